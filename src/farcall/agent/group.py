"""The group as one agent lives in it: who is there, how each is reached, and who has gone.

The membership protocol (`protocol.membership`) decides who is there; here it meets threads, a clock and connections.

Rules
- The protocol is asked under the lock, and what it says of members is done under it, in its order. That changes tables,
  and nothing more: what is to be sent, and what a user wants to be told, comes after.
- Nothing here waits. What takes a while, to connect, is left to the posts in the serving pool.
- Who has closed a connection is examined at once. If nobody listens where it did, its process is gone; anything else
  may be a break of the network, and the heartbeat decides.
- Who leaves has answered before, perhaps on another connection than its good-bye came by, or a friend's word of it. So
  the connection ends when the answers are read; at the latest at the tick after next.
- Watchers are told in the order in which the tables changed, one change after the other, whoever has changed them.
- Of those who have gone some are remembered, so that who calls them hears what became of them.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import Final

from farcall.agent.book import ReferenceBook
from farcall.agent.calling import Calling
from farcall.agent.calls import ChoreJob
from farcall.agent.incoming import Incoming
from farcall.agent.lanes import Lane
from farcall.agent.outgoing import Outgoing
from farcall.agent.peers import Peer
from farcall.agent.post import Post
from farcall.agent.serving import Serving
from farcall.backends.interface import MembershipChange
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
from farcall.protocol.wire import NEWS, Bytes, Sizes
from farcall.protocol.wire import encode as encode_frame
from farcall.security import Credentials
from farcall.transports.base import Channel, Transport
from farcall.transports.shared_memory import Pool

logger = logging.getLogger("farcall")

_REMEMBERED: Final = 1024
"""So many of those who have gone are remembered."""


class Group:
    """The other workers, from one agent's point of view."""

    def __init__(
        self,
        me: Member,
        run: str,
        is_open: bool,
        transports: Mapping[str, Transport],
        book: ReferenceBook,
        calling: Calling,
        serving: Serving,
        new_connection: Callable[[Peer, Channel, Lane], Outgoing],
        on_expelled: Callable[[], None],
        interval: float,
        patience: float,
        credentials: Credentials,
        pool: Pool,
    ) -> None:
        """Raises `UsageError` if interval and patience do not go together."""
        self.me = me
        self.run = run
        self._is_open = is_open  # workers may join that were not there at the start
        self.next_tick = 0.0
        """When `tick` is to be called next, by the monotonic clock."""
        self.is_quiet = False
        """From now on, a connection that ends is no sign of a loss: everybody is about to go."""
        self.on_gone: Callable[[Worker, bool], None] = lambda number, left: None
        """Told of everybody that is gone, and whether it said good-bye; set by the agent."""
        self.sizes = Sizes()
        """How large the messages of others may be; set by the agent."""
        self._transports = transports
        self._book = book
        self._calling = calling
        self._serving = serving
        self._new_connection = new_connection
        self._on_expelled = on_expelled
        self._credentials = credentials
        self._pool = pool
        self._interval = interval
        self._lock = threading.RLock()
        self._membership = Membership(me, random.randrange, interval=interval, patience=patience)
        self._posts: dict[Worker, Post] = {}
        self._incoming: dict[Worker, Incoming] = {}  # the connection of each that it made
        self._gone: dict[Worker, Peer] = {}  # oldest first
        self._parting: list[Peer] = []  # those who left since the last tick, and since the one before
        self._parting_before: list[Peer] = []
        self._watchers: list[Callable[[MembershipChange], object]] = []
        self._untold: deque[tuple[list[Callable[[MembershipChange], object]], MembershipChange]] = deque()
        self._telling = threading.Lock()
        self._add(me)

    # Start, and the clock

    def start(self, members: Iterable[Member], announce: bool) -> None:
        """These are there. `announce`: they do not know of this worker yet."""
        self.next_tick = monotonic() + self._interval * (0.5 + random.random() / 2)  # not all at once
        with self._lock:
            effects = self._membership.started(tuple(members), announce)
            self._change(effects)
        self._act(effects)

    def tick(self, now: float) -> None:
        """Pings some, and declares lost who has not answered for too long. For the supervisor."""
        self.next_tick = now + self._interval
        if self._calling.closed is not None:  # expelled, say: nobody wants to hear from this worker
            return
        with self._lock:
            effects = self._membership.ticked(now)
            self._change(effects)
            posts = [post for post in self._posts.values() if post.is_stuck]
            overdue, self._parting_before, self._parting = self._parting_before, self._parting, []
        self._act(effects)
        for peer in overdue:
            peer.close_connection()
        for post in posts:
            post.try_again()

    # Connections

    def refusal(self, hello: Hello) -> Refused | None:
        """See `Reception`."""
        if hello.group != self.run:
            return Refused(f"this worker is of group {self.run!r}, not of {hello.group!r}")
        if hello.wanted != self.me.name:
            return Refused(f"this is worker {self.me.name!r}, not {hello.wanted!r}")
        if hello.wanted_number != self.me.number:
            return Refused(f"worker {self.me.name!r} was started again, and is not the one that was wanted")
        members = self._membership.members
        if hello.number in members.gone and hello.number != self.me.number:
            reason = f"worker {hello.name!r} is not in the group any more: it has left, or was taken for dead"
            return Refused(reason, gone=True)
        if hello.number not in members.here and not self._is_open:
            return Refused(f"there is no worker {hello.name!r} with number {hello.number} in this group")
        return None

    def greeted(self, incoming: Incoming, hello: Hello) -> None:
        """See `Reception`: it may be somebody of whom nobody has told us yet."""
        self._incoming[hello.number] = incoming
        self.met(Member(hello.number, hello.name, hello.rank, hello.host, hello.addresses))

    def closed(self, incoming: Incoming) -> None:
        """See `Reception`."""
        if incoming.has_greeted():
            caller = incoming.caller()
            if self._incoming.get(caller) is incoming:
                del self._incoming[caller]
            self.examine(caller)

    def told(self, sender: Worker, news: Bytes) -> None:
        """See `Reception`."""
        message = decode(news)
        with self._lock:
            effects = self._membership.message_received(sender, message)
            self._change(effects)
        self._act(effects)

    def examine(self, worker: Worker) -> None:
        """A connection with that worker has ended: connects anew and sends what was lost, or finds that it is gone."""
        post = self._posts.get(worker)
        if post is not None and not self.is_quiet and self._calling.closed is None:
            post.try_again()

    def _unreachable(self, worker: Worker) -> None:
        """Nobody listens any more where that worker did."""
        if self.is_quiet or self._calling.closed is not None:
            return
        with self._lock:
            effects = self._membership.peer_unreachable(worker)
            self._change(effects)
        self._act(effects)

    def _is_over(self) -> bool:
        return self._calling.closed is not None

    def _expelled(self) -> None:
        """Somebody has refused a connection, as this worker was taken for dead."""
        if not self._membership.is_out:
            self._membership.is_out = True
            self._on_expelled()

    def post(self, worker: Worker) -> None:
        """Sends what the reference protocol has to say to that worker."""
        post = self._posts.get(worker)
        if post is not None and self._calling.closed is None:
            post.send()

    # Who is there

    def name_of(self, worker: Worker) -> str:
        """Also of those who have gone of late."""
        peer = self._calling.numbered.get(worker)
        return peer.info.name if peer is not None else f"number {worker}"

    def here(self) -> dict[Worker, Member]:
        """Those who are there, this one included."""
        with self._lock:
            return dict(self._membership.members.here)

    def met(self, member: Member) -> None:
        """That worker is in the group, though nobody may have heard of it yet."""
        if member.number not in self._membership.members.here:
            with self._lock:
                effects = self._membership.message_received(member.number, News((member,)))
                self._change(effects)
            self._act(effects)

    def is_gone(self, worker: Worker) -> bool:
        """Whether that worker was there, and is not any more."""
        with self._lock:
            members = self._membership.members
            return worker in members.gone and worker not in members.here

    def names_gone(self) -> set[str]:
        """The names of those who have gone of late and of whom nobody here has the name again."""
        with self._lock:
            gone = {peer.info.name for peer in self._gone.values()}
            return gone.difference(member.name for member in self._membership.members.here.values())

    def ends(self) -> dict[Worker, tuple[Incoming | None, Post]]:
        """Of each that is there: its connection to this worker, if there is one, and what is sent to it by."""
        with self._lock:
            return {number: (self._incoming.get(number), post) for number, post in self._posts.items()}

    def silences(self) -> dict[str, float]:
        """For how many seconds each of those whom this worker watches has said nothing."""
        with self._lock:
            watching = self._membership.watching
            return {self.name_of(number): watching.silence(number) for number in watching.watched}

    def watch(self, watcher: Callable[[MembershipChange], object]) -> None:
        """Has the watcher called with every change from now on, in the serving pool, in order."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[MembershipChange], object]) -> None:
        """Takes it back. Does nothing if it is not there."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    # The end

    def leave(self) -> None:
        """Says good-bye to all with whom there is a connection, as they would take its end for a loss. Never waits."""
        self.is_quiet = True
        with self._lock:
            effects = self._membership.leave_wanted()
            connected = [peer.connection for peer in self._calling.numbered.values()]
            incoming = list(self._incoming.values())
        good_byes = [effect.message for effect in effects if isinstance(effect, SendMessage)]
        if good_byes:
            frame = encode_frame(NEWS, 0, b"", encode(good_byes[0]))
            for connection in connected:
                if connection is not None:
                    connection.send_news(frame)
            for one in incoming:
                one.answer(frame)

    # Acting

    def _change(self, effects: Iterable[Effect]) -> None:
        """What is to be done to the tables. Under the lock."""
        for effect in effects:
            if isinstance(effect, MemberJoined):
                self._add(effect.member)
                self._note("joined", effect.member)
            elif isinstance(effect, (MemberLeft, MemberLost)):
                left = isinstance(effect, MemberLeft)
                self._remove(effect.member, left)
                self._note("left" if left else "lost", effect.member)

    def _act(self, effects: Iterable[Effect]) -> None:
        """What comes after. Without the lock."""
        for effect in effects:
            if isinstance(effect, SendMessage):
                self._send(effect.to, encode_frame(NEWS, 0, b"", encode(effect.message)))
            elif isinstance(effect, Expelled):
                self._on_expelled()
            elif isinstance(effect, (MemberLeft, MemberLost)):
                self._finish_off(effect.member.number, isinstance(effect, MemberLeft))
        if self._untold:
            self._serving.submit(ChoreJob(self._tell))
        if len(self._gone) > _REMEMBERED:
            with self._lock:
                while len(self._gone) > _REMEMBERED:
                    self._forget(self._gone.pop(next(iter(self._gone))))

    def _send(self, to: Worker, frame: bytes) -> None:
        post = self._posts.get(to)
        if post is not None:
            post.say(frame)
            return
        incoming = self._incoming.get(to)  # of one who is gone for us, and should hear of it
        if incoming is not None:
            incoming.answer(frame)

    def _note(self, kind: str, member: Member) -> None:
        """For the watchers of now. Under the lock."""
        if self._watchers:
            self._untold.append((list(self._watchers), MembershipChange(kind, info_of(member))))

    def _tell(self) -> None:
        """Tells the watchers what they have not been told yet, unless another thread is at it: that one goes on."""
        while self._untold and self._telling.acquire(blocking=False):
            try:
                while self._untold:
                    call_watchers(*self._untold.popleft())
            finally:
                self._telling.release()

    def _add(self, member: Member) -> None:
        peer = Peer(
            member,
            self.me,
            self.run,
            self._transports,
            self._new_connection,
            self._expelled,
            self._is_over,
            self._credentials,
            self._pool,
        )
        peer.sizes = self.sizes
        self._book.joined(member.number)
        self._posts[member.number] = Post(
            peer,
            self._book.mailboxes,
            self._serving,
            lambda: self._incoming.get(member.number),
            lambda: self._unreachable(member.number),
        )
        calling = self._calling
        calling.numbered[member.number] = peer
        calling.peers[peer.info.name] = calling.peers[peer.info.id] = calling.peers[peer.info] = peer

    def _remove(self, member: Member, left: bool) -> None:
        number = member.number
        peer = self._calling.numbered[number]
        logger.info("worker %r: worker %r %s", self.me.name, member.name, "has left the group" if left else "was lost")
        del self._posts[number]
        peer.lose(left)
        self._gone[number] = peer

    def _forget(self, peer: Peer) -> None:
        calling = self._calling
        calling.numbered.pop(peer.number, None)
        for key in (peer.info.name, peer.info.id, peer.info):
            if calling.peers.get(key) is peer:
                del calling.peers[key]

    def _finish_off(self, number: Worker, left: bool) -> None:
        """Whatever waits for one who has gone ends now. Without the lock: callbacks may follow from it."""
        peer = self._calling.numbered.get(number)
        if peer is not None and left:
            self._parting.append(peer)
            peer.part()
        elif peer is not None:
            peer.close_connection()
        incoming = self._incoming.get(number)
        if incoming is not None:
            incoming.close()
        self._book.lost(number)
        self.on_gone(number, left)


def info_of(member: Member) -> WorkerInfo:
    """What the program knows a worker by: its rank is its number if it was given none."""
    return WorkerInfo(member.name, member.rank if member.rank >= 0 else member.number)


def call_watchers(watchers: Iterable[Callable[[MembershipChange], object]], change: MembershipChange) -> None:
    """Tells each of them. What one raises is logged."""
    for watcher in watchers:
        try:
            watcher(change)
        except BaseException:  # a sys.exit() too ends neither the thread nor the others' turns
            logger.exception("a callback for changes of the group failed")
