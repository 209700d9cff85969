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
from farcall.gate import FOREVER
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
"""Seconds that a shutdown waits for functions and coroutines that still run."""
_SHORT_CLOSE_TIMEOUT_S: Final = 0.2
"""The same, after Ctrl-C has interrupted the shutdown."""
_SHORT_STORE_TIMEOUT_S: Final = 1.0
"""Seconds that the host of the store waits for the other workers, after a graceful shutdown has failed."""
_IDLE_MEMORY_S: Final = 10.0
"""Seconds after which unused memory is given back to the system."""


class Agent(RpcAgent):
    """farcall's own agent: makes this process one worker of a group, and holds all parts of the worker.

    Create it, call `start` once, and call `shutdown` at the end. After `shutdown`, every call raises
    `NotInitializedError`.

    The constructor joins the group. Other workers cannot call this worker before `start`.

    Args:
        name: The name of this worker. No other worker of the group may have it.
        rendezvous: Where the workers of the group find each other.
        options: The options of the program. The agent keeps a frozen copy, so later changes have no effect.
        transports: The transports by scheme, such as "tcp", in order of preference. Those that do not work on this
            machine are skipped.
        credentials: How this worker authenticates itself; None to create the credentials from `options`.

    Attributes:
        reference_store: The references of this worker.
        failure_to_send: For a subclass. Given a function's name and its error, returns the error to send to the caller.
            None means that the error itself is sent.
        function_runner: For a subclass. Given a function, returns the function to run in its place. None means that the
            function itself is run.
        honours_deadlines: For a subclass. Whether calls inherit deadlines, and a call is cancelled when its caller
            stops waiting.

    Raises:
        RendezvousError: The group could not be joined, for example within `options.init_timeout` seconds. Nothing
            is left running.
        UsageError: No transport works on this machine, or an option is not valid.
    """

    reference_store: ReferenceStore
    failure_to_send: Callable[[str, BaseException], BaseException] | None = None
    function_runner: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    honours_deadlines: bool = True

    def __init__(
        self,
        name: str,
        rendezvous: Rendezvous,
        options: RpcBackendOptions,
        transports: Mapping[str, Transport],
        credentials: Credentials | None = None,
    ) -> None:
        options = self.options = options.frozen_copy()
        self.device_maps = options.device_maps
        """For code that moves tensors. The agent itself does not use it."""
        self._credentials = credentials or credentials_from_options(options)
        self._rendezvous = rendezvous
        self._lock = threading.Lock()
        self._lost: list[str] = []
        self._syncs = 0
        self._has_ended = self._is_closing = False
        # Calls of `shutdown` that have not ended, oldest first: their threads' idents, and events for their ends.
        self._shutdowns: list[tuple[int, threading.Event]] = []
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
        """Returns a listener for each transport that can listen on `host`. Logs and skips the others.

        Raises `UsageError` if no transport can listen. `name` is the name of this worker, for messages.
        """
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
        """The error that every call raises after shutdown, after expulsion, or in a forked child process.

        None while the agent can be used.
        """
        return self._peers.closed

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        """Whether the group is open: workers may join and leave at any time. False for a fixed group."""
        return self._entry.is_open

    # Start

    def start(self) -> None:
        """Starts the threads of this worker, and begins to run the calls of other workers.

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
        """Starts to accept connections on all listeners, also on those that `_accept` has stopped watching.

        Does nothing for listeners that are watched already. Raises nothing.
        """
        with suppress(OSError):  # the listeners have just been closed
            for listener in self._listeners:
                self._poller.watch_listener(listener, partial(self._accept, listener))

    def _accept(self, listener: Listener) -> None:
        """Accepts one connection at `listener`, and begins its handshake. Does nothing if none is waiting.

        If the listener fails, logs a warning and stops watching it, until `_accept_connections` is called again.
        """
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
        """Called when a connection from another worker has ended. Removes it, and adds its counters to the metrics."""
        self._servers.discard(connection)
        self._handshakes.remove(connection)
        if connection.is_admitted():
            self._metrics.add_server(connection)
        if self.closed is None:
            self._accept_connections()

    def connect_client(self, peer: Peer, link: Link, peer_limits: tuple[int, int]) -> ClientConnection:
        """Returns a new connection for calls of this worker to another one.

        If this agent is closed, the returned connection has ended already.

        Args:
            peer: The worker at the other end.
            link: A link to that worker, with a completed handshake.
            peer_limits: The most bytes of a head (a frame without payload and buffers) and of a whole frame that the
                other end accepts; 0 for no limit.
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
        """Called once in each heartbeat interval, for regular work.

        Closes connections whose handshake takes too long, frees memory that was not used for ten seconds, schedules
        work on references, accepts connections again if that had failed, and replaces idle connections whose links
        could be better.

        Args:
            now: The current time of the monotonic clock.
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
            self._replace_connections()

    def _replace_connections(self) -> None:
        """Replaces idle connections for which a new link may be faster (`should_be_replaced`).

        Calls that begin later do not use such a connection: the next one opens a new connection. The old one is closed
        at a later heartbeat, because a thread may be about to send a call on it. A connection with pending calls or
        unsent bytes is not replaced, because later calls on a new connection could overtake these.
        """
        for connection in list(self._clients):
            should_be_replaced = getattr(connection.link, "should_be_replaced", None)
            if should_be_replaced is None or connection.pending or connection.link.unsent_bytes():
                continue
            if should_be_replaced():
                peer = self._peers.by_number.get(connection.number)
                if peer is not None and peer.connection is connection:
                    peer.forget(connection)
                else:
                    connection.lose("another connection to it has taken the place of this one", advice="")

    def _links(self) -> list[Link]:
        """Returns the links of all connections, whether this or the other worker opened them; may be empty."""
        clients, servers = list(self._clients), list(self._servers)
        return [*[each.link for each in clients], *[each.link for each in servers]]

    def worker_gone(self, number: Worker, has_left: bool) -> None:
        """Called when a worker is not in the group any more: updates the metrics and the store of the rendezvous.

        In an open group, the store frees the name of the worker. In a fixed group, nothing more happens if the worker
        has left. If it was lost, its name is added to the result of `lost`. Threads that wait in the store for other
        workers then get a `RendezvousError`. While the group shuts down, they get it only if the lost worker hosted
        the store.

        Args:
            number: The number of the worker.
            has_left: True if the worker has left, False if it was lost.
        """
        self._metrics.remove_worker(number)
        if not has_left and not self._entry.is_open:  # workers of an open group do not wait for all others
            self._lost.append(self._cluster.name_of(number))
        self._entry.member_gone(number, has_left)

    def expelled(self) -> None:
        """Called when the group has declared this worker lost: fails all calls and references with `ExpelledError`.

        Pending calls fail at once, references a moment later in another thread. Does nothing if the agent is closed
        already.
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
        """Returns the name and id of a worker of the group. A worker that has just left or was lost is still found.

        Args:
            to: The name, the rank or the `WorkerInfo` of the worker; None means this worker.

        Raises:
            UnknownWorkerError: The group has no such worker.
            UsageError: `to` has a wrong type, such as float or bool.
            RpcError: Raised in place of `UnknownWorkerError` after this worker was shut down or expelled.
        """
        if to is None:
            return self.info
        peer = self._peers.find(to)
        if peer is None:
            raise self.calling.refusal(to)
        return peer.info

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Returns the names and ids of all workers of the group, this worker included, sorted by id."""
        return self._peers.present()

    def watch_members(self, watcher: Callable[[MembershipChange], object]) -> None:
        """Registers a function that is called with every later change of the membership.

        Calls run in the executor, one at a time, in the order of the changes.

        Args:
            watcher: The function. Exceptions that it raises are logged. If it is registered twice, it is called twice.
        """
        self._cluster.watch(watcher)

    def unwatch_members(self, watcher: Callable[[MembershipChange], object]) -> None:
        """Removes one registration of a function by `watch_members`. Does nothing if `watcher` is not registered."""
        self._cluster.unwatch(watcher)

    # Calls

    @property
    def rpc_timeout(self) -> float:
        """The timeout in seconds of calls that do not give their own; 0 means no timeout.

        May be set at any time. The new value is not checked.
        """
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
        """Sends a call to a worker, and returns the future of the result without waiting for the reply.

        Opens a connection first if there is none, and waits for that.

        Args:
            worker: The callee.
            function: The function to run there.
            args: Its positional arguments; may be empty.
            kwargs: Its keyword arguments; may be empty.
            timeout: How many seconds the call may take; 0 means no timeout, `UNSET_RPC_TIMEOUT` means `rpc_timeout`.
                After that, the future fails with `RpcTimeoutError`.

        Raises:
            UnknownWorkerError: The group has no such worker.
            UsageError: An argument of this method is not valid, or the call is too large for the callee.
            SerializationError: An argument cannot be pickled.
            RpcTimeoutError: The timeout expired before the call was sent.
            WorkerLostError: The worker has left, was lost, or cannot be reached.
            RpcError: This worker was shut down or expelled.
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
        """Makes a worker run a function and keep the result. Returns a handle of the result without waiting for it.

        Opens a connection first if there is none, and waits for that. An error of the function is raised when the
        handle is used.

        Args:
            to: The worker: its name, rank or `WorkerInfo`. This worker is allowed.
            function: The function.
            args: Its positional arguments, a tuple or list; None for none.
            kwargs: Its keyword arguments; None for none.
            timeout: The function is cancelled if there is no result within so many seconds. 0 and `UNSET_RPC_TIMEOUT`
                mean no timeout. A deadline of the code that makes the call limits the time in any case.

        Raises:
            UnknownWorkerError: The group has no such worker.
            UsageError: An argument of this method is not valid, or the call is too large for the callee.
            SerializationError: An argument cannot be pickled.
            RpcTimeoutError: `timeout` expired before the call was sent. Without a timeout, `rpc_timeout` limits that.
            WorkerLostError: The worker has left, was lost, or cannot be reached.
            RpcError: This worker was shut down or expelled.
        """
        return self.calling.remote(to, function, args, kwargs, timeout)

    def call_many(
        self,
        workers: Sequence[WorkerInfo],
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float,
    ) -> list[Future[Any]]:
        """Sends the same call to several workers, and returns their futures without waiting for the replies.

        The arguments are pickled once.

        Args:
            workers: The callees; at least one.
            function: The function to run there.
            args: Its positional arguments, a tuple or list; None for none.
            kwargs: Its keyword arguments; None for none.
            timeout: How many seconds each call may take; 0 means no timeout, `UNSET_RPC_TIMEOUT` means `rpc_timeout`.

        Returns:
            A future for each worker, in the same order. It has failed if the call could not be sent to that worker.

        Raises:
            UsageError: `function`, `args` or `timeout` is not valid.
            SerializationError: An argument cannot be pickled.
            RpcError: This worker was shut down or expelled.
        """
        return self.calling.call_many(workers, function, args, kwargs, timeout)

    def calls_pending(self, worker: WorkerInfo) -> int:
        """Returns how many calls of this worker to `worker` are under way; 0 if `worker` is not known.

        Calls of `remote` are not counted.
        """
        return self.calling.calls_pending(worker)

    def submit_own_call(self, callee: bytes, job: Job) -> None:
        """Queues a call that this worker has made to itself with `remote`. No message is sent. A subclass may delay it.

        Args:
            callee: The function or method to call, as encoded in a frame (`protocol.frames`).
            job: The job that runs the call.
        """
        self._executor.submit(job)

    def add_interceptor(self, interceptor: ClientInterceptor | ServerInterceptor) -> None:
        """Registers an interceptor for all calls that begin later. It runs inside those that were registered before.

        Raises:
            UsageError: `interceptor` is neither a `ClientInterceptor` nor a `ServerInterceptor`.
        """
        self.interceptors.add(interceptor)

    def remove_interceptor(self, interceptor: ClientInterceptor | ServerInterceptor) -> None:
        """Removes an interceptor from later calls. Does nothing if it is not registered."""
        self.interceptors.remove(interceptor)

    def after_reply(self, function: Callable[[], object]) -> None:
        """Calls `function` as soon as the reply to the current call was sent, on the thread that has sent it.

        The current call is the one that this thread or coroutine runs for another worker. Errors of `function` are
        logged. If there is no current call, or its reply was sent already, `function` is called at once, and its errors
        are raised.
        """
        call_after_reply(function)

    def process_soon(self, has_work: Callable[[], bool], work: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that schedules `work`.

        Each run of `work` begins a few milliseconds later, in the executor.

        Args:
            has_work: Returns whether there is something to do. If it returns False when the time has come, `work` is
                not called. If it still returns True after `work`, another run is scheduled.
            work: Does the work. Errors are logged.

        Returns:
            The function, without arguments. It takes no lock, so finalizers may call it. If a run is scheduled and has
            not begun, it does nothing.
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
        """Returns the current metrics of this worker, for each other worker and in total. `Metrics` lists the keys."""
        refusals = self.reference_store.refusals.counts()
        return self._metrics.report(list(self._clients), self._cluster, self._executor.counts(), refusals)

    # Waiting for the others

    def join(self, shutdown: bool = False, timeout: float = 0.0) -> None:
        """Waits until all workers of a fixed group have called `join` and no call is running on any of them.

        In an open group, only waits until this worker is idle: it has nothing to do and waits for nothing.

        Args:
            shutdown: Whether this worker leaves next. If True, connections may end after this call: this worker does
                not regard the workers at their other ends as lost. If False, it still does.
            timeout: How many seconds to wait; 0 means no limit.

        Raises:
            ShutdownError: The timeout expired, a worker of a fixed group was lost, or this worker was expelled.
        """
        if self._entry.is_open:
            wait_until_idle(self, deadline_of(timeout))
        else:
            wait_for_everybody(self, self._rendezvous, deadline_of(timeout), self._next_sync("join()"))
        if shutdown:
            self._cluster.is_quiet = True

    def sync(self, timeout: float = 0.0) -> None:
        """Waits until all workers of a fixed group have called `sync`, even if calls are still running.

        Args:
            timeout: How many seconds to wait; 0 means no limit.

        Raises:
            ShutdownError: The timeout expired, a worker was lost, or this worker was expelled.
            UsageError: The group is open.
        """
        if self._entry.is_open:
            raise UsageError("in an open group nobody knows for whom to wait: use _barrier(names) for some workers")
        wait_at_barrier(self, self._rendezvous, deadline_of(timeout), self._next_sync("sync()"))

    def _next_sync(self, where: str) -> Occasion:
        """Counts one more call of `join` or `sync`. Returns the prefix of the call's keys in the store, and texts.

        The prefix contains the count. So it is the same on all workers that have called `join` and `sync` equally
        often. The texts are for error messages. `where` is the name in the texts: "join()" or "sync()".
        """
        with self._lock:
            self._syncs += 1
            number = self._syncs
        return Occasion(f"sync/{number}/", where, f"in {where}", f"gave up in {where}", "this worker goes on")

    def is_idle(self) -> bool:
        """Returns whether this worker has nothing to do and waits for nothing.

        False while a function runs or is queued here, a call of this worker is pending, a reply is not fully sent, a
        value of this worker does not exist yet, or a message about references is not sent or not acknowledged.
        """
        return (
            not self._executor.is_busy()
            and not any(connection.pending for connection in list(self._clients))
            and not any(peer.has_unsent() for peer in list(self._peers.by_number.values()))
            and not any(connection.has_unsent() for connection in list(self._servers))
            and self.reference_store.is_quiet()
        )

    def busy_report(self) -> str:
        """Returns text that lists the functions that run here and the pending calls, for messages. Never empty."""
        return describe_busy_work(self._executor.thread_idents(), list(self._clients))

    def is_expelled(self) -> bool:
        """Returns whether the group has declared this worker lost. False again after `shutdown`."""
        return isinstance(self.closed, ExpelledError)

    def calls_started(self) -> int:
        """Returns the number of calls that this worker has made to others so far.

        Messages about references are counted too, because they can lead to calls: such a message can release a value,
        and the finalizer of the value can make calls.
        """
        now = sum(connection.calls_made for connection in list(self._clients))
        return self._metrics.calls_made() + now + self.reference_store.messages_sent()

    def everybody(self) -> list[tuple[WorkerInfo, bool]]:
        """Returns all known workers of the group, sorted by id, as pairs of `WorkerInfo` and bool.

        The bool is True if the worker has left or was lost.
        """
        peers = sorted(self._peers.by_number.values(), key=lambda peer: peer.info.id)
        return [(peer.info, peer.is_lost) for peer in peers]

    def lost(self) -> list[str]:
        """Returns the names of the workers that were lost; an empty list if none was, or if the group is open."""
        return list(self._lost)

    # The end

    def shutdown(self, graceful: bool = False, timeout: float = 0.0) -> None:
        """Leaves the group and releases all resources, even if an error is raised.

        Does nothing if that was done before. Ctrl-C ends the wait of a graceful shutdown. The `KeyboardInterrupt` is
        raised after everything is closed.

        If another thread is in `shutdown`, a graceful shutdown waits until the other thread has finished. A shutdown
        that is not graceful does not wait, but closes everything at once. That ends the wait of the other thread, too.
        A signal handler may interrupt `shutdown` and call it again. If that call is graceful, it does nothing, and the
        interrupted shutdown goes on afterwards.

        Args:
            graceful: Whether to wait first until no call is running on any worker; in an open group, until this worker
                is idle. If False, pending calls fail with `RpcError`.
            timeout: How many seconds a graceful shutdown waits; 0 means no limit.

        Raises:
            ShutdownError: The graceful shutdown timed out, a worker of a fixed group was lost, or this worker was
                expelled. If another thread has got such an error from its shutdown, it is not raised here again.
        """
        own = threading.get_ident(), threading.Event()
        try:
            self._shutdowns.append(own)
            if not graceful or self._wait_for_other_shutdowns(own, timeout):
                self._shut_down(graceful, timeout)
        finally:
            own[1].set()
            self._shutdowns.remove(own)

    def _wait_for_other_shutdowns(self, own: tuple[int, threading.Event], timeout: float) -> bool:
        """Waits until the calls of `shutdown` that began before this one have ended.

        Args:
            own: The entry of this call in `_shutdowns`: the ident of its thread, and the event that is set at its end.
            timeout: How many seconds to wait; 0 for no limit.

        Returns:
            True if this call must shut down. False if everything is closed already. Also False if an earlier call is
            under way in the same thread: a signal handler has interrupted that call, and it goes on later.

        Raises:
            ShutdownError: The timeout expired.
        """
        deadline = deadline_of(timeout)
        for ident, has_ended in self._shutdowns[: self._shutdowns.index(own)]:
            if ident == own[0]:
                return False
            if not has_ended.wait(None if deadline == FOREVER else max(0.0, deadline - monotonic())):
                raise ShutdownError(
                    f"worker {self.info.name!r}: another thread is in shutdown(), which did not end in {timeout:g} s. "
                    "Call shutdown(graceful=False) to end it now"
                )
        return not self._has_ended

    def _shut_down(self, graceful: bool, timeout: float) -> None:
        """Closes all parts of this worker, even if the wait before that fails.

        Args:
            graceful: Whether to wait first until no call is running on any worker; in an open group, until this worker
                is idle.
            timeout: How many seconds to wait; 0 for no limit.

        Raises:
            ShutdownError: The timeout expired, a worker of a fixed group was lost, or this worker was expelled.
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
        """Waits until no call is running on any worker of a fixed group, and all workers know that.

        Sets the attribute `left` to the references that this worker still owns or holds. Logs a warning if this worker
        holds a reference that another worker owns, or the reverse. Does not close anything.

        Args:
            timeout: How many seconds to wait; 0 means no limit.

        Raises:
            ShutdownError: The timeout expired, a worker was lost, or this worker was expelled.
        """
        deadline = deadline_of(timeout)
        wait_for_everybody(self, self._rendezvous, deadline)
        self._cluster.is_quiet = True
        self.left = self._report_what_is_left()
        confirm_leave(self, self._rendezvous, deadline)

    def drain(self, timeout: float) -> None:
        """Prepares to leave an open group: waits until this worker is idle, and gives up its handles.

        If a handle of another worker's value is used later, `UsageError` is raised. Logs a warning if this worker still
        holds a reference that another worker owns, or the reverse. Does not close anything.

        Args:
            timeout: How many seconds to wait; 0 means no limit.

        Raises:
            ShutdownError: The timeout expired, or this worker was expelled.
        """
        deadline = deadline_of(timeout)
        wait_until_idle(self, deadline)
        self.reference_store.give_up_handles(f"worker {self.info.name!r} (this one) has left the group")
        wait_until_idle(self, deadline)
        self._report_what_is_left()

    def _report_what_is_left(self) -> Inventory:
        """Returns all references that this worker owns or holds.

        Logs a warning if this worker holds a reference that another worker owns, or the reverse.
        """
        inventory = self.reference_store.inventory()
        left = inventory.between_workers()
        if left.owned or left.held:
            logger.warning("worker %r shuts down with references left: it %s", self.info.name, left.report())
        return inventory

    def close_after_leaving(self) -> None:
        """Closes all parts of this worker. To be called after `wait_to_leave`.

        Does nothing if they are closed already.
        """
        self._close(is_early=False, store_timeout=STORE_TIMEOUT_S, timeout=_CLOSE_TIMEOUT_S)

    def _close(self, is_early: bool, store_timeout: float, timeout: float) -> None:
        """Closes all parts of this worker, and restores the SIGINT handler.

        Does nothing if that was done, or another thread is doing it. Raises `KeyboardInterrupt` at the end if Ctrl-C
        was pressed meanwhile.

        Args:
            is_early: True if the other workers do not expect this worker to leave. Then they are told that it leaves.
            store_timeout: How many seconds to wait until the other workers do not need the store of the rendezvous any
                more, if this worker hosts it; 0 to close it at once.
            timeout: How many seconds to wait for cancelled coroutines to end. The wait for functions comes next, and
                takes at most `timeout` seconds again. Coroutines and functions that still run then are not stopped.
        """
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
        """Closes all parts of this worker. Each step can be repeated, so a call that was interrupted can be made again.

        Args:
            is_early: True if the other workers do not expect this worker to leave. Then they are told that it leaves.
            store_timeout: How many seconds to wait until the other workers do not need the store of the rendezvous any
                more, if this worker hosts it; 0 to close it at once.
            timeout: How many seconds to wait for cancelled coroutines to end. The wait for functions comes next, and
                takes at most `timeout` seconds again. Coroutines and functions that still run then are not stopped.
                For functions, a warning is logged.
        """
        is_member = self.closed is None
        self._peers.closed = NotInitializedError(f"worker {self.info.name!r} has shut down; call init_rpc again first")
        reason = f"worker {self.info.name!r} (this one) shut down before the call ended"
        for connection in list(self._clients):
            for future in list(connection.pending.values()):
                # Before the others are told: they close their connections then, and the error would blame them.
                connection.fail(future, future.lost_error(RpcError(reason), ""))
        for peer in list(self._peers.by_number.values()):
            peer.fail_unsent(RpcError(reason))
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
        """Closes all listeners, all connections from other workers, the shared memory and the poller.

        May be called twice.
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
        """Whether this process is a forked child of the agent's process, in which `abandon` was called."""
        return isinstance(self.closed, ForkedProcessError)

    def about_to_fork(self) -> None:
        """Called before this process forks, so that received buffers do not change in the child.

        The child inherits the received buffers that are in shared memory. From now on, the memory of these buffers is
        not used for later frames.
        """
        for link in self._links():
            link.prepare_fork()

    def abandon(self) -> None:
        """Called in a forked child: closes the child's copies of all descriptors.

        The agent of the parent is not affected. Pending calls of the child's copy fail with `ForkedProcessError`, and
        every later call raises it.
        """
        self._has_ended = True
        interrupts.forget()
        error = self._peers.closed = ForkedProcessError(
            f"this process was forked from worker {self.info.name!r} and cannot use its agent; "
            "call init_rpc with a name of its own in this process, or start it with the spawn method"
        )
        for client in list(self._clients):
            client.abandon(error)
        for peer in list(self._peers.by_number.values()):
            peer.abandon(error)
        for server in list(self._servers):
            server.abandon()
        for listener in self._listeners:
            listener.abandon()
        self._segments.close()
        self._received.abandon()
        self._poller.abandon()
        self._rendezvous.store.abandon()
