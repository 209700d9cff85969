"""How the results are told: tables for the screen and for the README, and JSON.

A table is built once, as text, and rendered twice. All numbers come from the run.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

import systems
from figures import DISTURBANCE, Figure, Results
from measurements import Effort

BEGIN: Final = "<!-- results: written by run.py --write-readme; do not edit -->"
END: Final = "<!-- end of results -->"
SUMMARY_BEGIN: Final = "<!-- bench:begin -->"
SUMMARY_END: Final = "<!-- bench:end -->"
_ABSENT: Final = "–"
_PACKAGES: Final = ("farcall", "torch", "rpyc")


@dataclass(frozen=True)
class TextTable:
    """A table of text. The first column is set left, the others right."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def show(self, console: Console) -> None:
        """Print it to a screen."""
        table = Table(title=self.title, title_justify="left")
        for position, name in enumerate(self.header):
            table.add_column(name, justify="right" if position else "left")
        for row in self.rows:
            table.add_row(
                *row, style={"missed": "red", "not measured": "yellow", "within noise": "yellow"}.get(row[-1])
            )
        console.print(table)

    def markdown(self) -> str:
        """The same as Markdown."""
        ruler = [":---", *["---:"] * (len(self.header) - 1)]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.header, ruler, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines])


def tables(results: Results, figures: Iterable[Figure], effort: Effort) -> list[TextTable]:
    """All tables of a run; those with nothing in them are left out."""

    def number(value: float | None, form: str) -> str:
        return _ABSENT if value is None else format(value, form)

    calls = [
        [
            system.label,
            number(results.median(system.name, "p50_us"), ",.1f"),
            number(results.median(system.name, "p99_us"), ",.1f"),
            number(results.median(system.name, "calls_per_s"), ",.0f"),
        ]
        for system in systems.ALL
        if system.name in results.calls
    ]
    busy = [
        [label, f"{statistics.median(rates):,.0f}"]
        for label, rates in (("spinning (default)", results.busy_spinning), ("spin=0", results.busy_blocking))
        if rates
    ]
    wanted = [
        [
            figure.title,
            number(figure.value, ".2f") + (figure.unit if figure.value is not None else ""),
            f"{figure.bound} {figure.required:g}{figure.unit}"
            + (f" (noise {figure.noise:.0%})" if figure.noise else ""),
            _ABSENT if figure.aim is None else f"{figure.aim:g}{figure.unit}",
            figure.verdict,
        ]
        for figure in figures
    ]
    every = [
        TextTable(
            f"A no-op between two processes of one host (medians over {effort.rounds} rounds)",
            ["system", "one by one: p50 µs", "p99 µs", f"{effort.pipelined:,} pipelined: calls/s"],
            calls,
        ),
        TextTable(
            f"{systems.BUSY_WORKERS} busy farcall workers that call each other",
            ["waiting", "calls/s, all together"],
            busy,
        ),
        TextTable("The figures that are wanted", ["figure", "found", "wanted", "aim", "verdict"], wanted),
    ]
    return [table for table in every if table.rows]


def machine(results: Results) -> dict[str, str]:
    """What the run stood on, and whether it had the machine for itself."""
    versions = {name: _version(name) for name in _PACKAGES}
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        **{name: version for name, version in versions.items() if version},
        "disturbed turns": f"{results.disturbed} of {len(results.others_percent)}"
        f" (other programs took more than {DISTURBANCE:g} % of a core)",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def as_json(results: Results, figures: Iterable[Figure], effort: Effort, where: dict[str, str]) -> dict[str, Any]:
    """Everything, with each round's findings, for programs to read."""
    return {
        "machine": where,
        "effort": dataclasses.asdict(effort),
        "rounds": dataclasses.asdict(results),
        "figures": [dataclasses.asdict(figure) | {"verdict": figure.verdict} for figure in figures],
    }


def around_results(readme: Path) -> tuple[str, str]:
    """What stands before and after the results in a README. Raises ValueError if it does not say where they go."""
    before, begin, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme} lacks the lines {BEGIN!r} and {END!r} that say where the results go")
    return before, after


def write_summary(readme: Path, shown: Sequence[TextTable], where: dict[str, str]) -> None:
    """Replace the block of the project's README: the first table, and what the run stood on."""
    before, begin, rest = readme.read_text(encoding="utf-8").partition(SUMMARY_BEGIN)
    _, end, after = rest.partition(SUMMARY_END)
    if not begin or not end:
        raise ValueError(f"{readme} lacks the lines {SUMMARY_BEGIN!r} and {SUMMARY_END!r}")
    about = ", ".join(f"{name} {value}" for name, value in where.items())
    body = "\n\n".join([shown[0].markdown(), f"Measured by `make bench` on: {about}."])
    readme.write_text(f"{before}{begin}\n\n{body}\n\n{end}{after}", encoding="utf-8")


def write_readme(readme: Path, shown: Iterable[TextTable], where: dict[str, str]) -> None:
    """Replace the results in a README. Raises ValueError, and changes nothing, if it does not say where they go."""
    before, after = around_results(readme)
    about = "\n".join(f"- {name}: {value}" for name, value in where.items())
    body = "\n\n".join([*(table.markdown() for table in shown), "The run:\n\n" + about])
    readme.write_text(f"{before}{BEGIN}\n\n{body}\n\n{END}{after}", encoding="utf-8")
