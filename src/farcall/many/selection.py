"""`Workers`: a selection of workers, with the verbs that run functions on all of them, or on any of them.

    farcall.workers("rollout*").call(step, weights)

Rules
- The verbs are those of `Worker`, and return dicts by worker name (`farcall.many`).
- A selection is a description. It is looked up anew for each operation. An operation on an empty selection fails.
- A selection made by `farcall.workers` acts for the group that is current when it is used, one made by `group.workers`
  for that group.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Iterator
from fnmatch import fnmatchcase
from sys import _getframe
from typing import Any, ParamSpec, TypeAlias, TypeVar, Unpack, overload

from farcall import current
from farcall.backends.interface import RpcAgent, checked_function
from farcall.errors import RpcError, UnknownWorkerError, UsageError
from farcall.functions import is_idempotent
from farcall.futures import Future, awaited_together
from farcall.many.futures_by_name import Futures, group_call_error
from farcall.many.least_busy import least_busy
from farcall.many.map_stream import MapStream, MapTargets, checked_per_worker
from farcall.many.references_by_name import RRefs
from farcall.options import UNSET_RPC_TIMEOUT, CallOptions, SelectionOptions, call_timeout, idempotent_option
from farcall.protocol.ids import WorkerInfo
from farcall.rref import RRef
from farcall.workers import Worker, wait_until_joined

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
T = TypeVar("T")

AnyIterable: TypeAlias = Iterable[T] | AsyncIterable[T]
"""What `map` takes items from: anything for `for` or `async for`."""


class Workers:
    """A selection of workers: those with certain names, or all. `farcall.workers` and `group.workers` return one.

    Immutable; may be sent to other workers. It is looked up anew for each operation. An operation on a selection that
    is empty then raises `UnknownWorkerError`.

    Programs call `farcall.workers` or `group.workers` instead of the constructor. Nothing is looked up here.

    Args:
        names: Names and patterns of names; empty for all workers.
        where: Returns whether a worker is in the selection; None for all of those names.
        others: Whether to leave out this worker.
        agent: The agent that makes the calls; None for the agent that is current at each use.
        timeout: The timeout of the calls in seconds. 0 means no limit, and -1 the `rpc_timeout` of the agent.
        is_idempotent: Whether `map` gives the items of a lost worker to another one.

    Raises:
        UsageError: A name is not a str, or `where` cannot be called.
    """

    __slots__ = ("_agent", "_is_idempotent", "_names", "_others", "_timeout", "_where")

    def __init__(
        self,
        names: tuple[str, ...] = (),
        where: Callable[[WorkerInfo], bool] | None = None,
        others: bool = False,
        agent: RpcAgent | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
        is_idempotent: bool = False,
    ) -> None:
        for name in names:
            if not isinstance(name, str):
                raise UsageError(f"workers() takes names of workers, or patterns such as 'rollout*', not {name!r}")
        if where is not None and not callable(where):
            raise UsageError(f"`where` must be a function of a WorkerInfo, not {where!r}")
        self._names = names
        self._where = where
        self._others = others
        self._agent = agent
        self._timeout = timeout
        self._is_idempotent = is_idempotent

    # Who that is

    def __iter__(self) -> Iterator[Worker]:
        """Returns handles of the workers that are in the selection now, by rank. There may be none."""
        return iter([Worker(info.name, self._agent, self._timeout) for info in self.infos(self._acting_agent())])

    def __len__(self) -> int:
        """Returns how many workers are in the selection now. Raises `NotInitializedError` without a group."""
        return len(self.infos(self._acting_agent()))

    def infos(self, agent: RpcAgent) -> list[WorkerInfo]:
        """Returns the workers that are in the selection now, as `agent` knows them, by rank. There may be none."""
        infos = agent.get_worker_infos()
        if self._names:
            infos = [info for info in infos if any(fnmatchcase(info.name, pattern) for pattern in self._names)]
        if self._others:
            infos = [info for info in infos if info != agent.info]
        return infos if self._where is None else [info for info in infos if self._where(info)]

    def chosen(self, agent: RpcAgent) -> list[WorkerInfo]:
        """Returns the workers that are in the selection now, by rank. Raises `UnknownWorkerError` if there are none."""
        infos = self.infos(agent)
        if not infos:
            known = ", ".join(repr(info.name) for info in agent.get_worker_infos())
            raise UnknownWorkerError(f"{self!r} is empty: the group has {known}; wait_joined() waits for workers")
        return infos

    def _acting_agent(self) -> RpcAgent:
        """Returns the agent that makes the calls: that of this selection, or the current one.

        Raises `NotInitializedError` if this process is in no group, and `ExpelledError` if the group has expelled it.
        """
        agent = self._agent or current.current_agent()
        if agent.closed is not None:
            raise agent.closed
        return agent

    def options(self, **options: Unpack[SelectionOptions]) -> Workers:
        """Returns another selection of the same workers, whose calls have these options. This one does not change.

        Args:
            options: `timeout`, in seconds and more than 0, None for no limit; `idempotent`, whether `map` gives the
                items of a lost worker to another one. What is left out stays as it was.

        Raises:
            UsageError: There is no such option, or it cannot have that value.
            RpcTimeoutError: `timeout` is 0, so it is over already.
        """
        is_idempotent, of_calls = idempotent_option(options, self._is_idempotent)
        return Workers(
            self._names, self._where, self._others, self._agent, call_timeout(of_calls, self._timeout), is_idempotent
        )

    # On all of them. In each group of overloads: an `async def` function, one marked `async_execution`, any other.

    @overload
    def call(self, func: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> dict[str, R]: ...
    @overload
    def call(self, func: Callable[P, Future[R]], /, *args: P.args, **kwargs: P.kwargs) -> dict[str, R]: ...
    @overload
    def call(self, func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> dict[str, R]: ...
    def call(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Runs `func(*args, **kwargs)` on all workers of the selection, and returns the results by worker name.

        Raises:
            GroupCallError: A worker failed: its function raised, its timeout expired, or it was lost. Raised as soon as
                one fails; the others are cancelled.
            UsageError: The selection is empty (`UnknownWorkerError`), an argument cannot be pickled
                (`SerializationError`), or this process is in no group (`NotInitializedError`).
        """
        futures = self._submit(func, args, kwargs)
        try:
            return futures.result()
        except BaseException:
            futures.cancel()  # nobody else knows them: Ctrl-C ends the calls
            raise

    @overload
    def submit(self, func: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> Futures[R]: ...
    @overload
    def submit(self, func: Callable[P, Future[R]], /, *args: P.args, **kwargs: P.kwargs) -> Futures[R]: ...
    @overload
    def submit(self, func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Futures[R]: ...
    def submit(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Futures[Any]:
        """Runs `func(*args, **kwargs)` on all workers of the selection. Returns futures by worker name at once.

        A worker that cannot be reached fails its future.

        Raises:
            UsageError: The selection is empty (`UnknownWorkerError`), an argument cannot be pickled
                (`SerializationError`), or this process is in no group (`NotInitializedError`).
        """
        futures = self._submit(func, args, kwargs)
        for future in futures.values():
            future.made_by(_getframe(1))
            if awaited_together:
                awaited_together.note(future)
        return futures

    def _submit(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Futures[Any]:
        """Sends a call of `func(*args, **kwargs)` to all workers of the selection. Returns the futures by worker name.

        Raises `UsageError` if the selection is empty (`UnknownWorkerError`), an argument cannot be pickled
        (`SerializationError`), or this process is in no group (`NotInitializedError`).
        """
        agent = self._acting_agent()
        infos = self.chosen(agent)
        calls = agent.call_many(infos, func, args or None, kwargs or None, self._timeout)
        return Futures({info.name: future for info, future in zip(infos, calls, strict=True)})

    @overload
    def keep(self, func: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs) -> RRefs[R]: ...
    @overload
    def keep(self, func: Callable[P, Future[R]], /, *args: P.args, **kwargs: P.kwargs) -> RRefs[R]: ...
    @overload
    def keep(self, func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> RRefs[R]: ...
    def keep(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RRefs[Any]:
        """Runs `func(*args, **kwargs)` on all workers, each of which keeps its result. Returns references at once.

        What the function raises on a worker, every use of that worker's reference raises. The timeout of this selection
        does not apply here; it applies to calls on the references.

        Raises:
            GroupCallError: A worker cannot be reached. Its `results` are the references that were made.
            UsageError: The selection is empty (`UnknownWorkerError`), an argument cannot be pickled
                (`SerializationError`), or this process is in no group (`NotInitializedError`).
        """
        agent = self._acting_agent()
        infos = self.chosen(agent)
        made: dict[str, RRef[Any]] = {}
        errors: dict[str, RpcError] = {}
        for info in infos:
            try:
                made[info.name] = RRef.of(agent.remote(info, func, args or None, kwargs or None))
            except UsageError:
                raise  # wrong for all of them
            except RpcError as error:
                errors[info.name] = error
        if errors:
            raise group_call_error(errors, made, len(infos))
        return RRefs(made, self._timeout, self._is_idempotent)

    # On one of them

    @overload
    def map(
        self, func: Callable[[A], Coroutine[Any, Any, R]], items: AnyIterable[A], /, *, per_worker: int = 1
    ) -> MapStream[A, R]: ...
    @overload
    def map(
        self, func: Callable[[A], Future[R]], items: AnyIterable[A], /, *, per_worker: int = 1
    ) -> MapStream[A, R]: ...
    @overload
    def map(self, func: Callable[[A], R], items: AnyIterable[A], /, *, per_worker: int = 1) -> MapStream[A, R]: ...
    def map(self, func: Callable[..., Any], items: AnyIterable[Any], /, *, per_worker: int = 1) -> MapStream[Any, Any]:
        """Runs `func(item)` for each item, each on a worker of the selection that is free.

        Returns a stream of the results in the order of the items, for `for` and `async for`. Nothing runs before the
        first result is asked for, and items are read only as they are needed. `outcomes()` of the stream gives what
        became of each item instead.

        Workers that join while the map runs get items, too. An item whose worker is lost fails with `WorkerLostError`;
        if `func` is marked `idempotent`, or the option says so, another worker gets it.

        Args:
            func: The function of one item.
            items: The items: an iterable, or an async iterable for `async for`.
            per_worker: How many items are under way on each worker at a time, at least 1. With 2, the next item is
                already there when a worker has finished one.

        Raises:
            UsageError: The selection is empty (`UnknownWorkerError`), `func` cannot be called, `items` cannot be
                iterated, or `per_worker` is not such a number.
        """
        agent = self._acting_agent()
        self.chosen(agent)
        targets = _MapOnWorkers(self, agent, checked_function(func), self._timeout)
        retries = self._is_idempotent or is_idempotent(func)
        return MapStream(targets, items, checked_per_worker(per_worker), retries)

    def any(self) -> Worker:
        """Returns a handle whose calls go to one worker of the selection each.

        That is the worker with the fewest calls of this process under way; of several such workers, the next in turn.
        The handle follows the selection, which is looked up for each call. A call while it is empty raises
        `UnknownWorkerError`.
        """
        return _AnyWorker(self, self._agent, self._timeout)

    def wait_joined(self, count: int | None = None, timeout: float | None = None) -> Workers:
        """Waits until there are enough workers in the selection, and returns this selection.

        Args:
            count: How many workers; None for one of each name and pattern that the selection was made with.
            timeout: How many seconds to wait at most; None for no limit. 0 checks once.

        Raises:
            RpcTimeoutError: Not enough workers have joined in time.
            UnknownWorkerError: The group is fixed and does not have them, so they will not join.
            UsageError: `count` or `timeout` is not valid.
            RpcError: This worker has left the group, or was expelled.
        """
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise UsageError(f"`count` must be a number of workers, at least 1, or None, not {count!r}")
        agent = self._acting_agent()

        def are_there() -> bool:
            infos = self.infos(agent)
            if count is not None:
                return len(infos) >= count
            patterns = self._names or ("*",)
            return all(any(fnmatchcase(info.name, pattern) for info in infos) for pattern in patterns)

        what = f"{self!r}" if count is None else f"{count} of {self!r}"
        wait_until_joined(agent, are_there, what, timeout)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the selection without its agent: where it is unpickled, it acts for the current group there."""
        return Workers, (self._names, self._where, self._others, None, self._timeout, self._is_idempotent)

    def __repr__(self) -> str:
        described = list(map(repr, self._names))
        if self._where is not None:
            described.append(f"where={getattr(self._where, '__qualname__', self._where)}")
        if self._others:
            described.append("others=True")
        return f"workers({', '.join(described)})"


def workers(*names: str, where: Callable[[WorkerInfo], bool] | None = None, others: bool = False) -> Workers:
    """Returns a selection of workers, through which functions are run on all of them, or on any.

    Args:
        names: Names, and patterns of names such as `"rollout*"`, in which `*`, `?` and `[...]` have the meaning that
            they have in names of files. Without any, all workers.
        where: Returns whether a worker of these names is in the selection; None for all.
        others: Whether to leave out this worker.

    Raises:
        UsageError: A name is not a str, or `where` cannot be called.

    Example:
        >>> farcall.workers("shard*").call(count_rows)
        {'shard0': 12, 'shard1': 30}
    """
    return Workers(names, where, others)


class _AnyWorker(Worker):
    """A handle whose every use means the worker of a selection with the fewest calls under way.

    Args:
        selection: The selection.
        agent: The agent that makes the calls; None for the agent that is current at each use.
        timeout: The timeout of the calls in seconds. 0 means no limit, and -1 the `rpc_timeout` of the agent.
    """

    __slots__ = ("_selection",)

    def __init__(self, selection: Workers, agent: RpcAgent | None, timeout: float) -> None:
        self._selection = selection
        self._agent = agent
        self._timeout = timeout

    @property
    def _key(self) -> WorkerInfo:  # type: ignore[override]
        """The worker that is chosen for the next call. `Worker` reads this once for each call.

        Raises `UnknownWorkerError` if the selection is empty, and `NotInitializedError` if this process is in no group.
        """
        agent = self._agent or current.current_agent()
        if agent.closed is not None:
            raise agent.closed
        return least_busy(self._selection.chosen(agent), agent.calls_pending)

    def options(self, **options: Unpack[CallOptions]) -> Worker:
        """Returns the same handle with these options for its calls. This handle does not change.

        The only option is `timeout`, in seconds and more than 0; None for no limit. Without it the timeout stays as it
        was. Raises `RpcTimeoutError` if it is 0, and `UsageError` for another option or a timeout that is not valid.
        """
        return _AnyWorker(self._selection, self._agent, call_timeout(options, self._timeout))

    def wait_joined(self, timeout: float | None = None) -> Worker:
        """Waits until there is a worker in the selection, and returns this handle.

        `timeout` is how many seconds to wait at most; None for no limit. 0 checks once. Raises `RpcTimeoutError` if
        none has joined in time, `UnknownWorkerError` if the group is fixed and has none, and `UsageError` if `timeout`
        is not valid.
        """
        self._selection.wait_joined(1, timeout)
        return self

    def _identity(self) -> tuple[Any, ...]:
        return id(self._selection), id(self._agent), self._timeout

    def __reduce__(self) -> tuple[Any, ...]:
        return _AnyWorker, (self._selection, None, self._timeout)

    def __repr__(self) -> str:
        return f"<any of {self._selection!r}>"


class _MapOnWorkers(MapTargets[WorkerInfo]):
    """Where a map on a selection sends its items: to the workers that are in the selection at that moment.

    Args:
        selection: The selection.
        agent: The agent that makes the calls.
        function: The function of one item.
        timeout: The timeout of each call in seconds. 0 means no limit, and -1 the `rpc_timeout` of the agent.
    """

    def __init__(self, selection: Workers, agent: RpcAgent, function: Callable[..., Any], timeout: float) -> None:
        super().__init__(agent)
        self._selection = selection
        self._function = function
        self._timeout = timeout

    def present(self) -> list[WorkerInfo]:
        return self._selection.infos(self.agent)

    def name_of(self, target: WorkerInfo) -> str:
        return target.name

    def send(self, target: WorkerInfo, item: Any) -> Future[Any]:
        return self.agent.call(target, self._function, (item,), None, self._timeout, unattended=True)

    def __repr__(self) -> str:
        return repr(self._selection)
