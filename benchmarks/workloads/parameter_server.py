"""A parameter server: trainers send the gradients of each batch, layer by layer, and get their average back.

As in PyTorch's benchmark, a group of N has one master, one server and N - 2 trainers. A trainer computes the gradients
of its batch, sends those of every layer in a call of its own, all at once, waits for the averages, and takes a step
with them. The server adds them up as they come and answers all trainers when the last one's have come; no thread of
its own waits meanwhile.

What is counted
- An update is one step of the model, which all trainers take with the same averages. The rate is by the master's clock,
  from telling the trainers to begin until the last has reported.
- The time of a batch is what it takes a trainer, computing included; beside it, how long of that it waited for the
  averages.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from workloads import computing, sides
from workloads.latency import micros
from workloads.settings import ParameterServing

side = sides.chosen()
rpc = side.rpc


class Server:
    """Averages; lives on the server's worker."""

    def __init__(self, setting: ParameterServing) -> None:
        self._compute = computing.find(setting.computing)
        self._trainers = setting.others
        self._lock = threading.Lock()
        self._sums: dict[int, Any] = {}
        self._waiting: dict[int, list[Any]] = {}

    def add(self, layer: int, gradient: Any) -> Any:
        """A future of the average of all trainers' gradients of this layer."""
        answer = side.Future()
        gradient = self._compute.array(gradient)
        with self._lock:
            waiting = self._waiting.setdefault(layer, [])
            waiting.append(answer)
            if layer in self._sums:
                self._sums[layer] += gradient
            else:
                self._sums[layer] = gradient
            if len(waiting) < self._trainers:
                return answer
            del self._waiting[layer]
            average = self._sums.pop(layer)
        average /= self._trainers
        for each in waiting:
            each.set_result(side.cargo(average))
        return answer


@sides.answers_later
def average(server: Any, layer: int, gradient: Any) -> Any:
    """Runs on the server's worker, for one trainer's call; answered with those of all the others."""
    return server.local_value().add(layer, gradient)


class Trainer:
    """Trains; lives on its own worker."""

    def __init__(self, number: int, setting: ParameterServing) -> None:
        self._compute = computing.find(setting.computing)
        self._model = self._compute.model(setting.width, setting.width, setting.layers)
        self._generator = np.random.default_rng(number)
        self._setting = setting

    def _batch(self) -> tuple[Any, Any]:
        setting, integers = self._setting, self._generator.integers
        words = min(setting.words, setting.width)
        samples = integers(words, size=(setting.samples, setting.sample_length))
        return self._compute.array(samples), self._compute.array(integers(words, size=setting.samples))

    def train(self, server: Any, batches: int) -> tuple[list[float], list[float]]:
        """How long each batch took, and the waiting in it, in seconds. Raises if a call fails."""
        owner = server.owner()
        took = []
        waited = []
        for _ in range(batches):
            samples, targets = self._batch()
            began = time.perf_counter()
            gradients = self._model.gradients(samples, targets)
            computed = time.perf_counter()
            averages = side.wait_all(
                rpc.rpc_async(owner, average, args=(server, layer, side.cargo(gradient)))
                for layer, gradient in enumerate(gradients)
            )
            arrived = time.perf_counter()
            self._model.step([self._compute.array(each) for each in averages])
            took.append(time.perf_counter() - began)
            waited.append(arrived - computed)
        return took, waited


def lead(setting: ParameterServing) -> dict[str, float]:
    """The master's part: everything is made, takes some batches that do not count, and then all that do.

    The result has `updates`, `updates_per_s`, and in µs `batch_p50_us`, `batch_p95_us`, `waiting_p50_us` and
    `waiting_p95_us`. Raises if a call fails.
    """
    server = rpc.remote(setting.name(1), Server, args=(setting,))
    trainers = [
        rpc.remote(setting.name(number + 2), Trainer, args=(number, setting)) for number in range(setting.others)
    ]
    side.wait_all(trainer.rpc_async().train(server, setting.warmup) for trainer in trainers)
    began = time.perf_counter()
    reports = side.wait_all(trainer.rpc_async().train(server, setting.batches) for trainer in trainers)
    elapsed = time.perf_counter() - began
    return {
        "updates": setting.batches,
        "updates_per_s": setting.batches / elapsed,
        **micros("batch", [seconds for took, _ in reports for seconds in took]),
        **micros("waiting", [seconds for _, waited in reports for seconds in waited]),
    }
