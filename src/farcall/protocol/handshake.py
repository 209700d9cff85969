"""The first bytes on a connection: who speaks what, and which version of it.

Each side begins with a *preamble*, before anything else:

    offset  size  what
    0       8     b"farcall\\0"
    8       2     protocol version, little-endian
    10      2     purpose: 1 calls (worker to worker), 2 store (worker to rendezvous store)
    12      4     length of the message that follows, little-endian, at most MAX_MESSAGE

followed by one message. `Hello` comes from the side that connected, `Challenge` from the side that listens, `Proof`
from the one and then the other, and behind it `Welcome` or `Refused`, which may come at any time (`security.proof` is
the theory of it). Each stands behind a preamble. The preamble's layout never changes, so that any version can tell any
other what is wrong.

Messages are a tagged union in msgpack; nothing here is ever unpickled.

Pure: bytes in, messages out. No socket, no clock.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, TypeAlias

import msgspec

from farcall.errors import EncryptionError, ProtocolError, VersionMismatchError

MAGIC: Final = b"farcall\0"
VERSION: Final = 1
MAX_MESSAGE: Final = 64 * 1024

_LONGEST_QUOTE: Final = 1000
_TLS_RECORDS: Final = range(20, 24)
"""The first bytes of records of TLS; the second is 3 (RFC 8446, 5.1)."""

_PREAMBLE: Final = struct.Struct("<8sHHI")
PREAMBLE_SIZE: Final = _PREAMBLE.size


class Purpose(IntEnum):
    """What a connection is for."""

    CALLS = 1
    STORE = 2


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """The side that connected says who it is and whom it wants."""

    group: str
    """Which run of which group: two groups on one machine must not be taken for each other."""
    name: str
    rank: int
    wanted: str
    """The worker that the other side should be; empty for a store."""
    number: int = 0
    """The number of the worker that connected, which is its own for ever; and below, where it is reached itself: the
    other side may not have heard of it yet."""
    host: str = ""
    addresses: tuple[str, ...] = ()
    wanted_number: int = 0
    """The worker of that name may have been started again, and is another one then."""
    dialed: str = ""
    """The address at which it looks for the other side; empty for a store that is not on loopback."""
    nonce: bytes = b""
    """Never used before."""
    limits: tuple[int, int] = (0, 0)
    """How large a head and a message from the other side may be; 0: nothing is said of it."""
    lends: int = -1
    """The descriptor of a segment of shared memory for the other side to try, and what it begins with; -1: none."""
    token: bytes = b""


class Challenge(msgspec.Struct, tag="challenge", frozen=True):
    """The side that listens wants a proof that the other knows the secret."""

    nonce: bytes


class Proof(msgspec.Struct, tag="proof", frozen=True):
    """One side knows the secret."""

    mac: bytes


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The side that listens is who was wanted, and takes the connection."""

    name: str
    rank: int
    number: int = 0
    limits: tuple[int, int] = (0, 0)
    """As in the hello, for what goes the other way."""
    shares: bool = False
    """It has opened the segment that the hello named: buffers may come in shared memory."""
    lends: int = -1
    token: bytes = b""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The side that listens does not take the connection; it closes after this."""

    reason: str
    gone: bool = False
    """The group has taken the one who connected for dead, or has heard it say good-bye."""
    stranger: bool = False
    """The one who connected does not know the secret."""


Greeting: TypeAlias = Hello | Challenge | Proof | Welcome | Refused

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)


def pack(purpose: Purpose, message: Greeting) -> bytes:
    """The preamble and the message, ready to be sent."""
    body = encode(message)
    if len(body) > MAX_MESSAGE:
        raise ProtocolError(f"a greeting of {len(body)} bytes is longer than {MAX_MESSAGE}; use shorter names")
    return _PREAMBLE.pack(MAGIC, VERSION, purpose, len(body)) + body


def body_length(preamble: bytes, purpose: Purpose, other: str, limit: int = MAX_MESSAGE) -> int:
    """How many bytes follow this preamble, at most `limit`. `other` names the other end in errors.

    Raises `ProtocolError` for anything but our protocol (`EncryptionError` if it is TLS), `VersionMismatchError` for
    another version of it.
    """
    check_beginning(preamble, other)
    _, version, got_purpose, length = _PREAMBLE.unpack(preamble)
    if version != VERSION:
        raise VersionMismatchError(
            f"{other} speaks version {version} of the farcall protocol, this worker speaks version {VERSION}; "
            "install the same release of farcall on all workers"
        )
    if got_purpose != purpose:
        raise ProtocolError(
            f"{other} is a farcall connection of another kind ({got_purpose}, not {int(purpose)}); "
            "is this the address of the store, or of a worker?"
        )
    if length > limit:
        raise ProtocolError(f"{other} announced a greeting of {length} bytes; at most {limit} are allowed")
    return int(length)


def check_beginning(received: bytes | bytearray, other: str) -> None:
    """What does not begin as ours never will be. Raises as `body_length`; nothing if it may be ours so far."""
    if MAGIC.startswith(received[: len(MAGIC)]):
        return
    if received[0] in _TLS_RECORDS and received[1:2] in (b"", b"\x03"):
        raise EncryptionError(
            f"{other} encrypts (it speaks TLS), and this worker does not: encrypt_between_hosts must be the same at "
            "all workers"
        )
    raise ProtocolError(f"{other} does not speak farcall: its first bytes were {bytes(received[:8])!r}")


def quoted(text: str) -> str:
    """What a stranger says, fit for a line of a log: not too long, and nothing in it ends a line or moves a cursor."""
    clipped = text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..."
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in clipped)


def unpack(body: bytes, other: str) -> Greeting:
    """The message behind a preamble. Raises `ProtocolError` if it is none of ours."""
    try:
        return _decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{other} sent a greeting that cannot be read: {quoted(str(error))}") from None


def take(buffer: bytearray, purpose: Purpose, other: str, limit: int = MAX_MESSAGE) -> tuple[Greeting, bytes] | None:
    """The first whole message of a greeting and its body, taken out of the buffer; None if more bytes must come first.

    Raises as `body_length` and `unpack`.
    """
    if len(buffer) < PREAMBLE_SIZE:
        check_beginning(buffer, other)
        return None
    end = PREAMBLE_SIZE + body_length(bytes(buffer[:PREAMBLE_SIZE]), purpose, other, limit)
    if len(buffer) < end:
        return None
    body = bytes(buffer[PREAMBLE_SIZE:end])
    message = unpack(body, other)
    del buffer[:end]
    return message, body
