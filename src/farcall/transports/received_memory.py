"""Memory that large messages are received into, used again when what lay in it is gone.

Memory that is new costs more than the copy into it: the system hands it out page by page, each emptied first. So what
large buffers were received into is kept for a while, and the next of about that size is received there.

Rules
- What is taken belongs to its receiver alone, and can be written to: it comes back only when nothing shows it any more.
  Views of a buffer keep what exports it, so each time it is taken it gets an exporter of its own, whose end is noticed.
- Nothing of a message's memory is handed out before the message is whole, so nobody sees what was there before.
- New memory becomes real only where it is written to: nobody makes a worker run out of it by announcing much.
- At most so many bytes are kept, and not for long if nobody takes them (`sweep`).
- The end of an exporter may come at any line of any thread: it only appends to a queue, and takes no lock.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from time import monotonic
from typing import Any, Final

LEAST: Final = 1 << 20
"""Bytes from which on it is worth it."""
_STEP: Final = 1 << 21
"""Sizes are rounded up to this, the size of a large page."""


class ReceivedMemory:
    """That of one worker, for all its connections."""

    def __init__(self, most: int) -> None:
        """At most `most` bytes are kept that nobody uses."""
        self._most = most
        self._lock = threading.RLock()
        self._free: list[_Block] = []
        self._taken: set[_Block] = set()
        self._returned: deque[_Block] = deque()

    def take(self, size: int) -> memoryview:
        """So many bytes, of which nobody knows what they hold. Raises `MemoryError`."""
        with self._lock:
            self._collect()
            # Of equal ones the one that was used last, which is warm.
            fitting = [block for block in reversed(self._free) if size <= block.capacity <= 2 * size + _STEP]
            block = min(fitting, key=lambda block: block.capacity, default=None)
            if block is not None:
                self._free.remove(block)
        if block is None:
            block = _Block(-(-size // _STEP) * _STEP)
        self._taken.add(block)
        return block.lease(self._returned)[:size]

    def _collect(self) -> None:
        """Takes in what has come back. Under the lock."""
        while self._returned:
            block = self._returned.popleft()
            self._taken.discard(block)
            if block.capacity + sum([each.capacity for each in self._free]) <= self._most:
                block.used = monotonic()
                self._free.append(block)

    def kept(self) -> int:
        """How many bytes are kept that nobody uses."""
        with self._lock:
            self._collect()
            return sum([each.capacity for each in self._free])

    def sweep(self, before: float) -> None:
        """Gives up what came back before that moment."""
        with self._lock:
            self._collect()
            self._free = [block for block in self._free if block.used >= before]

    def close(self) -> None:
        """Keeps nothing any more. What was taken stays its receiver's."""
        self._most = 0
        self.sweep(float("inf"))

    def abandon(self) -> None:
        """As `close`, in a forked child: another thread of the parent may have held the lock."""
        self._most = 0
        self._free = []


class _Block:
    """One piece of memory."""

    __slots__ = ("_lease_type", "_memory", "_noticed", "capacity", "used")

    def __init__(self, capacity: int) -> None:
        import ctypes  # not at the head: only who gets large data needs it

        self.capacity = capacity
        self.used = 0.0
        self._noticed: weakref.ref[Any] | None = None
        try:
            self._memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"there is not the memory for {capacity} bytes that were announced: {error}") from None
        try:
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a system without large pages
        self._lease_type: Any = type("_Lease", (ctypes.c_char * capacity,), {})

    def lease(self, returned: deque[_Block]) -> memoryview:
        """All of it. When nothing shows it any more, the block is appended to `returned`."""
        lease = self._lease_type.from_buffer(self._memory)
        self._noticed = weakref.ref(lease, lambda _: returned.append(self))
        return memoryview(lease).cast("B")
