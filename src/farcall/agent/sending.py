"""Sending on a channel from many threads, without ever blocking the thread that serves.

Rules
- Messages go out whole and in the order of `send`, `send_all` and `queue`, each message's pieces together.
- What the channel does not take now is copied and waits in a queue; the poller tells when the channel takes more, and
  calls `flush`. Until then nobody tries in vain.
- `queue` only queues: a burst of replies is flushed with one system call. So does a `send` while another thread sends:
  nobody waits for the lock, and what many threads send at once goes out at once.
- A large message goes in parts, straight from its memory: its sender waits until the channel has taken it, and flushes
  meanwhile what others have queued. Between two parts they have their turn.
- After the channel broke every call raises `OSError`; what was queued is dropped.
- An exception that comes from nowhere (Ctrl-C, no memory) in the midst of a send leaves an unknown part of a message
  sent. The channel is of no use then: it is marked broken, before anything else is done.
- A small message takes the ring, where there is one, if nothing is before it that must go on the channel. Who has put
  it in looks whether the reader of the ring has gone to sleep just then, and knocks (`transports.rings`). If that is
  interrupted, whoever sends or flushes next does it, and those who wait for a reply flush now and then.
- A signal handler or a finalizer may send in the midst of a send of the same thread: the lock lets it in, and it only
  queues its message, whole, for the outer send to take along.
"""

from __future__ import annotations

import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final, NamedTuple

from farcall.protocol.wire import KNOCK, Decoder, encode, encode_part
from farcall.sleeping import asleep
from farcall.transports.base import Buffer, Channel
from farcall.transports.rings import AWAKE, RingWriter

_CHUNK: Final = 1 << 18
_PIECES: Final = 64
PART_SIZE: Final = 1 << 19
"""Bytes of a part. Others may go in front of the next one, so that is how long they wait."""
LARGE: Final = 1 << 20
"""From this size on a message goes in parts."""
_KNOCK: Final = encode(KNOCK, 0, b"", b"")
MAX_WAITING: Final = 1 << 24
"""Bytes that may wait to be sent before those who send have to wait too: see `hold_back`."""


class InParts(NamedTuple):
    """A large message, to be sent in parts."""

    start: bytes
    call_id: int
    pieces: Sequence[Buffer]
    """Head, body and buffers."""


class Sender:
    """The sending side of one channel."""

    __slots__ = (
        "_broken",
        "_channel",
        "_full",
        "_later",
        "_lock",
        "_pushing",
        "_queue",
        "_want_writable",
        "busy",
        "queue",
        "ring",
        "sent",
        "waiting",
    )

    def __init__(self, channel: Channel, want_writable: Callable[[bool], None]) -> None:
        self._channel = channel
        self._want_writable = want_writable  # asks the poller to call `flush`, or no longer to
        self._full = False  # the channel took less than it was given, and the poller will tell when it takes more
        self._pushing = 0  # so many threads are sending something in parts, and flush by themselves
        self._lock = threading.RLock()
        self.busy = False
        """Somebody sends. Under the lock: this very thread, further out."""
        self._queue: deque[Buffer] = deque()  # under the lock
        self._later: deque[bytes] = deque()
        self.queue = self._later.append
        """`queue(message)`: queues one message; somebody must `flush` soon. Takes no lock, not even a frame."""
        self._broken: BaseException | str | None = None
        self.waiting = 0
        """Bytes that the channel has not taken yet."""
        self.sent = 0
        """Bytes that it has taken so far, or the ring."""
        self.ring: RingWriter | None = None
        """Takes small messages instead of the channel, where there is one and the other side is looking at it."""

    def is_broken(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._broken is not None

    def is_sending_here(self) -> bool:
        """Whether this very thread is in the midst of a send: what it sends now goes out only when that goes on."""
        return self.busy and self._lock._is_owned()  # type: ignore[attr-defined]  # not in typeshed

    def send(self, data: bytes) -> None:
        """Sends one small message, or queues what does not fit. Raises `OSError` if the channel is broken."""
        ring = self.ring
        if not self._lock.acquire(False):  # by its place: a keyword takes as long as the rest of it, for every message
            self._later.append(data)  # whoever sends just now takes it along, and it costs no system call of its own
            self._send_later()
            return
        try:
            if self.busy or self._full or self._later or self._broken is not None:
                self._send_behind((data,))
            else:
                self.busy = True
                try:
                    if ring is not None and ring.put(data, self.sent):
                        self.sent += len(data)
                    else:
                        try:
                            sent = self._channel.send(data)
                        except BlockingIOError:
                            sent = 0
                        self.sent += sent
                        if sent != len(data):
                            self._keep(memoryview(data)[sent:])
                except BaseException as error:
                    self._broken = error
                    self._drop()
                    raise
                self.busy = False
        finally:
            self._lock.release()
        if ring is not None and not ring.words[AWAKE]:
            self._knock(ring)
        if self._later:
            self._send_later()

    def _knock(self, ring: RingWriter) -> None:
        """The reader of the ring is not looking; it is told if something is in there, which it may have missed."""
        if ring.is_unseen():
            with self._lock:
                self._send_behind((_KNOCK,))

    def _send_later(self) -> None:
        """Sends what was queued while somebody was sending.

        Whoever releases the lock looks for it afterwards: nothing stays, whoever was first.
        """
        while self._later and self._lock.acquire(False):
            try:
                if self.busy:  # further out, in this very thread
                    return
                self._send_behind(())
            finally:
                self._lock.release()

    def send_all(self, pieces: Sequence[Buffer]) -> None:
        """Sends one message made of several pieces. What does not fit is copied: the pieces may be changed after it.

        Raises as `send`.
        """
        with self._lock:
            self._send_behind(pieces)
        if self._later:
            self._send_later()

    def flush(self) -> None:
        """Sends what is queued, as far as it goes. Raises `OSError` if the channel is broken."""
        later, ring = self._later, self.ring
        if not self._lock.acquire(False):
            return  # whoever sends just now takes it along
        try:
            if self.busy or self._full or self._broken is not None:
                self._send_behind((), although_full=True)
            elif later:
                # As in `send`, and written out twice: a call between the look and this would let an interrupt in.
                self.busy = True
                try:
                    data = later.popleft()
                    if later:
                        data += b"".join([later.popleft() for _ in range(len(later))])
                    if ring is not None and ring.put(data, self.sent):
                        self.sent += len(data)
                    else:
                        try:
                            sent = self._channel.send(data)
                        except BlockingIOError:
                            sent = 0
                        self.sent += sent
                        if sent != len(data):
                            self._keep(memoryview(data)[sent:])
                except BaseException as error:
                    self._broken = error
                    self._drop()
                    raise
                self.busy = False
        finally:
            self._lock.release()
        if ring is not None and not ring.words[AWAKE]:
            self._knock(ring)
        if later:
            self._send_later()

    def send_large(
        self, message: Sequence[Buffer] | InParts, deadline: float, is_over: Callable[[], bool], before: bytes = b""
    ) -> None:
        """Sends `before` and then the message, in parts if it says so: see `send_in_parts` and `send_all`."""
        if not isinstance(message, InParts):
            if len(message) == 1:  # its buffers are in shared memory, most likely
                self.send(before + bytes(message[0]))
            else:
                self.send_all([before, *message])
            return
        if before:
            self.send(before)
        self.send_in_parts(message, deadline, is_over)

    def send_in_parts(self, message: InParts, deadline: float, is_over: Callable[[], bool]) -> None:
        """Sends a large message, and waits until the channel has taken it, or it is over with the connection.

        What it has not taken by the deadline is copied, and waits as other messages do. Raises as `send`.
        """
        with self._lock:
            self._pushing += 1
        try:
            self.send(message.start)
            for piece in message.pieces:
                view = memoryview(piece)
                for begin in range(0, view.nbytes, PART_SIZE):
                    part = view[begin : begin + PART_SIZE]
                    self._send_part(encode_part(message.call_id, part.nbytes), part)
                    if self._full and not self._push(deadline, is_over):
                        return
        except BaseException as error:
            with self._lock:
                self._broken = self._broken or error  # a part of it may be missing for ever
                self._drop()
            raise
        finally:
            with self._lock:
                self._pushing -= 1
                if self._full:
                    self._queue = deque(map(_own, self._queue))
                    self._want_writable(not self._pushing)

    def _send_part(self, start: bytes, part: memoryview) -> None:
        with self._lock:
            if self.busy or self._full:  # an interrupt in the midst of a send; or its time was over
                self._send_behind((start + part,))
            else:
                self._send_behind((start, part), keep=True)
        if self._later:
            self._send_later()

    def _push(self, deadline: float, is_over: Callable[[], bool]) -> bool:
        """Waits until the channel takes more, and sends what waits; False if it is over with the connection."""
        writable = select.poll()
        writable.register(self._channel.fileno(), select.POLLOUT)
        with asleep():
            while self._full and monotonic() < deadline:
                if is_over():
                    return False
                writable.poll(100)
                self.flush()
        return True

    def hold_back(self, deadline: float, is_over: Callable[[], bool]) -> None:
        """Keeps the caller while too much waits, until it is over with the connection. Raises as `flush`."""
        writable = select.poll()
        writable.register(self._channel.fileno(), select.POLLOUT)
        with asleep():
            while self.waiting > MAX_WAITING and not is_over() and monotonic() < deadline:
                writable.poll(100)
                self.flush()

    def _keep(self, rest: Buffer) -> None:
        self._append(rest)
        self._set_full(True)

    def _send_behind(self, pieces: Sequence[Buffer], although_full: bool = False, keep: bool = False) -> None:
        """Sends all that is queued, then the pieces, then what came in between.

        What does not fit is copied, unless whoever sends it waits until it has gone (`keep`).
        """
        if self._broken is not None:
            raise ConnectionError(f"the connection to {self._channel.address} is broken: {self._broken}")
        if self.busy:
            if pieces:
                self._later.append(b"".join(pieces))
            return
        self.busy = True
        try:
            self._append_later()
            if self._full and not although_full:
                for piece in pieces:
                    self._append(_own(piece))
            else:
                for piece in pieces:
                    self._append(piece)
                self._send_queue()
                if pieces and self._queue and not keep:
                    self._queue = deque(map(_own, self._queue))
            while self._later:
                self._append_later()
                if not self._full:
                    self._send_queue()
        except BaseException as error:
            self._broken = error
            self._drop()
            raise
        self.busy = False

    def _append_later(self) -> None:
        while self._later:
            self._append(self._later.popleft())

    def _append(self, piece: Buffer) -> None:
        if piece:
            self._queue.append(piece)
            self.waiting += len(piece)

    def _send_queue(self) -> None:
        while self._queue:
            pieces, size = self._next_pieces()
            try:
                sent = self._channel.send(pieces[0]) if len(pieces) == 1 else self._channel.send_gather(pieces)
            except BlockingIOError:
                sent = 0
            self.waiting -= sent
            self.sent += sent
            if sent != size:
                self._put_back(pieces, sent)
                self._set_full(True)
                return
        self._set_full(False)

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

    def _set_full(self, full: bool) -> None:
        if full != self._full:
            self._full = full
            self._want_writable(full and not self._pushing)

    def _drop(self) -> None:
        self._queue.clear()
        self._later.clear()
        self.waiting = 0
        self._broken = str(self._broken)  # the error itself would keep the frames that met it, and what they hold


class Traffic(NamedTuple):
    """Both directions of a connection, for those who count bytes."""

    sender: Sender
    decoder: Decoder

    def counted(self) -> dict[str, int]:
        """How many bytes went out and came in so far, and how many wait to go out."""
        return {
            "bytes_out": self.sender.sent,
            "bytes_in": self.decoder.received,
            "bytes_waiting": self.sender.waiting,
        }


def _own(piece: Buffer) -> Buffer:
    """The piece if nobody can change it, else a copy."""
    if isinstance(piece, bytes) or (isinstance(piece, memoryview) and type(piece.obj) is bytes):
        return piece
    return bytes(piece)
