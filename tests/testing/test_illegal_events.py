"""UNCHANGED is checked with events that are illegal in the state at hand, and breaks where one is taken."""

from __future__ import annotations

import pytest

from farcall.errors import ProtocolError
from farcall.protocol.reference_messages import Effect, Event, HandleDropped, PeerJoined, PeerLost
from farcall.protocol.references import References
from farcall.testing.illegal_events import check_unchanged, illegal_events
from farcall.testing.invariants import BrokenInvariant
from farcall.testing.random_schedules import RandomSchedule


class Careless(References):
    """Takes a loss of somebody who was never there."""

    def peer_lost(self, lost: int) -> list[Effect]:
        return super().peer_lost(lost) if lost in self.peers else []


class Hasty(References):
    """Changes before it checks."""

    def handle(self, event: Event) -> list[Effect]:
        if isinstance(event, HandleDropped):
            self.forks += 1
        return super().handle(event)


def check_all(references: References) -> None:
    references.handle(PeerJoined(references.me))
    references.handle(PeerJoined(1))
    check_unchanged(references)


def test_nothing_illegal_is_taken_at_the_start() -> None:
    check_all(References(0))


def test_one_of_them_is_checked_alone_counted_round() -> None:
    careless = Careless(0)
    careless.handle(PeerJoined(0))
    events = illegal_events(careless)
    lost = events.index(PeerLost(999))
    check_unchanged(careless, lost - 1)
    for kind in (lost, lost + len(events)):
        with pytest.raises(BrokenInvariant, match="UNCHANGED"):
            check_unchanged(careless, kind)


def test_what_is_taken_breaks_it() -> None:
    with pytest.raises(BrokenInvariant, match=r"UNCHANGED: worker 0 took PeerLost\(worker=999\)"):
        check_all(Careless(0))


def test_what_changes_breaks_it_even_if_it_is_refused() -> None:
    with pytest.raises(BrokenInvariant, match=r"UNCHANGED: worker 0 refused HandleDropped.* and has changed"):
        check_all(Hasty(0))


def test_all_are_refused_in_every_state_that_schedules_reach() -> None:
    for seed in range(60):
        schedule = RandomSchedule(seed)
        for _ in range(25):
            schedule._make_one_step()
        for worker in schedule.network.alive:
            for event in illegal_events(worker.references):
                with pytest.raises(ProtocolError):
                    worker.references.handle(event)
