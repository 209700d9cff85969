"""A worker's agent: it owns everything that runs, and takes it down again.

It puts together what the other modules of this layer do: the poller and the serving pool that read and run, the
supervisor that watches the clock, the listeners, one `Peer` for each worker of the group. It holds no global: several
agents may live in one process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import msgspec

from farcall.agent.calls import PendingCall
from farcall.agent.coroutines import EventLoop
from farcall.agent.departure import wait_for_everybody
from farcall.agent.incoming import Incoming
from farcall.agent.outgoing import Outgoing
from farcall.agent.peers import Member, Peer
from farcall.agent.poller import READABLE, Poller
from farcall.agent.serving import Serving
from farcall.agent.supervisor import Supervisor
from farcall.agent.under_way import describe_under_way
from farcall.errors import (
    ForkedProcessError,
    NotInitializedError,
    RpcError,
    RpcTimeoutError,
    ShutdownError,
    UnknownWorkerError,
    UsageError,
    WorkerLost,
)
from farcall.futures import FOREVER
from farcall.options import UNSET_RPC_TIMEOUT, RpcBackendOptions
from farcall.protocol.ids import WorkerInfo
from farcall.rendezvous.store import PATIENCE
from farcall.serialization import Pickled, callable_name, dumps_arguments, encode_function
from farcall.transports.base import Channel, Listener, Transport
from farcall.transports.network import host_identity

if TYPE_CHECKING:
    from farcall.rendezvous import Rendezvous

logger = logging.getLogger("farcall")

_CLOSE_TIMEOUT: Final = 1.0
_SHORT_PATIENCE: Final = 1.0
_NO_ARGUMENTS: Final[Pickled] = (b"", [])

To = str | int | WorkerInfo


class Agent:
    """One worker of a group."""

    def __init__(
        self,
        name: str,
        rendezvous: Rendezvous,
        options: RpcBackendOptions,
        transports: Mapping[str, Transport],
    ) -> None:
        """Joins the group; `start` it next. Raises `RendezvousError`; then nothing is left running."""
        self.info = WorkerInfo(name, rendezvous.rank)
        self.options = options
        self.rpc_timeout = options.rpc_timeout
        self._rendezvous = rendezvous
        self._transports = transports
        self._peers: dict[To, Peer] = {}
        self._incoming: set[Incoming] = set()
        self._connections: dict[Outgoing, None] = {}
        self._closed: RpcError | None = None
        self._calls_before = 0  # on connections that are gone
        self._lock = threading.Lock()
        self._poller = Poller()
        self._supervisor = Supervisor(name)
        self._loop = EventLoop(name)
        self._serving = Serving(name, self._poller, options.num_worker_threads, options.spin, self._supervisor.quicken)
        self._supervisor.serving = self._serving
        self._supervisor.connections = lambda: list(self._connections)
        self._listeners = self._listen()
        try:
            self._join()
        except BaseException:
            self._close_descriptors()
            raise

    # Start

    def start(self) -> None:
        """Begins to serve. Not before whoever holds the agent can find it: the functions it runs may ask for it."""
        self._serving.start()
        self._supervisor.start()

    def _listen(self) -> list[Listener]:
        listeners: list[Listener] = []
        reasons = []
        for transport in self._transports.values():
            try:
                listener = transport.listen(self._rendezvous.host)
            except OSError as error:
                reasons.append(f"{transport.scheme}: {error}")
                logger.info("worker %r goes without transport %s here: %s", self.info.name, transport.scheme, error)
            else:
                listeners.append(listener)
        if not listeners:
            self._poller.close()
            raise UsageError(f"worker {self.info.name!r} can listen on no transport ({'; '.join(reasons)})")
        return listeners

    def _join(self) -> None:
        addresses = tuple(listener.address for listener in self._listeners)
        us = Member(self.info.name, self.info.id, host_identity(), addresses)
        for listener in self._listeners:
            self._poller.add(listener.fileno(), lambda _, listener=listener: self._accept(listener), READABLE)  # type: ignore[misc]
        from farcall.rendezvous import join  # not at the head: see `farcall.rendezvous`

        payloads = join(self._rendezvous, self.info.name, msgspec.msgpack.encode(us), self.options.init_timeout)
        for payload in payloads.values():
            member = msgspec.msgpack.decode(payload, type=Member)
            peer = Peer(member, us, self._rendezvous.group, self._transports, self._new_connection)
            self._peers[peer.info.name] = self._peers[peer.info.id] = self._peers[peer.info] = peer

    def _accept(self, listener: Listener) -> None:
        try:
            channel = listener.accept()
        except OSError as error:
            # Most likely out of descriptors. Who waits in the queue goes on waiting until a connection is closed.
            logger.warning("worker %r cannot accept connections at %s: %s", self.info.name, listener.address, error)
            self._poller.want(listener.fileno(), READABLE, False)
            return
        if channel is not None:
            self._incoming.add(
                Incoming(
                    self.info,
                    self._rendezvous.group,
                    channel,
                    self._poller,
                    self._serving,
                    self._loop,
                    self._incoming_closed,
                )
            )

    def _incoming_closed(self, incoming: Incoming) -> None:
        self._incoming.discard(incoming)
        if self._closed is None:
            for listener in self._listeners:
                self._poller.want(listener.fileno(), READABLE, True)

    def _new_connection(self, peer: WorkerInfo, channel: Channel, on_lost: Callable[[Outgoing], None]) -> Outgoing:
        def lost(connection: Outgoing) -> None:
            self._calls_before += connection.calls_started
            self._connections.pop(connection, None)
            on_lost(connection)

        connection = Outgoing(peer, channel, self._poller, self._serving, self._supervisor, self.options.spin, lost)
        self._connections[connection] = None
        if self._closed is not None:  # meanwhile
            connection.close(str(self._closed))
        return connection

    # Calls

    def call(
        self,
        to: To,
        function: Callable[..., Any],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        timeout: float,
        unattended: bool = False,
    ) -> PendingCall:
        """Sends a call; its future. See `api.rpc_async` for what it raises.

        `unattended`: nobody is going to wait for it at once, so somebody else must see to its reply.
        """
        try:
            peer = self._peers.get(to)
        except TypeError:  # not even hashable
            peer = None
        if peer is None or self._closed is not None:
            raise self._refusal(to)
        try:
            if timeout == UNSET_RPC_TIMEOUT:
                timeout = self.rpc_timeout
            elif timeout < 0:
                raise UsageError(f"a timeout must be 0 (none) or more seconds, not {timeout}")
        except TypeError:
            raise UsageError(f"a timeout must be a number of seconds (0 is none), not {timeout!r}") from None
        head = encode_function(function)
        body, buffers = _NO_ARGUMENTS
        if head is None:
            if not callable(function):
                raise UsageError(f"{function!r} cannot be called: give a function, a class or another callable")
            head = b""
            body, buffers = dumps_arguments(function, args or (), kwargs, peer.info.name, by_value=True)
        elif args or kwargs:
            body, buffers = dumps_arguments(function, args or (), kwargs, peer.info.name)
        connection = peer.connection
        if connection is not None:
            future = connection.call(function, head, body, buffers, timeout)
        else:
            connection, spent = self._connect(peer, function, timeout)
            future = connection.call(function, head, body, buffers, timeout, spent)
        if unattended:
            connection.unattended()
        return future

    def _connect(self, peer: Peer, function: Callable[..., Any], timeout: float) -> tuple[Outgoing, float]:
        """A new connection, and how much of the call's time it has taken."""
        began = monotonic()
        try:
            connection = peer.connect(began + timeout if timeout else FOREVER)
        except WorkerLost as error:
            if timeout and monotonic() >= began + timeout:
                raise RpcTimeoutError(
                    f"`{callable_name(function)}` was not sent within {timeout:g} s: {error}"
                ) from None
            raise
        return connection, monotonic() - began

    def _refusal(self, to: To) -> RpcError:
        if self._closed is not None:
            return self._closed
        if not isinstance(to, (str, int, WorkerInfo)):
            return UsageError(f"`to` must be a worker's name, rank or WorkerInfo, not {to!r}")
        known = ", ".join(f"{info.name!r} (rank {info.id})" for info in self.get_worker_infos())
        return UnknownWorkerError(f"there is no worker {to!r} in this group; there are {known}")

    # The group

    def get_worker_info(self, to: To | None = None) -> WorkerInfo:
        """Of the worker of that name or rank; of this one by default. Raises `UnknownWorkerError`."""
        if to is None:
            return self.info
        peer = self._peers.get(to)
        if peer is None:
            raise self._refusal(to)
        return peer.info

    def get_worker_infos(self) -> list[WorkerInfo]:
        """All workers of the group, by rank."""
        return sorted({peer.info for peer in self._peers.values()}, key=lambda info: info.id)

    # The end

    def is_idle(self) -> bool:
        """Nothing runs here for others, and nothing is awaited from others."""
        return not self._serving.is_busy() and not any(connection.pending for connection in list(self._connections))

    def under_way(self) -> str:
        """What keeps this worker from being idle, in words."""
        return describe_under_way(self._serving.thread_idents(), list(self._connections))

    def calls_started(self) -> int:
        """How many calls this worker has made so far."""
        return self._calls_before + sum(connection.calls_started for connection in list(self._connections))

    def shutdown(self, graceful: bool, timeout: float) -> None:
        """Leaves the group and frees everything, in any case.

        Graceful: first waits until all workers are here and all their calls have ended, at most `timeout` seconds (0:
        without limit). Raises `ShutdownError`, after everything is freed, if that failed.
        """
        early, patience = True, 0.0
        try:
            if graceful:
                wait_for_everybody(self, self._rendezvous, timeout)
                early, patience = False, PATIENCE
        except ShutdownError:
            patience = _SHORT_PATIENCE  # so that those who come just now still hear who was missing
            raise
        finally:
            self._close(early, patience)

    def _close(self, early: bool, patience: float) -> None:
        with self._lock:
            if self._closed is not None:
                return
            self._closed = NotInitializedError(f"worker {self.info.name!r} has shut down; call init_rpc again first")
        for connection in list(self._connections):
            connection.close(f"worker {self.info.name!r} (this one) shut down before the call ended")
        deadline = monotonic() + _CLOSE_TIMEOUT
        self._loop.close(_CLOSE_TIMEOUT)
        left = self._serving.close(deadline)
        if left:
            logger.warning("worker %r: %d function(s) still run after the shutdown", self.info.name, len(left))
        self._supervisor.close()
        self._close_descriptors()
        self._rendezvous.store.close(early, patience)

    def _close_descriptors(self) -> None:
        for listener in self._listeners:
            self._poller.remove(listener.fileno())
            listener.close()
        for incoming in list(self._incoming):
            incoming.close()
        self._poller.close()

    @property
    def is_forked(self) -> bool:
        """Whether this agent belongs to the parent of this process."""
        return isinstance(self._closed, ForkedProcessError)

    def abandon(self) -> None:
        """In a forked child: lets go of what belongs to the parent, taking no lock and ending nothing there."""
        self._closed = ForkedProcessError(
            f"this process was forked from worker {self.info.name!r} and cannot use its agent; "
            "call init_rpc with a name of its own in this process, or start it with the spawn method"
        )
        for connection in list(self._connections):
            connection.abandon(self._closed)
        for incoming in list(self._incoming):
            incoming.abandon()
        for listener in self._listeners:
            listener.abandon()
        self._poller.abandon()
        self._rendezvous.store.abandon()
