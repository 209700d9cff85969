"""`TensorPipeAgent`: farcall's agent under torch's name, with torch's constructor and methods.

It finds the other workers through a store of torch's (`torch_store`). The device maps are kept here; `devices` applies
them. `enable_gil_profiling` measures how long the threads that serve wait for the interpreter's lock: before each
function a thread releases the lock for a moment, and takes the time until it has it again (`InterpreterWaits`).
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
    """Measures how long serving threads wait for the interpreter's lock, before each function."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._seconds = 0.0

    def measure(self) -> None:
        """Waits once for the interpreter."""
        began = perf_counter()
        sleep(0)
        self.note(perf_counter() - began)

    def note(self, seconds: float) -> None:
        """A wait has taken that long."""
        with self._lock:
            self._count += 1
            self._seconds += seconds

    def intercept(self, call: ServerCall, proceed: Callable[[ServerCall], Any]) -> Any:
        """See `ServerInterceptor`."""
        self.measure()
        return proceed(call)

    def average(self) -> float:
        """In microseconds; 0 if nothing was measured."""
        with self._lock:
            return self._seconds / self._count * 1e6 if self._count else 0.0


_RUN_KEY: Final = "run"
_EXCHANGE: Final = "exchange/"
_LOOPBACK: Final = "127.0.0.1"


class TensorPipeAgent(Agent):
    """A worker of a group, for programs written for torch."""

    function_runner = staticmethod(runner_of)

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
        """Joins the group. Raises `RendezvousError`, `RuntimeError` for a name that torch does not take."""
        WorkerInfo(name, rank)  # refuses the name
        self._torch_store = store
        self._is_static_group = bool(world_size)
        self._opts = copy.copy(rpc_backend_options)  # the program may go on to change its own
        self._opts.device_maps = dict(rpc_backend_options.device_maps)
        self._may_leave = False
        self._infos: dict[int, WorkerInfo] = {}
        self.reverse_device_maps = reverse_device_maps
        """For a caller's name: where its device is that stands for ours."""
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
        """The store of torch's at which the workers met."""
        return self._torch_store

    @property
    def is_static_group(self) -> bool:
        """Whether no worker can join or leave."""
        return self._is_static_group

    def _own_options(self, opts: _TensorPipeRpcBackendOptionsBase) -> RpcBackendOptions:
        return opts.for_agent()

    def failure_to_send(self, name: str, error: BaseException) -> BaseException:
        """As torch: what a function raises goes to stderr here, besides to its caller.

        Programs for torch expect a `RuntimeError` for an exception whose type is not made of a message alone. The
        exception itself is the cause of it.
        """
        return exception_for_caller(error, self.get_worker_info())

    # The end

    def join(self, shutdown: bool = False, timeout: float = 0.0) -> None:
        """See `RpcAgent`. Before a shutdown: says good-bye, too, so that nobody takes those who go for lost."""
        if not shutdown:
            super().join(timeout=timeout)
        elif self.is_static_group:
            self.wait_to_leave(timeout)
            self._may_leave = True
        else:
            self.drain(timeout)

    def shutdown(self, graceful: bool = False, timeout: float = 0.0) -> None:
        """See `RpcAgent`."""
        if self._may_leave:
            self.close_after_leaving()
        else:
            super().shutdown(graceful, timeout)

    # Who is there

    def get_worker_info(self, to: str | int | AnyWorkerInfo | None = None) -> WorkerInfo:
        """See `RpcAgent`. On the path of every call."""
        peer = self._peers.by_key.get(to) if to is not None else None
        if peer is None:
            return as_torch(super().get_worker_info(to))
        known = self._infos.get(peer.number)
        if known is None:
            known = self._infos[peer.number] = as_torch(peer.info)
        return known

    def get_worker_infos(self) -> list[AnyWorkerInfo]:
        """See `RpcAgent`."""
        return [as_torch(info) for info in super().get_worker_infos()]

    def get_debug_info(self) -> dict[str, str]:
        """Numbers about the agent as texts: torch's names, and farcall's own."""
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
        waits = self._interpreter_waits
        return {} if waits is None else {"agent.gil_average_wait_time_us": f"{waits.average():.3f}"}

    def enable_gil_profiling(self, flag: bool) -> None:
        """Measures, or no longer, how long a thread waits for the interpreter before it runs a function for others."""
        if self._interpreter_waits is not None:
            self.remove_interceptor(self._interpreter_waits)
        self._interpreter_waits = InterpreterWaits() if flag else None
        if self._interpreter_waits is not None:
            self.add_interceptor(self._interpreter_waits)

    def exchange(self, told: bytes) -> dict[str, bytes]:
        """What each worker of a fixed group has told so far as this, by name, when all have. Once, at the start.

        Raises `RendezvousError`.
        """
        store = self._rendezvous.store
        store.set(f"{_EXCHANGE}{self.info.id}", told)
        everybody = store.collect(_EXCHANGE, len(self.get_worker_infos()), self.options.init_timeout)
        return {info.name: everybody[f"{_EXCHANGE}{info.id}"] for info in self.get_worker_infos()}

    # Devices

    def _get_backend_options(self) -> _TensorPipeRpcBackendOptionsBase:
        return self._opts

    def _get_device_map(self, dst: AnyWorkerInfo) -> DeviceMap:
        """See `RpcAgent`."""
        return dict(self.device_maps.get(dst.name, {}))

    def _update_group_membership(
        self,
        worker_info: AnyWorkerInfo,
        my_devices: list[torch.device],
        reverse_device_map: dict[str, DeviceMap],
        is_join: bool,
    ) -> None:
        """A worker has joined, with device maps for this one, or left; the group itself knows that already."""
        if is_join:
            self.used_devices = my_devices
            self.reverse_device_maps.update(reverse_device_map)
        else:
            self.reverse_device_maps.pop(worker_info.name, None)


def _rendezvous_of(store: Any, rank: int, world_size: int | None) -> Rendezvous:
    """The group that has the store; the first worker to come names this run of it."""
    ours = TorchStore(store, rank, world_size)
    run = ours.set_new(_RUN_KEY, uuid.uuid4().hex.encode()).decode()
    return Rendezvous(ours, rank, world_size, _address_for_others(store), run)


def _address_for_others(store: Any) -> str:
    """Where the other workers can reach this one: as they reach the store, if it is at an address."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if isinstance(host, str) and isinstance(port, int):
        return local_address_towards(host, port)
    return next(iter(local_addresses()), _LOOPBACK)


def enable_gil_profiling(flag: bool) -> None:
    """Whether this worker measures how long its threads wait for the interpreter; `get_debug_info` tells the average.

    Raises `NotInitializedError` if this process is no worker.
    """
    current_agent().enable_gil_profiling(flag)  # type: ignore[attr-defined]  # one of these
