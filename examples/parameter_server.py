"""A parameter server that waits for a gradient of every trainer before it takes a step.

    farcall run -n 4 examples/parameter_server.py

The worker with rank 0 is the server, all others are trainers; any number of them will do. The server's object is kept
there by `keep`, and the trainers get a reference to it. `push` is an `async def` method, so the trainers wait but no
thread of the server does. All pushes run in one event loop, so the object needs no lock. The last trainer of a round
brings the gradient that completes it, and settles the future for all.
"""

from __future__ import annotations

import asyncio
import random

import farcall

Vector = list[float]

TRUE_WEIGHTS = [1.5, -2.0, 0.5]
ROUNDS = 60


class ParameterServer:
    """The weights, and the gradients of the round that is under way."""

    def __init__(self, trainers: int, rate: float) -> None:
        self._trainers = trainers
        self._rate = rate
        self._weights = [0.0] * len(TRUE_WEIGHTS)
        self._gradients: list[Vector] = []
        self._stepped: asyncio.Future[Vector] | None = None

    async def pull(self) -> Vector:
        """Returns the weights."""
        return self._weights

    async def push(self, gradient: Vector) -> Vector:
        """Returns the weights after this round."""
        if self._stepped is None:
            self._stepped = asyncio.get_running_loop().create_future()
        stepped = self._stepped
        self._gradients.append(gradient)
        if len(self._gradients) == self._trainers:
            means = [sum(parts) / len(parts) for parts in zip(*self._gradients, strict=True)]
            self._weights = [weight - self._rate * mean for weight, mean in zip(self._weights, means, strict=True)]
            self._gradients, self._stepped = [], None
            stepped.set_result(self._weights)
        return await asyncio.shield(stepped)  # the trainers share it: if one of them goes, the others still wait


def train(server: farcall.RRef[ParameterServer], seed: int) -> float:
    """Runs in each trainer; returns its mean squared error at the end."""
    chance = random.Random(seed)
    inputs = [[chance.uniform(-1, 1) for _ in TRUE_WEIGHTS] for _ in range(100)]
    points = [(values, dot(TRUE_WEIGHTS, values)) for values in inputs]
    weights = server.call(ParameterServer.pull)
    for _ in range(ROUNDS):
        gradient = [0.0] * len(weights)
        for values, wanted in points:
            miss = dot(weights, values) - wanted
            gradient = [part + miss * value / len(points) for part, value in zip(gradient, values, strict=True)]
        weights = server.call(ParameterServer.push, gradient)
    return sum((dot(weights, values) - wanted) ** 2 for values, wanted in points) / len(points)


def dot(left: Vector, right: Vector) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def main() -> None:
    with farcall.Group() as group:
        if group.info.id == 0:
            trainers = farcall.workers(others=True).options(timeout=None)  # a training may take days
            if not len(trainers):
                raise SystemExit("one server and no trainer: start at least two workers, farcall run -n 2 ...")
            server = farcall.worker().keep(ParameterServer, len(trainers), rate=0.5)
            jobs = {trainer.name: trainer.submit(train, server, seed) for seed, trainer in enumerate(trainers)}
            for name, error in farcall.Futures(jobs).result().items():
                print(f"{name}: mean squared error {error:.1e} after {ROUNDS} rounds")


if __name__ == "__main__":
    main()
