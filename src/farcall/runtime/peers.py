"""The other workers: their addresses, and our one connection to each.

Rules
- The first call opens the connection. After it was lost, the next call opens a new one.
- The transports are tried in order of preference, until one works. Unix sockets work on one host only.
- The handshake makes sure that the other end knows the group's secret and is the right worker. Until then nothing that
  it sends is trusted.
- A refused connection shows that a worker has ended only if the kernel of this host refused it, or an authenticated
  worker did. In all other cases the heartbeats decide whether the worker is lost.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from farcall.errors import AuthenticationError, PeerRefusedError, ProtocolError, RpcError, WorkerLostError
from farcall.gate import asleep, sleepless
from farcall.protocol.fields import quoted
from farcall.protocol.handshake import Hello, Purpose, Refused, encode, unpack
from farcall.protocol.ids import WorkerInfo
from farcall.protocol.membership_messages import Member
from farcall.runtime.client import LOST_ADVICE, ClientConnection
from farcall.runtime.interrupts import raise_deferred
from farcall.runtime.parts import WorkerParts
from farcall.security import EncryptionRequired
from farcall.transports.base import FOREVER, Link, Transport
from farcall.transports.network import are_on_one_host, is_local

if TYPE_CHECKING:
    from farcall.runtime.unsent import Unsent

CONNECT_TIMEOUT_S: Final = 10.0
"""The most seconds that one attempt to connect to a worker takes."""
_LOOK_AGAIN_S: Final = 0.05
"""How often a thread that waits in the handshake checks whether the connection is still needed."""
ONE_HOST: Final = frozenset({"unix", "memory"})
"""The schemes of transports that work on one host only."""


class Peer:
    """One worker of the group, and the connection from this worker to it, if there is one.

    It has no connection at first. `connect` opens one.

    Args:
        parts: The objects that the connections and calls of this worker share, such as its executor.
        member: The worker that the peer stands for.
        me: This worker.
        group: The name of this run of the group. The other worker refuses a connection that names another run.
        new_connection: Creates a connection. Its arguments are this peer, a link with a completed handshake, and a
            tuple of two limits of the other end: the most bytes of a head (a frame without payload and buffers) and of
            a whole frame.
        on_expelled: Called if the other worker says that the group has expelled this worker.
        is_over: Returns whether this worker is shut down or expelled, so that no connection is needed any more.
    """

    def __init__(
        self,
        parts: WorkerParts,
        member: Member,
        me: Member,
        group: str,
        new_connection: Callable[[Peer, Link, tuple[int, int]], ClientConnection],
        on_expelled: Callable[[], None],
        is_over: Callable[[], bool],
    ) -> None:
        self.info = info_of(member)
        self.number = member.number
        """Unique in the group: a worker that is started again with the same name and rank has another number."""
        self._member = member
        self._me = me
        self._group = group
        self._transports = parts.transports
        self._credentials = parts.credentials
        self._link_options = parts.link_options
        self._limits = parts.limits
        self._new_connection = new_connection
        self._on_expelled = on_expelled
        self.is_over = is_over
        self._executor = parts.executor
        self._lock = threading.RLock()
        self._has_left = False
        self.is_lost = False
        """Whether the worker has left or was lost."""
        self.connection: ClientConnection | None = None
        """The connection; None if there is none now. Then use `connect`."""
        self._last_connection: ClientConnection | None = None
        self._unsent: deque[Unsent] = deque()  # what waits for the connection
        self._unsent_lock = threading.RLock()  # for the queue, and for the step from it to the connection
        self._is_connecting_for_unsent = False  # a thread connects for the queue, or is about to

    def connect(self, deadline: float) -> ClientConnection:
        """Returns the connection. Opens it if there is none, and waits for that.

        Several threads may call this at once; they get the same connection.

        Args:
            deadline: Until when to wait, as a time of the monotonic clock. The wait is at most `CONNECT_TIMEOUT_S`
                seconds.

        Raises:
            WorkerLostError: The worker has left, was lost, or could not be reached before the deadline. Its attribute
                `is_gone` is True if the process of the worker has certainly ended.
        """
        if self.is_lost:
            raise self.lost_error()
        deadline = min(deadline, monotonic() + CONNECT_TIMEOUT_S)
        with asleep():
            # Under a lock, so that several threads open one connection.
            if not self._lock.acquire(timeout=max(0.0, deadline - monotonic())):
                raise WorkerLostError(f"worker {self.info.name!r} could not be connected to in time", self.info.name)
            try:
                if self.connection is None:
                    connection = self._new_connection(self, *self._open(deadline))
                    self._send_unsent(connection)
                    if self.is_lost:  # meanwhile
                        self.close_connection()
                        raise self.lost_error()
                    if connection.is_lost():  # before it was stored here
                        self.forget(connection)
                    return connection
                return self.connection
            finally:
                self._lock.release()

    # What waits for the connection

    def send_when_connected(self, unsent: Unsent) -> ClientConnection | None:
        """Queues a call that is sent as soon as there is a connection. Does not wait.

        Starts a thread that connects, unless one runs already. The thread calls `unsent.send` when there is a
        connection, or `unsent.fail` if connecting fails.

        Returns:
            None if the call was queued. If there is a connection by now, returns the connection. Then nothing was
            queued, and the caller must send the call.
        """
        with self._unsent_lock:
            if self.connection is not None:
                return self.connection
            self._unsent.append(unsent)
            must_start = not self._is_connecting_for_unsent
            self._is_connecting_for_unsent = True
        if must_start:
            self._executor.run_aside(self._connect_for_unsent)
        return None

    def has_unsent(self) -> bool:
        """Returns whether a call waits for the connection, or the thread that connects for such calls still runs."""
        return bool(self._unsent) or self._is_connecting_for_unsent

    def count_unsent(self) -> int:
        """Returns how many calls wait for the connection."""
        return len(self._unsent)

    def fail_unsent(self, error: RpcError, made_until: float = FOREVER) -> None:
        """Calls `fail(error)` of each call that waits for the connection. Does nothing if there are none.

        Calls that were made after `made_until`, a time of the monotonic clock, stay in the queue.
        """
        while True:
            with self._unsent_lock:
                if not self._unsent or self._unsent[0].made_at > made_until:
                    return
                unsent = self._unsent.popleft()
            unsent.fail(error)

    def abandon(self, error: RpcError) -> None:
        """Called in a forked child: fails the child's copies of the calls that wait for the connection, with `error`.

        Runs no callbacks. The calls of the parent are not affected.
        """
        self._unsent_lock = threading.RLock()  # another thread of the parent may have held it
        queue, self._unsent = self._unsent, deque()
        for unsent in queue:
            unsent.abandon(error)

    def _connect_for_unsent(self) -> None:
        """The function of the thread that connects for the calls in the queue. Ends when the queue is empty.

        If connecting fails, `fail` is called for the calls that were queued before the attempt. Later ones get another
        attempt, unless the worker is gone or this worker was shut down or expelled.
        """
        while True:
            with self._unsent_lock:
                if not self._unsent:
                    self._is_connecting_for_unsent = False
                    return
            began = monotonic()
            try:
                self.connect(FOREVER)
            except WorkerLostError as error:
                # What was queued during this attempt gets another one. `connect` raises at once if the worker is gone.
                self.fail_unsent(error, FOREVER if self.is_lost or self.is_over() else began)
            except BaseException as error:
                self.fail_unsent(RpcError(f"connecting to worker {self.info.name!r} failed: {error!r}"))
                raise

    def _send_unsent(self, connection: ClientConnection) -> None:
        """Sends the calls that wait for the connection, in order. Then sets `self.connection` to `connection`.

        It is set last, because a call that finds the connection must not overtake one that waits for it.
        """
        try:
            with sleepless():  # while the connection is not known, nothing would end such a wait if the worker is lost
                while True:
                    with self._unsent_lock:
                        if not self._unsent:
                            self.connection = connection
                            return
                        unsent = self._unsent.popleft()
                    unsent.send(connection)
        except BaseException as error:
            connection.lose(f"sending to it was interrupted by {type(error).__name__}", advice="")
            raise

    def lose(self, has_left: bool) -> None:
        """Marks the worker as not in the group any more: new calls to it fail at once with `WorkerLostError`.

        The caller must call `leave` or `close_connection` next, which end the connection.

        Args:
            has_left: True if the worker has left, False if it was lost.
        """
        self._has_left = has_left
        self.is_lost = True
        self._last_connection, self.connection = self.connection, None

    def lost_error(self) -> WorkerLostError:
        """Returns a new error for a call to this worker, to be used after `lose`."""
        fate = "has left the group" if self._has_left else "was lost"
        return WorkerLostError(f"worker {self.info.name!r} {fate}", self.info.name)

    def leave(self) -> None:
        """Ends the connection to a worker that has left the group, after its last replies are read.

        Does not wait for that. Does nothing if there is no connection.
        """
        for connection in filter(None, (self._last_connection, self.connection)):
            connection.leave("it has left the group")

    def close_connection(self) -> None:
        """Ends the connection at once, after `lose`: pending calls fail with `WorkerLostError`. May be called twice.

        Does nothing if there is no connection.
        """
        last, self._last_connection = self._last_connection, None
        for connection in filter(None, (last, self.connection)):
            connection.lose("it has left the group" if self._has_left else "the group cannot reach it", advice="")

    def forget(self, connection: ClientConnection) -> None:
        """Removes a connection that has ended, so that `connect` opens a new one.

        Does nothing if `connection` is not the current connection of this peer.
        """
        if self.connection is connection:
            self.connection = None

    # Connecting

    def _open(self, deadline: float) -> tuple[Link, tuple[int, int]]:
        """Tries the addresses of the worker in order, and performs the handshake.

        Returns the first link that works, and a tuple of two limits of the other end: the most bytes of a head (a frame
        without payload and buffers) and of a whole frame; 0 for no limit. `deadline` is a time of the monotonic clock.
        Raises `WorkerLostError` if no address works before `deadline`.
        """
        reasons = []
        somebody_answers = False
        refusal: AuthenticationError | None = None
        ways: list[tuple[Callable[..., Link], Transport, str]] = [
            (transport.connect, transport, address) for transport, address in self._reachable_addresses()
        ]
        for tried, (connect, transport, address) in enumerate(ways):
            # Each address gets an equal share of the time, so that one that does not answer leaves time for the next.
            until = monotonic() + max(0.0, deadline - monotonic()) / (len(ways) - tried)
            link = None
            try:
                link = connect(address, max(0.0, until - monotonic()), self._credentials.limits.max_message_bytes)
                limits = self._do_handshake(link, until)
                link.establish(self._link_options, until)
                return link, limits
            except EncryptionRequired as error:
                somebody_answers = True
                encrypted: Any = getattr(transport, "connect_encrypted", None)
                if encrypted is not None:
                    ways.insert(tried + 1, (encrypted, transport, address))
                else:
                    reasons.append(f"{address}: {error}")
            except OSError as error:
                if link is None:
                    # Between hosts, a refusal may come from anything on the way.
                    is_nobody = isinstance(error, ConnectionRefusedError | FileNotFoundError)
                    somebody_answers |= not (is_nobody and self._is_on_this_host(address))
                else:
                    # Any other answer is not authenticated, so it does not show that the worker has ended.
                    somebody_answers |= not isinstance(error, _AnotherWorkerError)
                refusal = error.with_traceback(None) if isinstance(error, AuthenticationError) else refusal
                reasons.append(f"{address}: {error.strerror or error}")
            except BaseException:
                if link is not None:
                    link.close()
                raise
            if link is not None:
                link.close()
        detail = "; ".join(reasons) or f"no transport of {', '.join(self._transports)} leads to it"
        advice = f"; {LOST_ADVICE}" if refusal is None else ""  # a refusal has advice of its own
        lost = WorkerLostError(f"worker {self.info.name!r} cannot be reached ({detail}){advice}", self.info.name)
        lost.is_gone = bool(reasons) and not somebody_answers
        try:
            raise lost from refusal
        finally:
            del lost, refusal  # else the error and this stack frame would be a reference cycle

    def _reachable_addresses(self) -> list[tuple[Transport, str]]:
        """Returns the addresses that may work from this host, each with its transport, in order of preference.

        The list is empty if this worker has no transport for any of them, or if all work only on the other host.
        """
        same_host = are_on_one_host(self._member.host, self._me.host)
        return [
            (transport, address)
            for transport in self._transports.values()
            for address in self._member.addresses
            if address.partition(":")[0] == transport.scheme and (same_host or transport.scheme not in ONE_HOST)
        ]

    def _is_on_this_host(self, address: str) -> bool:
        """Returns whether `address` belongs to this host.

        Only then does a refused connection prove that nothing listens at `address`.
        """
        scheme, _, rest = address.partition(":")
        if scheme in ONE_HOST:
            return are_on_one_host(self._member.host, self._me.host)
        # In another network namespace of the same kernel, the same address belongs to another interface.
        return scheme == "tcp" and self._member.host == self._me.host and is_local(rest.rpartition(":")[0].strip("[]"))

    def _do_handshake(self, link: Link, deadline: float) -> tuple[int, int]:
        """Performs the whole handshake on a new link, and returns two limits of the other end.

        The limits are the most bytes of a head (a frame without payload and buffers) and of a whole frame; 0 for no
        limit. `deadline` is a time of the monotonic clock.

        Raises:
            ProtocolError: The other end does not know the secret, is another worker, or refuses the connection.
            EncryptionRequired: The other end wants a new connection with TLS.
            OSError: The link has failed, or the deadline has passed (`TimeoutError`).
        """
        me, other = self._me, f"worker {self.info.name!r}"
        hello = Hello(
            self._group,
            me.name,
            me.rank,
            self.info.name,
            me.number,
            me.host,
            me.addresses,
            wanted_number=self.number,
            dialed=link.address,
            network=link.network,
            limits=self._limits,
        )
        handshake, hello = self._credentials.client_handshake(Purpose.CALLS, hello, other, link.binding)
        link.send(encode(hello))
        frames: list[bytes] = []
        while handshake.outcome is None:
            if not frames:
                frames = self._receive_handshake(link, deadline, other)
            answer = handshake.take(unpack(frames.pop(0), other))
            if answer is not None:
                link.send(encode(answer))
        refusal = handshake.outcome
        if isinstance(refusal, Refused) and handshake.is_proven:
            if refusal.gone:
                self._on_expelled()
            raise _AnotherWorkerError(f"{other} refused the connection: {quoted(refusal.reason)}")
        welcome = handshake.welcome()
        if welcome.name != self.info.name or welcome.number != self.number:
            raise _AnotherWorkerError(f"this is worker {welcome.name!r}, not {self.info.name!r}")
        return welcome.limits

    def _receive_handshake(self, link: Link, deadline: float, other: str) -> list[bytes]:
        """Waits for the next frames of the handshake, and returns them: at least one.

        Args:
            link: The link.
            deadline: Until when to wait, as a time of the monotonic clock.
            other: Text that names the other end, for messages.

        Raises:
            TimeoutError: The deadline has passed, or the connection is not needed any more.
            ProtocolError: A frame cannot be read, or the other end has closed the connection.
        """
        while True:
            left = deadline - monotonic()
            if left <= 0 or self.is_lost or self.is_over():
                raise TimeoutError(f"{other} did not answer the handshake in time")
            link.wait(min(left, _LOOK_AGAIN_S))
            raise_deferred()
            try:
                frames = [bytes(frame) for frame, _ in link.receive()]
            except ProtocolError:
                raise
            except ConnectionError:
                raise ProtocolError(f"{other} closed the connection in the middle of the handshake") from None
            if frames:
                return frames


class _AnotherWorkerError(PeerRefusedError):
    """The other end has proved that it knows the secret, but it is not the wanted worker or refuses the connection."""


def info_of(member: Member) -> WorkerInfo:
    """Returns the `WorkerInfo` of a member: its name and id.

    The id is the member's rank. In an open group the rank is -1, and the id is the member's number instead.
    """
    return WorkerInfo(member.name, member.rank if member.rank >= 0 else member.number)
