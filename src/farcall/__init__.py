"""Remote calls between Python workers: any worker runs functions on any other.

import farcall as rpc

rpc.init_rpc("worker0", rank=0, world_size=2)
rpc.rpc_sync("worker1", max, args=(1, 2))
rpc.shutdown()
"""

from typing import TYPE_CHECKING

from farcall import errors, functions
from farcall.api import (
    _delete_all_user_and_unforked_owner_rrefs,
    _destroy_rref_context,
    _rref_context_get_debug_info,
    _set_rpc_timeout,
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    is_available,
    references,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from farcall.errors import (
    AlreadyInitializedError,
    ConnectionRefusedByPeer,
    ForkedProcessError,
    NotInitializedError,
    OwnerLost,
    ProtocolError,
    ReferenceRefused,
    RemoteError,
    RendezvousError,
    RendezvousTimeoutError,
    RpcError,
    RpcTimeoutError,
    SerializationError,
    ShutdownError,
    UnknownWorkerError,
    UsageError,
    VersionMismatchError,
    WorkerLost,
)
from farcall.futures import Future, UnseenFailureWarning
from farcall.gathering import collect_all, wait_all
from farcall.options import RpcBackendOptions
from farcall.protocol import WorkerInfo
from farcall.rref import RRef

__version__ = "0.1.0"

__all__ = [
    "AlreadyInitializedError",
    "ConnectionRefusedByPeer",
    "ForkedProcessError",
    "Future",
    "NotInitializedError",
    "OwnerLost",
    "ProtocolError",
    "RRef",
    "ReferenceRefused",
    "RemoteError",
    "RendezvousError",
    "RendezvousTimeoutError",
    "RpcBackendOptions",
    "RpcError",
    "RpcTimeoutError",
    "SerializationError",
    "ShutdownError",
    "UnknownWorkerError",
    "UnseenFailureWarning",
    "UsageError",
    "VersionMismatchError",
    "WorkerInfo",
    "WorkerLost",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_destroy_rref_context",
    "_rref_context_get_debug_info",
    "_set_rpc_timeout",
    "collect_all",
    "errors",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "references",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "wait_all",
]

_NOT_HERE = {
    "TensorPipeRpcBackendOptions": "use farcall.RpcBackendOptions; it knows no device maps",
    "BackendType": "there is one backend; leave `backend` out of init_rpc",
    "backend_registry": "there is one backend; transports are registered in farcall.transports",
    "TensorPipeAgent": "there is one kind of agent, which init_rpc makes",
}
"""What programs written for `torch.distributed.rpc` may look for."""

if not TYPE_CHECKING:  # a type checker would take any name then

    def __getattr__(name: str) -> object:
        advice = f", as torch.distributed.rpc has: {_NOT_HERE[name]}" if name in _NOT_HERE else ""
        raise AttributeError(f"module 'farcall' has no {name!r}{advice}")
