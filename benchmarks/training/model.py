"""What is trained, as in PyTorch's tutorial on distributed RNNs: table and decoder on a server, layers between here.

A step: the words go to the server's embedding table, what comes back through the recurrent layers of the trainer, and
from there to the server's decoder; then a backward pass through all of it, and a step of the optimizers on both.

It imports `torch.distributed` as any program does; `worker` has put farcall in its place before, or has not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer

SERVER = "server"


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batches."""

    words: int
    features: int
    hidden: int
    layers: int
    length: int
    """Words in a sentence."""
    batch: int


class Table(nn.Module):  # type: ignore[misc]  # torch may not be there when types are checked
    """Features of words; lives on the server."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.words, sizes.features)

    def forward(self, words: Any) -> Any:
        return self.embedding(words)


class Decoder(nn.Module):  # type: ignore[misc]
    """Scores of words; lives on the server."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.linear = nn.Linear(sizes.hidden, sizes.words)

    def forward(self, hidden: Any) -> Any:
        return self.linear(hidden)


def _forward(module: Any, inputs: Any) -> Any:
    return module.local_value()(inputs)


def _parameters(module: Any) -> list[Any]:
    return [rpc.RRef(each) for each in module.local_value().parameters()]


class Training:
    """The trainer's part."""

    def __init__(self, sizes: Sizes) -> None:
        torch.manual_seed(7)
        self._sizes = sizes
        self._table = rpc.remote(SERVER, Table, args=(sizes,))
        self._decoder = rpc.remote(SERVER, Decoder, args=(sizes,))
        self._recurrent = nn.LSTM(sizes.features, sizes.hidden, sizes.layers)
        parameters = [rpc.RRef(each) for each in self._recurrent.parameters()]
        for module in (self._table, self._decoder):
            parameters += rpc.rpc_sync(SERVER, _parameters, args=(module,))
        self._optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
        self._loss = nn.CrossEntropyLoss()

    def step(self, words: Any, following: Any) -> tuple[float, float, float]:
        """When the forward pass, the backward pass and the optimizer were through."""
        with dist_autograd.context() as context_id:
            features = rpc.rpc_sync(SERVER, _forward, args=(self._table, words))
            hidden, _ = self._recurrent(features)
            scores = rpc.rpc_sync(SERVER, _forward, args=(self._decoder, hidden))
            loss = self._loss(scores.view(-1, self._sizes.words), following)
            forward = time.perf_counter()
            dist_autograd.backward(context_id, [loss])
            backward = time.perf_counter()
            self._optimizer.step(context_id)
        return forward, backward, time.perf_counter()


class Alone:
    """The same model and the same steps in one process, with torch's own autograd and optimizer: no calls at all."""

    def __init__(self, sizes: Sizes) -> None:
        torch.manual_seed(7)
        self._sizes = sizes
        self._table, self._decoder = Table(sizes), Decoder(sizes)
        self._recurrent = nn.LSTM(sizes.features, sizes.hidden, sizes.layers)
        modules = (self._recurrent, self._table, self._decoder)
        self._optimizer = torch.optim.SGD([each for module in modules for each in module.parameters()], lr=0.05)
        self._loss = nn.CrossEntropyLoss()

    def step(self, words: Any, following: Any) -> tuple[float, float, float]:
        """As that of `Training`."""
        hidden, _ = self._recurrent(self._table(words))
        loss = self._loss(self._decoder(hidden).view(-1, self._sizes.words), following)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return forward, backward, time.perf_counter()


def time_steps(model: Training | Alone, sizes: Sizes, steps: int) -> dict[str, list[float]]:
    """Seconds of each step and of its three parts. Raises if a call fails."""
    times: dict[str, list[float]] = {"step": [], "forward": [], "backward": [], "optimizer": []}
    for _ in range(steps):
        words = torch.randint(sizes.words, (sizes.length, sizes.batch))
        following = torch.randint(sizes.words, (sizes.length * sizes.batch,))
        began = time.perf_counter()
        forward, backward, ended = model.step(words, following)
        times["step"].append(ended - began)
        times["forward"].append(forward - began)
        times["backward"].append(backward - forward)
        times["optimizer"].append(ended - backward)
    return times


def _double(tensor: Any) -> Any:
    return tensor * 2


def time_pairs(times: int) -> dict[str, list[float]]:
    """Seconds of one call with a small tensor: alone, in a context, and its backward pass. Raises if a call fails.

    In a context, a call is a pair of send and receive functions on its way there, and another one on its way back; the
    backward pass goes through both.
    """
    found: dict[str, list[float]] = {"call": [], "call in context": [], "backward": [], "context": []}
    tensor = torch.ones(4)
    watched = torch.ones(4, requires_grad=True)
    for _ in range(times):
        began = time.perf_counter()
        rpc.rpc_sync(SERVER, _double, args=(tensor,))
        found["call"].append(time.perf_counter() - began)
        entered = time.perf_counter()
        with dist_autograd.context() as context_id:
            began = time.perf_counter()
            result = rpc.rpc_sync(SERVER, _double, args=(watched,))
            called = time.perf_counter()
            total = result.sum()
            summed = time.perf_counter()
            dist_autograd.backward(context_id, [total])
            ended = time.perf_counter()
        found["call in context"].append(called - began)
        found["backward"].append(ended - summed)
        found["context"].append(time.perf_counter() - entered - (ended - began))
    return found
