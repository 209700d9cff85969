"""How the results are told: tables for the screen and for READMEs, a summary, and JSON.

All numbers come from the run.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Final

from farcall.bench import systems
from farcall.bench.machine import describe
from farcall.bench.tables import ABSENT, TextTable, in_bytes, number, three_digits
from figures import Figure, Results, torch_ratios
from measurements import EXCHANGED, SIZES, THREADS, Effort

_PACKAGES: Final = ("farcall", "torch", "rpyc")
_STYLES: Final = {"missed": "red", "not measured": "yellow", "within noise": "yellow"}


def tables(results: Results, figures: Iterable[Figure], effort: Effort) -> list[TextTable]:
    """All tables of a run; those with nothing in them are left out."""
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
    references = [
        [
            system.label,
            number(results.median(system.name, "remote_us"), ",.1f"),
            number(results.median(system.name, "proxy_us"), ",.1f"),
            number(results.median_shared(system.name), ",.0f"),
        ]
        for system in systems.ALL
        if system.refers and system.name in results.calls
    ]
    data = [
        [
            system.label,
            *(_bandwidth(size, results.median_data(system.name, f"echo {name}")) for name, size in SIZES.items()),
            *(number(results.median_data(system.name, f"threads {count}"), ",.0f") for count in THREADS),
            number(results.median_data(system.name, "streaming"), ",.0f"),
        ]
        for system in (*systems.ALL, systems.COPY)
        if system.name in results.data
    ]
    if data and results.median_copy is not None:
        copied = _bandwidth(max(SIZES.values()), results.median_copy)
        absent = [ABSENT] * (len(SIZES) - 1)
        data.append(["memory, copied in one process", *absent, copied, *[ABSENT] * len(THREADS), ABSENT])
    exchanged = [
        [
            system.label,
            *(_bandwidth(SIZES[name], results.median_data(system.name, f"exchange {name}")) for name in EXCHANGED),
        ]
        for system in systems.ALL
        if system.exchanges and system.name in results.data
    ]
    tensors = [
        [system.label, number(results.median(system.name, "tensor_us"), ",.1f")]
        for system in systems.ALL
        if results.median(system.name, "tensor_us") is not None
    ]
    busy = [
        [label, f"{statistics.median(rates):,.0f}"]
        for label, rates in (("spinning (default)", results.busy_spinning), ("spin=0", results.busy_blocking))
        if rates
    ]
    wanted = [
        [
            figure.title,
            number(figure.value, ".2f", figure.unit),
            f"{figure.bound} {figure.required:g}{figure.unit}"
            + (f" (noise {figure.noise:.0%})" if figure.noise else ""),
            ABSENT if figure.aim is None else f"{figure.aim:g}{figure.unit}",
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
            f"Arrays there and back, and many threads (medians over {effort.rounds} rounds)",
            [
                "system",
                *(f"{name}: GB/s" for name in SIZES),
                *(f"{count} thread{'s' if count > 1 else ''}: calls/s" for count in THREADS),
                f"no-op p99 µs beside a stream of {in_bytes(effort.streamed)}",
            ],
            data,
        ),
        TextTable(
            f"Arrays there, and others back (medians over {effort.rounds} rounds)",
            ["system", *(f"{name}: GB/s" for name in EXCHANGED)],
            exchanged,
        ),
        TextTable(
            f"A tensor of 2 × 2 there and back (medians over {effort.rounds} rounds)", ["system", "p50 µs"], tensors
        ),
        TextTable(
            f"{systems.BUSY_WORKERS} busy farcall workers that call each other",
            ["waiting", "calls/s, all together"],
            busy,
        ),
        TextTable("The figures that are wanted", ["figure", "found", "wanted", "aim", "verdict"], wanted, _STYLES),
    ]
    return [table for table in every if table.rows]


def _bandwidth(size: int, microseconds: float | None) -> str:
    """Both ways together."""
    return ABSENT if not microseconds else three_digits(2e-3 * size / microseconds)


def machine(results: Results) -> dict[str, str]:
    """What the run stood on, and whether it had the machine for itself."""
    return describe(_PACKAGES, results.others_percent)


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
            number(results.median(system.name, "p50_us"), ",.1f", " µs"),
            number(results.median(system.name, "calls_per_s"), ",.0f"),
            number(results.median(system.name, "remote_us"), ",.1f", " µs"),
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
