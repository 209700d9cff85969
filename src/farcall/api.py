"""The functions of the package with torch's names: they hand everything to the current agent (`farcall.current`).

Names, parameters and defaults are those of `torch.distributed.rpc`.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from numbers import Real
from sys import _getframe
from typing import Any, TypeVar, overload

from farcall import current
from farcall.backends.interface import MembershipChange, RpcAgent, To, worker_key
from farcall.backends.registry import BackendType, choose_backend, init_backend
from farcall.current import current_agent as current_agent
from farcall.current import current_reference_store as current_reference_store
from farcall.errors import AlreadyInitializedError, UsageError
from farcall.futures import Future, awaited_together
from farcall.gate import blocking_thread
from farcall.launcher.exit_report import NAME_VARIABLE, install_exit_report, report_name
from farcall.options import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT, BackendOptions
from farcall.protocol.ids import WorkerInfo
from farcall.rref import RRef
from farcall.runtime.interceptors import ClientInterceptor, ServerInterceptor
from farcall.runtime.leaks import Inventory

R = TypeVar("R")

_new_rref = RRef.__new__  # as `RRef.of` does, without its frame
_lock = threading.RLock()  # held while an agent is made, in the midst of which a signal handler may shut down


def is_available() -> bool:
    """Returns True: farcall works wherever it can be imported. Programs written for torch may ask."""
    return True


def init_rpc(
    name: str | None = None,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: BackendOptions | None = None,
) -> None:
    """Makes this process a worker: finds the other workers of the group, and starts to run their calls.

    Returns when the group is complete, or, for an open group, when this worker has joined it.

    Args:
        name: The name of this worker, 1 to 255 printable characters, different for each worker of the group. None
            means the name that the launcher gives, else `worker` and the rank.
        backend: The kind of agent. None means the backend that the options belong to, or `BackendType.FARCALL` without
            options.
        rank: The number of this worker, from 0. -1 means: take the rank from the rendezvous URL or the environment.
        world_size: The number of workers. None means: take it from the URL or the environment, else join an open group.
        rpc_backend_options: The options of the agent; None means the defaults.

    Raises:
        AlreadyInitializedError: This process is a worker already.
        UsageError: The name is missing, empty or not printable, or another argument or an option is not valid.
        BackendError: `backend` or `rpc_backend_options` has a wrong type, or the two do not belong together.
        RendezvousTimeoutError: Not all workers arrived in time. The message says which ones did.
        RendezvousError: The group could not be joined for another reason. After an error nothing is left running.

    Example:
        >>> farcall.init_rpc("worker0", rank=0, world_size=2)
    """
    name = check_name(name) if name is not None else launched_name(rank)
    if name is None:
        raise UsageError(
            "this worker has no name: give init_rpc one, or start the workers with a launcher (`farcall run`, mpirun, "
            "torchrun, Slurm), which gives each of them a number"
        )
    backend, rpc_backend_options = choose_backend(backend, rpc_backend_options)
    with _lock:
        _refuse_a_second_agent()
        agent = make_agent(name, backend, rank, world_size, rpc_backend_options)
        try:
            adopt(agent)
        except BaseException:  # no thread to be had: nothing is left behind
            agent.shutdown(graceful=False, timeout=0.0)
            raise


def check_name(name: str) -> str:
    """Returns the name of a worker.

    Raises `UsageError` if it is not a str, is empty, is not printable, or has more than 255 characters.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"a worker's name must be a str that is not empty, not {name!r}")
    if not name.isprintable() or len(name) > 255:
        raise UsageError(f"a worker's name must be printable and at most 255 characters long, not {name!r}")
    return name


def launched_name(rank: int) -> str | None:
    """Returns the name that the launcher has given to this worker, or `worker` and its rank; None if it has neither.

    Args:
        rank: The rank of this worker; -1 takes it from the environment.

    Raises:
        UsageError: The name or the rank in the environment is not valid.
    """
    name = os.environ.get(NAME_VARIABLE)
    if name:
        return check_name(name)
    from farcall.rendezvous.urls import rank_in_environment  # imported here: it takes as long as `import farcall`

    number = rank if rank >= 0 else rank_in_environment(os.environ)
    return None if number is None else f"worker{number}"


def make_agent(name: str, backend: BackendType, rank: int, world_size: int | None, options: BackendOptions) -> RpcAgent:
    """Returns a new agent that has joined its group, and does not run calls of others yet.

    Args:
        name: The name of this worker.
        backend: The kind of agent.
        rank: The rank of this worker; -1 takes it from the rendezvous URL or the environment.
        world_size: The number of workers; None takes it from the URL or the environment, else the group is open.
        options: The options of the agent.

    Raises:
        UsageError: An argument or an option is not valid; `BackendError` if the options are not of this backend.
        RendezvousError: The group could not be joined; `RendezvousTimeoutError` if workers did not arrive in time.
    """
    install_exit_report(os.environ)
    report_name(os.environ, name)
    return init_backend(backend, store=None, name=name, rank=rank, world_size=world_size, rpc_backend_options=options)


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leaves the group and stops the agent of this process. Does nothing if this process is not a worker.

    A graceful shutdown first waits until all workers have called `shutdown` and all calls have ended. Meanwhile this
    worker still runs the calls of others. All resources are released even if an error is raised. Ctrl-C ends the wait;
    `KeyboardInterrupt` is raised after the resources were released. If another Ctrl-C interrupts the release, the next
    `shutdown` completes it.

    Args:
        graceful: Whether to wait for the other workers.
        timeout: How many seconds to wait for them; 0 means no limit.

    Raises:
        ShutdownError: The timeout expired or a worker was lost during the wait.
        UsageError: `timeout` is negative or not a number, or a function that runs here for another worker asks for a
            graceful shutdown, which would wait for that function itself. Nothing has changed.
    """
    if not isinstance(timeout, Real) or timeout < 0:
        raise UsageError(f"the timeout of shutdown must be 0 (no limit) or more seconds, not {timeout!r}")
    with _lock:  # another thread may be about to make one
        agent = current.find_current_agent()
    if agent is not None:
        shut_down(agent, graceful, timeout)


def shut_down(agent: RpcAgent, graceful: bool, timeout: float) -> None:
    """Makes an agent of this process leave its group, and forgets it.

    Only forgets the agent of a forked child's parent.

    Args:
        agent: The agent.
        graceful: Whether to wait first until all workers have called `shutdown` and all calls have ended.
        timeout: How many seconds to wait; 0 means no limit.

    Raises:
        ShutdownError: The timeout expired or a worker was lost during a graceful wait. The agent is gone all the same.
        UsageError: A function that the agent runs for another worker asks for a graceful shutdown. Nothing has changed.
    """
    if graceful and current.serving.agent is agent:
        raise UsageError(
            "a graceful shutdown waits for all functions that run here for other workers, so such a function cannot "
            "call it; call it where init_rpc was called, or use shutdown(graceful=False)"
        )
    if agent.is_forked:  # the parent's: it has been let go already
        current.remove(agent)
        return
    try:
        agent.shutdown(graceful, timeout)  # under no lock: a signal handler may shut down meanwhile
    except BaseException as error:
        if not isinstance(error, Exception):  # Ctrl-C: whatever it has left is freed now, and else by the next shutdown
            agent.shutdown(graceful=False, timeout=0.0)
        current.remove(agent)
        raise
    current.remove(agent)


@overload
def rpc_sync(
    to: To,
    func: Callable[..., Coroutine[Any, Any, R]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> R: ...
@overload
def rpc_sync(
    to: To,
    func: Callable[..., Future[R]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> R: ...
@overload
def rpc_sync(
    to: To,
    func: Callable[..., R],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> R: ...
def rpc_sync(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Runs `func(*args, **kwargs)` on another worker, waits for the result and returns it.

    Args:
        to: The worker that runs the function: its name, its rank or its `WorkerInfo`. May be this worker.
        func: The function, class or other callable.
        args: The positional arguments, a tuple or a list; None means none.
        kwargs: The keyword arguments; None means none.
        timeout: How many seconds to wait; 0 means no limit. The default is the `rpc_timeout` of this worker.

    Returns:
        What the function returned.

    Raises:
        NotInitializedError: This process is not a worker.
        UnknownWorkerError: The group has no worker `to`.
        UsageError: `to` is not a name, rank or `WorkerInfo`, `func` cannot be called, `args` is not a tuple or list, or
            `timeout` is negative or not a number.
        SerializationError: An argument or the result cannot be pickled.
        RpcTimeoutError: The timeout expired. The function is cancelled; a synchronous one that does not look at
            `cancelled` runs to its end.
        WorkerLostError: The worker cannot be reached, or died during the call.
        NotAllowedError: The worker does not allow others to call this function or to send these arguments.
        Exception: Any exception of the function, with its own type and with the remote traceback.

    Example:
        >>> farcall.rpc_sync("worker1", max, args=(3, 4))
        4
    """
    agent = current.sole
    if agent is None:
        agent = current_agent()
    future = agent.call(to, func, args, kwargs, timeout)
    try:
        return future.wait()
    except BaseException:
        future.cancel()  # if the wait was interrupted: nobody else knows this call
        del future  # see `Future.value`. Not in a `finally`, which every call would pass
        raise


@overload
def rpc_async(
    to: To,
    func: Callable[..., Coroutine[Any, Any, R]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[R]: ...
@overload
def rpc_async(
    to: To,
    func: Callable[..., Future[R]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[R]: ...
@overload
def rpc_async(
    to: To,
    func: Callable[..., R],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[R]: ...
def rpc_async(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Sends a call as `rpc_sync` does, but returns a `Future` of the result without waiting for the reply.

    The first call to a worker waits until the connection to it is made. On the thread of an event loop nothing waits:
    another thread connects and sends the call, and the future has the error if that fails.

    Args:
        to: The worker that runs the function: its name, its rank or its `WorkerInfo`.
        func: The function, class or other callable.
        args: The positional arguments, a tuple or a list; None means none.
        kwargs: The keyword arguments; None means none.
        timeout: After how many seconds the future fails; 0 means never. The default is the `rpc_timeout` of this
            worker.

    Returns:
        The future. It fails with `RpcTimeoutError`, `WorkerLostError`, or the exception of the function.

    Raises:
        NotInitializedError: This process is not a worker.
        UnknownWorkerError: The group has no worker `to`.
        UsageError: `to` is not a name, rank or `WorkerInfo`, `func` cannot be called, `args` is not a tuple or list, or
            `timeout` is negative or not a number.
        SerializationError: An argument cannot be pickled.
        WorkerLostError: The worker cannot be reached.

    Example:
        >>> farcall.rpc_async("worker1", max, args=(3, 4)).wait()
        4
    """
    agent = current.sole
    if agent is None:
        agent = current_agent()
    future = agent.call(to, func, args, kwargs, timeout, unattended=True)
    future.made_by(_getframe(1))
    if awaited_together:
        awaited_together.note(future)
    return future


@overload
def remote(
    to: To,
    func: Callable[..., Coroutine[Any, Any, R]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[R]: ...
@overload
def remote(
    to: To,
    func: Callable[..., Future[R]],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[R]: ...
@overload
def remote(
    to: To,
    func: Callable[..., R],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[R]: ...
def remote(
    to: To,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Runs `func(*args, **kwargs)` on another worker, which keeps the result.

    Returns a reference to the result at once.

    Args:
        to: The worker that runs the function and owns the result: its name, its rank or its `WorkerInfo`.
        func: The function, class or other callable.
        args: The positional arguments, a tuple or a list; None means none.
        kwargs: The keyword arguments; None means none.
        timeout: After how many seconds without a result the function is cancelled, and every use of the reference
            raises `RpcTimeoutError`. 0, and the default: no limit but that of a `deadline` block around the call.

    Returns:
        The reference. If the function raises, every use of the reference raises the same exception.

    Raises:
        NotInitializedError: This process is not a worker.
        UnknownWorkerError: The group has no worker `to`.
        UsageError: `func` cannot be called, `args` is not a tuple or list, or the backend has no references.
        SerializationError: An argument cannot be pickled.
        WorkerLostError: The worker cannot be reached.

    Example:
        >>> counter = farcall.remote("worker1", collections.Counter)
        >>> counter.rpc_sync().update("hello")
    """
    agent = current.sole
    if agent is None:
        agent = current_agent()
    rref: RRef[Any] = _new_rref(RRef)
    rref._handle = (
        agent.remote(to, func, args, kwargs)
        if timeout == UNSET_RPC_TIMEOUT
        else agent.remote(to, func, args, kwargs, timeout)
    )
    return rref


def references() -> Inventory:
    """Returns the references that this worker owns and holds now, with the place where each was created.

    Returns:
        The inventory. It is empty if there are no references, or if the backend has none.

    Raises:
        NotInitializedError: This process is not a worker.
        ForkedProcessError: Only the parent of this forked process is a worker.
    """
    return current_reference_store().inventory()


def _rref_context_get_debug_info() -> dict[str, str]:
    """Returns counters of this worker's references as text, under the names that torch uses.

    Returns an empty dict if the backend counts nothing.

    Raises:
        NotInitializedError: This process is not a worker.
    """
    return current_reference_store().debug_info()


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = UNSET_RPC_TIMEOUT) -> None:
    """Releases all handles of references that other workers own. Later uses of these handles raise `UsageError`.

    Does nothing if there are none.

    Args:
        timeout: Ignored. Programs written for torch pass it.

    Raises:
        NotInitializedError: This process is not a worker.
    """
    current_reference_store().give_up_handles("all references of this worker were deleted")


def _destroy_rref_context(ignore_leak: bool) -> None:
    """Releases all references that this worker owns or holds. Later uses, here or on other workers, raise an error.

    New references can be created afterwards.

    Args:
        ignore_leak: Whether to do this although references are left.

    Raises:
        UsageError: References are left and `ignore_leak` is false. Nothing was released.
        NotInitializedError: This process is not a worker.
    """
    store = current_reference_store()
    left = store.inventory()
    if not ignore_leak and (left.owned or left.held):
        raise UsageError(f"references are left on worker {get_worker_info().name!r}: it {left}")
    store.forget("the references of this worker were destroyed")


def get_worker_info(worker_name: To | None = None) -> WorkerInfo:
    """Returns the name and the id of a worker.

    Args:
        worker_name: The name, the rank, the `WorkerInfo` or a handle of the worker. None means this worker.

    Raises:
        UnknownWorkerError: The group has no such worker.
        NotInitializedError: This process is not a worker.
    """
    return current_agent().get_worker_info(None if worker_name is None else worker_key(worker_name))


def get_worker_infos() -> list[WorkerInfo]:
    """Returns the names and ids of all workers of the group, this worker included, ordered by rank.

    Raises:
        NotInitializedError: This process is not a worker.
    """
    return current_agent().get_worker_infos()


def get_metrics() -> Mapping[str, Any]:
    """Returns the counters of this worker under the names of `farcall.backends.Metrics`.

    Returns:
        The counters; an empty mapping if the backend counts nothing.

    Raises:
        NotInitializedError: This process is not a worker.
    """
    return current_agent().get_metrics()


def _get_debug_info() -> dict[str, str]:
    """Returns the counters of references and of the agent together, as text under the names that torch uses.

    Raises:
        NotInitializedError: This process is not a worker.
    """
    agent = current_agent()
    return {**agent.reference_store.debug_info(), **agent.get_debug_info()}


def add_membership_callback(callback: Callable[[MembershipChange], object]) -> None:
    """Registers a function that is called whenever a worker joins the group, leaves it or is lost, until the shutdown.

    Args:
        callback: A function of one `MembershipChange`. It runs on a thread of the executor, one change after the other,
            and may make calls. Exceptions that it raises are logged.

    Raises:
        UsageError: `callback` cannot be called.
        NotInitializedError: This process is not a worker.
    """
    if not callable(callback):
        raise UsageError(f"a membership callback must be a function of one MembershipChange, not {callback!r}")
    current_agent().watch_members(callback)


def remove_membership_callback(callback: Callable[[MembershipChange], object]) -> None:
    """Removes a function that `add_membership_callback` has registered. Does nothing if it is not registered.

    Args:
        callback: The function.

    Raises:
        NotInitializedError: This process is not a worker.
    """
    current_agent().unwatch_members(callback)


def add_interceptor(interceptor: ClientInterceptor | ServerInterceptor) -> None:
    """Registers code that runs around every call of this worker, until the shutdown.

    A `ClientInterceptor` runs around the calls that this worker makes, a `ServerInterceptor` around the calls that it
    runs for other workers. An object may be both. The interceptor that was registered first is outermost. Calls that
    have begun before are not affected.

    Args:
        interceptor: An instance of a subclass of `ClientInterceptor`, `ServerInterceptor`, or both.

    Raises:
        NotInitializedError: This process is not a worker.
        UsageError: `interceptor` is not an interceptor, or the backend of this worker does not support interceptors.
    """
    current_agent().add_interceptor(interceptor)


def remove_interceptor(interceptor: ClientInterceptor | ServerInterceptor) -> None:
    """Removes an interceptor that `add_interceptor` has registered. Does nothing if it is not registered.

    Args:
        interceptor: The interceptor.

    Raises:
        NotInitializedError: This process is not a worker.
    """
    current_agent().remove_interceptor(interceptor)


def get_rpc_timeout() -> float:
    """Returns the default timeout of this worker's calls in seconds; 0 means no timeout.

    Raises:
        NotInitializedError: This process is not a worker.
    """
    return current_agent().rpc_timeout


def _set_rpc_timeout(timeout: float) -> None:
    """Sets the default timeout of the calls that this worker makes from now on.

    Args:
        timeout: Seconds; 0 means no timeout.

    Raises:
        UsageError: `timeout` is negative or not a number. The timeout has not changed.
        NotInitializedError: This process is not a worker.
    """
    if not isinstance(timeout, Real) or not timeout >= 0:  # nan too
        raise UsageError(f"a timeout must be 0 (no timeout) or more seconds, not {timeout!r}")
    current_agent().rpc_timeout = float(timeout)


def is_initialized() -> bool:
    """Returns whether this process is a worker. Returns False in a forked child of a worker."""
    agent = current.find_current_agent()
    return agent is not None and not agent.is_forked


def adopt(agent: RpcAgent) -> None:
    """Makes an existing agent the agent of `init_rpc`, and starts it.

    Args:
        agent: The agent, which was not started yet.

    Raises:
        AlreadyInitializedError: This process has an agent already.
        Exception: What `agent.start` raises. The process then has no agent.
    """
    with _lock:
        _refuse_a_second_agent()
        current.add(agent, agent, is_of_init_rpc=True)
        try:
            agent.start()
        except BaseException:
            current.remove(agent)
            raise


def release() -> None:
    """Forgets the agent of `init_rpc`, without a shutdown. Does nothing if there is none.

    For callers that have shut down the agent themselves.
    """
    agent = current.agent_of_init_rpc()
    if agent is not None:
        current.remove(agent)


def _refuse_a_second_agent() -> None:
    """Raises `AlreadyInitializedError` if `init_rpc` has made this process a worker, and no fork has undone that."""
    agent = current.agent_of_init_rpc()
    if agent is not None and not agent.is_forked:
        raise AlreadyInitializedError(
            f"this process is worker {agent.info.name!r} already; call shutdown() before init_rpc again"
        )


def _forget_lock_in_child() -> None:
    """Runs in a forked child: replaces the lock, and forgets the executor that owned this thread in the parent."""
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held it
    blocking_thread.before = blocking_thread.after = None  # the pool that this thread belonged to is the parent's


os.register_at_fork(after_in_child=_forget_lock_in_child)


@atexit.register
def _shut_down_at_exit() -> None:
    """Called when the interpreter exits: leaves all groups without waiting for others."""
    for agent in current.agents():
        shut_down(agent, graceful=False, timeout=0.0)
