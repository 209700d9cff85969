"""The side-by-side benchmark behind `make bench`: farcall, torch's RPC, RPyC and the raw socket, in one run.

Rounds alternate: in each one, every system is measured once, in an order that rotates from round to round, so that
nothing else that the machine does in those minutes falls on one system alone. A result is the median over the rounds.

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
from farcall.bench import systems
from farcall.bench.processes import EndpointFailed, ended_by_signals
from farcall.bench.rounds import Turn, rotated, take
from farcall.bench.screen import Screen
from farcall.bench.systems import installed
from figures import Results, wanted_figures
from measurements import (
    QUICK,
    Effort,
    measure_beside,
    measure_busy,
    measure_calls,
    measure_copy,
    measure_data,
    measure_idle,
    measure_import,
    measure_shared,
)
from recording import Block

_OWN_README: Final = Path(__file__).with_name("README.md")
_REPOSITORY_README: Final = Path(__file__).parents[1] / "README.md"


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
        help="put the tables into FILE; without FILE, into the README beside this program, and a summary into the"
        " repository's",
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
        if absent := sorted({system.package for system in options.systems if not installed(system)}):
            parser.error(
                f"not installed: {', '.join(absent)}; `pip install 'farcall[peers]'` installs what is compared"
            )
    # Both are refused now rather than after minutes of measuring.
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no directory {options.json.parent}")
    if options.write_readme is not None:
        try:
            for block in blocks(options.write_readme):
                block.around()
        except (OSError, ValueError) as error:
            parser.error(f"--write-readme: {error}")
    return options


def blocks(readme: Path) -> list[Block]:
    """Where to record the run if this README is asked for: the place of the tables and, it may be, of a summary."""
    tables = Block.of_tables(readme)
    return [tables, Block.of_summary(_REPOSITORY_README)] if readme == _OWN_README else [tables]


def plan(chosen: Sequence[systems.System], effort: Effort, results: Results) -> list[Turn]:
    """All turns of the run in their order: a description, and what measures and records."""
    turns: list[Turn] = []
    farcall = next((system for system in chosen if system.family == "farcall"), None)
    copies = [systems.COPY] if any(system.family == "raw" for system in chosen) else []
    yardsticks = {f"farcall-{kind}": systems.find(f"raw-spin-{kind}") for kind in ("unix", "tcp")}

    def calls(system: systems.System) -> None:
        results.calls.setdefault(system.name, []).append(measure_calls(system, effort))

    def beside_raw(system: systems.System, raw: systems.System) -> None:
        results.beside_raw.setdefault(system.name, []).append(measure_beside(system, raw, effort))

    def data(system: systems.System) -> None:
        results.data.setdefault(system.name, []).append(measure_data(system, effort))

    def shared(system: systems.System) -> None:
        results.shared.setdefault(system.name, []).append(measure_shared(system, effort))

    def idle(system: systems.System) -> None:
        results.idle_percent.append(measure_idle(system, effort))

    def busy() -> None:
        spinning, blocking = measure_busy(effort)
        results.busy_spinning += spinning
        results.busy_blocking += blocking

    for number in range(effort.rounds):
        for system in rotated(chosen, number):
            title = f"round {number + 1}: {system.label}"
            turns.append((title, lambda system=system: calls(system)))  # type: ignore[misc]
            raw = yardsticks.get(system.name)
            if raw is not None and raw in chosen:
                turns.append((f"{title} beside {raw.label}", lambda system=system, raw=raw: beside_raw(system, raw)))  # type: ignore[misc]
            if system.refers:
                turns.append((f"{title}, shared references", lambda system=system: shared(system)))  # type: ignore[misc]
        for system in rotated([*(each for each in chosen if each.threads), *copies], number):
            title = f"round {number + 1}: {system.label}, large data and many threads"
            turns.append((title, lambda system=system: data(system)))  # type: ignore[misc]
        if farcall is None:
            continue
        turns.append((f"round {number + 1}: memory", lambda: results.copy_us.append(measure_copy(effort))))
        turns.append((f"round {number + 1}: an idle worker", lambda: idle(farcall)))
        turns.append((f"round {number + 1}: {systems.BUSY_WORKERS} busy workers, spinning and not", busy))
        turns.append((f"round {number + 1}: import farcall", lambda: results.import_ms.append(measure_import(effort))))
    return turns


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it all; the exit status."""
    options = parse(arguments)
    effort = QUICK if options.quick else Effort()
    if options.rounds is not None:
        effort = dataclasses.replace(effort, rounds=options.rounds)
    screen = Screen()
    chosen = options.systems
    if chosen is None:
        chosen = [system for system in systems.ALL if installed(system)]
        for absent in sorted({str(system.package) for system in systems.ALL if system not in chosen}):
            screen.note(f"{absent} is not installed and is left out; `pip install 'farcall[peers]'` does")
    results = Results()
    try:
        take(plan(chosen, effort, results), results.others_percent, screen)
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
        texts = (report.in_full(shown, where), report.summary(results, where))
        for block, text in zip(blocks(options.write_readme), texts, strict=False):
            block.replace(text)
    good = all(figure.verdict in ("met", "aim met", "within noise") for figure in figures)
    return 1 if options.strict and not good else 0


if __name__ == "__main__":
    with ended_by_signals():
        sys.exit(main())
