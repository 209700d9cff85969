"""`farcall bench` from end to end: it measures, tells what it found, and leaves no process behind."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farcall.bench.processes import MARK_VARIABLE

LIMIT = 50.0


@contextmanager
def bench(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The command as a process of its own, ended at the latest when the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "farcall", "bench", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200", **environment},
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def started_by(pid: int) -> list[int]:
    """The processes that it has started."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def bearers(mark: str) -> list[int]:
    """The processes that bear a mark of the bench."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            wanted = f"{MARK_VARIABLE}={mark}".encode()
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            pass
    return found


def test_a_quick_run_measures_everything(tmp_path: Path) -> None:
    small = ("--quick", "--sizes", "0,64KiB", "--in-flight", "4", "--start", "1")
    outputs = ("--json", str(tmp_path / "found.json"), "--plots", str(tmp_path / "plots"))
    with bench(*small, *outputs) as process:
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["left_out"], found["notes"]) == ({}, [])
    points = {
        key: {cell["point"]: cell for cell in measure["systems"]["farcall"]}
        for key, measure in found["measures"].items()
    }
    assert {key: list(cells) for key, cells in points.items()} == {
        "latency": [0, 65536],
        "latency_p99": [0, 65536],
        "bandwidth": [65536],
        "exchanged": [65536],
        "in_flight": [4],
        "threads": [1, 4],
        "streaming": [16 * 1024**2],
        "fetched": [1],
        "shared": [1],
        "startup": [1],
    }
    assert all(cell["median"] > 0 and len(cell["rounds"]) == 1 for cells in points.values() for cell in cells.values())
    assert points["latency"][0]["median"] < points["startup"][1]["median"]
    assert f"{points['in_flight'][4]['median']:,.0f}" in out
    assert "Until workers can be used" in out
    assert "This was a quick run" in err
    if importlib.util.find_spec("matplotlib"):
        assert {path.name for path in (tmp_path / "plots").iterdir()} >= {"latency.png", "latency.svg", "startup.svg"}
    else:
        assert "matplotlib is not installed" in err


@pytest.mark.parametrize(("how", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_process_outlives_an_interrupted_run(how: signal.Signals, expected: int, tmp_path: Path) -> None:
    # Two workers and their starter: ends of the bench, and ends of an end.
    arguments = ("--measure", "startup", "--start", "2", "--rounds", "1000")
    with bench(*arguments, TMPDIR=str(tmp_path)) as process:
        deadline = time.monotonic() + 20
        mark = ""
        while not mark or len(bearers(mark)) < 3:
            assert time.monotonic() < deadline, "the bench started no workers"
            assert process.poll() is None, process.communicate()
            for child in started_by(process.pid):
                environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                marks = [word for word in environ if word.startswith(MARK_VARIABLE.encode())]
                mark = marks[0].decode().partition("=")[2] if marks else ""
            time.sleep(0.01)
        process.send_signal(how)
        assert process.wait(20) == expected
    deadline = time.monotonic() + 20
    while bearers(mark):
        assert time.monotonic() < deadline, "a process outlived the bench"
        time.sleep(0.01)
    if how != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


def test_bad_input_is_one_line() -> None:
    with bench("--measure", "luck") as process:
        _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 2
    assert err.startswith("farcall: --measure: 'luck' does not exist; choose from payload, ")
    assert err.count("\n") == 1
