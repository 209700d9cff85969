"""The systems that are put side by side, one module for each package.

`ALL` are those of `run.py`, in the order of its tables; `PEERS` those that `compare.py` puts beside farcall.
"""

from __future__ import annotations

from typing import Final

from farcall.bench.farcall_rpc import OWN, Farcall
from farcall.bench.system import System
from systems.dask_actors import Dask
from systems.grpc_unary import Grpc
from systems.monarch_actors import Monarch
from systems.pyro5_proxy import Pyro5
from systems.raw import Raw, RawCopy
from systems.ray_actors import Ray
from systems.rpyc_rpc import Rpyc
from systems.torch_edge import TorchEdge
from systems.torch_rpc import Torch
from systems.xoscar_actors import Xoscar

ALL: Final[tuple[System, ...]] = (
    Farcall("unix"),
    Farcall("unix", native=False),
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
PEERS: Final[dict[str, System]] = {
    system.family: system
    for system in (Torch(), Ray(), Rpyc(), Pyro5(), Grpc(), Xoscar(), Dask(), Monarch())
}  # fmt: skip
COMPARED: Final[tuple[System, ...]] = (OWN, *PEERS.values())

__all__ = ["ALL", "COMPARED", "COPY", "PEERS", "find"]


def find(name: str) -> System:
    """The system of this name. Raises KeyError if there is none."""
    for system in (*ALL, COPY, *COMPARED):
        if system.name == name:
            return system
    raise KeyError(name)
