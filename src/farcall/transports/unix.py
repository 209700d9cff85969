"""Links between processes of one user on one host: Unix sockets with a path, and rings in shared memory.

Addresses: `unix:/tmp/farcall-1000/6f1c2a.sock`. Linux's abstract sockets are not used: they have no permissions, so
every user of the machine could connect.

A link begins on its socket. When both ends are authenticated, the connecting end sends SETUP. It contains a ring in a
memfd and the two events of its poller, as descriptors, and a segment to try to open (`shm_buffers`). The accepting end
answers SETUP_DONE with its own events. From then on all frames are sent through the ring, and the socket only shows
when the other end has closed the link. If one end has no C extension, no descriptors left or no shared memory, frames
are sent through the socket. A link that lacks its ring only because descriptors or memory were short is replaced later
(`should_be_replaced`).

    SETUP      1 type, 1 flag (there is a ring), 2 unused, 4 capacity, 4 descriptor, 16 token
    SETUP_DONE 1 type, 1 flags (1 ring is mapped, 2 offered segment was opened, 4 a ring may be possible later), 2
               unused, 4 descriptor, 16 token
    LONG       1 type, 1 flag (the last), 2 unused, 4 id; then a piece of an internal frame that is too long for the
               ring

Rules
- The sockets of a user are in one directory, `<temporary directory>/farcall-<uid>`. It is used only if it is a real
  directory that belongs to the user and that others cannot access. Otherwise, each listener creates a directory of its
  own, which is removed with the listener.
- Permissions keep other users out. Both ends also ask the kernel for the user at the other end, which must be the same:
  another program may have taken over the path of a socket.
- A killed process cannot remove its socket, so `listen` removes sockets without a listener. To find them, it connects a
  datagram socket, which does not disturb a listener: the error is "connection refused" if nothing listens, and "wrong
  protocol type" otherwise.
- The file of a socket exists a moment before the socket listens. So it is created with a name that ends in `.new`, and
  renamed when it listens. The removal above ignores such names for a minute.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import logging
import os
import secrets
import socket
import stat
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any, Final

from farcall._native import rings
from farcall.errors import ProtocolError, UsageError
from farcall.gate import asleep, must_not_sleep
from farcall.transports.base import FOREVER, Buffer, Frame, LinkCounts, LinkOptions
from farcall.transports.large_frames import (
    CHUNK,
    CHUNK_HEADER_SIZE,
    Assembler,
    chunks_of,
    pack_chunk_header,
    pack_inline,
    pack_supply,
)
from farcall.transports.shm_buffers import OPENED, SharedBuffers, is_shared_kind
from farcall.transports.shm_segments import TOKEN_SIZE
from farcall.transports.sockets import BACKLOG, OwnSocket
from farcall.transports.stream import INTERNAL, WORD, StreamLink
from farcall.transports.wake_up import WakeUp

SETUP: Final = 9
SETUP_DONE: Final = 10
LONG: Final = 11
_SETUP: Final = struct.Struct(f"<BBxxIi{TOKEN_SIZE}s")
_SETUP_DONE: Final = struct.Struct(f"<BBxxi{TOKEN_SIZE}s")
_LONG: Final = struct.Struct("<BBxxI")
_RING_MAPPED: Final = 1
_SEGMENT_OPENED: Final = 2
_RING_POSSIBLE_LATER: Final = 4

RING_BYTES: Final = 1 << 16
"""The capacity of each of the two rings of a link. A link needs twice that and one page of memory."""
_RING_WHOLE_MAX_BYTES: Final = RING_BYTES // 4
"""Larger frames are sent in chunks of this size, so that other frames can be sent in between."""
_MAX_LONG_BYTES: Final = 1 << 20
"""The most bytes of an internal frame that is sent in LONG pieces."""
_MAX_LONG_FRAMES: Final = 64
"""The most LONG frames at the same time. The longest, a table of 65,535 buffers, has half of `_MAX_LONG_BYTES`."""
_REPLACE_AFTER_S: Final = 5.0
"""Seconds after which a link that was made without a ring, for lack of descriptors, may be replaced by a new one."""
_DESCRIPTORS_OF_LINK: Final = 6
"""How many descriptors must be free before a link is replaced: for the new socket, its ring and events, and a spare."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_WRITE_SEALS: Final = fcntl.F_SEAL_WRITE | 0x10  # F_SEAL_FUTURE_WRITE, for which Python has no name

_MAX_PATH_BYTES: Final = 107  # unix(7): 108 with the null byte
_GRACE_S: Final = 60.0
"""Seconds for which a new file or directory is not removed, because another process may be setting it up."""
_MAX_REMEMBERED_USERS: Final = 64
"""For how many refused users a listener logs a warning, one for each."""
_SEND_BUFFER_BYTES: Final = 2 << 20
"""The size of the kernel's buffer, with its overhead. About 5,000 small frames fit; with the default size, 280."""

_log = logging.getLogger(__name__)


class UnixLink(StreamLink):
    """A link to a process on this host. It begins on a Unix socket, and then uses shared memory if possible.

    `establish` completes the handshake, and sets up a ring: a queue of frames in shared memory. If the two ends cannot
    have a ring, frames go through the socket. Large buffers can be in shared memory in both cases.

    Only one thread at a time may be in `receive` or `wait`. Any thread may call the other methods.

    The constructor sends nothing.

    Args:
        sock: The connected socket. The link takes it over and closes it.
        address: The address of the other end, for log and error messages.
        handshake_limit: The most bytes of a frame that the link receives before it is established.
        process: The process id of the other end. None if the kernel does not know it; then no shared memory is
            used.
    """

    can_append = False  # a frame in a ring makes no system call

    def __init__(self, sock: socket.socket, address: str, handshake_limit: int, process: int | None) -> None:
        super().__init__(sock, address, handshake_limit)
        self._process = process
        self._shared: SharedBuffers | None = None
        self.ring: Any = None
        """The `RingPair` that carries all frames; None before it is set up. The poller uses it."""
        self._peer_events: list[int] = []
        self._due_kind = 0  # the kind of internal frame that must come next, SETUP or SETUP_DONE; 0 for any
        self._descriptors: list[int] = []  # received with that frame
        self._setup_done = b""  # at the connecting end: the answer of the other end
        # At the accepting end: frames to send after SETUP_DONE. Before that, the other end accepts no frames.
        self._before_setup: list[tuple[bytes, list[memoryview]]] | None = None
        self._setup_lock = threading.RLock()  # a finalizer may send while its thread holds the lock
        self._ring_queue: deque[tuple[Buffer, ...]] = deque()  # frames that wait until the ring has room
        self._count_lock = threading.RLock()  # for queue and `backlog`; a finalizer may send while its thread holds it
        self._long_frames: dict[int, bytearray] = {}
        self._replace_at = FOREVER  # when a new link may have the ring that this one lacks

    # Setting up

    def establish(self, options: LinkOptions, deadline: float | None = None) -> None:
        """Completes the handshake, and sets up a ring and shared memory if both ends can use them.

        Args:
            options: The options of all links of this worker.
            deadline: At the connecting end, until when to wait for the other end's answer, as a time of the monotonic
                clock. None at the accepting end, which does not wait.

        Raises:
            ConnectionError: The other end has closed the link, or this process has no descriptors left.
            TimeoutError: The other end did not answer before `deadline`.
            ProtocolError: The answer cannot be read.
        """
        super().establish(options)
        if self._process is not None and options.segments.is_enabled:
            self._shared = SharedBuffers(options, self._process, self._send_internal, self._send_supply)
            complete = self._shared.complete
            self._assembler = Assembler(options.received.take, options.max_frame_size, complete)
        if deadline is None:
            self._before_setup, self._due_kind = [], SETUP
        else:
            self._set_up(options, deadline)

    def _set_up(self, options: LinkOptions, deadline: float) -> None:
        """At the connecting end: offers the other end a ring and a shared segment, and waits for the answer.

        A shared segment is memory for large buffers. The ring is used if the other end accepts it; otherwise frames go
        through the socket. If this end cannot have a ring or a segment, it does not offer that. `deadline` is a time of
        the monotonic clock.

        Raises:
            ConnectionError: The other end has closed the link, or this process has no descriptors left.
            TimeoutError: The other end did not answer before `deadline`.
            ProtocolError: The answer cannot be read.
        """
        wants_ring = self._shared is not None and options.poller.has_rings
        memory = _new_ring_memory() if wants_ring else -1
        if memory >= 0 and not _has_free_descriptors(2):  # without room for the other end's events the link would fail
            os.close(memory)
            memory = -1
        try:
            descriptor, token = self._shared.offer() if self._shared is not None else (-1, bytes(TOKEN_SIZE))
            setup = _SETUP.pack(SETUP, memory >= 0, RING_BYTES, descriptor, token)
            events = [options.poller.leader_event, options.poller.standby_event]
            self._send_with_descriptors(setup, [memory, *events] if memory >= 0 else [])
            flags, descriptor, token = self._wait_for_setup_done(deadline)
            if flags & _SEGMENT_OPENED and self._shared is not None:
                self._shared.note_opened()
            if flags & _RING_MAPPED:
                self._use_offered_ring(memory, options)
            elif wants_ring and (memory < 0 or flags & _RING_POSSIBLE_LATER):
                self._replace_at = monotonic() + _REPLACE_AFTER_S
            if self._shared is not None and self._shared.try_offer(descriptor, token):
                self._send_internal(bytes((OPENED,)))
        finally:
            if memory >= 0:
                os.close(memory)
            _close_all(self._descriptors)
            self._wake_up = WakeUp()  # frees its descriptor; only this thread has waited on the socket

    def _use_offered_ring(self, memory: int, options: LinkOptions) -> None:
        """At the connecting end: uses the ring that this end has offered and the other end has accepted.

        `memory` is the memfd of the ring; -1 if none was offered. `_descriptors` has the two events (eventfds)
        that the other end has sent.

        Raises:
            ProtocolError: No ring was offered, or the descriptors of the other end are not events.
            ConnectionAbortedError: This process has no descriptors or memory left for the ring.
        """
        if memory < 0 or not all(map(_is_event, self._descriptors)):
            raise ProtocolError(f"{self.address} set up a ring that it was not offered")
        if len(self._descriptors) != 2:
            raise ConnectionAbortedError(f"this process has no descriptors left for a link to {self.address}")
        try:
            self._use_ring(memory, 0, self._descriptors, options)
        except OSError as error:
            raise ConnectionAbortedError(f"a ring to {self.address} cannot be mapped: {error}") from error
        self._descriptors = []

    def _send_with_descriptors(self, internal: bytes, descriptors: list[int]) -> None:
        """Sends `internal`, a frame for the link at the other end, and file descriptors through the socket.

        `descriptors` may be empty. Does not wait: the socket must have room for them. Raises `ConnectionError` if the
        connection is closed or broken, or if there is no room.
        """
        sock = self._open_socket()
        data = WORD.pack(len(internal) | INTERNAL) + internal
        try:
            sent = socket.send_fds(sock, [data], descriptors) if descriptors else sock.send(data)
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionResetError(f"the connection broke: {error}") from error
        if sent != len(data):
            raise ConnectionAbortedError(f"{self.address} does not take what sets the link up")
        self._bytes_out += sent

    def _wait_for_setup_done(self, deadline: float) -> tuple[int, int, bytes]:
        """At the connecting end: waits for SETUP_DONE, the answer to the offer of a ring and a shared segment.

        Returns the flags of the answer, the descriptor of a segment that the other end offers (negative for none), and
        the token with which all segments of the other end begin. Raises `TimeoutError` after the time `deadline` of the
        monotonic clock, `ConnectionError` if the other end has closed the link, and `ProtocolError` if something else
        arrives.
        """
        self._due_kind = SETUP_DONE
        while self._due_kind:
            left = deadline - monotonic()
            if left <= 0:
                raise TimeoutError(errno.ETIMEDOUT, "the other end did not set the link up in time", self.address)
            # Read no byte after it: the poller only notices frames that are still in the socket.
            missing = WORD.size + _SETUP_DONE.size - len(self._rest)
            if self.wait(left) and self._receive_from_socket(max(1, missing)):
                raise ProtocolError(f"{self.address} sent a frame before the link was set up")
        if len(self._setup_done) != _SETUP_DONE.size:
            raise ProtocolError(f"{self.address} sent a SETUP_DONE of {len(self._setup_done)} bytes")
        _, flags, descriptor, token = _SETUP_DONE.unpack(self._setup_done)
        return flags, descriptor, token

    def _receive_from_socket(self, size: int) -> list[Frame]:
        """Receives at most `size` bytes, and file descriptors, while the link is being set up.

        Appends the descriptors to `_descriptors`. Returns complete frames; an empty list if there are none, or nothing
        has arrived.

        Raises:
            ConnectionError: The link is closed or broken.
            ProtocolError: The bytes are not a frame, or there are too many descriptors.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(self._open_socket(), size, 3, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionResetError(f"the connection broke: {error}") from error
        self._descriptors += descriptors
        if len(self._descriptors) > 3:
            raise ProtocolError(f"{self.address} sent descriptors that nobody asked for")
        if not data:
            raise ConnectionResetError("the other end closed the connection")
        self._bytes_in += len(data)
        data, self._rest = self._rest + data, b""
        frames: list[Frame] = []
        self._parse(data, frames)
        return frames

    def _receive_setup(self) -> list[Frame]:
        """At the accepting end: receives and answers SETUP, the offer of a ring. Reads no byte after it. Does not wait.

        Returns an empty list, because SETUP is not for the user of the link. Raises `ProtocolError` if another frame
        comes first, and `ConnectionError` if the link is closed.
        """
        missing = WORD.size + _SETUP.size - len(self._rest)
        if self._receive_from_socket(max(1, missing)):
            raise ProtocolError(f"{self.address} sent a frame before the link was set up")
        return []

    def _accept_setup(self, data: bytes) -> None:
        """At the accepting end: processes SETUP, the offer of a ring and a shared segment. Answers with SETUP_DONE.

        Maps the ring if possible. Then sends the frames that were held back.

        Raises:
            ProtocolError: `data` has not the size of a SETUP frame, or its descriptors are not events.
            ConnectionError: The answer cannot be sent.
        """
        assert self._options is not None
        options, descriptors = self._options, self._descriptors
        self._descriptors = []
        try:
            if len(data) != _SETUP.size:
                raise ProtocolError(f"{self.address} sent a SETUP of {len(data)} bytes")
            _, has_ring, capacity, descriptor, token = _SETUP.unpack(data)
            shared = self._shared
            flags, mine, my_token = 0, -1, bytes(TOKEN_SIZE)
            if shared is not None:
                mine, my_token = shared.offer()
                if shared.try_offer(descriptor, token):
                    flags |= _SEGMENT_OPENED
            events = []
            if has_ring and shared is not None and options.poller.has_rings and capacity == RING_BYTES:
                flags |= self._accept_ring(descriptors, options)
            if flags & _RING_MAPPED:
                events = [options.poller.leader_event, options.poller.standby_event]
            self._send_with_descriptors(_SETUP_DONE.pack(SETUP_DONE, flags, mine, my_token), events)
        finally:
            _close_all(descriptors)
        self._send_held_back()

    def _accept_ring(self, descriptors: list[int], options: LinkOptions) -> int:
        """At the accepting end: maps the ring that was offered, and uses it from now on.

        `descriptors` are the memory of the ring and two events (eventfds). They are fewer if this process has no
        descriptors left. If the ring is used, the events are removed from the list.

        Returns a flag for SETUP_DONE, the answer to the offer. `_RING_MAPPED`: the ring is used.
        `_RING_POSSIBLE_LATER`: this process lacks descriptors or memory. 0: the first descriptor is not a valid ring.
        Raises `ProtocolError` if the last two of three descriptors are not events.
        """
        if len(descriptors) != 3:  # this process has no descriptors left
            return _RING_POSSIBLE_LATER
        memory, *events = descriptors
        if not all(map(_is_event, events)):
            raise ProtocolError(f"{self.address} sent descriptors that are no events")
        if not _is_ring_memory(memory):
            return 0
        try:
            self._use_ring(memory, 1, events, options)
        except OSError:  # no memory is left
            return _RING_POSSIBLE_LATER
        del descriptors[1:]
        return _RING_MAPPED

    def _hold_back(self, frame: bytes, buffers: list[memoryview] | None) -> bool:
        """If the link is not set up yet: stores a frame, with copies of its buffers, and returns True.

        Then `buffers` is emptied, and `_send_held_back` sends the frame later. If the link is set up, changes nothing
        and returns False: the caller must send the frame. The connecting end always gets False.
        """
        with self._setup_lock:
            if self._before_setup is None:
                return False
            copies = [memoryview(bytearray(buffer)) for buffer in buffers or ()]
            if buffers:
                buffers.clear()
            self._before_setup.append((frame, copies))
            return True

    def _send_held_back(self) -> None:
        """Sends the frames that `_hold_back` has kept, if any. Other threads that call `send` wait meanwhile.

        Raises `ConnectionError` if the link is closed or broken.
        """
        with self._setup_lock:
            for frame, buffers in self._before_setup or ():
                self._send_large(frame, buffers, 0.0)  # deadline 0: this thread is the leader, and must not wait
            self._before_setup = None

    def _use_ring(self, memory: int, side: int, events: list[int], options: LinkOptions) -> None:
        """Maps a ring, and sends and receives all frames through it from now on.

        Args:
            memory: The memfd of the ring.
            side: 0 at the connecting end, 1 at the accepting end.
            events: The descriptors of two eventfds of the other end. This end wakes the other end by writing to them.
                The link closes them. If `OSError` is raised, the caller must.
            options: The options of the link.

        Raises:
            OSError: The memory cannot be mapped.
        """
        same_process = self._process == os.getpid()
        ring = rings.RingPair(
            memory, RING_BYTES, side, *events, options.spin_s, self._receive_internal, same_process=same_process
        )
        self._peer_events = events
        self.ring = ring
        self._wake_up = WakeUp()  # frees its descriptor, which a link with a ring does not need
        # Replace the method by that of the ring, which saves every call one Python function.
        self.wait = self.ring.wait  # type: ignore[method-assign]
        options.poller.note_ring(self)

    # Receiving

    def receive(self) -> list[Frame]:
        """Returns the frames that have arrived; an empty list if there are none. Does not wait.

        Raises:
            ConnectionError: The link is closed or broken, or the other end has closed it and all frames were returned
                before.
            ProtocolError: The other end has sent something that is not a frame, sent a frame that is too large, or
                damaged the ring.
        """
        ring = self.ring
        if ring is None:
            return self._receive_setup() if self._due_kind else super().receive()
        try:
            frames: list[Frame] = ring.receive()
        except rings.DamagedError as error:
            raise ProtocolError(f"{self.address} has damaged the ring of this link") from error
        if not frames:
            self._check_hang_up()
        return frames

    def _check_hang_up(self) -> None:
        """Raises an error if the link has ended. Called when `receive` has found no frames in the ring.

        Does nothing if the link is open. Does nothing either if frames have come into the ring since: they must be
        received first.

        Raises:
            ConnectionResetError: The other end has closed the link, or the connection is broken.
            ProtocolError: The other end has sent bytes through the socket, although the link has a ring.
        """
        failure: ConnectionError = ConnectionResetError("the other end closed the connection")
        try:
            if self._open_socket().recv(1):
                failure = ProtocolError(f"{self.address} sent bytes beside its ring")
        except BlockingIOError:
            return
        except OSError as error:
            failure = ConnectionResetError(f"the connection broke: {error}")
        ring = self.ring
        if ring is None or not ring.is_readable():  # else read the ring first: the frames were written before the end
            raise failure

    def _receive_internal(self, data: bytes) -> Frame | None:
        """Processes an internal frame, which is for the link itself and not for its user.

        Returns the frame for the user if the internal frame contains or completes one, else None. Raises
        `ProtocolError` if the internal frame is empty, cannot be read, or is not allowed now.
        """
        if not data:
            raise ProtocolError(f"{self.address} sent an empty internal frame")
        kind = data[0]
        if self._due_kind:
            if kind != self._due_kind:
                raise ProtocolError(f"{self.address} sent an internal frame of kind {kind} before the link was set up")
            self._due_kind = 0
            if kind == SETUP:
                self._accept_setup(data)
            else:
                self._setup_done = data
            return None
        if kind == CHUNK and self._assembler is not None:
            return self._assembler.add_chunk(data)
        if kind == LONG:
            return self._receive_long(data)
        if self._shared is not None and is_shared_kind(data):
            return self._shared.receive(data)
        return super()._receive_internal(data)

    def _receive_long(self, data: bytes) -> Frame | None:
        """Processes a LONG piece, a part of an internal frame that is too long for the ring.

        Adds `data` to the earlier pieces of the same internal frame. With the last piece, processes that frame.

        Returns the frame for the user of the link if the internal frame contains or completes one, else None.

        Raises `ProtocolError` if the piece is too short, the internal frame is too long or cannot be read, or too many
        internal frames are incomplete.
        """
        if len(data) < _LONG.size:
            raise ProtocolError(f"{self.address} sent a header that is too short")
        _, is_last, number = _LONG.unpack_from(data)
        pieces = self._long_frames.setdefault(number, bytearray())
        pieces += data[_LONG.size :]
        if len(pieces) > _MAX_LONG_BYTES or len(self._long_frames) > _MAX_LONG_FRAMES:
            raise ProtocolError(f"{self.address} sent too much of internal frames that do not end")
        if not is_last:
            return None
        del self._long_frames[number]
        if pieces[:1] == bytes((LONG,)):
            raise ProtocolError(f"{self.address} sent an internal frame inside of itself")
        return self._receive_internal(bytes(pieces))

    def wake(self) -> None:
        """Ends `wait` in another thread early; if no thread waits, the next `wait` returns at once. Raises nothing."""
        ring = self.ring
        if ring is not None:
            ring.wake()
        else:
            super().wake()

    def note_hang_up(self) -> None:
        """Ends `wait` in another thread, and makes later waits end at once. Raises nothing.

        To be called when the other end has closed the link. Does nothing if the link has no ring: then the closed
        socket itself ends the wait.
        """
        ring = self.ring
        if ring is not None:
            ring.hang_up()

    # Sending

    def send(self, frame: bytes, buffers: list[memoryview] | None = None, deadline: float = FOREVER) -> None:
        """Sends one frame through the ring, in shared memory, or through the socket. Queues it if there is no room.

        Args:
            frame: The bytes of the frame; may be empty.
            buffers: The buffers of the frame; None or an empty list for none. The list is emptied.
            deadline: Until when to wait while a large frame is sent, as a time of the monotonic clock. After that the
                rest is copied and queued, and no error is raised.

        Raises:
            ConnectionError: The link is closed or broken.
        """
        if self._before_setup is not None and self._hold_back(frame, buffers):
            return
        ring = self.ring  # read after `_hold_back`, during which it may have been set up
        if ring is None or buffers or len(frame) > _RING_WHOLE_MAX_BYTES:
            self._send_large(frame, [] if buffers is None else buffers, deadline)
        elif self._ring_queue or not ring.send(frame):
            self._queue_for_ring((frame,))

    def send_kept(self, frame: bytes, buffers: list[memoryview], deadline: float = FOREVER) -> list[memoryview]:
        """Sends one frame, and returns copies of its buffers, so that the frame can be sent again on another link.

        Queues the frame if there is no room.

        Args:
            frame: The bytes of the frame; may be empty.
            buffers: The buffers of the frame; an empty list for none. The list may be empty afterwards.
            deadline: Until when to wait while a large frame is sent, as a time of the monotonic clock. After that the
                rest is copied and queued, and no error is raised.

        Returns:
            A copy of each buffer; an empty list for no buffers. A copy does not change when the program changes the
            original.

        Raises:
            ConnectionError: The link is closed or broken.
        """
        kept = self._shared.send_kept(frame, buffers) if self._shared is not None else None
        return kept if kept is not None else super().send_kept(frame, buffers, deadline)

    def _send_large(self, frame: bytes, buffers: list[memoryview], deadline: float) -> None:
        """Sends a frame in shared memory if possible, else through the ring or the socket, in chunks if it is large.

        For frames with buffers, frames that are too large for the ring, and all frames of links without a ring. Empties
        `buffers`. `deadline`, a time of the monotonic clock, limits the wait while chunks are sent. After that, the
        rest is queued. Raises `ConnectionError` if the link is closed or broken.
        """
        if self._shared is not None and self._shared.send(frame, buffers):
            return
        if self.ring is None:
            super().send(frame, buffers, deadline)
            return
        total = len(frame) + sum([buffer.nbytes for buffer in buffers])
        if total + 8 * len(buffers) <= _RING_WHOLE_MAX_BYTES - 64:
            self._send_internal(pack_inline(frame, buffers), b"".join((frame, *buffers)))
        else:
            self._send_chunks(frame, buffers, deadline)
        buffers.clear()

    def _send_internal(self, *parts: Buffer) -> None:
        """Sends one internal frame, which is for the link at the other end. It consists of `parts` in this order.

        Queues it if there is no room. Raises `ConnectionError` if the link is closed or broken.
        """
        ring = self.ring
        if ring is None:
            super()._send_internal(*parts)
        elif sum([len(part) for part in parts]) > _RING_WHOLE_MAX_BYTES:  # a table of very many buffers
            # In one step: frames of other threads may not come in between, as the other end has a limit for them.
            self._queue_for_ring(*[(None, piece) for piece in self._long_pieces(b"".join(parts))])
        elif self._ring_queue or not ring.send_internal(*parts):
            self._queue_for_ring((None, b"".join(parts)))

    def _long_pieces(self, data: bytes) -> list[bytes]:
        """Splits an internal frame into LONG pieces: parts with a header each, which fit into the ring.

        Returns `[data]` if `data` fits as it is.
        """
        if len(data) <= _RING_WHOLE_MAX_BYTES:
            return [data]
        number, step = next(self._numbers), _RING_WHOLE_MAX_BYTES - _LONG.size
        return [
            _LONG.pack(LONG, at + step >= len(data), number) + data[at : at + step] for at in range(0, len(data), step)
        ]

    def _queue_for_ring(self, *entries: tuple[Any, ...]) -> None:
        """Queues frames in one step, and then moves as many as possible into the ring.

        Each entry is a tuple: `(frame,)`, or `(None, data)` for an internal frame. Raises `ConnectionAbortedError` if
        the link is closed.
        """
        if self._socket is None:
            raise ConnectionAbortedError(f"the link to {self.address} is closed")
        with self._count_lock:
            self._ring_queue.extend(entries)
            self.backlog += sum([len(entry[-1]) for entry in entries])
        self.flush()

    def flush(self) -> None:
        """Sends queued frames as far as that is possible without waiting. Does nothing if none are queued.

        Raises:
            ConnectionError: The link is closed or broken.
        """
        if self.ring is None:
            super().flush()
            return
        # Check again after the lock is released, so that a frame that was queued meanwhile is not left.
        while self._ring_queue and self._try_lock():
            try:
                has_room = self._flush_ring()
            finally:
                self._unlock()
            if not has_room:
                return

    def _flush_ring(self) -> bool:
        """Moves queued frames into the ring, and returns True if none is left. Does not wait.

        Returns False if the ring is full or closed. If it is full, the poller calls `flush` later.
        """
        assert self._options is not None
        queue = self._ring_queue
        while queue:
            ring, entry = self.ring, queue[0]
            if ring is None:
                return False
            is_sent = ring.send_internal(entry[1]) if entry[0] is None else ring.send(entry[0])
            if is_sent:
                with self._count_lock:
                    queue.popleft()
                    self.backlog -= len(entry[-1])
            else:
                if not self._is_awaiting_room:
                    self._is_awaiting_room = True
                    self._options.poller.await_room(self, True)
                if not ring.ask_for_room():
                    return False
        self.backlog = 0
        if self._is_awaiting_room:
            self._is_awaiting_room = False
            self._options.poller.await_room(self, False)
        return True

    def _max_chunk_bytes(self) -> int:
        """Returns the most bytes of a chunk, a piece of a large frame, without its header."""
        return super()._max_chunk_bytes() if self.ring is None else _RING_WHOLE_MAX_BYTES - CHUNK_HEADER_SIZE

    def _send_chunk(self, header: bytes, chunk: memoryview, deadline: float) -> None:
        """Sends a chunk, a piece of a large frame, with its header. Waits while there is no room for it.

        At the time `deadline` of the monotonic clock, the bytes that were not accepted are copied and queued. They are
        queued at once if this thread must not wait. Raises `ConnectionError` if the link is closed or broken.
        """
        ring = self.ring
        if ring is None:
            super()._send_chunk(header, chunk, deadline)
            return
        if not self._ring_queue and ring.send_internal(header, chunk):
            return
        if not self._is_sending() and self._wait_and_send_chunk(header, chunk, deadline):
            return
        self._queue_for_ring((None, header + bytes(chunk)))

    def _send_contiguous(
        self, announcement: bytes, header: bytes, frame: Buffer, buffers: Sequence[memoryview]
    ) -> None:
        """Queues a large frame in one step, and sends as much of it as there is room for. Does not wait.

        The large frame is `frame` and `buffers`, which are sent in chunks. `announcement` is the internal frame that
        goes before the chunks. `header` is the header of each chunk. If several threads call this method, their chunks
        are not mixed. Raises `ConnectionError` if the link is closed or broken.
        """
        if self.ring is None:
            super()._send_contiguous(announcement, header, frame, buffers)
            return
        pieces = self._long_pieces(announcement)
        pieces += [header + chunk for chunk in chunks_of(frame, buffers, self._max_chunk_bytes())]
        self._queue_for_ring(*[(None, piece) for piece in pieces])

    def _wait_and_send_chunk(self, header: bytes, chunk: memoryview, deadline: float) -> bool:
        """Waits for room in the ring, sends `header` and `chunk`, and returns True.

        Returns False, and sends nothing, after the time `deadline` of the monotonic clock. Returns False at once if
        this thread must not wait, because it reads the links of this worker or runs an event loop.

        Raises:
            ConnectionAbortedError: The link was closed.
        """
        if must_not_sleep():
            return False
        try:
            with asleep():
                while monotonic() < deadline:
                    ring = self.ring
                    if ring is None:
                        raise ConnectionAbortedError(f"the link to {self.address} is closed")
                    self.flush()
                    if not self._ring_queue and ring.send_internal(header, chunk):
                        return True
                    ring.wait_for_room(len(header) + chunk.nbytes, 0.01)
        except UsageError:  # this is the leader of an executor, which must not wait while it reads
            pass
        return False

    def _send_supply(self, segment: int, buffers: list[memoryview]) -> None:
        """Sends the buffers of a shared segment through the link, because the other end could not open the segment.

        `segment` is the number of the segment. Does not wait: the buffers may be queued. Raises `ConnectionError` if
        the link is closed or broken.
        """
        number = next(self._numbers)
        self._send_contiguous(pack_supply(number, segment, buffers), pack_chunk_header(number), b"", buffers)

    def unsent_bytes(self) -> int:
        """Returns 0 if `close` would lose nothing; otherwise about the number of bytes that it would lose, at least 1.

        Counted are queued bytes, 1 for each frame that waits until the link is set up, and 1 if the other end has yet
        to open a shared segment.
        """
        unopened = self._shared is not None and self._shared.has_unopened()
        return self.backlog + len(self._before_setup or ()) + unopened

    def counts(self) -> LinkCounts:
        """Returns the numbers of bytes that were received and sent so far, also after `close`.

        They include the bytes that went through the socket, through the ring, and in shared memory.
        """
        bytes_in, bytes_out = self._bytes_in, self._bytes_out
        ring, shared = self.ring, self._shared
        if ring is not None:
            bytes_in, bytes_out = bytes_in + ring.bytes_in, bytes_out + ring.bytes_out
        if shared is None:
            return LinkCounts(bytes_in, bytes_out)
        bytes_in, bytes_out = bytes_in + shared.bytes_in, bytes_out + shared.bytes_out
        return LinkCounts(bytes_in, bytes_out, shared.bytes_in, shared.bytes_out, shared.bytes_returned)

    # The end

    def should_be_replaced(self) -> bool:
        """Returns whether to replace this link by a new one, because this one has no ring and a new one may get it.

        True only if all of this holds: this is the connecting end; the link got no ring because one of the two
        processes was short of descriptors or memory; some seconds have passed since; this process has enough free
        descriptors for a new link.
        """
        return monotonic() >= self._replace_at and _has_free_descriptors(_DESCRIPTORS_OF_LINK)

    def sweep(self, before: float) -> None:
        """Frees shared memory that was last used before `before`, a time of the monotonic clock. Raises nothing."""
        if self._shared is not None:
            self._shared.sweep(before)

    def prepare_fork(self) -> None:
        """Must be called before this process forks. Makes sure that buffers that the child inherits do not change.

        Such buffers are in shared memory. From now on neither end reuses that memory for other frames.
        """
        if self._shared is not None:
            self._shared.prepare_fork()

    def close(self) -> None:
        """Closes the link in both directions, drops queued frames, and frees shared memory. May be called twice.

        Buffers that were received stay valid.
        """
        super().close()
        self._release_ring()
        if self._shared is not None:
            self._shared.close()

    def abandon(self) -> None:
        """Closes the descriptors in a forked child. The link stays open in the parent. Raises nothing."""
        super().abandon()
        self._setup_lock = threading.RLock()  # a thread of the parent may have held the lock
        self._release_ring()
        if self._shared is not None:
            self._shared.abandon()

    def _release_ring(self) -> None:
        """Closes the ring and the descriptors of the other end's events, and drops queued frames.

        Does nothing if that was done before.
        """
        with self._setup_lock:  # another thread may be in `close`
            ring, self.ring = self.ring, None
        if ring is not None:
            del self.wait  # the method of the ring
            counts = ring.bytes_in, ring.bytes_out
            self._bytes_in += counts[0]
            self._bytes_out += counts[1]
            ring.close()
        self._ring_queue.clear()
        self.backlog = 0
        self._before_setup = None
        _close_all(self._peer_events)
        _close_all(self._descriptors)


def _new_ring_memory() -> int:
    """Returns a memfd for the rings of a link, one for each direction; -1 if the system cannot create one.

    Its size is sealed: nobody can change it.
    """
    try:
        memory = os.memfd_create("farcall-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return -1
    try:
        os.ftruncate(memory, rings.mapping_size(RING_BYTES))
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(memory)
        return -1
    return memory


def _has_free_descriptors(count: int) -> bool:
    """Returns whether this process can open `count` more file descriptors. Finds out by opening them for a moment."""
    taken: list[int] = []
    try:
        while len(taken) < count:
            taken += os.pipe()
    except OSError:
        return False
    finally:
        _close_all(taken)
    return True


def _is_ring_memory(descriptor: int) -> bool:
    """Returns whether a descriptor is a memfd with the same size, seals and access as those of `_new_ring_memory`.

    Without the seals, the other end could shrink the memory, and this process would die of SIGBUS. False if the
    descriptor is not a memfd or not open.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        size = os.fstat(descriptor).st_size
    except OSError:
        return False
    is_sealed = seals & (_SEALS | _WRITE_SEALS) == _SEALS
    return is_sealed and mode == os.O_RDWR and size == rings.mapping_size(RING_BYTES)


def _is_event(descriptor: int) -> bool:
    """Returns whether a descriptor is an eventfd. Writing to anything else could block this process.

    Raises `OSError` if the descriptor is not open.
    """
    return os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[eventfd]"


def _close_all(descriptors: list[int]) -> None:
    """Closes the descriptors, and empties the list."""
    while descriptors:
        try:
            descriptor = descriptors.pop()
        except IndexError:  # another thread closes them as well
            return
        os.close(descriptor)


class UnixTransport:
    """The transport with the scheme `unix`: Unix sockets and shared memory, for workers of one user on one host.

    The constructor creates no directory.

    Args:
        roots: Directories in which `listen` may create the directory of the sockets. It uses the first that works, and
            raises `OSError` if there is none. None stands for the system's temporary directory, and then `/tmp`.
    """

    scheme = "unix"

    def __init__(self, roots: Iterable[str] | None = None) -> None:
        self._roots = None if roots is None else tuple(roots)

    def listen(self, host: str | None, handshake_limit: int) -> UnixListener:
        """Returns a listener with a new path, in a directory that only this user can access.

        Also removes sockets of this user whose processes have ended.

        Args:
            host: Ignored.
            handshake_limit: The most bytes of a frame that an accepted link receives before it is established.

        Raises:
            OSError: No directory can be written to, or all paths are too long for a socket.
        """
        roots = (tempfile.gettempdir(), "/tmp") if self._roots is None else self._roots
        for root in roots:
            _remove_dead_sockets(_shared_directory(root))
            for directory in glob.glob(f"{glob.escape(_shared_directory(root))}-*"):
                _remove_dead_sockets(directory)
                if _is_private(directory) and _age_s(directory) > _GRACE_S:
                    _remove(None, directory)  # fails if it has sockets in use
        directory, is_ours_alone = _choose_directory(roots)
        path = os.path.join(directory, f"{secrets.token_hex(8)}.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:  # closed unless the listener has taken it over
            try:
                sock.bind(path + ".new")
                os.chmod(path + ".new", 0o600)
                sock.listen(BACKLOG)
                os.rename(path + ".new", path)
                return UnixListener(sock, path, directory if is_ours_alone else None, handshake_limit)
            except OSError:
                _remove(path + ".new", directory if is_ours_alone else None)
                raise

    def connect(self, address: str, timeout: float, handshake_limit: int) -> UnixLink:
        """Connects to a listener, and returns the link, which is in its handshake.

        Args:
            address: The address of the listener, `unix:/path`.
            timeout: How many seconds to wait if the queue of the listener is full; 0 to not wait.
            handshake_limit: The most bytes of a frame that the link receives before it is established.

        Raises:
            OSError: The address is not valid, nothing listens there, or the listener belongs to another user.
            TimeoutError: The timeout has expired.
        """
        path = _parse_address(address)
        deadline = monotonic() + timeout
        pause = 0.0005
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:  # closed unless the link has taken it over
            sock.setblocking(False)
            while True:
                try:
                    sock.connect(path)
                    process = _checked_process(sock, address)
                    return UnixLink(_tuned(sock), address, handshake_limit, process)
                except BlockingIOError:
                    left = deadline - monotonic()
                except OSError as error:
                    raise OSError(error.errno, error.strerror, address) from error
                if left <= 0:
                    raise TimeoutError(errno.ETIMEDOUT, f"not accepted within {timeout:g} s", address)
                time.sleep(min(pause, left))  # the queue of the listener is full, and poll cannot wait for that
                pause = min(pause * 2, 0.02)


class UnixListener:
    """A listening Unix socket with a path in the file system. `accept` returns the links of connecting workers.

    Args:
        sock: The socket. The listener takes it over and closes it.
        path: The path of the socket. `close` removes it.
        directory: A directory that `close` removes if it is empty; None to remove none.
        handshake_limit: The most bytes of a frame that an accepted link receives before it is established.
    """

    def __init__(self, sock: socket.socket, path: str, directory: str | None, handshake_limit: int) -> None:
        self.address = f"unix:{path}"
        self._socket: OwnSocket | None = OwnSocket(sock)
        self._path = path
        self._directory = directory
        self._handshake_limit = handshake_limit
        self._refused_users: set[int] = set()

    def fileno(self) -> int:
        """Returns a file descriptor that is readable when a link can be accepted.

        Raises:
            OSError: The listener is closed.
        """
        return self._open_socket().fileno()

    def _open_socket(self) -> OwnSocket:
        """Returns the listening socket. Raises `OSError` if the listener is closed."""
        if self._socket is None:
            raise OSError(errno.EBADF, f"the listener at {self.address} is closed")
        return self._socket

    def accept(self) -> UnixLink | None:
        """Returns the next link, which is in its handshake. Does not wait.

        Returns:
            The link; None if nobody has connected, or if the connection is of another user. Such a connection is
            closed.

        Raises:
            OSError: The listener is closed, or the process has no file descriptors left.
        """
        try:
            sock, _ = self._open_socket().accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        process, user, _ = _peer_credentials(sock)
        if user == os.geteuid():
            # The connecting end has no path, so messages show its process id.
            return UnixLink(_tuned(sock), f"unix:process {process}", self._handshake_limit, process or None)
        sock.close()
        if user not in self._refused_users and len(self._refused_users) < _MAX_REMEMBERED_USERS:
            self._refused_users.add(user)
            _log.warning("a connection of user %d to %s was closed: it is for one user only", user, self.address)
        return None

    def close(self) -> None:
        """Stops listening, and removes the socket's path. Links that were accepted stay open. May be called twice."""
        sock, self._socket = self._socket, None
        if sock is not None:
            _remove(self._path, self._directory)
            sock.release()

    def abandon(self) -> None:
        """Closes the descriptor in a forked child. The parent continues to listen. Raises nothing."""
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.abandon()


def private_directory() -> str | None:
    """Returns the path of this user's directory in the system's temporary directory. Creates it if necessary.

    Returns:
        The path; None if the directory cannot be created, or if other users could access it.
    """
    directory = _shared_directory(tempfile.gettempdir())
    try:
        os.mkdir(directory, 0o700)
    except OSError:
        pass  # it exists, or cannot be created: `_is_private` decides
    return directory if _is_private(directory) else None


def _parse_address(address: str) -> bytes:
    """Returns the path in an address `unix:/path` as bytes. Raises `OSError` if the address is not valid."""
    scheme, _, path = address.partition(":")
    try:
        encoded = os.fsencode(path)
    except UnicodeError:
        encoded = b""
    if scheme != "unix" or not encoded.startswith(b"/") or b"\0" in encoded or len(encoded) > _MAX_PATH_BYTES:
        raise OSError(errno.EINVAL, "no unix address; it looks like unix:/directory/name.sock", address)
    return encoded


def _peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Returns the process id, the user id and the group id of the process at the other end.

    The process id is 0 if the kernel does not know it. Raises `OSError` if the socket is closed.
    """
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, group = struct.unpack("3i", found)
    return process, user, group


def _checked_process(sock: socket.socket, address: str) -> int | None:
    """Returns the process id of the listener to which `sock` is connected; None if the kernel does not know it.

    Raises `PermissionError`, whose text contains `address`, if the process belongs to another user.
    """
    process, user, _ = _peer_credentials(sock)
    if user != os.geteuid():
        message = f"user {user} listens there, not {os.geteuid()}; workers of several users reach each other by tcp"
        raise PermissionError(errno.EACCES, message, address)
    return process or None


def _tuned(sock: socket.socket) -> socket.socket:
    """Gives a socket a larger send buffer, and returns the socket."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return sock


def _shared_directory(root: str) -> str:
    """Returns the path of the directory for all sockets of this user, which is in `root`. Does not create it."""
    return os.path.join(root, f"farcall-{os.geteuid()}")


def _choose_directory(roots: Iterable[str]) -> tuple[str, bool]:
    """Returns a directory for a new socket, in the first of `roots` that works. Only this user can access it.

    Creates the directory if necessary. Returns its path and a flag. The flag is True if the directory was created for
    this socket alone, and False if all sockets of this user share it. Raises `OSError` if `roots` is empty, no
    directory is writable, or all paths are too long for a socket.
    """
    refused = []
    for root in roots:
        shared = _shared_directory(root)
        # The name of a directory for one listener has a dash and 8 more characters.
        longest = os.path.join(f"{shared}-{'x' * 8}", f"{'x' * 16}.sock.new")
        if len(os.fsencode(longest)) > _MAX_PATH_BYTES:
            refused.append(f"{root} is too long a path for a socket")
            continue
        try:
            os.mkdir(shared, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            refused.append(f"{root}: {error.strerror}")
            continue
        if _is_private(shared):
            return shared, False
        try:
            return tempfile.mkdtemp(prefix=f"{os.path.basename(shared)}-", dir=root), True
        except OSError as error:
            refused.append(f"{root}: {error.strerror}")
    message = f"no directory for unix sockets ({'; '.join(refused)}). Set TMPDIR to a short path that you may write to"
    raise OSError(errno.EACCES, message)


def _is_private(directory: str) -> bool:
    """Returns whether a path is a directory of this user that nobody else can access; False if it does not exist."""
    try:
        found = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077


def _remove_dead_sockets(directory: str) -> None:
    """Removes the sockets in a directory on which no process listens any more.

    Does nothing if the directory does not exist or is not private. Ignores errors.
    """
    if not _is_private(directory):
        return
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        path = os.path.join(directory, name)
        if name.endswith((".sock", ".sock.new")) and _is_dead(path):
            _remove(path, None)


def _is_dead(path: str) -> bool:
    """Returns whether no process listens on the socket at `path`.

    False if the path does not exist. Also False for a path that ends in `.new` and is less than a minute old: its
    process may be about to listen.
    """
    if path.endswith(".new") and _age_s(path) < _GRACE_S:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(path)
        except OSError as error:
            return error.errno == errno.ECONNREFUSED
    return False


def _age_s(path: str) -> float:
    """Returns how many seconds ago a file or directory was changed; 0 if it does not exist."""
    try:
        return time.time() - os.lstat(path).st_mtime
    except OSError:
        return 0.0  # another process has removed it


def _remove(file: str | None, directory: str | None) -> None:
    """Removes `file`, and then `directory` if it is empty. None stands for nothing to remove. Ignores errors."""
    try:
        if file is not None:
            os.unlink(file)
    except OSError:
        pass  # another process has removed it
    try:
        if directory is not None:
            os.rmdir(directory)
    except OSError:
        pass  # it is not empty
