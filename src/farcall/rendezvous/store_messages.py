"""What a worker and the embedded store say to each other once they have greeted.

Each message is a length (4 bytes, little-endian, at most `MAX_FRAME`) and that many bytes of msgpack, one of the tagged
unions below. Every request but `GoodBye` has an id, and exactly one reply carries it. Replies come in any order: a
`Get` or `Collect` that waits holds up nothing behind it.

Pure: bytes in, messages out. Nothing is unpickled.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

import msgspec

from farcall.errors import ProtocolError, RendezvousError

MAX_FRAME: Final = 16 * 1024 * 1024
_LENGTH: Final = struct.Struct("<I")


class _Numbered(msgspec.Struct, frozen=True):
    id: int


class Set(_Numbered, tag="set", frozen=True):
    """Answered by `Done`."""

    key: str
    value: bytes


class SetNew(_Numbered, tag="set_new", frozen=True):
    """Answered by `Value`: what is there now."""

    key: str
    value: bytes


class Get(_Numbered, tag="get", frozen=True):
    """Answered by `Value` as soon as there is one, or by `TimedOut`."""

    key: str
    timeout: float


class Add(_Numbered, tag="add", frozen=True):
    """Answered by `Number`: the sum."""

    key: str
    amount: int


class Delete(_Numbered, tag="delete", frozen=True):
    """Answered by `Number`: how many keys are gone, 0 or 1."""

    key: str
    expected: bytes | None = None
    """If given, it is deleted only if this is its value."""


class Read(_Numbered, tag="read", frozen=True):
    """Answered by `Entries`."""

    prefix: str


class Collect(_Numbered, tag="collect", frozen=True):
    """Answered by `Entries` as soon as there are enough, by `TimedOut`, or by `Failed` when a worker is lost."""

    prefix: str
    count: int
    timeout: float


class GoodBye(msgspec.Struct, tag="good_bye", frozen=True):
    """The last message: the worker leaves. The store closes the connection when it has read it."""

    early: bool = False
    """It does not wait for the others, who may be waiting for it."""


class Done(_Numbered, tag="done", frozen=True):
    """It is as was asked."""


class Value(_Numbered, tag="value", frozen=True):
    """One value."""

    value: bytes


class Number(_Numbered, tag="number", frozen=True):
    """A sum or a count."""

    number: int


class Entries(_Numbered, tag="entries", frozen=True):
    """Keys with their values."""

    entries: dict[str, bytes]


class TimedOut(_Numbered, tag="timed_out", frozen=True):
    """The time of a wait is over; these of the keys were there."""

    present: tuple[str, ...]


class Failed(_Numbered, tag="failed", frozen=True):
    """It cannot be done, and why."""

    reason: str


Request: TypeAlias = Set | SetNew | Get | Add | Delete | Read | Collect | GoodBye
Reply: TypeAlias = Done | Value | Number | Entries | TimedOut | Failed

_encode = msgspec.msgpack.Encoder().encode
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def pack_request(request: Request) -> bytes:
    """A request, ready to be sent. Raises `RendezvousError` if it is larger than a store takes."""
    body = _encode(request)
    if len(body) > MAX_FRAME:
        raise RendezvousError(f"a value of {len(body)} bytes is too large for the store; it takes {MAX_FRAME} at most")
    return _LENGTH.pack(len(body)) + body


def pack_reply(reply: Reply) -> bytes:
    """A reply, ready to be sent; a `Failed` in its place if it is larger than a message may be."""
    body = _encode(reply)
    if len(body) > MAX_FRAME:
        body = _encode(Failed(reply.id, f"the answer has {len(body)} bytes; the store sends {MAX_FRAME} at most"))
    return _LENGTH.pack(len(body)) + body


def take_frame(buffer: bytearray) -> bytes | None:
    """The first whole message in the buffer, which is taken out of it; None if more bytes must come first.

    Raises `ProtocolError` for a length that is not allowed, before any memory is reserved for it.
    """
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > MAX_FRAME:
        raise ProtocolError(f"a message of {length} bytes was announced; at most {MAX_FRAME} are allowed")
    end = _LENGTH.size + length
    if len(buffer) < end:
        return None
    frame = bytes(memoryview(buffer)[_LENGTH.size : end])
    del buffer[:end]
    return frame


def unpack_request(frame: bytes) -> Request:
    """Raises `ProtocolError` if it is none of ours."""
    try:
        return _requests.decode(frame)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a request cannot be read: {error}") from None


def unpack_reply(frame: bytes) -> Reply:
    """Raises `ProtocolError` if it is none of ours."""
    try:
        return _replies.decode(frame)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a reply cannot be read: {error}") from None
