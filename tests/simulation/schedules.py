"""Schedules of simulations as text: `make 0; pass 0 1 1; drop 0 1`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Step: TypeAlias = tuple[str | int, ...]
"""Something that happens: a word, and numbers."""


def show(schedule: Iterable[Step]) -> str:
    """Returns a schedule as text, which `parse` reads."""
    return "; ".join(" ".join(map(str, step)) for step in schedule)


def parse(text: str) -> list[Step]:
    """Returns the schedule that a text describes. Raises `ValueError` if it describes none."""
    schedule: list[Step] = []
    for part in filter(None, map(str.split, text.split(";"))):
        schedule.append((part[0], *map(int, part[1:])))
    return schedule
