"""The policy and the model in numpy. See `computing` for what each is."""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

_RATE: Final = np.float32(1e-4)
_SEED: Final = 7


def array(cargo: Any) -> Array:
    """A tensor is taken as it lies in memory."""
    return np.asarray(cargo)


def zeros(*shape: int) -> Array:
    """Of float32."""
    return np.zeros(shape, np.float32)


def _layer(generator: np.random.Generator, inputs: int, outputs: int) -> Array:
    """Weights, with the bias as their last row."""
    bound = inputs**-0.5
    return generator.uniform(-bound, bound, (inputs + 1, outputs)).astype(np.float32)


def _softmax(scores: Array) -> Array:
    odds: Array = np.exp(scores - scores.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    return odds


class _Policy:
    def __init__(self, features: int, layers: int, actions: int) -> None:
        self._generator = np.random.default_rng(_SEED)
        sizes = [features] + [actions] * (layers + 1)
        self._layers = [_layer(self._generator, *ends) for ends in itertools.pairwise(sizes)]
        self._log_odds: list[Array] = []

    def choose(self, states: Array) -> list[int]:
        scores = states.reshape(len(states), -1)
        for layer in self._layers:
            scores = scores @ layer[:-1] + layer[-1]
        odds = _softmax(scores)
        # The first action at which the odds so far exceed a random share; sums may end a little below 1.
        dice = self._generator.random((len(states), 1), np.float32)
        actions = np.minimum((odds.cumsum(axis=1) <= dice).sum(axis=1), odds.shape[1] - 1)
        self._log_odds.append(np.log(odds[np.arange(len(states)), actions]))
        found: list[int] = actions.tolist()
        return found

    def forget(self) -> None:
        self._log_odds.clear()


class _Model:
    def __init__(self, words: int, width: int, layers: int) -> None:
        generator = np.random.default_rng(_SEED)
        self._words = words
        self._embeddings = generator.standard_normal((words, width), np.float32)
        self._layers = [_layer(generator, width, width) for _ in range(layers)]

    def gradients(self, samples: NDArray[np.int64], targets: NDArray[np.int64]) -> list[Array]:
        # How often each word is in each sample: the mean over a bag is then a product, and so is its gradient.
        count = len(samples)
        shares = zeros(count, self._words)
        np.add.at(shares, (np.arange(count)[:, None], samples), np.float32(1 / samples.shape[1]))
        values = [shares @ self._embeddings]
        for layer in self._layers:
            values.append(values[-1] @ layer[:-1] + layer[-1])
        slope = _softmax(values[-1])
        slope[np.arange(count), targets] -= 1
        slope /= count
        found = []
        for layer, value in zip(reversed(self._layers), reversed(values[:-1]), strict=True):
            gradient = np.empty_like(layer)
            np.matmul(value.T, slope, out=gradient[:-1])
            slope.sum(axis=0, out=gradient[-1])
            found.append(gradient)
            slope = slope @ layer[:-1].T
        return [shares.T @ slope, *reversed(found)]

    def step(self, gradients: list[Array]) -> None:
        for parameters, gradient in zip([self._embeddings, *self._layers], gradients, strict=True):
            parameters -= _RATE * gradient


def policy(features: int, layers: int, actions: int) -> _Policy:
    """Of `computing.Policy`."""
    return _Policy(features, layers, actions)


def model(words: int, width: int, layers: int) -> _Model:
    """Of `computing.Model`."""
    return _Model(words, width, layers)
