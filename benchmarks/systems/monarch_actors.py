"""Monarch: an actor in a process of this host that the caller starts."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from farcall.bench import payloads
from farcall.bench.system import (
    FETCHED,
    SHARED,
    SPAWN_LIMIT_S,
    START_LIMIT_S,
    Address,
    EchoCaller,
    FutureCalls,
    System,
    Workers,
)


class _MonarchCaller(FutureCalls):
    """The client of a mesh of processes, with one actor in each."""

    def __init__(self, workers: int) -> None:
        from monarch.actor import Actor, endpoint, this_host

        class Echo(Actor):  # type: ignore[misc,unused-ignore]  # where monarch is not installed, it has no types
            @endpoint  # type: ignore[untyped-decorator,unused-ignore]
            def noop(self) -> None:
                """The callee."""

            @endpoint  # type: ignore[untyped-decorator,unused-ignore]
            def echo(self, payload: Any) -> Any:
                return payload

        self._mesh: Any = this_host().spawn_procs(per_host={"procs": workers})
        self._actors: Any = self._mesh.spawn("echo", Echo)
        first: Any = self._actors.slice(procs=0)
        self._noop: Any = first.noop
        self._echo: Any = first.echo

    def noop(self) -> None:
        self._noop.call_one().get()

    def payload(self, size: int) -> Any:
        return payloads.array(size)

    def echo(self, payload: Any) -> Any:
        return self._echo.call_one(payload).get()

    def start(self) -> Any:
        return self._noop.call_one()

    def finish(self, future: Any) -> None:
        future.get()

    def call_all(self) -> None:
        self._actors.noop.call().get(timeout=START_LIMIT_S)

    def close(self) -> None:
        from monarch.actor import shutdown_context

        self._mesh.stop().get()
        shutdown_context().get()


class Monarch(System):
    """Monarch on one host."""

    name = "monarch"
    label = "Monarch"
    package = "monarch"
    distribution = "torchmonarch"
    spawns = True
    start_limit = SPAWN_LIMIT_S
    usage = "an actor in a mesh of processes, futures; numpy arrays"
    cannot = MappingProxyType(
        dict.fromkeys((FETCHED, SHARED), "references of Monarch are to actors, not to what a call gives")
    )

    def connect(self, address: Address) -> EchoCaller:
        return _MonarchCaller(address.ends - 1)

    def spawn(self, workers: int, address: Address) -> Workers:
        return _MonarchCaller(workers)
