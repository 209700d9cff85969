"""All turns of a run in their order, each with a look at who else used the machine.

A turn is a title and what measures and records. The order in which systems take their turns rotates from round to
round, so that nothing else that the machine does in those minutes falls on one system alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from farcall.bench.machine import others_cpu_seconds
from farcall.bench.screen import Screen

T = TypeVar("T")
Turn = tuple[str, Callable[[], None]]


def rotated(every: Sequence[T], number: int) -> list[T]:
    """All of them, beginning with another one in each round."""
    first = number % len(every) if every else 0
    return [*every[first:], *every[:first]]


def take(turns: Sequence[Turn], others_percent: list[float], screen: Screen) -> None:
    """Take all turns, showing which one is under way. Raises what a turn raises.

    For each, the share of a core that other programs took meanwhile is appended to `others_percent`.
    """
    with screen.progress(len(turns)) as show:
        for done, (title, turn) in enumerate(turns):
            show(title, done)
            others, start = others_cpu_seconds(), time.perf_counter()
            turn()
            share = (others_cpu_seconds() - others) / (time.perf_counter() - start)
            others_percent.append(100 * share)
        show("measured", len(turns))
