"""One thread of the serving pool, and how it is told what to do. What it does then is in `serving.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from farcall.agent.leading import Lead
from farcall.sleeping import Gate

if TYPE_CHECKING:
    from farcall.agent.jobs import Job


class Order:
    """What a thread is told to do, other than to run a job."""


LEAD: Final = Order()
EXIT: Final = Order()


class Follower:
    """One thread of the pool."""

    __slots__ = ("_gate", "_order", "counted", "depth", "lead", "rested", "thread")

    def __init__(self) -> None:
        self._gate = Gate()
        self._order: Job | Order | None = None
        self.lead = Lead()
        self.thread = 0
        self.counted = False
        """The function it runs is among those that count for the limit. Under the pool's lock."""
        self.rested = 0.0
        """Seconds for which the function that it runs has slept or dozed in waits of ours so far."""
        self.depth = 0
        """How many waits of ours its function sleeps in; a callback may wait inside a wait."""

    def tell(self, order: Job | Order) -> None:
        """Wakes it with something to do. Only for a thread that was taken from the idle ones, or is new."""
        self._order = order
        self._gate.open()

    def listen(self, deadline: float) -> Job | Order | None:
        """Sleeps until told something, or until the deadline."""
        self._gate.rest(deadline)
        order, self._order = self._order, None
        return order
