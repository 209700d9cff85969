"""The interface of a system that the benchmark measures: a server, a caller in another process, calls between them.

A system with references to remote objects has a third end as well, with which the caller shares references. If a system
starts its processes by itself (`spawns`), only its caller is started by the benchmark.

A system only knows how to start its ends. Processes, clocks and statistics are elsewhere.

Rules
- `serve`, `connect` and `join` return once the end is up, or raise. None waits longer than `START_LIMIT_S` seconds.
- Third-party packages are imported inside the functions that need them, so that all systems can be listed even if only
  some of them are installed.
- A function that is called remotely is a module-level function of its system's module, so that all processes import it
  by the same name.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

START_LIMIT_S: Final = 60.0
"""How many seconds starting one end may take. Importing torch on a busy machine takes many of them."""
SPAWN_LIMIT_S: Final = 150.0
"""How many seconds a system may take to start a whole cluster by itself."""
GROUP_LIMIT_S: Final = 180.0
"""How many seconds starting a group of many workers may take."""
LEAVE_LIMIT_S: Final = 10.0
"""How many seconds leaving a group of two or three may take."""
OWNER: Final = "server"
"""The name of the server, in systems that have names. The values of references live there."""
CALLER: Final = "client"
"""The name of the caller, in systems that have names."""
THIRD: Final = "third"
"""The name of the third end, in systems that have names."""

IN_FLIGHT: Final = "in flight"
FETCHED: Final = "fetched"
SHARED: Final = "shared"
"""`IN_FLIGHT`, `FETCHED` and `SHARED` are measurements that some systems cannot do: the keys of `System.cannot`."""
THREADS: Final = "threads"
STREAMING: Final = "streaming"
"""`THREADS` and `STREAMING` are measured only for systems whose `threads` is True."""
EXCHANGED: Final = "exchanged"
"""Measured only for systems whose `exchanges` is True."""

T = TypeVar("T")


@dataclass(frozen=True)
class Address:
    """Where the processes of one measurement find each other. A system uses the part that suits it. Nothing is checked.

    Attributes:
        port: A port that was free a moment ago.
        socket_path: A path for a Unix socket, where no file exists yet.
        ends: How many processes there are: 2, or 3 with a third one to share references with; more in a group of many
            workers.
        host: The address at which the server listens.
    """

    port: int
    """A port that was free a moment ago."""
    socket_path: str
    """A path for a Unix socket, where no file exists yet."""
    ends: int = 2
    """How many processes there are: 2, or 3 with a third one to share references with; more in a group of many workers.
    """
    host: str = "127.0.0.1"
    """The address at which the server listens."""

    @property
    def directory(self) -> str:
        """The directory of `socket_path`, for files of the measurement. It is removed at the end of the measurement."""
        return str(Path(self.socket_path).parent)


class Server(Protocol):
    """A process of a measurement that is called: it runs the no-op, or uses the references that are shared with it.

    `System.serve` and `System.join` return one. A type for annotations: any object with the method `close` is one.
    """

    def close(self) -> None:
        """Stops serving, in bounded time. Called once. Raises what the measured library raises if that fails."""


class Caller(Protocol):
    """The process of a measurement that makes the calls. `System.connect` returns one.

    Every method raises what the measured library raises if a call fails. The no-op is a remote function without
    arguments that does nothing.
    """

    def noop(self) -> None:
        """Calls the no-op, a remote function that does nothing, and waits for its reply.

        Raises what the measured library raises.
        """

    def pipelined(self, calls: int) -> None:
        """Starts `calls` no-op calls without waiting in between, then waits for all of them; 0 does nothing.

        Raises `NotImplementedError` for a system whose `pipelines` is False, and what the measured library raises if a
        call fails.
        """

    def close(self) -> None:
        """Disconnects, in bounded time. Called once. Raises what the measured library raises if that fails."""


@runtime_checkable
class ReferenceCaller(Caller, Protocol):
    """The caller of a system that has remote references (`refers` is True): it can make, use and share references.

    Every method raises what the measured library raises if a call fails.
    """

    def remote_to_here(self) -> None:
        """Makes the server create a small value, gets a reference to it, fetches the value, and drops the reference.

        Raises what the measured library raises if a call fails.
        """

    def proxy_call(self) -> None:
        """Calls a no-op method of an object on the server through a reference, which is the same each time.

        Raises what the measured library raises if the call fails.
        """

    def pass_back(self) -> None:
        """Creates a reference to a value on the server, passes it back to the server, and drops the reference.

        The server fetches the value of the reference that it gets, which must be the original value.

        Raises `RuntimeError` if the server got a wrong value, and what the measured library raises if a call fails.
        """

    def share(self, references: int) -> None:
        """Creates references on the server, each of which a third process uses once; waits until all were used.

        Args:
            references: How many; 0 does nothing.

        Raises:
            RuntimeError: The third process got a wrong value.
            Exception: What the measured library raises if a call fails, for example because there is no third process.
        """


@runtime_checkable
class EchoCaller(Caller, Protocol):
    """The caller of a system that can send payloads to the server and back. `farcall bench` needs such a caller.

    Every method raises what the measured library raises if a call fails.
    """

    def payload(self, size: int) -> Any:
        """Returns a new payload of `size` bytes, which may be 0, in the type that users of the system would send."""

    def echo(self, payload: Any) -> Any:
        """Sends the payload to the server, waits, and returns what the server sends back: the same bytes.

        Raises what the measured library raises if the call fails.
        """

    def in_flight(self, calls: int, window: int) -> None:
        """Makes `calls` no-op calls with `window` of them always in flight, and waits until all are answered.

        0 calls do nothing. Raises `NotImplementedError` for a system that cannot have several in flight, and what the
        measured library raises if a call fails.
        """


@runtime_checkable
class StreamingCaller(EchoCaller, Protocol):
    """The caller of a system that several threads can call at once (`threads` is True), and that can send payloads."""

    def send(self, payload: Any) -> None:
        """Sends the payload to the server, and returns when the server has received it. The reply is empty.

        Raises what the measured library raises if the call fails.
        """


@runtime_checkable
class ExchangingCaller(EchoCaller, Protocol):
    """The caller of a system whose server can answer a payload with another payload (`exchanges` is True)."""

    def exchange(self, payload: Any) -> Any:
        """Sends the payload to the server, waits, and returns the server's answer: another payload of the same size.

        Raises what the measured library raises if the call fails.
        """


@runtime_checkable
class AwaitingCaller(Protocol):
    """A caller whose users write coroutines. It is measured inside its event loop.

    Every method raises what the measured library raises if a call fails.
    """

    async def await_noop(self) -> None:
        """Calls the no-op, a remote function that does nothing, and waits for its reply, as a coroutine.

        Raises what the measured library raises if the call fails.
        """

    async def await_echo(self, payload: Any) -> Any:
        """Sends the payload to the server and returns what comes back, the same bytes, as a coroutine.

        Raises what the measured library raises if the call fails.
        """

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the caller's event loop, and returns its result. Raises what the coroutine raises."""


class Workers(Protocol):
    """A group of workers, as seen by the process that has started them or by one of them.

    `System.spawn` and `System.member` return one.
    """

    def call_all(self) -> None:
        """Calls a no-op on each worker except this process, all at the same time, and waits for all replies.

        Raises what the measured library raises if a call fails.
        """

    def close(self) -> None:
        """Ends the group, or leaves it, in bounded time. Called once.

        Raises what the measured library raises if that fails.
        """


def keep_in_flight(count: int, window: int, start: Callable[[], Any], finish: Callable[[Any], object]) -> None:
    """Starts `count` operations, with at most `window` in flight at a time, and finishes all of them, the oldest first.

    Args:
        count: How many operations to run; 0 does nothing.
        window: How many may be in flight; at least 1; 0 raises `IndexError`.
        start: Starts an operation and returns its handle: whatever `finish` needs.
        finish: Waits for the operation with this handle.

    Raises:
        Exception: What `start` or `finish` raises. Operations that are in flight then are not finished.
    """
    under_way: deque[Any] = deque()
    for _ in range(count):
        if len(under_way) == window:
            finish(under_way.popleft())
        under_way.append(start())
    while under_way:
        finish(under_way.popleft())


class FutureCalls(ABC):
    """Implements `in_flight` and `pipelined` for callers whose system returns a future for each call.

    A subclass implements `start`, which starts a no-op call, and `finish`, which waits for it.
    """

    @abstractmethod
    def start(self) -> Any:
        """Starts a no-op call, and returns its future, or anything else that `finish` takes. Does not wait.

        Raises what the measured library raises if it cannot be sent.
        """

    @abstractmethod
    def finish(self, future: Any) -> None:
        """Waits for the reply to the call whose future `start` returned.

        Raises what the measured library raises if the call failed.
        """

    def in_flight(self, calls: int, window: int) -> None:
        """Makes `calls` no-op calls with `window` of them always in flight, and waits for all. 0 calls do nothing.

        `window` is at least 1. Raises what the measured library raises if a call fails.
        """
        keep_in_flight(calls, window, self.start, self.finish)

    def pipelined(self, calls: int) -> None:
        """Starts `calls` no-op calls without waiting in between, then waits for all of them. 0 does nothing.

        Raises what the measured library raises if a call fails.
        """
        self.in_flight(calls, calls)


class System(ABC):
    """A system that is measured, farcall or another library: one row of the tables. The base class of all of them.

    A measurement has a server, a caller that calls it, and sometimes a third process, with which references are shared.
    These processes are the *ends*. A subclass sets at least `name` and `label`. It implements `connect`, and `serve` or
    `spawn`. Nothing is checked.

    Attributes:
        name: Its name on the command line and in the JSON: `family` or `family-variant`.
        label: Its name in the tables.
        package: The package that must be importable; None if there is none.
        pipelines: True if many calls can be in flight at once.
        refers: True if it has references to remote objects. Its caller is a `ReferenceCaller` then.
        starts_together: True if the ends wait for each other at their start, so that the server is not up before the
            caller. If False, the caller is started once the server listens.
        spawns: True if the caller makes the system start its other ends.
        start_limit: How many seconds a caller, and the ends that it starts, may take to start.
        cannot: The measurements that it cannot do, of `IN_FLIGHT`, `FETCHED` and `SHARED`, each with the reason in one
            line. Empty if it can do all.
        threads: True if several threads may use its caller at once. The caller is a `StreamingCaller` then.
        exchanges: True if its caller is an `ExchangingCaller`, whose server answers a payload with another one.
        distribution: The name of the package for `pip`, if it differs from `package`; otherwise None.
        usage: How the system is used here, in a few words.
        environment: Environment variables of its processes, besides those of the benchmark itself.
    """

    name: str
    label: str
    package: str | None = None
    pipelines: bool = True
    refers: bool = False
    starts_together: bool = False
    spawns: bool = False
    start_limit: float = START_LIMIT_S
    cannot: Mapping[str, str] = MappingProxyType({})
    threads: bool = False
    exchanges: bool = False
    distribution: str | None = None
    usage: str = ""
    environment: Mapping[str, str] = MappingProxyType({})

    @property
    def family(self) -> str:
        """The part of the name before the first hyphen, which all variants share: `farcall` for `farcall-tcp`."""
        return self.name.partition("-")[0]

    def why_not_tried(self, what: str) -> str | None:
        """Returns why one measurement is not made for this system, in one line; None if it is made.

        `what` is the measurement: `THREADS`, `STREAMING` or `EXCHANGED`. Any other text gives None.
        """
        if what == EXCHANGED:
            return None if self.exchanges else "only the echo is measured for it"
        if self.threads or what not in (THREADS, STREAMING):
            return None
        return "its caller is used by one thread only"

    def serve(self, address: Address) -> Server:
        """Starts the server in this process, and returns it once it can be called.

        Waits at most `START_LIMIT_S` seconds. Raises `NotImplementedError` for a system whose `spawns` is True, because
        its caller starts the server, and what the measured library raises if it cannot start.
        """
        raise NotImplementedError(f"{self.label} starts its serving ends by itself")

    @property
    def is_installed(self) -> bool:
        """True if the package that the system needs can be found, or it needs none. Nothing is imported."""
        return self.package is None or importlib.util.find_spec(self.package) is not None

    def load(self) -> None:
        """Imports the package that the system needs; does nothing if it needs none.

        Raises `ImportError` if it is not installed.
        """
        if self.package is not None:
            importlib.import_module(self.package)

    @abstractmethod
    def connect(self, address: Address) -> Caller:
        """Starts the caller in this process, connects it to the server at `address`, and returns it.

        Waits at most `start_limit` seconds. Raises what the measured library raises if it cannot connect.
        """

    def join(self, address: Address) -> Server:
        """Makes this process the third one of a measurement, with which references are shared.

        Returns the object that ends this role by its `close`.

        Raises `NotImplementedError` for a system whose `refers` is False, and what the measured library raises if it
        cannot start.
        """
        raise NotImplementedError(f"{self.label} has no references to share with a third end")

    def spawn(self, workers: int, address: Address) -> Workers:
        """Makes the system start `workers` workers, at least 1, and returns them.

        `address` says which port and directory they may use. Raises `NotImplementedError` if `spawns` is False, and
        what the system raises if they do not start.
        """
        raise NotImplementedError(f"{self.label} does not start workers by itself")

    def member(self, rank: int, address: Address) -> Workers:
        """Joins a group of `address.ends` workers as worker `rank`, and returns the group when it is complete.

        Raises `NotImplementedError` if `starts_together` is False, and what the measured library raises if the group
        does not form.
        """
        raise NotImplementedError(f"{self.label} does not form groups")
