"""Reads a rendezvous URL, the arguments of `init_rpc` and environment variables into a `Plan`.

    env://                      MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, as set by `farcall run` and torchrun
    tcp://host:port             rank 0 hosts the store at this address; also tcp://[::1]:port
    file:///path                rank 0 writes the address of its store into this file

Rules
- All URLs accept `?rank=1&world_size=4`. An argument takes precedence over the URL, and the URL over the environment.
  An argument and a URL that contradict each other are rejected.
- Without any world size the group is open: a worker needs no rank, and the first worker hosts the store.
- Nothing is opened, and no name is resolved, here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from farcall.errors import UsageError
from farcall.rendezvous.addresses import host_port

# In order of precedence: torchrun and `farcall run`, Open MPI, MPICH and its derivatives, Slurm.
_RANK_VARIABLES: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZE_VARIABLES: Final = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")

_CANDIDATE_COUNT: Final = 16
"""How many ports `candidate_ports` returns."""
_FIRST_CANDIDATE_PORT: Final = 20000
_CANDIDATE_PORT_RANGE: Final = 40000


@dataclass(frozen=True)
class TcpPlace:
    """Where a group's store is: on one of some ports of a host, the first one that was free when the store started.

    `host` is a name or an address, without brackets. `ports` are tried in their order; at least one. `group` is a text
    that is the same for all workers of the group and different for other groups. The fields are not checked.
    """

    host: str
    """The name or the address of the host, without brackets."""
    ports: tuple[int, ...]
    """The ports on which the store may be, in the order in which they are tried; at least one."""
    group: str
    """Text that is the same for all workers of one group and different for other groups."""

    def __str__(self) -> str:
        """Returns the place for messages: `tcp://host:port`, or the host and its ports."""
        if len(self.ports) == 1:
            return f"tcp://{host_port(self.host, self.ports[0])}"
        return f"{self.host}, ports {', '.join(map(str, self.ports))}"


@dataclass(frozen=True)
class FilePlace:
    """Where a group's store is: at an address that is written in a file. The path is not checked."""

    path: str
    """The path of the file. It need not exist before a worker hosts the store."""

    def __str__(self) -> str:
        """Returns the place for messages: `the file <path>`."""
        return f"the file {self.path}"


@dataclass(frozen=True)
class Plan:
    """What a worker needs to know to find its group: which worker it is, of how many, and where the store is.

    `rank` is the rank of this worker, -1 in an open group if none was given. `world_size` is the number of workers,
    None for an open group. `place` is the host and ports of the store, or a file that holds its address.
    """

    rank: int
    """The rank of this worker; -1 in an open group if none was given."""
    world_size: int | None
    """The number of workers; None for an open group."""
    place: TcpPlace | FilePlace
    """Where the group's store is: on a port of a host, or at an address that is written in a file."""


def read_plan(init_method: str, rank: int, world_size: int | None, environ: Mapping[str, str]) -> Plan:
    """Combines the rendezvous URL, the arguments of `init_rpc` and the environment into a plan.

    Opens and resolves nothing.

    Args:
        init_method: The rendezvous URL: env://, tcp://host:port or file:///path.
        rank: The rank of this worker; -1 takes it from the URL or the environment.
        world_size: The number of workers; None takes it from the URL or the environment. If those have none either, the
            group is open.
        environ: The environment variables, usually `os.environ`; may be empty.

    Raises:
        UsageError: Something is missing, malformed or contradictory. The message says what to set.
    """
    try:
        url = urlsplit(init_method)
        query = _parse_query(init_method, url)
    except ValueError as error:
        raise UsageError(f"init_method {init_method!r} is not a URL: {error}") from None
    if rank < -1:
        raise UsageError(f"rank must be 0 or more, or -1 to take it from init_method or the environment, not {rank}")
    own_rank = _choose_number("rank", None if rank == -1 else rank, query, environ, _RANK_VARIABLES)
    size = _choose_number("world_size", world_size, query, environ, _SIZE_VARIABLES)
    if size is None:
        if own_rank is not None and own_rank < 0:
            raise UsageError(f"rank must be 0 or more, not {own_rank}; in an open group leave it out")
        return Plan(-1 if own_rank is None else own_rank, None, _parse_place(init_method, url, environ))
    if own_rank is None:
        raise UsageError(
            "this worker has no rank, which a group with a world_size needs: a number from 0 to world_size - 1. Pass "
            "rank to init_rpc, add ?rank=... to init_method, or set RANK (`farcall run` sets it)"
        )
    if size < 1:
        raise UsageError(f"world_size must be at least 1, not {size}")
    if not 0 <= own_rank < size:
        raise UsageError(f"rank {own_rank} does not exist in a group of {size} workers; ranks go from 0 to {size - 1}")
    return Plan(own_rank, size, _parse_place(init_method, url, environ))


def rank_in_environment(environ: Mapping[str, str]) -> int | None:
    """Returns the rank that a launcher has given to this process by an environment variable, such as RANK.

    Returns None if no such variable is set. Raises `UsageError` if it is not a whole number. The range is not checked.
    """
    return _choose_number("rank", None, {}, environ, _RANK_VARIABLES)


def candidate_ports(master_port: int, run_id: str, restart_count: str) -> tuple[int, ...]:
    """Returns ports for the store when MASTER_PORT itself belongs to another program's store, such as torchrun's.

    The ports are derived from the arguments by a hash, so all workers of one run get the same ports in the same order,
    and other runs get others.

    Args:
        master_port: MASTER_PORT, which is never among the result.
        run_id: The id of torchrun's run; may be empty.
        restart_count: How often torchrun has restarted the workers, as text.

    Returns:
        16 different ports between 20000 and 59999.
    """
    ports: dict[int, None] = {}  # a set that keeps the order
    attempt = 0
    while len(ports) < _CANDIDATE_COUNT:
        digest = hashlib.sha256(f"farcall|{master_port}|{run_id}|{restart_count}|{attempt}".encode()).digest()
        port = _FIRST_CANDIDATE_PORT + int.from_bytes(digest[:4], "little") % _CANDIDATE_PORT_RANGE
        if port != master_port:
            ports[port] = None
        attempt += 1
    return tuple(ports)


def _parse_query(init_method: str, url: SplitResult) -> dict[str, int]:
    """Returns rank and world_size from the query of the URL, as far as they are given; an empty dict without a query.

    `url` is `init_method` in its parts. Raises `UsageError` for any other name, a name that is given twice, or a value
    that is not a whole number.
    """
    found: dict[str, int] = {}
    for name, values in parse_qs(url.query, keep_blank_values=True).items():
        if name not in ("rank", "world_size"):
            raise UsageError(f"init_method {init_method!r} has a parameter {name!r}; only rank and world_size exist")
        if len(values) > 1:
            raise UsageError(f"init_method {init_method!r} has {name} {len(values)} times; give it once")
        found[name] = _parse_integer(f"{name} in init_method {init_method!r}", values[0])
    return found


def _choose_number(
    what: str, argument: int | None, query: Mapping[str, int], environ: Mapping[str, str], variables: tuple[str, ...]
) -> int | None:
    """Returns the rank or the world size: the argument, else the number in the URL, else that of a variable, else None.

    The range of the number is not checked.

    Args:
        what: "rank" or "world_size".
        argument: The argument of `init_rpc`; None if it was not given.
        query: The numbers in the URL, by name; may be empty.
        environ: The environment variables.
        variables: The names of the variables to look at, in order. A variable with an empty value counts as not set.

    Raises:
        UsageError: The argument and the URL contradict each other, or a variable is not a whole number.
    """
    in_url = query.get(what)
    if argument is not None and in_url is not None and argument != in_url:
        raise UsageError(f"{what} is given twice: {argument} as an argument, {in_url} in init_method; leave one out")
    if argument is not None:
        return argument
    if in_url is not None:
        return in_url
    for variable in variables:
        if environ.get(variable):
            return _parse_integer(variable, environ[variable])
    return None


def _parse_place(init_method: str, url: SplitResult, environ: Mapping[str, str]) -> TcpPlace | FilePlace:
    """Returns where the rendezvous URL `init_method`, whose parts are `url`, says the store is.

    For env:// that is what MASTER_ADDR and MASTER_PORT of `environ` say. Raises `UsageError` for an unknown scheme, a
    malformed or empty URL, or a missing variable.
    """
    if url.scheme == "env":
        return _place_from_environment(environ)
    if url.scheme == "tcp":
        try:
            port = url.port
        except ValueError:
            port = None
        if not url.hostname or not port or url.path not in ("", "/"):
            raise UsageError(f"init_method {init_method!r} must be tcp://host:port, for example tcp://10.0.0.1:29500")
        return _single_port_place(url.hostname, port)
    if url.scheme == "file":
        path = unquote(url.path)
        if url.netloc not in ("", "localhost"):
            raise UsageError(
                f"init_method {init_method!r} has {url.netloc!r} where a host would be; write three slashes and the "
                "full path, for example file:///tmp/my-group"
            )
        if not path or path.endswith("/"):
            raise UsageError(f"init_method {init_method!r} must name a file, for example file:///tmp/my-group")
        return FilePlace(path)
    raise UsageError(f"init_method {init_method!r} must begin with env://, tcp:// or file://")


def _place_from_environment(environ: Mapping[str, str]) -> TcpPlace:
    """Returns the place of the store that MASTER_ADDR and MASTER_PORT name; under torchrun, other ports of that host.

    Raises `UsageError` if one of the two is missing or empty, or the port is not a number from 1 to 65535.
    """
    host = environ.get("MASTER_ADDR", "").strip("[]")
    if not host:
        raise _missing_variable_error("MASTER_ADDR", "the address of the worker with rank 0", "10.0.0.1")
    text = environ.get("MASTER_PORT")
    if not text:
        raise _missing_variable_error(
            "MASTER_PORT", "a free port of the worker with rank 0, the same for all workers", "29500"
        )
    port = _parse_integer("MASTER_PORT", text)
    if not 0 < port < 65536:
        raise UsageError(f"MASTER_PORT must be between 1 and 65535, not {port}")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return _single_port_place(host, port)
    # torchrun's own store listens on MASTER_PORT, so ours needs another port that all workers can compute.
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    restart_count = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return TcpPlace(
        host,
        candidate_ports(port, run_id, restart_count),
        f"torchrun run {run_id!r}, restart {restart_count}, at {host_port(host, port)}",
    )


def _single_port_place(host: str, port: int) -> TcpPlace:
    """Returns the place of a store at one host and port.

    The `group` of the place is `host:port`, with the host in lower case.
    """
    return TcpPlace(host, (port,), host_port(host.lower(), port))


def _missing_variable_error(variable: str, what: str, example: str) -> UsageError:
    """Returns the error for an environment variable that env:// needs and that is not set or empty.

    Args:
        variable: The name of the variable.
        what: What it should contain.
        example: An example of its value.
    """
    return UsageError(
        f"the environment variable {variable} is not set, and init_method env:// needs it: {what}. Set it (export "
        f"{variable}={example}), start the workers with `farcall run`, which sets all that is needed, or use "
        "init_method tcp://host:port"
    )


def _parse_integer(what: str, text: str) -> int:
    """Returns the text as an integer. Raises `UsageError`, which names `what`, if it is empty or not an integer."""
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{what} must be a whole number, not {text!r}") from None
