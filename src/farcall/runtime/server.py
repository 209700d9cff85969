"""A connection from another worker: its handshake, its requests, our replies.

Rules
- The connection begins with the handshake, in which the other end proves that it knows the group's secret
  (`security.proof`). Until then it is a *stranger*: its frames are used for the handshake only, and have a size limit.
- Nothing is unpickled here. The thread that runs the function unpickles its arguments.
- A frame that cannot be read closes the connection with a line in the log, and has no other effect. The log has one
  line for each stranger, however often it connects.
- The leader of the executor reads the connection, so nothing here blocks.
- The references in a frame are counted here, before anything else in the frame is used. For a frame with very many
  references, a job does that: another thread can take the lead meanwhile, and read other connections.
- A call is in `calls` from when it is read until it is answered. Only the thread that removes it answers it: the thread
  that ran its function, or the one that read its cancellation. So each call gets one reply, and one whose result
  nobody wants costs no pickling.
- The end of the connection cancels its calls: their caller has given them up with it. Remote calls are not in `calls`:
  their values may be wanted by others, and by the same worker when it has connected again.
- A closed connection is not part of a reference cycle. Strangers can connect at any rate, and the memory of their
  connections must be freed without waiting for the garbage collector.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol

from farcall.errors import ProtocolError, SerializationError
from farcall.protocol.fields import quoted
from farcall.protocol.frames import (
    CALL,
    CANCEL,
    CONTROL,
    GOSSIP,
    HANDLE_SIZE,
    HAS_ANNOTATIONS,
    HAS_REFERENCES,
    HEADER_SIZE,
    KEEP,
    REFERENCES,
    SECTION_SIZE,
    pack_cancelled,
    unpack_annotations,
    unpack_handle,
    unpack_header,
    unpack_references,
)
from farcall.protocol.handshake import Hello, Purpose, Refused, Welcome, encode, unpack
from farcall.protocol.ids import RRefId, Worker, WorkerInfo
from farcall.protocol.membership_messages import Member
from farcall.runtime.executor import Task
from farcall.runtime.handles import check_number
from farcall.runtime.invocation import FEW_HANDLES, Invocation
from farcall.runtime.parts import WorkerParts
from farcall.security import EncryptionRequired, Limits, ServerHandshake, refusal_for, stranger_kind
from farcall.serialization import callable_name
from farcall.transports.base import FOREVER, Link

if TYPE_CHECKING:
    from farcall.runtime.handles import Handle

logger = logging.getLogger("farcall")

MAX_COLLECTED_BYTES: Final = 4096
"""Larger replies are sent at once, not collected."""
MANY_REFERENCES: Final = 700
"""The references of a frame with more than this are counted in a job."""


class SizeLimits(Protocol):
    """The largest frames that a worker accepts: the options `max_head_size` and `max_message_size`."""

    @property
    def max_head_size(self) -> int:
        """The most bytes of a head: a frame without its payload and buffers. At least 1024."""

    @property
    def max_message_size(self) -> int:
        """The most bytes of a whole frame with its buffers. At least 65536."""


class Admission(Protocol):
    """Decides which workers may connect, and is told what their connections receive and when they end.

    Attributes:
        me: This worker.
    """

    me: Member

    def refusal(self, hello: Hello) -> Refused | None:
        """Returns why the sender of `hello`, the first message of a handshake, may not connect; None if it may."""

    def admitted(self, connection: ServerConnection, hello: Hello) -> None:
        """Called when the handshake of a worker has succeeded. `hello` is the first message of that handshake."""

    def connection_closed(self, connection: ServerConnection) -> None:
        """Called when a connection has ended, whether its handshake had succeeded or not."""

    def receive_gossip(self, sender: Worker, payload: bytes) -> None:
        """Processes a message about the membership.

        Args:
            sender: The number of the worker that sent the message.
            payload: The encoded message.

        Raises:
            ProtocolError: `payload` cannot be decoded.
        """


class ServerConnection:
    """One connection from another worker, or from a stranger: an end that has not proved that it knows the secret.

    It takes over a link that was accepted, and reads it at once. The first frames are the handshake.

    Args:
        parts: The objects that the connections and calls of this worker share, such as its executor.
        link: The link. The connection closes it at its end.
        address: The address of this worker to which the other end has connected.
        admission: Decides which workers may connect.
        on_closed: Called once with this connection, when the connection has ended.
    """

    def __init__(
        self,
        parts: WorkerParts,
        link: Link,
        address: str,
        admission: Admission,
        on_closed: Callable[[ServerConnection], None],
    ) -> None:
        self.link = link
        self._address = address
        self._parts = parts
        self._poller = parts.poller
        self._admission = admission
        self._credentials = parts.credentials
        self._link_options = parts.link_options
        self._limits = parts.limits
        self._peer_limits = (0, 0)
        self._on_closed = on_closed
        self._handshake: ServerHandshake | None = None
        self._peer: Hello | None = None
        self.number: Worker = -1
        """The number of the worker at the other end; -1 before the handshake is done."""
        self.calls: dict[int, Invocation] = {}
        """The calls that are not answered, by id, without remote calls."""
        self.calls_served = 0
        """The number of calls that have arrived, without those made by `remote`."""
        self.calls_expired = 0
        """The number of calls that were not run, because their deadline had passed."""
        self.calls_cancelled = 0
        """The number of calls that were cancelled before they were answered."""
        self._is_closed = False
        self._can_append: bool = getattr(link, "can_append", False)
        parts.poller.watch(link, self._read)

    # Reading

    def _read(self) -> None:
        """Processes the frames that have arrived, if any. Closes the connection after a wrong frame. Raises nothing.

        Called by the leader of the executor, the thread that waits for frames on the links of this worker.
        """
        try:
            frames = self.link.receive()
            frames.reverse()
            while frames:
                frame, buffers = frames.pop()  # popped: the list must not keep the buffers
                if self._peer is None:
                    self._receive_handshake(frame)
                    continue
                kind, flags, callee_size, milliseconds, call_id = unpack_header(frame)
                begin = HEADER_SIZE + callee_size
                if begin > len(frame):
                    raise ProtocolError("a frame came that is shorter than the name of its callee")
                if kind != CALL or flags:
                    self._receive(kind, flags, callee_size, call_id, frame, buffers)
                    continue
                self.calls_served += 1
                callee = frame[HEADER_SIZE:begin]
                if type(callee) is not bytes:  # a memoryview of a large frame
                    callee = bytes(callee)
                parts = self._parts
                invocation = Invocation(
                    parts,
                    self,
                    call_id,
                    callee,
                    frame[begin:],
                    buffers,
                    monotonic() + milliseconds * 1e-3 if milliseconds else FOREVER,
                )
                self.calls[call_id] = invocation
                parts.executor.ready.append(invocation)
                del frame, buffers, invocation
        except Exception as error:
            self._reading_failed(error)

    def _reading_failed(self, error: Exception) -> None:
        """Closes the connection after frames could not be read, and logs why."""
        if isinstance(error, ProtocolError):
            if self._peer is None:
                self._turn_away(error)
            else:
                self.refuse(error)
        elif isinstance(error, ConnectionError):
            if self._peer is None:
                self.dismiss("left", f"left before it had proved that it knows the secret ({error})")
            else:
                self.close()
        elif isinstance(error, struct.error):
            self.refuse(ProtocolError("a frame came that is too short"))
        elif isinstance(error, MemoryError):
            self.refuse(error)
        else:
            # No error, such as a RecursionError, may leave the connection open when frames were read only in part.
            logger.exception("worker %r: connection from %s closed: what it sent failed", self._me(), self)
            self.close()

    def _receive(
        self,
        kind: int,
        flags: int,
        callee_size: int,
        call_id: int,
        frame: bytes,
        buffers: Sequence[memoryview],
    ) -> None:
        """Processes one frame. `_read` itself processes plain calls, which have no references and no annotations.

        `kind`, `flags`, `callee_size` and `call_id` are from the header of `frame` (`protocol.frames`). Raises
        `ProtocolError` if the frame cannot be read, or is of a kind that a caller may not send.
        """
        if kind in (CALL, KEEP):
            self._receive_request(kind, flags, callee_size, call_id, frame, buffers)
        elif kind == CANCEL:
            self._cancel(call_id)
        elif kind == CONTROL:
            self._parts.store.receive_control(self.number, frame[HEADER_SIZE:])
        elif kind == GOSSIP:
            self._admission.receive_gossip(self.number, bytes(frame[HEADER_SIZE:]))
        elif kind == REFERENCES:
            number, carried, _ = unpack_references(frame, HEADER_SIZE)
            self._parts.store.receive_references(self.number, number, carried)
        else:
            raise ProtocolError(f"a frame of kind {kind} came where only requests may")

    def _cancel(self, call_id: int) -> None:
        """Cancels a call, and answers it. Does nothing if the call is not known or was answered."""
        invocation = self.calls.pop(call_id, None)
        if invocation is not None:
            self.calls_cancelled += 1
            has_started = invocation.cancel_call()
            self.reply(pack_cancelled(call_id, has_started), None)

    def _receive_request(
        self,
        kind: int,
        flags: int,
        callee_size: int,
        call_id: int,
        frame: bytes,
        buffers: Sequence[memoryview],
    ) -> None:
        """Queues a request that was made by `remote`, or has references or annotations.

        A request with more than `MANY_REFERENCES` references is read later, by a job of the executor. `kind`, `flags`,
        `callee_size` and `call_id` are from the header of `frame`. Raises `ProtocolError` if the request cannot be
        read.
        """
        at = HEADER_SIZE + callee_size
        callee = bytes(frame[HEADER_SIZE:at])
        take = partial(self._take_request, kind, flags, call_id, callee, at, frame, buffers)
        references_at = at + (HANDLE_SIZE if kind == KEEP else 0)
        if flags & HAS_REFERENCES and len(frame) >= references_at + SECTION_SIZE:
            count = int.from_bytes(frame[references_at + 8 : references_at + 10], "little")
            if count > MANY_REFERENCES:
                self._parts.executor.ready.append(Task(partial(self._take_and_run, take)))
                return
        invocation = take()
        if invocation is not None:
            self._parts.executor.ready.append(invocation)

    def _take_and_run(self, take: Callable[[], Invocation | None]) -> None:
        """Called in the executor: calls `take`, which reads a request, and runs the invocation that it returns.

        Does nothing else if `take` returns None. Closes the connection if `take` raises, because the request cannot be
        read.
        """
        try:
            invocation = take()
        except (ProtocolError, MemoryError) as error:
            self.refuse(error)
            return
        if invocation is not None:
            invocation.run()

    def _take_request(
        self,
        kind: int,
        flags: int,
        call_id: int,
        callee: bytes,
        at: int,
        frame: bytes,
        buffers: Sequence[memoryview],
    ) -> Invocation | None:
        """Reads a request, and returns its invocation; None if the same request had arrived before.

        Notes in the reference store that this worker now holds the references in the request. `kind`, `flags` and
        `call_id` are from the header of `frame`. `callee` is the encoded function or method, and `at` is the offset in
        `frame` after it. `buffers` are the buffers of the request. Raises `ProtocolError` if the request cannot be
        read, or its head is too large.
        """
        store = self._parts.store
        value, annotations = None, None
        reference: RRefId | None = None
        handles: Sequence[Handle] = ()
        carried: Sequence[Any] = ()
        number = 0
        if kind == KEEP:
            if not flags & HAS_REFERENCES:
                raise ProtocolError("a remote call came without a number")
            reference, fork = unpack_handle(frame, at)
            at += HANDLE_SIZE
        if flags & HAS_REFERENCES:
            number, carried, at = unpack_references(frame, at)
        if at > self._limits[0]:
            raise ProtocolError(f"a request has a head of {at:,} bytes; at most {self._limits[0]:,} are allowed")
        if flags & HAS_ANNOTATIONS:
            annotations, at = unpack_annotations(frame, at)
        if reference is not None:
            taken = store.accept_create(self.number, number, reference, fork, carried)
            if not call_id:
                store.owe_acknowledgement(self.number)
            if taken is None:
                return None
            value, handles = taken
        else:
            self.calls_served += 1
            if flags & HAS_REFERENCES:
                received = store.receive_references(self.number, number, carried)
                if received is None:
                    return None
                handles = received
        milliseconds = unpack_header(frame)[3]
        deadline = monotonic() + milliseconds * 1e-3 if milliseconds else FOREVER
        invocation = Invocation(self._parts, self, call_id, callee, frame[at:], buffers, deadline)
        invocation.attach(handles, annotations, value, reference)
        if kind == CALL:
            self.calls[call_id] = invocation
        return invocation

    # The handshake

    def _receive_handshake(self, frame: bytes) -> None:
        """Processes one message of the handshake, and answers it. The last message admits the other end.

        Raises `ProtocolError` if the message is wrong, or the other end may not connect.
        """
        handshake, link = self._handshake, self.link
        if handshake is None:
            # Only when the first message has arrived, because an encrypted link has no `binding` before.
            handshake = self._handshake = self._credentials.server_handshake(
                Purpose.CALLS, self._address, link.binding, link.network
            )
        body = bytes(frame)
        link.send(encode(handshake.take(unpack(body, link.address), body)))
        if not handshake.is_proven:
            return
        hello = handshake.hello
        assert hello is not None
        refusal = self._admission.refusal(hello)
        if refusal is not None:
            raise _NotAdmittedError(refusal)
        me = self._admission.me
        link.send(encode(Welcome(me.name, me.rank, me.number, self._limits)))
        self._handshake = None
        if all(hello.limits):
            self._peer_limits = hello.limits
        self._peer, self.number = hello, hello.number
        link.establish(self._link_options)
        self._admission.admitted(self, hello)

    def _turn_away(self, error: ProtocolError) -> None:
        """Tells the other end why it is refused, in a form that all versions understand, and closes the connection."""
        refusal = error.refusal if isinstance(error, _NotAdmittedError) else refusal_for(error)
        with suppress(OSError):
            self.link.send(encode(refusal))
        # An end that is asked to use TLS connects again with TLS. That is not worth a warning.
        self.dismiss("left" if isinstance(error, EncryptionRequired) else stranger_kind(error), str(error))

    def is_admitted(self) -> bool:
        """Returns whether the handshake has succeeded. Remains True after the connection is closed."""
        return self._peer is not None

    def worker_number(self) -> Worker:
        """Returns the number of the worker at the other end; -1 before the handshake has succeeded."""
        return self.number

    def peer_info(self) -> WorkerInfo | None:
        """Returns the name and id of the worker at the other end; None before the handshake has succeeded."""
        peer = self._peer
        if peer is None:
            return None
        return WorkerInfo(peer.name, peer.rank if peer.rank >= 0 else peer.number)

    # Replying

    def check_reply_size(
        self, function: Callable[..., Any] | str, handles: int, payload: bytes, buffers: Sequence[memoryview]
    ) -> None:
        """Raises `SerializationError` if a reply is larger than the caller accepts; otherwise does nothing.

        Args:
            function: The function, for the error message.
            handles: The number of references in the reply.
            payload: The pickled result.
            buffers: The buffers of the result; may be empty.
        """
        if handles > FEW_HANDLES:
            check_number(handles)
        excess = excess_of(self._peer_limits, HEADER_SIZE, handles, payload, buffers)
        if excess is not None:
            raise SerializationError(
                f"the result of `{callable_name(function)}` cannot be sent from worker {self._me()!r} to {self}: it "
                f"has {excess}. Return less at once, or start that worker with a larger limit"
            )

    def reply(self, frame: bytes, buffers: list[memoryview] | None) -> None:
        """Sends a reply. If that fails, closes the connection. Raises nothing.

        Args:
            frame: The reply.
            buffers: The buffers of the result; None for none. The link empties the list.
        """
        if self._poller.collector and self._collect(frame, buffers):
            return
        try:
            self.link.send(frame, buffers)
        except Exception as error:
            self._reply_failed(error)

    def _collect(self, frame: bytes, buffers: list[memoryview] | None) -> bool:
        """Gives a small reply to the poller, which sends several replies together.

        Returns True if the poller has accepted the reply. Returns False if the reply has buffers or is too large, if
        the link has no `append`, or if the poller refuses the reply. Then the caller must send it.
        """
        if buffers or not self._can_append or len(frame) > MAX_COLLECTED_BYTES:
            return False
        return self._poller.collect(self.link, frame)

    def _reply_failed(self, error: Exception) -> None:
        """Closes the connection. Logs a warning unless the link is closed or broken.

        Part of the frame may have been sent. The end of the connection tells the caller that no more follows.
        """
        if not isinstance(error, ConnectionError):
            logger.warning("worker %r: connection from %s closed, a reply failed: %r", self._me(), self, error)
        self.close()

    def send(self, frame: bytes) -> None:
        """Sends a frame that is not a reply. If that fails, closes the connection. Raises nothing."""
        self.reply(frame, None)

    # The end

    def refuse(self, error: BaseException) -> None:
        """Closes the connection because of a wrong frame, and logs `error` as a warning. Raises nothing."""
        why = quoted(str(error) or type(error).__name__)
        logger.warning("worker %r: connection from %s closed: %s", self._me(), self, why)
        self.close()

    def dismiss(self, kind: str, why: str) -> None:
        """Closes the connection of a stranger, and logs `why`.

        The first time for each address and `kind` is logged as a warning, or as information if `kind` is "left". Later
        times are logged for debugging only.

        Args:
            kind: A short name for the kind of reason. "left" is for reasons that deserve no warning: the stranger has
                left, or will connect again with TLS.
            why: The reason, for the log.
        """
        # An end that closes the connection itself may be a worker of the group that timed out: no reason to warn.
        level = logging.INFO if kind == "left" else logging.WARNING
        if not self._credentials.stranger_log.is_new(self.link.address, kind):
            level = logging.DEBUG
        logger.log(level, "worker %r: connection from %s closed: %s", self._me(), self.link.address, quoted(why))
        self.close()

    def close(self) -> None:
        """Closes the connection. Does nothing the second time.

        Its calls are cancelled. Calls made by `remote` continue to run.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._poller.unwatch(self.link)
        self.link.close()
        self._handshake = None
        while self._parts.honours_deadlines and self.calls:
            try:
                _, invocation = self.calls.popitem()
            except KeyError:
                break  # it was answered meanwhile
            self.calls_cancelled += 1
            invocation.cancel_call()
        self._on_closed(self)
        self._admission.connection_closed(self)

    def is_lost(self) -> bool:
        """Returns whether the connection is closed. Frames that were sent on it may not have arrived."""
        return self._is_closed

    def has_unsent(self) -> bool:
        """Returns whether part of a reply still waits to be sent; False if the connection is closed."""
        return not self._is_closed and self.link.unsent_bytes() > 0

    def abandon(self) -> None:
        """Called in a forked child: marks the child's copy as closed. The connection of the parent is not affected."""
        self._is_closed = True
        self.link.abandon()

    def _me(self) -> str:
        """Returns the name of this worker."""
        return self._admission.me.name

    def __str__(self) -> str:
        return f"worker {self._peer.name!r}" if self._peer is not None else self.link.address


class _NotAdmittedError(ProtocolError):
    """A worker that knows the secret may not connect for another reason, such as a wrong group.

    Args:
        refusal: The message that is sent to the other end. Its `reason` is the text of the error.
    """

    def __init__(self, refusal: Refused) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


def excess_of(
    limits: tuple[int, int], head: int, handles: int, payload: bytes, buffers: Sequence[memoryview]
) -> str | None:
    """Returns text that says how large a frame is and how large it may be; None if it is not too large.

    Args:
        limits: The most bytes of a head and of a whole frame that the other end accepts; 0 for no limit.
        head: The number of bytes of the head, without references.
        handles: The number of references in the frame.
        payload: The payload.
        buffers: The buffers; may be empty.
    """
    max_head, max_message = limits
    head += SECTION_SIZE + handles * HANDLE_SIZE
    total = head + len(payload) + sum([buffer.nbytes for buffer in buffers])
    if max_message and total > max_message:
        return f"about {total:,} bytes, and it takes {max_message:,} at most (its option max_message_size)"
    if max_head and head > max_head:
        return f"a head of about {head:,} bytes, and it takes {max_head:,} at most (its option max_head_size)"
    return None


class PendingHandshakes:
    """The connections whose handshake is not done. Limits their number and how long each may take.

    When a new connection exceeds the limit, the oldest pending one is closed: a worker of the group finishes its
    handshake quickly, so the oldest is most likely not one. Timeouts are checked when a connection is added and at
    every heartbeat.

    Args:
        limits: Its `max_strangers` is the largest number of connections, its `proof_timeout` the seconds for each
            handshake.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._until: dict[ServerConnection, float] = {}  # oldest first

    def __len__(self) -> int:
        """Returns the number of connections in this collection, including some whose handshake has just succeeded."""
        return len(self._until)

    def add(self, connection: ServerConnection) -> None:
        """Adds a new connection. Closes those that have timed out, and the oldest ones if there are too many."""
        for admitted in [each for each in list(self._until) if each.is_admitted()]:
            self._until.pop(admitted, None)
        self.expire()
        while len(self._until) >= self._limits.max_strangers:
            oldest = next(iter(list(self._until)), None)
            if oldest is not None and self._until.pop(oldest, None) is not None:
                oldest.dismiss(
                    "too many", f"more than {self._limits.max_strangers} connections have not proved themselves yet"
                )
        self._until[connection] = monotonic() + self._limits.proof_timeout

    def remove(self, connection: ServerConnection) -> None:
        """Removes a connection that was admitted or closed. Does nothing if it is not pending."""
        self._until.pop(connection, None)

    def expire(self) -> None:
        """Closes the connections whose handshake has taken too long. Does nothing if there are none."""
        now = monotonic()
        for connection, until in list(self._until.items()):
            if connection.is_admitted():
                self._until.pop(connection, None)
            elif until > now:
                break
            elif self._until.pop(connection, None) is not None:
                seconds = f"{self._limits.proof_timeout:g} s"
                connection.dismiss("silent", f"it did not prove within {seconds} that it knows the secret")
