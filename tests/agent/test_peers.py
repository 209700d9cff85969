"""Finding the way to a peer: which transports are tried in which order, and what is said when none leads there."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import msgspec
import pytest

from eventually import eventually
from farcall.agent import peers
from farcall.agent.lanes import Lane
from farcall.agent.peers import Peer
from farcall.agent.sending import InParts
from farcall.errors import EncryptionError, WorkerLost
from farcall.protocol.handshake import (
    MAGIC,
    PREAMBLE_SIZE,
    VERSION,
    Challenge,
    Greeting,
    Hello,
    Proof,
    Purpose,
    Refused,
    Welcome,
    body_length,
    pack,
    unpack,
)
from farcall.protocol.ids import WorkerInfo
from farcall.protocol.membership_messages import Member
from farcall.protocol.wire import CALL, SHARES, Sizes, encode
from farcall.security import Applicant, Credentials, Secret
from farcall.security.proof import proof_of
from farcall.sleeping import FOREVER, blocking_thread
from farcall.transports.shared_memory import Borrower, Pool
from farcall.transports.sockets import SocketChannel

UNIX, TCP, TCP6 = "unix:/run/b.sock", "tcp:10.0.0.2:4000", "tcp:[fd00::2]:4000"
WELCOME = pack(Purpose.CALLS, Welcome("b", 1, 1))

Answer = bytes | OSError
"""What the other side has already sent when we connect, behind its proof of the secret, or what connecting raises."""

SECRET = Secret("the secret of the group")
US = Member(0, "a", 0, "here", ("unix:a",))


class Predictable(Credentials):
    """Credentials whose nonce is known beforehand, so that the other side's proof is, too."""

    def applicant(self, purpose: Purpose, hello: Hello, other: str, binding: bytes) -> tuple[Applicant, Hello]:
        hello = msgspec.structs.replace(hello, nonce=bytes(32))
        return Applicant(self.secret, purpose, hello, other, binding), hello


def hello_to(address: str, lends: int = -1, token: bytes = b"") -> Hello:
    """What `a` says to `b` there."""
    return Hello(
        "group",
        "a",
        0,
        "b",
        0,
        "here",
        ("unix:a",),
        wanted_number=1,
        dialed=address,
        nonce=bytes(32),
        lends=lends,
        token=token,
        limits=Sizes(),
    )


def challenge_and_proof(hello: Hello, secret: Secret) -> bytes:
    """What somebody who knows that secret answers."""
    body, nonce = pack(Purpose.CALLS, hello)[PREAMBLE_SIZE:], b"n" * 32
    mac = proof_of(secret, b"the side that listens", Purpose.CALLS, body, nonce, b"")
    return pack(Purpose.CALLS, Challenge(nonce)) + pack(Purpose.CALLS, Proof(mac))


class World:
    """What is at which address. Remembers who was tried, and closes all in the end."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.tried: list[tuple[str, float]] = []
        self.other_ends: list[socket.socket] = []
        self.channels: list[SocketChannel] = []
        self.hangs_up = False
        self.secret: Secret | None = SECRET  # what the other side knows
        self.lost: list[str] = []
        self.is_over = False
        self.pool = Pool(0, 0, str)
        self.process: int | None = None

    def connect(self, address: str, timeout: float) -> SocketChannel:
        self.tried.append((address, timeout))
        answer = self.answers.get(address, ConnectionRefusedError("nobody listens there"))
        if isinstance(answer, OSError):
            raise answer
        ours, theirs = socket.socketpair()
        if self.secret is not None:
            theirs.sendall(challenge_and_proof(self.hello(address), self.secret))
        theirs.sendall(answer)
        if self.hangs_up:
            theirs.shutdown(socket.SHUT_WR)
        self.other_ends.append(theirs)  # last: who sees it may send more
        self.channels.append(SocketChannel(ours, address, self.process))
        return self.channels[-1]

    def hello(self, address: str) -> Hello:
        """What is said to whoever is there."""
        if self.process is None:
            return hello_to(address)
        return hello_to(address, self.pool.probe(), self.pool.token)

    def heard(self, number: int = 0) -> Greeting:
        """The greeting that came at the other end."""
        data = self.other_ends[number].recv(1 << 16)
        size = body_length(data[:PREAMBLE_SIZE], Purpose.CALLS, "we")
        return unpack(data[PREAMBLE_SIZE : PREAMBLE_SIZE + size], "we")

    def is_closed(self, number: int) -> bool:
        """Whether the other end sees that we have gone."""
        end = self.other_ends[number]
        end.settimeout(5)
        try:
            while end.recv(1 << 16):
                pass
        except ConnectionResetError:  # we left something unread
            pass
        return True

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        for end in self.other_ends:
            end.close()
        self.pool.close()


class FakeTransport:
    def __init__(self, scheme: str, world: World) -> None:
        self.scheme = scheme
        self.connect = world.connect

    def listen(self, host: str | None = None) -> Any:
        raise AssertionError("a peer does not listen")


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def peer_in(
    world: World,
    addresses: tuple[str, ...] = (UNIX, TCP),
    schemes: tuple[str, ...] = ("unix", "tcp"),
    host: str = "here",
) -> Peer:
    return Peer(
        Member(1, "b", 1, host, addresses),
        US,
        "group",
        {scheme: FakeTransport(scheme, world) for scheme in schemes},
        Connection,  # type: ignore[arg-type]
        lambda: world.lost.append("this one"),
        lambda: world.is_over,
        Predictable(SECRET),
        world.pool,
    )


class Connection:
    """What the agent makes of a channel."""

    def __init__(self, peer: Peer, channel: SocketChannel, lane: Lane) -> None:
        self.info = peer.info
        self.channel, self.lane = channel, lane
        self.lose = lambda *_, **__: peer.forget(self)  # type: ignore[arg-type]


def connect(peer: Peer, seconds: float = FOREVER) -> Connection:
    connection: Any = peer.connect(monotonic() + seconds)
    assert isinstance(connection, Connection)
    return connection


def refusal(peer: Peer, seconds: float = FOREVER) -> str:
    with pytest.raises(WorkerLost) as lost:
        connect(peer, seconds)
    assert lost.value.worker == "b"
    assert peer.connection is None
    return str(lost.value)


def test_the_best_transport_that_works_is_taken(world: World) -> None:
    world.answers = {UNIX: WELCOME, TCP: WELCOME}
    peer = peer_in(world, addresses=(TCP, UNIX))
    assert peer.info == WorkerInfo("b", 1)
    assert peer.connection is None
    connection = connect(peer)
    assert [address for address, _ in world.tried] == [UNIX], "best first is the order of the transports"
    assert connection.channel is world.channels[0]
    assert connection.info == peer.info
    assert peer.connection is connection


def test_the_greeting_says_who_we_are_and_whom_we_want(world: World) -> None:
    world.answers = {UNIX: WELCOME}
    connect(peer_in(world))
    assert world.heard() == hello_to(UNIX)


@pytest.fixture
def lends(world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The world is a process of this host, with which memory can be shared. Which descriptors of it were tried."""
    world.pool, world.process = Pool(1 << 20, 4, str), os.getpid()
    tried: list[int] = []
    check = Borrower.check

    def noted(borrower: Borrower, descriptor: int) -> None:
        tried.append(descriptor)
        check(borrower, descriptor)

    monkeypatch.setattr(Borrower, "check", noted)
    return tried


def rest_of(world: World) -> bytes:
    """What came behind the hello and the proof."""
    data = world.other_ends[0].recv(1 << 16)
    for _ in range(2):
        size = body_length(data[:PREAMBLE_SIZE], Purpose.CALLS, "we")
        data = data[PREAMBLE_SIZE + size :]
    return data


def test_memory_is_offered_and_the_others_is_tried(world: World, lends: list[int]) -> None:
    theirs = Pool(1 << 20, 4, str)
    world.answers = {
        UNIX: pack(Purpose.CALLS, Welcome("b", 1, 1, shares=True, lends=theirs.probe(), token=theirs.token))
    }
    lane = connect(peer_in(world)).lane
    assert lends == [theirs.probe()]
    assert rest_of(world) == encode(SHARES, 0, b"", b""), "it is told that it may lend"
    pieces = lane.pieces(CALL, 1, b"", b"", [memoryview(bytes(1 << 18))])
    assert len(pieces) == 1, "the buffer is in shared memory"
    lane.close()
    theirs.close()


@pytest.mark.parametrize("token", [bytes(16), b""])
def test_who_offers_memory_that_is_not_its_own_is_not_told_that_it_may_lend(
    world: World, lends: list[int], token: bytes
) -> None:
    world.answers = {UNIX: pack(Purpose.CALLS, Welcome("b", 1, 1, lends=world.pool.probe(), token=token))}
    lane = connect(peer_in(world)).lane
    assert lends == [world.pool.probe()]
    assert rest_of(world) == b""
    assert not isinstance(pieces := lane.pieces(CALL, 1, b"", b"", [memoryview(bytes(1 << 18))]), InParts)
    assert len(pieces) == 2, "it could not open ours either, so the buffer follows"


def test_nothing_is_opened_of_one_who_has_not_proved_itself(world: World, lends: list[int]) -> None:
    theirs = Pool(1 << 20, 4, str)
    world.answers = {
        UNIX: pack(Purpose.CALLS, Welcome("b", 1, 1, shares=True, lends=theirs.probe(), token=theirs.token))
    }
    world.secret = Secret("another secret than the group's")
    refusal(peer_in(world))
    assert lends == []
    theirs.close()


def test_what_comes_behind_the_greeting_is_left_in_the_channel(world: World) -> None:
    world.answers = {UNIX: WELCOME + b"the first reply"}
    assert connect(peer_in(world)).channel.receive(100) == b"the first reply"


def test_a_welcome_may_come_in_pieces(world: World) -> None:
    world.answers = {UNIX: WELCOME[:10]}
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect, peer_in(world))
        eventually(lambda: world.other_ends)
        for number in range(10, len(WELCOME)):
            world.other_ends[0].send(WELCOME[number : number + 1])
        connecting.result()


@pytest.mark.parametrize(
    "answer",
    [
        FileNotFoundError(2, "No such file or directory"),
        PermissionError(13, "Permission denied"),
        TimeoutError("not accepted"),
        pack(Purpose.CALLS, Refused("another group")),
        pack(Purpose.CALLS, Welcome("c", 2)),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
    ids=["no file", "no permission", "timeout", "refused", "wrong worker", "stranger"],
)
def test_whatever_fails_is_passed_over_for_the_next(world: World, answer: Answer) -> None:
    world.answers = {UNIX: answer, TCP: WELCOME}
    connection = connect(peer_in(world))
    assert [address for address, _ in world.tried] == [UNIX, TCP]
    assert connection.channel.address == TCP
    if isinstance(answer, bytes):
        assert world.is_closed(0), "and let go of"


def test_every_address_of_a_transport_is_tried(world: World) -> None:
    world.answers = {TCP6: WELCOME}
    assert connect(peer_in(world, addresses=(UNIX, TCP, TCP6))).channel.address == TCP6
    assert [address for address, _ in world.tried] == [UNIX, TCP, TCP6]


def test_transports_of_one_host_are_not_tried_on_another(world: World) -> None:
    world.answers = {UNIX: WELCOME, TCP: WELCOME}
    peer = peer_in(world, addresses=(UNIX, "memory:1", TCP), schemes=("memory", "unix", "tcp"), host="there")
    assert connect(peer).channel.address == TCP
    assert [address for address, _ in world.tried] == [TCP]


def test_an_address_of_an_unknown_transport_is_passed_over(world: World) -> None:
    world.answers = {TCP: WELCOME}
    connect(peer_in(world, addresses=("warp:9", UNIX, TCP), schemes=("tcp",)))
    assert [address for address, _ in world.tried] == [TCP]


# What is said


def test_every_way_that_was_tried_is_named_with_its_reason(world: World) -> None:
    world.answers = {UNIX: FileNotFoundError(2, "No such file or directory", UNIX)}
    assert refusal(peer_in(world)) == (
        f"worker 'b' cannot be reached ({UNIX}: No such file or directory; {TCP}: nobody listens there); "
        "is it still running, and does every worker call rpc.shutdown() at its end?"
    )


def test_no_way_at_all(world: World) -> None:
    text = refusal(peer_in(world, addresses=(UNIX,), host="there"))
    assert text.startswith("worker 'b' cannot be reached (no transport of unix, tcp leads to it); is it still running,")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (pack(Purpose.CALLS, Refused("this is worker 'c', not 'b'")), "refused the connection: this is worker 'c'"),
        (pack(Purpose.CALLS, Welcome("c", 2)), "this is worker 'c', not 'b'"),
        (pack(Purpose.CALLS, Hello("g", "b", 1, "a")), "answered the proof of the secret with a Hello"),
        (pack(Purpose.STORE, Welcome("b", 1)), "of another kind (2, not 1)"),
        (
            struct.pack("<8sHHI", MAGIC, VERSION + 1, 9, 9),
            f"speaks version {VERSION + 1} of the farcall protocol, this",
        ),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "does not speak farcall: its first bytes were b'SSH-2.0-'"),
        (pack(Purpose.CALLS, Welcome("b", 1))[:-1] + b"\xc1", "sent a greeting that cannot be read"),
    ],
)
def test_an_answer_that_is_not_the_one_we_want(world: World, answer: bytes, reason: str) -> None:
    world.answers = {TCP: answer}
    text = refusal(peer_in(world, addresses=(TCP,)))
    assert text.startswith(f"worker 'b' cannot be reached ({TCP}: ")
    assert reason in text
    assert text.count(TCP) == 1
    assert world.is_closed(0)


@pytest.mark.parametrize(
    "answer",
    [EncryptionError("the other side refuses this worker's certificate"), bytes((21, 3, 3, 0, 2, 2, 10))],
    ids=["a certificate", "an alert"],
)
def test_who_refuses_the_encryption_is_not_gone_and_what_to_do_is_said(world: World, answer: Answer) -> None:
    world.secret = None
    world.hangs_up = True
    world.answers = {TCP: answer}
    with pytest.raises(WorkerLost) as caught:
        connect(peer_in(world, addresses=(TCP,)), FOREVER)
    assert isinstance(caught.value.__cause__, EncryptionError)
    assert str(caught.value).startswith(f"worker 'b' cannot be reached ({TCP}: {caught.value.__cause__})")
    assert "still running" not in str(caught.value)
    assert not caught.value.is_gone


def test_nobody_is_told_anything_who_does_not_know_the_secret(world: World) -> None:
    world.secret = Secret("quite another secret")
    world.answers = {TCP: pack(Purpose.CALLS, Refused("you are dead", gone=True))}
    assert "does not know this group's secret" in refusal(peer_in(world, addresses=(TCP,)))
    assert world.lost == []
    assert world.is_closed(0)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (WELCOME, "worker 'b' answered a hello with a Welcome"),
        (pack(Purpose.CALLS, Refused("no", gone=True)), "worker 'b' refused the connection: no"),
        (pack(Purpose.CALLS, Refused("no", stranger=True)), "this worker's secret (from the option secret) is not the"),
    ],
)
def test_what_is_said_before_the_proof_is_not_believed(world: World, answer: bytes, reason: str) -> None:
    world.secret = None
    world.answers = {TCP: answer}
    assert reason in refusal(peer_in(world, addresses=(TCP,)))
    assert world.lost == []


LOOPBACK = "tcp:[::1]:4000"
GONE = FileNotFoundError(2, "No such file or directory")
REFUSED = ConnectionRefusedError("nobody listens there")
ANOTHER = pack(Purpose.CALLS, Welcome("b", 1, 7))
STRANGER = pack(Purpose.CALLS, Refused("no", stranger=True))


@pytest.mark.parametrize(
    ("host", "answers", "knows_secret", "is_gone"),
    [
        ("here", {UNIX: GONE, LOOPBACK: REFUSED}, True, True),
        ("here", {UNIX: REFUSED, TCP: ANOTHER}, True, True),
        ("here", {UNIX: GONE, TCP: REFUSED}, True, False),  # in another container
        ("there", {LOOPBACK: REFUSED}, True, False),
        ("there", {TCP: ANOTHER}, True, True),
        ("there", {TCP: REFUSED}, True, False),
        ("there", {TCP: TimeoutError("not accepted")}, True, False),
        ("here", {UNIX: GONE, TCP: TimeoutError("not accepted")}, True, False),
        ("there", {TCP: STRANGER}, False, False),
        ("here", {UNIX: GONE, TCP: STRANGER}, False, False),
        ("there", {TCP: pack(Purpose.CALLS, Refused("this is worker 'c'"))}, False, False),
    ],
)
def test_it_is_gone_only_by_the_word_of_who_can_be_trusted(
    world: World, host: str, answers: dict[str, Answer], knows_secret: bool, is_gone: bool
) -> None:
    world.answers = answers
    world.secret = SECRET if knows_secret else None
    with pytest.raises(WorkerLost) as lost:
        connect(peer_in(world, addresses=tuple(answers), host=host))
    assert lost.value.is_gone is is_gone


def test_who_knows_another_secret_is_not_believed_to_be_all_there_is(world: World) -> None:
    world.secret = Secret("quite another secret")
    world.answers = {UNIX: GONE, TCP: ANOTHER}
    with pytest.raises(WorkerLost, match="does not know this group's secret") as lost:
        connect(peer_in(world))
    assert not lost.value.is_gone


def test_who_has_proved_itself_and_says_that_we_are_dead_is_believed(world: World) -> None:
    world.answers = {TCP: pack(Purpose.CALLS, Refused("you are dead", gone=True))}
    assert "refused the connection: you are dead" in refusal(peer_in(world, addresses=(TCP,)))
    assert world.lost == ["this one"]


@pytest.mark.parametrize("answer", [b"", WELCOME[:5], WELCOME[:-1]])
def test_a_connection_that_ends_in_the_midst_of_the_greeting(world: World, answer: bytes) -> None:
    world.hangs_up = True
    world.answers = {TCP: answer}
    assert "closed the connection in the midst of the greeting" in refusal(peer_in(world, addresses=(TCP,)))


@pytest.mark.parametrize("answer", [b"", WELCOME[:5], WELCOME[:-1]])
def test_a_greeting_that_is_not_answered_ends_with_the_time_of_the_call(world: World, answer: bytes) -> None:
    world.answers = {TCP: answer}
    before = monotonic()
    assert "did not answer the greeting in time" in refusal(peer_in(world, addresses=(TCP,)), seconds=0.02)
    assert 0.02 <= monotonic() - before < peers.CONNECT_TIMEOUT
    assert world.is_closed(0)


def test_a_channel_that_does_not_take_the_greeting(world: World) -> None:
    class Full(FakeTransport):
        def __init__(self) -> None:
            super().__init__("tcp", world)
            self.connect = self._connect  # type: ignore[method-assign]

        def _connect(self, address: str, timeout: float) -> SocketChannel:
            channel = world.connect(address, timeout)
            channel.send = lambda data: 3
            return channel

    world.answers = {TCP: WELCOME}
    peer = peer_in(world, addresses=(TCP,))
    peer._transports = {"tcp": Full()}
    assert "does not take a greeting of" in refusal(peer)
    assert world.is_closed(0)


# Time, and many at once


def test_connecting_has_the_time_of_the_call_but_not_for_ever(world: World) -> None:
    peer = peer_in(world, addresses=(TCP,))
    refusal(peer, seconds=5)
    refusal(peer)
    (_, short), (_, longest) = world.tried
    assert 4 < short <= 5
    assert peers.CONNECT_TIMEOUT - 1 < longest <= peers.CONNECT_TIMEOUT


def test_a_call_whose_time_is_over_still_hears_why(world: World) -> None:
    refusal(peer_in(world, addresses=(TCP,)), seconds=-1)
    assert [timeout for _, timeout in world.tried] in ([], [0.0])


def test_a_lost_connection_is_made_anew_by_the_next_call(world: World) -> None:
    world.answers = {UNIX: WELCOME}
    peer = peer_in(world)
    first = connect(peer)
    assert connect(peer) is first
    first.lose()
    assert peer.connection is None
    second = connect(peer)
    assert second is not first
    first.lose()
    assert peer.connection is second, "the loss of an old connection is not that of the new one"


def test_many_threads_make_one_connection(world: World) -> None:
    world.answers = {UNIX: WELCOME}
    peer = peer_in(world)
    start = threading.Barrier(8)

    def call() -> Connection:
        start.wait()
        return connect(peer)

    with ThreadPoolExecutor(8) as pool:
        connections = {each.result() for each in [pool.submit(call) for _ in range(8)]}
    assert len(connections) == 1
    assert len(world.tried) == 1


def test_a_call_does_not_wait_for_another_call_that_connects_longer_than_its_own_time(world: World) -> None:
    peer = peer_in(world)
    with peer._lock:
        assert refusal_of_locked(peer) == "worker 'b' could not be connected to in time"
    assert not world.tried


def refusal_of_locked(peer: Peer) -> str:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(refusal, peer, 0.01).result()


def test_the_owner_of_the_thread_hears_that_it_sleeps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(blocking_thread, "before", lambda: said.append("before"))
    monkeypatch.setattr(blocking_thread, "after", lambda: said.append("after"))
    world.answers = {UNIX: WELCOME}
    peer = peer_in(world)
    connect(peer)
    peer.connection = None
    world.answers = {}
    refusal(peer)
    assert said == ["before", "after"] * 2


def test_an_interrupt_leaves_no_channel_open_and_no_lock_locked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    world.answers = {UNIX: WELCOME}
    peer = peer_in(world)
    with monkeypatch.context() as patch:
        patch.setattr(peers, "unpack", interrupted)
        with pytest.raises(KeyboardInterrupt):
            connect(peer)
    assert world.is_closed(0)
    connect(peer)


@pytest.mark.parametrize(("left", "fate"), [(False, "was lost"), (True, "has left the group")])
def test_a_peer_that_is_gone_cannot_be_connected_to(world: World, left: bool, fate: str) -> None:
    peer = peer_in(world)
    assert not peer.is_lost
    peer.lose(left)
    assert peer.is_lost
    with pytest.raises(WorkerLost, match=f"worker 'b' {fate}"):
        peer.connect(FOREVER)
    assert world.tried == []


def test_what_is_raised_keeps_nothing(world: World) -> None:
    """Not even until the garbage collector comes by: the frames that it went through hold what is the caller's."""

    class Held:
        """Something of the caller's."""

    def refuse(address: str, timeout: float) -> SocketChannel:
        raise ConnectionRefusedError("nobody listens there")

    world.connect = refuse  # type: ignore[method-assign]

    def call(held: Held) -> None:
        with contextlib.suppress(WorkerLost):
            peer_in(world).connect(FOREVER)

    held = Held()
    here = weakref.ref(held)
    gc.collect()
    gc.disable()
    try:
        call(held)
        del held
        assert here() is None
    finally:
        gc.enable()
