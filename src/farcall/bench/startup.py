"""Measures how long it takes until N workers can be used: from the command to the last reply to a no-op call on each.

The process that starts them is running, and has imported the system's package. Each worker is a process of its own,
started the way of its system:

- a system that starts workers by itself (Ray, Dask, Xoscar, Monarch) is told to;
- of a system whose workers form a group (farcall, torch), processes are started, and all join, the starter too;
- of a system with servers (RPyC, Pyro5, gRPC), servers are started, and each is connected to.

So the time includes starting Python and importing the package in each worker, for which users wait as well.

`Joiner` answers another question: how long a group takes to form whose processes are all running (`make
bench-startup`).
"""

from __future__ import annotations

import time

from farcall.bench.processes import Endpoints
from farcall.bench.system import Address, Caller, System, Workers


class Starter:
    """Starts the workers of a system once, and measures how long that takes.

    Use: create it, call `start` once, then `close`.

    Args:
        system: The system, whose package is imported at once.
    """

    def __init__(self, system: System) -> None:
        """Imports the system's package, so that this does not count. Raises `ImportError` if it is not installed."""
        system.load()
        self._system = system
        self._endpoints = Endpoints()
        self._workers: Workers | None = None
        self._callers: list[Caller] = []

    def start(self, workers: int) -> float:
        """Starts `workers` workers, calls a no-op on each, and returns the seconds that it took.

        Must be called only once, which is not checked.

        Args:
            workers: How many workers to start, at least 1.

        Raises:
            EndpointFailed: A process cannot be started, or not in time.
            Exception: What the measured library raises if its workers do not start.
        """
        began = time.perf_counter()
        address = self._endpoints.address(workers + 1)
        if self._system.spawns:
            self._workers = self._system.spawn(workers, address)
            self._workers.call_all()
        elif self._system.starts_together:
            members = [
                self._endpoints.start(
                    f"worker {rank} of {self._system.label}",
                    kind="member",
                    system=self._system,
                    rank=rank,
                    address=address,
                )
                for rank in range(1, workers + 1)
            ]
            self._workers = self._system.member(0, address)
            self._workers.call_all()
            # The messages that they are up are read now; otherwise they would be taken for later answers.
            seconds = time.perf_counter() - began
            self._endpoints.wait_until_up(*members)
            return seconds
        else:
            self._start_servers(workers)
        return time.perf_counter() - began

    def _start_servers(self, workers: int) -> None:
        """Starts `workers` servers, connects to each and calls a no-op on each. 0 does nothing.

        Raises `EndpointFailed` if a server cannot be started, and what the measured library raises if it cannot connect
        or call.
        """
        addresses = [self._endpoints.address(2) for _ in range(workers)]
        servers = [
            self._endpoints.start(
                f"server {number} of {self._system.label}", kind="server", system=self._system, address=address
            )
            for number, address in enumerate(addresses)
        ]
        for server, address in zip(servers, addresses, strict=True):
            self._endpoints.wait_until_up(server)
            self._callers.append(self._system.connect(address))
        for caller in self._callers:
            caller.noop()

    def close(self) -> None:
        """Ends all workers, in bounded time. May be called without a call of `start`.

        Raises `EndpointFailed` if a process does not carry out the command "stop", and what the measured library raises
        if it cannot close or leave.
        """
        for caller in self._callers:
            caller.close()
        try:
            if self._system.starts_together:
                # The members of a group leave together, so the other processes are told before this one leaves.
                self._endpoints.send_stop()
            if self._workers is not None:
                self._workers.close()
        finally:
            self._endpoints.__exit__(None, None, None)


class Joiner:
    """A process that joins a group when it is told, and measures how long that takes.

    Use: create it, call `join`, then `leave`.

    Args:
        system: The system whose workers form a group. Its package is imported at once.
    """

    def __init__(self, system: System) -> None:
        """Imports the system's package, so that this does not count. Raises `ImportError` if it is not installed."""
        system.load()
        self._system = system
        self._group: Workers | None = None

    def join(self, rank: int, address: Address) -> tuple[float, float, float]:
        """Joins the group as worker `rank` at `address`, and calls a no-op on all other workers.

        Returns:
            The times of the start, of having joined and of the last reply, in seconds of `time.monotonic`, whose clock
            all processes of a host share.

        Raises:
            NotImplementedError: The workers of the system form no groups.
            Exception: What the measured library raises if the group does not form or a call fails; `RpcError` for
                farcall.
        """
        began = time.monotonic()
        self._group = self._system.member(rank, address)
        joined = time.monotonic()
        self._group.call_all()
        return began, joined, time.monotonic()

    def leave(self) -> float:
        """Leaves the group, and returns the seconds that it took; about 0 if `join` was not called.

        Raises what the measured library raises if that fails; `ShutdownError` for farcall.
        """
        began = time.monotonic()
        if self._group is not None:
            self._group.close()
        return time.monotonic() - began
