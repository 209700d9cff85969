"""Each planted bug is caught, by random schedules and by the exploration. With -s, a table of how soon."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
from planted_bugs import PLANTED, Planted

from farcall.testing.exploration import Bound, Exploration
from farcall.testing.explore import FIRST_STEPS
from farcall.testing.invariants import BrokenInvariant
from farcall.testing.random_schedules import RandomSchedule
from farcall.testing.simulated_workers import SimulatedWorker
from farcall.testing.simulation import show

MOST_SCHEDULES = 2000
BOUNDS = (Bound(1, 0, 1), Bound(1, 1, 0), Bound(2, 0, 0), Bound(1, 0, 0, 1, 1), Bound(2, 1, 0))
"""From the cheapest on; all within what the full exploration covers."""


class Caught(NamedTuple):
    """How a bug was caught: after how much, and what was broken."""

    after: int
    broken: BrokenInvariant


def by_schedules(bug: Planted) -> Caught | None:
    for seed in range(MOST_SCHEDULES):
        try:
            RandomSchedule(seed, new_worker=partial(SimulatedWorker, **bug.classes)).run()
        except BrokenInvariant as broken:
            return Caught(seed + 1, broken)
    return None


def by_exploration(bug: Planted) -> Caught | None:
    states = 0
    for bound in BOUNDS:
        for first in FIRST_STEPS.values():
            explored = Exploration(first, bound, **bug.classes).run()
            states += explored.states
            if explored.broken is not None:
                return Caught(states, explored.broken)
    return None


_table: list[tuple[str, Caught, Caught]] = []


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught_by_both(bug: Planted) -> None:
    at_random, exhaustively = by_schedules(bug), by_exploration(bug)
    assert at_random is not None, f"{MOST_SCHEDULES} random schedules ran clean"
    assert exhaustively is not None, "the exploration ran clean"
    _table.append((bug.name, at_random, exhaustively))


def test_the_table_of_planted_bugs() -> None:
    print(f"\n{'planted bug':23} {'schedules':>9}  broken     {'states':>7}  broken     a shortest schedule")
    for name, at_random, exhaustively in _table:
        print(
            f"{name:23} {at_random.after:>9,}  {at_random.broken.invariant:10} {exhaustively.after:>7,}  "
            f"{exhaustively.broken.invariant:10} {show(exhaustively.broken.schedule)}"
        )
    assert len(PLANTED) >= 8


def test_what_is_planted_is_found_by_the_checks_and_not_by_accident() -> None:
    unharmed = Planted("none", {})
    assert by_schedules(unharmed) is None
