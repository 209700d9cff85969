"""Shared memory: what is lent arrives, and goes back when the last view of it is gone and not before, within bounds."""

from __future__ import annotations

import gc
import mmap
import os
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_memory_stage import LEAST, Ends, data, descriptors, mapped

from farcall.transports import shared_memory
from farcall.transports.segments import ALIGNMENT
from farcall.transports.shared_memory import MOST_SEGMENTS, Lender

pytestmark = pytest.mark.usefixtures("segments_from_here")

PAGE = mmap.PAGESIZE


# What arrives


@given(st.lists(st.binary(max_size=300) | st.integers(0, 3 * LEAST).map(bytes), min_size=1, max_size=6))
@settings(deadline=None, max_examples=60)
def test_what_is_lent_arrives_each_buffer_aligned(buffers: list[bytes]) -> None:
    ends = Ends()
    views = ends.pass_on(*buffers)
    assert views is not None
    assert [bytes(view) for view in views] == buffers
    for view in views:
        assert not view.readonly
        if view.nbytes:
            assert np.frombuffer(view, np.uint8).ctypes.data % ALIGNMENT == 0
    ends.close()


def test_what_arrived_is_the_receivers_own(ends: Ends) -> None:
    sent = bytearray(data(1))
    views = ends.lender.lend([memoryview(sent)])
    assert views is not None
    (received,) = ends.borrower.take(views, [len(sent)])
    sent[:] = data(2)
    assert received == data(1)
    received[:] = data(3)
    assert sent == data(2)


def test_large_data_is_copied_without_numpy_too(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    large = os.urandom(3 << 20)
    for with_numpy in (True, False):
        if not with_numpy:
            monkeypatch.setitem(sys.modules, "numpy", None)
        views = ends.pass_on(large, large[:100])
        assert views is not None
        assert [bytes(view) for view in views] == [large, large[:100]]
        del views


# Going back


def test_a_segment_is_used_again_when_all_of_it_is_let_go_of(ends: Ends) -> None:
    views = ends.pass_on(data(1), data(2))
    assert views is not None
    assert ends.numbers() == [1]
    one = views[1]
    del views
    other = ends.pass_on(data(3))
    assert ends.numbers() == [1, 2], "one of two buffers is still there"
    assert one == data(2)
    del one, other
    last = ends.pass_on(data(4), data(5))
    assert ends.numbers() == [1, 2]
    assert last == [data(4), data(5)]


@pytest.mark.parametrize(
    "keep",
    [
        lambda view: view[10:20],
        lambda view: memoryview(view),
        lambda view: np.frombuffer(view, np.uint8),
        lambda view: np.frombuffer(view, np.uint8)[::7].reshape(-1, 1),
        lambda view: np.frombuffer(view, np.float64).reshape(2, -1).T[3:],
        lambda view: memoryview(np.frombuffer(view, np.uint16)[5:]),
    ],
    ids=["slice", "view", "array", "strided", "transposed", "view of an array"],
)
def test_whatever_is_made_of_a_buffer_keeps_its_segment(ends: Ends, keep: Any) -> None:
    views = ends.pass_on(data(1))
    assert views is not None
    kept = keep(views[0])
    contents = bytes(kept)
    del views
    for seed in range(2, 6):
        assert ends.pass_on(data(seed)) == [data(seed)]
    assert bytes(kept) == contents
    assert ends.numbers() == [1, 2]
    del kept
    assert ends.pass_on(data(9)) == [data(9)]
    assert ends.numbers() == [1, 2]
    assert ends.lender._segments[0].state() == 0


def test_a_buffer_in_a_cycle_goes_back_with_the_collector(ends: Ends) -> None:
    views = ends.pass_on(data(1))
    assert views is not None
    cycle: list[Any] = [views]
    cycle.append(cycle)
    del views, cycle
    gc.collect()
    assert ends.lender._segments[0].state() == 0


def test_a_buffer_is_let_go_of_after_the_connection(ends: Ends) -> None:
    views = ends.pass_on(data(1))
    assert views is not None
    ends.close()
    gc.collect()
    assert views == [data(1)]
    views[0][:5] = b"still"
    del views
    gc.collect()
    assert mapped() == 0


# Bounds


def test_beyond_the_limit_nothing_is_lent() -> None:
    ends = Ends(limit=2 * LEAST)
    held = [ends.pass_on(data(seed)) for seed in range(3)]
    assert held == [[data(0)], [data(1)], None]
    held.pop(0)
    assert ends.pass_on(data(4)) == [data(4)]
    assert ends.pass_on(data(5, LEAST + 1)) is None, "only half of it is free"
    held.clear()
    assert ends.pass_on(data(5, LEAST + 1)) == [data(5, LEAST + 1)], "free ones make room for a larger one"
    assert ends.trouble == []
    ends.close()


def test_there_are_only_so_many_segments_for_all_peers_together() -> None:
    ends = Ends(most=3)
    assert ends.pool.probe() >= 0
    other = Lender(ends.pool)
    held = [ends.pass_on(data(1)), ends.pass_on(data(2)), ends.pass_on(data(3))]
    assert held == [[data(1)], [data(2)], None]
    assert other.lend([memoryview(data(4))]) is None
    held.clear()
    ends.lender.sweep(float("inf"))
    assert other.lend([memoryview(data(4))]) is not None
    other.close()
    ends.close()


def test_there_are_only_so_many_segments_for_one_peer() -> None:
    ends = Ends(most=1000)
    held = [ends.pass_on(data(seed)) for seed in range(MOST_SEGMENTS)]
    assert None not in held
    assert ends.pass_on(data(1)) is None
    held.pop()
    assert ends.pass_on(data(1, 2 * LEAST)) is not None, "a free one that is too small makes room"
    assert len(ends.numbers()) == MOST_SEGMENTS
    held.clear()
    ends.close()


def test_what_fits_is_taken_and_of_that_the_least(ends: Ends) -> None:
    sizes = [4 * LEAST, LEAST, 2 * LEAST]
    held = [ends.pass_on(data(seed, size)) for seed, size in enumerate(sizes)]
    held.clear()
    views = ends.pass_on(data(1, LEAST + 1))
    assert [segment.state() for segment in ends.lender._segments] == [0, 0, 1]
    assert views == [data(1, LEAST + 1)]


@given(st.integers(1, 1 << 40))
def test_little_of_a_segment_is_wasted(total: int) -> None:
    capacity = shared_memory._rounded(total)
    assert total <= capacity <= max(LEAST, total * 9 / 8)
    assert shared_memory._rounded(capacity) == capacity


# Memory that nobody uses


def test_idle_memory_is_given_back_at_both_ends(ends: Ends) -> None:
    views = ends.pass_on(data(1))
    kept = ends.pass_on(data(2))
    assert (mapped(), len(ends.numbers())) == (4, 2)
    del views
    used = min(segment.used for segment in ends.lender._segments)
    ends.lender.sweep(used)
    ends.borrower.sweep(used)
    assert (mapped(), len(ends.numbers())) == (4, 2), "it was not used before that moment"
    ends.lender.sweep(float("inf"))
    assert (mapped(), len(ends.numbers())) == (3, 1), "one is in use"
    gc.disable()
    try:
        ends.borrower.sweep(float("inf"))
        assert mapped() == 2, "at once, not when the collector comes by"
    finally:
        gc.enable()
    assert kept == [data(2)]
    gc.collect()
    del kept
    assert ends.lender._segments[0].state() == 0, "it came back, though the borrower was swept meanwhile"
    assert ends.pass_on(data(3)) == [data(3)]


def test_what_the_lender_gives_up_is_no_memory_any_more_though_the_borrower_has_it_mapped(ends: Ends) -> None:
    ends.pass_on(data(1, 1 << 22))
    mapping = ends.borrower._mappings[1]._memory
    assert mapping[PAGE] == 2
    copy = os.dup(ends.lender._segments[0].descriptor)
    assert os.fstat(copy).st_blocks * 512 >= 1 << 22
    ends.lender.sweep(float("inf"))
    assert os.fstat(copy).st_blocks * 512 <= PAGE
    os.close(copy)


def test_what_is_in_use_when_the_lender_goes_keeps_its_contents(ends: Ends) -> None:
    views = ends.pass_on(data(7))
    ends.close()
    assert views == [data(7)]


def test_what_the_borrower_has_given_up_is_opened_again(ends: Ends) -> None:
    ends.pass_on(data(1))
    assert not ends.lender.has_unseen()
    ends.borrower.sweep(float("inf"))
    place = ends.lend(data(2))
    assert place is not None
    assert place.number == 1
    assert ends.lender.has_unseen(), "it could not be opened after the lender has gone"
    assert ends.borrower.take(place, [LEAST]) == [data(2)]
    assert not ends.lender.has_unseen()


def test_a_thousand_messages_leave_nothing(ends: Ends) -> None:
    ends.pass_on(data(1, 1 << 20), data(2))
    now = mapped(), descriptors(), ends.numbers()
    for seed in range(1000):
        assert ends.pass_on(data(seed, 1 << 20), data(seed + 1)) is not None
    assert (mapped(), descriptors(), ends.numbers()) == now
    ends.close()
    ends.borrower.sweep(float("inf"))
    assert (mapped(), descriptors()) == (0, 0)


# What the lender keeps


def test_what_is_kept_is_not_lent_again_before_the_lender_lets_go(ends: Ends) -> None:
    place, kept = ends.lender.keep([memoryview(data(1)), memoryview(b"xyz")]) or (None, [])
    assert place is not None
    assert [bytes(view) for view in kept] == [data(1), b"xyz"]
    ends.borrower.take(place, [LEAST, 3])  # and lets go at once
    other = ends.lend(data(2), b"abc")
    assert other is not None
    assert other.number != place.number
    ends.lender.sweep(float("inf"))
    assert place.number in ends.numbers()
    assert bytes(kept[0]) == data(1)
    kept.clear()
    again = ends.lend(data(3), b"abc")
    assert again is not None
    assert again.number == place.number


def test_what_is_kept_outlives_the_lender(ends: Ends) -> None:
    place, kept = ends.lender.keep([memoryview(data(5))]) or (None, [])
    assert place is not None
    ends.borrower.take(place, [LEAST])
    ends.close()
    assert bytes(kept[0]) == data(5)
    kept.clear()
    assert (mapped(), descriptors()) == (0, 0)


def test_what_was_not_told_can_be_taken_back(ends: Ends) -> None:
    place, kept = ends.lender.keep([memoryview(data(6))]) or (None, [])
    assert place is not None
    ends.lender.take_back(place)
    kept.clear()
    again = ends.lend(data(7))
    assert again == place


def test_nothing_is_kept_where_nothing_is_lent() -> None:
    ends = Ends(limit=0)
    assert ends.lender.keep([memoryview(data(1))]) is None
    ends.close()
