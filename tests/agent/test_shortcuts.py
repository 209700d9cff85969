"""The shortcut of a connection: over every interleaving of a sender and a reader, nothing is lost and order is kept."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from farcall.agent.sending import Sender
from farcall.agent.shortcuts import abandon, accept, receive_beside
from farcall.errors import ProtocolError
from farcall.protocol.wire import CALL, HEADER, KNOCK, Decoder, encode
from farcall.transports.rings import AWAKE, PAIR_SIZE, RING_SIZE, RingReader, RingWriter, found, rest
from interleaving import Schedule, explore
from interruption import At, Interrupt

LINES = ("transports/rings.py", "agent/shortcuts.py", "agent/test_shortcuts.py", "agent/sending.py")
GREETING = 40


class Socket:
    """Both ends of a channel."""

    address = "memory"

    def __init__(self) -> None:
        self.data = b""
        self.sends = 0
        self.closed = False
        self.broken = False

    def send(self, data: Any) -> int:
        self.data += bytes(data)
        self.sends += 1
        return len(data)

    def receive(self, size: int) -> bytes:
        if not self.data:
            if self.broken:
                raise ConnectionResetError
            if self.closed:
                return b""
            raise BlockingIOError
        data, self.data = self.data[:size], self.data[size:]
        return data

    def receive_into(self, space: memoryview) -> int:
        data = self.receive(space.nbytes)
        space[: len(data)] = data
        return len(data)


class Connection:
    """One direction of a connection, with a ring."""

    def __init__(self) -> None:
        memory = memoryview(bytearray(RING_SIZE))
        self.socket = Socket()
        self.sender = Sender(self.socket, lambda on: None)  # type: ignore[arg-type]
        self.sender.sent = GREETING
        self.sender.ring = RingWriter(memory, GREETING)
        self.decoder = Decoder()
        self.ring = RingReader(memory, "it")
        self.got: list[int] = []

    def receive(self) -> bool:
        """Whether the connection is there still."""
        messages = receive_beside(self.ring, self.socket, self.decoder)  # type: ignore[arg-type]
        self.got += [call_id for kind, call_id, *_ in messages or () if kind != KNOCK]
        return messages is not None


def message(number: int, size: int = 0) -> bytes:
    return encode(CALL, number, b"", bytes(size))


Rest = Callable[[list[RingReader]], list[Any]]


def scenario(send: Callable[[Connection], object], count: int, rest: Rest = rest) -> Callable[[Schedule], Any]:
    def make(schedule: Schedule) -> Any:
        here = Connection()
        here.ring.words[AWAKE] = 1

        def read() -> None:
            while len(here.got) < count:
                here.ring.words[AWAKE] = 1
                if not here.socket.data and not found([here.ring]) and not rest([here.ring]):
                    schedule.step(lambda: bool(here.socket.data), "asleep")
                try:
                    here.receive()
                except BlockingIOError:
                    pass

        def check() -> None:
            assert here.got == list(range(count)), "out of order"

        return [lambda: send(here), read], check

    return make


def send_two(here: Connection) -> None:
    here.sender.send(message(0))
    here.sender.send(message(1))


def send_in_all_ways(here: Connection) -> None:
    here.sender.send(message(0))
    here.sender.send_all([message(1)])
    here.sender.queue(message(2))
    here.sender.flush()


def test_one_who_sends_against_one_who_falls_asleep() -> None:
    assert explore(scenario(lambda here: here.sender.send(message(0)), 1), LINES, preemptions=2) > 100
    assert explore(scenario(send_two, 2), LINES, preemptions=1) > 100


def test_what_takes_the_socket_and_what_takes_the_ring_stay_in_order() -> None:
    assert explore(scenario(send_in_all_ways, 3), LINES, preemptions=1) > 100


def test_without_the_knock_somebody_would_sleep_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sender, "_knock", lambda self, ring: None)
    with pytest.raises(AssertionError, match="asleep"):
        explore(scenario(send_two, 2), LINES, preemptions=1)


def test_without_the_last_look_somebody_would_sleep_for_ever() -> None:
    def careless(rings: list[RingReader]) -> list[Any]:
        rest(rings)
        return []

    with pytest.raises(AssertionError, match="asleep"):
        explore(scenario(send_two, 2, careless), LINES, preemptions=1)


def test_without_a_count_of_what_was_read_they_would_come_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    put = RingWriter.put
    monkeypatch.setattr(RingWriter, "put", lambda self, data, sent: put(self, data, self.words[17] + self.head + 40))
    with pytest.raises(AssertionError, match="out of order"):
        explore(scenario(send_in_all_ways, 3), LINES, preemptions=1)


# One thing after the other


def test_small_messages_take_the_ring_while_somebody_looks_and_the_socket_else() -> None:
    here = Connection()
    here.sender.send(message(0))
    assert here.socket.sends == 1
    here.receive()
    here.ring.words[AWAKE] = 1
    here.sender.send(message(1))
    here.sender.queue(message(2))
    here.sender.flush()
    assert here.socket.sends == 1
    assert found([here.ring])
    here.sender.send(message(3, 1 << 15))
    here.sender.send(message(4))
    assert here.socket.sends == 3, "too large; and behind what is in the socket"
    here.receive()
    assert here.got == [0, 1, 2]
    while here.socket.data:
        here.receive()
    assert here.got == [0, 1, 2, 3, 4]
    assert here.decoder.received + GREETING == here.sender.sent, "all of it is counted"
    here.sender.send(message(5))
    assert here.socket.sends == 3
    here.receive()
    assert here.got[-1] == 5


@pytest.mark.parametrize("end", ["closed", "broken"])
def test_what_is_in_the_ring_comes_before_the_end(end: str) -> None:
    here = Connection()

    class Last(Socket):
        """The other side says its last word just before it goes."""

        def receive(self, size: int) -> bytes:
            if not here.got and not found([here.ring]):
                here.ring.words[AWAKE] = 1
                here.sender.send(message(0))
            return super().receive(size)

    here.socket = Last()
    setattr(here.socket, end, True)
    assert here.receive()
    assert here.got == [0]
    if end == "closed":
        assert not here.receive()
    else:
        with pytest.raises(ConnectionResetError):
            here.receive()


def test_nothing_may_come_in_the_ring_in_the_midst_of_a_large_message() -> None:
    here = Connection()
    here.socket.send(HEADER.pack(CALL, 0, 0, 0, 1 << 20, 0))
    here.receive()
    assert here.decoder.space is not None
    here.ring.words[0] = 8
    with pytest.raises(ProtocolError, match="in the midst of a message"):
        here.receive()


@pytest.mark.parametrize("sizes", [[PAIR_SIZE - 1], [PAIR_SIZE + 1], [PAIR_SIZE, 8], []])
def test_what_cannot_be_rings_is_refused(sizes: list[int]) -> None:
    with pytest.raises(ProtocolError, match="were offered"):
        accept([bytearray(size) for size in sizes], Connection().sender, 0, None)


def test_rings_are_accepted_once() -> None:
    sender = Sender(Socket(), lambda on: None)  # type: ignore[arg-type]
    assert accept([bytearray(PAIR_SIZE)], sender, 0, "event").event == "event"
    with pytest.raises(ProtocolError, match="were offered"):
        accept([bytearray(PAIR_SIZE)], sender, 0, None)


# Interrupts


PATH = ("agent/sending.py", "transports/rings.py", "agent/shortcuts.py")


@pytest.mark.parametrize("way", ["send", "flush"])
def test_an_interrupt_at_any_point_of_a_send_leaves_all_of_it_or_a_broken_channel(way: str) -> None:
    """What is in the ring is whole, and who sends or flushes next knocks for it."""
    for point in itertools.count():
        here = Connection()
        here.ring.words[AWAKE] = 1
        if way == "flush":
            here.sender.queue(message(0))
        with contextlib.suppress(Interrupt), At(PATH, (point,)) as at:
            if way == "flush":
                here.sender.flush()
            else:
                here.sender.send(message(0))
        here.ring.words[AWAKE] = 0  # the reader sleeps by now, and has seen nothing
        if here.sender.is_broken():
            with pytest.raises(ConnectionError):
                here.sender.send(message(1))
        else:
            here.sender.flush()
            assert here.socket.data or not here.ring.has_some(), f"nobody is woken: {at.places}"
            while here.socket.data or here.ring.has_some():
                here.receive()
            assert here.got == [0] or (at.places and not here.got), at.places
        if not at.has_acted:
            assert point > 5
            return


def test_an_interrupt_at_any_point_of_receiving_is_not_swallowed() -> None:
    """Bytes may be lost then: whoever reads gives the connection up."""
    for point in itertools.count():
        here = Connection()
        here.ring.words[AWAKE] = 1
        here.sender.send(message(0))
        interrupted = True
        with contextlib.suppress(Interrupt), At(PATH, (point,)) as at:
            here.receive()
            interrupted = False
        assert interrupted == at.has_acted, at.places
        if not at.has_acted:
            assert point > 2
            assert here.got == [0]
            return


def test_a_forked_child_in_the_midst_of_it_touches_nothing() -> None:
    here = Connection()
    here.ring.words[AWAKE] = 1
    here.sender.send(message(0))
    words, data, writer = here.ring.words, here.ring._data, here.sender.ring
    before = bytes(words), bytes(data)
    assert writer is not None
    abandon([here.ring], here.sender)
    assert rest([here.ring]) == []
    assert here.ring.take() == b""
    here.ring.had(77)
    assert not writer.put(message(1), here.sender.sent)
    assert here.sender.ring is None
    assert (bytes(words), bytes(data)) == before
