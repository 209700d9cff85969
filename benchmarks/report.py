"""How the results are told: tables for the screen and for READMEs, a summary, and JSON.

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
from figures import DISTURBANCE, Figure, Results, torch_ratios
from measurements import Effort

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


def _number(value: float | None, form: str, unit: str = "") -> str:
    return _ABSENT if value is None else format(value, form) + unit


def tables(results: Results, figures: Iterable[Figure], effort: Effort) -> list[TextTable]:
    """All tables of a run; those with nothing in them are left out."""
    calls = [
        [
            system.label,
            _number(results.median(system.name, "p50_us"), ",.1f"),
            _number(results.median(system.name, "p99_us"), ",.1f"),
            _number(results.median(system.name, "calls_per_s"), ",.0f"),
        ]
        for system in systems.ALL
        if system.name in results.calls
    ]
    references = [
        [
            system.label,
            _number(results.median(system.name, "remote_us"), ",.1f"),
            _number(results.median(system.name, "proxy_us"), ",.1f"),
            _number(results.median_shared(system.name), ",.0f"),
        ]
        for system in systems.ALL
        if system.refers and system.name in results.calls
    ]
    busy = [
        [label, f"{statistics.median(rates):,.0f}"]
        for label, rates in (("spinning (default)", results.busy_spinning), ("spin=0", results.busy_blocking))
        if rates
    ]
    wanted = [
        [
            figure.title,
            _number(figure.value, ".2f", figure.unit),
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
            f"References to remote objects (medians over {effort.rounds} rounds)",
            [
                "system",
                "remote + to_here: p50 µs",
                "proxy call: p50 µs",
                f"{effort.references:,} shared with a third worker: references/s",
            ],
            references,
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


def in_full(shown: Iterable[TextTable], where: dict[str, str]) -> str:
    """All tables and what the run stood on, as Markdown."""
    about = "\n".join(f"- {name}: {value}" for name, value in where.items())
    return "\n\n".join([*(table.markdown() for table in shown), "The run:\n\n" + about])


def summary(results: Results, where: dict[str, str]) -> str:
    """The run in short, as Markdown: a table, the ratios to torch, the machine and the date."""
    rows = [
        [
            system.label,
            _number(results.median(system.name, "p50_us"), ",.1f", " µs"),
            _number(results.median(system.name, "calls_per_s"), ",.0f"),
            _number(results.median(system.name, "remote_us"), ",.1f", " µs"),
        ]
        for system in systems.ALL
        if system.name in results.calls and system.in_summary
    ]
    table = TextTable(
        "Between processes of one host",
        ["system", "no-op call, p50", "pipelined calls/s", "`remote` + `to_here`, p50"],
        rows,
    )
    machine_line = ", ".join(f"{name} {value}" for name, value in where.items() if name != "date")
    return "\n\n".join(
        [table.markdown(), _against_torch(results), f"Measured on: {machine_line}.", where["date"] + "."]
    )


def _against_torch(results: Results) -> str:
    ratios = torch_ratios(results)
    phrases = [
        f"{ratio:.1f} times {what}"
        for ratio, what in (
            (ratios.call, "as fast in a call"),
            (ratios.pipelined, "in pipelined calls"),
            (ratios.remote, "in `remote` + `to_here`"),
            (ratios.proxy, "in a call through a proxy"),
            (ratios.shared, "in references shared with a third worker"),
        )
        if ratio is not None
    ]
    if not phrases:
        return "torch.distributed.rpc was not measured beside it in this run."
    return f"Over a Unix socket and beside torch.distributed.rpc, farcall was {_listed(phrases)}."


def _listed(phrases: Sequence[str]) -> str:
    return phrases[0] if len(phrases) == 1 else ", ".join(phrases[:-1]) + " and " + phrases[-1]
