"""The connections whose other end has not proved yet that it knows the secret: how many there are, and for how long.

Rules
- When one more comes than may be there, the oldest goes: an honest worker is through with its greeting in a moment, so
  those who stay silent make way for it.
- Each has its time. It is looked at whenever somebody comes, and at every heartbeat.
- Whoever takes a connection out of the table decides what becomes of it: it is dismissed once.
"""

from __future__ import annotations

from farcall.agent.incoming import Incoming
from farcall.security import Limits


class Doorstep:
    """Those of one agent. The serving pool and the supervisor's thread use it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._until: dict[Incoming, float] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._until)

    def came(self, incoming: Incoming, now: float) -> None:
        """Somebody has connected."""
        for known in [one for one in list(self._until) if one.has_greeted()]:
            self._until.pop(known, None)
        self.expire(now)
        while len(self._until) >= self._limits.most:
            oldest = next(iter(list(self._until)), None)
            if oldest is not None and self._until.pop(oldest, None) is not None:
                oldest.dismiss("too many", f"more than {self._limits.most} connections have not proved themselves yet")
        self._until[incoming] = now + self._limits.patience

    def gone(self, incoming: Incoming) -> None:
        """It is known now, or closed."""
        self._until.pop(incoming, None)

    def expire(self, now: float) -> None:
        """Dismisses those whose time is over."""
        for incoming, until in list(self._until.items()):
            if incoming.has_greeted():
                self._until.pop(incoming, None)
            elif until > now:
                break
            elif self._until.pop(incoming, None) is not None:
                seconds = f"{self._limits.patience:g} s"
                incoming.dismiss("silent", f"it did not prove within {seconds} that it knows the secret")
