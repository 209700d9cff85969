"""The API of `torch.distributed.rpc` on farcall, with tensors: `import farcall.pytorch as rpc`.

`install()` puts it in place of torch's own module, so that programs that import torch's run on farcall unchanged.
`python -m farcall.pytorch script.py ...` does that before it runs a script.

Example:
    import farcall.pytorch as rpc

    rpc.init_rpc("worker0", rank=0, world_size=2)
    print(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)))
    rpc.shutdown()
"""

import threading

from torch._C._distributed_c10d import Store

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
    AllGatherStates,
    get_worker_info,
    method_factory,
    new_method,
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
from farcall.pytorch.installation import install
from farcall.pytorch.native import *  # noqa: F403
from farcall.pytorch.options import TensorPipeRpcBackendOptions, _is_tensorpipe_available
from farcall.pytorch.rref import RRef
from farcall.pytorch.server_process_global_profiler import _server_process_global_profile
from farcall.pytorch.startup import (
    _get_debug_info,
    _init_rpc_backend,
    _validate_rpc_args,
    init_rpc,
    is_available,
    logger,
)

_init_counter = 0
"""How many groups this process has started. In a fixed group the number is the same in all workers."""
_init_counter_lock = threading.Lock()
dist_autograd = autograd

__all__ = [
    "AllGatherStates",
    "BackendType",
    "BackendValue",
    "RRef",
    "Store",
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
    "dist_autograd",
    "functions",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "install",
    "internal",
    "is_available",
    "logger",
    "method_factory",
    "new_method",
    "options",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "rref_proxy",
    "server_process_global_profiler",
    "shutdown",
]
