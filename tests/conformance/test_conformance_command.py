"""The command, on a suite without torch: the choice of tests, what is shown, and the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from conformance import command
from conformance.categories import Categories, Category, Rule
from conformance.command import main
from conformance.runner import Runner

PASSING = {"Fake.test_passes": "passed", "Fake.test_skipped": "skipped"}


@pytest.fixture(autouse=True)
def _fake(pids: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    categories = Categories(
        [Category("good", ""), Category("bad", "", out_of_reach="it is bad", slow=True)],
        [Rule("*", "*", "bad"), *(Rule(*test.split("."), "good") for test in PASSING)],  # type: ignore[call-arg]
    )
    monkeypatch.setattr(Categories, "read", lambda: categories)
    monkeypatch.setattr(command, "Runner", partial(Runner, suite="fake_suite"))
    monkeypatch.setattr(command, "read_baseline", lambda: PASSING)


def test_all_that_torch_passes_passed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--category", "reachable", "-v"]) == 0
    out, err = capfd.readouterr()
    assert "1 passed, 0 failed, 1 skipped" in out
    assert "not passed" not in out
    assert "2 tests of fake 1.0 on farcall.pytorch:install, 4 at once, 60 s for each test" in err
    assert "Fake.test_skipped  there is no reason" in err
    assert "warning: something runs" in err


def test_what_is_lost_is_named_with_its_reason(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["-k", "test_passes", "-k", "*fails", "--impl", "other:install"]) == 1
    out, err = capfd.readouterr()
    assert "not passed, though torch itself passes:\n  Fake.test_fails: AssertionError: 1 is not 2\n" in out
    assert "\nbad is out of reach: it is bad\n1 passed, 1 failed" in out
    assert "Fake.test_fails  AssertionError: 1 is not 2" in err
    assert "seen on the way" not in err  # that is for -v


def test_what_torch_itself_skips_is_no_loss(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "read_baseline", lambda: {"Fake.test_fails": "skipped"})
    assert main(["-k", "fails", "-v"]) == 0
    out, err = capfd.readouterr()
    assert "failed, and torch itself skips it:\n  Fake.test_fails" in out
    assert "    seen on the way" in err


def test_tests_of_the_baseline_that_cannot_be_loaded_are_lost(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "read_baseline", lambda: {"Broken.test_a": "passed", "Gone.test_b": "passed"})
    assert main(["-k", "Broken", "-k", "Gone"]) == 1
    out = capfd.readouterr().out
    assert "Broken.test_a: Broken has no install" in out
    assert "Gone.test_b: is not among the tests of fake 1.0" in out


def test_all_runs_must_pass(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # `together_1` waits in vain the first time, and finds what it has written the second time.
    path = tmp_path / "out.json"
    arguments = ["-k", "together_", "--jobs", "1", "--timeout", "2", "--runs", "2", "--json", str(path)]
    assert main(arguments) == 1
    assert "run 1 of 2: 1 passed, 1 failed" in (out := capfd.readouterr().out)
    assert "run 2 of 2: 2 passed, 0 failed" in out
    runs = json.loads(path.read_text())["runs"]
    assert [run["Fake.test_together_1"]["status"] for run in runs] == ["failed", "passed"]


def test_slow_tests_start_first(pids: object) -> None:
    session = command.Session(command.parse([]))
    assert session.selected(["Fake.test_passes", "Fake.test_b", "Fake.test_skipped", "Fake.test_a"]) == [
        "Fake.test_b", "Fake.test_a", "Fake.test_passes", "Fake.test_skipped",
    ]  # fmt: skip


def test_the_list_needs_no_torch(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "Runner", None)
    assert main(["--list", "-k", "skip"]) == 0
    assert capfd.readouterr().out.split() == ["good", "Fake.test_skipped"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-k", "nothing of the kind"], "no test was selected"),
        (["--category", "worse"], "there is no category 'worse'"),
        (["--impl", "refuse"], "this implementation cannot be loaded"),
    ],
)
def test_nothing_could_be_run(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--runs", "0"], "--runs must be at least 1"),
        (["--timeout", "0"], "--timeout must be more than 0"),
        (["--timeout", "nan"], "--timeout must be more than 0"),
        (["--json", "nowhere/at/all.json"], "there is no directory nowhere/at"),
        (["--write-baseline"], "--impl none"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capfd.readouterr().err


def test_the_baseline_is_written_from_a_run_of_torch_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[set[str], int]] = []
    monkeypatch.setattr(command, "write_baseline", lambda outcomes, tests: written.append((set(outcomes), len(tests))))
    assert main(["--impl", "none", "--write-baseline", "-k", "passes"]) == 0
    ((tests, count),) = written
    assert tests == {"Fake.test_passes"}
    assert count > 5
