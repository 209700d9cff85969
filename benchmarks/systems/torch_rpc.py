"""torch.distributed.rpc with the options that its users have by default: TensorPipe, which picks its own transports."""

from __future__ import annotations

from typing import Any

from systems.base import START_LIMIT, Address, Caller, Server, System


def noop() -> None:
    """The callee."""


class _TorchEnd:
    """One worker of a group of two. Only the client calls; only the server is called."""

    def __init__(self, name: str, rank: int, port: int) -> None:
        import torch.distributed.rpc as rpc

        self._rpc: Any = rpc
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=16, rpc_timeout=START_LIMIT
        )
        rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)

    def noop(self) -> None:
        self._rpc.rpc_sync("server", noop)

    def pipelined(self, calls: int) -> None:
        import torch

        rpc_async = self._rpc.rpc_async
        torch.futures.wait_all([rpc_async("server", noop) for _ in range(calls)])

    def close(self) -> None:
        self._rpc.shutdown(timeout=10)


class Torch(System):
    """torch's RPC between two processes of one host."""

    name = "torch"
    label = "torch.distributed.rpc"
    package = "torch"
    starts_together = True

    def serve(self, address: Address) -> Server:
        return _TorchEnd("server", 0, address.port)

    def connect(self, address: Address) -> Caller:
        return _TorchEnd("client", 1, address.port)
