"""The constants of `torch.distributed.rpc.constants`. Programs may set them: they are looked up when used."""

from __future__ import annotations

from datetime import timedelta

from farcall.options import DEFAULT_INIT_METHOD as _DEFAULT_INIT_METHOD
from farcall.options import DEFAULT_NUM_WORKER_THREADS as _DEFAULT_NUM_WORKER_THREADS
from farcall.options import DEFAULT_RPC_TIMEOUT as _DEFAULT_RPC_TIMEOUT_SEC
from farcall.options import UNSET_RPC_TIMEOUT as _UNSET_RPC_TIMEOUT

DEFAULT_RPC_TIMEOUT_SEC: float = _DEFAULT_RPC_TIMEOUT_SEC
"""The default timeout of calls in seconds."""
DEFAULT_INIT_METHOD: str = _DEFAULT_INIT_METHOD
"""The default rendezvous URL."""
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
"""Seconds that `shutdown` waits by default; 0 for no limit."""
DEFAULT_NUM_WORKER_THREADS: int = _DEFAULT_NUM_WORKER_THREADS
"""The default number of threads that run requests."""
DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=2**31 - 1)
"""The timeout of process groups that `backend_registry._init_process_group` creates."""
UNSET_RPC_TIMEOUT: float = _UNSET_RPC_TIMEOUT
"""As the timeout of a call: use the worker's default timeout."""
