"""Memory that is received into: its receiver's alone, used again when nothing shows it, and not kept for ever."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from farcall.transports import received_memory
from farcall.transports.received_memory import ReceivedMemory

MIB = 1 << 20
MOST = 64 * MIB


@pytest.fixture
def memory() -> ReceivedMemory:
    return ReceivedMemory(MOST)


def where(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


@pytest.mark.parametrize("size", [MIB, 3 * MIB - 5, 40 * MIB])
def test_what_is_taken_has_its_size_and_can_be_written_to(memory: ReceivedMemory, size: int) -> None:
    view = memory.take(size)
    assert view.nbytes == size
    assert (view.format, view.readonly) == ("B", False)
    view[0], view[-1] = 1, 2
    assert memory.kept() == 0


def test_it_is_used_again_when_the_last_view_is_gone(memory: ReceivedMemory) -> None:
    view: Any = memory.take(4 * MIB)
    array: Any = np.frombuffer(view, np.float32).reshape(-1, 4)[:, 1]
    at = where(view)
    del view
    other = memory.take(4 * MIB)
    assert where(other) != at, "the array shows it still"
    del array
    assert where(memory.take(4 * MIB)) == at
    del other


def test_two_receivers_never_share(memory: ReceivedMemory) -> None:
    views = [memory.take(2 * MIB) for _ in range(4)]
    for number, view in enumerate(views):
        view[:] = bytes((number,)) * len(view)
    assert [(view[0], view[-1]) for view in views] == [(number, number) for number in range(4)]


def test_what_is_much_too_large_is_not_taken_for_little(memory: ReceivedMemory) -> None:
    at = where(memory.take(32 * MIB))
    assert memory.kept() == 32 * MIB
    assert where(memory.take(2 * MIB)) != at
    assert where(memory.take(20 * MIB)) == at


def test_the_least_that_fits_is_taken(memory: ReceivedMemory) -> None:
    views = [memory.take(size) for size in (16 * MIB, 10 * MIB, 12 * MIB)]
    at = where(views[1])
    del views[:]
    assert where(memory.take(9 * MIB)) == at


def test_only_so_much_is_kept(memory: ReceivedMemory) -> None:
    views = [memory.take(24 * MIB) for _ in range(4)]
    assert memory.kept() == 0
    del views[:]
    assert memory.kept() == 48 * MIB


def test_what_nobody_takes_for_a_while_is_given_up(memory: ReceivedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(received_memory, "monotonic", lambda: now)
    memory.take(4 * MIB)
    assert memory.kept() == 4 * MIB
    now = 105.0
    memory.take(24 * MIB)
    memory.sweep(100.0)
    assert memory.kept() == 28 * MIB
    memory.sweep(101.0)
    assert memory.kept() == 24 * MIB


def test_what_comes_back_after_the_end_is_not_kept(memory: ReceivedMemory) -> None:
    views = [memory.take(4 * MIB)]
    memory.take(2 * MIB)
    memory.close()
    assert memory.kept() == 0
    views[0][5] = 5
    views.clear()
    assert memory.kept() == 0


def test_a_forked_child_lets_go_without_a_lock(memory: ReceivedMemory) -> None:
    memory.take(4 * MIB)
    assert memory.kept() == 4 * MIB
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with memory._lock:
            held.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    memory.abandon()
    done.set()
    thread.join()
    assert memory.kept() == 0


def test_a_view_may_go_in_the_midst_of_anything(memory: ReceivedMemory) -> None:
    """Its end takes no lock: it may come in a thread that has it, or while another thread does."""
    views = [memory.take(2 * MIB)]
    held, gone = threading.Event(), threading.Event()

    def hold() -> None:
        with memory._lock:
            held.set()
            assert gone.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    views.clear()
    gone.set()
    thread.join()
    assert memory.kept() == 2 * MIB


def test_what_cannot_be_had_is_a_memory_error(memory: ReceivedMemory) -> None:
    with pytest.raises(MemoryError, match="announced"):
        memory.take(1 << 60)


def test_a_system_without_large_pages_does_without(memory: ReceivedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received_memory.mmap, "MADV_HUGEPAGE", -1)
    assert memory.take(2 * MIB).nbytes == 2 * MIB
