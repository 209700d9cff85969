"""What a thread that makes remote calls does along the way for the references that it has made before.

A program that makes a reference, uses it and drops it, over and over, leaves something to be done for each of them:
that it has arrived, and that it is no more. The serving pool would do it by the clock (`ReferenceBook.work_off`); but
then two threads of this process want the interpreter, and one of them the core on which the owner looks for the next
call: both ends take that for a crowd, and sleep where they should look (`spinning.py`). So the thread that makes the
calls does it, some at a time, while the owner is busy with the last one.

Rules
- Only the usual is done: our own forks, that were delivered, or dropped. All else is left to `work_off`.
- It comes to the same as `References.create_delivered`, `References.handle_dropped` and `Tables._decide`, in one frame.
- Ctrl-C may come here, where nobody could do again what was begun. So each entry is worked off at one stroke: from the
  first change to the tables until it is out of its queue there is no call and no loop, which is where Python looks for
  signals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias, cast

from farcall.agent.parcels import RemoteFrame
from farcall.protocol.ids import ForkId, RRefId, Worker, new_tuple
from farcall.protocol.reference_messages import UserDeleted
from farcall.protocol.reference_tables import CONFIRMED, UNCONFIRMED

if TYPE_CHECKING:
    from farcall.agent.book import ReferenceBook

Dropped: TypeAlias = tuple[RRefId, ForkId | None]
"""A handle of a reference is no more: its fork, None for the owner's own."""
Delivered: TypeAlias = tuple[Worker, int]
"""A remote call has arrived: its owner, and the number of the message."""
ENOUGH: Final = 16
"""So many handles that were dropped are worth the while."""


def tend(book: ReferenceBook) -> None:
    """Works off what is usual of what was delivered and dropped, and leaves the rest."""
    boxes, held_forks, handles = book.mailboxes, book._references.held, book._handles
    links, outboxes = boxes.delivery.links, boxes.outboxes
    delivered, dropped, left = book.delivered, book.dropped, book.left
    with book._lock:
        while delivered:
            owner, number = delivered[0]
            link = links.get(owner)
            parcel = link.unacknowledged.get(number) if link is not None else None
            held = held_forks.get(parcel.fork) if isinstance(parcel, RemoteFrame) else None
            if held is None or held.dropped:
                left += [delivered[0]]
                del delivered[0]
                continue
            assert link is not None
            assert isinstance(parcel, RemoteFrame)
            known = handles.get(parcel.fork)
            handle = known() if known is not None else None
            # At one stroke:
            held.standing = CONFIRMED
            if handle is not None:
                handle.confirmed = True
            del link.unacknowledged[number]
            del delivered[0]
            handle = None  # or it would live on until the next one
        while dropped:
            reference, fork = dropped[0]
            held = held_forks.get(fork) if fork is not None else None
            if fork is None or held is None or held.dropped or reference[0] not in links:
                left += [dropped[0]]
                del dropped[0]
            elif held.children or held.standing is UNCONFIRMED:
                # Its end is told once they have come to theirs, or it has arrived.
                known = handles.get(fork)
                # At one stroke:
                held.dropped = True
                if known is not None:
                    del handles[fork]
                del dropped[0]
            elif held.standing is not CONFIRMED:
                left += [dropped[0]]
                del dropped[0]
            else:
                owner = reference[0]
                link = links[owner]
                outbox = outboxes.get(owner)
                if outbox is None:
                    outbox = outboxes[owner] = []
                known = handles.get(fork)
                message = new_tuple(UserDeleted, (reference, fork))
                # At one stroke:
                number = link.last = link.last + 1
                link.unacknowledged[number] = message
                outbox += [(number, message)]
                del held_forks[fork]
                if known is not None:
                    del handles[fork]
                del dropped[0]
    book.tended += 1


def work_off(book: ReferenceBook) -> None:
    """Works off all that was delivered, left and dropped. Under the book's lock; not for threads of the program."""
    references, delivered, left, dropped = book._references, book.delivered, book.left, book.dropped
    while queue := delivered or left or dropped:  # that it has arrived comes before that its handle was dropped
        first, second = entry = queue.popleft()
        if isinstance(first, int):
            parcel = book.mailboxes.delivery.taken(*entry)
            if not isinstance(parcel, RemoteFrame):
                continue  # that was known
            effects = references.create_delivered(parcel.reference, parcel.fork)
        else:
            fork = cast("ForkId | None", second)
            if fork is not None:
                book._handles.pop(fork, None)
                held = references.held.get(fork)
                if held is None or held.dropped:  # refused or orphaned; or given up before
                    continue
            effects = references.handle_dropped(first, fork)
        if effects:
            book._decide(effects)
