"""Run the two workloads on farcall and on torch's RPC, in alternating rounds, and tell how they compare.

    PYTHONPATH=benchmarks python -m workloads.run                        # everything, about ten minutes
    PYTHONPATH=benchmarks python -m workloads.run --quick                # does it work? figures not to be believed
    PYTHONPATH=benchmarks python -m workloads.run --workloads rl --computing numpy --world-size 8
    PYTHONPATH=benchmarks python -m workloads.run --json found.json --strict
    PYTHONPATH=benchmarks python -m workloads.run --recorded found.json --write-readme

Every round starts its processes anew and ends them, for the reasons that `measurements` has. A result is the median
over the rounds. With --strict the exit status is 1 unless every wanted figure is met.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from rich.console import Console

import report
from farcall.bench.machine import others_cpu_seconds
from farcall.bench.processes import EndpointFailed
from farcall.bench.screen import Screen
from farcall.bench.tables import TextTable
from figures import Results
from recording import Block
from workloads import computing, sides
from workloads.cases import LABELS, Case, all_cases, measure

_COLUMNS: Final = {
    "rl": {
        "steps_per_s": "steps/s",
        "agent_p50_us": "agent: p50 µs",
        "agent_p95_us": "p95 µs",
        "observer_p50_us": "observer: p50 µs",
        "observer_p95_us": "p95 µs",
    },
    "ps": {
        "updates_per_s": "updates/s",
        "batch_p50_us": "batch: p50 µs",
        "batch_p95_us": "p95 µs",
        "waiting_p50_us": "of it waiting: p50 µs",
        "waiting_p95_us": "p95 µs",
    },
}
_TITLES: Final = {"rl": "Reinforcement learning", "ps": "Parameter server"}
_MIDDLE: Final = {"rl": "a coordinator, an agent and observers", "ps": "a master, a server and trainers"}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; exits with status 2 and a reason for wrong ones."""
    parser = argparse.ArgumentParser(prog="workloads.run", description="Two workloads on farcall and on torch's RPC.")
    parser.add_argument("--quick", action="store_true", help="a short run that shows that everything works")
    parser.add_argument("--rounds", type=int, metavar="N", help="alternating rounds (default: 5; 1 with --quick)")
    parser.add_argument("--world-size", type=int, default=4, metavar="N", help="processes in all (default: 4)")
    parser.add_argument("--systems", metavar="A,B", help=f"only these: {', '.join(sides.NAMES)} (default: installed)")
    parser.add_argument("--workloads", metavar="A,B", help=f"only these: {', '.join(_TITLES)} (default: all)")
    parser.add_argument(
        "--computing", metavar="A,B", help=f"what they compute in: {', '.join(computing.NAMES)} (default: installed)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all findings there")
    parser.add_argument("--recorded", type=Path, metavar="FILE", help="measure nothing: show what --json has written")
    parser.add_argument("--write-readme", action="store_true", help="write the tables into benchmarks/README.md")
    parser.add_argument("--strict", action="store_true", help="exit with 1 unless every wanted figure is met")
    options = parser.parse_args(arguments)
    if options.rounds is None:
        options.rounds = 1 if options.quick else 5
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    if options.world_size < 3:
        parser.error(f"--world-size must be at least 3, for one observer or trainer, not {options.world_size}")
    torch_is_here = importlib.util.find_spec("torch") is not None
    for name, every in (("systems", sides.NAMES), ("computing", computing.NAMES), ("workloads", tuple(_TITLES))):
        given = getattr(options, name)
        if given is None:
            picked = [each for each in every if each != "torch" or torch_is_here]
        else:
            asked = given.split(",")
            if unknown := sorted(set(asked) - set(every)):
                parser.error(f"--{name}: there is no {', '.join(unknown)}; there are {', '.join(every)}")
            if "torch" in asked and not torch_is_here:
                parser.error(f"--{name}: torch is not installed; `pip install 'farcall[bench]'` does")
            picked = [each for each in every if each in asked]
        setattr(options, name, picked)
    if options.recorded is not None and not options.recorded.is_file():
        parser.error(f"--recorded: there is no file {options.recorded}")
    # Refused now rather than after minutes of measuring.
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no directory {options.json.parent}")
    return options


def read(recorded: Path, cases: Sequence[Case]) -> tuple[list[Case], dict[str, str]]:
    """The cases of a run that `as_json` has written, and what it stood on. Raises OSError, ValueError."""
    written = json.loads(recorded.read_text(encoding="utf-8"))
    found = {case["name"]: case["rounds"] for case in written["cases"]}
    measured = [case for case in cases if case.name in found]
    for case in measured:
        case.rounds.update(found[case.name])
    return measured, written["machine"]


def run(cases: Sequence[Case], systems: Sequence[str], rounds: int, results: Results, notes: Console) -> None:
    """Measure all cases: in each round every system has its turn with every case, and the order rotates.

    Raises EndpointFailed.
    """
    for number in range(rounds):
        turn = number % len(systems)
        for case in cases:
            for system in (*systems[turn:], *systems[:turn]):
                others, start = others_cpu_seconds(), time.perf_counter()
                found = measure(system, case.setting)
                share = (others_cpu_seconds() - others) / (time.perf_counter() - start)
                results.others_percent.append(100 * share)
                case.rounds.setdefault(system, []).append(found)
                notes.print(
                    f"round {number + 1}: {case.title}: {LABELS[system]}: {found[case.rate]:,.1f} "
                    f"{case.rate.replace('_per_', '/')}",
                    markup=False,
                    highlight=False,
                )


def tables(cases: Sequence[Case], systems: Sequence[str], rounds: int) -> list[TextTable]:
    """A table for each workload, and one of the figures."""
    shown = []
    for workload, columns in _COLUMNS.items():
        rows = []
        for case in cases:
            if case.workload != workload:
                continue
            for system in systems:
                values = [case.median(system, finding) for finding in columns]
                cells = ["–" if value is None else f"{value:,.{1 if value < 1000 else 0}f}" for value in values]
                ratio = "–" if case.ratio is None or system != "farcall" else f"{case.ratio:.2f}"
                rows.append([f"{case.title.partition(', ')[2]}: {LABELS[system]}", *cells, ratio])
        if rows:
            size = next(case.setting for case in cases if case.workload == workload).world_size
            title = f"{_TITLES[workload]}, {size} processes: {_MIDDLE[workload]} (medians, {rounds} rounds)"
            shown.append(TextTable(title, ["", *columns.values(), "× torch"], rows))
    figures = [case.figure for case in cases if case.figure is not None]
    if figures:
        rows = [
            [
                each.title,
                "–" if each.value is None else f"{each.value:.2f}{each.unit}",
                f"{each.bound} {each.required:g}{each.unit}",
                "–" if each.aim is None else f"{each.aim:g}{each.unit}",
                each.verdict,
            ]
            for each in figures
        ]
        shown.append(TextTable("What is wanted", ["figure", "found", "wanted", "aim", "verdict"], rows))
    return shown


def as_json(cases: Sequence[Case], where: dict[str, str]) -> dict[str, Any]:
    """Everything, with each round's findings, for programs to read."""
    return {
        "machine": where,
        "cases": [
            {
                "name": case.name,
                "title": case.title,
                "setting": dataclasses.asdict(case.setting),
                "rounds": case.rounds,
                "throughput": case.rate,
                "ratio": case.ratio,
            }
            for case in cases
        ],
        "figures": [case.figure.as_json() for case in cases if case.figure is not None],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it all; the exit status."""
    options = parse(arguments)
    screen, notes = Screen(), Console(stderr=True)
    cases = [
        case
        for case in all_cases(options.computing, options.world_size, options.quick)
        if case.workload in options.workloads
    ]
    results = Results()
    if options.recorded is not None:
        cases, where = read(options.recorded, cases)
        options.rounds = len(cases[0].rounds[options.systems[0]])
    else:
        try:
            run(cases, options.systems, options.rounds, results, notes)
        except EndpointFailed as failure:
            notes.print(f"the bench cannot go on: {failure}", markup=False, style="red")
            return 1
        where = report.machine(results)
    shown = tables(cases, options.systems, options.rounds)
    for table in shown:
        screen.table(table)
    screen.line(", ".join(f"{name} {value}" for name, value in where.items()))
    if results.disturbed:
        notes.print(
            "Other programs disturbed the run. Figures to keep need a machine with nothing else to do.", style="yellow"
        )
    if options.json is not None:
        text = json.dumps(as_json(cases, where), indent=2, ensure_ascii=False)
        options.json.write_text(text + "\n", encoding="utf-8")
    if options.write_readme:
        Block.of_program("workloads.run").replace(report.in_full(shown, where))
    good = all(case.figure is None or case.figure.verdict in ("met", "aim met") for case in cases)
    return 1 if options.strict and not good else 0


def _end(signal_number: int, _: object) -> NoReturn:
    raise SystemExit(128 + signal_number)


if __name__ == "__main__":
    # As an exception it leaves every `with` behind it in order, and with it the processes that were started.
    signal.signal(signal.SIGTERM, _end)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
