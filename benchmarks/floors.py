"""Whether the benchmarks still reach their floors: the figures that farcall must never fall below.

    PYTHONPATH=benchmarks python -m floors                   # all three benchmarks: `make floors`
    PYTHONPATH=benchmarks python -m floors --only training   # one of them
    PYTHONPATH=benchmarks python -m floors found.json ...    # judge runs that are recorded already

The floors are what the benchmarks once had to reach: the `floor` of a figure or, if it has none, the column "wanted".
They are not the best figures ever seen: a simplification may spend the difference. One run says little on a machine
whose speed changes, so each benchmark is run up to five times, and a floor is met if one of the runs reaches it. No run
is made once all are met.

The exit status is 1 if a floor was missed in every run, or could not be measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from farcall.bench.screen import Screen
from farcall.bench.tables import TextTable
from figures import Figure

MAX_RUNS: Final = 5
BENCHMARKS: Final = {
    "calls": [str(Path(__file__).with_name("run.py"))],
    "training": ["-m", "training.run"],
    "workloads": ["-m", "workloads.run"],
}
"""The name of each benchmark, and what Python is given to run it."""

_GOOD: Final = ("met", "aim met", "within noise")


def read_figures(path: Path) -> list[Figure]:
    """Returns the figures of a run that a benchmark wrote with `--json`, each with its floor as what is required.

    Raises:
        OSError: The file cannot be read.
        KeyError, ValueError: The file is not what a benchmark writes.
    """
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["figures"]
    figures = [Figure(**{name: value for name, value in figure.items() if name != "verdict"}) for figure in found]
    return [each if each.floor is None else replace(each, required=each.floor) for each in figures]


def best_figures(runs: Iterable[Sequence[Figure]]) -> list[Figure]:
    """Returns, for each title, the figure of the run in which it came out best; a figure that is missing is worst."""
    best: dict[str, Figure] = {}
    for run in runs:
        for figure in run:
            known = best.get(figure.title)
            if known is None or known.value is None or (figure.value is not None and _is_better(figure, known)):
                best[figure.title] = figure
    return list(best.values())


def missed_floors(figures: Iterable[Figure]) -> list[Figure]:
    """Returns the figures that are below their floor or could not be measured."""
    return [figure for figure in figures if figure.verdict not in _GOOD]


def _is_better(figure: Figure, other: Figure) -> bool:
    assert figure.value is not None
    assert other.value is not None
    return figure.value > other.value if figure.bound == "≥" else figure.value < other.value


def measure(name: str) -> tuple[list[Figure], int]:
    """Runs one benchmark until all its floors are met, at most `MAX_RUNS` times.

    Args:
        name: A key of `BENCHMARKS`.

    Returns:
        The best figures, and the number of runs that were made.

    Raises:
        subprocess.CalledProcessError: A run failed.
    """
    runs: list[list[Figure]] = []
    best: list[Figure] = []
    with tempfile.TemporaryDirectory() as directory:
        for number in range(1, MAX_RUNS + 1):
            written = Path(directory) / f"{number}.json"
            subprocess.run([sys.executable, *BENCHMARKS[name], "--json", str(written)], check=True)
            runs.append(read_figures(written))
            best = best_figures(runs)
            if not missed_floors(best):
                break
    return best, len(runs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures or reads, prints a table, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="floors", description="Compare the benchmarks with their floors.")
    parser.add_argument("--only", choices=BENCHMARKS, help="run this benchmark alone")
    parser.add_argument("recorded", nargs="*", type=Path, metavar="FILE", help="runs to judge: files that --json wrote")
    options = parser.parse_args(arguments)
    rows: list[list[str]] = []
    missed: list[Figure] = []
    if options.recorded:
        results = {"recorded": (best_figures(map(read_figures, options.recorded)), len(options.recorded))}
    else:
        results = {name: measure(name) for name in BENCHMARKS if options.only in (None, name)}
    for figures, runs in results.values():
        missed += missed_floors(figures)
        for figure in figures:
            value = "–" if figure.value is None else f"{figure.value:.2f}{figure.unit}"
            floor = f"{figure.bound} {figure.required:g}{figure.unit}"
            rows.append([figure.title, floor, value, str(runs), figure.verdict])
    Screen().table(TextTable("Floors", ["figure", "floor", "best", "runs", "verdict"], rows))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
