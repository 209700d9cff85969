"""Backends: kinds of agents, each with a name and options of its own.

    interface  what an agent must do, and what the agents of all backends share
    registry   finds backends by name; the default one creates farcall's own agent

Nothing in this package runs during a call of farcall's own agent.
"""

from farcall.backends.interface import (
    Handle,
    Metrics,
    NoReferences,
    PeerMetrics,
    ReferenceCalls,
    ReferenceStore,
    RpcAgent,
    run_here,
)
from farcall.backends.registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
    unregister_backend,
)

__all__ = [
    "BackendType",
    "BackendValue",
    "Handle",
    "Metrics",
    "NoReferences",
    "PeerMetrics",
    "ReferenceCalls",
    "ReferenceStore",
    "RpcAgent",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
    "run_here",
    "unregister_backend",
]
