"""The constants of `torch.distributed.rpc`, by its names. Programs may set them: they are looked up when used."""

from __future__ import annotations

from datetime import timedelta

from farcall.options import DEFAULT_INIT_METHOD as _DEFAULT_INIT_METHOD
from farcall.options import DEFAULT_NUM_WORKER_THREADS as _DEFAULT_NUM_WORKER_THREADS
from farcall.options import DEFAULT_RPC_TIMEOUT as _DEFAULT_RPC_TIMEOUT_SEC
from farcall.options import UNSET_RPC_TIMEOUT as _UNSET_RPC_TIMEOUT

DEFAULT_RPC_TIMEOUT_SEC: float = _DEFAULT_RPC_TIMEOUT_SEC
DEFAULT_INIT_METHOD: str = _DEFAULT_INIT_METHOD
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
DEFAULT_NUM_WORKER_THREADS: int = _DEFAULT_NUM_WORKER_THREADS
DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=2**31 - 1)
UNSET_RPC_TIMEOUT: float = _UNSET_RPC_TIMEOUT
