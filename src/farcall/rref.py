"""RRef: a reference to a value that lives on some worker. A handle with a face: it counts nothing itself.

Whoever holds one can fetch the value (`to_here`), call its methods where it lives (`rpc_sync().method(...)`), or pass
it on inside the arguments and results of calls, to anybody. The value goes when the last handle anywhere has gone;
nothing is freed by hand.

What it asks of an agent is in `backends.interface`; what farcall's own handles are, and how their end is noticed, is
in `runtime.handles`; what follows from it, in `runtime.reference_store`; what the workers tell each other about it, in
`protocol.refcount`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from sys import _getframe
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

from farcall.errors import OwnerLost, RpcTimeoutError, UsageError
from farcall.futures import DONE, Future, awaited_together
from farcall.gate import FOREVER
from farcall.options import UNSET_RPC_TIMEOUT
from farcall.protocol.frames import METHOD, PRESENCE, TYPE, VALUE
from farcall.protocol.ids import WorkerInfo
from farcall.serialization import collect, take_offered

if TYPE_CHECKING:
    from farcall.backends.interface import Handle, ReferenceCalls

T = TypeVar("T")


class RRef(Generic[T]):
    """A reference to a value of type `T` on some worker.

    Made by `remote`, by `RRef(value)` for a value of this worker, or received in a call.
    """

    __slots__ = ("__weakref__", "_handle", "_proxy")

    _handle: Handle
    _proxy: Proxy
    """What `rpc_sync()` gives, from the first time on."""

    def __init__(self, value: T, type_hint: Any = None) -> None:
        """A reference to a value that is here. `type_hint` is accepted for programs written for torch.

        Raises `NotInitializedError` if this process is no worker, `ForkedProcessError` if only its parent is one.
        """
        from farcall.api import current_reference_store  # not at the head: the module of the functions knows this one

        self._handle = current_reference_store().own(value)

    @classmethod
    def of(cls, handle: Handle) -> RRef[Any]:
        """The face of a handle."""
        rref = cls.__new__(cls)
        rref._handle = handle
        return rref

    @property
    def _calling(self) -> ReferenceCalls:
        return self._handle.reference_store.calling

    # Who and where

    def is_owner(self) -> bool:
        """Whether the value lives on this worker."""
        return self._handle.reference.owner == self._handle.reference_store.me

    def owner(self) -> WorkerInfo:
        """The worker on which the value lives. Raises `OwnerLost` if it is gone, and so many others since, that it was
        forgotten."""
        peer = self._calling.numbered.get(self._handle.reference.owner)
        if peer is None:
            raise OwnerLost(f"the owner of {self._handle.reference} is gone for long, and is not known any more")
        return peer.info

    def owner_name(self) -> str:
        """The name of the worker on which the value lives."""
        return self.owner().name

    def confirmed_by_owner(self) -> bool:
        """Whether the owner has counted this handle. It can be used before."""
        return self._handle.confirmed

    # The value

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """The value: itself at its owner, else a copy. Waits until it is there.

        Raises what the function of the remote call raised; `RpcTimeoutError`, `OwnerLost`, `ReferenceRefused`.
        """
        handle = self._handle
        if handle.fork is not None:
            return handle.reference_store.calling.fetch(handle, timeout)  # type: ignore[no-any-return]
        return cast(T, self._fetch(VALUE, timeout).wait())

    def local_value(self) -> T:
        """The value itself, at its owner. Raises what made it fail; `UsageError` on any other worker."""
        if not self.is_owner():
            raise UsageError(
                f"{self!r} belongs to worker {self.owner_name()!r}: local_value() works only there; "
                "use to_here() for a copy, or rpc_sync() to call its methods there"
            )
        value = self._value_here()
        # Not cast() and not only wait(): it is on the path of nearly every call that is given a reference.
        return value._value if value._state == DONE else value.wait()  # type: ignore[no-any-return]

    def __await__(self) -> Generator[Any, None, T]:
        return cast("Future[T]", self._fetch(VALUE, UNSET_RPC_TIMEOUT, unattended=True)).__await__()

    def _value_here(self) -> Future[Any]:
        handle = self._handle
        handle.check()
        assert handle.value is not None
        return handle.value

    def _fetch(self, what: bytes, timeout: float, unattended: bool = False) -> Future[Any]:
        """Asks for something about the value. At the owner, waits for it here unless it is `unattended`."""
        if not self.is_owner():
            return self._calling.call_on(self._handle, what, _QUESTIONS[what], (), None, timeout, unattended)
        value = self._value_here()
        if not unattended:
            seconds = self._calling.resolve_timeout(timeout)
            if not value.block(monotonic() + seconds if seconds else FOREVER):
                raise RpcTimeoutError(
                    f"RPC ran for more than set timeout: the value of {self!r} was not there within {seconds:g} s, as "
                    "its function is still running. Give a longer timeout, or 0 for none"
                )
        if what == TYPE:
            return value.then(lambda done: type(done.value()))
        if what == PRESENCE:
            return value.then(lambda done: (done.value(), None)[1])
        return value

    def _get_future(self) -> Future[None]:
        """A future that is done when the value is there, or its function failed."""
        return self._fetch(PRESENCE, 0.0, unattended=True)

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The type of the value; with `blocking=False` a future of it."""
        if blocking:
            return self._fetch(TYPE, timeout).wait()
        return self._fetch(TYPE, timeout, unattended=True)

    # Calling its methods

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """A proxy: `rref.rpc_sync().method(args)` runs the method where the value lives, and gives its result."""
        if timeout != UNSET_RPC_TIMEOUT:
            return Proxy(_call, self._handle, timeout, "rpc_sync")
        try:
            return self._proxy
        except AttributeError:
            proxy = self._proxy = Proxy(_call, self._handle, timeout, "rpc_sync")
            return proxy

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """As `rpc_sync`, but the method gives a `Future` at once."""
        return Proxy(_call_later, self._handle, timeout, "rpc_async")

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """As `rpc_sync`, but the method gives an `RRef` of its result at once, which stays where the value lives."""
        return Proxy(_call_remote, self._handle, timeout, "remote")

    # Travelling

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[int]]:
        return _receive, (collect(self._handle, self),)

    def _serialize(self) -> tuple[int]:
        """What stands for it in a pickle: its place among the references of the message that is being made."""
        return (collect(self._handle, self),)

    @staticmethod
    def _deserialize(place: tuple[int]) -> RRef[Any]:
        """The reference at that place in the message that is being read."""
        return _receive(*place)

    def __copy__(self) -> RRef[T]:
        return RRef.of(self._handle)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise UsageError(f"{self!r} cannot be copied deeply; copy its value, to_here()")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RRef) and other._handle.reference == self._handle.reference

    def __hash__(self) -> int:
        return hash(self._handle.reference)

    def __repr__(self) -> str:
        reference = self._handle.reference
        return f"<RRef {reference.creator}:{reference.number} owned by {self.owner_name()!r}>"


_QUESTIONS = {VALUE: "to_here", PRESENCE: "_get_future", TYPE: "_get_type"}


def _receive(place: int) -> RRef[Any]:
    return RRef.of(take_offered(place))


class Proxy:
    """What stands for the value of a reference: its methods are called where it lives.

    Its own attributes are private by name: a value may have a method of any other. It holds no `RRef`, as an `RRef` may
    hold it, and what is in a circle goes late.
    """

    __slots__ = ("__call", "__handle", "__timeout", "__way")

    def __init__(self, call: Callable[..., Any], handle: Handle, timeout: float, way: str) -> None:
        self.__call = call
        self.__handle = handle
        self.__timeout = timeout
        self.__way = way

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self.__call, self.__handle, self.__timeout, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__call(self.__handle, self.__timeout, "__call__", *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Proxy, (self.__call, self.__handle, self.__timeout, self.__way)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise UsageError(f"{self!r} cannot be copied deeply; copy the value of the reference, to_here()")

    def __repr__(self) -> str:
        return f"{RRef.of(self.__handle)!r}.{self.__way}()"


# What a proxy does with a method. What comes first goes by position only: a method may have arguments of any name.


def _call(handle: Handle, timeout: float, method: str, /, *args: Any, **kwargs: Any) -> Any:
    return handle.reference_store.calling.call_on(handle, METHOD, method, args, kwargs, timeout).wait()


def _call_later(handle: Handle, timeout: float, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
    future = handle.reference_store.calling.call_on(handle, METHOD, method, args, kwargs, timeout, unattended=True)
    future.made_by(_getframe(1))
    if awaited_together:
        awaited_together.note(future)
    return future


def _call_remote(handle: Handle, timeout: float, method: str, /, *args: Any, **kwargs: Any) -> RRef[Any]:
    return RRef.of(handle.reference_store.calling.remote_on(handle, method, args, kwargs))
