"""torch.distributed.rpc with the options that its users have by default: TensorPipe, which picks its own transports."""

from __future__ import annotations

from typing import Any

from systems.base import CALLER, OWNER, START_LIMIT, THIRD, Address, ReferenceCaller, Server, System
from systems.references import ReferenceUses


def noop() -> None:
    """The callee."""


class _TorchEnd(ReferenceUses):
    """One worker of a group of two or three."""

    def __init__(self, name: str, rank: int, address: Address) -> None:
        import torch.distributed.rpc as rpc

        super().__init__(rpc)
        self._rpc: Any = rpc
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{address.port}", num_worker_threads=16, rpc_timeout=START_LIMIT
        )
        rpc.init_rpc(name, rank=rank, world_size=address.ends, rpc_backend_options=options)

    def noop(self) -> None:
        self._rpc.rpc_sync(OWNER, noop)

    def pipelined(self, calls: int) -> None:
        import torch

        rpc_async = self._rpc.rpc_async
        torch.futures.wait_all([rpc_async(OWNER, noop) for _ in range(calls)])

    def close(self) -> None:
        self.drop()
        self._rpc.shutdown(timeout=10)


class Torch(System):
    """torch's RPC between processes of one host."""

    name = "torch"
    label = "torch.distributed.rpc"
    package = "torch"
    refers = True
    starts_together = True

    def serve(self, address: Address) -> Server:
        return _TorchEnd(OWNER, 0, address)

    def connect(self, address: Address) -> ReferenceCaller:
        return _TorchEnd(CALLER, 1, address)

    def join(self, address: Address) -> Server:
        return _TorchEnd(THIRD, 2, address)
