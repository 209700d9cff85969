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
"""`send_tables`: the tensors found so far, while a thread serializes. `recv_tables`: those to use, while it reads."""
_pickler: Any = pickle.Pickler
"""The class that `serialize` pickles with. Programs may replace it."""
_unpickler: Any = pickle.Unpickler
"""The class that `deserialize` unpickles with. Programs may replace it."""


def _get_current_rpc_agent() -> Any:
    """Returns the agent of this process.

    Raises `NotInitializedError`, a `RuntimeError`, if this process is not a worker.
    """
    if not is_initialized():
        raise NotInitializedError(
            "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
        )
    return current_agent()


class RPCExecMode(Enum):
    """The ways to call a function: by `rpc_sync`, by `rpc_async`, by `rpc_async` in TorchScript, or by `remote`.

    The values are the texts in profiler names, for example `rpc_sync#add(worker0 -> worker1)`.
    """

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A Python function with its arguments, as torch pickles a call. Nothing is checked.

    Attributes:
        func: The function.
        args: Its positional arguments, a tuple; may be empty.
        kwargs: Its keyword arguments, a dict; may be empty.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """The description of an exception that torch sends in place of the exception; farcall sends the exception itself.

    Attributes:
        msg: The worker, the exception and its traceback, as text.
        exception_type: The class of the exception.
    """

    msg: str
    exception_type: type


def _references() -> Any:
    """Returns the module `farcall.pytorch.rref`, which cannot be imported at the top because it imports this one."""
    return sys.modules["farcall.pytorch.rref"]


class SendTable(list[torch.Tensor]):
    """A list of the tensors of one value. `_tensor_reducer` adds each tensor to it only once.

    Pickling may find a tensor twice: it starts over when a function has to be sent by value. The constructor takes no
    arguments, and the list is empty at first.

    Attributes:
        places: The index of each tensor in the list, by the `id()` of the tensor.
    """

    def __init__(self) -> None:
        self.places: dict[int, int] = {}
        """The index of each tensor, by its id."""


class _Reducers(dict[type, Reducer]):
    """A dispatch table for pickle: the reducers of one pickler, and those registered in this process.

    Args:
        pickler: The pickler. Its methods for tensors, references and script modules become reducers. A subclass may
            override them.
    """

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
        """Returns the reducer for a type for which the pickler has none.

        That is one registered in this process or, for a subclass of `torch.jit.ScriptModule`, that of script modules.
        Raises `KeyError`, as pickle expects, if there is neither.
        """
        if kind in REDUCERS or not issubclass(kind, torch.jit.ScriptModule):
            return REDUCERS[kind]
        return self._script_module_reducer


class _InternalRPCPickler:
    """Pickles values without their tensors, which are returned as a list beside the pickle.

    Programs inherit from it to pickle their calls in another way, and pass an object of their class to
    `api._use_rpc_pickler`. The constructor takes no arguments.
    """

    def __init__(self) -> None:
        self._dispatch_table: dict[type, Reducer] = copyreg.dispatch_table.copy()
        self._dispatch_table[torch.Tensor] = self._tensor_reducer
        self._class_reducer_dict: dict[type, Reducer] = {}
        """The reducers that `_register_reducer` has registered, by class."""

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        """Registers a reducer for objects of a class. Does nothing if one was registered for the class already.

        A reducer of the default pickler applies to all messages of this process, that of another pickler to itself
        only.

        Args:
            obj_class: The class. Subclasses are not included.
            reducer: Takes an object, and returns a function and a tuple of arguments that rebuild the object, as in
                pickle. It is not checked.
        """
        if obj_class not in self._class_reducer_dict:
            self._class_reducer_dict[obj_class] = reducer
            if self is _internal_rpc_pickler:
                register_reducer(obj_class, reducer)

    # The receivers are static methods, not class methods as in torch, because pickle must find them by name.

    @staticmethod
    def _tensor_receiver(tensor_index: int) -> torch.Tensor:
        """Returns the tensor at `tensor_index` of the list of tensors that this thread is deserializing with.

        Raises `AttributeError` if this thread is not deserializing, and `IndexError` if the list is too short.
        """
        tensor: torch.Tensor = _thread_local_tensor_tables.recv_tables[tensor_index]
        return tensor

    def _tensor_reducer(self, tensor: torch.Tensor) -> tuple[Callable[[int], torch.Tensor], tuple[int]]:
        """Adds `tensor` to the list of tensors of the value that this thread is serializing; only its index is pickled.

        Returns `_tensor_receiver` and a tuple with the index. Raises `AttributeError` if this thread is not
        serializing.
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
        """Returns the reference at a place in the message that this thread is reading.

        Raises `SerializationError` if this thread is not reading a message, or the message has no such reference.

        Args:
            rref_fork_data: Two numbers: the index of the reference among the references of the message, and the number
                that `str(rref)` shows for it. A tuple of another length raises `TypeError`.
        """
        return _references().PyRRef._deserialize(rref_fork_data)

    def _py_rref_reducer(self, py_rref: Any) -> tuple[Callable[[tuple[Any, ...]], Any], tuple[tuple[Any, ...]]]:
        """Returns what is pickled in place of the reference `py_rref`: a function and its arguments.

        Raises `SerializationError` if this thread is not writing a message, and `UsageError` if the reference was
        deleted.
        """
        return _InternalRPCPickler._py_rref_receiver, (py_rref._serialize(),)

    def _rref_reducer(self, rref: Any) -> tuple[Callable[[tuple[Any, ...]], Any], tuple[tuple[Any, ...]]]:
        """Returns what is pickled in place of a reference that `RRef(value)` created: a function and its arguments.

        Raises `SerializationError` if this thread is not writing a message, and `UsageError` if the reference was
        deleted.
        """
        return self._py_rref_reducer(rref)

    @staticmethod
    def _script_module_receiver(script_module_serialized: bytes) -> Any:
        """Returns the script module in `script_module_serialized`, the bytes that `torch.jit.save` has written.

        The Python class of the module is not needed. Raises `RuntimeError` if the bytes are damaged.
        """
        return torch.jit.load(io.BytesIO(script_module_serialized))

    def _script_module_reducer(self, script_module: Any) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        """Returns what is pickled in place of a script module: a function, and the bytes that `torch.jit.save` writes.

        Raises `RuntimeError` if torch cannot save the module.
        """
        file = io.BytesIO()
        torch.jit.save(script_module, file)
        return _InternalRPCPickler._script_module_receiver, (file.getvalue(),)

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Pickles a value without its tensors.

        Args:
            obj: The value.

        Returns:
            The pickle, and the list of the tensors; the list is empty if the value has none.

        Raises:
            Exception: What pickle raises if the value cannot be pickled, for example `PicklingError` or `TypeError`.
        """
        from farcall.pytorch.tensors import sending_apart  # here, because it imports this module

        with sending_apart() as tensors:
            return _dump(obj, _Reducers(self)), tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        """Rebuilds a value from its pickle and its tensors, the two results of `serialize`.

        If the pickle names a function or class that is not defined here, returns (does not raise) an `AttributeError`
        that says so, as torch does.

        Args:
            binary_data: The pickle.
            tensor_table: The tensors of the value; an empty list if it has none.

        Raises:
            SerializationError: The pickle is damaged, or `tensor_table` is too short.
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
        obj: The value. Raises what pickle raises if it cannot be pickled, for example `PicklingError` or `TypeError`.
        reducers: Says how to pickle each type.
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
    """Returns the value of the pickle `binary_data`.

    Uses the unpickler that the program has put into `_unpickler`, unless this worker has an allow-list. Raises
    `SerializationError` if the pickle is damaged, `NotAllowedError` if the allow-list forbids it, or what the program's
    unpickler raises.
    """
    from farcall.pytorch.allow_list import current_allow_list, load  # here, because it imports this module

    if _unpickler is pickle.Unpickler or current_allow_list() is not None:
        return load(binary_data)
    return _unpickler(io.BytesIO(binary_data)).load()


_internal_rpc_pickler: Final = _InternalRPCPickler()
"""The default pickler, which all calls use unless the program chooses another one."""


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Pickles a value without its tensors, with the default pickler.

    Returns the pickle and the list of the tensors, which may be empty. Raises what pickle raises if the value cannot be
    pickled, for example `PicklingError` or `TypeError`.
    """
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """Rebuilds a value from its pickle and its tensors, the two results of `serialize`, with the default pickler.

    Args:
        binary_data: The pickle.
        tensor_table: The tensors of the value; an empty list if it has none.

    Returns:
        The value; an `AttributeError` if the pickle names a function or class that is not defined here.

    Raises:
        SerializationError: The pickle is damaged, or `tensor_table` is too short.
        NotAllowedError: The allow-list of this worker forbids something in it.
    """
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _run_function(python_udf: PythonUDF | AttributeError) -> Any:
    """Runs a function that another worker has called. Programs may replace it.

    Args:
        python_udf: The function and its arguments, or the `AttributeError` that `deserialize` returns for a function
            that is not defined here.

    Returns:
        What the function returned. If it raised, or `python_udf` is an error, a `RemoteException` that describes the
        exception by a text, which is also printed to standard error.

    Raises:
        NotInitializedError: The function raised, and this process is not a worker.
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
    """Returns what to call in place of a function that another worker has called. Every call uses this.

    That is the function itself, unless the program has replaced `_run_function`. Then it is a function that passes
    `function` and its arguments to the replacement. Functions of farcall itself that only carry other calls are always
    returned as they are.
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
    """Raised in place of a function's exception if a replaced `_run_function` returned a `RemoteException`.

    Args:
        description: The `RemoteException`: the exception's text and type. It is kept as the attribute `description`.
    """

    def __init__(self, description: RemoteException) -> None:
        super().__init__(description)
        self.description = description


def _report_exception(error: BaseException, worker: Any) -> RemoteException:
    """Prints an exception to standard error, and returns its description for the caller. Raises nothing.

    The description has the worker, the exception and its traceback as a text, and the type of the exception.

    Args:
        error: The exception, which a function has raised that another worker has called.
        worker: The `WorkerInfo` of this worker, which the description names.
    """
    text = f"On {worker}:\n{error!r}\n{''.join(traceback.format_exception(error))}"
    print(text, file=sys.stderr)
    return RemoteException(text, type(error))


def _handle_exception(result: Any) -> None:
    """Raises the exception that a `RemoteException` describes. Returns None for any other `result`.

    Escapes in the description, such as a backslash and `n`, are replaced by the characters that they stand for.

    Raises:
        Exception: Of the type that the function raised, with the description as its text.
        RuntimeError: An exception of that type cannot be created from a text alone.
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
    """Returns the exception that the caller of a function gets if the function raised `error` on this worker.

    That is `error` itself, with its attributes, cause and traceback. If an exception of its type cannot be created from
    a text alone, it is a `RuntimeError` with `error` as its cause, as in torch. If a replaced `_run_function` has
    described the exception, it is an exception made from the description. Prints `error` to standard error, unless it
    was described. Raises nothing.

    Args:
        error: What the function raised.
        worker: The `WorkerInfo` of this worker, which the printed text names.
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
    """Returns the name of a call in the profiler, for example `rpc_sync#add(worker0 -> worker1)`. Nothing is checked.

    Args:
        exec_type: How the function is called; in the example by `rpc_sync`.
        func_name: The name of the function; in the example `add`.
        current_worker_name: The name of the caller; in the example `worker0`.
        dst_worker_name: The name of the callee; in the example `worker1`.
    """
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"


def _start_record_function(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dest_worker_name: str
) -> Any:
    """Returns a profiler record of a call that starts now. Torch's script code uses it, and ends the record.

    The name of the record is for example `rpc_sync#add(worker0 -> worker1)`.

    Args:
        exec_type: How the function is called.
        func_name: The name of the function.
        current_worker_name: The name of the caller.
        dest_worker_name: The name of the callee.

    Raises:
        AssertionError: No profiler is active in this thread.
    """
    if not torch.autograd._profiler_enabled():
        raise AssertionError("Autograd profiler should be enabled.")
    record = torch.autograd._RecordFunction()
    key = _build_rpc_profiling_key(exec_type, str(func_name), current_worker_name, dest_worker_name)
    torch.autograd._run_before_callbacks(record, key)
    return record
