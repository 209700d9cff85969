"""Memory that two processes on one host share, as who borrows it sees it: the other end of `shared_memory`.

A segment is opened through the lender's process (`/proc/<process>/fd/<descriptor>`), mapped once, and views of it are
handed out. When the last view of a message is gone, the segment goes back by a byte in it, once.

What was borrowed may go back as a part of a message, without a copy, if nothing here shows it any more (`Loan`). That
is no guess: views keep the exporter that each message has of its own, whose end is noticed. Whoever wants to know lets
go of all it has while the loan is held, so that what ends then is not handed back, and looks.

Rules
- Of one message, all goes back at once. While anything here shows any of it, all of it stays, and is copied.
- What goes back is told to the lender by the message, and not by the byte: it is not to be used before it came.
- What a fork has given to a child never goes back.
- Nothing here waits. Any thread may call anything; views are let go of in any thread, even inside the collector.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from time import monotonic
from types import TracebackType
from typing import Any

from farcall.transports.segments import (
    DATA,
    FREE,
    KEPT,
    LENT_AT,
    MAPPED_AT,
    NUMBER,
    NUMBER_AT,
    TOKEN_SIZE,
    Place,
    aligned,
    are_apart,
    begins,
    ends,
    views,
)


class Borrower:
    """What was lent by one peer."""

    def __init__(self, process: int, token: bytes) -> None:
        self._process = process
        self._token = token
        self._mappings: dict[int, _Mapping] = {}
        # A thread that forks inside `take`, as the collector may have it do, must get through.
        self._lock = threading.RLock()

    def check(self, descriptor: int) -> None:
        """Tries to open the segment of that descriptor. Raises `OSError` if the peer can lend nothing to us."""
        self._open(descriptor)

    def take(self, place: Place, sizes: Sequence[int]) -> list[memoryview]:
        """The buffers of a message, ours from now on. Raises `OSError` if they are not there."""
        with self._lock:
            mapping = self._mappings.get(place.number)
            if mapping is None:
                memory = self._open(place.descriptor)
                (number,) = NUMBER.unpack_from(memory, NUMBER_AT)
                if number != place.number:
                    raise OSError(f"shared memory {place.descriptor} is number {number}, not {place.number}")
                mapping = self._mappings[place.number] = _Mapping(memory, number)
            return mapping.views(sizes)

    def loan_of(self, buffers: Sequence[memoryview]) -> Loan | None:
        """What these are of, if all are of one message that was borrowed; they are most of it, and none is on another.

        Of a small part of a message a copy is better: it would keep the whole segment from its lender.
        """
        with self._lock:
            mappings = list(self._mappings.values())
        if not mappings:
            return None
        first = _address(buffers[0])
        for mapping in mappings:
            if 0 <= first - mapping.address < mapping.filled:
                break
        else:
            return None
        sizes, offsets = [buffers[0].nbytes], [first - mapping.address]
        for buffer in buffers[1:]:
            sizes.append(buffer.nbytes)
            offsets.append(_address(buffer) - mapping.address)
        if 2 * sum(sizes) < mapping.filled:
            return None
        return Loan(mapping, offsets, sizes, self._lock) if are_apart(offsets, sizes, mapping.filled) else None

    def _open(self, descriptor: int) -> mmap.mmap:
        path = f"/proc/{self._process}/fd/{descriptor}"
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            found = os.fstat(opened)
            # What is no memfd has no seals, and raises; what could still shrink would end this process one day.
            seals = fcntl.fcntl(opened, fcntl.F_GET_SEALS) if stat.S_ISREG(found.st_mode) else 0
            if not seals & fcntl.F_SEAL_SHRINK or found.st_size < DATA:
                raise OSError(f"{path} is no segment")
            memory = mmap.mmap(opened, found.st_size)
        finally:
            os.close(opened)
        if memory[:TOKEN_SIZE] != self._token:
            raise OSError(f"{path} is not the peer's segment")
        return memory

    def sweep(self, before: float) -> None:
        """Gives up what is not in use and was last used before that moment. It may be opened again."""
        with self._lock:
            for number, mapping in list(self._mappings.items()):
                if mapping.used < before and not mapping.is_in_use():
                    del self._mappings[number]
                    mapping.forget()

    def pin(self) -> None:
        """This process forks: the child has what is in use now, too, and must not see it change.

        So it is never given back: the lender forgets it, and it is there as long as one of the two processes has it.
        """
        with self._lock:
            for number, mapping in list(self._mappings.items()):
                if mapping.is_shown():
                    mapping.keep()
                    del self._mappings[number]


class Loan:
    """Some buffers of a message that was borrowed, which may go back as they are. Inside of `with` it is held."""

    __slots__ = ("_debt", "_lock", "_mapping", "number", "offsets", "sizes")

    def __init__(
        self, mapping: _Mapping, offsets: Sequence[int], sizes: Sequence[int], lock: AbstractContextManager[object]
    ) -> None:
        self._mapping = mapping
        self._lock = lock
        self._debt = mapping.debt  # of what is shown now, which is what the buffers show
        self.number = mapping.number
        """The segment's."""
        self.offsets = offsets
        self.sizes = sizes

    def __enter__(self) -> None:
        self._mapping.holders.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mapping.holders.remove(self)
        if self._debt:
            self._mapping.hand_back(self._debt)

    def give(self) -> bool:
        """Gives it to the message that goes to the lender, if nothing in this process shows any of it, nor ever will.

        It is not handed back then: the message does that. Only while it is held. Whether it was given.
        """
        with self._lock:  # `pin` has looked and not acted yet, or comes later and finds nothing
            if not self._mapping.is_left_to(self):
                return False
            self._debt.clear()
            return True

    def views(self) -> list[memoryview]:
        """The buffers themselves, for who copies them; they are there only while it is held."""
        return self._mapping.raw(self.offsets, self.sizes)


class _Mapping:
    """One segment, at the borrower's."""

    def __init__(self, memory: mmap.mmap, number: int) -> None:
        import ctypes  # not at the head: only who gets large data needs it

        self.number = number
        self.used = 0.0
        self.filled = 0
        """How much of it the last message takes."""
        self.holders: list[Loan] = []
        """Those that see to its going back: it does not by itself meanwhile. Each was made while it was in use."""
        self.debt: list[int] = []
        """That of the last message: not empty until it has gone back. Whoever empties it, does that."""
        self._is_kept = False
        self._memory = memory
        self._state = memoryview(memory)[: MAPPED_AT + 1]
        self._state[MAPPED_AT] = 1
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + DATA
        """Where its buffers begin."""
        # Views of a buffer keep what exports it, and nothing else. So each message gets an exporter of its own.
        self._lease_type: Any = type("_Lease", (ctypes.c_char * len(memory),), {})
        self._lease: weakref.ref[Any] | None = None

    def forget(self) -> None:
        self._state[MAPPED_AT] = 0

    def keep(self) -> None:
        self._is_kept = True
        self._state[LENT_AT] = KEPT

    def is_shown(self) -> bool:
        return self._lease is not None and self._lease() is not None

    def is_in_use(self) -> bool:
        return bool(self.holders) or self.is_shown()

    def is_left_to(self, holder: Loan) -> bool:
        """Whether it is in nobody's use but that of this one, who holds it."""
        return not self.is_shown() and self.holders == [holder] and not self._is_kept

    def views(self, sizes: Sequence[int]) -> list[memoryview]:
        found = (aligned(sizes[0]),) if len(sizes) == 1 else ends(sizes)
        filled = found[-1]
        shown = self._lease  # as `is_in_use`, with fewer steps
        if DATA + filled > len(self._memory) or self.holders or (shown is not None and shown() is not None):
            raise OSError(f"shared memory of {len(self._memory)} bytes, in use or not, was said to hold {sizes}")
        self.used = monotonic()
        self.filled = filled
        lease = self._lease_type.from_buffer(self._memory)
        debt = self.debt = [self.number]
        self._lease = weakref.ref(lease, lambda _: self.hand_back(debt))
        data = memoryview(lease).cast("B")
        return [data[DATA : DATA + sizes[0]]] if len(sizes) == 1 else views(data[DATA:], begins(found), sizes)

    def raw(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Views that keep nothing in use."""
        return views(memoryview(self._memory)[DATA:], offsets, sizes)

    def hand_back(self, debt: list[int]) -> None:
        """Once it is not in use any more, and if that has not been done.

        Two may come here for the same message, and one of them so late that the next message is there.
        """
        if self.is_in_use():
            return
        try:
            debt.pop()
        except IndexError:
            return
        if not self._is_kept:
            self._state[LENT_AT] = FREE


def _address(buffer: memoryview) -> int:
    """Where it is. 0 if that cannot be known: nothing is there."""
    if buffer.readonly:
        numpy: Any = sys.modules.get("numpy")
        return 0 if numpy is None else int(numpy.frombuffer(buffer, numpy.uint8).__array_interface__["data"][0])
    import ctypes  # not at the head, as for `_Mapping`

    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
