"""What a rendezvous URL, the arguments of `init_rpc` and the environment together say: a `Plan`.

    env://                      MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE; what `farcall run` and torchrun set
    tcp://host:port             rank 0 hosts the store there; also tcp://[::1]:port
    file:///path                rank 0 writes into this file where its store is

All take `?rank=1&world_size=4`. An argument counts before the URL, the URL before the environment; an argument and a
URL that contradict each other are refused. Where nobody says a world size the group is open: then ranks are not
needed, and whoever finds no store at the place hosts it. Nothing is opened or resolved here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from farcall.errors import UsageError
from farcall.rendezvous.addresses import host_port

# The first is everybody's; the others are set by Open MPI, MPICH and its kin, and Slurm.
_RANK_VARIABLES: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZE_VARIABLES: Final = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")

_CANDIDATES: Final = 16
_FIRST_CANDIDATE: Final = 20000
_CANDIDATE_RANGE: Final = 40000


@dataclass(frozen=True)
class TcpPlace:
    """The store is at one of these ports of a host: the first that was free for the worker that hosts it."""

    host: str
    ports: tuple[int, ...]
    group: str
    """Text that all workers of one group derive alike, and those of another do not."""

    def __str__(self) -> str:
        if len(self.ports) == 1:
            return f"tcp://{host_port(self.host, self.ports[0])}"
        return f"{self.host}, ports {', '.join(map(str, self.ports))}"


@dataclass(frozen=True)
class FilePlace:
    """A file says where the store is."""

    path: str

    def __str__(self) -> str:
        return f"the file {self.path}"


@dataclass(frozen=True)
class Plan:
    """Who we are, of how many, and where the store is."""

    rank: int
    """-1 in an open group if nobody said one."""
    world_size: int | None
    """None: the group is open."""
    place: TcpPlace | FilePlace


def read_plan(init_method: str, rank: int, world_size: int | None, environ: Mapping[str, str]) -> Plan:
    """Puts URL, arguments (rank -1 and world_size None: not given) and environment together.

    Raises `UsageError` for what is missing, malformed or contradictory.
    """
    try:
        url = urlsplit(init_method)
        query = _query(init_method, url)
    except ValueError as error:
        raise UsageError(f"init_method {init_method!r} is not a URL: {error}") from None
    if rank < -1:
        raise UsageError(f"rank must be 0 or more (or -1: take it from init_method or the environment), not {rank}")
    own_rank = _choose("rank", None if rank == -1 else rank, query, environ, _RANK_VARIABLES)
    size = _choose("world_size", world_size, query, environ, _SIZE_VARIABLES)
    if size is None:
        if own_rank is not None and own_rank < 0:
            raise UsageError(f"rank must be 0 or more, not {own_rank}; an open group needs none")
        return Plan(-1 if own_rank is None else own_rank, None, _place(init_method, url, environ))
    if own_rank is None:
        raise UsageError(
            "rank is needed: the number of this worker, from 0 on. Pass it to init_rpc, add ?rank=... to "
            "init_method, or set RANK (`farcall run` sets it)"
        )
    if size < 1:
        raise UsageError(f"world_size must be at least 1, not {size}")
    if not 0 <= own_rank < size:
        raise UsageError(f"rank {own_rank} does not exist among {size} workers; ranks go from 0 to {size - 1}")
    return Plan(own_rank, size, _place(init_method, url, environ))


def candidate_ports(master_port: int, run_id: str, restart_count: str) -> tuple[int, ...]:
    """Where to look for our store when somebody else's has MASTER_PORT: the same for all workers of one run."""
    ports: dict[int, None] = {}  # a set that keeps the order
    attempt = 0
    while len(ports) < _CANDIDATES:
        digest = hashlib.sha256(f"farcall|{master_port}|{run_id}|{restart_count}|{attempt}".encode()).digest()
        port = _FIRST_CANDIDATE + int.from_bytes(digest[:4], "little") % _CANDIDATE_RANGE
        if port != master_port:
            ports[port] = None
        attempt += 1
    return tuple(ports)


def _query(init_method: str, url: SplitResult) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, values in parse_qs(url.query, keep_blank_values=True).items():
        if name not in ("rank", "world_size"):
            raise UsageError(f"init_method {init_method!r} may say rank and world_size, but not {name!r}")
        if len(values) > 1:
            raise UsageError(f"init_method {init_method!r} says {name} {len(values)} times")
        found[name] = _integer(f"{name} in init_method {init_method!r}", values[0])
    return found


def _choose(
    what: str, argument: int | None, query: Mapping[str, int], environ: Mapping[str, str], variables: tuple[str, ...]
) -> int | None:
    in_url = query.get(what)
    if argument is not None and in_url is not None and argument != in_url:
        raise UsageError(f"{what} is given twice: {argument} as an argument, {in_url} in init_method; leave one out")
    if argument is not None:
        return argument
    if in_url is not None:
        return in_url
    for variable in variables:
        if environ.get(variable):
            return _integer(variable, environ[variable])
    return None


def _place(init_method: str, url: SplitResult, environ: Mapping[str, str]) -> TcpPlace | FilePlace:
    if url.scheme == "env":
        return _from_environment(environ)
    if url.scheme == "tcp":
        try:
            port = url.port
        except ValueError:
            port = None
        if not url.hostname or not port or url.path not in ("", "/"):
            raise UsageError(f"init_method {init_method!r} must be tcp://host:port, for example tcp://10.0.0.1:29500")
        return _tcp(url.hostname, port)
    if url.scheme == "file":
        path = unquote(url.path)
        if url.netloc not in ("", "localhost"):
            raise UsageError(
                f"init_method {init_method!r} names {url.netloc!r} where a host would be; a file needs three slashes "
                "and its full path, for example file:///tmp/my-group"
            )
        if not path or path.endswith("/"):
            raise UsageError(f"init_method {init_method!r} must name a file, for example file:///tmp/my-group")
        return FilePlace(path)
    raise UsageError(f"init_method {init_method!r} must begin with env://, tcp:// or file://")


def _from_environment(environ: Mapping[str, str]) -> TcpPlace:
    host = environ.get("MASTER_ADDR", "").strip("[]")
    if not host:
        raise _missing("MASTER_ADDR", "the address of the worker with rank 0", "10.0.0.1")
    text = environ.get("MASTER_PORT")
    if not text:
        raise _missing("MASTER_PORT", "a free port of the worker with rank 0, the same for all workers", "29500")
    port = _integer("MASTER_PORT", text)
    if not 0 < port < 65536:
        raise UsageError(f"MASTER_PORT must be between 1 and 65535, not {port}")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return _tcp(host, port)
    # torchrun's own store listens on MASTER_PORT.
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    restart_count = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return TcpPlace(
        host,
        candidate_ports(port, run_id, restart_count),
        f"torchrun run {run_id!r}, restart {restart_count}, at {host_port(host, port)}",
    )


def _tcp(host: str, port: int) -> TcpPlace:
    return TcpPlace(host, (port,), host_port(host.lower(), port))


def _missing(variable: str, what: str, example: str) -> UsageError:
    return UsageError(
        f"{variable} is not set, and init_method env:// needs it: {what}. Set it (export {variable}={example}), start "
        "the workers with `farcall run`, which sets all that is needed, or use init_method tcp://host:port"
    )


def _integer(what: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{what} must be a whole number, not {text!r}") from None
