"""Spinning: it looks for so long, gives up where it does not pay, and tries again. The clock is handed in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from farcall.agent import spinning
from farcall.agent.spinning import Awaiting, Dozing, Spinning

STEP = 2e-6
BUDGET = 100e-6


class World:
    """The clock, the core that is shared, and what is waited for."""

    def __init__(self) -> None:
        self.now = 50.0
        self.polls = 0
        self.yields = 0
        self.crowded_at: int | None = None
        self.taken_off = 7
        """How often somebody else was let run."""
        self.stands_still = False
        """Whether nobody else runs, though it takes as long as if somebody did."""
        self.ready_at: int | None = None
        """At which poll of a wait it comes; None: not while spinning."""

    def perf_counter(self) -> float:
        return self.now

    def sched_yield(self) -> None:
        self.yields += 1
        if self.yields == self.crowded_at:
            self.now += spinning._CROWDED * 2
            self.taken_off += not self.stands_still

    def poll(self, timeout: int) -> list[Any]:
        assert timeout == 0
        self.polls += 1
        self.now += STEP
        return ["it"] if self.polls == self.ready_at else []

    def wait(self, spin: Spinning, ready_at: int | None = None, crowded_at: int | None = None) -> list[Any]:
        self.polls = self.yields = 0
        self.ready_at, self.crowded_at = ready_at, crowded_at
        return spin.look(self.poll)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(spinning, "perf_counter", world.perf_counter)
    monkeypatch.setattr(spinning, "_yield", world.sched_yield)
    monkeypatch.setattr(spinning, "_count_taken_off", lambda: world.taken_off)
    return world


def misses_until_it_rests(world: World, spin: Spinning, crowded_at: int | None = None) -> int:
    count = 0
    while world.wait(spin, crowded_at=crowded_at) == [] and world.polls:
        count += 1
        assert count < 1000
    return count


def rest(world: World, spin: Spinning) -> int:
    """How many waits go without a look, the one that found it resting included."""
    count = 1
    while not (world.wait(spin, ready_at=1) and world.polls):
        count += 1
        assert count < 10_000
    return count


def test_what_is_there_already_is_found_by_the_first_look(world: World) -> None:
    assert world.wait(Spinning(BUDGET), ready_at=1) == ["it"]
    assert (world.polls, world.yields) == (1, 0)


def test_what_comes_soon_is_found_by_looking_again(world: World) -> None:
    assert world.wait(Spinning(BUDGET), ready_at=10) == ["it"]
    assert (world.polls, world.yields) == (10, 0)


def test_looking_ends_with_the_budget(world: World) -> None:
    assert world.wait(Spinning(BUDGET)) == []
    assert world.polls == pytest.approx(BUDGET / STEP, abs=2)
    assert world.wait(Spinning(BUDGET / 2)) == []
    assert world.polls == pytest.approx(BUDGET / STEP / 2, abs=2)


@pytest.mark.parametrize(("size", "times"), [(1 << 16, 2), (1 << 20, 3), (spinning._LARGEST, 4)])
def test_after_large_data_it_looks_for_longer_once(world: World, size: int, times: int) -> None:
    spin = Spinning(BUDGET)
    spin.after_large(size)
    assert world.wait(spin) == []
    assert world.polls == pytest.approx(times * BUDGET / STEP, rel=0.1)
    assert world.wait(spin) == []
    assert world.polls == pytest.approx(BUDGET / STEP, rel=0.1)


def test_after_more_than_that_it_looks_as_ever_as_the_next_comes_too_late_anyway(world: World) -> None:
    spin = Spinning(BUDGET)
    spin.after_large(1 << 20)
    spin.after_large(spinning._LARGEST + 1)
    assert world.wait(spin) == []
    assert world.polls == pytest.approx(BUDGET / STEP, rel=0.1)


def test_large_data_does_not_end_a_rest_nor_make_one_look_who_never_does(world: World) -> None:
    spin = Spinning(BUDGET)
    misses_until_it_rests(world, spin)
    for never in (spin, Spinning(0)):
        never.after_large(1 << 20)
        assert world.wait(never, ready_at=1) == []
        assert world.polls == 0


def test_a_crowded_core_ends_a_long_look_as_soon_as_a_short_one(world: World) -> None:
    spin = Spinning(BUDGET)
    spin.after_large(1 << 20)
    assert world.wait(spin, crowded_at=1) == []
    assert world.yields == 1


def test_the_core_is_offered_to_others_after_a_while_and_again(world: World) -> None:
    world.wait(Spinning(BUDGET), ready_at=int(spinning._OFFER_AFTER / STEP))
    assert world.yields == 0
    world.wait(Spinning(BUDGET))
    assert 3 <= world.yields <= BUDGET / spinning._OFFER_AFTER


def test_a_budget_of_nothing_never_looks(world: World) -> None:
    spin = Spinning(0)
    for _ in range(100):
        assert world.wait(spin, ready_at=1) == []
        assert world.polls == 0


def test_it_rests_when_it_has_missed_often_and_then_tries_again(world: World) -> None:
    spin = Spinning(BUDGET)
    assert misses_until_it_rests(world, spin) == spinning.TRUST // spinning._MISS_COSTS
    assert rest(world, spin) == spinning._FIRST_REST


@pytest.mark.parametrize(
    ("crowded_at", "expected"),
    [(None, [16, 32, 64, 128, 256, 256, 256, 256]), (1, [16, 32, 64, 128, 256, 512, 1024, 1024])],
    ids=["too late", "crowded"],
)
def test_rests_get_longer_up_to_a_limit(world: World, crowded_at: int | None, expected: list[int]) -> None:
    spin = Spinning(BUDGET)
    misses_until_it_rests(world, spin, crowded_at)
    rests = [rest(world, spin)]
    while len(rests) < len(expected):
        assert misses_until_it_rests(world, spin, crowded_at) <= 2, "trust is soon lost again"
        rests.append(rest(world, spin))
    assert rests == expected


def test_after_a_rest_it_looks_for_longer_until_trust_is_won_back(world: World) -> None:
    spin = Spinning(BUDGET)
    misses_until_it_rests(world, spin)
    rest(world, spin)
    late = int(2 * BUDGET / STEP)
    hits = 0
    while world.wait(spin, ready_at=late):
        hits += 1
        assert hits < 1000
    assert 2 * spinning._MISS_COSTS < hits < spinning.TRUST, "for as long as two misses take to win back, not for ever"
    assert world.wait(spin, ready_at=late), "a miss, and it looks for longer again"


def test_trust_that_is_won_back_makes_the_next_rest_short(world: World) -> None:
    spin = Spinning(BUDGET)
    misses_until_it_rests(world, spin)
    rest(world, spin)
    misses_until_it_rests(world, spin)
    rest(world, spin)
    for _ in range(spinning.TRUST):
        assert world.wait(spin, ready_at=2)
    assert misses_until_it_rests(world, spin) == spinning.TRUST // spinning._MISS_COSTS
    assert rest(world, spin) == spinning._FIRST_REST


@pytest.mark.parametrize(("hits_for_a_miss", "goes_on"), [(4, True), (3, True), (2, False)])
def test_it_pays_if_three_of_four_come_while_spinning(world: World, hits_for_a_miss: int, goes_on: bool) -> None:
    spin = Spinning(BUDGET)
    rested = False
    for _ in range(200):
        for ready_at in [2] * hits_for_a_miss + [None]:
            world.wait(spin, ready_at)
            rested = rested or not world.polls
    assert rested != goes_on


def test_a_crowded_core_ends_the_spinning_and_counts_as_a_miss(world: World) -> None:
    spin = Spinning(BUDGET)
    for _ in range(spinning.TRUST // spinning._MISS_COSTS):
        assert world.wait(spin, crowded_at=1) == []
        assert world.yields == 1
    assert world.wait(spin, ready_at=1) == []
    assert world.polls == 0, "it rests"


def test_a_machine_that_stands_still_for_a_moment_is_not_crowded(world: World) -> None:
    spin = Spinning(BUDGET)
    world.stands_still = True
    for _ in range(100):
        assert world.wait(spin, ready_at=int(2 * spinning._OFFER_AFTER / STEP), crowded_at=1) == ["it"]
        assert world.yields >= 1


def test_who_was_taken_off_its_core_is_counted() -> None:
    before = spinning._count_taken_off()
    assert before > 0
    threading.Event().wait(1e-3)
    assert spinning._count_taken_off() > before


def test_one_hiccup_among_many_hits_is_forgiven(world: World) -> None:
    spin = Spinning(BUDGET)
    for _ in range(50):
        for _ in range(2 * spinning._MISS_COSTS):
            assert world.wait(spin, ready_at=3) == ["it"]
        world.wait(spin, crowded_at=1)
    assert world.wait(spin, ready_at=3) == ["it"]


def test_what_comes_in_a_crowded_round_is_not_lost(world: World) -> None:
    world.wait(Spinning(BUDGET), crowded_at=1)
    crowded_round = world.polls
    assert world.wait(Spinning(BUDGET), ready_at=crowded_round, crowded_at=1) == ["it"]


def test_a_first_look_that_finds_it_says_nothing_of_spinning(world: World) -> None:
    spin = Spinning(BUDGET)
    looks: list[Callable[[], object]] = [lambda: world.wait(spin), lambda: world.wait(spin, ready_at=1)]
    for _ in range(spinning.TRUST // spinning._MISS_COSTS):
        for look in looks:
            look()
    assert world.wait(spin) == []
    assert world.polls == 0, "the misses have added up"


class Sleeper:
    """What a dozing thread polls: it takes so long to come, or does not come within a millisecond."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.polls = 0

    def doze(self, dozing: Dozing, comes_after: float | None) -> list[Any]:
        def poll(milliseconds: int) -> list[Any]:
            self.polls += 1
            assert milliseconds == 1
            self._world.now += 1e-3 if comes_after is None else comes_after
            return [] if comes_after is None else ["it"]

        return dozing.doze(poll)


def test_what_comes_while_dozing_is_found(world: World) -> None:
    sleeper, dozing = Sleeper(world), Dozing()
    assert [sleeper.doze(dozing, 100e-6) for _ in range(100)] == [["it"]] * 100
    assert sleeper.polls == 100


@pytest.mark.parametrize("comes_after", [None, 2 * spinning._WORTH], ids=["never", "too late"])
def test_dozing_that_does_not_pay_rests_and_is_tried_again(world: World, comes_after: float | None) -> None:
    sleeper, dozing = Sleeper(world), Dozing()
    for _ in range(100):
        sleeper.doze(dozing, comes_after)
    tried = sleeper.polls
    assert 4 <= tried < 20
    for _ in range(2 * spinning._LONGEST_REST):
        sleeper.doze(dozing, comes_after)
    assert sleeper.polls > tried


def look_for(world: World, spin: Spinning) -> float:
    """How long it looks for what does not come."""
    before = world.now
    world.wait(spin)
    return world.now - before


def sure(world: World) -> Awaiting:
    """Replies have come soon for long enough."""
    spin = Awaiting(BUDGET)
    for _ in range(spinning._SURE):
        spin.slept(spinning._SOON / 2)
    return spin


def test_replies_that_come_soon_are_looked_for_longer(world: World) -> None:
    spin = Awaiting(BUDGET)
    for _ in range(spinning._SURE - 1):
        spin.slept(spinning._SOON / 2)
    assert look_for(world, spin) == pytest.approx(BUDGET, abs=2 * STEP)
    assert look_for(world, sure(world)) == pytest.approx(spinning._SOON, abs=2 * STEP)


def test_even_while_it_rests(world: World) -> None:
    spin = Awaiting(BUDGET)
    misses_until_it_rests(world, spin)
    for _ in range(spinning._SURE):
        spin.slept(spinning._SOON / 2)
    assert look_for(world, spin) == pytest.approx(spinning._SOON, abs=2 * STEP)


def test_replies_that_take_long_are_not(world: World) -> None:
    spin = sure(world)
    for _ in range(spinning._SURE):
        spin.slept(spinning._SOON * 2)
    assert look_for(world, spin) == pytest.approx(BUDGET, abs=2 * STEP)


def test_looks_in_vain_end_the_long_ones_and_hits_keep_them_up(world: World) -> None:
    spin = sure(world)
    for _ in range(50):
        assert look_for(world, spin) == pytest.approx(spinning._SOON, abs=2 * STEP)
        for _ in range(5):
            assert world.wait(spin, ready_at=100) == ["it"]
    for _ in range(spinning._SURE // 2):
        look_for(world, spin)
    assert look_for(world, spin) < spinning._SOON


def test_who_was_crowded_out_keeps_to_its_rest(world: World) -> None:
    spin = sure(world)
    while world.wait(spin, crowded_at=1) == [] and world.polls:
        pass
    for _ in range(spinning._SURE):
        spin.slept(spinning._SOON / 2)
    assert look_for(world, spin) == 0


def test_a_crowd_now_and_then_does_not_end_the_long_looks(world: World) -> None:
    spin = sure(world)
    for _ in range(50):
        assert world.wait(spin, crowded_at=1) == []
        for _ in range(5):
            assert world.wait(spin, ready_at=100) == ["it"]
    assert look_for(world, spin) == pytest.approx(spinning._SOON, abs=2 * STEP)


def test_who_shall_not_spin_does_not_for_replies_either(world: World) -> None:
    spin = Awaiting(0)
    for _ in range(spinning._SURE):
        spin.slept(spinning._SOON / 2)
    assert look_for(world, spin) == 0
