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
    """A network within one process, for tests: it holds listeners by their addresses.

    Workers can connect to each other if their transports use the same network.

    Args:
        backlog: The most connections that wait at one listener to be accepted. Further ones wait in `connect`.
    """

    def __init__(self, backlog: int = BACKLOG) -> None:
        self.backlog: Final = backlog
        self._changed = threading.Condition()
        self._listeners: dict[str, MemoryListener] = {}
        self._used = 0

    def listen(self, handshake_limit: int) -> MemoryListener:
        """Returns a listener at an address that was never used before in this network.

        Args:
            handshake_limit: The most bytes of a frame that an accepted link receives before it is established.
        """
        with self._changed:
            self._used += 1
            listener = MemoryListener(self, f"memory:{self._used}", self._changed, handshake_limit)
            self._listeners[listener.address] = listener
        return listener

    def connect(self, address: str, timeout: float, handshake_limit: int) -> StreamLink:
        """Connects to the listener at an address, and returns the link, which is in its handshake.

        Args:
            address: The address of the listener.
            timeout: How many seconds to wait while too many other connections wait to be accepted; 0 to not wait.
            handshake_limit: The most bytes of a frame that the link receives before it is established.

        Raises:
            ConnectionRefusedError: There is no listener at that address in this network.
            TimeoutError: Too many connections were waiting until the timeout expired.
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
        """Removes a listener, so that nobody can connect to it. Does nothing if it was removed before."""
        with self._changed:
            self._listeners.pop(listener.address, None)
            self._changed.notify_all()

    def _has_room(self, address: str) -> bool:
        """Returns whether `connect` need not wait: `address` has room for a connection, or nothing listens there.

        The caller must hold the lock.
        """
        listener = self._listeners.get(address)
        return listener is None or len(listener.waiting) < self.backlog


class MemoryListener:
    """Accepts connections at one address of a `MemoryNetwork`. Create it by `MemoryNetwork.listen`.

    Args:
        network: The network of the listener. `close` removes the listener from it.
        address: Its address.
        changed: The condition of the network. The listener uses it as a lock, and notifies it after `accept`.
        handshake_limit: The most bytes of a frame that an accepted link receives before it is established.
    """

    def __init__(
        self, network: MemoryNetwork, address: str, changed: threading.Condition, handshake_limit: int
    ) -> None:
        self.address = address
        self.waiting: deque[socket.socket] = deque()
        """The sockets of connections that are not accepted yet. The network appends to it."""
        self._network = network
        self._changed = changed
        self._handshake_limit = handshake_limit
        # Has the length of `waiting`: readable while it is more than 0, and each read subtracts 1.
        self._counter: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)

    def fileno(self) -> int:
        """Returns a file descriptor that is readable when a link can be accepted.

        Raises:
            OSError: The listener is closed.
        """
        if self._counter is None:
            raise OSError(errno.EBADF, f"the listener at {self.address} is closed")
        return self._counter

    def accept(self) -> StreamLink | None:
        """Returns the next link, which is in its handshake; None if nobody has connected. Does not wait.

        Raises:
            OSError: The listener is closed.
        """
        with self._changed:
            counter = self.fileno()
            if not self.waiting:
                return None
            os.eventfd_read(counter)
            self._changed.notify_all()
            return StreamLink(self.waiting.popleft(), f"{self.address} (the connecting end)", self._handshake_limit)

    def close(self) -> None:
        """Stops listening. Accepted links stay open, waiting connections are closed. May be called twice."""
        with self._changed:
            counter, self._counter = self._counter, None
            if counter is None:
                return
            self._network.forget(self)
            os.close(counter)
            while self.waiting:
                self.waiting.popleft().close()

    def abandon(self) -> None:
        """Closes the descriptor in a forked child. The parent continues to listen. Raises nothing."""
        counter, self._counter = self._counter, None
        if counter is not None:
            os.close(counter)


class MemoryTransport:
    """The transport with the scheme `memory`, for tests.

    Args:
        network: The network of its listeners. Workers whose transports have the same network can connect.
    """

    scheme = "memory"

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network

    def listen(self, host: str | None, handshake_limit: int) -> MemoryListener:
        """Returns a listener at a new address of the network.

        Args:
            host: Ignored.
            handshake_limit: The most bytes of a frame that an accepted link receives before it is established.
        """
        return self._network.listen(handshake_limit)

    def connect(self, address: str, timeout: float, handshake_limit: int) -> StreamLink:
        """Connects to the listener at an address, and returns the link, which is in its handshake.

        Args:
            address: The address of the listener.
            timeout: How many seconds to wait while too many other connections wait to be accepted; 0 to not wait.
            handshake_limit: The most bytes of a frame that the link receives before it is established.

        Raises:
            ConnectionRefusedError: There is no listener at that address in the network.
            TimeoutError: Too many connections were waiting until the timeout expired.
        """
        return self._network.connect(address, timeout, handshake_limit)
