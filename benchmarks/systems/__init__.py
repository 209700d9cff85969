"""The systems that the bench puts side by side, one module for each package. `ALL` is the order of the tables."""

from __future__ import annotations

from typing import Final

from systems.base import START_LIMIT, Address, Caller, ReferenceCaller, Server, System
from systems.farcall_rpc import BUSY_WORKERS, BusyWorker, Farcall
from systems.raw import Raw
from systems.rpyc_rpc import Rpyc
from systems.torch_rpc import Torch

ALL: Final[tuple[System, ...]] = (
    Farcall("unix"),
    Farcall("tcp"),
    Torch(),
    Rpyc("unix"),
    Rpyc("tcp"),
    Raw("unix", spins=True),
    Raw("tcp", spins=True),
    Raw("unix", spins=False),
    Raw("tcp", spins=False),
)

__all__ = [
    "ALL",
    "BUSY_WORKERS",
    "START_LIMIT",
    "Address",
    "BusyWorker",
    "Caller",
    "ReferenceCaller",
    "Server",
    "System",
    "find",
]


def find(name: str) -> System:
    """The system of this name. Raises KeyError if there is none."""
    for system in ALL:
        if system.name == name:
            return system
    raise KeyError(name)
