"""The registry of backends where torch has it: `from farcall.backend_registry import register_backend`.

Names only: what they do is in `farcall.backends.registry`.
"""

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
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
    "unregister_backend",
]
