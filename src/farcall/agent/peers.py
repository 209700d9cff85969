"""The other workers: where they are, and the one connection to each for our own calls.

Rules
- A connection is made by the first call, and made anew by the next call after it was lost.
- The best transport that works is taken: unix sockets only on the same host, and whatever fails (a container without
  the socket's directory, say) is passed over for the next.
- The greeting makes sure that the one who answers knows the group's secret, and is the worker we want. Until it has
  proved that, nothing it says is believed.
- That a worker is gone is believed at once of one who has proved itself, and of this host's own system; everything else
  is left to the heartbeats.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Final

from farcall.agent.lanes import Lane
from farcall.agent.outgoing import LOST_ADVICE, Outgoing
from farcall.errors import AuthenticationError, ConnectionRefusedByPeer, ProtocolError, WorkerLost
from farcall.protocol.handshake import (
    PREAMBLE_SIZE,
    Greeting,
    Hello,
    Purpose,
    Refused,
    body_length,
    check_beginning,
    pack,
    unpack,
)
from farcall.protocol.ids import WorkerInfo
from farcall.protocol.membership_messages import Member
from farcall.protocol.wire import SHARES, Sizes, encode
from farcall.security import Credentials
from farcall.sleeping import asleep
from farcall.transports.base import Channel, Transport
from farcall.transports.network import is_local
from farcall.transports.shared_memory import Pool

CONNECT_TIMEOUT: Final = 10.0
_LOOK_AGAIN: Final = 0.05
"""Seconds after which who waits for an answer looks whether it is still wanted."""
ONE_HOST: Final = frozenset({"unix", "memory"})
"""Transports that can work on one host only."""


class Peer:
    """One worker of the group, as this worker sees it."""

    def __init__(
        self,
        member: Member,
        us: Member,
        group: str,
        transports: Mapping[str, Transport],
        new_connection: Callable[[Peer, Channel, Lane], Outgoing],
        on_expelled: Callable[[], None],
        is_over: Callable[[], bool],
        credentials: Credentials,
        pool: Pool,
    ) -> None:
        self.info = WorkerInfo(member.name, member.rank if member.rank >= 0 else member.number)
        self.number = member.number
        """Its own for ever; who is started again with the same name and rank has another one."""
        self._member = member
        self._us = us
        self._group = group
        self._transports = transports
        self._new_connection = new_connection
        self._on_expelled = on_expelled  # the worker says that this one was taken for dead
        self._credentials = credentials
        self._pool = pool
        self.is_over = is_over
        """Whether nobody is to be connected to any more."""
        self._lock = threading.RLock()
        self._has_left = False
        self.is_lost = False
        """It is gone for good."""
        self.connection: Outgoing | None = None
        """The connection, if there is one now; else `connect`."""
        self._last: Outgoing | None = None
        self.sizes = Sizes()
        """How large messages may be that come from there."""

    def connect(self, deadline: float) -> Outgoing:
        """The connection, made if need be. Raises `WorkerLost` if the worker cannot be reached."""
        if self.is_lost:
            raise self.lost_error()
        deadline = min(deadline, monotonic() + CONNECT_TIMEOUT)
        with asleep():
            try:
                # One connection, however many threads call at once.
                if not self._lock.acquire(timeout=max(0.0, deadline - monotonic())):
                    raise WorkerLost(f"worker {self.info.name!r} could not be connected to in time", self.info.name)
                if self.connection is None:
                    self.connection = self._new_connection(self, *self._open(deadline))
                    if self.is_lost:  # meanwhile
                        self.close_connection()
                        raise self.lost_error()
                return self.connection
            finally:
                if self._lock._is_owned():  # type: ignore[attr-defined]  # Ctrl-C may come as it has just been taken
                    self._lock.release()

    def lose(self, left: bool) -> None:
        """It is gone for good: new calls to it fail at once from now on. `part` and `close_connection` end others."""
        self._has_left = left
        self.is_lost = True
        self._last, self.connection = self.connection, None

    def lost_error(self) -> WorkerLost:
        """What is raised by who wants something of a worker that is gone."""
        fate = "has left the group" if self._has_left else "was lost"
        return WorkerLost(f"worker {self.info.name!r} {fate}", self.info.name)

    def part(self) -> None:
        """Of one who has left, ends the connection when what it has answered is read, and what waits on it then."""
        for connection in filter(None, (self._last, self.connection)):
            connection.part("it has left the group")

    def close_connection(self) -> None:
        """Ends the connection of one who is gone, if there is one, and what waits on it."""
        last, self._last = self._last, None  # it is not kept longer than needed, with all that was met on it
        for connection in filter(None, (last, self.connection)):
            connection.lose("it has left the group" if self._has_left else "the group cannot reach it", advice="")

    def forget(self, connection: Outgoing) -> None:
        """That connection has ended."""
        if self.connection is connection:
            self.connection = None

    def _open(self, deadline: float) -> tuple[Channel, Lane]:
        reasons = []
        anybody = False
        same_host = self._member.host == self._us.host
        refusal: AuthenticationError | None = None
        ways = self._ways()
        for tried, (transport, address) in enumerate(ways):
            # Each gets its share of the time: one that hangs must not leave nothing for the next.
            until = monotonic() + max(0.0, deadline - monotonic()) / (len(ways) - tried)
            try:
                channel = transport.connect(address, max(0.0, until - monotonic()))
            except OSError as error:
                # From another host, anybody on the way may say that nobody listens there.
                nobody = isinstance(error, (ConnectionRefusedError, FileNotFoundError))
                anybody |= not (nobody and same_host and _is_here(address))
                refusal = error.with_traceback(None) if isinstance(error, AuthenticationError) else refusal
                reasons.append(f"{address}: {error.strerror or error}")  # some name the address once more
                continue
            try:
                lane = self._greet(channel, until)
            except (OSError, ProtocolError) as error:
                channel.close()
                anybody |= not isinstance(error, _AnotherWorker)  # who has not proved itself may be anybody
                refusal = error.with_traceback(None) if isinstance(error, AuthenticationError) else refusal
                reasons.append(f"{address}: {error.strerror or error}")
            except BaseException:
                channel.close()
                raise
            else:
                return channel, lane
        detail = "; ".join(reasons) or f"no transport of {', '.join(self._transports)} leads to it"
        advice = f"; {LOST_ADVICE}" if refusal is None else ""  # a refusal says itself what to do
        lost = WorkerLost(f"worker {self.info.name!r} cannot be reached ({detail}){advice}", self.info.name)
        lost.is_gone = bool(reasons) and not anybody
        try:
            raise lost from refusal
        finally:
            del lost, refusal  # else it and this frame would keep each other, and all that the caller has

    def _ways(self) -> list[tuple[Transport, str]]:
        """The addresses of the worker that may be reached from here, best first."""
        same_host = self._member.host == self._us.host
        return [
            (transport, address)
            for transport in self._transports.values()
            for address in self._member.addresses
            if address.partition(":")[0] == transport.scheme and (same_host or transport.scheme not in ONE_HOST)
        ]

    def _greet(self, channel: Channel, deadline: float) -> Lane:
        us = self._us
        lane = Lane(self._pool, channel)
        descriptor, token = lane.offer()
        hello = Hello(
            self._group,
            us.name,
            us.rank,
            self.info.name,
            us.number,
            us.host,
            us.addresses,
            wanted_number=self.number,
            dialed=channel.address,
            limits=self.sizes,
            lends=descriptor,
            token=token,
        )
        other = f"worker {self.info.name!r}"
        applicant, hello = self._credentials.applicant(Purpose.CALLS, hello, other, getattr(channel, "binding", b""))
        self._say(channel, hello)
        while applicant.outcome is None:
            preamble = self._receive_exactly(channel, PREAMBLE_SIZE, deadline, check_beginning)
            size = body_length(preamble, Purpose.CALLS, other, self._credentials.limits.greeting)
            answer = applicant.take(unpack(self._receive_exactly(channel, size, deadline), other))
            if answer is not None:
                self._say(channel, answer)
        refusal = applicant.outcome
        if isinstance(refusal, Refused) and applicant.is_proven:
            if refusal.gone:
                self._on_expelled()
            raise _AnotherWorker(f"{other} refused the connection: {refusal.reason}")
        welcome = applicant.welcome()
        if welcome.name != self.info.name or welcome.number != self.number:
            raise _AnotherWorker(f"this is worker {welcome.name!r}, not {self.info.name!r}")
        lane.agree(welcome.limits)
        if welcome.shares:
            lane.open()
        if lane.accept(welcome.lends, welcome.token):
            shares = encode(SHARES, 0, b"", b"")
            self._send(channel, shares)
            lane.told = len(shares)
        return lane

    def _say(self, channel: Channel, message: Greeting) -> None:
        self._send(channel, pack(Purpose.CALLS, message))

    def _send(self, channel: Channel, greeting: bytes) -> None:
        if channel.send(greeting) != len(greeting):  # it fits into any socket's empty buffer
            raise ProtocolError(f"it does not take a greeting of {len(greeting)} bytes")

    def _receive_exactly(
        self,
        channel: Channel,
        size: int,
        deadline: float,
        check: Callable[[bytes, str], None] = lambda received, other: None,
    ) -> bytes:
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN)
        data = b""
        while len(data) < size:
            left = deadline - monotonic()
            if left <= 0 or self.is_lost or self.is_over():
                raise TimeoutError(f"worker {self.info.name!r} did not answer the greeting in time")
            if not poll.poll(min(left, _LOOK_AGAIN) * 1000):
                continue
            try:
                chunk = channel.receive(size - len(data))
            except BlockingIOError:
                continue
            if not chunk:
                raise ProtocolError(f"worker {self.info.name!r} closed the connection in the midst of the greeting")
            data += chunk
            check(data, f"worker {self.info.name!r}")
        return data


def _is_here(address: str) -> bool:
    """Whether nobody but the system of this host answers in the place of who does not listen there."""
    scheme, _, rest = address.partition(":")
    return scheme in ONE_HOST or (scheme == "tcp" and is_local(rest.rpartition(":")[0].strip("[]")))


class _AnotherWorker(ConnectionRefusedByPeer):
    """Somebody else listens there now, or the one who does wants nothing to do with us."""
