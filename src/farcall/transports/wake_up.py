"""`WakeUp`, by which a thread ends the wait of another thread that polls a link."""

from __future__ import annotations

import os
from contextlib import suppress


class WakeUp:
    """Ends the wait of a thread that polls a link, when another thread calls `request`.

    A request stays until the waiting thread calls `take`, so a request that comes before the wait is not lost.

    The first call of `fileno` creates the descriptor, and the descriptor is closed with this object. A thread that
    polls the descriptor must keep a reference to this object. Otherwise the number of the descriptor could soon belong
    to another file.
    """

    __slots__ = ("_event", "_is_due")

    def __init__(self) -> None:
        self._event = -1
        self._is_due = False

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable at the next `request`. Creates it if necessary.

        Call `take` afterwards: a request from before the descriptor existed does not make it readable. Returns -1 if
        the process has no descriptor left; then the thread that waits must call `take` from time to time.
        """
        if self._event < 0:
            with suppress(OSError):
                self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self._event

    def request(self) -> None:
        """Ends the wait of the waiting thread. If no thread waits, the next wait ends at once. Raises nothing."""
        self._is_due = True  # first: the thread that waits creates the descriptor, and looks here after that
        if self._event >= 0:
            with suppress(OSError):
                os.eventfd_write(self._event, 1)

    def take(self) -> bool:
        """Removes the request, and returns True; False if there was none. Only for the waiting thread."""
        if not self._is_due:
            return False
        self._is_due = False
        if self._event >= 0:
            with suppress(BlockingIOError):
                os.eventfd_read(self._event)
        return True

    def close(self) -> None:
        """Closes the descriptor, if there is one. No thread may wait any more."""
        event, self._event = self._event, -1
        if event >= 0:
            os.close(event)

    def __del__(self) -> None:
        self.close()
