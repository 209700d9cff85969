"""Xoscar: an actor in a process of a local pool that the caller starts. Its users write coroutines."""

from __future__ import annotations

from collections.abc import Coroutine
from types import MappingProxyType
from typing import Any, TypeVar

from farcall.bench import payloads
from farcall.bench.system import FETCHED, SHARED, SPAWN_LIMIT_S, Address, EchoCaller, System, Workers

T = TypeVar("T")


class _XoscarCaller:
    """The main process of a pool, with one actor in each of its other processes."""

    def __init__(self, workers: int) -> None:
        import asyncio

        self._asyncio: Any = asyncio
        self._loop = asyncio.new_event_loop()
        self._pool: Any = None
        self._actors: list[Any] = []
        self.run(self._start(workers))

    async def _start(self, workers: int) -> None:
        import xoscar
        from xoscar.backends.allocate_strategy import ProcessIndex

        class Echo(xoscar.StatelessActor):  # type: ignore[misc,unused-ignore]  # xoscar has no types
            def noop(self) -> None:
                """The callee."""

            def echo(self, payload: Any) -> Any:
                return payload

        self._pool = await xoscar.create_actor_pool("127.0.0.1:0", n_process=workers)
        for index in range(1, workers + 1):
            self._actors.append(
                await xoscar.create_actor(
                    Echo, address=self._pool.external_address, uid=f"echo{index}", allocate_strategy=ProcessIndex(index)
                )
            )

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(coroutine)

    async def await_noop(self) -> None:
        await self._actors[0].noop()

    async def await_echo(self, payload: Any) -> Any:
        return await self._actors[0].echo(payload)

    def noop(self) -> None:
        self.run(self.await_noop())

    def payload(self, size: int) -> Any:
        return payloads.array(size)

    def echo(self, payload: Any) -> Any:
        return self.run(self.await_echo(payload))

    def in_flight(self, calls: int, window: int) -> None:
        self.run(self._in_flight(calls, window))

    async def _in_flight(self, calls: int, window: int) -> None:
        rest = iter(range(calls))

        async def one_after_another() -> None:
            for _ in rest:
                await self.await_noop()

        await self._asyncio.gather(*(one_after_another() for _ in range(window)))

    def pipelined(self, calls: int) -> None:
        self.in_flight(calls, calls)

    def call_all(self) -> None:
        self.run(self._call_all())

    async def _call_all(self) -> None:
        await self._asyncio.gather(*(actor.noop() for actor in self._actors))

    def close(self) -> None:
        self.run(self._pool.stop())
        self._loop.close()


class Xoscar(System):
    """Xoscar on one host."""

    name = "xoscar"
    label = "Xoscar"
    package = "xoscar"
    spawns = True
    start_limit = SPAWN_LIMIT_S
    usage = "an actor in a pool of processes, coroutines; numpy arrays"
    cannot = MappingProxyType(
        dict.fromkeys((FETCHED, SHARED), "references of Xoscar are to actors, not to what a call gives")
    )

    def connect(self, address: Address) -> EchoCaller:
        return _XoscarCaller(address.ends - 1)

    def spawn(self, workers: int, address: Address) -> Workers:
        return _XoscarCaller(workers)
