"""`RRef` as torch has it: farcall's references with torch's methods, futures and messages.

If no interceptor is active (`envelopes`), fetching a value and calling its methods are farcall's own operations.
Otherwise they are made as ordinary calls, so that the interceptors see the tensors of the value.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, Final, Generic, TypeVar, cast

import torch

from farcall.api import current_agent, current_reference_store
from farcall.errors import (
    NotInitializedError,
    OwnerLostError,
    RpcError,
    RpcTimeoutError,
    SerializationError,
    UsageError,
)
from farcall.futures import DONE, Future
from farcall.gate import FOREVER
from farcall.protocol.frames import PRESENCE, TYPE
from farcall.protocol.ids import RRefId
from farcall.protocol.ids import WorkerInfo as AnyWorkerInfo
from farcall.pytorch.allow_list import check_kinds
from farcall.pytorch.autograd.flat import travels_as_numbers
from farcall.pytorch.autograd.short_calls import see_through
from farcall.pytorch.constants import UNSET_RPC_TIMEOUT
from farcall.pytorch.envelopes import rides_along
from farcall.pytorch.futures import RpcFuture, failed_future
from farcall.pytorch.internal import _internal_rpc_pickler, _InternalRPCPickler
from farcall.pytorch.script_modules import check_type_hint
from farcall.pytorch.worker_info import WorkerInfo, as_torch
from farcall.rref import RRef as _OwnRRef
from farcall.serialization import collect, register_plain, register_reducer, take_offered

T = TypeVar("T")

_POLL_INTERVAL_S: Final = 1e-3


class PyRRef(_OwnRRef[T]):
    """A reference to a value of type `T`, which lives on one worker, its owner. `remote` returns one.

    `to_here()` fetches the value, and `rpc_sync().method(args)` calls a method of the value on the owner. `RRef(value)`
    creates a reference to a value of this worker. For a script module, `type_hint` is its TorchScript interface.

    The private fields are futures about the value and the call, and the label: the number that `str(rref)` shows.
    """

    __slots__ = ("_creation", "_label", "_profiling_future", "_type")

    _creation: Future[Any]
    """A future that is done when the function of the call by `remote` has run."""
    _label: int
    """The number of the reference in `str(rref)`. It is the same on all workers."""
    _profiling_future: Any
    _type: Any
    """A future of the value's type, set when it was first asked for."""

    def __init__(self, value: T, type_hint: Any = None) -> None:
        """Creates a reference to a value of this worker. The value is not copied.

        Args:
            value: The value; anything, None included.
            type_hint: The TorchScript interface of the value, required for a script module. None for anything else.

        Raises:
            RuntimeError: This process is not a worker, or the type hint is missing, wrong or forbidden.
        """
        check_type_hint(value, type_hint)
        try:
            super().__init__(value, type_hint)
            self._label = labels.next(1)
        except NotInitializedError as error:
            raise NotInitializedError(
                "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
            ) from error

    # -- the owner

    def owner(self) -> WorkerInfo:
        """Returns the name and rank of the worker on which the value lives.

        Raises `OwnerLostError` if that worker left so long ago that this worker has forgotten it.
        """
        return as_torch(super().owner())

    def confirmed_by_owner(self) -> bool:
        """Waits until the owner has counted this reference, and returns True. That usually takes milliseconds.

        Returns True at once on the owner. If the default timeout of calls is 0, the wait has no limit.

        Raises:
            RpcTimeoutError: The owner did not confirm the reference within the default timeout of calls.
            RpcError: The reference cannot be used any more: its owner was lost, or it was deleted.
        """
        deadline = monotonic() + (current_agent().rpc_timeout or FOREVER)
        while not self._handle.confirmed:
            self._handle.check()
            if monotonic() >= deadline:
                raise RpcTimeoutError(f"the owner of {self} has not confirmed it in time; is it still running?")
            sleep(_POLL_INTERVAL_S)
        return True

    # -- the value

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Returns the value: the value itself on its owner, a copy on any other worker. Waits until the value is there.

        Args:
            timeout: Seconds until the fetch fails; 0 for no timeout. By default the timeout of `init_rpc`'s options. A
                negative number other than the default -1 raises `UsageError`.

        Raises:
            RpcTimeoutError: The fetch timed out, or the function did not return within the timeout that was given to
                `remote`.
            OwnerLostError: The owner was lost.
            UsageError: The reference was deleted, for example by a shutdown.
            SerializationError: The value cannot be pickled.
            Exception: The error of the function that `remote` called, if that function failed.
        """
        self._check_not_deleted("to_here() on it")
        creation = getattr(self, "_creation", None)
        if creation is not None and creation.done() and isinstance(error := creation.exception(), RpcTimeoutError):
            raise RpcTimeoutError(f"RRef creation via rpc.remote() timed out: {error}") from None
        if not self.is_owner() and rides_along(cast(Any, current_agent()), self.owner()):
            return self._fetch_by_call(timeout)
        return super().to_here(timeout)

    def _fetch_by_call(self, timeout: float) -> T:
        """Fetches the value from its owner with an ordinary call, so that interceptors see its tensors. Returns a copy.

        Args:
            timeout: Seconds until the fetch fails; 0 for no timeout, -1 for the timeout of `init_rpc`'s options.

        Raises:
            RuntimeError: The fetch timed out (`RpcTimeoutError`), or the owner was lost (`OwnerLostError`).
            Exception: The error of the function that should have created the value, if that function failed.
        """
        from farcall.pytorch.api import rpc_sync
        from farcall.pytorch.profiler import shown_as

        agent, owner = current_agent(), self.owner()
        with shown_as(f"to_here#({agent.info.name})->({owner.name})"):
            if rides_along(cast(Any, agent), owner):
                return cast(T, rpc_sync(owner, _value_of, (self,), timeout=timeout))
            return super().to_here(timeout)

    def local_value(self) -> T:
        """Returns the value itself, on its owner. Waits without a limit until the value is there.

        Raises:
            RuntimeError: This worker is not the owner, or the reference was deleted.
            Exception: The error of the function that `remote` called, if that function failed.
        """
        if not self.is_owner():
            rref_id, fork_id = self._ids()
            raise RuntimeError(
                f"For UserRRef(rref_id={rref_id}, fork_id={fork_id}), can't call localValue() on user "
                f"{current_agent().get_worker_info()}. Call it on owner {self.owner()}"
            )
        value = self._value_here()
        return value._value if value._state == DONE else value.wait()  # type: ignore[no-any-return]  # as in `super()`

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Returns the type of the value. The owner is asked once, and the answer is kept.

        Args:
            timeout: Seconds until asking fails; 0 for no timeout. By default (-1) the timeout of `init_rpc`'s options.
                Ignored if the answer is known.
            blocking: If False, returns a torch future of the type at once. The future fails if the owner does not
                answer in time, or with what the function of the call by `remote` raised.

        Raises:
            RpcTimeoutError: The owner did not answer in time. The next call asks again.
            OwnerLostError: The owner was lost.
            UsageError: The reference was deleted, or `timeout` is negative and not -1.
            Exception: What the function of the call by `remote` raised.
        """
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
        """Returns a torch future that is done when the value exists. Raises nothing.

        The future fails with what the function of the call by `remote` raised. On other workers than the owner, it also
        fails if the function did not return within the timeout that was given to `remote`, or else within the default
        timeout of calls. It has failed already if the reference was deleted or its owner was lost.
        """
        if getattr(self, "_creation", None) is None:
            try:
                self._creation = self._fetch(PRESENCE, UNSET_RPC_TIMEOUT, unattended=True)
            except RpcError as error:  # it leads nowhere
                self._creation = failed_future(error)
        return RpcFuture(self._creation)

    def _watch_creation(self, timeout: float) -> None:
        """Makes `to_here` fail if the function of the call by `remote` does not return within `timeout` seconds.

        0 means no timeout, and -1 the default timeout of calls. The future that `_get_future` returns fails at the
        timeout, too. With any other negative number, that future has failed already, but `to_here` does not fail.
        Raises nothing.
        """
        ask = self._calling.call_on
        try:
            self._creation = ask(self._handle, PRESENCE, "_get_future", (), None, timeout, unattended=True)
        except RpcError as error:
            self._creation = failed_future(error)
        # With a callback its failure counts as seen: if the reference is never used, no warning is logged.
        self._creation.watch(_ignore, waker=False, attended=True)

    def _get_profiling_future(self) -> torch.futures.Future:
        """Returns a torch future that is done when the profiler of the caller has the events of the call by `remote`.

        Raises `RuntimeError` if no profiler was active when `remote` was called, and on other workers than the caller.
        """
        future = getattr(self, "_profiling_future", None)
        if future is None:
            raise RuntimeError("Profiling future has not been set: was the profiler enabled when remote() was called?")
        return future

    def _set_profiling_future(self, profiling_future: torch.futures.Future) -> None:
        """Sets the future that `_get_profiling_future` returns. Replaces an earlier one."""
        self._profiling_future = profiling_future

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs the backward pass of autograd with the value of this reference as its root, and waits for its end.

        Args:
            dist_autograd_ctx_id: The id of the distributed autograd context, in which gradients are accumulated. By
                default (-1) the pass is local and gradients go to `.grad`, which works on the owner only.
            retain_graph: If True, keeps the graph for another pass.

        Raises:
            RuntimeError: The value is not a scalar tensor that requires grad, the context does not exist, or this
                worker is not the owner and no context is given.
        """
        from farcall.pytorch.autograd.references import backward

        backward(self, dist_autograd_ctx_id, retain_graph)

    # -- methods of the value

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy: `rref.rpc_sync().method(args)` runs the method on the owner, and returns its result.

        Nothing is sent before a method is called. A method that does not exist raises `AttributeError` then.

        Args:
            timeout: Seconds until each call of the proxy fails; 0 for no timeout. By default (-1) the timeout of
                `init_rpc`'s options. Any other negative number raises `UsageError` when a method is called.
        """
        from farcall.pytorch import api, rref_proxy

        return rref_proxy.RRefProxy(self, api.rpc_sync, timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy: `rref.rpc_async().method(args)` runs the method on the owner, and returns a future at once.

        Nothing is sent before a method is called. If the method does not exist, the future fails with `AttributeError`.

        Args:
            timeout: Seconds until each future of the proxy fails; 0 for no timeout. By default (-1) the timeout of
                `init_rpc`'s options. Any other negative number raises `UsageError` when a method is called.
        """
        from farcall.pytorch import api, rref_proxy

        return rref_proxy.RRefProxy(self, api.rpc_async, timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy: `rref.remote().method(args)` runs the method on the owner, and returns a reference.

        The reference is to the result of the method, which stays on the owner. A call of the proxy first waits for the
        type of the value, and raises `AttributeError` if the type has no such method. While an interceptor such as the
        profiler is active, it does not wait, and fetching the result raises instead.

        Args:
            timeout: Seconds after which fetching a result fails if the method has not returned; 0 for no timeout. By
                default there is none.
        """
        from farcall.pytorch import api, rref_proxy

        return rref_proxy.RRefProxy(self, api.remote, timeout)

    # -- serialization

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _internal_rpc_pickler._py_rref_reducer(self)

    def __copy__(self) -> PyRRef[T]:
        rref = cast("PyRRef[T]", PyRRef.of(self._handle))
        rref._label = self._label
        return rref

    def _serialize(self) -> tuple[Any, ...]:
        """Returns what stands for the reference in a pickle: its index in the message's references, and its label.

        The label is the number of the reference in `str(rref)`.

        Raises `SerializationError` if this thread is not writing a message of a call, and `UsageError` if the reference
        was deleted.
        """
        with suppress(OwnerLostError):  # the call itself raises it
            self._check_not_deleted("fork an UserRRef")
        try:
            return collect(self._handle, self), self._label
        except SerializationError as error:
            raise SerializationError(f"Can not pickle rref in python pickler: {error}") from None

    @staticmethod
    def _deserialize(place: tuple[Any, ...]) -> PyRRef[Any]:
        """Returns the reference for `place`, a result of `_serialize`, in the message that this thread is reading.

        Raises `SerializationError` if this thread is not reading a message, or the message has no such reference.
        Raises `TypeError` if `place` does not have two items.
        """
        return _receive(*place)

    def _check_not_deleted(self, what: str) -> None:
        """Returns None if the reference can be used.

        Raises `UsageError` if it was deleted, `OwnerLostError` if its owner was lost, and another `RpcError` if the
        owner refused it.

        Args:
            what: The operation that the caller is about to do, for the message.
        """
        try:
            self._handle.check()
        except UsageError as error:
            raise UsageError(f"{self} is gone ({error}). Cannot call {what} after deletion.") from None

    def _ids(self) -> tuple[str, str]:
        """Returns the ids of the reference and of this fork as texts.

        For example `GloballyUniqueId(created_on=1, local_id=2)`: the id of the worker that created it, and the number
        that torch would give it there.
        """
        reference, fork = self._handle.reference, self._handle.fork
        rref_id = _unique_id_text(reference.creator, self._label)
        if fork is None or reference.creator == self._handle.reference_store.me:
            return rref_id, _unique_id_text(reference.creator, self._label + 1)
        return rref_id, _unique_id_text(fork.creator, fork.number)

    def __str__(self) -> str:
        """Returns the text that torch's references have.

        That is `OwnerRRef(...)` with the id of the reference on the owner, else `UserRRef(...)` with the ids of the
        reference and of this fork.
        """
        rref_id, fork_id = self._ids()
        if self.is_owner():
            return f"OwnerRRef({rref_id})"
        return f"UserRRef(RRefId = {rref_id}, ForkId = {fork_id})"


class RRef(PyRRef[T], Generic[T]):
    """A reference that its owner creates: `RRef(value)`. Also the type for annotations: `RRef[int]`.

    The constructor takes the value, and for a script module its TorchScript interface as `type_hint`. It raises
    `RuntimeError` if this process is not a worker, or if the type hint is missing or wrong.

    As in torch, references that `remote` returns or that calls receive are exactly of type `PyRRef`, because programs
    test `type(rref) is PyRRef`. Also as in torch, only an `RRef` can have attributes of the program's own.
    """


_new_rref: Final = PyRRef.__new__


class _ToOwner:
    """Stands for a reference in a call to the owner of its value. The owner does not count a new fork for it.

    That is safe because the caller keeps its own fork until the call is answered.

    Args:
        rref: The reference. The owner must have counted the fork of this worker; that is not checked.
    """

    __slots__ = ("_rref",)

    def __init__(self, rref: PyRRef[Any]) -> None:
        self._rref = rref


def _reduce_to_owner(wrapped: _ToOwner) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns what pickle needs to rebuild the reference in `wrapped` on its owner: a function, and the id and label.

    The label is the number of the reference in `str(rref)`.
    """
    return _receive_here, (tuple(wrapped._rref._handle.reference), wrapped._rref._label)


register_reducer(_ToOwner, _reduce_to_owner)


def _for_owner(rref: PyRRef[Any], to: AnyWorkerInfo) -> _ToOwner | None:
    """Returns a `_ToOwner`, to be sent in place of `rref` in a call to worker `to`. It saves counting a new fork.

    Returns None if the reference must be sent as usual: `to` does not own the value, or has not counted this fork yet.
    Raises `UsageError` if the reference was deleted.
    """
    return _ToOwner(rref) if _is_known_at(rref._handle, to) else None


def _is_known_at(handle: Any, to: AnyWorkerInfo) -> bool:
    """Returns True if worker `to` owns the value of `handle` and has counted this fork; else False.

    `handle` is the `_handle` of a reference. Raises an `RpcError` if the reference cannot be used any more:
    `OwnerLostError` if its owner was lost, `UsageError` if it was deleted.
    """
    if handle.fork is None or not handle.confirmed:
        return False
    owner = handle.reference_store.calling.numbered.get(handle.reference.owner)
    if owner is None or owner.info.id != to.id:
        return False
    handle.check()
    return True


def _receive_here(reference: tuple[int, int, int, bytes], label: int) -> PyRRef[Any]:
    """Returns a reference to a value that this worker owns.

    Raises `ReferenceRefusedError` if this worker has no value with that id and token.

    Args:
        reference: The id of the reference: the numbers of owner, creator and reference, and the token.
        label: The number of the reference in `str(rref)`.
    """
    return _from_numbers(*reference, label)


def _from_numbers(owner: int, creator: int, number: int, token: bytes, label: int) -> PyRRef[Any]:
    """Returns a reference to a value that this worker owns.

    Raises `ReferenceRefusedError` if this worker has no value with that id and token.

    Args:
        owner: The id of the worker that owns the value.
        creator: The id of the worker that created the reference.
        number: The number that the creator gave to the reference.
        token: The secret number of the reference.
        label: The number of the reference in `str(rref)`.
    """
    store: Any = current_reference_store()
    rref: PyRRef[Any] = _new_rref(PyRRef)
    rref._handle = store.share_own(RRefId(owner, creator, number, token), "a call of another worker")
    rref._label = label
    return rref


def _as_numbers(rref: PyRRef[Any], to: AnyWorkerInfo) -> tuple[int, int, int, bytes, int] | None:
    """Returns the id and the label of `rref` as a tuple, to be sent to worker `to` in place of the reference.

    The tuple is the numbers of owner, creator and reference, the token, and the label, which is the number in
    `str(rref)`. Returns None if the reference must be sent as usual: `to` does not own the value, or has not counted
    this fork yet. Raises `UsageError` if the reference was deleted.
    """
    return (*rref._handle.reference, rref._label) if _is_known_at(rref._handle, to) else None


see_through(PyRRef, _for_owner)
see_through(RRef, _for_owner)
travels_as_numbers(PyRRef, _as_numbers, _from_numbers)  # not `RRef`: only its owner has it, and sends it to others


def _unique_id_text(creator: int, number: int) -> str:
    """Returns an id as torch writes it. For `(1, 2)` that is `GloballyUniqueId(created_on=1, local_id=2)`."""
    return f"GloballyUniqueId(created_on={creator}, local_id={number})"


def _receive(place: int, label: int) -> PyRRef[Any]:
    """Returns a reference of the message that this thread is reading.

    Raises `SerializationError` if this thread is not reading a message, or the message has no such reference.

    Args:
        place: The index of the reference among the references of the message.
        label: The number of the reference in `str(rref)`.
    """
    rref = cast("PyRRef[Any]", PyRRef.of(take_offered(place)))
    rref._label = label
    return rref


def _receive_here_checked(reference: Any, label: Any) -> PyRRef[Any]:
    """Returns a reference to a value that this worker owns, after it has checked the types of the arguments.

    It is for workers with an allow-list. Raises `TypeError` if an argument has the wrong type or length, and
    `ReferenceRefusedError` if this worker has no value with that id and token.

    Args:
        reference: The id of the reference: a tuple of the numbers of owner, creator and reference, and the token.
        label: The number of the reference in `str(rref)`, an int.
    """
    check_kinds((reference, tuple), (label, int))
    *numbers, token = reference or (None,)
    check_kinds((token, bytes), *((number, int) for number in numbers))
    return _receive_here(reference, label)


def _receive_checked(place: Any, label: Any) -> PyRRef[Any]:
    """Returns a reference of the message that this thread is reading, after it has checked the arguments.

    It is for workers with an allow-list. Raises `TypeError` unless both are integers, and `SerializationError` if the
    message has no such reference.

    Args:
        place: The index of the reference among the references of the message.
        label: The number of the reference in `str(rref)`.
    """
    check_kinds((place, int), (label, int))
    return _receive(place, label)


def _receive_place_checked(place: Any) -> PyRRef[Any]:
    """Returns the reference that `place` stands for in the message that this thread is reading.

    It is for workers with an allow-list. `place` is a tuple of the index of the reference among those of the message,
    and of its number in `str(rref)`. Raises `TypeError` unless `place` is a tuple of two integers, and
    `SerializationError` if the message has no such reference.
    """
    check_kinds((place, tuple))
    return _receive_checked(*place)


# Workers with an allow-list accept references, as they accept all plain data.
register_plain(_receive_here, _receive_here_checked)
register_plain(_InternalRPCPickler._py_rref_receiver, _receive_place_checked)


class _Labels:
    """Gives numbers to the references that this worker creates, for `str(rref)`, as torch counts them.

    As in torch, a reference and the fork of its creator have consecutive numbers. The constructor takes no arguments,
    and starts from 0.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Starts again from 0, for a new agent of this process."""
        self._next = 0
        self._lock = threading.Lock()

    def next(self, count: int) -> int:
        """Reserves `count` numbers, and returns the first of them. `count` is not checked. Safe for several threads."""
        with self._lock:
            first, self._next = self._next, self._next + count
        return first


labels: Final = _Labels()


def _ignore(creation: Future[Any]) -> None:
    """Does nothing. As a callback of a future, it makes the future's failure count as seen."""


def _value_of(rref: PyRRef[T]) -> T:
    """Called remotely on the owner: waits until the value of `rref` exists, and returns it.

    Raises `RuntimeError` if another worker owns the value. If the function that should have created the value failed,
    raises its error.
    """
    return rref.local_value()
