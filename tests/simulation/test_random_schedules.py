"""Random schedules run clean, are the same for the same seed, and play again from their text."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Hashable, Iterator
from pathlib import Path

import pytest

from simulation.invariants import BrokenInvariant
from simulation.planted_bugs import BUGS, planted
from simulation.random_schedules import RandomSchedule, replay, shorten
from simulation.reference_state import tables
from simulation.schedules import Step, parse, show
from simulation.simulation import SimulatedNetwork

G2_DROPPED = BUGS["G2Dropped"]


def snapshots(network: SimulatedNetwork) -> list[Hashable]:
    return [(tables(worker.counts), str(worker.store.table_sizes())) for worker in network.workers.values()]


@pytest.mark.parametrize("block", range(5))
def test_seeded_schedules_run_clean(block: int) -> None:
    for seed in range(block * 1000, block * 1000 + 1000):
        RandomSchedule(seed).run()


def test_everything_happens_in_some_schedule() -> None:
    words = {step[0] for seed in range(300) for step in RandomSchedule(seed).run().schedule}
    assert words == {
        "make", "call", "on", "fetch", "pass", "use", "return", "send", "interrupt", "drop", "run",
            "cancel", "giveup",
        "work", "report", "connect", "fail", "retry",
        "deliver", "again", "discard", "close", "crash", "remove", "restart", "add",
        "illegal", "forge", "claim", "seek",
    }  # fmt: skip


def test_a_seed_is_a_schedule() -> None:
    one, again, other = (RandomSchedule(seed).run() for seed in (5, 5, 6))
    assert one.schedule == again.schedule != other.schedule
    assert snapshots(one) == snapshots(again)


def test_a_seed_is_the_same_schedule_in_every_process() -> None:
    program = "from simulation.test_random_schedules import print_schedules; print_schedules()"
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
    assert printed.pop().count("\n") == 40


def print_schedules() -> None:
    for seed in range(40):
        print(show(RandomSchedule(seed).run().schedule))


def test_a_printed_schedule_plays_again() -> None:
    for seed in range(100):
        schedule = RandomSchedule(seed)
        workers = len(schedule.network.workers)
        network = schedule.run()
        again = replay(parse(show(network.schedule)), workers)
        assert again.schedule == network.schedule
        assert snapshots(again) == snapshots(network)


@pytest.fixture
def broken_protocol() -> Iterator[None]:
    with planted(G2_DROPPED):
        yield


def first_failure() -> tuple[BrokenInvariant, int]:
    for seed in range(1000):
        schedule = RandomSchedule(seed)
        workers = len(schedule.network.workers)
        try:
            schedule.run()
        except BrokenInvariant as broken:
            return broken, workers
    raise AssertionError("the planted bug was not found")


def broken_by(schedule: list[Step], workers: int) -> str | None:
    try:
        replay(schedule, workers)
    except BrokenInvariant as broken:
        return broken.invariant
    return None


@pytest.mark.usefixtures("broken_protocol")
def test_a_failing_schedule_fails_again_from_its_text() -> None:
    broken, workers = first_failure()
    with pytest.raises(BrokenInvariant) as caught:
        replay(parse(show(broken.schedule)), workers)
    assert str(caught.value) == str(broken)


@pytest.mark.usefixtures("broken_protocol")
def test_a_failing_schedule_is_shortened_to_what_matters() -> None:
    broken, workers = first_failure()
    before = len(broken.schedule)
    short = shorten(broken, workers)
    assert short.invariant == broken.invariant
    assert len(short.schedule) < before
    for position in range(len(short.schedule)):
        shorter = short.schedule[:position] + short.schedule[position + 1 :]
        assert broken_by(shorter, workers) != short.invariant, "a step could have been left out"
    with pytest.raises(BrokenInvariant, match=short.invariant):
        replay(short.schedule, workers)
