"""`RpcAgent`: what an agent must do, so that `rpc_sync` and its like work over it. farcall's own is `farcall.agent`.

An agent is one worker of a group. A backend's `init_backend_handler` makes it, with the group complete as far as the
backend wants it to be; `init_rpc` then makes it the agent of the process and calls `start`.

Rules
- Any thread may call any method at any time, functions that the agent runs for others too.
- Every wait ends: by its timeout, or because it is known that what is waited for cannot come.
- Errors are those of `farcall.errors`; what a user's function raises arrives with its own type.
- Five methods must be written. The others do the least that is right, and can be left as they are.
- What is the same for every agent is done here: `call` checks what it is given, finds the worker and sees to the
  timeout, and `run_on` gets what is left to do. An agent that can do better overrides `call`, as farcall's own does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from time import monotonic
from typing import Any, NamedTuple, TypedDict

from farcall.backends.expiry import Expiry
from farcall.backends.given import bad_arguments, bad_callee, check_timeout, checked_function
from farcall.backends.references import Book, Handle, NoReferences
from farcall.errors import BackendError, ForkedProcessError, RpcError, RpcTimeoutError
from farcall.futures import Future
from farcall.options import DEFAULT_RPC_TIMEOUT, UNSET_RPC_TIMEOUT
from farcall.protocol.ids import WorkerInfo

To = str | int | WorkerInfo
"""A worker's name, its rank, or what `get_worker_info` gave for it."""


class PeerMetrics(TypedDict):
    """What an agent has counted between this worker and another, since the agent started."""

    calls_made: int
    """Calls to it, those on references among them; not what `remote` asks, which nobody waits for."""
    calls_failed: int
    """Of those, the ones that ended with an error, whatever it was: raised there, time over, worker lost."""
    calls_pending: int
    """Of those, the ones that have not ended yet."""
    calls_served: int
    """Calls of it that came here, by the same rule."""
    bytes_out: int
    """Sent to it, on all connections."""
    bytes_in: int
    """Received from it, on all connections."""
    bytes_waiting: int
    """To be sent to it as soon as its connection takes them."""
    resends: int
    """Messages about references that were sent to it again after a connection broke."""
    heartbeat_age: float
    """Seconds since a sign of life came from it, for those that this worker watches; else 0. In sum it says nothing."""


class Metrics(PeerMetrics):
    """The same in sum over all workers, and what this worker is busy with now."""

    queue_length: int
    """Functions that others have called and that wait for a thread."""
    threads: int
    """Threads that serve."""
    threads_running: int
    """Of those, the ones that run a function now."""
    threads_waiting: int
    """Of those, the ones whose function waits for a call of its own."""
    threads_idle: int
    """Of those, the ones that sleep, with nothing to do."""
    peers: dict[str, PeerMetrics]
    """For each worker, by its name; this one is among them, as it may call itself."""


class MembershipChange(NamedTuple):
    """Somebody has joined the group, has left it, or was lost."""

    kind: str
    """`joined`, `left` (it said good-bye) or `lost` (it died, or was taken for dead)."""
    worker: WorkerInfo


class RpcAgent(ABC):
    """One worker of a group, as `farcall`'s functions see it."""

    rpc_timeout: float = DEFAULT_RPC_TIMEOUT
    """Seconds that a call may take unless it says otherwise; 0 is without end. May be set at any time.

    `init_rpc` sets it to what the options say when the agent is made.
    """

    book: Book = NoReferences()
    """This worker's references. By default there are none, and whoever wants one hears so."""

    closed: RpcError | None = None
    """What every use raises from now on, if anything."""

    _abandoned = False

    # What must be written

    @abstractmethod
    def run_on(
        self,
        worker: WorkerInfo,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float,
    ) -> Future[Any]:
        """Has a worker run the function; a future of its outcome, at once.

        The worker is what `get_worker_info` gave. `timeout` is in seconds and 0 without end: the other side may want
        to know; nothing has to be done about it here. The future fails with what the function raised, or with
        `WorkerLost`; what is wrong with the call itself is raised here, such as `SerializationError`.
        """

    @abstractmethod
    def get_worker_info(self, to: To | None = None) -> WorkerInfo:
        """Of the worker of that name or rank, or equal to that; of this one by default.

        Raises `UnknownWorkerError` for any other: nothing else looks whether there is such a worker.
        """

    @abstractmethod
    def get_worker_infos(self) -> list[WorkerInfo]:
        """All workers of the group, by rank. Raises nothing."""

    @abstractmethod
    def join(self, shutdown: bool = False, timeout: float = 0.0) -> None:
        """Returns when all workers have called it and no call is under way anywhere. The agent goes on serving.

        `shutdown` says that this worker is about to leave, so that connections that end from now on are no loss.
        Raises `ShutdownError` after `timeout` seconds (0: without limit), saying who or what was missing.
        """

    @abstractmethod
    def shutdown(self, graceful: bool = False, timeout: float = 0.0) -> None:
        """Leaves the group and frees everything, in any case. A second time it does nothing.

        Graceful: after a `join`, whose `ShutdownError` is raised when everything is freed.
        """

    # What may be left as it is

    @cached_property
    def info(self) -> WorkerInfo:
        """Who this worker is, and stays: what `get_worker_info()` gives. An agent may also set it."""
        return self.get_worker_info()

    def call(
        self,
        to: To,
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float,
        unattended: bool = False,
    ) -> Future[Any]:
        """Has a worker run the function; a future of its outcome, at once. `rpc_sync` and `rpc_async` come to this.

        `timeout` is in seconds; 0 is without end, `UNSET_RPC_TIMEOUT` means `rpc_timeout`. `unattended` says that the
        caller is not going to wait for the future at once: of use to agents whose replies are read by whoever waits
        for them. The future fails with what the function raised, with `RpcTimeoutError` or with `WorkerLost`. What is
        wrong with the call itself is raised here: `UnknownWorkerError`, `SerializationError`, `UsageError`; and what
        `closed` says. `BackendError` if `run_on` gives no future.
        """
        if self.closed is not None:
            raise self.closed
        if not isinstance(to, str | int | WorkerInfo):
            raise bad_callee(to)
        worker = self.get_worker_info(to)
        checked_function(function)
        if args is not None and not isinstance(args, tuple | list):
            raise bad_arguments(args)
        if timeout == UNSET_RPC_TIMEOUT:
            timeout = self.rpc_timeout
        else:
            check_timeout(timeout)
        began = monotonic()
        future = self.run_on(worker, function, tuple(args or ()), dict(kwargs or {}), timeout)
        if not isinstance(future, Future):
            raise BackendError(f"{type(self).__name__}.run_on must give a farcall.Future at once, not {future!r}")
        if not timeout or future.done():
            return future

        def new_error() -> RpcTimeoutError:
            name = getattr(function, "__qualname__", None) or repr(function)
            return RpcTimeoutError(
                f"worker {worker.name!r} did not answer `{name}` within {timeout:g} s; it may still be running there. "
                "Give the call a longer timeout, or 0 for none"
            )

        return self._expiry.limit(future, began + timeout, new_error)

    @cached_property
    def _expiry(self) -> Expiry:
        return Expiry()

    def start(self) -> None:  # noqa: B027 (an agent may serve from the beginning)
        """Begins to serve. Called once, when the functions that it runs can find it by `farcall`'s functions."""

    def sync(self, timeout: float = 0.0) -> None:
        """Returns when all workers have called it. Raises `ShutdownError` after `timeout` seconds (0: no limit)."""
        self.join(timeout=timeout)

    def remote(
        self, to: To, function: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
    ) -> Handle:
        """Has a worker run the function and keep the result; a handle of it, at once. Raises as `call`.

        Raises `UsageError` if the backend has no references.
        """
        return self.book.own(None)  # refused

    def watch_members(self, watcher: Callable[[MembershipChange], object]) -> None:  # noqa: B027
        """Has the watcher called with every change of the group from now on, one after the other.

        What it raises is logged. Raises nothing itself. In a group that never changes there is nothing to do.
        """

    def unwatch_members(self, watcher: Callable[[MembershipChange], object]) -> None:  # noqa: B027
        """Takes back what `watch_members` was given. Raises nothing, also if that was nothing."""

    def get_metrics(self) -> Mapping[str, Any]:
        """What the agent has counted, by the names in `Metrics` as far as it counts. Raises nothing."""
        return {}

    def get_debug_info(self) -> dict[str, str]:
        """Numbers about the agent as texts, by names that begin with `agent.`, as torch gives them. Raises nothing."""
        return {
            f"agent.{name}": str(value)
            for name, value in self.get_metrics().items()
            if isinstance(value, int | float | str)
        }

    # A forked child of the process

    @property
    def is_forked(self) -> bool:
        """Whether this agent belongs to the parent of this process."""
        return self._abandoned

    def about_to_fork(self) -> None:  # noqa: B027 (most have nothing to do)
        """This process forks next. Takes no lock that another thread may hold for long."""

    def abandon(self) -> None:
        """In a forked child: lets go of what belongs to the parent, taking no lock and ending nothing there.

        Every use raises `ForkedProcessError` from then on.
        """
        self._abandoned = True
        self.closed = ForkedProcessError(
            f"this process was forked from worker {self.info.name!r} and cannot use its agent; "
            "call init_rpc with a name of its own in this process, or start it with the spawn method"
        )
