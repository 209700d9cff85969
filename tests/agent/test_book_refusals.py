"""What the book of references refuses, before it has taken anything: handles, receivers and messages."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from book_stage import CALL, WAY, WAYS_TO_PASS, Books

from farcall.agent.book import ReferenceBook
from farcall.errors import (
    OwnerLost,
    ProtocolError,
    ReferenceRefused,
    RpcError,
    SerializationError,
    UsageError,
    WorkerLost,
)
from farcall.protocol.control import MOST_HANDLES, pack_control
from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_messages import ForkAccepted, UserDeleted

pytestmark = pytest.mark.timeout(20)


def test_a_handle_that_leads_nowhere_is_not_passed_on(books: Books) -> None:
    bad, _ = books.remote(0, 1)
    good = books[0].own("tea")
    books[0].lost(1)
    with pytest.raises(OwnerLost, match="worker 'w1', who owned reference 0:1 owned by 1, was lost") as caught:
        books[0].pass_on([good, bad], 2, WAY)
    assert caught.value.worker == "w1"
    with pytest.raises(OwnerLost):
        books[0].call_remote(2, [good, bad], *CALL, WAY)
    assert books[0].inventory().owned[0].holders == ()
    assert books[0].is_quiet()


def snapshot(book: ReferenceBook) -> Any:
    """All that a failed attempt to pass something on could have changed."""
    references = book._references
    return (
        {reference: (owned.handles, dict(owned.forks)) for reference, owned in references.owned.items()},
        {fork: (held.dropped, dict(held.children)) for fork, held in references.held.items()},
        dict(references.numbers),
        references.forks,
        {peer: (link.last, dict(link.unacknowledged)) for peer, link in book.mailboxes.delivery.links.items()},
        dict(book.mailboxes.outboxes),
        dict(book.mailboxes.owed),
        dict(book._values),
        len(book._handles),
    )


@pytest.mark.parametrize("way", WAYS_TO_PASS)
def test_too_many_handles_are_refused_before_anything_is_taken(books: Books, way: str) -> None:
    handle = books[0].own("tea")
    theirs, _ = books.remote(0, 1)
    books.deliver()
    before = snapshot(books[0])
    with pytest.raises(SerializationError, match=r"a message with 65536 references .* at most 65535 .* in parts"):
        WAYS_TO_PASS[way](books[0], [handle] * (MOST_HANDLES + 1))
    assert snapshot(books[0]) == before
    assert theirs.confirmed


@pytest.mark.parametrize("way", WAYS_TO_PASS)
@pytest.mark.parametrize("error", [OwnerLost, ReferenceRefused, UsageError])
def test_a_handle_that_leads_nowhere_is_refused_before_anything_is_taken(
    books: Books, way: str, error: type[RpcError]
) -> None:
    good, (bad, _) = books[0].own("tea"), books.remote(0, 2)
    books.deliver()
    bad.new_error = lambda: error("it leads nowhere")
    before = snapshot(books[0])
    with pytest.raises(error, match="it leads nowhere"):
        WAYS_TO_PASS[way](books[0], [good, bad])
    assert snapshot(books[0]) == before


@pytest.mark.parametrize("way", WAYS_TO_PASS)
def test_a_lost_receiver_is_refused_before_anything_is_taken(books: Books, way: str) -> None:
    handle = books[0].own("tea")
    books[0].lost(1)
    before = snapshot(books[0])
    with pytest.raises(WorkerLost, match="worker 'w1' was lost") as caught:
        WAYS_TO_PASS[way](books[0], [handle])
    assert caught.value.worker == "w1"
    assert not isinstance(caught.value, OwnerLost)
    assert snapshot(books[0]) == before
    assert books[0].is_quiet()


def test_what_was_dropped_is_not_lost_with_a_remote_call_that_is_refused(books: Books) -> None:
    dropped, _ = books.remote(0, 1)
    books.deliver()
    del dropped
    gc.collect()
    books[0].lost(2)
    with pytest.raises(WorkerLost):
        books[0].call_remote(2, [], *CALL, WAY)
    assert books[0].has_work()
    books.deliver()
    assert books[1]._references.is_empty()


def test_a_message_that_is_none_is_refused(books: Books) -> None:
    with pytest.raises(ProtocolError):
        books[0].control_received(1, b"noise")
    with pytest.raises(ProtocolError, match="the last one sent is 0"):
        books[0].control_received(1, pack_control(5, []))
    with pytest.raises(ProtocolError, match="gave up"):
        books[0].control_received(1, pack_control(0, [(1, UserDeleted(RRefId(0, 1, 1), ForkId(1, 1)))]))
    assert books[0]._references.is_empty()


def test_what_came_before_a_message_that_is_none_is_done(books: Books) -> None:
    first, _ = books.remote(2, 1)
    (handle,) = books.pass_on(2, 0, first)
    books.moment(0)
    good = ForkAccepted(handle.reference, handle.fork)  # type: ignore[arg-type]
    bad = UserDeleted(RRefId(0, 1, 1), ForkId(1, 1))
    with pytest.raises(ProtocolError):
        books[0].control_received(1, pack_control(0, [(1, good), (2, bad)]))
    assert handle.confirmed, "it was taken, and will not be taken again"


# -- A finalizer in the midst of a change to the tables


@pytest.mark.parametrize("way", ["make", "pass_on", "call_remote"])
def test_a_finalizer_that_interrupts_the_book_keeping_is_refused(books: Books, way: str) -> None:
    handle = books[0].own("tea")
    ways: dict[str, Callable[[], object]] = {
        "make": lambda: books[0].own("milk"),
        "pass_on": lambda: books[0].pass_on([handle], 1, WAY),
        "call_remote": lambda: books[0].call_remote(1, [], *CALL, WAY),
    }
    with books[0]._lock, pytest.raises(UsageError, match="a finalizer cannot"):
        ways[way]()
    assert books[0].is_quiet()
    ways[way]()
