"""How the findings are told: tables, and the page in the documentation. Every number comes from the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from farcall.bench import findings as found
from farcall.bench.effort import Effort
from farcall.bench.findings import Findings, Measure, points
from farcall.bench.systems import System
from farcall.bench.tables import ABSENT, TextTable, in_bytes, in_time, three_digits

_REFERENCES: Final = ((found.FETCHED, "fetched, one by one"), (found.SHARED, "shared with a third worker"))
_SHOWN: Final = (
    *(found.LATENCY, found.BANDWIDTH, found.EXCHANGED, found.IN_FLIGHT, found.THREADS, found.STREAMING, found.STARTUP),
)

_EXPLAINED: Final[dict[Measure, str]] = {
    found.LATENCY: "A payload goes to the other process and comes back: the median of many such calls, one after"
    " another. Both axes are logarithmic.",
    found.BANDWIDTH: "The same calls: the bytes that went both ways, by the time of a call. What the function returns"
    " is what it got: farcall hands it back in the shared memory that it came in, and copies it once and not twice.",
    found.EXCHANGED: "The same with a function that returns another array of that size, which it keeps: nothing can go"
    " back as it came, and each array is copied.",
    found.IN_FLIGHT: "No-op calls of one caller, of which so many are always under way.",
    found.THREADS: "So many threads of one process each make no-op calls, one after another, over the one caller that"
    " they share; their calls together.",
    found.STREAMING: "One thread sends an array of that size again and again; another makes no-op calls to the same"
    " worker meanwhile.",
    found.FETCHED: "*Fetched*: a reference to a value that a call has made in the other process, whose value is then"
    " fetched and which is dropped; one after another. *Shared*: such a reference is passed on to a third worker, which"
    " fetches the value; at most 12 at a time.",
    found.STARTUP: "From the word to start so many workers, each a process of this machine, to the last reply of a"
    " no-op on each. What Python and the imports of each worker take is in it; what the starting process imports is"
    " not.",
}


def show_point(measure: Measure, point: int) -> str:
    """How a point stands at the head of a column."""
    return in_bytes(point) if measure.point == "payload" else str(point)


def show_value(measure: Measure, value: float | None) -> str:
    """How a value stands in a table."""
    if value is None:
        return ABSENT
    if measure.unit == "s":
        return in_time(value)
    return f"{three_digits(value / 1e9)} GB/s" if measure.unit == "B/s" else f"{value:,.0f}"


def show_ratio(value: float | None) -> str:
    """How a ratio stands in a table."""
    return ABSENT if value is None else f"{three_digits(value)}×"


def tables(findings: Findings, effort: Effort) -> dict[Measure, list[TextTable]]:
    """The tables of each measure, with its ratios if there are peers; measures of which there is nothing are left out.

    Those of both kinds of references stand together, under the first.
    """
    every: dict[Measure, list[TextTable]] = {}
    medians = f"medians over {effort.rounds} rounds" if effort.rounds > 1 else "one round"
    for measure in _SHOWN:
        if measure == found.STARTUP:
            _add_references(every, findings, medians)
        where = points(measure, effort)
        if not any(findings.median(measure, system, point) for system in findings.systems for point in where):
            continue
        unit = f", {measure.unit}" if measure.unit == "calls/s" else ""
        head = ["system", *(show_point(measure, point) for point in where)]
        head[1] = f"{measure.point}: {head[1]}"
        rows = [
            [system.label, *(show_value(measure, findings.median(measure, system, point)) for point in where)]
            for system in findings.systems
        ]
        every[measure] = [TextTable(f"{measure.title}{unit} ({medians})", head, rows)]
        # Bandwidth is latency in other words, and so are its ratios.
        if findings.peers and measure != found.BANDWIDTH:
            ratios = [
                [peer.label, *(show_ratio(findings.times_as_fast(measure, peer, point)) for point in where)]
                for peer in findings.peers
            ]
            every[measure].append(TextTable("farcall is so many times as fast", head, ratios))
    return every


def _add_references(every: dict[Measure, list[TextTable]], findings: Findings, medians: str) -> None:
    def has_any(system: System) -> bool:
        return any(findings.median(measure, system, 1) for measure, _ in _REFERENCES)

    if not any(map(has_any, findings.systems)):
        return
    rows = [
        [system.label, *(show_value(measure, findings.median(measure, system, 1)) for measure, _ in _REFERENCES)]
        for system in findings.systems
    ]
    every[found.FETCHED] = [
        TextTable(f"References per second ({medians})", ["system", *(name for _, name in _REFERENCES)], rows)
    ]
    if findings.peers:
        ratios = [
            [peer.label, *(show_ratio(findings.times_as_fast(measure, peer, 1)) for measure, _ in _REFERENCES)]
            for peer in findings.peers
        ]
        head = ["system", *(name for _, name in _REFERENCES)]
        every[found.FETCHED].append(TextTable("farcall is so many times as fast", head, ratios))


def reasons(findings: Findings) -> list[str]:
    """Why some cells are empty, and who took no part: one line for each reason of each system."""
    lines = [f"{label} was left out: {reason}" for label, reason in findings.left_out.items()]
    for system in findings.systems:
        seen: dict[str, list[str]] = {}
        for (measure, name, point), reason in findings.reasons.items():
            if name == system.name and measure not in (found.LATENCY_P99, found.BANDWIDTH):
                where = "" if points(measure, Effort()) == found.ONCE else f" at {show_point(measure, point)}"
                seen.setdefault(reason, []).append(f"{measure.key.replace('_', ' ')}{where}")
        lines += [f"{system.label}, {', '.join(where)}: {reason}" for reason, where in seen.items()]
    return lines + findings.notes


def page(findings: Findings, effort: Effort, where: dict[str, str], plots: Sequence[str]) -> str:
    """The page in the documentation, as Markdown. `plots` are files in the directory `benchmarks` beside it."""
    parts = ["# Benchmarks", _introduction(findings, effort)]
    for measure, shown in tables(findings, effort).items():
        heading = "References" if measure == found.FETCHED else measure.title
        parts += [f"## {heading}", _EXPLAINED[measure]]
        name = "references" if measure == found.FETCHED else measure.key
        if f"{name}.svg" in plots:
            parts.append(f"![{heading}](benchmarks/{name}.svg)")
        parts += [table.markdown() for table in shown]
    if absent := reasons(findings):
        parts += [f"## What is not there\n\n{ABSENT} stands where there is no figure.", _listed(absent)]
    usages = [f"{system.label}: {system.usage}" for system in findings.systems]
    parts += ["## How each is used", _listed(usages)]
    parts += ["## The run", _listed([f"{name}: {value}" for name, value in where.items()])]
    return "\n\n".join(parts) + "\n"


def _introduction(findings: Findings, effort: Effort) -> str:
    beside = f"beside {_and([peer.label for peer in findings.peers])}" if findings.peers else "by itself"
    command = "farcall bench --quick" if effort.quick else f"farcall bench --rounds {effort.rounds}"
    if findings.peers:
        command += f" --peers {','.join(peer.family for peer in findings.peers)}"
    text = (
        f"farcall {beside}, with the same work for all, on one machine. This page is written by the command itself,"
        f" from the run that is described at its end:\n\n```sh\n{command} --write-docs\n```\n\n"
        "`make bench-peers` sets up an environment with the peers, a large download, and runs `farcall bench --peers"
        " all` there, with what `ARGS` adds; all of them take about half an hour. A ratio below 1 is one by which"
        " farcall is slower. Single calls are timed one after another with an array as their argument; the calls of"
        " *in flight* and *threads* have none, and follow each other at once. Every system runs in two"
        " processes of one host, in the way that its own documentation recommends, and the caller reads the clock."
        " Rounds alternate: each system has its turn in each, in an order that rotates; the figures are medians over"
        " the rounds. What counts are the ratios; times differ between machines. The figures that farcall must reach"
        " are elsewhere, in [the benchmark of the repository](../benchmarks/README.md)."
    )
    if effort.quick:
        text += (
            "\n\n**This was a quick run, to see that everything works: few calls, few points. Its figures are not to be"
            " believed.**"
        )
    return text


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
