"""Tells the thread that serves which descriptors have something for it.

A thin layer over epoll: descriptors and handlers may be added and removed by any thread while one thread waits. A
handler runs in the waiting thread; one that was removed is not called any more, but may be under way just now.
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
        self._lock = threading.Lock()
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
                return
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
            # Taken out altogether while nothing is wanted: epoll reports a hang-up even with an empty mask.
            if not before:
                self._epoll.register(descriptor, after)
            elif not after:
                self._epoll.unregister(descriptor)
            else:
                self._epoll.modify(descriptor, after)

    def remove(self, descriptor: int) -> None:
        """To be called before the descriptor is closed. Does nothing if it was removed already."""
        with self._lock:
            self.handlers.pop(descriptor, None)
            if self._wanted.pop(descriptor, 0):
                self._epoll.unregister(descriptor)

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
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._epoll.close()
        bell, self._bell = self._bell, -1
        os.close(bell)

    def close(self) -> None:
        """Frees the descriptors. Nobody may be waiting any more."""
        with self._lock:
            self._wanted.clear()  # a thread that still sends its last reply finds nothing to change
            self._epoll.close()
            bell, self._bell = self._bell, -1
            if bell >= 0:
                os.close(bell)
