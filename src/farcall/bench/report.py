"""Presents the results of a run: tables, and the page docs/benchmarks.md. Every number comes from the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from farcall.bench import findings as found
from farcall.bench.effort import Effort
from farcall.bench.findings import Findings, Measure, points
from farcall.bench.system import System
from farcall.bench.tables import ABSENT, TextTable, in_bytes, in_time, three_digits

HOSTS_BEGIN: Final = "<!-- hosts: written by `make bench-hosts`; do not edit -->"
HOSTS_END: Final = "<!-- end of hosts -->"
"""Between the lines `HOSTS_BEGIN` and `HOSTS_END` of docs/benchmarks.md another program records its own run."""
_REFERENCES: Final = ((found.FETCHED, "fetched, one by one"), (found.SHARED, "shared with a third worker"))
"""The two kinds of results about references, which share one table, and the titles of their columns."""
_SHOWN: Final = (
    *(found.LATENCY, found.BANDWIDTH, found.EXCHANGED, found.IN_FLIGHT, found.THREADS, found.STREAMING, found.STARTUP),
)
"""The kinds of results that have tables of their own, in the order of the page."""

_EXPLAINED: Final[dict[Measure, str]] = {
    found.LATENCY: "The time of a call that sends a payload to the other process and gets it back: the median of many"
    " calls, one after another. Both axes are logarithmic.",
    found.BANDWIDTH: "The same calls: the bytes sent in both directions, divided by the time of the call. The function"
    " returns its own argument, so farcall can send it back in the same shared memory, and copies it only once.",
    found.EXCHANGED: "The same with a function that returns another array of the same size. It cannot be sent back in"
    " the memory of the argument, so both arrays are copied.",
    found.IN_FLIGHT: "No-op calls of one caller, with this many calls always in flight.",
    found.THREADS: "This many threads of one process each make no-op calls, one after another, over one shared caller."
    " The rate is that of all threads together.",
    found.STREAMING: "One thread sends an array of this size again and again, while another makes no-op calls to the"
    " same worker.",
    found.FETCHED: "*Fetched*: a call creates a value in the other process and returns a reference to it; the value is"
    " fetched and the reference dropped, one after another. *Shared*: such a reference is passed to a third worker,"
    " which fetches the value; at most 12 at a time.",
    found.STARTUP: "The time from the command to start this many workers, each a process of this machine, to the last"
    " reply to a no-op call on each. It includes starting Python and the imports of each worker, but not the imports of"
    " the starting process.",
}
"""What each kind of result means, for the page."""


def show_point(measure: Measure, point: int) -> str:
    """Returns how a point is shown in the header of a table: `4 KiB` for a payload size, a plain number for others.

    A point is a payload size in bytes, or a number of calls, threads, references or workers; `measure` says which.
    """
    return in_bytes(point) if measure.point == "payload" else str(point)


def show_value(measure: Measure, value: float | None) -> str:
    """Returns how a value is shown in a table: `4.56 µs`, `1.23 GB/s`, or a whole number such as `12,345`.

    The unit of `measure` (seconds, bytes per second or another one) decides. Returns a dash, `ABSENT`, for None.
    """
    if value is None:
        return ABSENT
    if measure.unit == "s":
        return in_time(value)
    return f"{three_digits(value / 1e9)} GB/s" if measure.unit == "B/s" else f"{value:,.0f}"


def show_ratio(value: float | None) -> str:
    """Returns how a ratio is shown in a table, with about three digits, such as `12.3×`; a dash for None."""
    return ABSENT if value is None else f"{three_digits(value)}×"


def tables(findings: Findings, effort: Effort) -> dict[Measure, list[TextTable]]:
    """Returns the tables of each measure (kind of result) that has values; an empty dict if none has.

    The first table of a measure has a row for each system. If farcall is compared with others, a table of ratios
    follows, except for bandwidth. `SHARED` has no entry: it is a column of the tables of `FETCHED`. `LATENCY_P99` has
    no tables.

    Args:
        findings: The results.
        effort: What was measured, for the columns and the titles.
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
        # Bandwidth follows from latency, so its ratios would say nothing new.
        if findings.peers and measure != found.BANDWIDTH:
            ratios = [
                [peer.label, *(show_ratio(findings.times_as_fast(measure, peer, point)) for point in where)]
                for peer in findings.peers
            ]
            every[measure].append(TextTable("farcall is so many times as fast", head, ratios))
    return every


def _add_references(every: dict[Measure, list[TextTable]], findings: Findings, medians: str) -> None:
    """Adds the table of references to `every`, under `FETCHED`, and one of ratios if farcall is compared with others.

    Does nothing if there are no values. `medians` is a part of the title, such as "medians over 3 rounds".
    """

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
    """Returns lines that say which values are missing and which systems were left out, and why.

    The notes of the run follow. There is one line for each system that was left out, and one for each reason of a
    system. Returns an empty list if nothing is missing and there are no notes.
    """
    lines = [f"{label} was left out: {reason}" for label, reason in findings.left_out.items()]
    for system in findings.systems:
        seen: dict[str, list[str]] = {}
        for (measure, name, point), reason in findings.reasons.items():
            if name == system.name and measure not in (found.LATENCY_P99, found.BANDWIDTH):
                where = "" if points(measure, Effort()) == found.SINGLE_POINT else f" at {show_point(measure, point)}"
                seen.setdefault(reason, []).append(f"{measure.key.replace('_', ' ')}{where}")
        lines += [f"{system.label}, {', '.join(where)}: {reason}" for reason, where in seen.items()]
    return lines + findings.notes


def page(findings: Findings, effort: Effort, where: dict[str, str], plots: Sequence[str]) -> str:
    """Returns docs/benchmarks.md as Markdown: tables and pictures, missing figures, the systems and the machine.

    Kinds of results without values have no section.

    Args:
        findings: The results.
        effort: What was measured.
        where: Texts about the machine, by their titles, such as "kernel".
        plots: The names of picture files, such as `latency.svg`, in the directory `benchmarks` beside the page. Other
            pictures are left out.
    """
    parts = ["# Benchmarks", _introduction(findings, effort)]
    for measure, shown in tables(findings, effort).items():
        heading = "References" if measure == found.FETCHED else measure.title
        parts += [f"## {heading}", _EXPLAINED[measure]]
        name = "references" if measure == found.FETCHED else measure.key
        if f"{name}.svg" in plots:
            parts.append(f"![{heading}](benchmarks/{name}.svg)")
        parts += [table.markdown() for table in shown]
    if absent := reasons(findings):
        parts += [f"## Missing figures\n\n{ABSENT} marks a missing figure.", _bullet_list(absent)]
    usages = [f"{system.label}: {system.usage}" for system in findings.systems]
    parts += ["## How each system is used", _bullet_list(usages)]
    parts += ["## The run", _bullet_list([f"{name}: {value}" for name, value in where.items()])]
    return "\n\n".join(parts) + "\n"


def hosts_section(page: str) -> str:
    """Returns the section of a page from `HOSTS_BEGIN` to `HOSTS_END`, to append to a new page.

    `make bench-hosts` writes that section, so it is kept when the rest of the page is replaced. If `page` is empty or
    has no such section, returns one without contents.
    """
    recorded = page.partition(HOSTS_BEGIN)[2].partition(HOSTS_END)[0]
    return f"\n{HOSTS_BEGIN}{recorded or chr(10)}{HOSTS_END}\n"


def _introduction(findings: Findings, effort: Effort) -> str:
    """Returns the first paragraphs of docs/benchmarks.md as Markdown: what was compared, and by which command.

    They end with a warning if it was a quick run.
    """
    beside = f"beside {_join_words([peer.label for peer in findings.peers])}" if findings.peers else "alone"
    command = "python benchmarks/compare.py " + ("--quick" if effort.quick else f"--rounds {effort.rounds}")
    if findings.peers:
        command += f" --peers {','.join(peer.family for peer in findings.peers)}"
    text = (
        f"farcall {beside}, with the same work for all, on one machine. A command wrote this page, from the run that is"
        f" described at its end:\n\n```sh\n{command} --write-docs\n```\n\n"
        "`make bench-peers` sets up an environment with the peers, which is a large download, and runs this command"
        " there, with the options in `ARGS`. All peers together take about half an hour. A ratio below 1 means that"
        " farcall is slower. Single calls are timed one after another, with an array as argument. The calls of *in"
        " flight* and *threads* have no arguments, and follow each other without a pause. Every system runs in two"
        " processes of one host, in the way that its own documentation recommends, and the caller reads the clock. In"
        " each round every system has its turn, in an order that rotates; the figures are medians over the rounds. Look"
        " at the ratios: times differ between machines. The figures that farcall must reach are in"
        " [the benchmark of the repository](../benchmarks/README.md)."
    )
    if effort.quick:
        text += (
            "\n\n**This was a quick run, to see that everything works: few calls, few points. Its figures are not"
            " reliable.**"
        )
    return text


def _bullet_list(lines: Sequence[str]) -> str:
    """Returns the lines as a Markdown list, one item each; an empty text for no lines."""
    return "\n".join(f"- {line}" for line in lines)


def _join_words(words: Sequence[str]) -> str:
    """Returns the words as text: `a`, `a and b` or `a, b and c`. An empty list raises `IndexError`."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
