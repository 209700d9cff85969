"""`farcall run`: starts the workers of a group on this host and tells each who it is.

This is what the workers are told, by the environment, in the words of torchrun where it has one:

    MASTER_ADDR, MASTER_PORT        where the workers find each other
    RANK, WORLD_SIZE                which worker of the group this is, and how many there are
    LOCAL_RANK, LOCAL_WORLD_SIZE    the same, among the workers of this host
    FARCALL_WORKER_NAME             its name: worker0, worker1 ...
    FARCALL_SECRET                  what the group's workers know each other by; fresh for each run on one host
    PYTHONUNBUFFERED                1: what a worker prints is seen at once

The module only plans; `supervisor` runs, and adds FARCALL_LAUNCHER, where workers tell it of their end (`last_words`).
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
from collections.abc import Mapping

from farcall.cli.process import WorkerPlan
from farcall.errors import UsageError

DASHES = "\0--"
"""What stands for an argument `--` while argparse is at work; no argument can hold the byte 0."""

_DESCRIPTION = """\
Starts N workers on this host, each a process of this Python that runs the same script or module, and stays until all
have ended. Each worker's lines are printed with its name. If one fails, the others are ended, and the exit status is
that of the first that failed of its own accord. On several hosts, start it on each with --nodes and --node-rank.
"""

_EPILOG = """\
examples:
  farcall run -n 4 train.py --epochs 3
  farcall run -n 4 -m package.module
  farcall run -n 8 --nodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 4000 train.py
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds what `farcall run` takes."""
    parser.set_defaults(execute=execute)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "farcall run -n N [options] (SCRIPT | -m MODULE) [ARGUMENT ...]"
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.add_argument("-n", "--workers", type=int, required=True, metavar="N", help="how many, on this host")
    parser.add_argument("-m", "--module", action="store_true", help="the target is a module, as with python -m")
    parser.add_argument(
        "--name", default="worker", metavar="PREFIX", help="names are PREFIX0, PREFIX1 ... (%(default)s)"
    )
    parser.add_argument("--master-addr", metavar="ADDRESS", help="the first worker's address (127.0.0.1)")
    parser.add_argument("--master-port", type=int, metavar="PORT", help="the port where workers meet (a free one)")
    parser.add_argument("--nodes", type=int, default=1, metavar="K", help="hosts in the group (%(default)s)")
    parser.add_argument("--node-rank", type=int, default=0, metavar="I", help="which of them this is (%(default)s)")
    parser.add_argument(
        "--grace", type=float, default=5.0, metavar="SECONDS", help="from asking to end to killing (%(default)s)"
    )
    parser.add_argument("target", metavar="SCRIPT | MODULE", help="what each worker runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="passed on to it")


def execute(arguments: argparse.Namespace) -> int:
    """Runs the workers; gives the exit status. Raises `UsageError` before anything is started."""
    # Not at the head: `farcall --help` needs none of it.
    from farcall.cli.supervisor import Supervisor

    check(arguments)
    return Supervisor(make_plans(arguments, os.environ), arguments.grace).run()


def check(arguments: argparse.Namespace) -> None:
    """Raises `UsageError` if the arguments cannot be meant."""
    if arguments.workers < 1:
        raise UsageError(f"-n must be at least 1, not {arguments.workers}")
    if arguments.nodes < 1:
        raise UsageError(f"--nodes must be at least 1, not {arguments.nodes}")
    if not 0 <= arguments.node_rank < arguments.nodes:
        raise UsageError(
            f"--node-rank must be from 0 to {arguments.nodes - 1} with --nodes {arguments.nodes}, "
            f"not {arguments.node_rank}"
        )
    if arguments.nodes > 1 and (arguments.master_addr is None or arguments.master_port is None):
        raise UsageError(
            "with --nodes, give --master-addr and --master-port: an address of the first host and a free port there, "
            "the same on all hosts"
        )
    if arguments.master_port is not None and not 0 < arguments.master_port < 1 << 16:
        raise UsageError(f"--master-port must be from 1 to 65535, not {arguments.master_port}")
    if not 0 <= arguments.grace < float("inf"):
        raise UsageError(f"--grace must be 0 or more seconds, not {arguments.grace}")
    match command_of(arguments):
        case []:
            raise UsageError("name a script after the --, or -m and a module")
        case [script, *_] if not arguments.module and not os.path.exists(script):
            raise UsageError(f"there is no script {script!r} (to run a module, put -m before its name)")


def command_of(arguments: argparse.Namespace) -> list[str]:
    """The script or module and its arguments; a `--` before them is not part of them."""
    words = ["--" if word == DASHES else word for word in (arguments.target, *arguments.arguments)]
    return words[1:] if words[0] == "--" else words


def make_plans(arguments: argparse.Namespace, environ: Mapping[str, str]) -> list[WorkerPlan]:
    """What each worker of this host is to be. Raises `UsageError` if no port can be had on the master address."""
    address = arguments.master_addr or "127.0.0.1"
    command = [sys.executable, *(["-m"] if arguments.module else []), *command_of(arguments)]
    shared = {
        **environ,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(arguments.master_port or free_port(address)),
        "WORLD_SIZE": str(arguments.workers * arguments.nodes),
        "LOCAL_WORLD_SIZE": str(arguments.workers),
        "PYTHONUNBUFFERED": "1",
    }
    if arguments.nodes == 1 and not environ.get("FARCALL_SECRET"):
        # Several hosts must share one, and here we can only speak for ours: theirs comes from the environment or from
        # the user's own file.
        shared["FARCALL_SECRET"] = secrets.token_hex(32)
    plans = []
    for local_rank in range(arguments.workers):
        rank = arguments.node_rank * arguments.workers + local_rank
        name = f"{arguments.name}{rank}"
        own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "FARCALL_WORKER_NAME": name}
        plans.append(WorkerPlan(name, rank, command, {**shared, **own}))
    return plans


def free_port(address: str) -> int:
    """A port that is free on this address of ours now. Another program may take it before the first worker does.

    Raises `UsageError` if the address is not one of this host's.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
            return int(probe.getsockname()[1])
    except OSError as error:
        raise UsageError(
            f"cannot find a free port on --master-addr {address!r}: {error}; "
            "give an address of this host, or --master-port as well"
        ) from error
