"""What a failure of TLS means: what is refused for good, what is no worker, and what may be tried again."""

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
from farcall.testing.conformance import HANDSHAKE_LIMIT, TIMEOUT_S, accept, in_thread, receive
from farcall.transports.tcp import TcpTransport
from farcall.transports.tls import TlsSocket
from farcall.transports.tls_failures import ENCRYPTED_ONLY, PLAIN, ended_early, explained, is_plain, not_tls


def test_the_two_sides_agree_on_how_a_connection_begins() -> None:
    assert PLAIN == MAGIC
    with pytest.raises(EncryptionError, match=r"it encrypts \(it speaks TLS\), and this worker does not"):
        check_beginning(ENCRYPTED_ONLY, "it")


def send_and_receive(transport: TcpTransport, address: str) -> None:
    link = transport.connect(address, TIMEOUT_S, HANDSHAKE_LIMIT)
    try:
        link.send(b"?")
        receive(link)
    finally:
        link.close()


@pytest.mark.parametrize("oddity", [oddity for oddity in ODDITIES if not oddity.startswith("encrypted")])
def test_the_connecting_end_says_whose_certificate_is_refused_and_why(oddity: str, tmp_path: Path) -> None:
    ours, theirs, expected = both_sides(tmp_path, oddity)
    listener = TcpTransport(theirs, even_on_loopback=True).listen(None, HANDSHAKE_LIMIT)
    raised: list[OSError] = []

    def answer() -> None:
        link = accept(listener)
        try:
            receive(link)
        except OSError as error:
            raised.append(error)
        link.close()

    join = in_thread(answer)
    with pytest.raises(EncryptionError, match=expected):
        send_and_receive(TcpTransport(ours, even_on_loopback=True), listener.address)
    join()
    listener.close()
    assert [type(error) for error in raised] == [EncryptionError]


def test_a_refusal_is_told_to_an_end_that_was_cut_off_before_it_sent_anything(tmp_path: Path) -> None:
    ours, theirs, expected = both_sides(tmp_path, "own certificates there only")
    assert ours is not None
    assert theirs is not None
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = TlsSocket(socket.create_connection(server.getsockname()), ours, listens=False)
        listening = TlsSocket(server.accept()[0], theirs, listens=True)
    listening.settimeout(TIMEOUT_S)
    refused: list[str] = []

    def refuse() -> None:
        with pytest.raises(EncryptionError) as refusal:
            listening.recv(1)
        refused.append(str(refusal.value))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it ends with a reset
        listening.close()

    join = in_thread(refuse)
    client.do_handshake(TIMEOUT_S)
    join()
    poll = select.poll()
    poll.register(client, 0)  # a broken connection is reported all the same
    assert poll.poll(TIMEOUT_S * 1000)
    with pytest.raises(EncryptionError, match=expected):
        client.send(b"?")
    client.close()
    assert len(refused) == 1


def error(reason: str) -> ssl.SSLError:
    failure = ssl.SSLError(1, "what OpenSSL says")
    failure.reason = reason
    return failure


def test_an_alert_before_the_first_data_is_a_refusal_and_after_it_a_broken_connection() -> None:
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
