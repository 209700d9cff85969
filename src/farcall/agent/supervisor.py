"""The thread that watches the clock, so that no other has to.

It deposes a leader whose function proves slow, ends calls whose time is over though nobody waits for them, and sees to
replies that nobody reads. It sleeps for long while nothing of that can happen, and ticks quickly while it can.

Rules
- It runs no user code and never waits for anything but time. It sends nothing but heartbeats, which must not depend on
  anybody else having the time; otherwise it only decides who else should act.
- Waking it is for the one who makes quick ticks necessary (`quicken`); that is cheap while it ticks anyway.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import Final, Protocol

from farcall.agent.serving import Serving
from farcall.sleeping import Gate

logger = logging.getLogger("farcall")

TICK: Final = 5e-3
_SLEEP: Final = 1.0
_LINGER: Final = 32
"""Quick ticks without need before it sleeps: waking it anew for each lone call would cost that call more."""


class Supervised(Protocol):
    """A connection that may have calls for which nobody waits."""

    def tick(self, now: float) -> bool:
        """Sees to it; whether it is to be looked at again soon."""

    def next_deadline(self) -> float:
        """When the first of its calls ends by its timeout; infinity if none does."""


class Supervisor:
    """The clock thread of one agent."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._gate = Gate()
        self._dormant = False
        self._closing = False
        self._attended: dict[Supervised, None] = {}
        self._wake_at = 0.0
        self.connections: Callable[[], list[Supervised]] = list
        """All connections with deadlines; set by the agent."""
        self.serving: Serving | None = None
        self.has_chores: Callable[[], bool] = lambda: False
        """Whether the agent has something to be done soon; set by the agent, as is what does it."""
        self.do_chores: Callable[[], None] = lambda: None
        self.next_beat: Callable[[], float] = lambda: float("inf")
        """When the heart of the group beats next; set by the agent, as is what it does then."""
        self.beat: Callable[[float], None] = lambda now: None
        self._thread = threading.Thread(target=self._run, name=f"farcall-{name}-supervisor", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def quicken(self) -> None:
        """Something is under way that needs quick ticks: a function runs, or replies go unread."""
        if self._dormant:
            self._dormant = False
            self._gate.open()

    def attend(self, connection: Supervised) -> None:
        """Calls `connection.tick` until it says that there is nothing more to see to."""
        self._attended[connection] = None
        self.quicken()

    def deadline_set(self, deadline: float) -> None:
        """A call has this deadline. Wakes the thread if it would sleep past it."""
        if deadline < self._wake_at:
            self._dormant = False
            self._gate.open()

    def close(self) -> None:
        """Ends the thread and waits for it."""
        self._closing = True
        self._gate.open()
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    def _run(self) -> None:
        calm = 0
        while not self._closing:
            try:
                busy = self._tick(monotonic())
            except Exception:  # a clock that stops would hang callers: say so, go on
                logger.exception("worker %r: the supervisor failed in a tick", self._name)
                busy = False
            calm = 0 if busy else calm + 1
            if calm < _LINGER:
                self._wake_at = 0.0
                self._gate.rest(monotonic() + TICK)
                continue
            # First say that it sleeps, then look once more: who comes before the look is seen by it, who comes after
            # sees the word, and opens the gate.
            self._wake_at = monotonic() + _SLEEP
            self._dormant = True
            wake_at = self._wake_at = min(self._wake_at, self._next_deadline())
            if not self._is_needed() and self._gate.rest(wake_at):
                calm = 0
            self._dormant = False

    def _is_needed(self) -> bool:
        serving = self.serving
        return bool(self._attended) or self.has_chores() or (serving is not None and not serving.asleep)

    def _tick(self, now: float) -> bool:
        serving = self.serving
        busy = False
        if serving is not None and not serving.asleep:
            busy = True
            serving.depose_stuck_leader()
        if self.has_chores():
            busy = True
            self.do_chores()
        if now >= self.next_beat():
            self.beat(now)
        for connection in list(self._attended):
            self._attended.pop(connection, None)  # before the look: who attends it again meanwhile is not lost
            if connection.tick(now):
                self._attended[connection] = None
                busy = True
        if now >= self._wake_at:
            for connection in self.connections():
                connection.tick(now)
        return busy

    def _next_deadline(self) -> float:
        first = min((connection.next_deadline() for connection in self.connections()), default=float("inf"))
        return min(first, self.next_beat())
