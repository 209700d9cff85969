"""Ray: an actor in a local cluster that the caller starts, and object references for what calls give."""

from __future__ import annotations

import os
from typing import Any

from farcall.bench import payloads
from farcall.bench.reference_uses import MAX_SHARED_IN_FLIGHT, NUMBER, check
from farcall.bench.system import SPAWN_LIMIT_S, Address, EchoCaller, FutureCalls, System, Workers, keep_in_flight


class _RayCaller(FutureCalls):
    """The driver of a cluster of its own, with one actor for each worker."""

    def __init__(self, workers: int, directory: str) -> None:
        # Read when ray is imported: no report about the use of it leaves this machine.
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        import ray

        # By value: the workers need not import the module that it is in, and with it farcall.
        class Echo:
            def noop(self) -> None:
                """The callee."""

            def echo(self, payload: Any) -> Any:
                return payload

            def number(self) -> int:
                return NUMBER

        self._ray: Any = ray
        ray.init(
            address="local",  # never somebody's cluster that happens to run here
            num_cpus=workers,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=directory,
        )
        actor: Any = ray.remote(num_cpus=1)(Echo)
        self._actors: list[Any] = [actor.remote() for _ in range(workers)]
        self._first = self._actors[0]

    def noop(self) -> None:
        self._ray.get(self._first.noop.remote())

    def payload(self, size: int) -> Any:
        return payloads.array(size)

    def echo(self, payload: Any) -> Any:
        return self._ray.get(self._first.echo.remote(payload))

    def start(self) -> Any:
        return self._first.noop.remote()

    def finish(self, future: Any) -> None:
        self._ray.get(future)

    def remote_to_here(self) -> None:
        check(self._ray.get(self._first.number.remote()))

    def share(self, references: int) -> None:
        keep_in_flight(references, MAX_SHARED_IN_FLIGHT, self._share_one, lambda reply: check(self._ray.get(reply)))

    def _share_one(self) -> Any:
        # A reference that is an argument is fetched before the callee runs.
        return self._actors[1].echo.remote(self._first.number.remote())

    def call_all(self) -> None:
        self._ray.get([actor.noop.remote() for actor in self._actors])

    def close(self) -> None:
        self._actors.clear()
        self._ray.shutdown()


class Ray(System):
    """Ray on one host."""

    name = "ray"
    label = "Ray"
    package = "ray"
    spawns = True
    start_limit = SPAWN_LIMIT_S
    usage = "an actor in a local cluster, object references; numpy arrays"

    def connect(self, address: Address) -> EchoCaller:
        return _RayCaller(address.ends - 1, address.directory)

    def spawn(self, workers: int, address: Address) -> Workers:
        return _RayCaller(workers, address.directory)
