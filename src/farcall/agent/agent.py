"""A worker's agent: it owns everything that runs, and takes it down again.

It is the `RpcAgent` of the default backend, and puts together what the other modules of this layer do: the poller and
the serving pool that read and run, the supervisor that watches the clock, the listeners, one `Peer` for each worker of
the group. It holds no global: several agents may live in one process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from farcall.agent.book import ReferenceBook
from farcall.agent.calling import Calling, To
from farcall.agent.calls import ChoreJob, PendingCall
from farcall.agent.coroutines import EventLoop
from farcall.agent.counting import Counting
from farcall.agent.doorstep import Doorstep
from farcall.agent.entrance import Entrance
from farcall.agent.execution import Workplace
from farcall.agent.group import Group, info_of
from farcall.agent.guarding import jobs_for, reply_for
from farcall.agent.handle import Handle
from farcall.agent.incoming import Incoming
from farcall.agent.lanes import IDLE, Lane, pool_for, received_memory
from farcall.agent.listening import Listening, listen_on
from farcall.agent.outgoing import Outgoing
from farcall.agent.peers import Peer
from farcall.agent.poller import Poller
from farcall.agent.serving import Serving
from farcall.agent.spinning import Spinning
from farcall.agent.supervisor import Supervisor
from farcall.agent.turns import Bells
from farcall.agent.waiting import WaitingAgent
from farcall.backends.interface import MembershipChange, Metrics
from farcall.errors import ExpelledError, ForkedProcessError, NotInitializedError, RpcError, ShutdownError, UsageError
from farcall.options import RpcBackendOptions
from farcall.protocol.ids import Worker, WorkerInfo
from farcall.protocol.wire import Sizes
from farcall.rendezvous.store import PATIENCE
from farcall.security import Credentials, credentials_of
from farcall.serialization import encode_text
from farcall.transports.base import Channel, Transport

if TYPE_CHECKING:
    from farcall.rendezvous import Rendezvous

logger = logging.getLogger("farcall")

_CLOSE_TIMEOUT: Final = 1.0
_HURRY: Final = 0.2
"""Seconds instead of those, when Ctrl-C has come in the midst of closing."""
_SHORT_PATIENCE: Final = 1.0
_GONE: Final = object()


class Agent(WaitingAgent):
    """One worker of a group."""

    book: ReferenceBook
    failure_to_send: Callable[[str, BaseException], BaseException] | None = None
    """For a subclass: see `Workplace`."""

    def __init__(
        self,
        name: str,
        rendezvous: Rendezvous,
        options: RpcBackendOptions,
        transports: Mapping[str, Transport],
        credentials: Credentials | None = None,
    ) -> None:
        """Joins the group; `start` it next. Raises `RendezvousError`; then nothing is left running.

        `credentials` are by default what the options say of them.
        """
        options = options.taken()
        self._credentials = credentials or credentials_of(options)
        self._strangers = Doorstep(self._credentials.limits)
        self._sizes = Sizes(options.max_head_size, options.max_message_size)
        self._pool = pool_for(name, options.shared_memory)
        self._received = received_memory()
        self.options = options
        self.device_maps = options.device_maps
        """Stored for those who move tensors; the agent itself does nothing with it."""
        self._rendezvous = rendezvous
        self._incoming: set[Incoming] = set()
        self._connections: dict[Outgoing, object] = {}
        self._counting = Counting()
        self._meetings = 0
        self._lost: list[str] = []
        self._ended = False
        self._is_closing = False
        self._lock = threading.Lock()
        self._poller = Poller()
        self._bells = Bells()
        self._supervisor = Supervisor(name)
        self._loop = EventLoop(name)
        self._serving = Serving(
            name, self._poller, options.num_worker_threads, self.new_spinning(), self._supervisor.quicken
        )
        try:
            self._listeners = listen_on(name, transports.values(), rendezvous.host)
        except UsageError:
            self._poller.close()
            raise
        self._listening = Listening(name, self._listeners, self._poller, self._come)
        addresses = tuple(listener.address for listener in self._listeners)
        self._entrance = Entrance(rendezvous, name, addresses, options.heartbeat_patience)
        try:
            me, members = self._entrance.join(options.init_timeout)
            self.info = info_of(me)
            self.book = ReferenceBook(
                me.number,
                lambda worker: self.group.post(worker),
                self._supervisor.quicken,
                lambda worker: self.group.name_of(worker),
                options.record_stacks,
            )
            last_resort = encode_text(
                "MemoryError", "there was not even memory to tell what is wrong", name, "a function"
            )
            jobs = jobs_for(options.allow, name)
            last = (last_resort, *jobs, self.failure_to_send)
            self._place = Workplace(name, self._loop, self._serving, self.book, *last)
            self.calling = self.book.calling = Calling(self.info, self.book, self._place, options.rpc_timeout)
            # The methods of these names, one frame shorter: they are the fast path.
            self.call = self.calling.call  # type: ignore[method-assign]
            self.remote = self.calling.remote  # type: ignore[method-assign]
            self.group = Group(
                me,
                rendezvous.group,
                self._entrance.is_open,
                transports,
                self.book,
                self.calling,
                self._serving,
                self._new_connection,
                self._expelled,
                options.heartbeat_interval,
                options.heartbeat_patience,
                self._credentials,
                self._pool,
            )
            self.group.sizes = self._sizes
            self._first_members = members
            self.book.resend = self.group.examine
            self.group.on_gone = self._member_gone
            self._peers = self.calling.peers
        except BaseException:
            self._entrance.leave()
            self._close_descriptors()
            raise
        self._chores: list[tuple[Callable[[], bool], Callable[[], None]]] = [(self.book.needs_help, self.book.work_off)]
        self._supervisor.has_chores = self.book.has_work
        self._supervisor.do_chores = self._do_chores
        self._supervisor.serving = self._serving
        self._supervisor.connections = lambda: list(self._connections)
        self._supervisor.next_beat = lambda: self.group.next_tick
        self._supervisor.beat = self._beat

    @property
    def closed(self) -> RpcError | None:  # type: ignore[override]
        """See `RpcAgent`."""
        return self.calling.closed

    # Start

    def start(self) -> None:
        """Begins to serve. Not before whoever holds the agent can find it: the functions it runs may ask for it."""
        self._entrance.keep(self.group, self._serving)
        self.group.start(self._first_members, announce=self._entrance.is_open)
        self._serving.start()
        self._supervisor.start()
        # Only now: who came before the group is known would be refused, and take this worker for another one.
        self._listening.start()

    def _beat(self, now: float) -> None:
        self.group.tick(now)
        self._entrance.tick(now)
        self._strangers.expire(now)
        for lane in self._lanes():
            lane.sweep(now)
        self._received.sweep(now - IDLE)
        if self.closed is None:
            self._listening.go_on()  # what took the last descriptor may not have been a connection of ours

    def _come(self, channel: Channel, address: str) -> None:
        """Somebody has connected at that address."""
        incoming = Incoming(
            self.group,
            channel,
            self._poller,
            self._place,
            self._incoming_closed,
            self._credentials,
            address,
            self._pool,
        )
        incoming.traffic.decoder.limits = self._sizes
        incoming.traffic.decoder.new_memory = self._received.take
        self._incoming.add(incoming)
        self._strangers.came(incoming, monotonic())

    def _incoming_closed(self, incoming: Incoming) -> None:
        self._incoming.discard(incoming)
        self._strangers.gone(incoming)
        if incoming.has_greeted():
            self._counting.incoming_gone(incoming.caller(), incoming)
        if self.closed is None:
            self._listening.go_on()

    def new_spinning(self) -> Spinning:
        """How one waits for the replies of one worker, and the leader for requests."""
        return Spinning(self.options.spin)

    def _new_connection(self, peer: Peer, channel: Channel, lane: Lane) -> Outgoing:
        def lost(connection: Outgoing) -> None:
            # It may be told twice, by two threads at once: one of them gets it.
            if self._connections.pop(connection, _GONE) is not _GONE:
                self._counting.outgoing_gone(connection)
            peer.forget(connection)
            self.group.examine(peer.number)

        connection = Outgoing(
            peer.info,
            peer.number,
            channel,
            lane,
            self._poller,
            self._serving,
            self._supervisor,
            self.book,
            self.new_spinning(),
            self._bells,
            self.group.told,
            lost,
        )
        connection.traffic.decoder.limits = self._sizes
        connection.traffic.decoder.new_memory = connection.lane.new_memory = self._received.take
        connection.new_reply = reply_for(self.options.allow, self.info.name)
        self._connections[connection] = None
        if self.closed is not None:  # meanwhile
            connection.close(str(self.closed))
        return connection

    def _member_gone(self, number: Worker, left: bool) -> None:
        self._counting.peer_gone(number)
        if not left and not self._entrance.is_open:  # in an open group it would pile up, and nobody waits for everybody
            self._lost.append(self.group.name_of(number))
        self._entrance.member_gone(number, left)

    def _expelled(self) -> None:
        """The group has taken this worker for dead: what it does from now on would be believed by nobody."""
        with self._lock:
            if self.closed is not None:
                return
            self.calling.closed = ExpelledError(
                f"worker {self.info.name!r} (this one) was taken for dead by its group, as it did not answer for too "
                "long; its references are gone. Call shutdown(graceful=False), and init_rpc() to join again"
            )
        logger.warning("%s", self.closed)
        self._entrance.expelled()
        for connection in list(self._connections):
            connection.close(str(self.closed), ExpelledError)
        self._serving.run_aside(ChoreJob(self.book.cut_off))  # callbacks may follow from it

    # The group

    def get_worker_info(self, to: To | None = None) -> WorkerInfo:
        """Of the worker of that name or rank; of this one by default. Raises `UnknownWorkerError`."""
        if to is None:
            return self.info
        peer = self._peers.get(to)
        if peer is None:
            raise self.calling.refusal(to)
        return peer.info

    def get_worker_infos(self) -> list[WorkerInfo]:
        """All workers of the group, by rank."""
        return self.calling.worker_infos()

    # Calls

    @property
    def rpc_timeout(self) -> float:
        """See `RpcAgent`."""
        return self.calling.rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, seconds: float) -> None:
        self.calling.rpc_timeout = seconds

    def run_on(
        self,
        worker: WorkerInfo,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: float,
    ) -> PendingCall:
        """See `RpcAgent`."""
        return self.calling.call(worker, function, args, kwargs, timeout, unattended=True)

    def remote(
        self, to: To, function: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
    ) -> Handle:
        """See `RpcAgent`."""
        return self.calling.remote(to, function, args, kwargs)

    def watch_members(self, watcher: Callable[[MembershipChange], object]) -> None:
        """See `RpcAgent`."""
        self.group.watch(watcher)

    def unwatch_members(self, watcher: Callable[[MembershipChange], object]) -> None:
        """See `RpcAgent`."""
        self.group.unwatch(watcher)

    def afterwards(self, chore: Callable[[], None]) -> None:
        """For a function that another worker has called: has that done when its reply has gone, or at once."""
        self._serving.afterwards(chore)

    def look_after(self, has_work: Callable[[], bool], work_off: Callable[[], None]) -> Callable[[], None]:
        """Has `work_off` run in the serving pool every few milliseconds while `has_work`.

        What is returned is to be called whenever there is work after there was none. All of them from any thread.
        """
        self._chores.append((has_work, work_off))
        chores = list(self._chores)
        self._supervisor.has_chores = lambda: any(each() for each, _ in chores)
        return self._supervisor.quicken

    def _do_chores(self) -> None:
        for has_work, work_off in list(self._chores):
            if has_work():
                self._serving.submit(ChoreJob(work_off))

    # Reports

    def get_metrics(self) -> Metrics:
        """See `RpcAgent`."""
        return self._counting.report(list(self._connections), self.group, self._serving.counts())

    # The end

    def shutdown(self, graceful: bool = False, timeout: float = 0.0) -> None:
        """Leaves the group and frees everything, in any case.

        Graceful: first waits until all workers are here and all their calls have ended, at most `timeout` seconds (0:
        without limit). Raises `ShutdownError`, after everything is freed, if that failed. Ctrl-C ends the waiting and
        is raised after everything is freed, too; if more of them come in the midst of that, the next shutdown goes on.
        """
        early, patience = True, 0.0
        try:
            if graceful and self._entrance.is_open:
                self.wind_up(timeout)
            elif graceful:
                self.part(timeout)
                early, patience = False, PATIENCE
        except ShutdownError:
            patience = _SHORT_PATIENCE  # so that those who come just now still hear who was missing
            raise
        finally:
            try:
                self._close(early, patience, _CLOSE_TIMEOUT)
            except BaseException:
                self._close(early, 0.0, _HURRY)
                raise

    def close_after_parting(self) -> None:
        """Frees everything, after `part`."""
        self._close(early=False, patience=PATIENCE, timeout=_CLOSE_TIMEOUT)

    def _close(self, early: bool, patience: float, timeout: float) -> None:
        """Frees everything, unless another thread is at it, or a frame below this one (of a signal handler's)."""
        mine = False
        try:
            with self._lock:
                if self._ended or self._is_closing:
                    return
                self._is_closing = mine = True
            self._free(early, patience, timeout)
            self._ended = True
        finally:
            if mine:
                self._is_closing = False

    def _free(self, early: bool, patience: float, timeout: float) -> None:
        """Each step may be done twice, by who was interrupted in the midst of it."""
        is_in = self.closed is None
        self.calling.closed = NotInitializedError(f"worker {self.info.name!r} has shut down; call init_rpc again first")
        why = f"worker {self.info.name!r} (this one) shut down before the call ended"
        for connection in list(self._connections):
            for future in list(connection.pending.values()):
                # Before the good-bye: whoever hears that hangs up, and would be blamed.
                connection.take_and_fail(future, future.cut_off(RpcError(why), ""))
        if early:
            if is_in:
                self.group.leave()
            self._entrance.leave()  # also of one that was expelled: it keeps the way in no longer
        for connection in list(self._connections):
            connection.close(why)
        deadline = monotonic() + timeout
        self._loop.close(timeout)
        left = self._serving.close(deadline)
        if left:
            logger.warning("worker %r: %d function(s) still run after the shutdown", self.info.name, len(left))
        self._supervisor.close()
        self._close_descriptors()
        self.book.clear()
        self._rendezvous.store.close(early, patience)

    def _close_descriptors(self) -> None:
        self._listening.close()
        for incoming in list(self._incoming):
            incoming.close()
        self._pool.close()
        self._received.close()
        self._poller.close()
        self._bells.close()

    @property
    def is_forked(self) -> bool:
        """Whether this agent belongs to the parent of this process."""
        return isinstance(self.closed, ForkedProcessError)

    def _lanes(self) -> list[Lane]:
        connections, incoming = list(self._connections), list(self._incoming)
        return [*[each.lane for each in connections], *[each.lane for each in incoming]]

    def about_to_fork(self) -> None:
        """See `RpcAgent`."""
        for lane in self._lanes():
            lane.pin()

    def abandon(self) -> None:
        """See `RpcAgent`."""
        self._ended = True
        forked = self.calling.closed = ForkedProcessError(
            f"this process was forked from worker {self.info.name!r} and cannot use its agent; "
            "call init_rpc with a name of its own in this process, or start it with the spawn method"
        )
        for connection in list(self._connections):
            connection.abandon(forked)
        for incoming in list(self._incoming):
            incoming.abandon()
        for listener in self._listeners:
            listener.abandon()
        self._pool.close()
        self._received.abandon()
        self._poller.abandon()
        self._bells.close()
        self._rendezvous.store.abandon()
