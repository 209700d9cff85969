"""A transport within one process, for tests: many agents, no port, no file, no other process.

Only the meeting happens in memory. The channels are anonymous socket pairs, so that they block, fill up, poll and break
exactly as those of the other transports do.

Rules
- Agents reach each other if they share a `MemoryNetwork`. Networks know nothing of each other; there is no global one.
- A network remembers its open listeners, and nothing else.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections import deque
from typing import Final

from farcall.transports.sockets import BACKLOG, SocketChannel


class MemoryNetwork:
    """Where the listeners of one test are found. `backlog` is how many connections may wait at one listener."""

    def __init__(self, backlog: int = BACKLOG) -> None:
        self.backlog: Final = backlog
        self._changed = threading.Condition()
        self._listeners: dict[str, MemoryListener] = {}
        self._used = 0

    def listen(self) -> MemoryListener:
        """A listener at an address that was never used before in this network."""
        with self._changed:
            self._used += 1
            listener = MemoryListener(self, f"memory:{self._used}", self._changed)
            self._listeners[listener.address] = listener
        return listener

    def connect(self, address: str, timeout: float) -> SocketChannel:
        """A channel to that listener. Raises `ConnectionRefusedError` or `TimeoutError`."""
        with self._changed:
            # Also over when the listener goes away while we wait for room.
            self._changed.wait_for(lambda: self._has_room(address), min(timeout, threading.TIMEOUT_MAX))
            listener = self._listeners.get(address)
            if listener is None:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there in this network", address)
            if len(listener.waiting) >= self.backlog:
                raise TimeoutError(errno.ETIMEDOUT, f"not accepted within {timeout:g} s", address)
            ours, theirs = socket.socketpair()
            listener.waiting.append(SocketChannel(theirs, f"{address} (the connecting end)"))
            os.eventfd_write(listener.fileno(), 1)
        return SocketChannel(ours, address)

    def forget(self, listener: MemoryListener) -> None:
        """Nobody finds that listener any more."""
        with self._changed:
            self._listeners.pop(listener.address, None)
            self._changed.notify_all()

    def _has_room(self, address: str) -> bool:
        listener = self._listeners.get(address)
        return listener is None or len(listener.waiting) < self.backlog


class MemoryListener:
    """A `Listener`. Made by `MemoryNetwork.listen`."""

    def __init__(self, network: MemoryNetwork, address: str, changed: threading.Condition) -> None:
        self.address = address
        self.waiting: deque[SocketChannel] = deque()
        """The channels that nobody has accepted yet; the network adds to them."""
        self._network = network
        self._changed = changed
        # Counts `waiting`: readable while it is more than 0, and a read takes one off.
        self._counter: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)

    def fileno(self) -> int:
        """A descriptor that polls readable when `accept` has a channel. Raises `OSError` after `close`."""
        if self._counter is None:
            raise OSError(errno.EBADF, f"the listener at {self.address} is closed")
        return self._counter

    def accept(self) -> SocketChannel | None:
        """The next channel, or None. Raises `OSError` after `close`."""
        with self._changed:
            counter = self.fileno()
            if not self.waiting:
                return None
            os.eventfd_read(counter)
            self._changed.notify_all()
            return self.waiting.popleft()

    def close(self) -> None:
        """No more channels; who waits to be accepted sees the end of the stream. Any thread may, more than once."""
        with self._changed:
            counter, self._counter = self._counter, None
            if counter is None:
                return
            self._network.forget(self)
            os.close(counter)
            while self.waiting:
                self.waiting.popleft().close()

    def abandon(self) -> None:
        """In a forked child: gives the descriptor back; the parent goes on listening. Raises nothing."""
        counter, self._counter = self._counter, None
        if counter is not None:
            os.close(counter)


class MemoryTransport:
    """The `Transport` whose scheme is `memory`, in the given network."""

    scheme = "memory"

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network

    def listen(self, host: str | None = None) -> MemoryListener:
        """A listener in this network; `host` is ignored."""
        return self._network.listen()

    def connect(self, address: str, timeout: float) -> SocketChannel:
        """A channel to a listener in this network. Raises `ConnectionRefusedError` or `TimeoutError`."""
        return self._network.connect(address, timeout)
