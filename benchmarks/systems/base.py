"""What the bench asks of a system: a server in one process, a caller in another, a no-op between them.

A system with references to remote objects has a third end as well, with which the caller shares them.

Not here: processes, clocks, statistics. A system only knows how to start each of its ends.

Rules
- `serve`, `connect` and `join` return once the end is up, or raise. None waits for longer than `START_LIMIT` seconds.
- Third-party packages are imported inside the functions that need them, so that the list of all systems can be had
  where only some of them are installed.
- A callee is a module-level function of its system's module: all processes import it by the same name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

START_LIMIT: Final = 60.0
"""Seconds that starting one end may take. Importing torch on a busy machine takes many of them."""
OWNER: Final = "server"
"""The name of the serving end, where a system has names: what is referred to lives there."""
CALLER: Final = "client"
THIRD: Final = "third"


@dataclass(frozen=True)
class Address:
    """Where the ends of one run meet. A system uses the part that suits it."""

    port: int
    """A port of the loopback interface that was free a moment ago."""
    socket_path: str
    """A path for a Unix socket; nothing is there yet."""
    ends: int = 2
    """How many there are: 3 with the third one."""


class Server(Protocol):
    """An end that is called: it runs the no-op, or uses what is shared with it."""

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


@runtime_checkable
class ReferenceCaller(Caller, Protocol):
    """The calling end of a system whose `refers` is True."""

    def remote_to_here(self) -> None:
        """Have the server make a small value, get a reference to it, and fetch the value."""

    def proxy_call(self) -> None:
        """Call a no-op method of an object on the server through a reference, the same one each time."""

    def share(self, references: int) -> None:
        """Have so many made on the server, each used once by the third end and dropped; returns when all are used.

        Needs a third end. Raises RuntimeError if that got a wrong value.
        """


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
    refers: bool = False
    """Whether it has references to remote objects; its caller then is a `ReferenceCaller`."""
    in_summary: bool = True
    """Whether it has a row in the short table of the repository's README."""
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

    def join(self, address: Address) -> Server:
        """Start the third end in this process. Raises NotImplementedError for a system whose `refers` is False."""
        raise NotImplementedError(f"{self.label} has no references to share with a third end")
