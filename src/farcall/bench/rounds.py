"""Runs all turns of a run in order, and measures how much other programs use the machine meanwhile.

A turn is a title and a function that measures and records. The order of the systems rotates from round to round, so
that anything else that the machine does does not always affect the same system.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from farcall.bench.machine import others_cpu_seconds
from farcall.bench.screen import Screen

T = TypeVar("T")
Turn = tuple[str, Callable[[], None]]
"""One part of one system to measure: a title, for the progress display, and a function that measures and records."""


def rotated(every: Sequence[T], number: int) -> list[T]:
    """Returns all elements of `every` in their order, but beginning with the one at index `number` modulo their count.

    The elements before it follow at the end: `rotated("abc", 1)` is `["b", "c", "a"]`. Returns an empty list for an
    empty sequence.
    """
    first = number % len(every) if every else 0
    return [*every[first:], *every[:first]]


def take_turns(turns: Sequence[Turn], others_percent: list[float], screen: Screen) -> None:
    """Runs all turns in order, and shows which one is running. For no turns it only shows that all is measured.

    Args:
        turns: The turns, each a title and a function that measures and records.
        others_percent: For each turn, the percentage of a core that other programs used is appended here.
        screen: Where progress is shown.

    Raises:
        BaseException: What a turn raises. The turns after it are not run.
        OSError: There is no /proc: the system is not Linux.
    """
    with screen.progress(len(turns)) as show:
        for done, (title, turn) in enumerate(turns):
            show(title, done)
            others, start = others_cpu_seconds(), time.perf_counter()
            turn()
            share = (others_cpu_seconds() - others) / (time.perf_counter() - start)
            others_percent.append(100 * share)
        show("measured", len(turns))
