"""`rref.rpc_sync().method(...)`: methods of a reference's value, called where it lives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from farcall.api import current_agent
from farcall.backends.running import run_here
from farcall.functions import mark_async
from farcall.futures import Future
from farcall.protocol.wire import METHOD
from farcall.pytorch import api
from farcall.pytorch.constants import UNSET_RPC_TIMEOUT
from farcall.pytorch.envelopes import rides_along
from farcall.pytorch.futures import RpcFuture
from farcall.pytorch.rref import PyRRef, RRef, labels


def _local_invoke(rref: PyRRef[Any], func_name: str, args: Any, kwargs: Any) -> Future[Any]:
    """At the owner. The method may be marked `async_execution`."""
    return run_here(getattr(rref.local_value(), func_name), args, kwargs)


mark_async(_local_invoke, _local_invoke, lambda name, result: result)
_local_invoke_async_execution = _local_invoke  # torch has one for each kind of method


def _invoke_rpc(
    rref: PyRRef[Any], rpc_api: Callable[..., Any], func_name: str, timeout: float, /, *args: Any, **kwargs: Any
) -> Any:
    agent = cast(Any, current_agent())
    owner = rref.owner()
    if rides_along(agent, owner):
        return rpc_api(owner, _local_invoke, args=(rref, func_name, args, kwargs), timeout=timeout)
    handle = rref._handle
    if rpc_api is api.remote:
        getattr(rref._get_type(timeout), func_name)  # nobody would hear of it before the result is asked for
        result = cast("RRef[Any]", RRef.of(handle.book.calling.remote_on(handle, func_name, args, kwargs)))
        result._label = labels.next(2)
        if timeout != UNSET_RPC_TIMEOUT:
            result._watch_creation(timeout)
        return result
    if rpc_api is api.rpc_async:
        future = handle.book.calling.call_on(handle, METHOD, func_name, args, kwargs, timeout, unattended=True)
        return api.noted(RpcFuture(future))
    return handle.book.calling.call_on(handle, METHOD, func_name, args, kwargs, timeout).wait()


class RRefProxy:
    """What stands for the value of a reference."""

    def __init__(self, rref: PyRRef[Any], rpc_api: Callable[..., Any], timeout: float = UNSET_RPC_TIMEOUT) -> None:
        self.rref = rref
        self.rpc_api = rpc_api
        self.rpc_timeout = timeout

    def __getattr__(self, func_name: str) -> Callable[..., Any]:
        return partial(_invoke_rpc, self.rref, self.rpc_api, func_name, self.rpc_timeout)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _invoke_rpc(self.rref, self.rpc_api, "__call__", self.rpc_timeout, *args, **kwargs)
