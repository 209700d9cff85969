"""Runs one program on torch or on farcall, with a time limit, and leaves no process behind.

Every process is started in a session of its own. At the time limit, and when the program has ended, the session's
processes are killed: programs that fail often leave children behind, which would hold ports and processors.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal

from clients.catalog import Program

Implementation = Literal["torch", "farcall"]
IMPLEMENTATIONS: Final[tuple[Implementation, ...]] = ("torch", "farcall")

_SOURCES: Final = Path(__file__).parents[1] / "src"
_POLL_INTERVAL_S: Final = 0.05
_OUTPUT_LINES: Final = 30


@dataclass(frozen=True)
class Result:
    """What became of one run of a program."""

    passed: bool
    seconds: float
    reason: str = ""
    """Why it failed, in a line."""
    output: str = ""
    """The last lines of what its processes have written."""


def run(program: Program, on: Implementation, time_limit_s: float | None = None) -> Result:
    """Runs the program once. It passes if all its processes end with status 0 before the time limit."""
    limit = time_limit_s or program.time_limit_s
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fc-") as directory, tempfile.TemporaryFile("w+") as output:
        processes = _start(program, on, directory, output)
        try:
            reason = _wait(processes, begin + limit)
        finally:
            for process in processes:
                _kill_session(process)
        if reason is None:
            reason = f"did not end within {limit:g} s"
        seconds = time.monotonic() - begin
        output.seek(0)
        lines = output.read().splitlines()[-_OUTPUT_LINES:]
    return Result(not reason, seconds, reason, "\n".join(lines))


def _start(program: Program, on: Implementation, directory: str, output: IO[str]) -> list[subprocess.Popen[bytes]]:
    runner = ["-m", "farcall.pytorch"] if on == "farcall" else []
    group = {"MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(max(program.ranks, 1))}
    processes: list[subprocess.Popen[bytes]] = []
    for rank in range(max(program.ranks, 1)):
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", *runner, *program.command],
            cwd=directory,
            env=_environment({**group, "RANK": str(rank), "LOCAL_RANK": str(rank)}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        processes.append(process)
    return processes


def _environment(group: Mapping[str, str]) -> dict[str, str]:
    loopback = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    path = os.pathsep.join(filter(None, [str(_SOURCES), os.environ.get("PYTHONPATH")]))
    local = {"LOCAL_WORLD_SIZE": group["WORLD_SIZE"], "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **loopback, **local, **group, "PYTHONPATH": path}


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> str | None:
    """Why the processes failed, "" if all have passed, None at the deadline. Returns at the first failure."""
    while True:
        statuses = [process.poll() for process in processes]
        for rank, status in enumerate(statuses):
            if status:
                how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
                return f"rank {rank}: {how}" if len(processes) > 1 else how
        if all(status == 0 for status in statuses):
            return ""
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_INTERVAL_S)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    # The process has not been waited for by anyone else, or its group still has members: the id cannot be another's.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
