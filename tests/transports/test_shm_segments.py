"""Shared segments: buffers arrive, and a segment is used again when the last view of it is gone and not before."""

from __future__ import annotations

import gc
import mmap
import os
import sys
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from segment_ends import MIN_CAPACITY, Ends, data, descriptor_count, mapping_count

from farcall.transports.shm_segments import (
    _ALIGNMENT,
    MAX_SEGMENTS_PER_LINK,
    SegmentWriter,
    _end_of,
    _lie_apart,
    _offsets,
    _rounded_capacity,
)

pytestmark = pytest.mark.usefixtures("segments_from_here")

PAGE = mmap.PAGESIZE


# The layout

some_sizes = st.lists(st.integers(0, 5 * _ALIGNMENT), min_size=1, max_size=6)


@given(some_sizes, st.randoms())
def test_buffers_are_put_apart_in_whatever_order_they_are_named(sizes: list[int], random: Random) -> None:
    places = list(zip(_offsets(sizes), sizes, strict=True))
    random.shuffle(places)
    assert _lie_apart([at for at, _ in places], [size for _, size in places], _end_of(sizes))


@given(st.lists(st.tuples(st.integers(-100, 700), st.integers(0, 300)), min_size=1, max_size=4), st.integers(0, 1000))
def test_buffers_lie_apart_if_no_byte_is_in_two_and_none_outside(places: list[tuple[int, int]], capacity: int) -> None:
    taken = [byte for at, size in places for byte in range(at, at + size)]
    inside = all(at >= 0 and at + size <= capacity for at, size in places)
    expected = inside and len(set(taken)) == len(taken) and all(at % _ALIGNMENT == 0 for at, _ in places)
    found = _lie_apart([at for at, _ in places], [size for _, size in places], capacity)
    if any(not size for _, size in places):
        assert found <= expected, "an empty buffer may be refused where another begins, and nothing is lost by that"
    else:
        assert found == expected


# What arrives


@given(st.lists(st.binary(max_size=300) | st.integers(0, 3 * MIN_CAPACITY).map(bytes), min_size=1, max_size=6))
@settings(deadline=None, max_examples=60)
def test_buffers_arrive_aligned(buffers: list[bytes]) -> None:
    ends = Ends()
    views = ends.send(*buffers)
    assert views is not None
    assert [bytes(view) for view in views] == buffers
    for view in views:
        assert not view.readonly
        if view.nbytes:
            assert np.frombuffer(view, np.uint8).ctypes.data % _ALIGNMENT == 0
    ends.close()


def test_buffers_belong_to_the_reader(ends: Ends) -> None:
    sent = bytearray(data(1))
    views = ends.writer.write([memoryview(sent)])
    assert views is not None
    (received,) = ends.reader.read(views, [len(sent)])
    sent[:] = data(2)
    assert received == data(1)
    received[:] = data(3)
    assert sent == data(2)


def test_large_data_is_copied_without_numpy_too(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    large = os.urandom(3 << 20)
    for with_numpy in (True, False):
        if not with_numpy:
            monkeypatch.setitem(sys.modules, "numpy", None)
        views = ends.send(large, large[:100])
        assert views is not None
        assert [bytes(view) for view in views] == [large, large[:100]]
        del views


# Going back


def test_a_segment_is_used_again_when_its_last_buffer_is_gone(ends: Ends) -> None:
    views = ends.send(data(1), data(2))
    assert views is not None
    assert ends.numbers() == [1]
    one = views[1]
    del views
    other = ends.send(data(3))
    assert ends.numbers() == [1, 2], "one of two buffers is still there"
    assert one == data(2)
    del one, other
    last = ends.send(data(4), data(5))
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
        lambda view: np.frombuffer(view, np.uint16)[5:].data,
    ],
    ids=["slice", "view", "array", "strided", "transposed", "view of an array"],
)
def test_whatever_is_made_of_a_buffer_keeps_its_segment(ends: Ends, keep: Any) -> None:
    views = ends.send(data(1))
    assert views is not None
    kept = keep(views[0])
    contents = bytes(kept)
    del views
    for seed in range(2, 6):
        assert ends.send(data(seed)) == [data(seed)]
    assert bytes(kept) == contents
    assert ends.numbers() == [1, 2]
    del kept
    assert ends.send(data(9)) == [data(9)]
    assert ends.numbers() == [1, 2]
    assert ends.segments()[0].state() == 0


def test_a_buffer_in_a_cycle_goes_back_with_the_collector(ends: Ends) -> None:
    views = ends.send(data(1))
    assert views is not None
    cycle: list[Any] = [views]
    cycle.append(cycle)
    del views, cycle
    gc.collect()
    assert ends.segments()[0].state() == 0


def test_a_buffer_outlives_the_link(ends: Ends) -> None:
    views = ends.send(data(1))
    assert views is not None
    ends.close()
    gc.collect()
    assert views == [data(1)]
    views[0][:5] = b"still"
    del views
    gc.collect()
    assert mapping_count() == 0


# Bounds


def test_no_more_memory_is_used_than_allowed() -> None:
    ends = Ends(max_bytes=2 * MIN_CAPACITY)
    held = [ends.send(data(seed)) for seed in range(3)]
    assert held == [[data(0)], [data(1)], None]
    held.pop(0)
    assert ends.send(data(4)) == [data(4)]
    assert ends.send(data(5, MIN_CAPACITY + 1)) is None, "only half of it is free"
    held.clear()
    assert ends.send(data(5, MIN_CAPACITY + 1)) == [data(5, MIN_CAPACITY + 1)], "free ones make room for a larger one"
    assert ends.problems == []
    ends.close()


def test_there_are_only_so_many_segments_for_all_peers_together() -> None:
    ends = Ends(max_segments=3)
    assert ends.pool.probe_descriptor() >= 0
    other = SegmentWriter(ends.pool)
    held = [ends.send(data(1)), ends.send(data(2)), ends.send(data(3))]
    assert held == [[data(1)], [data(2)], None]
    assert other.write([memoryview(data(4))]) is None
    held.clear()
    ends.writer.sweep(float("inf"))
    assert other.write([memoryview(data(4))]) is not None
    other.close()
    ends.close()


def test_there_are_only_so_many_segments_for_one_peer() -> None:
    ends = Ends(max_segments=1000)
    held = [ends.send(data(seed)) for seed in range(MAX_SEGMENTS_PER_LINK)]
    assert None not in held
    assert ends.send(data(1)) is None
    held.pop()
    assert ends.send(data(1, 2 * MIN_CAPACITY)) is not None, "a free one that is too small makes room"
    assert len(ends.numbers()) == MAX_SEGMENTS_PER_LINK
    held.clear()
    ends.close()


def test_the_smallest_segment_that_fits_is_taken(ends: Ends) -> None:
    sizes = [4 * MIN_CAPACITY, MIN_CAPACITY, 2 * MIN_CAPACITY]
    held = [ends.send(data(seed, size)) for seed, size in enumerate(sizes)]
    held.clear()
    views = ends.send(data(1, MIN_CAPACITY + 1))
    assert [segment.state() for segment in ends.segments()] == [0, 0, 1]
    assert views == [data(1, MIN_CAPACITY + 1)]


@given(st.integers(1, 1 << 40))
def test_little_of_a_segment_is_wasted(total: int) -> None:
    capacity = _rounded_capacity(total)
    assert total <= capacity <= max(MIN_CAPACITY, total * 9 / 8)
    assert _rounded_capacity(capacity) == capacity


# Memory that nobody uses


def test_idle_memory_is_given_back_at_both_ends(ends: Ends) -> None:
    views = ends.send(data(1))
    kept = ends.send(data(2))
    assert (mapping_count(), len(ends.numbers())) == (4, 2)
    del views
    used = min(segment.used_at for segment in ends.segments())
    ends.writer.sweep(used)
    ends.reader.sweep(used)
    assert (mapping_count(), len(ends.numbers())) == (4, 2), "it was not used before that moment"
    ends.writer.sweep(float("inf"))
    assert (mapping_count(), len(ends.numbers())) == (3, 1), "one is in use"
    gc.disable()
    try:
        ends.reader.sweep(float("inf"))
        assert mapping_count() == 2, "at once, not when the collector comes by"
    finally:
        gc.enable()
    assert kept == [data(2)]
    gc.collect()
    del kept
    assert ends.segments()[0].state() == 0, "it came back, though the reader was swept meanwhile"
    assert ends.send(data(3)) == [data(3)]


def test_a_segment_that_is_given_up_takes_no_memory_though_the_reader_has_it_mapped(ends: Ends) -> None:
    ends.send(data(1, 1 << 22))
    mapping = ends.mappings()[1]._memory
    assert mapping[PAGE] == 2
    copy = os.dup(ends.segments()[0].descriptor)
    assert os.fstat(copy).st_blocks * 512 >= 1 << 22
    ends.writer.sweep(float("inf"))
    assert os.fstat(copy).st_blocks * 512 <= PAGE
    os.close(copy)


def test_a_segment_in_use_keeps_its_contents_when_the_writer_closes(ends: Ends) -> None:
    views = ends.send(data(7))
    ends.close()
    assert views == [data(7)]


def test_a_segment_that_the_reader_has_unmapped_is_opened_again(ends: Ends) -> None:
    ends.send(data(1))
    assert not ends.writer.has_unopened()
    ends.reader.sweep(float("inf"))
    place = ends.write(data(2))
    assert place is not None
    assert place.number == 1
    assert ends.writer.has_unopened(), "it could not be opened after the writer has gone"
    assert ends.reader.read(place, [MIN_CAPACITY]) == [data(2)]
    assert not ends.writer.has_unopened()


def test_a_thousand_frames_leave_nothing(ends: Ends) -> None:
    ends.send(data(1, 1 << 20), data(2))
    now = mapping_count(), descriptor_count(), ends.numbers()
    for seed in range(1000):
        assert ends.send(data(seed, 1 << 20), data(seed + 1)) is not None
    assert (mapping_count(), descriptor_count(), ends.numbers()) == now
    ends.close()
    ends.reader.sweep(float("inf"))
    assert (mapping_count(), descriptor_count()) == (0, 0)


# What the writer keeps


def test_a_segment_is_not_used_again_while_the_writer_keeps_a_copy_in_it(ends: Ends) -> None:
    place, kept = ends.writer.write_and_keep([memoryview(data(1)), memoryview(b"xyz")]) or (None, [])
    assert place is not None
    assert [bytes(view) for view in kept] == [data(1), b"xyz"]
    ends.reader.read(place, [MIN_CAPACITY, 3])  # and lets go at once
    other = ends.write(data(2), b"abc")
    assert other is not None
    assert other.number != place.number
    ends.writer.sweep(float("inf"))
    assert place.number in ends.numbers()
    assert bytes(kept[0]) == data(1)
    kept.clear()
    again = ends.write(data(3), b"abc")
    assert again is not None
    assert again.number == place.number


def test_kept_copies_outlive_the_writer(ends: Ends) -> None:
    place, kept = ends.writer.write_and_keep([memoryview(data(5))]) or (None, [])
    assert place is not None
    ends.reader.read(place, [MIN_CAPACITY])
    ends.close()
    assert bytes(kept[0]) == data(5)
    kept.clear()
    assert (mapping_count(), descriptor_count()) == (0, 0)


def test_a_segment_that_the_reader_never_opens_can_be_freed(ends: Ends) -> None:
    place, kept = ends.writer.write_and_keep([memoryview(data(6))]) or (None, [])
    assert place is not None
    ends.writer.free(place.number)
    kept.clear()
    again = ends.write(data(7))
    assert again == place


def test_nothing_is_kept_without_shared_memory() -> None:
    ends = Ends(max_bytes=0)
    assert ends.writer.write_and_keep([memoryview(data(1))]) is None
    ends.close()
