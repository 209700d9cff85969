"""`farcall run`: works out the command line and the environment of each worker on this host.

Workers get these environment variables, with torchrun's names where torchrun has one:

    MASTER_ADDR, MASTER_PORT        the address of the rendezvous
    RANK, WORLD_SIZE                the rank of this worker, and the number of workers in the group
    LOCAL_RANK, LOCAL_WORLD_SIZE    the same among the workers of this host
    FARCALL_WORKER_NAME             the name of this worker: worker0, worker1 ...
    FARCALL_SECRET                  the secret of the group; a new one for each run on a single host
    PYTHONUNBUFFERED                1, so that output is seen at once

`launcher.supervisor` starts the workers, and adds FARCALL_LAUNCHER (see `launcher.exit_report`).
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
from collections.abc import Mapping

from farcall.errors import UsageError
from farcall.launcher.worker_process import WorkerPlan

ESCAPED_DASHES = "\0--"
"""Stands for an argument `--` while argparse parses the command line. No real argument can contain the byte 0."""

_DESCRIPTION = """\
Starts N workers on this host and waits until all have ended. Each worker is a process that runs the same script or
module with this Python. Output is printed with the worker's name before each line. If a worker fails, the others are
ended, and the exit status is that of the worker that failed first. For a group on several hosts, run this command on
each host, with --nodes and --node-rank.
"""

_EPILOG = """\
examples:
  farcall run -n 4 train.py --epochs 3
  farcall run -n 4 -m package.module
  farcall run -n 8 --nodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 4000 train.py
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `farcall run` to `parser`.

    The parsed arguments also get an attribute `execute`: the function that runs the workers. Call `configure` once for
    a parser: a second call raises `argparse.ArgumentError`.
    """
    parser.set_defaults(execute=execute)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "farcall run -n N [options] (SCRIPT | -m MODULE) [ARGUMENT ...]"
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.add_argument("-n", "--workers", type=int, required=True, metavar="N", help="number of workers on this host")
    parser.add_argument("-m", "--module", action="store_true", help="run a module instead of a script, like python -m")
    parser.add_argument(
        "--name",
        default="worker",
        metavar="PREFIX",
        help="workers are named PREFIX0, PREFIX1 ... (default: %(default)s)",
    )
    parser.add_argument("--master-addr", metavar="ADDRESS", help="address of rank 0 (default: 127.0.0.1)")
    parser.add_argument("--master-port", type=int, metavar="PORT", help="port of the rendezvous (default: a free one)")
    parser.add_argument("--nodes", type=int, default=1, metavar="K", help="number of hosts (default: %(default)s)")
    parser.add_argument(
        "--node-rank", type=int, default=0, metavar="I", help="number of this host, from 0 (default: %(default)s)"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="time between SIGTERM and SIGKILL (default: %(default)s)",
    )
    target = parser.add_argument("target", metavar="SCRIPT | MODULE", help="the program that each worker runs")
    rest = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", default=[], help="arguments of the program"
    )
    # `check_arguments` reports a missing target, with an example. With nargs="?" argparse would match the target with
    # nothing at the first option, and put everything after it into `arguments`.
    target.required = rest.required = False


def execute(arguments: argparse.Namespace) -> int:
    """Runs the workers until all have ended, and returns the exit status of the run.

    The status is 0 if no worker failed, else that of the worker that failed first. For a worker that a signal killed,
    it is 128 plus the number of the signal. It is 130 after a second Ctrl-C, and 141 if the output cannot be written.

    Args:
        arguments: The parsed options of `farcall run`.

    Raises:
        UsageError: An option has an invalid value. Nothing has been started then.
    """
    # Imported here because `farcall --help` does not need the launcher.
    from farcall.launcher.supervisor import Supervisor

    check_arguments(arguments)
    return Supervisor(make_plans(arguments, os.environ), arguments.grace).run()


def check_arguments(arguments: argparse.Namespace) -> None:
    """Returns None if the parsed arguments of `farcall run` are valid, else raises `UsageError`.

    The message says what to do instead. Checks numbers, ports and seconds, that options do not contradict each other,
    and that the script exists. Whether a module exists is not checked.
    """
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
    match target_command(arguments):
        case []:
            example = f"farcall run -n {arguments.workers}"
            raise UsageError(
                "no script or module to run was given. Name a script, or a module after -m, with its arguments: "
                f"`{example} train.py --epochs 3` or `{example} -m package.module`"
            )
        case [script, *_] if not arguments.module and not os.path.exists(script):
            raise UsageError(f"the script {script!r} does not exist (to run a module, put -m before its name)")


def target_command(arguments: argparse.Namespace) -> list[str]:
    """Returns the script or module and its arguments, without a `--` before them; empty if no target was given.

    `arguments` are the parsed options of `farcall run`, in which `ESCAPED_DASHES` stands for `--`.
    """
    if arguments.target is None:
        return []
    words = ["--" if word == ESCAPED_DASHES else word for word in (arguments.target, *arguments.arguments)]
    return words[1:] if words[0] == "--" else words


def make_plans(arguments: argparse.Namespace, environ: Mapping[str, str]) -> list[WorkerPlan]:
    """Returns the plan of each worker on this host, in the order of their ranks: name, rank, command and environment.

    If `--nodes` is 1, and `FARCALL_SECRET` is not set or is empty, the environments contain a new secret.

    Args:
        arguments: The parsed options of `farcall run`, already checked.
        environ: The environment that the workers inherit. It is not changed.

    Raises:
        UsageError: `--master-port` is not given, and no free port can be found on the address `--master-addr`.
    """
    address = arguments.master_addr or "127.0.0.1"
    command = [sys.executable, *(["-m"] if arguments.module else []), *target_command(arguments)]
    shared = {
        **environ,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(arguments.master_port or free_port(address)),
        "WORLD_SIZE": str(arguments.workers * arguments.nodes),
        "LOCAL_WORLD_SIZE": str(arguments.workers),
        "PYTHONUNBUFFERED": "1",
    }
    if arguments.nodes == 1 and not environ.get("FARCALL_SECRET"):
        # With several hosts no new secret is made here, because the other hosts could not know it. They take the secret
        # from the environment or from the user's file.
        shared["FARCALL_SECRET"] = secrets.token_hex(32)
    plans = []
    for local_rank in range(arguments.workers):
        rank = arguments.node_rank * arguments.workers + local_rank
        name = f"{arguments.name}{rank}"
        own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "FARCALL_WORKER_NAME": name}
        plans.append(WorkerPlan(name, rank, command, {**shared, **own}))
    return plans


def free_port(address: str) -> int:
    """Returns a TCP port that is free on an address of this host now; another program may take it at any time.

    Args:
        address: A name or address of this host.

    Raises:
        UsageError: The address is empty, is not one of this host's, or cannot be resolved.
        UnicodeError: The address cannot be a host name, for example because a part has more than 63 characters.
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
