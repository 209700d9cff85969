"""Encrypted channels: all rules of channels hold on them, and what goes over the wire is of no use to anybody else."""

from __future__ import annotations

import hashlib
import random
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from farcall.errors import EncryptionError
from farcall.security.encryption import Encryption
from farcall.testing.conformance import PATIENCE, TransportConformance, in_thread, open_pair, polls, read, write
from farcall.transports.tcp import TcpTransport
from farcall.transports.tls import TlsSocket


@pytest.fixture(scope="module")
def encryption() -> Encryption:
    return Encryption()


class TestTls(TransportConformance):
    @pytest.fixture
    def transport(self, encryption: Encryption) -> TcpTransport:
        return TcpTransport(encryption, even_on_loopback=True)

    @pytest.fixture
    def crowded_address(self) -> Iterator[str]:
        """The kernel keeps on asking who does not answer, once as many wait as may."""
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            port = full.getsockname()[1]
            waiting = [socket.create_connection(("127.0.0.1", port))]
            yield f"tcp:127.0.0.1:{port}"
            for sock in waiting:
                sock.close()


@pytest.fixture
def transport(encryption: Encryption) -> TcpTransport:
    return TcpTransport(encryption, even_on_loopback=True)


def test_both_ends_are_bound_to_the_same(transport: TcpTransport, encryption: Encryption) -> None:
    listener = transport.listen()
    ours, theirs = open_pair(transport, listener)
    assert ours.binding == theirs.binding == encryption.fingerprint()  # type: ignore[attr-defined]
    assert len(encryption.fingerprint()) == 32
    assert Encryption().fingerprint() != encryption.fingerprint()
    for each in (ours, theirs, listener):
        each.close()


def test_loopback_goes_in_the_clear_unless_it_is_asked_for(encryption: Encryption) -> None:
    transport = TcpTransport(encryption)
    listener = transport.listen("127.0.0.1")
    ours, theirs = open_pair(transport, listener)
    assert ours.binding == theirs.binding == b""  # type: ignore[attr-defined]
    assert transport._encryption_for("127.0.0.1") is None
    assert transport._encryption_for("10.0.0.1") is encryption
    assert transport._encryption_for("fd00::7") is encryption
    for each in (ours, theirs, listener):
        each.close()


def test_what_is_on_the_wire_cannot_be_read(transport: TcpTransport) -> None:
    listener = transport.listen()
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:
        host, port = listener.address.removeprefix("tcp:").split(":")

        def hand_through() -> None:
            client, _ = between.accept()
            with client, socket.create_connection((host, int(port))) as server:
                while True:
                    for sock in select.select([client, server], [], [], PATIENCE)[0]:
                        data = sock.recv(1 << 16)
                        if not data:
                            return
                        seen.extend(data)
                        (server if sock is client else client).sendall(data)

        join = in_thread(hand_through)
        ours: list[object] = []
        connecting = in_thread(
            lambda: ours.append(transport.connect(f"tcp:127.0.0.1:{between.getsockname()[1]}", PATIENCE))
        )
        assert polls(listener, select.POLLIN)
        theirs = listener.accept()
        assert theirs is not None
        while not ours:
            polls(theirs, select.POLLIN, 0.01)
            with pytest.raises(BlockingIOError):
                theirs.receive(1)
        connecting()
        write(ours[0], b"a word that nobody else may read")  # type: ignore[arg-type]
        assert read(theirs, 32) == b"a word that nobody else may read"
        theirs.close()
        ours[0].close()  # type: ignore[attr-defined]
        join()
    assert b"nobody else" not in seen
    assert seen[:2] == b"\x16\x03"
    listener.close()


@pytest.mark.parametrize("garbage", [b"farcall\0" + bytes(8), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05hello"])
def test_who_does_not_encrypt_is_told_apart_by_the_side_that_listens(transport: TcpTransport, garbage: bytes) -> None:
    listener = transport.listen()
    host, port = listener.address.removeprefix("tcp:").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        assert polls(listener, select.POLLIN)
        theirs = listener.accept()
        assert theirs is not None
        stranger.sendall(garbage)
        assert polls(theirs, select.POLLIN)
        expected = {
            b"f": "the other side does not encrypt, and this worker does",
            b"G": "speaks neither TLS nor farcall: its first bytes were b'GET / HT'",
            b"\x16": "the encrypted connection failed",
        }[garbage[:1]]
        with pytest.raises(ConnectionError, match=expected):
            theirs.receive(100)
        theirs.close()
    listener.close()


def test_who_does_not_encrypt_is_told_apart_by_the_side_that_connects(transport: TcpTransport) -> None:
    listener = TcpTransport().listen()

    def answer() -> None:
        assert polls(listener, select.POLLIN)
        theirs = listener.accept()
        assert theirs is not None
        theirs.send(b"farcall\0" + bytes(8))
        assert polls(theirs, select.POLLIN)
        theirs.receive(1 << 16)
        theirs.close()

    join = in_thread(answer)
    with pytest.raises(EncryptionError, match="the other side does not encrypt, and this worker does"):
        transport.connect(listener.address, PATIENCE)
    join()
    listener.close()


def test_a_listener_that_never_answers_costs_no_more_than_the_timeout(transport: TcpTransport) -> None:
    listener = TcpTransport().listen()
    with pytest.raises(TimeoutError):
        transport.connect(listener.address, 0.05)
    listener.close()


def test_one_thread_may_send_while_another_receives_and_timeouts_are_kept(encryption: Encryption) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        below = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    theirs = TlsSocket(accepted, encryption, listens=True)
    theirs.settimeout(PATIENCE)
    ours = TlsSocket(below, encryption, listens=False)
    ours.settimeout(0.01)
    echoed = random.Random(3).randbytes(1 << 20)

    def echo() -> None:
        received = bytearray()
        while len(received) < len(echoed):
            received += theirs.recv(1000)
        theirs.sendall(received)

    join = in_thread(echo)
    ours.shake_hands(PATIENCE)
    with pytest.raises(TimeoutError):
        ours.recv(1)
    ours.settimeout(PATIENCE)
    answer = bytearray()

    def receive() -> None:
        while len(answer) < len(echoed):
            answer.extend(ours.recv(4096))

    reading = threading.Thread(target=receive)
    reading.start()
    ours.sendall(echoed)
    reading.join()
    join()
    assert hashlib.sha256(answer).digest() == hashlib.sha256(echoed).digest()
    ours.close()
    assert theirs.recv(1) == b""
    theirs.close()
