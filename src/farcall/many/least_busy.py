"""`least_busy`: which of several workers gets the next call of `any()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import TypeVar

T = TypeVar("T")

_turns = count()


def least_busy(candidates: Sequence[T], calls_pending: Callable[[T], int]) -> T:
    """Returns the candidate with the fewest pending calls; of several such candidates, each in its turn.

    Args:
        candidates: The candidates, such as workers. `ValueError` is raised if there are none.
        calls_pending: Returns the number of pending calls of a candidate.
    """
    pending = [calls_pending(each) for each in candidates]
    fewest = min(pending)
    idle = [each for each, number in zip(candidates, pending, strict=True) if number == fewest]
    return idle[next(_turns) % len(idle)]
