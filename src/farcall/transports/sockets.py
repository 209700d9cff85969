"""Channels and listeners over stream sockets: what `tcp`, `unix` and `memory` share.

It knows no address family: whoever makes the socket names it and tunes it. A channel's methods are the socket's own C
methods, so that no Python frame runs here between the agent and the kernel.

Giving a descriptor back is the delicate part. A thread that is about to enter `recv` has let go of the interpreter lock
with the descriptor's *number* in hand. If another thread closes that number now and opens something else, the kernel
gives the number away again, and the first thread reads what was meant for the newcomer (with a thread that spins on
`recv`, one close in a thousand did so). Therefore `close` only shuts the socket down, which ends the stream both ways
at once, and forgets it; the number is given back when the last call on it has returned.

Rule for users: who keeps a method of a channel, kept its descriptor. Let go of it along with the channel.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

from farcall.transports.base import Buffer, Channel

BACKLOG: Final = 4096
"""Connections that wait to be accepted; the kernel takes less if it is set up so. Big groups start all at once."""


class OwnSocket(socket.socket):
    """A socket that closes itself when nobody holds it any more, and complains only if nobody had said so."""

    __slots__ = ("released",)

    def __init__(self, sock: socket.socket) -> None:
        self.released = False
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.setblocking(False)

    def release(self) -> None:
        """Ends the stream now; the descriptor goes with the last reference. Any thread may, more than once."""
        self.released = True
        try:
            self.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected any more, which is what was wanted

    def abandon(self) -> None:
        """Closes the descriptor of a forked child, which leaves the stream to the parent."""
        self.released = True
        self.close()

    def __del__(self) -> None:
        if self.released:
            self.close()
        else:
            super().__del__()  # type: ignore[misc]  # it is there, and warns of an unclosed socket


class SocketChannel:
    """A `Channel` over a connected stream socket, which belongs to it from now on."""

    __slots__ = (
        "__weakref__",
        "_socket",
        "address",
        "fileno",
        "process",
        "receive",
        "receive_into",
        "send",
        "send_gather",
    )

    fileno: Callable[[], int]
    receive: Callable[[int], bytes]
    receive_into: Callable[[memoryview], int]
    send: Callable[[Buffer], int]
    send_gather: Callable[[Sequence[Buffer]], int]

    process: int | None
    """The id of the process at the other end, if that is on this host, and the kernel says so."""

    def __init__(self, sock: socket.socket, address: str, process: int | None = None) -> None:
        own = sock if isinstance(sock, OwnSocket) else OwnSocket(sock)
        self.address = address
        self.process = process
        self._socket: OwnSocket | None = own
        self.fileno = own.fileno
        self.receive = own.recv
        self.receive_into = own.recv_into
        self.send = own.send
        self.send_gather = own.sendmsg

    @property
    def binding(self) -> bytes:
        """What an encrypted channel is bound to; empty for any other."""
        return getattr(self._socket, "binding", b"")

    def close(self) -> None:
        """Ends the stream in both directions. Any thread may call it, more than once; it raises nothing."""
        sock = self._take()
        if sock is not None:
            sock.release()

    def abandon(self) -> None:
        """In a forked child: gives the descriptor back and leaves the stream to the parent. Raises nothing."""
        sock = self._take()
        if sock is not None:
            sock.abandon()

    def _take(self) -> OwnSocket | None:
        sock, self._socket = self._socket, None
        closed = _refusal(f"the channel to {self.address} is closed")
        self.fileno = self.receive = self.receive_into = self.send = self.send_gather = closed
        return sock

    def __repr__(self) -> str:
        return f"<SocketChannel {self.address}{' closed' if self._socket is None else ''}>"


class SocketListener:
    """A `Listener` over a listening stream socket, which belongs to it from now on.

    `channel` makes the channel out of an accepted socket and what `accept` said of the peer's address; None if it has
    turned the peer away, and closed the socket.
    """

    __slots__ = ("__weakref__", "_channel", "_socket", "address")

    def __init__(
        self, sock: socket.socket, address: str, channel: Callable[[socket.socket, Any], Channel | None]
    ) -> None:
        self.address = address
        self._channel = channel
        self._socket: OwnSocket | None = OwnSocket(sock)

    def fileno(self) -> int:
        """A descriptor that polls readable when `accept` has a channel. Raises `OSError` after `close`."""
        return self._open().fileno()

    def accept(self) -> Channel | None:
        """The next channel, or None. Raises `OSError` after `close`, or if this process is out of descriptors."""
        try:
            sock, peer = self._open().accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None  # nobody, or somebody who has changed their mind
        return self._channel(sock, peer)

    def close(self) -> None:
        """No more channels. Any thread may call it, more than once; it raises nothing."""
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.release()

    def abandon(self) -> None:
        """In a forked child: gives the descriptor back; the parent goes on listening. Raises nothing."""
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.abandon()

    def _open(self) -> OwnSocket:
        sock = self._socket
        if sock is None:
            raise OSError(errno.EBADF, f"the listener at {self.address} is closed")
        return sock

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address}{' closed' if self._socket is None else ''}>"


def _refusal(message: str) -> Callable[..., NoReturn]:
    def closed(*_: object) -> NoReturn:
        raise OSError(errno.EBADF, message)

    return closed
