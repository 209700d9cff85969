"""Turns of more than one call: who was let out goes on while others are in the line, over every interleaving."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from reading_stage import EndlessTurn, Scenario, Wire, idle_at_the_end

from farcall.agent.reading import Reading, Seat
from farcall.agent.turns import Bells
from farcall.futures import DONE, Future
from farcall.sleeping import FOREVER
from interleaving import ControlledBell, Schedule, explore
from interruption import At, Interrupt

MACHINE = ("agent/reading.py",)


class PatientBell(ControlledBell):
    """Naps there do not end by themselves while all threads are there, who let each other out: so turns come about."""

    __slots__ = ()

    def nap(self, left: float, before: int) -> bool:
        threads = self._schedule._threads
        self._schedule.step(lambda: self._rung or any(thread.ended for thread in threads), "a bell")
        rung, self._rung = self._rung, False
        return rung


class Answering(Wire):
    """A connection to a worker that answers calls in their order: a thread of its own, or the sender's at once."""

    def __init__(self, schedule: Schedule, reading: type[Reading] = Reading, calls: int = 0) -> None:
        super().__init__(schedule, reading)
        self.reading.turns.bells = Bells(lambda: PatientBell(schedule))
        self.sent: deque[int] = deque()
        self._calls = calls
        self._ids = itertools.count()

    def ask(self) -> Future[int]:
        number = next(self._ids)
        future = self.call(number)
        self.sent.append(number)
        if not self._calls:
            self.reply(self.sent.popleft())
        return future

    def answer(self) -> None:
        for _ in range(self._calls):
            self._schedule.step(lambda: bool(self.sent), "nothing to answer")
            self.reply(self.sent.popleft())

    @property
    def outcomes(self) -> list[bool]:
        turn = self.reading.turns.turn
        assert isinstance(turn, EndlessTurn)
        return turn.outcomes


def callers(
    calls: Sequence[int], at_once: bool, reading: type[Reading] = Reading, outcomes: set[bool] | None = None
) -> Scenario:
    """As many threads, each of which makes so many calls, one after the other."""

    def scenario(schedule: Schedule) -> Any:
        wire = Answering(schedule, reading, 0 if at_once else sum(calls))

        def call(count: int) -> None:
            for _ in range(count):
                future = wire.ask()
                wire.reading.wait(future, FOREVER)
                assert future.done()

        def check() -> None:
            idle_at_the_end(wire)
            if outcomes is not None:
                outcomes.update(wire.outcomes)

        bodies: list[Any] = [lambda count=count: call(count) for count in calls]
        return [*bodies, *([] if at_once else [wire.answer])], check

    return scenario


def test_threads_that_call_again_and_again_take_turns() -> None:
    outcomes: set[bool] = set()
    assert explore(callers((2, 2), False, outcomes=outcomes), (), 1) > 100
    assert outcomes == {True, False}, "turns went on, and ended as no reply came"


def test_two_threads_that_are_answered_at_once_take_turns() -> None:
    outcomes: set[bool] = set()
    assert explore(callers((2, 2), True, outcomes=outcomes), MACHINE, 1) > 100
    assert outcomes == {True}


def test_three_threads_that_are_answered_at_once_take_turns() -> None:
    outcomes: set[bool] = set()
    assert explore(callers((2, 2, 1), True, outcomes=outcomes), (), 1) > 100
    assert True in outcomes


def in_turn(schedule: Schedule) -> tuple[Answering, Seat]:
    """It is this thread's turn, and another one is in the line."""
    wire = Answering(schedule)
    reading = wire.reading
    waiting = Seat(reading, -1, wire.call(-1))
    reading._sit_down(waiting)
    wire.pending.pop(-1)
    waiting.future.settle(DONE, -1)
    waiting.napping, waiting.lined_up = False, True
    reading.line.append(waiting)
    reading.turns.turn.begin(threading.get_ident(), 1, 0.0)
    return wire, waiting


def is_let_out(seat: Seat) -> bool:
    assert seat.bell is not None
    return seat.bell.nap(0.0, 0)


def test_who_has_the_turn_goes_on_and_lets_nobody_out() -> None:
    wire, waiting = in_turn(Schedule((), ()))
    for _ in range(3):
        future = wire.ask()
        wire.reading.wait(future, FOREVER)
        assert future.done()
        assert not wire.reading._holder
    assert wire.outcomes == [True, True, True]
    assert list(wire.reading.line) == [waiting]
    assert not is_let_out(waiting)


def test_who_goes_on_in_its_turn_has_the_connection_watched_if_a_future_has_a_callback() -> None:
    wire, waiting = in_turn(Schedule((), ()))
    wire.call(-3)
    wire.reading._urgent = True
    future = wire.ask()
    wire.reading.wait(future, FOREVER)
    assert future.done()
    assert wire.watched
    assert not wire.reading._holder
    assert list(wire.reading.line) == [waiting]


def test_who_goes_on_in_its_turn_hands_the_role_on_if_the_line_is_empty_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire, waiting = in_turn(Schedule((), ()))
    reading = wire.reading
    sleeper = reading._queue[-3] = Seat(reading, -3, wire.call(-3))
    sleeper.gate = reading._new_gate()
    glance = wire.glance

    def looked_for_itself_meanwhile(future: Future[Any]) -> None:
        glance(future)
        reading._stand_up(waiting)
        reading.line.clear()

    monkeypatch.setattr(wire, "glance", looked_for_itself_meanwhile)
    reading.wait(wire.ask(), FOREVER)
    assert reading._holder == -3


def test_who_gets_no_reply_at_once_lets_the_next_one_out() -> None:
    wire, waiting = in_turn(Schedule((), ()))
    wire.reading.wait(wire.call(0), 0.0)
    assert wire.outcomes == [False]
    assert is_let_out(waiting)
    assert not wire.reading.line
    turn = wire.reading.turns.turn
    assert not turn.lasts(threading.get_ident())
    assert turn.lasts(-1), "it is the turn of who was let out"


def test_who_does_not_have_the_turn_lets_others_go_first() -> None:
    wire, waiting = in_turn(Schedule((), ()))
    wire.reading.turns.turn.begin(-2, 1, 0.0)
    wire.reading.wait(wire.ask(), 0.0)
    assert wire.outcomes == []
    assert is_let_out(waiting)


def test_who_has_the_turn_does_not_read_beside_another() -> None:
    wire, _ = in_turn(Schedule((), ()))
    wire.reading._holder = -2
    wire.reading.wait(wire.ask(), 0.0)
    assert wire.outcomes == []
    assert wire.readers == 0
    assert wire.reading._holder == -2


def test_nobody_is_let_out_beside_a_thread_that_reads_in_its_turn() -> None:
    wire, waiting = in_turn(Schedule((), ()))
    reading = wire.reading
    reading._holder = -2
    reading.turns.turn.begin(-2, 1, 0.0)
    reading.wait(wire.call(0), 0.0)
    assert not is_let_out(waiting)
    reading.turns.turn.until = 0.0
    reading.wait(wire.call(1), 0.0)
    assert is_let_out(waiting), "its turn is over, whatever it does"


@pytest.mark.parametrize("answered", [False, True])
def test_an_interrupt_at_any_point_of_a_turn_leaves_the_role_to_others(answered: bool) -> None:
    """Those in the line look for themselves, but the role must be free, and the line without who has left."""
    places: set[str] = set()
    for point in itertools.count():
        wire, waiting = in_turn(Schedule((), ()))
        future = wire.ask() if answered else wire.call(0)
        with contextlib.suppress(Interrupt), At(MACHINE, (point,)) as at:
            wire.reading.wait(future, 0.0)
        assert not wire.reading._holder
        assert list(wire.reading._queue.values()) == [waiting]
        assert (
            waiting in wire.reading.line
            or is_let_out(waiting)
            or {"let_out", "wake"} & {*re.findall(r"\w+", str(at.places))}
        )
        places.update(at.places)
        if not at.has_acted:
            break
    assert len(places) > 3


# Planted bugs


class KeepsTheRoleInItsTurn(Reading):
    """Does not give the role up while others are in the line."""

    def wait(self, future: Future[Any], deadline: float) -> None:
        super().wait(future, deadline)
        if self.line and not self._holder:
            self._holder = threading.get_ident()


class ForgetsTheLine(Reading):
    """Comes to sleep, and lets nobody out."""

    def let_out(self) -> None:
        """Nobody."""


@pytest.mark.parametrize("bug", [KeepsTheRoleInItsTurn, ForgetsTheLine])
def test_a_planted_bug_is_caught(bug: type[Reading]) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        explore(callers((2, 2), False, bug), (), preemptions=1)
