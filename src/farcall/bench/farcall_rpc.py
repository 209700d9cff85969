"""farcall as a system of the benchmark, with its default options or over one kind of socket; and the busy workers."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any, Final

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

BUSY_WORKERS: Final = 8
"""How many workers a group of `BusyWorker` has."""


def import_farcall() -> Any:
    """Imports and returns the real package `farcall`.

    In a process of the benchmark, an empty module stands in for the package; that module is replaced. If the real
    package is imported already, it is returned as it is.
    """
    if not hasattr(sys.modules.get("farcall"), "init_rpc"):
        sys.modules.pop("farcall", None)
    return importlib.import_module("farcall")


def noop() -> None:
    """Called remotely: does nothing."""


def echo(payload: Any) -> Any:
    """Called remotely: returns the payload that it gets."""
    return payload


def take(payload: Any) -> None:
    """Called remotely: receives the payload and returns None."""


_others: Final[dict[int, Any]] = {}
"""The payload that `exchange` returns in this process, by its size; at most one."""


def exchange(payload: Any) -> Any:
    """Called remotely: returns another payload of the same size as `payload`.

    It is created in the first call with that size, and returned again while calls have the same size.
    """
    if len(payload) not in _others:
        _others.clear()
        _others[len(payload)] = payloads.array(len(payload))
    return _others[len(payload)]


class FarcallEnd(ReferenceUses, FutureCalls):
    """One worker of a group of farcall that is measured: the server, the caller, the third end or a member.

    The server is worker 0, the caller 1 and the third end, with which references are shared, 2. A member is one of many
    workers whose start is measured.

    Args:
        name: The name of this worker.
        rank: Its rank.
        address: Where the workers find each other, and how many there are.
        transport: The only transport to use; None lets farcall choose.
        native: False if the C extension must be turned off.
        many: True for a group of many workers, which gets longer timeouts.
        encrypts: Whether connections between hosts are encrypted.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        address: Address,
        transport: str | None,
        native: bool = True,
        many: bool = False,
        encrypts: bool = True,
    ) -> None:
        """Joins the group, and returns when it is complete.

        Args:
            name: The name of this worker.
            rank: Its rank, from 0 to the number of workers minus one.
            address: Where the workers find each other, and how many there are.
            transport: The only transport to use, such as "tcp"; None lets farcall choose.
            native: False if the C extension must be turned off, by FARCALL_NATIVE=0 in the environment.
            many: True for a group of many workers, which gets timeouts of `GROUP_LIMIT_S` seconds.
            encrypts: Whether connections between hosts are encrypted.

        Raises:
            RuntimeError: `native` is False, and the C extension is in use all the same.
            UsageError: `rank` or `transport` is not valid.
            RendezvousError: The other workers do not come within the timeout, or the group cannot be joined.
        """
        rpc = import_farcall()
        if not native and rpc.native_available():
            raise RuntimeError("the C extension is in use, and was to be turned off: FARCALL_NATIVE=0")
        super().__init__(rpc)
        self._rpc = rpc
        self._others = [other for other in range(address.ends) if other != rank]
        self._leave_limit = GROUP_LIMIT_S if many else LEAVE_LIMIT_S
        options = rpc.RpcBackendOptions(
            init_method=f"tcp://{address.host}:{address.port}",
            init_timeout=START_LIMIT_S,
            encrypt_between_hosts=encrypts,
        )
        if many:
            options.init_timeout = options.rpc_timeout = GROUP_LIMIT_S
        if transport is not None:
            # The only transport: a silent fallback to TCP would put a wrong row into the table.
            options.transports = (transport,)
        rpc.init_rpc(name, rank=rank, world_size=address.ends, rpc_backend_options=options)

    def noop(self) -> None:
        """Calls the no-op on the server and waits for its reply. Raises the `RpcError` of a call that fails."""
        self._rpc.rpc_sync(OWNER, noop)

    def payload(self, size: int) -> Any:
        """Returns a numpy array of `size` bytes, which may be 0; plain bytes without numpy."""
        return payloads.array(size)

    def echo(self, payload: Any) -> Any:
        """Sends the payload to the server, and returns what the server sends back: the same bytes.

        Raises the `RpcError` of a call that fails.
        """
        return self._rpc.rpc_sync(OWNER, echo, args=(payload,))

    def exchange(self, payload: Any) -> Any:
        """Sends the payload to the server, and returns what the server sends back: another payload of the same size.

        Raises the `RpcError` of a call that fails.
        """
        return self._rpc.rpc_sync(OWNER, exchange, args=(payload,))

    def send(self, payload: Any) -> None:
        """Sends the payload to the server, and returns when the server has received it.

        Raises `RpcError` if that fails.
        """
        self._rpc.rpc_sync(OWNER, take, args=(payload,))

    def start(self) -> Any:
        """Starts a no-op call to the server, and returns its future. Raises `RpcError` if it cannot be sent."""
        return self._rpc.rpc_async(OWNER, noop)

    def finish(self, future: Any) -> None:
        """Waits for the reply to a call. Raises the error of a call that failed; `RpcTimeoutError` if no reply came."""
        future.wait()

    def pipelined(self, calls: int) -> None:
        """Starts `calls` no-op calls without waiting in between, then waits for all of them. 0 does nothing.

        Raises the `RpcError` of a call that fails.
        """
        rpc_async = self._rpc.rpc_async
        self._rpc.wait_all([rpc_async(OWNER, noop) for _ in range(calls)])

    def call_all(self) -> None:
        """Calls a no-op on each of the other workers at the same time, and waits for all replies.

        Raises the `RpcError` of a call that fails.
        """
        rpc_async = self._rpc.rpc_async
        self._rpc.wait_all([rpc_async(other, noop) for other in self._others])

    def close(self) -> None:
        """Drops the reference that `proxy_call` holds, if any, and leaves the group when all workers do.

        Waits at most `LEAVE_LIMIT_S` seconds, or `GROUP_LIMIT_S` in a group of many workers. Raises `ShutdownError` if
        the other workers do not leave by then. This worker has left all the same.
        """
        self.drop()
        self._rpc.shutdown(timeout=self._leave_limit)


class Farcall(System):
    """farcall between processes of one host, as a system to measure: one row of the tables.

    `Farcall()` lets farcall choose the transport; its name is "farcall". `Farcall("tcp")` is "farcall-tcp".

    Args:
        kind: The only transport to use, for example "tcp"; None lets farcall choose. Not checked before a worker
            starts.
        native: False turns the C extension off, and adds "-python" to the name.
    """

    package = "farcall"
    refers = True
    threads = True
    exchanges = True
    starts_together = True
    usage = "`rpc_sync`, `rpc_async`, `remote`; numpy arrays"

    def __init__(self, kind: str | None = None, native: bool = True) -> None:
        """Chooses the transport, and sets the name and the label of the system. Starts nothing.

        Args:
            kind: The only transport to use, for example "tcp"; None lets farcall choose. Not checked before a worker
                starts.
            native: False turns the C extension off.
        """
        self._kind = kind
        self._native = native
        self.name = f"farcall-{kind}" if kind else "farcall"
        self.label = f"farcall, {kind}" if kind else "farcall"
        if not native:
            self.name += "-python"
            self.label += ", pure Python"
            self.environment = {"FARCALL_NATIVE": "0"}

    def serve(self, address: Address) -> Server:
        """Starts the server in this process as worker 0, and returns it when the group is complete.

        Raises `RendezvousError` if the others do not come within `START_LIMIT_S` seconds.
        """
        return FarcallEnd(OWNER, 0, address, self._kind, self._native)

    def connect(self, address: Address) -> ReferenceCaller:
        """Starts the caller in this process as worker 1, and returns it when the group is complete.

        Raises `RendezvousError` if the others do not come within `START_LIMIT_S` seconds.
        """
        return FarcallEnd(CALLER, 1, address, self._kind, self._native)

    def join(self, address: Address) -> Server:
        """Starts the third end, with which references are shared, in this process as worker 2.

        Returns it when the group is complete. Raises `RendezvousError` if the others do not come within `START_LIMIT_S`
        seconds.
        """
        return FarcallEnd(THIRD, 2, address, self._kind, self._native)

    def member(self, rank: int, address: Address) -> Workers:
        """Joins a group of `address.ends` workers as worker `rank`, and returns this worker when the group is complete.

        Raises `RendezvousError` if the others do not come within `GROUP_LIMIT_S` seconds, and `UsageError` if `rank` is
        not valid.
        """
        return FarcallEnd(f"worker{rank}", rank, address, self._kind, self._native, many=True)

    def load(self) -> None:
        """Imports farcall, in place of the empty module that stands in for it. Raises `ImportError` if that fails."""
        import_farcall()


OWN: Final = Farcall()
"""farcall with the transport that it chooses itself: what `farcall bench` measures."""


class BusyWorker:
    """One of `BUSY_WORKERS` workers that call each other all the time, to measure calls on a busy host.

    Args:
        rank: The rank of this worker, from 0 to `BUSY_WORKERS` minus one.
        port: The port of the rendezvous on loopback.
        spins: Whether threads poll for a moment before they sleep while they wait for replies.
    """

    def __init__(self, rank: int, port: int, spins: bool) -> None:
        """Joins the group, and connects to all others. Returns when that is done.

        Args:
            rank: The rank of this worker, from 0 to `BUSY_WORKERS` minus one.
            port: The port of the rendezvous on loopback.
            spins: Whether threads poll for a moment before they sleep while they wait for replies.

        Raises:
            RendezvousError: The others do not come within `START_LIMIT_S` seconds.
            UsageError: `rank` is not valid.
        """
        rpc = self._rpc = import_farcall()
        where = f"tcp://127.0.0.1:{port}"
        if spins:
            options = rpc.RpcBackendOptions(init_method=where, init_timeout=START_LIMIT_S)
        else:
            options = rpc.RpcBackendOptions(init_method=where, init_timeout=START_LIMIT_S, spin=0.0)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=BUSY_WORKERS, rpc_backend_options=options)
        # Each worker starts with its neighbour, so that not all call the same worker at the same time.
        self._others = [f"worker{(rank + step) % BUSY_WORKERS}" for step in range(1, BUSY_WORKERS)]
        for other in self._others:
            rpc.rpc_sync(other, noop)  # makes the connection now rather than while calls are counted

    def call_all(self, seconds: float) -> int:
        """Calls the other workers in turn for `seconds`, and returns the number of calls. 0 calls none.

        Raises the `RpcError` of a call that fails.
        """
        rpc_sync = self._rpc.rpc_sync
        calls = 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for other in self._others:
                rpc_sync(other, noop)
            calls += len(self._others)
        return calls

    def close(self) -> None:
        """Leaves the group when all workers do.

        Raises `ShutdownError` if other workers are not done within `LEAVE_LIMIT_S` seconds. This worker has left all
        the same.
        """
        self._rpc.shutdown(timeout=LEAVE_LIMIT_S)
