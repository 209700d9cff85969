"""Looking again and again for a moment before sleeping; and sleeping for a moment before giving up one's place.

Waking a sleeping thread costs more than a whole small call, so a thread that waits first polls for some tens of
microseconds. That is a waste where the answer takes longer, and a harm where somebody else wants the core or the
interpreter. So it adapts, by two signs:

- *Misses*: what is waited for must come while spinning about three times in four, or spinning rests.
- *Crowding*: now and then the thread offers its core to others (`sched_yield`). If a round of looking takes much longer
  than it should, somebody took the offer, or another thread of this process wanted the interpreter. That counts as a
  miss, and ends the spinning: what it would gain is taken from others, who may well be the ones that are waited for.
  But a machine may stand still for as long by itself, a virtual one above all. Nobody else has run then, which the
  system knows: it counts how often a thread was taken off its core.

Around large data all takes longer: it is copied before it comes, and more is to be done for it at both ends. Who has
just sent or got some looks for longer the next time, or calls that bring arrays would be missed one after the other.

A rest is some number of waits without spinning, longer each time until spinning pays again. It ends sooner where nobody
else wanted the core: two workers that both rest make each other wait for longer than either would look, so each of them
has to try again while the other one does, or both would sleep through calls that take a fraction of a wake-up.

Where functions compute for a moment (`Awaiting`), replies come later than such a look lasts, and so do the requests of
a caller that computes in between; but soon enough that to be woken takes a good part of the whole, and what is woken
finds its caches cold. Where they do, who waits looks for as long as they take. In so long a time a clock ticks now and
then, which looks like a crowd: so one such miss counts as any other, and the rest that follows many is kept to.

*Dozing* is the same thought one step further. A function that waits for a reply should give its place in the serving
pool away, so that others are served meanwhile; but that wakes a thread, and later another one. If the reply usually
comes sooner than that pays, the function sleeps for a millisecond at first, place kept. It adapts by the same rule.

One object for each thing that is waited for. Not locked: only the thread that waits touches it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from resource import RUSAGE_THREAD, getrusage
from time import monotonic, perf_counter
from typing import Any, Final

from farcall.transports.rings import AWAKE, HEAD, RingReader, found, rest

TRUST: Final = 24
_MISS_COSTS: Final = 3
_FIRST_REST: Final = 16
_LONGEST_REST: Final = 256
LONGEST_CROWDED_REST: Final = 1024
_CROWDED: Final = 20e-6
"""A round of looking takes about 1 µs; longer than this, and others have run meanwhile."""
_OFFER_AFTER: Final = 20e-6
"""Not at once: an offer costs as much as a look, and most answers come sooner."""

_PROBE: Final = 3
"""How many times longer it looks until trust is won back, so after a rest: the other end may be at rest as well and
have to be woken first. With less, two that spin well together would never find back to it."""
_WON_BACK: Final = TRUST // 2
"""The other end's rest may last longer than this one's: the long looks go on until it has most likely ended."""
_COPIED: Final = 1 << 20
"""Bytes that are copied in no more than the time of a usual look."""
_LARGEST: Final = 1 << 21
"""What is larger takes so long to copy that a wake-up hardly matters."""
_SOON: Final = 1e-3
"""Seconds within which something comes soon: to look for so long costs as much as some wake-ups."""
_SURE: Final = 8
_WORTH: Final = 300e-6
"""Seconds in which a dozing thread must have been woken: giving its place away costs about as much."""

AT_ONCE: Final = 40e-6
"""Seconds: some times as long as a call takes that is answered at once."""
_GLANCES: Final = range(16)
"""Looks into each ring between two at everything else: together they take about as long as one of those."""

_yield = os.sched_yield


def _count_taken_off() -> int:
    """How often this thread was taken off its core so far, and began to wait; 1 more, so that it is never 0."""
    usage = getrusage(RUSAGE_THREAD)
    return usage.ru_nivcsw + usage.ru_nvcsw + 1


class Trust:
    """Whether something has paid of late."""

    __slots__ = ("_rest", "_resting", "_score")

    _chances = 1
    """So many misses after a rest, and it rests again."""

    def __init__(self) -> None:
        self._score = TRUST
        self._resting = 0  # how many waits to go without it
        self._rest = _FIRST_REST  # how long the next rest will be

    def _hit(self) -> None:
        if self._score < TRUST:
            self._score += 1
            if self._score == TRUST:
                self._rest = _FIRST_REST

    def _miss(self, longest_rest: int = _LONGEST_REST) -> None:
        self._score -= _MISS_COSTS
        if self._score <= 0:
            self._score = self._chances * _MISS_COSTS
            self._resting = min(self._rest, longest_rest)
            self._rest = min(2 * self._rest, LONGEST_CROWDED_REST)


class Dozing(Trust):
    """Sleeps for a moment without giving up one's place, and remembers how well that has paid."""

    __slots__ = ()

    _chances = 4
    """After a rest there are many threads that wait at once, for longer than one alone would: they must go first."""

    def doze(self, poll: Callable[[int], Any]) -> Any:
        """What `poll(1)` gives within a millisecond, if that has paid; nothing if the lead should be given up."""
        if self._resting:
            self._resting -= 1
            return None
        before = perf_counter()
        events = poll(1)
        if events and perf_counter() - before < _WORTH:
            self._hit()
        else:
            self._miss()
        return events


class Spinning(Trust):
    """Polls for a moment, and remembers how well that has paid."""

    __slots__ = ("_budget", "_more", "_probe", "_usual")

    def __init__(self, budget: float) -> None:
        super().__init__()
        self._budget = budget
        self._usual = budget
        self._probe = _PROBE * budget
        self._more = 0.0  # for how much longer it looks the next time

    def after_large(self, size: int) -> None:
        """So many bytes have just gone or come in shared memory: the next look is longer. Any thread may call it."""
        self._more = self._usual * (1 + size / _COPIED) if size <= _LARGEST else 0.0

    def slept(self, seconds: float) -> None:
        """What was waited for came so long after the thread had to sleep."""

    def look(self, poll: Callable[[int], list[Any]], rings: Sequence[RingReader] = ()) -> list[Any]:
        """What `poll(0)` gives, tried for a moment if that has paid before; nothing if the thread should sleep.

        The same of `rings`, by their events. They rest if it gives nothing, and only then (`transports.rings`).
        """
        if self._resting:
            self._resting -= 1
            return rest(rings)
        if not self._budget:
            return rest(rings)
        for ring in rings:
            if not ring.words[AWAKE]:
                ring.words[AWAKE] = 1
        events = poll(0)
        if events:
            return [*events, *found(rings)] if rings else events
        before = perf_counter()
        stop = before + self._more + (self._budget if self._score > _WON_BACK else self._probe)
        self._more = 0.0
        offer = before + _OFFER_AFTER
        taken_off = 0  # not asked yet: most answers come before the first offer
        heads = [(ring.words, ring.taken) for ring in rings]
        glances = _GLANCES if rings else ()
        only = [rings[0].event] if len(rings) == 1 else None
        while True:
            if before > offer:
                taken_off = taken_off or _count_taken_off()
                _yield()
                offer = before + _OFFER_AFTER
            for _ in glances:
                for words, taken in heads:
                    if words[HEAD] != taken:
                        self._hit()
                        return only or found(rings)
            events = poll(0)
            now = perf_counter()
            if now - before > _CROWDED and taken_off != (count := _count_taken_off()):
                if taken_off:
                    self._miss(LONGEST_CROWDED_REST)
                    break
                taken_off = count
            if events:
                self._hit()
                break
            if now >= stop:
                self._miss()
                break
            before = now
        if not rings:
            return events
        return [*events, *found(rings)] if events else rest(rings)

    def glance(self, poll: Callable[[int], list[Any]], rings: Sequence[RingReader], stop: float) -> bool:
        """Whether something comes by then, a moment of `monotonic`, for who does not sleep here otherwise.

        It counts neither as hit nor as miss. It is not tried if spinning is off, but if that rests: who asks knows
        whether this has paid.
        """
        if not self._budget:
            return False
        heads = []
        for ring in rings:
            if not ring.words[AWAKE]:
                ring.words[AWAKE] = 1
            heads.append((ring.words, ring.taken))
        glances = _GLANCES if rings else ()
        while True:
            for _ in glances:
                for words, taken in heads:
                    if words[HEAD] != taken:
                        return True
            if poll(0):
                return True
            if monotonic() > stop:
                return False


class Awaiting(Spinning):
    """The same for what computes: for longer, where things come soon, but not as soon as others do."""

    __slots__ = ("_crowded", "_near")

    def __init__(self, budget: float) -> None:
        super().__init__(budget)
        self._near = 0  # how many of the last ones came soon
        self._crowded = False  # others have wanted the core: the rest that follows is kept to

    def slept(self, seconds: float) -> None:
        """See `Spinning`."""
        if self._crowded and self._resting:
            return
        self._crowded = False
        if seconds > _SOON:
            self._doubt(1)
            return
        self._near = min(self._near + 1, _SURE)
        if self._near == _SURE and 0 < self._budget < _SOON:
            self._budget = self._probe = _SOON
            self._score, self._resting = TRUST, 0

    def _hit(self) -> None:
        if self._near < _SURE:
            self._near += 1
        if self._score < TRUST:  # on the path of every call: one frame, as a rule
            super()._hit()

    def _miss(self, longest_rest: int = _LONGEST_REST) -> None:
        self._crowded = longest_rest == LONGEST_CROWDED_REST
        self._doubt(2)
        super()._miss(longest_rest)

    def _doubt(self, by: int) -> None:
        self._near = max(0, self._near - by)
        if not self._near:
            self._budget, self._probe = self._usual, _PROBE * self._usual
