"""A faulty link is a link: what it carries, how it ends, and what it leaves behind, over each inner transport."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from time import monotonic

import pytest
from link_ends import HANDSHAKE_LIMIT, HELLO, WELCOME, LinkEnds, receive, receive_some

from eventually import eventually
from farcall.errors import ProtocolError
from farcall.protocol.frames import CALL, GOSSIP, RESULT, pack_call, pack_message, pack_reply, unpack_header
from farcall.protocol.handshake import encode
from farcall.testing import Failure, Faults, faulty_link
from farcall.testing.faulty_link import FaultyLink
from farcall.transports.base import Link, Transport
from farcall.transports.memory import MemoryNetwork, MemoryTransport
from farcall.transports.tcp import TcpTransport
from farcall.transports.unix import UnixTransport
from gates import SOON

MOMENT = 0.1
LARGE = [b"x" * 3_000_000, b"", b"y" * 70_000, b"z"]
Pair = tuple[FaultyLink, Link]


@pytest.fixture(params=["memory", "unix", "tcp"])
def inner(request: pytest.FixtureRequest) -> Iterator[Transport]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        if request.param == "unix":
            yield UnixTransport([directory])
        else:
            yield TcpTransport() if request.param == "tcp" else MemoryTransport(MemoryNetwork())


@pytest.fixture
def ends(faults: Faults, inner: Transport) -> Iterator[LinkEnds]:
    ends = LinkEnds(faults, inner)
    yield ends
    ends.close()


@pytest.fixture(params=["connect", "accept"])
def pair(request: pytest.FixtureRequest, ends: LinkEnds) -> Pair:
    """Both ends of an established link that this worker, or the other one, has opened."""
    return ends.connect() if request.param == "connect" else ends.accept()


def views(buffers: list[bytes]) -> list[memoryview]:
    return [memoryview(bytearray(buffer)) for buffer in buffers]


def reply(number: int) -> bytes:
    return pack_reply(RESULT, number, b"payload")


def receive_all(link: Link) -> list[bytes]:
    """Returns the frames that come before the other end closes the link."""
    frames: list[bytes] = []
    try:
        while True:
            frames += [bytes(frame) for frame, _ in receive_some(link)]
    except ConnectionResetError:
        return frames


# -- What it carries


def test_frames_and_large_buffers_pass_both_ways(pair: Pair) -> None:
    for sender, receiver in (pair, pair[::-1]):
        for buffers in ([], [b"small"], LARGE):
            sent = views(buffers)
            sender.send(reply(1), sent)
            assert not sent  # the link has taken the list over
            assert receive(receiver) == (reply(1), buffers)
        sender.send(pack_reply(RESULT, 2, b"w" * 2_000_000))
        assert receive(receiver)[0][16:] == b"w" * 2_000_000


def test_buffers_that_arrive_can_be_written(pair: Pair) -> None:
    ours, theirs = pair
    theirs.send(reply(1), views(LARGE))
    ((_, buffers),) = receive_some(ours)
    buffers[0][:1] = b"!"
    assert bytes(buffers[0][:2]) == b"!x"


@pytest.mark.parametrize("how", ["delayed", "frozen", "slow", "late"])
def test_what_is_held_is_what_was_sent_though_the_program_goes_on_to_change_it(
    pair: Pair, faults: Faults, how: str
) -> None:
    ours, theirs = pair
    if how == "frozen":
        faults.freeze("worker1")
    elif how == "slow":
        faults.slow("worker1", MOMENT)
    elif how == "delayed":
        faults.delay("PYTHON_CALL", MOMENT)
    else:
        faults.fail("PYTHON_CALL", failure=Failure.LATE)
    array = bytearray(b"a" * 100_000)
    call = pack_call(1, b"module\0function", b"", 0)
    ours.send(call, [memoryview(array)])
    array[:] = b"b" * 100_000
    with pytest.raises(TimeoutError):
        receive(theirs, 0.02)
    faults.heal()
    faults.fail("PYTHON_CALL", 0)
    if how == "late":
        ours.send(pack_call(2, b"module\0another", b"", 0))
        assert receive(theirs)[0][8:16] == b"\2" + bytes(7)
    assert receive(theirs) == (call, [b"a" * 100_000])


def test_order_is_kept_on_a_slow_way(pair: Pair, faults: Faults) -> None:
    faults.slow("worker1", 0.02)
    for sender, receiver in (pair, pair[::-1]):
        for number in range(50):
            sender.send(reply(number))
        received = [frame for frame, _ in receive_some(receiver)]
        while len(received) < 50:
            received += [frame for frame, _ in receive_some(receiver)]
        assert received == [reply(number) for number in range(50)]


def test_a_sender_never_waits_and_what_nobody_reads_is_sent_in_the_end(pair: Pair) -> None:
    ours, theirs = pair
    for number in range(8):
        ours.send(reply(number), views(LARGE))
        theirs.send(reply(number), views(LARGE), 0.0)
    received: dict[Link, list[tuple[bytes, list[bytes]]]] = {ours: [], theirs: []}
    deadline = monotonic() + SOON
    while min(map(len, received.values())) < 8 and monotonic() < deadline:
        theirs.flush()  # which its poller would do
        for end, frames in received.items():
            frames += [(bytes(frame), [bytes(each) for each in buffers]) for frame, buffers in end.receive()]
    assert list(received.values()) == [[(reply(number), LARGE) for number in range(8)]] * 2


def test_replies_that_nobody_reads_are_left_at_the_other_end(ends: LinkEnds) -> None:
    ours, theirs = ends.connect()
    frame = pack_reply(RESULT, 1, b"x" * 10_000)
    for _ in range(2000):
        theirs.send(frame)
    until = monotonic() + 0.3
    while monotonic() < until:
        theirs.flush()  # which its poller would do
        assert theirs.unsent_bytes()
    received = 0
    while received < 2000:
        received += len(receive_some(ours))
        theirs.flush()
    assert not theirs.unsent_bytes()


# -- Handshakes


@pytest.mark.parametrize("state", ["slow", "frozen"])
def test_a_handshake_passes_though_it_takes_longer(ends: LinkEnds, faults: Faults, state: str) -> None:
    if state == "slow":
        faults.slow("worker1", 0.02)
    else:
        faults.freeze("worker1")
        threading.Timer(MOMENT, faults.heal).start()
    for ours, theirs in (ends.connect(), ends.accept()):
        theirs.send(reply(1), views(LARGE))
        assert receive(ours) == (reply(1), LARGE)
        ours.send(reply(2), views(LARGE))
        assert receive(theirs) == (reply(2), LARGE)


@pytest.mark.parametrize("inner", ["memory", "tcp"], indirect=True)  # the ends of a unix link agree on memory first
def test_frames_may_follow_the_handshake_at_once(ends: LinkEnds) -> None:
    """They stay where they are until this end is established."""
    ours, theirs = ends.open()
    ours.send(encode(HELLO))
    receive(theirs)
    theirs.send(encode(WELCOME))
    theirs.establish(ends.options(1))
    theirs.send(reply(1), views(LARGE), 0.0)
    assert receive(ours) == (encode(WELCOME), [])
    assert not ours.wait(0.05)
    ours.establish(ends.options(0), SOON)
    while not (frames := ours.receive()):
        theirs.flush()
    assert [bytes(buffer) for buffer in frames[0][1]] == LARGE


def test_what_is_no_handshake_is_left_to_the_agent(ends: LinkEnds) -> None:
    ours, theirs = ends.open()
    theirs.send(b"nonsense")
    assert receive(ours) == (b"nonsense", [])


def test_its_properties_are_those_of_the_inner_link(ends: LinkEnds) -> None:
    ours, _ = ends.connect()
    assert bool(ours.network) == (ends.transport.scheme == "tcp")
    assert ours.binding == b""
    assert ours.counts()[0] > 0
    assert ours.is_established
    assert (ends.transport.connect_encrypted is not None) == (ends.transport.scheme == "tcp")


# -- How it ends


def test_what_came_before_the_other_end_closed_is_received_first(pair: Pair, faults: Faults) -> None:
    ours, theirs = pair
    faults.slow("worker1", 0.02)
    theirs.send(reply(1))
    theirs.send(reply(2))
    assert not ours.has_hung_up()
    theirs.close()
    assert receive_all(ours) == [reply(1), reply(2)]
    assert ours.has_hung_up()
    with pytest.raises(ConnectionError):
        ours.send(reply(3))
    with pytest.raises(ConnectionResetError):  # as often as it is asked
        ours.receive()


def test_what_is_held_arrives_though_the_agent_has_closed_the_link(pair: Pair, faults: Faults) -> None:
    ours, theirs = pair
    faults.slow("worker1", MOMENT)
    ours.send(pack_message(GOSSIP, b"good-bye"), views(LARGE))
    ours.close()
    ours.close()
    assert receive(theirs) == (pack_message(GOSSIP, b"good-bye"), LARGE)
    with pytest.raises(ConnectionError):
        receive(theirs)


def test_a_thread_that_waits_is_woken_when_the_link_is_closed(pair: Pair) -> None:
    ours, _ = pair
    woken = threading.Event()

    def wait() -> None:
        ours.wait(None)
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not woken.wait(0.05)
    ours.close()
    assert woken.wait(SOON)
    thread.join()
    for use in (ours.receive, ours.fileno, lambda: ours.wait(0.0), lambda: ours.send(reply(1))):
        with pytest.raises(OSError, match="is closed"):
            use()


def test_a_wait_ends_though_a_signal_handler_received_what_it_was_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faulty_link, "MAX_SLEEP_S", 0.05)
    ours, theirs = pair
    handled, is_over, waiting_thread = threading.Event(), threading.Event(), threading.get_ident()

    def take_frame(*_: object) -> None:
        theirs.send(reply(1))
        assert receive(ours) == (reply(1), [])
        handled.set()

    def send_signals() -> None:
        while not is_over.wait(0.01):  # more than one: the first may come before the wait
            signal.pthread_kill(waiting_thread, signal.SIGUSR1)
            assert handled.wait(SOON)
            handled.clear()

    before = signal.signal(signal.SIGUSR1, take_frame)
    sender = threading.Thread(target=send_signals)
    sender.start()
    try:
        assert not ours.wait(None)
    finally:
        is_over.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_link_that_was_cut_says_so(pair: Pair, faults: Faults) -> None:
    ours, theirs = pair
    theirs.send(reply(1))
    assert ours.wait(SOON)
    faults.cut("worker1")
    assert receive(ours) == (reply(1), [])
    for use in (ours.receive, lambda: ours.send(reply(2))):
        with pytest.raises(ConnectionError, match="the faulty agent has cut worker 'worker1' off"):
            use()
    with pytest.raises(ConnectionError):
        receive(theirs)


def test_no_handshake_passes_to_or_from_a_worker_that_is_cut_off(ends: LinkEnds, faults: Faults) -> None:
    faults.cut("worker1")
    ours, theirs = ends.open()
    with pytest.raises(ConnectionError, match="the faulty agent has cut worker 'worker1' off"):
        ours.send(encode(HELLO))
    with pytest.raises(ConnectionError):
        receive(theirs)
    with pytest.raises(ConnectionError):
        ends.accept()
    faults.heal()
    ends.accept()


@pytest.mark.parametrize(
    "malformed",
    [
        pytest.param(b"short", id="no header"),
        pytest.param(pack_message(6, b"control"), id="no control message"),
        pytest.param(b"\3\1" + bytes(14) + b"few", id="no references"),
    ],
)
def test_what_cannot_be_read_is_left_to_the_agent(pair: Pair, faults: Faults, malformed: bytes) -> None:
    ours, theirs = pair
    faults.sent_to(1).unacknowledged.add(3)  # so that control messages are looked into
    theirs.send(malformed)
    assert receive(ours) == (malformed, [])


def test_what_is_no_frame_is_an_error_where_the_agent_reads(ends: LinkEnds) -> None:
    ours, theirs = ends.open()
    theirs.send(b"x" * (HANDSHAKE_LIMIT + 1))
    with pytest.raises(ProtocolError, match="at most"):
        receive(ours)


def test_nothing_is_connected_after_the_end(ends: LinkEnds, faults: Faults) -> None:
    faults.relay.close()
    with pytest.raises(OSError, match="the faulty agent has ended"):
        ends.open()


# -- What it leaves behind


def test_closing_gives_every_descriptor_back(ends: LinkEnds, faults: Faults) -> None:
    def use() -> None:
        for ours, theirs in [ends.connect() for _ in range(5)] + [ends.accept() for _ in range(5)]:
            ours.close()
            theirs.close()

    use()
    eventually(lambda: not faults.relay.links)
    before = len(os.listdir("/proc/self/fd"))
    use()
    eventually(lambda: len(os.listdir("/proc/self/fd")) == before)


def test_without_descriptors_the_inner_link_is_closed(ends: LinkEnds, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = ends.inner
    listener = inner.listen(None, 100)
    connected = inner.connect(listener.address, SOON, 100)
    theirs = listener.accept()
    assert theirs is not None

    def out_of_descriptors() -> None:
        monkeypatch.undo()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(inner, "connect", lambda *_: connected)
    monkeypatch.setattr(socket, "socketpair", out_of_descriptors)
    with pytest.raises(OSError, match="Too many open files"):
        ends.transport.connect(listener.address, SOON, 100)
    with pytest.raises(ConnectionError):
        receive(theirs)
    theirs.close()
    listener.close()


def open_sockets() -> int:
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith("socket:") for link in links if os.path.islink(link))


def test_a_forked_child_gives_its_descriptors_back(ends: LinkEnds, faults: Faults) -> None:
    before = open_sockets()
    ours, theirs = ends.connect()
    child = os.fork()
    if not child:
        code = 1
        try:
            for link in (ours, theirs):
                link.abandon()
            code = 0 if open_sockets() == before else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    theirs.send(reply(1))
    assert receive(ours) == (reply(1), [])


def test_calls_are_judged_by_what_they_say(ends: LinkEnds, faults: Faults) -> None:
    """By function, arguments and buffers, and not by the id or the time that is left."""
    ours, theirs = ends.connect()
    faults.fail("PYTHON_CALL", failure=Failure.REQUEST_LOST)

    def arrives(call_id: int, milliseconds: int, buffer: bytes) -> bool:
        ours.send(pack_call(call_id, b"module\0function", b"arguments", milliseconds), [memoryview(buffer)])
        try:
            frame, _ = receive(theirs, 0.05)
        except TimeoutError:
            return False
        assert unpack_header(frame)[::4] == (CALL, call_id)
        return True

    assert [arrives(1, 0, b"a"), arrives(2, 70, b"a"), arrives(3, 0, b"b"), arrives(4, 0, b"b")] == [
        False, True, False, True,
    ]  # fmt: skip
