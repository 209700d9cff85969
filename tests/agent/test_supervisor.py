"""The clock thread, on a clock of the test's: when it ticks, when it sleeps, and that nobody calls it in vain."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from farcall.agent import supervisor as supervisor_module
from farcall.agent.supervisor import TICK, Supervisor
from farcall.sleeping import FOREVER
from interleaving import ControlledGate, Schedule, explore

LINGER = supervisor_module._LINGER
SLEEP = supervisor_module._SLEEP


class FakeConnection:
    """Counts its ticks; wants as many more as it is told."""

    def __init__(self, more: int = 0, deadline: float = FOREVER) -> None:
        self.ticks: list[float] = []
        self.more = more
        self.deadline = deadline
        self.on_tick: Callable[[], None] = lambda: None

    def tick(self, now: float) -> bool:
        self.ticks.append(now)
        self.on_tick()
        self.more -= 1
        return self.more > 0

    def next_deadline(self) -> float:
        return self.deadline


class FakeServing:
    """A serving pool whose leader sleeps, unless it is told otherwise."""

    def __init__(self) -> None:
        self.asleep = True
        self.looks = 0

    def depose_stuck_leader(self) -> None:
        self.looks += 1


class Clockwork:
    """A supervisor on a clock that runs only while it rests. `at[n]` is done in its n-th rest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rests: int) -> None:
        self.now = 1000.0
        self.rests: list[float] = []
        self.at: dict[int, Callable[[], object]] = {}
        self.serving = FakeServing()
        self.supervisor = Supervisor("w")
        self.supervisor.serving = self.serving  # type: ignore[assignment]
        self.supervisor._gate = self  # type: ignore[assignment]
        self._last = rests
        self._open = False
        monkeypatch.setattr(supervisor_module, "monotonic", lambda: self.now)

    def run(self) -> list[float]:
        """How long each rest was to be."""
        self.supervisor._run()
        return self.rests

    # Gate

    def open(self, _: object = None) -> None:
        self._open = True

    def rest(self, deadline: float) -> bool:
        self.rests.append(round(deadline - self.now, 9))
        if len(self.rests) >= self._last:
            self.supervisor._closing = True
        self.at.get(len(self.rests), lambda: None)()
        opened, self._open = self._open, False
        if not opened:
            self.now = max(self.now, deadline)
        return opened


def test_with_nothing_to_do_it_lingers_and_then_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    clockwork = Clockwork(monkeypatch, rests=LINGER + 2)
    assert clockwork.run() == [TICK] * (LINGER - 1) + [SLEEP] * 3
    assert clockwork.serving.looks == 0


def test_it_ticks_quickly_while_the_leader_is_awake_and_looks_at_it_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clockwork = Clockwork(monkeypatch, rests=100)
    clockwork.serving.asleep = False
    assert clockwork.run() == [TICK] * 100
    assert clockwork.serving.looks == 100


def test_it_sleeps_again_when_the_leader_does(monkeypatch: pytest.MonkeyPatch) -> None:
    clockwork = Clockwork(monkeypatch, rests=5 + LINGER)
    clockwork.serving.asleep = False
    clockwork.at[5] = lambda: setattr(clockwork.serving, "asleep", True)
    assert clockwork.run() == [TICK] * (5 + LINGER - 1) + [SLEEP]
    assert clockwork.serving.looks == 5


def test_it_works_without_a_serving_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    clockwork = Clockwork(monkeypatch, rests=LINGER)
    clockwork.supervisor.serving = None
    assert clockwork.run()[-1] == SLEEP


def test_a_sleeping_supervisor_is_quickened(monkeypatch: pytest.MonkeyPatch) -> None:
    clockwork = Clockwork(monkeypatch, rests=LINGER + 1)
    clockwork.at[LINGER] = clockwork.supervisor.quicken
    assert clockwork.run()[LINGER - 1 :] == [SLEEP, TICK]


def test_a_supervisor_that_ticks_anyway_is_not_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    clockwork = Clockwork(monkeypatch, rests=3)
    clockwork.at[2] = clockwork.supervisor.quicken
    clockwork.run()
    assert clockwork.now == pytest.approx(1000.0 + 3 * TICK), "all rests went to their end"


def test_it_attends_to_a_connection_until_that_says_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    clockwork = Clockwork(monkeypatch, rests=LINGER + 10)
    connection = FakeConnection(more=5)
    clockwork.at[LINGER] = lambda: clockwork.supervisor.attend(connection)
    assert clockwork.run()[LINGER - 1] == SLEEP
    begun = 1000.0 + (LINGER - 1) * TICK
    assert connection.ticks == pytest.approx([begun + number * TICK for number in range(5)]), "it was woken, too"
    assert not clockwork.supervisor._attended


def test_who_wants_attention_again_in_the_midst_of_a_tick_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clockwork = Clockwork(monkeypatch, rests=3)
    connection = FakeConnection(more=0)
    again = iter([lambda: clockwork.supervisor.attend(connection)])
    connection.on_tick = lambda: next(again, lambda: None)()
    clockwork.supervisor.attend(connection)
    clockwork.supervisor.connections = list
    clockwork.run()
    assert len(connection.ticks) == 2


def test_it_sleeps_until_the_first_deadline_and_then_ticks_every_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    clockwork = Clockwork(monkeypatch, rests=LINGER + 1)
    asleep_at = 1000.0 + (LINGER - 1) * TICK
    first, second = FakeConnection(deadline=asleep_at + 0.25), FakeConnection(deadline=asleep_at + 0.5)
    clockwork.supervisor.connections = lambda: [first, second]
    clockwork.at[LINGER] = lambda: (first.ticks.clear(), second.ticks.clear())
    first.on_tick = lambda: setattr(first, "deadline", FOREVER) if clockwork.now >= first.deadline else None
    rests = clockwork.run()
    assert rests[LINGER - 1 :] == pytest.approx([0.25, 0.25])
    assert first.ticks == second.ticks == pytest.approx([asleep_at + 0.25])


def test_deadlines_are_seen_to_while_it_ticks_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    clockwork = Clockwork(monkeypatch, rests=4)
    connection = FakeConnection(deadline=1000.0)
    clockwork.supervisor.connections = lambda: [connection]
    clockwork.run()
    assert len(connection.ticks) == 4


@pytest.mark.parametrize(("deadline_in", "rest"), [(0.1, 0.1), (SLEEP / 2, SLEEP / 2), (SLEEP * 2, SLEEP)])
def test_a_deadline_that_is_set_while_it_sleeps(
    monkeypatch: pytest.MonkeyPatch, deadline_in: float, rest: float
) -> None:
    clockwork = Clockwork(monkeypatch, rests=2 * LINGER + 2)
    connection = FakeConnection()
    clockwork.supervisor.connections = lambda: [connection]

    def call() -> None:
        connection.deadline = clockwork.now + deadline_in
        clockwork.supervisor.deadline_set(connection.deadline)

    clockwork.at[LINGER] = call
    rests = clockwork.run()
    assert rests[LINGER - 1] == SLEEP
    if rest == SLEEP:
        assert rests[LINGER] == pytest.approx(SLEEP), "not woken for it"
        return
    total = 0.0
    for slept in rests[LINGER:]:
        total += slept
        if slept != TICK:
            break
    assert total == pytest.approx(rest)


def test_a_tick_that_fails_is_logged_and_the_clock_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clockwork = Clockwork(monkeypatch, rests=4)
    bad, good = FakeConnection(), FakeConnection(more=2)
    bad.on_tick = lambda: 1 / 0  # type: ignore[assignment, return-value]
    clockwork.supervisor.attend(bad)
    clockwork.supervisor.attend(good)
    with caplog.at_level(logging.ERROR, "farcall"):
        clockwork.run()
    assert "worker 'w': the supervisor failed in a tick" in caplog.text
    assert len(good.ticks) == 2


def test_the_thread_lives_from_start_to_close() -> None:
    supervisor = Supervisor("w")
    supervisor.start()
    assert supervisor._thread.is_alive()
    assert supervisor._thread.name == "farcall-w-supervisor"
    supervisor.close()
    assert not supervisor._thread.is_alive()


# Nobody calls it in vain: over every interleaving with its way to sleep, which would last for ever.


class RestingGate(ControlledGate):
    """A rest with an end may end at any moment; the clock is then there."""

    __slots__ = ("_clock",)

    def __init__(self, schedule: Schedule, clock: list[float]) -> None:
        super().__init__(schedule)
        self._clock = clock

    def rest(self, deadline: float) -> bool:
        opened = self.sleep(deadline)
        if not opened:
            self._clock[0] = max(self._clock[0], deadline)
        return opened


def falling_asleep(
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[Supervisor, FakeConnection, FakeServing], None],
    new: Callable[[str], Supervisor] = Supervisor,
) -> Callable[[Schedule], Any]:
    """A supervisor that is about to sleep, and somebody who needs it. It ends when it has seen to that."""
    monkeypatch.setattr(supervisor_module, "_LINGER", 2)
    monkeypatch.setattr(supervisor_module, "_SLEEP", FOREVER)

    def scenario(schedule: Schedule) -> Any:
        clock = [10.0]
        monkeypatch.setattr(supervisor_module, "monotonic", lambda: clock[0])
        supervisor, serving, connection = new("w"), FakeServing(), FakeConnection()
        supervisor._gate = RestingGate(schedule, clock)
        supervisor.serving = serving  # type: ignore[assignment]
        supervisor.connections = lambda: [connection] if connection.deadline < FOREVER else []

        def seen() -> None:  # what `close` does
            supervisor._closing = True
            supervisor._gate.open()

        def tick() -> None:
            if clock[0] >= connection.deadline or connection.deadline == FOREVER:
                seen()

        connection.on_tick = tick
        serving.depose_stuck_leader = seen  # type: ignore[method-assign]

        return [supervisor._run, lambda: call(supervisor, connection, serving)], lambda: None

    return scenario


def attend(supervisor: Supervisor, connection: FakeConnection, _: FakeServing) -> None:
    supervisor.attend(connection)


def wake_the_leader(supervisor: Supervisor, _: FakeConnection, serving: FakeServing) -> None:
    serving.asleep = False
    supervisor.quicken()


def set_a_deadline(supervisor: Supervisor, connection: FakeConnection, _: FakeServing) -> None:
    connection.deadline = 20.0
    supervisor.deadline_set(20.0)


@pytest.mark.parametrize("call", [attend, wake_the_leader, set_a_deadline])
def test_who_needs_it_is_seen_to_though_it_is_falling_asleep(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., None]
) -> None:
    assert explore(falling_asleep(monkeypatch, call), ("agent/supervisor.py",), preemptions=2) > 100


class LooksBeforeItSaysThatItSleeps(Supervisor):
    """The two in the wrong order."""

    def _is_needed(self) -> bool:
        self._dormant = False
        needed = super()._is_needed()
        if not needed:
            self._gate.open()  # a step
            self._gate.rest(0.0)
            self._dormant = True
        return needed


class ForgetsToLookForDeadlines(Supervisor):
    """Sleeps for ever whatever deadline was set before."""

    def _next_deadline(self) -> float:
        return FOREVER


class ClearsAfterTheLook(Supervisor):
    """Never wakes for somebody who came while it said that it is awake."""

    def quicken(self) -> None:
        if self._dormant:
            self._dormant = False


@pytest.mark.parametrize(
    ("bug", "call"),
    [
        (LooksBeforeItSaysThatItSleeps, attend),
        (ForgetsToLookForDeadlines, set_a_deadline),
        (ClearsAfterTheLook, wake_the_leader),
    ],
)
def test_a_planted_bug_is_caught(
    monkeypatch: pytest.MonkeyPatch, bug: type[Supervisor], call: Callable[..., None]
) -> None:
    with pytest.raises(AssertionError, match="nobody can go on"):
        explore(falling_asleep(monkeypatch, call, bug), ("agent/supervisor.py",), preemptions=2)
