"""`torch.distributed.rpc.internal`: running functions for other workers, pickling calls, and names for the profiler.

Running. A function that another worker has called is run by `_run_function`, which programs may replace. As long as it
is ours, the function itself is called instead (`runner_of`), because `_run_function` describes an exception by a text,
and farcall sends the exception itself. An exception goes through `_report_exception`, the second half of
`_run_function`, and through `_handle_exception`, which decides what the caller gets.

Pickling. When farcall's own picklers meet a tensor that is sent outside of its pickle (`envelopes`), a reference or a
script module, they call the reducers of `_internal_rpc_pickler`. `serialize` and `deserialize` are for programs that
pickle calls themselves, with that pickler or with one of their own that inherits from it.

Rules
- A reducer of the default pickler applies to all messages of this process; that of another pickler only to what that
  one serializes.
- The arguments of a receiver came from another worker. Workers with an allow-list check them first (`envelopes`,
  `rref`).
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from enum import Enum
from typing import Any, Final, NamedTuple

import torch

from farcall.api import current_agent, is_initialized
from farcall.errors import NotInitializedError, SerializationError
from farcall.serialization import register_reducer
from farcall.serialization.callables import is_interactive
from farcall.serialization.registry import REDUCERS, Reducer

_thread_local_tensor_tables: Final = threading.local()
"""While a thread serializes: `send_tables`, the tensors found so far. While it deserializes: `recv_tables`."""
_pickler: Any = pickle.Pickler
"""The class that `serialize` pickles with. Programs may replace it."""
_unpickler: Any = pickle.Unpickler
"""The class that `deserialize` unpickles with. Programs may replace it."""


def _get_current_rpc_agent() -> Any:
    """Returns the agent of this process. Raises `RuntimeError` if this process is not a worker."""
    if not is_initialized():
        raise NotInitializedError(
            "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
        )
    return current_agent()


class RPCExecMode(Enum):
    """The ways to call a function: by `rpc_sync`, by `rpc_async`, by `rpc_async` in TorchScript, or by `remote`."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A Python function and its arguments, as torch pickles a call."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """What torch sends in place of an exception; farcall sends the exception itself."""

    msg: str
    exception_type: type


def _references() -> Any:
    """Returns the module `rref`, which imports this one."""
    return sys.modules["farcall.pytorch.rref"]


class SendTable(list[torch.Tensor]):
    """A list of the tensors of one value, each of them once.

    A tensor may be met twice, because pickling starts over when a function has to be sent by value.
    """

    def __init__(self) -> None:
        self.places: dict[int, int] = {}
        """The index of each tensor, by its id."""


class _Reducers(dict[type, Reducer]):
    """A dispatch table for pickle: the reducers of one pickler, and those of this process for all other types."""

    def __init__(self, pickler: _InternalRPCPickler) -> None:
        # A subclass may have overridden the methods, and may not have called our constructor.
        super().__init__(getattr(pickler, "_dispatch_table", {}))
        self.setdefault(torch.Tensor, pickler._tensor_reducer)
        self[torch.nn.Parameter] = pickler._tensor_reducer
        self[_references().PyRRef] = pickler._py_rref_reducer
        self[_references().RRef] = pickler._rref_reducer
        self.update(getattr(pickler, "_class_reducer_dict", {}))
        self._script_module_reducer = pickler._script_module_reducer

    def __missing__(self, kind: type) -> Reducer:
        """Returns the reducer of a type that the pickler has none for.

        Raises `KeyError`, as pickle expects, if there is none.
        """
        if kind in REDUCERS or not issubclass(kind, torch.jit.ScriptModule):
            return REDUCERS[kind]
        return self._script_module_reducer


class _InternalRPCPickler:
    """Pickles values, with their tensors in a separate list.

    Programs inherit from it to pickle their calls in another way (`api._use_rpc_pickler`).
    """

    def __init__(self) -> None:
        self._dispatch_table: dict[type, Reducer] = copyreg.dispatch_table.copy()
        self._dispatch_table[torch.Tensor] = self._tensor_reducer
        self._class_reducer_dict: dict[type, Reducer] = {}
        """The reducers that were registered."""

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        """Registers a reducer for objects of a class. Does nothing if this pickler has one for the class already.

        Args:
            obj_class: The class.
            reducer: Returns a function and its arguments, which rebuild the object.
        """
        if obj_class not in self._class_reducer_dict:
            self._class_reducer_dict[obj_class] = reducer
            if self is _internal_rpc_pickler:
                register_reducer(obj_class, reducer)

    # The receivers are static methods, not class methods as in torch, because pickle must find them by name.

    @staticmethod
    def _tensor_receiver(tensor_index: int) -> torch.Tensor:
        """Returns the tensor at an index of the list that is being deserialized.

        Raises `AttributeError` outside of that.
        """
        tensor: torch.Tensor = _thread_local_tensor_tables.recv_tables[tensor_index]
        return tensor

    def _tensor_reducer(self, tensor: torch.Tensor) -> tuple[Callable[[int], torch.Tensor], tuple[int]]:
        """Adds a tensor to the list that is being serialized; its index is pickled.

        Raises `AttributeError` outside of that.
        """
        table = _thread_local_tensor_tables.send_tables
        place = len(table)
        if isinstance(table, SendTable):
            place = table.places.setdefault(id(tensor), place)
        if place == len(table):
            table.append(tensor)
        return _InternalRPCPickler._tensor_receiver, (place,)

    @staticmethod
    def _py_rref_receiver(rref_fork_data: tuple[Any, ...]) -> Any:
        """Returns the reference for a result of `PyRRef._serialize` in the message that is being read.

        Raises `SerializationError` outside of a message.
        """
        return _references().PyRRef._deserialize(rref_fork_data)

    def _py_rref_reducer(self, py_rref: Any) -> tuple[Callable[[tuple[Any, ...]], Any], tuple[tuple[Any, ...]]]:
        """Returns what is pickled of a reference. Raises `SerializationError` if no message is being made."""
        return _InternalRPCPickler._py_rref_receiver, (py_rref._serialize(),)

    def _rref_reducer(self, rref: Any) -> tuple[Callable[[tuple[Any, ...]], Any], tuple[tuple[Any, ...]]]:
        """Returns what is pickled of a reference that was created by `RRef(value)`. Raises as `_py_rref_reducer`."""
        return self._py_rref_reducer(rref)

    @staticmethod
    def _script_module_receiver(script_module_serialized: bytes) -> Any:
        """Returns a script module from what `torch.jit.save` has written. Its Python class is not needed.

        Raises `RuntimeError` if the bytes are damaged.
        """
        return torch.jit.load(io.BytesIO(script_module_serialized))

    def _script_module_reducer(self, script_module: Any) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        """Returns what is pickled of a script module: what `torch.jit.save` writes.

        Raises `RuntimeError` if that fails.
        """
        file = io.BytesIO()
        torch.jit.save(script_module, file)
        return _InternalRPCPickler._script_module_receiver, (file.getvalue(),)

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Returns the pickle of a value, and its tensors. Raises what pickle raises if it cannot be pickled."""
        from farcall.pytorch.tensors import sending_apart  # here, because it imports this module

        with sending_apart() as tensors:
            return _dump(obj, _Reducers(self)), tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        """Returns the value of a pickle and its tensors.

        If the pickle names a function or class that is not defined here, returns an `AttributeError` that says so, as
        torch does.

        Raises:
            SerializationError: The pickle is damaged.
            NotAllowedError: The allow-list of this worker forbids something in it.
        """
        from farcall.pytorch.tensors import receiving_apart  # here, because it imports this module

        with receiving_apart(tensor_table):
            try:
                return _load(binary_data)
            except (AttributeError, SerializationError) as error:
                reason = error if isinstance(error, AttributeError) else error.__cause__
                if not isinstance(reason, AttributeError):
                    raise
                # Line breaks and blanks are as in torch, because programs compare the text.
                missing = AttributeError(
                    f"{reason} Default RPC pickler does not serialize\n            function code. Ensure that UDFs are "
                    "defined on both caller and\n            callee modules."
                )
                missing.__cause__ = reason
                return missing


def _dump(obj: Any, reducers: _Reducers) -> bytes:
    """Returns the pickle of a value. Functions that cannot be imported by name are pickled by value.

    Args:
        obj: The value.
        reducers: How types are pickled. Raises what pickle raises if a type cannot be pickled.
    """
    if not is_interactive():
        file = io.BytesIO()
        pickler = _pickler(file, 5)
        pickler.dispatch_table = reducers
        try:
            pickler.dump(obj)
            return file.getvalue()
        except Exception:
            if _pickler is not pickle.Pickler:  # the program's own pickler decides what can be pickled
                raise
    from farcall.serialization.by_value import dumps_by_value  # here, because it is slow to import and rarely needed

    return dumps_by_value(obj, None, reducers)


def _load(binary_data: bytes) -> Any:
    """Returns the value of a pickle.

    Uses the program's own unpickler if the program has replaced ours and this worker has no allow-list. Raises
    `SerializationError` or `NotAllowedError`, or what that unpickler raises.
    """
    from farcall.pytorch.allow_list import current_allow_list, load  # here, because it imports this module

    if _unpickler is pickle.Unpickler or current_allow_list() is not None:
        return load(binary_data)
    return _unpickler(io.BytesIO(binary_data)).load()


_internal_rpc_pickler: Final = _InternalRPCPickler()
"""The default pickler."""


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Returns the pickle of a value, and its tensors, by the default pickler. Raises what pickle raises."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """Returns the value of a pickle and its tensors, by the default pickler.

    Returns an `AttributeError` if the pickle names something that is not defined here. Raises `SerializationError` if
    the pickle is damaged, and `NotAllowedError` if the allow-list forbids it.
    """
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _run_function(python_udf: PythonUDF | AttributeError) -> Any:
    """Runs a function that another worker has called.

    Args:
        python_udf: The function and its arguments, or the `AttributeError` that `deserialize` returned.

    Returns:
        What the function returned. If it raised, a `RemoteException`, which is also printed to standard error.
    """
    try:
        if isinstance(python_udf, AttributeError):
            raise python_udf
        return python_udf.func(*python_udf.args, **python_udf.kwargs)
    except Exception as error:
        return _report_exception(error, _get_current_rpc_agent().get_worker_info())


_our_run_function: Final = _run_function

_NOT_RUN_BY_RUN_FUNCTION: Final = ("farcall.pytorch.autograd.", "farcall.pytorch.callees", "farcall.pytorch.envelopes")
"""Modules whose functions are not run by `_run_function`.

Where torch sends messages of another kind, farcall calls these functions. If they run a Python function of the program,
they use `runner_of` for that.
"""


def runner_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what to call in place of a function that another worker has called. On the path of every call.

    That is the function itself, unless the program has replaced `_run_function`.
    """
    if _run_function is _our_run_function:
        return function
    if str(getattr(function, "__module__", "")).startswith(_NOT_RUN_BY_RUN_FUNCTION):
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        result = _run_function(PythonUDF(function, args, kwargs))
        if isinstance(result, RemoteException):
            raise _DescribedException(result)
        return result

    return run


class _DescribedException(Exception):
    """Raised in place of a function's exception if a replaced `_run_function` has only described that exception."""

    def __init__(self, description: RemoteException) -> None:
        super().__init__(description)
        self.description = description


def _report_exception(error: BaseException, worker: Any) -> RemoteException:
    """Prints an exception that a function raised for another worker, and returns its description for the caller.

    `worker` is this worker, for the description. Raises nothing.
    """
    text = f"On {worker}:\n{error!r}\n{''.join(traceback.format_exception(error))}"
    print(text, file=sys.stderr)
    return RemoteException(text, type(error))


def _handle_exception(result: Any) -> None:
    """Raises the exception that a `RemoteException` describes; does nothing with any other result.

    Raises:
        Exception: Of the type that the function raised, with the description as its text.
        RuntimeError: An exception of that type cannot be created with a text alone.
    """
    if not isinstance(result, RemoteException):
        return
    text = result.msg.encode("utf-8").decode("unicode_escape")
    try:
        error = result.exception_type(text)
    except BaseException as refusal:
        raise RuntimeError(
            f"Failed to create original exception type. Error msg was {refusal} "
            f"Original exception on remote side was {text}"
        ) from refusal
    if error is not None:
        raise error


def exception_for_caller(error: BaseException, worker: Any) -> BaseException:
    """Returns what the caller of a function gets if the function raised `error` on this worker. Raises nothing.

    Prints the exception as well. The caller gets the exception itself, with its attributes, cause and traceback, unless
    torch's callers would get a `RuntimeError` in its place; the exception is the cause of that then. If a replaced
    `_run_function` has described the exception, the caller gets the description only, as in torch.

    Args:
        error: What the function raised.
        worker: This worker, for the description.
    """
    try:
        described = error.description if isinstance(error, _DescribedException) else _report_exception(error, worker)
        # Escaped, because `_handle_exception` decodes escapes: so a text with backslashes stays the same.
        _handle_exception(described._replace(msg=described.msg.encode("unicode_escape").decode()))
    except BaseException as raised:
        raised.__traceback__ = None  # which has only the frames of this function
        if isinstance(error, _DescribedException):
            return raised
        if type(raised) is type(error) or not isinstance(raised, RuntimeError):
            return error
        raised.__cause__ = error
        return raised
    return error


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Returns the name of a call in the profiler, for example `rpc_sync#add(worker0 -> worker1)`."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


def _start_record_function(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dest_worker_name: str
) -> Any:
    """Returns a profiler record of a call that starts now, for torch's script code.

    The arguments are those of `_build_rpc_profiling_key`. Raises `AssertionError` if no profiler is active in this
    thread.
    """
    if not torch.autograd._profiler_enabled():
        raise AssertionError("Autograd profiler should be enabled.")
    record = torch.autograd._RecordFunction()
    key = _build_rpc_profiling_key(exec_type, str(func_name), current_worker_name, dest_worker_name)
    torch.autograd._run_before_callbacks(record, key)
    return record
