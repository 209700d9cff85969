"""Random schedules run clean, are the same for the same seed, and play again from their text."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from planted_bugs import G2Dropped

from farcall.testing.invariants import BrokenInvariant
from farcall.testing.random_schedules import RandomSchedule, replay, shorten
from farcall.testing.simulated_workers import SimulatedWorker
from farcall.testing.simulation import SimulatedNetwork, Step, parse, show


def snapshots(network: SimulatedNetwork) -> list[Any]:
    return [worker.snapshot() for worker in network.workers.values()]


@pytest.mark.parametrize("block", range(5))
def test_seeded_schedules_run_clean(block: int) -> None:
    for seed in range(block * 1000, block * 1000 + 1000):
        RandomSchedule(seed).run()


def test_everything_happens_in_some_schedule() -> None:
    words = {step[0] for seed in range(300) for step in RandomSchedule(seed).run().schedule}
    assert words == {
        "make", "call", "pass", "use", "draft", "abandon", "drop", "keep", "deliver", "again", "lose", "resend", "ack",
        "cut", "heal", "crash", "tell", "restart", "greet", "illegal", "ask", "answer",
    }  # fmt: skip


def test_a_seed_is_a_schedule() -> None:
    one, again, other = (RandomSchedule(seed).run() for seed in (5, 5, 6))
    assert one.schedule == again.schedule != other.schedule
    assert snapshots(one) == snapshots(again)


def test_a_printed_schedule_plays_again() -> None:
    for seed in range(100):
        schedule = RandomSchedule(seed)
        workers = len(schedule.network.workers)
        network = schedule.run()
        again = replay(parse(show(network.schedule)), workers)
        assert again.schedule == network.schedule
        assert snapshots(again) == snapshots(network)


def first_failure() -> tuple[BrokenInvariant, int]:
    for seed in range(1000):
        schedule = RandomSchedule(seed, new_worker=partial(SimulatedWorker, references=G2Dropped))
        workers = len(schedule.network.workers)
        try:
            schedule.run()
        except BrokenInvariant as broken:
            return broken, workers
    raise AssertionError("the planted bug was not found")


def broken_by(schedule: list[Step], workers: int) -> str | None:
    try:
        replay(schedule, workers, new_worker=partial(SimulatedWorker, references=G2Dropped))
    except BrokenInvariant as broken:
        return broken.invariant
    return None


def test_a_failing_schedule_fails_again_from_its_text() -> None:
    broken, workers = first_failure()
    with pytest.raises(BrokenInvariant) as caught:
        replay(parse(show(broken.schedule)), workers, new_worker=partial(SimulatedWorker, references=G2Dropped))
    assert str(caught.value) == str(broken)


def test_a_failing_schedule_is_shortened_to_what_matters() -> None:
    broken, workers = first_failure()
    before = len(broken.schedule)
    short = shorten(broken, workers, new_worker=partial(SimulatedWorker, references=G2Dropped))
    assert short.invariant == broken.invariant
    assert len(short.schedule) < before
    for position in range(len(short.schedule)):
        shorter = short.schedule[:position] + short.schedule[position + 1 :]
        assert broken_by(shorter, workers) != short.invariant, "a step could have been left out"
    with pytest.raises(BrokenInvariant, match=short.invariant):
        replay(short.schedule, workers, new_worker=partial(SimulatedWorker, references=G2Dropped))
