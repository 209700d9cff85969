"""Sending on a channel from many threads, without ever blocking the thread that serves.

Rules
- Messages go out whole and in the order of `send`/`queue`, each message's pieces together.
- What the channel does not take now waits in a queue; the poller tells when the channel takes more, and then `flush`.
- `queue` only queues: a burst of replies is flushed with one system call.
- After the channel broke every call raises `OSError`; what was queued is dropped.
- An exception that comes from nowhere (Ctrl-C) in the midst of a send leaves an unknown part of a message sent. The
  channel is of no use then: it is marked broken.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from farcall.transports.base import Buffer, Channel

_CHUNK: Final = 1 << 18
_PIECES: Final = 64


class Sender:
    """The sending side of one channel."""

    __slots__ = ("_broken", "_channel", "_later", "_lock", "_queue", "_want_writable", "_wanted", "waiting")

    def __init__(self, channel: Channel, want_writable: Callable[[bool], None]) -> None:
        self._channel = channel
        self._want_writable = want_writable  # asks the poller to call `flush`, or no longer to
        self._wanted = False
        self._lock = threading.Lock()
        self._queue: deque[Buffer] = deque()  # under the lock
        self._later: deque[bytes] = deque()
        self._broken: BaseException | None = None
        self.waiting = 0
        """Bytes that the channel has not taken yet; of messages that could not be sent at once."""

    def send(self, data: Buffer) -> None:
        """Sends one small message, or queues what does not fit. Raises `OSError` if the channel is broken."""
        with self._lock:
            if self._queue or self._broken is not None:
                self._queue.append(data)
                self._send_queue()
                return
            try:
                sent = self._channel.send(data)
            except BlockingIOError:
                sent = 0
            except BaseException as error:
                self._broken = error
                raise
            if sent != len(data):
                self._queue.append(memoryview(data)[sent:])
                self._keep_going()

    def send_all(self, pieces: Sequence[Buffer]) -> None:
        """Sends one message made of several pieces, or queues what does not fit. Raises as `send`."""
        with self._lock:
            self._queue.extend(pieces)
            self._send_queue()

    def queue(self, message: bytes) -> None:
        """Queues one message; somebody must `flush` soon. Takes no lock."""
        self._later.append(message)

    def flush(self) -> None:
        """Sends what is queued, as far as it goes. Raises `OSError` if the channel is broken."""
        with self._lock:
            later = self._later
            while later:
                self._queue.append(later.popleft())
            self._send_queue()

    def keep_copies(self) -> None:
        """Copies what still waits, so that whoever gave the buffers may change them."""
        with self._lock:
            self._queue = deque(piece if isinstance(piece, bytes) else bytes(piece) for piece in self._queue)

    def _send_queue(self) -> None:
        queue = self._queue
        if self._broken is not None:
            queue.clear()
            raise ConnectionError(f"the connection to {self._channel.address} is broken: {self._broken}")
        pieces: list[Buffer] = []
        try:
            while queue:
                pieces, size = self._next_pieces()
                try:
                    sent = self._channel.send(pieces[0]) if len(pieces) == 1 else self._channel.send_gather(pieces)
                except BlockingIOError:
                    sent = 0
                if sent != size:
                    self._put_back(pieces, sent)
                    break
        except BaseException as error:
            self._broken = error
            queue.clear()
            raise
        self._keep_going()

    def _next_pieces(self) -> tuple[list[Buffer], int]:
        """Some of the queue, as much as one system call should carry; small pieces in a row are joined."""
        queue = self._queue
        pieces: list[Buffer] = []
        size = 0
        while queue and size < _CHUNK and len(pieces) < _PIECES:
            piece = queue.popleft()
            pieces.append(piece)
            size += len(piece)
        if len(pieces) > 1 and size < _CHUNK:
            return [b"".join(pieces)], size
        return pieces, size

    def _put_back(self, pieces: list[Buffer], sent: int) -> None:
        for index, piece in enumerate(pieces):
            if sent < len(piece):
                rest = [memoryview(piece)[sent:], *pieces[index + 1 :]]
                self._queue.extendleft(reversed(rest))
                return
            sent -= len(piece)

    def _keep_going(self) -> None:
        self.waiting = sum(len(piece) for piece in self._queue) if self._queue else 0
        if bool(self._queue) != self._wanted:
            self._wanted = bool(self._queue)
            self._want_writable(self._wanted)
