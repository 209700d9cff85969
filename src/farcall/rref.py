"""`RRef`, a reference to a value that lives on one worker.

The holder of a reference can fetch the value (`to_here`), call methods of the value on its owner
(`rpc_sync().method(...)`), or pass the reference on in the arguments and results of calls. The owner frees the value
when the last copy of the reference is gone. Nothing is freed by hand.

An `RRef` is the public face of a handle. `backends.interface` says what handles must do, `runtime.handles` has
farcall's own handles, `runtime.reference_store` acts when a handle is created or dropped, and `protocol.refcount` has
the messages between workers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from sys import _getframe
from time import monotonic
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar, Unpack, cast, overload

from farcall.current import current_reference_store
from farcall.errors import OwnerLostError, ReferenceRefusedError, RpcTimeoutError, UsageError, WorkerLostError
from farcall.futures import DONE, Future, awaited_together, wait_or_cancel
from farcall.gate import FOREVER
from farcall.options import UNSET_RPC_TIMEOUT, CallOptions, call_timeout
from farcall.protocol.frames import METHOD, PRESENCE, TYPE, VALUE
from farcall.protocol.ids import WorkerInfo
from farcall.serialization import callable_name, collect, encode_function, take_offered

if TYPE_CHECKING:
    from farcall.backends.interface import Handle, ReferenceCalls

T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")
P = ParamSpec("P")


class Target(Generic[T_co]):
    """Something that stands for a value that lives on one worker: an `RRef`, or what its `options` returns.

    Its verbs run `func(value, *args, **kwargs)` where the value lives: `call` returns the result, `submit` a future of
    it, and `keep` a reference to it. `func` is a method (`Shelf.put`), any other function (`len`, a lambda), or a str
    with the name of a method. A function of a class body is looked up on the value by its name, so overrides, abstract
    classes and protocols work. Programs do not create a `Target`.

    Example:
        >>> numbers = farcall.worker("w1").keep(list, (3, 1, 2))
        >>> numbers.call(len)
        3
    """

    __slots__ = ()

    _handle: Handle
    _timeout: float = UNSET_RPC_TIMEOUT

    @property
    def handle(self) -> Handle:
        """The handle of the reference, through which its calls are made."""
        return self._handle

    def options(self, **options: Unpack[CallOptions]) -> Target[T_co]:
        """Returns an object for the same value whose calls have these options. This object does not change.

        Args:
            options: `timeout` is the only one: how many seconds each call may take, more than 0; None means no limit.
                Without it the timeout stays as it was.

        Raises:
            UsageError: There is no such option, or `timeout` is negative or not a number.
            RpcTimeoutError: `timeout` is 0, so it is over already.
        """
        return _TargetWithOptions(self._handle, call_timeout(options, self._timeout))

    # In each group of overloads: a text, an `async def` function, one marked `async_execution`, any other callable.

    @overload
    def call(self, func: str, /, *args: Any, **kwargs: Any) -> Any: ...
    @overload
    def call(
        self, func: Callable[Concatenate[T_co, P], Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    def call(self, func: Callable[Concatenate[T_co, P], Future[R]], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def call(self, func: Callable[Concatenate[T_co, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def call(self, func: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Any:
        """Runs `func(value, *args, **kwargs)` where the value lives, on its owner, and returns what it returns.

        Waits until the value exists and the function has returned. The timeout is the one given to `options`; by
        default the `rpc_timeout` of this worker.

        Args:
            func: A method (`Shelf.put`), any other function of the value (`len`, a lambda), or the name of a method as
                a str.
            *args: Further positional arguments.
            **kwargs: Its keyword arguments.

        Raises:
            Exception: What the function raises, or what the function raised that was to make the value.
            AttributeError: The value has no such method.
            RpcTimeoutError: The timeout expired.
            OwnerLostError: The owner was lost.
            WorkerLostError: The owner cannot be reached.
            ReferenceRefusedError: The owner does not have the value any more.
            UsageError: `func` is neither a function nor the name of a method, an argument cannot be pickled
                (`SerializationError`), or this worker has released the reference, for example by a shutdown.
        """
        name, args = _callee(func, args)
        handle = self._handle
        return handle.reference_store.calling.call_on(handle, METHOD, name, args, kwargs, self._timeout).wait()

    @overload
    def submit(self, func: str, /, *args: Any, **kwargs: Any) -> Future[Any]: ...
    @overload
    def submit(
        self, func: Callable[Concatenate[T_co, P], Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...
    @overload
    def submit(
        self, func: Callable[Concatenate[T_co, P], Future[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...
    @overload
    def submit(self, func: Callable[Concatenate[T_co, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    def submit(self, func: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Runs `func(value, *args, **kwargs)` where the value lives. Returns a future of the result without waiting.

        The future fails with what the function raises, with `AttributeError` if the value has no such method, with
        `RpcTimeoutError` when the timeout expires, with `OwnerLostError` or `WorkerLostError` if the owner is lost or
        cannot be reached, and with `ReferenceRefusedError` if the owner does not have the value any more. The timeout
        is the one given to `options`; by default the `rpc_timeout` of this worker.

        Args:
            func: A method (`Shelf.put`), any other function of the value (`len`, a lambda), or the name of a method as
                a str.
            *args: Further positional arguments.
            **kwargs: Its keyword arguments.

        Raises:
            UsageError: `func` is neither a function nor the name of a method, an argument cannot be pickled
                (`SerializationError`), or this worker has released the reference, for example by a shutdown.
        """
        name, args = _callee(func, args)
        handle, future = self._handle, None
        try:
            future = handle.reference_store.calling.call_on(
                handle, METHOD, name, args, kwargs, self._timeout, unattended=True
            )
        except (WorkerLostError, ReferenceRefusedError, RpcTimeoutError) as error:
            future = Future()
            future.set_exception(error)
        future.made_by(_getframe(1))
        if awaited_together:
            awaited_together.note(future)
        return future

    @overload
    def keep(self, func: str, /, *args: Any, **kwargs: Any) -> RRef[Any]: ...
    @overload
    def keep(
        self, func: Callable[Concatenate[T_co, P], Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RRef[R]: ...
    @overload
    def keep(
        self, func: Callable[Concatenate[T_co, P], Future[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RRef[R]: ...
    @overload
    def keep(self, func: Callable[Concatenate[T_co, P], R], /, *args: P.args, **kwargs: P.kwargs) -> RRef[R]: ...
    def keep(self, func: Callable[..., Any] | str, /, *args: Any, **kwargs: Any) -> RRef[Any]:
        """Runs `func(value, *args, **kwargs)` on the owner, the worker where the value lives, which keeps the result.

        Returns a reference to the result at once. If the function raises, fetching the result and calling on it raise
        the same error. A timeout given to `options` does not apply.

        Args:
            func: A method (`Shelf.put`), any other function of the value (`len`, a lambda), or the name of a method as
                a str.
            *args: Further positional arguments.
            **kwargs: Its keyword arguments.

        Raises:
            OwnerLostError: The owner was lost.
            WorkerLostError: The owner cannot be reached.
            RpcTimeoutError: A connection to the owner could not be opened within the `rpc_timeout` of this worker.
            ReferenceRefusedError: The owner does not have the value any more.
            UsageError: `func` is neither a function nor the name of a method, an argument cannot be pickled
                (`SerializationError`), or this worker has released the reference, for example by a shutdown.
        """
        name, args = _callee(func, args)
        handle = self._handle
        return RRef.of(handle.reference_store.calling.remote_on(handle, name, args, kwargs))


class _TargetWithOptions(Target[T_co]):
    """What `Target.options` returns: the value of a reference, and the timeout of calls on it. Nothing is checked.

    Args:
        handle: A handle of the reference: the object of the runtime behind an `RRef`.
        timeout: The timeout of each call in seconds; 0 means no limit, -1 the `rpc_timeout` of this worker.
    """

    __slots__ = ("_handle", "_timeout")

    def __init__(self, handle: Handle, timeout: float) -> None:
        self._handle = handle
        self._timeout = timeout

    def __reduce__(self) -> tuple[Any, ...]:
        return _TargetWithOptions, (self._handle, self._timeout)

    def __repr__(self) -> str:
        return f"{RRef.of(self._handle)!r}.options(timeout={self._timeout or None})"


def submit_to_all(
    references: Sequence[Target[Any]],
    func: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
) -> list[Future[Any]]:
    """Runs `func(value, *args, **kwargs)` where the value of each reference lives. Returns futures without waiting.

    The arguments are pickled once, unless the references belong to several agents.

    Args:
        references: The references; at least one.
        func: A method, another function of the value, or the name of a method.
        args: Its other positional arguments.
        kwargs: Its keyword arguments.
        timeout: The timeout of each call in seconds; 0 means no limit, -1 the `rpc_timeout` of this worker.

    Raises:
        UsageError: `func` is neither a function nor the name of a method, or an argument cannot be pickled
            (`SerializationError`).
    """
    name, args = _callee(func, args)
    handles = [reference.handle for reference in references]
    by_store: dict[int, list[int]] = {}
    for place, handle in enumerate(handles):
        by_store.setdefault(id(handle.reference_store), []).append(place)
    futures: dict[int, Future[Any]] = {}
    for places in by_store.values():
        calling = handles[places[0]].reference_store.calling
        sent = calling.call_on_many([handles[place] for place in places], name, args, kwargs, timeout)
        futures.update(zip(places, sent, strict=True))
    return [futures[place] for place in range(len(handles))]


class _FunctionOfValue(str):
    """The name of a function, in a request that calls the function with the value of a reference as its first argument.

    The text is the encoded name: the module, a zero byte and the path in the module. It is empty if the function itself
    is the first argument of the request. The attribute `__qualname__` is the readable name, for messages.
    """

    __slots__ = ("__qualname__",)


def _callee(func: Callable[..., Any] | str, args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Returns the name that a request on the value of a reference has for `func`, and the arguments of the request.

    The name is that of a method, or the encoded name of another function: its module, a zero byte and its path. A
    function that other workers cannot find by name, such as a lambda, has an empty name and is put before `args`.
    Raises `UsageError` if `func` is neither callable nor a str that is an identifier.
    """
    if isinstance(func, str):
        if not func.isidentifier():
            raise UsageError(f"{func!r} is not the name of a method")
        return func, args
    if not callable(func):
        raise UsageError(f"{func!r} cannot be called: give a method, another function of the value, or a name")
    method = _name_of_method(func)
    if method is not None:
        return method, args
    encoded = encode_function(func)
    name = _FunctionOfValue(encoded.decode() if encoded is not None else "")
    name.__qualname__ = callable_name(func)  # type: ignore[attr-defined]
    return name, args if encoded is not None else (func, *args)


def _name_of_method(func: Callable[..., Any]) -> str | None:
    """Returns the name by which a function of a class body is found on an instance, for example `put` for `Shelf.put`.

    A private name gets Python's prefix (`_Shelf__put`). Returns None for any other callable: a module's function, a
    lambda, a bound method, a static method or a class.
    """
    qualname = getattr(func, "__qualname__", None)
    if not isinstance(qualname, str) or getattr(func, "__self__", None) is not None:  # bound to something else
        return None
    outer, dot, name = qualname.rpartition(".")
    if not dot or outer.endswith("<locals>") or isinstance(func, type) or not name.isidentifier():
        return None
    cls: Any = sys.modules.get(getattr(func, "__module__", None) or "")
    for part in outer.split("."):
        cls = getattr(cls, part, None)
    if isinstance(cls, type) and isinstance(vars(cls).get(name), staticmethod):
        return None  # it gets the value as an argument, which a look-up on the value would leave out
    if name.startswith("__") and not name.endswith("__"):  # Python changes such names in class bodies
        return f"_{outer.rpartition('.')[2].lstrip('_')}{name}"
    return name


class RRef(Target[T_co]):
    """A reference to a value on some worker, the owner.

    References are created by `keep` or `remote`, or by `RRef(value)` for a value of this worker, or received in a call.
    `to_here` fetches the value; `call`, `submit` and `keep` run functions on it where it lives. The owner frees the
    value when the last reference to it is gone. Two references are equal if they refer to the same value.

    Args:
        value: The value, which is not copied. This worker is its owner.
        type_hint: Ignored. Programs written for torch pass it.

    Raises:
        NotInitializedError: This process is not a worker.

    Example:
        >>> numbers = farcall.remote("worker1", list, args=((3, 1, 2),))
        >>> numbers.to_here()
        [3, 1, 2]
    """

    __slots__ = ("__weakref__", "_handle", "_proxy")

    _handle: Handle
    _proxy: Proxy
    """The proxy that `rpc_sync()` returns. Its first call without a timeout sets it; before, the attribute does not
    exist.
    """

    def __init__(self, value: T_co, type_hint: Any = None) -> None:
        """Creates a reference to a value of this worker, which becomes its owner.

        Args:
            value: The value; anything, also None. It is not copied.
            type_hint: Ignored. Programs written for torch pass it.

        Raises:
            NotInitializedError: This process is not a worker.
            ForkedProcessError: Only the parent of this forked process is a worker.
            ExpelledError: The group has declared this worker lost.
            UsageError: The backend of this worker has no references.
        """
        self._handle = current_reference_store().own(value)

    @classmethod
    def of(cls, handle: Handle) -> RRef[Any]:
        """Returns a reference that uses an existing handle, the object of the runtime that the owner counts.

        The owner does not count one more: all references with this handle share it. `handle` is not checked.
        """
        rref = cls.__new__(cls)
        rref._handle = handle
        return rref

    @property
    def _calling(self) -> ReferenceCalls:
        """The object of the runtime that sends requests about the value to its owner.

        Raises `UsageError` if the backend of this worker has no references.
        """
        return self._handle.reference_store.calling

    # Who and where

    def is_owner(self) -> bool:
        """Returns True if the value lives on this worker, else False."""
        return self._handle.reference.owner == self._handle.reference_store.me

    def owner(self) -> WorkerInfo:
        """Returns the name and id of the worker that owns the value. Sends nothing.

        Raises:
            OwnerLostError: The owner left or was lost so long ago that this worker has forgotten its name.
        """
        peer = self._calling.numbered.get(self._handle.reference.owner)
        if peer is None:
            raise OwnerLostError(
                f"the owner of {self._handle.reference} left so long ago that its name is not known any more"
            )
        return peer.info

    def owner_name(self) -> str:
        """Returns the name of the worker that owns the value.

        Raises:
            OwnerLostError: The owner left or was lost so long ago that this worker has forgotten its name.
        """
        return self.owner().name

    def confirmed_by_owner(self) -> bool:
        """Returns whether the owner has confirmed that it counts this copy of the reference; always True on the owner.

        The reference can be used while this is still False.
        """
        return self._handle.confirmed

    # The value

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T_co:
        """Waits until the value exists and returns it: the value itself on its owner, a copy on other workers.

        Args:
            timeout: How many seconds to wait; 0 means no limit. The default is the `rpc_timeout` of this worker.

        Raises:
            RpcTimeoutError: The timeout expired.
            OwnerLostError: The owner was lost.
            WorkerLostError: The owner cannot be reached.
            ReferenceRefusedError: The owner does not have the value any more.
            UsageError: `timeout` is negative or not a number, or this worker has released the reference, for example by
                a shutdown.
            SerializationError: The value cannot be pickled.
            Exception: The exception of the function that was to create the value.
        """
        handle = self._handle
        if handle.fork is not None:
            return handle.reference_store.calling.fetch(handle, timeout)  # type: ignore[no-any-return]
        return cast(T_co, self._fetch(VALUE, timeout).wait())

    def local_value(self) -> T_co:
        """Waits, without a limit, until the value exists, and returns the value itself. Works only on the owner.

        Raises:
            UsageError: Another worker owns the value, or this worker has released the reference, for example by a
                shutdown.
            Exception: The exception of the function that was to create the value.
        """
        if not self.is_owner():
            raise UsageError(
                f"{self!r} belongs to worker {self.owner_name()!r}: local_value() works only there; "
                "use to_here() for a copy, or rpc_sync() to call its methods there"
            )
        value = self._value_here()
        # Not cast() and not only wait(): it is on the path of nearly every call that is given a reference.
        return value._value if value._state == DONE else value.wait()  # type: ignore[no-any-return]

    def __await__(self) -> Generator[Any, None, T_co]:
        """Waits for the value without blocking the event loop, and returns it.

        Returns the value itself on its owner, a copy on other workers. On other workers than the owner it waits at most
        the `rpc_timeout` of this worker; on the owner there is no limit.

        Raises:
            RpcTimeoutError: The timeout expired.
            OwnerLostError: The owner was lost.
            WorkerLostError: The owner cannot be reached.
            ReferenceRefusedError: The owner does not have the value any more.
            UsageError: This worker has released the reference, for example by a shutdown.
            SerializationError: The value cannot be pickled.
            Exception: The exception of the function that was to create the value.
        """
        return cast("Future[T_co]", self._fetch(VALUE, UNSET_RPC_TIMEOUT, unattended=True)).__await__()

    def _value_here(self) -> Future[Any]:
        """Returns the future of a value that this worker owns. Must not be called on other workers.

        Raises `UsageError` if this worker has released the reference, for example by a shutdown, and `ExpelledError` if
        the group has declared this worker lost.
        """
        handle = self._handle
        handle.check()
        assert handle.value is not None
        return handle.value

    def _fetch(self, what: bytes, timeout: float, unattended: bool = False) -> Future[Any]:
        """Returns a future of the value, or of something about the value.

        Args:
            what: `VALUE` for the value, `TYPE` for its type, `PRESENCE` for None as soon as the value exists.
            timeout: Seconds; 0 means no limit, `UNSET_RPC_TIMEOUT` the `rpc_timeout` of this worker. Not checked and
                not applied on the owner if `unattended` is True.
            unattended: True if the caller will not wait for the future at once. If False, and this worker is the owner,
                this method waits until the value exists.

        Raises:
            RpcTimeoutError: On the owner, the value did not exist within the timeout.
            OwnerLostError: The owner was lost.
            WorkerLostError: The owner cannot be reached.
            ReferenceRefusedError: The owner does not have the value any more.
            UsageError: `timeout` is negative or not a number, or this worker has released the reference.
        """
        if not self.is_owner():
            return self._calling.call_on(self._handle, what, _QUESTIONS[what], (), None, timeout, unattended)
        value = self._value_here()
        if not unattended:
            seconds = self._calling.resolve_timeout(timeout)
            if not value.block(monotonic() + seconds if seconds else FOREVER):
                raise RpcTimeoutError(
                    f"RPC ran for more than set timeout: the value of {self!r} did not exist within {seconds:g} s: "
                    "its function is still running. Give a longer timeout, or 0 for none"
                )
        if what == TYPE:
            return value.then(lambda done: type(done.value()))
        if what == PRESENCE:
            return value.then(lambda done: (done.value(), None)[1])
        return value

    def _get_future(self) -> Future[None]:
        """Returns a future that completes with None when the value exists, or fails with the exception of its function.

        It has no timeout.

        Raises:
            OwnerLostError: The owner was lost.
            WorkerLostError: The owner cannot be reached.
            ReferenceRefusedError: The owner does not have the value any more.
            UsageError: This worker has released the reference, for example by a shutdown.
        """
        return self._fetch(PRESENCE, 0.0, unattended=True)

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Returns the type of the value, as soon as the value exists.

        Args:
            timeout: Seconds; 0 means no limit. The default is the `rpc_timeout` of this worker. It has no effect on the
                owner if `blocking` is False.
            blocking: Whether to wait. False returns a future of the type instead.

        Raises:
            RpcTimeoutError: The timeout expired.
            OwnerLostError: The owner was lost.
            WorkerLostError: The owner cannot be reached.
            ReferenceRefusedError: The owner does not have the value any more.
            UsageError: `timeout` is negative or not a number, or this worker has released the reference.
            Exception: The exception of the function that was to create the value.
        """
        if blocking:
            return self._fetch(TYPE, timeout).wait()
        return self._fetch(TYPE, timeout, unattended=True)

    # Calling its methods

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy: `rref.rpc_sync().method(...)` runs the method on the owner, waits, and returns its result.

        Args:
            timeout: The timeout of each call through the proxy in seconds; 0 means no limit. The default is the
                `rpc_timeout` of this worker. A wrong value is refused, with `UsageError`, when a method is called.

        Returns:
            The proxy. Nothing is sent before one of its methods is called. A call raises what the method raises,
            `AttributeError` if the value has no such method, `RpcTimeoutError`, `OwnerLostError` if the owner was lost,
            `ReferenceRefusedError` if it does not have the value any more, `SerializationError` if an argument cannot
            be pickled, and `UsageError` if this worker has released the reference.
        """
        if timeout != UNSET_RPC_TIMEOUT:
            return Proxy(_call, self._handle, timeout, "rpc_sync")
        try:
            return self._proxy
        except AttributeError:
            proxy = self._proxy = Proxy(_call, self._handle, timeout, "rpc_sync")
            return proxy

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy: `rref.rpc_async().method(...)` runs the method on the owner and returns a `Future` at once.

        Args:
            timeout: After how many seconds each future fails with `RpcTimeoutError`; 0 means never. The default is the
                `rpc_timeout` of this worker. A wrong value is refused, with `UsageError`, when a method is called.

        Returns:
            The proxy. Nothing is sent before one of its methods is called. The future fails with what the method
            raises, and with `AttributeError` if the value has no such method. The call itself raises `OwnerLostError`,
            `ReferenceRefusedError` or `UsageError` if the reference cannot be used any more, and `SerializationError`
            if an argument cannot be pickled.
        """
        return Proxy(_call_later, self._handle, timeout, "rpc_async")

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy: `rref.remote().method(...)` runs the method on the owner, which keeps the result.

        Args:
            timeout: Ignored and not checked, because nothing waits.

        Returns:
            The proxy. Nothing is sent before one of its methods is called. The call returns an `RRef` to the result at
            once, or raises `OwnerLostError`, `ReferenceRefusedError` or `UsageError` if the reference cannot be used
            any more, and `SerializationError` if an argument cannot be pickled. An error of the method is raised when
            that `RRef` is used.
        """
        return Proxy(_call_remote, self._handle, timeout, "remote")

    # Travelling

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[int]]:
        """Pickles the reference as an argument or result of a call; the owner counts the copy.

        Raises `SerializationError` outside of a call, for example for `pickle.dumps(rref)`.
        """
        return _receive, (collect(self._handle, self),)

    def _serialize(self) -> tuple[int]:
        """Returns what stands for this reference in a pickle: a tuple of its index among the references of the message.

        Raises `SerializationError` if this thread is not pickling the message of a call.
        """
        return (collect(self._handle, self),)

    @staticmethod
    def _deserialize(place: tuple[int]) -> RRef[Any]:
        """Returns the reference with the index `place[0]` in the message that this thread is unpickling.

        Raises `SerializationError` if no message is being read, or the message has no reference with that index.
        """
        return _receive(*place)

    def __copy__(self) -> RRef[T_co]:
        """Returns another `RRef` for the same value. Both share one handle, which the owner counts once."""
        return RRef.of(self._handle)

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Always raises `UsageError`: a reference cannot be deep-copied. `memo` is ignored."""
        raise UsageError(f"{self!r} cannot be deep-copied; copy its value, to_here()")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RRef) and other._handle.reference == self._handle.reference

    def __hash__(self) -> int:
        return hash(self._handle.reference)

    def __repr__(self) -> str:
        reference = self._handle.reference
        return f"<RRef {reference.creator}:{reference.number} owned by {self.owner_name()!r}>"


_QUESTIONS = {VALUE: "to_here", PRESENCE: "_get_future", TYPE: "_get_type"}
"""Maps each kind of request about a value that calls no method to the name of the `RRef` method that makes it, for
messages.
"""


def _receive(place: int) -> RRef[Any]:
    """Returns the reference with the index `place` in the message that this thread is unpickling.

    Pickles of references call it. Raises `SerializationError` if no message is being read, or it has no reference with
    that index.
    """
    return RRef.of(take_offered(place))


class Proxy:
    """Stands for the value of a reference: calling a method of the proxy calls the method of the value on its owner.

    Programs get a proxy from `rpc_sync()`, `rpc_async()` or `remote()` of an `RRef`: `rref.rpc_sync().append(1)`.
    Nothing is checked or sent before a method is called. The attributes of the proxy itself have mangled names, so the
    value may have methods of any other name. The proxy refers to the handle, not to the `RRef`: the `RRef` may refer to
    its proxy, and a cycle would be freed only by the garbage collector.

    Args:
        call: Makes one call: `_call`, `_call_later` or `_call_remote`.
        handle: A handle of the reference: the object of the runtime behind an `RRef`.
        timeout: The timeout of each call in seconds; 0 means no limit, -1 the `rpc_timeout` of this worker.
        way: The name of the `RRef` method that returned the proxy, for `repr`.
    """

    __slots__ = ("__call", "__handle", "__timeout", "__way")

    def __init__(self, call: Callable[..., Any], handle: Handle, timeout: float, way: str) -> None:
        self.__call = call
        self.__handle = handle
        self.__timeout = timeout
        self.__way = way

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Returns a function that calls the method `name` of the value on its owner.

        Whether the value has such a method is not checked here; if not, the call fails with `AttributeError`.
        """
        return partial(self.__call, self.__handle, self.__timeout, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the value itself on its owner, with these arguments.

        Returns the result, a future of it or a reference to it, depending on the `RRef` method that made the proxy. The
        error is `TypeError` if the value cannot be called.
        """
        return self.__call(self.__handle, self.__timeout, "__call__", *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Proxy, (self.__call, self.__handle, self.__timeout, self.__way)

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Always raises `UsageError`: a proxy cannot be deep-copied. `memo` is ignored."""
        raise UsageError(f"{self!r} cannot be deep-copied; copy the value of the reference, to_here()")

    def __repr__(self) -> str:
        return f"{RRef.of(self.__handle)!r}.{self.__way}()"


# What a proxy does with a method. What comes first goes by position only: a method may have arguments of any name.


def _call(handle: Handle, timeout: float, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of the value of a reference on its owner, waits, and returns the result.

    Args:
        handle: A handle of the reference.
        timeout: Seconds; 0 means no limit, -1 the `rpc_timeout` of this worker.
        method: The name of the method.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.

    Raises:
        Exception: What the method raises; `AttributeError` if the value has no such method.
        RpcTimeoutError: The timeout expired.
        OwnerLostError: The owner was lost.
        ReferenceRefusedError: The owner does not have the value any more.
        UsageError: This worker has released the reference, `timeout` is negative or not a number, or an argument cannot
            be pickled (`SerializationError`).
    """
    return wait_or_cancel(handle.reference_store.calling.call_on(handle, METHOD, method, args, kwargs, timeout))


def _call_later(handle: Handle, timeout: float, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
    """Calls a method of the value of a reference on its owner, and returns a future of the result without waiting.

    Args:
        handle: A handle of the reference.
        timeout: Seconds; 0 means no limit, -1 the `rpc_timeout` of this worker.
        method: The name of the method. If the value has none, the future fails with `AttributeError`.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.

    Raises:
        OwnerLostError: The owner was lost.
        ReferenceRefusedError: The owner does not have the value any more.
        UsageError: This worker has released the reference, `timeout` is negative or not a number, or an argument cannot
            be pickled (`SerializationError`).
    """
    future = handle.reference_store.calling.call_on(handle, METHOD, method, args, kwargs, timeout, unattended=True)
    future.made_by(_getframe(1))
    if awaited_together:
        awaited_together.note(future)
    return future


def _call_remote(handle: Handle, timeout: float, method: str, /, *args: Any, **kwargs: Any) -> RRef[Any]:
    """Calls a method of the value of a reference on its owner, which keeps the result. Returns a reference to it.

    Args:
        handle: A handle of the reference.
        timeout: Ignored.
        method: The name of the method. If the value has none, uses of the returned reference raise `AttributeError`.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.

    Raises:
        OwnerLostError: The owner was lost.
        ReferenceRefusedError: The owner does not have the value any more.
        UsageError: This worker has released the reference, or an argument cannot be pickled (`SerializationError`).
    """
    return RRef.of(handle.reference_store.calling.remote_on(handle, method, args, kwargs))
