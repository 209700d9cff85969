"""The benchmark runs, tells the truth about what it measured, and leaves no process behind."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIMIT = 50.0


@contextmanager
def bench(
    *arguments: str, scratch: Path | None = None, benchmarks: Path = BENCHMARKS
) -> Iterator[subprocess.Popen[str]]:
    """The benchmark as a process of its own, ended at the latest when the block ends.

    A run that is killed cannot clear its temporary directory away; `scratch` says where it is to be.
    """
    process = subprocess.Popen(
        [sys.executable, str(benchmarks / "run.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "200"} | ({"TMPDIR": str(scratch)} if scratch else {}),
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def run_bench(*arguments: str, benchmarks: Path = BENCHMARKS, limit: float = LIMIT) -> tuple[int, str, str]:
    with bench(*arguments, benchmarks=benchmarks) as process:
        out, err = process.communicate(timeout=limit)
        return process.returncode, out, err


@pytest.fixture
def bench_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a module of the benchmark, which is no package, for one test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if BENCHMARKS in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]


def a_clone(tmp_path: Path) -> Path:
    """A repository with nothing but the benchmark in it: its benchmarks folder."""
    benchmarks = tmp_path / "benchmarks"
    shutil.copytree(BENCHMARKS, benchmarks, ignore=shutil.ignore_patterns("__pycache__"))
    return benchmarks


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.timeout(4 * LIMIT)
def test_a_quick_run_measures_raw_sockets_and_farcall(tmp_path: Path) -> None:
    benchmarks = a_clone(tmp_path)
    findings = tmp_path / "findings.json"
    status, out, err = run_bench(
        *(
            "--quick",
            "--rounds",
            "1",
            "--systems",
            "raw,farcall-unix,farcall-tcp",
            "--json",
            str(findings),
            "--write-readme",
        ),
        benchmarks=benchmarks,
        limit=3 * LIMIT,
    )
    assert status == 0, err
    found = json.loads(findings.read_text())
    rounds = found["rounds"]
    workers = {"farcall-unix", "farcall-tcp"}
    pingpongs = {"raw-spin-unix", "raw-spin-tcp", "raw-block-unix", "raw-block-tcp"}
    assert set(rounds) == workers | pingpongs | {"raw-copy-tcp"}
    latencies = {"p50_us", "p99_us", "mean_us"}
    calls = {"no-op", "pipelined", "remote + to_here", "proxy call", "passed back", "shared"}
    sizes = {"echo 4 KiB", "echo 1 MiB", "echo 64 MiB"}
    data = sizes | {"exchange 1 MiB", "exchange 64 MiB", "1 thread", "16 threads", "beside a stream"}
    for name in workers:
        assert calls | data <= set(rounds[name]), name
        assert set(rounds[name]["no-op"]) == latencies, name
    for name in pingpongs:
        assert {point: set(values) for point, values in rounds[name].items()} == {"no-op": latencies}, name
    assert set(rounds["raw-copy-tcp"]) == sizes
    measured = rounds["farcall-unix"]
    others = {"of the raw socket", "fresh run", "idle", "memory copy", "busy workers", "import"}
    assert others <= set(measured)
    assert {"0 busy programs: in a row", "4 busy programs: 16 threads", "callee computes: apart"} <= set(measured)
    assert {"alone: 64 B", "mixed: 64 B", "alone: shared reference", "mixed: shared reference"} <= set(measured)
    for name, points in rounds.items():
        for point, values in points.items():
            assert all(len(each) == 1 and (each[0] > 0 or point == "idle") for each in values.values()), (name, point)
    figures = {figure["title"]: figure["value"] for figure in found["figures"]}
    assert figures["64 MiB there and back, tcp: of a raw copy's"] == pytest.approx(
        rounds["raw-copy-tcp"]["echo 64 MiB"]["p50_us"][0] / rounds["farcall-tcp"]["echo 64 MiB"]["p50_us"][0]
    )
    assert figures["16 threads, unix: of one alone"] == pytest.approx(
        measured["16 threads"]["calls_per_s"][0] / measured["1 thread"]["calls_per_s"][0]
    )
    assert figures["4 KiB there and back, unix: torch's rate"] is None
    assert "beside a stream of 16 MiB" in " ".join(out.split())
    verdicts = {figure["title"]: figure["verdict"] for figure in found["figures"]}
    assert verdicts["no-op, unix: faster than torch"] == "not measured"
    assert verdicts["shared references, unix: torch's rate"] == "not measured"
    assert verdicts["import farcall"] in ("met", "missed")
    assert verdicts["no-op, unix: of the raw spinning ping-pong"] in ("met", "missed")
    cell = " / ".join(f"{measured['no-op'][name][0]:,.1f}" for name in ("p50_us", "p99_us", "mean_us"))
    assert cell in out
    tables = (benchmarks / "README.md").read_text()
    assert f"| farcall, unix | {cell} |" in tables
    assert found["machine"]["kernel"] in tables
    assert "None is recorded yet" not in tables


def test_strict_fails_when_a_figure_is_not_met() -> None:
    arguments = ("--quick", "--rounds", "1", "--systems", "raw-block-unix")
    assert run_bench(*arguments)[0] == 0
    assert run_bench(*arguments, "--strict")[0] == 1


def test_a_readme_without_markers_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("mine\n")
    status, _, err = run_bench("--quick", "--systems", "raw-block-unix", "--write-readme", str(readme))
    assert status == 2
    assert "results" in err
    assert readme.read_text() == "mine\n"


def test_a_readme_that_is_named_is_the_only_one_that_is_written(tmp_path: Path) -> None:
    benchmarks = a_clone(tmp_path)
    other = tmp_path / "OTHER.md"
    other.write_text((benchmarks / "README.md").read_text())
    before = (benchmarks / "README.md").read_text()
    arguments = ("--quick", "--rounds", "1", "--systems", "raw-block-unix", "--write-readme", str(other))
    assert run_bench(*arguments, benchmarks=benchmarks)[0] == 0
    assert "| raw socket, blocking, unix |" in other.read_text()
    assert (benchmarks / "README.md").read_text() == before


@pytest.mark.parametrize(
    ("bound", "noise", "value", "verdict"),
    [
        ("≥", 0.0, None, "not measured"),
        ("≥", 0.0, 20.0, "aim met"),
        ("≥", 0.0, 19.9, "met"),
        ("≥", 0.0, 12.0, "met"),
        ("≥", 0.0, 11.9, "missed"),
        ("≥", 0.1, 11.9, "within noise"),
        ("≥", 0.1, 10.7, "missed"),
        ("≤", 0.0, 12.0, "met"),
        ("<", 0.0, 12.0, "missed"),
        ("<", 0.0, 11.9, "met"),
        ("<", 0.1, 13.1, "within noise"),
        ("<", 0.1, 13.3, "missed"),
    ],
)
def test_the_verdict_on_a_figure(
    bench_module: Callable[[str], Any], bound: str, noise: float, value: float | None, verdict: str
) -> None:
    aim = 20 if bound == "≥" else None
    figure = bench_module("figures").Figure("a figure", value, 12, aim=aim, bound=bound, noise=noise)
    assert figure.verdict == verdict


def test_a_bound_from_above_has_its_aim_below(bench_module: Callable[[str], Any]) -> None:
    figure = bench_module("figures").Figure
    assert figure("a figure", 4.0, 12, aim=5, bound="≤").verdict == "aim met"
    assert figure("a figure", 6.0, 12, aim=5, bound="≤").verdict == "met"


def results_beside_torch(bench_module: Callable[[str], Any]) -> Any:
    results = bench_module("figures").Results()
    points = {"no-op": (10.0, 250.0), "remote + to_here": (20.0, 280.0), "proxy call": (25.0, 400.0)}
    for number in range(3):
        # Torch's first round is an outlier, which the median is to ignore.
        torch = {point: {"p50_us": 1e9 if number == 0 else theirs} for point, (_, theirs) in points.items()}
        results.record(
            "torch", torch | {"pipelined": {"calls_per_s": 3_000.0}, "shared": {"references_per_s": 1_000.0}}
        )
        farcall = {point: {"p50_us": ours} for point, (ours, _) in points.items()}
        results.record(
            "farcall-unix",
            farcall | {"pipelined": {"calls_per_s": 90_000.0}, "shared": {"references_per_s": 9_000.0}},
        )
    for milliseconds in (160.0, 90.0, 100.0):
        results.record("farcall-unix", {"import": {"ms": milliseconds}})
    return results


def test_the_figures_are_ratios_of_the_medians(bench_module: Callable[[str], Any]) -> None:
    figures = bench_module("figures").wanted_figures(results_beside_torch(bench_module))
    found = {figure.title: (figure.value, figure.verdict) for figure in figures if figure.value is not None}
    assert found == {
        "no-op, unix: faster than torch": (25.0, "aim met"),
        "pipelined, unix: torch's rate": (30.0, "met"),
        "remote + to_here, unix: faster than torch": (14.0, "met"),
        "proxy call, unix: faster than torch": (16.0, "met"),
        "shared references, unix: torch's rate": (9.0, "missed"),
        "import farcall": (100.0, "met"),
    }


def test_an_unknown_system_is_refused_by_name() -> None:
    status, _, err = run_bench("--systems", "raw,smoke-signals")
    assert status == 2
    assert "smoke-signals" in err


@pytest.mark.parametrize(("how", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_process_outlives_an_interrupted_run(how: signal.Signals, expected: int, tmp_path: Path) -> None:
    with bench("--rounds", "1000", "--systems", "raw-block-unix", scratch=tmp_path) as process:
        seen: list[int] = []

        def both_ends_are_up() -> bool:
            seen[:] = children(process.pid)
            return len(seen) == 2

        wait_until(both_ends_are_up, "the bench started no server and caller")
        process.send_signal(how)
        assert process.wait(20) == expected
    wait_until(lambda: not any(map(is_running, seen)), "a server or caller outlived the bench")
    if how != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


def test_a_failing_end_is_named_and_everything_ends() -> None:
    with bench("--rounds", "1000", "--systems", "raw-block-unix") as process:
        wait_until(lambda: len(children(process.pid)) == 2, "the bench started no server and caller")
        ends = children(process.pid)
        os.kill(ends[0], signal.SIGKILL)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 1
    assert "raw socket, blocking, unix" in err
    assert not any(map(is_running, ends))
