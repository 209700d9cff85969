"""Finding the way to a peer: which transports are tried in which order, within which time, and by how many at once."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from peer_stage import TCP, TCP6, UNIX, WELCOME, Answer, Connection, World, connect, hello_to, peer_in, refusal

from eventually import eventually
from farcall.agent import peers
from farcall.agent.peers import Peer
from farcall.agent.sending import InParts
from farcall.errors import WorkerLost
from farcall.protocol.handshake import PREAMBLE_SIZE, Purpose, Refused, Welcome, body_length, pack
from farcall.protocol.ids import WorkerInfo
from farcall.protocol.wire import CALL, SHARES, encode
from farcall.security import Secret
from farcall.sleeping import FOREVER, blocking_thread
from farcall.transports.borrowed_memory import Borrower
from farcall.transports.shared_memory import Pool
from farcall.transports.sockets import SocketChannel


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
