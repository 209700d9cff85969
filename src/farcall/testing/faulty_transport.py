"""A transport around another one, whose connections pass through the links of a faulty agent.

The agent gets one end of a socket pair for each connection, so that it polls and blocks as it is used to. That end
differs from others in one thing: if the link was broken on purpose, its errors say so.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import TypeVar

from farcall.testing.faulty_control import Faults
from farcall.testing.faulty_link import Link
from farcall.transports.base import Channel, Listener, Transport
from farcall.transports.sockets import SocketChannel

T = TypeVar("T")


class FaultyTransport:
    """A `Transport` of the same scheme as the one it wraps."""

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self.scheme = inner.scheme
        self._inner = inner
        self._faults = faults

    def listen(self, host: str | None = None) -> FaultyListener:
        """A listener of the inner transport. Raises as that does."""
        return FaultyListener(self._inner.listen(host), self._faults)

    def connect(self, address: str, timeout: float) -> Channel:
        """A channel of the inner transport, with a link before it. Raises as that does."""
        return _link(self._inner.connect(address, timeout), self._faults)


class FaultyListener:
    """A `Listener` around another one."""

    def __init__(self, inner: Listener, faults: Faults) -> None:
        self.address = inner.address
        self.fileno = inner.fileno
        self.close = inner.close
        self.abandon = inner.abandon
        self._inner = inner
        self._faults = faults

    def accept(self) -> Channel | None:
        """The next channel, with a link before it, or None. Raises as the inner listener."""
        channel = self._inner.accept()
        return _link(channel, self._faults) if channel is not None else None


class FaultyChannel(SocketChannel):
    """The agent's end of a link."""

    __slots__ = ("_inner", "link")

    link: Link | None

    def __init__(self, sock: socket.socket, inner: Channel) -> None:
        super().__init__(sock, inner.address)
        self._inner = inner
        self.link = None
        self.receive = self._explaining(self.receive)
        self.receive_into = self._explaining(self.receive_into)
        self.send = self._explaining(self.send)
        self.send_gather = self._explaining(self.send_gather)

    @property
    def binding(self) -> bytes:
        """That of the real channel."""
        return getattr(self._inner, "binding", b"")

    def _explaining(self, plain: Callable[..., T]) -> Callable[..., T]:
        def method(argument: object) -> T:
            try:
                result = plain(argument)
            except ConnectionError:
                self._explain()
                raise
            if not result and argument:
                self._explain()
            return result

        return method

    def _explain(self) -> None:
        """Raises `ConnectionResetError` if the connection was broken on purpose."""
        link = self.link
        if link is not None and link.reason is not None:
            raise ConnectionResetError(link.reason)


def _link(inner: Channel, faults: Faults) -> FaultyChannel:
    try:
        agents, links = socket.socketpair()
    except OSError:
        inner.close()
        raise
    channel = FaultyChannel(agents, inner)
    ours = SocketChannel(links, inner.address)
    channel.link = faults.connect(inner, ours)
    if channel.link is None:
        for each in (channel, ours, inner):
            each.close()
        raise OSError(errno.ESHUTDOWN, "the faulty agent has ended")
    return channel
