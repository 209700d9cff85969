"""Which clients there are, and which programs show that they work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PROGRAMS: Final = Path(__file__).parent / "programs"
"""The directory of our own programs."""


@dataclass(frozen=True)
class Program:
    """One program: a command for `python`, run once, or once for each rank of a group."""

    name: str
    command: Sequence[str]
    """What follows `python`; a script is a path."""
    ranks: int = 0
    """The number of processes that are started with torchrun's environment; 0 for a program that starts its own."""
    time_limit_s: float = 300.0


@dataclass(frozen=True)
class Client:
    """A package from the package index, and the programs that use it."""

    name: str
    requirement: str
    """What pip is told to install."""
    module: str
    """What a program imports."""
    programs: Sequence[Program] = field(default_factory=tuple)


def _ours(file: str, *arguments: str, ranks: int = 0) -> Program:
    name = " ".join((file.removesuffix(".py").partition("_")[2].replace("_", " "), *arguments))
    return Program(name, (str(PROGRAMS / file), *arguments), ranks)


CLIENTS: Final = (
    Client(
        "torchrl",
        "torchrl",
        "torchrl",
        (
            _ours("torchrl_replay_buffer.py", ranks=4),
            _ours("torchrl_collectors.py", "sync"),
            _ours("torchrl_collectors.py", "async"),
        ),
    ),
    Client(
        "torch_geometric",
        "torch_geometric",
        "torch_geometric",
        (_ours("pyg_feature_store.py", ranks=2),),
    ),
    Client("torchopt", "torchopt", "torchopt", (_ours("torchopt_parallelize.py", ranks=2),)),
    Client("fairscale", "fairscale", "fairscale", (_ours("fairscale_pipeline.py", ranks=2),)),
    Client("machin", "machin moviepy<2", "machin", (_ours("machin_world.py"),)),
    Client(
        "torch",
        "torch==2.13.0",
        "torch",
        (
            _ours("torch_parameter_server.py", ranks=3),
            _ours("torch_pipeline.py", ranks=3),
            _ours("torch_actor_critic.py"),
        ),
    ),
)
