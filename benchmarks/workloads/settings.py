"""The numbers of one run of a workload. The bench picks them, and all workers of the run have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Setting:
    """What the two workloads have in common: a leader, one worker that all others call, and those others."""

    module: ClassVar[str]
    """The workload's module; it has a function `lead`."""
    roles: ClassVar[tuple[str, str, str]]
    """What the leader, the one in the middle and the others are called."""

    computing: str = "numpy"
    world_size: int = 4
    """Processes in all: two, and the others."""

    @property
    def others(self) -> int:
        """Observers, or trainers."""
        return self.world_size - 2

    def name(self, rank: int) -> str:
        """What the worker of this rank is called."""
        return self.roles[rank] if rank < 2 else f"{self.roles[2]}{rank}"


@dataclass(frozen=True)
class Reinforcement(Setting):
    """Of `reinforcement`; the defaults are those of PyTorch's benchmark, but for its world size."""

    module = "workloads.reinforcement"
    roles = ("coordinator", "agent", "observer")

    batched: bool = False
    episodes: int = 10
    steps: int = 100
    """In each episode, for each observer."""
    state: tuple[int, ...] = (10, 20, 10)
    layers: int = 5
    actions: int = 10


@dataclass(frozen=True)
class ParameterServing(Setting):
    """Of `parameter_server`; the defaults are those of PyTorch's benchmark, but for the number of batches."""

    module = "workloads.parameter_server"
    roles = ("master", "server", "trainer")

    width: int = 1024
    layers: int = 8
    batches: int = 20
    """For each trainer."""
    warmup: int = 3
    """Batches before them that do not count."""
    samples: int = 10
    """In a batch, of `sample_length` words each, of which there are `words`."""
    sample_length: int = 100
    words: int = 100
