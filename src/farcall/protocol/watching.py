"""The state of the failure detector: which neighbours a worker watches, when each was pinged, and when it was heard.

The watcher has its own clock. A tick advances the clock by one interval at most. So a worker that was stopped, or got
no processor, does not take the time that it missed for silence of the others. After a late tick the worker declares
nobody lost until the next tick, because answers may be unread in its sockets.

Silence is measured from the first ping without an answer, not from the last answer. A worker may stop at any time
after an answer; only a ping without an answer shows it.

The times, with an interval I and a timeout P (the option `heartbeat_patience`), for a worker that stops at time T:

    T .. T+I          the watcher pings it (each neighbour once in I; a turn, with its pings, every I/TURNS)
    +P-I              still silent: the watcher asks others whether they hear it (twice)
    +P+MARGIN         still silent, to the others as well: lost, at T+P+1.25I at the latest
    +P+ISOLATED       the same if the watcher hears nobody at all: lost, at T+P+1.83I at the latest

A watcher that hears nobody cannot know whether all others are gone or it is cut off itself. If it is cut off, the
others, which hear each other, declare it lost first: ISOLATED is longer than their slowest decision. So one worker that
is cut off never declares the whole group lost before the group has declared it lost.

A watcher watches its `NEIGHBOURS` successors on the ring. While none of them answers, it watches `WIDER` times as many
at each turn. So if many workers are lost together, each is pinged within 1.33 I, by the nearest worker before it that
is left. (The `TURNS` turns of an interval are enough for 1,536 lost workers in a row.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from farcall.errors import UsageError
from farcall.protocol.ids import Worker

NEIGHBOURS: Final = 3
"""How many successors on the ring a worker watches while they answer."""
WIDER: Final = 8
"""By which factor more successors are watched at each turn while none of the watched ones answers."""
TURNS: Final = 3
"""The number of turns in an interval. At each turn a worker pings some of its neighbours."""
SHORTEST_PATIENCE: Final = 3
"""The shortest timeout, in intervals. A shorter one leaves no time to ask others about a silent worker."""

# In intervals:
ASK_BEFORE: Final = 1.0
"""How long before the end of the timeout others are asked."""
ASK_AGAIN: Final = 2 / TURNS
"""How long after the first question others are asked about the same silence again."""
ANSWER_TIME: Final = 0.75
"""The least time that the others have to answer."""
MARGIN: Final = 0.25
"""How long after the end of the timeout a worker is declared lost: an answer may still be on its way."""
ISOLATED: Final = 1.5
"""How long after the end of the timeout a watcher that hears nobody declares the others lost."""
HEARS_NOBODY: Final = 0.5
"""A watcher whose pings have had no answer from anybody for longer than this counts as one that hears nobody."""
LATE: Final = 0.25
"""At a tick that is late by more than this, nobody is declared lost."""
_EARLY: Final = 0.01
"""How early a tick may come, because clocks are rounded."""


def check_heartbeat(interval: float, patience: float) -> None:
    """Checks the options `heartbeat_interval` and `heartbeat_patience`, both in seconds.

    `interval` is how often a watched worker gets a heartbeat. The second argument is the timeout: how long a worker
    must be silent before it is declared lost.

    Raises:
        UsageError: `interval` is not positive, or the timeout is shorter than three intervals.
    """
    if not 0 < interval * SHORTEST_PATIENCE <= patience:
        raise UsageError(
            f"heartbeat_interval {interval:g} s and heartbeat_patience {patience:g} s leave no time to ask other "
            f"workers about a silent one; set heartbeat_interval above 0, and heartbeat_patience to at least "
            f"{SHORTEST_PATIENCE} intervals"
        )


class Neighbour:
    """What a watcher knows about one worker that it watches. All times are those of the watcher's own clock.

    A new object has no pings and no questions to other workers.

    Args:
        now: The time at which watching begins. The worker counts as heard at this time.
    """

    __slots__ = ("asked_others", "heard", "pinged", "questions", "unanswered")

    def __init__(self, now: float) -> None:
        self.heard = now
        """When something last arrived from the worker, or was reported by another one; at first, when watching
        began."""
        self.pinged: int | None = None
        """The number of the turn in which it was last pinged; None before the first ping."""
        self.unanswered: float | None = None
        """When the first ping that is still without an answer was sent; None if all were answered."""
        self.asked_others: float | None = None
        """When other workers were first asked about the current silence; None if they were not."""
        self.questions = 0
        """How many times other workers were asked about the current silence."""

    def forget_questions(self) -> None:
        """Forgets that other workers were asked about this neighbour, so that they can be asked again."""
        self.asked_others = None
        self.questions = 0


class Watching:
    """Knows which workers one worker watches, and how long each of them was silent.

    A *tick* is one call of `advance`. A *turn* is a third of an interval; in each turn some watched workers are pinged.
    This object has its own clock. The clock moves by at most one interval per tick, so that a time in which this worker
    itself did not run hardly counts.

    At first nobody is watched.

    Args:
        interval: Seconds in which each watched worker is pinged once.
        patience: The timeout: the least seconds of silence before a watched worker is declared lost.

    Raises:
        UsageError: `interval` is not positive, or the timeout is shorter than three intervals.
    """

    def __init__(self, interval: float, patience: float) -> None:
        check_heartbeat(interval, patience)
        self.interval = interval
        self.patience = patience
        self.watched: dict[Worker, Neighbour] = {}
        """The watched workers, in the order of the ring."""
        self.span = NEIGHBOURS
        """How many successors on the ring the caller should watch (`follow`)."""
        self.turn = 0
        """How many turns there were so far."""
        self._clock = 0.0
        self._now: float | None = None
        self._next_turn = 0.0  # by the clock
        self._planned = interval  # from the last tick to the next one
        self._just_back = False  # the tick was late: what came meanwhile may not have been read yet
        self._heard: dict[Worker, float] = {}  # when anybody was heard last, watched or not
        self._unanswered: float | None = None  # the first ping to anybody since anybody was heard

    # Time

    def advance(self, now: float) -> bool:
        """Advances the clock of this object to `now`, but by one interval at most.

        Args:
            now: The current time of the monotonic clock. A time before that of the last call does not move the clock.

        Returns:
            Whether a new turn (a third of an interval) has begun, so that workers should be pinged.
        """
        gap = 0.0 if self._now is None else max(0.0, now - self._now)
        self._now = now
        self._clock += min(gap, self.interval)
        self._just_back = gap > self._planned + LATE * self.interval and not self._just_back
        if self._clock < self._next_turn - _EARLY * self.interval:
            return False
        self.turn += 1
        self._next_turn = self._clock + self.interval / TURNS
        return True

    def next_tick(self) -> float:
        """Returns when to call `advance` next, as a time of the monotonic clock.

        Must be called after each `advance`. The next `advance` counts as late if it comes well after the returned time.
        """
        wait = self._next_turn - self._clock
        for neighbour in self.watched.values():
            if neighbour.unanswered is not None:
                # On time, not at the turn after: those who were cut off themselves count on it (see ISOLATED).
                judged = neighbour.unanswered + self.patience + MARGIN * self.interval - self._clock
                if judged > 0.0:
                    wait = min(wait, judged)
        if self._unanswered is not None:
            judged = self._unanswered + self.patience + ISOLATED * self.interval - self._clock
            if judged > 0.0:
                wait = min(wait, judged)
        self._planned = max(wait, _EARLY * self.interval)
        return (self._now or 0.0) + self._planned

    # Whom to watch

    def look_further(self) -> bool:
        """Adapts `span`, the number of successors on the ring that this worker should watch, to their answers.

        If some watched worker has no unanswered ping, `span` becomes the place of the nearest such worker, counted from
        1, but at least `NEIGHBOURS`. If all watched workers have left a ping unanswered for a third of an interval,
        `span` becomes `WIDER` times the number of watched workers. Otherwise, or if nobody is watched, `span` does not
        change.

        Returns:
            Whether `span` has changed. False if the last `advance` came late, because answers may be unread then.
        """
        if self._just_back:
            return False
        before = self.span
        for place, neighbour in enumerate(self.watched.values()):
            if neighbour.unanswered is None:
                # Those behind it are watched by that one.
                self.span = max(NEIGHBOURS, place + 1)
                break
        else:
            if self.watched and all(map(self._is_quiet, self.watched.values())):
                self.span = len(self.watched) * WIDER
        return self.span != before

    def follow(self, neighbours: Iterable[Worker]) -> None:
        """Watches these workers from now on, in this order, and no others.

        A worker that was watched before keeps its state, such as when it was last heard.

        Args:
            neighbours: The workers to watch, the nearest on the ring first; nobody is watched if it is empty.
        """
        watched = self.watched
        self.watched = {worker: watched.get(worker) or Neighbour(self._clock) for worker in neighbours}

    def forget(self, worker: Worker) -> None:
        """Removes the time at which `worker` was last heard. Called when `worker` is gone.

        Does nothing if it was never heard.
        """
        self._heard.pop(worker, None)

    def to_ping(self) -> list[Worker]:
        """Returns the workers to ping now, and counts them as pinged. To be called each time `advance` returns True.

        The watched workers take turns, so that each is pinged at least once per interval. If one of them has not
        answered for a third of an interval, all are pinged out of turn, except those that have not answered for an
        interval or longer. The list may be empty.
        """
        pings: list[Worker] = []
        cycle = max(1, min(TURNS, len(self.watched)))
        alarm = any(map(self._is_quiet, self.watched.values()))
        for place, (worker, neighbour) in enumerate(self.watched.items()):
            if not (
                place % cycle == self.turn % cycle
                or neighbour.pinged is None
                or self.turn - neighbour.pinged >= TURNS  # its place has changed
                # One is silent: find out at once whether all are, and whether it was only a lost message.
                or (alarm and self._silence_of(neighbour) < self.interval)
            ):
                continue
            pings.append(worker)
            neighbour.pinged = self.turn
            if neighbour.unanswered is None:
                neighbour.unanswered = self._clock
        if pings and self._unanswered is None:
            self._unanswered = self._clock
        return pings

    def _silence_of(self, neighbour: Neighbour) -> float:
        """Returns the seconds since the first unanswered ping to `neighbour`; 0 if it has answered all pings."""
        return 0.0 if neighbour.unanswered is None else self._clock - neighbour.unanswered

    def quiet(self) -> list[Worker]:
        """Returns the watched workers that have not answered a ping for a third of an interval; may be empty."""
        return [worker for worker, neighbour in self.watched.items() if self._is_quiet(neighbour)]

    def _is_quiet(self, neighbour: Neighbour) -> bool:
        """Returns whether a watched worker has not answered a ping for a third of an interval."""
        asked = neighbour.unanswered
        return asked is not None and self._clock - asked >= (1 / TURNS - 2 * _EARLY) * self.interval

    # What is heard

    def heard(self, worker: Worker) -> None:
        """Notes that something has arrived from a worker, which ends its silence. The worker need not be watched."""
        if self._hears_nobody():
            # Whatever cut us off is over. All others are asked again, and about them.
            for neighbour in self.watched.values():
                neighbour.forget_questions()
        self._unanswered = None
        self._heard[worker] = self._clock
        self.vouched_for(worker)

    def vouched_for(self, worker: Worker) -> None:
        """Notes that another worker has just heard `worker`, which ends the silence of `worker`.

        Does nothing if `worker` is not watched.
        """
        neighbour = self.watched.get(worker)
        if neighbour is not None:
            neighbour.heard = self._clock
            neighbour.unanswered = None
            neighbour.forget_questions()

    def heard_of_late(self) -> list[Worker]:
        """Returns all workers, watched or not, from which something arrived within the timeout before now.

        The timeout is the option `heartbeat_patience`. Returns an empty list if there are none.
        """
        since = self._clock - self.patience
        return [worker for worker, heard in self._heard.items() if heard >= since]

    def silence(self, worker: Worker) -> float:
        """Returns how many seconds ago a watched worker was last heard.

        Reports of other workers that they have heard it count, too. If it was not heard since it is watched, returns
        for how many seconds it has been watched.

        Raises:
            KeyError: The worker is not watched.
        """
        return self._clock - self.watched[worker].heard

    def to_ask_about(self) -> list[Worker]:
        """Returns the watched workers that other workers should be asked about now, and counts them as asked about.

        Such a worker has not answered a ping, and the timeout (`heartbeat_patience`) ends in an interval or less.
        Others are asked about it a second time two thirds of an interval later.

        Returns:
            The workers. An empty list if there are none, if this worker hears nobody at all, or if the last `advance`
            came late, because answers may be unread then.
        """
        if self._just_back or self._hears_nobody():
            return []  # there is nobody to ask
        found: list[Worker] = []
        silent_since = self._clock - self.patience + (ASK_BEFORE + _EARLY) * self.interval
        again_since = self._clock - (ASK_AGAIN - _EARLY) * self.interval
        for worker, neighbour in self.watched.items():
            if neighbour.unanswered is None or neighbour.unanswered > silent_since:
                continue
            if neighbour.asked_others is None:
                neighbour.asked_others = self._clock
            elif neighbour.questions > 1 or neighbour.asked_others > again_since:
                continue
            neighbour.questions += 1
            found.append(worker)
        return found

    def dead(self) -> list[Worker]:
        """Returns the watched workers to declare lost now.

        Such a worker has not answered a ping for longer than the timeout (`heartbeat_patience`). Others were asked
        about it, and have not heard it either. If this worker hears nobody at all, it cannot ask others. Then it waits
        longer: the silent workers are returned when it has heard nobody for the timeout plus 1.5 intervals.

        Returns:
            The workers. An empty list if there are none, or if the last `advance` came late, because answers may be
            unread then.
        """
        if self._just_back:
            return []
        silent_since = self._clock - self.patience - MARGIN * self.interval
        silent = [
            (worker, neighbour)
            for worker, neighbour in self.watched.items()
            if neighbour.unanswered is not None and neighbour.unanswered <= silent_since
        ]
        if not silent:
            return []
        if self._unanswered is not None and self._hears_nobody():
            is_time = self._clock - self._unanswered >= self.patience + ISOLATED * self.interval
            return [worker for worker, _ in silent] if is_time else []
        asked_since = self._clock - ANSWER_TIME * self.interval
        return [
            worker
            for worker, neighbour in silent
            if neighbour.asked_others is not None and neighbour.asked_others <= asked_since
        ]

    def _hears_nobody(self) -> bool:
        """Returns whether this worker hears nobody at all.

        That is so if a ping was sent more than half an interval ago, and nothing has arrived from any worker since.
        """
        return self._unanswered is not None and self._clock - self._unanswered > HEARS_NOBODY * self.interval
