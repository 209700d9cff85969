"""The outbox of each worker: messages about references that are not sent yet, or not acknowledged yet.

These messages decide when values are released, and no thread waits for them. So the messages to a worker are collected
in its outbox, and sent together a few milliseconds later.

Each message has a number, and is kept until the receiver has acknowledged it (`protocol.delivery`). Remote calls, and
the references in calls and replies, have numbers of the same sequence: if the connection breaks after they were sent,
they are sent again on the next connection.

`Outboxes` has the data. The lock of the reference store protects it, so that a message gets its number under the same
lock as the decision to send it. `OutboxSender` sends to one worker, and connects to it if necessary.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

from farcall.errors import ProtocolError, WorkerLostError
from farcall.gate import FOREVER
from farcall.protocol.delivery import Delivery
from farcall.protocol.frames import CONTROL, REFERENCES, pack_again, pack_message, pack_references
from farcall.protocol.ids import ForkId, RRefId, Worker, new_tuple
from farcall.protocol.reference_messages import (
    CancelCreate,
    Carried,
    ChildAccepted,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    Message,
    UserDeleted,
)

if TYPE_CHECKING:
    from farcall.runtime.client import ClientConnection
    from farcall.runtime.executor import Executor
    from farcall.runtime.peers import Peer
    from farcall.runtime.server import ServerConnection

logger = logging.getLogger("farcall")

MAX_MESSAGES_PER_FRAME: Final = 1024
"""Limits how long the receiver of a frame processes it before it reads other links."""
ANSWERS: Final = (ForkAccepted, ForkRefused)
"""The types of the answer to a `ForkRequest`. The owner sends one answer to each."""
MAX_GOSSIP_CONNECTS: Final = 2
"""How many connections a worker opens for gossip at a time."""
_CONNECT_TIMEOUT_S: Final = 5.0
_MAX_UNSENT_GOSSIP: Final = 64
_CONNECT_PAUSES_S: Final = (0.02, 0.05, 0.1, 0.0)
"""Seconds to wait after each failed attempt to connect. There are as many attempts as pauses."""

_MESSAGE_TYPES: Final[tuple[type[Message], ...]] = (
    ForkRequest, ForkAccepted, ForkRefused, ChildAccepted, UserDeleted, CancelCreate,
)  # fmt: skip
"""The types of messages in CONTROL frames. A `CreateRequest` is not among them: a KEEP frame contains it."""
_MESSAGE_CODES: Final = {kind: code for code, kind in enumerate(_MESSAGE_TYPES)}
_ACKNOWLEDGEMENT: Final = struct.Struct("<Q")
_ENTRY: Final = struct.Struct("<QBIIQ16sIQ")


def pack_control(acknowledged: int, messages: Sequence[tuple[int, Message]]) -> bytes:
    """Encodes the payload of a CONTROL frame.

    Layout: the acknowledged number (8 bytes); then for each message its number (8), its type (1), its reference and
    fork (44). All little-endian.

    Args:
        acknowledged: This worker has received all messages of the receiver up to this number; 0 for none.
        messages: The messages with their numbers; may be empty.
    """
    parts = [_ACKNOWLEDGEMENT.pack(acknowledged)]
    for number, message in messages:
        reference, fork = message
        parts.append(_ENTRY.pack(number, _MESSAGE_CODES[type(message)], *reference, *fork))
    return b"".join(parts)


def unpack_control(payload: bytes | memoryview) -> tuple[int, list[tuple[int, Message]]]:
    """Decodes the payload of a CONTROL frame.

    Returns:
        The acknowledged number, and the messages with their numbers; an empty list if there are none.

    Raises:
        ProtocolError: The payload has a wrong size, or a message has an unknown type.
    """
    size = len(payload) - _ACKNOWLEDGEMENT.size
    if size < 0 or size % _ENTRY.size:
        raise ProtocolError(f"a control message of {len(payload)} bytes came, which cannot be")
    (acknowledged,) = _ACKNOWLEDGEMENT.unpack_from(payload)
    messages = []
    for number, code, *named in _ENTRY.iter_unpack(memoryview(payload)[_ACKNOWLEDGEMENT.size :]):
        if code >= len(_MESSAGE_TYPES):
            raise ProtocolError(f"a control message of unknown type {code} came")
        reference, fork = new_tuple(RRefId, named[:4]), new_tuple(ForkId, named[4:])
        messages.append((number, new_tuple(_MESSAGE_TYPES[code], (reference, fork))))
    return acknowledged, messages


class Connection(Protocol):
    """The connection on which a message was sent. It says whether the message may have been lost."""

    def is_lost(self) -> bool:
        """Returns whether the connection has ended. Then messages that were sent on it may not have arrived."""


class UnackedKeep:
    """A call made by `remote` that its receiver has not acknowledged yet. Keeps the frame, to send it again.

    `ReferenceStore.create_remote` sets `reference`, `fork` and `frame`. Before that, `frame` is empty, and `reference`
    and `fork` do not exist.

    Args:
        via: The connection on which the call is sent. When it is lost, the frame is sent again on the next connection.
        keeps: The handle whose method is called; None for a function. It stays alive until the call is acknowledged.
        deadline: When the value must be there, on the monotonic clock; `FOREVER` for no limit.

    Attributes:
        reference: The id of the reference to the result.
        fork: The fork of this reference that this worker holds.
        frame: The frame of the call.
    """

    __slots__ = ("buffers", "deadline", "fork", "frame", "keeps", "reference", "via")

    reference: RRefId
    fork: ForkId

    def __init__(self, via: Connection, keeps: object, deadline: float = FOREVER) -> None:
        self.frame = b""
        """The frame; empty until it has its number."""
        self.buffers: Sequence[memoryview] | None = None
        """Copies of the buffers, which do not change. None until the thread that makes the call has sent it."""
        self.via = via
        self.keeps = keeps
        """The handle whose method is called, or None. It must not be released before the call has arrived."""
        self.deadline = deadline
        """When the value must be there, on the monotonic clock."""

    def seconds_left(self) -> float:
        """Returns the seconds until the deadline; 0 if there is no limit.

        After the deadline, returns a small number, not 0.
        """
        return max(self.deadline - monotonic(), 1e-3) if self.deadline != FOREVER else 0.0


class UnackedReferences:
    """The references in a call or reply that its receiver has not acknowledged yet.

    Args:
        carried: The references, with the fork of each that was created for the receiver.
        via: The connection on which the call or reply was sent. When it is lost, the references are sent again on the
            next connection, without the call or reply.
    """

    __slots__ = ("carried", "via")

    def __init__(self, carried: Sequence[Carried], via: Connection) -> None:
        self.carried = carried
        self.via = via


Unacked: TypeAlias = Message | UnackedReferences | UnackedKeep


class ControlFrame(NamedTuple):
    """The payload of a frame with control messages, and what its sender needs to know to choose a connection.

    Attributes:
        payload: The payload, as `pack_control` returns it.
        has_only_answers: Whether all messages in it are answers to the receiver, and there is at least one. The
            receiver reads answers on the connection on which it asked.
        is_bare: Whether it has no messages, only the acknowledgement.
    """

    payload: bytes
    has_only_answers: bool
    is_bare: bool


class Outboxes:
    """The control messages to all other workers: those that wait to be sent, and those that are not acknowledged.

    Every use must hold the lock of the reference store.
    """

    def __init__(self) -> None:
        """Creates outboxes without workers and without messages. `delivery.joined(worker)` adds a worker."""
        self.delivery: Delivery[Unacked] = Delivery()
        self.unsent: dict[Worker, list[tuple[int, Message]]] = {}
        """Messages that have numbers and are not sent yet, by receiver."""
        self.owed: dict[Worker, None] = {}
        """Workers that must be sent an acknowledgement."""
        self.asked: dict[Worker, int] = {}
        """The number of our `ForkRequest` messages that each owner has not answered."""

    def add(self, to: Worker, message: Message) -> None:
        """Assigns the next number to a message, and puts it into the outbox of the worker `to`.

        Raises `KeyError` if that worker is gone or was never added.
        """
        self.unsent.setdefault(to, []).append((self.delivery.send(to, message), message))
        if type(message) is ForkRequest:
            self.asked[to] = self.asked.get(to, 0) + 1

    def remove_worker(self, worker: Worker) -> None:
        """Removes all messages to a worker that has left or was lost. Does nothing if there are none."""
        self.delivery.lost(worker)
        self.unsent.pop(worker, None)
        self.owed.pop(worker, None)
        self.asked.pop(worker, None)

    def receivers(self) -> list[Worker]:
        """Returns the workers to which a message or an acknowledgement must be sent; empty if there are none."""
        return [*self.unsent, *(worker for worker in self.owed if worker not in self.unsent)]

    def take_frame(self, to: Worker) -> ControlFrame | None:
        """Removes messages from the outbox of a worker, and returns them as a frame with an acknowledgement.

        Takes at most `MAX_MESSAGES_PER_FRAME` messages; the rest stays. Returns None if there is no
        message and no acknowledgement is owed. That is so for a worker that is gone or was never added.
        """
        messages = self.unsent.pop(to, None)
        if messages is None:
            if to not in self.owed:
                return None
            messages = []
        elif len(messages) > MAX_MESSAGES_PER_FRAME:
            self.unsent[to] = messages[MAX_MESSAGES_PER_FRAME:]
            del messages[MAX_MESSAGES_PER_FRAME:]
        self.owed.pop(to, None)
        has_only_answers = bool(messages) and all(type(message) in ANSWERS for _, message in messages)
        payload = pack_control(self.delivery.acknowledgement(to), messages)
        return ControlFrame(payload, has_only_answers, not messages)

    def take_unacked(self, to: Worker) -> list[tuple[int, Unacked]]:
        """Returns everything that a worker has not acknowledged, each with its number, in order; empty if nothing.

        Also empties the worker's outbox, because the list contains the messages of the outbox. The list is empty as
        well if the worker is gone or was never added.
        """
        self.unsent.pop(to, None)
        return self.delivery.unacknowledged(to)

    def take_acknowledgement(self, to: Worker) -> int:
        """Returns the number up to which all messages of a worker were received; 0 if the first was not.

        Returns 0 also if the worker is gone or was never added. The caller must send the number to the worker:
        `take_frame` does not return a frame for this acknowledgement any more.
        """
        self.owed.pop(to, None)
        return self.delivery.acknowledgement(to)

    def awaits(self, worker: Worker) -> bool:
        """Returns whether a worker still has to acknowledge a message, or to answer a `ForkRequest`.

        False if the worker is gone or was never added.
        """
        return self.delivery.awaits(worker) or bool(self.asked.get(worker))

    def clear(self) -> object:
        """Removes everything. Returns the old contents, which the caller must drop after it has released the lock.

        Dropping them may run finalizers of users.
        """
        kept, self.delivery = self.delivery, Delivery()
        self.unsent.clear()
        self.owed.clear()
        self.asked.clear()
        return kept


class OutboxSource(Protocol):
    """What `OutboxSender` needs from the reference store. All methods take the lock of the store."""

    def take_control_frame(self, to: Worker) -> ControlFrame | None:
        """Removes messages from the outbox of a worker, and returns them as a frame, which the caller must send.

        Returns None if there is nothing to send.
        """

    def take_unacked(self, to: Worker) -> list[tuple[int, Unacked]]:
        """Returns everything that a worker has not acknowledged, each with its number, in order; empty if nothing.

        Also empties the worker's outbox, because the list contains the messages of the outbox.
        """

    def take_acknowledgement(self, to: Worker) -> int:
        """Returns the number up to which all messages of a worker were received; 0 if the first was not.

        The caller must send the number to that worker.
        """


class OutboxSender:
    """Sends control messages about references, and gossip (changes of the membership of the group), to one worker.

    Most messages are sent on the connection that this worker has opened. A frame that has only answers (`ForkAccepted`,
    `ForkRefused`) is sent on the connection that the other worker has opened, if there is one.

    A control message that cannot be sent stays unacknowledged, and is sent again on the next connection. Gossip that
    cannot be sent is dropped. Connecting takes time, so a separate thread does it.
    If nothing listens at the worker's address any more, `on_unreachable` is called. If connecting fails for another
    reason, the next heartbeat tries again.

    Args:
        peer: The worker that gets the messages.
        source: The reference store, which has the messages.
        executor: Starts the threads that connect.
        server_connection: Returns the connection that `peer` has opened to this worker; None if there is none.
        on_unreachable: Called when nothing listens at the worker's address any more.
        gossip_slots: Limits how many connections are opened for gossip at a time; shared by the senders of this worker.
            None for a semaphore of `MAX_GOSSIP_CONNECTS` that only this sender uses.
    """

    def __init__(
        self,
        peer: Peer,
        source: OutboxSource,
        executor: Executor,
        server_connection: Callable[[], ServerConnection | None],
        on_unreachable: Callable[[], None],
        gossip_slots: threading.Semaphore | None = None,
    ) -> None:
        self._gossip_slots = gossip_slots or threading.Semaphore(MAX_GOSSIP_CONNECTS)
        self._has_slot = False
        self._peer = peer
        self._source = source
        self._executor = executor
        self._server_connection = server_connection
        self._on_unreachable = on_unreachable
        self._unsent_gossip: deque[bytes] = deque(maxlen=_MAX_UNSENT_GOSSIP)
        self._lock = threading.RLock()
        self._is_wanted = False  # set to connect and send, or to do so once more
        self._is_connecting = False
        self.is_stuck = False
        """Whether the last attempt to connect has failed. The next heartbeat tries again."""
        self.resends = 0
        """The number of messages that were sent again."""

    def send(self) -> None:
        """Sends the messages in the outbox and an owed acknowledgement, if there are any. Never raises or waits.

        If there is no connection, another thread connects and sends them. If the last attempt to connect has failed,
        the next heartbeat tries again.
        """
        client, server = self._peer.connection, self._server_connection()
        if client is None and server is None:
            if not self.is_stuck:  # otherwise the next heartbeat tries again
                self.connect_and_send()
            return
        while (control := self._source.take_control_frame(self._peer.number)) is not None:
            frame = pack_message(CONTROL, control.payload)
            used: Connection | None = client
            if server is not None and (control.has_only_answers or (control.is_bare and client is None)):
                server.send(frame)
                used = server
            elif client is not None:
                client.send(frame)
                if not control.is_bare:
                    client.expect_acknowledgement()
            if used is None or used.is_lost():
                self.connect_and_send()  # the frame is unacknowledged, and so is sent again
                return

    def send_gossip(self, frame: bytes) -> None:
        """Sends a frame with gossip. The frame may get lost. Never raises or waits.

        If there is no connection, another thread connects and sends the frame. Only the last 64 frames are kept until
        then. If no such thread runs yet, and this worker is already opening `MAX_GOSSIP_CONNECTS` connections for
        gossip, the frame is dropped. This limit protects a busy machine, where late heartbeats cause more gossip.
        """
        connection = self._peer.connection
        if connection is not None:
            connection.send(frame)
            return
        with self._lock:
            if not self._is_wanted and not self._is_connecting:
                if not self._gossip_slots.acquire(blocking=False):
                    return
                self._has_slot = True
        self._unsent_gossip.append(frame)
        self.connect_and_send()

    def connect_and_send(self) -> None:
        """Has another thread connect, if necessary, and send gossip and all unacknowledged messages. Does not wait.

        If such a thread runs already, no second one is started: the running thread connects and sends once more.
        """
        with self._lock:
            must_start = not self._is_wanted and not self._is_connecting
            self._is_wanted = True
        if must_start:
            self._executor.run_aside(self._run)

    def _run(self) -> None:
        """The function of the thread that connects and sends.

        Connects and sends once more if `connect_and_send` was called meanwhile. Returns at once if another thread runs
        this function for the same worker.
        """
        with self._lock:
            if self._is_connecting:
                return
            self._is_connecting = True
        try:
            while self._is_wanted:
                self._is_wanted = False
                connection = self._connect()
                if connection is not None:
                    self._send_all(connection)
        finally:
            with self._lock:
                self._is_connecting = False
                again = self._is_wanted
                if self._has_slot and not again:
                    self._has_slot = False
                    self._gossip_slots.release()
        if again:  # set between the last check and the end
            self._executor.run_aside(self._run)

    def _connect(self) -> ClientConnection | None:
        """Returns a connection to the worker. Tries a few times, with pauses.

        Returns None if all attempts have failed, or no connection is needed any more. The waiting gossip is dropped
        then. If nothing listens at the worker's address, calls `on_unreachable`, and returns None at once.
        """
        for pause in _CONNECT_PAUSES_S:
            if self._peer.is_lost or self._peer.is_over() or self._executor.is_closing:
                break
            try:
                connection = self._peer.connect(monotonic() + _CONNECT_TIMEOUT_S)
            except WorkerLostError as error:
                if error.is_gone:
                    logger.info("%s", error)
                    self._on_unreachable()
                    break
                sleep(pause)
            else:
                self.is_stuck = False
                return connection
        self.is_stuck = True
        self._unsent_gossip.clear()
        return None

    def _send_all(self, connection: ClientConnection) -> None:
        """Sends the waiting gossip, then all unacknowledged control messages, on `connection`.

        If `connection` ends meanwhile, connects again at once, and sends the control messages that are still
        unacknowledged. Gossip that was lost is not sent again.
        """
        while self._unsent_gossip:
            connection.send(self._unsent_gossip.popleft())
        self._resend(connection)
        if connection.is_lost():  # perhaps before everything was sent
            self.connect_and_send()

    def _resend(self, connection: ClientConnection) -> None:
        """Sends all unacknowledged messages again, with an acknowledgement.

        Calls made by `remote`, and references in calls and replies, are left out if the connection on which they were
        sent has not ended: they will arrive.
        """
        messages: list[tuple[int, Message]] = []
        for number, unacked in self._source.take_unacked(self._peer.number):
            if isinstance(unacked, UnackedKeep):
                if unacked.via.is_lost() and unacked.buffers is not None:
                    unacked.via = connection
                    self.resends += 1
                    connection.send(pack_again(unacked.frame, unacked.seconds_left()), list(unacked.buffers))
            elif isinstance(unacked, UnackedReferences):
                if unacked.via.is_lost():
                    unacked.via = connection
                    self.resends += 1
                    connection.send(pack_message(REFERENCES, pack_references(number, unacked.carried)))
            else:
                messages.append((number, unacked))
        acknowledged = self._source.take_acknowledgement(self._peer.number)
        self.resends += len(messages)
        for at in range(0, len(messages) or bool(acknowledged), MAX_MESSAGES_PER_FRAME):
            some = messages[at : at + MAX_MESSAGES_PER_FRAME]
            connection.send(pack_message(CONTROL, pack_control(acknowledged, some)))
        connection.expect_acknowledgement()
