"""The messages between workers as bytes, once the handshake is done.

    offset  size  what (little-endian)
    0       1     kind, see below
    1       1     flags: 1 if the buffers are in shared memory, 2 if all that follows the table comes in parts, 4 if the
                  buffers are in shared memory of the receiver's, and go back with the message
    2       2     number of out-of-band buffers
    4       4     length of the head
    8       8     length of the body
    16      8     call id: a reply carries the id of its call
    24      8×n   length of each out-of-band buffer
            8     with flag 1: in which segment they are, its descriptor at the sender's and its number
            8+8×n with flag 4: in which segment they are, its number, and where each begins in there
            ...   head, body, buffers, one after the other; with flag 1 or 4 no buffers

                        head                            body                    buffers
    1 call              the callee, see below           pickled arguments       of the body
    2 result            empty                           pickled result          of the body
    3 failure           empty                           an encoded failure      none
    4 call carrying     section, callee                 as a call
    5 result carrying   section                         as a result
    6 remote            section, reference, callee      pickled arguments       of the body
    7 carried           section                         empty                   none
    8 control           empty                           reference messages      none
    9 news              empty                           news of the group       none
    10 shares           empty                           empty                   none
    11 ring             empty                           empty                   a pair of rings, in shared memory
    12 knock            empty                           empty                   none
    13 part             empty                           a part of a message     none

A message that carries references has a *section* in front of its head (`control.py`). `carried` brings the references
of a call or reply that was lost with its connection. `shares` says that the other side may put buffers into shared
memory from now on. `ring` brings memory through which small messages may go from now on; `knock` says nothing but that
there is something in it (`transports.rings`). A `remote` with a call id is answered as a call for its value would be,
as soon as that is there; by `UNTOLD` if it has to be asked for. A large message comes in parts, so that others need not
wait for its end: each has its call id, and its bytes are the next of head, body and buffers. Only replies have buffers
that go back. The *callee* is

    empty                              a function by value: it is the first of the arguments
    module, 0, name                    a function by name
    1, reference and fork, name        a method of what a reference stands for
    2, reference and fork              its value
    3, reference and fork              nothing: answered when the value is there
    4, reference and fork              its type
    5, reference and fork              its value, if that is plain: else answered by `UNTOLD`

This module knows nothing of what heads and bodies mean. Pure: bytes in, messages out.

Rules
- `Decoder` is fed whatever came, in any chunking, and gives whole messages. A large message is received straight into
  its final place: while one is under way, `space` is where its next bytes belong.
- Memory is not taken at once on the other side's word: parts of a message get theirs one after the other, as bytes
  come, and large ones get what the owner of the decoder says, which must become memory only as it is filled.
- Anything that cannot be a message raises `ProtocolError`; the connection is of no more use then.
- A message is a plain tuple, because it is made for every call and every reply.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, NoReturn, TypeAlias

from farcall.errors import ProtocolError

CALL: Final = 1
RESULT: Final = 2
FAILURE: Final = 3
CALL_CARRYING: Final = 4
RESULT_CARRYING: Final = 5
REMOTE: Final = 6
CARRIED: Final = 7
CONTROL: Final = 8
NEWS: Final = 9
SHARES: Final = 10
RING: Final = 11
KNOCK: Final = 12
PART: Final = 13
_LAST: Final = KNOCK
"""Of the kinds that are whole messages."""

METHOD: Final = b"\1"
VALUE: Final = b"\2"
PRESENCE: Final = b"\3"
TYPE: Final = b"\4"
PLAIN: Final = b"\5"

UNTOLD: Final = b"\0"
"""The body of a result that says: the value is there, and has to be asked for. No pickle begins like that."""

HEADER: Final = struct.Struct("<BBHIQQ")
MAX_HEAD: Final = 1 << 22
MAX_MESSAGE: Final = 1 << 40
MAX_BUFFERS: Final = 0xFFFF
LARGE: Final = 1 << 16
"""From this size on, a message that has not come whole is received into its final place."""

HUGE: Final = 1 << 20
"""From this size on a part gets memory from `Decoder.new_memory`."""


class Sizes(NamedTuple):
    """How large a message may be."""

    head: int = MAX_HEAD
    message: int = MAX_MESSAGE


Bytes: TypeAlias = bytes | bytearray | memoryview
Message: TypeAlias = tuple[int, int, bytes, Bytes, Sequence[Bytes]]
"""kind, call id, head, body, buffers"""

_SIZE = HEADER.size
_PLACE: Final = struct.Struct("<II")
_SHARED: Final = 1
_IN_PARTS: Final = 2
_RETURNED: Final = 4
_MOST_UNFINISHED: Final = 4096
"""So many messages may be coming in parts at the same time."""
_pack = HEADER.pack
# One buffer is the rule: a format that is made anew for each message costs more than the packing.
_one_shared = struct.Struct("<QII").pack
_one_returned = struct.Struct("<QQQ").pack
_one_size = struct.Struct("<Q").unpack_from
_one_offset = struct.Struct("<QQ").unpack_from
_unpack_from = struct.Struct("<IIQQ").unpack_from
"""Kind, flags and number of buffers as one number, which is the kind if there are no flags and no buffers."""


def encode(kind: int, call_id: int, head: bytes, body: bytes) -> bytes:
    """A message without out-of-band buffers."""
    return _pack(kind, 0, 0, len(head), len(body), call_id) + head + body


def unanswered(message: bytes) -> bytes:
    """The same message without a call id: what is sent again, on another connection, is not answered there."""
    return message[:16] + bytes(8) + message[24:]


def encode_start(kind: int, call_id: int, head: bytes, body: bytes, buffers: Sequence[memoryview]) -> bytes:
    """A message up to where its out-of-band buffers follow, which the caller sends right behind it."""
    count = len(buffers)
    if count > MAX_BUFFERS:
        raise ProtocolError(f"a message has {count} out-of-band buffers; at most {MAX_BUFFERS} are allowed")
    sizes = struct.pack(f"<{count}Q", *[buffer.nbytes for buffer in buffers])
    return _pack(kind, 0, count, len(head), len(body), call_id) + sizes + head + body


def encode_shared(
    kind: int, call_id: int, head: bytes, body: bytes, sizes: Sequence[int], descriptor: int, number: int
) -> bytes:
    """A message whose buffers, of these sizes, are in that segment of shared memory."""
    count = len(sizes)
    if count == 1:
        table = _one_shared(sizes[0], descriptor, number)
    else:
        table = struct.pack(f"<{count}QII", *sizes, descriptor, number)
    return _pack(kind, _SHARED, count, len(head), len(body), call_id) + table + head + body


def encode_returned(
    kind: int, call_id: int, head: bytes, body: bytes, sizes: Sequence[int], number: int, offsets: Sequence[int]
) -> bytes:
    """A message whose buffers, of these sizes, are at these places in that segment of the receiver's own."""
    count = len(sizes)
    if count == 1:
        table = _one_returned(sizes[0], number, offsets[0])
    else:
        table = struct.pack(f"<{2 * count + 1}Q", *sizes, number, *offsets)
    return _pack(kind, _RETURNED, count, len(head), len(body), call_id) + table + head + body


def as_shared(messages: bytes, descriptor: int, number: int) -> bytes:
    """The same messages, the last of them an `encode_start`, whose buffers are in that segment of shared memory."""
    at = 0
    while True:
        start, head_size, body_size, _ = _unpack_from(messages, at)
        table = at + _SIZE + 8 * (start >> 16)
        if start >> 16:
            place = _PLACE.pack(descriptor, number)
            return messages[: at + 1] + bytes((_SHARED,)) + messages[at + 2 : table] + place + messages[table:]
        at = table + head_size + body_size


def encode_in_parts(kind: int, call_id: int, head: bytes, body: bytes, buffers: Sequence[memoryview]) -> bytes:
    """The start of a message whose head, body and buffers follow in parts, each behind an `encode_part`."""
    count = len(buffers)
    if count > MAX_BUFFERS:
        raise ProtocolError(f"a message has {count} out-of-band buffers; at most {MAX_BUFFERS} are allowed")
    sizes = struct.pack(f"<{count}Q", *[buffer.nbytes for buffer in buffers])
    return _pack(kind, _IN_PARTS, count, len(head), len(body), call_id) + sizes


def encode_part(call_id: int, size: int) -> bytes:
    """What stands before the next `size` bytes of a message that comes in parts."""
    return _pack(PART, 0, 0, 0, size, call_id)


def _start(start: int) -> tuple[int, int, int]:
    """The kind, the flags and the number of buffers, out of a message's first four bytes."""
    kind, flags, count = start & 0xFF, start >> 8 & 0xFF, start >> 16
    known = flags in (0, _IN_PARTS) or (flags in (_SHARED, _RETURNED) and count)
    if not CALL <= kind <= PART or not known or (flags and kind > _LAST):
        raise ProtocolError(f"a message of unknown kind {kind} (flags {flags}) came")
    return kind, flags, count


def _no_shared_memory(descriptor: int, number: int, sizes: Sequence[int]) -> NoReturn:
    raise ProtocolError("a message came whose buffers are in shared memory, of which there is none here")


def _nothing_returned(number: int, offsets: Sequence[int], sizes: Sequence[int]) -> NoReturn:
    raise ProtocolError("a message came whose buffers are said to be in shared memory of this side, which are not")


class Decoder:
    """Turns a stream of bytes into messages."""

    __slots__ = (
        "_large",
        "_part_left",
        "_rest",
        "_unfinished",
        "limits",
        "new_memory",
        "received",
        "returned",
        "shared",
        "space",
    )

    def __init__(self) -> None:
        self.new_memory: Callable[[int], memoryview] = _address_space
        """Gives so many bytes, for a part of a message of `HUGE` bytes or more."""
        self._unfinished: dict[int, _LargeMessage] = {}  # those that come in parts, by call id
        self._part_left = 0  # bytes that are still to come of the part that is under way
        self.shared: Callable[[int, int, Sequence[int]], Sequence[Bytes]] = _no_shared_memory
        """Finds the buffers of a message in shared memory: by the segment's descriptor and number, and their sizes."""
        self.returned: Callable[[int, Sequence[int], Sequence[int]], Sequence[Bytes]] = _nothing_returned
        """The same for shared memory of this side: by the segment's number, and their places and sizes."""
        self._rest = b""
        self._large: _LargeMessage | None = None
        self.limits = Sizes()
        self.received = 0
        """How many bytes have come so far."""
        self.space: memoryview | None = None
        """Where the next bytes belong while a large message is under way, else None: `feed` them."""

    def feed(self, data: bytes) -> list[Message]:
        """All messages that are whole now. Not to be called while `space` is set.

        Raises `ProtocolError` for what cannot be a message.
        """
        end = len(data)
        self.received += end
        if self._rest:
            data = self._rest + data
            self._rest = b""
            end = len(data)
        elif _SIZE <= end <= LARGE:  # one whole message is the rule: with fewer steps
            kind, head_size, body_size, call_id = _unpack_from(data)
            middle = _SIZE + head_size
            if middle + body_size == end and CALL <= kind <= _LAST:
                return [(kind, call_id, data[_SIZE:middle], data[middle:], ())]
        messages: list[Message] = []
        at = 0
        while end - at >= _SIZE:
            kind, head_size, body_size, call_id = _unpack_from(data, at)
            if not CALL <= kind <= _LAST or head_size + body_size > LARGE:
                kind, flags, count = _start(kind)
                table = at + _SIZE
                if kind == PART:
                    at = self._take_part(call_id, head_size + body_size, data, table, messages)
                    if self.space is not None:
                        return messages
                    continue
                if end - table < 8 * (count + (flags == _SHARED) + (flags == _RETURNED) * (count + 1)):
                    break
                sizes = _one_size(data, table) if count == 1 else struct.unpack_from(f"<{count}Q", data, table)
                total = head_size + body_size + sum(sizes)
                if head_size > self.limits.head or total > self.limits.message:
                    raise ProtocolError(
                        f"a message of {total} bytes with a head of {head_size} bytes was announced; at most "
                        f"{self.limits.message} and {self.limits.head} are allowed (max_message_size, max_head_size)"
                    )
                table += 8 * count
                shared = None
                if flags == _SHARED:
                    descriptor, number = _PLACE.unpack_from(data, table)
                    shared = self.shared(descriptor, number, sizes)
                    table += _PLACE.size
                    sizes = ()
                elif flags == _RETURNED:
                    number, *offsets = (
                        _one_offset(data, table) if count == 1 else struct.unpack_from(f"<{count + 1}Q", data, table)
                    )
                    shared = self.returned(number, offsets, sizes)
                    table += 8 * (count + 1)
                    sizes = ()
                if shared is not None and head_size + body_size <= min(LARGE, end - table):
                    # What is in shared memory most often has come whole: as below, with fewer steps.
                    middle = table + head_size
                    at = middle + body_size
                    messages.append((kind, call_id, data[table:middle], data[middle:at], shared))
                    continue
                large = _LargeMessage(kind, call_id, head_size, body_size, sizes, shared, self.new_memory)
                if flags == _IN_PARTS:
                    self._begin(call_id, large, messages)
                    at = table
                    continue
                at = table + large.take(memoryview(data)[table:])
                if large.space is not None:
                    self._large = large
                    self.space = large.space
                    return messages
                messages.append(large.message())
                continue
            middle = at + _SIZE + head_size
            stop = middle + body_size
            if stop > end:
                break
            messages.append((kind, call_id, data[middle - head_size : middle], data[middle:stop], ()))
            at = stop
        if at < end:
            self._rest = data[at:]
        return messages

    def filled(self, count: int) -> list[Message]:
        """Says that `count` bytes were put into `space`; gives the large message if that was its end."""
        large = self._large
        assert large is not None
        self.received += count
        self.space = large.advance(count)
        messages: list[Message] = []
        if self._part_left:
            self._part_left -= count
            self._go_on(large, messages)
        elif self.space is None:
            self._large = None
            messages.append(large.message())
        return messages

    # Messages in parts

    def _begin(self, call_id: int, large: _LargeMessage, messages: list[Message]) -> None:
        if call_id in self._unfinished or len(self._unfinished) == _MOST_UNFINISHED:
            raise ProtocolError(f"a message in parts began, call {call_id}, that had begun, or too many had")
        self._unfinished[call_id] = large
        if large.space is None:
            self._finish(large, messages)

    def _take_part(self, call_id: int, size: int, data: bytes, at: int, messages: list[Message]) -> int:
        """Takes what has come of a part that begins at `at`; where that ends."""
        large = self._unfinished.get(call_id)
        if large is None or not size:
            raise ProtocolError(f"a part of {size} bytes came of a message that had not begun, call {call_id}")
        taken = large.take(memoryview(data)[at : at + size])
        self._part_left = size - taken
        self._large = large
        self.space = large.space
        self._go_on(large, messages)
        return at + taken

    def _go_on(self, large: _LargeMessage, messages: list[Message]) -> None:
        """Waits for the rest of the part that is under way, or for the next part."""
        if self._part_left:
            if large.space is None:
                raise ProtocolError("a part came that is longer than the rest of its message")
            self.space = large.space[: self._part_left]
            return
        self.space = self._large = None
        if large.space is None:
            self._finish(large, messages)

    def _finish(self, large: _LargeMessage, messages: list[Message]) -> None:
        message = large.message()
        del self._unfinished[message[1]]
        messages.append(message)


class _LargeMessage:
    """A message that is received into its final place, each out-of-band buffer into memory of its own.

    Those that are `shared` are there already.
    """

    __slots__ = ("_call_id", "_head_size", "_kind", "_new_memory", "_parts", "_shared", "_sizes", "space")

    def __init__(
        self,
        kind: int,
        call_id: int,
        head_size: int,
        body_size: int,
        sizes: Sequence[int],
        shared: Sequence[Bytes] | None,
        new_memory: Callable[[int], memoryview],
    ) -> None:
        self._new_memory = new_memory
        self._kind = kind
        self._shared = shared
        self._call_id = call_id
        self._head_size = head_size
        self._sizes = (head_size + body_size, *sizes)
        self._parts: list[bytearray | memoryview] = []
        self.space: memoryview | None = self._next()

    def _next(self) -> memoryview | None:
        """Memory for the next part that is not empty."""
        while len(self._parts) < len(self._sizes):
            size = self._sizes[len(self._parts)]
            part = bytearray(size) if size < HUGE else self._new_memory(size)
            self._parts.append(part)
            if size:
                return memoryview(part)
        return None

    def advance(self, count: int) -> memoryview | None:
        space = self.space
        assert space is not None
        self.space = space[count:] if count < space.nbytes else self._next()
        return self.space

    def take(self, view: memoryview) -> int:
        """Takes what it can of that; how many bytes that were."""
        taken = 0
        while self.space is not None and taken < view.nbytes:
            count = min(self.space.nbytes, view.nbytes - taken)
            self.space[:count] = view[taken : taken + count]
            taken += count
            self.advance(count)
        return taken

    def message(self) -> Message:
        front = memoryview(self._parts[0])
        head = bytes(front[: self._head_size])
        buffers = self._parts[1:] if self._shared is None else self._shared
        return (self._kind, self._call_id, head, front[self._head_size :], buffers)


def _address_space(size: int) -> memoryview:
    """Memory that is taken only where it is written to. A `bytearray` would be zeroed, and so taken, at once."""
    try:
        return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError as error:
        raise MemoryError(f"there is not the memory for {size} bytes that were announced: {error}") from None
