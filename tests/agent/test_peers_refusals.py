"""What is said when no way leads to a peer, and whose word is believed about who is gone."""

from __future__ import annotations

import struct
from time import monotonic

import pytest
from peer_stage import SECRET, TCP, UNIX, WELCOME, Answer, FakeTransport, World, connect, peer_in, refusal

from farcall.agent import peers
from farcall.errors import EncryptionError, WorkerLost
from farcall.protocol.handshake import MAGIC, VERSION, Hello, Purpose, Refused, Welcome, pack
from farcall.security import Secret
from farcall.sleeping import FOREVER
from farcall.transports.sockets import SocketChannel


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
