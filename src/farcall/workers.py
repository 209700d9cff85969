"""`Worker`: a handle of one worker, with the verbs that run functions there.

    farcall.worker("w1").call(max, 1, 2)

Rules
- The three verbs are the same on workers and on references (`farcall.rref.Target`): `call` returns the result, `submit`
  a future of it, `keep` a reference to it, which stays there.
- All arguments behind the function are the function's. What concerns the call is said by `.options(...)`, which returns
  another handle.
- A handle made by `farcall.worker` acts for the group that is current when a verb is used, so a handle may be a
  constant of a module, or be sent to another worker. A handle of `group.worker` acts for that group.
- Nothing is looked up before the first use.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from sys import _getframe
from time import monotonic
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from farcall import current
from farcall.backends.interface import Key, RpcAgent, To, WorkerHandle, worker_key
from farcall.errors import RpcTimeoutError, UnknownWorkerError, UsageError, WorkerLostError
from farcall.futures import Future, awaited_together, failed_future
from farcall.gate import FOREVER, Gate
from farcall.options import UNSET_RPC_TIMEOUT, CallOptions, call_timeout
from farcall.protocol.ids import WorkerInfo
from farcall.rref import RRef

P = ParamSpec("P")
R = TypeVar("R")

_LOOK_AGAIN_S = 1.0
"""How many seconds `wait_until_joined` sleeps at most before it checks again whether this worker has left its group."""


class Worker(WorkerHandle):
    """A handle of one worker, with the verbs that run functions there: `call`, `submit` and `keep`.

    Programs get handles from `farcall.worker(...)` or `group.worker(...)`. A handle is immutable, and may be sent to
    other workers. Nothing is looked up before the first use: a verb of a handle without a worker raises
    `UnknownWorkerError`.

    Args:
        key: The worker: its name, its rank or its `WorkerInfo`. A name means the worker that has the name when a verb
            is used. A `WorkerInfo` means that very worker, also after another one has taken its name.
        agent: The agent (this process's membership of a group) that makes the calls; None for the current group's at
            each use.
        timeout: The timeout of the calls in seconds. 0 means no limit, and -1, the default, the group's `rpc_timeout`.

    Example:
        >>> farcall.worker("w1").call(max, 1, 2)
        2
    """

    __slots__ = ("_agent", "_key", "_timeout")

    def __init__(self, key: Key, agent: RpcAgent | None = None, timeout: float = UNSET_RPC_TIMEOUT):
        """Makes a handle. Programs use `farcall.worker` or `group.worker` instead. Nothing is looked up or checked.

        Args:
            key: The name, the rank or the `WorkerInfo` of the worker.
            agent: The agent (this process's membership of a group) that makes the calls; None for the one that is
                current at each use.
            timeout: The timeout of the calls in seconds. 0 means no limit, and -1, the default, the `rpc_timeout` of
                the agent.
        """
        self._key = key
        self._agent = agent
        self._timeout = timeout

    @property
    def key(self) -> Key:
        """The name, the rank or the `WorkerInfo` that the handle was made with."""
        return self._key

    @property
    def name(self) -> str:
        """The name of the worker, as text.

        If the handle was made with a name or a `WorkerInfo`, that name is returned without a check. For a rank, the
        name is looked up: raises `UnknownWorkerError` if no worker has the rank, and `NotInitializedError` if this
        process is in no group.
        """
        key = self._key
        return key if isinstance(key, str) else key.name if isinstance(key, WorkerInfo) else self.info().name

    def info(self) -> WorkerInfo:
        """Returns the name and id of the worker, also of one that has just left or was lost.

        Raises `UnknownWorkerError` if the group has no such worker, `NotInitializedError` if this process is in no
        group, and `UsageError` if the handle was made with something that cannot name a worker, such as a float.
        """
        return (self._agent or current.current_agent()).get_worker_info(self._key)

    def options(self, **options: Unpack[CallOptions]) -> Worker:
        """Returns another handle of the same worker, whose calls have these options. This handle does not change.

        Args:
            options: `timeout` is the only one: how many seconds each call may take, more than 0; None means no limit.
                Without it the timeout stays as it was.

        Raises:
            UsageError: There is no such option, or `timeout` is negative or not a number.
            RpcTimeoutError: `timeout` is 0, so it is over already.
        """
        return Worker(self._key, self._agent, call_timeout(options, self._timeout))

    # In each group of overloads: an `async def` function, one marked `async_execution`, any other callable.

    @overload
    def call(self, func: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def call(self, func: Callable[P, Future[R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def call(self, func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def call(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs `func(*args, **kwargs)` on the worker, waits, and returns what it returns.

        Of an `async def` function, and of one marked `async_execution`, it returns the final result. The timeout is
        that of this handle; by default the `rpc_timeout` of the group.

        Raises:
            Exception: What the function raises, with its own type and the remote traceback below.
            RpcTimeoutError: The timeout expired.
            WorkerLostError: The worker died or cannot be reached.
            UsageError: `func` cannot be called, there is no such worker (`UnknownWorkerError`), an argument cannot be
                pickled (`SerializationError`), or this process is in no group (`NotInitializedError`).
            ExpelledError: The group has declared this worker lost.
        """
        agent = self._agent or current.sole
        if agent is None:
            agent = current.current_agent()
        return agent.call(self._key, func, args or None, kwargs or None, self._timeout).wait()

    @overload
    def submit(self, func: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    @overload
    def submit(self, func: Callable[P, Future[R]], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    @overload
    def submit(self, func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    def submit(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Makes the worker run `func(*args, **kwargs)`, and returns a future of what it returns without waiting.

        What the function raises, an expired timeout (`RpcTimeoutError`) and a lost worker (`WorkerLostError`) are the
        errors of the future. The timeout is that of this handle; by default the `rpc_timeout` of the group.

        Raises:
            UsageError: `func` cannot be called, there is no such worker (`UnknownWorkerError`), an argument cannot be
                pickled (`SerializationError`), or this process is in no group (`NotInitializedError`).
            ExpelledError: The group has declared this worker lost.
        """
        agent = self._agent or current.current_agent()
        try:
            future = agent.call(self._key, func, args or None, kwargs or None, self._timeout, unattended=True)
        except (WorkerLostError, RpcTimeoutError) as error:
            future = failed_future(error)
        future.made_by(_getframe(1))
        if awaited_together:
            awaited_together.note(future)
        return future

    @overload
    def keep(self, func: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> RRef[R]: ...
    @overload
    def keep(self, func: Callable[P, Future[R]], /, *args: P.args, **kwargs: P.kwargs) -> RRef[R]: ...
    @overload
    def keep(self, func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> RRef[R]: ...
    def keep(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RRef[Any]:
        """Makes the worker run `func(*args, **kwargs)` and keep the result. Returns a reference to the result at once.

        If the function raises, fetching the value and calling on it raise the same error. The timeout of this handle
        does not apply. The first call to a worker opens a connection, and waits for it at most the `rpc_timeout` of the
        group.

        Raises:
            UsageError: `func` cannot be called, there is no such worker (`UnknownWorkerError`), an argument cannot be
                pickled (`SerializationError`), or this process is in no group (`NotInitializedError`).
            RpcTimeoutError: The connection could not be opened in time.
            WorkerLostError: The worker cannot be reached.
            ExpelledError: The group has declared this worker lost.
        """
        agent = self._agent or current.current_agent()
        return RRef.of(agent.remote(self._key, func, args or None, kwargs or None))

    def wait_joined(self, timeout: float | None = None) -> Worker:
        """Waits until there is such a worker in the group, and returns this handle. Returns at once if there is.

        Args:
            timeout: How many seconds to wait at most; None for no limit. 0 checks once.

        Raises:
            RpcTimeoutError: No such worker has joined in time.
            UnknownWorkerError: The group is fixed and has no such worker, so none will join.
            UsageError: `timeout` is negative or not a number.
            NotInitializedError: This process is in no group, or has left it meanwhile.
            ExpelledError: The group has declared this worker lost.
        """
        agent = self._agent or current.current_agent()
        wait_until_joined(agent, lambda: _is_there(agent, self._key), f"worker {self._key!r}", timeout)
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Worker) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        """Returns what two equal handles have in common: the key, the identity of the agent, and the timeout."""
        return self._key, id(self._agent), self._timeout

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the handle without its agent: where it is unpickled, it acts for the current group there."""
        return Worker, (self._key, None, self._timeout)  # it acts for the group of the worker that gets it

    def __repr__(self) -> str:
        return f"<Worker {self._key!r}>"


def worker(to: To | None = None) -> Worker:
    """Returns a handle of a worker, through which functions are run there.

    Args:
        to: The name, the rank, the `WorkerInfo` or another handle of the worker. None means this worker. Whether there
            is such a worker is found out when the handle is used: a call then raises `UnknownWorkerError`.

    Raises:
        UsageError: `to` is of another type, so it cannot name a worker. True and 1.0 are no ranks.
        NotInitializedError: `to` is None, and this process is in no group.

    Example:
        >>> farcall.worker("w1").call(max, 1, 2)
        2
    """
    return Worker(current.current_agent().info) if to is None else Worker(worker_key(to))


def wait_until_joined(agent: RpcAgent, is_there: Callable[[], bool], what: str, timeout: float | None) -> None:
    """Waits until `is_there()` is true. Checks it at once, when a worker joins or leaves the group, and every second.

    Args:
        agent: The agent (this process's membership of a group) that knows the members of the group.
        is_there: Returns whether the wanted members are there. What it raises is raised here.
        what: What is waited for, such as `worker 'w1'`, for messages.
        timeout: How many seconds to wait at most; None for no limit. 0 checks once.

    Raises:
        RpcTimeoutError: The timeout expired.
        UnknownWorkerError: The group is fixed, so no worker will join.
        UsageError: `timeout` is negative or not a number.
        NotInitializedError: This worker has left the group.
        ExpelledError: The group has declared this worker lost.
    """
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout < 0):
        raise UsageError(f"the timeout must be 0 or more seconds, or None for no limit, not {timeout!r}")
    deadline = FOREVER if timeout is None else monotonic() + timeout
    gate = Gate()
    agent.watch_members(gate.open)  # before the first look, so that no worker joins in between
    try:
        while not is_there():
            if agent.closed is not None:
                raise agent.closed
            if not agent.is_open:
                known = ", ".join(repr(info.name) for info in agent.get_worker_infos())
                raise UnknownWorkerError(f"{what} will not join: the group is fixed, and has {known}")
            if monotonic() >= deadline:
                raise RpcTimeoutError(f"{what} did not join within {timeout:g} s")
            gate.sleep(min(deadline, monotonic() + _LOOK_AGAIN_S))
    finally:
        agent.unwatch_members(gate.open)


def _is_there(agent: RpcAgent, key: Key) -> bool:
    """Returns whether the group of the agent has a worker now with this name, id or `WorkerInfo`; else False."""
    infos = agent.get_worker_infos()
    if isinstance(key, WorkerInfo):
        return key in infos
    return any(key in (info.name, info.id) for info in infos)
