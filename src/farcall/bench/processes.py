"""Starts, asks and ends the processes of a measurement.

Rules
- Every wait has a limit. A process that does not answer in time raises `EndpointFailed`.
- `Endpoints` is a context manager: when its block ends, also by an error or Ctrl-C, all its processes have ended.
- Each process has a session of its own, so Ctrl-C reaches only the benchmark, which then ends the others in order. If
  the benchmark is killed, its pipes break, and the processes end by themselves.
- Some systems start processes of their own, in further sessions. All of them inherit an environment variable with a
  *mark*, unique to one set of endpoints. At the end every process with the mark is killed, and every process that it
  has started: a process that changes its title overwrites its environment, and with it the mark.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self

from farcall.bench.system import START_LIMIT_S, Address, System

ANSWER_LIMIT_S: Final = 120.0
"""How many seconds one measurement, from a command to its answer, may take."""
STOP_LIMIT_S: Final = 15.0
"""How many seconds an orderly end may take before a process is killed."""
_PROGRAM: Final = Path(__file__).with_name("bootstrap.py")
MARK_VARIABLE: Final = "FARCALL_BENCH_MARK"
"""The environment variable that holds the mark: a text by which the processes of one measurement are found."""
_KILL_LIMIT_S: Final = 5.0
"""How many seconds `kill_marked` goes on for."""
_TRACKER_LIMIT_S: Final = 2.0
"""How many of these seconds `multiprocessing` resource trackers have for cleaning up."""


class EndpointFailed(Exception):
    """A process of the benchmark failed, died or did not answer.

    Args:
        message: What happened, with the output of the process.
        reason: The same in one line, for the report; None takes the first line of the message.

    Attributes:
        reason: What happened, in one line.
    """

    def __init__(self, message: str, reason: str | None = None) -> None:
        """Creates the error.

        Args:
            message: What happened; may have several lines.
            reason: The same in one line, for the report; None or an empty text takes the first line of the message.
        """
        super().__init__(message)
        self.reason = reason or message.partition("\n")[0]


class Endpoint:
    """One process of a measurement, and the pipe over which it is given commands. Created by `Endpoints.start`.

    Args:
        title: What the process is, for error messages.
        role: What it is to do, with the key `kind` ("server", "caller" and so on) and the arguments of that kind.
        log: The file for its output.
        environment: Its environment variables.

    Attributes:
        title: What the process is, for error messages.
    """

    def __init__(self, title: str, role: dict[str, Any], log: Path, environment: dict[str, str]) -> None:
        """Starts the process and sends it its role; does not wait for it to take up the role.

        Args:
            title: What the process is, for error messages.
            role: What it is to do, with the key `kind` ("server", "caller" and so on) and the arguments of that kind. A
                wrong role makes the first `receive` fail.
            log: The file for its output, which is replaced.
            environment: Its environment variables.

        Raises:
            OSError: The process cannot be started.
        """
        self.title = title
        self._log = log
        self._control, theirs = Pipe()
        with theirs, log.open("wb") as errors:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                # -P: do not import modules from the directory of the program.
                [sys.executable, "-P", str(_PROGRAM), str(fd)],
                env=environment,
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
        self._control.send(role)

    @property
    def pid(self) -> int:
        """The id of the process; also known after its end."""
        return self._process.pid

    def send(self, command: str, **options: object) -> None:
        """Sends a command, with its options, without waiting for the answer; `receive` returns that.

        A command that the process does not know ends it. Raises `EndpointFailed` if the process is gone.
        """
        try:
            self._control.send((command, options))
        except OSError:
            raise self._failure("is gone") from None

    def receive(self, limit: float = ANSWER_LIMIT_S) -> Any:
        """Waits for the answer to the oldest unanswered command, and returns it.

        The role counts as the first command. Its answer is None.

        Args:
            limit: How many seconds to wait; 0 does not wait.

        Raises:
            EndpointFailed: The command failed, the process ended, or no answer came in time.
        """
        try:
            if not self._control.poll(limit):
                raise self._failure(f"did not answer within {limit:g} s")
            outcome, result = self._control.recv()
        except (EOFError, ConnectionError):
            raise self._failure("ended without an answer") from None
        if outcome == "failed":
            # The last line of a traceback is the error itself.
            raise self._failure(f"failed:\n{result}", result.strip().rpartition("\n")[2][:300])
        return result

    def ask(self, command: str, **options: object) -> Any:
        """Sends a command, with its options, waits, and returns its answer.

        Raises `EndpointFailed` if the command fails, the process has ended, or no answer comes within `ANSWER_LIMIT_S`
        seconds.
        """
        self.send(command, **options)
        return self.receive()

    def wait(self, limit: float) -> None:
        """Waits up to `limit` seconds for the process to end; 0 does not wait.

        Returns also if it still runs; raises nothing.
        """
        try:
            self._process.wait(limit)
        except subprocess.TimeoutExpired:
            pass

    def kill(self) -> None:
        """Kills the process if it still runs, waits for its end, and closes the pipe. May be called again."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._control.close()

    def _failure(self, what: str, reason: str | None = None) -> EndpointFailed:
        """Returns the error for this process, with the end of its output in the message.

        Args:
            what: What went wrong, as the rest of a sentence that begins with the title of the process: "is gone".
            reason: What went wrong, in one line; None takes the title and `what`.
        """
        tail = self._log.read_text(errors="replace")[-2000:].strip()
        message = f"{self.title} (pid {self.pid}) {what}" + (f"\nits output:\n{tail}" if tail else "")
        return EndpointFailed(message, reason or f"{self.title} {what}")


class Endpoints:
    """The processes of one measurement, and a directory for their sockets and output.

    A context manager: at the end of its block all its processes have ended, and the directory is removed.

    Example:
        with Endpoints() as endpoints:
            server = endpoints.start("the server", kind="server", system=system, address=endpoints.address(2))
            endpoints.wait_until_up(server)
    """

    def __init__(self) -> None:
        self._all: list[Endpoint] = []
        self._places = 0
        self._told = False
        # Systems that are being killed may still write there: errors while it is removed do not matter.
        self._directory = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        # In a process of the benchmark that starts others: these inherit its mark, and the benchmark kills them all.
        self._inherited = os.environ.get(MARK_VARIABLE)
        self._mark = self._inherited or secrets.token_hex(16)

    def __enter__(self) -> Self:
        """Returns this object. Nothing is started before `start`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends all processes, and removes the directory.

        If the block ended with an error, the processes are killed. Otherwise each gets the command "stop", and those
        that still run after `STOP_LIMIT_S` seconds are killed. Raises `EndpointFailed` if a process does not carry out
        "stop", or does not answer it in time. Also then, all processes have ended.
        """
        try:
            if error is None:
                self._stop()
        finally:
            for endpoint in self._all:
                endpoint.kill()
            if self._inherited is None:
                kill_marked(self._mark)
            self._directory.cleanup()

    def _stop(self) -> None:
        """Sends the command "stop" to all processes, and waits up to `STOP_LIMIT_S` seconds until they have ended.

        Raises `EndpointFailed` if a process does not carry out the command, or does not answer it in time. If a process
        has answered but still runs in the end, nothing is raised.
        """
        deadline = time.monotonic() + STOP_LIMIT_S
        self.send_stop()
        for endpoint in self._all:
            endpoint.receive(max(0.0, deadline - time.monotonic()))
        for endpoint in self._all:
            endpoint.wait(max(0.0, deadline - time.monotonic()))

    def send_stop(self) -> None:
        """Sends the command "stop" to all processes, without waiting for their end. Does nothing the second time.

        All are told before any is waited for, because the members of a group leave together. Without processes it sends
        nothing. Raises `EndpointFailed` if a process is gone; the processes after it are not told then.
        """
        for endpoint in () if self._told else self._all:
            endpoint.send("stop")
        self._told = True

    def address(self, ends: int) -> Address:
        """Returns a new address for `ends` processes: a free port, and a path for a socket where no file exists yet."""
        self._places += 1
        return Address(free_port(), str(Path(self._directory.name, f"{self._places}.sock")), ends)

    def start(self, title: str, **role: object) -> Endpoint:
        """Starts a process with a role, and returns it. It has taken up the role once `wait_until_up` has returned.

        Args:
            title: What the process is, for error messages.
            **role: Its role: the key `kind` ("server", "caller" and so on) and the arguments of that kind. A `system`
                in it adds its own environment variables. A wrong role makes `wait_until_up` fail.

        Raises:
            OSError: The process cannot be started.
        """
        system = role.get("system")
        environment = {
            **os.environ,
            **(system.environment if isinstance(system, System) else {}),
            MARK_VARIABLE: self._mark,
            "TMPDIR": self._directory.name,
            "PYTHONPATH": os.pathsep.join(local_import_path()),
        }
        endpoint = Endpoint(title, role, Path(self._directory.name, f"{len(self._all)}.log"), environment)
        self._all.append(endpoint)
        return endpoint

    def wait_until_up(self, *endpoints: Endpoint, limit: float = START_LIMIT_S) -> None:
        """Waits up to `limit` seconds for each process to take up its role; for no processes, not at all.

        Must be called once for each process, before it is asked. Raises `EndpointFailed` if one fails or is not up in
        time.
        """
        for endpoint in endpoints:
            endpoint.receive(limit)


def local_import_path() -> list[str]:
    """Returns the directories of `sys.path` that exist and are not part of a Python environment; maybe none.

    The processes of a measurement get these directories as PYTHONPATH. So they can import a system that is defined
    outside the Python environment, for example in a repository.
    """
    prefixes = (sys.prefix, sys.base_prefix)
    return [entry for entry in sys.path if os.path.isdir(entry) and not entry.startswith(prefixes)]


def start_ends(endpoints: Endpoints, system: System, third: bool = False) -> tuple[Endpoint, ...]:
    """Starts the processes of a system: its server, its caller and, if `third` is True, a third one.

    Args:
        endpoints: The set of processes that the new ones are added to. It ends them at the end of its block.
        system: What is measured: farcall or another library.
        third: Whether there is a third process, to share references with.

    Returns:
        The server and the caller, but not the third process. If `system.spawns` is True, only the caller: it starts the
        other processes itself.

    Raises:
        EndpointFailed: A process could not take up its role, or not in time.
    """
    address = endpoints.address(3 if third else 2)
    if system.spawns:
        caller = endpoints.start(f"the caller of {system.label}", kind="caller", system=system, address=address)
        endpoints.wait_until_up(caller, limit=system.start_limit)
        return (caller,)
    server = endpoints.start(f"the server of {system.label}", kind="server", system=system, address=address)
    if not system.starts_together:
        endpoints.wait_until_up(server)
    caller = endpoints.start(f"the caller of {system.label}", kind="caller", system=system, address=address)
    others = []
    if third:
        others.append(endpoints.start(f"the third of {system.label}", kind="third", system=system, address=address))
    if system.starts_together:
        others.append(server)
    # The caller first: if it fails, the others would only report that they waited for it.
    endpoints.wait_until_up(caller, *others)
    return server, caller


@contextmanager
def busy_programs(number: int) -> Iterator[list[Endpoint]]:
    """Context manager: `number` programs that compute all the time run inside the block; 0 starts none.

    Yields the processes. Raises `EndpointFailed` if one could not be started, or did not go on to the end of the block.
    """
    with Endpoints() as endpoints:
        programs = [endpoints.start(f"busy program {each}", kind="busy program") for each in range(number)]
        endpoints.wait_until_up(*programs)
        yield programs


@contextmanager
def computing(end: Endpoint) -> Iterator[None]:
    """Context manager: a thread of the process `end` computes all the time inside the block.

    Raises `EndpointFailed` if the process is gone, or such a thread runs there already. After an error in the block,
    the thread is not stopped.
    """
    end.ask("start_computing")
    yield
    # Not after an error: the process may still be busy with a command, and all processes are about to be killed.
    end.ask("stop_computing")


def kill_marked(mark: str) -> None:
    """Kills all processes that have `mark` in their environment, and those that they have started, except this one.

    `mark` is the value of the environment variable `MARK_VARIABLE`, which the processes of one measurement inherit.
    Does nothing if there are no such processes. Returns when all have ended, or after `_KILL_LIMIT_S` seconds. Resource
    trackers of `multiprocessing` are killed only after `_TRACKER_LIMIT_S` seconds, so that they can remove semaphores
    and shared memory.
    """
    began = time.monotonic()
    while (found := find_marked(mark)) and (waited := time.monotonic() - began) < _KILL_LIMIT_S:
        # The youngest first, which usually have the higher ids: without its parent a process may not be found again.
        for pid in reversed(found):
            if waited > _TRACKER_LIMIT_S or not _is_tracker(pid):
                _kill(pid, mark)
        time.sleep(0.02)  # polled, because no event reports the end of a process that is not our child


def _is_tracker(pid: int) -> bool:
    """Returns whether the process `pid` is a resource tracker of `multiprocessing`; False if it has ended."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def find_marked(mark: str) -> list[int]:
    """Returns the ids of all processes that have `mark` in their environment, and of all that those have started.

    `mark` is the value of the environment variable `MARK_VARIABLE`, which the processes of one measurement inherit. The
    list is sorted, and does not have this process. It is empty if there are none.
    """
    parents = {int(entry): _parent_of(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    found = {pid for pid in parents if pid != os.getpid() and _has_mark(pid, mark)}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})


def _has_mark(pid: int, mark: str) -> bool:
    """Returns True if the process `pid` has `mark` as the value of `MARK_VARIABLE` in its environment.

    Returns False if not, or if the process has ended or belongs to another user.
    """
    try:
        return f"{MARK_VARIABLE}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _parent_of(pid: int) -> int:
    """Returns the id of the parent of the process `pid`; 0 if the process has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return 0
    return 0 if state in "ZX" else int(parent)


def _kill(pid: int, mark: str) -> None:
    """Kills the process `pid` if it still has the mark in its environment, or was started by one that has.

    Does nothing if not, or if it has ended.
    """
    # The descriptor refers to the process itself, so if its id is reused meanwhile, the new process is not killed.
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if pid in find_marked(mark):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Context manager: inside the block, SIGTERM raises `SystemExit` with status 143, and Ctrl-C with status 130.

    So the `with` blocks inside it end as usual, and no process is left behind. Raises `ValueError` if it is not entered
    in the main thread.
    """

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def run_python(title: str, program: str, environment: dict[str, str]) -> str:
    """Runs a program in a new Python process, and returns what it prints to standard output; empty if nothing.

    Args:
        title: What the program is, for error messages.
        program: Its source code.
        environment: All its environment variables.

    Raises:
        EndpointFailed: The program ends with a status other than 0, or takes longer than `ANSWER_LIMIT_S` seconds.
        OSError: Python cannot be started.
    """
    # -P: do not import modules from the current directory.
    command = [sys.executable, "-P", "-c", program]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_LIMIT_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise EndpointFailed(f"{title} did not end within {ANSWER_LIMIT_S:g} s") from None
    if done.returncode:
        raise EndpointFailed(f"{title} failed:\n{done.stderr[-2000:].strip()}")
    return done.stdout


def free_port() -> int:
    """Returns a TCP port of 127.0.0.1 that is free now. Another program may take it before it is used.

    Raises `OSError` if there is none.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
