"""`StreamLink`, a link over a stream socket: framing, the send queue, and large frames in chunks.

All transports use it. Wire format, in each direction: a prologue of 12 bytes (`protocol.handshake`), then frames. A
frame is a word of four bytes (its size; the highest bit is set if the frame is internal to the link, see
`large_frames`) and its bytes.

Sending. If no other thread is sending, a thread writes to the socket itself. Otherwise it appends its frame to a list,
which the sending thread checks when it is done. Bytes that the socket does not accept are queued, and the poller calls
`flush` when the socket has room. So no thread waits for another thread, with one exception: a large frame is sent in
chunks directly from its memory, and its sender waits until the socket has accepted them. Frames of other threads are
sent between the chunks.

A signal handler or a finalizer may call `send` while its own thread is in `send`. The lock is only tried, so the inner
`send` appends its frame to the list. It never waits, however large the frame is (`_is_sending`), because the outer
`send` could not continue.
"""

from __future__ import annotations

import itertools
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from threading import get_ident
from time import monotonic
from typing import Final

from farcall.errors import ProtocolError, UsageError
from farcall.gate import asleep, must_not_sleep, sleep_in_poll
from farcall.protocol.handshake import PROLOGUE_SIZE, check_prologue, pack_prologue
from farcall.transports.base import FOREVER, Buffer, Frame, LinkCounts, LinkOptions
from farcall.transports.large_frames import (
    ANNOUNCE,
    CHUNK,
    CHUNK_HEADER_SIZE,
    INLINE,
    MAX_INTERLEAVED,
    Assembler,
    check_size,
    chunks_of,
    pack_announcement,
    pack_chunk_header,
    pack_inline,
    unpack_inline,
)
from farcall.transports.sockets import OwnSocket
from farcall.transports.wake_up import WakeUp

INTERNAL: Final = 1 << 31
"""The bit of a frame's word that marks a frame for the link itself, not for its user."""
WORD: Final = struct.Struct("<I")
"""The four bytes before each frame: its size, and the bit `INTERNAL`."""
_WORD_SIZE: Final = WORD.size
RECEIVE_BYTES: Final = 1 << 15
"""Bytes to read at once. From 128 KiB on, malloc gets new memory from the kernel each time, which takes longer than a
small call."""
WHOLE_MAX_BYTES: Final = 1 << 16
"""Larger frames are sent in chunks."""
CHUNK_BYTES: Final = 1 << 19
"""The most bytes of one chunk of a large frame."""
_MAX_PIECE_BYTES: Final = WHOLE_MAX_BYTES + CHUNK_BYTES
"""The largest size on the wire, also of internal frames with their headers: a table of 65,535 buffers fits."""
_MAX_PIECES: Final = 64
"""The most queued pieces that one system call sends."""
_MAX_SEND_BYTES: Final = 1 << 18
"""After this many bytes, no further queued piece is sent with the same system call."""
_WRITABLE_POLL_MS: Final = 100
"""How many milliseconds a thread waits for room in the socket before it checks the queue again."""
_BLIND_SLEEP_S: Final = 0.05
"""How long a thread sleeps at most that nobody can wake, because no descriptor is left."""
_MAX_SLEEP_S: Final = 1.0
"""How many seconds `wait` sleeps before it checks whether a signal handler has received the frames."""


class StreamLink:
    """A link over a connected stream socket: one end of a connection that carries whole frames.

    It begins in its handshake, in which only small frames are allowed. `establish` completes the handshake.

    Only one thread at a time may be in `receive` or `wait`. Any thread may call the other methods.

    The constructor sends nothing.

    Args:
        sock: The connected socket. The link takes it over and closes it.
        address: The address of the other end, for log and error messages.
        handshake_limit: The most bytes of a frame that the link receives before it is established.
        network: Text that names the network namespace of this end (`network_identity`), for an unencrypted link on
            loopback; empty for all other links.
    """

    can_append = True
    """Whether small frames can be appended (`append`), and sent together by one system call."""

    def __init__(self, sock: socket.socket, address: str, handshake_limit: int, network: str = "") -> None:
        self.address = address
        self.network = network
        self.is_established = False
        self._is_closed = False
        self._socket: OwnSocket | None = sock if isinstance(sock, OwnSocket) else OwnSocket(sock)
        self._max_frame_size = handshake_limit
        self._options: LinkOptions | None = None
        self._assembler: Assembler | None = None
        self._bytes_in = self._bytes_out = 0
        # Receiving, by one thread at a time
        self._prologue_is_due = True
        self._rest = b""  # the beginning of a frame that is not complete
        self._chunk_header = b""  # of the chunk that is being received
        self._chunk_size = 0
        self._space: memoryview | None = None  # the memory for the next bytes of that chunk
        self._poll: select.poll | None = None  # of `wait`, while no thread is in it
        self._spins = False  # the last wait was short
        self._wake_up = WakeUp()
        # Sending, by the thread that holds the lock
        self._lock = threading.Lock()
        self._sender = 0  # the ident of the thread that holds the lock; 0 for none
        self._first_bytes = pack_prologue()  # sent with the first frame
        self._queue: deque[Buffer] = deque()
        self.backlog = 0
        """The number of queued bytes; see `Link`."""
        self._appended: deque[bytes] = deque()  # by threads that could not get the lock
        self._broken = ""  # why nothing can be sent any more (text, as an error object would be a cycle)
        self._is_awaiting_room = False  # the poller calls `flush` when the socket has room
        self._numbers = itertools.count(1)
        # A thread takes one out while it sends chunks. Not a semaphore: a signal handler may send at any moment, and
        # an interrupted `pop` or `append` of a deque leaves no lock behind.
        self._chunk_permits = deque([True] * MAX_INTERLEAVED)

    @property
    def binding(self) -> bytes:
        """The fingerprint of the certificate of the end that accepted the link.

        Empty if the link is not encrypted or is closed, and at the connecting end before the TLS handshake is done.
        """
        return getattr(self._socket, "binding", b"")

    def fileno(self) -> int:
        """Returns the file descriptor of the socket.

        Raises:
            ConnectionAbortedError: The link is closed. It is an `OSError`.
        """
        return self._open_socket().fileno()

    def _open_socket(self) -> OwnSocket:
        """Returns the socket. Raises `ConnectionAbortedError` if the link is closed."""
        sock = self._socket
        if sock is None:
            raise ConnectionAbortedError(f"the link to {self.address} is closed")
        return sock

    def establish(self, options: LinkOptions, deadline: float | None = None) -> None:
        """Completes the handshake: from now on frames of up to `options.max_frame_size` bytes can be received.

        Does not wait, because the two ends have nothing to agree on.

        Args:
            options: The options of all links of this worker.
            deadline: Ignored.
        """
        self._options = options
        self._max_frame_size = options.max_frame_size
        self._assembler = Assembler(options.received.take, options.max_frame_size)
        self.is_established = True

    def counts(self) -> LinkCounts:
        """Returns the numbers of bytes that were received from the socket and sent to it so far, also after `close`."""
        return LinkCounts(self._bytes_in, self._bytes_out)

    # Receiving

    def receive(self) -> list[Frame]:
        """Returns the frames that have arrived; an empty list if no frame is complete. Does not wait.

        Raises:
            ConnectionError: The link is closed or broken, or the other end has closed it and all frames were returned
                before.
            ProtocolError: The other end has sent bytes that are not a frame, or a frame that is too large.
        """
        frames: list[Frame] = []
        sock = self._open_socket()
        try:
            if not self.is_established:
                return self._receive_handshake(sock)
            if self._space is not None:
                self._receive_chunk(sock, frames)
                return frames
            data = sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return frames
        except ConnectionError:
            raise
        except OSError as error:  # the keep-alive of TCP has failed, or there is no route any more
            raise ConnectionResetError(f"the connection broke: {error}") from error
        if not data:
            raise ConnectionResetError("the other end closed the connection")
        self._bytes_in += len(data)
        if self._rest:
            data, self._rest = self._rest + data, b""
        elif len(data) - _WORD_SIZE == int.from_bytes(data[:_WORD_SIZE], "little") and not self._prologue_is_due:
            check_size(len(data) - _WORD_SIZE, self._max_frame_size)
            return [(data[_WORD_SIZE:], ())]  # one complete frame, the usual case
        self._parse(data, frames)
        return frames

    def _receive_handshake(self, sock: OwnSocket) -> list[Frame]:
        """Receives one frame of the handshake, and no byte after it.

        Returns a list of that frame; an empty list if the frame is not complete.

        After its handshake the other end may send other frames at once. They must stay in the socket until this end is
        established, because this end refuses them until then.

        Raises `ProtocolError` if the bytes are not those of a handshake, `ConnectionError` if the other end has closed
        the connection, and `BlockingIOError` if no bytes have arrived.
        """
        frames: list[Frame] = []
        for _ in range(2):  # the size, then the frame. Bytes that come later are read at the next event
            data = sock.recv(self._handshake_bytes_missing())
            if not data:
                raise ConnectionResetError("the other end closed the connection")
            self._bytes_in += len(data)
            data, self._rest = self._rest + data, b""
            self._parse(data, frames)
            if frames:
                break
        return frames

    def _handshake_bytes_missing(self) -> int:
        """Returns how many bytes to read next in the handshake.

        A frame begins with its size. While the size is not complete, returns the number of bytes up to its end. Then
        returns how many bytes of the frame are missing.
        """
        head = _WORD_SIZE + (PROLOGUE_SIZE if self._prologue_is_due else 0)
        if len(self._rest) < head:
            return head - len(self._rest)
        size = int.from_bytes(self._rest[:_WORD_SIZE], "little")  # checked by `_parse`; the prologue is removed
        return head + size - len(self._rest)

    def _parse(self, data: bytes, frames: list[Frame]) -> None:
        """Appends the complete frames in `data` to `frames`, and keeps the bytes of an incomplete frame in `_rest`.

        Raises `ProtocolError` if `data` is not made of frames, or a frame is too large.
        """
        at, end = 0, len(data)
        if self._prologue_is_due:
            check_prologue(data[:PROLOGUE_SIZE], self.address)
            if end < PROLOGUE_SIZE:
                self._rest = data
                return
            self._prologue_is_due, at = False, PROLOGUE_SIZE
        while end - at >= _WORD_SIZE:
            (word,) = WORD.unpack_from(data, at)
            size = word & ~INTERNAL
            begin = at + _WORD_SIZE
            if word & INTERNAL and not self.is_established:
                raise ProtocolError(f"{self.address} sent an internal frame before its handshake was over")
            if word & INTERNAL and end > begin and data[begin] == CHUNK:
                if end - begin < CHUNK_HEADER_SIZE:
                    break
                at = self._begin_chunk(data, begin, size, frames)
                if self._space is not None:
                    return
                continue
            # The contents of an internal frame may have the largest size that is allowed, plus its header.
            check_size(size, _MAX_PIECE_BYTES if word & INTERNAL else min(self._max_frame_size, _MAX_PIECE_BYTES))
            if end - begin < size:
                break
            at = begin + size
            frame = data[begin:at]
            if not word & INTERNAL:
                frames.append((frame, ()))
            elif (received := self._receive_internal(frame)) is not None:
                frames.append(received)
        self._rest = data[at:]

    def _begin_chunk(self, data: bytes, begin: int, size: int, frames: list[Frame]) -> int:
        """Begins to receive a chunk, a piece of a large frame. Copies its bytes that are in `data` into its buffer.

        `begin` is the offset of the chunk's header in `data`. `size` is the number of bytes of header and chunk. If
        that completes a large frame, the frame is appended to `frames`. Returns the offset after the bytes that were
        used. Raises `ProtocolError` if the large frame was not announced, or the chunk does not fit into it.
        """
        assert self._assembler is not None
        header_end = begin + CHUNK_HEADER_SIZE
        header = data[begin:header_end]
        space = self._assembler.space_for(header, size - CHUNK_HEADER_SIZE)
        come = min(space.nbytes, len(data) - header_end)
        space[:come] = memoryview(data)[header_end : header_end + come]
        self._chunk_header, self._chunk_size = header, space.nbytes
        self._space = space[come:]
        self._finish_chunk(frames)
        return header_end + come

    def _receive_chunk(self, sock: OwnSocket, frames: list[Frame]) -> None:
        """Receives the next bytes of a chunk, a piece of a large frame, directly into its buffer.

        If that completes the large frame, the frame is appended to `frames`.

        Raises `BlockingIOError` if no bytes have arrived, `ConnectionError` if the other end has closed the connection,
        and `ProtocolError` if a buffer cannot be allocated.
        """
        while self._space is not None:
            space = self._space
            count = sock.recv_into(space)
            if not count:
                raise ConnectionResetError("the other end closed the connection")
            self._bytes_in += count
            self._space = space[count:]
            self._finish_chunk(frames)
            if count < space.nbytes:
                # Most likely nothing is left, and another system call costs more than the poller. A thread that spins
                # would get the rest in many small pieces; while it sleeps they add up.
                self._spins = False
                if self._options is not None:
                    self._options.poller.skip_spin()
                return

    def _finish_chunk(self, frames: list[Frame]) -> None:
        """Ends the current chunk if all its bytes were received. Appends the large frame to `frames` if it is complete.

        Raises `ProtocolError` if the next buffer of the large frame cannot be allocated.
        """
        assert self._assembler is not None
        if self._space is not None and not self._space.nbytes:
            self._space = None
            whole = self._assembler.fill(self._chunk_header, self._chunk_size)
            if whole is not None:
                frames.append(whole)

    def _receive_internal(self, data: bytes) -> Frame | None:
        """Processes an internal frame, which is for the link itself and not for its user.

        Returns the frame for the user if the internal frame contains or completes one, else None. Raises
        `ProtocolError` if the internal frame is empty, of an unknown kind, or cannot be read.
        """
        assert self._assembler is not None
        kind = data[0] if data else 0
        if kind == INLINE:
            return unpack_inline(data, self._max_frame_size)
        if kind == ANNOUNCE:
            return self._assembler.announce(data)
        raise ProtocolError(f"{self.address} sent an internal frame of unknown kind {kind}")

    def wait(self, seconds: float | None) -> bool:
        """Waits until bytes have arrived, the other end has closed the link, or the time is over.

        An exception that a signal handler raises ends the wait, and is raised here.

        Args:
            seconds: How long to wait at most; None for no limit, 0 to only look.

        Returns:
            True if `receive` should be called. False after `seconds`. False also earlier, after `wake`, or if a signal
            handler has received the bytes.

        Raises:
            ConnectionAbortedError: This end was closed before the call.
        """
        sock = self._open_socket()  # keep a reference, so that `close` by another thread does not free the descriptor
        poll, self._poll = self._poll, None  # a signal handler that waits has to use another one
        if poll is None:
            poll = select.poll()
            poll.register(sock, select.POLLIN)
        start = monotonic()
        spin_s = self._options.spin_s if self._options is not None else 0.0
        try:
            # Nothing tells what the other host does. So a thread spins if the last wait was short, as the leader does.
            stop = start + spin_s if self._spins else start
            while not poll.poll(0):
                if monotonic() >= stop:
                    return self._sleep(poll, FOREVER if seconds is None else start + seconds)
            return True
        finally:
            self._spins = monotonic() - start < 2 * spin_s
            self._poll = poll

    def _sleep(self, poll: select.poll, until: float) -> bool:
        """Sleeps until the socket, which is registered in `poll`, is readable, and returns True.

        Returns False after the time `until` of the monotonic clock, after `wake`, or if a signal handler has received
        bytes.
        """
        before = self._bytes_in
        wake_up = self._wake_up  # keep a reference, as to the socket
        event = wake_up.fileno()
        if event < 0:
            return self._sleep_until(poll, until, before, wake_up, _BLIND_SLEEP_S)
        poll.register(event, select.POLLIN)
        try:
            return self._sleep_until(poll, until, before, wake_up, _MAX_SLEEP_S)
        finally:
            poll.unregister(event)

    def _sleep_until(self, poll: select.poll, until: float, before: int, wake_up: WakeUp, slice_s: float) -> bool:
        while True:
            if wake_up.take():
                return False
            left = min(max(0.0, until - monotonic()), slice_s)
            if sleep_in_poll(poll, left):
                return not wake_up.take()
            # A signal handler may have received the frames. `poll` itself continues after a signal.
            if self._bytes_in != before or monotonic() >= until:
                return False

    def has_hung_up(self) -> bool:
        """Returns whether the other end has closed the link, or the socket is broken.

        Raises:
            ConnectionAbortedError: This end is closed.
        """
        sock = self._open_socket()  # keep a reference, as in `wait`
        poll = select.poll()
        poll.register(sock, select.POLLRDHUP)
        return bool(poll.poll(0))  # also if the socket is broken

    def wake(self) -> None:
        """Ends `wait` in another thread early; if no thread waits, the next `wait` returns at once. Raises nothing."""
        self._wake_up.request()

    def note_hang_up(self) -> None:
        """Does nothing. A thread that waits on the socket notices without help that the other end has closed it."""

    # Sending

    def send(self, frame: bytes, buffers: list[memoryview] | None = None, deadline: float = FOREVER) -> None:
        """Sends one frame, or queues the part of it that the socket does not accept.

        Args:
            frame: The bytes of the frame; may be empty.
            buffers: The buffers of the frame; None or an empty list for none. The list is emptied.
            deadline: Until when to wait while a large frame is sent, as a time of the monotonic clock. After that the
                rest is copied and queued, and no error is raised.

        Raises:
            ConnectionError: The link is closed or broken.
        """
        if buffers:
            self._send_with_buffers(frame, buffers, deadline)
        elif len(frame) > WHOLE_MAX_BYTES:
            self._send_chunks(frame, (), deadline)
        else:
            self._send_bytes(WORD.pack(len(frame)) + frame)

    def send_kept(self, frame: bytes, buffers: list[memoryview], deadline: float = FOREVER) -> list[memoryview]:
        """Sends one frame, and returns copies of its buffers, so that the frame can be sent again on another link.

        Queues the part of the frame that the socket does not accept.

        Args:
            frame: The bytes of the frame; may be empty.
            buffers: The buffers of the frame; an empty list for none. The list is not changed.
            deadline: Until when to wait while a large frame is sent, as a time of the monotonic clock. After that the
                rest is copied and queued, and no error is raised.

        Returns:
            A copy of each buffer, which never changes; an empty list for no buffers.

        Raises:
            ConnectionError: The link is closed or broken.
        """
        kept = [memoryview(bytes(buffer)) for buffer in buffers]
        self.send(frame, list(kept), deadline)
        return kept

    def _send_with_buffers(self, frame: bytes, buffers: list[memoryview], deadline: float) -> None:
        """Sends a frame that has buffers: in one piece up to `WHOLE_MAX_BYTES`, else in chunks. Empties `buffers`.

        `deadline`, a time of the monotonic clock, limits the wait while chunks are sent. After that, the rest is
        queued. Raises `ConnectionError` if the link is closed or broken.
        """
        if len(frame) + sum([buffer.nbytes for buffer in buffers]) <= WHOLE_MAX_BYTES:
            self._send_internal(pack_inline(frame, buffers), frame, *buffers)
        else:
            self._send_chunks(frame, buffers, deadline)
        buffers.clear()

    def _send_internal(self, *parts: Buffer) -> None:
        """Sends one internal frame, which is for the link at the other end. It consists of `parts` in this order.

        Queues what the socket does not accept. Raises `ConnectionError` if the link is closed or broken.
        """
        size = sum([len(part) for part in parts])
        self._send_bytes(b"".join((WORD.pack(size | INTERNAL), *parts)))

    def _send_bytes(self, data: bytes) -> None:
        """Sends bytes without other bytes in between. Queues what the socket does not accept.

        Raises `ConnectionError` if the link is closed or broken.
        """
        if not self._try_lock():
            self._appended.append(data)
            self._send_appended()
            return
        try:
            self._check_broken()
            if self._first_bytes:
                data, self._first_bytes = self._first_bytes + data, b""
            if self._queue:
                self._queue_appended()
                self._enqueue((data,))
            elif self._appended:
                self._appended.append(data)
                self._write_appended()
            else:
                sent = self._write((data,))
                if sent != len(data):
                    self._enqueue((memoryview(data)[sent:],))
        finally:
            self._unlock()
        if self._appended:
            self._send_appended()

    def append(self, frame: bytes) -> None:
        """Adds a small frame without buffers to the frames that the next `send` or `flush` sends. Sends nothing itself.

        Args:
            frame: The bytes of the frame, at most `WHOLE_MAX_BYTES`; may be empty. The size is not checked.
        """
        self._appended.append(WORD.pack(len(frame)) + frame)

    def _try_lock(self) -> bool:
        """Takes the lock for sending if it is free. Returns whether it was; does not wait."""
        if not self._lock.acquire(False):
            return False
        self._sender = get_ident()
        return True

    def _unlock(self) -> None:
        """Releases the lock for sending, which this thread must hold."""
        self._sender = 0
        self._lock.release()

    def _is_sending(self) -> bool:
        """Returns whether this thread holds the lock for sending.

        This is so in a signal handler or a finalizer that interrupts a `send`. Such code must not wait, because the
        `send` cannot continue before the code returns.
        """
        return self._sender == get_ident()

    def _send_appended(self) -> None:
        """Sends the frames in `_appended`. Other threads put them there while this thread had the lock for sending.

        To be called after the lock was released. Returns at once if another thread has the lock: that thread sends
        them. Raises `ConnectionError` if the link is closed or broken.
        """
        while self._appended and self._try_lock():
            try:
                self._check_broken()
                if self._queue:
                    self._queue_appended()
                else:
                    self._write_appended()
            finally:
                self._unlock()

    def _write_appended(self) -> None:
        """Writes the frames in `_appended` together, with few system calls. Queues what the socket does not accept.

        The caller must hold the lock for sending, and the queue must be empty. Raises `ConnectionError` if the
        connection is closed or broken.
        """
        appended = self._appended
        try:
            while appended:
                frames = [appended.popleft()]
                size = len(frames[0])
                while appended and size + len(appended[0]) <= WHOLE_MAX_BYTES:
                    frames.append(appended.popleft())
                    size += len(frames[-1])
                data = b"".join(frames) if len(frames) > 1 else frames[0]
                sent = self._write((data,))
                if sent != size:
                    self._enqueue((memoryview(data)[sent:],))
                    self._queue_appended()
                    return
        except BaseException as error:  # of a signal handler: a frame may have been removed from the list and not sent
            self._broken = self._broken or f"{type(error).__name__}: {error}"
            raise

    def _check_broken(self) -> None:
        """Does nothing if the link is open. Otherwise drops queued frames, and raises `ConnectionAbortedError`."""
        if self._broken or self._socket is None:
            self._queue.clear()
            self._appended.clear()
            self.backlog = 0
            raise ConnectionAbortedError(f"the link to {self.address} is closed: {self._broken or 'by this end'}")

    def _write(self, pieces: tuple[Buffer, ...] | list[Buffer]) -> int:
        """Writes pieces to the socket. Returns how many bytes the socket has accepted, 0 if it is full.

        Raises `ConnectionError` if the connection is closed or broken.
        """
        sock = self._open_socket()
        try:
            sent = sock.send(pieces[0]) if len(pieces) == 1 else sock.sendmsg(pieces)
        except BlockingIOError:
            return 0
        except BaseException as error:  # after Ctrl-C, it is not known how much was sent
            self._broken = f"{type(error).__name__}: {error}"
            if isinstance(error, OSError) and not isinstance(error, ConnectionError):
                raise ConnectionResetError(f"the connection broke: {error}") from error
            raise
        self._bytes_out += sent
        return sent

    def _enqueue(self, pieces: Iterable[Buffer]) -> None:
        """Queues bytes, and asks the poller to call `flush` when the socket has room.

        The caller must hold the lock for sending. Raises `ConnectionAbortedError` in the handshake, when nothing may be
        queued.
        """
        for piece in pieces:
            if len(piece):
                self._queue.append(piece)
                self.backlog += len(piece)
        if not self._is_awaiting_room:
            if self._options is None:
                raise ConnectionAbortedError(f"{self.address} does not take what belongs to the handshake")
            self._is_awaiting_room = True
            self._options.poller.await_room(self, True)

    def _queue_appended(self) -> None:
        """Moves the frames in `_appended` to the queue. The caller must hold the lock for sending."""
        while self._appended:
            self._enqueue((self._appended.popleft(),))

    def _write_queue(self) -> None:
        """Writes queued bytes as far as the socket accepts them; none if the queue is empty.

        The caller must hold the lock for sending. Raises `ConnectionError` if the connection is closed or broken.
        """
        queue = self._queue
        while queue:
            pieces, size = _next_pieces(queue)
            sent = self._write(pieces)
            self.backlog -= sent
            _drop(queue, sent)
            if sent < size:
                return
        if self._is_awaiting_room and self._options is not None:
            self._is_awaiting_room = False
            self._options.poller.await_room(self, False)

    def flush(self) -> None:
        """Sends queued frames as far as that is possible without waiting. Does nothing if none are queued.

        Raises:
            ConnectionError: The link is closed or broken.
        """
        if self._try_lock():  # otherwise the thread that is sending sends the queue as well
            try:
                self._check_broken()
                if self._queue:
                    self._queue_appended()
                    self._write_queue()
                else:
                    self._write_appended()
            finally:
                self._unlock()
            if self._appended:
                self._send_appended()

    def unsent_bytes(self) -> int:
        """Returns the number of bytes that are queued; 0 if all were sent."""
        return self.backlog

    # Large frames

    def _send_chunks(self, frame: Buffer, buffers: Iterable[memoryview], deadline: float) -> None:
        """Sends a large frame and its buffers in chunks, without a copy. Waits until the socket has accepted them.

        From `deadline` on, a time of the monotonic clock, the rest is copied and queued. Raises `ConnectionError` if
        the link is closed or broken.
        """
        buffers = tuple(buffers)
        number = next(self._numbers)
        announcement = pack_announcement(number, frame, buffers)
        header = pack_chunk_header(number)
        try:
            self._chunk_permits.pop()
        except IndexError:
            self._send_contiguous(announcement, header, frame, buffers)
            return
        try:
            self._send_internal(announcement)
            for chunk in chunks_of(frame, buffers, self._max_chunk_bytes()):
                self._send_chunk(header, chunk, deadline)
        except BaseException as error:
            self._close_after_interrupt(error)
            raise
        finally:
            self._chunk_permits.append(True)

    def _max_chunk_bytes(self) -> int:
        """Returns the most bytes of a chunk, a piece of a large frame, without its header."""
        return CHUNK_BYTES

    def _send_contiguous(
        self, announcement: bytes, header: bytes, frame: Buffer, buffers: Sequence[memoryview]
    ) -> None:
        """Sends a large frame in one step, so that no other frame is between its chunks. Does not wait.

        Queues the bytes that the socket does not accept. Used only while `MAX_INTERLEAVED` other large frames are being
        sent, or where waiting is not allowed, because it copies the whole frame.

        `announcement` is the internal frame that goes before the chunks. `header` is the header of each chunk. Raises
        `ConnectionError` if the link is closed or broken.
        """
        parts: list[Buffer] = [WORD.pack(len(announcement) | INTERNAL), announcement]
        for chunk in chunks_of(frame, buffers, CHUNK_BYTES):
            parts += [WORD.pack((CHUNK_HEADER_SIZE + chunk.nbytes) | INTERNAL), header, chunk]
        self._send_bytes(b"".join(parts))

    def _close_after_interrupt(self, error: BaseException) -> None:
        """Closes the link after `error` has interrupted the sending of a large frame.

        Otherwise the other end would wait for ever for the rest of the frame, and the program could change memory that
        is still queued. Does nothing if `error` is a `ConnectionError`.
        """
        if not isinstance(error, ConnectionError):
            self._broken = f"a send was interrupted by {type(error).__name__}"
            self.close()

    def _send_chunk(self, header: bytes, chunk: memoryview, deadline: float) -> None:
        """Sends a chunk, a piece of a large frame, with its header. Waits until the socket has accepted both.

        Makes no copy before the time `deadline` of the monotonic clock. Then copies and queues the bytes that the
        socket has not accepted. Raises `ConnectionError` if the link is closed or broken.
        """
        header = WORD.pack((CHUNK_HEADER_SIZE + chunk.nbytes) | INTERNAL) + header
        self._wait_until_sent(deadline)
        if self.backlog or not self._try_lock():  # the deadline has passed, or another thread is sending
            self._send_bytes(header + chunk)
            return
        try:
            self._check_broken()
            self._queue_appended()  # the previous chunk may be among them
            if self._queue:
                self._enqueue((header, chunk))
                self._write_queue()
            else:
                sent = self._write([header, chunk])
                if sent < len(header) + chunk.nbytes:
                    rest = [memoryview(header)[sent:], chunk] if sent < len(header) else [chunk[sent - len(header) :]]
                    self._enqueue(rest)
        finally:
            self._unlock()
        if self._appended:
            self._send_appended()
        if self.backlog and not self._wait_until_sent(deadline):
            self._copy_queue()

    def _copy_queue(self) -> None:
        """Replaces queued memory by copies. From then on the program may change the original memory."""
        self._lock.acquire()  # a short wait: no thread that holds the lock waits
        self._sender = get_ident()
        try:
            self._queue = deque(bytes(piece) for piece in self._queue)
        finally:
            self._unlock()
        if self._appended:
            self._send_appended()

    def _wait_until_sent(self, deadline: float) -> bool:
        """Waits until no bytes are queued, and returns True.

        Returns False after the time `deadline` of the monotonic clock. Returns False at once if this thread must not
        wait, because it interrupts its own `send`, reads the links of this worker, or runs an event loop.

        Raises:
            ConnectionError: The link is closed or broken.
        """
        if not self.backlog:
            return True
        if self._is_sending() or must_not_sleep():
            return False
        sock = self._open_socket()  # keep a reference, as in `wait`
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        try:
            with asleep():
                while self.backlog:
                    if monotonic() >= deadline:
                        return False
                    poll.poll(_WRITABLE_POLL_MS)
                    self.flush()
        except UsageError:  # this is the leader of an executor, which must not wait while it reads
            return False
        return True

    # The end

    def sweep(self, before: float) -> None:
        """Does nothing, because this link keeps no unused memory. `before` is ignored."""

    def prepare_fork(self) -> None:
        """Does nothing: the link shares no memory with the other end."""

    def close(self) -> None:
        """Closes the link in both directions, and drops queued frames. May be called twice.

        Frames that the socket has accepted may still arrive.
        """
        self._is_closed = True
        self._wake_up = WakeUp()  # frees the descriptor of the old one when no thread polls it any more
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.release()

    def abandon(self) -> None:
        """Closes the descriptors in a forked child. The link stays open in the parent. Raises nothing."""
        self._is_closed = True
        self._wake_up.close()
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.abandon()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}{' closed' if self._socket is None else ''}>"


def _next_pieces(queue: deque[Buffer]) -> tuple[list[Buffer], int]:
    """Returns the first pieces of a queue, as many as one system call should send, and their size in bytes.

    Returns an empty list and 0 for an empty queue. The queue is not changed.
    """
    pieces: list[Buffer] = []
    size = 0
    for piece in queue:
        pieces.append(piece)
        size += len(piece)
        if size >= _MAX_SEND_BYTES or len(pieces) >= _MAX_PIECES:
            break
    return pieces, size


def _drop(queue: deque[Buffer], count: int) -> None:
    """Removes `count` bytes from the beginning of a queue, which must have at least `count` bytes."""
    while count:
        first = queue[0]
        if count < len(first):
            queue[0] = memoryview(first)[count:]
            return
        count -= len(first)
        queue.popleft()
