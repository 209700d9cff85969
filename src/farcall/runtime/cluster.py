"""The group as one worker sees it: its members, the connections to them, and the workers that have left or were lost.

The membership protocol (`protocol.membership`) decides who is a member. This module adds threads, a clock and
connections. A worker is *gone* if it has left the group or was lost.

Rules
- The protocol is called under the lock, and its effects on the tables are carried out under the same lock, in order.
  Messages are sent and watchers are called afterwards, without the lock.
- Nothing here blocks. Connecting takes time, so the outbox senders do it in threads of their own.
- When a connection to a worker has ended, the worker is contacted at once. If nothing listens at its address, its
  process has ended. Any other failure may be a network problem, and the heartbeats decide.
- A worker replies to its calls before it leaves, but the message that it leaves may arrive on another connection. So
  our connection to it ends when the replies are read, at the latest two heartbeats later.
- Watchers are called in the order in which the tables changed, for one change at a time.
- Some workers that are gone are remembered, so that the error of a call to one of them says why it is gone.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol

from farcall.backends.interface import MembershipChange, worker_key
from farcall.errors import RpcError
from farcall.protocol.frames import GOSSIP, pack_message
from farcall.protocol.handshake import Hello, Refused
from farcall.protocol.ids import Worker, WorkerInfo
from farcall.protocol.membership import Membership
from farcall.protocol.membership_messages import (
    Effect,
    Expelled,
    Member,
    MemberJoined,
    MemberLeft,
    MemberLost,
    News,
    SendMessage,
    decode,
    encode,
)
from farcall.runtime.executor import Task
from farcall.runtime.parts import WorkerParts
from farcall.runtime.peers import Peer, info_of
from farcall.runtime.reference_outbox import MAX_GOSSIP_CONNECTS, OutboxSender
from farcall.transports.base import Link

if TYPE_CHECKING:
    from farcall.runtime.client import ClientConnection
    from farcall.runtime.server import ServerConnection

logger = logging.getLogger("farcall")

_MAX_REMEMBERED: Final = 1024
"""How many workers that are gone are remembered."""

Watcher = Callable[[MembershipChange], object]


class PeerTable:
    """The members of the group, and workers that are gone and still remembered. Calls look up their callees here.

    Its attribute `closed` is the error of every call after this worker was shut down or expelled; None before.
    """

    def __init__(self) -> None:
        """Creates an empty table."""
        self.by_key: dict[str | WorkerInfo, Peer] = {}
        """The workers by name and by `WorkerInfo`."""
        self.by_rank: dict[int, Peer] = {}
        """The workers by rank. Not in `by_key`, where True and 1.0 would be found as the rank 1."""
        self.by_number: dict[Worker, Peer] = {}
        """The workers by number, which references contain."""
        self.closed: RpcError | None = None
        """The error that every call raises after this worker has shut down or was expelled; None before."""

    def add(self, peer: Peer) -> None:
        """Adds a worker, so that it is found by name, by rank, by `WorkerInfo` and by number.

        If an earlier worker has the same name or rank, only the new worker is found by it. Both are found by their
        numbers.
        """
        self.by_number[peer.number] = peer
        self.by_key[peer.info.name] = self.by_key[peer.info] = self.by_rank[peer.info.id] = peer

    def forget(self, peer: Peer) -> None:
        """Removes a worker that is gone. A newer worker with the same name or rank stays.

        Does nothing if the worker is not in the tables.
        """
        self.by_number.pop(peer.number, None)
        for key in (peer.info.name, peer.info):
            if self.by_key.get(key) is peer:
                del self.by_key[key]
        if self.by_rank.get(peer.info.id) is peer:
            del self.by_rank[peer.info.id]

    def find(self, to: object) -> Peer | None:
        """Returns a worker, also if it is gone and still remembered; None if there is no such worker.

        Args:
            to: The name, rank or `WorkerInfo` of the worker, or a `farcall.Worker`.

        Raises:
            UsageError: `to` is of another type. True and 1.0 are not ranks.
        """
        key = worker_key(to)
        return self.by_rank.get(key) if isinstance(key, int) else self.by_key.get(key)

    def present(self) -> list[WorkerInfo]:
        """Returns the members of the group, sorted by id. Workers that are gone are left out."""
        return sorted(
            {peer.info for peer in list(self.by_number.values()) if not peer.is_lost}, key=lambda info: info.id
        )


class ClusterOwner(Protocol):
    """What `Cluster` needs from the agent of its worker: the agent makes connections, and is told of changes."""

    def connect_client(self, peer: Peer, link: Link, peer_limits: tuple[int, int]) -> ClientConnection:
        """Returns a new connection for calls to a worker.

        Args:
            peer: The worker.
            link: A link to it, with a completed handshake.
            peer_limits: The most bytes of a head (a frame without payload and buffers) and of a whole frame that it
                accepts; 0 for no limit.
        """

    def worker_gone(self, number: Worker, has_left: bool) -> None:
        """Called when a worker is not in the group any more.

        Args:
            number: The number of the worker.
            has_left: True if the worker has left, False if it was lost.
        """

    def expelled(self) -> None:
        """Called when the group has declared this worker lost, although it still runs."""

    def heartbeat(self, now: float) -> None:
        """Called once in each heartbeat interval. `now` is the current time of the monotonic clock."""


class Cluster:
    """The group as one worker sees it: who is a member, the connections to each member, and the heartbeats.

    At first this worker is the only member. `start` adds the others.

    Args:
        parts: The objects that the connections and calls of this worker share, such as its executor.
        me: This worker.
        run: The name of this run of the group. Workers of another run may not connect.
        peers: The table in which calls look up their callees. The cluster keeps it up to date.
        heartbeat: Two times in seconds: the interval between heartbeats, and the shortest silence after which a worker
            is declared lost.
        owner: The agent, which is told of changes.
        is_open: Whether the group is open: workers may join at any time.

    Raises:
        UsageError: The first time is not positive, or the second is shorter than three times the first.
    """

    def __init__(
        self,
        parts: WorkerParts,
        me: Member,
        run: str,
        peers: PeerTable,
        heartbeat: tuple[float, float],
        owner: ClusterOwner,
        is_open: bool,
    ) -> None:
        self.me = me
        self.run = run
        self._parts = parts
        self._owner = owner
        self._is_open = is_open
        self._peers = peers
        self._store = parts.store
        self._executor = parts.executor
        self._timers = parts.timers
        self._interval, max_silence = heartbeat
        self.is_quiet = False
        """Whether all workers are about to leave. Then a connection that ends does not mean that a worker is lost."""
        self._lock = threading.RLock()
        self._membership = Membership(me, random.randrange, interval=self._interval, patience=max_silence)
        self._senders: dict[Worker, OutboxSender] = {}
        self._gossip_slots = threading.Semaphore(MAX_GOSSIP_CONNECTS)
        self._server_connections: dict[Worker, ServerConnection] = {}
        self._gone: dict[Worker, Peer] = {}  # oldest first
        self._leaving: list[Peer] = []  # workers that left since the last round, and since the one before
        self._leaving_before: list[Peer] = []
        self._next_round = 0.0
        self._watchers: list[Watcher] = []
        self._unreported_changes: deque[tuple[list[Watcher], MembershipChange]] = deque()
        self._notifying = threading.Lock()
        self._add(me)

    # Start, and the clock

    def start(self, members: Iterable[Member], must_announce: bool) -> None:
        """Adds the first members of the group, and starts the heartbeats.

        Args:
            members: The members, with or without this worker; may be empty.
            must_announce: Whether to tell the members that this worker has joined, as in an open group.
        """
        with self._lock:
            effects = self._membership.started(tuple(members), must_announce)
            self._change(effects)
        self._act(effects)
        # At a random time, so that not all workers send at once.
        self._timers.schedule(monotonic() + self._interval * (0.5 + random.random() / 2), self._tick)

    def _tick(self) -> None:
        """Called by the timers: sends heartbeats, and calls `ClusterOwner.heartbeat` once in each interval.

        Schedules itself for the next time.
        """
        now = monotonic()
        next_tick = now + self._interval
        try:
            if self._peers.closed is None:  # nobody answers an expelled worker
                next_tick = self._beat(now)
            if now >= self._next_round:
                self._next_round = now + self._interval
                self._owner.heartbeat(now)
        finally:
            self._timers.schedule(next_tick, self._tick)

    def _beat(self, now: float) -> float:
        """Sends heartbeats, and declares workers lost that were silent for too long.

        Tries again to connect to workers if the last attempt has failed. Closes connections to workers that left at
        least one interval ago.

        Args:
            now: The current time of the monotonic clock.

        Returns:
            When to call this again, as a time of the monotonic clock.
        """
        stuck: list[OutboxSender] = []
        overdue: list[Peer] = []
        with self._lock:
            effects = self._membership.ticked(now)
            self._change(effects)
            if now >= self._next_round:
                stuck = [sender for sender in self._senders.values() if sender.is_stuck]
                overdue, self._leaving_before, self._leaving = self._leaving_before, self._leaving, []
        self._act(effects)
        for peer in overdue:
            peer.close_connection()
        for sender in stuck:
            sender.connect_and_send()
        return self._membership.next_tick()

    # Connections

    def refusal(self, hello: Hello) -> Refused | None:
        """Returns why a worker may not connect to this one; None if it may.

        It may not if `hello` is for another group or is not for this worker, if the sender of `hello` has left or was
        lost, or if the group is fixed and the sender is not a member.

        Args:
            hello: The first message of the worker's handshake.
        """
        if hello.group != self.run:
            return Refused(f"this worker is of group {self.run!r}, not of {hello.group!r}")
        if hello.wanted != self.me.name:
            return Refused(f"this is worker {self.me.name!r}, not {hello.wanted!r}")
        if hello.wanted_number != self.me.number:
            return Refused(f"worker {self.me.name!r} was started again, and is not the one that was wanted")
        members = self._membership.members
        if hello.number in members.gone and hello.number != self.me.number:
            reason = f"worker {hello.name!r} is not in the group any more: it has left, or was declared lost"
            return Refused(reason, gone=True)
        if hello.number not in members.here and not self._is_open:
            return Refused(f"there is no worker {hello.name!r} with number {hello.number} in this group")
        return None

    def admitted(self, connection: ServerConnection, hello: Hello) -> None:
        """Called when the handshake of another worker has succeeded: adds the worker to the group if it is new here.

        Args:
            connection: The connection from that worker.
            hello: The first message of its handshake, which describes the worker.
        """
        self._server_connections[hello.number] = connection
        self.add_member(Member(hello.number, hello.name, hello.rank, hello.host, hello.addresses))

    def connection_closed(self, connection: ServerConnection) -> None:
        """Called when a connection from another worker has ended: tries to connect to that worker. Does not wait.

        Another thread connects. If nothing listens at the worker's address any more, the worker is declared lost. Does
        nothing if the handshake of the connection had not succeeded.
        """
        if connection.is_admitted():
            if self._server_connections.get(connection.number) is connection:
                del self._server_connections[connection.number]
            self.examine(connection.number)

    def receive_gossip(self, sender: Worker, payload: bytes) -> None:
        """Processes a message about the membership.

        Args:
            sender: The number of the worker that sent the message.
            payload: The encoded message.

        Raises:
            ProtocolError: `payload` cannot be decoded.
        """
        message = decode(payload)
        with self._lock:
            effects = self._membership.message_received(sender, message)
            self._change(effects)
        self._act(effects)

    def examine(self, worker: Worker) -> None:
        """Connects to a worker again in another thread, after a connection with it has ended. Does not wait.

        The other thread also sends all control messages again that were not acknowledged. If nothing listens at the
        worker's address, the worker is declared lost. Does nothing if the worker is gone or not known, or if this
        worker or the whole group is shutting down.

        Args:
            worker: The number of the worker.
        """
        sender = self._senders.get(worker)
        if sender is not None and not self.is_quiet and self._peers.closed is None:
            sender.connect_and_send()

    def send_outbox(self, worker: Worker) -> None:
        """Sends the control messages that wait in the outbox of a worker. Does not wait.

        Does nothing if the worker is gone or not known, or if this worker was shut down or expelled.

        Args:
            worker: The number of the worker.
        """
        sender = self._senders.get(worker)
        if sender is not None and self._peers.closed is None:
            sender.send()

    def _unreachable(self, worker: Worker) -> None:
        """Tells the membership protocol that nothing listens at the address of a worker any more.

        Does nothing if this worker or the whole group is shutting down.
        """
        if self.is_quiet or self._peers.closed is not None:
            return
        with self._lock:
            effects = self._membership.peer_unreachable(worker)
            self._change(effects)
        self._act(effects)

    def _is_over(self) -> bool:
        """Returns whether this worker was shut down or expelled."""
        return self._peers.closed is not None

    def _refused_as_dead(self) -> None:
        """Called when another worker says that the group has expelled this worker: tells the agent so.

        Does nothing if this worker knows already that it is expelled, or has left.
        """
        if not self._membership.is_out:
            self._membership.is_out = True
            self._owner.expelled()

    # Who is there

    def name_of(self, worker: Worker) -> str:
        """Returns the name of a worker, also if it is gone and remembered; `"number N"` if the worker is not known."""
        peer = self._peers.by_number.get(worker)
        return peer.info.name if peer is not None else f"number {worker}"

    def members(self) -> dict[Worker, Member]:
        """Returns a copy of the members of the group by number, including this worker."""
        with self._lock:
            return dict(self._membership.members.here)

    def add_member(self, member: Member) -> None:
        """Adds a worker that is known to be in the group. Does nothing if it is a member already, or is gone."""
        if member.number not in self._membership.members.here:
            with self._lock:
                effects = self._membership.message_received(member.number, News((member,)))
                self._change(effects)
            self._act(effects)

    def is_gone(self, worker: Worker) -> bool:
        """Returns whether a worker was a member and is not any more. False for a number that was never seen."""
        with self._lock:
            members = self._membership.members
            return worker in members.gone and worker not in members.here

    def names_gone(self) -> set[str]:
        """Returns the names of workers that are gone, except names that a member has again. Empty if there are none.

        At most the last 1024 workers that are gone are remembered.
        """
        with self._lock:
            gone = {peer.info.name for peer in self._gone.values()}
            return gone.difference(member.name for member in self._membership.members.here.values())

    def connections_of(self) -> dict[Worker, tuple[ServerConnection | None, OutboxSender]]:
        """Returns two things for each member, by number: the connection from it, and the `OutboxSender` to it.

        The connection is None if the member has not connected to this worker. An `OutboxSender` sends control messages.
        This worker is included.
        """
        with self._lock:
            return {number: (self._server_connections.get(number), sender) for number, sender in self._senders.items()}

    def silences(self) -> dict[str, float]:
        """Returns how many seconds each worker that this one watches has been silent, by name; may be empty.

        A worker sends heartbeats to some members only: those that it watches.
        """
        with self._lock:
            watching = self._membership.watching
            return {self.name_of(number): watching.silence(number) for number in watching.watched}

    def watch(self, watcher: Watcher) -> None:
        """Registers a function that is called with every later change of the membership.

        Calls run in the executor, one at a time, in the order of the changes.

        Args:
            watcher: The function. Errors that it raises are logged. If it is registered twice, it is called twice.
        """
        self._watchers.append(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        """Removes one registration of a watcher. Does nothing if it is not registered."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    # The end

    def leave(self) -> None:
        """Tells all connected workers that this one leaves the group, so that they do not declare it lost. Never waits.

        Closes no connection. From now on, this worker does not declare a worker lost when a connection ends.
        """
        self.is_quiet = True
        with self._lock:
            effects = self._membership.leave_wanted()
            clients = [peer.connection for peer in self._peers.by_number.values()]
            servers = list(self._server_connections.values())
        good_byes = [effect.message for effect in effects if isinstance(effect, SendMessage)]
        if good_byes:
            frame = pack_message(GOSSIP, encode(good_byes[0]))
            for client in clients:
                if client is not None:
                    client.send(frame)
            for server in servers:
                server.send(frame)

    # Carrying out effects

    def _change(self, effects: Iterable[Effect]) -> None:
        """Adds and removes workers, as `effects` say, and queues these changes for the watchers.

        `effects` are what the membership protocol has decided; may be empty. Effects that neither add nor remove a
        worker are ignored. The caller holds the lock.
        """
        for effect in effects:
            if isinstance(effect, MemberJoined):
                self._add(effect.member)
                self._note_change("joined", effect.member)
            elif isinstance(effect, MemberLeft | MemberLost):
                has_left = isinstance(effect, MemberLeft)
                self._remove(effect.member, has_left)
                self._note_change("left" if has_left else "lost", effect.member)

    def _act(self, effects: Iterable[Effect]) -> None:
        """Sends messages, ends connections and tells the agent of changes, as `effects` say.

        `effects` are what the membership protocol has decided; may be empty. `_change` must be called with them first.
        Lets the executor call the watchers if changes are queued for them. Forgets the oldest workers that are gone if
        more than 1024 are remembered. The caller does not hold the lock.
        """
        for effect in effects:
            if isinstance(effect, SendMessage):
                self._send_gossip(effect.to, pack_message(GOSSIP, encode(effect.message)))
            elif isinstance(effect, Expelled):
                self._owner.expelled()
            elif isinstance(effect, MemberLeft | MemberLost):
                self._clean_up_gone_worker(effect.member.number, isinstance(effect, MemberLeft))
        if self._unreported_changes:
            self._executor.submit(Task(self._notify_watchers))
        if len(self._gone) > _MAX_REMEMBERED:
            with self._lock:
                while len(self._gone) > _MAX_REMEMBERED:
                    self._peers.forget(self._gone.pop(next(iter(self._gone))))

    def _send_gossip(self, to: Worker, frame: bytes) -> None:
        """Sends a frame about the membership to a worker.

        If the worker is not a member any more, sends it on the connection that the worker has opened to this one. Does
        nothing if there is none.
        """
        sender = self._senders.get(to)
        if sender is not None:
            sender.send_gossip(frame)
            return
        connection = self._server_connections.get(to)  # of a worker that is gone for this one, and must be told so
        if connection is not None:
            connection.send(frame)

    def _note_change(self, kind: str, member: Member) -> None:
        """Queues a change for the watchers that are registered now. `kind` is "joined", "left" or "lost"."""
        if self._watchers:
            self._unreported_changes.append((list(self._watchers), MembershipChange(kind, info_of(member))))

    def _notify_watchers(self) -> None:
        """Calls the watchers with all queued changes. Returns at once if another thread is calling them."""
        while self._unreported_changes and self._notifying.acquire(blocking=False):
            try:
                while self._unreported_changes:
                    call_watchers(*self._unreported_changes.popleft())
            finally:
                self._notifying.release()

    def _add(self, member: Member) -> None:
        """Adds a member: creates its peer, its outbox and its outbox sender."""
        peer = Peer(
            self._parts,
            member,
            self.me,
            self.run,
            self._owner.connect_client,
            self._refused_as_dead,
            self._is_over,
        )
        self._store.add_worker(member.number)
        self._senders[member.number] = OutboxSender(
            peer,
            self._store,
            self._executor,
            lambda: self._server_connections.get(member.number),
            lambda: self._unreachable(member.number),
            self._gossip_slots,
        )
        self._peers.add(peer)

    def _remove(self, member: Member, has_left: bool) -> None:
        """Marks a member as gone, in the tables only. `_clean_up_gone_worker` must follow, without the lock.

        `has_left` is True if the member has left, and False if it was lost.
        """
        fate = "has left the group" if has_left else "was lost"
        logger.info("worker %r: worker %r %s", self.me.name, member.name, fate)
        peer = self._peers.by_number[member.number]
        del self._senders[member.number]
        peer.lose(has_left)
        self._gone[member.number] = peer

    def _clean_up_gone_worker(self, number: Worker, has_left: bool) -> None:
        """Ends the connections with a worker that is gone, fails the references that it owned, and tells the agent.

        `has_left` is True if the worker has left, and False if it was lost. The last replies of a worker that has left
        are still read. Called without the lock, because callbacks of users may run.
        """
        peer = self._peers.by_number.get(number)
        if peer is not None and has_left:
            self._leaving.append(peer)
            peer.leave()
        elif peer is not None:
            peer.close_connection()
        connection = self._server_connections.get(number)
        if connection is not None:
            connection.close()
        self._store.remove_worker(number)
        self._owner.worker_gone(number, has_left)


def call_watchers(watchers: Iterable[Watcher], change: MembershipChange) -> None:
    """Calls each watcher with `change`. Logs errors that watchers raise. Does nothing if there are no watchers."""
    for watcher in watchers:
        try:
            watcher(change)
        except BaseException:  # not even sys.exit() may end the thread, or skip the other watchers
            logger.exception("a callback for changes of the group failed")
