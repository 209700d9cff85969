"""UNCHANGED is checked with events that are illegal in the state at hand, and is broken where one is taken."""

from __future__ import annotations

from typing import Any

import pytest

from farcall.errors import ProtocolError
from farcall.protocol.refcount import ReferenceCounts
from farcall.protocol.reference_messages import Effect
from simulation.illegal_events import NOBODY, check_unchanged, illegal_events
from simulation.invariants import BrokenInvariant
from simulation.random_schedules import RandomSchedule, limited_claims
from simulation.reference_state import SimulatedTokens, apply


class Careless(ReferenceCounts):
    """Takes the loss of a worker that never joined."""

    def remove_worker(self, lost: int) -> list[Effect]:
        return super().remove_worker(lost) if lost in self.workers else []


class Hasty(ReferenceCounts):
    """Changes before it checks."""

    def drop_handle(self, reference: Any, fork: Any) -> list[Effect]:
        self.forks_made += 1
        return super().drop_handle(reference, fork)


def joined(kind: type[ReferenceCounts]) -> ReferenceCounts:
    counts = kind(0, SimulatedTokens(0))
    counts.add_worker(0)
    counts.add_worker(1)
    return counts


def test_nothing_illegal_is_taken_at_the_start() -> None:
    check_unchanged(joined(ReferenceCounts))


def test_one_of_them_is_checked_alone_counted_round() -> None:
    careless = joined(Careless)
    events = illegal_events(careless)
    at = events.index(("remove_worker", NOBODY))
    check_unchanged(careless, at - 1)
    for kind in (at, at + len(events)):
        with pytest.raises(BrokenInvariant, match="UNCHANGED"):
            check_unchanged(careless, kind)


def test_an_event_that_is_taken_breaks_it() -> None:
    with pytest.raises(BrokenInvariant, match=r"UNCHANGED: worker 0 took \('remove_worker', 999\)"):
        check_unchanged(joined(Careless))


def test_a_change_breaks_it_even_if_the_event_is_refused() -> None:
    with pytest.raises(BrokenInvariant, match=r"UNCHANGED: worker 0 refused \('drop_handle'.* and has changed"):
        check_unchanged(joined(Hasty))


def test_all_are_refused_in_every_state_that_schedules_reach() -> None:
    with limited_claims():
        for seed in range(60):
            schedule = RandomSchedule(seed)
            for _ in range(25):
                schedule.make_step()
            for worker in schedule.network.alive:
                for event in illegal_events(worker.counts):
                    with pytest.raises(ProtocolError):
                        apply(worker.counts, event)
