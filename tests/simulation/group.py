"""`python -m simulation.group`: how groups of many sizes join, churn and agree, in virtual time.

For each size: that many workers join, one after the other; then single changes of each kind, each until all agree; then
*churn*, many changes of all kinds at once on a network that loses messages. Printed are the messages that a change
cost, beside N log2 N, and how long it took until all agreed. Pings, which go on whether something changes or not, are
not among them. Exits with 1 if an invariant of `simulated_group.py` broke, or if a change cost more than N log2 N.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from math import log2
from time import perf_counter
from typing import Final, NamedTuple

from farcall.protocol.ids import Worker
from farcall.protocol.membership import Membership
from simulation.invariants import BrokenInvariant
from simulation.simulate import shown_progress
from simulation.simulated_group import SimulatedGroup

SIZES: Final = (64, 125, 250, 500, 1000)
ALONE: Final = ("join", "leave", "crash", "vanish", "restart")
"""The changes that are made one at a time."""
TOGETHER: Final = ("join", "join", "leave", "crash", "vanish", "restart", "stall", "oversleep", "stillborn")
"""... and those that churn is made of. Stalled for five seconds, a worker stays; for longer than the patience, not."""
CHURN_SECONDS: Final = 20.0
CHURN_LOSS: Final = 0.01
LONG_ENOUGH: Final = 30.0
"""In so many seconds all must agree, also on those whose watchers died with them."""


class Row(NamedTuple):
    """What one kind of change cost in a group of one size."""

    workers: int
    what: str
    changes: int
    messages: float
    """For each change."""
    seconds: float
    """Until all agreed, from the (last) change on."""

    @property
    def limit(self) -> float:
        """N log2 N."""
        return self.workers * log2(self.workers)

    def __str__(self) -> str:
        return (
            f"{self.workers:>5,} {self.what:>8} {self.changes:>7,} {self.messages:>10,.0f} "
            f"{self.messages / self.workers:>6.2f} {self.limit:>9,.0f} {self.messages / self.limit:>6.2f} "
            f"{self.seconds:>8.2f}"
        )


HEAD: Final = (
    f"{'N':>5} {'change':>8} {'changes':>7} {'messages':>10} {'/N':>6} {'N log2 N':>9} {'/that':>6} {'seconds':>8}\n"
    f"{'':>5} {'':>8} {'':>7} {'each':>10} {'':>6} {'':>9} {'':>6} {'to agree':>8}"
)


def changes_of(workers: int) -> int:
    """How many changes are measured for a group of this size."""
    return workers + len(ALONE) + churn_changes(workers)


def churn_changes(workers: int) -> int:
    """How many changes churn is made of: a tenth of the group, and at least ten."""
    return max(10, workers // 10)


def measure(
    workers: int, seed: int, progress: Callable[[int], None], machine: Callable[..., Membership] = Membership
) -> Iterator[Row]:
    """Runs a group of this size. `progress` is told of every change. Raises `BrokenInvariant`."""
    group, chance = SimulatedGroup(seed, machine=machine), random.Random(seed)
    for _ in range(workers):
        group.join()
        group.run(0.05)
        progress(1)
    seconds = group.settle(LONG_ENOUGH).seconds
    yield Row(workers, "joins", workers, group.spreading_messages() / workers, seconds)
    for what in ALONE:
        group.run(3.0)  # so that nothing of what was before is counted
        before = group.spreading_messages()
        count = change(group, what, chance)
        seconds = group.settle(LONG_ENOUGH).seconds
        group.run(3.0)
        progress(1)
        yield Row(workers, what, count, (group.spreading_messages() - before) / count, seconds)
    before, count = group.spreading_messages(), churn_changes(workers)
    group.loss = CHURN_LOSS
    costing = 0
    for _ in range(count):
        group.run(chance.expovariate(count / CHURN_SECONDS))
        costing += change(group, chance.choice(TOGETHER), chance)
        progress(1)
    seconds = group.settle(LONG_ENOUGH).seconds
    yield Row(workers, "churn", costing, (group.spreading_messages() - before) / max(1, costing), seconds)


def change(group: SimulatedGroup, what: str, chance: random.Random) -> int:
    """Makes it happen to somebody; gives how many changes of the group it is."""
    if what == "join":
        group.join()
        return 1
    if what == "stillborn":
        group.store.skip()
        return 0
    number = chance.choice([number for number in group.there() if not group.workers[number].frozen])
    if what == "restart":
        group.crash(number)
        group.join(group.workers[number].machine.me.name)
        return 2
    acts: dict[str, Callable[[Worker], None]] = {
        "leave": group.leave,
        "crash": group.crash,
        "vanish": group.vanish,
        "stall": lambda number: group.freeze(number, 5.0),
        "oversleep": lambda number: group.freeze(number, 12.0),
    }
    acts[what](number)
    return 0 if what == "stall" else 1


def main(arguments: list[str] | None = None) -> int:
    """The command. Gives its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m simulation.group",
        description="Groups of many sizes join, churn and agree, in virtual time; what that costs in messages.",
    )
    parser.add_argument("--workers", type=int, nargs="+", default=SIZES, metavar="N", help="the sizes of the groups")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    options = parser.parse_args(arguments)
    began, done, broken = perf_counter(), 0, False
    rows: list[Row] = []
    total = sum(changes_of(workers) for workers in options.workers)
    with shown_progress(total, None, "changes") as show:

        def progress(count: int) -> None:
            nonlocal done
            done += count
            show(done, perf_counter() - began)

        for workers in options.workers:
            try:
                rows.extend(measure(workers, options.seed, progress))
            except BrokenInvariant as error:
                print(f"BROKEN: {workers} workers, seed {options.seed}: {error}")
                broken = True
    print(HEAD, *rows, sep="\n")
    dear = [row for row in rows if row.messages > row.limit]
    for row in dear:
        print(f"TOO DEAR: {row.what} of {row.workers} workers cost {row.messages:,.0f} messages for each change")
    print(f"{done:,} changes in {perf_counter() - began:,.1f} s, seed {options.seed}")
    if not dear and not broken:
        print("all groups agreed, and no change cost more than N log2 N messages")
    return 1 if dear or broken else 0


if __name__ == "__main__":
    sys.exit(main())
