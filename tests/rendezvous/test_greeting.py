"""The two sides of the greeting, over a pair of connected sockets."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from farcall.errors import ConnectionRefusedByPeer, ProtocolError, VersionMismatchError
from farcall.protocol.handshake import Hello, Purpose, Refused, Welcome, pack
from farcall.rendezvous.greeting import (
    FinalRefusalError,
    OpenAndFixedError,
    OtherGroupError,
    StoreRefused,
    answer,
    introduce,
    take_hello,
)

HELLO = Hello("group", "worker1", 1, "")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_hello_is_read_piece_by_piece() -> None:
    stream = pack(Purpose.STORE, HELLO) + b"more"
    buffer = bytearray()
    for position, byte in enumerate(stream[:-5]):
        buffer.append(byte)
        assert take_hello(buffer, "it") is None, position
    buffer += stream[-5:]
    assert take_hello(buffer, "it") == HELLO
    assert buffer == b"more"


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", ProtocolError, "does not speak farcall"),
        (struct.pack("<8sHHI", b"farcall\0", 9, 2, 0), VersionMismatchError, "version 9"),
        (pack(Purpose.CALLS, HELLO), ProtocolError, "another kind"),
        (struct.pack("<8sHHI", b"farcall\0", 1, 2, 2**31), ProtocolError, "2147483648 bytes"),
        (pack(Purpose.STORE, Welcome("w", 0)), ProtocolError, "Welcome where a hello was due"),
    ],
)
def test_what_is_no_hello_is_refused(data: bytes, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        take_hello(bytearray(data), "it")


def test_a_welcome_lets_in(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(answer(Welcome("host", 0)))
    assert introduce(ours, HELLO, "the store", 10) == Welcome("host", 0)
    assert take_hello(bytearray(theirs.recv(4096)), "it") == HELLO


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (StoreRefused("so", other_group=True), OtherGroupError),
        (StoreRefused("so", other_group=True, open_and_fixed=True), OpenAndFixedError),
        (StoreRefused("so", final=True), FinalRefusalError),
        (StoreRefused("so"), ConnectionRefusedByPeer),
        (Refused("so"), ConnectionRefusedByPeer),
    ],
)
def test_a_refusal_says_why_and_of_what_kind(
    pair: tuple[socket.socket, socket.socket], refusal: Refused, error: type[Exception]
) -> None:
    ours, theirs = pair
    theirs.sendall(answer(refusal))
    with pytest.raises(ConnectionRefusedByPeer, match="the store refused the connection: so") as caught:
        introduce(ours, HELLO, "the store", 10)
    assert type(caught.value) is error


def test_silence_ends_in_time(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TimeoutError, match="did not answer in time"):
        introduce(pair[0], HELLO, "the store", 0.01)


def test_an_end_without_an_answer_is_no_refusal(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError, match="without an answer"):
        introduce(ours, HELLO, "the store", 10)


def test_another_program_is_told_apart(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
    with pytest.raises(ProtocolError, match="does not speak farcall"):
        introduce(ours, HELLO, "the store", 10)
