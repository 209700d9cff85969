"""Registers `FAULTY_TENSORPIPE`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from farcall.pytorch import api, backend_registry
from farcall.pytorch._testing.faulty_agent import FaultyTensorPipeAgent, FaultyTensorPipeRpcBackendOptions


def _construct_options(rpc_timeout: float, init_method: str, **kwargs: Any) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def _init_backend(store: Any, name: str, rank: int, world_size: int, rpc_backend_options: Any) -> FaultyTensorPipeAgent:
    if not isinstance(store, dist.Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`. {rpc_backend_options}")
    agent = FaultyTensorPipeAgent(store, name, rank, world_size, rpc_backend_options, {}, [])
    api._init_rpc_states(agent)
    return agent


backend_registry.register_backend("FAULTY_TENSORPIPE", _construct_options, _init_backend)
