"""Memory that two processes on one host share: large data is copied in by its sender, and never out again.

A *lender* copies the buffers of a message into a segment of its own and tells the other side which one it is. The
*borrower* there opens the segment through the lender's process (`/proc/<process>/fd/<descriptor>`), maps it once, and
hands out views. When the last view of a message is gone, it says so by a byte in the segment itself, and the lender
uses the segment again: handing memory to and fro takes no message, and no page is ever new twice.

    offset  size  what
    0       16    the lender's token: who opens another file by mistake sees that
    16      4     the segment's number, little-endian
    20      1     1 while it is lent, 2 if the borrower never gives it back
    21      1     1 while the borrower has it mapped
    4096    ...   the buffers, each at a multiple of `ALIGNMENT`

Rules
- A segment is a sealed memfd: it has no name, so a process that is killed leaves nothing behind; it cannot shrink, so
  nobody who has mapped it can be hurt by the other side.
- A segment is for one borrower, and holds one message at a time, which is the borrower's own until it lets go of it.
- What the lender keeps, in case that it must be sent again, stays as it is until the lender lets go of it, unless the
  borrower, who has it then, writes into it.
- Where a segment cannot be made, or what may be lent is lent, `lend` gives None, and the data takes another way.
- Nothing here waits. Any thread may call anything, a signal handler or a finalizer too in the midst of anything; views
  are let go of in any thread, even inside the collector.
- Not Linux, another user, another container: `Borrower.check` finds out, before anything is lent.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final, NamedTuple

ALIGNMENT: Final = 64
TOKEN_SIZE: Final = 16
MOST_SEGMENTS: Final = 16
"""So many has one lender at most."""

_DATA: Final = mmap.PAGESIZE
_NUMBER: Final = struct.Struct("<I")
_NUMBER_AT: Final = TOKEN_SIZE
_LENT_AT: Final = 20
_MAPPED_AT: Final = 21
_FREE: Final = 0
_LENT: Final = 1
_KEPT: Final = 2
_LEAST: Final = 1 << 18
_STEPS: Final = 8
"""Sizes of segments per doubling: the more there are the less is wasted, and the less often one fits again."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_WITHOUT_THE_LOCK: Final = 1 << 20
"""From this size on a copy is made with the interpreter let go of, if numpy is there to do it."""
_AT_ONCE: Final = 1 << 22
"""So much memory is given up at once, as no other thread runs meanwhile."""


class Place(NamedTuple):
    """Where the buffers of a message are."""

    descriptor: int
    """The segment's, in the lender's process."""
    number: int
    """The segment's own: descriptors are used again, numbers are not."""


class Pool:
    """What one worker lends, to all its peers together."""

    def __init__(self, limit: int, most: int, on_trouble: Callable[[str], object]) -> None:
        """At most `limit` bytes in `most` segments. `on_trouble` is told, once, why there are none."""
        self.token = secrets.token_bytes(TOKEN_SIZE)
        """Every segment of this worker begins with it."""
        self._left = limit
        self._segments_left = most
        self._on_trouble = on_trouble
        self._lock = threading.RLock()
        self._numbers = 0
        self._probe: _Segment | None = None
        self._is_broken = limit <= 0 or not hasattr(os, "memfd_create")

    def probe(self) -> int:
        """The descriptor of a segment for the other side to try; -1 if nothing can be lent."""
        with self._lock:
            if self._probe is None:
                probe = self.make(0)
                if self._probe is None:
                    self._probe = probe
                elif probe is not None:  # a signal handler was faster
                    probe.close()
                if self._is_broken:  # closed meanwhile
                    self.close()
            return self._probe.descriptor if self._probe is not None else -1

    def make(self, capacity: int) -> _Segment | None:
        """A new segment for that many bytes, or None."""
        with self._lock:
            if self._is_broken or self._left < capacity or not self._segments_left:
                return None
            self._left -= capacity
            self._segments_left -= 1
            self._numbers += 1
            number = self._numbers
        try:
            return _Segment(capacity, self.token, number)
        except (OSError, ValueError) as error:
            self.give_back(capacity)
            with self._lock:
                was_broken, self._is_broken = self._is_broken, True
            if not was_broken:
                self._on_trouble(f"no shared memory can be had ({error})")
            return None
        except BaseException:  # Ctrl-C
            self.give_back(capacity)
            raise

    def give_back(self, capacity: int) -> None:
        """A segment of that many bytes is no more."""
        with self._lock:
            self._left += capacity
            self._segments_left += 1

    def close(self) -> None:
        """Lends no more. Its lenders are closed by those who have them. May be called twice."""
        self._is_broken = True
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.close()


class Lender:
    """The segments that are lent to one peer."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._segments: list[_Segment] = []
        self._lock = threading.RLock()
        self._closed = False
        self.lent = 0
        """Bytes that were lent so far."""

    def lend(self, buffers: Sequence[memoryview]) -> Place | None:
        """Copies the buffers into a segment; None if there is none for them."""
        segment = self._lent(buffers)
        return None if segment is None else Place(segment.descriptor, segment.number)

    def keep(self, buffers: Sequence[memoryview]) -> tuple[Place, list[memoryview]] | None:
        """As `lend`, with views of the copies: the segment is not used again while one of them is there."""
        segment = self._lent(buffers)
        if segment is None:
            return None
        try:
            kept = segment.keep([buffer.nbytes for buffer in buffers])
            return Place(segment.descriptor, segment.number), kept
        except BaseException:
            segment.take_back()
            raise

    def take_back(self, place: Place) -> None:
        """What was lent there was not told to the other side."""
        with self._lock:
            for segment in self._segments:
                if segment.number == place.number:
                    segment.take_back()

    def _lent(self, buffers: Sequence[memoryview]) -> _Segment | None:
        total = _ends(tuple(buffer.nbytes for buffer in buffers))[-1]
        segment = None
        try:
            with self._lock:
                segment = self._claimed(total)
                if segment is None and self._add(total):
                    segment = self._claimed(total)
            if segment is None:
                return None
            segment.fill(buffers)
        except BaseException:
            if segment is not None:
                segment.take_back()
            raise
        self.lent += total
        return segment

    def _claimed(self, total: int) -> _Segment | None:
        """The least of those that are free and fit; lent from now on."""
        while True:
            fitting = (each for each in self._segments if each.capacity >= total and each.is_free())
            least = min(fitting, key=lambda segment: segment.capacity, default=None)
            if least is None:
                return None
            least.used = monotonic()
            if least.claim() == _FREE:
                return least

    def _add(self, total: int) -> bool:
        """Makes a segment, and gives up others for it if need be; whether there is one more."""
        if self._closed or (len(self._segments) >= MOST_SEGMENTS and not self._drop_one()):
            return False
        capacity = _rounded(total)
        segment = self._pool.make(capacity)
        while segment is None and self._drop_one():
            segment = self._pool.make(capacity)
        if segment is not None:
            self._segments.append(segment)
        return segment is not None

    def _drop_one(self) -> bool:
        """Gives up the one that is not lent for the longest; whether there was one."""
        unused = (each for each in self._segments if each.state() != _LENT and not each.is_kept())
        idle = sorted(unused, key=lambda segment: segment.used)
        for segment in idle:
            state = self._withdrawn(segment)
            if state != _LENT:
                self._give_up(segment, state)
                return True
        return False

    def _withdrawn(self, segment: _Segment) -> int:
        """Takes it out, unless it is lent; what it was."""
        state = segment.claim()
        if state != _LENT:
            self._segments.remove(segment)
        return state

    def _give_up(self, segment: _Segment, state: int) -> None:
        if state == _FREE and not segment.is_kept():
            segment.empty()
        segment.close()
        self._pool.give_back(segment.capacity)

    def has_unseen(self) -> bool:
        """Whether the other side has not even opened some of what was lent: it could not any more after `close`."""
        with self._lock:
            return any(each.state() == _LENT and not each.is_mapped() for each in self._segments)

    def sweep(self, before: float) -> None:
        """Gives up the segments that are free and were last used before that moment, and those that never come back."""
        with self._lock:
            idle = [
                each for each in self._segments if (each.state() == _KEPT or each.used < before) and not each.is_kept()
            ]
            states = [self._withdrawn(segment) for segment in idle]
        for segment, state in zip(idle, states, strict=True):  # not under the lock: it takes its time
            if state != _LENT:
                self._give_up(segment, state)

    def close(self) -> None:
        """Lends no more. What the other side has of it stays its own. May be called twice."""
        with self._lock:
            self._closed = True
            while self._segments:
                segment = self._segments.pop()
                self._give_up(segment, segment.claim())

    def abandon(self) -> None:
        """In a forked child: gives the descriptors back; the segments are the parent's."""
        self._closed = True
        for segment in self._segments:
            segment.close()
        self._segments = []


class _Segment:
    """One piece of shared memory, at the lender's."""

    def __init__(self, capacity: int, token: bytes, number: int) -> None:
        """Raises `OSError` if it cannot be had."""
        self.capacity = capacity
        self.number = number
        self.used = 0.0
        self.descriptor = os.memfd_create("farcall", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, _DATA + capacity)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            # Kept by its views alone: it is unmapped when the last of them is gone, a copy that is under way too.
            self._bytes = memoryview(mmap.mmap(self.descriptor, _DATA + capacity))
        except BaseException:
            os.close(self.descriptor)
            raise
        self._kept: weakref.ref[Any] | None = None
        self._bytes[:_NUMBER_AT] = token
        _NUMBER.pack_into(self._bytes, _NUMBER_AT, number)

    def claim(self) -> int:
        """Marks it as lent; what it was before.

        In one step, between which no signal handler or finalizer runs: that may lend, too.
        """
        state = self._bytes[_LENT_AT]
        if state != _LENT:
            self._bytes[_LENT_AT] = _LENT
        return state

    def take_back(self) -> None:
        self._bytes[_LENT_AT] = _FREE

    def state(self) -> int:
        return self._bytes[_LENT_AT]

    def is_free(self) -> bool:
        return self._bytes[_LENT_AT] == _FREE and not self.is_kept()

    def keep(self, sizes: Sequence[int]) -> list[memoryview]:
        """Views of the buffers in it, of which it knows when they are gone."""
        import ctypes  # not at the head, as for `_Mapping`

        lease_type: Any = type("_Kept", (ctypes.c_char * len(self._bytes),), {})
        lease = lease_type.from_buffer(self._bytes.obj)
        self._kept = weakref.ref(lease)
        return _views(memoryview(lease).cast("B")[_DATA:], sizes)

    def is_kept(self) -> bool:
        return self._kept is not None and self._kept() is not None

    def is_mapped(self) -> bool:
        return self._bytes[_MAPPED_AT] != 0

    def fill(self, buffers: Sequence[memoryview]) -> None:
        data = self._bytes[_DATA:]
        begin = 0
        for buffer, end in zip(buffers, _ends(tuple(buffer.nbytes for buffer in buffers)), strict=True):
            _copy(data[begin : begin + buffer.nbytes], buffer)
            begin = end

    def empty(self) -> None:
        """Gives its memory back at once: the other side may have it mapped for a while."""
        memory: Any = self._bytes.obj
        for at in range(_DATA, len(memory), _AT_ONCE):
            memory.madvise(mmap.MADV_REMOVE, at, min(_AT_ONCE, len(memory) - at))

    def close(self) -> None:
        os.close(self.descriptor)


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
                (number,) = _NUMBER.unpack_from(memory, _NUMBER_AT)
                if number != place.number:
                    raise OSError(f"shared memory {place.descriptor} is number {number}, not {place.number}")
                mapping = self._mappings[place.number] = _Mapping(memory)
            return mapping.views(sizes)

    def _open(self, descriptor: int) -> mmap.mmap:
        path = f"/proc/{self._process}/fd/{descriptor}"
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            found = os.fstat(opened)
            # What is no memfd has no seals, and raises; what could still shrink would end this process one day.
            seals = fcntl.fcntl(opened, fcntl.F_GET_SEALS) if stat.S_ISREG(found.st_mode) else 0
            if not seals & fcntl.F_SEAL_SHRINK or found.st_size < _DATA:
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
                if mapping.is_in_use():
                    mapping.keep()
                    del self._mappings[number]


class _Mapping:
    """One segment, at the borrower's."""

    def __init__(self, memory: mmap.mmap) -> None:
        import ctypes  # not at the head: only who gets large data needs it

        self.used = 0.0
        self._is_kept = False
        self._memory = memory
        self._state = memoryview(memory)[: _MAPPED_AT + 1]
        self._state[_MAPPED_AT] = 1
        # Views of a buffer keep what exports it, and nothing else. So each message gets an exporter of its own.
        self._lease_type: Any = type("_Lease", (ctypes.c_char * len(memory),), {})
        self._lease: weakref.ref[Any] | None = None

    def forget(self) -> None:
        self._state[_MAPPED_AT] = 0

    def keep(self) -> None:
        self._is_kept = True
        self._state[_LENT_AT] = _KEPT

    def is_in_use(self) -> bool:
        return self._lease is not None and self._lease() is not None

    def views(self, sizes: Sequence[int]) -> list[memoryview]:
        ends = _ends(sizes)
        if _DATA + ends[-1] > len(self._memory) or self.is_in_use():
            raise OSError(f"shared memory of {len(self._memory)} bytes, in use or not, was said to hold {sizes}")
        self.used = monotonic()
        lease = self._lease_type.from_buffer(self._memory)
        self._lease = weakref.ref(lease, self._returned)
        return _views(memoryview(lease).cast("B")[_DATA:], sizes)

    def _returned(self, _: object) -> None:
        if not self._is_kept:
            self._state[_LENT_AT] = _FREE


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _ends(sizes: Sequence[int]) -> list[int]:
    """Where each buffer's place ends."""
    end = 0
    ends = []
    for size in sizes:
        end += _aligned(size)
        ends.append(end)
    return ends


def _views(data: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """The buffers of these sizes in a segment's data."""
    begins = [end - _aligned(size) for end, size in zip(_ends(sizes), sizes, strict=True)]
    return [data[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]


def _rounded(total: int) -> int:
    """A capacity for that many bytes which others will need, too."""
    if total <= _LEAST:
        return _LEAST
    step = (1 << (total - 1).bit_length() - 1) // _STEPS
    return -(-total // step) * step


def _copy(target: memoryview, source: memoryview) -> None:
    numpy: Any = sys.modules.get("numpy") if target.nbytes >= _WITHOUT_THE_LOCK else None
    if numpy is None:
        target[:] = source
    else:
        numpy.copyto(numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8))
