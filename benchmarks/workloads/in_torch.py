"""The policy and the model as torch's users write them, with autograd. See `computing` for what each is."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

_RATE: Final = 1e-4
_SEED: Final = 7

torch.set_num_threads(1)


def array(cargo: Any) -> Any:
    """A numpy array is taken as it lies in memory."""
    return torch.as_tensor(cargo)


def zeros(*shape: int) -> Any:
    """Of float32."""
    return torch.zeros(*shape)


class _Policy:
    def __init__(self, features: int, layers: int, actions: int) -> None:
        torch.manual_seed(_SEED)
        further = [nn.Linear(actions, actions) for _ in range(layers)]
        self._layers = nn.Sequential(nn.Flatten(1), nn.Linear(features, actions), *further)
        self._log_odds: list[Any] = []

    def choose(self, states: Any) -> list[int]:
        odds = torch.softmax(self._layers(states), dim=1)
        choice = torch.distributions.Categorical(odds)
        actions = choice.sample()
        self._log_odds.append(choice.log_prob(actions))
        found: list[int] = actions.tolist()
        return found

    def forget(self) -> None:
        self._log_odds.clear()


class _Model:
    def __init__(self, words: int, width: int, layers: int) -> None:
        torch.manual_seed(_SEED)
        self._layers = nn.Sequential(nn.EmbeddingBag(words, width), *[nn.Linear(width, width) for _ in range(layers)])
        self._loss = nn.CrossEntropyLoss()
        self._optimizer = torch.optim.SGD(self._layers.parameters(), _RATE)

    def gradients(self, samples: Any, targets: Any) -> list[Any]:
        self._optimizer.zero_grad()
        self._loss(self._layers(samples), targets).backward()
        return [torch.cat([each.grad.flatten() for each in layer.parameters()]) for layer in self._layers]

    def step(self, gradients: list[Any]) -> None:
        for layer, gradient in zip(self._layers, gradients, strict=True):
            parameters = list(layer.parameters())
            for parameter, part in zip(parameters, gradient.split([each.numel() for each in parameters]), strict=True):
                parameter.grad = part.view_as(parameter)
        self._optimizer.step()


def policy(features: int, layers: int, actions: int) -> _Policy:
    """Of `computing.Policy`."""
    return _Policy(features, layers, actions)


def model(words: int, width: int, layers: int) -> _Model:
    """Of `computing.Model`."""
    return _Model(words, width, layers)
