"""Every state within small bounds; `python -m simulation.explore` goes to the full ones."""

from __future__ import annotations

import pytest

from simulation.exploration import Bound, Exploration
from simulation.explore import FIRST_STEPS, main
from simulation.planted_bugs import BUGS, planted
from simulation.schedules import Step, show


@pytest.mark.parametrize("first", FIRST_STEPS.values())
@pytest.mark.parametrize(
    ("bound", "at_least"),
    [
        (Bound(forks=2, crashes=0, doubles=0), 400),
        (Bound(forks=1, crashes=1, doubles=1), 400),
        (Bound(forks=1, crashes=2, doubles=0), 200),
        (Bound(forks=1, crashes=0, doubles=1, losses=1, acknowledgements=1), 200),
    ],
)
def test_all_invariants_hold_in_every_state(first: Step, bound: Bound, at_least: int) -> None:
    explored = Exploration(first, bound).run()
    print(f"{show([first])}, {bound}: {explored.states:,} states, {explored.transitions:,} transitions")
    assert explored.broken is None
    assert explored.states >= at_least
    assert explored.transitions > explored.states
    assert explored.at_rest > 0


def test_two_forks_and_a_crash_of_what_its_owner_made_or_called_itself() -> None:
    for first in (("make", 0), ("call", 0, 0)):
        assert Exploration(first, Bound(forks=2, crashes=1, doubles=0)).run().broken is None


def test_it_is_the_same_every_time() -> None:
    one, again = (Exploration(("call", 1, 0), Bound(forks=1, crashes=1, doubles=1)).run() for _ in range(2))
    assert (one.states, one.transitions, one.at_rest) == (again.states, again.transitions, again.at_rest)


def test_each_state_is_counted_once() -> None:
    # Held and dropped.
    explored = Exploration(("make", 0), Bound(forks=0, crashes=0, doubles=0)).run()
    assert (explored.states, explored.transitions, explored.at_rest) == (2, 1, 2)
    # (request | acknowledgement | nothing under way) x (held | dropped), and after a drop: delete under way, all gone
    explored = Exploration(("call", 1, 0), Bound(forks=0, crashes=0, doubles=0)).run()
    assert (explored.states, explored.transitions) == (7, 8)


def test_it_ends_at_a_number_of_states_if_asked() -> None:
    explored = Exploration(("call", 1, 0)).run(most=500)
    assert 500 <= explored.states < 5000
    assert explored.broken is None


def test_what_it_finds_is_a_shortest_schedule() -> None:
    with planted(BUGS["G2Dropped"]):
        explored = Exploration(("call", 1, 0), Bound(2, 0, 0)).run()
    assert explored.broken is not None
    assert explored.broken.invariant == "UNREPORTED"
    assert show(explored.broken.schedule) == "call 1 0; pass 1 1 1; drop 1 1; deliver 1 0 1; deliver 1 1 1; ack 1 0"


def test_a_message_that_is_taken_twice_is_found() -> None:
    with planted(BUGS["NoDeduplication"]):
        explored = Exploration(("make", 0), Bound(1, 0, 1)).run()
    assert explored.broken is not None
    assert str(explored.broken).startswith("D1: worker 0 took message 1 of 0 twice")
    assert show(explored.broken.schedule) == "make 0; pass 0 0 1; again 0 0 1; deliver 0 0 1"


def test_the_command_prints_how_much_it_visited(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--forks", "1", "--crashes", "0", "--doubles", "0"]) == 0
    printed = capsys.readouterr().out
    assert "at most 1 forks, 0 crashes, 0 doubles, 0 losses, 0 acknowledgements" in printed
    assert "a remote call to another:       233 states,        486 transitions" in printed
    assert "all invariants held in every state" in printed
