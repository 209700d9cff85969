"""Spinning beside rings: what is in one is found, and a ring rests whenever who looked may sleep, and only then."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest

from farcall.agent import spinning
from farcall.agent.spinning import Spinning
from farcall.transports.rings import AWAKE, RING_SIZE, RingReader, RingWriter
from interruption import At, Interrupt

BUDGET = 100e-6


class Pair:
    """Two rings, and somebody who looks into both and at a socket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memories = [memoryview(bytearray(RING_SIZE)) for _ in range(2)]
        self.writers = [RingWriter(memory, 0) for memory in memories]
        self.rings = [RingReader(memory, f"ring {number}") for number, memory in enumerate(memories)]
        self.spinning = Spinning(BUDGET)
        self.polls = itertools.count()
        self.at: dict[int, Callable[[], list[Any]]] = {}
        clock = itertools.count(50.0, 10e-6)
        monkeypatch.setattr(spinning, "perf_counter", clock.__next__)
        monkeypatch.setattr(spinning, "_yield", lambda: None)

    def poll(self, _: int) -> list[Any]:
        return self.at.get(next(self.polls), list)()

    def look(self) -> list[Any]:
        self.polls = itertools.count()
        return self.spinning.look(self.poll, self.rings)

    def awake(self) -> list[int]:
        return [ring.words[AWAKE] for ring in self.rings]

    def put(self, number: int) -> list[Any]:
        writer = self.writers[number]
        assert writer.put(b"message", writer.head), "it does not look"
        return []


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    return Pair(monkeypatch)


@pytest.mark.parametrize("poll", [0, 1, 5])
def test_what_comes_in_a_ring_is_found_and_the_rings_stay_awake(pair: Pair, poll: int) -> None:
    pair.at[poll] = lambda: pair.put(1)
    assert pair.look() == ["ring 1"]
    assert pair.awake() == [1, 1]
    pair.rings[1].take()
    assert pair.look() == ["ring 1"]


@pytest.mark.parametrize("poll", [0, 3])
def test_what_comes_through_the_socket_is_found_with_what_is_in_the_rings(pair: Pair, poll: int) -> None:
    def come() -> list[Any]:
        pair.put(0)
        return ["socket"]

    pair.at[poll] = come
    assert pair.look() == ["socket", "ring 0"]
    assert pair.awake() == [1, 1]


def test_who_finds_nothing_lets_the_rings_rest(pair: Pair) -> None:
    assert pair.look() == []
    assert pair.awake() == [0, 0]


def test_what_comes_at_the_last_moment_is_found(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    miss = Spinning._miss

    def last(self: Spinning, *args: Any) -> None:
        pair.put(0)
        miss(self, *args)

    monkeypatch.setattr(Spinning, "_miss", last)
    assert pair.look() == ["ring 0"]
    assert pair.awake() == [0, 0]


@pytest.mark.parametrize("why", ["rests", "never spins"])
def test_who_does_not_look_lets_the_rings_rest_and_takes_what_is_there(pair: Pair, why: str) -> None:
    pair.at[0] = lambda: pair.put(0)
    assert pair.look() == ["ring 0"]
    if why == "rests":
        pair.spinning._resting = 2
    else:
        pair.spinning._budget = 0.0
    assert pair.look() == ["ring 0"]
    assert pair.awake() == [0, 0]
    pair.rings[0].take()
    assert pair.look() == []


def test_after_an_interrupt_at_any_point_the_next_look_finds_what_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    for point in itertools.count():
        pair = Pair(monkeypatch)
        pair.at[2] = lambda pair=pair: pair.put(0)
        try:
            with At(("agent/spinning.py", "transports/rings.py"), (point,)) as at:
                pair.look()
        except Interrupt:
            pass
        pair.at.clear()
        if not pair.rings[0].has_some():
            assert pair.look() == [], at.places
            assert pair.awake() == [0, 0], at.places
        else:
            assert pair.look() == ["ring 0"], at.places
        if not at.has_acted:
            assert point > 10
            return


# Glancing, by who does not sleep there


@pytest.mark.parametrize("poll", [0, 3])
@pytest.mark.parametrize("where", ["ring", "socket"])
def test_a_glance_finds_what_comes_at_once(pair: Pair, where: str, poll: int) -> None:
    pair.at[poll] = (lambda: pair.put(1)) if where == "ring" else (lambda: ["socket"])
    assert pair.spinning.glance(pair.poll, pair.rings, monotonic() + 60.0)
    assert pair.awake() == [1, 1]
    assert next(pair.polls) == poll + 1


def test_a_glance_in_vain_ends_and_leaves_all_as_it_is(pair: Pair) -> None:
    for _ in range(100):
        assert not pair.spinning.glance(pair.poll, pair.rings, 0.0)
    assert pair.awake() == [1, 1], "nobody sleeps there"
    assert pair.spinning._score == spinning.TRUST
    assert not pair.spinning._resting


def test_there_is_no_glance_where_spinning_is_off(pair: Pair) -> None:
    pair.at[0] = lambda: ["socket"]
    assert not Spinning(0.0).glance(pair.poll, pair.rings, monotonic() + 60.0)
    assert pair.awake() == [0, 0]
