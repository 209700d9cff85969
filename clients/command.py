"""`python -m clients`: the arguments, the table, the verdict.

Exit status: 0 if everything that passes on torch passes on farcall; 1 if not; 2 if nothing could be run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from clients.catalog import CLIENTS, Client, Program
from clients.runner import IMPLEMENTATIONS, Implementation, Result, run

_IMPORT_TIME_LIMIT_S: Final = 300.0


@dataclass(frozen=True)
class Row:
    """One program of a client, on both."""

    client: str
    program: str
    on_torch: Result
    on_farcall: Result

    @property
    def is_lost(self) -> bool:
        """Whether it passes on torch only."""
        return self.on_torch.passed and not self.on_farcall.passed


def main(
    arguments: Sequence[str] | None = None,
    clients: Sequence[Client] = CLIENTS,
    run_program: Callable[[Program, Implementation, float | None], Result] = run,
) -> int:
    """Runs the chosen programs, prints the table, returns the exit status."""
    options = _parse(arguments)
    if options.requirements:
        print("\n".join(client.requirement for client in clients))
        return 0
    chosen = [client for client in clients if not options.client or client.name in options.client]
    if unknown := set(options.client) - {client.name for client in clients}:
        print(f"there is no client {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    rows = []
    for client in chosen:
        if why := _why_missing(client):
            print(f"{client.name} is left out: {why}", file=sys.stderr, flush=True)
            continue
        for program in client.programs:
            if not any(part in program.name for part in options.k or [""]):
                continue
            rows.append(_run_on_both(client, program, options, run_program))
    if not rows:
        print("no program was run: install a client, or choose another", file=sys.stderr)
        return 2
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    lost = [row for row in rows if row.is_lost]
    for row in lost:
        print(f"\n{row.client}, {row.program}: passes on torch, and on farcall: {row.on_farcall.reason}")
        print(row.on_farcall.output)
    return 1 if lost else 0


def table(rows: Sequence[Row]) -> str:
    """The results as a Markdown table."""
    lines = ["| client | program | torch | s | farcall | s |", "|---|---|---|---:|---|---:|"]
    for row in rows:
        cells = [row.client, row.program]
        for result in (row.on_torch, row.on_farcall):
            cells += ["passed" if result.passed else f"failed: {result.reason}", f"{result.seconds:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m clients", description="Run programs of packages that use torch.distributed.rpc on farcall."
    )
    parser.add_argument("client", nargs="*", help="only these clients")
    parser.add_argument("-k", action="append", metavar="PART", help="only programs whose name has this in it")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="runs on farcall, which must all pass")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="time limit for each run of a program")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    parser.add_argument("--requirements", action="store_true", help="print what pip has to install, and run nothing")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error(f"--runs must be at least 1, not {options.runs}")
    return options


def _why_missing(client: Client) -> str:
    """Why the client cannot be imported here; "" if it can."""
    command = [sys.executable, "-W", "ignore", "-c", f"import {client.module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"its import took longer than {_IMPORT_TIME_LIMIT_S:g} s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["its import failed"])[-1]


def _run_on_both(
    client: Client,
    program: Program,
    options: argparse.Namespace,
    run_program: Callable[[Program, Implementation, float | None], Result],
) -> Row:
    results = {}
    for on in IMPLEMENTATIONS:
        result = run_program(program, on, options.timeout)
        for _ in range(options.runs - 1 if on == "farcall" else 0):
            if result.passed:
                result = run_program(program, on, options.timeout)
        results[on] = result
        outcome = "passed" if result.passed else f"failed ({result.reason})"
        print(f"{client.name}, {program.name}, on {on}: {outcome}, {result.seconds:.1f} s", file=sys.stderr, flush=True)
    return Row(client.name, program.name, results["torch"], results["farcall"])
