"""How fast calls between hosts are: farcall in clear text and encrypted, torch's RPC and plain TLS sockets.

    PYTHONPATH=benchmarks python -m hosts.run                    # some minutes
    PYTHONPATH=benchmarks python -m hosts.run --quick            # does it work? figures not to be believed
    PYTHONPATH=benchmarks python -m hosts.run --write-docs       # record the run in docs/benchmarks.md
    PYTHONPATH=benchmarks python -m hosts.run --beside ../main   # the farcall of another checkout in the same rounds

Two network namespaces of this machine stand for the hosts (`namespaces`). Where the user may not make them, there is
nothing to measure: the program says so, and ends with status 0. In each round every system has its turn in processes
of its own, in an order that rotates; a result is the median over the rounds. With --strict the exit status is 1 unless
every wanted figure is met.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import report
from farcall.bench.machine import others_cpu_seconds
from farcall.bench.processes import Endpoint, EndpointFailed, Endpoints, exit_on_signals
from farcall.bench.report import HOSTS_BEGIN, HOSTS_END
from farcall.bench.screen import Screen
from farcall.bench.system import System
from farcall.bench.tables import ABSENT, TextTable, in_time, number, three_digits
from figures import Figure, Results
from hosts.namespaces import NotAllowed, SecondHost, join_two
from hosts.systems import FarcallBetweenHosts, Place, PlainTls, TorchBetweenHosts
from recording import Block

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = Block(ROOT / "docs" / "benchmarks.md", HOSTS_BEGIN, HOSTS_END)
SIZES: Final = {"4 KiB": 1 << 12, "1 MiB": 1 << 20, "64 MiB": 1 << 26}
STREAM_BYTES: Final = 1 << 28
BESIDE: Final = "no-op beside 256 MiB"
_PORTS: Final = range(20_000, 30_000)
"""The namespaces are new, so all ports are free."""


class Measurer:
    """Measures one system after another, each with a port of its own."""

    def __init__(self, far: SecondHost, quick: bool) -> None:
        self._far = far
        self._share = 0.05 if quick else 1.0
        self._ports = iter(_PORTS)

    def measure(self, system: System) -> dict[str, dict[str, float]]:
        """One turn of a system: what was found, by point. Raises `EndpointFailed`; no process is left in any case."""
        with Endpoints() as endpoints:
            place = Place(next(self._ports), endpoints.address(2).socket_path, namespace=self._far.path)
            server = endpoints.start(f"the server of {system.label}", kind="server", system=system, address=place)
            if not system.starts_together:
                endpoints.wait_until_up(server)
            caller = endpoints.start(f"the caller of {system.label}", kind="caller", system=system, address=place)
            endpoints.wait_until_up(caller, *([server] if system.starts_together else []))
            return self._points(system, caller)

    def _points(self, system: System, caller: Endpoint) -> dict[str, dict[str, float]]:
        share = self._share
        calls, warmup = int(3000 * share), int(500 * share)
        found = {"no-op": caller.ask("noops", calls=calls, warmup=warmup, seconds=2.5 * share)}
        for name, size in SIZES.items():
            found[name] = caller.ask("echoes", size=size, calls=calls, warmup=10, seconds=2.5 * share)
        if system.refers:
            found["pipelined"] = caller.ask("pipelined", calls=int(5000 * share), warmup=int(500 * share))
            found["remote + to_here"] = caller.ask("remotes", calls=calls, warmup=warmup, seconds=2.5 * share)
            found[BESIDE] = caller.ask("streaming", size=STREAM_BYTES, seconds=2.5 * share)
        return found


def wanted_figures(results: Results) -> list[Figure]:
    """Returns the figures that are wanted between hosts."""
    clear, encrypted, torch, plain = "farcall-clear", "farcall-encrypted", "torch", "plain-tls"

    def faster(point: str, system: str, than: str) -> float | None:
        if point == "pipelined":
            own, other = (results.median(name, point, "calls_per_s") for name in (system, than))
        else:
            other, own = (results.median(name, point) for name in (system, than))
        return None if own is None or other is None else own / other

    every = [
        Figure(f"encrypted, {point}: faster than torch in clear text", faster(point, encrypted, torch), wanted, aim)
        for point, wanted, aim in (
            ("no-op", 12, None),
            ("pipelined", 12, None),
            ("remote + to_here", 12, None),
            ("4 KiB", 8, None),
            ("64 MiB", 0.85, 1.0),
        )
    ]
    every += [
        Figure(f"encrypted, {point}: faster than plain ssl sockets", faster(point, encrypted, plain), 1.0)
        for point in ("1 MiB", "64 MiB")
    ]
    times = [results.median(name, "no-op") for name in (encrypted, clear)]
    more = None if times[0] is None or times[1] is None else times[0] - times[1]
    every.append(Figure("no-op: encrypted more than in clear text", more, 25, bound="≤", unit=" µs"))
    every += [
        Figure(f"clear text, {point}: faster than torch", faster(point, clear, torch), wanted)
        for point, wanted in (("no-op", 20), ("1 MiB", 2.5), ("64 MiB", 2))
    ]
    runs = results.values(clear, "no-op")
    spread = max(runs) / min(runs) if len(runs) > 1 else None
    every.append(Figure("clear text, no-op: slowest run / fastest run", spread, 1.5, bound="≤"))
    for name in (clear, encrypted):
        slowest = results.median(name, BESIDE, "p99_us")
        in_ms = None if slowest is None else slowest / 1000
        every.append(Figure(f"{name}, {BESIDE}, p99", in_ms, 5, bound="<", unit=" ms"))
    return every


def tables(results: Results, systems: Sequence[System], rounds: int) -> list[TextTable]:
    """Returns the table of times and that of the wanted figures."""
    points = ["no-op", *SIZES, "pipelined", "remote + to_here"]

    def cell(system: System, point: str) -> str:
        if point == "pipelined":
            rate = results.median(system.name, point, "calls_per_s")
            return ABSENT if rate is None else in_time(1 / rate)
        median = results.median(system.name, point)
        return ABSENT if median is None else in_time(median / 1e6)

    rows = []
    for system in systems:
        p99 = results.median(system.name, BESIDE, "p99_us")
        cells = [cell(system, point) for point in points]
        rows.append([system.label, *cells, ABSENT if p99 is None else in_time(p99 / 1e6)])
    head = ["system", "no-op", *(f"{name} echo" for name in SIZES), "pipelined, each", "`remote` + `to_here`"]
    head.append(f"{BESIDE}, p99")
    medians = f"medians over {rounds} rounds" if rounds > 1 else "one round"
    figures = [
        [
            each.title,
            ABSENT if each.value is None else three_digits(each.value) + each.unit,
            f"{each.bound} {each.required:g}{each.unit}",
            number(each.aim, "g", each.unit),
            each.verdict,
        ]
        for each in wanted_figures(results)
    ]
    return [
        TextTable(f"Between two hosts ({medians})", head, rows),
        TextTable("What is wanted between hosts", ["figure", "found", "wanted", "aim", "verdict"], figures),
    ]


def section(shown: Sequence[TextTable], where: dict[str, str]) -> str:
    """Returns the section of docs/benchmarks.md."""
    text = (
        "`make bench-hosts` wrote this section. Two network namespaces of one machine, joined by a pair of virtual"
        " interfaces, stand for the two hosts. farcall uses TCP only, in clear text (`encrypt_between_hosts=False`) and"
        " encrypted, as it is by default; torch's RPC uses what it chooses between hosts, and never encrypts. The plain"
        " `ssl` sockets have nothing around them: they are the yardstick for what encryption costs in Python. An *echo*"
        " sends an array there and back. *Beside 256 MiB* is a no-op while another thread sends arrays of 256 MiB to"
        " the same worker."
    )
    run = ", ".join(f"{name} {value}" for name, value in where.items())
    return "\n\n".join(["## Between hosts", text, *(table.markdown() for table in shown), f"The run: {run}."])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options. Exits with status 2 and a reason for wrong ones."""
    parser = argparse.ArgumentParser(
        prog="hosts.run", description="Calls between two hosts: farcall, torch, plain TLS."
    )
    parser.add_argument("--quick", action="store_true", help="a short run that shows that everything works")
    parser.add_argument("--rounds", type=int, metavar="N", help="alternating rounds (default: 10; 1 with --quick)")
    parser.add_argument("--systems", metavar="A,B", help="only these, by name (default: all that are installed)")
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="measure the farcall of that checkout as well")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what each round found there")
    parser.add_argument("--write-docs", action="store_true", help="write the tables into docs/benchmarks.md")
    parser.add_argument("--strict", action="store_true", help="exit with 1 unless every wanted figure is met")
    options = parser.parse_args(arguments)
    if options.rounds is None:
        options.rounds = 1 if options.quick else 10
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    every: list[System] = [FarcallBetweenHosts(False), FarcallBetweenHosts(True), TorchBetweenHosts(), PlainTls()]
    if options.beside is not None:
        source = options.beside.absolute() / "src"
        if not (source / "farcall").is_dir():
            parser.error(f"--beside: {options.beside} is no checkout of farcall")
        every += [FarcallBetweenHosts(encrypts, str(source)) for encrypts in (False, True)]
    asked = None if options.systems is None else options.systems.split(",")
    if unknown := sorted(set(asked or ()) - {system.name for system in every}):
        names = ", ".join(system.name for system in every)
        parser.error(f"--systems: there is no {', '.join(unknown)}; there are {names}")
    options.systems = [each for each in every if each.is_installed and (asked is None or each.name in asked)]
    if options.write_docs:
        DOCS.around()  # refused now rather than after minutes of measuring
    return options


def run(options: argparse.Namespace, far: SecondHost) -> Results:
    """Measures all rounds. Raises `EndpointFailed`."""
    results, measurer = Results(), Measurer(far, options.quick)
    for turn in range(options.rounds):
        shift = turn % len(options.systems)
        for system in (*options.systems[shift:], *options.systems[:shift]):
            others, start = others_cpu_seconds(), time.perf_counter()
            found = measurer.measure(system)
            results.others_percent.append(100 * (others_cpu_seconds() - others) / (time.perf_counter() - start))
            results.record(system.name, found)
            shown = ", ".join(
                f"{point} {in_time(values['p50_us'] / 1e6)}" for point, values in found.items() if "p50_us" in values
            )
            print(f"round {turn + 1}: {system.label}: {shown}", file=sys.stderr, flush=True)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it; returns the exit status."""
    options = parse(arguments)
    try:
        far = join_two()
    except NotAllowed as error:
        print(f"bench-hosts is skipped: {error}. It needs root, or a kernel that allows user namespaces.")
        return 0
    try:
        results = run(options, far)
    except EndpointFailed as failure:
        print(f"the bench cannot go on: {failure}", file=sys.stderr)
        return 1
    shown = tables(results, options.systems, options.rounds)
    where = report.machine(results)
    screen = Screen()
    for table in shown:
        screen.table(table)
    screen.line(", ".join(f"{name} {value}" for name, value in where.items()))
    figures = wanted_figures(results)
    if options.json is not None:
        found: dict[str, Any] = {
            "machine": where,
            "rounds": results.rounds,
            "figures": [each.as_json() for each in figures],
        }
        options.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.write_docs:
        DOCS.replace(section(shown, where))
    return 1 if options.strict and any(each.verdict in ("missed", "not measured") for each in figures) else 0


if __name__ == "__main__":
    with exit_on_signals():
        sys.exit(main())
