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
from collections.abc import Callable, Coroutine, Generator
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

    Its verbs `call`, `submit` and `keep` run a function where the value lives, with the value as its first argument: a
    method (`Shelf.put`), or any other function (`len`, a lambda). A function of a class body is looked up on the value
    by its name, so overrides, abstract classes and protocols work. A str is the name of a method, without types.
    """

    __slots__ = ()

    _handle: Handle
    _timeout: float = UNSET_RPC_TIMEOUT

    def options(self, **options: Unpack[CallOptions]) -> Target[T_co]:
        """Returns an object for the same value whose calls have these options. This object does not change.

        Args:
            options: `timeout`, in seconds and more than 0; None means no limit. Without it the timeout stays as it was.

        Raises:
            UsageError: There is no such option, or it cannot have that value.
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
        """Runs `func(value, *args, **kwargs)` where the value lives, and returns what it returns.

        Raises:
            Exception: What the function raises, or what the function raised that was to make the value.
            RpcTimeoutError: The timeout expired.
            OwnerLostError: The worker on which the value lives was lost.
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

        What the function raises, an expired timeout and a lost owner are the errors of the future.

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
        """Runs `func(value, *args, **kwargs)` where the value lives, which keeps the result.

        Returns a reference to it at once. What the function raises, every use of the reference raises.

        Raises:
            OwnerLostError: The worker on which the value lives was lost.
            ReferenceRefusedError: The owner does not have the value any more.
            UsageError: `func` is neither a function nor the name of a method, an argument cannot be pickled
                (`SerializationError`), or this worker has released the reference, for example by a shutdown.
        """
        name, args = _callee(func, args)
        handle = self._handle
        return RRef.of(handle.reference_store.calling.remote_on(handle, name, args, kwargs))


class _TargetWithOptions(Target[T_co]):
    """What `Target.options` returns: a value elsewhere, and the timeout of calls on it.

    Args:
        handle: A handle of the reference.
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


class _FunctionOfValue(str):
    """The encoded name of a function that is called with the value. `__qualname__` is for messages."""

    __slots__ = ("__qualname__",)


def _callee(func: Callable[..., Any] | str, args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Returns the name that a request on a value has for `func`, and the arguments of the request.

    The name is that of a method, or the encoded name of another function. For a function without a name that others
    know, the name is empty and the function is the first argument. Raises `UsageError` if `func` is neither callable
    nor an identifier.
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
    """Returns the name by which a function of a class body is found on an instance; None for any other callable."""
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
    """A reference to a value on some worker.

    References are created by `keep` or `remote`, or by `RRef(value)` for a value of this worker, or received in a call.
    Two references are equal if they refer to the same value.

    Example:
        >>> numbers = farcall.remote("worker1", list, args=((3, 1, 2),))
        >>> numbers.to_here()
        [3, 1, 2]
    """

    __slots__ = ("__weakref__", "_handle", "_proxy")

    _handle: Handle
    _proxy: Proxy
    """The proxy that `rpc_sync()` returns; set by its first call without a timeout."""

    def __init__(self, value: T_co, type_hint: Any = None) -> None:
        """Creates a reference to a value of this worker.

        Args:
            value: The value. It is not copied.
            type_hint: Ignored. Programs written for torch pass it.

        Raises:
            NotInitializedError: This process is not a worker.
            ForkedProcessError: Only the parent of this forked process is a worker.
            UsageError: The backend of this worker has no references.
        """
        self._handle = current_reference_store().own(value)

    @classmethod
    def of(cls, handle: Handle) -> RRef[Any]:
        """Returns a reference that uses an existing handle. Counts nothing: both share the handle."""
        rref = cls.__new__(cls)
        rref._handle = handle
        return rref

    @property
    def _calling(self) -> ReferenceCalls:
        """The object that sends requests about the value. Raises `UsageError` if the backend has no references."""
        return self._handle.reference_store.calling

    # Who and where

    def is_owner(self) -> bool:
        """Returns whether the value lives on this worker."""
        return self._handle.reference.owner == self._handle.reference_store.me

    def owner(self) -> WorkerInfo:
        """Returns the name and id of the worker that owns the value.

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
        """Returns whether the owner has confirmed that it counts this copy of the reference.

        The reference can be used before. Always True on the owner.
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
            ReferenceRefusedError: The owner does not have the value any more.
            UsageError: `timeout` is not valid, or this worker has released the reference, for example by a shutdown.
            SerializationError: The value cannot be pickled.
            Exception: The exception of the function that was to create the value.
        """
        handle = self._handle
        if handle.fork is not None:
            return handle.reference_store.calling.fetch(handle, timeout)  # type: ignore[no-any-return]
        return cast(T_co, self._fetch(VALUE, timeout).wait())

    def local_value(self) -> T_co:
        """Waits until the value exists and returns the value itself. Works only on the owner.

        Raises:
            UsageError: Another worker owns the value, or this worker has released the reference.
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
        """Waits for the value without blocking the event loop, and returns it as `to_here` does.

        Raises what `to_here` raises.
        """
        return cast("Future[T_co]", self._fetch(VALUE, UNSET_RPC_TIMEOUT, unattended=True)).__await__()

    def _value_here(self) -> Future[Any]:
        """Returns the future of a value that this worker owns.

        Raises `UsageError` or another `RpcError` if the reference cannot be used any more. Must not be called on other
        workers.
        """
        handle = self._handle
        handle.check()
        assert handle.value is not None
        return handle.value

    def _fetch(self, what: bytes, timeout: float, unattended: bool = False) -> Future[Any]:
        """Returns a future of the value, or of something about the value.

        Args:
            what: `VALUE` for the value, `TYPE` for its type, `PRESENCE` for None as soon as the value exists.
            timeout: Seconds; 0 means no limit, `UNSET_RPC_TIMEOUT` the `rpc_timeout` of this worker.
            unattended: True if the caller will not wait for the future at once. Otherwise this method waits on the
                owner until the value exists.

        Raises:
            RpcTimeoutError: On the owner, the value did not exist within the timeout.
            RpcError: The reference cannot be used any more, or `timeout` is not valid.
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

        Raises:
            RpcError: The reference cannot be used any more.
        """
        return self._fetch(PRESENCE, 0.0, unattended=True)

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Returns the type of the value, as soon as the value exists.

        Args:
            timeout: Seconds; 0 means no limit. The default is the `rpc_timeout` of this worker.
            blocking: Whether to wait. False returns a future of the type instead.

        Raises:
            RpcTimeoutError: The timeout expired.
            OwnerLostError: The owner was lost.
            ReferenceRefusedError: The owner does not have the value any more.
            UsageError: `timeout` is not valid, or this worker has released the reference.
        """
        if blocking:
            return self._fetch(TYPE, timeout).wait()
        return self._fetch(TYPE, timeout, unattended=True)

    # Calling its methods

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy: `rref.rpc_sync().method(...)` runs the method on the owner and returns its result.

        Args:
            timeout: The timeout of each call through the proxy in seconds; 0 means no limit. The default is the
                `rpc_timeout` of this worker. A wrong value is refused, with `UsageError`, when a method is called.

        Returns:
            The proxy. Its calls raise what `farcall.rpc_sync` raises, `OwnerLostError`, `ReferenceRefusedError`, and
            `AttributeError` if the value has no such method.
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
            timeout: After how many seconds each future fails; 0 means never. The default is the `rpc_timeout` of this
                worker. A wrong value is refused, with `UsageError`, when a method is called.
        """
        return Proxy(_call_later, self._handle, timeout, "rpc_async")

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy: `rref.remote().method(...)` runs the method on the owner, which keeps the result.

        The method of the proxy returns an `RRef` to the result at once.

        Args:
            timeout: Ignored, because nothing waits.
        """
        return Proxy(_call_remote, self._handle, timeout, "remote")

    # Travelling

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[int]]:
        """Pickles the reference for a message of a call. Raises `SerializationError` outside of a call."""
        return _receive, (collect(self._handle, self),)

    def _serialize(self) -> tuple[int]:
        """Returns what stands for this reference in a pickle: its index among the references of the message.

        Raises `SerializationError` if no message is being written.
        """
        return (collect(self._handle, self),)

    @staticmethod
    def _deserialize(place: tuple[int]) -> RRef[Any]:
        """Returns the reference with the index `place[0]` in the message being read.

        Raises `SerializationError` if no message is being read, or the message has no reference with that index.
        """
        return _receive(*place)

    def __copy__(self) -> RRef[T_co]:
        """Returns another `RRef` with the same handle; the owner counts nothing."""
        return RRef.of(self._handle)

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Raises `UsageError`: a reference cannot be deep-copied."""
        raise UsageError(f"{self!r} cannot be deep-copied; copy its value, to_here()")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RRef) and other._handle.reference == self._handle.reference

    def __hash__(self) -> int:
        return hash(self._handle.reference)

    def __repr__(self) -> str:
        reference = self._handle.reference
        return f"<RRef {reference.creator}:{reference.number} owned by {self.owner_name()!r}>"


_QUESTIONS = {VALUE: "to_here", PRESENCE: "_get_future", TYPE: "_get_type"}
"""The name of the `RRef` method that stands for each kind of request without a method, for messages."""


def _receive(place: int) -> RRef[Any]:
    """Returns the reference with an index in the message being read. Called by the unpickler.

    Raises `SerializationError` if no message is being read, or it has no reference with that index.
    """
    return RRef.of(take_offered(place))


class Proxy:
    """Stands for the value of a reference: calling a method of the proxy calls the method of the value on its owner.

    The attributes of the proxy itself have mangled names, so the value may have methods of any other name. The proxy
    refers to the handle, not to the `RRef`. The `RRef` may refer to its proxy, and a cycle would be freed only by the
    garbage collector.

    Args:
        call: Makes one call: `_call`, `_call_later` or `_call_remote`.
        handle: A handle of the reference.
        timeout: The timeout of each call in seconds.
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

        Whether there is one is not checked here.
        """
        return partial(self.__call, self.__handle, self.__timeout, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the value itself on its owner."""
        return self.__call(self.__handle, self.__timeout, "__call__", *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Proxy, (self.__call, self.__handle, self.__timeout, self.__way)

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Raises `UsageError`: a proxy cannot be deep-copied."""
        raise UsageError(f"{self!r} cannot be deep-copied; copy the value of the reference, to_here()")

    def __repr__(self) -> str:
        return f"{RRef.of(self.__handle)!r}.{self.__way}()"


# What a proxy does with a method. What comes first goes by position only: a method may have arguments of any name.


def _call(handle: Handle, timeout: float, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of the value on the owner, waits, and returns the result.

    Raises what the method raises, `RpcTimeoutError`, `OwnerLostError`, `ReferenceRefusedError`, `UsageError`, and
    `AttributeError` if the value has no such method.
    """
    return wait_or_cancel(handle.reference_store.calling.call_on(handle, METHOD, method, args, kwargs, timeout))


def _call_later(handle: Handle, timeout: float, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
    """Calls a method of the value on the owner, and returns a future of the result without waiting.

    Raises `OwnerLostError`, `ReferenceRefusedError` or `UsageError` if the reference cannot be used, and
    `SerializationError` if an argument cannot be pickled. All other errors are those of the future.
    """
    future = handle.reference_store.calling.call_on(handle, METHOD, method, args, kwargs, timeout, unattended=True)
    future.made_by(_getframe(1))
    if awaited_together:
        awaited_together.note(future)
    return future


def _call_remote(handle: Handle, timeout: float, method: str, /, *args: Any, **kwargs: Any) -> RRef[Any]:
    """Calls a method of the value on the owner, which keeps the result, and returns a reference to it.

    `timeout` is ignored. Raises `OwnerLostError`, `ReferenceRefusedError` or `UsageError` if the reference cannot be
    used.
    """
    return RRef.of(handle.reference_store.calling.remote_on(handle, method, args, kwargs))
