"""Tells the thread that serves which descriptors have something for it.

A thin layer over epoll: descriptors and handlers may be added and removed by any thread while one thread waits. A
handler runs in the waiting thread; one that was removed is not called any more, but may be under way just now.

Rule: what is wanted is written down first, and epoll is told until it knows what is written. So a signal handler or
finalizer may want something else in the midst of it (the lock lets it in), and Ctrl-C leaves nothing half told.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import Final, TypeAlias

READABLE: Final = select.EPOLLIN
WRITABLE: Final = select.EPOLLOUT
HUNG_UP: Final = select.EPOLLRDHUP

Handler: TypeAlias = Callable[[int], None]


class Poller:
    """Descriptors, what is wanted of each, and who handles it."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.RLock()
        self._wanted: dict[int, int] = {}
        self.handlers: dict[int, Handler] = {}
        self.poll = self._epoll.poll
        """`poll(timeout)`: (descriptor, events) pairs; -1 waits for ever. Bound to epoll's own method."""
        self.add(self._bell, self._answer_bell, READABLE)

    def add(self, descriptor: int, handler: Handler, wanted: int) -> None:
        """Has `handler(events)` called from now on. Hang-ups and errors are always wanted, unless `wanted` is 0.

        Does nothing once the poller is closed.
        """
        with self._lock:
            if self._bell < 0:
                return  # closed
            self.handlers[descriptor] = handler
            self._wanted[descriptor] = 0
        self.want(descriptor, wanted, True)

    def want(self, descriptor: int, events: int, on: bool) -> None:
        """Adds to or takes from what is wanted of a descriptor. Does nothing if it was removed."""
        with self._lock:
            before = self._wanted.get(descriptor)
            if before is None:
                return
            after = before | events if on else before & ~events
            if after == before:
                return
            self._wanted[descriptor] = after
            try:
                self._tell(descriptor)
            except OSError:
                raise
            except BaseException:
                self._tell(descriptor)
                raise

    def _tell(self, descriptor: int) -> None:
        """Tells epoll what is wanted. Under the lock."""
        while True:
            wanted = self._wanted.get(descriptor, 0)
            if wanted:
                try:
                    self._epoll.modify(descriptor, wanted)
                except FileNotFoundError:
                    self._epoll.register(descriptor, wanted)
            else:
                # Taken out altogether while nothing is wanted: epoll reports a hang-up even with an empty mask.
                try:
                    self._epoll.unregister(descriptor)
                except OSError:
                    pass  # it was never in, or is closed by now
            if self._wanted.get(descriptor, 0) == wanted:
                return

    def remove(self, descriptor: int) -> None:
        """To be called before the descriptor is closed. Does nothing if it was removed already."""
        with self._lock:
            if descriptor in self.handlers:
                self._wanted.pop(descriptor, None)
                self._tell(descriptor)
                self.handlers.pop(descriptor, None)  # last: who is interrupted does it all again

    def ring(self) -> None:
        """Makes the waiting thread return from `poll`."""
        with self._lock:  # or its number might be somebody else's by the time it is written to
            if self._bell >= 0:
                try:
                    os.eventfd_write(self._bell, 1)
                except BlockingIOError:
                    pass  # rung already

    def _answer_bell(self, _: int) -> None:
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            pass

    def abandon(self) -> None:
        """In a forked child: gives the descriptors back, and changes nothing of what the parent waits for."""
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self._epoll.close()
        bell, self._bell = self._bell, -1
        os.close(bell)

    def close(self) -> None:
        """Frees the descriptors. Nobody may be waiting any more."""
        with self._lock:
            self._wanted.clear()  # a thread that still sends its last reply finds nothing to change
            self.handlers.clear()
            self._epoll.close()
            bell, self._bell = self._bell, -1
            if bell >= 0:
                os.close(bell)


def new_poll(descriptor: int) -> Callable[[int], list[tuple[int, int]]]:
    """What waits, for so many milliseconds, until that descriptor alone can be read. For one thread at a time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return poll.poll
