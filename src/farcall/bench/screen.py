"""The terminal: tables and a progress bar with rich if it is installed, otherwise plain lines.

Results go to standard output, everything else to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from farcall.bench.tables import TextTable


class Screen:
    """Prints the progress and the results of a run to the terminal.

    Uses the package rich if it is installed; otherwise prints plain text. Results go to standard output, everything
    else to standard error.
    """

    def __init__(self) -> None:
        """Looks whether rich is installed. Prints nothing."""
        self._out: Any = None
        self._notes: Any = None
        try:
            from rich.console import Console
        except ImportError:
            return
        self._out, self._notes = Console(), Console(stderr=True)

    def table(self, table: TextTable) -> None:
        """Prints a table, under its title, to standard output. A table without rows has only its header.

        Without rich, all rows must have as many cells as the header; otherwise `ValueError` or `IndexError` is raised.
        """
        if self._out is None:
            print(table.plain(), end="\n\n")
            return
        from rich.table import Table

        shown = Table()
        for position, name in enumerate(table.header):
            shown.add_column(name, justify="right" if position else "left")
        for row in table.rows:
            shown.add_row(*row, style=table.styles.get(row[-1]))
        # Printed above the table and not as its title, which rich would wrap to the width of the table.
        self._out.print(table.title, markup=False, style="italic", highlight=False)
        self._out.print(shown)

    def line(self, text: str) -> None:
        """Prints a line of the results to standard output; an empty line for an empty text."""
        if self._out is None:
            print(text)
        else:
            self._out.print(text, markup=False)

    def note(self, text: str, style: str = "") -> None:
        """Prints a line that is not a result to standard error; an empty line for an empty text.

        Args:
            text: The line.
            style: A style of rich, for example "yellow"; empty for none. Ignored without rich.
        """
        if self._notes is None:
            print(text, file=sys.stderr)
        else:
            self._notes.print(text, markup=False, style=style or None)

    @contextmanager
    def progress(self, total: int) -> Iterator[Callable[[str, int], None]]:
        """Context manager: shows on standard error how many of `total` steps are done.

        Yields a function to call with a text about the current step, and the number of steps that are done. The numbers
        are not checked.
        """
        if self._notes is None:
            yield lambda what, done: print(f"[{done}/{total}] {what}", file=sys.stderr)
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # No automatic refresh: a thread that draws ten times a second would disturb every measurement.
        with Progress(*columns, console=self._notes, auto_refresh=False) as bar:
            task = bar.add_task("", total=total)
            yield lambda what, done: bar.update(task, description=what, completed=done, refresh=True)
