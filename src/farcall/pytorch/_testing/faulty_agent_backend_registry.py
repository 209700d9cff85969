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
        messages_to_fail: The names of messages that fail; none by default.
        messages_to_delay: The names of messages, and the seconds by which each is delayed; none by default.
        num_fail_sends: How many sends of each such message fail.
        **kwargs: Further options of `TensorPipeRpcBackendOptions`, which raises if it does not know one.
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
    """Returns a new faulty agent, which has started.

    Raises `TypeError` if the store or the options have the wrong type.
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
