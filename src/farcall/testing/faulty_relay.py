"""The thread between a faulty agent and its network: it reads the inner links, and delivers what was delayed.

Rules
- Everything that links and timers do is done under `lock`, by this thread or by the thread that sends or changes the
  faults. So a change holds when the method that makes it returns.
- The thread starts with the first link or timer. `close` ends it, and closes every link that is still open.
- No code of users runs here.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Final

from farcall.transports.poller import Poller

if TYPE_CHECKING:
    from farcall.testing.faulty_link import FaultyLink

logger = logging.getLogger("farcall")

CLOSE_TIMEOUT_S: Final = 1.0
"""At the end: how long frames that the agent has sent may take to go out."""
_CLOSE_INTERVAL_S: Final = 0.01


class Relay:
    """The thread that reads the links of one faulty agent and delivers delayed messages."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a finalizer may send in the middle of a send of its own thread
        self.poller = Poller(0.0, use_rings=False)
        """For the inner links."""
        self.links: set[FaultyLink] = set()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._numbers = itertools.count()  # timers of one moment go off in the order in which they were set
        self._thread: threading.Thread | None = None
        self._deadline: float | None = None  # set when it closes

    @property
    def is_closing(self) -> bool:
        """Whether `close` or `abandon` was called, so that no more links and timers are accepted."""
        return self._deadline is not None

    def add(self, link: FaultyLink) -> bool:
        """Adds a link, and starts the thread if necessary. The caller must hold the lock.

        Returns True; or False, and does nothing, if the relay is closing.
        """
        if self.is_closing:
            return False
        self._start()
        self.links.add(link)
        return True

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Calls a function after `seconds`, on the thread of the relay and under the lock.

        Does nothing if the relay is closing, and never calls the function if the relay closes before.
        """
        with self.lock:
            if not self.is_closing:
                self._start()
                heapq.heappush(self._timers, (monotonic() + seconds, next(self._numbers), function))
                self.poller.wake()

    def _start(self) -> None:
        """Starts the thread unless it runs."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="farcall-faults", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        """The thread: handles events and timers until the relay has closed. Exceptions of handlers are logged."""
        while not self._has_ended():
            for handler in [*self.poller.wait(self._seconds_to_wait()), self._call_timers]:
                try:
                    with self.lock:
                        handler()
                except Exception:  # the links of all workers depend on this thread
                    logger.exception("the relay of a faulty agent failed, and goes on")
        self._disconnect_all()

    def _has_ended(self) -> bool:
        """Returns whether the thread has to end: all links are finished, or the time for that is over."""
        with self.lock:
            if self._deadline is None:
                return False
            for link in list(self.links):
                link.finish()
            return not self.links or monotonic() >= self._deadline

    def _seconds_to_wait(self) -> float | None:
        """Returns how long the thread may wait for events; None if there are no timers."""
        with self.lock:
            if self._deadline is not None:
                return _CLOSE_INTERVAL_S
            return max(0.0, self._timers[0][0] - monotonic()) if self._timers else None

    def _call_timers(self) -> None:
        """Calls the functions of all timers that are due. The caller must hold the lock."""
        while self._timers and self._timers[0][0] <= monotonic():
            heapq.heappop(self._timers)[2]()

    def close(self) -> None:
        """Ends the thread. Links that the agent has closed send what is queued; everything else is dropped.

        Waits at most twice `CLOSE_TIMEOUT_S`. Does nothing the second time.
        """
        with self.lock:
            if self.is_closing:
                return
            self._deadline = monotonic() + CLOSE_TIMEOUT_S
            self._timers.clear()
            thread = self._thread
            self.poller.wake()
        if thread is None:
            self._disconnect_all()
        else:
            thread.join(2 * CLOSE_TIMEOUT_S)

    def _disconnect_all(self) -> None:
        """Closes all links and the poller."""
        with self.lock:
            for link in list(self.links):
                link.disconnect()
            self.poller.close()

    def abandon(self) -> None:
        """Called in a forked child, where the thread does not exist: closes the child's copies of descriptors."""
        self.lock = threading.RLock()  # the thread of the parent may have held the old one
        self._deadline = 0.0
        for link in list(self.links):
            link.abandon()
        self.poller.abandon()
