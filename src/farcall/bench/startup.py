"""How long it takes until so many workers can be used: from the first word to the last reply of a no-op on each.

The process that starts them is up and has imported the system's package. Each worker is a process of its own, started
the way of its system:

- a system that starts workers by itself (Ray, Dask, Xoscar, Monarch) is told to;
- of one whose workers meet as a group (farcall, torch), processes are started, and all join, the starter too;
- of one with servers (RPyC, Pyro5, gRPC), the servers are started, and each is connected to.

So it includes what starting a Python process and importing the package cost in each worker: users wait for that too.

`Joiner` is for the other question, how long a group takes to meet whose processes are all up (`make bench-startup`).
"""

from __future__ import annotations

import time

from farcall.bench.processes import Endpoints
from farcall.bench.systems import Address, Caller, System, Workers


class Starter:
    """Starts workers, once. Raises ImportError if the system's package is not there."""

    def __init__(self, system: System) -> None:
        system.load()
        self._system = system
        self._endpoints = Endpoints()
        self._workers: Workers | None = None
        self._callers: list[Caller] = []

    def start(self, workers: int) -> float:
        """Start so many and call each; the seconds that it took. Raises what the system raises, and EndpointFailed."""
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
                    system=self._system.name,
                    rank=rank,
                    address=address,
                )
                for rank in range(1, workers + 1)
            ]
            self._workers = self._system.member(0, address)
            self._workers.call_all()
            # Their word that they are up is heard now: it comes in between otherwise.
            seconds = time.perf_counter() - began
            self._endpoints.wait_until_up(*members)
            return seconds
        else:
            self._start_servers(workers)
        return time.perf_counter() - began

    def _start_servers(self, workers: int) -> None:
        addresses = [self._endpoints.address(2) for _ in range(workers)]
        servers = [
            self._endpoints.start(
                f"server {number} of {self._system.label}", kind="server", system=self._system.name, address=address
            )
            for number, address in enumerate(addresses)
        ]
        for server, address in zip(servers, addresses, strict=True):
            self._endpoints.wait_until_up(server)
            self._callers.append(self._system.connect(address))
        for caller in self._callers:
            caller.noop()

    def close(self) -> None:
        """End all of them; returns in bounded time."""
        for caller in self._callers:
            caller.close()
        try:
            if self._system.starts_together:
                # A group's members leave together: those of the other processes are told before we wait for them.
                self._endpoints.tell_to_stop()
            if self._workers is not None:
                self._workers.close()
        finally:
            self._endpoints.__exit__(None, None, None)


class Joiner:
    """A process that will join a group, and has imported what it needs. Raises ImportError if it cannot."""

    def __init__(self, system: System) -> None:
        system.load()
        self._system = system
        self._group: Workers | None = None

    def join(self, rank: int, address: Address) -> tuple[float, float, float]:
        """Join and call all others; when it began, had joined and had all replies, by the clock that processes share.

        Raises what the system raises.
        """
        began = time.monotonic()
        self._group = self._system.member(rank, address)
        joined = time.monotonic()
        self._group.call_all()
        return began, joined, time.monotonic()

    def leave(self) -> float:
        """Leave in order; the seconds that it took. Raises what the system raises."""
        began = time.monotonic()
        if self._group is not None:
            self._group.close()
        return time.monotonic() - began
