"""What farcall lends to the tests of its users. Nothing else in the package imports it.

`LocalGroup` is a group of agents in one process. `SimulatedNetwork` runs the reference protocol of many workers under a
schedule: with losses, duplicates, partitions and crashes.

`farcall.testing.conformance` checks a transport against the rules of `farcall.transports.base`; it needs pytest, and is
imported by its own name for that reason.
"""

from farcall.testing.local import LocalGroup
from farcall.testing.memory_store import MemoryStore
from farcall.testing.simulation import SimulatedNetwork

__all__ = ["LocalGroup", "MemoryStore", "SimulatedNetwork"]
