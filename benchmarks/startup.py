"""How long a group takes to start: farcall and torch's RPC side by side, in alternating rounds.

All processes are started first, and import what they need; imports are not measured. Then all are told to go: each
calls `init_rpc`, then everybody else (all calls at once), and says when, by the clock that all processes share. A
round's time is from the moment when the last one called `init_rpc` to the moment when the last call returned.

    python benchmarks/startup.py                          # 32 workers, 5 rounds
    python benchmarks/startup.py --workers 8 --rounds 3 --strict

With --strict the exit status is 1 unless farcall takes at most a quarter of torch's time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Final, NamedTuple

from farcall.bench.processes import EndpointFailed, Endpoints, exit_on_signals
from systems import find

WANTED: Final = 0.25
"""Of torch's time."""
LIMIT: Final = 180.0
"""Seconds for each step of a round of one system."""


class Round(NamedTuple):
    """What one round of one system took, in seconds."""

    total: float
    joining: float
    """Of it, until `init_rpc` had returned everywhere."""
    shutdown: float
    """The longest graceful shutdown."""


def measure(system: str, size: int) -> Round:
    """One round. Raises `EndpointFailed`; no process is left in any case."""
    with Endpoints() as endpoints:
        address = endpoints.address(size)
        workers = [
            endpoints.start(f"{system}, worker {rank}", kind="joiner", system=find(system)) for rank in range(size)
        ]
        endpoints.wait_until_up(*workers, limit=LIMIT)
        for rank, worker in enumerate(workers):
            worker.send("join", rank=rank, address=address)
        times = [worker.receive(LIMIT) for worker in workers]
        for worker in workers:
            worker.send("leave")
        shutdown = max(worker.receive(LIMIT) for worker in workers)
    last_came = max(began for began, _, _ in times)
    joining = max(joined for _, joined, _ in times) - last_came
    return Round(max(ended for _, _, ended in times) - last_came, joining, shutdown)


def main(arguments: list[str] | None = None) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(prog="startup.py", description="How long a group takes to start.")
    parser.add_argument("--workers", type=int, default=32, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--systems", default="farcall,torch", metavar="A,B")
    parser.add_argument("--strict", action="store_true", help="exit with 1 unless the figure is met")
    options = parser.parse_args(arguments)
    chosen = options.systems.split(",")
    if "torch" in chosen and not find("torch").is_installed:
        print("torch is not installed and is left out", file=sys.stderr)
        chosen.remove("torch")
    rounds: dict[str, list[Round]] = {system: [] for system in chosen}
    for number in range(options.rounds):
        for system in chosen if number % 2 == 0 else reversed(chosen):
            try:
                found = measure(system, options.workers)
            except EndpointFailed as failure:
                print(f"round {number + 1}: {failure}")
                continue
            rounds[system].append(found)
            print(
                f"round {number + 1}: {system:8} {found.total:7.3f} s to the last of all calls "
                f"(init_rpc {found.joining:.3f} s), shutdown {found.shutdown:.3f} s",
                flush=True,
            )
    if not all(rounds.values()):
        return 1
    medians = {system: statistics.median(each.total for each in found) for system, found in rounds.items()}
    for system, seconds in medians.items():
        print(f"{system}: {seconds:.3f} s, the median of {len(rounds[system])} rounds, {options.workers} workers")
    if len(medians) < 2:
        return 0
    share = medians["farcall"] / medians["torch"]
    verdict = "met" if share <= WANTED else "missed"
    print(f"farcall takes {share:.2f} of torch's time; wanted: at most {WANTED:g}, {verdict}")
    return 1 if options.strict and share > WANTED else 0


if __name__ == "__main__":
    with exit_on_signals():
        sys.exit(main())
