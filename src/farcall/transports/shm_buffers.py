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

from farcall.errors import ProtocolError
from farcall.transports.base import Buffer, Frame, LinkOptions
from farcall.transports.large_frames import MAX_BUFFERS, check_size, sizes_of, unpack_sizes
from farcall.transports.shm_segments import (
    MAX_SEGMENTS_PER_LINK,
    RETRY_S,
    TOKEN_SIZE,
    CannotOpenError,
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

SHM_MIN_BYTES: Final = 1 << 14
"""Frames that are smaller, including their buffers, are sent without shared memory."""
FRAME_INLINE_MAX_BYTES: Final = 1 << 13
"""The bytes of larger frames are also put into the segment."""
_MAX_SEGMENTS: Final = 128
"""The most segments of one worker. Each needs a descriptor."""
_MAX_DEFAULT_BYTES: Final = 4 << 30

_SHARED_HEADER: Final = struct.Struct("<BBHiIxxxx")
_RETURNED_HEADER: Final = struct.Struct("<BxHI")
_OFFER: Final = struct.Struct(f"<Bxxxi{TOKEN_SIZE}s")
_MISSING_HEADER: Final = _RETURNED_HEADER

logger = logging.getLogger("farcall")


def default_segment_pool(worker: str, max_bytes: int | None) -> SegmentPool:
    """Returns the segment pool of a worker.

    Args:
        worker: The name of the worker, for the log.
        max_bytes: The option `shared_memory`; 0 for none, None for a quarter of the machine's memory, at most 4 GiB.
    """
    if max_bytes is None:
        max_bytes = min(_MAX_DEFAULT_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)

    def warn(problem: str) -> None:
        logger.warning("worker %r: %s; large data goes through sockets for now, which is slower", worker, problem)

    return SegmentPool(max_bytes, _MAX_SEGMENTS, warn)


class SharedBuffers:
    """Sends and receives the large buffers of one link in shared memory."""

    def __init__(
        self,
        options: LinkOptions,
        process: int,
        send_internal: Callable[..., None],
        send_supply: Callable[[int, list[memoryview]], None],
    ) -> None:
        """Creates it. Nothing is sent in shared memory until the other end has opened a segment.

        Args:
            options: The options of the link.
            process: The id of the process at the other end.
            send_internal: Sends an internal frame that consists of the given parts.
            send_supply: Sends the buffers of a segment, given its number, without shared memory. Must not wait.
        """
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
        """The numbers of bytes that were received, sent and sent back in shared memory."""
        self._incomplete: dict[int, tuple[bytes, Sequence[int], bool]] = {}
        """Frames whose segment could not be opened, by the number of the segment: the frame, the sizes of its buffers,
        and whether the first buffer is the frame itself."""

    # Agreement

    def offer(self) -> tuple[int, bytes]:
        """Returns the descriptor and token of a segment that the other end can try to open; -1 if there is none."""
        return self._pool.probe_descriptor(), self._pool.token

    def try_offer(self, descriptor: int, token: bytes) -> bool:
        """Tries to open a segment that the other end has offered. Returns whether that worked."""
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
        """Notes that the other end could open the offered segment, so that SHARED frames may be sent."""
        self._peer_reads = True

    def _offer_again(self) -> None:
        if monotonic() >= self._offer_at:
            self._offer_at = monotonic() + RETRY_S
            descriptor, token = self.offer()
            if descriptor >= 0:
                self._send_internal(_OFFER.pack(OFFER, descriptor, token))

    # Sending

    def send(self, frame: bytes, buffers: list[memoryview]) -> bool:
        """Sends a frame with its buffers in shared memory, empties the list, and returns True.

        Returns False if shared memory cannot be used for this frame; then `buffers` has buffers to send another way. If
        the buffers came from the other end and nothing else refers to them, they are sent back without a copy.
        """
        total = len(frame) + sum([buffer.nbytes for buffer in buffers])
        if total < SHM_MIN_BYTES or len(buffers) >= MAX_BUFFERS:  # one more may be needed for the frame itself
            return False
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
        """Copies the buffers into a segment and sends the frame. Returns False if there is no segment."""
        has_frame = len(frame) > FRAME_INLINE_MAX_BYTES
        written = [memoryview(frame), *buffers] if has_frame else buffers
        place = self._writer.write(written)
        if place is None:
            return False
        self._send_shared(b"" if has_frame else frame, written, place, has_frame)
        return True

    def _send_shared(self, frame: bytes, written: Sequence[memoryview], place: Place, has_frame: bool) -> None:
        header = _SHARED_HEADER.pack(SHARED, has_frame, len(written), *place)
        self._send_internal(header, sizes_of(written), frame)
        self.bytes_out += sum([buffer.nbytes for buffer in written])

    def _send_back(self, frame: bytes, buffers: list[memoryview], returnable: ReturnableBuffers) -> bool:
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
        count = len(returnable.sizes)
        table = struct.pack(f"<{2 * count}Q", *returnable.offsets, *returnable.sizes)
        self._send_internal(_RETURNED_HEADER.pack(RETURNED, count, returnable.number), table, frame)
        self.bytes_out += sum(returnable.sizes)
        return True

    def send_kept(self, frame: bytes, buffers: list[memoryview]) -> list[memoryview] | None:
        """Sends a frame, empties the list, and returns copies of the buffers, which do not change.

        Returns None if shared memory cannot be used for this frame. Then nothing was sent.
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
        """Processes an internal frame of this module. Returns the frame that it contains; None if it contains none.

        Raises:
            ProtocolError: It is not a frame of this module, or names memory that does not exist.
        """
        kind = data[0]
        if kind == SHARED:
            return self._receive_shared(data)
        if kind == RETURNED:
            return self._receive_returned(data)
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
        if len(data) < _SHARED_HEADER.size or self._reader is None:
            raise ProtocolError("the other end sent a frame in shared memory, which this end has not agreed to")
        _, has_frame, count, descriptor, number = _SHARED_HEADER.unpack_from(data)
        sizes = unpack_sizes(data, _SHARED_HEADER.size, count)
        frame = data[_SHARED_HEADER.size + 8 * count :]
        check_size(len(frame) + sum(sizes), self._max_frame_size)
        try:
            buffers = self._reader.read(Place(descriptor, number), sizes)
        except CannotOpenError as error:
            logger.info("a segment cannot be opened, and its buffers are asked for another way: %s", error)
            if number in self._incomplete or len(self._incomplete) >= MAX_SEGMENTS_PER_LINK:
                raise ProtocolError(f"two frames came in segment {number} at once, or too many segments") from None
            self._incomplete[number] = frame, sizes, bool(has_frame)
            self._send_internal(_MISSING_HEADER.pack(MISSING, count, number), struct.pack(f"<{count}Q", *sizes))
            return None
        except (OSError, ValueError) as error:
            raise ProtocolError(f"the other end named shared memory that is not there: {error}") from None
        self.bytes_in += sum(sizes)
        if self._copies:
            buffers = [self._copy(buffer) for buffer in buffers]
        return _with_frame(frame, buffers, bool(has_frame))

    def _receive_returned(self, data: bytes) -> Frame:
        if len(data) < _RETURNED_HEADER.size:
            raise ProtocolError("the other end sent a header that is too short")
        _, count, number = _RETURNED_HEADER.unpack_from(data)
        table = unpack_sizes(data, _RETURNED_HEADER.size, 2 * count)
        try:
            buffers = self._writer.take_returned(number, table[:count], table[count:])
        except OSError as error:
            raise ProtocolError(f"the other end sent back shared memory that it does not have: {error}") from None
        size = sum(table[count:])
        self.bytes_in += size
        self.bytes_returned += size
        if self._copies or self._writer.is_short():
            buffers = [self._copy(buffer) for buffer in buffers]
        return data[_RETURNED_HEADER.size + 16 * count :], buffers

    def _copy(self, view: memoryview) -> memoryview:
        copy = self._received.take(view.nbytes)
        copy_bytes(copy, view)
        return copy

    def complete(self, segment: int, buffers: Sequence[memoryview]) -> Frame:
        """Returns the frame that waits for the buffers of a segment that could not be opened, with these buffers.

        Raises:
            ProtocolError: Buffers of that segment and of these sizes were not requested.
        """
        frame, sizes, has_frame = self._incomplete.pop(segment, (b"", (), False))
        if not sizes or [buffer.nbytes for buffer in buffers] != list(sizes):
            raise ProtocolError(f"the other end sent buffers of segment {segment} that were not asked for")
        return _with_frame(frame, buffers, has_frame)

    def _supply(self, data: bytes) -> None:
        if len(data) < _MISSING_HEADER.size:
            raise ProtocolError("the other end sent a header that is too short")
        _, count, number = _MISSING_HEADER.unpack_from(data)
        sizes = unpack_sizes(data, _MISSING_HEADER.size, count)
        try:
            buffers = self._writer.contents(number, sizes)
        except OSError as error:
            raise ProtocolError(f"the other end asked for what it was not sent: {error}") from None
        self._peer_reads = False
        self._offer_at = monotonic() + RETRY_S
        self._send_supply(number, [memoryview(bytes(buffer)) for buffer in buffers])
        self._writer.free(number)

    # Memory, and the end

    def has_unopened(self) -> bool:
        """Returns whether the other end has yet to open a segment that it was sent. After `close` it could not."""
        return self._writer.has_unopened()

    def sweep(self, before: float) -> None:
        """Frees memory that was not used since the time `before` on the monotonic clock.

        Does nothing if there is none.
        """
        self._writer.sweep(before)
        if self._reader is not None:
            self._reader.sweep(before - RETRY_S)  # later than the writer does, so that it need not map them again

    def prepare_fork(self) -> None:
        """Called before this process forks: makes sure that memory which the child inherits is not written again."""
        self._writer.prepare_fork()
        if self._reader is not None:
            self._reader.prepare_fork()

    def close(self) -> None:
        """Sends and receives no more. Buffers that were received stay valid. May be called twice."""
        self._reader = None
        self._incomplete.clear()
        self._writer.close()

    def abandon(self) -> None:
        """In a forked child: closes the descriptors here. The parent continues to use the memory."""
        self._reader = None
        self._writer.abandon()


def _with_frame(frame: bytes, buffers: Sequence[memoryview], has_frame: bool) -> Frame:
    """Returns a frame and its buffers. With `has_frame`, the first of `buffers` is the frame itself.

    Raises `ProtocolError` if that one is missing.
    """
    if not has_frame:
        return frame, buffers
    if not buffers:
        raise ProtocolError("the other end sent a frame whose bytes are missing")
    return buffers[0].toreadonly(), buffers[1:]  # type: ignore[return-value]


def is_shared_kind(data: Buffer) -> bool:
    """Returns whether an internal frame is of a kind of this module. False if it is empty."""
    return bool(data) and SHARED <= data[0] <= MISSING
