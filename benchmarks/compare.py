"""farcall beside other systems, with the same work for all: what `make bench-peers` runs.

    python benchmarks/compare.py --quick --peers torch,ray     # does it work? figures not to be believed
    python benchmarks/compare.py --peers all --write-docs      # writes docs/benchmarks.md and its plots

It takes what `farcall bench` takes, and the peers. A system that is not installed is left out, and the output says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from farcall.bench import command
from farcall.bench.effort import make_effort
from farcall.bench.system import System
from farcall.cli import bench
from farcall.errors import UsageError
from systems import PEERS


def choose_peers(text: str) -> list[System]:
    """Returns the peers of a list such as `torch,ray`; `all` stands for all of them.

    Raises:
        UsageError: A name is not known.
    """
    names = [name for word in text.split(",") if (name := word.strip().lower())]
    if unknown := [name for name in names if name not in PEERS and name != "all"]:
        raise UsageError(f"--peers: there is no {', '.join(map(repr, unknown))}; there are {', '.join(PEERS)}, or all")
    return [peer for name, peer in PEERS.items() if name in names or "all" in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures all that was chosen, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="compare.py")
    bench.configure(parser)
    parser.description = "Measures farcall and other systems, in alternating rounds, and prints the ratios."
    parser.epilog = "With all peers it takes half an hour; --quick takes a minute or two."
    parser.add_argument("--peers", default="all", metavar="A,B", help=f"{', '.join(PEERS)}, or all (all)")
    parser.add_argument(
        "--write-docs",
        type=Path,
        nargs="?",
        const=Path("docs"),
        metavar="DIRECTORY",
        help="write benchmarks.md and its plots there (docs)",
    )
    options = parser.parse_args(arguments)
    outputs = command.Outputs(json=options.json, plots=options.plots, docs=options.write_docs)
    try:
        return command.run(make_effort(options), choose_peers(options.peers), outputs)
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
