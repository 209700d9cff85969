"""When the first of a connection's calls ends by its timeout, so that the supervisor sleeps no longer than that.

It is never later than the true one. It may be sooner, as the calls that it was noted for have long been answered: then
the supervisor looks in vain, once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from farcall.agent.calls import PendingCall
from farcall.agent.supervisor import Supervisor
from farcall.sleeping import FOREVER


class Deadlines:
    """Those of one connection."""

    __slots__ = ("_lock", "_supervisor", "first")

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._lock = threading.RLock()
        self.first = FOREVER
        """The first of them; a call with a sooner one is to be noted."""

    def note(self, deadline: float) -> None:
        """A call is about to be sent that has it."""
        with self._lock:
            if deadline < self.first:  # not min(): what a signal handler sets in between must not be lost
                self.first = deadline
        self._supervisor.deadline_set(deadline)

    def expire(self, calls: Iterable[PendingCall], now: float, end: Callable[[PendingCall], object]) -> None:
        """Has those of the calls ended whose time is over, and finds the first deadline of the others."""
        with self._lock:
            self.first = FOREVER
        for call in calls:
            if call.deadline <= now:
                end(call)
            elif call.deadline < self.first:
                self.note(call.deadline)
