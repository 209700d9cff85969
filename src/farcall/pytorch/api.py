"""The functions of `torch.distributed.rpc.api`: calls, collectives, shutdown.

Rules
- Names of this module are looked up when they are used, because programs and their tests replace them.
- A plain call is farcall's own. All it costs more here is two checks: whether interceptors are active for it
  (`envelopes`: device maps, distributed autograd, the profiler), and whether the callee is a Python function
  (`callees`).
- The agent of the process is that of `farcall.api`; there is no second one.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, Final, Generic, ParamSpec, TypeAlias, TypeVar

import torch
from torch.futures import Future as Future

from farcall import api as _farcall
from farcall.errors import NotInitializedError, RpcTimeoutError, UsageError, WorkerLostError
from farcall.futures import Future as _OwnFuture
from farcall.gate import FOREVER, asleep, on_serving_thread
from farcall.pytorch import autograd
from farcall.pytorch._utils import _group_membership_management as _group_membership_management
from farcall.pytorch._utils import _update_group_membership as _update_group_membership
from farcall.pytorch.allow_list import may_be_called
from farcall.pytorch.autograd.short_calls import call_shortly
from farcall.pytorch.callees import make_call
from farcall.pytorch.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from farcall.pytorch.envelopes import Departure, Request, Trip, board, reply_of, rides_along, run, run_remotely, sending
from farcall.pytorch.futures import RpcFuture, completed_future, failed_future, wait_all
from farcall.pytorch.internal import PythonUDF as PythonUDF
from farcall.pytorch.internal import RPCExecMode, _internal_rpc_pickler
from farcall.pytorch.internal import _build_rpc_profiling_key as _build_rpc_profiling_key
from farcall.pytorch.internal import _get_current_rpc_agent as _get_current_rpc_agent
from farcall.pytorch.profiler import RemoteProfilerManager, profiled_name
from farcall.pytorch.profiler import _get_should_profile as _get_should_profile
from farcall.pytorch.rref import PyRRef, labels
from farcall.pytorch.rref import RRef as RRef
from farcall.pytorch.worker_info import WorkerInfo, as_torch
from farcall.runtime.agent import Agent
from farcall.runtime.shutdown import deadline_of, finish_what_has_begun

_P = ParamSpec("_P")
_R = TypeVar("_R")
T = TypeVar("T")
GenericWithOneTypeVar: Any = Generic[T]  # type: ignore[index]  # torch's name for it

__all__ = [
    "AllGatherStates",
    "RRef",
    "get_worker_info",
    "method_factory",
    "new_method",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

To: TypeAlias = str | int | WorkerInfo

logger = logging.getLogger("farcall")

_CHECK_INTERVAL_S: Final = 1.0
"""How often a thread that waits in `_all_gather` checks whether the other workers are still there."""

_ignore_rref_leak = True
"""If False, `shutdown` raises if other workers still hold references to values of this one."""
_default_pickler = _internal_rpc_pickler
_thread_local_var = threading.local()
_new_rref = PyRRef.__new__


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Context manager: inside it, all threads of this process pickle calls of Python functions with another pickler.

    At the end of the block, the default pickler is used again, also if the block is inside another such block.

    Args:
        rpc_pickler: An object whose `serialize(value)` returns a pickle and a list of the tensors of the value. The
            callee reads both with the default pickler. The object is not checked.
    """
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


# -- the agent


def _is_current_rpc_agent_set() -> bool:
    """Returns True if this process is a worker."""
    return _farcall.is_initialized()


def _set_and_start_rpc_agent(agent: Any) -> None:
    """Makes `agent`, which must not have been started, the agent of this process, and starts it.

    Raises `RuntimeError` if this process has an agent already, and what `agent.start` raises. If the start fails, this
    process has no agent.
    """
    _farcall.adopt(agent)


def _reset_current_rpc_agent() -> None:
    """Makes this process no longer a worker, without closing its agent. Does nothing if it is not a worker."""
    _farcall.release()


def _require_initialized(func: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: makes `func` raise `NotInitializedError` (a `RuntimeError`) unless this process is a worker."""

    @functools.wraps(func)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not _is_current_rpc_agent_set():
            raise NotInitializedError("RPC has not been initialized. Call torch.distributed.rpc.init_rpc first.")
        return func(*args, **kwargs)

    return wrapper


def _init_rpc_states(agent: Any) -> None:
    """Records the names of all workers of the agent's group, and makes `agent` the agent of this process.

    If this process has an agent already, only the names are recorded: some backends set the agent themselves. Raises
    what `agent.start` raises; this process then has no agent.
    """
    global _ALL_WORKER_NAMES
    _ALL_WORKER_NAMES = _all_names(agent)
    if not _is_current_rpc_agent_set():
        _reset_gatherings()  # before the agent serves: other workers may enter the first gathering at once
        labels.begin()
        _set_and_start_rpc_agent(agent)


@_require_initialized
def get_worker_info(worker_name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """Returns the name and rank of a worker.

    Args:
        worker_name: The name of a worker, its rank, or its `WorkerInfo`; None for this worker.

    Returns:
        A `WorkerInfo` with `name` and `id`. It can be used as `to` in calls.

    Raises:
        RuntimeError: There is no such worker, `worker_name` has another type, or this process is not a worker.
    """
    return as_torch(_get_current_rpc_agent().get_worker_info(worker_name))


def _to_worker_info(to: Any, agent: Any = None) -> WorkerInfo:
    """Returns the `WorkerInfo` of a worker.

    Args:
        to: The name, the rank or the `WorkerInfo` of the worker. A `WorkerInfo` is returned as it is, and is not
            checked.
        agent: The agent to ask; None for the agent of this process.

    Raises:
        RuntimeError: There is no such worker, or `agent` is None and this process is not a worker.
        ValueError: `to` has another type.
    """
    if isinstance(to, WorkerInfo):
        return to
    if isinstance(to, (str, int)):
        return as_torch((agent or _farcall.current_agent()).get_worker_info(to))
    raise ValueError(f"Cannot get WorkerInfo from name {to}")


def get_rpc_timeout() -> float:
    """Returns the default timeout of this worker's calls in seconds; 0 means no timeout.

    Raises `RuntimeError` if this process is not a worker.
    """
    return _farcall.get_rpc_timeout()


def _set_rpc_timeout(rpc_timeout_seconds: float) -> None:
    """Sets the default timeout of this worker's calls.

    Args:
        rpc_timeout_seconds: Seconds; 0 means no timeout. A negative number, and anything but a number, raises
            `UsageError`.

    Raises:
        RuntimeError: This process is not a worker.
    """
    _farcall._set_rpc_timeout(rpc_timeout_seconds)


# -- calls


def track_future(future: Any) -> Any:
    """Returns the given future, which may be any object with a `wait` method. It is not checked.

    If this thread is inside a `with _wait_all()` block, the end of that block waits for the future.
    """
    futures = getattr(_thread_local_var, "future_list", None)
    if futures is not None:
        futures.append(future)
    return future


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Context manager: at its end, waits for all futures that `rpc_async` returned to this thread inside the block.

    If there are none, it does not wait. Raises the error of a future that fails, without waiting for the others. It
    waits also if the block raises. Blocks can be nested; each waits for its own futures.

    Example:
        with rpc.api._wait_all():
            rpc.rpc_async("worker1", torch.add, args=(1, 2))
    """
    outer = getattr(_thread_local_var, "future_list", None)
    futures: list[Any] = []
    _thread_local_var.future_list = futures
    try:
        yield
    finally:
        if outer is None:
            del _thread_local_var.future_list
        else:
            _thread_local_var.future_list = outer
        wait_all(futures)


def rpc_sync(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Runs `func(*args, **kwargs)` on worker `to`, and returns its result.

    Args:
        to: The name, the rank or the `WorkerInfo` of the worker; may be this worker.
        func: A Python function that the worker can import, a builtin operator such as `torch.add`, or a script
            function.
        args: The positional arguments, a tuple or list; None for none.
        kwargs: The keyword arguments; None for none.
        timeout: Seconds until the call fails; 0 for no timeout. By default the timeout of `init_rpc`'s options. A
            negative number other than the default -1 raises `UsageError`, a `RuntimeError`.

    Returns:
        What the function returns. Tensors arrive on the CPU, unless a device map says otherwise.

    Raises:
        RuntimeError: The call timed out ("RPC ran for more than set timeout"), the worker does not exist or was lost,
            or this process is not a worker.
        TypeError: `func` is not callable, or an argument cannot be pickled (`SerializationError`).
        ValueError: `to` is neither a str, an int nor a `WorkerInfo`.
        Exception: What the function raised on the worker, with the same type where possible.

    Example:
        rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))
    """
    return _invoke_rpc(to, func, RPCExecMode.SYNC, args, kwargs, timeout).wait()


def rpc_async(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Runs `func(*args, **kwargs)` on worker `to`, and returns a future at once.

    Args:
        to: The name, the rank or the `WorkerInfo` of the worker; may be this worker.
        func: A Python function that the worker can import, a builtin operator such as `torch.add`, or a script
            function.
        args: The positional arguments, a tuple or list; None for none.
        kwargs: The keyword arguments; None for none.
        timeout: Seconds until the future fails; 0 for no timeout. By default the timeout of `init_rpc`'s options. A
            negative number other than the default -1 raises `UsageError`, a `RuntimeError`.

    Returns:
        A `torch.futures.Future`. Its `wait()` returns the result. It raises what the function raised, or a
        `RuntimeError` if the call timed out or the worker was lost.

    Raises:
        RuntimeError: The worker does not exist, or this process is not a worker.
        TypeError: `func` is not callable, or an argument cannot be pickled (`SerializationError`).
        ValueError: `to` is neither a str, an int nor a `WorkerInfo`.

    Example:
        future = rpc.rpc_async("worker1", torch.add, args=(torch.ones(2), 3))
        print(future.wait())
    """
    future = _invoke_rpc(to, func, RPCExecMode.ASYNC, args, kwargs, timeout)
    return track_future(RpcFuture(future) if isinstance(future, _OwnFuture) else future)


def _invoke_rpc(
    to: To,
    func: Callable[..., Any],
    rpc_type: RPCExecMode,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    rpc_timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Makes a call on worker `to`, and returns its future, which is one of farcall.

    For `SYNC`, it may be another object with a `wait` method. If the worker cannot be reached, the future fails.

    Args:
        to: The name, the rank or the `WorkerInfo` of the worker.
        func: The function.
        rpc_type: `SYNC` if the calling thread waits for the future at once, else `ASYNC`.
        args: The positional arguments, a tuple or list; None for none.
        kwargs: The keyword arguments; None for none.
        rpc_timeout: Seconds until the future fails; 0 for no timeout. By default (-1) the timeout of `init_rpc`'s
            options. Any other negative number raises `UsageError`, a `RuntimeError`.

    Raises:
        TypeError: `func` is not callable, or an argument cannot be pickled (`SerializationError`).
        ValueError: `to` has another type.
        RuntimeError: The worker does not exist, or this process is not a worker.
    """
    if not callable(func):
        raise TypeError("function should be callable.")
    agent: Any = _farcall.current_agent()
    unattended = rpc_type is not RPCExecMode.SYNC
    info = as_torch(agent.get_worker_info(to)) if type(to) is str else _to_worker_info(to, agent)
    callee, args, kwargs = make_call(func, args, kwargs, _default_pickler)
    try:
        if not rides_along(agent, info):
            known = to if type(to) is str else info  # a str caches its hash
            return agent.call(known, callee, args or None, kwargs or None, rpc_timeout, unattended)
        short = call_shortly(agent, info, callee, args or (), kwargs or {}, rpc_timeout, unattended)
        if short is not None:
            return short
        trips = board(agent, Departure(info, func, rpc_type))
        request = Request(agent, callee, args or (), kwargs or {}, trips)
        with sending(trips):
            call = agent.call(info, run, (request,), None, rpc_timeout, unattended)
        future: Any = reply_of(call, trips)
        for trip in trips.values():
            future = trip.awaited(future)
        return future
    except (
        RpcTimeoutError,
        WorkerLostError,
    ) as error:  # the worker cannot be reached; torch's futures report that in wait()
        return failed_future(error)


def remote(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> PyRRef[Any]:
    """Runs `func(*args, **kwargs)` on worker `to`, which keeps the result, and returns a reference to it at once.

    Args:
        to: The name, the rank or the `WorkerInfo` of the worker that owns the result; may be this worker.
        func: A Python function that the worker can import, a class, a builtin operator, or a script function.
        args: The positional arguments, a tuple or list; None for none.
        kwargs: The keyword arguments; None for none.
        timeout: Seconds after which fetching the value fails if the function has not returned; 0 for no timeout. By
            default there is none. It is not checked.

    Returns:
        The reference. `to_here()` fetches the value, or raises what the function raised.

    Raises:
        RuntimeError: The worker does not exist or cannot be reached, or this process is not a worker.
        TypeError: `func` is not callable, or an argument cannot be pickled (`SerializationError`).
        ValueError: `to` is neither a str, an int nor a `WorkerInfo`.

    Example:
        rref = rpc.remote("worker1", torch.add, args=(torch.ones(2), 3))
        print(rref.to_here())
    """
    if not callable(func):
        raise TypeError("function should be callable.")
    agent: Any = _farcall.current_agent()
    info = to if isinstance(to, WorkerInfo) else _to_worker_info(to, agent)
    callee, args, kwargs = make_call(func, args, kwargs, _default_pickler)
    rref: PyRRef[Any] = _new_rref(PyRRef)
    rref._label = labels.next(2)
    trips: dict[str, Trip] = {}
    if not rides_along(agent, info):
        rref._handle = agent.remote(info, callee, args or None, kwargs or None)
    else:
        trips = board(agent, Departure(info, func, RPCExecMode.REMOTE))
        request = Request(agent, callee, args or (), kwargs or {}, trips)
        with sending(trips):
            rref._handle = agent.remote(info, run_remotely, (request,), None)
    if timeout != UNSET_RPC_TIMEOUT:
        rref._watch_creation(timeout)
    for trip in trips.values():
        trip.referenced(rref)
    return rref


def _rref_typeof_on_owner(rref: PyRRef[Any], blocking: bool = True) -> Any:
    """Waits for a value that this worker owns, and returns its type.

    Args:
        rref: The reference to the value. Raises `RuntimeError` if another worker owns the value.
        blocking: If False, waits for the value all the same, but returns a torch future that has the type already.

    Raises:
        Exception: The error of the function that should have created the value, if that function failed.
    """
    kind = type(rref.local_value())
    return kind if blocking else completed_future(kind)


def _rref_typeof_on_user(rref: PyRRef[Any], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    """Asks the owner of a value for its type, and returns the type.

    Args:
        rref: The reference to the value.
        timeout: Seconds until asking fails; 0 for no timeout. By default the timeout of `init_rpc`'s options.
        blocking: If False, returns a torch future of the type at once. The future then fails with the errors below.

    Raises:
        RuntimeError: The call timed out, or the owner was lost.
        Exception: The error of the function that should have created the value, if that function failed.
    """
    future = rpc_async(rref.owner(), _rref_typeof_on_owner, args=(rref,), timeout=timeout)
    return future.wait() if blocking else future


def _enable_rpc_profiler(
    should_profile: bool,
    qualified_name: str | None,
    func: Callable[..., Any],
    rpc_type: RPCExecMode,
    dst_worker_info: WorkerInfo,
) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager that records a call in torch's profiler, for programs that make calls in their own way.

    The next call that this thread makes under the profiler is shown by the same name. Calls by `rpc_sync`, `rpc_async`
    and `remote` do not need this function.

    Args:
        should_profile: What `_get_should_profile` returned. If False, the context manager does nothing.
        qualified_name: The name of a builtin operator; None for any other function, whose own name is used.
        func: The function that is called. Ignored if `qualified_name` is given.
        rpc_type: How it is called, such as `RPCExecMode.SYNC`.
        dst_worker_info: The worker that runs it.

    Raises:
        RuntimeError: This process is not a worker. Or this thread has called this function before, and has made no
            call under the profiler since.
    """
    if not should_profile:
        return contextlib.nullcontext()
    name = profiled_name(func) if qualified_name is None else qualified_name
    key = _build_rpc_profiling_key(rpc_type, name, get_worker_info().name, dst_worker_info.name)
    RemoteProfilerManager.set_current_profiling_key(key)
    record: contextlib.AbstractContextManager[Any] = torch.autograd.profiler.record_function(key)
    return record


# torch's module has these names because a loop at its end documents the methods of `RRef`. Some programs import them.


def method_factory(method_name: str, docstring: str | None) -> Callable[..., Any]:
    """Returns a method for `RRef` that calls the method of `PyRRef`, its base class, with the given name.

    Args:
        method_name: The name of the method. A name that `PyRRef` does not have raises `AttributeError` when the
            returned method is called.
        docstring: The docstring of the new method; None for none.
    """

    def method(self: RRef[Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(super(RRef, self), method_name)(*args, **kwargs)

    method.__doc__ = docstring
    return method


method_name = "to_here"
method = PyRRef.to_here
docstring = method.__doc__
new_method = method_factory(method_name, docstring)


# -- collectives


class _ProceedSignal(threading.Event):
    """An event for threads of the executor: while one of them waits, another thread takes its place in the executor.

    Like a `threading.Event`, it starts unset, and any thread may set it.
    """

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the event is set, or for `timeout` seconds (None: without limit). Returns whether it is set."""
        if self.is_set():
            return True
        with asleep():
            return super().wait(timeout)


class AllGatherStates:
    """What one worker stores for one `_all_gather`, in which workers exchange objects.

    Programs with an exchange of their own create instances themselves. The constructor takes no arguments.

    Attributes:
        gathered_objects: The objects by worker name. The worker whose name sorts first is the leader. It has the
            objects that have arrived so far. On every other worker, this is empty until the leader sends all objects.
        proceed_signal: An event that is set when `gathered_objects` is complete.
    """

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal: threading.Event = _ProceedSignal()
        self._has_left = threading.Event()
        """Set when this worker's thread is about to return from `_all_gather`."""


_ALL_WORKER_NAMES: set[str] = set()
"""The names of all workers, set when the agent starts. In a fixed group `_all_gather` waits for them."""
_all_gather_dict_lock = threading.RLock()
"""Held while `_all_gather_sequence_id` or `_all_gather_sequence_id_to_states` is read or changed."""
_all_gather_sequence_id: dict[str, int] = {}
"""How often this worker has called `_all_gather` with a set of workers. Keys are their sorted names with commas."""
_all_gather_sequence_id_to_states: collections.defaultdict[str, AllGatherStates] = collections.defaultdict(
    AllGatherStates
)
"""The calls of `_all_gather` in progress, by sequence id: a key of `_all_gather_sequence_id`, `#`, and a number."""


def _reset_gatherings() -> None:
    """Deletes the state of every `_all_gather`, in which workers exchange objects. Called before an agent starts.

    The deleted state is that of an earlier agent, or of the parent process. Does nothing if there is none.
    """
    global _all_gather_dict_lock
    _all_gather_dict_lock = threading.RLock()  # in a forked child a thread of the parent may hold the old lock for ever
    _all_gather_sequence_id.clear()
    _all_gather_sequence_id_to_states.clear()


def _enter_gathering(names: Collection[str]) -> tuple[str, AllGatherStates]:
    """Returns the id and the state of the next `_all_gather`, in which these workers exchange objects.

    The id is the sorted names with commas, `#`, and a number, for example `a,b#0`. Every call of this function takes
    the next number for the same names. The caller deletes the state at the end. The names are not checked.
    """
    key = ",".join(sorted(names))
    with _all_gather_dict_lock:
        number = _all_gather_sequence_id.get(key, 0)
        _all_gather_sequence_id[key] = number + 1
        sequence_id = f"{key}#{number}"
        return sequence_id, _all_gather_sequence_id_to_states[sequence_id]


def _find_gathering(sequence_id: Any) -> AllGatherStates | None:
    """Returns the state of the `_all_gather` with this id; None if this worker has returned from it already.

    In an `_all_gather` workers exchange objects. Creates the state if this worker has not called it yet. An id is the
    sorted names of the workers with commas, `#`, and a number. An id of another form is not refused: a state is created
    for it.
    """
    key, _, number = sequence_id.rpartition("#") if isinstance(sequence_id, str) else (sequence_id, "", "")
    with _all_gather_dict_lock:
        has_entered = number.isdecimal() and int(number) < _all_gather_sequence_id.get(key, 0)
        if has_entered and sequence_id not in _all_gather_sequence_id_to_states:
            return None
        return _all_gather_sequence_id_to_states[sequence_id]


@may_be_called
def _gather_to_leader(
    sequence_id: Any, worker_name: str, obj: Any, worker_names: Collection[str] | None = None
) -> None:
    """Called remotely on the leader of an `_all_gather`, in which workers exchange objects: stores one worker's object.

    The leader is the worker whose name sorts first. When the objects of all workers are there, its wait ends.

    Args:
        sequence_id: Which `_all_gather`: the sorted names of its workers with commas, `#`, and a number.
        worker_name: The worker whose object it is.
        obj: The object.
        worker_names: The workers that take part; None or empty for all.

    Raises:
        AssertionError: `worker_names` is None or empty and there is no worker `worker_name`, or its object is stored
            already.
        RuntimeError: The leader has stopped waiting.
        TypeError: `worker_names` is not a set, frozenset, list or tuple.
    """
    # Another worker could send a huge `range`, which would take for ever to walk through.
    if type(worker_names) not in (set, frozenset, list, tuple, type(None)):
        raise TypeError(f"a {type(worker_names).__name__} came from another worker in place of the names of workers")
    if not worker_names:
        worker_names = _ALL_WORKER_NAMES
        if worker_name not in worker_names:
            raise AssertionError(f"{worker_name} is not expected by leader.")
    with _all_gather_dict_lock:
        states = _find_gathering(sequence_id)
        if states is None:
            raise RuntimeError(
                f"{worker_name} came too late to _all_gather: its leader has stopped waiting for the workers"
            )
        if worker_name in states.gathered_objects:
            raise AssertionError(f"{worker_name} reported intent sequence id {sequence_id} twice. ")
        states.gathered_objects[worker_name] = obj
        if set(worker_names) == states.gathered_objects.keys():
            states.proceed_signal.set()


@may_be_called
def _broadcast_to_followers(sequence_id: Any, objects_map: dict[str, Any]) -> None:
    """Called remotely by the leader of an `_all_gather`: stores the objects of all workers, and ends the wait here.

    In an `_all_gather` workers exchange objects. The leader is the worker whose name sorts first. After it has stored
    the objects, this function waits up to a second until `_all_gather` is about to return here. Does nothing if this
    worker has stopped waiting.

    Args:
        sequence_id: Which `_all_gather`: the sorted names of its workers with commas, `#`, and a number.
        objects_map: The objects by worker name.

    Raises:
        AssertionError: This worker has the objects already.
    """
    states = _find_gathering(sequence_id)
    if states is None:  # this worker has stopped waiting
        return
    if states.proceed_signal.is_set():
        raise AssertionError(f"Termination signal sequence id {sequence_id} got set twice.")
    states.gathered_objects = objects_map
    states.proceed_signal.set()
    # The leader returns when it has the reply, and often calls this worker at once, for something that the program here
    # registers after its own `_all_gather`. So the waiting thread must go first. Without this wait, the current thread
    # would keep the GIL, answer the leader, and run the leader's next call before that.
    states._has_left.wait(_CHECK_INTERVAL_S)


@_require_initialized
def _all_gather(
    obj: Any, worker_names: Collection[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Exchanges objects: waits until each of the workers has called it, and returns their objects by worker name.

    The worker whose name sorts first is the leader: the others send it their objects, and it sends all objects to them.
    The leader waits up to a second for the others to return first.

    Args:
        obj: The object of this worker; anything that can be sent in a call.
        worker_names: The workers that take part; None or empty for all.
        timeout: Seconds for each message, and for the wait; 0 for no limit. By default messages have the default
            timeout of calls, and the wait has no limit.

    Raises:
        RuntimeError: A worker was lost or did not come in time (`WorkerLostError`, `RpcTimeoutError`), this worker is
            not one of `worker_names` (`UsageError`), or this process is not a worker.
    """
    agent = _get_current_rpc_agent()
    names = set(worker_names or (_ALL_WORKER_NAMES if _is_static(agent) else _all_names(agent)))
    leader, me = min(names), agent.get_worker_info().name
    if me not in names:
        raise UsageError(f"{me} is not expected by leader {leader!r} of _all_gather: it is not one of {sorted(names)}")
    rpc_timeout = get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else timeout
    limit = 0.0 if timeout == UNSET_RPC_TIMEOUT else timeout
    sequence_id, states = _enter_gathering(names)
    try:
        if leader == me:
            _gather_to_leader(sequence_id, me, obj, names)
        else:
            rpc_sync(leader, _gather_to_leader, args=(sequence_id, me, obj, names), timeout=rpc_timeout)
        _wait_for_workers(agent, states, names, limit)
        if leader == me:
            _send_to_followers(sequence_id, sorted(names - {me}), states.gathered_objects, rpc_timeout)
        return states.gathered_objects
    finally:
        with _all_gather_dict_lock:
            del _all_gather_sequence_id_to_states[sequence_id]
        states._has_left.set()


def _is_static(agent: Any) -> bool:
    """Returns True if no worker can join or leave the agent's group; also for an agent that does not say."""
    return bool(getattr(agent, "is_static_group", True))


def _all_names(agent: Any) -> set[str]:
    """Returns the names of all workers in the group of `agent`. In a fixed group of farcall lost workers are included.

    Not all workers learn of a loss at the same time. With the lost workers included, all use the same names.
    """
    if isinstance(agent, Agent) and _is_static(agent):
        return {info.name for info, _ in agent.everybody()}
    return {info.name for info in agent.get_worker_infos()}


def _wait_for_workers(agent: Any, states: AllGatherStates, names: set[str], limit: float) -> None:
    """Waits until the objects of all workers are there in an `_all_gather`, in which workers exchange objects.

    Args:
        agent: The agent of this worker.
        states: The state of the `_all_gather` on this worker.
        names: The names of the workers that take part.
        limit: How many seconds to wait; 0 for no limit.

    Raises:
        RpcTimeoutError: The limit is over.
        WorkerLostError: A worker was lost or has left.
        RpcError: The agent was closed.
    """
    deadline = monotonic() + limit if limit else FOREVER
    while not states.proceed_signal.wait(max(0.0, min(deadline - monotonic(), _CHECK_INTERVAL_S))):
        missing = sorted(names - states.gathered_objects.keys())
        if monotonic() >= deadline:
            raise RpcTimeoutError(
                f"Followers {missing} timed out in _all_gather after {limit:.2f} seconds: they did not call it"
            )
        if agent.closed is not None:
            raise agent.closed
        there = {info.name for info in agent.get_worker_infos()}
        if gone := sorted(names - there):  # blame the lost ones: others may have left because of them
            lost = [name for name in gone if name in getattr(agent, "lost", list)()] or gone
            raise WorkerLostError(f"workers {lost} were lost before all workers had called _all_gather", lost[0])


def _send_to_followers(sequence_id: Any, followers: Sequence[str], objects: dict[str, Any], rpc_timeout: float) -> None:
    """Sends the objects of all workers to the other workers of an `_all_gather`, and waits for their replies.

    The worker whose name sorts first calls this: it has collected the objects.

    Args:
        sequence_id: Which `_all_gather`: the sorted names of its workers with commas, `#`, and a number.
        followers: The names of the other workers. If empty, nothing is sent.
        objects: The objects by worker name.
        rpc_timeout: The timeout of each call in seconds; 0 for none.

    Raises:
        WorkerLostError: Workers were lost, and nothing else failed.
        RpcTimeoutError: Any other failure, after all workers were tried.
    """
    told, errors = {}, {}
    for name in followers:
        try:
            told[name] = rpc_async(name, _broadcast_to_followers, args=(sequence_id, objects), timeout=rpc_timeout)
        except RuntimeError as error:  # go on: the other followers must be told
            errors[name] = error
    for name, future in told.items():
        try:
            future.wait()
        except RuntimeError as error:
            errors[name] = error
    lost = [name for name, error in errors.items() if isinstance(error, WorkerLostError)]
    if errors and len(lost) == len(errors):
        reason = next(iter(errors.values()))
        # Contains torch's "timed out in _all_gather", for programs that look for these words.
        raise WorkerLostError(
            f"Followers {lost} were lost, which is as if they timed out in _all_gather: {reason}", lost[0]
        )
    if errors:
        raise RpcTimeoutError(
            f"Followers {list(errors)} timed out in _all_gather after {rpc_timeout:.2f} seconds. "
            f"The first exception is {next(iter(errors.values()))}"
        )


@_require_initialized
def _barrier(worker_names: Collection[str]) -> None:
    """Waits until all given workers have called this function with the same names.

    If that fails or a name is unknown, the error is logged and not raised, as in torch.

    Args:
        worker_names: The names of the workers, this one included. Empty means all workers.

    Raises:
        NotInitializedError: This process is not a worker.
    """
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Waits until all workers have called this function.

    Args:
        timeout: Seconds to wait; 0 for no limit.

    Raises:
        WorkerLostError: A worker was lost. Before this is raised, the calls that run on this worker end, or the timeout
            expires.
        RpcTimeoutError: A worker did not call this function in time.
        NotInitializedError: This process is not a worker.
    """
    try:
        _all_gather(None, timeout=timeout)
    except (
        WorkerLostError
    ):  # no worker was late. Let the calls of the remaining workers end before this one shuts down.
        if isinstance(agent := _get_current_rpc_agent(), Agent):
            finish_what_has_begun(agent, deadline_of(timeout))
        raise
    except RuntimeError:
        logger.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


# -- shutdown


def _delete_all_user_and_unforked_owner_rrefs(timeout: timedelta | float = UNSET_RPC_TIMEOUT) -> None:
    """Deletes all references of this worker to values of other workers. Using one of them later raises `UsageError`.

    Does nothing if there are none. `timeout` is ignored. Raises `RuntimeError` if this process is not a worker.
    """
    _farcall._delete_all_user_and_unforked_owner_rrefs()


def _destroy_rref_context(ignore_rref_leak: bool) -> None:
    """Deletes all references of this worker, and releases the values that it owns.

    Args:
        ignore_rref_leak: If False, raises `RuntimeError` ("Leaking RRef") if other workers still hold references to
            values of this worker. All references are deleted before. If True, this is not checked.

    Raises:
        RuntimeError: This process is not a worker, or other workers still hold references.
    """
    store = _farcall.current_reference_store()
    left = getattr(_get_current_rpc_agent(), "left", None) or store.inventory()
    store.forget("the references of this worker were destroyed")
    if not ignore_rref_leak and any(owned.holders for owned in left.owned):
        raise RuntimeError(f"Leaking RRef: worker {get_worker_info().name!r} {left}")


def _cleanup_python_rpc_handler() -> None:
    """Does nothing: farcall has no such handler. It exists for programs that call torch's."""


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Takes this worker out of the group, and frees everything that belongs to it.

    Args:
        graceful: If True, first waits until all workers have called `shutdown` and all calls have ended; in an open
            group, only until no call is running on this worker. If False, leaves at once; calls of other workers to
            this one fail.
        timeout: Seconds to wait for the others; 0 for no limit. Ignored if `graceful` is False.

    Raises:
        RuntimeError: A worker was lost or did not come in time, or this process is not a worker. Everything is freed
            all the same.
        UsageError: A function that runs here for another worker asked for a graceful shutdown, which would wait for
            that function itself. Nothing has happened then.
    """
    if graceful and on_serving_thread():
        raise UsageError(
            "a graceful shutdown waits for all functions that run here for other workers, so such a function cannot "
            "call it; call it where init_rpc was called, or use shutdown(graceful=False)"
        )
    try:
        if graceful:
            agent = _get_current_rpc_agent()
            if _is_static(agent):
                _wait_all_workers(timeout)
                _delete_all_user_and_unforked_owner_rrefs()
            agent.join(shutdown=True, timeout=timeout)
    finally:
        _finalize_shutdown()


def _finalize_shutdown() -> None:
    """Deletes all references, closes the agent, and makes this process no longer a worker.

    Every step is made even if an earlier one raises. Raises `RuntimeError` if this process is not a worker, or if
    `_ignore_rref_leak` of this module is False and other workers still hold references to values of this one.
    """
    try:
        _destroy_rref_context(_ignore_rref_leak)
    finally:
        try:
            _get_current_rpc_agent().shutdown()
        finally:
            try:
                _cleanup_python_rpc_handler()
                autograd.close()
            finally:
                _reset_current_rpc_agent()


# torch's module has these names as well. At the end, because `native` imports this module.
from farcall.pytorch.native import _invoke_remote_builtin as _invoke_remote_builtin  # noqa: E402
from farcall.pytorch.native import _invoke_remote_python_udf as _invoke_remote_python_udf  # noqa: E402
from farcall.pytorch.native import _invoke_remote_torchscript as _invoke_remote_torchscript  # noqa: E402
from farcall.pytorch.native import _invoke_rpc_builtin as _invoke_rpc_builtin  # noqa: E402
from farcall.pytorch.native import _invoke_rpc_python_udf as _invoke_rpc_python_udf  # noqa: E402
from farcall.pytorch.native import _invoke_rpc_torchscript as _invoke_rpc_torchscript  # noqa: E402
