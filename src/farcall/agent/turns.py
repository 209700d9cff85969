"""Taking turns: threads whose replies have come together are let out one after the other.

A reader that wakes all the threads whose replies it has read makes a crowd that fights for the interpreter: each thread
gives it up at every system call, and has to be woken once more to get it back. So they line up instead, and sleep on.
One is let out; it goes on with its program, most likely sends its next request, and lets the next one out right before
it sleeps itself. At any moment one thread runs, and what the other end has answered meanwhile is read at once.

To let one out takes as long as a whole call that is answered at once. So a *turn* lasts for more than one call: who was
let out looks for its next reply itself, as if it were alone, and again for those after it, until its time is over. Only
then it sends a request and sleeps. So one thread waits for the turns of all others, and no longer.

Rules
- Nobody depends on the others' manners. Who sleeps in the line, or beside it, *naps*: for some milliseconds at most,
  and then it looks for itself. A thread that has been let out may compute, block or end.
- Turns are taken while that pays. Each saves some microseconds. A thread whose turn was over long before it came to
  sleep has kept those in the line waiting for nothing, and so has one that never came, so that their naps ended. Where
  more is lost than was saved all turns rest for some number of waits, longer each time. So it is with threads that
  sleep, or wait for others, between their calls.
- They last for more than one call while that pays, by the rule of `spinning.py`: a reply that does not come at once is
  a miss, and ends the turn. A turn is a matter of time, not of calls: who computes in between has no more than others.
- A napping thread sleeps at a *bell* and not at a lock: ringing it gives up the interpreter first, so that who is woken
  has it at once. One who is woken at a lock finds the interpreter taken by the waker, and sleeps a second time.
- A bell is a pipe, since Linux takes it that who writes into one sleeps next (a *synchronous* wake-up): who is woken
  gets the core of who rings. Where all cores are taken, anything else that wakes puts it, every other time, on the core
  of the worker that is called, which has to run first.
- A bell may ring though nobody meant it: for a seat that its thread has left. So its ring is a hint, never a promise.
  It is closed when nobody refers to it any more, and not before: a late ring must not go to another file.

The machine that decides who is let out and when is in `reading.py`.
"""

from __future__ import annotations

import math
import os
import select
from collections.abc import Callable
from time import monotonic
from typing import Final

from farcall.agent.spinning import TRUST, Trust

_NAP: Final = 5
"""Milliseconds. As long as a thread that computes keeps the interpreter from others, and so no use to look sooner."""
_NAP_MORE: Final = 8
"""And one more for so many threads that may go first. Each takes some tens of microseconds, or a turn."""
_EVENT: Final = 5e-3
"""Seconds. Naps that end by themselves in such a time do so for the same reason."""
_TURN: Final = 150e-6
"""Seconds. Enough for more than ten calls that are answered at once: to let the next one out takes as long as one. And
no more, for those who wait."""
_ROUND: Final = 4e-3
"""Seconds that the turns of all who are in the line may take together: less than a nap."""
_LATE: Final = 300e-6
"""Seconds after which somebody should have come to sleep once a turn was over. Less may be the interpreter's doing."""
_SAVES: Final = 20e-6
"""Seconds that a turn saves: about what it takes to wake a thread which has to fight for the interpreter."""
_MOST_SAVED: Final = 5e-3
"""Seconds that may be lost at once, however much was saved before."""
_FIRST_REST: Final = 16
_LONGEST_REST: Final = 1 << 12
"""Waits. Among so many, what is lost when turns are tried again does not matter."""
_RINGS: Final = 64
"""So many are answered at once: few ring that nobody meant."""
_KEPT: Final = 64
"""So many bells are kept for the next naps."""


class Bell:
    """Where one thread naps."""

    __slots__ = ("_ends", "_poll")

    def __init__(self) -> None:
        """Raises `OSError` if the system has no descriptor to give."""
        self._ends: tuple[int, ...] = ()
        self._ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        poll = select.poll()
        poll.register(self._ends[0], select.POLLIN)
        self._poll = poll.poll

    def ring(self) -> None:
        """Wakes the thread that naps here, or the next one to come."""
        try:
            os.write(self._ends[1], b"!")
        except BlockingIOError:
            pass  # full: it has rung for long

    def nap(self, left: float, before: int) -> bool:
        """Sleeps until it rings; False if that took too long, or as many seconds as are left.

        `before`: so many other threads may go first.
        """
        most = _NAP + before // _NAP_MORE
        if not self._poll(most if left > 1 else min(most, math.ceil(left * 1000))):
            return False
        os.read(self._ends[0], _RINGS)  # there is one: nobody else reads it
        return True

    def __del__(self) -> None:
        for end in getattr(self, "_ends", ()):
            os.close(end)


class Bells:
    """The bells of one agent that are not in use. It has as many as threads have napped at once, at most `_KEPT`."""

    __slots__ = ("_bells", "_kept", "_new_bell")

    def __init__(self, new_bell: Callable[[], Bell] = Bell) -> None:
        self._new_bell = new_bell
        self._bells: list[Bell] = []
        self._kept = _KEPT

    def take(self) -> Bell | None:
        """One that nobody uses; None if the system has no descriptor to give."""
        try:
            return self._bells.pop()
        except IndexError:
            pass
        try:
            return self._new_bell()
        except OSError:
            return None

    def put_back(self, bell: Bell) -> None:
        """Nobody naps at it any more."""
        if len(self._bells) < self._kept:
            self._bells.append(bell)

    def close(self) -> None:
        """Keeps none any more. Those in use are closed when they are put back."""
        self._kept = 0
        self._bells.clear()


class Turn(Trust):
    """Whose turn it is, on one connection, and whether it has paid of late that a turn lasts for more than one call.

    Not locked, as `Turns`.
    """

    __slots__ = ("_thread", "in_doubt", "until")

    def __init__(self) -> None:
        super().__init__()
        self._thread = 0
        self.in_doubt = False
        """It has been missed of late, and so it matters if it has `paid`, which is on the path of every call."""
        self.until = 0.0
        """When it is over."""

    def begin(self, thread: int, behind: int, now: float) -> None:
        """That thread is about to be let out. So many more are in the line."""
        self.until = now + min(_TURN, _ROUND / (behind + 1))
        self._thread = thread

    def lasts(self, me: int) -> bool:
        """Whether it is the turn of this thread, and it may go on."""
        if me != self._thread:
            return False
        if self._resting:
            self._resting -= 1
            return False
        return monotonic() < self.until

    def is_over(self, me: int) -> bool:
        """Whether the next one may be let out by this thread: it is not the turn of another."""
        return me == self._thread or monotonic() >= self.until

    def paid(self) -> None:
        """A thread that went on has got its reply at once."""
        self._hit()
        self.in_doubt = self._score < TRUST

    def missed(self) -> None:
        """It has not, and those in the line have waited for nothing."""
        self._miss()
        self.in_doubt = True


class Turns:
    """Whether taking turns has paid of late, on one connection.

    Not locked, though many threads use it: what two of them do at once is counted once at worst.
    """

    __slots__ = ("_last_broken", "_rest", "_resting", "_saved", "bells", "turn")

    def __init__(self, bells: Bells) -> None:
        self._saved = _MOST_SAVED  # seconds, less those that were lost
        self._last_broken = -math.inf
        self._rest = _FIRST_REST  # how long the next rest will be
        self._resting = 0  # how many waits to go without turns
        self.bells = bells
        self.turn = Turn()

    def bell(self) -> Bell | None:
        """A bell to nap at; None if the thread should rather sleep until it is woken."""
        if self._resting:
            self._resting -= 1
            return None
        return self.bells.take()

    def begin(self, thread: int, since: float, behind: int) -> None:
        """That thread is about to be let out. It has been in the line since then, and so many more are there."""
        now = monotonic()
        late = now - max(since, self.turn.until)
        self.turn.begin(thread, behind, now)
        if late > _LATE:
            self._lose(late)
        elif self._saved < _MOST_SAVED:
            self._saved += _SAVES
            if self._saved >= _MOST_SAVED:
                self._rest = _FIRST_REST

    def broken(self) -> None:
        """A thread that napped had to look for itself: who ran before it has not come back."""
        now = monotonic()
        if now - self._last_broken > _EVENT:
            self._last_broken = now
            self._lose(_EVENT)

    def _lose(self, seconds: float) -> None:
        self._saved -= seconds
        if self._saved < 0:
            self._saved = 0.0
            self._resting, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)
