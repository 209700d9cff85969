"""`init_rpc`: makes the process a worker, with torch's arguments and torch's rendezvous."""

from __future__ import annotations

import logging
import numbers
import os
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from farcall import api as _farcall
from farcall.options import BackendOptions
from farcall.pytorch import api, autograd, backend_registry
from farcall.pytorch.profiler import _set_profiler_node_id

logger = logging.getLogger("farcall")


def is_available() -> bool:
    """Returns True: farcall works wherever torch does."""
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Makes this process a worker, and returns when all workers of the group have joined.

    In an open group, it waits only until this worker has joined.

    Args:
        name: The name of this worker, unique in the group: A-Z, a-z, 0-9, `_`, `-` and `:`, from 1 to 127 characters.
        backend: A member of `BackendType`. By default the backend that the options belong to, else TENSORPIPE.
        rank: The rank of this worker; -1 takes the environment variable RANK. If that is not set, raises `ValueError`.
        world_size: The number of workers; None or 0 for an open group, which workers join and leave at any time.
        rpc_backend_options: The options of the backend; None for its defaults.

    Raises:
        TypeError: `backend` is not a backend, or `rpc_backend_options` are not options.
        ValueError: The rank does not exist in a group of this size, or the environment lacks MASTER_ADDR or the like.
        RuntimeError: This process is already a worker, other workers did not come in time, the name is not valid or not
            unique, or the workers were started with different world sizes.

    Example:
        rpc.init_rpc("worker0", rank=0, world_size=2)
    """
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, BackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None:
        backend = _infer_backend(rpc_backend_options)
    if rpc_backend_options is None:
        rpc_backend_options = backend_registry.construct_rpc_backend_options(backend)
    rank = _find_rank(rank)
    _check_not_initialized(rank, world_size)  # before this worker contacts others
    store = _open_store(rpc_backend_options, rank, world_size)
    autograd._init(rank)
    _set_profiler_node_id(rank)
    _init_rpc_backend(backend, store, name, rank, world_size, rpc_backend_options)


def _infer_backend(options: Any) -> Any:
    """Returns the backend whose options have the type of `options`; TENSORPIPE if `options` is None.

    A backend is a member of `BackendType`. Logs a warning if it is another one than TENSORPIPE. Raises `TypeError` if
    no backend has such options.
    """
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


def _open_store(options: Any, rank: int, world_size: int | None) -> Any:
    """Opens torch's store at the rendezvous URL of the options, and returns a part of it that only this group uses.

    Args:
        options: The options of the backend. `init_method` is the URL.
        rank: The rank of this worker.
        world_size: The number of workers; None or 0 for an open group.

    Raises:
        ValueError: The rendezvous URL is not valid, or the environment lacks MASTER_ADDR or the like.
        RuntimeError: Another worker of the group was started with another `world_size`.
    """
    import farcall.pytorch as package  # here, because the package imports this module

    if world_size:
        store, _, _ = next(dist.rendezvous(options.init_method, rank=rank, world_size=world_size))
    else:
        store = dist._create_store_from_options(options, rank)
    store.set_timeout(timedelta(seconds=options.rpc_timeout or 86400))
    with package._init_counter_lock:
        number, package._init_counter = package._init_counter, package._init_counter + 1
    # The workers of a fixed group have all started the same number of groups, so the number tells the groups apart. An
    # open group needs another prefix: a worker may join it for the second time, while it is the first for the others.
    part = dist.PrefixStore(f"rpc_prefix_{number}", store)
    kind = f"of {world_size}" if world_size else "open"
    found = part.compare_set("kind", "", kind).decode()
    if "open" in (kind, found) and kind != found:
        raise RuntimeError(
            "RPC group mixes statically and dynamically initialized members which is not supported. Start all workers "
            "with the same world_size, or all without one"
        )
    if kind != found:
        raise RuntimeError(
            f"rank {rank} was started with world_size={world_size}, but another worker of this group with "
            f"world_size={found.removeprefix('of ')}: start all workers with the same world_size"
        )
    return part if world_size else dist.PrefixStore("rpc_open", store)


def _validate_rpc_args(
    backend: Any, store: Any, name: Any, rank: Any, world_size: Any, rpc_backend_options: Any
) -> None:
    """Returns None if the arguments have the right types; raises `RuntimeError` for the first one that has not.

    Args:
        backend: A member of `BackendType`.
        store: A `torch.distributed.Store`.
        name: The name of this worker, a str.
        rank: The rank of this worker, a whole number.
        world_size: The number of workers, a whole number; None for an open group.
        rpc_backend_options: The options of the backend, a `BackendOptions`.
    """
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


def _find_rank(rank: int) -> int:
    """Returns the given rank; for -1, the one in the environment variable RANK, or -1 if that is not set or empty.

    Raises `RuntimeError` if RANK is not a whole number of at least 0.
    """
    told = os.environ.get("RANK", "") if rank == -1 else ""
    if not told:
        return rank
    if not told.isdecimal():
        raise RuntimeError(f"RANK is {told!r} in the environment: it must be a whole number, 0 or more")
    return int(told)


def _check_not_initialized(rank: int, world_size: int | None) -> None:
    """Returns None if this process may become a worker with this rank.

    Raises `RuntimeError` if it is a worker already, and `ValueError` if `rank` is not below `world_size`. A
    `world_size` of None or 0 allows any rank.
    """
    if api._is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized")
    if world_size and rank >= world_size:
        raise ValueError(
            f"rank {rank} does not exist in a group of {world_size} workers: ranks go from 0 to {world_size - 1}"
        )


_TENSORPIPE: Final = backend_registry.BackendType.TENSORPIPE


def _init_rpc_backend(
    backend: Any = _TENSORPIPE,
    store: Any = None,
    name: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Makes this process a worker. The workers find each other at the given store, not at a rendezvous URL.

    Returns when all workers of a fixed group have joined.

    Args:
        backend: A member of `BackendType`.
        store: A `torch.distributed.Store`, which all workers share.
        name: The name of this worker, unique in the group.
        rank: The rank of this worker. The default -1 is accepted in an open group only: a fixed group waits in vain
            for the missing rank.
        world_size: The number of workers; None or 0 for an open group.
        rpc_backend_options: The options of the backend. None, the default, is not accepted.

    Raises:
        RuntimeError: An argument has the wrong type, this process is already a worker, or the others did not come in
            time.
        ValueError: The rank does not exist in a group of this size.
    """
    if backend is _TENSORPIPE:  # `register_backend` may have replaced the enumeration since this module was imported
        backend = backend_registry.BackendType.TENSORPIPE
    _validate_rpc_args(backend, store, name, rank, world_size, rpc_backend_options)
    _check_not_initialized(rank, world_size)
    agent = backend_registry.init_backend(
        backend, store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=rpc_backend_options
    )
    api._init_rpc_states(agent)


@api._require_initialized
def _get_debug_info() -> dict[str, str]:
    """Returns counters of references, of the agent and of distributed autograd, as texts by name.

    Raises `RuntimeError` if this process is not a worker.
    """
    info: dict[str, str] = {}
    info.update(_farcall._rref_context_get_debug_info())
    info.update(api._get_current_rpc_agent().get_debug_info())
    info.update(autograd._get_debug_info())
    return info
