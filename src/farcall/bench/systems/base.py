"""What the bench asks of a system: a server in one process, a caller in another, calls between them.

A system with references to remote objects has a third end as well, with which the caller shares them. A system that
starts its processes by itself (`spawns`) has only its caller started, which has it start the others.

Not here: processes, clocks, statistics. A system only knows how to start each of its ends.

Rules
- `serve`, `connect` and `join` return once the end is up, or raise. None waits for longer than `START_LIMIT` seconds.
- Third-party packages are imported inside the functions that need them, so that the list of all systems can be had
  where only some of them are installed.
- A callee is a module-level function of its system's module: all processes import it by the same name.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

START_LIMIT: Final = 60.0
"""Seconds that starting one end may take. Importing torch on a busy machine takes many of them."""
SPAWN_LIMIT: Final = 150.0
"""The same for a whole cluster that a system starts by itself."""
GROUP_LIMIT: Final = 180.0
"""The same for a group of many workers, each of which takes its time."""
LEAVE_LIMIT: Final = 10.0
"""Seconds that leaving a group of two or three may take."""
OWNER: Final = "server"
"""The name of the serving end, where a system has names: what is referred to lives there."""
CALLER: Final = "client"
THIRD: Final = "third"

IN_FLIGHT: Final = "in flight"
FETCHED: Final = "fetched"
SHARED: Final = "shared"
"""What some systems cannot do: the keys of `System.cannot`."""
THREADS: Final = "threads"
STREAMING: Final = "streaming"
"""What is tried only of systems whose `threads` is True."""
EXCHANGED: Final = "exchanged"
"""What is tried only of systems whose `exchanges` is True."""

T = TypeVar("T")


@dataclass(frozen=True)
class Address:
    """Where the ends of one run meet. A system uses the part that suits it."""

    port: int
    """A port of the loopback interface that was free a moment ago."""
    socket_path: str
    """A path for a Unix socket; nothing is there yet."""
    ends: int = 2
    """How many there are: 3 with the third one."""

    @property
    def directory(self) -> str:
        """A directory for files of the run; it goes with it."""
        return str(Path(self.socket_path).parent)


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


@runtime_checkable
class EchoCaller(Caller, Protocol):
    """The calling end of a system that `farcall bench` compares."""

    def payload(self, size: int) -> Any:
        """So many bytes, as users of the system would send them."""

    def echo(self, payload: Any) -> Any:
        """Send it there and have it back."""

    def in_flight(self, calls: int, window: int) -> None:
        """Make so many no-op calls, always `window` of them under way; returns when all have been answered.

        Raises NotImplementedError for a system that cannot.
        """


@runtime_checkable
class StreamingCaller(EchoCaller, Protocol):
    """The calling end of a system whose `threads` is True."""

    def send(self, payload: Any) -> None:
        """Send it there; returns when it has been taken. Nothing comes back."""


@runtime_checkable
class ExchangingCaller(EchoCaller, Protocol):
    """The calling end of a system whose `exchanges` is True."""

    def exchange(self, payload: Any) -> Any:
        """Send it there and have another one of the same size back, which the other side keeps."""


@runtime_checkable
class AwaitingCaller(Protocol):
    """A calling end whose users write coroutines: it is measured inside its event loop."""

    async def await_noop(self) -> None:
        """`noop`, awaited."""

    async def await_echo(self, payload: Any) -> Any:
        """`echo`, awaited."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it in the event loop; its result."""


class Workers(Protocol):
    """A group of workers: for who has started them, or for one of them."""

    def call_all(self) -> None:
        """Call a no-op on each of the others, all at once, and wait for all replies."""

    def close(self) -> None:
        """End the group, or leave it; returns in bounded time."""


def keep_under_way(count: int, window: int, start: Callable[[], Any], finish: Callable[[Any], object]) -> None:
    """Start and finish so many, with `window` of them under way at a time; the oldest is always finished first."""
    under_way: deque[Any] = deque()
    for _ in range(count):
        if len(under_way) == window:
            finish(under_way.popleft())
        under_way.append(start())
    while under_way:
        finish(under_way.popleft())


class FutureCalls(ABC):
    """`in_flight` and `pipelined` of a caller whose system gives a future for each call."""

    @abstractmethod
    def start(self) -> Any:
        """Begin a no-op call; its future."""

    @abstractmethod
    def finish(self, future: Any) -> None:
        """Wait for its reply."""

    def in_flight(self, calls: int, window: int) -> None:
        keep_under_way(calls, window, self.start, self.finish)

    def pipelined(self, calls: int) -> None:
        self.in_flight(calls, calls)


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
    spawns: bool = False
    """Whether the caller has the system start its other ends."""
    start_limit: float = START_LIMIT
    """Seconds that a caller, with what it spawns, has to come up."""
    cannot: Mapping[str, str] = MappingProxyType({})
    """What it cannot do of `IN_FLIGHT`, `FETCHED` and `SHARED`, and why."""
    threads: bool = False
    """Whether many threads may use its caller at once, which then is a `StreamingCaller`."""
    exchanges: bool = False
    """Whether its caller is an `ExchangingCaller`."""
    distribution: str | None = None
    """What `pip` calls the package, if not by its own name."""
    usage: str = ""
    """How it is used here, in a few words."""

    @property
    def family(self) -> str:
        """The part of the name that all its variants share: `farcall` for `farcall-tcp`."""
        return self.name.partition("-")[0]

    def untried(self, what: str) -> str | None:
        """Why `THREADS`, `STREAMING` or `EXCHANGED` is not tried of it; None for anything that is."""
        if what == EXCHANGED:
            return None if self.exchanges else "only the echo is tried of it"
        if self.threads or what not in (THREADS, STREAMING):
            return None
        return "its caller is used by one thread here"

    def serve(self, address: Address) -> Server:
        """Start the serving end in this process. Raises NotImplementedError for a system that `spawns`."""
        raise NotImplementedError(f"{self.label} starts its serving ends by itself")

    def load(self) -> None:
        """Import the package. Raises ImportError."""
        if self.package is not None:
            importlib.import_module(self.package)

    @abstractmethod
    def connect(self, address: Address) -> Caller:
        """Start the calling end in this process."""

    def join(self, address: Address) -> Server:
        """Start the third end in this process. Raises NotImplementedError for a system whose `refers` is False."""
        raise NotImplementedError(f"{self.label} has no references to share with a third end")

    def spawn(self, workers: int, address: Address) -> Workers:
        """Have the system start so many workers. Raises NotImplementedError unless it `spawns`."""
        raise NotImplementedError(f"{self.label} does not start workers by itself")

    def member(self, rank: int, address: Address) -> Workers:
        """Become one of `address.ends` workers of a group. Raises NotImplementedError unless it `starts_together`."""
        raise NotImplementedError(f"{self.label} forms no groups")
