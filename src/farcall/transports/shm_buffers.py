"""How a link on one host sends the buffers of frames in shared segments.

The two ends use these internal frames (`large_frames` has the others). All numbers are little-endian.

    SHARED   1 type, 1 flag, 2 number of buffers, 4 descriptor, 4 segment, 4 unused, 8 size of each buffer; then frame.
             The buffers are in that segment of the sender. With the flag, the first buffer is the frame itself
    RETURNED 1 type, 1 unused, 2 number of buffers, 4 segment, 8 offset of each buffer, 8 size of each; then the frame.
             The buffers are in that segment of the *receiver*, which may use it again
    OFFER    1 type, 3 unused, 4 descriptor, 16 token. Asks the receiver to try to open this segment of the sender
    OPENED   1 type. The sender could open the offered segment, so the receiver may send SHARED frames
    MISSING  1 type, 1 unused, 2 number of buffers, 4 segment, 8 size of each buffer. The sender cannot open that
             segment now. The receiver must send its buffers without shared memory, and use no shared memory until it
             receives OPENED again
    COMMON   1 type, 1 unused, 2 number of buffers, 4 descriptor, 4 segment, 4 descriptor of the lease, 4 segment of
             the lease, 8 size of each buffer; then the frame. The buffers are in that common segment of the sender,
             which sends them to several receivers. MISSING names the segment of the lease

Whether the two ends can share memory is checked when the link is set up. If it failed, it is tried again after
`RETRY_S`, because a process may lack descriptors only for a while.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final
from weakref import WeakValueDictionary

from farcall.errors import ProtocolError
from farcall.transports.base import Buffer, CommonBuffers, Frame, LinkOptions
from farcall.transports.large_frames import MAX_BUFFERS
from farcall.transports.shm_segments import (
    MAX_SEGMENTS_PER_LINK,
    RETRY_S,
    TOKEN_SIZE,
    CannotOpenError,
    CommonSegment,
    Place,
    ReturnableBuffers,
    SegmentPool,
    SegmentReader,
    SegmentWriter,
    copy_bytes,
)

SHARED: Final = 4
RETURNED: Final = 5
OFFER: Final = 6
OPENED: Final = 7
MISSING: Final = 8
COMMON: Final = 12

SHM_MIN_BYTES: Final = 1 << 14
"""Frames that are smaller, including their buffers, are sent without shared memory."""
FRAME_INLINE_MAX_BYTES: Final = 1 << 13
"""The bytes of larger frames are also put into the segment."""
COMMON_MIN_BYTES: Final = 1 << 20
"""Smaller buffers for several receivers are copied for each: a common segment has to be mapped for every frame."""
_MAX_SEGMENTS: Final = 128
"""The most segments of one worker. Each needs a descriptor."""
_MAX_DEFAULT_BYTES: Final = 4 << 30

# A header has the number of buffers as its third field. A table of 8 bytes for each number follows the header.
_SHARED_HEADER: Final = struct.Struct("<BBHiIxxxx")
_RETURNED_HEADER: Final = struct.Struct("<BBHI")
_OFFER: Final = struct.Struct(f"<Bxxxi{TOKEN_SIZE}s")
_MISSING_HEADER: Final = _RETURNED_HEADER
_COMMON_HEADER: Final = struct.Struct("<BBHiIiI")

logger = logging.getLogger("farcall")


def default_segment_pool(worker: str, max_bytes: int | None) -> SegmentPool:
    """Returns a new pool for all shared segments that a worker writes into. Its problems are logged as warnings.

    Args:
        worker: The name of the worker, for log messages.
        max_bytes: The most bytes of all segments, from the option `shared_memory`. 0 turns shared memory off. None
            stands for a quarter of the machine's memory, but at most 4 GiB.
    """
    if max_bytes is None:
        max_bytes = min(_MAX_DEFAULT_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)

    def warn(problem: str) -> None:
        logger.warning("worker %r: %s; large data goes through sockets for now, which is slower", worker, problem)

    return SegmentPool(max_bytes, _MAX_SEGMENTS, warn)


class SharedBuffers:
    """Sends and receives the large buffers of one link in shared memory.

    One end *offers* a segment, a block of shared memory. The other end tries to open it. If the other end could open
    it, `note_opened` must be called. No buffers are copied into shared memory before that.

    An *internal frame* is a frame from one link to the other, which the program does not see.

    Args:
        options: The options of the link. Of these, the pool of segments, the memory for received buffers, whether
            received buffers are copied, and the largest size of a frame are used.
        process: The process id of the other end, which is on this host.
        send_internal: Sends one internal frame, which consists of all its arguments one after the other.
        send_supply: Sends the buffers of a segment without shared memory. It is called with the number of the segment
            and copies of the buffers, and must not wait.
    """

    def __init__(
        self,
        options: LinkOptions,
        process: int,
        send_internal: Callable[..., None],
        send_supply: Callable[[int, list[memoryview]], None],
    ) -> None:
        self._pool = options.segments
        self._received = options.received
        self._copies = options.copy_shared
        self._max_frame_size = options.max_frame_size
        self._process = process
        self._send_internal = send_internal
        self._send_supply = send_supply
        self._writer = SegmentWriter(self._pool)
        self._peer_reads = False  # whether the other end could open our segments when it last tried
        self._offer_at = monotonic() + RETRY_S
        self._reader: SegmentReader | None = None
        self.bytes_in = self.bytes_out = self.bytes_returned = 0
        """How many bytes of buffers were received and sent in shared memory, and which part of the received ones the
        other end has sent back in segments of this end."""
        self._common: WeakValueDictionary[int, CommonSegment] = WeakValueDictionary()
        """The common segment that was last sent with each lease, by the number of the lease."""
        self._incomplete: dict[int, tuple[bytes, Sequence[int], bool]] = {}
        """Frames whose segment could not be opened, by the number of the segment: the frame, the sizes of its buffers,
        and whether the first buffer is the frame itself."""

    # Agreement

    def offer(self) -> tuple[int, bytes]:
        """Returns an offer for the other end: a segment of this end that it can try to open with `try_offer`.

        Returns:
            The file descriptor of the segment in this process, and the token of this end's segments: bytes with which
            each of them begins. The descriptor is -1 if this end cannot use shared memory now.
        """
        return self._pool.probe_descriptor(), self._pool.token

    def try_offer(self, descriptor: int, token: bytes) -> bool:
        """Tries to open a segment that the other end has offered. If that works, this end can receive shared buffers.

        Args:
            descriptor: The file descriptor of the segment in the process of the other end; negative if it offers none.
            token: The token of the other end's segments: bytes with which each of them begins.

        Returns:
            Whether the segment could be opened. False also if shared memory is turned off here. No error is raised.
        """
        if descriptor < 0 or not self._pool.is_enabled:
            return False
        reader = SegmentReader(self._process, token)
        try:
            reader.check(descriptor)
        except (OSError, ValueError, CannotOpenError) as error:
            logger.info("process %d cannot share its memory with this one: %s", self._process, error)
            return False
        if self._reader is None:  # else keep the reader that has opened segments
            self._reader = reader
        return True

    def note_opened(self) -> None:
        """Notes that the other end could open the offered segment: this end may now send buffers in shared memory."""
        self._peer_reads = True

    def _offer_again(self) -> None:
        """Offers the other end a segment to open, unless the last offer is less than `RETRY_S` seconds ago.

        Does nothing if this end cannot use shared memory now. Raises `ConnectionError` if the link is closed or broken.
        """
        if monotonic() >= self._offer_at:
            self._offer_at = monotonic() + RETRY_S
            descriptor, token = self.offer()
            if descriptor >= 0:
                self._send_internal(_OFFER.pack(OFFER, descriptor, token))

    # Sending

    def send(self, frame: bytes, buffers: list[memoryview]) -> bool:
        """Sends a frame with its buffers in shared memory, if that is possible. Does not wait for the other end.

        Buffers that came from the other end are sent back without a copy if nothing outside of `buffers` refers to
        them. All others are copied into a segment.

        Args:
            frame: The bytes of the frame.
            buffers: The buffers of the frame, perhaps none.

        Returns:
            True if the frame was sent; `buffers` is empty then. False if nothing was sent, because the frame with its
            buffers is smaller than `SHM_MIN_BYTES`, has too many buffers, no segment is available, or the other end
            cannot open segments. Then the caller must send `frame` and `buffers` another way; the items of `buffers`
            may be copies now.

        Raises:
            ConnectionError: The link is closed or broken.
        """
        total = len(frame) + sum([buffer.nbytes for buffer in buffers])
        if total < SHM_MIN_BYTES or len(buffers) >= MAX_BUFFERS:  # one more may be needed for the frame itself
            return False
        if self._peer_reads and isinstance(buffers, CommonBuffers) and self._send_common(frame, buffers, total):
            buffers.clear()
            return True
        returnable = self._reader.find_returnable(buffers) if self._reader is not None and buffers else None
        if returnable is not None and len(frame) <= FRAME_INLINE_MAX_BYTES:
            return self._send_back(frame, buffers, returnable)
        if not self._peer_reads:
            self._offer_again()
            return False
        if not self._write_and_send(frame, buffers):
            return False
        buffers.clear()
        return True

    def _write_and_send(self, frame: bytes, buffers: list[memoryview]) -> bool:
        """Copies the buffers into a free segment and sends the frame. A large frame itself is copied there as well.

        Returns True. Returns False, with nothing sent, if no segment is free. `buffers` is not changed. Raises
        `ConnectionError` if the link is closed or broken.
        """
        has_frame = len(frame) > FRAME_INLINE_MAX_BYTES
        written = [memoryview(frame), *buffers] if has_frame else buffers
        place = self._writer.write(written)
        if place is None:
            return False
        self._send_shared(b"" if has_frame else frame, written, place, has_frame)
        return True

    def _send_shared(self, frame: bytes, written: Sequence[memoryview], place: Place, has_frame: bool) -> None:
        """Sends the internal frame that tells the other end that the buffers `written` are in the segment `place`.

        With `has_frame`, the first of `written` is the frame itself, and `frame` is empty. Raises `ConnectionError` if
        the link is closed or broken.
        """
        sizes = [buffer.nbytes for buffer in written]
        header = _SHARED_HEADER.pack(SHARED, has_frame, len(sizes), *place)
        self._send_internal(header, _pack_table(sizes), frame)
        self.bytes_out += sum(sizes)

    def _send_common(self, frame: bytes, buffers: CommonBuffers, total: int) -> bool:
        """Sends a frame whose buffers are in one segment for several receivers, the common segment.

        The first link of a broadcast copies the buffers there; the others only name the segment. `total` is the size
        of the frame with its buffers. Returns True. Returns False, with nothing sent, if no segment is free, `total` is
        less than `COMMON_MIN_BYTES`, or `frame` is longer than `FRAME_INLINE_MAX_BYTES`. Raises `ConnectionError` if
        the link is closed or broken.
        """
        if total < COMMON_MIN_BYTES or len(frame) > FRAME_INLINE_MAX_BYTES:
            return False
        broadcast = buffers.broadcast
        if broadcast.segment is None:
            broadcast.segment = self._pool.write_common(broadcast.buffers)
        lease = self._writer.new_lease() if broadcast.segment is not None else None
        if broadcast.segment is None or lease is None:
            return False
        broadcast.segment.leases.append(lease)
        self._common[lease.place.number] = broadcast.segment
        sizes = [buffer.nbytes for buffer in buffers]
        header = _COMMON_HEADER.pack(COMMON, 0, len(sizes), *broadcast.segment.segment.place, *lease.place)
        self._send_internal(header, _pack_table(sizes), frame)
        self.bytes_out += sum(sizes)
        return True

    def _send_back(self, frame: bytes, buffers: list[memoryview], returnable: ReturnableBuffers) -> bool:
        """Sends a frame with buffers that came from the other end. They are sent back in the same segment.

        If the program has other views of these buffers, they are copied into a segment of this end instead.
        `returnable` describes the buffers: their segment, offsets and sizes.

        Returns True if the frame was sent; `buffers` is empty then. Returns False if neither way is possible: nothing
        was sent, and `buffers` has copies of the buffers. Raises `ConnectionError` if the link is closed or broken.
        """
        with returnable:
            buffers.clear()  # the last views at this end, unless the program has kept some
            if not returnable.give_back():
                views = returnable.views()
                if self._peer_reads and self._write_and_send(frame, views):
                    return True
                # Copies, because the segment may be freed before they are sent.
                buffers.extend(memoryview(bytearray(view)) for view in views)
                return False
        # Sent outside of `with`: as soon as it is sent, the other end may use the segment for its next frame, which
        # another thread of this process may read before this one goes on.
        header = _RETURNED_HEADER.pack(RETURNED, 0, len(returnable.sizes), returnable.number)
        self._send_internal(header, _pack_table([*returnable.offsets, *returnable.sizes]), frame)
        self.bytes_out += sum(returnable.sizes)
        return True

    def send_kept(self, frame: bytes, buffers: list[memoryview]) -> list[memoryview] | None:
        """Sends a frame with its buffers in shared memory, and returns copies with which it can be sent again.

        Args:
            frame: The bytes of the frame.
            buffers: The buffers of the frame. The list is emptied if the frame was sent.

        Returns:
            A copy of each buffer, which does not change when the program changes the original. None if shared memory
            cannot be used for this frame: the frame is too large, its buffers are too small, too many or none, no
            segment is free, or the other end cannot open segments. Then nothing was sent and `buffers` is unchanged.

        Raises:
            ConnectionError: The link is closed or broken.
        """
        if len(frame) > FRAME_INLINE_MAX_BYTES or len(buffers) >= MAX_BUFFERS:
            return None
        if sum([buffer.nbytes for buffer in buffers]) < SHM_MIN_BYTES:
            return None
        if not self._peer_reads:
            self._offer_again()
            return None
        written = self._writer.write_and_keep(buffers)
        if written is None:
            return None
        place, kept = written
        self._send_shared(frame, buffers, place, has_frame=False)
        buffers.clear()
        return kept

    # Receiving

    def receive(self, data: bytes) -> Frame | None:
        """Processes an internal frame about shared memory.

        Args:
            data: The internal frame, whose first byte is its kind. It must not be empty.

        Returns:
            The frame and its buffers, if `data` carries a frame of the other end. None if `data` is only a message
            between the two links. None also if the segment of the buffers cannot be opened now. Then the buffers are
            requested, and `complete` returns the frame later.

        Raises:
            ProtocolError: The kind is unknown, a header is too short, the frame is too large, or a segment is named
                that does not exist or was not sent.
            ConnectionError: An answer cannot be sent, because the link is closed or broken.
        """
        kind = data[0]
        if kind == SHARED:
            return self._receive_shared(data)
        if kind == RETURNED:
            return self._receive_returned(data)
        if kind == COMMON:
            return self._receive_common(data)
        if kind == OFFER and len(data) == _OFFER.size:
            _, descriptor, token = _OFFER.unpack(data)
            if self.try_offer(descriptor, token):
                self._send_internal(bytes((OPENED,)))
        elif kind == OPENED:
            self.note_opened()
        elif kind == MISSING:
            self._supply(data)
        else:
            raise ProtocolError(f"the other end sent an internal frame of unknown kind {kind}")
        return None

    def _receive_shared(self, data: bytes) -> Frame | None:
        """Returns the frame in a SHARED frame: an internal frame whose buffers are in a segment of the other end.

        If the segment cannot be opened now, requests the buffers without shared memory, and returns None. Raises
        `ProtocolError` if the frame is not valid, is too large, or this end has not opened an offered segment.
        """
        if self._reader is None:
            raise ProtocolError("the other end sent a frame in shared memory, which this end has not agreed to")
        (_, has_frame, _, descriptor, number), sizes, frame = _unpack(_SHARED_HEADER, data)
        self._check_size(len(frame) + sum(sizes))
        reader = self._reader
        return self._receive_from(
            lambda: reader.read(Place(descriptor, number), sizes), number, frame, sizes, bool(has_frame)
        )

    def _receive_common(self, data: bytes) -> Frame | None:
        """Returns the frame in a COMMON frame: an internal frame whose buffers are in a segment for several receivers.

        If the segment cannot be opened now, requests the buffers without shared memory, and returns None. Raises
        `ProtocolError` if the frame is not valid, is too large, or this end has not opened an offered segment.
        """
        if self._reader is None:
            raise ProtocolError("the other end sent a frame in shared memory, which this end has not agreed to")
        (_, _, _, descriptor, number, lease_descriptor, lease), sizes, frame = _unpack(_COMMON_HEADER, data)
        self._check_size(len(frame) + sum(sizes))
        places = Place(descriptor, number), Place(lease_descriptor, lease)
        reader = self._reader
        return self._receive_from(lambda: reader.read_common(*places, sizes), lease, frame, sizes, False)

    def _check_size(self, size: int) -> None:
        """Raises `ProtocolError` if a frame and its buffers have more bytes together than this worker takes."""
        if size > self._max_frame_size:
            raise ProtocolError(
                f"the other end sent a frame of {size:,} bytes in shared memory; this worker takes "
                f"{self._max_frame_size:,} at most (max_message_size)"
            )

    def _receive_from(
        self,
        read: Callable[[], list[memoryview]],
        number: int,
        frame: bytes,
        sizes: Sequence[int],
        has_frame: bool,
    ) -> Frame | None:
        """Returns a frame with the buffers that `read` returns from shared memory.

        Args:
            read: Opens the segment and returns its buffers.
            number: The number by which to request the buffers if the segment cannot be opened now: the number of the
                segment. For a segment with several receivers it is that of the lease, a small segment for one receiver.
            frame: The bytes of the frame; empty with `has_frame`.
            sizes: The size of each buffer in bytes.
            has_frame: Whether the first buffer is the frame itself.

        Returns:
            The frame and its buffers. None if the segment cannot be opened now: the buffers were requested.

        Raises:
            ProtocolError: There is no such segment, too many frames wait for their buffers, or `has_frame` is True and
                there are no buffers.
            ConnectionError: The request cannot be sent, because the link is closed or broken.
        """
        try:
            buffers = read()
        except CannotOpenError as error:
            logger.info("a segment cannot be opened, and its buffers are asked for another way: %s", error)
            if number in self._incomplete or len(self._incomplete) >= MAX_SEGMENTS_PER_LINK:
                raise ProtocolError(f"two frames came in segment {number} at once, or too many segments") from None
            self._incomplete[number] = frame, sizes, has_frame
            self._send_internal(_MISSING_HEADER.pack(MISSING, 0, len(sizes), number), _pack_table(sizes))
            return None
        except (OSError, ValueError) as error:
            raise ProtocolError(f"the other end named shared memory that is not there: {error}") from None
        self.bytes_in += sum(sizes)
        if self._copies:
            buffers = [self._copy(buffer) for buffer in buffers]
        return _with_frame(frame, buffers, has_frame)

    def _receive_returned(self, data: bytes) -> Frame:
        """Returns the frame and buffers of a RETURNED frame: the other end sends buffers back in a segment of this end.

        Raises `ProtocolError` if the header is too short, if the named segment was not sent to the other end, or if the
        buffers do not fit into it.
        """
        (_, _, count, number), table, frame = _unpack(_RETURNED_HEADER, data, numbers_per_buffer=2)
        try:
            buffers = self._writer.take_returned(number, table[:count], table[count:])
        except OSError as error:
            raise ProtocolError(f"the other end sent back shared memory that it does not have: {error}") from None
        size = sum(table[count:])
        self.bytes_in += size
        self.bytes_returned += size
        if self._copies or self._writer.is_short():
            buffers = [self._copy(buffer) for buffer in buffers]
        return frame, buffers

    def _copy(self, view: memoryview) -> memoryview:
        """Returns a copy of a buffer in memory of this process."""
        copy = self._received.take(view.nbytes)
        copy_bytes(copy, view)
        return copy

    def complete(self, segment: int, buffers: Sequence[memoryview]) -> Frame:
        """Completes a frame that waits for its buffers, because its segment could not be opened.

        Called when the other end has sent the buffers without shared memory.

        Args:
            segment: The number by which the buffers were requested.
            buffers: The buffers that have arrived.

        Returns:
            The frame and its buffers.

        Raises:
            ProtocolError: No frame waits for that segment, or the sizes of the buffers are not those that were
                requested.
        """
        frame, sizes, has_frame = self._incomplete.pop(segment, (b"", (), False))
        if not sizes or [buffer.nbytes for buffer in buffers] != list(sizes):
            raise ProtocolError(f"the other end sent buffers of segment {segment} that were not asked for")
        return _with_frame(frame, buffers, has_frame)

    def _supply(self, data: bytes) -> None:
        """Processes a MISSING frame: the other end cannot open a segment that it was sent.

        Sends the buffers of that segment without shared memory, and frees the segment. No buffers are copied into
        shared memory until the other end has opened an offered segment again. Raises `ProtocolError` if the header is
        too short, or the other end does not have that segment.
        """
        (_, _, _, number), sizes, _ = _unpack(_MISSING_HEADER, data)
        try:
            common = self._common.get(number)
            if common is not None and common.has_lease(number):
                self._writer.contents(number, ())  # raises if the other end has freed the lease
                buffers = common.contents(sizes)
            else:
                buffers = self._writer.contents(number, sizes)
        except OSError as error:
            raise ProtocolError(f"the other end asked for what it was not sent: {error}") from None
        self._peer_reads = False
        self._offer_at = monotonic() + RETRY_S
        self._send_supply(number, [memoryview(bytes(buffer)) for buffer in buffers])
        self._writer.free(number)

    # Memory, and the end

    def has_unopened(self) -> bool:
        """Returns whether the other end was sent a segment that it has not opened yet.

        While this is True, `close` would lose data: after `close` the other end cannot open the segment.
        """
        return self._writer.has_unopened()

    def sweep(self, before: float) -> None:
        """Frees shared memory that has no views and was last used before `before`. Does nothing if there is none.

        Args:
            before: A time of the monotonic clock.
        """
        self._writer.sweep(before)
        self._pool.sweep_common(before)
        if self._reader is not None:
            self._reader.sweep(before - RETRY_S)  # later than the writer does, so that it need not map them again

    def prepare_fork(self) -> None:
        """Must be called before this process forks, so that the buffers that the child inherits do not change.

        If the program has views of a segment now, neither end writes into that segment again. Other segments stay in
        use.
        """
        self._writer.prepare_fork()
        if self._reader is not None:
            self._reader.prepare_fork()

    def close(self) -> None:
        """Closes all segments of this end. May be called twice.

        Buffers that were received stay valid. Frames that wait for their buffers are dropped.
        """
        self._reader = None
        self._incomplete.clear()
        self._writer.close()

    def abandon(self) -> None:
        """Called in a forked child: closes the child's descriptors of the segments of this end.

        The child can send nothing in shared memory afterwards. The parent continues to use the memory.
        """
        self._reader = None
        self._writer.abandon()


def _pack_table(numbers: Sequence[int]) -> bytes:
    """Encodes the table of numbers after the header of an internal frame: 8 bytes each. May be empty."""
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def _unpack(
    header: struct.Struct, data: bytes, numbers_per_buffer: int = 1
) -> tuple[tuple[int, ...], tuple[int, ...], bytes]:
    """Returns the fields of the header of an internal frame, the numbers of its table, and the bytes after them.

    `header` is the layout of the header; its third field is the number of buffers. The table after it has
    `numbers_per_buffer` numbers of 8 bytes for each buffer. Raises `ProtocolError` if `data` is too short for the
    header, or for the table that the header promises.
    """
    try:
        fields = header.unpack_from(data)
        count = fields[2] * numbers_per_buffer
        table = struct.unpack_from(f"<{count}Q", data, header.size)
    except struct.error:
        raise ProtocolError("the other end sent a header that is too short") from None
    return fields, table, data[header.size + 8 * count :]


def _with_frame(frame: bytes, buffers: Sequence[memoryview], has_frame: bool) -> Frame:
    """Returns a received frame and its buffers.

    With `has_frame`, the first of `buffers` is the frame itself, and `frame` is not used. In this case, an empty
    `buffers` raises `ProtocolError`.
    """
    if not has_frame:
        return frame, buffers
    if not buffers:
        raise ProtocolError("the other end sent a frame whose bytes are missing")
    return buffers[0].toreadonly(), buffers[1:]  # type: ignore[return-value]


def is_shared_kind(data: Buffer) -> bool:
    """Returns whether an internal frame is about shared memory, so that `SharedBuffers.receive` must process it.

    Only the first byte, the kind, is checked. Returns False if `data` is empty.
    """
    return bool(data) and (SHARED <= data[0] <= MISSING or data[0] == COMMON)
