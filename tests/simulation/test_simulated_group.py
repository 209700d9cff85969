"""Simulated groups: all scenarios come out right, and the simulation itself does what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from farcall.protocol.membership import Membership
from simulation.invariants import BrokenInvariant
from simulation.membership_scenarios import SCENARIOS
from simulation.simulated_group import SimulatedGroup


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_it_comes_out_right(scenario: Callable[[Callable[..., Membership]], None]) -> None:
    scenario(Membership)


@pytest.mark.timeout(300)  # to have a thousand workers know each other takes longer than what they do then
def test_one_worker_of_a_thousand_loses_all_others_in_time() -> None:
    group = SimulatedGroup(1)
    group.start_fixed(1000)
    group.run(2.0)
    began = group.now
    for number in group.there()[1:]:
        group.vanish(number)
    group.settle(10.0)
    assert len(group.declared) == 999
    assert all(8.0 <= at - began <= 10.0 for at in group.declared.values())


def play(seed: int) -> dict[Any, int]:
    group = SimulatedGroup(seed, loss=0.05)
    group.start_fixed(8)
    group.join()
    group.crash(3)
    group.run(5.0)
    return dict(group.sent)


def test_the_seed_decides_everything() -> None:
    assert play(1) == play(1)
    assert play(1) != play(2)


def test_a_group_that_does_not_agree_in_time_says_who_is_wrong() -> None:
    group = SimulatedGroup(1)
    group.start_fixed(4)
    group.part([2])
    group.join()
    with pytest.raises(BrokenInvariant, match=r"CONVERGED: after 2 s 1 of 5 workers are wrong: worker 2 misses \[5\]"):
        group.settle(2.0)


def test_a_frozen_worker_keeps_what_comes_and_goes_on_with_it() -> None:
    group = SimulatedGroup(1)
    group.start_fixed(4)
    group.freeze(2, 3.0)
    group.join()
    group.run(2.9)
    assert 5 not in group.workers[2].machine.members.here
    group.run(0.2)
    assert 5 in group.workers[2].machine.members.here


def test_a_crash_is_noticed_by_those_who_are_connected() -> None:
    group = SimulatedGroup(1)
    group.start_fixed(4)
    group.crash(2)
    group.run(0.2)
    assert group.declared.keys() == {2}
    assert group.agrees()


def test_nobody_hears_of_a_vanished_worker_before_the_patience_is_over() -> None:
    group = SimulatedGroup(1)
    group.start_fixed(4)
    group.run(1.0)
    group.vanish(2)
    group.run(8.0)
    assert group.declared == {}
    group.run(2.0)
    assert group.declared.keys() == {2}


def test_the_idle_group_sends_pings_and_their_answers_only() -> None:
    group = SimulatedGroup(1)
    group.start_fixed(20)
    group.run(2.0)
    group.sent.clear()
    group.run(10.0)
    assert {kind.__name__ for kind in group.sent} == {"Ping", "Ack"}
    assert sum(group.sent.values()) <= 20 * (10 + 1) * 6
