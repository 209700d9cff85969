"""Proxies for the value of a reference: `rref.rpc_sync().method(...)` runs the method on the owner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch.futures import Future as Future

from farcall.api import current_agent
from farcall.backends.interface import run_here
from farcall.functions import mark_async
from farcall.futures import Future as _OwnFuture
from farcall.protocol.frames import METHOD
from farcall.pytorch import api
from farcall.pytorch import functions as functions
from farcall.pytorch.api import rpc_async as rpc_async
from farcall.pytorch.constants import UNSET_RPC_TIMEOUT
from farcall.pytorch.envelopes import rides_along
from farcall.pytorch.futures import RpcFuture
from farcall.pytorch.rref import PyRRef, labels


def _local_invoke(rref: PyRRef[Any], func_name: str, args: Any, kwargs: Any) -> _OwnFuture[Any]:
    """Called remotely on the owner: runs a method of the value of `rref`, and returns a future of its result.

    The future fails with what the method raises.

    Args:
        rref: The reference. Raises `RuntimeError` if this worker is not its owner.
        func_name: The name of the method, which may be decorated with `async_execution`. A name that the value does not
            have raises `AttributeError`.
        args: The positional arguments of the method; may be empty.
        kwargs: Its keyword arguments; may be empty.
    """
    return run_here(getattr(rref.local_value(), func_name), args, kwargs)


mark_async(_local_invoke, _local_invoke, lambda name, result: result)
_local_invoke_async_execution = _local_invoke  # torch has a function of its own for `async_execution` methods


def _invoke_rpc(
    rref: PyRRef[Any], rpc_api: Callable[..., Any], func_name: str, timeout: float, *args: Any, **kwargs: Any
) -> Any:
    """Calls a method of the value of a reference on its owner.

    Returns the result, a torch future of it, or a reference to it, as `rpc_api` does. Raises `RuntimeError` if the
    reference cannot be used any more, the owner was lost or the call timed out.

    Args:
        rref: The reference.
        rpc_api: The function `rpc_sync`, `rpc_async` or `remote` of `api`, which decides what is returned.
        func_name: The name of the method. One that does not exist raises `AttributeError`; with `rpc_async`, the future
            fails with it.
        timeout: Seconds; 0 for no timeout, -1 for the default of `rpc_api`.
        *args: The positional arguments of the method.
        **kwargs: Its keyword arguments. `rref`, `rpc_api`, `func_name` and `timeout` cannot be their names.
    """
    return _call_method(rref, rpc_api, func_name, timeout, *args, **kwargs)


def _call_method(
    rref: PyRRef[Any], rpc_api: Callable[..., Any], func_name: str, timeout: float, /, *args: Any, **kwargs: Any
) -> Any:
    """Calls a method of the value of a reference on its owner.

    Returns the result, a torch future of it, or a reference to it, as `rpc_api` does. Raises `RuntimeError` if the
    reference cannot be used any more, the owner was lost or the call timed out.

    Args:
        rref: The reference.
        rpc_api: The function `rpc_sync`, `rpc_async` or `remote` of `api`, which decides what is returned.
        func_name: The name of the method. One that does not exist raises `AttributeError`; with `rpc_async`, the future
            fails with it.
        timeout: Seconds; 0 for no timeout, -1 for the default of `rpc_api`.
        *args: The positional arguments of the method.
        **kwargs: Its keyword arguments, of any names.
    """
    agent = cast(Any, current_agent())
    owner = rref.owner()
    if rides_along(agent, owner):
        return rpc_api(owner, _local_invoke, args=(rref, func_name, args, kwargs), timeout=timeout)
    handle = rref._handle
    if rpc_api is api.remote:
        getattr(rref._get_type(timeout), func_name)  # a wrong name raises here, and not only when the result is fetched
        result = cast(
            "PyRRef[Any]", PyRRef.of(handle.reference_store.calling.remote_on(handle, func_name, args, kwargs))
        )
        result._label = labels.next(2)
        if timeout != UNSET_RPC_TIMEOUT:
            result._watch_creation(timeout)
        return result
    if rpc_api is api.rpc_async:
        future = handle.reference_store.calling.call_on(
            handle, METHOD, func_name, args, kwargs, timeout, unattended=True
        )
        return api.track_future(RpcFuture(future))
    return handle.reference_store.calling.call_on(handle, METHOD, func_name, args, kwargs, timeout).wait()


class RRefProxy:
    """Stands for the value of a reference: each method call becomes a call on the owner.

    `rref.rpc_sync()`, `rref.rpc_async()` and `rref.remote()` return one. Every name other than those below is taken for
    a method of the value.

    Attributes:
        rref: The reference.
        rpc_api: The function `rpc_sync`, `rpc_async` or `remote` of `api`, which decides what a method call returns.
        rpc_timeout: The parameter `timeout`: the timeout of each method call in seconds; 0 for no timeout, -1 for that
            of `rpc_api`.
    """

    def __init__(self, rref: PyRRef[Any], rpc_api: Callable[..., Any], timeout: float = UNSET_RPC_TIMEOUT) -> None:
        """Creates a proxy; nothing is sent yet, and nothing is checked.

        Args:
            rref: The reference.
            rpc_api: The function `rpc_sync`, `rpc_async` or `remote` of `api`, which decides what a method call
                returns.
            timeout: The timeout of each method call in seconds; 0 for no timeout. By default that of `rpc_api`.
        """
        self.rref = rref
        self.rpc_api = rpc_api
        self.rpc_timeout = timeout

    def __getattr__(self, func_name: str) -> Callable[..., Any]:
        """Returns a function that calls the method `func_name` of the value on the owner. Sends nothing yet.

        If the value has no such method, `AttributeError` is raised when the function is called, or when its result is
        waited for.
        """
        return partial(_call_method, self.rref, self.rpc_api, func_name, self.rpc_timeout)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the value itself on the owner, with these arguments.

        Returns the result, a torch future of it, or a reference to it, depending on the proxy's `rpc_api`. The call
        fails with what the value raises, with `AttributeError` if the value cannot be called, and with `RuntimeError`
        if the call timed out or the owner was lost.
        """
        return _call_method(self.rref, self.rpc_api, "__call__", self.rpc_timeout, *args, **kwargs)
