"""What farcall lends to the tests of its users. Nothing else in the package imports it.

`farcall.testing.conformance` checks a transport against the rules of `farcall.transports.base`; it needs pytest, and is
imported by its own name for that reason.
"""

from farcall.testing.local import LocalGroup
from farcall.testing.memory_store import MemoryStore

__all__ = ["LocalGroup", "MemoryStore"]
