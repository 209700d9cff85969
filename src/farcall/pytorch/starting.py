"""`init_rpc`: makes the process a worker, with torch's arguments and torch's rendezvous."""

from __future__ import annotations

import logging
import numbers
import os
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from farcall import api as _farcall
from farcall.options import BackendOptions
from farcall.pytorch import api, autograd, backend_registry
from farcall.pytorch.profiling import _set_profiler_node_id

logger = logging.getLogger("farcall")

_init_counter = 0
_init_counter_lock = threading.Lock()


def is_available() -> bool:
    """True: farcall works wherever torch does."""
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Makes this process a worker, and returns when all workers are there.

    Without a `rank`, that of the environment (RANK) counts. Without a `world_size` the group is open: workers may join
    and leave. Raises `TypeError` for a backend or options that are none, `ValueError` for a rank that is none,
    `RuntimeError` if this process is a worker already or the others do not come.
    """
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, BackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None:
        backend = _backend_for(rpc_backend_options)
    if rpc_backend_options is None:
        rpc_backend_options = backend_registry.construct_rpc_backend_options(backend)
    rank = _own_rank(rank)
    _refuse_unless_new(rank, world_size)  # before anybody has met this worker
    store = _meet_at_store(rpc_backend_options, rank, world_size)
    autograd._init(rank)
    _set_profiler_node_id(rank)
    _init_rpc_backend(backend, store, name, rank, world_size, rpc_backend_options)


def _backend_for(options: Any) -> Any:
    """The backend that these options are of. Raises `TypeError` if there is none."""
    types = backend_registry.BackendType
    if options is None:
        return types.TENSORPIPE
    for candidate in types:
        if isinstance(options, type(backend_registry.construct_rpc_backend_options(candidate))):
            if candidate.name != "TENSORPIPE":
                logger.warning(
                    "RPC was initialized with no explicit backend but with options corresponding to %s, hence that "
                    "backend will be used instead of the default BackendType.TENSORPIPE. To silence this warning pass "
                    "`backend=%s` explicitly.",
                    candidate,
                    candidate,
                )
            return candidate
    raise TypeError(f"Could not infer backend for options {options}")


def _meet_at_store(options: Any, rank: int, world_size: int | None) -> Any:
    """A part of torch's store that this group has for itself.

    Raises what torch's rendezvous raises, `ValueError` among it; `RuntimeError` if there is a group of the other kind.
    """
    global _init_counter
    if world_size:
        store, _, _ = next(dist.rendezvous(options.init_method, rank=rank, world_size=world_size))
    else:
        store = dist._create_store_from_options(options, rank)
    store.set_timeout(timedelta(seconds=options.rpc_timeout or 86400))
    with _init_counter_lock:
        number, _init_counter = _init_counter, _init_counter + 1
    # Of a fixed group the workers come together, and it is the how many-th for all of them. Into an open one a worker
    # may come for the second time, while it is still the first for the others.
    part = dist.PrefixStore(f"rpc_prefix_{number}", store)
    kind = f"of {world_size}" if world_size else "open"
    found = part.compare_set("kind", "", kind).decode()
    if "open" in (kind, found) and kind != found:
        raise RuntimeError(
            "RPC group mixes statically and dynamically initialized members which is not supported. Give either all "
            "workers a world_size, the same, or none"
        )
    if kind != found:
        raise RuntimeError(
            f"rank {rank} was started with world_size={world_size}, and another worker of this group says that it is "
            f"{found}: give all of them the same"
        )
    return part if world_size else dist.PrefixStore("rpc_open", store)


def _validate_rpc_args(
    backend: Any, store: Any, name: Any, rank: Any, world_size: Any, rpc_backend_options: Any
) -> None:
    wanted = [
        (backend, backend_registry.BackendType),
        (store, dist.Store),
        (name, str),
        (rank, numbers.Integral),
        (world_size, (numbers.Integral, type(None))),
        (rpc_backend_options, BackendOptions),
    ]
    for argument, kind in wanted:
        if not isinstance(argument, kind):
            raise RuntimeError(f"Argument {argument} must be of type {kind} but got type {type(argument)}")


def _own_rank(rank: int) -> int:
    """The rank that was given, or else the one that a launcher has set. Raises `RuntimeError` if that is none."""
    told = os.environ.get("RANK", "") if rank == -1 else ""
    if not told:
        return rank
    if not told.isdecimal():
        raise RuntimeError(f"RANK is {told!r} in the environment: it has to be a whole number from 0 on")
    return int(told)


def _refuse_unless_new(rank: int, world_size: int | None) -> None:
    if api._is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    if world_size and rank >= world_size:
        raise ValueError(f"rank {rank} is none of a group of {world_size}: ranks go from 0 to {world_size - 1}")


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """As `init_rpc`, with a store of torch's at which the workers meet."""
    backend = backend if backend is not None else backend_registry.BackendType.TENSORPIPE
    _validate_rpc_args(backend, store, name, rank, world_size, rpc_backend_options)
    _refuse_unless_new(rank, world_size)
    agent = backend_registry.init_backend(
        backend, store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options
    )
    api._init_rpc_states(agent)


@api._require_initialized
def _get_debug_info() -> dict[str, str]:
    """The counters of references, of the agent and of distributed autograd."""
    info: dict[str, str] = {}
    info.update(_farcall._rref_context_get_debug_info())
    info.update(api._get_current_rpc_agent().get_debug_info())
    info.update(autograd._get_debug_info())
    return info
