"""`TensorPipeAgent`: farcall's agent under torch's name, with torch's constructor and methods.

It finds the other workers through a store of torch's (`torch_store`). It keeps the device maps, which `devices`
applies. `enable_gil_profiling` measures how long the threads of the executor wait for the interpreter's lock: before
each function a thread releases the lock for a moment, and measures the time until it has the lock again
(`InterpreterWaits`).
"""

from __future__ import annotations

import copy
import threading
import uuid
from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any, Final

import torch

from farcall.api import current_agent
from farcall.backends.registry import join_at
from farcall.options import RpcBackendOptions
from farcall.protocol.ids import WorkerInfo as AnyWorkerInfo
from farcall.pytorch.internal import exception_for_caller, runner_of
from farcall.pytorch.options import DeviceMap, _TensorPipeRpcBackendOptionsBase
from farcall.pytorch.torch_store import TorchStore
from farcall.pytorch.worker_info import WorkerInfo, as_torch
from farcall.rendezvous import Rendezvous
from farcall.runtime.agent import Agent
from farcall.runtime.interceptors import ServerCall, ServerInterceptor
from farcall.security import Credentials
from farcall.transports.network import local_address_towards, local_addresses


class InterpreterWaits(ServerInterceptor):
    """An interceptor that measures how long threads of the executor wait for the interpreter's lock (the GIL).

    It measures before each function that another worker calls. The constructor takes no arguments. Add an instance to
    an agent with `add_interceptor`, and read the result with `average`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._seconds = 0.0

    def measure(self) -> None:
        """Releases the interpreter's lock once, waits to get it back, and records how long that took."""
        began = perf_counter()
        sleep(0)
        self.note(perf_counter() - began)

    def note(self, seconds: float) -> None:
        """Adds one wait of `seconds` to the average. The number is not checked."""
        with self._lock:
            self._count += 1
            self._seconds += seconds

    def intercept(self, call: ServerCall, proceed: Callable[[ServerCall], Any]) -> Any:
        """Measures one wait for the interpreter's lock, then runs the call. Returns and raises what the call does.

        Args:
            call: The call that has come from another worker.
            proceed: Runs the call that it is given.
        """
        self.measure()
        return proceed(call)

    def average(self) -> float:
        """Returns the average of all recorded waits in microseconds; 0 if there are none."""
        with self._lock:
            return self._seconds / self._count * 1e6 if self._count else 0.0


_RUN_KEY: Final = "run"
_EXCHANGE: Final = "exchange/"
_LOOPBACK: Final = "127.0.0.1"


class TensorPipeAgent(Agent):
    """The agent of a worker, for programs written for torch. Creating one joins a group.

    A device map is for one callee. It maps devices of this worker to devices of the callee: a tensor on the first
    arrives on the second.

    Attributes:
        device_maps: The device maps of this worker, by the name of the callee.
        reverse_device_maps: For the name of each caller, a map from devices of this worker to devices of the caller.
        used_devices: The devices that calls may use on this worker.
    """

    function_runner = staticmethod(runner_of)
    honours_deadlines = False  # as in torch: a timeout ends the wait, a started call runs to its end

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        world_size: int | None,
        rpc_backend_options: _TensorPipeRpcBackendOptionsBase,
        reverse_device_maps: dict[str, DeviceMap],
        devices: list[torch.device],
    ) -> None:
        """Joins the group, and returns when all workers of a fixed group have joined.

        Args:
            store: A `torch.distributed.Store`, at which the workers find each other.
            name: The name of this worker.
            rank: The rank of this worker.
            world_size: The number of workers; None or 0 for an open group.
            rpc_backend_options: The options. The agent keeps a copy.
            reverse_device_maps: For the name of each caller, a map from devices of this worker to devices of the
                caller, for replies. May be empty.
            devices: The devices that calls may use on this worker; may be empty.

        Raises:
            RuntimeError: torch does not accept the name.
            UsageError: An option, the rank or the world size is not valid.
            RendezvousError: The group could not be joined; `RendezvousTimeoutError` if some workers did not come in
                time.
        """
        WorkerInfo(name, rank)  # refuses the name
        self._torch_store = store
        self._is_static_group = bool(world_size)
        self._opts = copy.copy(rpc_backend_options)  # the program may go on to change its own
        self._opts.device_maps = dict(rpc_backend_options.device_maps)
        self._may_leave = False
        self._infos: dict[int, WorkerInfo] = {}
        self.reverse_device_maps = reverse_device_maps
        """For the name of each caller, a map from devices of this worker to devices of the caller."""
        self.used_devices = devices
        self._interpreter_waits: InterpreterWaits | None = None

        def find_rendezvous(credentials: Credentials) -> Rendezvous:
            return _rendezvous_of(store, rank, world_size or None)

        def make(*given: Any) -> Agent:
            super(TensorPipeAgent, self).__init__(*given)
            return self

        join_at(make, name, self._own_options(rpc_backend_options), find_rendezvous)
        self.device_maps = rpc_backend_options.device_maps

    @property
    def store(self) -> Any:
        """The `torch.distributed.Store` at which the workers found each other."""
        return self._torch_store

    @property
    def is_static_group(self) -> bool:
        """Whether the group is fixed, so that no worker can join or leave."""
        return self._is_static_group

    def _own_options(self, opts: _TensorPipeRpcBackendOptionsBase) -> RpcBackendOptions:
        """Returns `opts` as options for farcall's own agent. A subclass may change them."""
        return opts.for_agent()

    def failure_to_send(self, name: str, error: BaseException) -> BaseException:
        """Returns the exception that the caller of a function gets. Prints `error` to standard error, as torch does.

        The caller gets `error` itself, unless an exception of its type cannot be created from a text alone. In that
        case the caller gets a `RuntimeError` with `error` as its cause. Raises nothing.

        Args:
            name: The name of the function; ignored.
            error: What the function raised.
        """
        return exception_for_caller(error, self.get_worker_info())

    # The end

    def join(self, shutdown: bool = False, timeout: float = 0.0) -> None:
        """Waits until all workers have called `join` and no call is running on any of them.

        In an open group, waits only until no call is running on this worker.

        Args:
            shutdown: True if this worker will leave next. Then it also tells the other workers, so that none takes it
                for lost; in an open group, it deletes its references to values of other workers.
            timeout: How many seconds to wait at most; 0 means no limit.

        Raises:
            ShutdownError: The timeout expired, a worker was lost, or this worker was expelled.
        """
        if not shutdown:
            super().join(timeout=timeout)
        elif self.is_static_group:
            self.wait_to_leave(timeout)
            self._may_leave = True
        else:
            self.drain(timeout)

    def shutdown(self, graceful: bool = False, timeout: float = 0.0) -> None:
        """Leaves the group and releases all resources. Does nothing the second time.

        Args:
            graceful: Whether to wait first until the work of all workers is done; in an open group, of this one.
                Ignored after `join(shutdown=True)`.
            timeout: How many seconds to wait at most; 0 means no limit. Ignored if `graceful` is False.

        Raises:
            ShutdownError: The wait timed out, or a worker was lost. All resources have been released all the same.
        """
        if self._may_leave:
            self.close_after_leaving()
        else:
            super().shutdown(graceful, timeout)

    # Who is there

    def get_worker_info(self, to: str | int | AnyWorkerInfo | None = None) -> WorkerInfo:
        """Returns the name and id of a worker. Every call uses this, so it is cached.

        Args:
            to: The name, the rank or the `WorkerInfo` of the worker; None means this worker.

        Raises:
            UnknownWorkerError: The group has no such worker.
            UsageError: `to` has another type, such as float.
        """
        if type(to) is int:
            peer = self._peers.by_rank.get(to)
        else:
            peer = self._peers.by_key.get(to) if to is not None else None  # type: ignore[arg-type]
        if peer is None:
            return as_torch(super().get_worker_info(to))
        known = self._infos.get(peer.number)
        if known is None:
            known = self._infos[peer.number] = as_torch(peer.info)
        return known

    def get_worker_infos(self) -> list[AnyWorkerInfo]:
        """Returns the names and ids of all workers of the group, this worker included, ordered by rank."""
        return [as_torch(info) for info in super().get_worker_infos()]

    def get_debug_info(self) -> dict[str, str]:
        """Returns counters of the agent as texts by name, under torch's names and under farcall's own.

        One of torch's is `agent.num_idle_threads`. `agent.gil_average_wait_time_us` is there only after
        `enable_gil_profiling(True)`.
        """
        metrics = self.get_metrics()
        return {
            **super().get_debug_info(),
            "agent.thread_pool_size": str(self.options.num_worker_threads),
            "agent.num_idle_threads": str(self.options.num_worker_threads - metrics["threads_running"]),
            "agent.client_active_calls": str(metrics["calls_pending"]),
            "agent.server_active_calls": str(metrics["threads_running"]),
            **self._waits_for_the_interpreter(),
        }

    def _waits_for_the_interpreter(self) -> dict[str, str]:
        """Returns the average wait for the interpreter's lock (the GIL) under torch's name; empty if not measured.

        The name is `agent.gil_average_wait_time_us`, and the value a text in microseconds.
        """
        waits = self._interpreter_waits
        return {} if waits is None else {"agent.gil_average_wait_time_us": f"{waits.average():.3f}"}

    def enable_gil_profiling(self, flag: bool) -> None:
        """Starts or stops measuring how long threads wait for the interpreter's lock (the GIL) before each function.

        `get_debug_info` then has the average. Earlier measurements are dropped in either case.

        Args:
            flag: True to start, False to stop, which does nothing if nothing is measured.
        """
        if self._interpreter_waits is not None:
            self.remove_interceptor(self._interpreter_waits)
        self._interpreter_waits = InterpreterWaits() if flag else None
        if self._interpreter_waits is not None:
            self.add_interceptor(self._interpreter_waits)

    def exchange(self, told: bytes) -> dict[str, bytes]:
        """Gives a value to all workers of a fixed group, and returns the values of all workers by name.

        Call it once on every worker, at the start. It waits for the values of the others.

        Args:
            told: The value of this worker; may be empty.

        Raises:
            RendezvousTimeoutError: Not all workers gave a value within the option `init_timeout`.
            RendezvousError: The store is gone.
            KeyError: The group is open.
        """
        store = self._rendezvous.store
        store.set(f"{_EXCHANGE}{self.info.id}", told)
        everybody = store.collect(_EXCHANGE, len(self.get_worker_infos()), self.options.init_timeout)
        return {info.name: everybody[f"{_EXCHANGE}{info.id}"] for info in self.get_worker_infos()}

    # Devices

    def _get_backend_options(self) -> _TensorPipeRpcBackendOptionsBase:
        """Returns the agent's copy of the options that the program gave."""
        return self._opts

    def _get_device_map(self, dst: AnyWorkerInfo) -> DeviceMap:
        """Returns the map from devices of this worker to devices of the worker `dst`; empty if there is none."""
        return dict(self.device_maps.get(dst.name, {}))

    def _update_group_membership(
        self,
        worker_info: AnyWorkerInfo,
        my_devices: list[torch.device],
        reverse_device_map: dict[str, DeviceMap],
        is_join: bool,
    ) -> None:
        """Stores the devices and device maps of a worker that has joined, or deletes those of a worker that has left.

        The membership of the group does not change. Nothing is checked.

        Args:
            worker_info: The worker that has joined or left.
            my_devices: The devices that calls may now use on this worker. Ignored if a worker has left.
            reverse_device_map: For the name of each caller, a map from devices of this worker to devices of the caller,
                which replaces an earlier one of that caller. Ignored if a worker has left.
            is_join: True if the worker has joined, False if it has left.
        """
        if is_join:
            self.used_devices = my_devices
            self.reverse_device_maps.update(reverse_device_map)
        else:
            self.reverse_device_maps.pop(worker_info.name, None)


def _rendezvous_of(store: Any, rank: int, world_size: int | None) -> Rendezvous:
    """Returns a rendezvous at a store of torch's, for the group that uses this store.

    The first worker that calls this chooses the id of the run: a random text, which is the same for the whole group.

    Args:
        store: A `torch.distributed.Store`. Raises `RendezvousError` if it is gone.
        rank: The rank of this worker.
        world_size: The number of workers; None for an open group.
    """
    ours = TorchStore(store, rank, world_size)
    run = ours.set_new(_RUN_KEY, uuid.uuid4().hex.encode()).decode()
    return Rendezvous(ours, rank, world_size, _address_for_others(store), run)


def _address_for_others(store: Any) -> str:
    """Returns the IP address at which other workers reach this one.

    `store` is a `torch.distributed.Store`. If it has a host and a port, the result is the local address of the route to
    it. Otherwise it is the first address of this machine, or loopback if there is none.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if isinstance(host, str) and isinstance(port, int):
        return local_address_towards(host, port)
    return next(iter(local_addresses()), _LOOPBACK)


def enable_gil_profiling(flag: bool) -> None:
    """Starts or stops measuring how long threads of this worker wait for the interpreter's lock (the GIL).

    `get_debug_info` of the agent has the average as `agent.gil_average_wait_time_us`. Earlier measurements are dropped.

    Args:
        flag: True to start, False to stop.

    Raises:
        NotInitializedError: This process is not a worker.
    """
    current_agent().enable_gil_profiling(flag)  # type: ignore[attr-defined]  # one of these
