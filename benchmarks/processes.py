"""The bench's hold on the processes it starts: each is started, asked and ended here, and by nobody else.

Rules
- Every wait has a limit. A process that does not answer within it is an `EndpointFailed`.
- `Endpoints` is a context manager: when its block ends, by an error or Ctrl-C too, so have all its processes.
- Each process is a session of its own, so that Ctrl-C reaches the bench alone, which then ends the others in order.
  Should the bench be killed outright, its pipes break and they end by themselves.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from systems import START_LIMIT, Address

ANSWER_LIMIT: Final = 120.0
"""Seconds for one measurement."""
STOP_LIMIT: Final = 15.0
"""Seconds for an orderly end; then the process is killed."""
_PROGRAM: Final = Path(__file__).with_name("endpoint.py")


class EndpointFailed(Exception):
    """A process of the bench failed, died or did not answer."""


class Endpoint:
    """One process. Made by `Endpoints.start`."""

    def __init__(self, title: str, role: dict[str, Any], log: Path) -> None:
        self.title = title
        self._log = log
        self._control, theirs = Pipe()
        with theirs, log.open("wb") as errors:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, str(_PROGRAM), str(fd)],
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
            raise self._failure(f"failed:\n{result}")
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

    def _failure(self, what: str) -> EndpointFailed:
        tail = self._log.read_text(errors="replace")[-2000:].strip()
        return EndpointFailed(f"{self.title} (pid {self.pid}) {what}" + (f"\nits output:\n{tail}" if tail else ""))


class Endpoints:
    """The processes of one measurement, and the directory for their sockets and output."""

    def __init__(self) -> None:
        self._all: list[Endpoint] = []
        self._directory = tempfile.TemporaryDirectory(prefix="bench-")

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
            self._directory.cleanup()

    def _stop(self) -> None:
        # All are told before any is waited for: the members of a group leave together.
        deadline = time.monotonic() + STOP_LIMIT
        for endpoint in self._all:
            endpoint.tell("stop")
        for endpoint in self._all:
            endpoint.hear(max(0.0, deadline - time.monotonic()))
        for endpoint in self._all:
            endpoint.wait(max(0.0, deadline - time.monotonic()))

    def address(self, ends: int) -> Address:
        """A fresh place for so many ends to meet."""
        return Address(free_port(), str(Path(self._directory.name, f"{len(self._all)}.sock")), ends)

    def start(self, title: str, **role: object) -> Endpoint:
        """Start a process with this role. It is up once `hear(START_LIMIT)` has returned."""
        endpoint = Endpoint(title, role, Path(self._directory.name, f"{len(self._all)}.log"))
        self._all.append(endpoint)
        return endpoint

    def wait_until_up(self, *endpoints: Endpoint) -> None:
        """Wait until all of them have taken up their role. Raises EndpointFailed."""
        for endpoint in endpoints:
            endpoint.hear(START_LIMIT)


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
