"""`farcall bench`: reads what is to be measured; `farcall.bench` does it, and is imported only then."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from farcall.errors import UsageError

_DESCRIPTION = """\
Measures farcall on this machine: latency against payload, throughput against the number of calls in flight, bandwidth,
references per second, and the start of workers. With --peers the same work is done by others as well, those that are
installed, in alternating rounds; the ratios are printed. It takes minutes, and more with peers; --quick takes seconds.
"""

_EPILOG = """\
examples:
  farcall bench --quick
  farcall bench --peers torch,ray --json results.json --plots plots
  farcall bench --peers all --write-docs
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds what `farcall bench` takes."""
    parser.set_defaults(execute=execute)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.add_argument("--quick", action="store_true", help="a short run that shows that everything works")
    parser.add_argument(
        "--peers",
        default="",
        metavar="A,B",
        help="whom to compare with: torch, ray, rpyc, pyro5, grpc, xoscar, dask, monarch, or all (nobody)",
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="alternating rounds (3; 1 with --quick)")
    parser.add_argument(
        "--measure",
        metavar="A,B",
        help="only these: payload, exchange, in-flight, threads, streaming, references, startup (all)",
    )
    parser.add_argument("--sizes", metavar="A,B", help="of payloads, as 0,4KiB,16MiB (0 to 256 MiB)")
    parser.add_argument("--in-flight", metavar="A,B", help="calls under way, as 1,8,64 (1 to 512)")
    parser.add_argument("--start", metavar="A,B", help="workers to be started, as 1,2,4 (1 to 16)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all findings there")
    parser.add_argument("--plots", type=Path, metavar="DIRECTORY", help="draw them there, as PNG and SVG")
    parser.add_argument(
        "--write-docs",
        type=Path,
        nargs="?",
        const=Path("docs"),
        metavar="DIRECTORY",
        help="write benchmarks.md and its plots there (docs)",
    )


def execute(arguments: argparse.Namespace) -> int:
    """Runs the benchmark; gives the exit status. Raises `UsageError` before anything is started."""
    # Not at the head: no other command needs any of it.
    from farcall.bench import command
    from farcall.bench.effort import QUICK, Effort, parse_counts, parse_parts, parse_sizes

    effort = QUICK if arguments.quick else Effort()
    if arguments.rounds is not None:
        if arguments.rounds < 1:
            raise UsageError(f"--rounds must be at least 1, not {arguments.rounds}")
        effort = dataclasses.replace(effort, rounds=arguments.rounds)
    if arguments.measure is not None:
        effort = dataclasses.replace(effort, parts=parse_parts(arguments.measure))
    if arguments.sizes is not None:
        effort = dataclasses.replace(effort, sizes=parse_sizes(arguments.sizes))
    if arguments.in_flight is not None:
        effort = dataclasses.replace(effort, windows=parse_counts("--in-flight", arguments.in_flight))
    if arguments.start is not None:
        effort = dataclasses.replace(effort, workers=parse_counts("--start", arguments.start))
    outputs = command.Outputs(json=arguments.json, plots=arguments.plots, docs=arguments.write_docs)
    return command.run(effort, command.choose_peers(arguments.peers), outputs)
