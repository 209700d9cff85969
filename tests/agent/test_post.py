"""What workers say about references, and how often: no word too many, and every word once though connections break."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from eventually import eventually
from farcall import RRef, SerializationError, WorkerInfo, WorkerLost
from farcall.agent import Agent
from farcall.agent import book as book_module
from farcall.agent.incoming import Incoming
from farcall.agent.outgoing import Outgoing
from farcall.agent.parcels import CarriedFrame, Letter, RemoteFrame
from farcall.agent.post import Post
from farcall.protocol.control import pack_control
from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_messages import ForkAccepted
from farcall.protocol.wire import CALL, CALL_CARRYING, CONTROL, REMOTE, RESULT, Decoder
from farcall.testing import LocalGroup
from farcall.transports.base import Channel
from reference_stage import SOON, call, expect_confirmed, expect_nothing_left, here, remote, start, tables

pytestmark = pytest.mark.timeout(60)

runs: list[Any] = []
gates: dict[str, threading.Event] = {}
arrived: dict[str, threading.Event] = {}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    runs.clear()
    yield
    runs.clear()
    for spy in spies:
        spy.originals.clear()
    spies.clear()


@pytest.fixture
def warm(group: LocalGroup) -> LocalGroup:
    """Three workers, all connected with all."""
    for agent in group:
        for to in range(3):
            call(agent, to, echo, 0)
    return group


def echo(value: Any) -> Any:
    return value


def run(value: Any) -> Any:
    runs.append(value)
    return value


def fetch(rref: RRef[Any]) -> Any:
    return rref.to_here(timeout=SOON)


def run_and_fetch(rref: RRef[Any]) -> Any:
    runs.append("fetch")
    return rref.to_here(timeout=SOON)


def new_gate(name: str) -> threading.Event:
    gates[name], arrived[name] = threading.Event(), threading.Event()
    return gates[name]


def wait_at(name: str, result: Any = None) -> Any:
    arrived[name].set()
    assert gates[name].wait(SOON)
    return result


def connection(agent: Agent, to: int) -> Outgoing:
    found = agent._peers[to].connection
    assert found is not None
    return found


def cut(agent: Agent, to: int) -> None:
    """Ends the connection for calls of a worker to another, and waits until there is another."""
    old = connection(agent, to)
    old.lose("it was cut")
    eventually(lambda: agent._peers[to].connection is not None and agent._peers[to].connection is not old)


# -- How much is said


class Spy:
    """All messages that are sent, by who sends to whom. For small ones, which the channel takes whole."""

    def __init__(self, group: LocalGroup) -> None:
        self._names: dict[Channel, tuple[str, str]] = {}
        for agent in group:
            for one in agent._connections:
                self._names[one._channel] = (agent.info.name, one.peer.name)
            for incoming in agent._incoming:
                assert incoming._peer is not None
                self._names[incoming._channel] = (agent.info.name, incoming._peer.name)
        self._decoders = {channel: Decoder() for channel in self._names}
        self.said: list[tuple[str, str, int]] = []
        # Here and not in closures: who keeps a method keeps its descriptor, and a traceback may keep a closure.
        self.originals = {channel: (channel.send, channel.send_gather) for channel in self._names}
        spies.append(self)
        for channel in self._names:
            self._listen(channel)

    def _listen(self, channel: Any) -> None:
        def spied_send(data: Any) -> int:
            self._note(channel, bytes(data))  # before it is sent, or the answer may be noted first
            return self.originals[channel][0](data)

        def spied_gather(buffers: Any) -> int:
            self._note(channel, b"".join(map(bytes, buffers)))
            return self.originals[channel][1](buffers)

        channel.send, channel.send_gather = spied_send, spied_gather

    def _note(self, channel: Channel, data: bytes) -> None:
        self.said += [(*self._names[channel], kind) for kind, *_ in self._decoders[channel].feed(data)]

    def between(self, sender: str, to: str) -> list[int]:
        """Calls and replies from one to another."""
        return [kind for one, other, kind in self.said if (one, other) == (sender, to) and kind != CONTROL]

    def controls(self, sender: str, to: str) -> int:
        """How many messages about references alone went from one to another, by any connection."""
        return self.said.count((sender, to, CONTROL))


spies: list[Spy] = []


def test_fetching_right_after_a_remote_call_is_one_round_trip(warm: LocalGroup) -> None:
    spy = Spy(warm)
    rref = remote(warm[0], 1, echo, "tea")
    assert spy.between("worker0", "worker1") == [REMOTE], "nothing is asked before"
    assert rref.to_here() == "tea"
    assert spy.between("worker0", "worker1") == [REMOTE, CALL]
    expect_confirmed(rref)
    assert spy.between("worker0", "worker1") == [REMOTE, CALL]
    assert spy.between("worker1", "worker0") == [RESULT]
    assert spy.controls("worker0", "worker1") == 0, "the creator has nothing to say"
    assert 1 <= spy.controls("worker1", "worker0") <= 2, "the owner says that it came"
    assert not [said for said in spy.said if "worker2" in said]


def test_a_reference_is_passed_with_one_message_of_the_caller(warm: LocalGroup) -> None:
    rref = remote(warm[0], 1, echo, "tea")
    expect_confirmed(rref)
    eventually(lambda: not warm[0].book.has_work())
    spy = Spy(warm)
    assert call(warm[0], 2, fetch, rref) == "tea"
    assert spy.between("worker0", "worker2") == [CALL_CARRYING]
    assert spy.between("worker2", "worker1") == [CALL]
    expect_confirmed(rref)
    del rref
    expect_nothing_left(warm)
    assert spy.controls("worker0", "worker1") <= 3, spy.said


def test_an_owners_own_reference_asks_for_nothing(warm: LocalGroup) -> None:
    rref = here(warm[0], "tea")
    spy = Spy(warm)
    assert call(warm[0], 1, echo_confirmed, rref) is True
    assert spy.between("worker0", "worker1") == [CALL_CARRYING]
    assert spy.between("worker1", "worker0") == [RESULT]


def echo_confirmed(rref: RRef[Any]) -> bool:
    return rref.confirmed_by_owner()


def test_many_that_are_dropped_at_once_go_in_few_messages(warm: LocalGroup) -> None:
    rrefs = [remote(warm[0], 1, echo, number) for number in range(500)]
    assert rrefs[-1].to_here() == 499
    for rref in rrefs:
        expect_confirmed(rref)
    eventually(lambda: not warm[0].book.has_work() and not warm[1].book.has_work())
    spy = Spy(warm)
    del rrefs, rref
    expect_nothing_left(warm)
    assert len(spy.said) < 100, len(spy.said)


def test_a_proxy_call_is_one_round_trip(warm: LocalGroup) -> None:
    rref = remote(warm[0], 1, echo, 5)
    expect_confirmed(rref)
    eventually(lambda: not warm[0].book.has_work() and not warm[1].book.has_work())
    spy = Spy(warm)
    assert rref.rpc_sync().bit_length() == 3
    assert spy.said == [("worker0", "worker1", CALL), ("worker1", "worker0", RESULT)]


# -- What is said is heard, though nothing else is said


def test_the_word_that_a_reference_arrived_is_heard_though_nobody_calls(warm: LocalGroup) -> None:
    rref = here(warm[0], "tea")
    call(warm[0], 1, echo, rref)
    del rref
    expect_nothing_left(warm)


def test_a_graceful_shutdown_after_references_were_passed_ends(new_group: Callable[..., LocalGroup]) -> None:
    group = new_group(2)
    rref = here(group[0], "tea")
    call(group[0], 1, keep, rref)
    group.shutdown(graceful=True, timeout=5.0)
    kept.clear()


kept: list[Any] = []


def keep(value: Any) -> None:
    kept.append(value)


def test_the_death_of_a_worker_is_noticed_though_nobody_calls_it(group: LocalGroup) -> None:
    """It never called us, so that our connection to it is the only one."""
    rref = here(group[0], "tea")
    call(group[0], 1, keep, rref)
    del rref
    group[1].shutdown(graceful=False, timeout=0)
    kept.clear()
    expect_nothing_left([group[0]])


def test_what_was_dropped_is_given_back_though_the_remote_call_that_took_it_along_fails(warm: LocalGroup) -> None:
    bad = remote(warm[0], 2, echo, 1)
    dropped = remote(warm[0], 1, echo, 2)
    expect_confirmed(bad)
    expect_confirmed(dropped)
    eventually(lambda: not warm[0].book.has_work())
    warm[2].shutdown(graceful=False, timeout=0)
    eventually(lambda: bad._handle.new_error is not None)
    has_chores, warm[0]._supervisor.has_chores = warm[0]._supervisor.has_chores, lambda: False
    del dropped  # only the remote call can see to it
    gc.collect()
    with pytest.raises(WorkerLost):
        remote(warm[0], 1, echo, bad)
    warm[0]._supervisor.has_chores = has_chores
    expect_nothing_left(warm._agents[:2])


@pytest.mark.parametrize("way", ["call", "remote", "result"])
def test_a_message_with_too_many_references_harms_no_later_one(
    warm: LocalGroup, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """It is refused before it has a number: one that is taken and never sent would hold up all that follow."""
    monkeypatch.setattr(book_module, "MOST_HANDLES", 2)
    many = [here(warm[0], number) for number in range(3)]
    attempts: dict[str, Callable[[], Any]] = {
        "call": lambda: call(warm[0], 1, echo, many),
        "remote": lambda: remote(warm[0], 1, echo, many),
        "result": lambda: call(warm[1], 0, references_at, warm, 3),
    }
    with pytest.raises(SerializationError, match="a message with 3 references cannot be sent; at most 2 are allowed"):
        attempts[way]()
    assert call(warm[0], 1, fetch, many[0]) == 0
    assert call(warm[1], 0, references_at, warm, 1)[0].to_here() == 0
    many.clear()
    expect_nothing_left(warm)


def references_at(group: LocalGroup, count: int) -> list[RRef[Any]]:
    """Runs on worker 0: references of its own."""
    return [here(group[0], number) for number in range(count)]


def reference_at(group: LocalGroup, gate: str) -> RRef[Any]:
    """Runs on worker 0: a reference of its own, after a while."""
    wait_at(gate)
    return here(group[0], "late")


def test_a_caller_of_no_rank_in_the_group_harms_nobody(warm: LocalGroup, caplog: pytest.LogCaptureFixture) -> None:
    from test_incoming import Stranger

    stranger = Stranger(warm)
    stranger.channel.send(stranger.hello(rank=99, name="worker99"))
    stranger.read_greeting()
    before = len(warm[1]._incoming)
    stranger.channel.close()
    eventually(lambda: len(warm[1]._incoming) < before)
    assert call(warm[0], 1, echo, "unharmed") == "unharmed"
    assert "failed" not in caplog.text, caplog.text


# -- By which way it goes


class Line:
    """A connection of either kind, and what was sent on it."""

    def __init__(self, lost: bool = False) -> None:
        self.sent: list[Any] = []
        self.lost = lost

    def send_control(self, message: Any) -> None:
        self.sent += message

    def answer(self, frame: bytes) -> None:
        self.sent.append(frame)

    def is_lost(self) -> bool:
        return self.lost


class Desk:
    """A post with everything around it made up."""

    def __init__(self, outgoing: Line | None, incoming: Line | None) -> None:
        self.letters: list[Letter] = []
        self.again: list[Any] = []
        peer: Any = SimpleNamespace(connection=outgoing, info=WorkerInfo("w1", 1), is_lost=False)
        book: Any = SimpleNamespace(outbox=self._outbox, me=0, resend=lambda to: self.again.append(self.post))
        serving: Any = SimpleNamespace(submit=self.again.append)
        self.post = Post(peer, book, serving, lambda: incoming)  # type: ignore[arg-type, return-value]

    def _outbox(self, to: int) -> Letter | None:
        assert to == 1
        return self.letters.pop(0) if self.letters else None


ANSWERS, REQUESTS = Letter(pack_control(1, []), True), Letter(pack_control(2, []), False)


@pytest.mark.parametrize(
    ("letter", "way"), [(ANSWERS, "incoming"), (REQUESTS, "outgoing")], ids=["answers", "requests"]
)
def test_answers_go_where_they_were_asked_for_and_all_else_where_it_is_read_at_once(letter: Letter, way: str) -> None:
    lines = {"outgoing": Line(), "incoming": Line()}
    desk = Desk(**lines)
    desk.letters.append(letter)
    desk.post.send()
    assert {name: len(line.sent) for name, line in lines.items() if line.sent} == {way: 1}
    assert lines[way].sent[0].endswith(letter.body)
    assert desk.again == []


def test_answers_go_by_our_own_connection_if_there_is_no_other() -> None:
    line = Line()
    desk = Desk(line, None)
    desk.letters.append(ANSWERS)
    desk.post.send()
    assert len(line.sent) == 1


def test_nothing_is_sent_if_there_is_nothing_to_say() -> None:
    outgoing, incoming = Line(), Line()
    desk = Desk(outgoing, incoming)
    desk.post.send()
    assert (outgoing.sent, incoming.sent, desk.again) == ([], [], [])


@pytest.mark.parametrize("letter", [ANSWERS, REQUESTS], ids=["answers", "requests"])
def test_without_any_connection_the_pool_makes_one(letter: Letter) -> None:
    desk = Desk(None, None)
    desk.letters.append(letter)
    desk.post.send()
    assert desk.again == [desk.post]
    assert desk.letters == [letter], "it stays where it is until then"


def test_requests_wait_for_a_connection_of_our_own() -> None:
    incoming = Line()
    desk = Desk(None, incoming)
    desk.letters.append(REQUESTS)
    desk.post.send()
    assert incoming.sent == []
    assert desk.again == [desk.post], "it is sent with all that is not acknowledged"


@pytest.mark.parametrize("letter", [ANSWERS, REQUESTS], ids=["answers", "requests"])
def test_what_was_said_into_a_connection_that_is_lost_is_said_again(letter: Letter) -> None:
    """It was lost, and all that was known then was sent again, before this letter was written."""
    desk = Desk(Line(lost=True), Line(lost=True))
    desk.letters.append(letter)
    desk.post.send()
    assert desk.again == [desk.post]


def test_what_is_sent_again_is_counted() -> None:
    old, new = Line(lost=True), Line()
    reference, fork = RRefId(1, 0, 1), ForkId(0, 1)
    call = RemoteFrame(reference, fork, old, None)
    call.frame = [b"a call"]
    parcels: list[tuple[int, Any]] = [
        (1, call),
        (2, CarriedFrame([], old)),
        (3, CarriedFrame([], new)),  # under way on a connection that works
        (4, ForkAccepted(reference, fork)),
        (5, ForkAccepted(reference, fork)),
    ]
    desk = Desk(new, None)
    desk.post._peer.connect = lambda deadline: new  # type: ignore[assignment, method-assign, return-value]
    book: Any = desk.post._book
    book.unacknowledged = lambda to: parcels
    book.acknowledgement = lambda to: 0
    desk.post.run()
    assert desk.post.resends == 4
    assert len(new.sent) == 3  # the messages go in one


# -- Connections that break


def lose_before_sending(one: Outgoing) -> None:
    """The next message about references on this connection is lost with it."""

    def lose(message: Any, patience: float = 0.0) -> None:
        del one.send_control
        one.lose("it was cut before the message was sent")

    one.send_control = lose  # type: ignore[method-assign]


def close_after(group: LocalGroup, owner: int, caller: int, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The connection is cut when the owner has read the next such message, before it has answered."""
    book = group[owner].book
    original = getattr(book, method)

    def once(*args: Any) -> Any:
        monkeypatch.setattr(book, method, original)
        result = original(*args)
        group[owner]._incoming_of[caller].close()
        return result

    monkeypatch.setattr(book, method, once)


def fetch_again(rref: RRef[Any]) -> Any:
    """Fetches it, though a first attempt may meet the connection that is going."""
    try:
        return rref.to_here(timeout=SOON)
    except WorkerLost:
        return rref.to_here(timeout=SOON)


@pytest.mark.parametrize("moment", ["before it is sent", "after it was read"])
def test_a_remote_call_survives_its_connection(warm: LocalGroup, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    if moment == "before it is sent":
        lose_before_sending(connection(warm[0], 1))
    else:
        close_after(warm, 1, 0, monkeypatch, "create_requested")
    argument = here(warm[0], "milk")
    rref = remote(warm[0], 1, run, [argument])
    del argument
    expect_confirmed(rref)
    assert fetch_again(rref)[0].to_here() == "milk"
    assert len(runs) == 1
    runs.clear()
    del rref
    expect_nothing_left(warm)


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_references_of_a_call_that_was_lost_do_not_leak(
    warm: LocalGroup, monkeypatch: pytest.MonkeyPatch, owner: int
) -> None:
    """The callee has read it, or has not: the caller cannot know, and hears that the worker was lost."""
    rref = remote(warm[0], owner, echo, "tea")
    expect_confirmed(rref)
    gate = new_gate("lost")
    future = start(warm[0], 1, wait_and_drop, "lost", rref)
    assert arrived["lost"].wait(SOON)
    cut(warm[0], 1)
    with pytest.raises(WorkerLost, match="worker 'worker1' was lost"):
        future.wait()
    gate.set()
    assert call(warm[0], 1, fetch, rref) == "tea"
    del rref, future
    expect_nothing_left(warm)


def wait_and_drop(name: str, rref: RRef[Any]) -> None:
    wait_at(name)


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_references_of_a_call_that_never_arrived_do_not_leak(
    warm: LocalGroup, monkeypatch: pytest.MonkeyPatch, owner: int
) -> None:
    rref = remote(warm[0], owner, echo, "tea")
    expect_confirmed(rref)
    original = warm[0].book.pass_on

    def cut_then_pass(*args: Any) -> Any:
        monkeypatch.setattr(warm[0].book, "pass_on", original)
        result = original(*args)
        connection(warm[0], 1).lose("it was cut before the call was sent")
        return result

    monkeypatch.setattr(warm[0].book, "pass_on", cut_then_pass)
    with pytest.raises(WorkerLost):
        call(warm[0], 1, run_and_fetch, rref)
    del rref
    expect_nothing_left(warm)
    assert runs == []


@pytest.mark.parametrize("way", ["call", "remote"])
def test_a_connection_that_was_replaced_just_before_its_use(
    warm: LocalGroup, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A thread has got the connection; it is lost and re-made by another before the thread goes on."""
    rref = remote(warm[0], 2, echo, "tea")
    expect_confirmed(rref)
    method = "pass_on" if way == "call" else "call_remote"
    original = getattr(warm[0].book, method)

    def cut_first(*args: Any) -> Any:
        monkeypatch.setattr(warm[0].book, method, original)
        cut(warm[0], 1)
        eventually(lambda: not warm[0]._serving.is_busy())
        return original(*args)

    monkeypatch.setattr(warm[0].book, method, cut_first)
    if way == "call":
        with pytest.raises(WorkerLost):
            call(warm[0], 1, fetch, rref)
    else:
        there = remote(warm[0], 1, fetch, rref)
        assert there.to_here(timeout=SOON) == "tea"
        del there
    del rref
    expect_nothing_left(warm)


@pytest.mark.parametrize("cut_by", ["caller", "callee"])
def test_a_reference_returned_to_a_caller_whose_connection_is_gone_does_not_leak(warm: LocalGroup, cut_by: str) -> None:
    gate = new_gate("gone")
    future = start(warm[1], 0, reference_at, warm, "gone")
    assert arrived["gone"].wait(SOON)
    if cut_by == "caller":
        cut(warm[1], 0)
    else:
        warm[0]._incoming_of[1].close()
    with pytest.raises(WorkerLost):
        future.wait()
    eventually(lambda: 1 in warm[0]._incoming_of)
    eventually(lambda: not warm[0]._serving.ready and not warm[1]._serving.ready)
    gate.set()
    del future
    expect_nothing_left(warm)


def test_what_was_given_back_survives_the_connection(warm: LocalGroup) -> None:
    rref = remote(warm[0], 1, echo, "tea")
    expect_confirmed(rref)
    eventually(lambda: not warm[0].book.has_work())
    lose_before_sending(connection(warm[0], 1))
    del rref
    expect_nothing_left(warm)


@pytest.mark.parametrize("times", [1, 2])
def test_a_connection_that_breaks_in_the_greeting_does_not_make_a_worker_dead(
    warm: LocalGroup, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Somebody listens there, so it lives."""
    rref = remote(warm[0], 1, echo, "tea")
    expect_confirmed(rref)
    broken: list[Incoming] = []
    greet = Incoming._greet

    def break_off(incoming: Incoming, data: bytes) -> bytes:
        if incoming._us.id == 1 and len(broken) < times:
            broken.append(incoming)
            raise ConnectionResetError("cut")
        return greet(incoming, data)

    monkeypatch.setattr(Incoming, "_greet", break_off)
    connection(warm[0], 1).lose("it was cut")
    eventually(lambda: len(broken) == times)
    eventually(lambda: warm[0]._peers[1].connection is not None or warm[0]._peers[1].is_lost)
    assert not warm[0]._peers[1].is_lost
    assert rref.to_here() == "tea"
    del rref
    expect_nothing_left(warm)


def test_a_connection_that_is_made_while_the_worker_closes_is_closed(warm: LocalGroup) -> None:
    warm[0].shutdown(graceful=False, timeout=0)
    warm[0]._posts[1].run()  # it was under way in the serving pool
    left = list(warm[0]._connections)
    for one in left:
        one.close("by the test")
    assert left == []


@pytest.mark.parametrize("seed", range(4))
def test_connections_are_cut_at_any_moment(new_group: Callable[..., LocalGroup], seed: int) -> None:
    group = new_group(3)
    chance = random.Random(seed)
    stop = threading.Event()
    timer = threading.Timer(1.5, stop.set)
    timer.start()
    with ThreadPoolExecutor(4) as pool:
        sharing = [pool.submit(share, group, number, random.Random(seed * 100 + number), stop) for number in range(3)]
        pause = threading.Event()
        while not stop.is_set():
            pause.wait(chance.random() * 0.02)
            agent = group[chance.randrange(3)]
            ends = [*agent._connections, *agent._incoming]
            if ends:
                end = chance.choice(ends)
                end.lose("it was cut") if isinstance(end, Outgoing) else end.close()
        shared = [one.result(4 * SOON) for one in sharing]
    timer.join()
    assert min(shared) > 5, shared
    assert not any(peer.is_lost for agent in group for peer in agent._peers.values())
    assert len(runs) == len(set(runs)), "a remote call ran twice"
    expect_nothing_left(group)


def share(group: LocalGroup, number: int, chance: random.Random, stop: threading.Event) -> int:
    """Makes references and passes them on, whatever is cut meanwhile; how many of these came to their end."""
    done = count = 0
    mine: list[RRef[Any]] = []
    while not stop.is_set():
        count += 1
        agent = group[chance.randrange(3)]
        try:
            rref = remote(agent, chance.randrange(3), run, (number, count))
            mine.append(rref)
            assert call(agent, chance.randrange(3), fetch, rref) == (number, count)
            back = call(agent, chance.randrange(3), echo, rref)
            assert back.to_here(timeout=SOON) == (number, count)
            done += 1
        except WorkerLost:
            pass
        if len(mine) > 4:
            del mine[chance.randrange(len(mine))]
    for rref in mine:
        expect_confirmed(rref)
    return done


def test_the_check_for_what_is_left_bites(warm: LocalGroup) -> None:
    rref = here(warm[0], "tea")
    assert tables(warm[0]) == {"owned": 1, "values": 1, "origins": 1}
    del rref
    expect_nothing_left(warm)
