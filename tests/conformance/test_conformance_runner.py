"""Runner, nursery and warden together, on a suite without torch: outcomes, limits, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.nursery import NATIVE
from conformance.outcomes import Outcome
from conformance.runner import NurseryFailed, Runner
from eventually import eventually

Pids = Callable[[int], list[int]]
ROOT = Path(__file__).parents[2]


def runner(jobs: int = 2, limit: float = 30.0, implementation: str = "some:install") -> Runner:
    return Runner(implementation, jobs, limit, suite="fake_suite")


def run(*tests: str, jobs: int = 2, limit: float = 30.0) -> dict[str, Outcome]:
    with runner(jobs, limit) as nursery:
        found = nursery.run([f"Fake.test_{test}" for test in tests])
        return {test.removeprefix("Fake.test_"): outcome for test, outcome in found}


def assert_gone(pids: list[int]) -> None:
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []


def test_what_is_loaded_is_told(pids: Pids) -> None:
    with runner() as nursery:
        loaded = nursery.loaded
    assert loaded.about == "fake 1.0"
    assert "Fake.test_passes" in loaded.tests
    assert loaded.broken == {"Broken": "Broken has no install"}
    assert len(loaded.warnings) == 1


def test_how_tests_end(pids: Pids) -> None:
    found = run("passes", "fails", "skipped", "dies", "exits", "native")
    assert found["passes"].status == "passed"
    assert found["skipped"].status == "skipped"
    assert {found[name].status for name in ("fails", "dies", "exits", "native")} == {"failed"}
    assert found["fails"].reason == "AssertionError: 1 is not 2"
    assert "seen on the way" in found["fails"].details
    assert "in test_fails" in found["fails"].details
    assert found["skipped"].reason == "there is no reason"
    assert found["dies"].reason == "its process died before it could say how the test ended"
    assert found["exits"].reason == "SystemExit: 3"
    assert found["native"].reason == NATIVE
    assert 0 < found["passes"].seconds < 30


def test_a_test_that_hangs_ends_at_its_limit_with_stacks_and_all_its_processes(pids: Pids) -> None:
    found = run("hangs", "passes", limit=2.0)
    assert found["hangs"].reason == "did not end within 2 s"
    assert 2 <= found["hangs"].seconds < 12
    assert found["passes"].status == "passed"
    hung = pids(2)
    assert len(hung) == 2
    for pid in hung:
        assert f"stacks of process {pid}" in found["hangs"].details
    assert found["hangs"].details.count("in a_place_to_hang") == 2
    assert_gone(hung)


def test_what_a_test_leaves_behind_is_gone_before_it_is_answered_for(pids: Pids) -> None:
    with runner() as nursery:
        for _, outcome in nursery.run(["Fake.test_leaves_a_process"]):
            assert outcome.status == "passed"
            assert_gone(pids(1))


def test_so_many_run_at_once(pids: Pids) -> None:
    together = run("together_1", "together_2")
    assert [outcome.status for outcome in together.values()] == ["passed", "passed"]


def test_no_more_run_at_once_than_asked_for(pids: Pids) -> None:
    alone = run("together_1", "together_2", jobs=1, limit=2.0)
    # The second finds what the first has left, so only the first waits in vain.
    assert [outcome.status for outcome in alone.values()] == ["failed", "passed"]


def test_a_test_can_be_run_again(pids: Pids) -> None:
    with runner() as nursery:
        for _ in range(2):
            assert [outcome.status for _, outcome in nursery.run(["Fake.test_passes"])] == ["passed"]


def test_temporary_files_are_gone_at_the_end(pids: Pids) -> None:
    before = set(os.listdir(tempfile.gettempdir()))
    with runner() as nursery:
        (directory,) = set(os.listdir(tempfile.gettempdir())) - before
        ((_, outcome),) = nursery.run(["Fake.test_temporary_files"])
        assert outcome.status == "passed"
        assert os.listdir(os.path.join(tempfile.gettempdir(), directory)) == []
    assert set(os.listdir(tempfile.gettempdir())) == before


def test_leaving_early_ends_what_runs(pids: Pids) -> None:
    with runner() as nursery:
        running = nursery.run(["Fake.test_hangs", "Fake.test_passes"])
        assert next(running)[0] == "Fake.test_passes"
        hung = pids(2)
    assert_gone(hung)


def test_an_implementation_that_cannot_be_loaded(pids: Pids) -> None:
    with pytest.raises(NurseryFailed, match=r"(?s)this implementation cannot be loaded.*on refuse"):  # noqa: SIM117
        with runner(implementation="refuse"):
            pytest.fail("there is nothing to run")


def test_a_nursery_that_dies_while_loading(pids: Pids) -> None:
    with pytest.raises(NurseryFailed, match="ended before its time"):  # noqa: SIM117
        with runner(implementation="die"):
            pytest.fail("there is nothing to run")


def test_a_nursery_that_is_killed_takes_its_tests_along(pids: Pids) -> None:
    before = set(os.listdir(tempfile.gettempdir()))
    with runner() as nursery:
        running = nursery.run(["Fake.test_hangs", "Fake.test_passes"])
        next(running)
        hung = pids(2)
        os.kill(nursery._process.pid, signal.SIGKILL)
        with pytest.raises(NurseryFailed, match="ended before its time"):
            next(running)
        eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in hung))
    assert set(os.listdir(tempfile.gettempdir())) == before


def test_whoever_runs_the_tests_is_killed_and_takes_everything_along(pids: Pids, tmp_path: Path) -> None:
    program = (
        "from conformance.runner import Runner\n"
        "with Runner('some:install', 2, 30.0, suite='fake_suite') as nursery:\n"
        "    list(nursery.run(['Fake.test_hangs']))\n"
    )
    scratch = tmp_path / "t"
    scratch.mkdir()
    environment = os.environ | {"TMPDIR": str(scratch)}
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment) as process:
        hung = pids(2)
        process.kill()
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in hung))
    eventually(lambda: not os.listdir(scratch))
