"""The two systems as a workload sees them: the same functions, and arrays of the kind that each carries by nature.

Rules
- A process is of one side all its life. `choose` comes first; a workload's module is imported afterwards, because its
  marks (`answers_later`) are the chosen side's.
- Nothing is converted but at the edge, and never copied: a numpy array and a tensor share their memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

NAMES: Final = ("farcall", "torch")


class Side(ABC):
    """One system. `rpc` is its module, `Future` its class of futures."""

    rpc: Any
    Future: Any

    @abstractmethod
    def init_rpc(self, name: str, rank: int, size: int, port: int, limit: float) -> None:
        """Join the group with the options that users have by default; starting and each call may take `limit` s."""

    @abstractmethod
    def cargo(self, array: Any) -> Any:
        """The array as this side carries it, with the same memory."""

    @abstractmethod
    def wait_all(self, futures: Iterable[Any]) -> list[Any]:
        """The values of all of them. Raises the error of one that failed."""


class _Farcall(Side):
    def __init__(self) -> None:
        import numpy

        from farcall.bench.farcall_rpc import import_farcall

        farcall = import_farcall()

        self.rpc = farcall
        self.Future = farcall.Future
        self._as_array = numpy.asarray

    def init_rpc(self, name: str, rank: int, size: int, port: int, limit: float) -> None:
        options = self.rpc.RpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{port}", init_timeout=limit, rpc_timeout=limit
        )
        self.rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)

    def cargo(self, array: Any) -> Any:
        return self._as_array(array)

    def wait_all(self, futures: Iterable[Any]) -> list[Any]:
        return list(self.rpc.wait_all(list(futures)))


class _Torch(Side):
    def __init__(self) -> None:
        import torch
        import torch.distributed.rpc as rpc

        # Each process has its own work to do, and more threads than cores would only be in each other's way.
        torch.set_num_threads(1)
        self.rpc = rpc
        self.Future = torch.futures.Future
        self._as_tensor = torch.as_tensor
        self._wait_all = torch.futures.wait_all

    def init_rpc(self, name: str, rank: int, size: int, port: int, limit: float) -> None:
        options = self.rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=limit)
        self.rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)

    def cargo(self, array: Any) -> Any:
        return self._as_tensor(array)

    def wait_all(self, futures: Iterable[Any]) -> list[Any]:
        return list(self._wait_all(list(futures)))


_chosen: Side | None = None


def choose(name: str) -> Side:
    """Make this process one of the named side. Raises KeyError for a name that is not in `NAMES`."""
    global _chosen
    _chosen = {"farcall": _Farcall, "torch": _Torch}[name]()
    return _chosen


def chosen() -> Side:
    """The side of this process. Raises RuntimeError before `choose`."""
    if _chosen is None:
        raise RuntimeError("this process has no side yet: call sides.choose first, then import the workload")
    return _chosen


def answers_later(function: F) -> F:
    """`functions.async_execution` of this process's side: what the function returns is a future of the answer."""
    marked: F = chosen().rpc.functions.async_execution(function)
    return marked
