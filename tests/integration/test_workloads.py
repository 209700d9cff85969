"""The two workloads run on farcall without torch, compute what they should, and leave nothing behind."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")
np = pytest.importorskip("numpy")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIMIT = 50.0


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "workloads.run", *arguments],
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "200"} | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def processes_with(mark: str) -> list[str]:
    """The processes whose environment holds this text."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environment.read_bytes():
                found.append(environment.parent.name)
        except OSError:  # ended, or another user's
            pass
    return found


@pytest.fixture
def workload(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a module of the workloads into this process, which is then of farcall's side, for one test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    importlib.import_module("workloads.sides").choose("farcall")
    yield lambda name: importlib.import_module(f"workloads.{name}")
    for name in set(sys.modules) - before:
        if BENCHMARKS in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]


# End to end


def test_both_workloads_run_on_farcall_and_leave_nothing_behind(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    mark = uuid.uuid4().hex
    found = tmp_path / "found.json"
    arguments = ["--quick", "--systems", "farcall", "--computing", "numpy", "--json", str(found)]
    done = run(*arguments, TMPDIR=str(scratch), WORKLOADS_MARK=mark)
    assert done.returncode == 0, done.stderr
    assert processes_with(mark) == []
    assert list(scratch.iterdir()) == []
    written = json.loads(found.read_text())
    cases = {case["name"]: case for case in written["cases"]}
    assert set(cases) == {"rl-one-by-one-numpy", "rl-batched-numpy", "ps-64-numpy"}
    for name in ("rl-one-by-one-numpy", "rl-batched-numpy"):
        (findings,) = cases[name]["rounds"]["farcall"]
        assert findings["steps"] == 2 * 2 * 20  # observers, episodes, steps
        assert findings["steps_per_s"] > 0
        assert 0 < findings["agent_p50_us"] < findings["agent_p95_us"]
        assert findings["agent_p50_us"] < findings["observer_p50_us"] < findings["observer_p95_us"]
        assert cases[name]["ratio"] is None
    assert [figure["verdict"] for figure in written["figures"]] == ["not measured"] * 2  # a ratio needs both systems
    (findings,) = cases["ps-64-numpy"]["rounds"]["farcall"]
    assert findings["updates"] == 5
    assert findings["updates_per_s"] > 0
    assert 0 < findings["waiting_p50_us"] < findings["batch_p50_us"]
    assert "steps/s" in done.stdout
    assert "updates/s" in done.stdout
    again = run("--quick", "--systems", "farcall", "--computing", "numpy", "--recorded", str(found))
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout, "what was recorded is shown as it was found"


def test_a_worker_that_fails_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    # The import of the policy fails in every worker.
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise ImportError('no numpy for this test')\n")
    mark = uuid.uuid4().hex
    path = os.pathsep.join(filter(None, [str(tmp_path), str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
    arguments = ["--quick", "--systems", "farcall", "--computing", "numpy", "--workloads", "rl"]
    done = run(*arguments, PYTHONPATH=path, WORKLOADS_MARK=mark)
    assert done.returncode == 1
    assert "coordinator of farcall" in done.stderr
    assert "no numpy for this test" in done.stderr
    assert processes_with(mark) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--world-size", "2"], "--world-size must be at least 3"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--recorded", "absent.json"], "--recorded: there is no file absent.json"),
        (["--systems", "rpyc"], "--systems: there is no rpyc; there are farcall, torch"),
        (["--workloads", "chess"], "--workloads: there is no chess; there are rl, ps"),
        (["--json", "nowhere/found.json"], "--json: there is no directory nowhere"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(arguments: list[str], reason: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert reason in done.stderr


# What is told


def test_a_case_compares_medians_and_wants_three_times_torchs_throughput(workload: Callable[[str], Any]) -> None:
    case, *_ = workload("cases").all_cases(["numpy"], 4, quick=False)
    assert case.ratio is None
    case.rounds["farcall"] = [{"steps_per_s": rate} for rate in (100.0, 900.0, 800.0)]
    case.rounds["torch"] = [{"steps_per_s": rate} for rate in (200.0, 1.0, 250.0)]
    assert case.ratio == 4
    assert (case.figure.required, case.figure.aim, case.figure.verdict) == (3, 5, "met")
    assert workload("cases").all_cases(["numpy"], 8, quick=False)[0].figure is None


# What the workers do


def test_the_agent_answers_a_batch_when_the_last_state_has_come(workload: Callable[[str], Any]) -> None:
    settings = workload("settings")
    agent = workload("reinforcement").Agent(settings.Reinforcement(batched=True, world_size=5, state=(3, 2), actions=4))
    state = np.ones((3, 2), np.float32)
    first, second = agent.answer_with_others(2, state), agent.answer_with_others(0, state)
    assert not first.done()
    third = agent.answer_with_others(1, state)
    assert all(each.wait() in range(4) for each in (first, second, third))
    assert len(agent.end_episode()) == 1
    assert not agent.answer_with_others(0, state).done()  # the next batch


def test_the_agent_answers_every_observer_with_its_own_action(workload: Callable[[str], Any]) -> None:
    settings = workload("settings")
    agent = workload("reinforcement").Agent(settings.Reinforcement(batched=True, state=(2,), actions=4))
    agent._policy.choose = lambda states: [int(state[0]) for state in states]
    answers = [agent.answer_with_others(1, np.float32([7, 0])), agent.answer_with_others(0, np.float32([5, 0]))]
    assert [answer.wait() for answer in answers] == [7, 5]


def test_the_server_answers_all_trainers_with_the_average(workload: Callable[[str], Any]) -> None:
    server = workload("parameter_server").Server(workload("settings").ParameterServing(world_size=4))
    for _ in range(2):  # nothing of a batch is left for the next
        first = server.add(0, np.float32([1, 2]))
        other = server.add(1, np.float32([10]))
        assert not first.done()
        second = server.add(0, np.float32([3, 6]))
        assert first.wait().tolist() == second.wait().tolist() == [2, 4]
        assert not other.done()
        assert server.add(1, np.float32([20])).wait().tolist() == [15]


# What they compute


def test_the_policy_chooses_by_its_odds(workload: Callable[[str], Any]) -> None:
    policy = workload("in_numpy").policy(features=2, layers=0, actions=3)
    policy._layers[0][:] = 0
    policy._layers[0][-1] = np.log(np.float32([0.5, 0.3, 0.2]))  # the bias alone decides
    counts = np.bincount(policy.choose(np.zeros((20_000, 2), np.float32)), minlength=3) / 20_000
    assert np.abs(counts - [0.5, 0.3, 0.2]).max() < 0.02
    assert len(policy._log_odds) == 1
    policy.forget()
    assert policy._log_odds == []


def test_the_models_gradients_are_those_of_its_loss(workload: Callable[[str], Any]) -> None:
    model = workload("in_numpy").model(words=6, width=6, layers=2)
    generator = np.random.default_rng(1)
    samples, targets = generator.integers(6, size=(4, 5)), generator.integers(6, size=4)

    def loss() -> float:
        values = model._embeddings[samples].mean(axis=1, dtype=np.float64)
        for layer in model._layers:
            values = values @ layer[:-1] + layer[-1]
        odds = np.exp(values) / np.exp(values).sum(axis=1, keepdims=True)
        return float(-np.log(odds[np.arange(4), targets]).mean())

    gradients = model.gradients(samples, targets)
    assert len(gradients) == 3
    for parameters, gradient in zip([model._embeddings, *model._layers], gradients, strict=True):
        assert gradient.shape == parameters.shape
        for place in [(0, 0), (3, 2), (-1, 4)]:
            kept = parameters[place]
            parameters[place] = kept + 0.01
            above = loss()
            parameters[place] = kept - 0.01
            below = loss()
            parameters[place] = kept
            assert gradient[place] == pytest.approx((above - below) / 0.02, abs=2e-3)
    before = loss()
    model.step([1000 * each for each in gradients])
    assert loss() < before
