"""The first words between a worker and a store: the only place where either side lets the other in.

A worker introduces itself (`introduce`); the store asks for a proof that it knows the group's secret, proves the same,
and answers `Welcome` or `Refused`: see `security.proof`. Nobody reads or writes the store without it, and no worker
believes a store without it. The format is that of `protocol.handshake`; nothing is unpickled.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import msgspec

from farcall.errors import ConnectionRefusedByPeer, ProtocolError
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
    """A refusal that says what it is worth to try again."""

    other_group: bool = False
    """This is the store of another group: the right one may be elsewhere, or not be there yet."""
    open_and_fixed: bool = False
    """It is the right place, but one of the two has a world size and the other has none."""
    final: bool = False
    """It is of no use to try again."""


class OtherGroupError(ConnectionRefusedByPeer):
    """A store answered, but it serves another group."""


class OpenAndFixedError(OtherGroupError):
    """A store answered at the right place, but one of the two groups is open and the other has a world size."""


class FinalRefusalError(ConnectionRefusedByPeer):
    """The right store answered, and will not change its mind."""


_refusals: msgspec.msgpack.Decoder[StoreRefused] = msgspec.msgpack.Decoder(StoreRefused)


def introduce(
    sock: socket.socket, hello: Hello, other: str, timeout: float, credentials: Credentials, binding: bytes = b""
) -> Welcome:
    """The worker's side: the whole greeting; the socket's timeout is left at what remained.

    Raises `AuthenticationError` if one of the two does not know the other's secret, `EncryptionError` if only one of
    them encrypts; `OtherGroupError`
    (`OpenAndFixedError` among them), `FinalRefusalError`, another `ConnectionRefusedByPeer` or `ProtocolError` if it is
    not welcome; `OSError` (`TimeoutError` among them) if the connection breaks, or no answer comes in time.
    """
    deadline = time.monotonic() + timeout
    sock.settimeout(timeout)
    applicant, hello = credentials.applicant(Purpose.STORE, hello, other, binding)
    sock.sendall(answer(hello))
    while applicant.outcome is None:
        preamble = _receive_exactly(sock, PREAMBLE_SIZE, other, deadline, check_beginning)
        size = body_length(preamble, Purpose.STORE, other, credentials.limits.greeting)
        body = _receive_exactly(sock, size, other, deadline)
        reply = applicant.take(unpack(body, other))
        if reply is not None:
            sock.sendall(answer(reply))
    if isinstance(applicant.outcome, Refused) and applicant.is_proven:
        _raise_refusal(body, other)
    return applicant.welcome()


def _raise_refusal(body: bytes, other: str) -> None:
    """Raises what the store's refusal means, if it means something in particular."""
    try:
        refusal = _refusals.decode(body)
    except ValueError as error:
        raise ProtocolError(f"{other} sent a refusal that cannot be read: {error}") from None
    if refusal.open_and_fixed:
        raise OpenAndFixedError(f"{other} refused the connection: {refusal.reason}")
    if refusal.other_group:
        raise OtherGroupError(f"{other} refused the connection: {refusal.reason}")
    if refusal.final:
        raise FinalRefusalError(f"{other} refused the connection: {refusal.reason}")


def answer(message: Greeting) -> bytes:
    """A message of either side, ready to be sent."""
    return pack(Purpose.STORE, message)


def _receive_exactly(
    sock: socket.socket,
    size: int,
    other: str,
    deadline: float,
    check: Callable[[bytearray, str], None] = lambda received, other: None,
) -> bytes:
    received = bytearray()
    while len(received) < size:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"{other} took the connection but did not answer in time")
        sock.settimeout(remaining)
        try:
            piece = sock.recv(size - len(received))
        except TimeoutError:
            raise TimeoutError(f"{other} took the connection but did not answer in time") from None
        if not piece:
            raise ConnectionResetError(
                f"{other} closed the connection without an answer (the store of an earlier run may just be ending)"
            )
        received += piece
        check(received, other)
    return bytes(received)
