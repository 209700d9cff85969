"""`import farcall.pytorch as rpc`: the API of `torch.distributed.rpc` on farcall, with tensors.

`install()` puts it in the place of torch's own, so that programs which import that run on farcall unchanged;
`python -m farcall.pytorch script.py ...` does so before it runs a script.
"""

from farcall.pytorch import (
    _utils,
    api,
    autograd,
    backend_registry,
    constants,
    functions,
    internal,
    options,
    rref_proxy,
    server_process_global_profiler,
)
from farcall.pytorch.api import (
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from farcall.pytorch.backend_registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from farcall.pytorch.installing import install
from farcall.pytorch.native import *  # noqa: F403
from farcall.pytorch.options import TensorPipeRpcBackendOptions, _is_tensorpipe_available
from farcall.pytorch.rref import RRef
from farcall.pytorch.server_process_global_profiler import _server_process_global_profile
from farcall.pytorch.starting import _get_debug_info, _init_rpc_backend, _validate_rpc_args, init_rpc, is_available

__all__ = [
    "BackendType",
    "BackendValue",
    "RRef",
    "TensorPipeRpcBackendOptions",
    "_get_debug_info",
    "_init_rpc_backend",
    "_is_tensorpipe_available",
    "_server_process_global_profile",
    "_utils",
    "_validate_rpc_args",
    "api",
    "autograd",
    "backend_registered",
    "backend_registry",
    "constants",
    "construct_rpc_backend_options",
    "functions",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "install",
    "internal",
    "is_available",
    "options",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "rref_proxy",
    "server_process_global_profiler",
    "shutdown",
]
