"""The thread between a faulty agent and its network: it waits for descriptors and for moments to come.

Rules
- Everything that links and timers do is done under `lock`, by this thread or by whoever changes the faults. So a change
  holds when the method that makes it returns.
- The thread starts with the first link or timer. `close` ends it, and whatever is open still.
- Nothing of a user runs here.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Final

from farcall.agent.poller import Poller

if TYPE_CHECKING:
    from farcall.testing.faulty_link import Link

_LAST_WORDS: Final = 1.0
"""Seconds that remain at the end for what the agent has sent and the network has not taken yet."""


class Relay:
    """Runs the links of one agent."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.poller = Poller()
        self.links: set[Link] = set()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._deadline: float | None = None  # set at the end

    @property
    def is_closing(self) -> bool:
        """Whether no more links are taken."""
        return self._deadline is not None

    def add(self, link: Link) -> None:
        """Runs that link from now on. Under the lock; not when it is closing."""
        self.links.add(link)
        self.start()
        self.poller.ring()

    def start(self) -> None:
        """Has the thread run, if it does not, and it is not closing. Under the lock."""
        if self._thread is None and not self.is_closing:
            self._thread = threading.Thread(target=self._run, name="farcall-faults", daemon=True)
            self._thread.start()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Has the action done after so many seconds; not at all if the end comes before. Under the lock."""
        heapq.heappush(self._timers, (monotonic() + seconds, next(self._numbers), action))
        self.poller.ring()

    def _run(self) -> None:
        while True:
            with self.lock:
                left = self._time_left()
            if left is None:
                break
            for descriptor, events in self.poller.poll(left):
                with self.lock:
                    handler = self.poller.handlers.get(descriptor)
                    if handler is not None:
                        handler(events)
            with self.lock:
                while self._timers and self._timers[0][0] <= monotonic():
                    heapq.heappop(self._timers)[2]()
        self._end()

    def _time_left(self) -> float | None:
        """Seconds until there is something to do, -1 if nobody knows; None at the end."""
        if self._deadline is not None:
            left = self._deadline - monotonic()
            return left if self.links and left > 0 else None
        return max(0.0, self._timers[0][0] - monotonic()) if self._timers else -1

    def close(self) -> None:
        """Ends it: links whose agent has closed them send what they have; whatever waits is dropped. May be twice."""
        with self.lock:
            if self._deadline is not None:
                return
            self._deadline = monotonic() + _LAST_WORDS
            self._timers.clear()
            for link in list(self.links):
                link.wind_up()
            thread = self._thread
            self.poller.ring()
        if thread is None:
            self._end()
        else:
            thread.join(2 * _LAST_WORDS)

    def _end(self) -> None:
        with self.lock:
            for link in list(self.links):
                link.close()
            self.poller.close()

    def abandon(self) -> None:
        """In a forked child: gives the descriptors back, and leaves the streams to the parent."""
        self._deadline = 0.0
        for link in list(self.links):
            link.abandon()
        self.poller.abandon()
