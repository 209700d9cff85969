"""A table of text, as Markdown or for a terminal, and how numbers are written in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

ABSENT: Final = "–"
"""Shown where there is no number."""
_BYTES: Final = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclass(frozen=True)
class TextTable:
    """A table of text. The first column is left-aligned, the others right-aligned.

    `header` has a text for each column, and each of `rows` a text for each column.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    styles: Mapping[str, str] = field(default_factory=dict)
    """How a row looks on a terminal, by the text of its last cell; other rows are plain."""

    def markdown(self) -> str:
        """Returns the table as Markdown, under its title in bold."""
        ruler = [":---", *["---:"] * (len(self.header) - 1)]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.header, ruler, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines])

    def plain(self) -> str:
        """Returns the table as text with aligned columns, under its title."""
        rows = [self.header, *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(self.header))]
        lines = [
            "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in
                      enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]  # fmt: skip
        return "\n".join([self.title, *lines])


def number(value: float | None, form: str, unit: str = "") -> str:
    """Returns the value formatted by `form`, such as `,.0f`, with `unit` behind it; `ABSENT` for None."""
    return ABSENT if value is None else format(value, form) + unit


def three_digits(value: float) -> str:
    """Returns a number of 0 or more with about three significant digits: `1,234`, `12.3`, `0.123`."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def in_time(seconds: float) -> str:
    """Returns a time with about three digits in a suitable unit: `1.50 s`, `12.3 ms`, `4.56 µs`, `789 ns`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def in_bytes(size: int) -> str:
    """Returns a number of bytes in a suitable unit: `0 B`, `64 B`, `4 KiB`, `1.5 MiB`."""
    for unit, worth in _BYTES:
        if size >= worth:
            return f"{size / worth:g} {unit}"
    return f"{size} B"
