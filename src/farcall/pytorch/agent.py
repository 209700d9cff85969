"""`TensorPipeAgent`: farcall's agent under torch's name, with torch's constructor and methods.

It meets the others at a store of torch's (`store`). The device maps are kept here; what is done with them is in
`devices`.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import traceback
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from farcall.agent import Agent
from farcall.agent.spinning import Awaiting, Spinning
from farcall.agent.surrounding import Around, surround
from farcall.api import current_agent
from farcall.backends.default import join_at
from farcall.options import RpcBackendOptions
from farcall.protocol.ids import WorkerInfo as AnyWorkerInfo
from farcall.pytorch.interpreter_waits import InterpreterWaits
from farcall.pytorch.options import DeviceMap, _TensorPipeRpcBackendOptionsBase
from farcall.pytorch.store import TorchStore
from farcall.pytorch.workers import WorkerInfo, as_torch
from farcall.rendezvous import Rendezvous
from farcall.security import Credentials
from farcall.transports.network import local_address_towards, local_addresses

_RUN_KEY: Final = "run"
_EXCHANGE: Final = "exchange/"
_LOOPBACK: Final = "127.0.0.1"


class TensorPipeAgent(Agent):
    """A worker of a group, for programs written for torch."""

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
        self.store = store
        """Of torch's, by which the workers met."""
        self.is_static_group = bool(world_size)
        """Whether no worker can join or leave."""
        self._opts = copy.copy(rpc_backend_options)  # the program may go on to change its own
        self._opts.device_maps = dict(rpc_backend_options.device_maps)
        self._has_parted = False
        self._infos: dict[int, WorkerInfo] = {}
        self.reverse_device_maps = reverse_device_maps
        """For a caller's name: where its device is that stands for ours."""
        self.used_devices = devices
        self._surroundings: dict[str, Around] = {}
        self._surroundings_lock = threading.Lock()
        self._interpreter_waits: InterpreterWaits | None = None

        def meet(credentials: Credentials) -> Rendezvous:
            return _meet(store, rank, world_size or None)

        def make(*given: Any) -> Agent:
            super(TensorPipeAgent, self).__init__(*given)
            return self

        join_at(make, name, self._own_options(rpc_backend_options), meet)
        self.device_maps = rpc_backend_options.device_maps

    def _own_options(self, opts: _TensorPipeRpcBackendOptionsBase) -> RpcBackendOptions:
        return opts.for_agent()

    def new_spinning(self) -> Spinning:
        """See `Agent`. What computes with tensors takes some hundred microseconds, and to be woken some of them."""
        return Awaiting(self.options.spin)

    def failure_to_send(self, name: str, error: BaseException) -> BaseException:
        """As torch: what a function raises goes to stderr here, besides to its caller.

        Programs for torch expect a `RuntimeError` for an exception whose type is not made of a message alone. The
        exception itself is the cause of it.
        """
        with contextlib.suppress(Exception):
            trace = "".join(traceback.format_exception(error))
            print(f"On {self.get_worker_info()}:\n{error!r}\n{trace}", file=sys.stderr)
        try:
            type(error)(str(error))
            return error
        except Exception as refusal:
            stands_in = RuntimeError(
                f"Failed to create original exception type. Error msg was {refusal} "
                f"Original exception on remote side was {error!r}, in `{name}` on worker {self.info.name!r}"
            )
            stands_in.__cause__ = error
            return stands_in

    # The end

    def join(self, shutdown: bool = False, timeout: float = 0.0) -> None:
        """See `RpcAgent`. Before a shutdown: says good-bye, too, so that nobody takes those who go for lost."""
        if not shutdown:
            super().join(timeout=timeout)
        elif self.is_static_group:
            self.part(timeout)
            self._has_parted = True
        else:
            self.wind_up(timeout)

    def shutdown(self, graceful: bool = False, timeout: float = 0.0) -> None:
        """See `RpcAgent`."""
        if self._has_parted:
            self.close_after_parting()
        else:
            super().shutdown(graceful, timeout)

    # Who is there

    def get_worker_info(self, to: str | int | AnyWorkerInfo | None = None) -> WorkerInfo:
        """See `RpcAgent`. On the path of every call."""
        peer = self._peers.get(to) if to is not None else None
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

    # What is around the functions that run here for others

    def surround(self, what: str, around: Around | None) -> None:
        """Has all functions that run here for others run inside `around()`, too; None: inside of that not any more."""
        with self._surroundings_lock:
            if around is None:
                self._surroundings.pop(what, None)
            else:
                self._surroundings[what] = around
            surround(self._place, _within(list(self._surroundings.values())))

    def enable_gil_profiling(self, flag: bool) -> None:
        """Whether it is measured how long a thread waits for the interpreter before it runs a function for others."""
        waits = InterpreterWaits() if flag else None
        self._interpreter_waits = waits
        self.surround("interpreter waits", None if waits is None else waits.before_function)

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


def _within(surroundings: Sequence[Around]) -> Around | None:
    if len(surroundings) < 2:
        return next(iter(surroundings), None)

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in surroundings:
                stack.enter_context(each())
            yield

    return around


def _meet(store: Any, rank: int, world_size: int | None) -> Rendezvous:
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
