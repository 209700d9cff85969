"""`python -m simulation.explore`: visits every state of three workers within a bound, and prints how many there are."""

from __future__ import annotations

import argparse
import sys

from simulation.exploration import Bound, Exploration
from simulation.schedules import Step, show

FIRST_STEPS: dict[str, Step] = {
    "a value of its owner": ("make", 0),
    "a remote call to oneself": ("call", 0, 0),
    "a remote call to another": ("call", 1, 0),
}

BOUNDS = (
    Bound(forks=2, crashes=1, doubles=1),
    Bound(forks=1, crashes=1, doubles=1, losses=1, acknowledgements=1),
    Bound(forks=1, crashes=1, doubles=0, claims=1),
)
"""The first is about references, the second about delivery below them, the third about a member that is not honest.
(What such a member says of references that are there is tried in every state of all of them.)"""


def main(arguments: list[str] | None = None) -> int:
    """The command. Gives its exit status: 1 if an invariant was broken."""
    parser = argparse.ArgumentParser(prog="python -m simulation.explore", description=__doc__)
    for field, default in Bound()._asdict().items():
        parser.add_argument(f"--{field}", type=int, metavar="N", help=f"at most so many; alone, {default}")
    given = {field: value for field, value in vars(parser.parse_args(arguments)).items() if value is not None}
    failed = False
    for bound in (Bound(**given),) if given else BOUNDS:
        print("three workers, one reference; at most", ", ".join(f"{n} {what}" for what, n in bound._asdict().items()))
        for name, first in FIRST_STEPS.items():
            explored = Exploration(first, bound).run()
            print(
                f"  {name + ':':25} {explored.states:>9,} states, {explored.transitions:>10,} transitions, "
                f"{explored.at_rest:>6,} states at rest, {explored.seconds:5.1f} s",
                flush=True,
            )
            if explored.broken is not None:
                failed = True
                print(f"  BROKEN: {explored.broken}\n    {show(explored.broken.schedule)}")
    print("broken" if failed else "all invariants held in every state")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
