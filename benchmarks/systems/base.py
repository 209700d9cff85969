"""What the bench asks of a system: a server in one process, a caller in another, a no-op between them.

Not here: processes, clocks, statistics. A system only knows how to start each of its two ends.

Rules
- `serve` and `connect` return once the end is up, or raise. Neither waits for longer than `START_LIMIT` seconds.
- Third-party packages are imported inside the functions that need them, so that the list of all systems can be had
  where only some of them are installed.
- A callee is a module-level function of its system's module: both processes import it by the same name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final, Protocol

START_LIMIT: Final = 60.0
"""Seconds that starting one end may take. Importing torch on a busy machine takes many of them."""


@dataclass(frozen=True)
class Address:
    """Where the two ends of one run meet. A system uses the part that suits it."""

    port: int
    """A port of the loopback interface that was free a moment ago."""
    socket_path: str
    """A path for a Unix socket; nothing is there yet."""


class Server(Protocol):
    """The end that runs the no-op."""

    def close(self) -> None:
        """Stop serving; returns in bounded time."""


class Caller(Protocol):
    """The end that calls. Every method raises what the system raises when a call fails."""

    def noop(self) -> None:
        """Call the no-op and wait for its reply."""

    def pipelined(self, calls: int) -> None:
        """Start `calls` no-ops without waiting in between, then wait for all of them.

        Raises NotImplementedError for a system whose `pipelines` is False.
        """

    def close(self) -> None:
        """Hang up; returns in bounded time."""


class System(ABC):
    """One row of the table."""

    name: str
    """What it is called on the command line and in the JSON: `family` or `family-variant`."""
    label: str
    """What it is called in the tables."""
    package: str | None = None
    """The importable package that it needs, if it needs one."""
    pipelines: bool = True
    """Whether many calls can be under way at once."""
    starts_together: bool = False
    """Whether each end waits for the other at its start (a rendezvous), so that the server is not up before the caller
    has come. Otherwise the caller is started once the server listens."""

    @property
    def family(self) -> str:
        """The part of the name that all its variants share: `farcall` for `farcall-tcp`."""
        return self.name.partition("-")[0]

    @abstractmethod
    def serve(self, address: Address) -> Server:
        """Start the serving end in this process."""

    @abstractmethod
    def connect(self, address: Address) -> Caller:
        """Start the calling end in this process."""
