"""What the workloads compute, in numpy or in torch: whichever is picked, both sides do the same.

PyTorch's benchmarks compute in torch, and for an action the policy then takes longer than a call does: that says what a
user of torch gains. In numpy the same policy takes a tenth of that, so what is left is the call, which is what these
benchmarks are for. With numpy the workloads also run where there is no torch.
"""

from __future__ import annotations

import importlib
from typing import Any, Final, Protocol

NAMES: Final = ("numpy", "torch")


class Policy(Protocol):
    """What an agent decides by: layers without anything in between, a softmax, and a choice by chance."""

    def choose(self, states: Any) -> list[int]:
        """An action for each of the states, an array with one state in each row; keeps the logarithms of their odds."""

    def forget(self) -> None:
        """Let go of what it has kept: an episode is over."""


class Model(Protocol):
    """What a trainer trains: a bag of embeddings and some linear layers, with a cross entropy at the end."""

    def gradients(self, samples: Any, targets: Any) -> list[Any]:
        """One array for each layer, weights and bias together, for this batch of word numbers (two-dimensional)."""

    def step(self, gradients: list[Any]) -> None:
        """Move the parameters against these gradients."""


class Computing(Protocol):
    """One of the two modules, `in_numpy` and `in_torch`."""

    def array(self, cargo: Any) -> Any:
        """What came from another worker as an array to compute with, with the same memory."""

    def zeros(self, *shape: int) -> Any:
        """An array of float32."""

    def policy(self, features: int, layers: int, actions: int) -> Policy:
        """A new one; the same seed gives every one the same parameters."""

    def model(self, words: int, width: int, layers: int) -> Model:
        """A new one; all trainers begin with the same parameters."""


def find(name: str) -> Computing:
    """The module of this name. Raises ImportError if its package is not there."""
    module: Any = importlib.import_module(f"workloads.in_{name}")
    found: Computing = module
    return found
