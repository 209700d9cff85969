"""What a thread of the program does along the way comes to the same as what the serving pool does by the clock."""

from __future__ import annotations

import contextlib
import gc
import itertools
from typing import Any

import pytest

from farcall.agent.tending import tend
from farcall.protocol.control import unpack_remote
from farcall.protocol.wire import Decoder
from tests.agent.book_stage import CALL, WAY, Books
from tests.interruption import At, Interrupt


class Told:
    """As much of a `ToldCall` as the book sees."""

    call_id = 1
    number = 0


def answered(books: Books, owner: int = 1) -> Any:
    """A remote call of worker 0 that was answered; its handle."""
    told = Told()
    handle, message = books[0].call_remote(owner, [], *CALL, WAY, None, told)  # type: ignore[arg-type]
    head = Decoder().feed(message)[-1][2]
    number, carried, reference, fork, _ = unpack_remote(head)
    assert number == told.number
    books[owner].create_requested(0, number, reference, fork, carried, answered=True)
    books[0].delivered.append((owner, number))
    return handle


def test_what_was_answered_is_confirmed_and_need_not_be_acknowledged() -> None:
    books = Books()
    handle = answered(books)
    assert not books[1].mailboxes.owed
    tend(books[0])
    assert handle.confirmed
    assert not books[0].mailboxes.unacknowledged(1)
    assert not books[0].delivered
    del handle
    assert books.left() == {}


def test_what_was_dropped_is_told_to_the_owner() -> None:
    books = Books()
    handle = answered(books)
    fork = handle.fork
    del handle
    gc.collect()
    tend(books[0])
    ((_, message),) = books[0].mailboxes.outboxes[1]
    assert message.fork == fork
    assert not books[0]._references.held
    assert not books[0]._handles
    assert books.left() == {}


def test_what_has_a_child_is_told_once_that_has_come_to_its_end() -> None:
    books = Books()
    handle = answered(books)
    (child,) = books.pass_on(0, 2, handle)
    del handle
    gc.collect()
    tend(books[0])
    assert not books[0].dropped
    assert 1 not in books[0].mailboxes.outboxes
    del child
    assert books.left() == {}


def test_what_is_unusual_is_left_to_the_pool() -> None:
    books = Books()
    own, handle = books[0].own("tea"), answered(books)
    (lent,) = books.pass_on(2, 0, books.remote(2, 1)[0])
    books[0].lost(2)
    books[0].delivered.append((2, 1))
    del own, lent
    gc.collect()
    tend(books[0])
    assert len(books[0].left) == 2, "its own handle, and what was lost"
    assert books[0].has_work()
    books[0].work_off()
    assert not books[0].left
    assert not books[0]._values
    assert handle.confirmed


def test_the_pool_lets_it_be_while_others_do_it_but_not_for_ever() -> None:
    books = Books()
    handle = answered(books)
    looks = []
    for _ in range(10):
        books[0].tended += 1
        looks.append(books[0].needs_help())
    assert looks.count(True) == 2
    assert books[0].needs_help(), "nobody else has done anything since"
    assert handle.fork is not None


@pytest.mark.parametrize("passes", [False, True])
def test_an_interrupt_at_any_point_leaves_nothing_behind(passes: bool) -> None:
    for point in itertools.count():
        books = Books()
        handle, other = answered(books), answered(books)
        children = books.pass_on(0, 2, other) if passes else []
        del handle, other
        gc.collect()
        with contextlib.suppress(Interrupt), At(("agent/tending.py",), (point,)) as at:
            tend(books[0])
        del children
        assert books.left() == {}, at.places
        if not at.has_acted:
            assert point > 10
            return
