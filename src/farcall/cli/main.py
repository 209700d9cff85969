"""The command line: reads the arguments, hands them to the command, and says what was wrong with them.

It does no work of its own. A command is a module with `configure(parser)` and `execute(arguments)`, which gives the
exit status. A wrong argument ends with status 2, as everywhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from farcall.cli import bench, run
from farcall.errors import UsageError


class _Version(argparse.Action):
    """Prints the installed version. Not argparse's own: that would look the version up at every start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from importlib.metadata import version

        print(f"farcall {version('farcall')}")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """The whole command line, for `main` and for whoever documents it."""
    parser = argparse.ArgumentParser(
        prog="farcall", description="Remote calls between Python workers.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run.configure(commands.add_parser("run", help="start the workers of a group on this host", allow_abbrev=False))
    bench.configure(commands.add_parser("bench", help="measure farcall, also beside others", allow_abbrev=False))
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, understood; ends the process where they cannot be."""
    # argparse drops a "--" wherever it stands, but one that follows the target of `run` is the target's own.
    return make_parser().parse_args([run.DASHES if argument == "--" else argument for argument in argv])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` (or the process's own arguments) names; gives the exit status."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        status: int = arguments.execute(arguments)
    except UsageError as error:
        print(f"farcall: {error}", file=sys.stderr)
        return 2
    return status
