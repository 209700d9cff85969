"""The examples, run as a newcomer runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 40.0
"""Seconds after which an example that does not end fails its test."""


def run_example(name: str, workers: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "farcall", "run", "-n", str(workers), f"examples/{name}"],
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1", "PYTHONWARNINGS": "error"},
        capture_output=True,
        encoding="utf-8",
        timeout=LIMIT,
    )


def test_the_first_program_greets() -> None:
    result = run_example("first.py", workers=2)
    assert (result.returncode, result.stdout, result.stderr) == (0, "worker0 | hello worker0, this is worker1\n", "")


def test_the_demo_tells_its_whole_story_in_order() -> None:
    result = run_example("demo.py", workers=4)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line for line in lines if not line.startswith("worker0 | ")] == []  # one voice
    story = [
        r"Four workers have found each other\.",
        r"Calls: ",
        r"worker1 is process \d+$",
        r"worker2 is process \d+$",
        r"worker3 is process \d+$",
        r"max, args=\(3, 4\)\)  →  4$",
        r"a lambda .*  →  40$",
        r"2000 calls, one after the other  →  \d+ µs each$",
        r"Futures: ",
        r"three naps .*  →  done: \[False, False, False\]$",
        r"wait_all\(futures\)  →  \[0\.3, 0\.3, 0\.3\] after 0\.\d s$",
        r"then\(double it\)  →  8$",
        r"Errors: ",
        r"KeyError: 'milk'$",
        r"Remote traceback \(worker 'worker2', in `read_shelf`\):$",
        r"return shelf\[item\]$",
        r"RpcTimeoutError: worker 'worker3' did not answer `nap` within 0\.2 s",
        r"UnknownWorkerError: there is no worker 'worker9'",
        r"A parameter server: ",
        r"at the start  →  y = 0\.00 x \+ 0\.00$",
        r"after 180 steps  →  y = 3\.00 x \+ 2\.00$",
        r"mean squared error .*e-\d\d, .*e-\d\d, .*e-\d\d$",
        r"That is all\.",
    ]
    rest = iter(lines)
    missing = [pattern for pattern in story if not any(re.search(pattern, line) for line in rest)]
    assert missing == [], result.stdout


@pytest.mark.parametrize("workers", [2, 4])
def test_the_parameter_server_learns_with_any_number_of_trainers(workers: int) -> None:
    result = run_example("parameter_server.py", workers)
    assert (result.returncode, result.stderr) == (0, "")
    line = re.compile(r"worker0 \| worker(\d): mean squared error (\S+) after 60 rounds")
    found = [match.groups() for match in map(line.fullmatch, result.stdout.splitlines()) if match is not None]
    assert [int(trainer) for trainer, _ in found] == list(range(1, workers))
    assert all(float(error) < 1e-6 for _, error in found)


def test_the_parameter_server_says_that_it_needs_a_trainer() -> None:
    result = run_example("parameter_server.py", workers=1)
    assert result.returncode == 1
    assert "start at least two workers" in result.stderr
