"""The processes of one worker: the first one, which is the worker itself, and all that it starts.

A worker leads a session and process group of its own. So signals that a terminal sends to the launcher's group do not
reach it, and all its descendants can be ended together, except those that leave the group on purpose.

A worker that has ended is not reaped before `reap`. As long as it is a zombie the kernel does not reuse its pid, so a
signal can never reach an unrelated process.

Workers must be started by the main thread: the kernel's parent-death signal is tied to the *thread* that forked.
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
_KEEPER_TIMEOUT_S = 5.0
"""How many seconds `Keeper.close` waits before it kills the keeper."""


@dataclass(frozen=True)
class WorkerPlan:
    """Everything that is known about a worker before it starts. Nothing is checked.

    Attributes:
        name: The name of the worker, for messages and before its output.
        rank: The rank of the worker, from 0 on, for messages.
        command: The path of the program, and its arguments; at least the path.
        environment: All environment variables of the worker; nothing is inherited.
    """

    name: str
    rank: int
    command: Sequence[str]
    environment: Mapping[str, str]


class WorkerProcess:
    """The process of a worker, in a process group of its own. The constructor starts it.

    Args:
        plan: What to start. A command that cannot be run makes the process exit with status 1 and a message.

    Attributes:
        plan: What was started.
        name: The name of the worker: that of the plan, until the launcher sets the name that the worker has reported.
        pid: Its process id, which is also the id of its process group.

    Raises:
        OSError: The system cannot create a process.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        """Starts the worker, without waiting for it. Must be called by the main thread, which is not checked.

        Args:
            plan: What to start. A command that cannot be run makes the process exit with status 1 and a message.

        Raises:
            OSError: The system cannot create a process.
        """
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
        self.name = plan.name
        """The name of the worker: the planned one, until it tells another."""
        self.pid = self._popen.pid

    @property
    def outputs(self) -> tuple[IO[bytes], IO[bytes]]:
        """The read ends of the worker's standard output and standard error, unbuffered. The caller closes them."""
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        return self._popen.stdout, self._popen.stderr

    def poll(self) -> int | None:
        """Returns the exit status of the worker, or minus the signal that killed it; None while it runs.

        Does not reap it, so it may be called again. Raises `ChildProcessError` after `reap` has reaped it.
        """
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    def signal(self, number: int) -> None:
        """Sends a signal to the worker's first process only; it has no effect on a process that has ended.

        The process must not have been reaped: another process may have its pid then.
        """
        os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Sends a signal to the worker and all processes of its group. Processes of other users are skipped.

        Raises `ProcessLookupError` if the group has no process any more, which happens only after `reap`.
        """
        try:
            os.killpg(self.pid, number)
        except PermissionError:
            # The processes that are left run as another user.
            pass

    def reap(self, within: float = 0.0) -> None:
        """Waits up to `within` seconds for the worker to end, and reaps it. Its pid may be reused afterwards.

        0 does not wait. Does nothing if the worker still runs then, or was reaped before.
        """
        try:
            self._popen.wait(within)
        except subprocess.TimeoutExpired:
            pass

    def __str__(self) -> str:
        """Returns name, rank and pid, for messages: "worker1 (rank 1, pid 4711)"."""
        return f"{self.name} (rank {self.plan.rank}, pid {self.pid})"


class Keeper:
    """A process that kills the workers' process groups if the launcher itself is killed.

    The constructor starts it. Call `watch` for each worker that was started, `forget` for each that has ended, and
    `close` at the end.
    """

    def __init__(self) -> None:
        """Starts the process, in a session of its own. Raises `OSError` if the system cannot create one."""
        command = [sys.executable, "-I", "-S", _KEEPER]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)

    def watch(self, process: WorkerProcess) -> None:
        """Adds the process group of a worker to those that are killed if the launcher dies.

        Does nothing if the process of this keeper is gone.
        """
        self._send(f"+{process.pid}\n")

    def forget(self, process: WorkerProcess) -> None:
        """Removes the process group of a worker that has ended, so that it is not killed.

        Does nothing if it was not watched, or the process of this keeper is gone.
        """
        self._send(f"-{process.pid}\n")

    def _send(self, line: str) -> None:
        """Sends a line, with its line break, to the process; does nothing if that process is gone."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(line.encode())
        except BrokenPipeError:
            # The keeper was killed. The kernel still kills the workers with the launcher, but not their children.
            pass

    def close(self) -> None:
        """Ends the process, which first kills the process groups that were watched and not forgotten.

        Waits until the process has ended. If that takes more than `_KEEPER_TIMEOUT_S` seconds, kills it. May be called
        again.
        """
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        try:
            self._popen.wait(_KEEPER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


def describe_end(code: int) -> str:
    """Returns how a worker ended: `exited with status 1`, or `was killed by SIGTERM`.

    Args:
        code: The exit status, or minus the signal that killed it, as `WorkerProcess.poll` returned it; not None.
    """
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def exit_status(code: int) -> int:
    """Returns the exit status that a shell would report for a result of `WorkerProcess.poll` that is not None.

    That is the worker's own status, or 128 plus the number of the signal that killed it, if `code` is negative.
    """
    return code if code >= 0 else 128 - code


def live_groups() -> set[int]:
    """Returns the ids of all process groups on this machine with a process that is not a zombie. Reads `/proc`."""
    groups = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue  # the process ended meanwhile
        # The format is "pid (name) state ppid pgrp ...". The name may contain blanks and parentheses; see proc(5).
        state, _, group = stat.rpartition(b")")[2].split(maxsplit=3)[:3]
        if state not in (b"Z", b"X"):
            groups.add(int(group))
    return groups
