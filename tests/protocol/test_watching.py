"""Who is silent for how long: from the first ping that is not answered, and only while the watcher runs itself."""

from __future__ import annotations

import pytest

from farcall.errors import UsageError
from farcall.protocol.watching import ISOLATED, MARGIN, NEIGHBOURS, TURNS, WIDER, Watching

START = 100.0


class Ticks:
    """Ticks a `Watching` when it wants to be ticked, and does in each turn what the protocol does."""

    def __init__(self, *workers: int, interval: float = 1.0, patience: float = 8.0) -> None:
        self.watching = Watching(interval, patience)
        self.watching.follow(workers)
        self.now = START
        self.pings: list[tuple[float, int]] = []
        self.asked: list[tuple[float, int]] = []
        self.dead: list[tuple[float, int]] = []
        self.answering: set[int] = set()
        """These answer every ping at once."""
        self.tick()

    def tick(self, late: float = 0.0) -> None:
        self.now = self.watching.next_tick() + late if self.watching._now is not None else START
        watching, at = self.watching, round(self.now - START, 6)
        is_turn = watching.advance(self.now)
        self.dead += [(at, worker) for worker in watching.dead() if worker not in [each for _, each in self.dead]]
        if is_turn:
            watching.look_further()
            self.asked += [(at, worker) for worker in watching.to_ask_about()]
            pings = watching.to_ping()
            self.pings += [(at, worker) for worker in pings]
            for worker in self.answering.intersection(pings):
                watching.heard(worker)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.watching.next_tick() <= until + 1e-6:
            self.tick()


def times(events: list[tuple[float, int]], worker: int) -> list[float]:
    return [at for at, each in events if each == worker]


# -- pings


def test_the_neighbours_are_pinged_one_after_the_other_each_once_in_an_interval() -> None:
    ticks = Ticks(1, 2, 3)
    ticks.answering = {1, 2, 3}
    for worker in (1, 2, 3):
        ticks.watching.heard(worker)  # the first pings go to all
    ticks.pings.clear()
    ticks.run(6.0)
    gaps = {round(after - before, 3) for (before, _), (after, _) in zip(ticks.pings, ticks.pings[1:], strict=False)}
    assert gaps == {round(1 / TURNS, 3)}
    assert [len(times(ticks.pings, worker)) for worker in (1, 2, 3)] == [6, 6, 6]


def test_a_lone_neighbour_has_all_the_pings() -> None:
    ticks = Ticks(1)
    ticks.answering = {1}
    ticks.run(4.0)
    assert len(ticks.pings) == 4 * TURNS + 1


def test_one_whose_place_changes_is_pinged_within_an_interval() -> None:
    ticks = Ticks(1, 2, 3)
    ticks.answering = {1, 2, 3, 4, 5}
    for order in [(3, 1, 2), (4, 3, 1), (1, 4, 3), (3, 5, 4), (3, 4, 5)]:
        ticks.watching.follow(order)
        ticks.run(2 / TURNS)
    assert max(after - before for before, after in zip(times(ticks.pings, 3), times(ticks.pings, 3)[1:])) <= 1.001  # noqa: B905


def test_when_one_is_silent_all_are_asked_at_once() -> None:
    ticks = Ticks(1, 2, 3)
    ticks.answering = {2, 3}
    ticks.watching.heard(2)
    ticks.watching.heard(3)
    ticks.pings.clear()
    ticks.run(1 / TURNS)
    assert {worker for _, worker in ticks.pings} >= {2, 3}


# -- silence


@pytest.mark.parametrize(("interval", "patience"), [(1.0, 8.0), (1.0, 3.0), (0.2, 1.6), (0.3, 1.0), (7.0, 29.9)])
def test_a_silent_worker_is_asked_about_twice_and_judged_when_the_patience_is_over(
    interval: float, patience: float
) -> None:
    ticks = Ticks(1, 2, interval=interval, patience=patience)
    ticks.answering = {2}
    ticks.run(patience + interval)
    assert len(times(ticks.asked, 1)) == 2
    assert patience - interval - 0.02 * interval <= times(ticks.asked, 1)[0] <= patience - interval + interval / TURNS
    (lost,) = times(ticks.dead, 1)
    assert lost == pytest.approx(patience + MARGIN * interval, abs=0.011 * interval)
    assert lost > patience
    assert times(ticks.dead, 2) == []


def test_silence_begins_with_the_ping_and_not_with_the_last_answer() -> None:
    ticks = Ticks(1, 2, 3)
    ticks.answering = {1, 2, 3}
    ticks.run(5.0)
    last = times(ticks.pings, 1)[-1]
    ticks.answering = {2, 3}
    ticks.run(10.0)
    (lost,) = times(ticks.dead, 1)
    assert lost >= min(at for at in times(ticks.pings, 1) if at > last) + 8.0


def test_a_sign_of_life_ends_the_silence() -> None:
    ticks = Ticks(1, 2)
    ticks.answering = {2}
    ticks.run(8.0)
    ticks.watching.heard(1)
    ticks.run(7.5)
    assert ticks.dead == []
    ticks.run(2.0)
    assert times(ticks.dead, 1)


def test_who_is_vouched_for_by_another_is_not_silent() -> None:
    ticks = Ticks(1, 2)
    ticks.answering = {2}
    ticks.run(8.0)
    ticks.watching.vouched_for(1)
    ticks.run(8.0)
    assert ticks.dead == []
    assert ticks.watching.heard_of_late() == [2]


def test_a_new_neighbour_has_all_the_time_and_one_that_stays_keeps_its_silence() -> None:
    ticks = Ticks(1, 2)
    ticks.answering = {2}
    ticks.run(7.0)
    ticks.watching.follow([1, 2, 3])
    ticks.run(2.0)
    assert [worker for _, worker in ticks.dead] == [1]
    ticks.watching.follow([2, 3])
    with pytest.raises(KeyError):
        ticks.watching.silence(1)


def test_who_was_heard_of_late_is_known_whether_watched_or_not() -> None:
    ticks = Ticks(1)
    ticks.watching.heard(7)
    ticks.watching.heard(8)
    ticks.watching.forget(8)
    ticks.run(7.9)
    assert ticks.watching.heard_of_late() == [7]
    ticks.run(1.0)
    assert ticks.watching.heard_of_late() == []


# -- the watcher's own time


def test_the_time_that_the_watcher_missed_is_nobodys_silence() -> None:
    ticks = Ticks(1, 2)
    ticks.tick(late=60.0)
    assert ticks.watching.silence(1) == 1.0
    ticks.answering = {2}
    ticks.run(6.9)
    assert ticks.dead == []


def test_at_a_late_tick_nobody_is_blamed_as_answers_may_lie_unread() -> None:
    ticks = Ticks(1, 2)
    ticks.answering = {2}
    ticks.run(8.1)
    ticks.tick(late=0.5)
    assert ticks.dead == []
    ticks.tick()
    assert [worker for _, worker in ticks.dead] == [1]


def test_a_watcher_that_is_always_late_finds_the_dead_all_the_same() -> None:
    ticks = Ticks(1, 2)
    ticks.answering = {2}
    for _ in range(30):
        ticks.tick(late=5.0)
    assert [worker for _, worker in ticks.dead] == [1]


def test_a_clock_that_goes_back_does_no_harm() -> None:
    ticks = Ticks(1)
    ticks.watching.advance(START - 50.0)
    assert ticks.watching.silence(1) == 0.0


# -- many, and nobody


def test_a_watcher_that_hears_nobody_waits_longer() -> None:
    ticks = Ticks(1, 2)
    ticks.run(11.0)
    assert ticks.asked == []  # there is nobody to ask
    assert [at for at, _ in ticks.dead] == pytest.approx([8.0 + ISOLATED] * 2, abs=0.011)


def test_a_watcher_that_hears_somebody_again_asks_before_it_judges() -> None:
    ticks = Ticks(1, 2)
    ticks.run(9.0)
    ticks.watching.heard(3)
    ticks.answering = {2}
    ticks.run(1 / TURNS)
    assert ticks.dead == []
    assert [worker for _, worker in ticks.asked] == [1, 2]
    ticks.run(1.0)
    assert [worker for _, worker in ticks.dead] == [1]


def test_it_looks_further_while_nobody_answers_and_no_further_than_the_first_who_does() -> None:
    ticks = Ticks(*range(1, NEIGHBOURS + 1))
    spans = []
    for _ in range(3):
        ticks.tick()
        spans.append(ticks.watching.span)
        ticks.watching.follow(range(1, ticks.watching.span + 1))
        ticks.pings += [(0.0, worker) for worker in ticks.watching.to_ping()]
    assert spans == [NEIGHBOURS * WIDER, NEIGHBOURS * WIDER**2, NEIGHBOURS * WIDER**3]
    ticks.watching.heard(20)
    ticks.watching.heard(30)
    ticks.tick()
    assert ticks.watching.span == 20
    ticks.watching.heard(1)
    ticks.tick()
    assert ticks.watching.span == NEIGHBOURS


def test_one_that_answers_among_the_neighbours_is_enough() -> None:
    ticks = Ticks(1, 2, 3)
    ticks.answering = {2}
    ticks.run(5.0)
    assert ticks.watching.span == NEIGHBOURS


def test_a_watcher_that_comes_back_does_not_look_further_at_once() -> None:
    ticks = Ticks(1, 2, 3)
    ticks.tick(late=5.0)
    assert ticks.watching.span == NEIGHBOURS


@pytest.mark.parametrize(("interval", "patience"), [(0.0, 8.0), (-1.0, 8.0), (1.0, 2.9)])
def test_times_that_do_not_go_together_are_refused(interval: float, patience: float) -> None:
    with pytest.raises(
        UsageError, match="set heartbeat_interval above 0, and heartbeat_patience to at least 3 intervals"
    ):
        Watching(interval, patience)
