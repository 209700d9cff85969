"""Two processes on an x86, over every order in which its cores may do things: what a shortcut must survive.

Each core has a buffer: what it writes goes there, and from there to the memory that both see, in that order, at some
time. It sees what is in its own buffer, and nothing of the other's. A fence waits until the buffer is empty. A socket
is taken to be memory as well, though the system's calls are fences in fact: what holds here holds there all the more.

The two sides are the real code, and no thread runs it: all that a side knows is what its steps have given so far. So it
is run anew from the beginning with these results, up to the first step that has none yet, and that step is taken next,
or any of the other side, or one of the two buffers. `explore` goes from state to state until it knows them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from farcall.agent import spinning
from farcall.agent.sending import Sender
from farcall.agent.shortcuts import receive_beside
from farcall.agent.spinning import Spinning
from farcall.protocol.wire import KNOCK, Decoder
from farcall.transports import rings
from farcall.transports.rings import RING_SIZE, RingReader, RingWriter

GREETING = 40
DATA = "data"
SOCKET = "socket"
FENCE, POLL, RECEIVE, SLEEP = ("fence",), ("poll",), ("receive",), ("sleep",)
_SEEN = 256
"""Bytes of the ring that are used here."""

Step = tuple[Any, ...]


class AsleepForEver(AssertionError):
    """Something was sent, and nobody will wake who waits for it."""


class OutOfOrder(AssertionError):
    """What was sent first came later."""


class _Next(BaseException):
    """The step that has no result yet."""


class Side:
    """One side, which is run up to the first step whose result is not known."""

    now: Side

    def __init__(self, name: str, results: tuple[Any, ...]) -> None:
        self.name, self._results, self._at = name, results, 0

    def do(self, *step: Any) -> Any:
        if self._at == len(self._results):
            raise _Next(step)
        self._at += 1
        return self._results[self._at - 1]


class _Words:
    def __getitem__(self, index: int) -> Any:
        return Side.now.do("load", index)

    def __setitem__(self, index: int, value: int) -> None:
        Side.now.do("store", index, value)


class _Piece(bytes):
    tobytes = bytes.__bytes__


class _Data:
    def __getitem__(self, where: slice) -> _Piece:
        return _Piece(Side.now.do("load", DATA)[where])

    def __setitem__(self, where: slice, data: bytes) -> None:
        Side.now.do("store", DATA, where.start, data)


class _Socket:
    address = "a socket"

    def send(self, data: Any) -> int:
        Side.now.do("store", SOCKET, bytes(data))
        return len(data)

    def receive(self, size: int) -> bytes:
        data: bytes = Side.now.do(*RECEIVE)
        if not data:
            raise BlockingIOError
        return data


def _have_ring(ring: Any) -> Any:
    ring.words, ring._data = _Words(), _Data()
    return ring


def write(send: Callable[[Sender], None]) -> None:
    """The side that sends."""
    sender = Sender(_Socket(), lambda on: None)  # type: ignore[arg-type]
    sender.sent = GREETING
    sender.ring = _have_ring(RingWriter(memoryview(bytearray(RING_SIZE)), GREETING))
    send(sender)


def read(count: int) -> list[int]:
    """The side that reads, until it has had so many; what it has had."""
    ring = _have_ring(RingReader(memoryview(bytearray(RING_SIZE)), "it"))
    look, decoder, got = Spinning(0.5).look, Decoder(), list[int]()
    while len(got) < count:
        if not look(lambda _: ["socket"] if Side.now.do(*POLL) else [], (ring,)):
            Side.now.do(*SLEEP)
        try:
            messages = receive_beside(ring, _Socket(), decoder)  # type: ignore[arg-type]
        except BlockingIOError:
            continue
        got += [call_id for kind, call_id, *_ in messages or () if kind != KNOCK]
    return got


class State(NamedTuple):
    """All that there is at one moment."""

    results: tuple[tuple[Any, ...], tuple[Any, ...]] = ((), ())
    buffers: tuple[tuple[Step, ...], tuple[Step, ...]] = ((), ())
    words: tuple[int, ...] = (0,) * 32
    data: bytes = bytes(_SEEN)
    socket: bytes = b""

    def seen_by(self, side: int, what: Any) -> Any:
        """What that side sees there: what it has written last, even if that is in its buffer still."""
        data = self.data
        for step in self.buffers[side]:
            if step[1] == what == DATA:
                data = data[: step[2]] + step[3] + data[step[2] + len(step[3]) :]
        if what == DATA:
            return data
        return next((step[2] for step in reversed(self.buffers[side]) if step[1] == what), self.words[what])

    def after(self, side: int, result: Any, **others: Any) -> State:
        """The side has got that."""
        results = _with(self.results, side, (*self.results[side], result))
        return self._replace(results=results, **others)

    def drained(self, side: int) -> State:
        """The first of what is in the buffer of that side is there for both to see."""
        (_, what, *values), *left = self.buffers[side]
        rest = self._replace(buffers=_with(self.buffers, side, tuple(left)))
        if what == SOCKET:
            return rest._replace(socket=self.socket + values[0])
        if what == DATA:
            begin, data = values
            return rest._replace(data=self.data[:begin] + data + self.data[begin + len(data) :])
        return rest._replace(words=(*self.words[:what], values[0], *self.words[what + 1 :]))


def _with(pair: Any, side: int, value: Any) -> Any:
    return (value, pair[1]) if side == 0 else (pair[0], value)


class Model:
    """A sender and a reader."""

    def __init__(self, send: Callable[[Sender], None], count: int) -> None:
        self._bodies: tuple[Callable[[], Any], ...] = (lambda: write(send), lambda: read(count))
        self._expected = list(range(count))
        self._known: list[dict[tuple[Any, ...], Step | None]] = [{}, {}]

    def explore(self) -> int:
        """Goes through all states; how many there are. Raises `AsleepForEver` or `OutOfOrder`."""
        first = State()
        seen, left = {first}, [first]
        while left:
            state = left.pop()
            following = list(self._following(state))
            if not following and any(self._next(side, state) is not None for side in (0, 1)):
                raise AsleepForEver(self._next(1, state))
            for each in following:
                if each not in seen:
                    seen.add(each)
                    left.append(each)
        return len(seen)

    def _next(self, side: int, state: State) -> Step | None:
        """The next step of that side; None if it has ended."""
        results, known = state.results[side], self._known[side]
        if results not in known:
            Side.now = Side(("writer", "reader")[side], results)
            try:
                got = self._bodies[side]()
                known[results] = None
                if got is not None and got != self._expected:
                    raise OutOfOrder(got)
            except _Next as step:
                known[results] = step.args[0]
        return known[results]

    def _following(self, state: State) -> Iterator[State]:
        for side in (0, 1):
            if state.buffers[side]:
                yield state.drained(side)
            step = self._next(side, state)
            if step is None:
                continue
            kind = step[0]
            if kind == "load":
                yield state.after(side, state.seen_by(side, step[1]))
            elif kind == "store":
                buffers = _with(state.buffers, side, (*state.buffers[side], step))
                yield state.after(side, None, buffers=buffers)
            elif step == FENCE:
                if not state.buffers[side]:
                    yield state.after(side, None)
            elif step == POLL:
                yield state.after(side, bool(state.socket))
            elif step == RECEIVE:
                yield state.after(side, state.socket, socket=b"")
            elif state.socket:  # SLEEP
                yield state.after(side, None)


@pytest.fixture
def x86(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What the two sides stand on: fences that are steps, and a clock by which each looks once and then gives up."""
    monkeypatch.setattr(rings, "fence", lambda: Side.now.do(*FENCE))
    monkeypatch.setattr(spinning, "_GLANCES", range(1))
    monkeypatch.setattr(spinning, "_count_taken_off", lambda: 0)
    monkeypatch.setattr(spinning, "perf_counter", itertools.count().__next__)
    return monkeypatch
