"""The names of `torch._C._distributed_rpc`, torch's C++ module. `install()` puts this module in its place.

Most names are defined in other modules of this package. Defined here are the six functions by which torch's Python code
calls its C++ agent: with an operator, a script function or a pickle, each with a result or a reference. `api` does not
use them. They are for programs that do, so the arguments have torch's order and torch's names.
"""

# ruff: noqa: N803 (torch's names of arguments)

from __future__ import annotations

from typing import Any

import torch

from farcall.api import _rref_context_get_debug_info
from farcall.backends.interface import RpcAgent
from farcall.futures import Future
from farcall.options import BackendOptions as RpcBackendOptions
from farcall.pytorch import api
from farcall.pytorch.agent import TensorPipeAgent, enable_gil_profiling
from farcall.pytorch.api import (
    _cleanup_python_rpc_handler,
    _delete_all_user_and_unforked_owner_rrefs,
    _destroy_rref_context,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
    get_rpc_timeout,
)
from farcall.pytorch.callees import Call, builtin_call, pickled_call, script_call
from farcall.pytorch.constants import DEFAULT_INIT_METHOD as _DEFAULT_INIT_METHOD
from farcall.pytorch.constants import DEFAULT_NUM_WORKER_THREADS as _DEFAULT_NUM_WORKER_THREADS
from farcall.pytorch.constants import DEFAULT_RPC_TIMEOUT_SEC as _DEFAULT_RPC_TIMEOUT_SEC
from farcall.pytorch.constants import UNSET_RPC_TIMEOUT as _UNSET_RPC_TIMEOUT
from farcall.pytorch.futures import RpcFuture
from farcall.pytorch.internal import RPCExecMode
from farcall.pytorch.options import _TensorPipeRpcBackendOptionsBase
from farcall.pytorch.profiler import RemoteProfilerManager, _set_profiler_node_id
from farcall.pytorch.rref import PyRRef
from farcall.pytorch.script_modules import _disable_jit_rref_pickle, _enable_jit_rref_pickle
from farcall.pytorch.server_process_global_profiler import (
    _disable_server_process_global_profiler,
    _enable_server_process_global_profiler,
)
from farcall.pytorch.worker_info import WorkerInfo

__all__ = [
    "_DEFAULT_INIT_METHOD",
    "_DEFAULT_NUM_WORKER_THREADS",
    "_DEFAULT_RPC_TIMEOUT_SEC",
    "_UNSET_RPC_TIMEOUT",
    "PyRRef",
    "RemoteProfilerManager",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "WorkerInfo",
    "_TensorPipeRpcBackendOptionsBase",
    "_cleanup_python_rpc_handler",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_destroy_rref_context",
    "_disable_jit_rref_pickle",
    "_disable_server_process_global_profiler",
    "_enable_jit_rref_pickle",
    "_enable_server_process_global_profiler",
    "_get_current_rpc_agent",
    "_invoke_remote_builtin",
    "_invoke_remote_python_udf",
    "_invoke_remote_torchscript",
    "_invoke_rpc_builtin",
    "_invoke_rpc_python_udf",
    "_invoke_rpc_torchscript",
    "_is_current_rpc_agent_set",
    "_reset_current_rpc_agent",
    "_rref_context_get_debug_info",
    "_set_and_start_rpc_agent",
    "_set_profiler_node_id",
    "_set_rpc_timeout",
    "enable_gil_profiling",
    "get_rpc_timeout",
]


def _invoke_rpc_builtin(dst: WorkerInfo, opName: str, rpcTimeoutSeconds: float, *args: Any, **kwargs: Any) -> Any:
    """Runs a builtin operator on another worker.

    Args:
        dst: The worker. Raises `RuntimeError` if it does not exist, or this process is not a worker.
        opName: The name of the operator, for example `aten::add`.
        rpcTimeoutSeconds: The timeout in seconds; 0 for none, -1 for the default.
        *args: The positional arguments of the operator.
        **kwargs: Its keyword arguments.

    Returns:
        A `torch.futures.Future` of the result. It fails if there is no such operator.
    """
    return _call(dst, builtin_call(opName, args, kwargs), rpcTimeoutSeconds)


def _invoke_remote_builtin(
    dst: WorkerInfo, opName: str, rpcTimeoutSeconds: float, *args: Any, **kwargs: Any
) -> PyRRef[Any]:
    """Runs a builtin operator on another worker, which keeps the result, and returns a reference to it.

    Args:
        dst: The worker. Raises `RuntimeError` if it does not exist, or this process is not a worker.
        opName: The name of the operator, for example `aten::add`. If there is none, fetching the value raises.
        rpcTimeoutSeconds: Seconds after which fetching the value fails if the operator has not returned; 0 or -1 for no
            limit.
        *args: The positional arguments of the operator.
        **kwargs: Its keyword arguments.
    """
    return _remote(dst, builtin_call(opName, args, kwargs), rpcTimeoutSeconds)


def _invoke_rpc_torchscript(
    dstWorkerName: str,
    qualifiedNameStr: str,
    argsTuple: tuple[Any, ...],
    kwargsDict: dict[str, Any],
    rpcTimeoutSeconds: float,
    isAsyncExecution: bool,
) -> Any:
    """Runs a script function on another worker.

    Args:
        dstWorkerName: The name of the worker. Raises `RuntimeError` if it does not exist, or this process is not a
            worker.
        qualifiedNameStr: The qualified name of the function, for example `__torch__.service.predict`.
        argsTuple: Its positional arguments; may be empty.
        kwargsDict: Its keyword arguments; may be empty.
        rpcTimeoutSeconds: The timeout in seconds; 0 for none, -1 for the default.
        isAsyncExecution: True if the function returns a future, whose result is wanted.

    Returns:
        A `torch.futures.Future` of the result. It fails with what the function raises, or if there is no such function.
    """
    call = script_call(qualifiedNameStr, argsTuple, kwargsDict, isAsyncExecution)
    return _call(dstWorkerName, call, rpcTimeoutSeconds)


def _invoke_remote_torchscript(
    dstWorkerName: str,
    qualifiedNameStr: str,
    rpcTimeoutSeconds: float,
    isAsyncExecution: bool,
    *args: Any,
    **kwargs: Any,
) -> PyRRef[Any]:
    """Runs a script function on another worker, which keeps the result, and returns a reference to it.

    Args:
        dstWorkerName: The name of the worker. Raises `RuntimeError` if it does not exist, or this process is not a
            worker.
        qualifiedNameStr: The qualified name of the function, for example `__torch__.service.predict`. If there is none,
            fetching the value raises.
        rpcTimeoutSeconds: Seconds after which fetching the value fails if the function has not returned; 0 or -1 for no
            limit.
        isAsyncExecution: True if the function returns a future, whose result is kept.
        *args: The positional arguments of the function.
        **kwargs: Its keyword arguments.
    """
    return _remote(dstWorkerName, script_call(qualifiedNameStr, args, kwargs, isAsyncExecution), rpcTimeoutSeconds)


def _invoke_rpc_python_udf(
    dst: WorkerInfo,
    pickledPythonUDF: bytes,
    tensors: list[torch.Tensor],
    rpcTimeoutSeconds: float,
    isAsyncExecution: bool,
) -> Any:
    """Runs a pickled `PythonUDF`, a function with its arguments, on another worker.

    Args:
        dst: The worker. Raises `RuntimeError` if it does not exist, or this process is not a worker.
        pickledPythonUDF: The pickle, as `internal.serialize` returns it.
        tensors: Its tensors; may be empty.
        rpcTimeoutSeconds: The timeout in seconds; 0 for none, -1 for the default.
        isAsyncExecution: Ignored: the function itself says whether it returns a future.

    Returns:
        A `torch.futures.Future` of the result. It fails if the pickle is damaged or the function is not defined there.
    """
    return _call(dst, pickled_call(pickledPythonUDF, tensors), rpcTimeoutSeconds)


def _invoke_remote_python_udf(
    dst: WorkerInfo,
    pickledPythonUDF: bytes,
    tensors: list[torch.Tensor],
    rpcTimeoutSeconds: float,
    isAsyncExecution: bool,
) -> PyRRef[Any]:
    """Runs a pickled `PythonUDF`, a function with its arguments, on another worker. Returns a reference to the result.

    The other worker keeps the result. If the pickle is damaged, fetching the value raises.

    Args:
        dst: The worker. Raises `RuntimeError` if it does not exist, or this process is not a worker.
        pickledPythonUDF: The pickle, as `internal.serialize` returns it.
        tensors: Its tensors; may be empty.
        rpcTimeoutSeconds: Seconds after which fetching the value fails if the function has not returned; 0 or -1 for no
            limit.
        isAsyncExecution: Ignored: the function itself says whether it returns a future.
    """
    return _remote(dst, pickled_call(pickledPythonUDF, tensors), rpcTimeoutSeconds)


def _call(to: Any, call: Call, timeout: float) -> Any:
    """Makes a call on worker `to`, and returns a torch future of the result.

    The future fails with what the function raises, or if the call timed out. Raises `RuntimeError` if there is no such
    worker, or this process is not a worker.

    Args:
        to: The name or the `WorkerInfo` of the worker.
        call: The function, its positional and its keyword arguments.
        timeout: The timeout in seconds; 0 for none, -1 for the default.
    """
    function, args, kwargs = call
    future = api._invoke_rpc(to, function, RPCExecMode.ASYNC, args, kwargs, timeout)
    return RpcFuture(future) if isinstance(future, Future) else future


def _remote(to: Any, call: Call, timeout: float) -> PyRRef[Any]:
    """Makes a call on worker `to`, which keeps the result, and returns a reference to it.

    Raises `RuntimeError` if there is no such worker, or this process is not a worker. Fetching the value raises what
    the function raised.

    Args:
        to: The name or the `WorkerInfo` of the worker.
        call: The function, its positional and its keyword arguments.
        timeout: Seconds after which fetching the value fails if the function has not returned; 0 or -1 for no limit.
    """
    function, args, kwargs = call
    return api.remote(to, function, args, kwargs, timeout)
