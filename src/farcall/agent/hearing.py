"""What peers tell this worker about references: the usual of it in one frame, as it is told of every reference.

Usual is that a remote call has arrived, that a fork is no more, and that a child is settled; all of references that
nothing unusual has happened to. All else is for `References.message_received`.

Rules
- It comes to the same as that and `Tables._decide` together.
- Ctrl-C: as in `tending.py`, each message is taken at one stroke, without a call or a loop in its midst.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from farcall.agent.mailboxes import ANSWERS
from farcall.agent.parcels import RemoteFrame
from farcall.protocol.control import CHILD_ACCEPTED, USER_DELETED, Entry, message_of
from farcall.protocol.ids import Worker, new_tuple
from farcall.protocol.reference_messages import UserDeleted
from farcall.protocol.reference_tables import CONFIRMED, UNCONFIRMED
from farcall.serialization import ATOMS

if TYPE_CHECKING:
    from farcall.agent.book import ReferenceBook


def hear_acknowledged(book: ReferenceBook, sender: Worker, upto: int) -> None:
    """A peer has taken all messages up to that number. Under the book's lock. Raises `ProtocolError`."""
    references = book._references
    held_forks, handles = references.held, book._handles
    for parcel in book.mailboxes.delivery.acknowledged(sender, upto):
        if type(parcel) is not RemoteFrame:
            continue
        held = held_forks.get(parcel.fork)
        if held is None or held.standing is not UNCONFIRMED or (held.dropped and not held.children):
            book._decide(references.create_delivered(parcel.reference, parcel.fork))
            continue
        known = handles.get(parcel.fork)
        handle = known() if known is not None else None
        held.standing = CONFIRMED
        if handle is not None:
            handle.confirmed = True
            handle = None


def hear_messages(book: ReferenceBook, sender: Worker, entries: Iterable[Entry]) -> None:
    """A peer says that. Under the book's lock. Raises `ProtocolError`."""
    references, boxes, values, origins = book._references, book.mailboxes, book._values, book._origins
    owned_here, held_forks, parents = references.owned, references.held, references.parents
    links, outboxes = boxes.delivery.links, boxes.outboxes
    link = links.get(sender)
    if link is None:
        return  # it is lost
    received = link.received
    for number, code, owner, creator, count, fork_creator, fork_number in entries:
        in_turn = number == received.mark + 1 and not received.beyond
        named, fork = (owner, creator, count), (fork_creator, fork_number)  # equal to RRefId and ForkId
        if code == USER_DELETED and in_turn:
            owned = owned_here.get(named)  # type: ignore[call-overload]
            if owned is not None and not owned.handles and owned.forks == {fork: sender}:
                value = values.get(named)  # type: ignore[call-overload]
                plain = value is None or type(value._value) in ATOMS
                # At one stroke:
                received.mark = number
                del owned_here[named]  # type: ignore[arg-type]
                if value is not None:
                    del values[named]  # type: ignore[arg-type]
                    if not plain:
                        book._released += [value]
                value = None
                if origins:
                    origins.pop(named, None)  # type: ignore[call-overload]
                continue
        elif code == CHILD_ACCEPTED and in_turn:
            parent = parents.get(fork)  # type: ignore[call-overload]
            held = held_forks.get(parent) if parent is not None else None
            if held is not None and parent is not None and held.children.get(fork) == sender:  # type: ignore[call-overload]
                if held.dropped and len(held.children) == 1 and held.standing is not UNCONFIRMED:
                    there = links.get(owner)
                    if held.standing is CONFIRMED and held.parent is None and there is not None:
                        outbox = outboxes.get(owner)
                        if outbox is None:
                            outbox = outboxes[owner] = []
                        message = new_tuple(UserDeleted, (held.reference, parent))
                        # At one stroke:
                        received.mark = number
                        last = there.last = there.last + 1
                        there.unacknowledged[last] = message
                        outbox += [(last, message)]
                        del parents[fork]  # type: ignore[arg-type]
                        del held_forks[parent]
                        continue
                else:
                    # At one stroke:
                    received.mark = number
                    del held.children[fork]  # type: ignore[arg-type]
                    del parents[fork]  # type: ignore[arg-type]
                    continue
        if boxes.delivery.receive(sender, number):
            told = message_of(code, named, fork)
            book._decide(references.message_received(sender, told))
            if type(told) in ANSWERS:
                boxes.asked[sender] = max(0, boxes.asked.get(sender, 0) - 1)
