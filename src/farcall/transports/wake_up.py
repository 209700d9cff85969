"""`WakeUp`, by which a thread ends the wait of another thread that polls a link."""

from __future__ import annotations

import os
from contextlib import suppress


class WakeUp:
    """A request to end a wait. It stays until a wait takes it, so one that comes before the wait is not lost.

    The descriptor is created by the first wait that needs it, and closed with the object. A thread that polls it must
    keep a reference to the object: otherwise another file could have its number.
    """

    __slots__ = ("_event", "_is_due")

    def __init__(self) -> None:
        self._event = -1
        self._is_due = False

    def fileno(self) -> int:
        """Returns a descriptor that is readable after a later request. The thread that waits calls `take` after it."""
        if self._event < 0:
            self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self._event

    def request(self) -> None:
        """Ends the wait of another thread, or the next one. Raises nothing."""
        self._is_due = True  # first: the thread that waits creates the descriptor, and looks here after that
        if self._event >= 0:
            with suppress(OSError):
                os.eventfd_write(self._event, 1)

    def take(self) -> bool:
        """Returns whether there was a request, which is done with then. For the thread that waits."""
        if not self._is_due:
            return False
        self._is_due = False
        if self._event >= 0:
            with suppress(BlockingIOError):
                os.eventfd_read(self._event)
        return True

    def __del__(self) -> None:
        if self._event >= 0:
            os.close(self._event)
