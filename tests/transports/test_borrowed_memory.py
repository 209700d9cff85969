"""What is borrowed goes back once, by a byte or with a message, and not while anything shows it."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import shared_memory_stage

from farcall.transports.borrowed_memory import Loan
from farcall.transports.segments import ALIGNMENT, FREE, KEPT, LENT
from farcall.transports.shared_memory import MOST_SEGMENTS, Pool
from interruption import At, Interrupt

SIZE = 1 << 18
FILES = ("transports/shared_memory.py", "transports/segments.py")


class Ends(shared_memory_stage.Ends):
    """A lender and its borrower, both in this process."""

    def pass_on(self, *buffers: bytes) -> list[memoryview]:
        views = super().pass_on(*buffers)
        assert views is not None
        return views

    def loan_of(self, *buffers: memoryview) -> Loan:
        loan = self.borrower.loan_of(buffers)
        assert loan is not None
        return loan

    def states(self) -> list[int]:
        return [segment.state() for segment in self.lender._segments]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def data(seed: int, size: int = SIZE) -> bytes:
    return bytes([seed]) * size


# Which buffers are of a loan


def test_buffers_of_a_message_are_found_by_where_they_are(ends: Ends) -> None:
    first, second = ends.pass_on(data(1, 1000), data(2, SIZE))
    third = ends.pass_on(data(3))[0]
    assert ends.borrower.loan_of([second]).offsets == [1024]  # type: ignore[union-attr]
    loan = ends.loan_of(memoryview(np.frombuffer(second, np.uint8)), first)
    assert (loan.number, loan.offsets, loan.sizes) == (1, [1024, 0], [SIZE, 1000])
    assert ends.loan_of(third.toreadonly()).number == 2


def test_what_is_no_loan(ends: Ends) -> None:
    assert ends.borrower.loan_of([memoryview(data(1))]) is None, "nothing was borrowed"
    first, second = ends.pass_on(data(1), data(2))
    (other,) = ends.pass_on(data(3))
    for buffers in (
        [memoryview(data(1))],
        [memoryview(bytearray(data(1)))],
        [first, memoryview(data(1))],
        [memoryview(data(1)), first],
        [first, other],
        [first, first],
        [first, second, second[-ALIGNMENT:]],
        [first[ALIGNMENT:]],
        [first[1:], second],
    ):
        assert ends.borrower.loan_of(buffers) is None
    assert ends.borrower.loan_of([first]) is not None, "half of it is enough"


def test_of_what_cannot_be_written_to_nobody_knows_where_it_is_without_numpy(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    (view,) = ends.pass_on(data(1))
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert ends.borrower.loan_of([view.toreadonly()]) is None
    assert ends.borrower.loan_of([view]) is not None


# Giving it back with a message


def test_what_is_free_is_given_and_the_lender_shows_it_where_it_lies(ends: Ends) -> None:
    (view,) = ends.pass_on(data(1))
    view[5] = 7
    loan = ends.loan_of(view)
    with loan:
        assert not loan.give()
        del view
        assert ends.states() == [LENT], "it is not to be used before the message came"
        assert loan.give()
    assert ends.states() == [LENT]
    (returned,) = ends.lender.take_returned(loan.number, loan.offsets, loan.sizes)
    assert (returned[5], returned[6], returned.nbytes, returned.readonly) == (7, 1, SIZE, False)
    assert ends.states() == [FREE]
    assert ends.lender.returned == SIZE
    assert bytes(ends.pass_on(data(2))[0]) == data(2)
    assert len(ends.lender._segments) == 2, "it is not lent while it is shown"
    assert returned[6] == 1
    del returned
    assert bytes(ends.pass_on(data(3))[0]) == data(3)
    assert len(ends.lender._segments) == 2


def test_only_a_part_of_it_may_be_given(ends: Ends) -> None:
    views = ends.pass_on(data(1, 1000), data(2))
    loan = ends.loan_of(views[1])
    with loan:
        views.clear()
        assert loan.give()
    (returned,) = ends.lender.take_returned(loan.number, loan.offsets, loan.sizes)
    assert bytes(returned) == data(2)


def test_what_is_held_and_not_given_is_handed_back_once(ends: Ends) -> None:
    (view,) = ends.pass_on(data(1))
    loan = ends.loan_of(view)
    with loan:
        del view
        assert ends.states() == [LENT]
    assert ends.states() == [FREE]


def test_what_something_shows_is_not_free_and_goes_back_with_that(ends: Ends) -> None:
    views = ends.pass_on(data(1, 1000), data(2))
    other = views[0]
    loan = ends.loan_of(views[1])
    with loan:
        views.clear()
        assert not loan.give(), "another buffer of the same message"
        assert [bytes(each) for each in loan.views()] == [data(2)]
    assert ends.states() == [LENT]
    del other
    assert ends.states() == [FREE]


def test_what_is_let_go_of_while_it_is_held_goes_back_afterwards(ends: Ends) -> None:
    views = ends.pass_on(data(1))
    kept = np.frombuffer(views[0], np.uint8)
    loan = ends.loan_of(views[0])
    with loan:
        views.clear()
        assert not loan.give()
        copied = loan.views()
        del kept
        assert ends.states() == [LENT], "somebody copies it just now"
        assert bytes(copied[0]) == data(1)
        assert ends.borrower._mappings[1].is_in_use()
    assert ends.states() == [FREE]


def test_of_two_who_hold_it_neither_finds_it_free(ends: Ends) -> None:
    views = ends.pass_on(data(1), data(2))
    first, second = ends.loan_of(views[0]), ends.loan_of(views[1])
    with first:
        with second:
            views.clear()
            assert not first.give()
            assert not second.give()
        assert ends.states() == [LENT]
    assert ends.states() == [FREE]


def test_who_comes_late_in_two_steps_does_not_either(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has seen that the memory is not in use, and then much happens before it goes on."""
    (view,) = ends.pass_on(data(1))
    mapping = ends.borrower._mappings[1]
    assert mapping._lease is not None
    late = mapping._lease.__callback__
    del view
    (view,) = ends.pass_on(data(2))
    monkeypatch.setattr(mapping, "is_in_use", lambda: False)
    late(None)  # type: ignore[arg-type,misc]
    assert ends.states() == [LENT]
    assert bytes(view) == data(2)


def test_who_comes_late_does_not_hand_back_what_has_come_since(ends: Ends) -> None:
    """The end of a view may be noticed in another thread, and that be stopped for as long as it takes."""
    (view,) = ends.pass_on(data(1))
    mapping = ends.borrower._mappings[1]
    debt = mapping.debt
    loan = ends.loan_of(view)
    with loan:
        del view
        loan.give()
    ends.lender.take_returned(loan.number, loan.offsets, loan.sizes)
    (view,) = ends.pass_on(data(2))
    assert ends.borrower._mappings[1] is mapping
    mapping.hand_back(debt)
    assert ends.states() == [LENT]
    del view
    assert ends.states() == [FREE]
    mapping.hand_back(debt)
    mapping.hand_back(mapping.debt)
    place = ends.lender.lend([memoryview(data(3))])
    mapping.hand_back(mapping.debt)
    assert place is not None
    assert ends.states() == [LENT], "lent again, and not taken yet"


def test_what_was_given_may_be_unmapped(ends: Ends) -> None:
    (view,) = ends.pass_on(data(1))
    loan = ends.loan_of(view)
    with loan:
        del view
        ends.borrower.sweep(float("inf"))
        assert len(ends.borrower._mappings) == 1, "it is held"
        loan.give()
    ends.borrower.sweep(float("inf"))
    assert ends.borrower._mappings == {}
    assert bytes(ends.lender.take_returned(loan.number, loan.offsets, loan.sizes)[0]) == data(1)


# Forks


def test_what_a_child_of_the_borrower_has_is_never_given(ends: Ends) -> None:
    (view,) = ends.pass_on(data(1))
    loan = ends.loan_of(view)
    with loan:
        ends.borrower.pin()
        del view
        assert not loan.give()
        assert bytes(loan.views()[0]) == data(1)
    assert ends.states() == [KEPT]


def test_a_fork_while_nothing_shows_what_is_held_is_no_hindrance(ends: Ends) -> None:
    (view,) = ends.pass_on(data(1))
    loan = ends.loan_of(view)
    with loan:
        del view
        ends.borrower.pin()
        assert loan.give()
    assert bytes(ends.lender.take_returned(loan.number, loan.offsets, loan.sizes)[0]) == data(1)


def test_a_fork_that_has_begun_goes_first(ends: Ends, background: ThreadPoolExecutor) -> None:
    (view,) = ends.pass_on(data(1))
    mapping, loan = ends.borrower._mappings[1], ends.loan_of(view)
    looked, go_on = threading.Event(), threading.Event()

    def keep() -> None:
        looked.set()
        assert go_on.wait(10)
        type(mapping).keep(mapping)

    mapping.keep = keep  # type: ignore[method-assign]
    forking = background.submit(ends.borrower.pin)
    assert looked.wait(10)
    with loan:
        del view
        giving = background.submit(loan.give)
        assert not giving.done()
        go_on.set()
        assert not giving.result(10)
        forking.result(10)
    assert ends.states() == [KEPT]


def test_what_a_child_of_the_lender_has_is_not_used_again(ends: Ends) -> None:
    (view,) = ends.pass_on(data(1))
    loan = ends.loan_of(view)
    with loan:
        del view
        loan.give()
    (returned,) = ends.lender.take_returned(loan.number, loan.offsets, loan.sizes)
    left = ends.pool._left
    ends.lender.pin()
    assert ends.lender._segments == []
    assert ends.pool._left == left + SIZE
    del returned
    ends.pass_on(data(2))
    ends.lender.pin()
    assert len(ends.lender._segments) == 1, "what is only lent is not shown to anybody here"


# What cannot be


@pytest.mark.parametrize(
    ("number", "offsets", "sizes", "reason"),
    [
        (2, [0], [10], "number 2 is not lent"),
        (1, [0], [SIZE + 1], "was said to hold"),
        (1, [SIZE], [1], "was said to hold"),
        (1, [-ALIGNMENT], [10], "was said to hold"),
        (1, [3], [10], "was said to hold"),
        (1, [0, ALIGNMENT], [ALIGNMENT + 1, 10], "was said to hold"),
    ],
)
def test_what_was_not_lent_so_is_not_taken(
    ends: Ends, number: int, offsets: list[int], sizes: list[int], reason: str
) -> None:
    (view,) = ends.pass_on(data(1))
    with pytest.raises(OSError, match=reason):
        ends.lender.take_returned(number, offsets, sizes)
    assert ends.states() == [LENT]
    del view
    with pytest.raises(OSError, match="number 1 is not lent"):
        ends.lender.take_returned(1, [0], [10])


def test_an_interrupt_anywhere_while_it_is_taken_back_shows_nobody_what_another_gets() -> None:
    for point in range(200):
        ends = Ends()
        (view,) = ends.pass_on(data(1))
        loan = ends.loan_of(view)
        with loan:
            del view
            assert loan.give()
        at = At(FILES, (point,))
        got = None
        with at:
            try:
                got = ends.lender.take_returned(loan.number, loan.offsets, loan.sizes)
            except Interrupt:
                pass
        gc.collect()
        segment = ends.lender._segments[0]
        if got is None:
            assert segment.state() == LENT or segment.is_free(), at.places
        else:
            assert not segment.is_free()
            assert bytes(got[0]) == data(1)
        ends.close()
        if not at.has_acted:
            break
    assert 5 < point < 199


# Little memory


def returned(ends: Ends, seed: int) -> Any:
    (view,) = ends.pass_on(data(seed))
    loan = ends.loan_of(view)
    with loan:
        del view
        loan.give()
    return ends.lender.take_returned(loan.number, loan.offsets, loan.sizes)[0]


def test_it_is_short_when_more_than_half_of_the_segments_are_shown(ends: Ends) -> None:
    shown = []
    for seed in range(MOST_SEGMENTS // 2):
        shown.append(returned(ends, seed))
        assert not ends.lender.is_short()
    shown.append(returned(ends, 0))
    assert ends.lender.is_short()
    del shown[1:]
    gc.collect()
    assert not ends.lender.is_short()


def test_it_is_short_when_more_than_half_of_all_memory_is_used() -> None:
    pool = Pool(4 * SIZE, 8, str)
    assert not pool.is_short()
    for count in range(1, 5):
        made = pool.make(SIZE)
        assert made is not None
        made.close()
        assert pool.is_short() == (count > 2)
    pool = Pool(100 * SIZE, 4, str)
    for count in range(1, 5):
        made = pool.make(SIZE)
        assert made is not None
        made.close()
        assert pool.is_short() == (count > 2)
