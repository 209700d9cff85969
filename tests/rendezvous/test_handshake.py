"""The two sides of the greeting, over a pair of connected sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from farcall.errors import AuthenticationError, PeerRefusedError, ProtocolError
from farcall.protocol.handshake import Hello, Purpose, Refused, Welcome, take
from farcall.rendezvous.handshake import (
    FinalRefusalError,
    OpenAndFixedError,
    OtherGroupError,
    StoreRefused,
    introduce_worker,
    pack_message,
)
from farcall.security import Credentials, Secret

HELLO = Hello("group", "worker1", 1, "")
SECRET = "the secret of the group"
OURS = Credentials(Secret(SECRET))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def store_side(sock: socket.socket, secret: str, last: Welcome | Refused, seen: list[Hello]) -> None:
    """A store that says `last` to whoever knows the secret."""
    handshake = Credentials(Secret(secret)).server_handshake(Purpose.STORE, "", b"")
    buffer = bytearray()
    try:
        while not handshake.is_proven:
            while (taken := take(buffer, Purpose.STORE, "it")) is None:
                if not (data := sock.recv(4096)):
                    return
                buffer += data
            sock.sendall(pack_message(handshake.take(*taken)))
        assert handshake.hello is not None
        seen.append(handshake.hello)
        sock.sendall(pack_message(last))
    except AuthenticationError as error:
        sock.sendall(pack_message(Refused(str(error), stranger=True)))


def greet(pair: tuple[socket.socket, socket.socket], last: Welcome | Refused, secret: str = SECRET) -> Welcome:
    """Greets a store that knows that secret."""
    seen: list[Hello] = []
    thread = threading.Thread(target=store_side, args=(pair[1], secret, last, seen))
    thread.start()
    try:
        welcome = introduce_worker(pair[0], HELLO, "the store", 10, OURS)
    finally:
        thread.join()
    assert [msgspec.structs.replace(hello, nonce=b"") for hello in seen] == [HELLO]
    return welcome


def test_a_welcome_lets_in(pair: tuple[socket.socket, socket.socket]) -> None:
    assert greet(pair, Welcome("host", 0)) == Welcome("host", 0)


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (StoreRefused("so", other_group=True), OtherGroupError),
        (StoreRefused("so", other_group=True, open_and_fixed=True), OpenAndFixedError),
        (StoreRefused("so", final=True), FinalRefusalError),
        (StoreRefused("so"), PeerRefusedError),
        (Refused("so"), PeerRefusedError),
    ],
)
def test_a_refusal_says_why_and_of_what_kind(
    pair: tuple[socket.socket, socket.socket], refusal: Refused, error: type[Exception]
) -> None:
    with pytest.raises(PeerRefusedError, match="the store refused the connection: so") as caught:
        greet(pair, refusal)
    assert type(caught.value) is error


def test_a_refusal_without_a_proof_is_a_text_and_nothing_more(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].sendall(pack_message(StoreRefused("so", other_group=True, final=True)))
    with pytest.raises(PeerRefusedError, match="the store refused the connection: so") as caught:
        introduce_worker(pair[0], HELLO, "the store", 10, OURS)
    assert type(caught.value) is PeerRefusedError


def test_a_welcome_without_a_proof_is_not_believed(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].sendall(pack_message(Welcome("host", 0)))
    with pytest.raises(ProtocolError, match="the store answered a hello with a Welcome"):
        introduce_worker(pair[0], HELLO, "the store", 10, OURS)


def test_another_secret_is_said_at_both_ends(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(
        AuthenticationError, match=r"this worker's secret \(from the option secret\) is not the group's"
    ):
        greet(pair, Welcome("host", 0), secret="quite another secret")


def test_silence_ends_in_time(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TimeoutError, match="did not answer in time"):
        introduce_worker(pair[0], HELLO, "the store", 0.01, OURS)


def test_an_end_without_an_answer_is_no_refusal(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError, match="without an answer"):
        introduce_worker(ours, HELLO, "the store", 10, OURS)


def test_another_program_is_told_apart(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
    with pytest.raises(ProtocolError, match="does not speak farcall"):
        introduce_worker(ours, HELLO, "the store", 10, OURS)
