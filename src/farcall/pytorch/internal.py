"""`torch.distributed.rpc.internal`: how calls are named for the profiler, and a pickler that others may use.

farcall's own calls do not go through this pickler. It is there for programs that pickle with it themselves: tensors
beside the pickle, in a list.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch

from farcall.errors import SerializationError


class RPCExecMode(Enum):
    """How a function is called."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function and its arguments."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """What torch sends in place of an exception; here those travel themselves."""

    msg: str
    exception_type: type


class _InternalRPCPickler:
    """Pickles values with their tensors apart."""

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        """Has objects of that class pickled by the reducer from now on, unless there is one for it already."""
        from farcall.serialization import register_reducer
        from farcall.serialization.reducers import REDUCERS

        if obj_class not in REDUCERS:
            register_reducer(obj_class, reducer)

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """The pickle of a value, and its tensors."""
        from farcall.pytorch.envelopes import dumps_apart

        return dumps_apart(obj)

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        """The value again; an `AttributeError`, not raised, if it names what is not defined here."""
        from farcall.pytorch.envelopes import loads_apart

        try:
            return loads_apart(binary_data, tensor_table)
        except SerializationError as error:
            if not isinstance(error.__cause__, AttributeError):
                raise
            missing = AttributeError(
                f"{error.__cause__} Default RPC pickler does not serialize function code. Ensure that UDFs are defined "
                "on both caller and callee modules."
            )
            missing.__cause__ = error.__cause__
            return missing


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The pickle of a value, and its tensors."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """The value again."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """The name of a call in the profiler: `rpc_sync#add(worker0 -> worker1)`."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


def _start_record_function(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dest_worker_name: str
) -> Any:
    """A record of that call that has begun, for torch's script code. Raises `AssertionError` if nobody profiles."""
    if not torch.autograd._profiler_enabled():
        raise AssertionError("Autograd profiler should be enabled.")
    record = torch.autograd._RecordFunction()
    key = _build_rpc_profiling_key(exec_type, str(func_name), current_worker_name, dest_worker_name)
    torch.autograd._run_before_callbacks(record, key)
    return record
