"""What the training examples show: a progress bar, if rich is there and somebody looks, and a plot with matplotlib."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence


class Progress:
    """A bar for so many steps. Shows nothing without rich, or where there is no terminal."""

    def __init__(self, title: str, steps: int) -> None:
        self._bar = None
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import Progress as Bar
            except ImportError:
                return
            self._bar = Bar(console=Console(stderr=True))
            self._task = self._bar.add_task(title, total=steps)
            self._title = title
            self._bar.start()

    def step(self, note: str) -> None:
        """One more is done."""
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=f"{self._title}: {note}")

    def close(self) -> None:
        """All are done."""
        if self._bar is not None:
            self._bar.stop()

    @staticmethod
    def plot(file: str, losses: Mapping[str, Sequence[float]]) -> None:
        """Draws the losses by step. Raises `SystemExit` if matplotlib is not there."""
        try:
            import matplotlib
        except ImportError:
            raise SystemExit("--plot needs matplotlib: pip install 'farcall[bench]'") from None
        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4))
        for name, values in losses.items():
            axes.plot(range(1, len(values) + 1), values, label=name)
        axes.set(xlabel="step", ylabel="loss", yscale="log")
        axes.legend()
        figure.savefig(file, dpi=120, bbox_inches="tight")
        print(f"the losses are drawn in {os.path.basename(file)}")
