"""Encrypted links: what is on the wire, what the two ends say to who does not encrypt, and what bounds a peer's TLS."""

from __future__ import annotations

import hashlib
import random
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from farcall.errors import EncryptionError, ProtocolError
from farcall.security.encryption import Encryption
from farcall.testing.conformance import (
    HANDSHAKE_LIMIT,
    PROLOGUE,
    TIMEOUT_S,
    accept,
    in_thread,
    open_links,
    receive,
    receive_frames,
    receive_until,
)
from farcall.transports.base import Link
from farcall.transports.stream import StreamLink
from farcall.transports.tcp import TcpListener, TcpTransport
from farcall.transports.tls import MAX_EMPTY_RECORDS, MAX_HANDSHAKE_RECORDS, TlsSocket
from hostile_tls import DATA, HANDSHAKE, HostileTls, hello_in_fragments


@pytest.fixture(scope="module")
def encryption() -> Encryption:
    return Encryption()


@pytest.fixture
def transport(encryption: Encryption) -> TcpTransport:
    return TcpTransport(encryption, even_on_loopback=True)


@pytest.fixture
def listener(transport: TcpTransport) -> Iterator[TcpListener]:
    listener = transport.listen(None, HANDSHAKE_LIMIT)
    yield listener
    listener.close()


def connect_plain(address: str) -> socket.socket:
    """Connects without TLS."""
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


# What is encrypted


def test_both_ends_have_the_fingerprint_of_the_listening_end(
    transport: TcpTransport, listener: TcpListener, encryption: Encryption
) -> None:
    ours, theirs = open_links(transport, listener)
    assert ours.binding == theirs.binding == encryption.fingerprint()
    assert len(encryption.fingerprint()) == 32
    assert Encryption().fingerprint() != encryption.fingerprint()
    assert ours.network == theirs.network == ""
    for end in (ours, theirs):
        end.close()


def test_loopback_is_not_encrypted_by_default(encryption: Encryption) -> None:
    transport = TcpTransport(encryption)
    listener = transport.listen("127.0.0.1", HANDSHAKE_LIMIT)
    ours, theirs = open_links(transport, listener)
    ours.send(b"hello")
    assert receive(theirs) == b"hello"
    assert ours.binding == theirs.binding == b""
    assert ours.network == theirs.network != ""
    assert transport._encryption_for("127.0.0.1") is None
    assert transport._encryption_for("10.0.0.1") is encryption
    assert transport._encryption_for("fd00::7") is encryption
    for end in (ours, theirs, listener):
        end.close()


def test_a_listener_on_loopback_takes_encrypted_links_too(encryption: Encryption) -> None:
    transport = TcpTransport(encryption)
    listener = transport.listen("127.0.0.1", HANDSHAKE_LIMIT)
    ours: list[StreamLink] = []
    join = in_thread(lambda: ours.append(transport.connect_encrypted(listener.address, TIMEOUT_S, HANDSHAKE_LIMIT)))
    theirs = accept(listener)
    receive_until([theirs], lambda: bool(ours))
    join()
    assert ours[0].binding == theirs.binding == encryption.fingerprint()
    assert ours[0].network == theirs.network == ""
    ours[0].send(b"secret")
    assert receive(theirs) == b"secret"
    for end in (*ours, theirs):
        end.close()
    listener.close()


def test_a_worker_that_does_not_encrypt_cannot_connect_encrypted() -> None:
    with pytest.raises(EncryptionError, match="this worker does not encrypt: encrypt_between_hosts must be the same"):
        TcpTransport().connect_encrypted("tcp:127.0.0.1:1", TIMEOUT_S, HANDSHAKE_LIMIT)


def test_what_is_on_the_wire_cannot_be_read(transport: TcpTransport, listener: TcpListener) -> None:
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:

        def relay() -> None:
            client, _ = between.accept()
            with client, connect_plain(listener.address) as server:
                while True:
                    for sock in select.select([client, server], [], [], TIMEOUT_S)[0]:
                        data = sock.recv(1 << 16)
                        if not data:
                            return
                        seen.extend(data)
                        (server if sock is client else client).sendall(data)

        joins = [in_thread(relay)]
        address = f"tcp:127.0.0.1:{between.getsockname()[1]}"
        ours: list[StreamLink] = []
        joins.append(in_thread(lambda: ours.append(transport.connect(address, TIMEOUT_S, HANDSHAKE_LIMIT))))
        theirs = accept(listener)
        receive_until([theirs], lambda: bool(ours))
        ours[0].send(b"a word that nobody else may read")
        assert receive(theirs) == b"a word that nobody else may read"
        theirs.close()
        ours[0].close()
        for join in joins:
            join()
    assert b"nobody else" not in seen
    assert b"farcall" not in seen
    assert seen[:2] == b"\x16\x03"


# Who does not encrypt


@pytest.mark.parametrize(
    ("beginning", "expected"),
    [
        (PROLOGUE, "the other side does not encrypt, and this worker does"),
        (b"GET / HTTP/1.1\r\n\r\n", "speaks neither TLS nor farcall: its first bytes were b'GET / HT'"),
        (b"\x16\x03\x01\x00\x05hello", "the encrypted connection failed"),
    ],
)
def test_the_listening_end_says_what_is_no_tls(listener: TcpListener, beginning: bytes, expected: str) -> None:
    with connect_plain(listener.address) as stranger:
        theirs = accept(listener)
        stranger.sendall(beginning)
        with pytest.raises(ProtocolError, match=expected):
            receive(theirs)
        theirs.close()


def test_the_connecting_end_says_what_is_no_tls(transport: TcpTransport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            client, _ = server.accept()
            with client:
                client.sendall(PROLOGUE)
                client.recv(1 << 16)

        join = in_thread(answer)
        with pytest.raises(EncryptionError, match="the other side does not encrypt, and this worker does"):
            transport.connect(f"tcp:127.0.0.1:{server.getsockname()[1]}", TIMEOUT_S, HANDSHAKE_LIMIT)
        join()


def test_a_link_that_does_not_encrypt_is_told_that_the_listening_end_does(listener: TcpListener) -> None:
    ours = TcpTransport().connect(listener.address, TIMEOUT_S, HANDSHAKE_LIMIT)
    theirs = accept(listener)
    ours.send(b"hello")
    with pytest.raises(EncryptionError, match="does not encrypt"):
        receive(theirs)
    with pytest.raises(EncryptionError, match=r"it speaks TLS\), and this worker does not"):
        receive(ours)
    for end in (ours, theirs):
        end.close()


def test_a_listener_that_never_answers_costs_no_more_than_the_timeout(transport: TcpTransport) -> None:
    listener = TcpTransport().listen(None, HANDSHAKE_LIMIT)
    with pytest.raises(TimeoutError):
        transport.connect(listener.address, 0.05, HANDSHAKE_LIMIT)
    listener.close()


# What the other end can make this end do


@contextmanager
def hostile_link(listener: TcpListener) -> Iterator[tuple[HostileTls, Link]]:
    """A connection on which the other end can send TLS records of any kind, and its accepted end."""
    found: list[HostileTls] = []
    join = in_thread(lambda: found.append(HostileTls(connect_plain(listener.address))))
    link = accept(listener)
    receive_until([link], lambda: bool(found))
    join()
    yield found[0], link
    found[0].sock.close()
    link.close()


def test_records_without_data_are_taken_up_to_their_limit(listener: TcpListener) -> None:
    """OpenSSL may update its keys by itself after very much data."""
    with hostile_link(listener) as (hostile, link):
        frame = (5).to_bytes(4, "little") + b"hello"
        hostile.sock.sendall(hostile.key_updates(MAX_EMPTY_RECORDS) + hostile.data(PROLOGUE + frame))
        assert receive(link) == b"hello"
        hostile.sock.sendall(hostile.key_update() + hostile.data(frame))
        with pytest.raises(ProtocolError, match=f"more than {MAX_EMPTY_RECORDS} TLS records without data"):
            receive(link)


@pytest.mark.parametrize("kind", ["key updates", "key updates that want an answer", "empty records", "tickets"])
def test_records_without_data_beyond_their_limit_break_the_link(listener: TcpListener, kind: str) -> None:
    with hostile_link(listener) as (hostile, link):
        if kind.startswith("key"):
            records = hostile.key_updates(1000, wants_answer=kind != "key updates")
        elif kind == "empty records":
            records = b"".join(hostile.record(DATA, b"") for _ in range(1000))
        else:  # which only servers may send
            records = b"".join(hostile.record(HANDSHAKE, bytes([4, 0, 0, 0])) for _ in range(1000))
        hostile.sock.sendall(records)
        with pytest.raises(ConnectionError):
            receive(link)


def test_data_in_tiny_records_arrives(listener: TcpListener) -> None:
    data = PROLOGUE + b"".join(len(frame).to_bytes(4, "little") + frame for frame in (b"", b"one", b"x" * 50))
    with hostile_link(listener) as (hostile, link):
        hostile.sock.sendall(b"".join(hostile.data(bytes([byte])) for byte in data))
        assert [bytes(frame) for frame, _ in receive_frames(link, 3)] == [b"", b"one", b"x" * 50]


def test_a_tls_handshake_in_too_many_records_is_refused(listener: TcpListener) -> None:
    hello = hello_in_fragments(1)
    with connect_plain(listener.address) as stranger:
        link = accept(listener)
        stranger.sendall(hello)
        with pytest.raises(ProtocolError, match=f"longer than {MAX_HANDSHAKE_RECORDS} records"):
            receive(link)
        link.close()


def test_a_connection_that_ends_before_it_is_encrypted_may_be_tried_again(listener: TcpListener) -> None:
    stranger = connect_plain(listener.address)
    link = accept(listener)
    stranger.sendall(hello_in_fragments(1 << 14)[:100])
    stranger.close()
    with pytest.raises(ConnectionResetError, match="closed the connection before it was encrypted"):
        receive(link)
    link.close()


# The socket below the links, which stores use as well


def test_one_thread_may_send_while_another_receives_and_timeouts_are_kept(encryption: Encryption) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        below = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    theirs = TlsSocket(accepted, encryption, listens=True)
    theirs.settimeout(TIMEOUT_S)
    ours = TlsSocket(below, encryption, listens=False)
    ours.settimeout(0.01)
    echoed = random.Random(3).randbytes(1 << 20)

    def echo() -> None:
        received = bytearray()
        while len(received) < len(echoed):
            received += theirs.recv(1000)
        theirs.sendall(received)

    join = in_thread(echo)
    ours.do_handshake(TIMEOUT_S)
    with pytest.raises(TimeoutError):
        ours.recv(1)
    ours.settimeout(TIMEOUT_S)
    answer = bytearray()

    def receive_all() -> None:
        while len(answer) < len(echoed):
            answer.extend(ours.recv(4096))

    reading = threading.Thread(target=receive_all)
    reading.start()
    ours.sendall(echoed)
    reading.join()
    join()
    assert hashlib.sha256(answer).digest() == hashlib.sha256(echoed).digest()
    ours.close()
    assert theirs.recv(1) == b""
    theirs.close()


def test_buffers_that_are_sent_together_fill_whole_records(encryption: Encryption) -> None:
    """A small buffer before a large one gets no record, and no system call, of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        below = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    ours = TlsSocket(below, encryption, listens=False)
    accepted.settimeout(TIMEOUT_S)
    found: list[HostileTls] = []
    join = in_thread(lambda: found.append(HostileTls(accepted, is_server=True)))
    ours.do_handshake(TIMEOUT_S)
    join()
    buffers = [b"head", bytes(40_000), b"", b"middle", bytes(100)]
    size = sum(map(len, buffers))
    assert ours.sendmsg(buffers) == size
    received = bytearray()
    sizes: list[int] = []
    while sum(sizes) < size:
        received += accepted.recv(1 << 16)
        while len(received) >= 5 and len(received) >= (end := 5 + int.from_bytes(received[3:5], "big")):
            sizes.append(end - 5 - 17)  # without the type of the record and its tag
            del received[:end]
    assert sizes == [16384, 16384, size - 2 * 16384]
    ours.close()
    accepted.close()
