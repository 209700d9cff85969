"""Memory for buffers that arrive: its receiver's alone, used again when nothing refers to it, not kept for ever."""

from __future__ import annotations

import mmap
import threading
from typing import Any

import numpy as np
import pytest

from farcall.transports import buffer_pool
from farcall.transports.buffer_pool import BufferPool

MIB = 1 << 20
MAX_KEPT_BYTES = 64 * MIB


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(MAX_KEPT_BYTES)


def where(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


@pytest.mark.parametrize("size", [MIB, 3 * MIB - 5, 40 * MIB])
def test_memory_has_its_size_and_can_be_written_to(pool: BufferPool, size: int) -> None:
    view = pool.take(size)
    assert view.nbytes == size
    assert (view.format, view.readonly) == ("B", False)
    view[0], view[-1] = 1, 2
    assert pool.kept_bytes() == 0


def test_memory_is_used_again_when_the_last_view_is_gone(pool: BufferPool) -> None:
    view: Any = pool.take(4 * MIB)
    array: Any = np.frombuffer(view, np.float32).reshape(-1, 4)[:, 1]
    at = where(view)
    del view
    other = pool.take(4 * MIB)
    assert where(other) != at, "the array still refers to it"
    del array
    assert where(pool.take(4 * MIB)) == at
    del other


def test_two_receivers_never_share(pool: BufferPool) -> None:
    views = [pool.take(2 * MIB) for _ in range(4)]
    for number, view in enumerate(views):
        view[:] = bytes((number,)) * len(view)
    assert [(view[0], view[-1]) for view in views] == [(number, number) for number in range(4)]


def test_memory_that_is_much_too_large_is_not_used(pool: BufferPool) -> None:
    at = where(pool.take(32 * MIB))
    assert pool.kept_bytes() == 32 * MIB
    assert where(pool.take(2 * MIB)) != at
    assert where(pool.take(20 * MIB)) == at


def test_the_smallest_block_that_fits_is_taken(pool: BufferPool) -> None:
    views = [pool.take(size) for size in (16 * MIB, 10 * MIB, 12 * MIB)]
    at = where(views[1])
    del views[:]
    assert where(pool.take(9 * MIB)) == at


def test_no_more_than_the_limit_is_kept(pool: BufferPool) -> None:
    views = [pool.take(24 * MIB) for _ in range(4)]
    assert pool.kept_bytes() == 0
    del views[:]
    assert pool.kept_bytes() == 48 * MIB


def test_memory_that_nobody_takes_for_a_while_is_given_up(pool: BufferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(buffer_pool, "monotonic", lambda: now)
    pool.take(4 * MIB)
    assert pool.kept_bytes() == 4 * MIB
    now = 105.0
    pool.take(24 * MIB)
    pool.sweep(100.0)
    assert pool.kept_bytes() == 28 * MIB
    pool.sweep(101.0)
    assert pool.kept_bytes() == 24 * MIB


def test_memory_that_comes_back_after_the_end_is_not_kept(pool: BufferPool) -> None:
    views = [pool.take(4 * MIB)]
    pool.take(2 * MIB)
    pool.close()
    assert pool.kept_bytes() == 0
    views[0][5] = 5
    views.clear()
    assert pool.kept_bytes() == 0


def test_a_forked_child_gives_memory_up_without_the_lock(pool: BufferPool) -> None:
    pool.take(4 * MIB)
    assert pool.kept_bytes() == 4 * MIB
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._lock:
            held.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    pool.abandon()
    done.set()
    thread.join()
    assert pool.kept_bytes() == 0


def test_the_last_view_may_go_while_another_thread_has_the_lock(pool: BufferPool) -> None:
    """Its end takes no lock: it may come in a thread that has it, or while another thread does."""
    views = [pool.take(2 * MIB)]
    held, gone = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._lock:
            held.set()
            assert gone.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    views.clear()
    gone.set()
    thread.join()
    assert pool.kept_bytes() == 2 * MIB


def test_memory_that_is_not_to_be_had_is_a_memory_error(pool: BufferPool) -> None:
    with pytest.raises(MemoryError, match="announced"):
        pool.take(1 << 60)


def test_huge_pages_are_optional(pool: BufferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)
    assert pool.take(2 * MIB).nbytes == 2 * MIB
