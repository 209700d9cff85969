"""The side-by-side benchmark behind `make bench`: farcall, torch's RPC, RPyC and the raw socket, in one run.

In each round every system has one turn for each part of the benchmark that is for it (`measurements.PARTS`). The order
of the systems rotates from round to round, so that nothing else that the machine does falls on one system alone. A
result is the median over the rounds.

Exit status: 0; with --strict, 1 if a wanted figure was missed or could not be had. Also 1 if a measurement failed, 2 if
the arguments are wrong, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import report
import systems
from farcall.bench.processes import EndpointFailed, exit_on_signals
from farcall.bench.rounds import Turn, rotated, take_turns
from farcall.bench.screen import Screen
from farcall.bench.system import System
from figures import Results, wanted_figures
from measurements import PARTS, QUICK, Effort
from recording import Block

_OWN_README: Final = Path(__file__).with_name("README.md")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments. Ends the program for wrong ones."""
    names = sorted({system.family for system in systems.ALL} | {system.name for system in systems.ALL})
    parser = argparse.ArgumentParser(
        prog="run.py", description="Measure farcall beside torch's RPC, RPyC and raw sockets."
    )
    parser.add_argument("--quick", action="store_true", help="a short run that shows that everything works")
    parser.add_argument("--rounds", type=int, metavar="N", help="alternating rounds (default: 5; 2 with --quick)")
    parser.add_argument("--systems", metavar="A,B", help=f"only these: {', '.join(names)} (default: all installed)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all findings there")
    parser.add_argument(
        "--write-readme",
        type=Path,
        nargs="?",
        const=_OWN_README,
        metavar="FILE",
        help="put the tables into FILE; without FILE, into the README beside this program",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 unless every wanted figure is met")
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    if options.systems is not None:
        wanted = options.systems.split(",")
        if unknown := sorted(set(wanted) - set(names)):
            parser.error(f"no such system: {', '.join(unknown)}; there are {', '.join(names)}")
        options.systems = [system for system in systems.ALL if system.name in wanted or system.family in wanted]
        if absent := sorted({system.package for system in options.systems if not system.is_installed}):
            parser.error(
                f"not installed: {', '.join(absent)}; `pip install 'farcall[peers]'` installs what is compared"
            )
    # Both are refused now rather than after minutes of measuring.
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no directory {options.json.parent}")
    if options.write_readme is not None:
        try:
            Block.of_tables(options.write_readme).around()
        except (OSError, ValueError) as error:
            parser.error(f"--write-readme: {error}")
    return options


def plan(chosen: Sequence[System], effort: Effort, results: Results) -> list[Turn]:
    """Returns all turns of the run in order: a title, and a function that measures and records."""
    if any(system.family == "raw" for system in chosen):
        chosen = [*chosen, systems.COPY]
    return [
        (
            f"round {number + 1}: {part.title}, {system.label}",
            lambda part=part, system=system: results.record(system.name, part.measure(system, effort)),  # type: ignore[misc]
        )
        for number in range(effort.rounds)
        for part in PARTS
        for system in rotated([each for each in chosen if part.is_for(each)], number)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it all; the exit status."""
    options = parse(arguments)
    effort = QUICK if options.quick else Effort()
    if options.rounds is not None:
        effort = dataclasses.replace(effort, rounds=options.rounds)
    screen = Screen()
    chosen = options.systems
    if chosen is None:
        chosen = [system for system in systems.ALL if system.is_installed]
        for absent in sorted({str(system.package) for system in systems.ALL if system not in chosen}):
            screen.note(f"{absent} is not installed and is left out; `pip install 'farcall[peers]'` does")
    results = Results()
    try:
        take_turns(plan(chosen, effort, results), results.others_percent, screen)
    except EndpointFailed as failure:
        screen.note(f"the bench cannot go on: {failure}", style="red")
        return 1
    where = report.machine(results)
    figures = wanted_figures(results)
    shown = report.tables(results, figures, effort)
    for table in shown:
        screen.table(table)
    screen.line(", ".join(f"{name} {value}" for name, value in where.items()))
    if results.disturbed:
        screen.note(
            "Other programs disturbed the run. Figures to keep need a machine with nothing else to do.", style="yellow"
        )
    if options.json is not None:
        found = report.as_json(results, figures, effort, where)
        options.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.write_readme is not None:
        Block.of_tables(options.write_readme).replace(report.in_full(shown, where))
    good = all(figure.verdict in ("met", "aim met", "within noise") for figure in figures)
    return 1 if options.strict and not good else 0


if __name__ == "__main__":
    with exit_on_signals():
        sys.exit(main())
