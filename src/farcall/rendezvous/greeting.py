"""The first words between a worker and a store: the only place where either side lets the other in.

A worker says `Hello` (`introduce`); the store reads it piece by piece (`take_hello`) and answers `Welcome` or `Refused`
(`answer`). What must be proved before a store trusts a worker, or a worker a store, belongs here, between the two.
The format is that of `protocol.handshake`; nothing is unpickled.
"""

from __future__ import annotations

import socket
import time

import msgspec

from farcall.errors import ConnectionRefusedByPeer, ProtocolError
from farcall.protocol.handshake import (
    PREAMBLE_SIZE,
    Hello,
    Purpose,
    Refused,
    Welcome,
    body_length,
    expect_welcome,
    pack,
    unpack,
)


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


def introduce(sock: socket.socket, hello: Hello, other: str, timeout: float) -> Welcome:
    """The worker's side: says hello and waits for the answer; the socket's timeout is left at what remained.

    Raises `OtherGroupError` (`OpenAndFixedError` among them), `FinalRefusalError`, another `ConnectionRefusedByPeer` or
    `ProtocolError` if it is not welcome; `OSError` (`TimeoutError` among them) if the connection breaks, or no answer
    comes in time.
    """
    deadline = time.monotonic() + timeout
    sock.settimeout(timeout)
    sock.sendall(pack(Purpose.STORE, hello))
    preamble = _receive_exactly(sock, PREAMBLE_SIZE, other, deadline)
    body = _receive_exactly(sock, body_length(preamble, Purpose.STORE, other), other, deadline)
    message = unpack(body, other)
    if isinstance(message, Refused):
        refusal = _refusals.decode(body)
        if refusal.open_and_fixed:
            raise OpenAndFixedError(f"{other} refused the connection: {refusal.reason}")
        if refusal.other_group:
            raise OtherGroupError(f"{other} refused the connection: {refusal.reason}")
        if refusal.final:
            raise FinalRefusalError(f"{other} refused the connection: {refusal.reason}")
    return expect_welcome(message, other)


def take_hello(buffer: bytearray, other: str) -> Hello | None:
    """The store's side: the hello, taken out of the buffer; None if more bytes must come first.

    Raises `ProtocolError` if it is none, or of another version.
    """
    if len(buffer) < PREAMBLE_SIZE:
        return None
    end = PREAMBLE_SIZE + body_length(bytes(buffer[:PREAMBLE_SIZE]), Purpose.STORE, other)
    if len(buffer) < end:
        return None
    message = unpack(bytes(buffer[PREAMBLE_SIZE:end]), other)
    if not isinstance(message, Hello):
        raise ProtocolError(f"{other} began with a {type(message).__name__} where a hello was due")
    del buffer[:end]
    return message


def answer(message: Welcome | Refused) -> bytes:
    """The store's side: what to send back."""
    return pack(Purpose.STORE, message)


def _receive_exactly(sock: socket.socket, size: int, other: str, deadline: float) -> bytes:
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
    return bytes(received)
