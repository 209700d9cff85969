"""Large frames: how a link splits them into chunks, and how the other end assembles them.

A link marks some of its frames as *internal*: they are for the link at the other end, not for its user. These are the
internal frames for large frames. All numbers are little-endian.

    INLINE   1 type, 1 unused, 2 number of buffers, 4 size of the frame, 8 size of each buffer; then frame and buffers
    ANNOUNCE 1 type, 1 flag, 2 number of buffers, 4 id, 8 size of the frame, 8 size of each buffer. With the flag, the
             buffers belong to a frame whose segment the receiver could not open (`shm_buffers`), and the number of
             that segment is in place of the size of the frame
    CHUNK    1 type, 3 unused, 4 id; then the next bytes of the frame and its buffers. A chunk ends where the frame or
             a buffer ends, at the latest

An announced frame is sent in chunks, so that other frames can be sent in between. Each direction of a link has its own
ids, which are increasing numbers.

The receiver takes memory for each frame that is announced and not complete, so there is a limit. A sender keeps it: at
most `MAX_INTERLEAVED` frames have chunks of other announced frames between theirs. All others are *contiguous*: they
are queued in one step, so that only one of them at a time is sent in part.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from farcall.errors import ProtocolError
from farcall.transports.base import Buffer, Frame

INLINE: Final = 1
ANNOUNCE: Final = 2
CHUNK: Final = 3

MAX_BUFFERS: Final = 0xFFFF
"""The most buffers of one frame."""
MAX_INTERLEAVED: Final = 64
"""The most frames of a link that are sent in chunks with others between them. Each has a thread that sends it."""
_MAX_UNFINISHED: Final = MAX_INTERLEAVED + 1
"""The most frames that the other end may have announced and not completed: the interleaved, and one contiguous one."""

_HEADER: Final = struct.Struct("<BBHI")
_CHUNK_HEADER: Final = struct.Struct("<BxxxI")
CHUNK_HEADER_SIZE: Final = _CHUNK_HEADER.size
_FRAME_SIZE: Final = struct.Struct("<Q")


def sizes_of(buffers: Sequence[memoryview]) -> bytes:
    """Returns the sizes of `buffers`, encoded in 8 bytes each for a header; empty bytes for no buffers.

    Raises:
        ValueError: There are more than `MAX_BUFFERS` buffers.
    """
    if len(buffers) > MAX_BUFFERS:
        raise ValueError(f"a frame has {len(buffers)} buffers; at most {MAX_BUFFERS} are allowed")
    return struct.pack(f"<{len(buffers)}Q", *[buffer.nbytes for buffer in buffers])


def unpack_sizes(header: Buffer, at: int, count: int) -> tuple[int, ...]:
    """Returns `count` numbers from a header, each of which has 8 bytes.

    Args:
        header: The header.
        at: The offset of the first number.
        count: How many numbers to return; 0 gives an empty tuple.

    Raises:
        ProtocolError: The header is too short.
    """
    if len(header) < at + 8 * count:
        raise ProtocolError("the other end sent a header that is too short")
    return struct.unpack_from(f"<{count}Q", header, at)


def pack_inline(frame: bytes, buffers: Sequence[memoryview]) -> bytes:
    """Returns the header of an INLINE frame, which contains a small frame and its buffers.

    The caller must send the header, then `frame`, then `buffers`. These together are the INLINE frame.

    Raises:
        ValueError: There are more than `MAX_BUFFERS` buffers.
    """
    sizes = sizes_of(buffers)
    return _HEADER.pack(INLINE, 0, len(buffers), len(frame)) + sizes


def unpack_inline(data: bytes, max_frame_size: int) -> Frame:
    """Returns the frame and the buffers that an INLINE frame contains. The buffers are writable copies.

    Args:
        data: The INLINE frame: its header, the frame and the buffers.
        max_frame_size: The most bytes that the frame may have with its buffers.

    Raises:
        ProtocolError: The frame has more than `max_frame_size` bytes, or `data` is too short or has wrong sizes.
    """
    _, _, count, frame_size = _unpack(_HEADER, data)
    sizes = unpack_sizes(data, _HEADER.size, count)
    check_size(frame_size + sum(sizes), max_frame_size)
    at = _HEADER.size + 8 * count
    if len(data) != at + frame_size + sum(sizes):
        raise ProtocolError("the other end sent a frame whose sizes do not add up")
    view = memoryview(data)
    frame = data[at : at + frame_size]
    at += frame_size
    buffers = []
    for size in sizes:
        buffers.append(memoryview(bytearray(view[at : at + size])))
        at += size
    return frame, buffers


def pack_announcement(number: int, frame: Buffer, buffers: Sequence[memoryview]) -> bytes:
    """Returns an ANNOUNCE frame, which tells the other end the sizes of a large frame whose bytes follow in chunks.

    Args:
        number: The id of the large frame. The header of each of its chunks has the same id.
        frame: The bytes of the large frame.
        buffers: The buffers of the large frame; empty for none.

    Raises:
        ValueError: There are more than `MAX_BUFFERS` buffers.
    """
    sizes = sizes_of(buffers)
    return _HEADER.pack(ANNOUNCE, 0, len(buffers), number) + _FRAME_SIZE.pack(len(frame)) + sizes


def pack_supply(number: int, segment: int, buffers: Sequence[memoryview]) -> bytes:
    """Returns an ANNOUNCE frame for buffers that the receiver lacks because it could not open their shared segment.

    The bytes of the buffers follow in chunks.

    Args:
        number: The id of the announcement. The header of each chunk has the same id.
        segment: The number of the segment.
        buffers: The buffers in the segment.

    Raises:
        ValueError: There are more than `MAX_BUFFERS` buffers.
    """
    sizes = sizes_of(buffers)
    return _HEADER.pack(ANNOUNCE, 1, len(buffers), number) + _FRAME_SIZE.pack(segment) + sizes


def pack_chunk_header(number: int) -> bytes:
    """Returns the header of a chunk: a piece of the large frame that was announced with the id `number`."""
    return _CHUNK_HEADER.pack(CHUNK, number)


def chunks_of(frame: Buffer, buffers: Sequence[memoryview], max_bytes: int) -> Iterator[memoryview]:
    """Yields the bytes of a frame and then those of its buffers, in pieces of at most `max_bytes`.

    No piece has bytes of two buffers, or of the frame and a buffer. A frame or buffer without bytes has no piece.
    `max_bytes` must be at least 1; this is not checked.
    """
    for piece in (memoryview(frame), *buffers):
        view = piece.cast("B") if piece.nbytes else piece
        for begin in range(0, view.nbytes, max_bytes):
            yield view[begin : begin + max_bytes]


class Assembler:
    """Assembles the large frames that arrive on one link from their chunks.

    `announce` begins a frame. `add_chunk` adds a chunk to it; `space_for` and `fill` do the same without a copy. The
    call that completes a frame returns it.

    Args:
        new_buffer: Returns writable memory of a given size. The memory should be allocated only when it is written,
            because a stranger may announce large frames.
        max_frame_size: The most bytes of a frame with its buffers. Larger frames raise `ProtocolError`.
        complete: Used if this end could not open a shared segment, and the other end sends the buffers of the segment
            in chunks. Called with the number of the segment and the buffers. Must return the frame to which the buffers
            belong. None if the link does not use shared memory.
    """

    def __init__(
        self,
        new_buffer: Callable[[int], memoryview],
        max_frame_size: int,
        complete: Callable[[int, Sequence[memoryview]], Frame] | None = None,
    ) -> None:
        self._new_buffer = new_buffer
        self._max_frame_size = max_frame_size
        self._complete = complete
        self._unfinished: dict[int, _LargeFrame] = {}

    def announce(self, data: bytes) -> Frame | None:
        """Begins to assemble a large frame whose chunks follow.

        Args:
            data: The ANNOUNCE frame. It has the id of the large frame, its size and the sizes of its buffers.

        Returns:
            None if chunks follow. For a large frame without any bytes no chunk follows, and the frame itself is
            returned.

        Raises:
            ProtocolError: The frame is too large, its id is in use, too many frames are incomplete, there is no memory
                for it, or `data` cannot be read.
        """
        _, is_supply, count, number = _unpack(_HEADER, data)
        frame_size, *sizes = unpack_sizes(data, _HEADER.size, count + 1)
        segment = None
        if is_supply:
            frame_size, segment = 0, frame_size
        check_size(frame_size + sum(sizes), self._max_frame_size)
        if number in self._unfinished:
            raise ProtocolError(f"the other end announced frame {number} twice")
        if len(self._unfinished) >= _MAX_UNFINISHED:
            raise ProtocolError(f"the other end announced too many frames at once; {_MAX_UNFINISHED} are allowed")
        large = _LargeFrame((frame_size, *sizes), segment, self._new_buffer)
        if large.space is None:
            return self._finish(large)
        self._unfinished[number] = large
        return None

    def space_for(self, header: Buffer, size: int) -> memoryview:
        """Returns the memory into which the bytes of a chunk must be received. It has `size` bytes.

        When the memory is full, the caller must call `fill` with the same arguments.

        Args:
            header: The header of the chunk. It has the id of the large frame.
            size: The number of bytes of the chunk, without its header.

        Raises:
            ProtocolError: No frame with the id in `header` was announced, or the chunk is empty or larger than the rest
                of its buffer.
        """
        large = self._find(header)
        if large.space is None or not 0 < size <= large.space.nbytes:
            raise ProtocolError(f"the other end sent a chunk of {size} bytes that does not fit into its frame")
        return large.space[:size]

    def fill(self, header: Buffer, size: int) -> Frame | None:
        """Notes that all bytes of a chunk were received into the memory that `space_for` returned.

        Args:
            header: The header of the chunk, as given to `space_for`.
            size: The number of bytes of the chunk, as given to `space_for`.

        Returns:
            The large frame if this chunk was its last; otherwise None.

        Raises:
            ProtocolError: No frame with the id in `header` was announced, or there is no memory for its next buffer.
        """
        large = self._find(header)
        large.advance(size)
        if large.space is not None:
            return None
        _, number = _unpack(_CHUNK_HEADER, header)
        del self._unfinished[number]
        return self._finish(large)

    def _finish(self, large: _LargeFrame) -> Frame:
        """Returns the frame that was received as `large`, which must be complete.

        If `large` has only the buffers of a shared segment, returns the frame to which these buffers belong. Raises
        `ProtocolError` if this end did not request such buffers.
        """
        if large.segment is None:
            return large.frame()
        if self._complete is None:
            raise ProtocolError("the other end sent buffers that were not asked for")
        return self._complete(large.segment, large.frame()[1])

    def add_chunk(self, data: bytes) -> Frame | None:
        """Adds a chunk that has arrived as a whole to its large frame.

        Args:
            data: The CHUNK frame: the header and the bytes of the chunk.

        Returns:
            The large frame if this chunk was its last; otherwise None.

        Raises:
            ProtocolError: No frame with the id in the header was announced, the chunk does not fit into that frame, or
                there is no memory for the next buffer.
        """
        size = len(data) - CHUNK_HEADER_SIZE
        self.space_for(data, size)[:] = memoryview(data)[CHUNK_HEADER_SIZE:]
        return self.fill(data, size)

    def _find(self, header: Buffer) -> _LargeFrame:
        """Returns the incomplete frame that the chunk with this header belongs to.

        Raises `ProtocolError` if the frame was not announced, or the header is too short.
        """
        _, number = _unpack(_CHUNK_HEADER, header)
        large = self._unfinished.get(number)
        if large is None:
            raise ProtocolError(f"the other end sent a chunk of frame {number}, which it has not announced")
        return large


class _LargeFrame:
    """A large frame that is being received. The frame itself and each of its buffers get memory of their own.

    The caller receives bytes into `space` and calls `advance`, until `space` is None. Then `frame` returns the frame.

    The constructor takes memory for the frame itself. If the frame has no bytes, it takes memory for the first buffer
    that has bytes. The memory for each further buffer is taken when its first byte is due. `ProtocolError` is raised if
    there is no memory.

    Args:
        sizes: The size of the frame itself, then the size of each buffer.
        segment: The number of the shared segment that the buffers were in; None for an ordinary frame.
        new_buffer: Returns writable memory of a given size.
    """

    __slots__ = ("_new_buffer", "_parts", "_sizes", "segment", "space")

    def __init__(self, sizes: Sequence[int], segment: int | None, new_buffer: Callable[[int], memoryview]) -> None:
        self._sizes = sizes
        self.segment = segment
        self._new_buffer = new_buffer
        self._parts: list[memoryview] = []
        self.space: memoryview | None = self._next_space()
        """The memory for the next bytes, up to the end of the frame or a buffer. None if the frame is complete."""

    def _next_space(self) -> memoryview | None:
        # One buffer after the other: memory is taken as bytes arrive, not when they are announced.
        """Takes memory for the next buffer that is not empty, and returns it; None if all buffers have their memory.

        The frame itself counts as the first buffer. Raises `ProtocolError` if there is no memory.
        """
        while len(self._parts) < len(self._sizes):
            try:
                part = self._new_buffer(self._sizes[len(self._parts)])
            except MemoryError as error:
                raise ProtocolError(str(error)) from None
            self._parts.append(part)
            if part.nbytes:
                return part
        return None

    def advance(self, count: int) -> None:
        """Notes that `count` bytes were received into `space`, which must not be None. Moves `space` behind them.

        Raises `ProtocolError` if there is no memory for the next buffer.
        """
        assert self.space is not None
        self.space = self.space[count:] if count < self.space.nbytes else self._next_space()

    def frame(self) -> Frame:
        # A view, because copying a large pickle would take time.
        """Returns the frame and its buffers. To be called only when all bytes were received.

        The frame is a read-only view of the memory that was received into, not a copy.
        """
        return self._parts[0].toreadonly(), self._parts[1:]  # type: ignore[return-value]


def check_size(size: int, limit: int) -> None:
    """Checks the size of a frame that the other end has sent.

    Raises:
        ProtocolError: `size` is greater than `limit`.
    """
    if size > limit:
        raise ProtocolError(
            f"the other end sent a frame of {size:,} bytes; this worker takes {limit:,} at most (max_message_size)"
        )


def _unpack(layout: struct.Struct, data: Buffer) -> tuple[int, ...]:
    """Returns the fields of `layout` at the beginning of `data`. Raises `ProtocolError` if `data` is too short."""
    if len(data) < layout.size:
        raise ProtocolError("the other end sent a header that is too short")
    return layout.unpack_from(data)
