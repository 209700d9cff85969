"""farcall under torch's names, with torch's tensors and default options: `farcall.pytorch`."""

from __future__ import annotations

import importlib

from farcall.bench.farcall_rpc import import_farcall
from farcall.bench.system import CALLER, OWNER, THIRD, Address, ReferenceCaller, Server, System, Workers
from systems.torch_rpc import TorchEnd


class _EdgeEnd(TorchEnd):
    """One worker of a group."""

    package = "farcall.pytorch"

    def __init__(self, name: str, rank: int, address: Address, many: bool = False) -> None:
        import_farcall()
        super().__init__(name, rank, address, many)


class TorchEdge(System):
    """`farcall.pytorch` between processes of one host."""

    name = "edge"
    label = "farcall.pytorch"
    package = "torch"
    refers = True
    threads = True
    exchanges = True
    starts_together = True
    usage = "`rpc_sync`, `rpc_async`, `remote`; tensors"

    def serve(self, address: Address) -> Server:
        return _EdgeEnd(OWNER, 0, address)

    def connect(self, address: Address) -> ReferenceCaller:
        return _EdgeEnd(CALLER, 1, address)

    def join(self, address: Address) -> Server:
        return _EdgeEnd(THIRD, 2, address)

    def member(self, rank: int, address: Address) -> Workers:
        return _EdgeEnd(f"worker{rank}", rank, address, many=True)

    def load(self) -> None:
        import_farcall()
        importlib.import_module("farcall.pytorch")
