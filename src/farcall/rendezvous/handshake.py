"""The first messages between a worker and a store, in which both prove that they know the group's secret.

    worker                                   store
    Hello (group, name, rank)      --->
                                   <---      challenge, then the proof of the store (see `security.proof`)
    proof                          --->
                                   <---      Welcome or StoreRefused

Without the proof of the worker the store reads no request, and without the proof of the store the worker believes no
answer. The format of the messages is that of `protocol.handshake`. Nothing is unpickled.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import msgspec

from farcall.errors import PeerRefusedError, ProtocolError
from farcall.protocol.fields import quoted
from farcall.protocol.handshake import (
    PREAMBLE_SIZE,
    Greeting,
    Hello,
    Purpose,
    Refused,
    Welcome,
    body_length,
    check_beginning,
    pack,
    unpack,
)
from farcall.security import Credentials


class StoreRefused(Refused, tag="refused", frozen=True):
    """The store's refusal of a worker, with flags that tell whether a retry, or a search elsewhere, can help.

    `reason` is the text for people. `other_group` is True if the store serves another group; the worker's own store may
    be elsewhere. `other_size` is True, too, if the two groups differ only in their world size. `open_and_fixed` is
    True, too, if one of these groups is open and so has none. `final` is True if the store would refuse a retry as
    well. If no flag is set, a retry may help. The flags `gone`, `stranger` and `encrypt`, of the base class, stay False
    here.
    """

    other_group: bool = False
    """True if this store serves another group: ours may be elsewhere or not started yet."""
    other_size: bool = False
    """True if this is the right place, but the group there has another world size."""
    open_and_fixed: bool = False
    """True if this is the right place, but one of the two groups is open and the other has a world size."""
    final: bool = False
    """True if the store would refuse a retry as well."""


class OtherGroupError(PeerRefusedError):
    """A store answered, but it serves another group than the one that this worker looks for."""


class OtherSizeError(OtherGroupError):
    """A store answered at the right place, but its group has another world size."""


class OpenAndFixedError(OtherSizeError):
    """A store answered at the right place, but its group is open and this worker has a world size, or the reverse."""


class FinalRefusalError(PeerRefusedError):
    """The right store refused this worker, and would refuse it again, for example because its rank does not exist."""


_refusals: msgspec.msgpack.Decoder[StoreRefused] = msgspec.msgpack.Decoder(StoreRefused)


def introduce_worker(
    sock: socket.socket, hello: Hello, other: str, timeout: float, credentials: Credentials, binding: bytes = b""
) -> Welcome:
    """Carries out the worker's side of the handshake on a connected socket.

    Leaves the socket's timeout at what remained of `timeout`. Never closes the socket.

    Args:
        sock: A socket connected to the store.
        hello: Who this worker is and which group it looks for.
        other: A name for the other end, for error messages.
        timeout: Seconds for the whole handshake, more than 0.
        credentials: This worker's secret and encryption.
        binding: The fingerprint of the store's certificate, to which the proofs are bound; empty without TLS.

    Returns:
        The store's welcome, which names the hosting worker.

    Raises:
        AuthenticationError: One end does not know the secret of the other.
        EncryptionError: Only one end encrypts.
        EncryptionRequired: The store wants this worker to connect again, with TLS.
        OtherGroupError: The store serves another group. `OtherSizeError` and `OpenAndFixedError` are special cases.
        FinalRefusalError: The store refused this worker for good.
        PeerRefusedError: The store refused this worker for now.
        ProtocolError: The other end does not speak this protocol, or another version of it (`VersionMismatchError`).
        TimeoutError: No answer came in time.
        OSError: The connection broke.
    """
    deadline = time.monotonic() + timeout
    sock.settimeout(timeout)
    handshake, hello = credentials.client_handshake(Purpose.STORE, hello, other, binding)
    sock.sendall(pack_message(hello))
    while handshake.outcome is None:
        preamble = _receive_exactly(sock, PREAMBLE_SIZE, other, deadline, check_beginning)
        size = body_length(preamble, Purpose.STORE, other, credentials.limits.max_message_bytes)
        body = _receive_exactly(sock, size, other, deadline)
        reply = handshake.take(unpack(body, other))
        if reply is not None:
            sock.sendall(pack_message(reply))
    if isinstance(handshake.outcome, Refused) and handshake.is_proven:
        _raise_refusal(body, other)
    return handshake.welcome()


def _raise_refusal(body: bytes, other: str) -> None:
    """Raises the error that the flags of the store's refusal stand for; returns if no flag is set.

    The errors are `OpenAndFixedError`, `OtherSizeError`, `OtherGroupError` and `FinalRefusalError`.

    Args:
        body: The refusal, a `StoreRefused`, as bytes. Raises `ProtocolError` if it cannot be decoded.
        other: A name for the other end, for the message.
    """
    try:
        refusal = _refusals.decode(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{other} sent a refusal that cannot be read: {quoted(str(error))}") from None
    why = f"{other} refused the connection: {quoted(refusal.reason)}"
    if refusal.open_and_fixed:
        raise OpenAndFixedError(why)
    if refusal.other_size:
        raise OtherSizeError(why)
    if refusal.other_group:
        raise OtherGroupError(why)
    if refusal.final:
        raise FinalRefusalError(why)


def pack_message(message: Greeting) -> bytes:
    """Returns a handshake message, of the worker or of the store, as bytes to send.

    Raises `ProtocolError` if the message is larger than 64 KiB.
    """
    return pack(Purpose.STORE, message)


def _receive_exactly(
    sock: socket.socket,
    size: int,
    other: str,
    deadline: float,
    check: Callable[[bytearray, str], None] = lambda received, other: None,
) -> bytes:
    """Reads exactly `size` bytes from a socket and returns them; empty for 0.

    Args:
        sock: The socket. Its timeout is changed.
        size: How many bytes to read.
        other: A name for the other end, for error messages.
        deadline: When to give up, in seconds of `time.monotonic`.
        check: Called with all bytes so far, and `other`, after each read. It may raise to reject them. The default
            accepts everything.

    Raises:
        TimeoutError: The deadline has passed.
        ConnectionResetError: The other end has closed the connection first.
        OSError: The connection broke.
    """
    received = bytearray()
    while len(received) < size:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"{other} accepted the connection but did not answer in time")
        sock.settimeout(remaining)
        try:
            piece = sock.recv(size - len(received))
        except TimeoutError:
            raise TimeoutError(f"{other} accepted the connection but did not answer in time") from None
        if not piece:
            raise ConnectionResetError(
                f"{other} closed the connection without an answer (the store of an earlier run may just be ending)"
            )
        received += piece
        check(received, other)
    return bytes(received)
