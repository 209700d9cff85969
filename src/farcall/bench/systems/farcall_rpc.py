"""farcall with its default options, over Unix sockets and over TCP; and one of many busy farcall workers."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any, Final

from farcall.bench.systems import payloads
from farcall.bench.systems.base import (
    CALLER,
    GROUP_LIMIT,
    LEAVE_LIMIT,
    OWNER,
    START_LIMIT,
    THIRD,
    Address,
    FutureCalls,
    ReferenceCaller,
    Server,
    System,
    Workers,
)
from farcall.bench.systems.references import ReferenceUses

BUSY_WORKERS: Final = 8


def the_package() -> Any:
    """farcall itself, in place of the stand-in that processes of the bench begin with."""
    if not hasattr(sys.modules.get("farcall"), "init_rpc"):
        sys.modules.pop("farcall", None)
    return importlib.import_module("farcall")


def noop() -> None:
    """The callee."""


def echo(payload: Any) -> Any:
    """The callee that sends back what it gets."""
    return payload


def take(payload: Any) -> None:
    """The callee that keeps nothing."""


_others: Final[dict[int, Any]] = {}


def exchange(payload: Any) -> Any:
    """The callee that sends back another one of the same size, which it keeps."""
    if len(payload) not in _others:
        _others.clear()
        _others[len(payload)] = payloads.array(len(payload))
    return _others[len(payload)]


class _FarcallEnd(ReferenceUses, FutureCalls):
    """One worker of a group."""

    def __init__(self, name: str, rank: int, address: Address, transport: str | None, many: bool = False) -> None:
        rpc = the_package()
        super().__init__(rpc)
        self._rpc = rpc
        self._others = [other for other in range(address.ends) if other != rank]
        self._leave_limit = GROUP_LIMIT if many else LEAVE_LIMIT
        options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{address.port}", init_timeout=START_LIMIT)
        if many:
            options.init_timeout = options.rpc_timeout = GROUP_LIMIT
        if transport is not None:
            # One and no other: falling back to TCP must be an error here, not a wrong row in the table.
            options.transports = (transport,)
        rpc.init_rpc(name, rank=rank, world_size=address.ends, rpc_backend_options=options)

    def noop(self) -> None:
        self._rpc.rpc_sync(OWNER, noop)

    def payload(self, size: int) -> Any:
        return payloads.array(size)

    def echo(self, payload: Any) -> Any:
        return self._rpc.rpc_sync(OWNER, echo, args=(payload,))

    def exchange(self, payload: Any) -> Any:
        return self._rpc.rpc_sync(OWNER, exchange, args=(payload,))

    def send(self, payload: Any) -> None:
        self._rpc.rpc_sync(OWNER, take, args=(payload,))

    def start(self) -> Any:
        return self._rpc.rpc_async(OWNER, noop)

    def finish(self, future: Any) -> None:
        future.wait()

    def pipelined(self, calls: int) -> None:
        rpc_async = self._rpc.rpc_async
        self._rpc.wait_all([rpc_async(OWNER, noop) for _ in range(calls)])

    def call_all(self) -> None:
        rpc_async = self._rpc.rpc_async
        self._rpc.wait_all([rpc_async(other, noop) for other in self._others])

    def close(self) -> None:
        self.drop()
        self._rpc.shutdown(timeout=self._leave_limit)


class Farcall(System):
    """farcall between processes of one host: over one kind of socket, or as it chooses by itself."""

    package = "farcall"
    refers = True
    threads = True
    exchanges = True
    starts_together = True
    usage = "`rpc_sync`, `rpc_async`, `remote`; numpy arrays"

    def __init__(self, kind: str | None = None) -> None:
        self._kind = kind
        self.name = f"farcall-{kind}" if kind else "farcall"
        self.label = f"farcall, {kind}" if kind else "farcall"

    def serve(self, address: Address) -> Server:
        return _FarcallEnd(OWNER, 0, address, self._kind)

    def connect(self, address: Address) -> ReferenceCaller:
        return _FarcallEnd(CALLER, 1, address, self._kind)

    def join(self, address: Address) -> Server:
        return _FarcallEnd(THIRD, 2, address, self._kind)

    def member(self, rank: int, address: Address) -> Workers:
        return _FarcallEnd(f"worker{rank}", rank, address, self._kind, many=True)

    def load(self) -> None:
        the_package()


class BusyWorker:
    """One of `BUSY_WORKERS` workers that call each other all the time."""

    def __init__(self, rank: int, port: int, spins: bool) -> None:
        rpc = self._rpc = the_package()
        where = f"tcp://127.0.0.1:{port}"
        if spins:
            options = rpc.RpcBackendOptions(init_method=where, init_timeout=START_LIMIT)
        else:
            options = rpc.RpcBackendOptions(init_method=where, init_timeout=START_LIMIT, spin=0.0)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=BUSY_WORKERS, rpc_backend_options=options)
        # Each begins with its neighbour, so that not all call the same worker at once.
        self._others = [f"worker{(rank + step) % BUSY_WORKERS}" for step in range(1, BUSY_WORKERS)]
        for other in self._others:
            rpc.rpc_sync(other, noop)  # connections are made now, not while it counts

    def call_all(self, seconds: float) -> int:
        """Call the others in turn for so long; the number of calls made."""
        rpc_sync = self._rpc.rpc_sync
        calls = 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for other in self._others:
                rpc_sync(other, noop)
            calls += len(self._others)
        return calls

    def close(self) -> None:
        """Leave the group; returns in bounded time."""
        self._rpc.shutdown(timeout=LEAVE_LIMIT)
