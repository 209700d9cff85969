"""`RRef` as torch has it: farcall's references with torch's words, futures and answers.

Where nothing rides along with calls (`envelopes`), fetching and calling is farcall's own. Else it goes the way of a
call, so that whatever rides along sees the value's tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, Final, Generic, TypeVar, cast

import torch

from farcall.agent.handle import handle_here
from farcall.api import current_agent, current_book
from farcall.errors import NotInitializedError, OwnerLost, RpcError, RpcTimeoutError, SerializationError, UsageError
from farcall.futures import DONE, Future
from farcall.protocol.ids import RRefId
from farcall.protocol.ids import WorkerInfo as AnyWorkerInfo
from farcall.protocol.wire import PRESENCE, TYPE
from farcall.pytorch.autograd.flat import travels_as_numbers
from farcall.pytorch.autograd.short_calls import see_through
from farcall.pytorch.constants import UNSET_RPC_TIMEOUT
from farcall.pytorch.envelopes import rides_along
from farcall.pytorch.futures import RpcFuture, failed_with
from farcall.pytorch.guarding import check_kinds
from farcall.pytorch.script_modules import check_type_hint
from farcall.pytorch.workers import WorkerInfo, as_torch
from farcall.rref import RRef as _OwnRRef
from farcall.serialization import collect, register_plain, register_reducer, take_offered
from farcall.sleeping import FOREVER

T = TypeVar("T")

_PAUSE: Final = 1e-3


class PyRRef(_OwnRRef[T]):
    """A reference to a value of type `T` on some worker."""

    __slots__ = ("_creation", "_label", "_profiling_future", "_type")

    _creation: Future[Any]
    """Of a remote call: done when its function has run."""
    _label: int
    """For people: the number by which they know the reference, on all workers."""
    _profiling_future: Any
    _type: Any
    """A future of the value's type, once somebody has asked for it."""

    def __init__(self, value: T, type_hint: Any = None) -> None:
        """A reference to a value that is here. `type_hint`: the interface of a script module.

        Raises `RuntimeError` if this process is no worker, and if it is a script module's, and not given or wrong.
        """
        check_type_hint(value, type_hint)
        try:
            super().__init__(value, type_hint)
            self._label = labels.next(1)
        except NotInitializedError as error:
            raise NotInitializedError(
                "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
            ) from error

    # Who and where

    def owner(self) -> WorkerInfo:
        """The worker on which the value lives."""
        return as_torch(super().owner())

    def confirmed_by_owner(self) -> bool:
        """Whether the owner has counted this reference. It does so by itself, soon; that is waited for.

        Raises what every use raises, if it leads nowhere; `RpcTimeoutError`.
        """
        deadline = monotonic() + (current_agent().rpc_timeout or FOREVER)
        while not self._handle.confirmed:
            self._handle.check()
            if monotonic() >= deadline:
                raise RpcTimeoutError(f"the owner of {self} has not confirmed it in time; is it still running?")
            sleep(_PAUSE)
        return True

    # The value

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """The value: itself at its owner, else a copy. Waits until it is there.

        Raises what the function of the remote call raised; `RpcTimeoutError` also if that was not through in the time
        that `remote` was given for it.
        """
        self._refuse_if_deleted("to_here() on it")
        creation = getattr(self, "_creation", None)
        if creation is not None and creation.done() and isinstance(error := creation.exception(), RpcTimeoutError):
            raise RpcTimeoutError(f"RRef creation via rpc.remote() timed out: {error}") from None
        if not self.is_owner() and rides_along(cast(Any, current_agent()), self.owner()):
            return self._ride_here(timeout)
        return super().to_here(timeout)

    def _ride_here(self, timeout: float) -> T:
        from farcall.pytorch.api import rpc_sync
        from farcall.pytorch.profiling import shown_as

        agent, owner = current_agent(), self.owner()
        with shown_as(f"to_here#({agent.info.name})->({owner.name})"):
            if rides_along(cast(Any, agent), owner):
                return cast(T, rpc_sync(owner, _value_of, (self,), timeout=timeout))
            return super().to_here(timeout)

    def local_value(self) -> T:
        """The value itself, at its owner. Raises what made it fail; `RuntimeError` on any other worker."""
        if not self.is_owner():
            rref_id, fork_id = self._ids()
            raise RuntimeError(
                f"For UserRRef(rref_id={rref_id}, fork_id={fork_id}), can't call localValue() on user "
                f"{current_agent().get_worker_info()}. Call it on owner {self.owner()}"
            )
        value = self._value_here()
        return value._value if value._state == DONE else value.wait()  # type: ignore[no-any-return]  # as in `super()`

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The type of the value; with `blocking=False` a future of it. Asked for once."""
        from farcall.pytorch import api

        future = getattr(self, "_type", None)
        if future is None or (future.done() and getattr(future, "failed", False)):
            if self.is_owner():
                future = RpcFuture(self._fetch(TYPE, timeout, unattended=not blocking))
            elif rides_along(cast(Any, current_agent()), self.owner()):
                future = api._rref_typeof_on_user(self, timeout, blocking=False)
            else:
                future = RpcFuture(self._fetch(TYPE, timeout, unattended=True))
            self._type = future
        return future.wait() if blocking else future

    def _get_future(self) -> torch.futures.Future:
        """Done when the value is there, or its function failed; fails if that takes longer than `remote` allowed."""
        if getattr(self, "_creation", None) is None:
            try:
                self._creation = self._fetch(PRESENCE, UNSET_RPC_TIMEOUT, unattended=True)
            except RpcError as error:  # it leads nowhere
                self._creation = failed_with(error)
        return RpcFuture(self._creation)

    def _watch_creation(self, timeout: float) -> None:
        """Of a remote call that must be through in a given time; also of one to this very worker."""
        ask = self._calling.call_on
        try:
            self._creation = ask(self._handle, PRESENCE, "_get_future", (), None, timeout, unattended=True)
        except RpcError as error:
            self._creation = failed_with(error)
        # If it fails and the reference is never used, nobody wants to hear of it.
        self._creation.watch(_ignore, waker=False, attended=True)

    def _get_profiling_future(self) -> torch.futures.Future:
        """Done when the profiler has what it wants of the remote call. Raises `RuntimeError` if it was not profiled."""
        future = getattr(self, "_profiling_future", None)
        if future is None:
            raise RuntimeError("Profiling future has not been set: was the profiler enabled when remote() was called?")
        return future

    def _set_profiling_future(self, profiling_future: torch.futures.Future) -> None:
        self._profiling_future = profiling_future

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs the backward pass with the value of the reference as its root. See `RRef.backward` of torch."""
        from farcall.pytorch.autograd.references import backward

        backward(self, dist_autograd_ctx_id, retain_graph)

    # Calling its methods

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """A proxy: `rref.rpc_sync().method(args)` runs the method where the value lives, and gives its result."""
        from farcall.pytorch import api, rref_proxy

        return rref_proxy.RRefProxy(self, api.rpc_sync, timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """As `rpc_sync`, but the method gives a future at once."""
        from farcall.pytorch import api, rref_proxy

        return rref_proxy.RRefProxy(self, api.rpc_async, timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """As `rpc_sync`, but the method gives a reference to its result at once, which stays where the value lives."""
        from farcall.pytorch import api, rref_proxy

        return rref_proxy.RRefProxy(self, api.remote, timeout)

    # Travelling

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _receive, self._serialize()

    def __copy__(self) -> RRef[T]:
        rref = cast("RRef[T]", RRef.of(self._handle))
        rref._label = self._label
        return rref

    def _serialize(self) -> tuple[Any, ...]:
        """What stands for it in a pickle: its place among the references of the message that is being made."""
        with suppress(OwnerLost):  # which is said, with that type, as the call is made
            self._refuse_if_deleted("fork an UserRRef")
        try:
            return collect(self._handle, self), self._label
        except SerializationError as error:
            raise SerializationError(f"Can not pickle rref in python pickler: {error}") from None

    @staticmethod
    def _deserialize(place: tuple[Any, ...]) -> RRef[Any]:
        """The reference at that place in the message that is being read."""
        return _receive(*place)

    def _refuse_if_deleted(self, what: str) -> None:
        try:
            self._handle.check()
        except UsageError as error:
            raise UsageError(f"{self} is gone ({error}). Cannot call {what} after deletion.") from None

    def _ids(self) -> tuple[str, str]:
        """Of the reference and of this handle. Its creator's own handle has the number behind the reference's."""
        reference, fork = self._handle.reference, self._handle.fork
        rref_id = _unique(reference.creator, self._label)
        if fork is None or reference.creator == self._handle.book.me:
            return rref_id, _unique(reference.creator, self._label + 1)
        return rref_id, _unique(fork.creator, fork.number)

    def __str__(self) -> str:
        rref_id, fork_id = self._ids()
        if self.is_owner():
            return f"OwnerRRef({rref_id})"
        return f"UserRRef(RRefId = {rref_id}, ForkId = {fork_id})"


class RRef(PyRRef[T], Generic[T]):
    """A reference to a value of type `T` on some worker. Made by `remote`, by `RRef(value)`, or received in a call."""

    __slots__ = ()


_new_rref: Final = RRef.__new__


class _Told:
    """A reference, as its owner is told of it by a call that keeps it until it is answered: nothing is counted."""

    __slots__ = ("_rref",)

    def __init__(self, rref: RRef[Any]) -> None:
        self._rref = rref


def _reduce_told(told: _Told) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return _receive_here, (tuple(told._rref._handle.reference), told._rref._label)


register_reducer(_Told, _reduce_told)


def _told(rref: RRef[Any], to: AnyWorkerInfo) -> _Told | None:
    """What to send in place of it in a call to that worker, if that owns the value and knows of this handle."""
    return _Told(rref) if _is_known_at(rref._handle, to) else None


def _is_known_at(handle: Any, to: AnyWorkerInfo) -> bool:
    """Whether that worker owns the value, and has counted the handle. Raises what every use of the handle raises."""
    if handle.fork is None or not handle.confirmed:
        return False
    owner = handle.book.calling.numbered.get(handle.reference.owner)
    if owner is None or owner.info.id != to.id:
        return False
    handle.check()
    return True


def _receive_here(reference: tuple[int, int, int], label: int) -> RRef[Any]:
    return _of_numbers(*reference, label)


def _of_numbers(owner: int, creator: int, number: int, label: int) -> RRef[Any]:
    book: Any = current_book()
    rref: RRef[Any] = _new_rref(RRef)
    rref._handle = handle_here(book, RRefId(owner, creator, number), "a call of another worker")
    rref._label = label
    return rref


def _numbers(rref: RRef[Any], to: AnyWorkerInfo) -> tuple[int, int, int, int] | None:
    return (*rref._handle.reference, rref._label) if _is_known_at(rref._handle, to) else None


see_through(RRef, _told)
travels_as_numbers(RRef, _numbers, _of_numbers)


def _unique(creator: int, number: int) -> str:
    return f"GloballyUniqueId(created_on={creator}, local_id={number})"


def _receive(place: int, label: int) -> RRef[Any]:
    rref = cast("RRef[Any]", RRef.of(take_offered(place)))
    rref._label = label
    return rref


def _receive_here_checked(reference: Any, label: Any) -> RRef[Any]:
    check_kinds((reference, tuple), (label, int), *((number, int) for number in reference))
    return _receive_here(reference, label)


def _receive_checked(place: Any, label: Any) -> RRef[Any]:
    check_kinds((place, int), (label, int))
    return _receive(place, label)


# Workers that restrict what others may do take references, as they take all plain data.
register_plain(_receive_here, _receive_here_checked)
register_plain(_receive, _receive_checked)


class _Labels:
    """The numbers by which people know the references that this worker makes, as torch counts: references and their
    creator's handles in one row."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """With a new agent: none were made yet."""
        self._next = 0
        self._lock = threading.Lock()

    def next(self, count: int) -> int:
        """The first of the next so many numbers."""
        with self._lock:
            first, self._next = self._next, self._next + count
        return first


labels: Final = _Labels()


def _ignore(creation: Future[Any]) -> None:
    """Somebody has looked at it."""


def _value_of(rref: PyRRef[T]) -> T:
    return rref.local_value()
