"""Strangers at every endpoint of a running group: the store, a worker's TCP port, and its unix socket.

Whatever they do, nothing of theirs is unpickled or run, no entry of the store changes, the workers go on calling each
other, and one line in the log names each. The attacks are real: `tests/security/test_checks_removed.py` removes the
checks one by one, and sees them succeed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import resource
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from eventually import eventually
from farcall.options import RpcBackendOptions
from farcall.protocol import frames
from farcall.protocol.handshake import (
    VERSION,
    Greeting,
    Hello,
    Proof,
    Purpose,
    encode,
    pack,
    pack_prologue,
    take,
    unpack,
)
from farcall.rendezvous import rendezvous
from farcall.rendezvous.messages import Set, pack_request
from farcall.runtime.agent import Agent
from farcall.security import ClientHandshake, Credentials, Limits, Secret, credentials_from_options
from farcall.security.encryption import Encryption
from farcall.transports.base import Transport
from farcall.transports.stream import INTERNAL
from farcall.transports.tcp import TcpTransport
from farcall.transports.tls_failures import ENCRYPTED_ONLY
from farcall.transports.unix import UnixTransport
from ports import free_port

pytestmark = pytest.mark.timeout(60)

exploded: list[str] = []
MOST = 32


class Bomb:
    def __reduce__(self) -> Any:
        return exploded.append, ("bang",)


BOMB = pickle.dumps(Bomb())


def framed(*bodies: bytes, mark: int = 0) -> bytes:
    return b"".join(struct.pack("<I", len(body) | mark) + body for body in bodies)


FRAMES = b"".join(
    framed(frames.HEADER.pack(kind, 0, len(callee), 0, 1) + callee + BOMB, mark=mark)
    for kind in range(frames.GOSSIP + 4)
    for callee in (b"", b"os\0getpid", BOMB, frames.METHOD + bytes(44))
    for mark in (0, INTERNAL)
)
"""A pickle that runs something, in every kind of frame, as callee and as payload; the same as internal frames."""


class Endpoint:
    """One place where the group listens."""

    def __init__(self, name: str, purpose: Purpose, connect: Callable[[], socket.socket], hello: Hello) -> None:
        self.name, self.purpose, self.connect, self._hello = name, purpose, connect, hello

    def client_handshake(self, secret: str) -> tuple[ClientHandshake, bytes]:
        handshake, hello = Credentials(Secret(secret)).client_handshake(self.purpose, self._hello, "the endpoint", b"")
        return handshake, pack(self.purpose, hello)

    def pack_next(self, message: Greeting) -> bytes:
        """A message that is not the first."""
        return pack(self.purpose, message) if self.purpose == Purpose.STORE else framed(encode(message))

    def read(self, sock: socket.socket, buffer: bytearray) -> Any:
        """The next message of the handshake; None at the end."""
        while (message := self._take(buffer)) is None:
            data = sock.recv(4096)
            if not data:
                return None
            buffer += data
        return message

    def _take(self, buffer: bytearray) -> Greeting | None:
        if self.purpose == Purpose.STORE or buffer.startswith(b"farcall\0"):
            taken = take(buffer, self.purpose, "the endpoint")
            return None if taken is None else taken[0]
        size = int.from_bytes(buffer[:4], "little")
        if len(buffer) < 4 or len(buffer) < 4 + size:
            return None
        message = unpack(bytes(buffer[4 : 4 + size]), "the endpoint")
        del buffer[: 4 + size]
        return message


class Group:
    """Two workers in this process, with real endpoints."""

    def __init__(self, secret: str, limits: Limits) -> None:
        self.port = free_port()
        self.secret = secret
        self.agents: list[Agent] = [None, None]  # type: ignore[list-item]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda rank: self._start(rank, limits), range(2)))

    def _start(self, rank: int, limits: Limits) -> None:
        credentials = Credentials(Secret(self.secret), limits=limits)
        meeting = rendezvous(f"tcp://127.0.0.1:{self.port}", f"w{rank}", rank, 2, 20, credentials=credentials)
        transports: dict[str, Transport] = {"unix": UnixTransport(), "tcp": TcpTransport()}
        options = RpcBackendOptions(heartbeat_interval=0.1, heartbeat_patience=20.0)
        agent = Agent(f"w{rank}", meeting, options, transports, credentials)
        agent.start()
        self.agents[rank] = agent

    def call(self, value: Any) -> Any:
        return self.agents[0].call("w1", abs, (value,), None, 20).wait()

    def endpoints(self) -> dict[str, Endpoint]:
        target = self.agents[1]
        run = target._rendezvous.group
        addresses = {listener.address.partition(":")[0]: listener.address for listener in target._listeners}

        def hello(address: str) -> Hello:
            return Hello(run, "w0", 0, "w1", 0, "", (), wanted_number=1, dialed=address)

        def unix() -> socket.socket:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(10)
            sock.connect(addresses["unix"].removeprefix("unix:"))
            return sock

        tcp_port = int(addresses["tcp"].rpartition(":")[2])
        store = Hello(f"127.0.0.1:{self.port}, 2 workers", "w1", 1, "", dialed=f"127.0.0.1:{self.port}")
        return {
            "store": Endpoint(
                "store", Purpose.STORE, lambda: socket.create_connection(("127.0.0.1", self.port), 10), store
            ),
            "tcp": Endpoint(
                "tcp",
                Purpose.CALLS,
                lambda: socket.create_connection(("127.0.0.1", tcp_port), 10),
                hello(addresses["tcp"]),
            ),
            "unix": Endpoint("unix", Purpose.CALLS, unix, hello(addresses["unix"])),
        }

    def close(self) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda agent: agent.shutdown(graceful=False, timeout=0), self.agents))


@pytest.fixture
def group() -> Iterator[Group]:
    exploded.clear()
    group = Group("the secret of this group", Limits(max_strangers=MOST, proof_timeout=0.3))
    yield group
    group.close()


def wait_for_end(sock: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(65536):
            received += data
    return received


# The attacks: each gets an endpoint and a fresh connection to it.


def stay_silent(group: Group, endpoint: Endpoint, sock: socket.socket) -> None:
    wait_for_end(sock)


def send_garbage(group: Group, endpoint: Endpoint, sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        sock.sendall(os.urandom(100_000))
    wait_for_end(sock)


def send_frames_at_once(group: Group, endpoint: Endpoint, sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        sock.sendall(FRAMES + pack_request(Set(1, "mine", b"mine")))
    wait_for_end(sock)


def announce_a_lot(group: Group, endpoint: Endpoint, sock: socket.socket) -> None:
    sock.sendall(struct.pack("<8sHHI", b"farcall\0", VERSION, endpoint.purpose, 2**32 - 1))
    wait_for_end(sock)


def announce_more_than_a_handshake_may_have(group: Group, endpoint: Endpoint, sock: socket.socket) -> None:
    if endpoint.purpose == Purpose.CALLS:
        sock.sendall(pack_prologue() + struct.pack("<I", 70_000))
        assert b"this worker takes 65,536 at most" in wait_for_end(sock)
    else:
        announce_a_lot(group, endpoint, sock)


def begin_with_an_internal_frame(group: Group, endpoint: Endpoint, sock: socket.socket) -> None:
    prologue = struct.pack("<8sHH", b"farcall\0", VERSION, endpoint.purpose)
    with contextlib.suppress(ConnectionError):
        sock.sendall(prologue + framed(bytes([9]) + bytes(27), mark=INTERNAL) + FRAMES)
    wait_for_end(sock)


def send_half_a_hello(group: Group, endpoint: Endpoint, sock: socket.socket) -> None:
    sock.sendall(endpoint.client_handshake(group.secret)[1][:-3])
    wait_for_end(sock)


def send_a_hello_and_frames(group: Group, endpoint: Endpoint, sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        sock.sendall(
            endpoint.client_handshake("not the secret at all")[1] + FRAMES + pack_request(Set(1, "mine", b"mine"))
        )
    wait_for_end(sock)


def use_the_wrong_secret_and_send_frames(group: Group, endpoint: Endpoint, sock: socket.socket) -> None:
    handshake, hello = endpoint.client_handshake("not the secret at all")
    sock.sendall(hello)
    proof = handshake.take(endpoint.read(sock, bytearray()))
    assert proof is not None
    with contextlib.suppress(ConnectionError):
        sock.sendall(endpoint.pack_next(proof) + FRAMES + pack_request(Set(1, "mine", b"mine")))
    assert b"must know the secret" in wait_for_end(sock)


def replay(group: Group, endpoint: Endpoint, sock: socket.socket) -> None:
    handshake, hello = endpoint.client_handshake(group.secret)
    with endpoint.connect() as honest:
        honest.sendall(hello)
        proof = handshake.take(endpoint.read(honest, bytearray()))
    assert proof is not None
    sock.sendall(hello)
    endpoint.read(sock, bytearray())
    with contextlib.suppress(ConnectionError):
        sock.sendall(endpoint.pack_next(proof) + FRAMES + pack_request(Set(1, "mine", b"mine")))
    assert b"must know the secret" in wait_for_end(sock)


def reflect(group: Group, endpoint: Endpoint, sock: socket.socket) -> None:
    """Gives the challenge back as the nonce of a second connection, and what comes there as its own proof."""
    _, hello = endpoint.client_handshake("not the secret at all")
    sock.sendall(hello)
    challenge = endpoint.read(sock, bytearray())
    with contextlib.suppress(ConnectionError):
        sock.sendall(endpoint.pack_next(Proof(challenge.nonce)) + FRAMES)
    assert b"must know the secret" in wait_for_end(sock)


ATTACKS = [
    stay_silent,
    send_garbage,
    send_frames_at_once,
    announce_a_lot,
    announce_more_than_a_handshake_may_have,
    begin_with_an_internal_frame,
    send_half_a_hello,
    send_a_hello_and_frames,
    use_the_wrong_secret_and_send_frames,
    replay,
    reflect,
]


@pytest.mark.parametrize("name", ["store", "tcp", "unix"])
def test_no_stranger_gets_in(group: Group, name: str, caplog: pytest.LogCaptureFixture) -> None:
    endpoint = group.endpoints()[name]
    for attack in ATTACKS:
        caplog.clear()
        with caplog.at_level(logging.DEBUG), endpoint.connect() as sock:
            attack(group, endpoint, sock)
        assert group.call(-7) == 7, attack.__name__
        said = "127.0.0.1" if name != "unix" else f"unix:process {os.getpid()}"
        assert any(said in record.getMessage() for record in caplog.records), attack.__name__
    assert exploded == []
    store = group.agents[0]._rendezvous.store
    assert store.read("mine") == {}


@pytest.mark.parametrize("name", ["store", "tcp", "unix"])
def test_a_stranger_that_comes_again_and_again_is_logged_once(
    group: Group, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = group.endpoints()[name]
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            with endpoint.connect() as sock:
                use_the_wrong_secret_and_send_frames(group, endpoint, sock)
    assert len([record for record in caplog.records if "know the secret" in record.getMessage()]) == 1


@pytest.mark.parametrize("name", ["store", "tcp", "unix"])
def test_a_thousand_silent_strangers_hold_up_nobody(group: Group, name: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = 1000 if hard == resource.RLIM_INFINITY or hard >= 2500 else 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2500, hard if hard > 0 else 2500)), hard))
    endpoint = group.endpoints()[name]
    target = group.agents[1]
    answered: list[int] = []
    over = threading.Event()

    def keep_calling() -> None:
        while not over.is_set():
            answered.append(group.call(-3))

    group.call(-1)
    caller = threading.Thread(target=keep_calling)
    caller.start()
    before = resident()
    crowd = []
    try:
        for _ in range(many):
            crowd.append(endpoint.connect())
            if endpoint.purpose == Purpose.CALLS:
                assert len(target._handshakes) <= MOST
        grown = resident() - before
        before_last = len(answered)
        eventually(lambda: len(answered) >= before_last + 20)
    finally:
        over.set()
        caller.join()
        for sock in crowd:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert grown < 16 << 20
    assert set(answered) == {3}
    assert group.call(-2) == 2
    eventually(lambda: len(target._handshakes) == 0)


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_is_no_message_behind_the_proof_ends_that_connection_alone(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = group.endpoints()["tcp"]
    with endpoint.connect() as sock:
        handshake, hello = endpoint.client_handshake(group.secret)
        buffer = bytearray()
        sock.sendall(hello)
        proof = handshake.take(endpoint.read(sock, buffer))
        assert proof is not None
        sock.sendall(endpoint.pack_next(proof))
        while handshake.outcome is None:
            handshake.take(endpoint.read(sock, buffer))
        handshake.welcome()
        with caplog.at_level(logging.WARNING):
            sock.sendall(b"\xff" * 100)
            assert wait_for_end(sock) == b""
    assert "connection from worker 'w0' closed: the other end sent a frame of 2,147,483,647 bytes" in caplog.text
    assert group.call(-4) == 4


def test_workers_call_each_other_over_encrypted_channels_and_strangers_stay_out() -> None:
    secret, encryptions = Secret("the secret of this group"), [Encryption(), Encryption()]
    port = free_port()

    def start(rank: int) -> Agent:
        credentials = Credentials(secret, encryptions[rank], Limits(proof_timeout=0.3))
        meeting = rendezvous(f"tcp://127.0.0.1:{port}", f"w{rank}", rank, 2, 20, credentials=credentials)
        transports = {"tcp": TcpTransport(encryptions[rank], even_on_loopback=True)}
        options = RpcBackendOptions(heartbeat_interval=0.1, heartbeat_patience=20.0)
        agent = Agent(f"w{rank}", meeting, options, transports, credentials)
        agent.start()
        return agent

    with ThreadPoolExecutor(2) as pool:
        agents = list(pool.map(start, range(2)))
        try:
            assert agents[0].call("w1", len, (bytes(3 << 20),), None, 20).wait() == 3 << 20
            assert agents[1].call("w0", bytes, (5 << 20,), None, 20).wait() == bytes(5 << 20)
            (listener,) = agents[1]._listeners
            with socket.create_connection(("127.0.0.1", int(listener.address.rpartition(":")[2])), 10) as stranger:
                stranger.sendall(pack(Purpose.CALLS, Hello("g", "w0", 0, "w1", nonce=bytes(32))))
                assert wait_for_end(stranger) == ENCRYPTED_ONLY
            with socket.create_connection(("127.0.0.1", int(listener.address.rpartition(":")[2])), 10) as silent:
                assert select.select([silent], [], [], 10)[0]
            assert agents[0].call("w1", abs, (-1,), None, 20).wait() == 1
        finally:
            list(pool.map(lambda agent: agent.shutdown(graceful=False, timeout=0), agents))


def test_the_default_options_ask_for_proof_and_encrypt() -> None:
    credentials = credentials_from_options(RpcBackendOptions())
    assert credentials.encryption is not None
    assert credentials.limits == Limits()
