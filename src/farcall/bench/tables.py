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
    """A table of text. The first column is left-aligned, the others right-aligned. The shape is not checked.

    Attributes:
        title: The text above the table.
        header: A text for each column.
        rows: The rows, each with a text for each column; may be empty.
        styles: Maps the text of a row's last cell to the style of that row on a terminal: a style of rich, such as
            "yellow". Rows whose last cell is not in it are plain.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    styles: Mapping[str, str] = field(default_factory=dict)
    """Maps the text of a row's last cell to the style of that row on a terminal: a style of rich, such as "yellow"."""

    def markdown(self) -> str:
        """Returns the table as Markdown, under its title in bold. Without rows it has only its header.

        Texts are not escaped: a `|` in a cell breaks the table.
        """
        ruler = [":---", *["---:"] * (len(self.header) - 1)]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.header, ruler, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines])

    def plain(self) -> str:
        """Returns the table as text with aligned columns, under its title. Without rows it has only its header.

        Raises `ValueError` or `IndexError` if a row does not have as many cells as the header.
        """
        rows = [self.header, *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(len(self.header))]
        lines = [
            "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in
                      enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]  # fmt: skip
        return "\n".join([self.title, *lines])


def number(value: float | None, form: str, unit: str = "") -> str:
    """Returns the value formatted by `form`, such as `,.0f`, with `unit` behind it; a dash, `ABSENT`, for None.

    Raises `ValueError` if `form` is not a format of numbers.
    """
    return ABSENT if value is None else format(value, form) + unit


def three_digits(value: float) -> str:
    """Returns a number of 0 or more with about three significant digits: `1,234`, `12.3`, `1.23`, `0.123`.

    0 gives `0.000`. A negative number has three decimals.
    """
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def in_time(seconds: float) -> str:
    """Returns a time with about three digits in a suitable unit: `1.50 s`, `12.3 ms`, `4.56 µs`, `0 ns`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def in_bytes(size: int) -> str:
    """Returns a number of bytes in a suitable unit: `0 B`, `64 B`, `4 KiB`, `1.5 MiB`. Negative numbers are in `B`."""
    for unit, worth in _BYTES:
        if size >= worth:
            return f"{size / worth:g} {unit}"
    return f"{size} B"
