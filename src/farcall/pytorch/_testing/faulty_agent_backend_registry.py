"""Registers the backend `FAULTY_TENSORPIPE`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from farcall.pytorch import api, backend_registry, constants
from farcall.pytorch._testing.faulty_agent import FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions


def _faulty_tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
    messages_to_fail: Sequence[str] = (),
    messages_to_delay: Mapping[str, float] = MappingProxyType({}),
    num_fail_sends: int = 0,
    **kwargs: Any,
) -> FaultyTensorPipeRpcBackendOptions:
    """Returns the options of the faulty backend. Called by `construct_rpc_backend_options`.

    Args:
        rpc_timeout: The default timeout of calls in seconds; 0 for no timeout.
        init_method: The rendezvous URL.
        num_worker_threads: The number of threads that run requests.
        messages_to_fail: The names of messages that fail; none by default. Names are checked when an agent is created.
        messages_to_delay: By how many seconds messages are delayed, by the name of the message; none by default.
        num_fail_sends: How many sends of each message in `messages_to_fail` fail before one succeeds; 0 for none.
        **kwargs: Further options of `TensorPipeRpcBackendOptions`, which raises `TypeError` if an option is unknown.
    """
    return FaultyTensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
        messages_to_fail=list(messages_to_fail),
        messages_to_delay=dict(messages_to_delay),
        num_fail_sends=num_fail_sends,
        **kwargs,
    )


def _faulty_tensorpipe_init_backend_handler(
    store: Any, name: str, rank: int, world_size: int, rpc_backend_options: Any
) -> FaultyTensorPipeAgent:
    """Starts a faulty agent, makes it the agent of this process, and returns it.

    Args:
        store: A `torch.distributed.Store`, at which the workers find each other.
        name: The name of this worker.
        rank: Its rank.
        world_size: The number of workers; 0 or None for an open group.
        rpc_backend_options: The options, a `FaultyTensorPipeRpcBackendOptions`.

    Raises:
        TypeError: `store` or `rpc_backend_options` has the wrong type.
        UsageError: A message name or a number in the options is not valid.
        RendezvousError: The group could not be joined.
        RuntimeError: torch does not accept the name.
    """
    if not isinstance(store, dist.Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`. {rpc_backend_options}")
    agent = FaultyTensorPipeAgent(store, name, rank, world_size, rpc_backend_options, {}, [])
    api._init_rpc_states(agent)
    return agent


backend_registry.register_backend(
    "FAULTY_TENSORPIPE",
    _faulty_tensorpipe_construct_rpc_backend_options_handler,
    _faulty_tensorpipe_init_backend_handler,
)
