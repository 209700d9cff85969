"""Who leads, over every interleaving of the leader with the supervisor and of the leader with itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from farcall.agent.leading import Lead
from interleaving import Schedule, explore

LINES = ("agent/leading.py", "agent/test_leading.py")
"""With this file too: the steps of the pool around the lead count."""


def test_a_leader_leads_on_if_nobody_came_between() -> None:
    lead = Lead()
    for _ in range(3):
        assert not lead.is_running()
        lead.begin()
        assert lead.is_running()
        assert lead.end()
    assert not lead.is_running()


def test_a_leader_that_was_deposed_learns_it_at_the_end_of_its_function() -> None:
    lead = Lead()
    lead.begin()
    assert lead.depose()
    assert not lead.is_running()
    assert not lead.depose(), "it was taken already"
    assert not lead.end()
    lead.begin()
    assert lead.end(), "and may lead again, later"


def test_a_lead_that_runs_nothing_cannot_be_taken() -> None:
    lead = Lead()
    assert not lead.is_stuck()
    assert not lead.depose()
    lead.begin()
    assert lead.end()
    assert not lead.is_stuck()
    assert not lead.depose()


def test_the_second_look_at_one_function_finds_it_stuck() -> None:
    lead = Lead()
    lead.begin()
    assert not lead.is_stuck()
    assert lead.is_stuck()
    assert lead.is_stuck()


def test_a_new_function_between_two_looks_is_not_stuck() -> None:
    lead = Lead()
    for _ in range(3):
        lead.begin()
        assert not lead.is_stuck()
        assert lead.end()
    assert not lead.is_stuck()


class Pool:
    """The serving pool, as far as the lead goes: whoever takes the lead from the leader makes a successor."""

    def __init__(self, lead: Lead) -> None:
        self.lead = lead
        self.successors = 0
        self.led_to_the_end = False

    def run_functions(self, count: int, sleeps: Sequence[int]) -> None:
        """What the leader does: functions, in some of which it gives the lead away itself, until it is deposed."""
        for number in range(count):
            self.lead.begin()
            if number in sleeps and self.lead.depose():
                self.successors += 1
            if not self.lead.end():
                return  # another leads
            assert self.successors == 0, "two threads lead"
        self.led_to_the_end = True

    def supervise(self, looks: int) -> None:
        for _ in range(looks):
            if self.lead.is_stuck() and self.lead.depose():
                self.successors += 1


def scenario(
    new_lead: Callable[[], Lead], functions: int, looks: int, sleeps: Sequence[int] = ()
) -> Callable[[Schedule], Any]:
    def make(_: Schedule) -> Any:
        pool = Pool(new_lead())

        def check() -> None:
            assert pool.successors + pool.led_to_the_end == 1, "nobody leads, or two do"
            assert not pool.lead.is_running()

        return [lambda: pool.run_functions(functions, sleeps), lambda: pool.supervise(looks)], check

    return make


def test_the_supervisor_against_a_leader() -> None:
    assert explore(scenario(Lead, functions=2, looks=3), LINES, preemptions=2) > 100


def test_the_supervisor_against_a_leader_that_gives_the_lead_away_itself() -> None:
    assert explore(scenario(Lead, functions=2, looks=3, sleeps=[1]), LINES, preemptions=2) > 100


def test_a_function_that_does_not_end_is_deposed_once_by_the_second_look_at_the_latest() -> None:
    def make(schedule: Schedule) -> Any:
        lead = Lead()
        deposed: list[bool] = []

        def look() -> None:
            if lead.is_stuck() and lead.depose():
                deposed.append(True)

        def leader() -> None:
            lead.begin()
            if lead.end():
                lead.begin()  # and never ends

        def supervisor() -> None:
            for _ in range(3):
                look()

        def check() -> None:
            for _ in range(2):
                look()
            assert deposed == [True]
            assert not lead.is_running()

        return [leader, supervisor], check

    assert explore(make, ("agent/leading.py",), preemptions=2) > 50


# Planted bugs


class LooksThenTakes(Lead):
    """Takes the claim in two steps: two may take the same one."""

    __slots__ = ()

    def end(self) -> bool:
        if not self._claim:
            return False
        self._claim = []
        return True

    depose = end


class Forgets(Lead):
    """A leader that believes it leads on whatever happened meanwhile."""

    __slots__ = ()

    def end(self) -> bool:
        super().end()
        return True


class TakesWhatIsNotThere(Lead):
    """Deposes a leader that runs nothing."""

    __slots__ = ()

    def depose(self) -> bool:
        super().depose()
        return True


@pytest.mark.parametrize("bug", [LooksThenTakes, Forgets, TakesWhatIsNotThere])
def test_a_planted_bug_is_caught(bug: type[Lead]) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        explore(scenario(bug, functions=2, looks=3, sleeps=[1]), LINES, preemptions=2)
