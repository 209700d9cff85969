"""The store's thread over real sockets: keys, strangers, garbage, who may come in, and encryption."""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from rendezvous_stage import GROUP, Stage, wait_for_end

from farcall.errors import AuthenticationError, PeerRefusedError, VersionMismatchError
from farcall.protocol.handshake import Hello, Purpose, Welcome, body_length, pack
from farcall.rendezvous import client as client_module
from farcall.rendezvous import server as server_module
from farcall.rendezvous.addresses import listen
from farcall.rendezvous.client import Candidate, StoreClient, try_candidate
from farcall.rendezvous.handshake import OtherGroupError
from farcall.rendezvous.messages import Set, pack_request
from farcall.rendezvous.server import StoreServer
from farcall.security import Credentials, Secret
from farcall.security.encryption import Encryption
from farcall.transports.tls import TlsSocket
from farcall.transports.tls_failures import ENCRYPTED_ONLY


def test_clients_share_the_keys(stage: Stage) -> None:
    one, two = stage.client(0), stage.client(1)
    one.set("k", b"v")
    assert two.get("k", 10) == b"v"
    assert two.set_new("k", b"w") == b"v"
    assert [one.add("n", 2), two.add("n", 3)] == [2, 5]
    assert one.read("") == {"k": b"v", "n": b"5"}
    assert (two.delete("k"), two.delete("k")) == (True, False)


def test_a_large_value_goes_through_whole(stage: Stage) -> None:
    value = os.urandom(8 * 1024 * 1024)
    one, two = stage.client(0), stage.client(1)
    one.set("k", value)
    assert two.get("k", 10) == value


# -- strangers


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(16), os.urandom(70_000), b"farcall\0" + b"\xff" * 8]
)
def test_garbage_closes_its_connection_with_a_log_line_and_harms_nobody(
    stage: Stage, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    client = stage.client(0)
    with stage.raw() as stranger:
        try:
            stranger.sendall(garbage)
        except ConnectionError:
            pass
        wait_for_end(stranger)
    client.set("k", b"v")
    assert client.get("k", 10) == b"v"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", struct.pack("<I", 3) + b"\xc1\xc1\xc1"])
def test_garbage_after_the_hello_closes_the_connection_too(
    stage: Stage, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    client = stage.client(0)
    with stage.hello(1) as worker:
        worker.sendall(garbage)
        assert wait_for_end(worker) == b""
    client.set("k", b"v")
    assert "'worker1' (rank 1" in caplog.text
    assert "broke" not in caplog.text


def test_another_version_is_told_ours_and_closed_at_once(stages: Callable[..., Stage]) -> None:
    with stages(patience=60).raw() as stranger:
        stranger.sendall(struct.pack("<8sHHI", b"farcall\0", 99, 2, 5))
        answer = wait_for_end(stranger)
    assert b"speaks version 99" in answer
    with pytest.raises(VersionMismatchError):
        body_length(answer[:8] + b"\x63\0" + answer[10:16], Purpose.STORE, "it")


def test_silence_is_closed_after_a_while(stages: Callable[..., Stage], caplog: pytest.LogCaptureFixture) -> None:
    stage = stages(patience=0.05)
    client = stage.client(0)
    with stage.raw() as silent, stage.raw() as slow:
        slow.sendall(b"farcall\0")
        assert wait_for_end(silent) == b""
        assert wait_for_end(slow) == b""
    assert caplog.text.count("did not prove within 0.05 s that it knows the secret") == 1, "once for one address"
    client.set("k", b"v")  # who has proved itself may be silent for as long as it likes


def test_when_there_are_too_many_strangers_the_oldest_goes(
    stages: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    stage = stages(most=2)
    with stage.raw() as first, stage.raw(), stage.raw():
        assert wait_for_end(first) == b""
        stage.client(0).set("k", b"v")
    assert caplog.text.count("more than 2 connections have not proved that they know the secret") == 1


def test_who_does_not_know_the_secret_is_refused_and_logged_once(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    place = Candidate("127.0.0.1", stage.server.port, GROUP)
    for _ in range(3):
        with pytest.raises(AuthenticationError, match=r"secret \(from the option secret\) is not the group's"):
            try_candidate(place, "worker1", 1, 10, Credentials(Secret("not the secret at all")))
    assert caplog.text.count("'worker1', but it does not know the secret") == 1
    assert "127.0.0.1" in caplog.text
    assert stage.server._state.members == 0


def test_a_request_before_the_proof_is_not_read(stage: Stage) -> None:
    client = stage.client(0)
    hello = Hello(GROUP, "worker1", 1, "", nonce=bytes(32))
    with stage.raw() as stranger:
        stranger.sendall(pack(Purpose.STORE, hello) + pack_request(Set(1, "k", b"theirs")))
        wait_for_end(stranger)
    assert client.read("k") == {}


def test_a_reply_of_the_greeting_is_not_a_hello(stage: Stage) -> None:
    with stage.raw() as stranger:
        stranger.sendall(pack(Purpose.STORE, Welcome("w", 0)))
        assert b"Welcome where a hello was expected" in wait_for_end(stranger)
    assert isinstance(stage.client(0), StoreClient)


def test_running_out_of_descriptors_is_survived(caplog: pytest.LogCaptureFixture) -> None:
    class Exhausted(socket.socket):
        """As if no descriptor were left, the first time."""

        failed = False

        def accept(self) -> tuple[socket.socket, object]:
            if not self.failed:
                self.failed = True
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    server = StoreServer(Exhausted(fileno=listen("127.0.0.1", [0]).detach()), GROUP, 2, "host")
    try_candidate(Candidate("127.0.0.1", server.port, GROUP), "worker1", 1, 10)[0].close()
    server.close()
    assert "cannot accept connections for the moment: [Errno 24]" in caplog.text


# -- who may come in


def test_another_group_is_refused(stage: Stage) -> None:
    with pytest.raises(OtherGroupError, match="serves the group 'the group', not 'another'"):
        stage.hello(1, group="another")


def test_a_rank_or_name_that_is_there_is_refused(stage: Stage) -> None:
    stage.client(1)
    with pytest.raises(PeerRefusedError, match="'worker1' \\(rank 1\\); start 'b' with a rank of its own"):
        stage.hello(1, "b")
    with pytest.raises(PeerRefusedError, match="name 'worker1' is not unique: rank 1 and rank 2"):
        stage.hello(2, "worker1")


def test_refusals_of_one_kind_are_logged_once(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.client(1)
    for _ in range(3):
        with pytest.raises(PeerRefusedError):
            stage.hello(1, "b")
    assert caplog.text.count("rank 1 is taken by worker") == 1


# -- between hosts


@pytest.fixture
def far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if loopback were another host."""
    for module in (server_module, client_module):
        monkeypatch.setattr(module, "is_loopback", lambda host: False)


@pytest.mark.usefixtures("far_away")
def test_between_hosts_the_store_is_encrypted(background: ThreadPoolExecutor) -> None:
    ours, theirs = (Credentials(encryption=Encryption()) for _ in range(2))
    server = StoreServer(listen("127.0.0.1", [0]), GROUP, 2, "host", credentials=theirs)
    place = Candidate("127.0.0.1", server.port, GROUP)
    clients = [StoreClient(*try_candidate(place, f"worker{rank}", rank, 10, ours)) for rank in range(2)]
    waiting = background.submit(clients[0].get, "large", 10)
    clients[1].set("large", bytes(3 << 20))
    assert waiting.result() == bytes(3 << 20)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as stranger:
        stranger.sendall(pack(Purpose.STORE, Hello(GROUP, "worker1", 1, "", nonce=bytes(32))))
        assert wait_for_end(stranger) == ENCRYPTED_ONLY, "who does not encrypt hears nothing else"
    for client in clients:
        client.close()
    server.close()


@pytest.mark.usefixtures("far_away")
def test_the_time_it_takes_to_make_a_certificate_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first attempt of every worker would be in vain, and the store see its connection break."""
    passed = 0.0
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed))

    class Slow(Encryption):
        def connecting(self) -> ssl.SSLContext:
            nonlocal passed
            passed += 60.0
            return super().connecting()

    server = StoreServer(listen("127.0.0.1", [0]), GROUP, 1, "host", credentials=Credentials(encryption=Encryption()))
    try:
        candidate = Candidate("127.0.0.1", server.port, GROUP)
        sock, _ = try_candidate(candidate, "ann", 0, 10, Credentials(encryption=Slow()))
        sock.close()
    finally:
        server.close(linger=0)


@pytest.mark.usefixtures("far_away")
def test_who_stands_between_a_worker_and_its_store_is_found() -> None:
    """It has no secret, but a certificate of its own: it decrypts, and encrypts anew."""
    honest, between = Credentials(encryption=Encryption()), Encryption()
    server = StoreServer(listen("127.0.0.1", [0]), GROUP, 2, "host", credentials=honest)
    with listen("127.0.0.1", [0]) as listener, ThreadPoolExecutor(1) as pool:

        def hand_through() -> None:
            victim = TlsSocket(listener.accept()[0], between, listens=True)
            store = TlsSocket(socket.create_connection(("127.0.0.1", server.port)), between, listens=False)
            victim.settimeout(10)
            with victim, store:
                hello = victim.recv(4096)
                store.do_handshake(10)
                store.settimeout(10)
                store.sendall(hello)
                victim.sendall(store.recv(4096))  # the challenge
                store.sendall(victim.recv(4096))  # the proof
                victim.sendall(store.recv(4096))

        handing = pool.submit(hand_through)
        place = Candidate("127.0.0.1", listener.getsockname()[1], GROUP)
        with pytest.raises(AuthenticationError):
            try_candidate(place, "worker1", 1, 10, honest)
        handing.result()
    server.close()


def test_who_hands_a_greeting_through_from_another_address_of_loopback_gets_nothing(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.2", stage.server.port)) as between, ThreadPoolExecutor() as pool:

        def hand_through() -> None:
            near, _ = between.accept()
            with near, stage.raw() as far:
                for _ in range(2):  # the hello and the challenge, the proof and the verdict
                    far.sendall(near.recv(65536))
                    near.sendall(far.recv(65536))

        handed = pool.submit(hand_through)
        with pytest.raises(AuthenticationError):
            try_candidate(Candidate("127.0.0.2", stage.server.port, GROUP), "worker1", 1, 10, stage.credentials)
        handed.result()
    assert "another process relays the connection" in caplog.text
    assert stage.server._state.members == 0
