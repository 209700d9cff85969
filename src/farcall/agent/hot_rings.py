"""The few rings that the leader of the serving pool looks into while it polls: those that have brought something last.

A look into a ring takes less time than anything else, but a look into many does not. Calls that come through no ring
come through their sockets.

Rules
- Only the leader warms a ring, and it looks into all that are warm, or lets them rest, before it sleeps.
- A ring that has to make room must be empty, and its other end must know that nobody looks there any more.
- A ring whose connection is closed is looked into no more, whoever was about to warm it.
"""

from __future__ import annotations

import threading
from typing import Final

from farcall.transports.rings import RingReader, rest

_MOST: Final = 3


class HotRings:
    """Those of one serving pool."""

    __slots__ = ("_lock", "rings")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.rings: tuple[RingReader, ...] = ()
        """Those that are warm, each with the event that its handler is to get."""

    def warm(self, ring: RingReader) -> None:
        """Something has come from there: it is looked into from now on, if one of the others can make room."""
        with self._lock:
            if ring.is_open and ring not in self.rings and not rest(self.rings[_MOST - 1 :]):
                self.rings = (ring, *self.rings[: _MOST - 1])

    def cool(self, ring: RingReader) -> None:
        """Its connection is closed."""
        with self._lock:
            ring.is_open = False
            self.rings = tuple([each for each in self.rings if each is not ring])
