"""How the results are told: tables for the screen and for READMEs, and JSON.

All numbers come from the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import farcall
import systems
from farcall.bench.endpoint import MIXED_KINDS
from farcall.bench.farcall_rpc import BUSY_WORKERS
from farcall.bench.machine import describe
from farcall.bench.system import System
from farcall.bench.tables import ABSENT, TextTable, in_bytes, number, three_digits
from figures import Figure, Results
from measurements import (
    APART_S,
    EXCHANGED,
    REFERENCE_USES,
    SHORT_CALLS,
    SIZES,
    THREADS,
    Effort,
    contended_loads,
    counted,
)

_PACKAGES: Final = ("farcall", "torch", "rpyc")
_STYLES: Final = {"missed": "red", "not measured": "yellow", "within noise": "yellow"}
_LATENCY: Final = "p50 / p99 / mean µs"
TWO_VALUES: Final = 1.5
"""By how much the p50s of the rounds may differ before a median is not enough."""


def tables(results: Results, figures: Iterable[Figure], effort: Effort) -> list[TextTable]:
    """Returns all tables of a run; those with nothing in them are left out."""
    medians = f"medians over {counted(effort.rounds, 'round')}"

    def rows(columns: Sequence[Callable[[str], str]], every: Iterable[System] = systems.ALL) -> list[list[str]]:
        """A row for each system for which at least one column has something."""
        found = [[system.label, *(column(system.name) for column in columns)] for system in every]
        return [row for row in found if any(cell != ABSENT for cell in row[1:])]

    def latency(point: str) -> Callable[[str], str]:
        return lambda system: latencies(results, system, point)

    def value(point: str, name: str, form: str = ",.0f", unit: str = "") -> Callable[[str], str]:
        return lambda system: number(results.median(system, point, name), form, unit)

    def bandwidth(way: str, size: str) -> Callable[[str], str]:
        return lambda system: _bandwidth(SIZES[size], results.median(system, f"{way} {size}"))

    data = rows(
        [
            *(bandwidth("echo", name) for name in SIZES),
            *(value(counted(count, "thread"), "calls_per_s") for count in THREADS),
            latency("beside a stream"),
        ],
        [*systems.ALL, systems.COPY],
    )
    copy_us = results.median("farcall-unix", "memory copy")
    if copy_us is not None:
        copied = _bandwidth(max(SIZES.values()), copy_us)
        absent = [ABSENT] * (len(SIZES) - 1)
        data.append(["memory, copied in one process", *absent, copied, *[ABSENT] * len(THREADS), ABSENT])
    every = [
        TextTable(
            f"A no-op between two processes of one host ({medians})",
            ["system", f"one by one: {_LATENCY}", f"{effort.pipelined:,} pipelined: calls/s"],
            rows([latency("no-op"), value("pipelined", "calls_per_s")]),
        ),
        TextTable(
            f"A no-op beside busy programs, and while another thread computes ({medians})",
            [
                "system",
                "beside",
                f"in a row: {_LATENCY}",
                f"{1000 * APART_S:g} ms apart: {_LATENCY}",
                f"{max(THREADS)} threads, {SHORT_CALLS} calls each: calls/s",
                _LATENCY,
            ],
            [
                [row[0], load, *row[1:]]
                for load in contended_loads()
                for row in rows(
                    [
                        latency(f"{load}: in a row"),
                        latency(f"{load}: apart"),
                        value(f"{load}: {max(THREADS)} threads", "calls_per_s"),
                        latency(f"{load}: {max(THREADS)} threads"),
                    ]
                )
            ],
        ),
        TextTable(
            f"farcall, unix: calls of several kinds in random order ({medians})",
            ["kind", f"alone: {_LATENCY}", f"mixed: {_LATENCY}"],
            [
                [kind, *(latencies(results, "farcall-unix", f"{way}: {kind}") for way in ("alone", "mixed"))]
                for kind in MIXED_KINDS
                if results.values("farcall-unix", f"mixed: {kind}")
            ],
        ),
        TextTable(
            f"References to remote objects ({medians})",
            [
                "system",
                *(f"{use}: {_LATENCY}" for use in REFERENCE_USES),
                f"{effort.references:,} shared with a third worker: references/s",
            ],
            rows([*map(latency, REFERENCE_USES), value("shared", "references_per_s")]),
        ),
        TextTable(
            f"Arrays there and back, and many threads ({medians})",
            [
                "system",
                *(f"{name}: GB/s" for name in SIZES),
                *(f"{counted(count, 'thread')}: calls/s" for count in THREADS),
                f"no-op beside a stream of {in_bytes(effort.streamed)}: {_LATENCY}",
            ],
            data,
        ),
        TextTable(
            f"Arrays there, and others back ({medians})",
            ["system", *(f"{name}: GB/s" for name in EXCHANGED)],
            rows([bandwidth("exchange", name) for name in EXCHANGED]),
        ),
        TextTable(
            f"A tensor of 2 × 2 there and back ({medians})", ["system", _LATENCY], rows([latency("2 × 2 tensor")])
        ),
        TextTable(
            f"{BUSY_WORKERS} busy workers that call each other ({medians})",
            ["system", "spinning (default): calls/s, all together", "spin=0: calls/s"],
            rows([value("busy workers", "spinning"), value("busy workers", "blocking")]),
        ),
        TextTable(
            f"An idle worker ({medians})", ["system", "share of a core"], rows([value("idle", "percent", ".1f", " %")])
        ),
        TextTable(
            "The figures that are wanted",
            ["figure", "found", "wanted", "aim", "verdict"],
            [
                [
                    figure.title,
                    number(figure.value, ".2f", figure.unit),
                    f"{figure.bound} {figure.required:g}{figure.unit}"
                    + (f" (noise {figure.noise:.0%})" if figure.noise else ""),
                    ABSENT if figure.aim is None else f"{figure.aim:g}{figure.unit}",
                    figure.verdict,
                ]
                for figure in figures
            ],
            _STYLES,
        ),
    ]
    return [table for table in every if table.rows]


def latencies(results: Results, system: str, point: str) -> str:
    """Returns the medians over the rounds of p50, p99 and mean, in µs: `8.6 / 30.6 / 9.1`.

    If the p50 of some rounds is more than `TWO_VALUES` times that of others, one median would hide it: the lowest and
    the highest p50 are added.
    """
    values = results.values(system, point)
    if not values:
        return ABSENT
    text = " / ".join(number(results.median(system, point, name), ",.1f") for name in ("p50_us", "p99_us", "mean_us"))
    lowest, highest = min(values), max(values)
    return text if highest <= TWO_VALUES * lowest else f"{text} (p50 from {lowest:,.1f} to {highest:,.1f})"


def _bandwidth(size: int, microseconds: float | None) -> str:
    """Both ways together."""
    return ABSENT if not microseconds else three_digits(2e-3 * size / microseconds)


def machine(results: Results) -> dict[str, str]:
    """Returns what a reader needs to know about the run: versions, machine, whether other programs disturbed it."""
    return {
        "C extension": "in use" if farcall.native_available() else "not in use",
        **describe(_PACKAGES, results.others_percent),
    }


def as_json(results: Results, figures: Iterable[Figure], effort: Effort, where: dict[str, str]) -> dict[str, Any]:
    """Everything, with each round's findings, for programs to read."""
    return {
        "machine": where,
        "effort": dataclasses.asdict(effort),
        "rounds": results.rounds,
        "others_percent": results.others_percent,
        "figures": [figure.as_json() for figure in figures],
    }


def in_full(shown: Iterable[TextTable], where: dict[str, str]) -> str:
    """All tables and what the run stood on, as Markdown."""
    about = "\n".join(f"- {name}: {value}" for name, value in where.items())
    return "\n\n".join([*(table.markdown() for table in shown), "The run:\n\n" + about])
