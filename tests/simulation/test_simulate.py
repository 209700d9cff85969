"""The command that runs random schedules: what it prints, how it ends, and that its processes end with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from simulation import simulate
from simulation.planted_bugs import BUGS, planted


@pytest.fixture
def broken_protocol() -> Iterator[None]:
    with planted(BUGS["G2Dropped"]):
        yield


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
    assert "again:\n  python -m simulation.simulate --workers " in printed


def test_one_schedule_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--workers", "2", "--replay", "call 1 0; send 1 3; deliver 1; drop 1 2"]) == 0
    assert capsys.readouterr().out == "all invariants held at every step\n"


@pytest.mark.usefixtures("broken_protocol")
def test_a_failing_schedule_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    steps = (
        "call 1 0; send 1 3; deliver 1; run 0 1; deliver 2; pass 1 2 2; send 1 4; deliver 3; run 2 1; drop 1 2; work 1"
    )
    assert simulate.main(["--workers", "3", "--replay", steps]) == 1
    assert "BROKEN: UNREPORTED: worker 1 does not wait for fork 1:2" in capsys.readouterr().out
