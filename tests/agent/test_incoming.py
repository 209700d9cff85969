"""Connections from others: who is let in, what is answered, and that a bad one harms nobody else."""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Iterator
from contextlib import ExitStack
from time import monotonic

import pytest

from farcall import WorkerLost
from farcall.agent.sending import Sender
from farcall.protocol.handshake import (
    PREAMBLE_SIZE,
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
from farcall.protocol.wire import CALL, RESULT, Decoder, Sizes, encode
from farcall.testing import LocalGroup
from farcall.transports.base import Channel
from gates import SOON, arrived, gates, new_gate, wait_at
from group_stage import call, echo, start

pytestmark = pytest.mark.timeout(30)


class Stranger:
    """A connection to worker1 made by hand."""

    def __init__(self, group: LocalGroup) -> None:
        (self.address,) = group[1]._peers["worker1"]._member.addresses
        self.group = group[1]._rendezvous.group
        self.credentials = group[1]._credentials
        self.channel: Channel = group.network.connect(self.address, SOON)

    def hello(self, **changes: object) -> bytes:
        """The hello, ready to be sent; `applicant` goes on with the greeting."""
        fields: dict[str, object] = {"group": self.group, "name": "worker0", "rank": 0, "wanted": "worker1"}
        fields |= {"wanted_number": 1, "dialed": self.address}
        hello = Hello(**{**fields, **changes})  # type: ignore[arg-type]
        self.applicant, hello = self.credentials.applicant(Purpose.CALLS, hello, "it", b"")
        return pack(Purpose.CALLS, hello)

    def prove(self) -> bytes:
        """The answer to the challenge that comes next."""
        proof = self.applicant.take(self.read_greeting())
        assert proof is not None
        return pack(Purpose.CALLS, proof)

    def outcome(self) -> Welcome | Refused:
        """What comes behind the proof of the other side."""
        while self.applicant.outcome is None:
            self.applicant.take(self.read_greeting())
        return self.applicant.outcome

    def read(self, most: int = 1 << 16) -> bytes:
        """What comes next; nothing if the other end has closed."""
        assert select.select([self.channel.fileno()], [], [], SOON)[0], "nothing came"
        try:
            return self.channel.receive(most)
        except ConnectionError:
            return b""

    def read_all(self) -> bytes:
        data = b""
        while chunk := self.read():
            data += chunk
        return data

    def read_greeting(self) -> Greeting:
        preamble = self.read_exactly(PREAMBLE_SIZE)
        return unpack(self.read_exactly(body_length(preamble, Purpose.CALLS, "it")), "it")

    def read_exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self.read(size - len(data))
            assert chunk, "it closed the connection"
            data += chunk
        return data

    def greet(self, **changes: object) -> Stranger:
        self.channel.send(self.hello(**changes))
        self.channel.send(self.prove())
        assert self.outcome() == Welcome("worker1", 1, 1, Sizes())
        assert self.applicant.is_proven
        return self


@pytest.fixture
def stranger(group: LocalGroup) -> Iterator[Stranger]:
    stranger = Stranger(group)
    yield stranger
    stranger.channel.close()


def test_a_proper_hello_is_welcomed_and_calls_are_answered(stranger: Stranger) -> None:
    stranger.greet()
    stranger.channel.send(encode(CALL, 77, b"builtins\0int", b""))
    ((kind, call_id, _, body, _),) = Decoder().feed(stranger.read())
    assert (kind, call_id) == (RESULT, 77)
    assert body


def test_a_greeting_may_come_byte_by_byte_with_a_call_behind_it(stranger: Stranger) -> None:
    hello = stranger.hello()
    for at in range(len(hello)):
        stranger.channel.send(hello[at : at + 1])
    data = stranger.prove() + encode(CALL, 1, b"builtins\0int", b"")
    for at in range(len(data)):
        stranger.channel.send(data[at : at + 1])
    assert isinstance(stranger.outcome(), Welcome)
    assert Decoder().feed(stranger.read())[0][:2] == (RESULT, 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"group": "another"}, "not of 'another'"), ({"wanted": "worker2"}, "this is worker 'worker1', not 'worker2'")],
)
def test_who_wants_somebody_else_is_refused_with_the_reason(
    stranger: Stranger, changes: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "farcall"):
        stranger.channel.send(stranger.hello(**changes))
        stranger.channel.send(stranger.prove())
        refusal = stranger.outcome()
        assert isinstance(refusal, Refused)
        assert reason in refusal.reason
        assert stranger.read_all() == b""
    assert reason in caplog.text


def test_who_does_not_know_the_secret_is_refused_and_logged_once(
    group: LocalGroup, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "farcall"):
        for _ in range(3):
            stranger = Stranger(group)
            stranger.channel.send(stranger.hello())
            stranger.read_greeting()
            stranger.channel.send(pack(Purpose.CALLS, Proof(bytes(32))) + encode(CALL, 1, b"agent_stage\0note", b""))
            refusal = stranger.read_greeting()
            assert isinstance(refusal, Refused)
            assert refusal.stranger
            assert stranger.read_all() == b""
            stranger.channel.close()
    assert caplog.text.count("does not know the secret of this group") == 1
    assert call(group[0], 1, echo, "unharmed") == "unharmed"


def test_a_hello_alone_is_welcomed_by_nobody(group: LocalGroup, stranger: Stranger) -> None:
    stranger.channel.send(stranger.hello() + encode(CALL, 1, b"builtins\0int", b""))
    assert isinstance(stranger.read_greeting(), Challenge)
    refusal = stranger.read_greeting()
    assert isinstance(refusal, Refused)
    assert "does not speak farcall" in refusal.reason
    assert stranger.read_all() == b""


def test_who_was_led_here_by_somebody_else_is_refused(stranger: Stranger) -> None:
    stranger.channel.send(stranger.hello(dialed="tcp:10.6.6.6:1"))
    stranger.channel.send(stranger.prove())
    refusal = stranger.read_greeting()
    assert isinstance(refusal, Refused)
    assert refusal.stranger


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64)],
    ids=["http", "tls"],
)
def test_what_is_no_greeting_closes_the_connection_and_harms_nobody(
    group: LocalGroup, stranger: Stranger, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "farcall"):
        stranger.channel.send(data)
        stranger.read_all()
    assert "connection from" in caplog.text
    assert call(group[0], 1, echo, "unharmed") == "unharmed"


@pytest.mark.parametrize(
    "message",
    [
        encode(RESULT, 1, b"", b""),
        encode(14, 1, b"", b""),
        b"\x55\x55\x02\x00" + b"\x55" * 60,
        encode(CALL, 1, b"", b"")[:4] + (1 << 30).to_bytes(4, "little") + bytes(16),
    ],
    ids=["a reply", "unknown kind", "noise", "head of 1 GiB"],
)
def test_what_is_no_call_closes_the_connection_and_harms_nobody(
    group: LocalGroup, stranger: Stranger, message: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "farcall"):
        stranger.greet()
        stranger.channel.send(message)
        assert stranger.read_all() == b""
    assert "connection from worker 'worker0' closed" in caplog.text
    assert call(group[0], 1, echo, "unharmed") == "unharmed"


@pytest.mark.parametrize(
    ("head", "body", "text"),
    [
        (b"no_such_module\0f", b"", "cannot import module `no_such_module`"),
        (b"builtins\0nothing", b"", "has no function `nothing` in module `builtins`"),
        (b"builtins\0int", b"no pickle", "the arguments of `builtins.int` cannot be rebuilt on worker 'worker1'"),
        (b"", b"", "names no function and brings none"),
        (b"\xff\xfe", b"", "no text"),
    ],
)
def test_a_call_that_cannot_be_understood_is_answered(stranger: Stranger, head: bytes, body: bytes, text: str) -> None:
    stranger.greet()
    stranger.channel.send(encode(CALL, 5, head, body))
    ((_, call_id, _, body, _),) = Decoder().feed(stranger.read())
    assert call_id == 5
    assert text in bytes(body).decode(errors="replace")


def test_who_leaves_in_the_midst_of_a_message_harms_nobody(group: LocalGroup, stranger: Stranger) -> None:
    stranger.greet()
    stranger.channel.send(encode(CALL, 1, b"builtins\0int", bytes(1000))[:500])
    stranger.channel.close()
    assert call(group[0], 1, echo, "unharmed") == "unharmed"


def test_many_who_say_nothing_harm_nobody(group: LocalGroup, stranger: Stranger) -> None:
    silent = [group.network.connect(stranger.address, SOON) for _ in range(50)]
    assert call(group[0], 1, echo, "unharmed") == "unharmed"
    for channel in silent:
        channel.close()


def test_a_reply_that_the_caller_does_not_read_holds_up_nobody(group: LocalGroup, stranger: Stranger) -> None:
    stranger.greet()
    many = b"".join(encode(CALL, n, b"agent_stage\0a_megabyte", b"") for n in range(1, 21))
    stranger.channel.send(many)
    assert [call(group[0], 1, echo, n) for n in range(20)] == list(range(20))
    decoder = Decoder()
    replies = []
    while len(replies) < 20:
        if decoder.space is None:
            replies += decoder.feed(stranger.read())
        else:
            select.select([stranger.channel.fileno()], [], [], SOON)
            replies += decoder.filled(stranger.channel.receive_into(decoder.space))
    assert sorted(call_id for _, call_id, *_ in replies) == list(range(1, 21))
    assert all(len(buffer) == 1 << 20 for *_, (buffer,) in replies)


def test_a_late_answer_to_a_caller_that_is_gone_harms_no_newer_caller(group: LocalGroup) -> None:
    gate = new_gate("late")
    for one, other in ((1, 2), (2, 1)):  # so that nobody opens a descriptor to tell that worker0 has gone
        assert call(group[one], other, echo, 0) == 0
    gone = start(group[0], 1, wait_at, "late")
    assert arrived["late"].wait(SOON)
    (incoming,) = [incoming for incoming in group[1]._incoming if incoming.caller() == 0]
    group[0].shutdown(graceful=False, timeout=0)
    assert gone.exception() is not None
    with ExitStack() as stack:
        newer = _with_the_same_descriptor(group, incoming._descriptor, stack)
        gate.set()
        deadline = monotonic() + SOON
        while group[1]._serving.is_busy() and monotonic() < deadline:
            pass
        newer.channel.send(encode(CALL, 1, b"builtins\0int", b""))
        assert select.select([newer.channel.fileno()], [], [], 1)[0], "the newer caller is not heard any more"
        assert Decoder().feed(newer.read())[0][:2] == (RESULT, 1)


def _with_the_same_descriptor(group: LocalGroup, descriptor: int, stack: ExitStack) -> Stranger:
    """Connects until worker1's end of a connection has that number, which is free again."""
    for _ in range(20):
        stranger = Stranger(group).greet(number=2, name="worker2", rank=2)
        stack.callback(stranger.channel.close)
        if any(incoming._descriptor == descriptor for incoming in group[1]._incoming):
            return stranger
        stack.callback(os.close, os.eventfd(0))  # ends come in pairs; now the others get the even numbers
    raise AssertionError(f"nobody got the descriptor {descriptor} again")


def test_calls_that_came_before_the_caller_went_run_to_their_end(group: LocalGroup) -> None:
    gate = new_gate("first")
    new_gate("second")
    futures = [start(group[0], 1, wait_at, name) for name in ("first", "second")]
    assert all(arrived[name].wait(SOON) for name in ("first", "second"))
    group[0].shutdown(graceful=False, timeout=0)
    assert all(future.exception() is not None for future in futures)
    gate.set()
    gates["second"].set()
    assert call(group[2], 1, echo, "unharmed") == "unharmed"


def test_a_worker_that_shut_down_answers_nobody(group: LocalGroup) -> None:
    gate = new_gate("never")
    future = start(group[0], 1, wait_at, "never")
    assert arrived["never"].wait(SOON)
    group[1].shutdown(graceful=False, timeout=0)
    with pytest.raises(WorkerLost, match=r"'worker1' was lost.*`wait_at`"):
        future.wait()
    gate.set()


def test_a_reply_for_which_there_is_no_memory_closes_its_connection_and_no_other(
    group: LocalGroup, stranger: Stranger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    stranger.greet()
    (incoming,) = group[1]._incoming
    for way in ("send_all", "flush"):
        with monkeypatch.context() as patch:
            patch.setattr(Sender, way, no_memory)
            if way == "flush":
                incoming.flush_answers()
            else:
                incoming.answer([b"large", b"reply"])
    assert stranger.read_all() == b""
    assert incoming.is_lost()
    assert "a reply could not be sent: MemoryError()" in caplog.text
    assert call(group[0], 1, echo, 1) == 1


def test_ctrl_c_in_a_thread_that_answers_goes_on_and_the_connection_is_closed(
    group: LocalGroup, stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    stranger.greet()
    (incoming,) = group[1]._incoming
    monkeypatch.setattr(Sender, "send_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        incoming.answer(b"reply")
    assert incoming.is_lost()
