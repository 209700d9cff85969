"""The functions of the package: they hold the process's current agent and hand everything to it.

The only module with a global. Names, parameters and defaults are those of `torch.distributed.rpc`.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from sys import _getframe
from typing import Any, TypeVar

from farcall.backends.interface import MembershipChange, ReferenceStore, RpcAgent
from farcall.backends.registry import BackendType, choose_backend, init_backend
from farcall.errors import AlreadyInitializedError, NotInitializedError, UsageError
from farcall.futures import Future, awaited_together
from farcall.gate import blocking_thread, on_serving_thread
from farcall.launcher.exit_report import install_exit_report
from farcall.options import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT, BackendOptions
from farcall.protocol.ids import WorkerInfo
from farcall.rref import RRef
from farcall.runtime.interceptors import ClientInterceptor, ServerInterceptor
from farcall.runtime.leaks import Inventory

T = TypeVar("T")

To = str | int | WorkerInfo

_new_rref = RRef.__new__  # as `RRef.of` does, without its frame
_agent: RpcAgent | None = None
_lock = threading.RLock()  # held while an agent is made, in the midst of which a signal handler may shut down


def is_available() -> bool:
    """True: farcall works wherever it can be imported."""
    return True


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: BackendOptions | None = None,
) -> None:
    """Makes this process a worker: finds the others, and starts to serve their calls.

    `rank` and `world_size` are taken from the environment or the URL if not given; the backend is the one that the
    options are of, and `BackendType.FARCALL` without any. Returns when all workers are there.
    Raises `AlreadyInitializedError`, `UsageError` for wrong arguments (`BackendError` for backend and options),
    `RendezvousTimeoutError` (who came and who did not) and `RendezvousError`; then nothing is left running.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"a worker's name must be a text that is not empty, not {name!r}")
    if not name.isprintable() or len(name) > 255:
        raise UsageError(f"a worker's name must be printable and at most 255 characters long, not {name!r}")
    backend, options = choose_backend(backend, rpc_backend_options)
    install_exit_report(os.environ)
    with _lock:
        if _agent is not None and not _agent.is_forked:
            raise AlreadyInitializedError(
                f"this process is worker {_agent.info.name!r} already; call shutdown() before init_rpc again"
            )
        agent = init_backend(
            backend, store=None, name=name, rank=rank, world_size=world_size, rpc_backend_options=options
        )
        try:
            adopt(agent)
        except BaseException:  # no thread to be had: nothing is left behind
            agent.shutdown(graceful=False, timeout=0.0)
            raise


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Takes this worker down. Harmless if there is none.

    Graceful: waits first until all workers have called it and all calls have ended, at most `timeout` seconds (0:
    without limit), and serves meanwhile. Raises `ShutdownError` if that failed; everything is freed here all the same.
    `UsageError` if a function that runs here for others calls it gracefully.

    Ctrl-C ends the waiting, and is raised when everything is freed. If more of them come in the midst of that and
    something is left, the next shutdown goes on with it.
    """
    global _agent
    if not isinstance(timeout, Real) or timeout < 0:
        raise UsageError(f"the timeout of a shutdown must be 0 (none) or more seconds, not {timeout!r}")
    if graceful and on_serving_thread():
        raise UsageError(
            "a graceful shutdown waits for all functions that run here for others, so it cannot be called by one of "
            "them; call it where init_rpc was called, or use shutdown(graceful=False)"
        )
    with _lock:
        agent = _agent
        if agent is None:
            return
        if agent.is_forked:  # the parent's: it has been let go already
            _agent = None
            return
    try:
        agent.shutdown(graceful, timeout)  # not under the lock: a signal handler may shut down meanwhile
    except BaseException as error:
        if not isinstance(error, Exception):  # Ctrl-C: whatever it has left is freed now, and else by the next shutdown
            agent.shutdown(graceful=False, timeout=0.0)
        _forget(agent)
        raise
    _forget(agent)


def _forget(agent: RpcAgent) -> None:
    global _agent
    with _lock:
        if _agent is agent:
            _agent = None


def rpc_sync(
    to: To,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> T:
    """Runs `func(*args, **kwargs)` on worker `to` (a name, a rank or a `WorkerInfo`) and returns what it returns.

    Raises what it raises, with its own type and the remote traceback below; `RpcTimeoutError` after `timeout` seconds
    (default: the worker's `rpc_timeout`; 0 is without end), `WorkerLost`, `UnknownWorkerError`, `SerializationError`,
    `NotInitializedError`.
    """
    agent = _agent
    if agent is None:
        raise _not_initialized()
    return agent.call(to, func, args, kwargs, timeout).wait()  # type: ignore[no-any-return]


def rpc_async(
    to: To,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[T]:
    """As `rpc_sync`, but returns a `Future` at once: when the call is sent. The first call to a worker connects first.

    Raises at once only what is wrong with the call itself: `UnknownWorkerError`, `SerializationError`,
    `NotInitializedError`, or `WorkerLost` if the worker cannot be reached.
    """
    agent = _agent
    if agent is None:
        raise _not_initialized()
    future = agent.call(to, func, args, kwargs, timeout, unattended=True)
    future.made_by(_getframe(1))
    if awaited_together:
        awaited_together.note(future)
    return future


def remote(
    to: To,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[T]:
    """Has worker `to` run `func(*args, **kwargs)` and keep the result; gives a reference to it at once.

    Raises what is wrong with the call itself, as `rpc_async`. What the function raises, every use of the reference
    raises. `timeout` is accepted for programs written for torch: nothing here waits.
    """
    agent = _agent
    if agent is None:
        raise _not_initialized()
    rref: RRef[T] = _new_rref(RRef)
    rref._handle = agent.remote(to, func, args, kwargs)
    return rref


def references() -> Inventory:
    """What this worker owns and for whom, and what it holds, with where each was made. Raises `NotInitializedError`."""
    return current_reference_store().inventory()


def _rref_context_get_debug_info() -> dict[str, str]:
    """Counters of this worker's references, by the names that torch gives them. Raises `NotInitializedError`."""
    return current_reference_store().debug_info()


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = UNSET_RPC_TIMEOUT) -> None:
    """Gives up all handles of references that others own; using one raises from now on."""
    current_reference_store().give_up_handles("all references of this worker were deleted")


def _destroy_rref_context(ignore_leak: bool) -> None:
    """Gives up all references to values of others, and lets go of all values: others that use them are refused.

    Raises `UsageError` if some are left, unless leaks are to be ignored. New ones can be made after it.
    """
    store = current_reference_store()
    left = store.inventory()
    if not ignore_leak and (left.owned or left.held):
        raise UsageError(f"references are left on worker {get_worker_info().name!r}: it {left}")
    store.forget("the references of this worker were destroyed")


def get_worker_info(worker_name: To | None = None) -> WorkerInfo:
    """Name and rank of a worker; of this one by default. Raises `UnknownWorkerError`, `NotInitializedError`."""
    return current_agent().get_worker_info(worker_name)


def get_worker_infos() -> list[WorkerInfo]:
    """All workers of the group, by rank. Raises `NotInitializedError`."""
    return current_agent().get_worker_infos()


def get_metrics() -> Mapping[str, Any]:
    """What this worker has counted, by the names in `farcall.backends.Metrics`. Raises `NotInitializedError`."""
    return current_agent().get_metrics()


def _get_debug_info() -> dict[str, str]:
    """The counters of references and of the agent, as torch gives them: texts. Raises `NotInitializedError`."""
    agent = current_agent()
    return {**agent.reference_store.debug_info(), **agent.get_debug_info()}


def add_membership_callback(callback: Callable[[MembershipChange], object]) -> None:
    """Has `callback(change)` called whenever a worker joins the group, leaves it or is lost, until the shutdown.

    It runs in the serving pool, one change after the other, and may make calls. What it raises is logged.
    Raises `NotInitializedError`; `UsageError` if it cannot be called.
    """
    if not callable(callback):
        raise UsageError(f"a membership callback must be something to be called with each change, not {callback!r}")
    current_agent().watch_members(callback)


def remove_membership_callback(callback: Callable[[MembershipChange], object]) -> None:
    """Takes back what `add_membership_callback` was given; nothing happens if it was not. `NotInitializedError`."""
    current_agent().unwatch_members(callback)


def add_interceptor(interceptor: ClientInterceptor | ServerInterceptor) -> None:
    """Registers code that runs around every call of this worker, until the shutdown.

    A `ClientInterceptor` runs around the calls that this worker makes, a `ServerInterceptor` around those that it runs
    for others; an object may be both. The one that is registered first is outermost. Calls under way do not see it.

    Args:
        interceptor: An object of a class that derives from one of these, or from both.

    Raises:
        NotInitializedError: This process is no worker.
        UsageError: The object is no interceptor, or the backend of this worker has none.
    """
    current_agent().add_interceptor(interceptor)


def remove_interceptor(interceptor: ClientInterceptor | ServerInterceptor) -> None:
    """Takes back what `add_interceptor` was given; does nothing if it was not. Raises `NotInitializedError`."""
    current_agent().remove_interceptor(interceptor)


def get_rpc_timeout() -> float:
    """The default timeout of this worker's calls, in seconds; 0 is without end. Raises `NotInitializedError`."""
    return current_agent().rpc_timeout


def _set_rpc_timeout(timeout: float) -> None:
    """Sets the default timeout of this worker's calls. Raises `UsageError`, `NotInitializedError`."""
    if not isinstance(timeout, Real) or not timeout >= 0:  # nan too
        raise UsageError(f"a timeout must be 0 (none) or more seconds, not {timeout!r}")
    current_agent().rpc_timeout = float(timeout)


def is_initialized() -> bool:
    """Whether this process is a worker."""
    return _agent is not None and not _agent.is_forked


def adopt(agent: RpcAgent) -> None:
    """Makes an agent that was made elsewhere the one of this process, and starts it.

    Raises `AlreadyInitializedError`; and what its `start` raises, then it is not the one.
    """
    global _agent
    with _lock:
        if _agent is not None and not _agent.is_forked:
            raise AlreadyInitializedError(
                f"this process is worker {_agent.info.name!r} already; call shutdown() before init_rpc again"
            )
        _agent = agent
        try:
            agent.start()
        except BaseException:
            _agent = None
            raise


def release() -> None:
    """Forgets the agent of this process, which has been shut down by whoever knows it."""
    global _agent
    with _lock:
        _agent = None


def current_agent() -> RpcAgent:
    """The agent of this process. Raises `NotInitializedError`."""
    agent = _agent
    if agent is None:
        raise _not_initialized()
    return agent


def current_reference_store() -> ReferenceStore:
    """The references of this process. Raises `NotInitializedError`; `ForkedProcessError` if they are its parent's."""
    agent = current_agent()
    if agent.closed is not None:
        raise agent.closed
    return agent.reference_store


def _not_initialized() -> NotInitializedError:
    return NotInitializedError(
        "RPC has not been initialized: this process is no worker: call farcall.init_rpc(...) first (after a shutdown, "
        "again)"
    )


def _abandon_in_child() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held it
    blocking_thread.before = blocking_thread.after = None  # the pool that this thread belonged to is the parent's
    if _agent is not None:
        _agent.abandon()


def _tell_before_fork() -> None:
    if _agent is not None:
        _agent.about_to_fork()


os.register_at_fork(before=_tell_before_fork, after_in_child=_abandon_in_child)


@atexit.register
def _shutdown_at_exit() -> None:
    shutdown(graceful=False)
