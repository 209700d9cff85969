"""Who of its neighbours a worker still hears: the failure detector's memory.

Time is counted in a way of its own: a tick counts for one interval at most. A worker that was stopped, or got no
processor, sees its next tick late; the time that it missed is nobody's silence, and at that tick it blames nobody, for
the answers may lie unread. So silence means that so many pings in a row went unanswered while this worker was there to
hear.

A neighbour that was silent for almost all of the patience is *suspect*: others are asked whether they hear it. Silent
for all of it, it is *dead*. There is one exception: if this worker has heard nobody at all of late, it is likely that
the fault is its own. Then it waits for `LONELY_ROUNDS` more, in which the others, if they are there, will have taken it
for dead, and will say so at the first word that gets through; and if it hears somebody again, it asks once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from farcall.errors import UsageError
from farcall.protocol.ids import Worker

PROBE_ROUNDS: Final = 2
"""In so many rounds before the end of the patience others are asked."""
LONELY_ROUNDS: Final = 1


def check_heartbeat(interval: float, patience: float) -> None:
    """Raises `UsageError` if the patience is too short to ask others within it."""
    if not 0 < interval * (PROBE_ROUNDS + 1) <= patience:
        raise UsageError(
            f"a heartbeat interval of {interval:g} s with a patience of {patience:g} s leaves no time to ask "
            f"others about a silent worker; give an interval above 0 and a patience of at least "
            f"{PROBE_ROUNDS + 1} intervals"
        )


class Watching:
    """The neighbours that one worker watches."""

    def __init__(self, interval: float, patience: float) -> None:
        """Raises `UsageError` as `check_heartbeat`."""
        check_heartbeat(interval, patience)
        self.interval = interval
        self.patience = patience
        self.watched: dict[Worker, float] = {}
        """When each was heard last, or its watch began."""
        self._clock = 0.0
        self._now: float | None = None
        self._just_back = False  # the tick was late: what came meanwhile may not have been read yet
        self._anybody = 0.0  # when anybody at all was heard last, watched or not

    def advance(self, now: float) -> None:
        """A tick: time goes on, by one interval at most."""
        gap = 0.0 if self._now is None else max(0.0, now - self._now)
        self._now = now
        self._clock += min(gap, self.interval)
        self._just_back = gap > 2 * self.interval and not self._just_back

    def follow(self, neighbours: Iterable[Worker]) -> None:
        """These are to be watched now; those that were before keep their times."""
        self.watched = {worker: self.watched.get(worker, self._clock) for worker in neighbours}

    def heard(self, worker: Worker) -> None:
        """A sign of life."""
        if self._is_lonely():
            # Whatever it was that cut us off is over: all others get the time to be asked again, and through others.
            since = self._clock - self.patience + PROBE_ROUNDS * self.interval
            self.watched = {each: max(heard, since) for each, heard in self.watched.items()}
        if worker in self.watched:
            self.watched[worker] = self._clock
        self._anybody = self._clock

    def silence(self, worker: Worker) -> float:
        """For how long a watched worker has said nothing. Raises `KeyError` if it is not watched."""
        return self._clock - self.watched[worker]

    def suspects(self) -> list[Worker]:
        """Those about whom others are to be asked now."""
        return self._silent_for(self.patience - PROBE_ROUNDS * self.interval)

    def dead(self, alone: bool) -> list[Worker]:
        """Those of whom nothing is to be hoped for any more. `alone`: there is nobody else who could be heard."""
        if self._just_back:
            return []
        silent = self._silent_for(self.patience)
        if silent and not alone and self._is_lonely():
            return self._silent_for(self.patience + LONELY_ROUNDS * self.interval)
        return silent

    def _is_lonely(self) -> bool:
        return self._clock - self._anybody > (LONELY_ROUNDS + 0.5) * self.interval

    def _silent_for(self, span: float) -> list[Worker]:
        # Half an interval is left to ticks that come a little early: it is rounds that are counted.
        since = self._clock - span + self.interval / 2
        return [worker for worker, heard in self.watched.items() if heard <= since]
