"""Busy programs and computing threads: they compute while they should, and nothing of them is left."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from eventually import eventually
from farcall.bench.computing import ComputingThread
from farcall.bench.machine import cpu_seconds
from farcall.bench.processes import EndpointFailed, Endpoints, busy_programs, computing, start_ends
from systems import find

RAW = find("raw-block-unix")
PROGRAM = """
import time
from farcall.bench.processes import busy_programs, exit_on_signals

with exit_on_signals(), busy_programs(2) as programs:
    print(*(program.pid for program in programs), flush=True)
    time.sleep(60)
"""


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def computes(pid: int) -> None:
    """Waits until the process has used the processor for a while."""
    before = cpu_seconds(pid)
    eventually(lambda: cpu_seconds(pid) >= before + 0.05)


def test_busy_programs_compute_until_the_block_ends() -> None:
    with busy_programs(2) as programs:
        pids = [program.pid for program in programs]
        assert len(set(pids)) == 2
        for pid in pids:
            computes(pid)
    assert all(map(is_gone, pids))


def test_no_busy_program_starts_no_process() -> None:
    with busy_programs(0) as programs:
        assert programs == []


def test_busy_programs_end_if_the_measurement_fails() -> None:
    pids: list[int] = []

    def measure() -> None:
        with busy_programs(1) as programs:
            pids.append(programs[0].pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure()
    assert is_gone(pids[0])


def test_a_busy_program_that_has_died_is_reported() -> None:
    with pytest.raises(EndpointFailed, match="busy program 0"), busy_programs(1) as programs:
        programs[0].kill()


@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_busy_programs_end_with_a_benchmark_that_is_interrupted(how: signal.Signals, status: int) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        process.send_signal(how)
        assert process.wait(30) == status
        eventually(lambda: all(map(is_gone, pids)))


@pytest.mark.parametrize("which", [0, 1])
def test_a_thread_of_either_end_computes_while_calls_are_timed(which: int) -> None:
    with Endpoints() as endpoints:
        ends = start_ends(endpoints, RAW)
        with computing(ends[which]):
            computes(ends[which].pid)
            assert ends[1].ask("noops", calls=5, warmup=1)["mean_us"] > 0


def test_a_computing_thread_ends_when_it_is_stopped_and_can_start_again() -> None:
    thread = ComputingThread()
    for _ in range(2):
        thread.start()
        with pytest.raises(RuntimeError, match="runs already"):
            thread.start()
        assert any(each.name == "computing" for each in threading.enumerate())
        thread.stop()
        assert not any(each.name == "computing" for each in threading.enumerate())
    thread.stop()
