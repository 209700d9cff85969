"""`Agent`, the `RpcAgent` of the default backend: creates the parts of a worker, and closes them at shutdown.

It has no global state: one process can have several agents.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from farcall.backends.interface import Key, MembershipChange, Metrics, RpcAgent, To
from farcall.errors import ExpelledError, ForkedProcessError, NotInitializedError, RpcError, ShutdownError, UsageError
from farcall.futures import Future
from farcall.options import UNSET_RPC_TIMEOUT, RpcBackendOptions
from farcall.protocol.ids import Worker, WorkerInfo
from farcall.protocol.refcount import ReferenceCounts
from farcall.rendezvous.store import CLOSE_TIMEOUT_S as STORE_TIMEOUT_S
from farcall.runtime import interrupts
from farcall.runtime.busy_report import describe_busy_work
from farcall.runtime.caller import Caller
from farcall.runtime.client import ClientConnection
from farcall.runtime.cluster import Cluster, PeerTable
from farcall.runtime.coroutines import EventLoop
from farcall.runtime.executor import Executor, Job, Task
from farcall.runtime.handles import Handle
from farcall.runtime.interceptors import ClientInterceptor, InterceptorChain, ServerInterceptor
from farcall.runtime.invocation import call_after_reply
from farcall.runtime.joining import GroupEntry
from farcall.runtime.leaks import Inventory
from farcall.runtime.metrics import MetricsCounter
from farcall.runtime.parts import WorkerParts
from farcall.runtime.peers import Peer, info_of
from farcall.runtime.reference_store import PROCESS_INTERVAL_S, RandomTokens, ReferenceStore
from farcall.runtime.server import PendingHandshakes, ServerConnection
from farcall.runtime.shutdown import (
    Occasion,
    confirm_leave,
    deadline_of,
    wait_at_barrier,
    wait_for_everybody,
    wait_until_idle,
)
from farcall.runtime.timers import Timers
from farcall.security import Credentials, credentials_from_options
from farcall.security.allowed import AllowList
from farcall.transports.base import Link, LinkOptions, Listener, Transport
from farcall.transports.buffer_pool import default_buffer_pool
from farcall.transports.poller import Poller
from farcall.transports.shm_buffers import default_segment_pool

if TYPE_CHECKING:
    from farcall.rendezvous import Rendezvous

logger = logging.getLogger("farcall")

_CLOSE_TIMEOUT_S: Final = 1.0
_SHORT_CLOSE_TIMEOUT_S: Final = 0.2
"""Used after Ctrl-C has interrupted the closing."""
_SHORT_STORE_TIMEOUT_S: Final = 1.0
_IDLE_MEMORY_S: Final = 10.0
"""Seconds after which unused memory is given back to the system."""


class Agent(RpcAgent):
    """farcall's own agent: makes this process one worker of a group, and holds all parts of the worker."""

    reference_store: ReferenceStore
    """The references of this worker."""
    failure_to_send: Callable[[str, BaseException], BaseException] | None = None
    """For a subclass: see `WorkerParts`."""
    function_runner: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    """For a subclass: see `WorkerParts`."""
    honours_deadlines: bool = True
    """For a subclass: see `WorkerParts`."""

    def __init__(
        self,
        name: str,
        rendezvous: Rendezvous,
        options: RpcBackendOptions,
        transports: Mapping[str, Transport],
        credentials: Credentials | None = None,
    ) -> None:
        """Joins the group. `start` must follow.

        Args:
            name: The name of this worker.
            rendezvous: Where the workers of the group find each other.
            options: The options of the program. The agent keeps a frozen copy.
            transports: The transports by scheme, in order of preference.
            credentials: The credentials to use; None to make them from the options.

        Raises:
            RendezvousError: The group could not be joined. Nothing is left running.
            UsageError: No transport can be used here.
        """
        options = self.options = options.frozen_copy()
        self.device_maps = options.device_maps
        """For code that moves tensors. The agent itself does not use it."""
        self._credentials = credentials or credentials_from_options(options)
        self._rendezvous = rendezvous
        self._lock = threading.Lock()
        self._lost: list[str] = []
        self._syncs = 0
        self._has_ended = self._is_closing = False
        self.left: Inventory | None = None
        """The references that still existed at the end of `wait_to_leave`; None before."""
        self._servers: set[ServerConnection] = set()
        self._clients: dict[ClientConnection, None] = {}
        self._metrics = MetricsCounter()
        self._handshakes = PendingHandshakes(self._credentials.limits)
        self.interceptors = InterceptorChain()
        self._poller = Poller(options.spin)
        self._segments = default_segment_pool(name, options.shared_memory)
        self._received = default_buffer_pool()
        self._link_options = LinkOptions(
            self._poller,
            self._segments,
            self._received,
            options.spin,
            copy_shared=options.allow is not None,
            max_frame_size=options.max_message_size,
        )
        self._timers = Timers(name)
        self._loop = EventLoop(name, self)
        self._executor = Executor(name, self._poller, options.num_worker_threads, self)
        try:
            self._listeners = self._listen(name, transports, rendezvous.host)
        except BaseException:
            self._poller.close()
            raise
        addresses = tuple(listener.address for listener in self._listeners)
        self._entry = GroupEntry(rendezvous, name, addresses, options.heartbeat_patience)
        try:
            me, self._first_members = self._entry.join(options.init_timeout)
            self.info = info_of(me)
            self._peers = PeerTable()
            self.reference_store = ReferenceStore(
                ReferenceCounts(me.number, RandomTokens()),
                self._executor,
                self._timers,
                lambda worker: self._cluster.name_of(worker),
                lambda worker: self._cluster.send_outbox(worker),
                lambda worker: self._cluster.examine(worker),
                options.record_stacks,
            )
            parts = self._parts = WorkerParts(
                name=name,
                poller=self._poller,
                executor=self._executor,
                timers=self._timers,
                loop=self._loop,
                store=self.reference_store,
                guard=AllowList(options.allow, name) if options.allow is not None else None,
                interceptors=self.interceptors,
                transports=transports,
                credentials=self._credentials,
                link_options=self._link_options,
                limits=(options.max_head_size, options.max_message_size),
                failure_to_send=self.failure_to_send,
                function_runner=self.function_runner,
                honours_deadlines=self.honours_deadlines,
            )
            self.calling = Caller(parts, self.info, self._peers, options.rpc_timeout, self.submit_own_call)
            self.reference_store.calling = self.calling
            # Shadow the methods of the same names, which saves every call one Python function.
            self.call = self.calling.call  # type: ignore[method-assign]
            self.remote = self.calling.remote  # type: ignore[method-assign]
            heartbeat = (options.heartbeat_interval, options.heartbeat_patience)
            self._cluster = Cluster(
                parts, me, rendezvous.group, self._peers, heartbeat, self, is_open=self._entry.is_open
            )
        except BaseException:
            self._entry.leave()
            self._close_descriptors()
            raise

    def _listen(self, name: str, transports: Mapping[str, Transport], host: str) -> list[Listener]:
        """Returns a listener for each transport that works on this machine. Raises `UsageError` if none does."""
        listeners: list[Listener] = []
        reasons = []
        for transport in transports.values():
            try:
                listeners.append(transport.listen(host, self._credentials.limits.max_message_bytes))
            except OSError as error:
                reasons.append(f"{transport.scheme}: {error}")
                logger.info("worker %r does without transport %s: %s", name, transport.scheme, error)
        if not listeners:
            raise UsageError(f"worker {name!r} can listen on no transport ({'; '.join(reasons)})")
        return listeners

    @property
    def closed(self) -> RpcError | None:  # type: ignore[override]
        """The error that every call raises from now on; None while the agent can be used."""
        return self._peers.closed

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        """See `RpcAgent`."""
        return self._entry.is_open

    # Start

    def start(self) -> None:
        """Starts the threads, and begins to run the calls of other workers.

        Must be called once. Raises `RuntimeError` if the system cannot create a thread.
        """
        self._timers.start()
        interrupts.install(self._timers.schedule)
        self._entry.attach(self._cluster, self._executor)
        self._cluster.start(self._first_members, must_announce=self._entry.is_open)
        self._executor.start()
        # Last: a worker that connects before this one knows the members of the group would be refused.
        self._accept_connections()

    def _accept_connections(self) -> None:
        """Starts to accept connections, or resumes after the process had run out of file descriptors."""
        with suppress(OSError):  # the listeners have just been closed
            for listener in self._listeners:
                self._poller.watch_listener(listener, partial(self._accept, listener))

    def _accept(self, listener: Listener) -> None:
        """Accepts one connection, if there is one, and begins its handshake. Logs an error of the listener."""
        try:
            link = listener.accept()
        except OSError as error:
            # Mostly because the process is out of file descriptors. `_accept_connections` is called again at the next
            # heartbeat, and when a connection ends.
            logger.warning("worker %r cannot accept connections at %s: %s", self.info.name, listener.address, error)
            self._poller.unwatch(listener)
            return
        if link is None:
            return
        connection = ServerConnection(self._parts, link, listener.address, self._cluster, self._server_closed)
        self._servers.add(connection)
        self._handshakes.add(connection)

    def _server_closed(self, connection: ServerConnection) -> None:
        """Called when a connection from another worker has ended: forgets the connection, and adds its counts."""
        self._servers.discard(connection)
        self._handshakes.remove(connection)
        if connection.is_admitted():
            self._metrics.add_server(connection)
        if self.closed is None:
            self._accept_connections()

    def connect_client(self, peer: Peer, link: Link, peer_limits: tuple[int, int]) -> ClientConnection:
        """Returns a new connection for our calls, on a link that is established.

        Args:
            peer: The worker at the other end.
            link: The link.
            peer_limits: The largest head and the largest frame in bytes that the other end accepts; 0 for no limit.
        """

        def lost(connection: ClientConnection) -> None:
            if self._clients.pop(connection, self) is None:
                self._metrics.add_client(connection)
            peer.forget(connection)
            self._cluster.examine(peer.number)

        connection = ClientConnection(
            self._parts, peer.info, peer.number, link, peer_limits, self._cluster.receive_gossip, lost
        )
        self._clients[connection] = None
        if self.closed is not None:  # meanwhile
            connection.close(str(self.closed))
        return connection

    def heartbeat(self, now: float) -> None:
        """Called once in each heartbeat interval: ends slow handshakes, frees unused memory, and accepts connections.

        Args:
            now: The time on the monotonic clock.
        """
        self._entry.tick(now)
        self._handshakes.expire()
        self.reference_store.look_for_work()
        before = now - _IDLE_MEMORY_S
        for link in self._links():
            link.sweep(before)
        self._received.sweep(before)
        if self.closed is None:
            self._accept_connections()

    def _links(self) -> list[Link]:
        """Returns the links of all connections in both directions; an empty list if there are none."""
        clients, servers = list(self._clients), list(self._servers)
        return [*[each.link for each in clients], *[each.link for each in servers]]

    def worker_gone(self, number: Worker, has_left: bool) -> None:
        """Called when a worker has left the group (`has_left`) or was lost: updates the counts and the store."""
        self._metrics.remove_worker(number)
        if not has_left and not self._entry.is_open:  # workers of an open group do not wait for all others
            self._lost.append(self._cluster.name_of(number))
        self._entry.member_gone(number, has_left)

    def expelled(self) -> None:
        """Called when the group has declared this worker lost: fails all calls and references with `ExpelledError`.

        Does nothing if the agent is closed.
        """
        with self._lock:
            if self.closed is not None:
                return
            self._peers.closed = ExpelledError(
                f"worker {self.info.name!r} (this one) was declared lost by its group: it did not answer for too "
                "long; its references are gone. Call shutdown(graceful=False), and init_rpc() to join again"
            )
        logger.warning("%s", self.closed)
        self._entry.expelled()
        for connection in list(self._clients):
            connection.close(str(self.closed), ExpelledError)
        self._executor.run_aside(self.reference_store.cut_off)  # aside, because callbacks of users may run

    # The group

    def get_worker_info(self, to: Key | None = None) -> WorkerInfo:
        """Returns the name and id of a worker of the group.

        Args:
            to: The name, the rank or the `WorkerInfo` of the worker; None means this worker.

        Raises:
            UnknownWorkerError: The group has no such worker.
            UsageError: `to` is of another type.
            RpcError: The agent is closed, and has no such worker.
        """
        if to is None:
            return self.info
        peer = self._peers.find(to)
        if peer is None:
            raise self.calling.refusal(to)
        return peer.info

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Returns the names and ids of all workers of the group, this worker included, ordered by rank."""
        return self._peers.present()

    def watch_members(self, watcher: Callable[[MembershipChange], object]) -> None:
        """Registers a function that is called in the executor with every later change of the group, one by one.

        Exceptions of the watcher are logged. A function that is registered twice is called twice.
        """
        self._cluster.watch(watcher)

    def unwatch_members(self, watcher: Callable[[MembershipChange], object]) -> None:
        """Removes a watcher that was registered with `watch_members`. Does nothing if it is not registered."""
        self._cluster.unwatch(watcher)

    # Calls

    @property
    def rpc_timeout(self) -> float:
        """The timeout in seconds of calls that do not give their own; 0 means no timeout. May be set at any time."""
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
    ) -> Future[Any]:
        """Sends a call to a worker without waiting for the reply. Returns a future of the result.

        Args:
            worker: The callee.
            function: The function to run there.
            args: Its positional arguments; may be empty.
            kwargs: Its keyword arguments; may be empty.
            timeout: Seconds; 0 means no timeout.

        Raises:
            SerializationError: An argument cannot be pickled.
            RpcError: The worker is unknown or lost, or the agent is closed.
        """
        return self.calling.call(worker, function, args, kwargs, timeout, unattended=True)

    def remote(
        self,
        to: To,
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> Handle:
        """Makes a worker run a function and keep the result. Returns a handle of the result at once.

        Args:
            to: The worker: its name, rank or `WorkerInfo`.
            function: The function.
            args: Its positional arguments, a tuple or list; None for none.
            kwargs: Its keyword arguments; None for none.
            timeout: After how many seconds without a result the function is cancelled; 0 for no limit.

        Raises:
            UsageError: `to`, `function` or `args` is not valid.
            SerializationError: An argument cannot be pickled.
            RpcError: The worker is unknown or lost, or the agent is closed.
        """
        return self.calling.remote(to, function, args, kwargs, timeout)

    def submit_own_call(self, callee: bytes, job: Job) -> None:
        """Submits a remote call of this worker to itself, for which no message is sent. A subclass may delay it.

        Args:
            callee: The callee as encoded in a frame (`protocol.frames`).
            job: The job that runs the call.
        """
        self._executor.submit(job)

    def add_interceptor(self, interceptor: ClientInterceptor | ServerInterceptor) -> None:
        """Registers an interceptor, as the innermost one, for all calls that begin later.

        Raises:
            UsageError: It is neither a `ClientInterceptor` nor a `ServerInterceptor`.
        """
        self.interceptors.add(interceptor)

    def remove_interceptor(self, interceptor: ClientInterceptor | ServerInterceptor) -> None:
        """Removes an interceptor. Does nothing if it is not registered."""
        self.interceptors.remove(interceptor)

    def after_reply(self, function: Callable[[], object]) -> None:
        """Calls a function after the reply of the call that this thread runs for another worker was sent.

        If the thread runs no such call, the function is called at once, and its errors are raised.
        """
        call_after_reply(function)

    def process_soon(self, has_work: Callable[[], bool], work: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that schedules `work` in the executor, a few milliseconds later.

        Args:
            has_work: Returns whether there is something to do. `work` is called only if it returns True, and again
                until it returns False.
            work: Does the work.

        Returns:
            The function. It takes no lock, so finalizers may call it. Calls before `work` has started schedule it only
            once.
        """
        is_scheduled = False

        def run() -> None:
            nonlocal is_scheduled
            is_scheduled = False
            if has_work():
                work()
            if has_work():
                soon()

        def soon() -> None:
            nonlocal is_scheduled
            if not is_scheduled:
                is_scheduled = True
                self._timers.schedule(monotonic() + PROCESS_INTERVAL_S, lambda: self._executor.submit(Task(run)))

        return soon

    # Reports

    def get_metrics(self) -> Metrics:
        """Returns the counters of this worker, for each other worker and in total. See `Metrics` for the names."""
        refusals = self.reference_store.refusals.counts()
        return self._metrics.report(list(self._clients), self._cluster, self._executor.counts(), refusals)

    # Waiting for the others

    def join(self, shutdown: bool = False, timeout: float = 0.0) -> None:
        """Waits until all workers have called `join` and no call is running anywhere.

        In an open group, only for this worker.

        Args:
            shutdown: Whether this worker will leave next, so that connections that close from now on are expected.
            timeout: How many seconds to wait; 0 means no limit.

        Raises:
            ShutdownError: The timeout expired, a worker was lost, or this worker was expelled.
        """
        if self._entry.is_open:
            wait_until_idle(self, deadline_of(timeout))
        else:
            wait_for_everybody(self, self._rendezvous, deadline_of(timeout), self._next_sync("join()"))
        if shutdown:
            self._cluster.is_quiet = True

    def sync(self, timeout: float = 0.0) -> None:
        """Waits until all workers of a fixed group have called `sync`, whether calls are running or not.

        Args:
            timeout: How many seconds to wait; 0 means no limit.

        Raises:
            ShutdownError: The timeout expired, or a worker was lost.
            UsageError: The group is open.
        """
        if self._entry.is_open:
            raise UsageError("in an open group nobody knows for whom to wait: use _barrier(names) for some workers")
        wait_at_barrier(self, self._rendezvous, deadline_of(timeout), self._next_sync("sync()"))

    def _next_sync(self, where: str) -> Occasion:
        """Returns the next occasion on which all workers wait for each other; `where` is the function, for messages."""
        with self._lock:
            self._syncs += 1
            number = self._syncs
        return Occasion(f"sync/{number}/", where, f"in {where}", f"gave up in {where}", "this worker goes on")

    def is_idle(self) -> bool:
        """Returns whether no function runs here, nothing is left to send, and no reply or acknowledgement is due."""
        return (
            not self._executor.is_busy()
            and not any(connection.pending for connection in list(self._clients))
            and not any(connection.has_unsent() for connection in list(self._servers))
            and self.reference_store.is_quiet()
        )

    def busy_report(self) -> str:
        """Returns text that says which functions and calls keep this worker busy."""
        return describe_busy_work(self._executor.thread_idents(), list(self._clients))

    def is_expelled(self) -> bool:
        """Returns whether the group has declared this worker lost."""
        return isinstance(self.closed, ExpelledError)

    def calls_started(self) -> int:
        """Returns the number of calls that this worker has made so far.

        Messages about references count as well, because releasing a value may make calls.
        """
        now = sum(connection.calls_made for connection in list(self._clients))
        return self._metrics.calls_made() + now + self.reference_store.messages_sent()

    def everybody(self) -> list[tuple[WorkerInfo, bool]]:
        """Returns all known workers of the group, sorted by rank, each with whether it has left or was lost."""
        peers = sorted(self._peers.by_number.values(), key=lambda peer: peer.info.id)
        return [(peer.info, peer.is_lost) for peer in peers]

    def lost(self) -> list[str]:
        """Returns the names of the workers of a fixed group that were lost; an empty list if none was."""
        return list(self._lost)

    # The end

    def shutdown(self, graceful: bool = False, timeout: float = 0.0) -> None:
        """Leaves the group and releases all resources, even if an error is raised. Does nothing the second time.

        Ctrl-C ends the wait. The `KeyboardInterrupt` is raised after everything is closed.

        Args:
            graceful: Whether to wait first until all workers are done; in an open group, until this worker is done.
            timeout: How many seconds to wait; 0 means no limit.

        Raises:
            ShutdownError: The wait failed.
        """
        is_early, store_timeout = True, 0.0
        try:
            if graceful and self._entry.is_open:
                self.drain(timeout)
            elif graceful:
                self.wait_to_leave(timeout)
                is_early, store_timeout = False, STORE_TIMEOUT_S
        except ShutdownError:
            store_timeout = _SHORT_STORE_TIMEOUT_S  # so that workers that arrive now still learn who was missing
            raise
        finally:
            try:
                self._close(is_early, store_timeout, _CLOSE_TIMEOUT_S)
            except BaseException:
                self._close(is_early, 0.0, _SHORT_CLOSE_TIMEOUT_S)
                raise

    def wait_to_leave(self, timeout: float) -> None:
        """Waits until all workers of a fixed group are idle and know that all others are.

        Raises:
            ShutdownError: The timeout expired, a worker was lost, or this worker was expelled.
        """
        deadline = deadline_of(timeout)
        wait_for_everybody(self, self._rendezvous, deadline)
        self._cluster.is_quiet = True
        self.left = self._report_what_is_left()
        confirm_leave(self, self._rendezvous, deadline)

    def drain(self, timeout: float) -> None:
        """Prepares to leave an open group: waits until this worker is idle, and releases its references.

        Raises:
            ShutdownError: The timeout expired, or this worker was expelled.
        """
        deadline = deadline_of(timeout)
        wait_until_idle(self, deadline)
        self.reference_store.give_up_handles(f"worker {self.info.name!r} (this one) has left the group")
        wait_until_idle(self, deadline)
        self._report_what_is_left()

    def _report_what_is_left(self) -> Inventory:
        """Logs a warning if other workers and this one still hold references of each other. Returns all references."""
        inventory = self.reference_store.inventory()
        left = inventory.between_workers()
        if left.owned or left.held:
            logger.warning("worker %r shuts down with references left: it %s", self.info.name, left.report())
        return inventory

    def close_after_leaving(self) -> None:
        """Closes everything. To be called after `wait_to_leave`. Does nothing the second time."""
        self._close(is_early=False, store_timeout=STORE_TIMEOUT_S, timeout=_CLOSE_TIMEOUT_S)

    def _close(self, is_early: bool, store_timeout: float, timeout: float) -> None:
        """Closes everything with `_free`. Does nothing if that was done, or another thread is doing it."""
        with self._lock:
            if self._has_ended or self._is_closing:
                return
            self._is_closing = True
        try:
            self._free(is_early, store_timeout, timeout)
            self._has_ended = True
        finally:
            self._is_closing = False
        interrupts.uninstall()
        interrupts.raise_deferred()

    def _free(self, is_early: bool, store_timeout: float, timeout: float) -> None:
        """Closes everything. Can be called again after it was interrupted: each step can be repeated.

        Args:
            is_early: Whether the other workers do not expect this worker to leave, and must be told.
            store_timeout: Seconds to wait until the other workers do not need the store in this worker any more.
            timeout: Seconds to wait for functions and coroutines that still run.
        """
        is_member = self.closed is None
        self._peers.closed = NotInitializedError(f"worker {self.info.name!r} has shut down; call init_rpc again first")
        reason = f"worker {self.info.name!r} (this one) shut down before the call ended"
        for connection in list(self._clients):
            for future in list(connection.pending.values()):
                # Before the others are told: they close their connections then, and the error would blame them.
                connection.fail(future, future.lost_error(RpcError(reason), ""))
        if is_early:
            if is_member:
                self._cluster.leave()
            self._entry.leave()
        for connection in list(self._clients):
            connection.close(reason)
        self._loop.close(timeout)
        left = self._executor.close(monotonic() + timeout)
        if left:
            logger.warning("worker %r: %d function(s) still run after the shutdown", self.info.name, left)
        self._timers.close()
        self._close_descriptors()
        self.reference_store.clear()
        self._rendezvous.store.close(is_early, store_timeout)

    def _close_descriptors(self) -> None:
        """Closes all listeners and connections from other workers, the shared memory and the poller.

        Can be repeated.
        """
        for listener in self._listeners:
            self._poller.unwatch(listener)
            listener.close()
        for connection in list(self._servers):
            connection.close()
        self._segments.close()
        self._received.close()
        self._poller.close()

    # Fork

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the process that the agent belongs to."""
        return isinstance(self.closed, ForkedProcessError)

    def about_to_fork(self) -> None:
        """Called before this process forks: keeps memory that the child inherits from being written again."""
        for link in self._links():
            link.prepare_fork()

    def abandon(self) -> None:
        """Called in a forked child: closes the child's copies of descriptors.

        Every later call raises `ForkedProcessError`.
        """
        self._has_ended = True
        interrupts.forget()
        error = self._peers.closed = ForkedProcessError(
            f"this process was forked from worker {self.info.name!r} and cannot use its agent; "
            "call init_rpc with a name of its own in this process, or start it with the spawn method"
        )
        for client in list(self._clients):
            client.abandon(error)
        for server in list(self._servers):
            server.abandon()
        for listener in self._listeners:
            listener.abandon()
        self._segments.close()
        self._received.abandon()
        self._poller.abandon()
        self._rendezvous.store.abandon()
