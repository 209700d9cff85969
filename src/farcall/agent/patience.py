"""Waiting for what was asked for ahead (`calling.py`), in the thread that leads the serving pool, with the lead kept.

Calls that come together have their values asked for together, so that the first of them waits for the answer to all,
and those behind it need not wait at all. The lead given away in the meantime would have each of them wait in a thread
of its own. So the first waits for longer than a reply to a call of its own would be waited for, and reads by itself.

It adapts as `Dozing` does: values that are not there so soon are left to the wait that everybody else uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from farcall.agent.spinning import Dozing


class Patience(Dozing):
    """Waits for a moment, and remembers how well that has paid."""

    __slots__ = ()

    def doze(self, poll: Callable[[int], Any]) -> Any:
        """What `poll(1)` gives, asked once and again; nothing if that has not paid of late."""
        if self._resting:
            self._resting -= 1
            return None
        there = poll(1) or poll(1)
        if there:
            self._hit()
        else:
            self._miss()
        return there
