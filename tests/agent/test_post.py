"""What workers say about references, how often and by which way: no word too many, and every word is heard."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from eventually import eventually
from farcall import RRef, SerializationError, WorkerLost
from farcall.agent import handle as handle_module
from farcall.agent.parcels import CarriedFrame, Letter, RemoteFrame
from farcall.agent.post import Post
from farcall.protocol.control import pack_control
from farcall.protocol.handshake import Refused
from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_messages import ForkAccepted
from farcall.protocol.wire import CALL, CALL_CARRYING, CONTROL, REMOTE, RESULT, Decoder
from farcall.testing import LocalGroup
from farcall.transports.base import Channel
from group_stage import call, echo
from reference_stage import expect_confirmed, expect_nothing_left, fetch, here, keep_there, kept, remote, tables

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    for spy in spies:
        spy.originals.clear()
    spies.clear()


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
    call(group[0], 1, keep_there, rref)
    group.shutdown(graceful=True, timeout=5.0)
    kept.clear()


def test_the_death_of_a_worker_is_noticed_though_nobody_calls_it(group: LocalGroup) -> None:
    """It never called us, so that our connection to it is the only one."""
    rref = here(group[0], "tea")
    call(group[0], 1, keep_there, rref)
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
    monkeypatch.setattr(handle_module, "MOST_HANDLES", 2)
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


def test_a_caller_of_no_rank_in_the_group_harms_nobody(warm: LocalGroup, caplog: pytest.LogCaptureFixture) -> None:
    from test_incoming import Stranger

    stranger = Stranger(warm)
    before = len(warm[1]._incoming)
    stranger.channel.send(stranger.hello(number=99, name="worker99"))
    stranger.channel.send(stranger.prove())
    assert stranger.outcome() == Refused("there is no worker 'worker99' with number 99 in this group")
    assert stranger.read() == b""
    stranger.channel.close()
    eventually(lambda: len(warm[1]._incoming) <= before)
    assert call(warm[0], 1, echo, "unharmed") == "unharmed"
    assert "failed" not in caplog.text, caplog.text


# -- By which way it goes


class Line:
    """A connection of either kind, and what was sent on it."""

    def __init__(self, lost: bool = False) -> None:
        self.sent: list[Any] = []
        self.lost = lost

    def send_control(self, message: bytes, buffers: Sequence[Any] = ()) -> None:
        self.sent.append(message)

    def answer(self, frame: bytes) -> None:
        self.sent.append(frame)

    send_news = answer

    def is_lost(self) -> bool:
        return self.lost


class Desk:
    """A post with everything around it made up."""

    def __init__(self, outgoing: Line | None, incoming: Line | None) -> None:
        self.letters: list[Letter] = []
        self.again: list[Any] = []
        peer: Any = SimpleNamespace(connection=outgoing, number=1, is_lost=False, is_over=lambda: False)
        mailboxes: Any = SimpleNamespace(outbox=self._outbox)
        serving: Any = SimpleNamespace(run_aside=self.again.append, is_closing=False)
        self.post = Post(peer, mailboxes, serving, lambda: incoming, lambda: None)  # type: ignore[arg-type, return-value]

    def _outbox(self, to: int) -> Letter | None:
        assert to == 1
        return self.letters.pop(0) if self.letters else None


ANSWERS, REQUESTS = Letter(pack_control(1, []), True), Letter(pack_control(2, []), False)
BARE = Letter(pack_control(3, []), False, is_bare=True)


@pytest.mark.parametrize(
    ("letter", "way"),
    [(ANSWERS, "incoming"), (REQUESTS, "outgoing"), (BARE, "outgoing")],
    ids=["answers", "requests", "an acknowledgement, perhaps of answers"],
)
def test_answers_go_where_they_were_asked_for_and_all_else_where_it_is_read_at_once(letter: Letter, way: str) -> None:
    lines = {"outgoing": Line(), "incoming": Line()}
    desk = Desk(**lines)
    desk.letters.append(letter)
    desk.post.send()
    assert {name: len(line.sent) for name, line in lines.items() if line.sent} == {way: 1}
    assert lines[way].sent[0].endswith(letter.body)
    assert desk.again == []


def test_an_acknowledgement_goes_by_the_peers_connection_if_there_is_no_other() -> None:
    line = Line()
    desk = Desk(None, line)
    desk.letters.append(BARE)
    desk.post.send()
    assert len(line.sent) == 1
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


@pytest.mark.parametrize("acknowledged", [0, 3])
def test_an_acknowledgement_that_was_lost_is_said_again_with_nothing_else_to_say(acknowledged: int) -> None:
    """Who waits for it may have a connection that works, and no reason to ask again."""
    line = Line()
    desk = Desk(line, None)
    desk.post._peer.connect = lambda deadline: line  # type: ignore[assignment, method-assign, return-value]
    desk.post._mailboxes.unacknowledged = lambda to: []  # type: ignore[method-assign]
    desk.post._mailboxes.acknowledgement = lambda to: acknowledged  # type: ignore[method-assign]
    desk.post.try_again()
    desk.post.run()
    assert [frame.endswith(pack_control(3, [])) for frame in line.sent] == ([True] if acknowledged else [])


def test_what_is_sent_again_is_counted() -> None:
    old, new = Line(lost=True), Line()
    reference, fork = RRefId(1, 0, 1), ForkId(0, 1)
    call = RemoteFrame(reference, fork, (), old, None)
    call.frame = b"a call"
    parcels: list[tuple[int, Any]] = [
        (1, call),
        (2, CarriedFrame([], old)),
        (3, CarriedFrame([], new)),  # under way on a connection that works
        (4, ForkAccepted(reference, fork)),
        (5, ForkAccepted(reference, fork)),
    ]
    desk = Desk(new, None)
    desk.post._peer.connect = lambda deadline: new  # type: ignore[assignment, method-assign, return-value]
    mailboxes: Any = desk.post._mailboxes
    mailboxes.unacknowledged = lambda to: parcels
    mailboxes.acknowledgement = lambda to: 0
    desk.post.try_again()
    desk.post.run()
    assert desk.post.resends == 4
    assert len(new.sent) == 3  # the messages go in one


def test_the_check_for_what_is_left_bites(warm: LocalGroup) -> None:
    rref = here(warm[0], "tea")
    assert tables(warm[0]) == {"owned": 1, "values": 1, "origins": 1}
    del rref
    expect_nothing_left(warm)
