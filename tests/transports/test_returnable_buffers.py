"""Returnable buffers: a segment goes back to its writer once, by a byte or a frame, and never while it is in use."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import segment_ends
from segment_ends import MIN_CAPACITY, data

from farcall.transports.shm_segments import (
    _ALIGNMENT,
    _FREE,
    _IN_USE,
    _KEPT,
    MAX_SEGMENTS_PER_LINK,
    SegmentPool,
)
from interruption import At, Interrupt

FILES = ("transports/shm_segments.py",)


class Ends(segment_ends.Ends):
    """A writer and its reader, with segments enough."""

    def send(self, *buffers: bytes) -> list[memoryview]:
        views = super().send(*buffers)
        assert views is not None
        return views


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


# Which buffers can be sent back


def test_buffers_of_a_frame_are_found_by_their_addresses(ends: Ends) -> None:
    first, second = ends.send(data(1, 1000), data(2, MIN_CAPACITY))
    third = ends.send(data(3))[0]
    assert ends.find_returnable(second).offsets == [1024]
    returnable = ends.find_returnable(np.frombuffer(second, np.uint8).data, first)
    assert (returnable.number, returnable.offsets, returnable.sizes) == (1, [1024, 0], [MIN_CAPACITY, 1000])
    assert ends.find_returnable(third.toreadonly()).number == 2


def test_what_cannot_be_sent_back(ends: Ends) -> None:
    assert ends.reader.find_returnable([memoryview(data(1))]) is None, "nothing was received"
    first, second = ends.send(data(1), data(2))
    (other,) = ends.send(data(3))
    for buffers in (
        [memoryview(data(1))],
        [memoryview(bytearray(data(1)))],
        [first, memoryview(data(1))],
        [memoryview(data(1)), first],
        [first, other],
        [first, first],
        [first, second, second[-_ALIGNMENT:]],
        [first[_ALIGNMENT:]],
        [first[1:], second],
    ):
        assert ends.reader.find_returnable(buffers) is None
    assert ends.reader.find_returnable([first]) is not None, "half of it is enough"


def test_read_only_buffers_cannot_be_sent_back_without_numpy(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    (view,) = ends.send(data(1))
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert ends.reader.find_returnable([view.toreadonly()]) is None
    assert ends.reader.find_returnable([view]) is not None


# Going back with a frame


def test_buffers_that_nobody_refers_to_go_back_without_a_copy(ends: Ends) -> None:
    (view,) = ends.send(data(1))
    view[5] = 7
    returnable = ends.find_returnable(view)
    with returnable:
        assert not returnable.give_back()
        del view
        assert ends.states() == [_IN_USE], "it is not to be used before the frame came"
        assert returnable.give_back()
    assert ends.states() == [_IN_USE]
    (returned,) = ends.take_returned(returnable)
    assert (returned[5], returned[6], returned.nbytes, returned.readonly) == (7, 2, MIN_CAPACITY, False)
    assert ends.states() == [_FREE]
    assert bytes(ends.send(data(2))[0]) == data(2)
    assert len(ends.segments()) == 2, "it is not used while it is shown"
    assert returned[6] == 2
    del returned
    assert bytes(ends.send(data(3))[0]) == data(3)
    assert len(ends.segments()) == 2


def test_a_part_of_a_segment_may_go_back(ends: Ends) -> None:
    views = ends.send(data(1, 1000), data(2))
    returnable = ends.find_returnable(views[1])
    with returnable:
        views.clear()
        assert returnable.give_back()
    (returned,) = ends.take_returned(returnable)
    assert bytes(returned) == data(2)


def test_buffers_that_are_not_given_back_free_their_segment_once(ends: Ends) -> None:
    (view,) = ends.send(data(1))
    returnable = ends.find_returnable(view)
    with returnable:
        del view
        assert ends.states() == [_IN_USE]
    assert ends.states() == [_FREE]


def test_a_segment_to_which_something_refers_is_freed_with_that(ends: Ends) -> None:
    views = ends.send(data(1, 1000), data(2))
    other = views[0]
    returnable = ends.find_returnable(views[1])
    with returnable:
        views.clear()
        assert not returnable.give_back(), "another buffer of the same frame"
        assert [bytes(each) for each in returnable.views()] == [data(2)]
    assert ends.states() == [_IN_USE]
    del other
    assert ends.states() == [_FREE]


def test_a_segment_whose_last_view_goes_before_the_return_is_freed_afterwards(ends: Ends) -> None:
    views = ends.send(data(1))
    kept = np.frombuffer(views[0], np.uint8)
    returnable = ends.find_returnable(views[0])
    with returnable:
        views.clear()
        assert not returnable.give_back()
        copied = returnable.views()
        del kept
        assert ends.states() == [_IN_USE], "somebody copies it just now"
        assert bytes(copied[0]) == data(1)
        assert ends.mappings()[1].is_in_use()
    assert ends.states() == [_FREE]


def test_of_two_parts_of_a_segment_neither_can_be_given_back(ends: Ends) -> None:
    views = ends.send(data(1), data(2))
    first, second = ends.find_returnable(views[0]), ends.find_returnable(views[1])
    with first:
        with second:
            views.clear()
            assert not first.give_back()
            assert not second.give_back()
        assert ends.states() == [_IN_USE]
    assert ends.states() == [_FREE]


def test_a_late_finalizer_that_has_seen_the_segment_unused_does_not_free_what_came_since(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has seen that the memory is not in use, and then much happens before it goes on."""
    (view,) = ends.send(data(1))
    mapping = ends.mappings()[1]
    assert mapping._exporter is not None
    late = mapping._exporter.__callback__
    del view
    (view,) = ends.send(data(2))
    monkeypatch.setattr(mapping, "is_in_use", lambda: False)
    late(None)  # type: ignore[arg-type,misc]
    assert ends.states() == [_IN_USE]
    assert bytes(view) == data(2)


def test_a_late_finalizer_does_not_free_what_came_since(ends: Ends) -> None:
    """The end of a view may be noticed in another thread, and that be stopped for as long as it takes."""
    (view,) = ends.send(data(1))
    mapping = ends.mappings()[1]
    unfreed = mapping.unfreed
    returnable = ends.find_returnable(view)
    with returnable:
        del view
        returnable.give_back()
    ends.take_returned(returnable)
    (view,) = ends.send(data(2))
    assert ends.mappings()[1] is mapping
    mapping.hand_back(unfreed)
    assert ends.states() == [_IN_USE]
    del view
    assert ends.states() == [_FREE]
    mapping.hand_back(unfreed)
    mapping.hand_back(mapping.unfreed)
    place = ends.writer.write([memoryview(data(3))])
    mapping.hand_back(mapping.unfreed)
    assert place is not None
    assert ends.states() == [_IN_USE], "used again, and not read yet"


def test_a_segment_that_was_given_back_may_be_unmapped(ends: Ends) -> None:
    (view,) = ends.send(data(1))
    returnable = ends.find_returnable(view)
    with returnable:
        del view
        ends.reader.sweep(float("inf"))
        assert len(ends.mappings()) == 1, "it is held"
        returnable.give_back()
    ends.reader.sweep(float("inf"))
    assert ends.mappings() == {}
    assert bytes(ends.take_returned(returnable)[0]) == data(1)


# Forks


def test_buffers_that_a_child_of_the_reader_sees_never_go_back(ends: Ends) -> None:
    (view,) = ends.send(data(1))
    returnable = ends.find_returnable(view)
    with returnable:
        ends.reader.prepare_fork()
        del view
        assert not returnable.give_back()
        assert bytes(returnable.views()[0]) == data(1)
    assert ends.states() == [_KEPT]


def test_a_fork_while_nobody_refers_to_the_buffers_does_no_harm(ends: Ends) -> None:
    (view,) = ends.send(data(1))
    returnable = ends.find_returnable(view)
    with returnable:
        del view
        ends.reader.prepare_fork()
        assert returnable.give_back()
    assert bytes(ends.take_returned(returnable)[0]) == data(1)


def test_a_fork_that_has_begun_goes_first(ends: Ends, background: ThreadPoolExecutor) -> None:
    (view,) = ends.send(data(1))
    mapping, returnable = ends.mappings()[1], ends.find_returnable(view)
    looked, go_on = threading.Event(), threading.Event()

    def keep() -> None:
        looked.set()
        assert go_on.wait(10)
        type(mapping).keep_for_good(mapping)

    mapping.keep_for_good = keep  # type: ignore[method-assign]
    forking = background.submit(ends.reader.prepare_fork)
    assert looked.wait(10)
    with returnable:
        del view
        giving = background.submit(returnable.give_back)
        assert not giving.done()
        go_on.set()
        assert not giving.result(10)
        forking.result(10)
    assert ends.states() == [_KEPT]


def test_a_segment_that_a_child_of_the_writer_sees_is_not_used_again(ends: Ends) -> None:
    (view,) = ends.send(data(1))
    returnable = ends.find_returnable(view)
    with returnable:
        del view
        returnable.give_back()
    (returned,) = ends.take_returned(returnable)
    left = ends.pool._bytes_left
    ends.writer.prepare_fork()
    assert ends.segments() == []
    assert ends.pool._bytes_left == left + MIN_CAPACITY
    del returned
    ends.send(data(2))
    ends.writer.prepare_fork()
    assert len(ends.segments()) == 1, "what was only sent is seen by nobody here"


# What cannot be


@pytest.mark.parametrize(
    ("number", "offsets", "sizes", "reason"),
    [
        (2, [0], [10], "segment 2 was not given"),
        (1, [0], [MIN_CAPACITY + 1], "cannot hold"),
        (1, [MIN_CAPACITY], [1], "cannot hold"),
        (1, [-_ALIGNMENT], [10], "cannot hold"),
        (1, [3], [10], "cannot hold"),
        (1, [0, _ALIGNMENT], [_ALIGNMENT + 1, 10], "cannot hold"),
    ],
)
def test_buffers_that_were_not_sent_so_are_not_taken_back(
    ends: Ends, number: int, offsets: list[int], sizes: list[int], reason: str
) -> None:
    (view,) = ends.send(data(1))
    with pytest.raises(OSError, match=reason):
        ends.writer.take_returned(number, offsets, sizes)
    assert ends.states() == [_IN_USE]
    del view
    with pytest.raises(OSError, match="segment 1 was not given"):
        ends.writer.take_returned(1, [0], [10])


def test_an_interrupt_anywhere_while_buffers_are_taken_back_gives_no_segment_to_two() -> None:
    for point in range(200):
        ends = Ends()
        (view,) = ends.send(data(1))
        returnable = ends.find_returnable(view)
        with returnable:
            del view
            assert returnable.give_back()
        at = At(FILES, (point,))
        got = None
        with at:
            try:
                got = ends.take_returned(returnable)
            except Interrupt:
                pass
        gc.collect()
        segment = ends.segments()[0]
        if got is None:
            assert segment.state() == _IN_USE or segment.is_free(), at.places
        else:
            assert not segment.is_free()
            assert bytes(got[0]) == data(1)
        ends.close()
        if not at.has_acted:
            break
    assert 5 < point < 199


# Little memory


def returned(ends: Ends, seed: int) -> Any:
    (view,) = ends.send(data(seed))
    returnable = ends.find_returnable(view)
    with returnable:
        del view
        returnable.give_back()
    return ends.take_returned(returnable)[0]


def test_memory_is_short_when_more_than_half_of_the_segments_have_come_back(ends: Ends) -> None:
    shown = []
    for seed in range(MAX_SEGMENTS_PER_LINK // 2):
        shown.append(returned(ends, seed))
        assert not ends.writer.is_short()
    shown.append(returned(ends, 0))
    assert ends.writer.is_short()
    del shown[1:]
    gc.collect()
    assert not ends.writer.is_short()


def test_memory_is_short_when_more_than_half_of_it_is_used() -> None:
    pool = SegmentPool(4 * MIN_CAPACITY, 8, str)
    assert not pool.is_short()
    for count in range(1, 5):
        made = pool.create(MIN_CAPACITY)
        assert made is not None
        made.close()
        assert pool.is_short() == (count > 2)
    pool = SegmentPool(100 * MIN_CAPACITY, 4, str)
    for count in range(1, 5):
        made = pool.create(MIN_CAPACITY)
        assert made is not None
        made.close()
        assert pool.is_short() == (count > 2)
