"""What can be chosen about an agent. Frozen: an agent never sees its options change.

Defaults are those of `torch.distributed.rpc` where it has the option.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Final

from farcall.errors import UsageError

DEFAULT_RPC_TIMEOUT: Final = 60.0
UNSET_RPC_TIMEOUT: Final = -1.0
"""The default of a `timeout` parameter: take the agent's."""
DEFAULT_NUM_WORKER_THREADS: Final = 16
DEFAULT_INIT_METHOD: Final = "env://"
DEFAULT_INIT_TIMEOUT: Final = 60.0
DEFAULT_SHUTDOWN_TIMEOUT: Final = 0.0


@dataclass(frozen=True, kw_only=True)
class RpcBackendOptions:
    """The options of the default backend."""

    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS
    """How many functions run here at once for others. Those that wait for a farcall reply do not count."""

    rpc_timeout: float = DEFAULT_RPC_TIMEOUT
    """Seconds that a call may take unless it says otherwise; 0 is without end."""

    init_method: str = DEFAULT_INIT_METHOD
    """Where workers find each other: `env://`, `tcp://host:port` or `file://path`."""

    init_timeout: float = DEFAULT_INIT_TIMEOUT
    """Seconds to wait for all workers at the start."""

    interface: str | None = None
    """The network interface (`eth0`) or its address to listen on; by default the one that leads to the store."""

    transports: tuple[str, ...] = ("unix", "tcp")
    """Which transports may be used, best first. What cannot be used here or for a peer is passed over."""

    spin: float = 100e-6
    """Seconds that a thread at most polls for what it waits for before it sleeps; 0 turns spinning off.
    Spinning stops by itself where it does not pay."""

    heartbeat_interval: float = 1.0
    """Seconds between the pings by which workers watch each other."""

    heartbeat_patience: float = 8.0
    """Seconds of silence after which a worker is taken for dead. It should be longer than any call into C that keeps
    the interpreter to itself; a worker whose process has ended is noticed at once all the same."""

    record_stacks: bool = False
    """Whether references remember the whole stack where they were made, for `references()`; else the line only."""

    def __post_init__(self) -> None:
        for name in (
            "num_worker_threads",
            "rpc_timeout",
            "init_timeout",
            "spin",
            "heartbeat_interval",
            "heartbeat_patience",
        ):
            value = getattr(self, name)
            if not isinstance(value, Real):
                raise UsageError(f"{name} must be a number, not {value!r}")
        if self.num_worker_threads < 1:
            raise UsageError(f"num_worker_threads must be at least 1, not {self.num_worker_threads}")
        if not self.rpc_timeout >= 0:  # nan too
            raise UsageError(f"rpc_timeout must be 0 (no timeout) or more, not {self.rpc_timeout}")
        if not self.init_timeout > 0:
            raise UsageError(f"init_timeout must be more than 0, not {self.init_timeout}")
        if not self.spin >= 0:
            raise UsageError(f"spin must be 0 (never spin) or more, not {self.spin}")
        if isinstance(self.transports, str) or not self.transports:
            raise UsageError(f"transports must be a tuple of names such as ('unix', 'tcp'), not {self.transports!r}")
