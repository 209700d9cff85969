"""`Gate`, where one thread sleeps until another wakes it, and `asleep`, which tells the owner of a thread first.

The serving pool owns threads that run functions of users. Such a function may wait for a call of its own. The pool must
know, because another thread takes the place of the sleeping one meanwhile.
"""

from __future__ import annotations

import math
import select
import threading
from collections.abc import Callable
from time import monotonic
from typing import Final

FOREVER: Final = math.inf


class _BlockingThread(threading.local):
    """Lets the owner of a thread (the serving pool) know when code on it is about to sleep in a wait of ours."""

    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None


blocking_thread = _BlockingThread()


def on_serving_thread() -> bool:
    """Whether this thread belongs to a serving pool, and so runs a function for another worker."""
    return blocking_thread.before is not None


class asleep:  # noqa: N801 (reads as a word: with asleep(): ...)
    """Around anything in which a thread may sleep for long: tells the owner of the thread."""

    __slots__ = ()

    def __enter__(self) -> None:
        before = blocking_thread.before
        if before is not None:
            before()

    def __exit__(self, *_: object) -> None:
        after = blocking_thread.after
        if after is not None:
            after()


def sleep_in_poll(poll: select.poll, seconds: float) -> bool:
    """Sleeps until a descriptor is ready. Returns whether one is. Ends at once for Ctrl-C in the main thread."""
    return bool(poll.poll(seconds * 1000))


class Gate:
    """Where one thread sleeps until another opens it. Opening it twice is the same as once."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self, _: object = None) -> None:
        """Wakes the thread that sleeps here, or the next one to come."""
        try:
            self._lock.release()
        except RuntimeError:
            pass  # open already

    def sleep(self, deadline: float) -> bool:
        """Sleeps until opened; False if the deadline passed first. Ends at once for Ctrl-C in the main thread."""
        if self._lock.acquire(blocking=False):
            return True
        with asleep():
            return self.rest(deadline)

    def doze(self, milliseconds: int) -> bool:
        """As `rest`, for so long at most."""
        return self._lock.acquire(timeout=milliseconds / 1000)

    def rest(self, deadline: float) -> bool:
        """As `sleep`, without a word to the owner of the thread."""
        if deadline == FOREVER:
            return self._lock.acquire()
        return self._lock.acquire(timeout=min(max(0.0, deadline - monotonic()), threading.TIMEOUT_MAX))
