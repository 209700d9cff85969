"""The messages between a worker and a store after the handshake: their fields, and how they become bytes.

    +----------------------------+-----------------------------+
    | length: 4 bytes,           | body: msgpack, one of the   |
    | little-endian              | tagged structs below        |
    +----------------------------+-----------------------------+

Rules
- The length is at most `MAX_FRAME_BYTES`, and is checked before any memory is reserved.
- Every request except `GoodBye` has an id, and gets exactly one reply with the same id.
- Replies come in any order: a `Get` or `Collect` that waits does not delay the requests behind it.

Pure: no socket and no thread. Nothing is unpickled.
"""

from __future__ import annotations

import struct
from typing import Final, TypeAlias

import msgspec

from farcall.errors import ProtocolError, RendezvousError
from farcall.protocol.fields import Seconds, quoted

MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
"""The largest size of the body of a message, in bytes."""
_LENGTH: Final = struct.Struct("<I")
"""The length before each body: four bytes, little-endian."""


class _Numbered(msgspec.Struct, frozen=True):
    """The base of all messages between a worker and a store that have an id.

    The worker chooses a new `id` for each request. The reply has the id of its request. Fields are checked where a
    message is decoded, not here.
    """

    id: int
    """The number of the request, chosen by the worker, different for each. A reply has the id of its request."""


class Set(_Numbered, tag="set", frozen=True):
    """A request to set `key` to `value` in the store, replacing any earlier value. The reply is `Done`.

    `id` is the number of the request, which the reply repeats. The value may be empty.
    """

    key: str
    value: bytes


class SetNew(_Numbered, tag="set_new", frozen=True):
    """A request to set `key` to `value` in the store unless the key exists. The reply is `Value`: what the key has now.

    `id` is the number of the request, which the reply repeats. The value may be empty.
    """

    key: str
    value: bytes


class Get(_Numbered, tag="get", frozen=True):
    """A request for the value of `key`. The store waits up to `timeout` seconds for the key; 0 does not wait.

    `id` is the number of the request, which the reply repeats. The reply is `Value`, `TimedOut` if the key did not
    appear, or `Failed` if the store closes.
    """

    key: str
    timeout: Seconds


class Add(_Numbered, tag="add", frozen=True):
    """A request to add `amount`, which may be negative, to the counter at `key`. A missing key counts as 0.

    `id` is the number of the request, which the reply repeats. The reply is `Number` (the sum), or `Failed` if the key
    holds no number or the sum would exceed 64 bits.
    """

    key: str
    amount: int


class Delete(_Numbered, tag="delete", frozen=True):
    """A request to delete `key`; if `expected` is not None, only if the key has that value.

    `id` is the number of the request, which the reply repeats. The reply is `Number`: 1 if the key was deleted, 0 if it
    did not exist or had another value.
    """

    key: str
    expected: bytes | None = None
    """If given, the key is deleted only if it has this value. None deletes it with any value."""


class Read(_Numbered, tag="read", frozen=True):
    """A request for all keys that start with `prefix` now, with their values. An empty prefix means all keys.

    `id` is the number of the request, which the reply repeats. The reply is `Entries`, which may be empty.
    """

    prefix: str


class Collect(_Numbered, tag="collect", frozen=True):
    """A request for all keys that start with `prefix`, with their values, once there are at least `count` of them.

    A `count` of 0 is answered at once. `id` is the number of the request, which the reply repeats. The reply is
    `Entries`, `TimedOut` after `timeout` seconds (0 does not wait), or `Failed` if a worker was lost or the store
    closes.
    """

    prefix: str
    count: int
    timeout: Seconds


class GoodBye(msgspec.Struct, tag="good_bye", frozen=True):
    """The last message of a worker that leaves. There is no reply: the store closes the connection.

    `early` is True if the worker does not wait for the others. In a fixed group, requests of the type `Collect` then
    fail.
    """

    early: bool = False
    """True if the worker does not wait for the others. Workers that wait for it are told so."""


class Done(_Numbered, tag="done", frozen=True):
    """The reply to a `Set`: the request with this `id` was carried out, and there is no value to return."""


class Value(_Numbered, tag="value", frozen=True):
    """The reply to a `Get` or `SetNew`: the `value` of the key. `id` is that of the request."""

    value: bytes


class Number(_Numbered, tag="number", frozen=True):
    """The reply to an `Add` (`number` is the sum) or a `Delete` (how many keys were deleted). `id` is the request's."""

    number: int


class Entries(_Numbered, tag="entries", frozen=True):
    """The reply to a `Read` or `Collect`: keys with their values; may be empty. `id` is that of the request."""

    entries: dict[str, bytes]


class TimedOut(_Numbered, tag="timed_out", frozen=True):
    """The reply to a `Get` or `Collect` whose timeout has expired. `id` is that of the request.

    For a `Collect`, `present` has the keys with its prefix that were there. For a `Get` it is empty.
    """

    present: tuple[str, ...]


class Failed(_Numbered, tag="failed", frozen=True):
    """The request with this `id` was refused or can never succeed; `reason` is text for people."""

    reason: str


Request: TypeAlias = Set | SetNew | Get | Add | Delete | Read | Collect | GoodBye
Reply: TypeAlias = Done | Value | Number | Entries | TimedOut | Failed

_encode = msgspec.msgpack.Encoder().encode
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def pack_request(request: Request) -> bytes:
    """Returns a request as bytes to send: the length of its body in four bytes, and the body.

    The types of the fields are not checked. Raises `RendezvousError` if the body is larger than `MAX_FRAME_BYTES`, and
    `OverflowError` for a number of more than 64 bits.
    """
    body = _encode(request)
    if len(body) > MAX_FRAME_BYTES:
        raise RendezvousError(
            f"a request of {len(body)} bytes is too large for the store; the limit is {MAX_FRAME_BYTES} bytes"
        )
    return _LENGTH.pack(len(body)) + body


def pack_reply(reply: Reply) -> bytes:
    """Returns a reply as bytes to send: the length of its body in four bytes, and the body.

    A reply whose body is larger than `MAX_FRAME_BYTES` is replaced by a `Failed` with the same id. Raises nothing.
    """
    body = _encode(reply)
    if len(body) > MAX_FRAME_BYTES:
        reason = f"the reply is {len(body)} bytes; the limit of the store is {MAX_FRAME_BYTES} bytes"
        body = _encode(Failed(reply.id, reason))
    return _LENGTH.pack(len(body)) + body


def take_frame(buffer: bytearray) -> bytes | None:
    """Removes the first complete message (its length and its body) from the start of `buffer` and returns the body.

    Returns None, and leaves the buffer unchanged, if the buffer is empty or the message is not complete yet. Raises
    `ProtocolError` if the announced length is larger than `MAX_FRAME_BYTES`.
    """
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {length} bytes was announced; the limit is {MAX_FRAME_BYTES} bytes")
    end = _LENGTH.size + length
    if len(buffer) < end:
        return None
    frame = bytes(memoryview(buffer)[_LENGTH.size : end])
    del buffer[:end]
    return frame


def unpack_request(frame: bytes) -> Request:
    """Decodes the body of a request: the bytes of a message without the length at its beginning.

    Raises `ProtocolError` if the bytes are empty or not a valid request.
    """
    try:
        return _requests.decode(frame)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a request cannot be read: {quoted(str(error))}") from None


def unpack_reply(frame: bytes) -> Reply:
    """Decodes the body of a reply: the bytes of a message without the length at its beginning.

    Raises `ProtocolError` if the bytes are empty or not a valid reply.
    """
    try:
        return _replies.decode(frame)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a reply cannot be read: {quoted(str(error))}") from None
