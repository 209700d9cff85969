"""Calls in torch's profilers."""

from __future__ import annotations

from typing import Any

import torch

# torch's own, whatever is put in the place of its module later: it needs no agent.
_set_profiler_node_id: Any = torch._C._distributed_rpc._set_profiler_node_id
_enable_server_process_global_profiler: Any = torch._C._distributed_rpc._enable_server_process_global_profiler
_disable_server_process_global_profiler: Any = torch._C._distributed_rpc._disable_server_process_global_profiler
RemoteProfilerManager: Any = torch._C._distributed_rpc.RemoteProfilerManager
