"""Looking again and again for a moment before sleeping.

Waking a sleeping thread costs more than a whole small call, so a thread that waits first polls for some tens of
microseconds. That is a waste where the answer takes longer, and a harm where somebody else wants the core or the
interpreter. So it adapts, by two signs:

- *Misses*: what is waited for must come while spinning about three times in four, or spinning rests.
- *Crowding*: now and then the thread offers its core to others (`sched_yield`). If a round of looking takes much longer
  than it should, somebody took the offer, or another thread of this process wanted the interpreter. That counts as a
  miss, and ends the spinning: what it would gain is taken from others, who may well be the ones that are waited for.

A rest is some number of waits without spinning, longer each time until spinning pays again.

One object for each thing that is waited for. Not locked: only the thread that waits touches it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

_TRUST: Final = 24
_MISS_COSTS: Final = 3
_FIRST_REST: Final = 16
_LONGEST_REST: Final = 1024
_CROWDED: Final = 20e-6
"""A round of looking takes about 1 µs; longer than this, and others have run meanwhile."""
_OFFER_AFTER: Final = 20e-6
"""Not at once: an offer costs as much as a look, and most answers come sooner."""

_yield = os.sched_yield


class Spinning:
    """Polls for a moment, and remembers how well that has paid."""

    __slots__ = ("_budget", "_rest", "_resting", "_score")

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._score = _TRUST
        self._resting = 0  # how many waits to go without spinning
        self._rest = _FIRST_REST  # how long the next rest will be

    def look(self, poll: Callable[[int], list[Any]]) -> list[Any]:
        """What `poll(0)` gives, tried for a moment if that has paid before; nothing if the thread should sleep."""
        if self._resting:
            self._resting -= 1
            return []
        if not self._budget:
            return []
        events = poll(0)
        if events:
            return events
        before = perf_counter()
        stop = before + self._budget
        offer = before + _OFFER_AFTER
        while True:
            if before > offer:
                _yield()
                offer = before + _OFFER_AFTER
            events = poll(0)
            now = perf_counter()
            if now - before > _CROWDED:
                self._miss()
                return events
            if events:
                self._hit()
                return events
            if now >= stop:
                self._miss()
                return events
            before = now

    def _hit(self) -> None:
        if self._score < _TRUST:
            self._score += 1
            if self._score == _TRUST:
                self._rest = _FIRST_REST

    def _miss(self) -> None:
        self._score -= _MISS_COSTS
        if self._score <= 0:
            self._take_a_rest()

    def _take_a_rest(self) -> None:
        self._score = _MISS_COSTS  # one more miss after the rest, and it rests again
        self._resting = self._rest
        self._rest = min(2 * self._rest, _LONGEST_REST)
