"""The functions of `torch.distributed.rpc.api`: calls, gatherings, the end.

Rules
- Names of this module are looked up when they are used: programs, and tests of programs, replace them.
- A plain call is farcall's own: what it costs more here is one look at whether anything rides along (`envelopes`), the
  profiler among them, and whether the function is no Python function (`callees`).
- The agent of the process is that of `farcall.api`; there is no other.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

from farcall import api as _farcall
from farcall.agent import Agent
from farcall.agent.departure import deadline_of, finish_what_has_begun
from farcall.errors import NotInitializedError, RpcTimeoutError, UsageError, WorkerLost
from farcall.futures import Future
from farcall.pytorch import autograd
from farcall.pytorch.autograd.short_calls import call_shortly
from farcall.pytorch.callees import callee_of
from farcall.pytorch.constants import UNSET_RPC_TIMEOUT
from farcall.pytorch.envelopes import Departure, Request, Trip, board, reply_of, rides_along, run, run_remotely, sending
from farcall.pytorch.futures import RpcFuture, failed_with, settled, wait_all
from farcall.pytorch.guarding import may_be_called
from farcall.pytorch.internal import RPCExecMode, _internal_rpc_pickler
from farcall.pytorch.rref import PyRRef, RRef, labels
from farcall.pytorch.workers import WorkerInfo, as_torch
from farcall.sleeping import FOREVER, on_serving_thread

P = ParamSpec("P")
R = TypeVar("R")

To: TypeAlias = str | int | WorkerInfo

logger = logging.getLogger("farcall")

_GLANCE: Final = 1.0
"""Seconds after which whoever waits for others looks whether they are still there."""

_ignore_rref_leak = True
"""Whether references that are left at the shutdown are no error."""
_default_pickler = _internal_rpc_pickler
_thread_local_var = threading.local()
_new_rref = RRef.__new__


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Has `_default_pickler` be another one inside: it pickles functions and arguments in its own way."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


# The agent


def _is_current_rpc_agent_set() -> bool:
    return _farcall.is_initialized()


def _get_current_rpc_agent() -> Any:
    if not _is_current_rpc_agent_set():
        raise NotInitializedError(
            "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"
        )
    return _farcall.current_agent()


def _set_and_start_rpc_agent(agent: Any) -> None:
    _farcall.adopt(agent)


def _reset_current_rpc_agent() -> None:
    _farcall.release()


def _require_initialized(func: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _is_current_rpc_agent_set():
            raise NotInitializedError("RPC has not been initialized. Call torch.distributed.rpc.init_rpc first.")
        return func(*args, **kwargs)

    return wrapper


def _init_rpc_states(agent: Any) -> None:
    """Makes it the agent of this process, unless its backend has done so."""
    if not _is_current_rpc_agent_set():
        _gatherings.begin()  # before it serves: others may come to the first one at once
        labels.begin()
        _set_and_start_rpc_agent(agent)


@_require_initialized
def get_worker_info(worker_name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """Name and rank of a worker; of this one by default. Raises `RuntimeError` if there is none of that name."""
    return as_torch(_get_current_rpc_agent().get_worker_info(worker_name))


def _to_worker_info(to: Any, agent: Any = None) -> WorkerInfo:
    if isinstance(to, WorkerInfo):
        return to
    if isinstance(to, (str, int)):
        return as_torch((agent or _farcall.current_agent()).get_worker_info(to))
    raise ValueError(f"Cannot get WorkerInfo from name {to}")


def get_rpc_timeout() -> float:
    """The default timeout of this worker's calls, in seconds; 0 is without end."""
    return _farcall.get_rpc_timeout()


def _set_rpc_timeout(rpc_timeout_seconds: float) -> None:
    """Sets the default timeout of this worker's calls."""
    _farcall._set_rpc_timeout(rpc_timeout_seconds)


# Calls


def noted(future: Any) -> Any:
    """The same future; `_wait_all` waits for it, if this thread is in one."""
    futures = getattr(_thread_local_var, "future_list", None)
    if futures is not None:
        futures.append(future)
    return future


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Waits at its end for all futures that `rpc_async` has given to this thread inside. Raises their first error."""
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
    """Runs `func(*args, **kwargs)` on worker `to` and returns what it returns. Raises what it raises."""
    return _invoke_rpc(to, func, RPCExecMode.SYNC, args, kwargs, timeout).wait()


def rpc_async(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """As `rpc_sync`, but returns a `torch.futures.Future` at once."""
    future = _invoke_rpc(to, func, RPCExecMode.ASYNC, args, kwargs, timeout)
    return noted(RpcFuture(future) if isinstance(future, Future) else future)


def _invoke_rpc(
    to: To,
    func: Callable[..., Any],
    rpc_type: RPCExecMode,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    rpc_timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """A future of farcall's, or, if something that rides along wants it so, of torch's."""
    if not callable(func):
        raise TypeError("function should be callable.")
    agent: Any = _farcall.current_agent()
    unattended = rpc_type is not RPCExecMode.SYNC
    info = as_torch(agent.get_worker_info(to)) if type(to) is str else _to_worker_info(to, agent)
    callee, args, kwargs = callee_of(func, args, kwargs, _default_pickler)
    try:
        if not rides_along(agent, info):
            known = to if type(to) is str else info  # whose hash is there already
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
    except (RpcTimeoutError, WorkerLost) as error:  # there is no way to that worker: torch says so when one waits
        return failed_with(error)


def remote(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Has worker `to` run `func(*args, **kwargs)` and keep the result; gives a reference to it at once.

    With a `timeout`, fetching the value fails if the function is not through by then.
    """
    if not callable(func):
        raise TypeError("function should be callable.")
    agent: Any = _farcall.current_agent()
    info = to if isinstance(to, WorkerInfo) else _to_worker_info(to, agent)
    callee, args, kwargs = callee_of(func, args, kwargs, _default_pickler)
    rref: RRef[Any] = _new_rref(RRef)
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
    """The type of a value that is here; with `blocking=False` a future of it."""
    kind = type(rref.local_value())
    return kind if blocking else settled(kind)


def _rref_typeof_on_user(rref: PyRRef[Any], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    """The type of a value that another worker has; with `blocking=False` a future of it."""
    future = rpc_async(rref.owner(), _rref_typeof_on_owner, args=(rref,), timeout=timeout)
    return future.wait() if blocking else future


# All together


class _Gathering:
    """One gathering at one worker."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.proceed: Future[dict[str, Any]] = Future()


class _Gatherings:
    """Those of this process, by what tells them apart: of whom, and the how many of those."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.numbers: dict[tuple[str, ...], int] = {}
        self.running: dict[tuple[tuple[str, ...], int], _Gathering] = {}

    def begin(self) -> None:
        """With a new agent: nothing has been gathered yet."""
        self.lock = threading.RLock()  # in a forked child, a thread of the parent may have held the old one
        self.numbers.clear()
        self.running.clear()

    def enter(self, names: tuple[str, ...]) -> tuple[Any, _Gathering]:
        """This worker comes to the next one of those: by what others know it, and itself. `leave` it at the end."""
        with self.lock:
            sequence_id = names, self.numbers.get(names, 0)
            gathering = self.running.setdefault(sequence_id, _Gathering())
            self.numbers[names] = sequence_id[1] + 1
        return sequence_id, gathering

    def find(self, sequence_id: Any) -> _Gathering | None:
        """One that this worker is in, or has still to come to. None if it has left it."""
        names, number = sequence_id
        with self.lock:
            if number < self.numbers.get(names, 0):
                return self.running.get(sequence_id)
            return self.running.setdefault(sequence_id, _Gathering())

    def leave(self, sequence_id: Any) -> None:
        with self.lock:
            del self.running[sequence_id]


_gatherings: Final = _Gatherings()


@may_be_called
def _gather_to_leader(
    sequence_id: Any, worker_name: str, obj: Any, worker_names: Collection[str] | None = None
) -> None:
    """At the leader: a worker has come. All workers of the group have to, by default.

    Raises `RuntimeError` if the leader has given up waiting for it.
    """
    if worker_names is None:
        worker_names = [info.name for info in _get_current_rpc_agent().get_worker_infos()]
    gathering = _gatherings.find(sequence_id)
    if gathering is None:
        raise RuntimeError(f"{worker_name} came too late to _all_gather: its leader has given up waiting for everybody")
    with _gatherings.lock:
        if worker_name in gathering.objects:
            raise RuntimeError(f"{worker_name} reported intent sequence id {sequence_id} twice.")
        gathering.objects[worker_name] = obj
        is_complete = set(worker_names) == gathering.objects.keys()
    if is_complete:
        gathering.proceed.set_result(gathering.objects)


@may_be_called
def _broadcast_to_followers(sequence_id: Any, objects_map: dict[str, Any]) -> None:
    """At everybody else: all have come."""
    gathering = _gatherings.find(sequence_id)
    if gathering is not None:  # else this worker has given up
        gathering.proceed.set_result(objects_map)


@_require_initialized
def _all_gather(
    obj: Any, worker_names: Collection[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """What each of these workers (all by default) has given to it, by name, when all of them have called it.

    The first by name leads: the others bring it what they have, and it tells them what all brought. `timeout` limits
    these calls, and the waiting if it is given. Raises `RuntimeError` if they take longer, or a worker is lost;
    `UsageError`, one too, if this worker is none of them.
    """
    agent = _get_current_rpc_agent()
    names = set(worker_names) if worker_names else _all_names(agent)
    leader, me = min(names), agent.get_worker_info().name
    if me not in names:
        raise UsageError(f"{me} is not expected by leader {leader!r} of _all_gather: it is none of {sorted(names)}")
    rpc_timeout = get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else timeout
    limit = 0.0 if timeout == UNSET_RPC_TIMEOUT else timeout
    sequence_id, gathering = _gatherings.enter(tuple(sorted(names)))
    try:
        if leader == me:
            _gather_to_leader(sequence_id, me, obj, names)
        else:
            rpc_sync(leader, _gather_to_leader, args=(sequence_id, me, obj, names), timeout=rpc_timeout)
        objects = _wait_for(agent, gathering, names, limit)
        if leader == me:
            _tell_followers(sequence_id, sorted(names - {me}), objects, rpc_timeout)
        return objects
    finally:
        _gatherings.leave(sequence_id)


def _all_names(agent: Any) -> set[str]:
    """Of a fixed group those who are lost, too: else workers who do not know of it yet would wait for others."""
    if isinstance(agent, Agent) and getattr(agent, "is_static_group", True):
        return {info.name for info, _ in agent.everybody()}
    return {info.name for info in agent.get_worker_infos()}


def _wait_for(agent: Any, gathering: _Gathering, names: set[str], limit: float) -> dict[str, Any]:
    """Looks up now and then: who is lost never comes, and the agent may be closed meanwhile."""
    deadline = monotonic() + limit if limit else FOREVER
    while not gathering.proceed.block(min(deadline, monotonic() + _GLANCE)):
        missing = sorted(names - gathering.objects.keys())
        if monotonic() >= deadline:
            raise RpcTimeoutError(
                f"Followers {missing} timed out in _all_gather after {limit:.2f} seconds: they did not come"
            )
        if agent.closed is not None:
            raise agent.closed
        there = {info.name for info in agent.get_worker_infos()}
        if gone := sorted(names - there):  # some of whom have gone because of others, perhaps
            lost = [name for name in gone if name in getattr(agent, "lost", list)()] or gone
            raise WorkerLost(f"workers {lost} were lost before everybody had come to _all_gather", lost[0])
    return gathering.proceed.value()


def _tell_followers(sequence_id: Any, followers: Sequence[str], objects: dict[str, Any], rpc_timeout: float) -> None:
    told, errors = {}, {}
    for name in followers:
        try:
            told[name] = rpc_async(name, _broadcast_to_followers, args=(sequence_id, objects), timeout=rpc_timeout)
        except RuntimeError as error:  # the others are told all the same
            errors[name] = error
    for name, future in told.items():
        try:
            future.wait()
        except RuntimeError as error:
            errors[name] = error
    lost = [name for name, error in errors.items() if isinstance(error, WorkerLost)]
    if errors and len(lost) == len(errors):
        reason = next(iter(errors.values()))
        # With torch's words, for programs that look for them.
        raise WorkerLost(f"Followers {lost} were lost, which is as if they timed out in _all_gather: {reason}", lost[0])
    if errors:
        raise RpcTimeoutError(
            f"Followers {list(errors)} timed out in _all_gather after {rpc_timeout:.2f} seconds. "
            f"The first exception is {next(iter(errors.values()))}"
        )


@_require_initialized
def _barrier(worker_names: Collection[str]) -> None:
    """Returns when all these workers have called it. What goes wrong is logged, as torch does."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")


@_require_initialized
def _wait_all_workers(timeout: float = 0) -> None:
    """Returns when all workers have called it. Raises `RuntimeError` if that takes longer; 0 is without limit."""
    try:
        _all_gather(None, timeout=timeout)
    except WorkerLost:  # nobody was late; what those who are left have called here ends first
        if isinstance(agent := _get_current_rpc_agent(), Agent):
            finish_what_has_begun(agent, deadline_of(timeout))
        raise
    except RuntimeError:
        logger.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


# The end


def _delete_all_user_and_unforked_owner_rrefs(timeout: timedelta | float = UNSET_RPC_TIMEOUT) -> None:
    """Gives up all handles of references that others own; using one raises from now on."""
    _farcall._delete_all_user_and_unforked_owner_rrefs()


def _destroy_rref_context(ignore_rref_leak: bool) -> None:
    """Lets go of all references. Raises `RuntimeError` if others still hold some, unless that is to be ignored.

    What only this worker itself has is no leak: torch lets go of that at the end, too.
    """
    book = _farcall.current_book()
    left = getattr(_get_current_rpc_agent(), "left", None) or book.inventory()
    book.forget("the references of this worker were destroyed")
    if not ignore_rref_leak and any(owned.holders for owned in left.owned):
        raise RuntimeError(f"Leaking RRef: worker {get_worker_info().name!r} {left}")


def _cleanup_python_rpc_handler() -> None:
    """Nothing: what torch cleans up here does not exist."""


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Takes this worker down. Graceful: waits first until all workers have called it and all calls have ended.

    Raises what went wrong while waiting; everything is freed here all the same. `UsageError` if a function that runs
    here for others calls it gracefully.
    """
    if graceful and on_serving_thread():
        raise UsageError(
            "a graceful shutdown waits for all functions that run here for others, so it cannot be called by one of "
            "them; call it where init_rpc was called, or use shutdown(graceful=False)"
        )
    try:
        if graceful:
            agent = _get_current_rpc_agent()
            if getattr(agent, "is_static_group", True):
                _wait_all_workers(timeout)
                _delete_all_user_and_unforked_owner_rrefs()
            agent.join(shutdown=True, timeout=timeout)
    finally:
        _finalize_shutdown()


def _finalize_shutdown() -> None:
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
