"""A parameter server that waits for a gradient of every trainer before it takes a step.

    farcall run -n 4 examples/parameter_server.py

The worker with rank 0 is the server, all others are trainers; any number of them will do. `push` returns a future that
is not done yet, so the trainers wait but no thread of the server does: that is what `async_execution` is for. The last
trainer of a round brings the gradient that completes it, and settles the future for all.
"""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import farcall as rpc

Vector = list[float]

TRUE_WEIGHTS = [1.5, -2.0, 0.5]
RATE = 0.5
ROUNDS = 60
SERVER = "worker0"


class Server:
    """The weights, and the gradients of the round that is under way."""

    def __init__(self, trainers: int) -> None:
        self._trainers = trainers
        self._lock = threading.Lock()
        self._weights = [0.0] * len(TRUE_WEIGHTS)
        self._gradients: list[Vector] = []
        self._stepped: rpc.Future[Vector] = rpc.Future()

    def add(self, gradient: Vector) -> rpc.Future[Vector]:
        """A future for the weights after this round."""
        with self._lock:
            self._gradients.append(gradient)
            stepped = self._stepped
            if len(self._gradients) < self._trainers:
                return stepped
            means = [sum(parts) / len(parts) for parts in zip(*self._gradients, strict=True)]
            self._weights = [weight - RATE * mean for weight, mean in zip(self._weights, means, strict=True)]
            weights = self._weights
            self._gradients = []
            self._stepped = rpc.Future()
        stepped.set_result(weights)  # outside the lock: this answers the other trainers
        return stepped


server: Server | None = None  # there is one in the process of rank 0 only


@rpc.functions.async_execution
def push(gradient: Vector) -> rpc.Future[Vector]:
    """What trainers call. They get the weights once the round is complete."""
    assert server is not None
    return server.add(gradient)


def train(seed: int) -> float:
    """Runs in each trainer; gives its mean squared error at the end."""
    chance = random.Random(seed)
    inputs = [[chance.uniform(-1, 1) for _ in TRUE_WEIGHTS] for _ in range(100)]
    points = [(values, dot(TRUE_WEIGHTS, values)) for values in inputs]
    weights: Vector = [0.0] * len(TRUE_WEIGHTS)
    for _ in range(ROUNDS):
        gradient = [0.0] * len(weights)
        for values, wanted in points:
            miss = dot(weights, values) - wanted
            gradient = [part + miss * value / len(points) for part, value in zip(gradient, values, strict=True)]
        stepped: Any = rpc.rpc_sync(SERVER, push, args=(gradient,))  # what the future is settled with
        weights = stepped
    return sum((dot(weights, values) - wanted) ** 2 for values, wanted in points) / len(points)


def dot(left: Vector, right: Vector) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def main() -> None:
    global server
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size < 2:
        raise SystemExit("one server and no trainer: start at least two workers, farcall run -n 2 ...")
    if rank == 0:
        server = Server(trainers=world_size - 1)  # before init_rpc: from then on it may be called
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        futures = [rpc.rpc_async(trainer, train, args=(trainer,)) for trainer in range(1, world_size)]
        for trainer, error in enumerate(rpc.wait_all(futures), start=1):
            print(f"worker{trainer}: mean squared error {error:.1e} after {ROUNDS} rounds")
    rpc.shutdown()


if __name__ == "__main__":
    main()
