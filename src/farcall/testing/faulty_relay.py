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
"""How many seconds `Relay.close` gives the links to send the frames that are queued."""
_CLOSE_INTERVAL_S: Final = 0.01
"""How many seconds the thread of a closing relay waits between two tries to send what is queued."""


class Relay:
    """The thread that reads the links of one faulty agent, and delivers messages that were delayed.

    Made without a thread, which starts with the first link or timer. `close` must be called at the end.

    Attributes:
        lock: Held while anything about the links or the timers is read or changed.
        poller: Watches the inner links, which lead to the other workers.
        links: The open links of the agent.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a finalizer may send in the middle of a send of its own thread
        self.poller = Poller(0.0, use_rings=False)
        """Watches the inner links, which lead to the other workers."""
        self.links: set[FaultyLink] = set()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._numbers = itertools.count()  # timers of one moment go off in the order in which they were set
        self._thread: threading.Thread | None = None
        self._deadline: float | None = None  # set when it closes

    @property
    def is_closing(self) -> bool:
        """True once `close` or `abandon` was called. No links and timers are accepted from then on."""
        return self._deadline is not None

    def add(self, link: FaultyLink) -> bool:
        """Adds a link, starts the thread if it does not run yet, and returns True. The caller must hold the lock.

        Returns False, and changes nothing, if the relay is closing.
        """
        if self.is_closing:
            return False
        self._start()
        self.links.add(link)
        return True

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Calls a function `seconds` from now, on the thread of the relay and under the lock. Logs what it raises.

        0 means as soon as the thread can. Does nothing if the relay is closing. If the relay closes before the time has
        come, the function is not called.
        """
        with self.lock:
            if not self.is_closing:
                self._start()
                heapq.heappush(self._timers, (monotonic() + seconds, next(self._numbers), function))
                self.poller.wake()

    def _start(self) -> None:
        """Starts the thread, unless it has been started before."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="farcall-faults", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        """The code of the thread: handles events and timers until the relay has closed, then closes all links.

        An exception of a handler is logged, and the thread goes on.
        """
        while not self._has_ended():
            for handler in [*self.poller.wait(self._seconds_to_wait()), self._call_timers]:
                try:
                    with self.lock:
                        handler()
                except Exception:  # the links of all workers depend on this thread
                    logger.exception("the relay of a faulty agent failed, and goes on")
        self._disconnect_all()

    def _has_ended(self) -> bool:
        """Returns True if the thread has to end: `close` was called, and no link is left or `CLOSE_TIMEOUT_S` is over.

        After `close` was called, this also makes the links send what is queued.
        """
        with self.lock:
            if self._deadline is None:
                return False
            for link in list(self.links):
                link.finish()
            return not self.links or monotonic() >= self._deadline

    def _seconds_to_wait(self) -> float | None:
        """Returns how many seconds the thread may wait for events: until the next timer; None if there is none.

        While the relay is closing, it is `_CLOSE_INTERVAL_S`.
        """
        with self.lock:
            if self._deadline is not None:
                return _CLOSE_INTERVAL_S
            return max(0.0, self._timers[0][0] - monotonic()) if self._timers else None

    def _call_timers(self) -> None:
        """Calls the functions of all timers whose time has come. The caller must hold the lock."""
        while self._timers and self._timers[0][0] <= monotonic():
            heapq.heappop(self._timers)[2]()

    def close(self) -> None:
        """Ends the thread. Links that are still open send the frames that are queued, then all links are closed.

        Delayed messages whose time has not come, and messages on a frozen network, are dropped. Waits at most twice
        `CLOSE_TIMEOUT_S`, and raises nothing then. A second call does nothing.
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
        """Closes all links and the poller. Frames that are still queued are lost."""
        with self.lock:
            for link in list(self.links):
                link.disconnect()
            self.poller.close()

    def abandon(self) -> None:
        """Called in a forked child, where the thread does not exist: closes the child's copies of descriptors.

        The links of the parent are not disturbed. No links and timers are accepted from then on. Raises nothing.
        """
        self.lock = threading.RLock()  # the thread of the parent may have held the old one
        self._deadline = 0.0
        for link in list(self.links):
            link.abandon()
        self.poller.abandon()
