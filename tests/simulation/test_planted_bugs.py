"""The simulation and the exploration find each planted bug. With -s, prints a table of how soon."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from farcall.protocol.delivery import Delivery
from farcall.protocol.refcount import ReferenceCounts
from farcall.runtime.reference_outbox import Outboxes, OutboxSender
from farcall.runtime.reference_store import ReferenceStore
from simulation.exploration import Bound, Exploration
from simulation.explore import FIRST_STEPS
from simulation.invariants import BrokenInvariant
from simulation.planted_bugs import BUGS, COUNTING, COUNTING_AT_SELF, STORE, Bug, planted
from simulation.random_schedules import RandomSchedule
from simulation.schedules import show

MAX_SCHEDULES = 5000
BOUNDS = (
    Bound(1, 0, 1),
    Bound(1, 1, 0),
    Bound(2, 0, 0),
    Bound(1, 0, 0, 1, 1),
    Bound(2, 1, 0),
    Bound(0, 0, 0, claims=1),
)
"""From the cheapest on; all within what the full exploration covers."""


class Finding(NamedTuple):
    """How a bug was found: after how many schedules or states, and what was broken."""

    after: int
    broken: BrokenInvariant


def find_by_simulation(bug: Bug, schedules: int = MAX_SCHEDULES) -> Finding | None:
    with planted(bug):
        for seed in range(schedules):
            try:
                RandomSchedule(seed).run()
            except BrokenInvariant as broken:
                return Finding(seed + 1, broken)
    return None


def find_by_exploration(bug: Bug) -> Finding | None:
    states = 0
    with planted(bug):
        for bound in BOUNDS:
            for first in FIRST_STEPS.values():
                explored = Exploration(first, bound).run()
                states += explored.states
                if explored.broken is not None:
                    return Finding(states, explored.broken)
    return None


_table: list[tuple[str, str, Finding]] = []


@pytest.mark.parametrize("bug", COUNTING + STORE, ids=lambda bug: bug.name)
def test_the_simulation_finds(bug: Bug) -> None:
    found = find_by_simulation(bug)
    assert found is not None, f"{MAX_SCHEDULES} random schedules ran clean"
    _table.append((bug.name, "schedules", found))


@pytest.mark.parametrize("bug", COUNTING + COUNTING_AT_SELF, ids=lambda bug: bug.name)
def test_the_exploration_finds(bug: Bug) -> None:
    found = find_by_exploration(bug)
    assert found is not None, "the exploration ran clean"
    _table.append((bug.name, "states", found))


def test_the_table_of_planted_bugs() -> None:
    for name, what, found in _table:
        schedule = show(found.broken.schedule)[:100]
        print(f"\n{name:32} {found.after:>6,} {what:10} {found.broken.invariant:10} {schedule}", end="")
    assert len(BUGS) == len(COUNTING + COUNTING_AT_SELF + STORE) >= 70


@pytest.mark.parametrize("where", [ReferenceCounts, Delivery, ReferenceStore, Outboxes, OutboxSender])
def test_replaced_methods_without_a_bug_run_clean(where: type) -> None:
    assert find_by_simulation(Bug("none", where, ()), 200) is None


def test_a_bug_is_gone_when_its_context_ends() -> None:
    before = dict(vars(ReferenceCounts))
    with planted(COUNTING[0]):
        assert dict(vars(ReferenceCounts)) != before
    assert dict(vars(ReferenceCounts)) == before


def test_a_piece_of_source_that_is_not_there_is_an_error() -> None:
    with pytest.raises(AssertionError, match="Old: 'what was there once' is there 0 times"):
        find_by_simulation(Bug("Old", ReferenceCounts, (("what was there once", ""),)))
