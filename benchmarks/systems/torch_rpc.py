"""torch.distributed.rpc with the options that its users have by default: TensorPipe, which picks its own transports."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from farcall.bench import payloads
from farcall.bench.reference_uses import ReferenceUses
from farcall.bench.system import (
    CALLER,
    GROUP_LIMIT_S,
    LEAVE_LIMIT_S,
    OWNER,
    START_LIMIT_S,
    THIRD,
    Address,
    FutureCalls,
    ReferenceCaller,
    Server,
    System,
    Workers,
)


def noop() -> None:
    """The callee."""


def echo(payload: Any) -> Any:
    """The callee that sends back what it gets."""
    return payload


def take(payload: Any) -> None:
    """The callee that keeps nothing."""


_others: dict[int, Any] = {}


def exchange(payload: Any) -> Any:
    """The callee that sends back another one of the same size, which it keeps."""
    if len(payload) not in _others:
        _others.clear()
        _others[len(payload)] = payload.clone()
    return _others[len(payload)]


class TorchEnd(ReferenceUses, FutureCalls):
    """One worker of a group."""

    package = "torch.distributed.rpc"

    def __init__(self, name: str, rank: int, address: Address, many: bool = False, **options: Any) -> None:
        """Joins the group. `options` are further ones of torch's."""
        rpc: Any = importlib.import_module(self.package)
        super().__init__(rpc)
        self._rpc = rpc
        self._others = [other for other in range(address.ends) if other != rank]
        self._leave_limit = GROUP_LIMIT_S if many else LEAVE_LIMIT_S
        given = rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://{address.host}:{address.port}",
            num_worker_threads=16,
            rpc_timeout=GROUP_LIMIT_S if many else START_LIMIT_S,
            **options,
        )
        self._rpc.init_rpc(name, rank=rank, world_size=address.ends, rpc_backend_options=given)

    def noop(self) -> None:
        self._rpc.rpc_sync(OWNER, noop)

    def payload(self, size: int) -> Any:
        import torch

        # A bytearray can be written to; torch warns of memory that cannot. There is no tensor over an empty one.
        data = bytearray(payloads.plain(size))
        return torch.frombuffer(data, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)

    def echo(self, payload: Any) -> Any:
        return self._rpc.rpc_sync(OWNER, echo, args=(payload,))

    def exchange(self, payload: Any) -> Any:
        return self._rpc.rpc_sync(OWNER, exchange, args=(payload,))

    @functools.cached_property
    def _small(self) -> Any:
        import torch

        return torch.ones(2, 2)

    def echo_small(self) -> None:
        """Send a tensor of 2 × 2 there and have it back."""
        self._rpc.rpc_sync(OWNER, echo, args=(self._small,))

    def send(self, payload: Any) -> None:
        self._rpc.rpc_sync(OWNER, take, args=(payload,))

    def start(self) -> Any:
        return self._rpc.rpc_async(OWNER, noop)

    def finish(self, future: Any) -> None:
        future.wait()

    def pipelined(self, calls: int) -> None:
        import torch

        rpc_async = self._rpc.rpc_async
        torch.futures.wait_all([rpc_async(OWNER, noop) for _ in range(calls)])

    def call_all(self) -> None:
        for future in [self._rpc.rpc_async(other, noop) for other in self._others]:
            future.wait()

    def close(self) -> None:
        self.drop()
        self._rpc.shutdown(timeout=self._leave_limit)


class Torch(System):
    """torch's RPC between processes of one host."""

    name = "torch"
    label = "torch.distributed.rpc"
    package = "torch"
    refers = True
    threads = True
    exchanges = True
    starts_together = True
    usage = "`rpc_sync`, `rpc_async`, `remote`; tensors"

    def serve(self, address: Address) -> Server:
        return TorchEnd(OWNER, 0, address)

    def connect(self, address: Address) -> ReferenceCaller:
        return TorchEnd(CALLER, 1, address)

    def join(self, address: Address) -> Server:
        return TorchEnd(THIRD, 2, address)

    def member(self, rank: int, address: Address) -> Workers:
        return TorchEnd(f"worker{rank}", rank, address, many=True)

    def load(self) -> None:
        importlib.import_module("torch.distributed.rpc")
