"""Shared segments: shared memory in which two workers on one host send large buffers to each other.

The *writer* copies the buffers of a frame into one of its segments, and names the segment in the frame. The *reader*
maps the segment once, and uses the buffers as views of it. When the program at the reader has dropped the last view,
the reader clears a byte in the segment, and the writer can use the segment again. So segments are reused without a
message, and the kernel allocates each page once.

If a function changes an array and returns it, the result is sent back without a copy: if nothing else at the reader
refers to the buffers when they are sent back, the reply only names the segment and the offsets (`ReturnableBuffers`).
The writer then uses the buffers in its own segment.

A frame that goes to several readers has its buffers in one *common segment*, which is written once. Each reader maps
it privately: what it changes, the others do not see. The frame also names a *lease*, a segment without buffers that is
for this reader alone. The reader keeps the lease in use as long as it has views of the common segment. So the lease
has the life that a segment with the buffers would have, and the common segment is free when all its leases are.

Layout of a segment

    offset  size  contents
    0       16    the writer's token, by which a reader notices that it has opened a wrong file
    16      4     the number of the segment, little-endian
    20      1     0 free; 1 in use; 2 kept by the reader, never to be used again
    21      1     1 while the reader has it mapped
    4096    ...   the buffers, each at a multiple of 64

Rules
- A segment is a sealed memfd. It has no name, so a killed process leaves no file behind. It cannot shrink, so neither
  end can crash the other with SIGBUS.
- A segment is for one reader and holds the buffers of one frame at a time. A common segment has several readers, one
  lease for each, and is never sent back.
- The reader can write anything into a segment, including the byte that says whether it is in use. So the writer also
  remembers which segments it has sent. A reader can return each of them, or request its contents, only once.
- A reader opens a segment through `/proc/<process>/fd/<descriptor>`. That this works is checked before any segment is
  sent (`SegmentReader.check`). If a segment cannot be opened later, for example because the reader has no descriptors
  left, its contents are sent without shared memory (`SegmentWriter.contents`).
- If no segment is available, `write` returns None, and the buffers are sent without shared memory. No thread waits for
  a segment. After a failure to create one, the next attempt is made `RETRY_S` later.
- Views may be dropped in any thread, also by the garbage collector.
- A fork copies views. A segment that a child may refer to is never written again (`prepare_fork`).
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import secrets
import stat
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import monotonic
from types import TracebackType
from typing import Any, Final, NamedTuple

RETRY_S: Final = 1.0
"""Seconds between a failure to create a segment and the next attempt."""
_WARN_INTERVAL_S: Final = 60.0
"""Seconds between two warnings of one pool, at least."""
MAX_SEGMENTS_PER_LINK: Final = 16
"""The most segments that this worker has for one peer."""
_MAX_MAPPINGS: Final = 2 * MAX_SEGMENTS_PER_LINK
"""The most mappings of one reader. More than segments of a link: the writer may drop segments that are still mapped."""
_MIN_CAPACITY: Final = 1 << 18
"""The bytes of the smallest segment that is made for buffers."""
_SIZES_PER_DOUBLING: Final = 8
"""The number of different capacities between a size and its double. More waste less memory, but are reused less."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FREE_STEP_BYTES: Final = 1 << 22
"""How much memory is freed at once. No other Python thread runs meanwhile."""

_ALIGNMENT: Final = 64
TOKEN_SIZE: Final = 16
_NUMBER: Final = struct.Struct("<I")
_NUMBER_AT: Final = TOKEN_SIZE
_STATE_AT: Final = 20
_MAPPED_AT: Final = 21
_DATA_AT: Final = 4096
_FREE: Final = 0
_IN_USE: Final = 1
_KEPT: Final = 2

_RELEASE_LOCK_BYTES: Final = 1 << 20
"""From this size on, copies release the interpreter's lock, if numpy is imported."""
_NO_ACCESS: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EACCES, errno.EPERM))
"""The error numbers that say that this process may not, or cannot now, open a segment that may be valid."""


class Place(NamedTuple):
    """Which segment, a block of shared memory, has the buffers of a frame.

    The sender puts this into the frame, and the receiver opens the segment.

    Attributes:
        descriptor: The file descriptor of the segment in the process of the sender.
        number: The number of the segment. Unlike descriptors, numbers are not reused.
    """

    descriptor: int
    number: int


class CannotOpenError(Exception):
    """This process cannot open or map a segment now, for example because it has no descriptors left.

    The segment itself may be valid. A segment that does not exist raises `OSError` instead.
    """


class SegmentPool:
    """Creates the segments (blocks of shared memory) that one worker writes into. Limits their number and total size.

    A segment counts towards the limits from `create` to `remove`. All methods may be called in any thread.

    Args:
        max_bytes: The most bytes of all segments together. 0 turns shared memory off: `create` then returns None.
        max_segments: The most segments at a time. Each needs a file descriptor.
        warn: Called with a message when a segment cannot be created, at most once a minute.
    """

    def __init__(self, max_bytes: int, max_segments: int, warn: Callable[[str], object]) -> None:
        self.token = secrets.token_bytes(TOKEN_SIZE)
        """The first bytes of every segment of this worker."""
        self._max_bytes, self._bytes_left = max_bytes, max_bytes
        self._max_segments, self._segments_left = max_segments, max_segments
        self._warn = warn
        self._lock = threading.RLock()
        self._last_number = 0
        self._probe: _WriterSegment | None = None
        self._common: list[CommonSegment] = []
        self.is_enabled = max_bytes > 0 and hasattr(os, "memfd_create")
        """Whether shared memory may be used."""
        self._retry_at = 0.0
        self._is_failing = False
        self._warned_at = -_WARN_INTERVAL_S

    def probe_descriptor(self) -> int:
        """Returns the file descriptor of an empty segment, which a peer can try to open.

        The first call creates this segment. Later calls return the same descriptor.

        Returns:
            The descriptor; -1 if shared memory is turned off, or if the segment cannot be created now.
        """
        with self._lock:
            if self._probe is None and self.is_enabled:
                probe = self.create(0)
                if self._probe is None and self.is_enabled:
                    self._probe = probe
                elif probe is not None:  # a signal handler has created one, or closed the pool
                    probe.close()
            return self._probe.descriptor if self._probe is not None else -1

    def create(self, capacity: int) -> _WriterSegment | None:
        """Creates a segment, which counts towards the limits until `remove` is called for it.

        Args:
            capacity: How many bytes of buffers the segment can hold; 0 for a segment that is only opened as a test.

        Returns:
            The segment. None if the pool is closed or turned off, if a limit of the pool would be exceeded, if the
            system cannot create a segment, or if the last failure to create one is less than `RETRY_S` ago.
        """
        with self._lock:
            if not self.is_enabled or self._bytes_left < capacity or not self._segments_left:
                return None
            if self._is_failing and monotonic() < self._retry_at:
                return None
            self._bytes_left -= capacity
            self._segments_left -= 1
            self._last_number += 1
            number = self._last_number
        try:
            segment = _WriterSegment(capacity, self.token, number)
        except (OSError, ValueError, ImportError) as error:
            self._count_back(capacity)
            self._note_failure(error)
            return None
        except BaseException:
            self._count_back(capacity)
            raise
        self._is_failing = False
        return segment

    def write_common(self, buffers: Sequence[memoryview]) -> CommonSegment | None:
        """Copies buffers into a free common segment: one that several readers map. Creates one if necessary.

        Does not wait for a segment to become free.

        Args:
            buffers: The buffers of one frame. If there are none, an empty segment is used all the same.

        Returns:
            The segment, with `is_held` set. It is not written again before the caller has set `is_held` to False, and
            all readers have dropped it. None if no segment is free and none can be created.
        """
        total = _end_of([buffer.nbytes for buffer in buffers])
        with self._lock:
            fitting = [each for each in self._common if each.segment.capacity >= total and each.is_free()]
            common = min(fitting, key=lambda each: each.segment.capacity, default=None)
            if common is None:
                segment = self.create(_rounded_capacity(total))
                if segment is None:
                    return None
                common = CommonSegment(segment)
                self._common.append(common)
            common.is_held = True
            common.leases.clear()
        try:
            common.segment.fill(buffers)
        except BaseException:
            common.is_held = False
            raise
        common.used_at = monotonic()
        return common

    def sweep_common(self, before: float) -> None:
        """Removes common segments (segments that several readers map) that were last written before `before`.

        A segment stays if it is being sent, or if a reader with an open link still uses it. Does nothing if there is
        none to remove.

        Args:
            before: A time of the monotonic clock.
        """
        with self._lock:
            idle = [each for each in self._common if each.used_at < before and each.is_over()]
            self._common = [each for each in self._common if each not in idle]
        for common in idle:
            common.segment.close()
            self.remove(common.segment)

    def _note_failure(self, error: Exception) -> None:
        """Warns that a segment could not be created because of `error`, and sets when to try again.

        Does not warn if the last attempt failed as well, or the last warning is less than a minute ago.
        """
        with self._lock:
            now = monotonic()
            must_warn = not self._is_failing and now >= self._warned_at + _WARN_INTERVAL_S
            if must_warn:
                self._warned_at = now
            self._is_failing = True
            self._retry_at = now + RETRY_S
        if must_warn:
            self._warn(f"no shared memory can be had ({error})")

    def _count_back(self, capacity: int) -> None:
        """Counts a segment of `capacity` bytes no longer towards the limits of the pool.

        `create` has counted the segment, and then could not create it.
        """
        with self._lock:
            self._bytes_left += capacity
            self._segments_left += 1

    def remove(self, segment: _WriterSegment) -> None:
        """Counts a segment no longer towards the limits of the pool. The segment itself is not closed.

        A second call for the same segment does nothing.
        """
        with self._lock:
            if segment.is_counted:  # no calls below: an interrupt in between would make the counts wrong
                segment.is_counted = False
                self._bytes_left += segment.capacity
                self._segments_left += 1

    def is_short(self) -> bool:
        """Returns whether more than half of the allowed bytes, or of the allowed segments, are in use."""
        return 2 * self._bytes_left < self._max_bytes or 2 * self._segments_left < self._max_segments

    def close(self) -> None:
        """Makes `create` return None from now on. Closes the segments that belong to the pool itself.

        These are the segments of `write_common`, and the empty one of `probe_descriptor`. Other segments stay usable,
        and their writers must close them. May be called twice.
        """
        self.is_enabled = False
        with self._lock:
            common, self._common = self._common, []
        for each in common:
            each.segment.close()
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.close()


class CommonSegment:
    """A segment (block of shared memory) whose buffers several readers map: the workers that get the same frame.

    Each reader has a *lease*, a small segment of its own. A lease is in use as long as its reader has views of the
    common segment.

    Args:
        segment: The segment. It must not be used for anything else.
    """

    def __init__(self, segment: _WriterSegment) -> None:
        self.segment = segment
        self.leases: list[Lease] = []
        """The leases that were sent since the segment was written."""
        self.is_held = False
        """Whether it is still being sent to readers."""
        self.used_at = 0.0
        """When it was last written, as a time of the monotonic clock."""

    def is_free(self) -> bool:
        """Returns whether the segment can be written: it is not being sent, and all readers have dropped it."""
        return not self.is_held and all(lease.is_free() for lease in self.leases)

    def is_over(self) -> bool:
        """Returns whether the segment can be removed: it is not being sent, and no reader will ask for its contents.

        A reader does not ask any more if it has dropped its views, or if the link to that reader is closed. In the
        second case it may still have views, so the segment must not be written again.
        """
        return not self.is_held and all(lease.is_free() or lease.is_closed() for lease in self.leases)

    def contents(self, sizes: Sequence[int]) -> list[memoryview]:
        """Returns one view of each buffer. `sizes` are the bytes of the buffers, in the order they were written.

        Raises `OSError` if the segment is too small for these sizes. Whether buffers of these sizes were written is not
        checked.
        """
        if self.segment.capacity < _end_of(sizes):
            raise OSError(f"buffers of {sizes} bytes are not in segment {self.segment.number}")
        return self.segment.contents(sizes)

    def has_lease(self, number: int) -> bool:
        """Returns whether a lease with this number was sent with the current contents of the segment.

        A lease is a small segment that one reader gets. It is in use as long as that reader has views of the common
        segment.
        """
        return any(lease.place.number == number for lease in self.leases)


class Lease:
    """A segment without buffers that shows whether one reader still has views of a common segment.

    A common segment is one whose buffers several readers map, each with a lease of its own. A lease is in use until its
    reader has dropped its views. The common segment can be written again when all its leases are free.

    Args:
        segment: The segment without buffers. It was marked as in use for the reader.
    """

    def __init__(self, segment: _WriterSegment) -> None:
        self.place = segment.place
        self._segment = segment
        self._views = segment.keep_views([0])  # while they exist, the segment is not used for another frame

    def is_free(self) -> bool:
        """Returns whether the reader has dropped its views of the common segment, so that this lease is not in use."""
        return self._segment.state() == _FREE

    def is_closed(self) -> bool:
        """Returns whether the link to the reader is closed. Then the lease may stay in use for ever."""
        return self._segment.descriptor < 0


class SegmentWriter:
    """The segments (blocks of shared memory) that this worker writes for one peer, the *reader*.

    It has none at first. Methods may be called in any thread.

    Args:
        pool: Creates the segments when they are needed.
    """

    def __init__(self, pool: SegmentPool) -> None:
        self._pool = pool
        self._segments: list[_WriterSegment] = []
        self._lock = threading.RLock()
        self._is_closed = False

    def write(self, buffers: Sequence[memoryview]) -> Place | None:
        """Copies buffers into one segment that is not in use, which is created if necessary. Does not wait.

        Args:
            buffers: The buffers of one frame. If there are none, an empty segment is used all the same.

        Returns:
            The segment, now in use, for the frame that tells the reader about it. None if all segments are in use and
            no other one can be created: then nothing was copied.
        """
        segment = self._write(buffers)
        return None if segment is None else segment.place

    def write_and_keep(self, buffers: Sequence[memoryview]) -> tuple[Place, list[memoryview]] | None:
        """Copies buffers into one segment that is not in use, and also returns views of the copies. Does not wait.

        The segment is not used for another frame while one of these views exists, even if the reader has freed the
        segment.

        Args:
            buffers: The buffers of one frame. If there are none, an empty segment is used, and there are no views.

        Returns:
            The segment, now in use, and one view for each buffer in the same order. None if all segments are in use and
            no other one can be created: then nothing was copied.
        """
        segment = self._write(buffers)
        if segment is None:
            return None
        try:
            return segment.place, segment.keep_views([buffer.nbytes for buffer in buffers])
        except BaseException:
            segment.free()
            raise

    def new_lease(self) -> Lease | None:
        """Returns a new lease for the reader: a segment without buffers, which is in use from now on.

        It is sent together with a common segment, one that several readers map. The lease becomes free when the reader
        has dropped its views of the common segment. Returns None if all segments are in use and no other one can be
        created.
        """
        with self._lock:
            segment = self._claim(0, _MIN_CAPACITY)  # not a larger one, which buffers may need
            if segment is None and self._add(0):
                segment = self._claim(0, _MIN_CAPACITY)
        return None if segment is None else Lease(segment)

    def free(self, number: int) -> None:
        """Makes a segment available for another frame.

        The peer must not have opened the segment for the frame that is in it now. This is not checked.

        Args:
            number: The number of the segment. Nothing happens if no segment of this writer has it.
        """
        with self._lock:
            for segment in self._segments:
                if segment.number == number:
                    segment.free()

    def contents(self, number: int, sizes: Sequence[int]) -> list[memoryview]:
        """Returns the buffers in a segment, for a peer that got a frame with the segment but cannot open it.

        The caller must call `free` when it does not need the views any more.

        Args:
            number: The number of the segment.
            sizes: The size of each buffer in bytes, in the order in which the buffers were written.

        Returns:
            One view of the segment for each size.

        Raises:
            OSError: No segment with that number is in use by the peer, or the segment is too small for these sizes.
        """
        with self._lock:
            for segment in self._segments:
                if segment.number == number and segment.is_handed_out() and segment.capacity >= _end_of(sizes):
                    return segment.contents(sizes)
        raise OSError(f"buffers of {sizes} bytes are not in segment {number}")

    def take_returned(self, number: int, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Returns the buffers that the peer has sent back in a segment of this writer, and frees the segment.

        The segment is used for another frame only after all views that are returned here were dropped.

        Args:
            number: The number of the segment.
            offsets: Where each buffer begins, in bytes from the first buffer byte of the segment.
            sizes: The size of each buffer in bytes, one for each offset.

        Returns:
            One writable view for each buffer, in the same order.

        Raises:
            OSError: No segment with that number is in use by the peer, or the buffers overlap, are not aligned to 64
                bytes, or reach beyond the end of the segment. The segment stays as it was.
        """
        with self._lock:
            for segment in self._segments:
                if segment.number == number and segment.is_handed_out():
                    break
            else:
                raise OSError(f"segment {number} was not given to it")
            if not _lie_apart(offsets, sizes, segment.capacity):
                raise OSError(f"segment {number} of {segment.capacity} bytes cannot hold {sizes} bytes at {offsets}")
            returned = segment.show_views(offsets, sizes)
            segment.free()  # only now: a segment with shown views is not free
            return returned

    def is_short(self) -> bool:
        """Returns whether buffers that were sent back should be copied, because segments are running out.

        Returns:
            True if the program keeps buffers of `take_returned` in more than half of `MAX_SEGMENTS_PER_LINK` segments,
            or if more than half of the bytes or segments that all links of this worker may have are in use.
        """
        if 2 * len(self._segments) > MAX_SEGMENTS_PER_LINK:
            shown = sum(segment.is_shown() for segment in self._segments)
            if 2 * shown > MAX_SEGMENTS_PER_LINK:
                return True
        return self._pool.is_short()

    def _write(self, buffers: Sequence[memoryview]) -> _WriterSegment | None:
        """Copies buffers into a free segment, which is created if necessary. Returns the segment, now in use.

        Returns None, with nothing copied, if all segments are in use and no other one can be created.
        """
        total = _end_of([buffer.nbytes for buffer in buffers])
        segment: _WriterSegment | None = None
        try:
            with self._lock:
                segment = self._claim(total)
                if segment is None and self._add(total):
                    segment = self._claim(total)
            if segment is not None:
                segment.fill(buffers)
        except BaseException:
            if segment is not None:
                segment.free()
            raise
        return segment

    def _claim(self, total: int, most: float = math.inf) -> _WriterSegment | None:
        """Marks the smallest free segment that holds `total` to `most` bytes as in use, and returns it.

        Returns None if there is none. The caller holds the lock.
        """
        while True:
            smallest: _WriterSegment | None = None
            for each in self._segments:
                is_better = total <= each.capacity <= most and (smallest is None or each.capacity < smallest.capacity)
                if is_better and each.is_free():
                    smallest = each
            if smallest is None:
                return None
            smallest.used_at = monotonic()
            if smallest.claim() == _FREE:  # else a signal handler or finalizer of this thread has taken it
                return smallest

    def _add(self, total: int) -> bool:
        """Creates a segment of at least `total` bytes. Returns whether it was created.

        Unused segments are removed first if this writer has `MAX_SEGMENTS_PER_LINK` segments, or if the pool creates
        none. Returns False if that does not help, or if the writer is closed.
        """
        if self._is_closed or (len(self._segments) >= MAX_SEGMENTS_PER_LINK and not self._drop_oldest()):
            return False
        capacity = _rounded_capacity(total)
        segment = self._pool.create(capacity)
        while segment is None and self._drop_oldest():
            segment = self._pool.create(capacity)
        if segment is not None:
            self._segments.append(segment)
        return segment is not None

    def _drop_oldest(self) -> bool:
        """Removes the unused segment whose last use is the longest ago, and returns True.

        Returns False, with nothing removed, if all segments are in use, or there are none.
        """
        unused = [each for each in self._segments if each.state() != _IN_USE and not each.has_views()]
        for segment in sorted(unused, key=lambda segment: segment.used_at):
            state = self._withdraw(segment)
            if state != _IN_USE:
                self._give_up(segment, state)
                return True
        return False

    def _withdraw(self, segment: _WriterSegment) -> int:
        """Removes a segment from this writer, unless it is in use. Returns the state that the segment had.

        If the state is `_IN_USE`, nothing was changed: a signal handler has just taken the segment. Otherwise, that is
        `_FREE` or `_KEPT` (the peer needs the segment for ever), the segment is marked as in use, and the caller must
        call `_give_up`.
        """
        state = segment.claim()
        if state != _IN_USE:
            self._segments.remove(segment)
        return state

    def _give_up(self, segment: _WriterSegment, state: int) -> None:
        """Closes a segment of this writer. The segment no longer counts towards the limits of the pool.

        `state` is the state that the segment had before it was marked as in use. If `state` is `_FREE` and this process
        has no views of the segment, the memory is freed at once.
        """
        if state == _FREE and not segment.has_views():
            segment.give_memory_back()
        segment.close()
        self._pool.remove(segment)

    def has_unopened(self) -> bool:
        """Returns whether the peer was sent a segment that it has not opened yet.

        After `close` the peer could not open it any more.
        """
        with self._lock:
            return any(each.is_handed_out() and not each.is_mapped() for each in self._segments)

    def sweep(self, before: float) -> None:
        """Removes free segments that were last used before `before`. Does nothing if there are none.

        Also removes segments that the peer keeps for ever, because a child that it forked may use them. Segments of
        which this process has views stay.

        Args:
            before: A time of the monotonic clock.
        """
        with self._lock:
            idle = [
                each
                for each in self._segments
                if not each.has_views() and (each.state() == _KEPT or (each.is_free() and each.used_at < before))
            ]
            states = [self._withdraw(segment) for segment in idle]
        for segment, state in zip(idle, states, strict=True):  # without the lock, because freeing memory takes time
            if state != _IN_USE:
                self._give_up(segment, state)

    def prepare_fork(self) -> None:
        """Closes and removes the segments of which the program still has buffers from `take_returned`.

        Must be called before this process forks: the segments are never written again, so the child does not see its
        inherited buffers change. Other segments stay as they are.
        """
        with self._lock:
            for segment in [each for each in self._segments if each.is_shown()]:
                self._segments.remove(segment)
                segment.close()
                self._pool.remove(segment)

    def close(self) -> None:
        """Closes and removes all segments. `write` returns None from then on. May be called twice.

        Buffers that the peer has mapped stay valid there.
        """
        with self._lock:
            self._is_closed = True
            while True:
                if not self._segments:  # not in the `while`: on 3.13, an interrupt there would not release the lock
                    break
                segment = self._segments[-1]
                self._give_up(
                    segment, segment.claim()
                )  # an interrupt may come in there: the next `close` does it again
                del self._segments[-1:]

    def abandon(self) -> None:
        """Closes the descriptors of all segments in a forked child. The parent continues to use the segments.

        `write` returns None in the child from then on.
        """
        self._lock = threading.RLock()
        self._is_closed = True
        segments, self._segments = self._segments, []
        for segment in segments:
            segment.close()


class _WriterSegment:
    """One segment (block of shared memory), mapped in the process that created it and writes into it.

    Its state is `_FREE`, `_IN_USE` (a frame with it was sent to the reader), or `_KEPT` (the reader needs it for ever).
    The constructor creates and maps the segment, which is free then.

    Args:
        capacity: How many bytes of buffers it can hold.
        token: The first bytes of the segment, `TOKEN_SIZE` of them, by which the reader recognizes it.
        number: A number that no other segment of the pool ever has.

    Raises:
        OSError: The system cannot create the segment.
    """

    def __init__(self, capacity: int, token: bytes, number: int) -> None:
        if capacity:
            import ctypes  # noqa: F401 (for `_new_exporter`, where it must not fail: importing takes descriptors)

        self.capacity = capacity
        self.number = number
        self.used_at = 0.0
        self.is_counted = True  # whether the pool counts it
        self._is_claimed = False  # whether this end has claimed it and not freed it
        self.descriptor = os.memfd_create("farcall", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, _DATA_AT + capacity)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            # Only views refer to the mapping, so that it is unmapped with the last view.
            self._bytes = memoryview(mmap.mmap(self.descriptor, _DATA_AT + capacity))
            self.place = Place(self.descriptor, number)
            self._exporter_type: Any = None
            self._kept: weakref.ref[Any] | None = None
            self._shown: weakref.ref[Any] | None = None
            self._bytes[:_NUMBER_AT] = token
            _NUMBER.pack_into(self._bytes, _NUMBER_AT, number)
        except BaseException:
            os.close(self.descriptor)
            raise

    def claim(self) -> int:
        """Marks the segment as in use, unless it is already. Returns its state before: `_FREE`, `_IN_USE` or `_KEPT`.

        There is no call between reading and writing the state, because a signal handler or finalizer could claim the
        segment during a call.
        """
        state = self._bytes[_STATE_AT]
        if state != _IN_USE:
            self._bytes[_STATE_AT] = _IN_USE
            self._is_claimed = True
        return state

    def free(self) -> None:
        """Marks the segment as free, whatever its state is."""
        self._is_claimed = False
        self._bytes[_STATE_AT] = _FREE

    def is_handed_out(self) -> bool:
        """Returns whether the reader may be using the segment: this end has claimed it, and the state is `_IN_USE`."""
        return self._is_claimed and self.state() == _IN_USE

    def state(self) -> int:
        """Returns the byte that says whether the segment is used: `_FREE`, `_IN_USE` or `_KEPT` (for ever).

        A faulty reader may have written another value.
        """
        return self._bytes[_STATE_AT]

    def is_free(self) -> bool:
        """Returns whether the state is `_FREE` and this end has no views, so that another frame may use the segment."""
        return self._bytes[_STATE_AT] == _FREE and not self.has_views()

    def is_mapped(self) -> bool:
        """Returns whether the reader says, by a byte in the segment, that it has the segment mapped."""
        return self._bytes[_MAPPED_AT] != 0

    def has_views(self) -> bool:
        """Returns whether a view that `keep_views` or `show_views` returned still exists in this process."""
        return (self._kept is not None and self._kept() is not None) or self.is_shown()

    def is_shown(self) -> bool:
        """Returns whether a view that `show_views` returned still exists in this process."""
        return self._shown is not None and self._shown() is not None

    def contents(self, sizes: Sequence[int]) -> list[memoryview]:
        """Returns one view for each size in bytes, of the buffers that `fill` has written.

        The views do not keep the segment from being written again. The sizes are not checked.
        """
        return _slices(self._bytes[_DATA_AT:], _offsets(sizes), sizes)

    def keep_views(self, sizes: Sequence[int]) -> list[memoryview]:
        """Returns one view for each size in bytes, of the buffers that `fill` has written.

        While one of the views exists, `has_views` returns True, and the segment is not written again. The sizes are not
        checked.
        """
        exporter = self._new_exporter()
        self._kept = weakref.ref(exporter)
        return _slices(memoryview(exporter).cast("B")[_DATA_AT:], _offsets(sizes), sizes)

    def show_views(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Returns one view for each offset and size, of buffers that the reader has sent back.

        While one of the views exists, `has_views` and `is_shown` return True, and the segment is not written again. The
        offsets count from the first buffer byte. Neither they nor the sizes are checked.
        """
        exporter = self._new_exporter()
        self._shown = weakref.ref(exporter)
        return _slices(memoryview(exporter).cast("B")[_DATA_AT:], offsets, sizes)

    def _new_exporter(self) -> Any:
        """Returns a new object that exports the whole segment as a buffer. Only views keep it alive."""
        if self._exporter_type is None:
            import ctypes

            self._exporter_type = type("_Exporter", (ctypes.c_char * len(self._bytes),), {})
        return self._exporter_type.from_buffer(self._bytes.obj)

    def fill(self, buffers: Sequence[memoryview]) -> None:
        """Copies the buffers into the segment one after the other, each at a multiple of 64 bytes.

        Raises `ValueError` if they do not fit.
        """
        begin = _DATA_AT
        for buffer in buffers:
            size = buffer.nbytes
            copy_bytes(self._bytes[begin : begin + size], buffer)
            begin += _aligned(size)

    def give_memory_back(self) -> None:
        """Frees the pages of the segment at once, although the reader may still have it mapped.

        The buffers in it are lost.
        """
        memory: Any = self._bytes.obj
        for at in range(_DATA_AT, len(memory), _FREE_STEP_BYTES):
            memory.madvise(mmap.MADV_REMOVE, at, min(_FREE_STEP_BYTES, len(memory) - at))

    def close(self) -> None:
        """Closes the descriptor of the segment. Mappings and views stay valid. May be called twice."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class SegmentReader:
    """The segments (blocks of shared memory) of one peer, the *writer*, which this worker has mapped.

    Methods may be called in any thread.

    Nothing is opened before the first `check` or `read`.

    Args:
        process: The process id of the writer, on this host.
        token: The token of the writer's `SegmentPool`. A segment that does not begin with it is refused.
    """

    def __init__(self, process: int, token: bytes) -> None:
        self._process = process
        self._token = token
        self._mappings: dict[int, _Mapping] = {}
        self._lock = threading.RLock()

    def check(self, descriptor: int) -> None:
        """Tries to open a segment of the writer, and closes it again.

        Args:
            descriptor: The file descriptor of the segment in the writer's process.

        Raises:
            OSError: The descriptor does not exist, or is not a segment of the writer.
            CannotOpenError: This process may not, or cannot now, open or map it.
        """
        self._open(descriptor)

    def read(self, place: Place, sizes: Sequence[int]) -> list[memoryview]:
        """Returns the buffers of a frame as views of the segment that has them. Maps the segment if necessary.

        When the last of the views is dropped, the segment becomes free for the writer; at once if `sizes` is empty.

        Args:
            place: The segment.
            sizes: The size of each buffer in bytes, in the order in which the buffers were written.

        Returns:
            One writable view for each size.

        Raises:
            OSError: The segment does not exist, its number is not `place.number`, it is too small for these sizes, or
                there are views of an earlier frame in it. Also raised if the writer has too many segments.
            CannotOpenError: This process may not, or cannot now, open or map the segment. The frame may be valid.
        """
        with self._lock:
            mapping = self._mappings.get(place.number)
            if mapping is None:
                self._make_room()
                memory = self._open(place.descriptor)
                (number,) = _NUMBER.unpack_from(memory, _NUMBER_AT)
                if number != place.number:
                    raise OSError(f"shared memory {place.descriptor} is segment {number}, not {place.number}")
                try:
                    mapping = self._mappings[place.number] = _Mapping(memory, number)
                except (OSError, ImportError) as error:  # importing ctypes needs descriptors as well
                    raise CannotOpenError(str(error)) from None
            return mapping.new_views(sizes)

    def read_common(self, place: Place, lease: Place, sizes: Sequence[int]) -> list[memoryview]:
        """Returns the buffers of a frame as views of a common segment, which other workers read as well.

        This worker may write into the views: no other worker sees the changes. When the last of the views is dropped,
        the lease becomes free for the writer; at once if `sizes` is empty.

        Args:
            place: The common segment.
            lease: The segment without buffers that says how long this reader uses the common one.
            sizes: The size of each buffer in bytes, in the order in which the buffers were written.

        Returns:
            One writable view for each size.

        Raises:
            OSError: One of the segments does not exist or has another number, the common one is too small for these
                sizes, the lease is in use, or the writer has too many segments.
            CannotOpenError: This process may not, or cannot now, open or map a segment. The frame may be valid.
        """
        # Mapped anew for each frame: pages that the program has changed are not those of the segment any more.
        memory = self._open(place.descriptor, mmap.ACCESS_COPY)
        (number,) = _NUMBER.unpack_from(memory, _NUMBER_AT)
        if number != place.number or _DATA_AT + _end_of(sizes) > len(memory):
            raise OSError(f"shared memory {place.descriptor} is not segment {place.number}, or too small for {sizes}")
        try:
            import ctypes
        except ImportError as error:
            raise CannotOpenError(str(error)) from None
        exporter_type: Any = type("_Exporter", (ctypes.c_char * len(memory),), {})
        exporter = exporter_type.from_buffer(memory)
        exporter.lease = self.read(
            lease, [0]
        )  # last: after an error the lease is still in use, and the buffers are requested
        return _slices(memoryview(exporter).cast("B")[_DATA_AT:], _offsets(sizes), sizes)

    def _make_room(self) -> None:
        """Makes sure that one more segment can be mapped.

        Does nothing if there are fewer than `_MAX_MAPPINGS` mappings. Otherwise unmaps the unused segment whose last
        use is the longest ago.

        Raises:
            OSError: All mappings are in use. A correct writer has fewer segments.
        """
        if len(self._mappings) < _MAX_MAPPINGS:
            return
        unused = [each for each in self._mappings.values() if not each.is_in_use()]
        if not unused:
            raise OSError(f"more than {_MAX_MAPPINGS} segments at once")
        oldest = min(unused, key=lambda mapping: mapping.used_at)
        del self._mappings[oldest.number]
        oldest.note_unmapped()

    def find_returnable(self, buffers: Sequence[memoryview]) -> ReturnableBuffers | None:
        """Finds out whether buffers can be sent back to the writer in the segment in which they came.

        They can if all of them are in one segment, and make up at least half of the bytes of the last frame in it.
        Fewer bytes should be copied: they would keep the writer from using the rest of the segment.

        Args:
            buffers: The buffers to send, at least one.

        Returns:
            The object that sends them back; None if they cannot be sent back.
        """
        with self._lock:
            mappings = list(self._mappings.values())
        if not mappings:
            return None
        addresses = [_address_of(buffer) for buffer in buffers]
        for mapping in mappings:
            if 0 <= addresses[0] - mapping.address < mapping.filled:
                break
        else:
            return None
        sizes, offsets = [buffer.nbytes for buffer in buffers], [address - mapping.address for address in addresses]
        if 2 * sum(sizes) < mapping.filled or not _lie_apart(offsets, sizes, mapping.filled):
            return None
        return ReturnableBuffers(mapping, offsets, sizes, self._lock)

    def _open(self, descriptor: int, access: int = mmap.ACCESS_WRITE) -> mmap.mmap:
        """Opens and maps the writer's segment with that file descriptor, and returns the mapping.

        `access` is `mmap.ACCESS_WRITE`, or `mmap.ACCESS_COPY` for a private mapping.

        Raises `CannotOpenError` if this process may not or cannot do that now, and `OSError` if it is no segment of the
        writer.
        """
        path = f"/proc/{self._process}/fd/{descriptor}"
        try:
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            if error.errno in _NO_ACCESS:
                raise CannotOpenError(str(error)) from None
            raise
        try:
            found = os.fstat(opened)
            # A file that is not a memfd raises here. A memfd that can shrink could crash this process with SIGBUS.
            seals = fcntl.fcntl(opened, fcntl.F_GET_SEALS) if stat.S_ISREG(found.st_mode) else 0
            if not seals & fcntl.F_SEAL_SHRINK or found.st_size < _DATA_AT:
                raise OSError(f"{path} is no segment")
            try:
                memory = mmap.mmap(opened, found.st_size, access=access)  # it duplicates the descriptor
            except OSError as error:
                raise CannotOpenError(f"{path} cannot be mapped: {error}") from None
        finally:
            os.close(opened)
        if memory[:TOKEN_SIZE] != self._token:
            raise OSError(f"{path} is not a segment of the peer")
        return memory

    def sweep(self, before: float) -> None:
        """Unmaps segments without views that were last used before `before`. `read` maps them again if necessary.

        Args:
            before: A time of the monotonic clock.
        """
        with self._lock:
            for number, mapping in list(self._mappings.items()):
                if mapping.used_at < before and not mapping.is_in_use():
                    del self._mappings[number]
                    mapping.note_unmapped()

    def prepare_fork(self) -> None:
        """Marks all segments that have views as kept: the writer never uses them again.

        Must be called before this process forks, so that memory that the child inherits does not change.
        """
        with self._lock:
            for number, mapping in list(self._mappings.items()):
                if mapping.has_views():
                    mapping.keep_for_good()
                    del self._mappings[number]


class ReturnableBuffers:
    """Buffers of a received frame that can perhaps be sent back in their shared segment, without a copy.

    Use it like this: inside of `with`, drop all views of the buffers, then call `give_back`. Inside of `with`, the
    segment is not freed when its last view is dropped.

    Args:
        mapping: The mapping of the segment.
        offsets: Where each buffer begins, in bytes from the first buffer byte of the segment.
        sizes: The size of each buffer in bytes, one for each offset.
        lock: The lock of the `SegmentReader` that has the mapping.

    Attributes:
        number: The number of the segment.
    """

    __slots__ = ("_lock", "_mapping", "_unfreed", "number", "offsets", "sizes")

    def __init__(
        self, mapping: _Mapping, offsets: Sequence[int], sizes: Sequence[int], lock: AbstractContextManager[object]
    ) -> None:
        self._mapping = mapping
        self._lock = lock
        self._unfreed = mapping.unfreed
        self.number = mapping.number
        self.offsets = offsets
        self.sizes = sizes

    def __enter__(self) -> None:
        """Keeps the segment from being freed for its writer, even if the last view is dropped. Returns nothing."""
        self._mapping.holders.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Frees the segment for its writer if no view of it exists, unless `give_back` has returned True."""
        self._mapping.holders.remove(self)
        if self._unfreed:
            self._mapping.hand_back(self._unfreed)

    def give_back(self) -> bool:
        """Decides whether the segment goes back to its writer. Must be called inside of `with`.

        Returns:
            True if no view of the segment exists any more: the caller must send the frame that returns the segment.
            False if a view still exists, or the segment is kept for ever: the caller must send copies, and the segment
            is freed later as usual.
        """
        with self._lock:  # so that `prepare_fork` runs either before or after this
            if not self._mapping.is_held_only_by(self):
                return False
            self._unfreed.clear()
            return True

    def views(self) -> list[memoryview]:
        """Returns one view for each buffer, for a caller that must copy them. They are valid only inside of `with`."""
        return self._mapping.plain_views(self.offsets, self.sizes)


class _Mapping:
    """One shared segment of the writer, mapped in the process that reads it.

    The constructor marks the segment as mapped, by a byte in the segment that its writer reads.

    Args:
        memory: The mapping of the whole segment.
        number: The number of the segment.
    """

    def __init__(self, memory: mmap.mmap, number: int) -> None:
        import ctypes

        self.number = number
        self.used_at = 0.0
        self.filled = 0  # the number of bytes of the last frame
        self.holders: list[ReturnableBuffers] = []
        self.unfreed: list[int] = []
        """A list with one item until the segment is freed after the last frame. The thread that pops it frees it."""
        self._is_kept = False
        self._memory = memory
        self._state = memoryview(memory)[: _MAPPED_AT + 1]
        self._state[_MAPPED_AT] = 1
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + _DATA_AT
        self._exporter_type: Any = type("_Exporter", (ctypes.c_char * len(memory),), {})
        self._exporter: weakref.ref[Any] | None = None

    def note_unmapped(self) -> None:
        """Tells the writer, by a byte in the segment, that this process does not have the segment mapped any more."""
        self._state[_MAPPED_AT] = 0

    def keep_for_good(self) -> None:
        """Marks the segment as needed for ever (`_KEPT`), so that the writer never writes into it again."""
        self._is_kept = True
        self._state[_STATE_AT] = _KEPT

    def has_views(self) -> bool:
        """Returns whether a view that `new_views` returned still exists."""
        return self._exporter is not None and self._exporter() is not None

    def is_in_use(self) -> bool:
        """Returns whether a view from `new_views` exists, or a `ReturnableBuffers` of this segment is inside `with`."""
        return bool(self.holders) or self.has_views()

    def is_held_only_by(self, holder: ReturnableBuffers) -> bool:
        """Returns whether `holder` is the only user of the segment, so that it can send the segment back.

        Returns True only if `holder` is inside `with`, no other `ReturnableBuffers` of this segment is, and no view of
        `new_views` exists. Returns False if the segment is kept for ever.
        """
        return not self.has_views() and self.holders == [holder] and not self._is_kept

    def new_views(self, sizes: Sequence[int]) -> list[memoryview]:
        """Returns one view for each buffer of a new frame. `sizes` are the bytes of the buffers.

        The segment is freed for the writer when all views were dropped; at once if `sizes` is empty. Raises `OSError`
        if the segment is in use or too small.
        """
        filled = _end_of(sizes)
        if _DATA_AT + filled > len(self._memory) or self.is_in_use():
            raise OSError(f"a segment of {len(self._memory)} bytes, perhaps in use, was said to hold {sizes}")
        self.used_at = monotonic()
        self.filled = filled
        exporter = self._exporter_type.from_buffer(self._memory)
        unfreed = self.unfreed = [self.number]
        self._exporter = weakref.ref(exporter, lambda _: self.hand_back(unfreed))
        return _slices(memoryview(exporter).cast("B")[_DATA_AT:], _offsets(sizes), sizes)

    def plain_views(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Returns one view for each offset and size in bytes. The views do not keep the segment in use.

        The offsets count from the first buffer byte. Neither they nor the sizes are checked.
        """
        return _slices(memoryview(self._memory)[_DATA_AT:], offsets, sizes)

    def hand_back(self, unfreed: list[int]) -> None:
        """Tells the writer that it may use the segment again, unless the segment is in use or kept for ever.

        Args:
            unfreed: The list that `new_views` has made for one frame. Its one item says that the segment was not freed
                after that frame yet. This method removes the item, unless the segment is in use. If the list is empty,
                nothing happens.
        """
        if self.is_in_use():
            return
        try:
            unfreed.pop()
        except IndexError:
            return
        if not self._is_kept:
            self._state[_STATE_AT] = _FREE


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copies all bytes of `source` into `target`, which must have the same size.

    For 1 MiB or more, other threads can run meanwhile if numpy is imported.

    Raises:
        ValueError: The sizes differ.
    """
    numpy: Any = sys.modules.get("numpy") if target.nbytes >= _RELEASE_LOCK_BYTES else None
    if numpy is None:
        target[:] = source
    else:
        numpy.copyto(numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8))


def _aligned(size: int) -> int:
    """Returns `size` rounded up to a multiple of 64."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _end_of(sizes: Sequence[int]) -> int:
    """Returns the number of bytes that buffers of these sizes need in a segment, with alignment; 0 for none."""
    if len(sizes) == 1:
        return _aligned(sizes[0])
    return sum(_aligned(size) for size in sizes)


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Returns the offset of each buffer in the data of a segment; an empty list for no buffers."""
    begin = 0
    found = []
    for size in sizes:
        found.append(begin)
        begin += _aligned(size)
    return found


def _slices(data: memoryview, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
    """Returns one view of `data` for each offset and size; an empty list for none.

    Raises `ValueError` if there are not as many offsets as sizes. A view that would reach beyond `data` is shorter.
    """
    return [data[begin : begin + size] for begin, size in zip(offsets, sizes, strict=True)]


def _lie_apart(offsets: Sequence[int], sizes: Sequence[int], capacity: int) -> bool:
    """Returns whether buffers at these offsets and of these sizes are valid in a segment of `capacity` bytes.

    They must begin at multiples of 64, not overlap, and end within the capacity. True for no buffers.
    """
    end = 0
    for offset, size in sorted(zip(offsets, sizes, strict=True)):
        if offset < end or offset % _ALIGNMENT:
            return False
        end = offset + size
    return end <= capacity


def _rounded_capacity(total: int) -> int:
    """Returns the capacity for a segment that has to hold `total` bytes: at least `_MIN_CAPACITY`.

    A larger `total` is rounded up, so that later frames are more likely to fit as well. There are eight capacities from
    one power of two to the next, at equal distances.
    """
    if total <= _MIN_CAPACITY:
        return _MIN_CAPACITY
    step = (1 << (total - 1).bit_length() - 1) // _SIZES_PER_DOUBLING
    return -(-total // step) * step


def _address_of(buffer: memoryview) -> int:
    """Returns the address of a buffer in memory; 0 if the buffer is empty, or read-only while numpy is not imported."""
    if not buffer.nbytes:
        return 0
    if buffer.readonly:
        numpy: Any = sys.modules.get("numpy")
        return 0 if numpy is None else int(numpy.frombuffer(buffer, numpy.uint8).__array_interface__["data"][0])
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
