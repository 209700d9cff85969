"""`RRefs`: one reference on each worker of a selection, with the verbs that run functions on all of the values.

shelves = farcall.workers("w*").keep(Shelf)
shelves.call(Shelf.put, "tea")
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Iterator, Mapping
from sys import _getframe
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack, overload

from farcall import current
from farcall.errors import OwnerLostError, UsageError
from farcall.functions import is_idempotent
from farcall.futures import Future, awaited_together
from farcall.many.futures_by_name import Futures
from farcall.many.least_busy import least_busy
from farcall.many.map_stream import MapStream, MapTargets, checked_per_worker
from farcall.options import UNSET_RPC_TIMEOUT, CallOptions, SelectionOptions, call_timeout, idempotent_option
from farcall.rref import RRef, Target, submit_to_all

if TYPE_CHECKING:
    from farcall.backends.interface import Handle

T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class RRefs(Mapping[str, RRef[T_co]]):
    """References by worker name, one on each worker of a selection. `Workers.keep` returns them.

    References of your own work as well: `RRefs({"a": one, "b": another})`. May be sent to other workers.

    Args:
        references: The references by name. The mapping is copied.
        timeout: The timeout of calls on them in seconds. 0 means no limit, and -1 the `rpc_timeout` of this worker.
        is_idempotent: Whether `map` gives the items of a lost worker to another one.

    Raises:
        UsageError: `references` is not a mapping of references.
    """

    __slots__ = ("_is_idempotent", "_references", "_timeout")

    def __init__(
        self,
        references: Mapping[str, RRef[T_co]],
        timeout: float = UNSET_RPC_TIMEOUT,
        is_idempotent: bool = False,
    ) -> None:
        if not isinstance(references, Mapping):
            raise UsageError(f"RRefs takes a mapping of references by name, not {references!r}")
        self._references = dict(references)
        for reference in self._references.values():
            if not isinstance(reference, RRef):
                raise UsageError(f"RRefs takes references, as keep returns them, not {reference!r}")
        self._timeout = timeout
        self._is_idempotent = is_idempotent

    def __getitem__(self, name: str, /) -> RRef[T_co]:
        return self._references[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._references)

    def __len__(self) -> int:
        return len(self._references)

    def options(self, **options: Unpack[SelectionOptions]) -> RRefs[T_co]:
        """Returns the same references, whose calls have these options. This object does not change.

        Args:
            options: `timeout`, in seconds and more than 0, None for no limit; `idempotent`, whether `map` gives the
                items of a lost worker to another one. What is left out stays as it was.

        Raises:
            UsageError: There is no such option, or it cannot have that value.
            RpcTimeoutError: `timeout` is 0, so it is over already.
        """
        is_idempotent, of_calls = idempotent_option(options, self._is_idempotent)
        return RRefs(self._references, call_timeout(of_calls, self._timeout), is_idempotent)

    # In each group of overloads: an `async def` function, one marked `async_execution`, any other callable.

    @overload
    def call(
        self, func: Callable[Concatenate[T_co, P], Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> dict[str, R]: ...
    @overload
    def call(
        self, func: Callable[Concatenate[T_co, P], Future[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> dict[str, R]: ...
    @overload
    def call(self, func: Callable[Concatenate[T_co, P], R], /, *args: P.args, **kwargs: P.kwargs) -> dict[str, R]: ...
    def call(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Runs `func(value, *args, **kwargs)` where each value lives, and returns the results by worker name.

        Raises:
            GroupCallError: One of them failed: the function raised, the timeout expired, or the owner was lost. Raised
                as soon as one fails; the others are cancelled.
            UsageError: There are no references, `func` is not a function, or an argument cannot be pickled
                (`SerializationError`).
        """
        futures = self._submit(func, args, kwargs)
        try:
            return futures.result()
        except BaseException:
            futures.cancel()  # nobody else knows them: Ctrl-C ends the calls
            raise

    @overload
    def submit(
        self, func: Callable[Concatenate[T_co, P], Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Futures[R]: ...
    @overload
    def submit(
        self, func: Callable[Concatenate[T_co, P], Future[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Futures[R]: ...
    @overload
    def submit(self, func: Callable[Concatenate[T_co, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Futures[R]: ...
    def submit(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Futures[Any]:
        """Runs `func(value, *args, **kwargs)` where each value lives. Returns futures by worker name at once.

        A worker that cannot be reached fails its future.

        Raises:
            UsageError: There are no references, `func` is not a function, or an argument cannot be pickled
                (`SerializationError`).
        """
        futures = self._submit(func, args, kwargs)
        for future in futures.values():
            future.made_by(_getframe(1))
            if awaited_together:
                awaited_together.note(future)
        return futures

    def _submit(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Futures[Any]:
        """Sends a call of `func(value, *args, **kwargs)` to where each value lives. Returns futures by worker name.

        Raises `UsageError` if there are no references, `func` is not a function, or an argument cannot be pickled
        (`SerializationError`).
        """
        self._check_not_empty()
        futures = submit_to_all(list(self._references.values()), func, args, kwargs, self._timeout)
        return Futures(dict(zip(self._references, futures, strict=True)))

    @overload
    def map(
        self,
        func: Callable[[T_co, A], Coroutine[Any, Any, R]],
        items: Iterable[A] | AsyncIterable[A],
        /,
        *,
        per_worker: int = 1,
    ) -> MapStream[A, R]: ...
    @overload
    def map(
        self, func: Callable[[T_co, A], Future[R]], items: Iterable[A] | AsyncIterable[A], /, *, per_worker: int = 1
    ) -> MapStream[A, R]: ...
    @overload
    def map(
        self, func: Callable[[T_co, A], R], items: Iterable[A] | AsyncIterable[A], /, *, per_worker: int = 1
    ) -> MapStream[A, R]: ...
    def map(
        self,
        func: Callable[..., Any],
        items: Iterable[Any] | AsyncIterable[Any],
        /,
        *,
        per_worker: int = 1,
    ) -> MapStream[Any, Any]:
        """Runs `func(value, item)` for each item, each where one of the values lives that is free.

        Returns a stream of the results in the order of the items, for `for` and `async for`. Nothing runs before the
        first result is asked for, and items are read only as they are needed. `outcomes()` of the stream gives what
        became of each item instead. An item whose worker is lost fails with `WorkerLostError`; if `func` is marked
        `idempotent`, or the option says so, another value gets it.

        Args:
            func: The function of a value and an item.
            items: The items: an iterable, or an async iterable for `async for`.
            per_worker: How many items are under way for each value at a time, at least 1.

        Raises:
            UsageError: There are no references, `items` cannot be iterated, `per_worker` is not a number of at least
                1, or this process is in no group (`NotInitializedError`).
        """
        self._check_not_empty()
        retries = self._is_idempotent or is_idempotent(func)
        return MapStream(_MapOnReferences(self, func), items, checked_per_worker(per_worker), retries)

    def any(self) -> Target[T_co]:
        """Returns an object whose calls go to one of the values each.

        That is the value whose owner has the fewest calls of this process under way; of several, the next in turn.
        Values whose owners are lost get no calls while there are others.

        Raises:
            UsageError: There are no references.
        """
        self._check_not_empty()
        return _AnyReference(self, self._timeout)

    def target(self, name: str) -> Target[T_co]:
        """Returns the reference with the name `name`; its calls have the timeout of this object.

        Raises `KeyError` if there is no reference of that name.
        """
        reference = self._references[name]
        return reference if self._timeout == UNSET_RPC_TIMEOUT else reference.options(timeout=self._timeout or None)

    def present(self) -> list[str]:
        """Returns the names of the references whose owners are in the group now; an empty list if there are none.

        Raises `NotInitializedError` if this process is in no group.
        """
        present = set(current.current_agent().get_worker_infos())
        return [name for name, reference in self._references.items() if reference.owner() in present]

    def _check_not_empty(self) -> None:
        """Raises `UsageError` if there are no references."""
        if not self._references:
            raise UsageError("there are no references: RRefs of nothing has no results")

    def __reduce__(self) -> tuple[Any, ...]:
        return RRefs, (self._references, self._timeout, self._is_idempotent)

    def __repr__(self) -> str:
        return f"<RRefs on {', '.join(map(repr, self._references))}>"


class _AnyReference(Target[T_co]):
    """An object whose every call goes to one of several values: that whose owner has the fewest calls under way.

    Args:
        references: The references to choose from, at least one.
        timeout: The timeout of the calls in seconds. 0 means no limit, and -1 the `rpc_timeout` of this worker.
    """

    __slots__ = ("_references", "_timeout")

    def __init__(self, references: RRefs[T_co], timeout: float) -> None:
        self._references = references
        self._timeout = timeout

    @property
    def _handle(self) -> Handle:  # type: ignore[override]
        """The handle of the value that is chosen for the next call. `Target` reads this once for each call.

        Chooses among the values whose owners are in the group; among all if there is none. Raises `NotInitializedError`
        if this process is in no group.
        """
        agent = current.current_agent()
        names = self._references.present() or list(self._references)
        chosen = least_busy(names, lambda name: agent.calls_pending(self._references[name].owner()))
        return self._references[chosen].handle

    def options(self, **options: Unpack[CallOptions]) -> Target[T_co]:
        """Returns the same object with these options for its calls. This object does not change.

        The only option is `timeout`, in seconds and more than 0; None for no limit. Without it the timeout stays as it
        was. Raises `RpcTimeoutError` if it is 0, and `UsageError` for another option or a timeout that is not valid.
        """
        return _AnyReference(self._references, call_timeout(options, self._timeout))

    def __reduce__(self) -> tuple[Any, ...]:
        return _AnyReference, (self._references, self._timeout)

    def __repr__(self) -> str:
        return f"<any of {self._references!r}>"


class _MapOnReferences(MapTargets[str]):
    """Where a map on references sends its items: to the values whose owners are in the group. A target is a name.

    Args:
        references: The references by name.
        function: Called at the owner with the value and an item.

    Raises:
        NotInitializedError: This process is in no group.
    """

    def __init__(self, references: RRefs[Any], function: Callable[..., Any]) -> None:
        super().__init__(current.current_agent())
        self._references = references
        self._function = function

    def present(self) -> list[str]:
        return self._references.present()

    def name_of(self, target: str) -> str:
        return target

    def is_lost(self, target: str, error: BaseException | None) -> bool:
        return super().is_lost(target, error) or (isinstance(error, OwnerLostError) and target not in self.present())

    def send(self, target: str, item: Any) -> Future[Any]:
        return self._references.target(target).submit(self._function, item)

    def __repr__(self) -> str:
        return repr(self._references)
