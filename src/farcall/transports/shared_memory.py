"""Memory that two processes on one host share, as who lends it sees it: large data is copied in, and never out again.

A *lender* copies the buffers of a message into a segment of its own and tells the other side which one it is. The
*borrower* there (`borrowed_memory`) maps it once, and hands out views. When the last view of a message is gone, it says
so by a byte in the segment itself (`segments`), and the lender uses the segment again: handing memory to and fro takes
no message, and no page is ever new twice.

What the borrower sends back of what it was lent, and has nothing of any more, is *returned*: the lender shows it where
it lies, in its own segment, and uses that again when the last of these views is gone.

Rules
- A segment is a sealed memfd: it has no name, so a process that is killed leaves nothing behind; it cannot shrink, so
  nobody who has mapped it can be hurt by the other side.
- A segment is for one borrower, and holds one message at a time, which is the borrower's own until it lets go of it.
- What the lender keeps, in case that it must be sent again, stays as it is until the lender lets go of it, unless the
  borrower, who has it then, writes into it.
- Only what is lent can be returned, by whom it was lent to. That nobody there writes into it any more is believed, as
  it is of what was handed back.
- What is returned and then kept takes segments from the next messages: `is_short` says when that is too many.
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
import threading
import weakref
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final

from farcall.transports.segments import (
    DATA,
    FREE,
    KEPT,
    LENT,
    LENT_AT,
    MAPPED_AT,
    NUMBER,
    NUMBER_AT,
    TOKEN_SIZE,
    Place,
    aligned,
    are_apart,
    begins,
    copy,
    ends,
    views,
)

MOST_SEGMENTS: Final = 16
"""So many has one lender at most."""

_MOST_RINGS: Final = 8
"""At one worker."""
_LEAST: Final = 1 << 18
_STEPS: Final = 8
"""Sizes of segments per doubling: the more there are the less is wasted, and the less often one fits again."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_AT_ONCE: Final = 1 << 22
"""So much memory is given up at once, as no other thread runs meanwhile."""


class Pool:
    """What one worker lends, to all its peers together."""

    def __init__(self, limit: int, most: int, on_trouble: Callable[[str], object]) -> None:
        """At most `limit` bytes in `most` segments. `on_trouble` is told, once, why there are none."""
        self.token = secrets.token_bytes(TOKEN_SIZE)
        """Every segment of this worker begins with it."""
        self._limit, self._left = limit, limit
        self._most, self._segments_left = most, most
        self._ringed: set[object] = set()  # who has rings
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
            self._count_back(capacity)
            with self._lock:
                was_broken, self._is_broken = self._is_broken, True
            if not was_broken:
                self._on_trouble(f"no shared memory can be had ({error})")
            return None
        except BaseException:  # Ctrl-C
            self._count_back(capacity)
            raise

    def _count_back(self, capacity: int) -> None:
        with self._lock:
            self._left += capacity
            self._segments_left += 1

    def give_back(self, segment: _Segment) -> None:
        """It is no more. May be said twice."""
        with self._lock:
            if segment.is_counted:
                segment.is_counted = False
                self._left += segment.capacity
                self._segments_left += 1

    def may_have_rings(self, connection: object) -> bool:
        """Whether one more connection may have rings, the memory of which is kept as long as it is there."""
        with self._lock:
            if connection in self._ringed or len(self._ringed) >= _MOST_RINGS:
                return False
            self._ringed.add(connection)
            return True

    def take_rings_back(self, connection: object) -> None:
        """It has no rings any more, if it had any."""
        self._ringed.discard(connection)

    def is_short(self) -> bool:
        """Whether more than half of it is used."""
        return 2 * self._left < self._limit or 2 * self._segments_left < self._most

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
        self.lent = self.returned = 0
        """Bytes that were lent so far, and bytes that came back as they were lent, without a copy."""

    def lend(self, buffers: Sequence[memoryview]) -> Place | None:
        """Copies the buffers into a segment; None if there is none for them."""
        segment = self._lent(buffers)
        return None if segment is None else segment.place

    def keep(self, buffers: Sequence[memoryview]) -> tuple[Place, list[memoryview]] | None:
        """As `lend`, with views of the copies: the segment is not used again while one of them is there."""
        segment = self._lent(buffers)
        if segment is None:
            return None
        try:
            kept = segment.keep([buffer.nbytes for buffer in buffers])
            return segment.place, kept
        except BaseException:
            segment.take_back()
            raise

    def take_back(self, place: Place) -> None:
        """What was lent there was not told to the other side."""
        with self._lock:
            for segment in self._segments:
                if segment.number == place.number:
                    segment.take_back()

    def take_returned(self, number: int, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """What the other side has returned, in that segment at these places: ours again.

        Raises `OSError` if that is not lent to it, or cannot be there.
        """
        with self._lock:
            for segment in self._segments:
                if segment.number == number and segment.state() == LENT:
                    break
            else:
                raise OSError(f"number {number} is not lent to it")
            if not are_apart(offsets, sizes, segment.capacity):
                raise OSError(f"shared memory of {segment.capacity} bytes was said to hold {sizes} at {offsets}")
            returned = segment.show(offsets, sizes)
            segment.take_back()  # after that: it is not free while somebody is shown what it holds
        self.returned += sum(sizes)
        return returned

    def is_short(self) -> bool:
        """Whether what was returned, and is there still, leaves too little for the next messages."""
        if 2 * len(self._segments) > MOST_SEGMENTS:
            shown = [segment for segment in self._segments if segment.is_shown()]
            if 2 * len(shown) > MOST_SEGMENTS:
                return True
        return self._pool.is_short()

    def _lent(self, buffers: Sequence[memoryview]) -> _Segment | None:
        total = aligned(buffers[0].nbytes) if len(buffers) == 1 else ends([buffer.nbytes for buffer in buffers])[-1]
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
            least: _Segment | None = None
            for each in self._segments:  # not min(): it would take as long as the rest
                if each.capacity >= total and (least is None or each.capacity < least.capacity) and each.is_free():
                    least = each
            if least is None:
                return None
            least.used = monotonic()
            if least.claim() == FREE:
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
        unused = (each for each in self._segments if each.state() != LENT and not each.is_kept())
        idle = sorted(unused, key=lambda segment: segment.used)
        for segment in idle:
            state = self._withdrawn(segment)
            if state != LENT:
                self._give_up(segment, state)
                return True
        return False

    def _withdrawn(self, segment: _Segment) -> int:
        """Takes it out, unless it is lent; what it was."""
        state = segment.claim()
        if state != LENT:
            self._segments.remove(segment)
        return state

    def _give_up(self, segment: _Segment, state: int) -> None:
        if state == FREE and not segment.is_kept():
            segment.empty()
        segment.close()
        self._pool.give_back(segment)

    def has_unseen(self) -> bool:
        """Whether the other side has not even opened some of what was lent: it could not any more after `close`."""
        with self._lock:
            return any(each.state() == LENT and not each.is_mapped() for each in self._segments)

    def sweep(self, before: float) -> None:
        """Gives up the segments that are free and were last used before that moment, and those that never come back."""
        with self._lock:
            idle = [
                each for each in self._segments if (each.state() == KEPT or each.used < before) and not each.is_kept()
            ]
            states = [self._withdrawn(segment) for segment in idle]
        for segment, state in zip(idle, states, strict=True):  # not under the lock: it takes its time
            if state != LENT:
                self._give_up(segment, state)

    def pin(self) -> None:
        """This process forks: the child has what was returned and is shown now, too, and must not see it change.

        So it is not used again: it is there as long as one of the two processes has it.
        """
        with self._lock:
            for segment in [each for each in self._segments if each.is_shown()]:
                self._segments.remove(segment)
                segment.close()
                self._pool.give_back(segment)

    def close(self) -> None:
        """Lends no more. What the other side has of it stays its own. May be called twice."""
        with self._lock:
            self._closed = True
            while self._segments:
                segment = self._segments[-1]
                self._give_up(segment, segment.claim())  # Ctrl-C may come in there: then it is done again
                del self._segments[-1:]

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
        self.is_counted = True  # by the pool
        self.descriptor = os.memfd_create("farcall", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, DATA + capacity)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            # Kept by its views alone: it is unmapped when the last of them is gone, a copy that is under way too.
            self._bytes = memoryview(mmap.mmap(self.descriptor, DATA + capacity))
            self.place = Place(self.descriptor, number)
            self._lease_type: Any = None
            self._kept: weakref.ref[Any] | None = None
            self._shown: weakref.ref[Any] | None = None
            self._bytes[:NUMBER_AT] = token
            NUMBER.pack_into(self._bytes, NUMBER_AT, number)
        except BaseException:
            os.close(self.descriptor)
            raise

    def claim(self) -> int:
        """Marks it as lent; what it was before.

        In one step, between which no signal handler or finalizer runs: that may lend, too.
        """
        state = self._bytes[LENT_AT]
        if state != LENT:
            self._bytes[LENT_AT] = LENT
        return state

    def take_back(self) -> None:
        self._bytes[LENT_AT] = FREE

    def state(self) -> int:
        return self._bytes[LENT_AT]

    def is_free(self) -> bool:
        if self._bytes[LENT_AT] != FREE:
            return False
        kept, shown = self._kept, self._shown  # as `is_kept`, with fewer steps
        return (kept is None or kept() is None) and (shown is None or shown() is None)

    def keep(self, sizes: Sequence[int]) -> list[memoryview]:
        """Views of the buffers in it, of which it knows when they are gone."""
        lease = self._lease()
        self._kept = weakref.ref(lease)
        return views(memoryview(lease).cast("B")[DATA:], begins(ends(sizes)), sizes)

    def show(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """The same for what was returned."""
        lease = self._lease()
        self._shown = weakref.ref(lease)
        data = memoryview(lease).cast("B")
        if len(sizes) == 1:
            begin = DATA + offsets[0]
            return [data[begin : begin + sizes[0]]]
        return views(data[DATA:], offsets, sizes)

    def _lease(self) -> Any:
        """All of it: views keep what exports it, and nothing else. So each message has an exporter of its own."""
        if self._lease_type is None:
            import ctypes  # not at the head: only who gets large data needs it

            self._lease_type = type("_Lease", (ctypes.c_char * len(self._bytes),), {})
        return self._lease_type.from_buffer(self._bytes.obj)

    def is_kept(self) -> bool:
        return (self._kept is not None and self._kept() is not None) or self.is_shown()

    def is_shown(self) -> bool:
        return self._shown is not None and self._shown() is not None

    def is_mapped(self) -> bool:
        return self._bytes[MAPPED_AT] != 0

    def fill(self, buffers: Sequence[memoryview]) -> None:
        begin = DATA
        for buffer in buffers:
            size = buffer.nbytes
            copy(self._bytes[begin : begin + size], buffer)
            begin += aligned(size)

    def empty(self) -> None:
        """Gives its memory back at once: the other side may have it mapped for a while."""
        memory: Any = self._bytes.obj
        for at in range(DATA, len(memory), _AT_ONCE):
            memory.madvise(mmap.MADV_REMOVE, at, min(_AT_ONCE, len(memory) - at))

    def close(self) -> None:
        """May be called twice."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _rounded(total: int) -> int:
    """A capacity for that many bytes which others will need, too."""
    if total <= _LEAST:
        return _LEAST
    step = (1 << (total - 1).bit_length() - 1) // _STEPS
    return -(-total // step) * step
