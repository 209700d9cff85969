"""Real worker processes for a test: the same script on each, its reports read as they come, nothing left at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ports import free_port

LIMIT = 30.0
"""Seconds after which workers that still run are killed, and the test fails."""

StartWorkers = Callable[..., "Workers"]


class Workers:
    """Processes that run one script. A rank that was told to start later does so with `start`."""

    def __init__(self, directory: Path, script: str, size: int, environment: dict[str, str], limit: float) -> None:
        self.directory = directory
        self.deadline = time.monotonic() + limit
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._size = size
        self._environment = environment
        (directory / "script.py").write_text("from worker_script import *\n" + textwrap.dedent(script))

    def start(self, rank: int) -> None:
        """Starts the worker of that rank."""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
            "PYTHONUNBUFFERED": "1",
            **self._environment,
            "RANK": str(rank),
            "WORLD_SIZE": str(self._size),
            "STAGE_REPORTS": str(self._file(rank, "reports")),
        }
        with open(self._file(rank, "output"), "wb") as output, open(self._file(rank, "errors"), "wb") as errors:
            self.processes[rank] = subprocess.Popen(
                self.command(rank),
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )

    def command(self, rank: int) -> list[str]:
        """What is run for the worker of that rank."""
        return [sys.executable, "script.py"]

    def reports(self, rank: int) -> dict[str, Any]:
        """All that a worker has reported so far."""
        facts: dict[str, Any] = {}
        path = self._file(rank, "reports")
        for line in path.read_text().splitlines() if path.exists() else ():
            facts.update(json.loads(line))
        return facts

    def wait_for(self, rank: int, fact: str) -> Any:
        """Waits until a worker has reported something of that name."""
        while fact not in (facts := self.reports(rank)):
            if self.processes[rank].poll() is not None and fact not in self.reports(rank):
                pytest.fail(f"rank {rank} ended without a word about {fact!r}\n{self._what_was_said()}")
            self._check_time(f"rank {rank} to report {fact!r}")
            time.sleep(0.002)
        return facts[fact]

    def wait_until(self, rank: int, fact: str, value: Any) -> None:
        """Waits until what a worker reports under that name has this value."""
        while self.reports(rank).get(fact) != value:
            self._check_time(f"rank {rank} to report that {fact!r} is {value!r}")
            time.sleep(0.002)

    def send_signal(self, rank: int, number: signal.Signals) -> float:
        """Sends a signal to a worker; when, by the clock that all processes share."""
        self.processes[rank].send_signal(number)
        return time.monotonic()

    def wait(self, rank: int) -> int:
        """Waits until a worker has ended; its status."""
        while (status := self.processes[rank].poll()) is None:
            self._check_time(f"rank {rank} to end")
            time.sleep(0.002)
        return status

    def finish(self, statuses: dict[int, int] | None = None, quiet: bool = True) -> list[dict[str, Any]]:
        """Waits until all have ended, with status 0 unless `statuses` says otherwise; all their reports, by rank.

        `quiet`: those with status 0 must have said nothing on stderr.
        """
        expected = {rank: (statuses or {}).get(rank, 0) for rank in self.processes}
        found = {rank: self.wait(rank) for rank in self.processes}
        assert found == expected, self._what_was_said()
        if quiet:
            noise = {rank: text for rank in self.processes if (text := self.errors(rank)) and found[rank] == 0}
            assert noise == {}, noise
        return [self.reports(rank) for rank in sorted(self.processes)]

    def errors(self, rank: int) -> str:
        """What a worker has written to stderr."""
        return self._file(rank, "errors").read_text(errors="replace")

    def kill_all(self) -> None:
        """Ends what still runs, by its process id."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def _check_time(self, what: str) -> None:
        if time.monotonic() > self.deadline:
            for process in self.processes.values():
                if process.poll() is None:
                    process.send_signal(signal.SIGABRT)  # faulthandler shows where each thread stands
                    process.send_signal(signal.SIGCONT)
            time.sleep(0.5)
            pytest.fail(f"waited too long for {what}\n{self._what_was_said()}")

    def _what_was_said(self) -> str:
        said = [
            f"rank {rank} (status {process.poll()}): reports {self.reports(rank)}\n{self.errors(rank)}"
            for rank, process in self.processes.items()
        ]
        return "\n".join(said)

    def _file(self, rank: int, what: str) -> Path:
        return self.directory / f"{what}.{rank}"


@contextmanager
def starting_workers(tmp_path: Path) -> Iterator[StartWorkers]:
    """Yields a function that starts a script on several workers. At the end, all that still run are killed.

    The workers start in the order of `order`, and ranks that are not in it are left out. `url` is where they meet:
    "tcp" (the default), "env", "file", or a whole URL.
    """
    started: list[Workers] = []

    def workers(
        script: str,
        n: int = 2,
        url: str = "tcp",
        transports: Sequence[str] = (),
        order: Sequence[int] | None = None,
        limit: float = LIMIT,
        environment: dict[str, str] | None = None,
    ) -> Workers:
        directory = tmp_path / str(len(started))
        directory.mkdir()
        settings = {"PYTHONFAULTHANDLER": "1"}
        port = free_port()
        if url == "env":
            settings |= {"STAGE_URL": "env://", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        else:
            urls = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{directory}/meeting"}
            settings["STAGE_URL"] = urls.get(url, url)
        if transports:
            settings["STAGE_TRANSPORTS"] = ",".join(transports)
        group = Workers(directory, script, n, settings | (environment or {}), limit)
        started.append(group)
        for rank in order if order is not None else range(n):
            group.start(rank)
        return group

    try:
        yield workers
    finally:
        for group in started:
            group.kill_all()
