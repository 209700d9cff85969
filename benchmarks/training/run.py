"""How long a training step takes with distributed autograd: torch's RPC and farcall side by side.

    PYTHONPATH=benchmarks python -m training.run                    # about two minutes
    PYTHONPATH=benchmarks python -m training.run --quick            # does it work? figures not to be believed
    PYTHONPATH=benchmarks python -m training.run --rounds 9 --strict --json found.json

Two processes: a trainer with recurrent layers, and a server with embedding table and decoder (`model`). A round starts
them anew, for each of the two in turn; a result is the median over the rounds of the medians in each. Beside them, the
same step in one process: what is computed in any case, so that it can be seen what the calls add. With --strict the
exit status is 1 unless farcall's step is at least twice as fast as torch's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Final

import report
from farcall.bench.machine import others_cpu_seconds
from farcall.bench.processes import EndpointFailed, Endpoints, exit_on_signals, free_port
from farcall.bench.screen import Screen
from farcall.bench.tables import TextTable
from figures import Figure, Results
from recording import Block
from training.worker import ALONE

WANTED: Final = 2.0
"""Times torch's speed, for a step of the small model."""
AIM: Final = 4.0
LIMIT: Final = 120.0
"""Seconds for each thing that a process is asked for."""
SMALL: Final = {"words": 10, "features": 2, "hidden": 3, "layers": 4, "length": 3, "batch": 5}
"""PyTorch's tutorial."""
LARGER: Final = {"words": 1000, "features": 64, "hidden": 64, "layers": 1, "length": 16, "batch": 8}
COMPARED: Final = ("farcall", "torch")
SYSTEMS: Final = (*COMPARED, ALONE)

Found = dict[str, float]


def measure(system: str, quick: bool) -> Found:
    """One round of one system: medians in µs by name. Raises `EndpointFailed`; no process is left in any case."""
    port = free_port()
    with Endpoints() as endpoints:
        workers = [
            endpoints.start(
                f"{role} on {system}",
                kind="module",
                module="training.worker",
                options={"system": system, "rank": rank, "port": port, "limit": LIMIT},
            )
            for rank, role in enumerate(("trainer", "server") if system != ALONE else ("trainer",))
        ]
        endpoints.wait_until_up(*workers, limit=LIMIT)
        trainer = workers[0]
        found: Found = {}
        for title, sizes, times in (("small", SMALL, 500), ("larger", LARGER, 300)):
            trainer.ask("steps", sizes=sizes, times=5 if quick else 50)  # not counted: compilers warm up
            for part, micros in trainer.ask("steps", sizes=sizes, times=5 if quick else times).items():
                found[f"{title} model: {part}"] = micros
        if system != ALONE:
            trainer.ask("pairs", times=5 if quick else 200)
            for part, micros in trainer.ask("pairs", times=20 if quick else 2000).items():
                found[f"one call: {part}"] = micros
        for worker in workers:
            worker.send("stop")
        return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options; exits with status 2 and a reason for wrong ones."""
    parser = argparse.ArgumentParser(prog="training.run", description="A training step on farcall and on torch's RPC.")
    parser.add_argument("--quick", action="store_true", help="a short run that shows that everything works")
    parser.add_argument("--rounds", type=int, metavar="N", help="alternating rounds (default: 5; 1 with --quick)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), metavar="A,B", help="only these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what each round found there")
    parser.add_argument("--write-readme", action="store_true", help="write the table into benchmarks/README.md")
    parser.add_argument("--strict", action="store_true", help="exit with 1 unless the wanted figure is met")
    options = parser.parse_args(arguments)
    if options.rounds is None:
        options.rounds = 1 if options.quick else 5
    options.systems = options.systems.split(",")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    if unknown := sorted(set(options.systems) - set(SYSTEMS)):
        parser.error(f"--systems: there is no {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    if importlib.util.find_spec("torch") is None:
        parser.error("torch is not installed: pip install 'farcall[torch]'")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run it; the exit status."""
    options = parse(arguments)
    results = Results()
    rounds: dict[str, list[Found]] = {system: [] for system in options.systems}
    for number in range(options.rounds):
        for system in options.systems if number % 2 == 0 else reversed(options.systems):
            others, start = others_cpu_seconds(), time.perf_counter()
            try:
                found = measure(system, options.quick)
            except EndpointFailed as failure:
                print(f"the bench cannot go on: {failure}", file=sys.stderr)
                return 1
            results.others_percent.append(100 * (others_cpu_seconds() - others) / (time.perf_counter() - start))
            rounds[system].append(found)
            print(f"round {number + 1}: {system:8} {found['small model: step']:7.0f} µs a step", flush=True)
    medians = {
        system: {name: statistics.median(each[name] for each in found) for name in found[0]}
        for system, found in rounds.items()
    }
    both = set(COMPARED) <= rounds.keys()
    ratios = {name: medians["torch"][name] / micros for name, micros in medians["farcall"].items()} if both else {}
    rows = [
        [
            name,
            *(f"{medians[system][name]:,.0f}" if name in medians[system] else "–" for system in rounds),
            f"{ratios[name]:.2f}" if ratios else "–",
        ]
        for name in next(iter(medians.values()))
    ]
    title = f"Training with a parameter server, 2 processes (µs, medians, {options.rounds} rounds)"
    table = TextTable(title, ["", *rounds, "× torch's speed"], rows)
    where = report.machine(results)
    screen = Screen()
    screen.table(table)
    screen.line(", ".join(f"{name} {value}" for name, value in where.items()))
    if options.write_readme:
        Block.of_program("training.run").replace(report.in_full([table], where))
    ratio = ratios.get("small model: step")
    figure = Figure("training step, small model: torch's speed", ratio, WANTED, AIM)
    if ratio is not None:
        if ALONE in medians:
            computed = medians[ALONE]["small model: step"]
            added = [medians[system]["small model: step"] - computed for system in COMPARED]
            print(
                f"to the {computed:.0f} µs of one process, farcall adds {added[0]:.0f} µs and torch {added[1]:.0f} µs"
            )
        print(
            f"a step of the small model: {ratio:.2f} × torch's speed; wanted {WANTED:g}, aim {AIM:g}: {figure.verdict}"
        )
    if options.json is not None:
        written = {"machine": where, "rounds": rounds, "ratios": ratios, "figures": [figure.as_json()]}
        options.json.write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if options.strict and (ratio is None or ratio < WANTED) else 0


if __name__ == "__main__":
    with exit_on_signals():
        sys.exit(main())
