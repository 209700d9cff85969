"""What must hold of the book of an agent by itself, at every step of a simulation (`simulated_books.py`).

- POSTED: every number that a message got went out, or waits in an outbox: one that is never sent holds up all others.
- VALUES: there is a value for all that was created and counts, and for nothing that does not.
- HANDLES: what a handle that the program has says of itself is what the tables say.

And at the end, EMPTY: whatever the book keeps besides the tables of the protocol is gone, and the values with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from farcall.agent.book import ReferenceBook
from farcall.agent.handle import Handle
from farcall.protocol.ids import Worker
from farcall.protocol.reference_tables import CONFIRMED
from farcall.testing.invariants import BrokenInvariant


def check_book(book: ReferenceBook, sent: Mapping[Worker, set[int]], handles: Iterable[Handle]) -> None:
    """POSTED, VALUES and HANDLES; `sent` are the numbers of the messages that went out to each peer."""
    _check_posted(book, sent)
    _check_values(book)
    for handle in handles:
        _check_handle(book, handle)


def _check_posted(book: ReferenceBook, sent: Mapping[Worker, set[int]]) -> None:
    boxes = book.mailboxes
    for peer, link in boxes.delivery.links.items():
        gone, waiting = sent[peer], [number for number, _ in boxes.outboxes.get(peer, ())]
        if len(gone) + len(waiting) != link.last or not gone.isdisjoint(waiting):
            raise BrokenInvariant(
                "POSTED",
                f"worker {book.me} has given {link.last} numbers to messages to worker {peer}; "
                f"sent are {sorted(gone)}, in the outbox {waiting}",
            )
    for peer in (*boxes.outboxes, *boxes.owed):
        if peer not in boxes.delivery.links:
            raise BrokenInvariant("POSTED", f"worker {book.me} has something to say to worker {peer}, which is lost")


def _check_values(book: ReferenceBook) -> None:
    owned, values = book._references.owned, book._values
    uncounted = {reference for _, reference, _ in book._uncounted}
    for reference in uncounted.union(reference for reference, each in owned.items() if each.created):
        if reference not in values:
            raise BrokenInvariant("VALUES", f"worker {book.me} has no value for {reference}, which is counted")
    for reference in values:
        if reference not in owned and reference not in uncounted:
            raise BrokenInvariant("VALUES", f"worker {book.me} keeps the value of {reference}, which nobody holds")


def _check_handle(book: ReferenceBook, handle: Handle) -> None:
    fork, reference = handle.fork, handle.reference
    if fork is None:
        owned = book._references.owned.get(reference)
        if owned is None or not owned.handles or book._values.get(reference) is not handle.value:
            raise BrokenInvariant("HANDLES", f"worker {book.me} has a handle of its own {reference}, uncounted")
        return
    held = book._references.held.get(fork)
    what = f"worker {book.me} has a handle {fork} of {reference}"
    if held is None:
        if handle.new_error is None:
            raise BrokenInvariant("HANDLES", f"{what}, of which its tables do not know")
    elif handle.new_error is not None:
        raise BrokenInvariant("HANDLES", f"{what}, which leads nowhere, and which its tables hold")
    elif held.dropped:
        raise BrokenInvariant("HANDLES", f"{what}, which is taken to be dropped")
    elif handle.confirmed is not (held.standing is CONFIRMED):
        raise BrokenInvariant("HANDLES", f"{what}, {handle.confirmed=}; it is {held.standing.value}")
    elif book._handles.find(fork) is not handle:
        raise BrokenInvariant("HANDLES", f"{what}, and could not find it")


def check_book_is_empty(book: ReferenceBook, values_left: int) -> None:
    """EMPTY: all handles are gone and nothing is under way."""
    left = {
        "chores": book.has_work(),
        "messages to be acknowledged": not book.mailboxes.delivery.is_quiet(),
        "answers to be awaited": any(book.mailboxes.asked.values()),
        "handles": book._handles,
        "values": book._values or values_left,
        "origins of values": book._origins,
    }
    for what, is_left in left.items():
        if is_left:
            raise BrokenInvariant("EMPTY", f"the book of worker {book.me} still has {what}: {is_left}")
