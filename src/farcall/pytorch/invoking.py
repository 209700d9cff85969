"""The six functions by which torch's Python code calls its C++ agent, on farcall: by operator, by script, by pickle.

Our own `api` has a shorter way and needs none of them. They are for programs that call them, so the arguments are
torch's, in torch's order and by torch's names.
"""

# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import torch

from farcall.futures import Future
from farcall.pytorch import api
from farcall.pytorch.callees import Call, builtin_call, pickled_call, script_call
from farcall.pytorch.futures import RpcFuture
from farcall.pytorch.internal import RPCExecMode
from farcall.pytorch.rref import RRef
from farcall.pytorch.workers import WorkerInfo


def _invoke_rpc_builtin(dst: WorkerInfo, opName: str, rpcTimeoutSeconds: float, *args: Any, **kwargs: Any) -> Any:
    """Runs an operator on worker `dst`; a `torch.futures.Future` of its result."""
    return _call(dst, builtin_call(opName, args, kwargs), rpcTimeoutSeconds)


def _invoke_remote_builtin(
    dst: WorkerInfo, opName: str, rpcTimeoutSeconds: float, *args: Any, **kwargs: Any
) -> RRef[Any]:
    """The same, but the result stays there."""
    return _remote(dst, builtin_call(opName, args, kwargs), rpcTimeoutSeconds)


def _invoke_rpc_torchscript(
    dstWorkerName: str,
    qualifiedNameStr: str,
    argsTuple: tuple[Any, ...],
    kwargsDict: dict[str, Any],
    rpcTimeoutSeconds: float,
    isAsyncExecution: bool,
) -> Any:
    """Runs a script function on that worker; a `torch.futures.Future` of its result."""
    call = script_call(qualifiedNameStr, argsTuple, kwargsDict, isAsyncExecution)
    return _call(dstWorkerName, call, rpcTimeoutSeconds)


def _invoke_remote_torchscript(
    dstWorkerName: str,
    qualifiedNameStr: str,
    rpcTimeoutSeconds: float,
    isAsyncExecution: bool,
    *args: Any,
    **kwargs: Any,
) -> RRef[Any]:
    """The same, but the result stays there."""
    return _remote(dstWorkerName, script_call(qualifiedNameStr, args, kwargs, isAsyncExecution), rpcTimeoutSeconds)


def _invoke_rpc_python_udf(
    dst: WorkerInfo,
    pickledPythonUDF: bytes,
    tensors: list[torch.Tensor],
    rpcTimeoutSeconds: float,
    isAsyncExecution: bool,
) -> Any:
    """Runs what a pickled `PythonUDF` says on worker `dst`; a `torch.futures.Future` of its result."""
    return _call(dst, pickled_call(pickledPythonUDF, tensors), rpcTimeoutSeconds)


def _invoke_remote_python_udf(
    dst: WorkerInfo,
    pickledPythonUDF: bytes,
    tensors: list[torch.Tensor],
    rpcTimeoutSeconds: float,
    isAsyncExecution: bool,
) -> RRef[Any]:
    """The same, but the result stays there."""
    return _remote(dst, pickled_call(pickledPythonUDF, tensors), rpcTimeoutSeconds)


def _call(to: Any, call: Call, timeout: float) -> Any:
    function, args, kwargs = call
    future = api._invoke_rpc(to, function, RPCExecMode.ASYNC, args, kwargs, timeout)
    return RpcFuture(future) if isinstance(future, Future) else future


def _remote(to: Any, call: Call, timeout: float) -> RRef[Any]:
    function, args, kwargs = call
    return api.remote(to, function, args, kwargs, timeout)
