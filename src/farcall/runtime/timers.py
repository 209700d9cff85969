"""The timers of a worker: one thread that calls functions at given times.

The functions must be quick, must not block, and must not be user code. They pass longer work to the executor.

`schedule` takes no lock, so finalizers may call it: the garbage collector can run a finalizer while its thread holds
any lock. `schedule` puts a new entry into a queue. Before the thread sleeps, it first stores until when it will sleep,
and then checks the queue once more. An entry that this check misses is due after that time, or wakes the thread.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

from farcall.gate import Gate
from farcall.transports.base import FOREVER

logger = logging.getLogger("farcall")

_MAX_SLEEP_S: Final = 3600.0


class Timers:
    """One thread of a worker that calls functions at given times. `start` starts the thread.

    Args:
        name: The name of this worker, for the name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._gate = Gate()
        self._added: deque[tuple[float, int, Callable[[], None]]] = deque()
        self._entries: list[tuple[float, int, Callable[[], None]]] = []  # a heap; only the thread uses it
        self._numbers = itertools.count()  # entries for the same time are called in the order in which they were added
        self._sleeps_until = 0.0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"farcall-{name}-timers", daemon=True)

    def start(self) -> None:
        """Starts the thread. Must be called once. Raises `RuntimeError` if the system cannot create a thread."""
        self._thread.start()

    def schedule(self, when: float, function: Callable[[], None]) -> None:
        """Schedules one call of `function` by the thread of this object. Takes no lock, so finalizers may call it.

        Before `start`, the call waits for `start`. After `close`, `function` is never called.

        Args:
            when: When to call it, as a time of the monotonic clock. A time in the past means at once.
            function: The function. It must be quick and must not block. Errors that it raises are logged.
        """
        self._added.append((when, next(self._numbers), function))
        if when < self._sleeps_until:
            self._gate.open()

    def close(self) -> None:
        """Ends the thread and waits for its end. Functions that are still scheduled are never called.

        May be called twice. Does not wait if the thread was never started, or if a scheduled function calls `close`.
        """
        self._is_closing = True
        self._gate.open()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        """The function of the thread: calls each scheduled function when it is due, until `close`."""
        while not self._is_closing:
            self._take_added()
            entries = self._entries
            now = monotonic()
            if entries and entries[0][0] <= now:
                _, _, function = heapq.heappop(entries)
                try:
                    function()
                except BaseException:  # if this thread ended, calls would never time out
                    logger.exception("worker %r: a timer failed", self._name)
                continue
            until = self._sleeps_until = entries[0][0] if entries else FOREVER
            if not self._added:
                self._gate.rest(min(until, now + _MAX_SLEEP_S))
            self._sleeps_until = 0.0

    def _take_added(self) -> None:
        """Moves the entries that `schedule` has queued to `_entries`, which is sorted by time. There may be none."""
        while self._added:
            heapq.heappush(self._entries, self._added.popleft())
