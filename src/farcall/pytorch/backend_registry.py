"""Backends by name, as torch has them: `TENSORPIPE` is farcall's own agent, `FAULTY_TENSORPIPE` the one for tests.

As in torch, `BackendType` is an enumeration that is made anew with each backend that is registered, so who has imported
it before does not see the new one. How the maps of devices are exchanged and checked is in `device_maps`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from farcall.pytorch import api, device_maps, devices, plain_tensors
from farcall.pytorch import constants as rpc_constants
from farcall.pytorch.agent import TensorPipeAgent
from farcall.pytorch.options import TensorPipeRpcBackendOptions


class BackendValue(NamedTuple):
    """What a backend does."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


def _backend_types(backends: dict[str, BackendValue]) -> Any:
    made = enum.Enum("BackendType", backends)  # type: ignore[misc]  # made of what is registered
    setattr(made, "__repr__", _backend_type_repr)  # noqa: B010 (a method of what is made here)
    made.__doc__ = _backend_type_doc
    return made


def _backend_type_repr(self: enum.Enum) -> str:
    return f"BackendType.{self.name}"


_backend_type_doc = "The backends that are registered, by name."


BackendType: Any = _backend_types({})


def backend_registered(backend_name: str) -> bool:
    """Whether there is a backend of that name."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Makes a backend known; its member of the new `BackendType`. Raises `RuntimeError` if the name is taken."""
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    known = {member.name: member.value for member in BackendType}
    BackendType = _backend_types(
        {backend_name: BackendValue(construct_rpc_backend_options_handler, init_backend_handler), **known}
    )
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = rpc_constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = rpc_constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Options for that backend. Raises what its handler raises."""
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """A new agent of that backend. Raises what its handler raises."""
    return backend.value.init_backend_handler(*args, **kwargs)


def _tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = rpc_constants.DEFAULT_NUM_WORKER_THREADS,
    _transports: Sequence[str] | None = None,
    _channels: Sequence[str] | None = None,
    **kwargs: Any,
) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
        _transports=_transports,
        _channels=_channels,
        **kwargs,
    )


def _tensorpipe_init_backend_handler(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> TensorPipeAgent:
    if not isinstance(store, dist.Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {rpc_backend_options}")
    agent = TensorPipeAgent(store, name, rank, world_size, rpc_backend_options, {}, [])
    api._init_rpc_states(agent)
    try:
        device_maps.exchange(agent)
        if torch.cuda.is_available() and agent.used_devices:
            torch.cuda.init()
    except BaseException:
        agent.shutdown()
        api._reset_current_rpc_agent()
        raise
    return agent


devices.ride()
plain_tensors.count_as_plain()
register_backend("TENSORPIPE", _tensorpipe_construct_rpc_backend_options_handler, _tensorpipe_init_backend_handler)
