"""`farcall bench`: the command-line options of the benchmark.

`farcall.bench`, which measures, is imported on use only.
"""

from __future__ import annotations

import argparse
from pathlib import Path

_DESCRIPTION = """\
Measures farcall on this machine: latency by payload size, throughput by calls in flight, bandwidth, references per
second, and how long workers take to start. A full run takes minutes; --quick takes seconds.
"""

_EPILOG = """\
examples:
  farcall bench --quick
  farcall bench --json results.json --plots plots
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `farcall bench` to `parser`.

    The parsed arguments also get an attribute `execute`: the function that runs the benchmark. Call `configure` once
    for a parser: a second call raises `argparse.ArgumentError`.
    """
    parser.set_defaults(execute=execute)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.add_argument("--quick", action="store_true", help="a short run, to see that everything works")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="how often to measure everything (default: 3; 1 with --quick)"
    )
    parser.add_argument(
        "--measure",
        metavar="A,B",
        help="what to measure: payload, exchange, in-flight, threads, streaming, references, startup (default: all)",
    )
    parser.add_argument(
        "--sizes", metavar="A,B", help="payload sizes, for example 0,4KiB,16MiB (default: 0 to 256 MiB)"
    )
    parser.add_argument("--in-flight", metavar="A,B", help="calls in flight, for example 1,8,64 (default: 1 to 512)")
    parser.add_argument(
        "--start", metavar="A,B", help="numbers of workers to start, for example 1,2,4 (default: 1 to 16)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")
    parser.add_argument(
        "--plots", type=Path, metavar="DIRECTORY", help="draw plots into this directory, as PNG and SVG"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Runs the benchmark, prints its results and returns the exit status: 0, or 1 if farcall could not be measured.

    Args:
        arguments: The parsed options of `farcall bench`.

    Raises:
        UsageError: An option has an invalid value, or an output cannot be written. Nothing has been measured then.
        OSError: A file could not be written after the run.
        SystemExit: The run was ended by SIGTERM (status 143) or Ctrl-C (status 130).
    """
    # Imported here because no other command needs these modules.
    from farcall.bench import command
    from farcall.bench.effort import make_effort

    outputs = command.Outputs(json=arguments.json, plots=arguments.plots)
    return command.run(make_effort(arguments), [], outputs)
