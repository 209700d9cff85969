"""What farcall offers to the tests of its users. Nothing else in the package imports it.

`LocalGroup` is a group of agents in one process. The faulty agent, `BackendType.FAULTY_TENSORPIPE`, fails, delays and
loses messages and cuts workers off, as it is told.

`farcall.testing.conformance` checks a transport against the rules of `farcall.transports.base`; it needs pytest, and is
imported by its own name for that reason.
"""

from farcall.testing.faulty_agent import FaultyAgent, faults
from farcall.testing.faulty_control import Faults
from farcall.testing.faulty_options import Failure, FaultyRpcBackendOptions, FaultyTensorPipeRpcBackendOptions
from farcall.testing.local import LocalGroup
from farcall.testing.memory_store import MemoryStore

__all__ = [
    "Failure",
    "Faults",
    "FaultyAgent",
    "FaultyRpcBackendOptions",
    "FaultyTensorPipeRpcBackendOptions",
    "LocalGroup",
    "MemoryStore",
    "faults",
]
