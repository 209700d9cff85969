"""What is made of a failure of TLS: what is refused for good, what is no worker, and what may be tried again."""

from __future__ import annotations

import select
import socket
import ssl
import struct
from pathlib import Path

import pytest

from certificate_stage import ODDITIES, both_sides
from farcall.errors import EncryptionError, ProtocolError
from farcall.protocol.handshake import MAGIC, check_beginning
from farcall.testing.conformance import PATIENCE, in_thread, polls, read
from farcall.transports.tcp import TcpTransport
from farcall.transports.tls import TlsSocket
from farcall.transports.tls_failures import ENCRYPTED_ONLY, PLAIN, ended_early, explained, is_plain, not_tls


def test_the_two_sides_agree_on_how_a_connection_begins() -> None:
    assert PLAIN == MAGIC
    with pytest.raises(EncryptionError, match=r"it encrypts \(it speaks TLS\), and this worker does not"):
        check_beginning(ENCRYPTED_ONLY, "it")


def say_a_word(transport: TcpTransport, address: str) -> None:
    channel = transport.connect(address, PATIENCE)
    try:
        channel.send(b"?")
        read(channel, 1)
    finally:
        channel.close()


@pytest.mark.parametrize("oddity", [oddity for oddity in ODDITIES if not oddity.startswith("encrypted")])
def test_who_connects_hears_whose_certificate_is_refused_and_why(oddity: str, tmp_path: Path) -> None:
    ours, theirs, heard = both_sides(tmp_path, oddity)
    listener = TcpTransport(theirs, even_on_loopback=True).listen()
    said: list[OSError] = []

    def answer() -> None:
        assert polls(listener, select.POLLIN)
        channel = listener.accept()
        assert channel is not None
        try:
            read(channel, 1)
        except OSError as error:
            said.append(error)
        channel.close()

    join = in_thread(answer)
    with pytest.raises(EncryptionError, match=heard):
        say_a_word(TcpTransport(ours, even_on_loopback=True), listener.address)
    join()
    listener.close()
    assert [type(error) for error in said] == [EncryptionError]


def test_who_was_refused_and_cut_off_before_it_spoke_hears_why_all_the_same(tmp_path: Path) -> None:
    ours, theirs, heard = both_sides(tmp_path, "own certificates there only")
    assert ours is not None
    assert theirs is not None
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = TlsSocket(socket.create_connection(server.getsockname()), ours, listens=False)
        listening = TlsSocket(server.accept()[0], theirs, listens=True)
    listening.settimeout(PATIENCE)
    refused: list[str] = []

    def refuse() -> None:
        with pytest.raises(EncryptionError) as refusal:
            listening.recv(1)
        refused.append(str(refusal.value))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it ends with a reset
        listening.close()

    join = in_thread(refuse)
    client.shake_hands(PATIENCE)
    join()
    assert polls(client, select.POLLERR | select.POLLHUP)
    with pytest.raises(EncryptionError, match=heard):
        client.send(b"?")
    client.close()
    assert len(refused) == 1


def error(reason: str) -> ssl.SSLError:
    failure = ssl.SSLError(1, "what OpenSSL says")
    failure.reason = reason
    return failure


def test_an_alert_before_the_first_word_is_a_refusal_and_behind_it_a_broken_connection() -> None:
    alert = error("SSLV3_ALERT_HANDSHAKE_FAILURE")
    refusal = explained(alert, has_begun=False)
    assert isinstance(refusal, EncryptionError)
    assert "the other side refuses it (SSLV3_ALERT_HANDSHAKE_FAILURE)" in str(refusal)
    assert "encrypt_between_hosts must be the same at all workers" in str(refusal)
    broken = explained(alert, has_begun=True)
    assert type(broken) is ConnectionError
    assert "broke: SSLV3_ALERT" in str(broken)


def test_what_is_no_tls_is_no_refusal_of_a_worker() -> None:
    assert type(explained(error("WRONG_VERSION_NUMBER"), has_begun=False)) is ProtocolError
    assert type(not_tls(b"HTTP/1.1 400 Bad Request")) is ProtocolError
    assert type(not_tls(MAGIC + bytes(8))) is EncryptionError
    assert is_plain(MAGIC[:3])
    assert not is_plain(b"fa-call")


def test_a_connection_that_just_ends_may_be_tried_again() -> None:
    assert type(ended_early()) is ConnectionResetError
