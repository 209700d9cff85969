"""Shared segments where things go wrong: none to be had, a peer that lies, forks, interrupts, many threads at once."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import threading
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from segment_ends import MIN_CAPACITY, Ends, data, descriptor_count, mapping_count, open_segments

from farcall.transports import shm_segments
from farcall.transports.shm_segments import (
    _ALIGNMENT,
    MAX_SEGMENTS_PER_LINK,
    Place,
    SegmentPool,
    SegmentReader,
    SegmentWriter,
)
from interruption import At, Interrupt

pytestmark = pytest.mark.usefixtures("segments_from_here")

PAGE = mmap.PAGESIZE
FILES = ("transports/shm_segments.py",)


# Where there is no shared memory


def test_it_is_said_once_that_no_segment_can_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends()
    tries = iter(range(2))

    def refuse(*_: object) -> int:
        if next(tries) == 0:
            ends.write(data(1))  # another one comes at the same time
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert [ends.write(data(1)), ends.write(data(2)), ends.pool.probe_descriptor()] == [None, None, -1]
    assert ends.problems == ["no shared memory can be had ([Errno 38] Function not implemented)"]


@pytest.mark.parametrize("step", ["ftruncate", "fcntl", "mmap"])
def test_a_segment_that_cannot_be_finished_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def refuse(*_: object) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    ends = Ends()
    with monkeypatch.context() as patch:
        patch.setattr({"ftruncate": os, "fcntl": fcntl, "mmap": mmap}[step], step, refuse)
        assert ends.write(data(1)) is None
    assert descriptor_count() == 0
    assert len(ends.problems) == 1
    assert (ends.pool._bytes_left, ends.pool._segments_left) == (1 << 26, 64)


def test_shared_memory_that_is_turned_off_is_no_problem() -> None:
    ends = Ends(max_bytes=0)
    assert (ends.write(data(1)), ends.pool.probe_descriptor(), ends.problems) == (None, -1, [])


def test_nothing_is_written_after_the_end(ends: Ends) -> None:
    assert ends.pool.probe_descriptor() >= 0
    ends.writer.close()
    ends.writer.close()
    assert ends.write(data(1)) is None
    ends.pool.close()
    ends.pool.close()
    assert ends.pool.probe_descriptor() == -1
    assert SegmentWriter(ends.pool).write([memoryview(data(1))]) is None
    assert descriptor_count() == 0


def test_threads_that_ask_for_the_probe_at_once_get_the_same(background: ThreadPoolExecutor) -> None:
    for _ in range(30):
        ends = Ends()
        start = threading.Barrier(8)

        def ask(ends: Ends = ends, start: threading.Barrier = start) -> int:
            start.wait()
            return ends.pool.probe_descriptor()

        assert len({future.result() for future in [background.submit(ask) for _ in range(8)]}) == 1
        ends.close()
        assert descriptor_count() == 0


@pytest.mark.parametrize("act", [SegmentPool.probe_descriptor, SegmentPool.close])
def test_a_signal_handler_that_uses_the_pool_while_it_makes_the_probe_leaves_no_descriptor(
    act: Callable[[SegmentPool], object],
) -> None:
    for point in range(1000):
        ends = Ends()
        at = At(FILES, (point,), lambda ends=ends: act(ends.pool))
        with at:
            ends.pool.probe_descriptor()
        ends.close()
        assert descriptor_count() == 0, at.places
        if not at.has_acted:
            break
    assert point > 5


# A peer that lies


def sealed(size: int, seals: int = fcntl.F_SEAL_SHRINK, start: bytes = b"") -> int:
    descriptor = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, start, 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize("what", ["token", "unsealed", "small", "file", "fifo", "socket", "closed", "negative"])
def test_descriptors_that_are_no_segments_of_the_peer_are_refused(ends: Ends, tmp_path: Path, what: str) -> None:
    token = ends.pool.token
    made: list[int] = []
    if what == "token":
        made.append(sealed(2 * PAGE, start=bytes(16)))
    elif what == "unsealed":
        made.append(sealed(2 * PAGE, seals=fcntl.F_SEAL_GROW, start=token))
    elif what == "small":
        made.append(sealed(PAGE - 1, start=token))
    elif what == "file":
        (tmp_path / "file").write_bytes(token + bytes(2 * PAGE))
        made.append(os.open(tmp_path / "file", os.O_RDWR))
    elif what == "fifo":
        os.mkfifo(tmp_path / "fifo")
        made.append(os.open(tmp_path / "fifo", os.O_RDWR | os.O_NONBLOCK))
    elif what == "socket":
        made.append(os.eventfd(0))
    elif what == "closed":
        os.close(closed := os.eventfd(0))
    descriptor = made[0] if made else closed if what == "closed" else -1
    opened = len(os.listdir("/proc/self/fd"))
    for attempt in (
        lambda: ends.reader.check(descriptor),
        lambda: ends.reader.read(Place(descriptor, 1), [10]),
    ):
        with pytest.raises(OSError):  # noqa: PT011 (the kernel's words differ)
            attempt()
    assert "/memfd:other" not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == opened
    for each in made:
        os.close(each)


def test_a_segment_of_another_process_is_not_found(ends: Ends) -> None:
    assert ends.pool.probe_descriptor() >= 0
    with pytest.raises(FileNotFoundError):
        SegmentReader(2**22 + 1, ends.pool.token).check(ends.pool.probe_descriptor())
    ends.reader.check(ends.pool.probe_descriptor())


@pytest.mark.parametrize(
    "sizes",
    [
        [MIN_CAPACITY + 1],
        [1, MIN_CAPACITY - _ALIGNMENT + 1],
        [1, MIN_CAPACITY],
        [1 << 40],
        [2**63, 2**63],
        [MIN_CAPACITY, 1],
    ],
)
def test_sizes_beyond_the_segment_are_refused(ends: Ends, sizes: list[int]) -> None:
    place = ends.write(data(1))
    assert place is not None
    with pytest.raises(OSError, match=f"a segment of {PAGE + MIN_CAPACITY} bytes"):
        ends.reader.read(place, sizes)
    assert ends.reader.read(place, [MIN_CAPACITY - _ALIGNMENT, 1]) == [data(1, MIN_CAPACITY - _ALIGNMENT), data(1, 1)]


def test_a_buffer_is_never_shorter_than_its_size(ends: Ends) -> None:
    descriptor = sealed(PAGE + 65, start=ends.pool.token + (1).to_bytes(4, "little"))
    for sizes in ([1, 64], [65, 1], [66]):
        with pytest.raises(OSError, match="a segment of"):
            ends.reader.read(Place(descriptor, 1), sizes)
    assert [len(view) for view in ends.reader.read(Place(descriptor, 1), [1, 0])] == [1, 0]
    ends.close()
    os.close(descriptor)


def test_another_number_is_refused(ends: Ends) -> None:
    place = ends.write(data(1))
    assert place is not None
    with pytest.raises(OSError, match="is segment 1, not 2"):
        ends.reader.read(Place(place.descriptor, 2), [10])
    assert mapping_count() == 1, "only the writer's"
    assert ends.writer.has_unopened()


def test_a_segment_in_use_cannot_be_read_again(ends: Ends) -> None:
    place = ends.write(data(1))
    assert place is not None
    views = ends.reader.read(place, [MIN_CAPACITY])
    with pytest.raises(OSError, match="in use"):
        ends.reader.read(place, [MIN_CAPACITY])
    assert views == [data(1)]


# Forks


def test_a_segment_in_use_at_a_fork_is_never_used_again_and_the_writer_forgets_it(ends: Ends) -> None:
    views = ends.send(data(1))
    ends.send(data(2))
    assert ends.numbers() == [1, 2]
    ends.reader.prepare_fork()
    assert views is not None
    last = weakref.ref(views[0].obj)
    del views
    assert last() is None
    assert ends.send(data(3)) == [data(3)]
    assert ends.numbers() == [1, 2]
    assert ends.segments()[0].state() == 2
    ends.writer.sweep(0.0)
    assert ends.numbers() == [2], "its share of the pool is free again"
    assert ends.pool._bytes_left == (1 << 26) - MIN_CAPACITY


def test_a_segment_that_is_kept_for_good_makes_room() -> None:
    ends = Ends(max_bytes=MIN_CAPACITY)
    views = ends.send(data(1))
    ends.reader.prepare_fork()
    assert ends.send(data(2)) == [data(2)]
    assert ends.numbers() == [2]
    assert views == [data(1)], "it is not emptied"
    ends.close()


def test_a_child_sees_what_its_parent_had(ends: Ends) -> None:
    views = ends.send(data(1))
    assert views is not None
    read_end, write_end = os.pipe()
    ends.reader.prepare_fork()
    child = os.fork()
    if not child:
        os.read(read_end, 1)
        ends.writer.abandon()
        ends.pool.close()
        del ends
        os._exit(0 if views == [data(1)] else 1)
    del views
    for seed in range(2, 20):
        assert ends.send(data(seed)) == [data(seed)]
    os.write(write_end, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(read_end)
    os.close(write_end)


# Interrupts and threads


@pytest.mark.parametrize("warm", [True, False])
def test_an_interrupt_anywhere_in_a_write_frees_the_segment(warm: bool) -> None:
    known = open_segments()
    lost = set()
    for point in range(1000):
        ends = Ends()
        if warm:
            ends.send(data(1))
        at = At(FILES, (point,))
        with at:
            try:
                ends.write(data(2), data(3, 1 << 20))
            except Interrupt:
                pass
        if at.places:
            assert [segment.state() for segment in ends.segments() if segment.state()] == [], at.places
        ends.close()
        if descriptor_count() or ends.pool._bytes_left != 1 << 26:
            # Between its making and its first owner something may be lost: the descriptor, or the room for one.
            lost.add(at.places[0].partition(",")[0])
            _close_segments(known)
        if not at.has_acted:
            break
    assert point > 20
    assert lost <= {"SegmentPool.create", "_WriterSegment.__init__"}


def test_a_close_that_was_interrupted_is_done_again() -> None:
    for point in range(1000):
        ends = Ends()
        ends.write(data(1))
        ends.send(data(2), data(3))
        at = At(FILES, (point,))
        with at:
            try:
                ends.writer.close()
            except Interrupt:
                pass
        ends.close()
        assert (descriptor_count(), ends.pool._bytes_left, ends.pool._segments_left) == (0, 1 << 26, 64), at.places
        if not at.has_acted:
            break
    assert point > 10


def _close_segments(known: set[str]) -> None:
    gc.collect()
    for name in open_segments() - known:
        os.close(int(name))


def test_a_failed_copy_frees_the_segment(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shm_segments, "copy_bytes", fail)
        with pytest.raises(KeyboardInterrupt):
            ends.write(data(1))
    assert ends.segments()[0].state() == 0
    assert ends.send(data(2)) == [data(2)]
    assert ends.numbers() == [1]


@pytest.mark.parametrize("full", [False, True])
def test_a_signal_handler_that_writes_in_the_middle_of_a_write_gets_a_segment_of_its_own(full: bool) -> None:
    for point in range(1000):
        ends = Ends(max_bytes=3 * MIN_CAPACITY if full else 1 << 26)
        held = [ends.send(data(seed, 2 * MIN_CAPACITY if full else MIN_CAPACITY)) for seed in range(1 if full else 2)]
        held.clear()
        nested: list[Place | None] = []
        at = At(FILES, (point,), lambda ends=ends, nested=nested: nested.append(ends.write(data(9))))
        with at:
            place = ends.write(data(5))
        for found, seed in ((place, 5), (nested[0] if nested else None, 9)):
            if found is not None:
                assert ends.reader.read(found, [MIN_CAPACITY]) == [data(seed)], at.places
        ends.close()
        if not at.has_acted:
            break
    assert point > 10


def test_many_threads_at_once(ends: Ends, background: ThreadPoolExecutor) -> None:
    """Each with a connection of its own, and all with one."""

    def work(seed: int) -> int:
        rng = np.random.default_rng(seed)
        by_socket = 0
        held: list[tuple[int, memoryview]] = []
        for _ in range(60):
            sent = rng.bytes(int(rng.integers(1, 3 * MIN_CAPACITY)))
            place = ends.write(sent)
            if place is None:
                by_socket += 1
                continue
            (view,) = ends.reader.read(place, [len(sent)])
            held.append((zlib.crc32(sent), view))
            if len(held) > 2:
                crc, oldest = held.pop(int(rng.integers(len(held))))
                assert zlib.crc32(oldest) == crc
        assert all(zlib.crc32(view) == crc for crc, view in held)
        return by_socket

    missed = [future.result() for future in [background.submit(work, seed) for seed in range(8)]]
    assert sum(missed) < 8 * 60
    assert len(ends.numbers()) <= MAX_SEGMENTS_PER_LINK
    assert all(segment.state() == 0 for segment in ends.segments())
