"""The other workers: where they are, and the one connection to each for our own calls.

Rules
- A connection is made by the first call, and made anew by the next call after it was lost.
- The best transport that works is taken: unix sockets only on the same host, and whatever fails (a container without
  the socket's directory, say) is passed over for the next.
- The greeting makes sure that the one who answers is the worker we want.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Final

import msgspec

from farcall.agent.outgoing import LOST_ADVICE, Outgoing
from farcall.errors import ConnectionRefusedByPeer, ProtocolError, WorkerLost
from farcall.protocol.handshake import PREAMBLE_SIZE, Hello, Purpose, body_length, expect_welcome, pack, unpack
from farcall.protocol.ids import WorkerInfo
from farcall.sleeping import asleep
from farcall.transports.base import Channel, Transport

CONNECT_TIMEOUT: Final = 10.0
ONE_HOST: Final = frozenset({"unix", "memory"})
"""Transports that can work on one host only."""


class Member(msgspec.Struct, frozen=True):
    """What a worker tells the others about itself when it joins."""

    name: str
    rank: int
    host: str
    """Tells hosts apart; see `transports.network.host_identity`."""
    addresses: tuple[str, ...]


class Peer:
    """One worker of the group, as this worker sees it."""

    def __init__(
        self,
        member: Member,
        us: Member,
        group: str,
        transports: Mapping[str, Transport],
        new_connection: Callable[[WorkerInfo, Channel, Callable[[Outgoing], None]], Outgoing],
        on_lost: Callable[[Peer], None],
    ) -> None:
        self.info = WorkerInfo(member.name, member.rank)
        self._member = member
        self._us = us
        self._group = group
        self._transports = transports
        self._new_connection = new_connection
        self._on_lost = on_lost
        self._lock = threading.RLock()
        self.is_lost = False
        """It is gone for good."""
        self.connection: Outgoing | None = None
        """The connection, if there is one now; else `connect`."""

    def connect(self, deadline: float) -> Outgoing:
        """The connection, made if need be. Raises `WorkerLost` if the worker cannot be reached."""
        if self.is_lost:
            raise WorkerLost(f"worker {self.info.name!r} was lost", self.info.name)
        deadline = min(deadline, monotonic() + CONNECT_TIMEOUT)
        with asleep():
            try:
                # One connection, however many threads call at once.
                if not self._lock.acquire(timeout=max(0.0, deadline - monotonic())):
                    raise WorkerLost(f"worker {self.info.name!r} could not be connected to in time", self.info.name)
                if self.connection is None:
                    self.connection = self._new_connection(self.info, self._open(deadline), self._forget)
                return self.connection
            finally:
                if self._lock._is_owned():  # type: ignore[attr-defined]  # Ctrl-C may come as it has just been taken
                    self._lock.release()

    def lose(self) -> None:
        """Takes it for gone for good: calls to it fail at once from now on."""
        with self._lock:
            if self.is_lost:
                return
            self.is_lost = True
        self._on_lost(self)

    def _forget(self, connection: Outgoing) -> None:
        if self.connection is connection:
            self.connection = None

    def _open(self, deadline: float) -> Channel:
        reasons = []
        ways = self._ways()
        for tried, (transport, address) in enumerate(ways):
            # Each gets its share of the time: one that hangs must not leave nothing for the next.
            until = monotonic() + max(0.0, deadline - monotonic()) / (len(ways) - tried)
            try:
                channel = transport.connect(address, max(0.0, until - monotonic()))
            except OSError as error:
                reasons.append(f"{address}: {error.strerror or error}")  # some name the address once more
                continue
            try:
                self._greet(channel, until)
            except (OSError, ProtocolError) as error:
                channel.close()
                reasons.append(f"{address}: {error.strerror or error}")
            except BaseException:
                channel.close()
                raise
            else:
                return channel
        detail = "; ".join(reasons) or f"no transport of {', '.join(self._transports)} leads to it"
        raise WorkerLost(f"worker {self.info.name!r} cannot be reached ({detail}); {LOST_ADVICE}", self.info.name)

    def _ways(self) -> list[tuple[Transport, str]]:
        """The addresses of the worker that may be reached from here, best first."""
        same_host = self._member.host == self._us.host
        return [
            (transport, address)
            for transport in self._transports.values()
            for address in self._member.addresses
            if address.partition(":")[0] == transport.scheme and (same_host or transport.scheme not in ONE_HOST)
        ]

    def _greet(self, channel: Channel, deadline: float) -> None:
        hello = Hello(group=self._group, name=self._us.name, rank=self._us.rank, wanted=self.info.name)
        greeting = pack(Purpose.CALLS, hello)
        if channel.send(greeting) != len(greeting):  # it fits into any socket's empty buffer
            raise ProtocolError(f"it does not take a greeting of {len(greeting)} bytes")
        other = f"worker {self.info.name!r}"
        preamble = _receive_exactly(channel, PREAMBLE_SIZE, deadline, other)
        body = _receive_exactly(channel, body_length(preamble, Purpose.CALLS, other), deadline, other)
        welcome = expect_welcome(unpack(body, other), other)
        if welcome.name != self.info.name:
            raise ConnectionRefusedByPeer(f"this is worker {welcome.name!r}, not {self.info.name!r}")


def _receive_exactly(channel: Channel, size: int, deadline: float, other: str) -> bytes:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    data = b""
    while len(data) < size:
        left = deadline - monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeoutError(f"{other} did not answer the greeting in time")
        try:
            chunk = channel.receive(size - len(data))
        except BlockingIOError:
            continue
        if not chunk:
            raise ProtocolError(f"{other} closed the connection in the midst of the greeting")
        data += chunk
    return data
