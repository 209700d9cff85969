"""The interface of an agent: `RpcAgent`, and for references `ReferenceStore`, `Handle` and `ReferenceCalls`.

An agent is the part of a process that makes it a worker of a group: it sends calls to other workers and runs theirs.
A backend's `init_backend_handler` creates it, `init_rpc` makes it the agent of the process and calls `start`. farcall's
own agent is `farcall.runtime`. This module is what the agents of other backends implement, and what all agents share.

Rules
- Any thread may call any method at any time, including threads that run functions for other workers.
- Every wait ends: when its timeout expires, or when what it waits for has become impossible.
- Errors are those of `farcall.errors`. An exception of a user's function arrives with its own type.
- A subclass of `RpcAgent` must implement five methods. The other methods have defaults that are correct and minimal.
- `RpcAgent.call` checks the arguments, finds the worker and applies the timeout, and leaves the rest to `run_on`. A
  subclass can override `call` to be faster, as farcall's own agent does, but must refuse the same arguments with the
  same errors, before anything is sent.

Timeouts of `RpcAgent.call`: the table of open calls decides which thread completes a future. The thread that removes
the call from the table completes it, either because the reply came or because the timeout expired. One thread per agent
watches the timeouts. It exists only while there are open calls with a timeout, so it never has to be stopped. The
future that `run_on` returned is left alone: it may be completed late, and its result is then discarded.

References: an `RRef` is the public face of a *handle*. The handles of an agent are in its *reference store*, and
requests about the value of a handle go through the store's `ReferenceCalls`. A reference is sent to another worker by
pickling an `RRef`: `serialization.collecting` returns the handles in a message, and `serialization.offering` gives the
handles that arrived with a message to the unpickler. A backend without references keeps the default store,
`NoReferences`.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import index
from time import monotonic
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Protocol, TypedDict

from farcall.deadlines import find_scope
from farcall.errors import BackendError, ForkedProcessError, RpcError, RpcTimeoutError, UsageError
from farcall.functions import async_result
from farcall.futures import Future, failed_future
from farcall.options import DEFAULT_RPC_TIMEOUT, UNSET_RPC_TIMEOUT
from farcall.protocol.ids import ForkId, RRefId, Worker, WorkerInfo

if TYPE_CHECKING:
    from farcall.runtime.leaks import Inventory


# References: only for backends that have them


class NumberedWorker(Protocol):
    """A worker of the group as a reference store knows it, by the worker's number. Only its name and id are needed."""

    @property
    def info(self) -> WorkerInfo:
        """The name and id of the worker."""


class Handle(Protocol):
    """One copy of a reference on this worker. When the handle is garbage-collected, the owner counts one copy less.

    Handles are created by the reference store of the agent, not by programs.
    """

    @property
    def reference(self) -> RRefId:
        """The id of the reference, which includes the owner; equal for all handles of one reference."""

    @property
    def fork(self) -> ForkId | None:
        """The id of this copy of the reference; None on the owner."""

    @property
    def value(self) -> Future[Any] | None:
        """The future of the value, on the owner of the reference; None on other workers."""

    @property
    def confirmed(self) -> bool:
        """Whether the owner has confirmed that it counts this handle; always True on the owner."""

    @property
    def reference_store(self) -> ReferenceStore:
        """The reference store that this handle belongs to."""

    def check(self) -> None:
        """Returns if the handle can be used.

        Raises:
            OwnerLostError: The owner was lost.
            ReferenceRefusedError: The owner does not have the value any more.
            UsageError: This worker has released the handle, for example by a shutdown.
        """


class ReferenceCalls(Protocol):
    """Makes requests about the values of references, for `RRef` and its proxies. An agent with references has one."""

    @property
    def info(self) -> WorkerInfo:
        """The name and id of this worker."""

    @property
    def numbered(self) -> Mapping[Any, NumberedWorker]:
        """The workers of the group, by their numbers. `RRefId.owner` and `ReferenceStore.me` are such numbers."""

    def call_on(
        self,
        handle: Any,
        what: bytes,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        timeout: float,
        unattended: bool = False,
    ) -> Future[Any]:
        """Sends the owner a request about the value of a reference, without waiting for the reply.

        Args:
            handle: A handle of the reference.
            what: The kind of the request, a constant of `protocol.frames`. `METHOD` calls a method of the value.
                `VALUE` gets a copy of the value. `PRESENCE` gets None as soon as the value exists. `TYPE` gets the type
                of the value. Not checked.
            method: The name of the method. For the other kinds it only appears in error messages.
            args: The positional arguments of the method; empty for the other kinds.
            kwargs: The keyword arguments of the method; None for none.
            timeout: Seconds; 0 means no timeout, `UNSET_RPC_TIMEOUT` the timeout of the agent.
            unattended: True if the caller will not wait for the future at once. Another thread then reads the reply.

        Returns:
            The future of the reply. It fails with the exception of the method, or with `RpcTimeoutError`.

        Raises:
            OwnerLostError: The owner was lost.
            ReferenceRefusedError: The owner does not have the value any more.
            SerializationError: An argument cannot be pickled.
            UsageError: This worker has released the handle, or `timeout` is negative or not a number.
        """

    def call_on_many(
        self,
        handles: Sequence[Any],
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        timeout: float,
    ) -> list[Future[Any]]:
        """Calls the same method of several values, without waiting for the replies; see `call_on`.

        Returns a future for each handle, in the same order. The future of a call that could not be sent has failed.

        Raises:
            SerializationError: An argument cannot be pickled.
        """

    def fetch(self, handle: Any, timeout: float) -> Any:
        """Waits for the value of a reference that another worker owns, and returns a copy of the value.

        Args:
            handle: A handle of the reference. On the owner, use `handle.value` instead.
            timeout: Seconds; 0 means no timeout, `UNSET_RPC_TIMEOUT` the timeout of the agent.

        Raises:
            RpcTimeoutError: The timeout expired.
            OwnerLostError: The owner was lost.
            ReferenceRefusedError: The owner does not have the value any more.
            UsageError: This worker has released the handle, or `timeout` is negative or not a number.
            Exception: The exception with which creating the value failed.
        """

    def remote_on(self, handle: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Handle:
        """Calls a method of the value on the owner, which keeps the result.

        Args:
            handle: A handle of the reference.
            method: The name of the method.
            args: The positional arguments; may be empty.
            kwargs: The keyword arguments; None for none.

        Returns:
            A handle of the result, without waiting for it. If the method fails or does not exist, using the result
            raises.

        Raises:
            OwnerLostError: The owner was lost.
            ReferenceRefusedError: The owner does not have the value any more.
            SerializationError: An argument cannot be pickled.
            UsageError: This worker has released the handle.
        """

    def resolve_timeout(self, timeout: float) -> float:
        """Returns the seconds that a `timeout` argument means; 0 means no timeout.

        Args:
            timeout: Seconds, or `UNSET_RPC_TIMEOUT` for the timeout of the agent.

        Raises:
            UsageError: `timeout` is not a number, or negative.
        """


class ReferenceStore(Protocol):
    """The references of one worker: the values that it owns, and its handles. A handle is one copy of a reference."""

    @property
    def me(self) -> Worker:
        """The number of this worker. References that this worker owns have it as `RRefId.owner`."""

    @property
    def calling(self) -> ReferenceCalls:
        """The object that makes the requests about the values of this store's handles.

        Raises `UsageError` if the backend has no references.
        """

    def own(self, value: Any) -> Handle:
        """Creates a reference to a value of this worker and returns its handle. `RRef(value)` calls it.

        Args:
            value: Any value; may be None. It is kept here and not copied.

        Raises:
            UsageError: The backend has no references, or the agent was shut down.
        """

    def inventory(self) -> Inventory:
        """Returns all references that this worker owns or holds now; an empty inventory if there are none."""

    def debug_info(self) -> dict[str, str]:
        """Returns counters of references as text, under the names that torch uses.

        Returns an empty dict if nothing is counted.
        """

    def give_up_handles(self, reason: str) -> None:
        """Releases all handles of references that other workers own. Later uses of them raise `UsageError`.

        Does nothing if there are none.

        Args:
            reason: Why, for the message of that error.
        """

    def forget(self, reason: str) -> None:
        """Releases all handles and all values that this worker owns. Later uses of them raise `UsageError`.

        Does nothing if there are none.

        Args:
            reason: Why, for the message of that error.
        """


class NoReferences:
    """The reference store of an agent without references.

    It is always empty. Creating a reference raises `UsageError`. `me` is always 0, because no reference needs the
    number of this worker.
    """

    me: Worker = 0

    @property
    def calling(self) -> NoReturn:
        """Raises `UsageError`: the backend has no references."""
        raise self._refusal()

    def own(self, value: Any) -> NoReturn:
        """Raises `UsageError`: the backend has no references."""
        raise self._refusal()

    def inventory(self) -> Inventory:
        """Returns an empty inventory."""
        from farcall.runtime.leaks import Inventory  # imported here, because farcall.runtime is above this layer

        return Inventory((), ())

    def debug_info(self) -> dict[str, str]:
        """Returns an empty dict."""
        return {}

    def give_up_handles(self, reason: str) -> None:
        """Does nothing, because there are no handles."""

    def forget(self, reason: str) -> None:
        """Does nothing, because there are no handles and no values."""

    def _refusal(self) -> UsageError:
        """Returns the error for an attempt to use references."""
        return UsageError(
            "the backend of this worker has no references: use rpc_sync or rpc_async, or the default backend"
        )


# The agent


Key = str | int | WorkerInfo
"""Names a worker: its name, its rank, or its `WorkerInfo`."""


class WorkerHandle:
    """The base of `farcall.Worker`: an object that can be given in place of the name of a worker.

    A subclass overrides `key`, which says which worker it stands for.
    """

    __slots__ = ()

    @property
    def key(self) -> Key:
        """The name, the rank or the `WorkerInfo` of the worker. This base class raises `NotImplementedError`."""
        raise NotImplementedError


To = Key | WorkerHandle
"""Names a worker: its name, its rank, its `WorkerInfo`, or a `farcall.Worker`."""


class PeerMetrics(TypedDict):
    """Counters about this worker and one other worker, since this worker's agent started.

    `calls_made` counts the calls of this worker to the other one; of these, `calls_failed` have failed and
    `calls_pending` are not done yet. `calls_served` counts the calls of the other worker to this one. `bytes_out` and
    `bytes_in` count bytes sent and received; `bytes_shared_out`, `bytes_shared_in` and `bytes_returned` are the parts
    of them that went through shared memory. `bytes_waiting` counts bytes not sent yet. `resends` counts messages sent
    again after a connection broke. `references_refused` counts refused requests about references. `heartbeat_age` is
    the time, in seconds, since the other worker was last heard; 0 if this worker does not watch it.
    """

    calls_made: int
    """Calls to the other worker, including those on references. Calls made by `remote` do not count."""
    calls_failed: int
    """How many of `calls_made` failed, for whatever reason: the function raised, the timeout expired, the worker was
    lost."""
    calls_pending: int
    """How many of `calls_made` are not done yet."""
    calls_served: int
    """Calls of the other worker that arrived here, including those on references. Requests of `remote` do not count."""
    calls_expired: int
    """Calls of the other worker that were not run here, because their time was over before a thread was free. Includes
    requests of `remote`."""
    calls_cancelled: int
    """Calls of the other worker that were cancelled here before they were answered, whether they had started or not."""
    bytes_out: int
    """Bytes sent to the other worker, on all connections."""
    bytes_in: int
    """Bytes received from the other worker, on all connections."""
    bytes_shared_out: int
    """Of `bytes_out`, those that went through shared memory: large buffers, to a worker on the same host."""
    bytes_shared_in: int
    """Of `bytes_in`, those that came through shared memory."""
    bytes_returned: int
    """Of `bytes_shared_in`, those in shared memory that this worker had sent and the other worker sent back as it was,
    without a copy.
    """
    bytes_waiting: int
    """Bytes that will be sent to the other worker as soon as its connection accepts them."""
    resends: int
    """Messages about references, and calls made by `remote`, that were sent again because they had not been
    acknowledged when a connection to the other worker broke.
    """
    references_refused: int
    """Messages and requests of the other worker about references that this worker refused: they were forged, or the
    value was lost with a worker that died. Refusals of unknown workers and of workers that left count only in the sum
    over all workers."""
    heartbeat_age: float
    """Seconds since this worker last received anything from the other one; 0 if this worker does not watch it.
    Meaningless as a sum.
    """


class Metrics(PeerMetrics):
    """The counters of one worker: the sums of `PeerMetrics` over all workers, and what its executor is doing now.

    `queue_length` is the number of requests that wait for a thread. `threads` is the number of threads;
    `threads_running` of them run a function, `threads_waiting` run a function that waits for a call of its own, and
    `threads_idle` have nothing to do. `peers` has the `PeerMetrics` for each worker, by its name.
    """

    queue_length: int
    """Requests of other workers that wait for a thread of the executor."""
    threads: int
    """Threads of the executor."""
    threads_running: int
    """How many of `threads` run a function now."""
    threads_waiting: int
    """How many of `threads` run a function that waits for a call of its own."""
    threads_idle: int
    """How many of `threads` sleep because they have nothing to do."""
    peers: dict[str, PeerMetrics]
    """The counters for each worker, by its name. This worker is one of them, because it may call itself."""


class MembershipChange(NamedTuple):
    """One change of a group, which is passed to the functions registered with `watch_members`.

    `kind` is "joined", "left" (the worker shut down) or "lost" (it died, or was declared lost). `worker` is the worker
    that joined, left or was lost.
    """

    kind: str
    """What happened: "joined", "left" (the worker shut down) or "lost" (it died, or was declared lost)."""
    worker: WorkerInfo
    """The worker that joined, left or was lost."""


class RpcAgent(ABC):
    """The part of a process that makes it a worker of a group. The base class of the agents of all backends.

    A subclass implements `run_on`, `get_worker_info`, `get_worker_infos`, `join` and `shutdown`. Instantiating a
    subclass without them raises `TypeError`. The constructor of this class takes no arguments. docs/backends.md has a
    complete example.

    `rpc_timeout` is the timeout, in seconds, of calls that do not give their own; 0 means none. `reference_store` has
    the references of this worker; the default has none, and creating one raises `UsageError`. `is_open` says whether
    workers may join the group after its start. `closed` is the error that every call raises from now on; None while the
    agent can be used.
    """

    rpc_timeout: float = DEFAULT_RPC_TIMEOUT
    """The timeout, in seconds, of calls that do not give their own; 0 means no timeout. May be set at any time.

    `init_rpc` sets it to the option `rpc_timeout` when the agent has been created.
    """

    reference_store: ReferenceStore = NoReferences()
    """The references of this worker. The default is for backends without references: every use raises `UsageError`."""

    is_open: bool = False
    """Whether workers may join the group after its start."""

    closed: RpcError | None = None
    """The error that every call raises from now on; None while the agent can be used."""

    _abandoned = False

    # Methods that a subclass must implement

    @abstractmethod
    def run_on(
        self,
        worker: WorkerInfo,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float,
    ) -> Future[Any]:
        """Sends a call to a worker, without waiting for the result.

        The timeout does not have to be enforced: `call`, the only caller of this method, does that. `call` has also
        checked the arguments.

        Args:
            worker: The callee, as `get_worker_info` returned it.
            function: The function to run there.
            args: Its positional arguments; may be empty.
            kwargs: Its keyword arguments; may be empty.
            timeout: How many seconds the caller will wait, in case the callee wants to know; 0 means no timeout.

        Returns:
            A future of the result. It fails with the exception of the function, or with `WorkerLostError`.

        Raises:
            SerializationError: An argument cannot be pickled.
            RpcError: The call cannot be sent for another reason.
        """

    @abstractmethod
    def get_worker_info(self, to: Key | None = None) -> WorkerInfo:
        """Returns the `WorkerInfo` of a worker of the group.

        Args:
            to: The name, the rank or the `WorkerInfo` of the worker; None means this worker.

        Raises:
            UnknownWorkerError: The group has no such worker. `call` relies on this check.
        """

    @abstractmethod
    def get_worker_infos(self) -> list[WorkerInfo]:
        """Returns the `WorkerInfo` of all workers of the group ordered by rank. This worker is always one of them."""

    @abstractmethod
    def join(self, shutdown: bool = False, timeout: float = 0.0) -> None:
        """Waits until all workers have called `join` and no call is running anywhere. The agent can still be used.

        Args:
            shutdown: True if this worker will leave next, so that connections that close from now on are expected.
            timeout: How many seconds to wait; 0 means no limit.

        Raises:
            ShutdownError: The timeout expired, or a worker was lost. The message says which workers or calls were
                missing.
        """

    @abstractmethod
    def shutdown(self, graceful: bool = False, timeout: float = 0.0) -> None:
        """Leaves the group and releases all resources, even if an error is raised. A second call does nothing.

        Args:
            graceful: Whether to call `join` first, which waits until all workers are done.
            timeout: How many seconds `join` may wait; 0 means no limit. Ignored if not `graceful`.

        Raises:
            ShutdownError: `join` failed. All resources have been released all the same.
        """

    # Methods that a subclass may override

    @cached_property
    def info(self) -> WorkerInfo:
        """The name and id of this worker, which never change. A subclass may also set this attribute."""
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
        """Sends a call to a worker, without waiting for the result. `rpc_sync` and `rpc_async` use it.

        Args:
            to: The callee: its name, its rank, its `WorkerInfo` or a `farcall.Worker`.
            function: The function to run there.
            args: Its positional arguments, a tuple or a list; None for none.
            kwargs: Its keyword arguments; None for none.
            timeout: Seconds; 0 means no timeout, `UNSET_RPC_TIMEOUT` means `rpc_timeout`.
            unattended: True if the caller will not wait for the future at once. Agents whose replies are read by the
                waiting threads then let another thread read the reply.

        Returns:
            A future of the result. It fails with the exception of the function, `RpcTimeoutError` or `WorkerLostError`.

        Raises:
            UnknownWorkerError: The group has no such worker.
            SerializationError: An argument cannot be pickled.
            UsageError: `to` names no worker, `function` cannot be called, `args` is not a tuple or list, or `timeout`
                is negative or not a number.
            BackendError: `run_on` did not return a future.
            RpcError: The error in `closed`, if the agent cannot be used any more.
        """
        if self.closed is not None:
            raise self.closed
        worker = self.get_worker_info(worker_key(to))
        checked_function(function)
        if args is not None and not isinstance(args, tuple | list):
            raise bad_arguments(args)
        if timeout != UNSET_RPC_TIMEOUT:
            check_timeout(timeout)
        scope = find_scope()
        if scope is not None:
            timeout = scope.limit(timeout, self.rpc_timeout)
        elif timeout == UNSET_RPC_TIMEOUT:
            timeout = self.rpc_timeout
        began = monotonic()
        future = self.run_on(worker, function, tuple(args or ()), dict(kwargs or {}), timeout)
        if not isinstance(future, Future):
            raise BackendError(f"{type(self).__name__}.run_on must return a farcall.Future, not {future!r}")
        if not timeout or future.done():
            return future

        def new_error() -> RpcTimeoutError:
            name = getattr(function, "__qualname__", None) or repr(function)
            return RpcTimeoutError(
                f"RPC ran for more than set timeout: worker {worker.name!r} did not answer `{name}` within "
                f"{timeout:g} s; it may still be running there. Give the call a longer timeout, or 0 for none"
            )

        return self._expiry.limit(future, began + timeout, new_error)

    def call_many(
        self,
        workers: Sequence[WorkerInfo],
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float,
    ) -> list[Future[Any]]:
        """Sends the same call to several workers, without waiting for results. `Workers.submit` uses it.

        The default calls `call` for each worker. An agent that pickles arguments can override it to pickle them once.

        Args:
            workers: The callees; at least one.
            function: The function to run there.
            args: Its positional arguments, a tuple or a list; None for none.
            kwargs: Its keyword arguments; None for none.
            timeout: Seconds; 0 means no timeout, `UNSET_RPC_TIMEOUT` means `rpc_timeout`.

        Returns:
            A future for each worker, in the same order. The future of a worker that cannot be reached has failed.

        Raises:
            UsageError: The call is wrong for all of them, as `call` says. Nothing was sent.
            RpcError: The error in `closed`, if the agent cannot be used any more.
        """
        futures: list[Future[Any]] = []
        for worker in workers:
            try:
                futures.append(self.call(worker, function, args, kwargs, timeout, unattended=True))
            except RpcError as error:
                if not futures and (isinstance(error, UsageError) or error is self.closed):
                    raise
                futures.append(failed_future(error))
        return futures

    def calls_pending(self, worker: WorkerInfo) -> int:
        """Returns how many calls of this worker to another one are under way. The default does not know: 0."""
        return 0

    @cached_property
    def _expiry(self) -> Expiry:
        """The open calls of this agent that have a timeout. Created empty by the first use."""
        return Expiry()

    def start(self) -> None:  # noqa: B027 (an agent may run calls as soon as it is created)
        """Begins to run the calls of other workers.

        `init_rpc` calls it once, after it has made this the agent of the process, so that functions that other workers
        call can use `farcall`'s functions. The default does nothing, for agents that run calls from their creation on.
        """

    def sync(self, timeout: float = 0.0) -> None:
        """Waits until all workers have called `sync`. The default calls `join`, which also waits for running calls.

        Args:
            timeout: How many seconds to wait; 0 means no limit.

        Raises:
            ShutdownError: The timeout expired, or a worker was lost.
        """
        self.join(timeout=timeout)

    def remote(
        self,
        to: To,
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> Handle:
        """Runs a function on a worker, which keeps the result. `farcall.remote` uses it.

        The default raises `UsageError`, for backends without references.

        Args:
            to: The worker that runs the function and owns the result: its name, rank, `WorkerInfo` or `farcall.Worker`.
            function: The function.
            args: Its positional arguments, a tuple or a list; None for none.
            kwargs: Its keyword arguments; None for none.
            timeout: Seconds within which the result must be there; 0 and `UNSET_RPC_TIMEOUT` mean no limit. Passed
                only if the program gives one, so a subclass may do without.

        Returns:
            A handle of the result, without waiting for it.

        Raises:
            UnknownWorkerError: The group has no such worker.
            SerializationError: An argument cannot be pickled.
            UsageError: The backend has no references, `to` names no worker, `function` cannot be called, or `args` is
                not a tuple or list.
            RpcError: The worker cannot be reached (`WorkerLostError`), or the agent cannot be used any more.
        """
        return self.reference_store.own(None)  # NoReferences.own raises UsageError

    def watch_members(self, watcher: Callable[[MembershipChange], object]) -> None:  # noqa: B027
        """Registers a function that is called with every later change of the group, one change after the other.

        Exceptions of the watcher are logged. The default does nothing, for backends whose groups never change.

        Args:
            watcher: A function of a `MembershipChange`: a worker has joined, has left or was lost.
        """

    def unwatch_members(self, watcher: Callable[[MembershipChange], object]) -> None:  # noqa: B027
        """Removes a watcher that was registered with `watch_members`. Does nothing if it is not registered.

        The default does nothing, for backends whose groups never change.
        """

    def add_interceptor(self, interceptor: Any) -> None:
        """Registers an interceptor, an object that runs around every call. `farcall.add_interceptor` uses it.

        The default raises `UsageError` for any object, for backends without interceptors. Other backends raise it for
        an object that is no interceptor.
        """
        raise UsageError(
            f"the backend of this worker ({type(self).__name__}) does not support interceptors; use the default backend"
        )

    def remove_interceptor(self, interceptor: Any) -> None:  # noqa: B027 (there is nothing to remove)
        """Removes an interceptor that `add_interceptor` has registered. Does nothing if it is not registered.

        The default does nothing, for backends without interceptors.
        """

    def get_metrics(self) -> Mapping[str, Any]:
        """Returns the agent's counters under the names of the fields of `Metrics`, such as `calls_made`.

        The default counts nothing, and returns an empty dict.
        """
        return {}

    def get_debug_info(self) -> dict[str, str]:
        """Returns the counters of `get_metrics` as text, under names that begin with `agent.`, as torch does.

        Counters that are not single numbers or texts are left out. Returns an empty dict if the agent counts nothing.
        """
        return {
            f"agent.{name}": str(value)
            for name, value in self.get_metrics().items()
            if isinstance(value, int | float | str)
        }

    def _get_device_map(self, dst: WorkerInfo) -> dict[Any, Any]:
        """Returns the device map for the callee `dst`: from devices of this worker to devices of the callee.

        The default returns an empty dict, which maps no devices. Whether there is such a worker is not checked.
        """
        return {}

    # Forks of the process

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the process that the agent belongs to."""
        return self._abandoned

    def about_to_fork(self) -> None:  # noqa: B027 (most agents have nothing to do)
        """Called just before this process forks. Must not take a lock that another thread may hold for long.

        The default does nothing.
        """

    def abandon(self) -> None:
        """Called in a forked child. Closes the child's copies of descriptors; every later call raises an error.

        Must take no lock, because a thread that does not exist in the child may hold it, and must not close connections
        of the parent. The default only sets `closed` to a `ForkedProcessError`.
        """
        self._abandoned = True
        self.closed = ForkedProcessError(
            f"this process was forked from worker {self.info.name!r} and cannot use its agent; "
            "call init_rpc with a name of its own in this process, or start it with the spawn method"
        )


# Checks of the arguments of a call


def checked_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`. Raises `UsageError` if it is not callable; None is not."""
    if not callable(function):
        raise UsageError(f"{function!r} cannot be called: give a function, a class or another callable")
    return function


def bad_arguments(args: object) -> UsageError:
    """Returns the error for `args` that are neither a tuple nor a list. Does not check `args` and raises nothing."""
    return UsageError(f"`args` must be a tuple or list of arguments, not a {type(args).__name__}; write args=(value,)")


def worker_key(to: object) -> Key:
    """Returns the name, the rank or the `WorkerInfo` that `to` stands for; for a `farcall.Worker`, its key.

    Raises `UsageError` for anything else, such as None. A bool or a float is no rank. Whether there is such a worker is
    not checked.
    """
    if isinstance(to, WorkerHandle):
        to = to.key
    if isinstance(to, str | WorkerInfo):
        return to
    if not isinstance(to, bool):
        try:
            return index(to)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise UsageError(f"`to` must be a worker's name, rank or WorkerInfo, or a farcall.Worker, not {to!r}")


def check_timeout(timeout: float) -> None:
    """Returns if `timeout` is a number of at least 0. Raises `UsageError` for a negative number, nan, or no number."""
    try:
        if timeout >= 0:
            return
    except TypeError:
        raise UsageError(f"a timeout must be a number of seconds (0 means no timeout), not {timeout!r}") from None
    raise UsageError(f"a timeout must be 0 (no timeout) or more seconds, not {timeout}")


# Running a function for another worker


def run_here(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    runner: Callable[..., Any] | None = None,
) -> Future[Any]:
    """Runs a function for another worker, in this thread, and returns a future of what its caller gets.

    Args:
        function: The function. If it cannot be called, the future fails with `TypeError`.
        args: Its positional arguments; none by default.
        kwargs: Its keyword arguments; None for none.
        runner: A function to call with these arguments in place of `function`; None calls `function`. The mark of
            `async_execution` is looked up on `function`, not on the runner.

    Returns:
        A future. It is done, except in two cases. For a function marked by `async_execution`, it is the future that the
        function returned. For an `async def` function, the coroutine runs in a new thread and completes the future
        later. Every exception of the function, even `SystemExit` or `KeyboardInterrupt`, becomes the outcome of the
        future; nothing is raised here.

    Example:
        >>> run_here(max, (3, 4)).value()
        4
    """
    future: Future[Any] = Future()
    try:
        result = (runner or function)(*args, **(kwargs or {}))
        converter = async_result(function)
        if converter is not None:
            return converter(getattr(function, "__qualname__", repr(function)), result)
        if type(result) is CoroutineType:
            threading.Thread(target=_run_coroutine, args=(result, future), name="farcall-async", daemon=True).start()
            return future
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
    return future


def _run_coroutine(coroutine: CoroutineType[Any, Any, Any], future: Future[Any]) -> None:
    """Runs a coroutine in a new event loop, and completes `future` with its result or exception. Never raises."""
    import asyncio  # imported here: it would take half the time of `import farcall`

    try:
        result = asyncio.run(coroutine)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


# Timeouts

_MAX_SLEEP_S: Final = 0.5
"""The longest that the thread sleeps before it checks whether there are open calls left."""


class Expiry:
    """The open calls of one agent that have a deadline, and the thread that fails those whose deadline has passed.

    `limit` adds a call. The thread exists only while there are open calls, so nothing has to be closed.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()  # its lock is reentrant, because a signal handler may make a call
        self._open: dict[int, tuple[float, Future[Any], Callable[[], Exception]]] = {}
        self._numbers = itertools.count()
        self._wake_at = 0.0
        self._thread: threading.Thread | None = None

    def limit(self, future: Future[Any], deadline: float, new_error: Callable[[], Exception]) -> Future[Any]:
        """Returns a future with the outcome of `future`, or with `new_error()` if the deadline passes first.

        A deadline in the past fails the returned future soon. `future` itself is not changed.

        Args:
            future: The future of the call.
            deadline: The moment of the deadline, in seconds of `time.monotonic`; infinity means never.
            new_error: Creates the exception; called by the thread that watches the deadlines. Must not raise.
        """
        limited: Future[Any] = Future()
        number = next(self._numbers)
        with self._condition:
            self._open[number] = deadline, limited, new_error
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="farcall-expiry", daemon=True)
                self._thread.start()
            elif deadline < self._wake_at:
                self._condition.notify()

        def settled(done: Future[Any]) -> None:
            error = done.exception()
            if self._open.pop(number, None) is None:
                return  # the deadline has passed, and the other thread has removed the call
            if error is None:
                limited.set_result(done.value())
            else:
                limited.set_exception(error)

        future.then(settled)
        return limited

    def _run(self) -> None:
        """The thread that watches the deadlines: fails calls whose deadlines pass. Ends when no open calls are left."""
        while True:
            with self._condition:
                if not self._open:
                    self._thread = None
                    return
                now = monotonic()
                first = min(deadline for deadline, _, _ in list(self._open.values()))
                if first > now:
                    self._wake_at = min(first, now + _MAX_SLEEP_S)
                    self._condition.wait(self._wake_at - now)
                    continue
            for number, (deadline, limited, new_error) in list(self._open.items()):
                if deadline <= now and self._open.pop(number, None) is not None:
                    limited.set_exception(new_error())
