"""Which thread of the serving pool leads, and how the lead is taken from it while it runs a function.

The leader reads requests and runs them itself: no other thread has to be woken for a call. While it runs a function it
cannot read, so the lead must be taken over if that function proves slow (the supervisor does), is known to be slow or
sleeps in a wait of ours (the leader itself does). The question is who decides when the function ends just then.

The answer is a *claim*, one for each thread: a list that holds the number of the function which the thread runs as the
leader, and nothing at other times. The leader puts it in when it starts a function; whoever pops it decides. If the
leader pops it, it leads on; if another thread popped it, the lead is that thread's to give away. `list.pop` is one
atomic step, so that the fast path, which is every call, takes no lock.

Rules, each tested over every interleaving
- There is never more than one leader.
- A function that does not end is deposed by the second look at the latest.
- A leader that was deposed learns of it as soon as its function ends, and leads no more.
"""

from __future__ import annotations

from typing import Final

SLOW: Final = 1e-3
"""A function that took longer than this, its waits for others not counted, is run with the lead given away first, next
time. One that only waits gives the lead away when it comes to that, and need not do so before."""
_MOST_KINDS: Final = 1024


class SlowKinds(dict[object, None]):
    """The kinds of functions that have proved slow of late."""

    def note(self, kind: object) -> None:
        """One of that kind has."""
        if len(self) > _MOST_KINDS:
            self.clear()
        self[kind] = None


class Lead:
    """The claim of one thread on the lead, while it runs a function as the leader."""

    __slots__ = ("_claim", "_number", "_seen")

    def __init__(self) -> None:
        self._claim: list[int] = []
        self._number = 0
        self._seen = 0

    def begin(self) -> None:
        """The leader starts a function."""
        self._number += 1
        self._claim.append(self._number)

    def end(self) -> bool:
        """Its function has ended; whether it still leads."""
        try:
            self._claim.pop()
        except IndexError:
            return False
        return True

    depose = end
    """Takes the lead from a leader that runs a function; whether it was there to be taken."""

    def is_running(self) -> bool:
        """Whether the thread runs a function as the leader."""
        return bool(self._claim)

    def is_stuck(self) -> bool:
        """Whether the function that ran at the last look is running still. For the supervisor, now and then."""
        try:
            number = self._claim[-1]
        except IndexError:
            return False
        stuck = number == self._seen
        self._seen = number
        return stuck
