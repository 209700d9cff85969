"""Both ends of a link with rings, for the tests of the C extension: in one process, or one end in a forked child."""

from __future__ import annotations

import mmap
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import pytest

from farcall import _native

if _native.rings is None:
    pytest.skip("the C extension is not available here", allow_module_level=True)

RingPair: Any = _native.rings.RingPair
Waiter: Any = _native.rings.Waiter
mapping_size: Any = _native.rings.mapping_size

RING_SIZE = 256
"""Bytes of the header of one ring in the shared memory. Side 0 writes ring 0."""
HEAD, WRITER_CORE, TAIL, READER_SLEEPS, POLLER, WRITER_WAITS = 0, 8, 64, 128, 132, 192
"""Offsets in that header. `ring.h` has the names."""
CORE_BLOCKED = 0xFFFFFFFF


class Events(NamedTuple):
    """The two events of one process, which its peer signals."""

    leader: int
    standby: int

    def signals(self) -> tuple[int, int]:
        """How often each was signalled since the last look."""
        return _take(self.leader), _take(self.standby)


def _take(event: int) -> int:
    try:
        return os.eventfd_read(event)
    except BlockingIOError:
        return 0


def refuse_internal(frame: bytes) -> NoReturn:
    """For links on which no internal frame is sent."""
    raise AssertionError(f"an internal frame: {frame!r}")


class RingLink:
    """A link: the ends `a` and `b`, their events, and the memory that they share."""

    def __init__(
        self,
        capacity: int = 1 << 16,
        spin_s: float = 0.0,
        on_internal: Callable[[bytes], object] = refuse_internal,
    ) -> None:
        self.capacity = capacity
        descriptor = os.memfd_create("ring-test")
        os.ftruncate(descriptor, mapping_size(capacity))
        self.memory = mmap.mmap(descriptor, mapping_size(capacity))
        self.events_a, self.events_b = _new_events(), _new_events()
        self.a = RingPair(descriptor, capacity, 0, *self.events_b, spin_s, on_internal)
        self.b = RingPair(descriptor, capacity, 1, *self.events_a, spin_s, on_internal)
        os.close(descriptor)

    def read_word(self, side: int, offset: int) -> int:
        """A word of 4 bytes in the header of the ring that this side writes."""
        start = side * RING_SIZE + offset
        return int.from_bytes(self.memory[start : start + 4], "little")

    def write_word(self, side: int, offset: int, value: int, size: int = 4) -> None:
        """Overwrites such a word, or one of 8 bytes."""
        start = side * RING_SIZE + offset
        self.memory[start : start + size] = value.to_bytes(size, "little")

    def close(self) -> None:
        """Closes all but the two ends, which may be in use."""
        self.a.close()
        self.b.close()
        self.memory.close()
        for event in (*self.events_a, *self.events_b):
            os.close(event)

    def __enter__(self) -> RingLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _new_events() -> Events:
    return Events(*(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2)))


@contextmanager
def child_process(function: Callable[..., object], *arguments: object) -> Iterator[int]:
    """Runs the function in a forked child. The child must have returned from it, or been killed, at the end."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function(*arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    try:
        yield child
    except BaseException:
        os.kill(child, 9)
        os.waitpid(child, 0)
        raise
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0, f"the child ended with status {status}"


def receive_frames(pair: Any, count: int) -> list[bytes]:
    """Waits for that many frames, and returns their bytes."""
    frames: list[bytes] = []
    while len(frames) < count:
        assert pair.wait(10.0), f"{len(frames)} of {count} frames came"
        frames += [frame for frame, _ in pair.receive()]
    return frames


def send_frame(pair: Any, *parts: Any) -> None:
    """Sends a frame, and waits for room as long as necessary."""
    while not pair.send(*parts):
        pair.wait_for_room(sum(map(len, parts)), 0.01)
