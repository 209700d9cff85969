"""The first bytes on a connection, which name the protocol and its version, and the messages of the handshake.

    offset  size  contents
    0       8     b"farcall\\0"
    8       2     protocol version, little-endian
    10      2     purpose: 1 calls (worker to worker), 2 store (worker to rendezvous store)
    12      4     length of the message that follows, little-endian, at most MAX_MESSAGE

The first 12 bytes are the *prologue*, all 16 the *preamble*. Each direction of a connection begins with a preamble and
a message. Between workers the next messages follow as frames of the link, each after its length only
(`transports.stream`); between a worker and the store each message follows a preamble. The layout of the preamble never
changes, so that workers of different versions can tell each other what is wrong.

The connecting end sends `Hello`, the listening end `Challenge`. Then the connecting end sends `Proof`, the listening
end `Proof` and `Welcome`. The listening end may send `Refused` at any time. `security.proof` explains why this is safe.

Messages are a tagged union in msgpack. Nothing is unpickled.

Pure: bytes in, messages out. No socket, no clock.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, TypeAlias

import msgspec

from farcall.errors import EncryptionError, ProtocolError, VersionMismatchError
from farcall.protocol.fields import (
    Addresses,
    Name,
    Rank,
    Size,
    Text,
    Token,
    WorkerNumber,
    check_name,
    quoted,
)

MAGIC: Final = b"farcall\0"
VERSION: Final = 3
MAX_MESSAGE: Final = 64 * 1024

_TLS_RECORDS: Final = range(20, 24)
"""The values of the first byte of a TLS record. The second byte is 3 (RFC 8446, 5.1)."""

_PREAMBLE: Final = struct.Struct("<8sHHI")
PREAMBLE_SIZE: Final = _PREAMBLE.size
_PROLOGUE: Final = struct.Struct("<8sHH")
PROLOGUE_SIZE: Final = _PROLOGUE.size
"""The bytes of a preamble without the length."""


class Purpose(IntEnum):
    """What a connection is for: calls between workers, or requests of a worker to the rendezvous store."""

    CALLS = 1
    STORE = 2


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """The first message of a handshake, sent by the connecting end: who it is, and which worker it wants.

    Attributes:
        group: The id of this run of the group, so that two groups on one machine are not confused.
        name: The name of the connecting worker.
        rank: The rank of the connecting worker; -1 if it has none.
        wanted: The name of the worker that the listening end should be; empty for a store.
        number: The number of the connecting worker; 0 if the listening end is a store. In a group that new workers may
            join, a listening worker adds an unknown worker to the group, with its `number`, `host` and `addresses`.
        host: The kernel and network namespace of the connecting worker, from `network_identity`; empty for a store.
        addresses: Where the connecting worker listens; empty for a store.
        wanted_number: The number of the wanted worker; 0 for a store. A worker gets a new number when it is restarted.
            A worker with another number refuses the connection.
        dialed: The address that the connecting end has connected to. It is empty if the listening end is a store with
            an address other than loopback.
        nonce: Random bytes that were never used before, so that an old proof cannot be used again.
        limits: Two limits of the connecting end, in bytes. The first is for a head (a frame without payload and
            buffers), the second for a whole frame. It accepts no larger ones; 0 if it does not say.
        network: The kernel and the network namespace of the connecting end, if the connection is unencrypted and over
            loopback; else empty. Each namespace has its own loopback. If the listening end is in another namespace, the
            connection is relayed.
    """

    group: Text
    name: Name
    rank: Rank
    wanted: Name
    number: WorkerNumber = 0
    host: Text = ""
    addresses: Addresses = ()
    wanted_number: WorkerNumber = 0
    dialed: Text = ""
    nonce: Token = b""
    limits: tuple[Size, Size] = (0, 0)
    network: Text = ""


class Challenge(msgspec.Struct, tag="challenge", frozen=True):
    """The listening end's answer to `Hello`: it wants a proof that the connecting end knows the secret.

    The proof must cover `nonce`, random bytes that were never used before. So an old proof cannot be used again.
    """

    nonce: Token


class Proof(msgspec.Struct, tag="proof", frozen=True):
    """Shows that its sender knows the secret, without revealing it.

    The connecting end sends it after `Challenge`. If it is right, the listening end answers with a proof of its own.

    `mac` is a message authentication code over the earlier messages of the handshake, made with the secret.
    """

    mac: Token


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """Sent by the listening end: it is the wanted worker or store, and accepts the connection.

    Attributes:
        name: The name of the listening worker or store.
        rank: The rank of the listening end; -1 if it has none.
        number: The number of the listening worker; 0 for a store.
        limits: Two limits of the listening end, in bytes. The first is for a head (a frame without payload and
            buffers), the second for a whole frame. It accepts no larger ones; 0 if it does not say.
    """

    name: Name
    rank: Rank
    number: WorkerNumber = 0
    limits: tuple[Size, Size] = (0, 0)


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """Sent by the listening end: it refuses the connection, and closes it after this message.

    Attributes:
        reason: Why, as text for an error message.
        gone: True if the reason is that the connecting worker has left the group or was declared lost.
        stranger: True if the reason is that the connecting end does not know the secret.
        encrypt: True if the connecting end should connect again with TLS, because the two ends are in different network
            namespaces. The connecting end may believe this without a proof: TLS only makes the connection safer.
    """

    reason: str
    gone: bool = False
    stranger: bool = False
    encrypt: bool = False


Greeting: TypeAlias = Hello | Challenge | Proof | Welcome | Refused

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)


def pack(purpose: Purpose, message: Greeting) -> bytes:
    """Returns the bytes of a message of the handshake. They begin with the preamble.

    The preamble has `PREAMBLE_SIZE` bytes: magic number, version, purpose, and the length of the message.

    Args:
        purpose: What the connection is for.
        message: The message.

    Raises:
        ProtocolError: The encoded message has more than 64 KiB.
    """
    body = encode(message)
    if len(body) > MAX_MESSAGE:
        raise ProtocolError(f"a handshake message of {len(body)} bytes is longer than {MAX_MESSAGE}; use shorter names")
    return _PREAMBLE.pack(MAGIC, VERSION, purpose, len(body)) + body


def body_length(preamble: bytes, purpose: Purpose, other: str, limit: int = MAX_MESSAGE) -> int:
    """Checks a preamble: magic number, version, purpose and length. Returns the length of the message after it.

    Args:
        preamble: The first bytes that were received, exactly `PREAMBLE_SIZE`.
        purpose: What the connection should be for.
        other: What error messages call the other end.
        limit: The most bytes that the message may have; 64 KiB by default.

    Returns:
        The length in bytes, as the other end has announced it. It may be 0, although no valid message is empty.

    Raises:
        EncryptionError: The bytes are the beginning of TLS.
        VersionMismatchError: The other end uses another version of the protocol.
        ProtocolError: The bytes are of another protocol, the purpose is another, or the message is too long.
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
        raise ProtocolError(f"{other} announced a handshake message of {length} bytes; at most {limit} are allowed")
    return int(length)


def pack_prologue() -> bytes:
    """Returns the first `PROLOGUE_SIZE` bytes of a link between workers: magic number, version and purpose."""
    return _PROLOGUE.pack(MAGIC, VERSION, Purpose.CALLS)


def check_prologue(received: bytes, other: str) -> None:
    """Checks the first bytes of a link between workers, even if only some of them have arrived.

    Args:
        received: The bytes that have arrived so far; no error is raised if there are none. Bytes after the prologue are
            not checked.
        other: What error messages call the other end.

    Raises:
        EncryptionError: The bytes are the beginning of TLS.
        VersionMismatchError: The other end uses another version of the protocol.
        ProtocolError: The bytes are of another protocol, or of a connection to the rendezvous store.
    """
    check_beginning(received, other)
    if len(received) >= PROLOGUE_SIZE:
        body_length(received[:PROLOGUE_SIZE] + bytes(4), Purpose.CALLS, other)


def check_beginning(received: bytes | bytearray, other: str) -> None:
    """Checks the magic number `farcall` at the beginning of a connection, even if only a part of it has arrived.

    Args:
        received: The bytes that have arrived so far; no error is raised if there are none. Bytes after the magic number
            are not checked.
        other: What error messages call the other end.

    Raises:
        EncryptionError: The bytes are the beginning of TLS.
        ProtocolError: The bytes are of another protocol.
    """
    if MAGIC.startswith(received[: len(MAGIC)]):
        return
    if received[0] in _TLS_RECORDS and received[1:2] in (b"", b"\x03"):
        raise EncryptionError(
            f"{other} encrypts (it speaks TLS), and this worker does not: encrypt_between_hosts must be the same at "
            "all workers"
        )
    raise ProtocolError(f"{other} does not speak farcall: its first bytes were {bytes(received[:8])!r}")


def unpack(body: bytes, other: str) -> Greeting:
    """Returns the message of the handshake in these bytes.

    Args:
        body: The bytes of one message, without a preamble.
        other: What error messages call the other end.

    Raises:
        ProtocolError: The bytes are empty or not a message of the handshake, a field has a wrong type or size, or a
            name has unprintable characters.
    """
    try:
        message = _decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{other} sent a handshake message that cannot be read: {quoted(str(error))}") from None
    if isinstance(message, Hello | Welcome):
        check_name(message.name, f"the name that {other} gives")
    return message


def take(buffer: bytearray, purpose: Purpose, other: str, limit: int = MAX_MESSAGE) -> tuple[Greeting, bytes] | None:
    """Removes the first message, with its preamble, from a buffer of received bytes.

    Args:
        buffer: The bytes. They are unchanged unless a message is returned.
        purpose: What the connection should be for.
        other: What error messages call the other end.
        limit: The most bytes that the message may have.

    Returns:
        The message, and its bytes without the preamble. None if the buffer is empty, or the message has not arrived as
        a whole.

    Raises:
        EncryptionError: The bytes are the beginning of TLS.
        VersionMismatchError: The other end uses another version of the protocol.
        ProtocolError: The bytes are of another protocol or purpose, or the message is too long or cannot be read.
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
