"""The terminal: tables and a progress bar by rich where it is installed, as plain lines where it is not.

Results go to standard output, everything else to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from farcall.bench.tables import TextTable


class Screen:
    """Where a run shows what it does and what it has found."""

    def __init__(self) -> None:
        self._out: Any = None
        self._notes: Any = None
        try:
            from rich.console import Console
        except ImportError:
            return
        self._out, self._notes = Console(), Console(stderr=True)

    def table(self, table: TextTable) -> None:
        """Show a table."""
        if self._out is None:
            print(table.plain(), end="\n\n")
            return
        from rich.table import Table

        shown = Table()
        for position, name in enumerate(table.header):
            shown.add_column(name, justify="right" if position else "left")
        for row in table.rows:
            shown.add_row(*row, style=table.styles.get(row[-1]))
        # Above the table, not as its title: rich would break it to the width of the table.
        self._out.print(table.title, markup=False, style="italic", highlight=False)
        self._out.print(shown)

    def line(self, text: str) -> None:
        """Show a line with the results."""
        if self._out is None:
            print(text)
        else:
            self._out.print(text, markup=False)

    def note(self, text: str, style: str = "") -> None:
        """Say something that is no result."""
        if self._notes is None:
            print(text, file=sys.stderr)
        else:
            self._notes.print(text, markup=False, style=style or None)

    @contextmanager
    def progress(self, total: int) -> Iterator[Callable[[str, int], None]]:
        """A bar for so many steps. What it gives is told what is under way, and how many steps are done."""
        if self._notes is None:
            yield lambda what, done: print(f"[{done}/{total}] {what}", file=sys.stderr)
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # No automatic refresh: a thread that draws ten times a second would be inside every measurement.
        with Progress(*columns, console=self._notes, auto_refresh=False) as bar:
            task = bar.add_task("", total=total)
            yield lambda what, done: bar.update(task, description=what, completed=done, refresh=True)
