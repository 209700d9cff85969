"""Remote calls between Python workers: any worker runs functions on any other.

import farcall as rpc

rpc.init_rpc("worker0", rank=0, world_size=2)
rpc.rpc_sync("worker1", max, args=(1, 2))
rpc.shutdown()
"""

from typing import TYPE_CHECKING

from farcall import asgi, backend_registry, engines, errors, functions
from farcall._native import native_available
from farcall.api import (
    _delete_all_user_and_unforked_owner_rrefs,
    _destroy_rref_context,
    _get_debug_info,
    _rref_context_get_debug_info,
    _set_rpc_timeout,
    add_interceptor,
    add_membership_callback,
    get_metrics,
    get_rpc_timeout,
    get_worker_info,
    get_worker_infos,
    init_rpc,
    is_available,
    references,
    remote,
    remove_interceptor,
    remove_membership_callback,
    rpc_async,
    rpc_sync,
    shutdown,
)
from farcall.backends.interface import MembershipChange, RpcAgent
from farcall.backends.registry import (
    BackendType,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from farcall.collectives import _all_gather, _barrier, _wait_all_workers
from farcall.deadlines import cancelled, deadline, detached, remaining
from farcall.errors import (
    AlreadyInitializedError,
    AuthenticationError,
    BackendError,
    CallCancelledError,
    ConnectionRefusedByPeer,
    DeviceError,
    EncryptionError,
    ExpelledError,
    ForkedProcessError,
    GroupCallError,
    NotAllowedError,
    NotInitializedError,
    OwnerLost,
    OwnerLostError,
    PeerRefusedError,
    ProtocolError,
    ReferenceRefused,
    ReferenceRefusedError,
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
    WorkerLostError,
)
from farcall.functions import exposed, idempotent
from farcall.futures import Future, UnseenFailureWarning, _wait_all, collect_all, wait_all
from farcall.groups import Group, group
from farcall.interruption import interruptible
from farcall.many.completion import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    FIRST_EXCEPTION,
    DoneAndNotDone,
    as_completed,
    wait,
)
from farcall.many.futures_by_name import Futures
from farcall.many.map_stream import MapStream, Outcome
from farcall.many.references_by_name import RRefs
from farcall.many.selection import Workers, workers
from farcall.options import (
    BackendOptions,
    CallOptions,
    RpcBackendOptions,
    SelectionOptions,
    TensorPipeRpcBackendOptions,
)
from farcall.protocol import WorkerInfo
from farcall.rref import RRef, Target
from farcall.runtime.interceptors import ClientCall, ClientInterceptor, ServerCall, ServerInterceptor
from farcall.streams import Stream
from farcall.workers import Worker, worker

__version__ = "0.1.0"

__all__ = [
    "ALL_COMPLETED",
    "FIRST_COMPLETED",
    "FIRST_EXCEPTION",
    "AlreadyInitializedError",
    "AuthenticationError",
    "BackendError",
    "BackendOptions",
    "BackendType",
    "CallCancelledError",
    "CallOptions",
    "ClientCall",
    "ClientInterceptor",
    "ConnectionRefusedByPeer",
    "DeviceError",
    "DoneAndNotDone",
    "EncryptionError",
    "ExpelledError",
    "ForkedProcessError",
    "Future",
    "Futures",
    "Group",
    "GroupCallError",
    "MapStream",
    "MembershipChange",
    "NotAllowedError",
    "NotInitializedError",
    "Outcome",
    "OwnerLost",
    "OwnerLostError",
    "PeerRefusedError",
    "ProtocolError",
    "RRef",
    "RRefs",
    "ReferenceRefused",
    "ReferenceRefusedError",
    "RemoteError",
    "RendezvousError",
    "RendezvousTimeoutError",
    "RpcAgent",
    "RpcBackendOptions",
    "RpcError",
    "RpcTimeoutError",
    "SelectionOptions",
    "SerializationError",
    "ServerCall",
    "ServerInterceptor",
    "ShutdownError",
    "Stream",
    "Target",
    "TensorPipeRpcBackendOptions",
    "UnknownWorkerError",
    "UnseenFailureWarning",
    "UsageError",
    "VersionMismatchError",
    "Worker",
    "WorkerInfo",
    "WorkerLost",
    "WorkerLostError",
    "Workers",
    "_all_gather",
    "_barrier",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_destroy_rref_context",
    "_get_debug_info",
    "_rref_context_get_debug_info",
    "_set_rpc_timeout",
    "_wait_all",
    "_wait_all_workers",
    "add_interceptor",
    "add_membership_callback",
    "as_completed",
    "asgi",
    "backend_registered",
    "backend_registry",
    "cancelled",
    "collect_all",
    "construct_rpc_backend_options",
    "deadline",
    "detached",
    "engines",
    "errors",
    "exposed",
    "functions",
    "get_metrics",
    "get_rpc_timeout",
    "get_worker_info",
    "get_worker_infos",
    "group",
    "idempotent",
    "init_backend",
    "init_rpc",
    "interruptible",
    "is_available",
    "native_available",
    "references",
    "register_backend",
    "remaining",
    "remote",
    "remove_interceptor",
    "remove_membership_callback",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "wait",
    "wait_all",
    "worker",
    "workers",
]

_NOT_HERE = {
    "TensorPipeAgent": "init_rpc makes it; what an agent can do is in farcall.RpcAgent",
    "enable_gil_profiling": "use get_metrics() for what the agent counts",
}
"""What programs written for `torch.distributed.rpc` may look for."""

if not TYPE_CHECKING:  # a type checker would take any name then

    def __getattr__(name: str) -> object:
        """Raises `AttributeError`, with advice for names of `torch.distributed.rpc` that farcall does not have."""
        advice = f", as torch.distributed.rpc has: {_NOT_HERE[name]}" if name in _NOT_HERE else ""
        raise AttributeError(f"module 'farcall' has no {name!r}{advice}")
