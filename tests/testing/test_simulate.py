"""The command that runs random schedules: what it prints, how it ends, and that its processes end with it."""

from __future__ import annotations

from functools import partial

import pytest
from planted_bugs import G2Dropped

from farcall.testing import random_schedules, simulate
from farcall.testing.random_schedules import RandomSchedule
from farcall.testing.simulated_workers import SimulatedWorker


@pytest.fixture
def broken_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(seed: int, workers: int, steps: int, *, new_worker: object) -> RandomSchedule:
        return RandomSchedule(seed, workers, steps, new_worker=partial(SimulatedWorker, references=G2Dropped))

    def shorten(failure: object, workers: int, *, new_worker: object) -> object:
        return random_schedules.shorten(failure, workers, new_worker=partial(SimulatedWorker, references=G2Dropped))  # type: ignore[arg-type]

    monkeypatch.setattr(simulate, "RandomSchedule", broken)
    monkeypatch.setattr(simulate, "shorten", shorten)


def test_it_runs_as_many_schedules_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--schedules", "1200", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("1,200 schedules from seed 3, ")
    assert "schedules/s with 1 process(es)" in printed
    assert printed.endswith("all invariants held at every step\n")


def test_it_runs_in_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--schedules", "1100", "--seed", "3", "--jobs", "2", "--steps", "4"]) == 0
    assert capsys.readouterr().out.startswith("1,100 schedules from seed 3, ")


def test_it_runs_for_as_long_as_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(simulate, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(simulate, "CHUNK", 10)
    assert simulate.main(["--minutes", "1", "--seed", "3", "--steps", "4"]) == 0
    captured = capsys.readouterr()
    done = int(captured.out.partition(" ")[0])
    assert 10 <= done <= 50
    assert "schedules, " in captured.err  # the plain progress


@pytest.mark.usefixtures("broken_protocol")
def test_a_failure_is_printed_with_its_seed_and_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--schedules", "2000", "--seed", "0"]) == 1
    printed = capsys.readouterr().out
    assert "BROKEN: seed " in printed
    assert "\nshortened\n  " in printed
    assert "again:\n  python -m farcall.testing.simulate --workers " in printed


def test_it_runs_schedules_with_the_books_of_agents(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--books", "--schedules", "30", "--seed", "3"]) == 0
    assert capsys.readouterr().out.startswith("30 schedules from seed 3, ")
    assert simulate.main(["--books", "--workers", "2", "--replay", "ask 1 0; deliver 1 0 1; count 0; work 1"]) == 0
    assert capsys.readouterr().out == "all invariants held at every step\n"


def test_a_finding_with_books_says_so_where_it_says_how_to_play_it_again() -> None:
    found = simulate.Finding(1, 2, "what", "make 0", "make 0", "what", books=True)
    assert 'farcall.testing.simulate --books --workers 2 --replay "make 0"' in str(found)


def test_one_schedule_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--workers", "2", "--replay", "call 1 0; deliver 1 0 1; drop 1 1"]) == 0
    assert capsys.readouterr().out == "all invariants held at every step\n"


def test_a_failing_schedule_is_replayed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def replay(schedule: object, workers: int, *, new_worker: object) -> object:
        return random_schedules.replay(schedule, workers, new_worker=partial(SimulatedWorker, references=G2Dropped))  # type: ignore[arg-type]

    monkeypatch.setattr(simulate, "replay", replay)
    steps = "call 1 0; pass 1 0 1; drop 1 1; deliver 1 0 1; ack 1 0; deliver 1 0 3; deliver 1 0 2"
    assert simulate.main(["--workers", "2", "--replay", steps]) == 1
    assert "BROKEN: PROMISED" in capsys.readouterr().out
