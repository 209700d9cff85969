"""What Python code imports from `torch._C._distributed_rpc`, torch's C++ module: the same names, from here.

`install()` puts this module in its place.
"""

from farcall.api import _rref_context_get_debug_info
from farcall.backends.interface import RpcAgent
from farcall.options import BackendOptions as RpcBackendOptions
from farcall.pytorch.agent import TensorPipeAgent, enable_gil_profiling
from farcall.pytorch.api import (
    _cleanup_python_rpc_handler,
    _delete_all_user_and_unforked_owner_rrefs,
    _destroy_rref_context,
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
    get_rpc_timeout,
)
from farcall.pytorch.constants import DEFAULT_INIT_METHOD as _DEFAULT_INIT_METHOD
from farcall.pytorch.constants import DEFAULT_NUM_WORKER_THREADS as _DEFAULT_NUM_WORKER_THREADS
from farcall.pytorch.constants import DEFAULT_RPC_TIMEOUT_SEC as _DEFAULT_RPC_TIMEOUT_SEC
from farcall.pytorch.constants import UNSET_RPC_TIMEOUT as _UNSET_RPC_TIMEOUT
from farcall.pytorch.invoking import (
    _invoke_remote_builtin,
    _invoke_remote_python_udf,
    _invoke_remote_torchscript,
    _invoke_rpc_builtin,
    _invoke_rpc_python_udf,
    _invoke_rpc_torchscript,
)
from farcall.pytorch.options import _TensorPipeRpcBackendOptionsBase
from farcall.pytorch.profiling import RemoteProfilerManager, _set_profiler_node_id
from farcall.pytorch.rref import PyRRef
from farcall.pytorch.script_modules import _disable_jit_rref_pickle, _enable_jit_rref_pickle
from farcall.pytorch.server_process_global_profiler import (
    _disable_server_process_global_profiler,
    _enable_server_process_global_profiler,
)
from farcall.pytorch.workers import WorkerInfo

__all__ = [
    "_DEFAULT_INIT_METHOD",
    "_DEFAULT_NUM_WORKER_THREADS",
    "_DEFAULT_RPC_TIMEOUT_SEC",
    "_UNSET_RPC_TIMEOUT",
    "PyRRef",
    "RemoteProfilerManager",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "WorkerInfo",
    "_TensorPipeRpcBackendOptionsBase",
    "_cleanup_python_rpc_handler",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_destroy_rref_context",
    "_disable_jit_rref_pickle",
    "_disable_server_process_global_profiler",
    "_enable_jit_rref_pickle",
    "_enable_server_process_global_profiler",
    "_get_current_rpc_agent",
    "_invoke_remote_builtin",
    "_invoke_remote_python_udf",
    "_invoke_remote_torchscript",
    "_invoke_rpc_builtin",
    "_invoke_rpc_python_udf",
    "_invoke_rpc_torchscript",
    "_is_current_rpc_agent_set",
    "_reset_current_rpc_agent",
    "_rref_context_get_debug_info",
    "_set_and_start_rpc_agent",
    "_set_profiler_node_id",
    "_set_rpc_timeout",
    "enable_gil_profiling",
    "get_rpc_timeout",
]
