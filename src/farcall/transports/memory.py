"""Links within one process, for tests. They need no port, no file and no other process.

Only the lookup of listeners is in memory. The links use anonymous socket pairs, so that they block, fill up, poll and
break like the links of the other transports.

Workers can connect if they share a `MemoryNetwork`. There is no global network.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections import deque
from typing import Final

from farcall.transports.sockets import BACKLOG
from farcall.transports.stream import StreamLink


class MemoryNetwork:
    """The listeners of one test, by address. Workers connect to each other in the same network only."""

    def __init__(self, backlog: int = BACKLOG) -> None:
        """Creates a network without listeners. Each listener will queue at most `backlog` connections."""
        self.backlog: Final = backlog
        self._changed = threading.Condition()
        self._listeners: dict[str, MemoryListener] = {}
        self._used = 0

    def listen(self, handshake_limit: int) -> MemoryListener:
        """Returns a listener at an address that was never used before in this network."""
        with self._changed:
            self._used += 1
            listener = MemoryListener(self, f"memory:{self._used}", self._changed, handshake_limit)
            self._listeners[listener.address] = listener
        return listener

    def connect(self, address: str, timeout: float, handshake_limit: int) -> StreamLink:
        """Returns a link to the listener at that address.

        Raises:
            ConnectionRefusedError: There is no listener at that address.
            TimeoutError: The queue of the listener was full until the timeout expired.
        """
        with self._changed:
            # The wait also ends when the listener is closed meanwhile.
            self._changed.wait_for(lambda: self._has_room(address), min(timeout, threading.TIMEOUT_MAX))
            listener = self._listeners.get(address)
            if listener is None:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there in this network", address)
            if len(listener.waiting) >= self.backlog:
                raise TimeoutError(errno.ETIMEDOUT, f"not accepted within {timeout:g} s", address)
            ours, theirs = socket.socketpair()
            listener.waiting.append(theirs)
            os.eventfd_write(listener.fileno(), 1)
        return StreamLink(ours, address, handshake_limit)

    def forget(self, listener: MemoryListener) -> None:
        """Removes a listener. Does nothing if it was removed before."""
        with self._changed:
            self._listeners.pop(listener.address, None)
            self._changed.notify_all()

    def _has_room(self, address: str) -> bool:
        listener = self._listeners.get(address)
        return listener is None or len(listener.waiting) < self.backlog


class MemoryListener:
    """A listener in a `MemoryNetwork`. Created by `MemoryNetwork.listen`."""

    def __init__(
        self, network: MemoryNetwork, address: str, changed: threading.Condition, handshake_limit: int
    ) -> None:
        self.address = address
        self.waiting: deque[socket.socket] = deque()
        """Sockets that are not accepted yet. The network appends to it."""
        self._network = network
        self._changed = changed
        self._handshake_limit = handshake_limit
        # Has the length of `waiting`: readable while it is more than 0, and each read subtracts 1.
        self._counter: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when a link can be accepted.

        Raises `OSError` if the listener is closed.
        """
        if self._counter is None:
            raise OSError(errno.EBADF, f"the listener at {self.address} is closed")
        return self._counter

    def accept(self) -> StreamLink | None:
        """Returns the next link; None if there is none now. Does not wait.

        Raises `OSError` if the listener is closed.
        """
        with self._changed:
            counter = self.fileno()
            if not self.waiting:
                return None
            os.eventfd_read(counter)
            self._changed.notify_all()
            return StreamLink(self.waiting.popleft(), f"{self.address} (the connecting end)", self._handshake_limit)

    def close(self) -> None:
        """Stops listening. Links that were accepted stay open; links that were not are closed. May be called twice."""
        with self._changed:
            counter, self._counter = self._counter, None
            if counter is None:
                return
            self._network.forget(self)
            os.close(counter)
            while self.waiting:
                self.waiting.popleft().close()

    def abandon(self) -> None:
        """In a forked child: closes the descriptor here. The parent continues to listen. Raises nothing."""
        counter, self._counter = self._counter, None
        if counter is not None:
            os.close(counter)


class MemoryTransport:
    """The transport with the scheme `memory`, which connects workers in one `MemoryNetwork`."""

    scheme = "memory"

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network

    def listen(self, host: str | None, handshake_limit: int) -> MemoryListener:
        """Returns a listener at a new address. `host` is ignored.

        `handshake_limit` is the most bytes of a frame that a link accepts before it is established.
        """
        return self._network.listen(handshake_limit)

    def connect(self, address: str, timeout: float, handshake_limit: int) -> StreamLink:
        """Returns a link to the listener at `address`, which is in its handshake.

        Args:
            address: The address of the listener.
            timeout: How many seconds to wait if the queue of the listener is full.
            handshake_limit: The most bytes of a frame that the link accepts before it is established.

        Raises:
            ConnectionRefusedError: There is no listener at that address.
            TimeoutError: The timeout expired.
        """
        return self._network.connect(address, timeout, handshake_limit)
