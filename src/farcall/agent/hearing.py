"""What peers tell this worker about references: the usual of it in one frame, as it is told of every reference.

Usual is a remote call that brings no handles, that one of ours has arrived, that a fork is no more, and that a child is
settled; all of references that nothing unusual has happened to. All else is for `References`, message by message.

Rules
- It comes to the same as that and `Tables._decide` together.
- A remote call is counted after it was answered (`Tables._count_created`), or before anything else that has to do with
  what this worker owns: the caller need not wait for that.
- Ctrl-C: as in `tending.py`, each message is taken at one stroke, without a call or a loop in its midst.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from farcall.agent.mailboxes import ANSWERS
from farcall.agent.parcels import RemoteFrame
from farcall.agent.values import Value, new_value
from farcall.futures import PENDING
from farcall.protocol.control import (
    CHILD_ACCEPTED,
    REMOTE_SIZE,
    USER_DELETED,
    Entry,
    message_of,
    unpack_remote_start,
)
from farcall.protocol.ids import ForkId, RRefId, Worker, new_tuple
from farcall.protocol.reference_messages import UserDeleted
from farcall.protocol.reference_tables import CONFIRMED, UNCONFIRMED
from farcall.serialization import ATOMS

if TYPE_CHECKING:
    from farcall.agent.book import ReferenceBook


def create_answered(book: ReferenceBook, sender: Worker, head: bytes) -> Value | None:
    """As `ReferenceBook.create_requested`, for the head of a remote call that will be answered: the place of its value.

    It is counted only then, by `count_created`. None if there is anything unusual about it: nothing is done then.
    """
    if len(head) < REMOTE_SIZE:
        return None
    number, handles, owner, creator, place, maker, fork_number = unpack_remote_start(head)
    if handles or owner != book.me or creator != sender or maker != sender:
        return None
    reference, values = new_tuple(RRefId, (owner, creator, place)), book._values
    with book._lock:
        link = book.mailboxes.delivery.links.get(sender)
        if link is None or number != link.received.mark + 1 or link.received.beyond or reference in values:
            return None
        link.received.mark = number
        value = values[reference] = new_value(Value)
        value._state, value._value, value._watchers, value._source = PENDING, None, [], None
        value._report, value._reply, value.failure, value._new_error = None, None, b"", None
        book._uncounted.append((sender, reference, new_tuple(ForkId, (maker, fork_number))))
    return value


def hear_acknowledged(book: ReferenceBook, sender: Worker, upto: int) -> None:
    """A peer has taken all messages up to that number. Under the book's lock. Raises `ProtocolError`."""
    held_forks, handles, boxes = book._references.held, book._handles, book.mailboxes
    link = boxes.delivery.links.get(sender)
    if link is None or upto > link.last:
        boxes.delivery.acknowledged(sender, upto)  # which raises, if it is not lost
        return
    kept = link.unacknowledged
    for number in link.kept_upto(upto):
        parcel = kept[number]
        held = held_forks.get(parcel.fork) if isinstance(parcel, RemoteFrame) else None
        if held is None or not isinstance(parcel, RemoteFrame):
            del kept[number]
            continue
        known = handles.get(parcel.fork)
        handle = known() if known is not None else None
        outbox = boxes.outboxes.get(sender)
        if held.dropped and not held.children:
            message = new_tuple(UserDeleted, (parcel.reference, parcel.fork))
            if outbox is None:
                outbox = boxes.outboxes[sender] = []
            # At one stroke:
            last = link.last = link.last + 1
            kept[last] = message
            outbox += [(last, message)]
            del held_forks[parcel.fork], kept[number]
        else:
            # At one stroke:
            held.standing = CONFIRMED
            if handle is not None:
                handle.confirmed = True
            del kept[number]
        handle = None  # or it would live on until the next one


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
            if owned is not None and owned.forks.get(fork) == sender:
                if owned.handles or len(owned.forks) > 1:
                    # At one stroke:
                    received.mark = number
                    del owned.forks[fork]
                    continue
                value = values.get(named)  # type: ignore[call-overload]
                plain = value is None or type(value._value) in ATOMS  # no finalizer of a user's can be felt
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
                    owner = held.reference[0]
                    there = links.get(owner)
                    if held.standing is CONFIRMED and there is not None:  # which has told its parent
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
