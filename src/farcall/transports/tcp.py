"""TCP, over IPv4 and IPv6: the transport between hosts, encrypted if it is told how.

Given an `Encryption`, every channel is encrypted (`tls`) but those on loopback. Both ends see from the address which it
is: that of a listener is loopback or it is not.

Addresses: `tcp:192.0.2.7:4000`, `tcp:[fd00::7]:4000`, `tcp:[fe80::7%eth0]:4000`, `tcp:some.host:4000`. The interface in
a link-local address is the *connecting* machine's, so such an address only travels between machines that name their
interfaces alike.

The sizes of the kernel's buffers are left to the kernel on purpose: setting them turns off its own tuning, which goes
far higher than what a process may ask for.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from farcall.errors import ProtocolError
from farcall.transports.base import Channel
from farcall.transports.network import is_loopback, numeric_host, resolve
from farcall.transports.sockets import BACKLOG, SocketChannel, SocketListener

if TYPE_CHECKING:
    from farcall.transports.tls import Encryption

_LONGEST_WAIT: Final = 3600.0
"""Seconds; the kernel gives up on a connection long before, and `settimeout` refuses infinity."""


class TcpTransport:
    """The `Transport` whose scheme is `tcp`."""

    scheme = "tcp"

    def __init__(self, encryption: Encryption | None = None, even_on_loopback: bool = False) -> None:
        """`even_on_loopback` is for tests that have no second host."""
        self.encryption = encryption
        """May be set until the first use."""
        self._even_on_loopback = even_on_loopback

    def _encryption_for(self, host: str) -> Encryption | None:
        """What to encrypt a connection with of which a numeric address is the listening end."""
        return self.encryption if self._even_on_loopback or not is_loopback(host) else None

    def listen(self, host: str | None = None) -> SocketListener:
        """A listener on a free port of that address of this machine; of 127.0.0.1 if none is given.

        Raises `OSError` if the address is not of this machine, or is one that nobody could connect to (`0.0.0.0`).
        """
        host = host or "127.0.0.1"
        failure = OSError(errno.EADDRNOTAVAIL, "no such address", host)
        for family, kind, protocol, _, sockaddr in resolve(host, 0, socket.SOCK_STREAM):
            if ipaddress.ip_address(sockaddr[0]).is_unspecified:
                message = "peers cannot connect to every address at once; listen on one interface's"
                raise OSError(errno.EADDRNOTAVAIL, message, host)
            with socket.socket(family, kind, protocol) as sock:  # closed unless the listener has taken it over
                try:
                    sock.bind(sockaddr)
                    sock.listen(BACKLOG)
                    encryption = self._encryption_for(sockaddr[0])
                    if encryption is not None:
                        encryption.listening()  # now, so that the first who connects holds up nobody
                    accepted = _accepted if encryption is None else partial(_accepted_encrypted, encryption)
                    return SocketListener(sock, _address(sock.getsockname()), accepted)
                except OSError as error:
                    failure = OSError(error.errno, error.strerror, host)
        raise failure

    def connect(self, address: str, timeout: float) -> Channel:
        """A channel to the listener at that address; a name's addresses are tried one by one, within the timeout.

        Raises `OSError` if nobody listens there, `TimeoutError` if nobody answers in time, `EncryptionError` if the two
        do not agree on the encryption, `ProtocolError` if it is nobody who could. A host that is a name has
        to be resolved first, which takes the time that the system's resolver takes.
        """
        deadline = time.monotonic() + timeout
        host, port = _parse(address)
        candidates = resolve(host, port, socket.SOCK_STREAM)
        failure = OSError(errno.EADDRNOTAVAIL, "no such address", address)
        for tried, (family, kind, protocol, _, sockaddr) in enumerate(candidates):
            # A fair share of the time for each, so that one that swallows packets leaves some for the next.
            share = (deadline - time.monotonic()) / (len(candidates) - tried)
            until = time.monotonic() + share
            with socket.socket(family, kind, protocol) as sock:  # closed unless the channel has taken it over
                try:
                    _dial(sock, sockaddr, share)
                    encryption = self._encryption_for(sockaddr[0])
                    if encryption is None:
                        return SocketChannel(_tune(sock), address)
                    return _encrypted(_tune(sock), encryption, until - time.monotonic(), address)
                except TimeoutError:
                    failure = TimeoutError(errno.ETIMEDOUT, f"no connection within {timeout:g} s", address)
                except ProtocolError as error:
                    failure = error.with_traceback(None)
                except OSError as error:
                    failure = OSError(error.errno or errno.ECONNABORTED, error.strerror or str(error), address)
        try:
            raise failure
        finally:
            del failure  # else it and this frame would keep each other, and all that the caller has


def _encrypted(sock: socket.socket, encryption: Encryption, seconds: float, address: str) -> Channel:
    from farcall.transports.tls import TlsSocket  # late: it needs ssl

    sock.setblocking(False)
    encrypted = TlsSocket(sock, encryption, listens=False)
    try:
        encrypted.shake_hands(seconds)
    except BaseException:
        encrypted.release()
        raise
    return SocketChannel(encrypted, address)


def _accepted_encrypted(encryption: Encryption, sock: socket.socket, peer: Any) -> Channel:
    from farcall.transports.tls import TlsSocket

    sock.setblocking(False)
    return SocketChannel(TlsSocket(_tune(sock), encryption, listens=True), _address(peer))


def _dial(sock: socket.socket, sockaddr: Any, seconds: float) -> None:
    if seconds <= 0:
        raise TimeoutError
    sock.settimeout(min(seconds, _LONGEST_WAIT))
    sock.connect(sockaddr)
    # On one host, a connection to a free port may come from that very port, and then TCP connects it with itself.
    if sock.getsockname() == sockaddr:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


def _accepted(sock: socket.socket, peer: Any) -> SocketChannel:
    return SocketChannel(_tune(sock), _address(peer))


def _tune(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock


def _address(sockaddr: Any) -> str:
    host = numeric_host(sockaddr)
    return f"tcp:[{host}]:{sockaddr[1]}" if ":" in host else f"tcp:{host}:{sockaddr[1]}"


def _parse(address: str) -> tuple[str, int]:
    scheme, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""  # an IPv6 address without brackets may end anywhere
    if scheme != "tcp" or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise OSError(errno.EINVAL, "no tcp address; it looks like tcp:host:port or tcp:[ipv6]:port", address)
    return host, int(port)
