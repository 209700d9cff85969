"""Strangers at every door of a running group: the store, a worker's TCP port, and its unix socket.

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
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from eventually import eventually
from farcall.agent import Agent
from farcall.options import RpcBackendOptions
from farcall.protocol import wire
from farcall.protocol.handshake import Hello, Proof, Purpose, pack, take
from farcall.rendezvous import rendezvous
from farcall.rendezvous.store_messages import Set, pack_request
from farcall.security import Applicant, Credentials, Limits, Secret, credentials_of
from farcall.security.encryption import Encryption
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
FRAMES = b"".join(
    wire.encode(kind, 1, head, BOMB)
    for kind in range(wire.CALL, wire.NEWS + 1)
    for head in (b"", b"os\0getpid", BOMB, wire.METHOD + bytes(32))
)
"""A pickle that runs something, in every kind of message, as head and as body."""


class Door:
    """One place where the group listens."""

    def __init__(self, name: str, purpose: Purpose, connect: Callable[[], socket.socket], hello: Hello) -> None:
        self.name, self.purpose, self.connect, self._hello = name, purpose, connect, hello

    def applicant(self, secret: str) -> tuple[Applicant, bytes]:
        applicant, hello = Credentials(Secret(secret)).applicant(self.purpose, self._hello, "the door", b"")
        return applicant, pack(self.purpose, hello)

    def read(self, sock: socket.socket, buffer: bytearray) -> Any:
        """The next message of a greeting; None at the end."""
        while (taken := take(buffer, self.purpose, "the door")) is None:
            data = sock.recv(4096)
            if not data:
                return None
            buffer += data
        return taken[0]


class Group:
    """Two workers in this process, with real doors."""

    def __init__(self, secret: str, limits: Limits) -> None:
        self.port = free_port()
        self.secret = secret
        self.agents: list[Agent] = [None, None]  # type: ignore[list-item]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda rank: self._start(rank, limits), range(2)))

    def _start(self, rank: int, limits: Limits) -> None:
        credentials = Credentials(Secret(self.secret), limits=limits)
        meeting = rendezvous(f"tcp://127.0.0.1:{self.port}", f"w{rank}", rank, 2, 20, credentials=credentials)
        transports = {"unix": UnixTransport(), "tcp": TcpTransport()}
        options = RpcBackendOptions(heartbeat_interval=0.1, heartbeat_patience=20.0)
        agent = Agent(f"w{rank}", meeting, options, transports, credentials)
        agent.start()
        self.agents[rank] = agent

    def call(self, value: Any) -> Any:
        return self.agents[0].call("w1", abs, (value,), None, 20).wait()

    def doors(self) -> dict[str, Door]:
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
            "store": Door(
                "store", Purpose.STORE, lambda: socket.create_connection(("127.0.0.1", self.port), 10), store
            ),
            "tcp": Door(
                "tcp",
                Purpose.CALLS,
                lambda: socket.create_connection(("127.0.0.1", tcp_port), 10),
                hello(addresses["tcp"]),
            ),
            "unix": Door("unix", Purpose.CALLS, unix, hello(addresses["unix"])),
        }

    def close(self) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda agent: agent.shutdown(graceful=False, timeout=0), self.agents))


@pytest.fixture
def group() -> Iterator[Group]:
    exploded.clear()
    group = Group("the secret of this group", Limits(most=MOST, patience=0.3))
    yield group
    group.close()


def wait_for_end(sock: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(65536):
            received += data
    return received


# The attacks: each gets a door and a fresh connection to it.


def stay_silent(group: Group, door: Door, sock: socket.socket) -> None:
    wait_for_end(sock)


def send_garbage(group: Group, door: Door, sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        sock.sendall(os.urandom(100_000))
    wait_for_end(sock)


def send_frames_at_once(group: Group, door: Door, sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        sock.sendall(FRAMES + pack_request(Set(1, "mine", b"mine")))
    wait_for_end(sock)


def announce_a_lot(group: Group, door: Door, sock: socket.socket) -> None:
    sock.sendall(struct.pack("<8sHHI", b"farcall\0", 1, door.purpose, 2**32 - 1))
    wait_for_end(sock)


def send_half_a_hello(group: Group, door: Door, sock: socket.socket) -> None:
    sock.sendall(door.applicant(group.secret)[1][:-3])
    wait_for_end(sock)


def send_a_hello_and_frames(group: Group, door: Door, sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        sock.sendall(door.applicant("not the secret at all")[1] + FRAMES + pack_request(Set(1, "mine", b"mine")))
    wait_for_end(sock)


def use_the_wrong_secret_and_send_frames(group: Group, door: Door, sock: socket.socket) -> None:
    applicant, hello = door.applicant("not the secret at all")
    sock.sendall(hello)
    proof = applicant.take(door.read(sock, bytearray()))
    assert proof is not None
    with contextlib.suppress(ConnectionError):
        sock.sendall(pack(door.purpose, proof) + FRAMES + pack_request(Set(1, "mine", b"mine")))
    assert b"must know the secret" in wait_for_end(sock)


def replay(group: Group, door: Door, sock: socket.socket) -> None:
    applicant, hello = door.applicant(group.secret)
    with door.connect() as honest:
        honest.sendall(hello)
        proof = applicant.take(door.read(honest, bytearray()))
    assert proof is not None
    sock.sendall(hello)
    door.read(sock, bytearray())
    with contextlib.suppress(ConnectionError):
        sock.sendall(pack(door.purpose, proof) + FRAMES + pack_request(Set(1, "mine", b"mine")))
    assert b"must know the secret" in wait_for_end(sock)


def reflect(group: Group, door: Door, sock: socket.socket) -> None:
    """Gives the challenge back as the nonce of a second connection, and what comes there as its own proof."""
    _, hello = door.applicant("not the secret at all")
    sock.sendall(hello)
    challenge = door.read(sock, bytearray())
    with contextlib.suppress(ConnectionError):
        sock.sendall(pack(door.purpose, Proof(challenge.nonce)) + FRAMES)
    assert b"must know the secret" in wait_for_end(sock)


ATTACKS = [
    stay_silent,
    send_garbage,
    send_frames_at_once,
    announce_a_lot,
    send_half_a_hello,
    send_a_hello_and_frames,
    use_the_wrong_secret_and_send_frames,
    replay,
    reflect,
]


@pytest.mark.parametrize("name", ["store", "tcp", "unix"])
def test_no_stranger_gets_in(group: Group, name: str, caplog: pytest.LogCaptureFixture) -> None:
    door = group.doors()[name]
    for attack in ATTACKS:
        caplog.clear()
        with caplog.at_level(logging.DEBUG), door.connect() as sock:
            attack(group, door, sock)
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
    door = group.doors()[name]
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            with door.connect() as sock:
                use_the_wrong_secret_and_send_frames(group, door, sock)
    assert len([record for record in caplog.records if "know the secret" in record.getMessage()]) == 1


@pytest.mark.parametrize("name", ["store", "tcp", "unix"])
def test_a_thousand_silent_strangers_hold_up_nobody(group: Group, name: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = 1000 if hard == resource.RLIM_INFINITY or hard >= 2500 else 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2500, hard if hard > 0 else 2500)), hard))
    door = group.doors()[name]
    target = group.agents[1]
    slowest: list[float] = []
    over = threading.Event()

    def keep_calling() -> None:
        while not over.is_set():
            before = time.perf_counter()
            assert group.call(-3) == 3
            slowest.append(time.perf_counter() - before)

    group.call(-1)
    caller = threading.Thread(target=keep_calling)
    caller.start()
    before = resident()
    crowd = []
    try:
        for _ in range(many):
            crowd.append(door.connect())
            if door.purpose == Purpose.CALLS:
                assert len(target._strangers) <= MOST
        grown = resident() - before
    finally:
        over.set()
        caller.join()
        for sock in crowd:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert grown < 16 << 20
    slowest.sort()
    assert slowest[len(slowest) // 2] < 0.02, "the middle call, on a machine that may be busy"
    assert group.call(-2) == 2
    eventually(lambda: len(target._strangers) == 0)


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_is_no_message_behind_the_proof_ends_that_connection_alone(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    door = group.doors()["tcp"]
    with door.connect() as sock:
        applicant, hello = door.applicant(group.secret)
        buffer = bytearray()
        sock.sendall(hello)
        proof = applicant.take(door.read(sock, buffer))
        assert proof is not None
        sock.sendall(pack(door.purpose, proof))
        while applicant.outcome is None:
            applicant.take(door.read(sock, buffer))
        applicant.welcome()
        with caplog.at_level(logging.WARNING):
            sock.sendall(b"\xff" * 100)
            assert wait_for_end(sock) == b""
    assert "connection from worker 'w0' closed: a message of unknown kind" in caplog.text
    assert group.call(-4) == 4


def test_workers_call_each_other_over_encrypted_channels_and_strangers_stay_out() -> None:
    secret, encryptions = Secret("the secret of this group"), [Encryption(), Encryption()]
    port = free_port()

    def start(rank: int) -> Agent:
        credentials = Credentials(secret, encryptions[rank], Limits(patience=0.3))
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
    credentials = credentials_of(RpcBackendOptions())
    assert credentials.encryption is not None
    assert credentials.limits == Limits()
