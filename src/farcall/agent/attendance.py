"""Sees to it that the replies of a connection are read, though nobody waits for them.

Who has made a call and does not wait for it yet says that the connection is unattended. If it still is a moment later,
by the supervisor's clock, the background reader is asked to watch it. While a burst of calls goes out it is let be for
longer: reading the replies all at once is cheaper for everybody.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Final

from farcall.agent.supervisor import Supervisor

if TYPE_CHECKING:
    from farcall.agent.outgoing import Outgoing

_PATIENCE: Final = 5e-3
_LONGEST_PATIENCE: Final = 100e-3


class Attendance:
    """Whether one connection is looked after."""

    __slots__ = ("_calls_at_last_tick", "_connection", "_look_after", "_supervisor", "since")

    def __init__(self, connection: Outgoing, supervisor: Supervisor, look_after: Callable[[], None]) -> None:
        self._connection = connection
        self._supervisor = supervisor
        self._look_after = look_after  # has the background reader watch it
        self._calls_at_last_tick = 0
        self.since = 0.0
        """Since when nobody is known to look after it; 0 if it needs nobody, or has somebody."""

    def unattended(self) -> None:
        """Replies are awaited, and nobody is known to read them. Must not block."""
        if not self.since:
            self.since = monotonic()
            try:
                self._supervisor.attend(self._connection)
            except BaseException:
                self.since = 0.0  # to be told again
                raise

    def tick(self, now: float) -> bool:
        """Has replies read that nobody reads, once no more calls are being sent. Whether to look again soon."""
        since = self.since
        if not since:
            return False
        connection = self._connection
        # First unset, then asked: a call that comes just now either is seen, or finds it unattended. And while it is
        # set, a connection may take for granted that something is awaited.
        self.since = 0.0
        if not connection.has_pending() or connection.is_lost():
            return False
        self.since = since
        bursting = connection.calls_started != self._calls_at_last_tick
        self._calls_at_last_tick = connection.calls_started
        if now - since < (_LONGEST_PATIENCE if bursting else _PATIENCE):
            return True
        self.since = 0.0
        self._look_after()
        return False
