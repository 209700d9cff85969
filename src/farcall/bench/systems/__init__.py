"""The systems that are put side by side, one module for each package.

`ALL` are those of `make bench`, in the order of its tables; `COMPARED` those of `farcall bench`, farcall first.
"""

from __future__ import annotations

import importlib.util
from typing import Final

from farcall.bench.systems.base import (
    EXCHANGED,
    FETCHED,
    IN_FLIGHT,
    SHARED,
    START_LIMIT,
    STREAMING,
    THREADS,
    Address,
    AwaitingCaller,
    Caller,
    EchoCaller,
    ExchangingCaller,
    ReferenceCaller,
    Server,
    StreamingCaller,
    System,
    Workers,
)
from farcall.bench.systems.dask_actors import Dask
from farcall.bench.systems.farcall_rpc import BUSY_WORKERS, BusyWorker, Farcall
from farcall.bench.systems.grpc_unary import Grpc
from farcall.bench.systems.monarch_actors import Monarch
from farcall.bench.systems.pyro5_proxy import Pyro5
from farcall.bench.systems.raw import Raw, RawCopy
from farcall.bench.systems.ray_actors import Ray
from farcall.bench.systems.rpyc_rpc import Rpyc
from farcall.bench.systems.torch_edge import TorchEdge
from farcall.bench.systems.torch_rpc import Torch
from farcall.bench.systems.xoscar_actors import Xoscar

ALL: Final[tuple[System, ...]] = (
    Farcall("unix"),
    Farcall("tcp"),
    TorchEdge(),
    Torch(),
    Rpyc("unix"),
    Rpyc("tcp"),
    Raw("unix", spins=True),
    Raw("tcp", spins=True),
    Raw("unix", spins=False),
    Raw("tcp", spins=False),
)
COPY: Final = RawCopy()
"""What farcall over TCP is measured by, where large data is sent."""
OWN: Final = Farcall()
PEERS: Final[dict[str, System]] = {
    system.family: system
    for system in (Torch(), Ray(), Rpyc(), Pyro5(), Grpc(), Xoscar(), Dask(), Monarch())
}  # fmt: skip
COMPARED: Final[tuple[System, ...]] = (OWN, *PEERS.values())

__all__ = [
    "ALL",
    "BUSY_WORKERS",
    "COMPARED",
    "COPY",
    "EXCHANGED",
    "FETCHED",
    "IN_FLIGHT",
    "OWN",
    "PEERS",
    "SHARED",
    "START_LIMIT",
    "STREAMING",
    "THREADS",
    "Address",
    "AwaitingCaller",
    "BusyWorker",
    "Caller",
    "EchoCaller",
    "ExchangingCaller",
    "ReferenceCaller",
    "Server",
    "StreamingCaller",
    "System",
    "Workers",
    "find",
    "installed",
]


def find(name: str) -> System:
    """The system of this name. Raises KeyError if there is none."""
    for system in (*ALL, COPY, *COMPARED):
        if system.name == name:
            return system
    raise KeyError(name)


def installed(system: System) -> bool:
    """Whether the package that the system needs is there."""
    return system.package is None or importlib.util.find_spec(system.package) is not None
