"""A table of text, as Markdown or for a screen, and how numbers stand in it.

A table is built once and rendered twice: on a screen by `screen`, in a document by `markdown`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

ABSENT: Final = "–"
"""Stands where there is no number."""
_BYTES: Final = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclass(frozen=True)
class TextTable:
    """A table of text. The first column is set left, the others right."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    styles: Mapping[str, str] = field(default_factory=dict)
    """How a row looks on a screen, by its last cell; others look as usual."""

    def markdown(self) -> str:
        """The table as Markdown, under its title."""
        ruler = [":---", *["---:"] * (len(self.header) - 1)]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.header, ruler, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines])

    def plain(self) -> str:
        """The table as text whose columns stand below each other, under its title."""
        rows = [self.header, *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(self.header))]
        lines = [
            "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in
                      enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]  # fmt: skip
        return "\n".join([self.title, *lines])


def number(value: float | None, form: str, unit: str = "") -> str:
    """The value in this format, with its unit; `ABSENT` if there is none."""
    return ABSENT if value is None else format(value, form) + unit


def three_digits(value: float) -> str:
    """The value with about three digits that count: 1,234 and 12.3 and 0.123."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def in_time(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def in_bytes(size: int) -> str:
    """A number of bytes in the unit that suits it: 64 B, 4 KiB, 1.5 MiB."""
    for unit, worth in _BYTES:
        if size >= worth:
            return f"{size / worth:g} {unit}"
    return f"{size} B"
