"""Dask: an actor in a local cluster of processes that the caller starts, and futures for what is submitted."""

from __future__ import annotations

from typing import Any

from farcall.bench import payloads
from farcall.bench.reference_uses import MAX_SHARED_IN_FLIGHT, check, number
from farcall.bench.system import (
    SPAWN_LIMIT_S,
    START_LIMIT_S,
    Address,
    EchoCaller,
    FutureCalls,
    System,
    Workers,
    keep_in_flight,
)


def same(value: Any) -> Any:
    """What the third worker does with a reference: one use."""
    return value


class _DaskCaller(FutureCalls):
    """The client of a cluster of its own, with one actor on each worker."""

    def __init__(self, workers: int, directory: str) -> None:
        import distributed

        # By value: the workers need not import the module that it is in, and with it farcall.
        class Echo:
            def noop(self) -> None:
                """The callee."""

            def echo(self, payload: Any) -> Any:
                return payload

        dask: Any = distributed
        self._cluster: Any = dask.LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address=None,
            local_directory=directory,
        )
        self._client: Any = dask.Client(self._cluster, timeout=START_LIMIT_S)
        self._client.wait_for_workers(workers, timeout=START_LIMIT_S)
        self._workers = sorted(self._client.scheduler_info(n_workers=-1)["workers"])
        # The futures are kept: an actor lives as long as its future.
        self._futures = [
            self._client.submit(Echo, actor=True, workers=[worker], pure=False) for worker in self._workers
        ]
        self._actors: list[Any] = [future.result() for future in self._futures]
        self._first = self._actors[0]

    def noop(self) -> None:
        self._first.noop().result()

    def payload(self, size: int) -> Any:
        return payloads.array(size)

    def echo(self, payload: Any) -> Any:
        return self._first.echo(payload).result()

    def start(self) -> Any:
        return self._first.noop()

    def finish(self, future: Any) -> None:
        future.result()

    def remote_to_here(self) -> None:
        check(self._make().result())

    def share(self, references: int) -> None:
        keep_in_flight(references, MAX_SHARED_IN_FLIGHT, self._share_one, lambda future: check(future.result()))

    def _share_one(self) -> Any:
        return self._client.submit(same, self._make(), workers=[self._workers[1]], pure=False)

    def _make(self) -> Any:
        return self._client.submit(number, workers=[self._workers[0]], pure=False)

    def call_all(self) -> None:
        for reply in [actor.noop() for actor in self._actors]:
            reply.result()

    def close(self) -> None:
        self._futures.clear()
        self._client.close()
        self._cluster.close()


class Dask(System):
    """Dask's distributed on one host."""

    name = "dask"
    label = "Dask"
    package = "distributed"
    spawns = True
    start_limit = SPAWN_LIMIT_S
    usage = "an actor in a `LocalCluster` of processes, futures; numpy arrays"

    def connect(self, address: Address) -> EchoCaller:
        return _DaskCaller(address.ends - 1, address.directory)

    def spawn(self, workers: int, address: Address) -> Workers:
        return _DaskCaller(workers, address.directory)
