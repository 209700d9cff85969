"""Whether to poll for a moment before sleeping.

Waking a sleeping thread costs more than a whole small call, so a thread that waits first looks again and again for some
tens of microseconds. That is a waste where the answer takes longer, and a harm where other workers want the core. So it
adapts: what is waited for must come while spinning about three times in four, or spinning stops; then it is tried again
once in a while, ever more rarely.

One object for each thing that is waited for. Not locked: only the thread that waits touches it.
"""

from __future__ import annotations

from typing import Final

_TRUST: Final = 24
_MISS_COSTS: Final = 3
_FIRST_REST: Final = 16
_LONGEST_REST: Final = 1024


class Spinning:
    """Remembers how well spinning has paid."""

    __slots__ = ("_budget", "_rest", "_resting", "_score")

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._score = _TRUST
        self._resting = 0  # how many waits to go without spinning
        self._rest = _FIRST_REST  # how long the next rest will be

    def budget(self) -> float:
        """Seconds to spin in this wait; 0 is not at all."""
        if self._resting:
            self._resting -= 1
            return 0.0
        return self._budget

    def hit(self) -> None:
        """It came while spinning."""
        if self._score < _TRUST:
            self._score += 1
            if self._score == _TRUST:
                self._rest = _FIRST_REST

    def miss(self) -> None:
        """It did not, and the thread goes to sleep."""
        self._score -= _MISS_COSTS
        if self._score <= 0:
            self._score = _MISS_COSTS  # one more miss after the rest, and it rests again
            self._resting = self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)
