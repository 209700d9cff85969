"""The benchmark runs, tells the truth about what it measured, and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIMIT = 50.0


@contextmanager
def bench(*arguments: str, scratch: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """The benchmark as a process of its own, ended at the latest when the block ends.

    A run that is killed cannot clear its temporary directory away; `scratch` says where it is to be.
    """
    process = subprocess.Popen(
        [sys.executable, str(BENCHMARKS / "run.py"), *arguments],
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


def run_bench(*arguments: str) -> tuple[int, str, str]:
    with bench(*arguments) as process:
        out, err = process.communicate(timeout=LIMIT)
        return process.returncode, out, err


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


def test_a_quick_run_measures_raw_sockets_and_farcall(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text((BENCHMARKS / "README.md").read_text())
    findings = tmp_path / "findings.json"
    status, out, err = run_bench(
        "--quick", "--rounds", "1", "--systems", "raw,farcall", "--json", str(findings), "--write-readme", str(readme)
    )
    assert status == 0, err
    found = json.loads(findings.read_text())
    assert set(found["rounds"]["calls"]) == {
        "farcall-unix",
        "farcall-tcp",
        "raw-spin-unix",
        "raw-spin-tcp",
        "raw-block-unix",
        "raw-block-tcp",
    }
    for name, rounds in found["rounds"]["calls"].items():
        assert len(rounds) == 1
        assert 0 < rounds[0]["p50_us"] <= rounds[0]["p99_us"], name
        assert ("calls_per_s" in rounds[0]) == name.startswith("farcall")
    assert len(found["rounds"]["idle_percent"]) == 1
    assert found["rounds"]["busy_spinning"][0] > 0
    assert found["rounds"]["busy_blocking"][0] > 0
    verdicts = {figure["title"]: figure["verdict"] for figure in found["figures"]}
    assert verdicts["no-op, unix: faster than torch"] == "not measured"
    assert verdicts["no-op, unix: of the raw spinning ping-pong"] in ("met", "missed")
    p50 = f"{found['rounds']['calls']['farcall-unix'][0]['p50_us']:,.1f}"
    assert p50 in out
    assert f"| farcall, unix | {p50} |" in readme.read_text()
    assert found["machine"]["kernel"] in readme.read_text()
    assert "None is recorded yet" not in readme.read_text()


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
