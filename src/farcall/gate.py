"""`Gate`, where one thread sleeps until another wakes it, and `asleep`, which tells the executor about a sleep.

The executor owns threads that run functions of users. Such a function may wait for a call of its own. The executor must
know about the wait, because another thread has to take the place of the sleeping one.

The thread of an event loop must not sleep while it makes a call (`must_not_sleep`). Code that would sleep until it can
send something asks before, and queues it instead.
"""

from __future__ import annotations

import math
import select
import sys
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

FOREVER: Final = math.inf
"""A deadline that never comes."""


class _BlockingThread(threading.local):
    """What the current thread calls around a sleep; each thread has values of its own, set by its executor.

    Attributes:
        before: Called before a sleep, so that another thread takes over; None on a thread that no executor owns.
        after: Called after a sleep; None on a thread that no executor owns.
    """

    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None


blocking_thread = _BlockingThread()


def on_serving_thread() -> bool:
    """Returns True if the current thread belongs to an executor, so runs a function for another worker; else False."""
    return blocking_thread.before is not None


class asleep:  # noqa: N801 (reads as a word: with asleep(): ...)
    """Context manager around code in which a thread may sleep for long: tells the executor that owns the thread.

    The executor then lets another thread take over. Does nothing on a thread that no executor owns.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        """Tells the executor that this thread may sleep; does nothing if no executor owns the thread."""
        before = blocking_thread.before
        if before is not None:
            before()

    def __exit__(self, *_: object) -> None:
        """Tells the executor that this thread goes on; does nothing if no executor owns it. Lets exceptions pass."""
        after = blocking_thread.after
        if after is not None:
            after()


class _SleeplessThread(threading.local):
    """How many blocks of `sleepless` the current thread is in."""

    depth = 0


_sleepless_thread = _SleeplessThread()


class sleepless:  # noqa: N801 (reads as a word: with sleepless(): ...)
    """Context manager around code that must not sleep to send something, as on the thread of an event loop."""

    __slots__ = ()

    def __enter__(self) -> None:
        _sleepless_thread.depth += 1

    def __exit__(self, *_: object) -> None:
        _sleepless_thread.depth -= 1


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Returns the event loop that runs in the current thread; None if there is none. Does not import asyncio."""
    module = sys.modules.get("asyncio")
    try:
        return None if module is None else module.get_running_loop()
    except (RuntimeError, AttributeError):  # there is none, or another thread is importing asyncio just now
        return None


def must_not_sleep() -> bool:
    """Returns whether the current thread must not sleep to send something.

    So it is on the thread of an event loop, and in a block of `sleepless`. To be asked only where the thread would
    sleep otherwise.
    """
    return _sleepless_thread.depth > 0 or running_loop() is not None


def sleep_in_poll(poll: select.poll, seconds: float) -> bool:
    """Waits until a descriptor of `poll` is ready, and returns True; returns False if none is ready after `seconds`.

    0 does not wait, a negative number waits without limit, and infinity raises `OverflowError`. A signal handler that
    raises (Ctrl-C in the main thread) ends the wait at once.
    """
    return bool(poll.poll(seconds * 1000))


class Gate:
    """One thread sleeps at a gate until another thread opens it.

    A new gate is closed. A gate that was opened while no thread slept lets the next sleeper pass at once, and is closed
    again. Opening an open gate has no effect. If several threads sleep, opening the gate wakes one of them.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self, _: object = None) -> None:
        """Wakes the thread that sleeps at the gate, or lets the next one pass; does nothing if the gate is open.

        Args:
            _: Ignored, so that the method can be used as a callback of a future.
        """
        try:
            self._lock.release()
        except RuntimeError:
            pass  # open already

    def sleep(self, deadline: float) -> bool:
        """Sleeps until the gate is opened, and returns True; returns False if the deadline passes first.

        Returns True at once if the gate is open. When the method returns, the gate is closed. The executor that owns
        the thread is told about the sleep, so that another thread takes over. Ctrl-C in the main thread ends the sleep
        at once.

        Args:
            deadline: When to stop, in seconds of `time.monotonic()`; `FOREVER` for no limit. If it has passed, the
                method does not sleep.
        """
        if self._lock.acquire(blocking=False):
            return True
        with asleep():
            return self.rest(deadline)

    def rest(self, deadline: float) -> bool:
        """Sleeps until the gate is opened, and returns True; does not tell the executor that owns the thread.

        Returns True at once if the gate is open. When the method returns, the gate is closed.

        Args:
            deadline: When to stop, in seconds of `time.monotonic()`; `FOREVER` for no limit.

        Returns:
            True when the gate is opened; False if the deadline passes first or has passed.
        """
        if deadline == FOREVER:
            return self._lock.acquire()
        return self._lock.acquire(timeout=min(max(0.0, deadline - monotonic()), threading.TIMEOUT_MAX))
