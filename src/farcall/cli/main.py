"""The entry point of the `farcall` command: parses the arguments, calls the subcommand, and reports wrong arguments.

A subcommand is a module with two functions: `configure(parser)` adds its options, and `execute(arguments)` runs it and
returns the exit status. Wrong arguments end with exit status 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from farcall.cli import bench, run
from farcall.errors import UsageError


class _Version(argparse.Action):
    """The action of `--version`: prints the installed version and exits.

    argparse's own action needs the version when the parser is built, and looking it up would slow every start.
    """

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        """Prints the version and exits with status 0.

        Raises `PackageNotFoundError` if farcall is not installed as a package.
        """
        from importlib.metadata import version

        print(f"farcall {version('farcall')}")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """Returns a new parser for the whole command line, with all subcommands. Parses nothing yet.

    The parsed arguments have an attribute `execute`: the function that runs the subcommand.
    """
    parser = argparse.ArgumentParser(
        prog="farcall", description="Remote calls between Python workers.", allow_abbrev=False
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run.configure(commands.add_parser("run", help="start the workers of a group on this host", allow_abbrev=False))
    bench.configure(commands.add_parser("bench", help="measure farcall on this machine", allow_abbrev=False))
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the parsed arguments; their attribute `execute` is the function that runs the subcommand.

    Each argument `--` is parsed as `run.ESCAPED_DASHES`, because argparse would remove it. Exits with status 2 and a
    message if an argument is not valid, or if there are no arguments. Exits with status 0 after `--help` and
    `--version`.
    """
    # argparse removes every "--", but one that follows the target of `run` belongs to the target's arguments.
    return make_parser().parse_args([run.ESCAPED_DASHES if argument == "--" else argument for argument in argv])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name, and returns its exit status.

    Args:
        argv: The arguments without the program's name; None for those of this process.

    Returns:
        The exit status of the command; 2 after a `UsageError`, whose text is printed.

    Raises:
        SystemExit: The arguments cannot be parsed or there are none (status 2), or ask for help or the version (status
            0).
    """
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        status: int = arguments.execute(arguments)
    except UsageError as error:
        print(f"farcall: {error}", file=sys.stderr)
        return 2
    return status
