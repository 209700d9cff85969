"""The bench's hold on the processes it starts: each is started, asked and ended here, and by nobody else.

Rules
- Every wait has a limit. A process that does not answer within it is an `EndpointFailed`.
- `Endpoints` is a context manager: when its block ends, by an error or Ctrl-C too, so have all its processes.
- Each process is a session of its own, so that Ctrl-C reaches the bench alone, which then ends the others in order.
  Should the bench be killed outright, its pipes break and they end by themselves.
- Some systems start processes of their own, and those start others, in sessions of their own. All of them inherit a
  mark in their environment, unique to one set of endpoints; whatever still bears it at the end is killed, and what has
  been started by it: a process that gives itself another title writes over its environment.
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

from farcall.bench.systems.base import START_LIMIT, Address, System

ANSWER_LIMIT: Final = 120.0
"""Seconds for one measurement."""
STOP_LIMIT: Final = 15.0
"""Seconds for an orderly end; then the process is killed."""
_PROGRAM: Final = Path(__file__).with_name("bootstrap.py")
MARK: Final = "FARCALL_BENCH_MARK"
"""The variable of the environment by which what the bench has started is known again."""
_SWEEP_LIMIT: Final = 5.0
"""Seconds in which killed processes must be gone."""
_TRACKER_LIMIT: Final = 2.0
"""Of them, what those have that clear away after the others."""


class EndpointFailed(Exception):
    """A process of the bench failed, died or did not answer. `reason` says so in one line."""

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason or message.partition("\n")[0]


class Endpoint:
    """One process. Made by `Endpoints.start`."""

    def __init__(self, title: str, role: dict[str, Any], log: Path, environment: dict[str, str]) -> None:
        self.title = title
        self._log = log
        self._control, theirs = Pipe()
        with theirs, log.open("wb") as errors:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                # -P: nothing that happens to lie beside the program is imported.
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
        return self._process.pid

    def tell(self, command: str, **options: object) -> None:
        """Give a command; its answer is had with `hear`. Raises EndpointFailed if the process is gone."""
        try:
            self._control.send((command, options))
        except OSError:
            raise self._failure("is gone") from None

    def hear(self, limit: float = ANSWER_LIMIT) -> Any:
        """The answer to the oldest unanswered command. Raises EndpointFailed if none comes within `limit` seconds."""
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
        """`tell` and `hear`."""
        self.tell(command, **options)
        return self.hear()

    def wait(self, limit: float) -> None:
        """Wait for the end of the process, at most `limit` seconds."""
        try:
            self._process.wait(limit)
        except subprocess.TimeoutExpired:
            pass

    def kill(self) -> None:
        """End the process if it has not ended yet. It is gone afterwards."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._control.close()

    def _failure(self, what: str, reason: str | None = None) -> EndpointFailed:
        tail = self._log.read_text(errors="replace")[-2000:].strip()
        message = f"{self.title} (pid {self.pid}) {what}" + (f"\nits output:\n{tail}" if tail else "")
        return EndpointFailed(message, reason or f"{self.title} {what}")


class Endpoints:
    """The processes of one measurement, and the directory for their sockets and output."""

    def __init__(self) -> None:
        self._all: list[Endpoint] = []
        self._places = 0
        self._told = False
        # What systems leave there while they are being killed need not be complained of.
        self._directory = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        # Endpoints of an endpoint bear the mark of the bench, which sweeps for them all.
        self._inherited = os.environ.get(MARK)
        self._mark = self._inherited or secrets.token_hex(16)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._stop()
        finally:
            for endpoint in self._all:
                endpoint.kill()
            if self._inherited is None:
                sweep(self._mark)
            self._directory.cleanup()

    def _stop(self) -> None:
        deadline = time.monotonic() + STOP_LIMIT
        self.tell_to_stop()
        for endpoint in self._all:
            endpoint.hear(max(0.0, deadline - time.monotonic()))
        for endpoint in self._all:
            endpoint.wait(max(0.0, deadline - time.monotonic()))

    def tell_to_stop(self) -> None:
        """Tell all to stop, once: all before any is waited for, as the members of a group leave together.

        Raises EndpointFailed if one is gone.
        """
        for endpoint in () if self._told else self._all:
            endpoint.tell("stop")
        self._told = True

    def address(self, ends: int) -> Address:
        """A fresh place for so many ends to meet."""
        self._places += 1
        return Address(free_port(), str(Path(self._directory.name, f"{self._places}.sock")), ends)

    def start(self, title: str, **role: object) -> Endpoint:
        """Start a process with this role. It is up once `hear(START_LIMIT)` has returned."""
        environment = {**os.environ, MARK: self._mark, "TMPDIR": self._directory.name}
        endpoint = Endpoint(title, role, Path(self._directory.name, f"{len(self._all)}.log"), environment)
        self._all.append(endpoint)
        return endpoint

    def wait_until_up(self, *endpoints: Endpoint, limit: float = START_LIMIT) -> None:
        """Wait until all of them have taken up their role. Raises EndpointFailed."""
        for endpoint in endpoints:
            endpoint.hear(limit)


def start_ends(endpoints: Endpoints, system: System, third: bool = False) -> tuple[Endpoint, ...]:
    """Start the ends of a system: its server, its caller and, if asked for, its third. Raises EndpointFailed.

    The server and the caller are returned; of a system that starts its server by itself, the caller alone.
    """
    address = endpoints.address(3 if third else 2)
    if system.spawns:
        caller = endpoints.start(f"the caller of {system.label}", kind="caller", system=system.name, address=address)
        endpoints.wait_until_up(caller, limit=system.start_limit)
        return (caller,)
    server = endpoints.start(f"the server of {system.label}", kind="server", system=system.name, address=address)
    if not system.starts_together:
        endpoints.wait_until_up(server)
    caller = endpoints.start(f"the caller of {system.label}", kind="caller", system=system.name, address=address)
    others = []
    if third:
        others.append(
            endpoints.start(f"the third of {system.label}", kind="third", system=system.name, address=address)
        )
    if system.starts_together:
        others.append(server)
    # The caller first: if it fails, the others would only report that they waited for it in vain.
    endpoints.wait_until_up(caller, *others)
    return server, caller


def sweep(mark: str) -> None:
    """Kill all processes that bear the mark, except this one, and wait until they are gone, for some seconds.

    The trackers by which `multiprocessing` clears semaphores and shared memory away do so when all others have gone,
    and get the time for it.
    """
    began = time.monotonic()
    while (found := marked(mark)) and (waited := time.monotonic() - began) < _SWEEP_LIMIT:
        # The youngest first, which have the higher numbers as a rule: one whose parent is gone may not be known again.
        for pid in reversed(found):
            if waited > _TRACKER_LIMIT or not _is_tracker(pid):
                _kill(pid, mark)
        time.sleep(0.02)  # nothing tells of the end of processes that are not our children


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def marked(mark: str) -> list[int]:
    """The processes that bear the mark, and all that those have started, except this one."""
    parents = {int(entry): _parent(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    found = {pid for pid in parents if pid != os.getpid() and _bears(pid, mark)}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})


def _bears(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended, or is another user's


def _parent(pid: int) -> int:
    """0 for one that has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return 0
    return 0 if state in "ZX" else int(parent)


def _kill(pid: int, mark: str) -> None:
    # The descriptor names the process itself: if its number has become another's meanwhile, that one is let be.
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if pid in marked(mark):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within it, SIGTERM and Ctrl-C end the program in order, with status 143 and 130: no process is left behind."""

    def end(number: int, _: object) -> NoReturn:
        # As an exception it leaves every `with` behind it in order, and with it the processes that were started.
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def run_python(title: str, program: str, environment: dict[str, str]) -> str:
    """What a fresh interpreter prints for a program. Raises EndpointFailed if it fails or takes too long."""
    # -P: nothing that happens to lie in the current directory is imported.
    command = [sys.executable, "-P", "-c", program]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_LIMIT,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise EndpointFailed(f"{title} did not end within {ANSWER_LIMIT:g} s") from None
    if done.returncode:
        raise EndpointFailed(f"{title} failed:\n{done.stderr[-2000:].strip()}")
    return done.stdout


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
