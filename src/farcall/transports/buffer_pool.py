"""Memory for large buffers that arrive through sockets, which is reused when the program has dropped its contents.

New memory costs more than the copy into it, because the kernel allocates it page by page and clears each page. So
memory that was received into is kept for a while, and the next buffer of about the same size is received there.

Rules
- Memory that was taken is used by one receiver, and is writable. It returns to the pool when nothing refers to it any
  more. A view keeps the object alive that exports its buffer. So each time memory is taken, a new exporting object is
  created, and a weak reference to it shows when the last view is gone.
- The kernel allocates memory when it is written. So a peer that only announces large buffers does not use up memory.
- An exporting object can be freed in any thread at any line, so that only appends to a queue and takes no lock.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from time import monotonic
from typing import Any, Final

POOLED_MIN_BYTES: Final = 1 << 20
"""Smaller buffers are byte arrays outside of the pool."""
_ROUND_TO_BYTES: Final = 1 << 21
"""Sizes are rounded up to this, the size of a huge page."""
_MAX_KEPT_BYTES: Final = 1 << 30
"""The most unused bytes of a default pool."""


def default_buffer_pool() -> BufferPool:
    """Returns a pool that keeps at most 1 GiB, or a sixteenth of the machine's memory if that is less."""
    return BufferPool(min(_MAX_KEPT_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 16))


class BufferPool:
    """The memory for large buffers that arrive on all links of one worker.

    `take` returns memory. When the last view of it is dropped, the pool keeps the memory for a later `take`, at most
    `max_kept_bytes` in all.

    Args:
        max_kept_bytes: The most bytes of unused memory that the pool keeps; 0 to keep none.
    """

    def __init__(self, max_kept_bytes: int) -> None:
        self._max_kept_bytes = max_kept_bytes
        self._lock = threading.RLock()  # a finalizer that receives frames may interrupt its own thread
        self._free: list[_Block] = []
        self._taken: set[_Block] = set()
        """The blocks in use. They must stay alive, or their weak references would not work."""
        self._returned: deque[_Block] = deque()

    def take(self, size: int) -> memoryview:
        """Returns writable memory.

        Memory of 1 MiB or more has undefined contents. Normally it goes back to the pool when its last view is
        dropped. Smaller memory is new and zero, and does not belong to the pool.

        Args:
            size: The number of bytes; 0 gives an empty view.

        Raises:
            MemoryError: The process has no address space left for it.
        """
        if size < POOLED_MIN_BYTES:
            return memoryview(bytearray(size))
        with self._lock:
            self._collect_returned()
            limit = 2 * size + _ROUND_TO_BYTES
            fitting = [block for block in self._free if size <= block.capacity <= limit]
            block = min(reversed(fitting), key=lambda block: block.capacity, default=None)  # of equals the last used
            if block is not None:
                self._free.remove(block)
        if block is None:
            try:
                block = _Block(-(-size // _ROUND_TO_BYTES) * _ROUND_TO_BYTES)
            except (OSError, ImportError):  # importing ctypes needs descriptors: do not use the pool this time
                return memoryview(_map_memory(size))
        self._taken.add(block)
        return block.new_view(self._returned)[:size]

    def _collect_returned(self) -> None:
        """Moves blocks that have no views any more to the unused blocks, or frees those beyond the limit of the pool.

        The caller must hold the lock.
        """
        while self._returned:
            block = self._returned.popleft()
            self._taken.discard(block)
            if block.capacity + sum(each.capacity for each in self._free) <= self._max_kept_bytes:
                block.returned_at = monotonic()
                self._free.append(block)

    def kept_bytes(self) -> int:
        """Returns the number of bytes of unused memory that the pool keeps."""
        with self._lock:
            self._collect_returned()
            return sum(each.capacity for each in self._free)

    def sweep(self, before: float) -> None:
        """Frees unused memory whose last view was dropped before `before`. Raises nothing.

        Args:
            before: A time of the monotonic clock.
        """
        with self._lock:
            self._collect_returned()
            self._free = [block for block in self._free if block.returned_at >= before]

    def close(self) -> None:
        """Frees all unused memory, and keeps none from now on. Memory that was taken stays valid."""
        self._max_kept_bytes = 0
        self.sweep(float("inf"))

    def abandon(self) -> None:
        """Closes the pool in a forked child: frees unused memory, and keeps none from now on.

        The pool of the parent stays open. It does not matter what threads of the parent were doing at the fork.
        """
        self._lock = threading.RLock()
        self.close()


class _Block:
    """One piece of memory of a pool, which holds one buffer at a time. The constructor maps new memory.

    Args:
        capacity: The number of bytes.

    Raises:
        MemoryError: There is no address space left.
    """

    __slots__ = ("_exporter_type", "_memory", "_noticed", "capacity", "returned_at")

    def __init__(self, capacity: int) -> None:
        import ctypes  # imported here, because only workers that receive large buffers need it

        self.capacity = capacity
        self.returned_at = 0.0
        self._noticed: weakref.ref[Any] | None = None
        self._memory = _map_memory(capacity)
        try:
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # the kernel has no huge pages
        self._exporter_type: Any = type("_Exporter", (ctypes.c_char * capacity,), {})

    def new_view(self, returned: deque[_Block]) -> memoryview:
        """Returns a view of the whole block. When the last view is dropped, the block is appended to `returned`.

        No view from an earlier call may be left.
        """
        exporter = self._exporter_type.from_buffer(self._memory)
        self._noticed = weakref.ref(exporter, lambda _: returned.append(self))
        return memoryview(exporter).cast("B")


def _map_memory(size: int) -> mmap.mmap:
    """Returns `size` bytes of new memory. Raises `MemoryError` if there is no address space left."""
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"there is no memory for {size} bytes that were announced: {error}") from None
