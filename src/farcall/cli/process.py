"""One worker's processes: the first one, which is the worker, and whatever that one starts.

A worker is the leader of a session and process group of its own: what a terminal sends to the launcher's group does not
reach it, and all its descendants can be ended together. (Those that leave the group on purpose are on their own.)

A worker that has ended is not reaped until `reap`: as long as it is a zombie, its number cannot become another's, so a
signal never reaches a stranger.

The main thread must start it: the kernel ties the worker's life to the *thread* that made it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_BOOTSTRAP = str(Path(__file__).with_name("bootstrap.py"))
_KEEPER = str(Path(__file__).with_name("keeper.py"))
_KEEPER_ENDS_WITHIN = 5.0


@dataclass(frozen=True)
class WorkerPlan:
    """What a worker is to be: all that is known before it starts."""

    name: str
    rank: int
    command: Sequence[str]
    """The program, by its path, and its arguments."""
    environment: Mapping[str, str]


class WorkerProcess:
    """A worker that has been started. Raises `OSError` if the system cannot start it."""

    def __init__(self, plan: WorkerPlan) -> None:
        bootstrap = [sys.executable, "-I", "-S", _BOOTSTRAP, str(os.getpid())]
        self._popen = subprocess.Popen(
            [*bootstrap, *plan.command],
            env=plan.environment,
            stdin=subprocess.DEVNULL,  # several workers cannot share one input
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self.plan = plan
        self.pid = self._popen.pid

    @property
    def outputs(self) -> tuple[IO[bytes], IO[bytes]]:
        """The ends to read of its standard output and standard error."""
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        return self._popen.stdout, self._popen.stderr

    def poll(self) -> int | None:
        """How the worker ended (its status, or minus the signal that killed it); None while it runs."""
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    def signal(self, number: int) -> None:
        """Signals the worker alone."""
        os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Signals the worker and all that it has started."""
        try:
            os.killpg(self.pid, number)
        except PermissionError:
            # All that is left of it runs as another user.
            pass

    def reap(self, within: float = 0.0) -> None:
        """Lets go of a worker that has ended, or does within these seconds. Its number is free from here on."""
        try:
            self._popen.wait(within)
        except subprocess.TimeoutExpired:
            pass

    def __str__(self) -> str:
        return f"{self.plan.name} (rank {self.plan.rank}, pid {self.pid})"


class Keeper:
    """The process that kills the workers' groups should the launcher be killed: see the module `keeper`."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", _KEEPER]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)

    def watch(self, process: WorkerProcess) -> None:
        """Has this worker's group killed should the launcher die."""
        self._tell(f"+{process.pid}\n")

    def forget(self, process: WorkerProcess) -> None:
        """The group is gone."""
        self._tell(f"-{process.pid}\n")

    def _tell(self, line: str) -> None:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(line.encode())
        except BrokenPipeError:
            # Somebody killed it. The kernel still ties the workers, though not their children, to the launcher.
            pass

    def close(self) -> None:
        """Ends it; it kills the groups that were not forgotten."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        try:
            self._popen.wait(_KEEPER_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


def describe_end(code: int) -> str:
    """In words, how a worker ended that `WorkerProcess.poll` said this of."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def exit_status(code: int) -> int:
    """The status by which a launcher, like a shell, tells of such an end."""
    return code if code >= 0 else 128 - code


def live_groups() -> set[int]:
    """The process groups in which something runs: zombies do not count."""
    groups = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue  # it ended meanwhile
        # "pid (name) state ppid pgrp ...", and the name may hold blanks and parentheses: see proc(5).
        state, _, group = stat.rpartition(b")")[2].split(maxsplit=3)[:3]
        if state not in (b"Z", b"X"):
            groups.add(int(group))
    return groups
