"""Which agent is made: a backend is a name for a kind of agent, with options of its own.

`interface` is what an agent must do, whoever writes it, and `references` what an `RRef` asks of one; `registry` finds
backends by name; `default` makes farcall's own agent. `given`, `expiry` and `running` are what agents written elsewhere
have in common: what a call is given, its time, and what is run for others. Nothing here is on the path of a call of
farcall's own agent.
"""

from farcall.backends.interface import Metrics, PeerMetrics, RpcAgent
from farcall.backends.references import Book, Handle, NoReferences, ReferenceCalls
from farcall.backends.registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
    unregister_backend,
)
from farcall.backends.running import run_here

__all__ = [
    "BackendType",
    "BackendValue",
    "Book",
    "Handle",
    "Metrics",
    "NoReferences",
    "PeerMetrics",
    "ReferenceCalls",
    "RpcAgent",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
    "run_here",
    "unregister_backend",
]
