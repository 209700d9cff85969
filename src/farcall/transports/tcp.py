"""TCP links over IPv4 and IPv6, for workers on different hosts. They are encrypted if there is an `Encryption`.

With an `Encryption`, every link is encrypted (`tls`) except those on loopback. Both ends decide that by the address of
the listener. A listener on loopback accepts encrypted links as well (`connect_encrypted`), because the other end may be
in another network namespace, with a proxy from its loopback to this one.

Addresses: `tcp:192.0.2.7:4000`, `tcp:[fd00::7]:4000`, `tcp:[fe80::7%eth0]:4000`, `tcp:some.host:4000`. The interface in
a link-local address is the *connecting* machine's, so such an address only works between machines that name their
interfaces alike.

The sizes of the kernel's buffers are not set, because that would turn off the kernel's own tuning, which allows far
larger buffers than a process can set.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from farcall.errors import EncryptionError, ProtocolError
from farcall.transports.base import Frame
from farcall.transports.network import is_loopback, network_identity, numeric_host, resolve
from farcall.transports.sockets import BACKLOG, OwnSocket
from farcall.transports.stream import StreamLink

if TYPE_CHECKING:
    from farcall.transports.tls import Encryption

_TLS_HANDSHAKE: Final = b"\x16"
"""The first byte of a TLS connection (RFC 8446, 5.1). An unencrypted link begins with `f`."""
_MAX_WAIT_S: Final = 3600.0
"""The longest timeout of a socket. Connecting ends long before that, and `settimeout` does not accept infinity."""


class TcpTransport:
    """The transport with the scheme `tcp`: TCP, encrypted between hosts."""

    scheme = "tcp"

    def __init__(self, encryption: Encryption | None = None, even_on_loopback: bool = False) -> None:
        """Creates a transport.

        Args:
            encryption: Certificates for links between hosts; None to encrypt nothing.
            even_on_loopback: Whether links on loopback are encrypted as well. For tests without a second host.
        """
        self._encryption = encryption
        self._even_on_loopback = even_on_loopback

    def _encryption_for(self, host: str) -> Encryption | None:
        """Returns the encryption of a link whose listener has that numeric address; None for no encryption."""
        return self._encryption if self._even_on_loopback or not is_loopback(host) else None

    def listen(self, host: str | None, handshake_limit: int) -> TcpListener:
        """Returns a listener on a free port.

        Args:
            host: An address of this machine; None means 127.0.0.1.
            handshake_limit: The most bytes of a frame that a link accepts before it is established.

        Raises:
            OSError: The host is not an address of this machine, or is `0.0.0.0`, which other workers could not dial.
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
                    must_encrypt = self._encryption_for(sockaddr[0]) is not None
                    if must_encrypt and self._encryption is not None:
                        self._encryption.listening()  # creates the certificate now, not during the first link
                    return TcpListener(sock, self._encryption, must_encrypt, handshake_limit)
                except OSError as error:
                    failure = OSError(error.errno, error.strerror, host)
        raise failure

    def connect(self, address: str, timeout: float, handshake_limit: int) -> StreamLink:
        """Returns a link to a listener, encrypted if the listener is on another host. Waits at most `timeout` seconds.

        The addresses of a host name are tried one by one. The timeout does not limit the time for resolving a host
        name.

        Raises:
            OSError: The address is not valid, nothing listens there, or the timeout has expired (`TimeoutError`).
            EncryptionError: Only one end uses encryption, or one refuses the other's certificate.
        """
        return self._connect(address, timeout, handshake_limit, self._encryption_for)

    def connect_encrypted(self, address: str, timeout: float, handshake_limit: int) -> StreamLink:
        """Connects as `connect` does, but always encrypts. Raises `EncryptionError` if this worker does not encrypt."""
        if self._encryption is None:
            raise EncryptionError(
                f"{address} is on another host or in another network namespace and wants encryption, and this worker "
                "does not encrypt: encrypt_between_hosts must be the same at all workers"
            )
        return self._connect(address, timeout, handshake_limit, lambda host: self._encryption)

    def _connect(
        self, address: str, timeout: float, handshake_limit: int, encryption_for: Callable[[str], Encryption | None]
    ) -> StreamLink:
        deadline = monotonic() + timeout
        host, port = _parse_address(address)
        candidates = resolve(host, port, socket.SOCK_STREAM)
        failure: OSError = OSError(errno.EADDRNOTAVAIL, "no such address", address)
        for tried, (family, kind, protocol, _, sockaddr) in enumerate(candidates):
            # Each address gets an equal share of the time, so that one that does not answer leaves time for the next.
            until = monotonic() + (deadline - monotonic()) / (len(candidates) - tried)
            with socket.socket(family, kind, protocol) as sock:  # closed unless the link has taken it over
                try:
                    _dial(sock, sockaddr, until - monotonic())
                    encryption = encryption_for(sockaddr[0])
                    if encryption is not None:
                        encrypted = _encrypt(_tuned(sock), encryption, until - monotonic())
                        return StreamLink(encrypted, address, handshake_limit)
                    network = network_identity(sock) if is_loopback(sockaddr[0]) else ""
                    return StreamLink(_tuned(sock), address, handshake_limit, network)
                except TimeoutError:
                    failure = TimeoutError(errno.ETIMEDOUT, f"no connection within {timeout:g} s", address)
                except ProtocolError as error:
                    failure = error.with_traceback(None)
                except OSError as error:
                    failure = OSError(error.errno or errno.ECONNABORTED, error.strerror or str(error), address)
        try:
            raise failure
        finally:
            del failure  # else the error and this stack frame would be a reference cycle


class TcpListener:
    """A listening TCP socket on one address."""

    def __init__(
        self, sock: socket.socket, encryption: Encryption | None, must_encrypt: bool, handshake_limit: int
    ) -> None:
        """Creates a listener on a listening socket.

        Args:
            sock: The socket. The listener takes it over.
            encryption: The certificates; None to encrypt nothing.
            must_encrypt: Whether every link is encrypted. If not, a link is encrypted if the other end begins with TLS.
            handshake_limit: See `Transport.listen`.
        """
        self.address = _format_address(sock.getsockname())
        self._socket: OwnSocket | None = OwnSocket(sock)
        self._encryption = encryption
        self._must_encrypt = must_encrypt
        self._handshake_limit = handshake_limit

    def fileno(self) -> int:
        """Returns a descriptor that is readable when a link can be accepted.

        Raises `OSError` if the listener is closed.
        """
        return self._open_socket().fileno()

    def _open_socket(self) -> OwnSocket:
        if self._socket is None:
            raise OSError(errno.EBADF, f"the listener at {self.address} is closed")
        return self._socket

    def accept(self) -> StreamLink | None:
        """Returns the next link; None if there is none now. Does not wait.

        Raises `OSError` if the listener is closed, or the process has no file descriptors left.
        """
        try:
            sock, peer = self._open_socket().accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        address, limit = _format_address(peer), self._handshake_limit
        if self._must_encrypt and self._encryption is not None:
            from farcall.transports.tls import TlsSocket  # imported here, because it imports ssl

            sock.setblocking(False)
            return StreamLink(TlsSocket(_tuned(sock), self._encryption, listens=True), address, limit)
        if self._encryption is not None:
            return _LoopbackLink(_tuned(sock), address, limit, self._encryption)
        return StreamLink(_tuned(sock), address, limit)

    def close(self) -> None:
        """Stops listening. Links that were accepted stay open. May be called twice."""
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.release()

    def abandon(self) -> None:
        """In a forked child: closes the descriptor here. The parent continues to listen. Raises nothing."""
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.abandon()


class _LoopbackLink(StreamLink):
    """A link that was accepted on loopback. Its first byte shows whether it is encrypted."""

    def __init__(self, sock: socket.socket, address: str, handshake_limit: int, encryption: Encryption) -> None:
        super().__init__(sock, address, handshake_limit, network_identity(sock))
        self._encryption: Encryption | None = encryption

    def receive(self) -> list[Frame]:
        """Returns the frames that have arrived, as `StreamLink.receive` does.

        Decides first whether the link is encrypted.
        """
        if self._encryption is not None:
            try:
                self._decide(self._encryption)
            except BlockingIOError:
                return []
            except ConnectionError:
                raise
            except OSError as error:
                raise ConnectionResetError(f"the connection broke: {error}") from error
        return super().receive()

    def _decide(self, encryption: Encryption) -> None:
        """Turns encryption on if the first byte is that of TLS. Raises `BlockingIOError` if it has not arrived yet."""
        sock = self._open_socket()
        if sock.recv(1, socket.MSG_PEEK) == _TLS_HANDSHAKE:
            from farcall.transports.tls import TlsSocket

            encryption.listening()  # if this raises, the socket is unchanged
            self._socket, self.network = TlsSocket(sock, encryption, listens=True), ""  # the descriptor is the same
            if self._is_closed:  # by another thread, which has closed the old socket object
                self.close()
        self._encryption = None


def _encrypt(sock: socket.socket, encryption: Encryption, seconds: float) -> OwnSocket:
    from farcall.transports.tls import TlsSocket  # imported here, because it imports ssl

    sock.setblocking(False)
    encrypted = TlsSocket(sock, encryption, listens=False)
    try:
        encrypted.do_handshake(seconds)
    except BaseException:
        encrypted.release()
        raise
    return encrypted


def _dial(sock: socket.socket, sockaddr: Any, seconds: float) -> None:
    if seconds <= 0:
        raise TimeoutError
    sock.settimeout(min(seconds, _MAX_WAIT_S))
    sock.connect(sockaddr)
    # On one host, a connection to a free port may get that same port as its source. Then TCP connects it to itself.
    if sock.getsockname() == sockaddr:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


def _tuned(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock


def _format_address(sockaddr: Any) -> str:
    host = numeric_host(sockaddr)
    return f"tcp:[{host}]:{sockaddr[1]}" if ":" in host else f"tcp:{host}:{sockaddr[1]}"


def _parse_address(address: str) -> tuple[str, int]:
    scheme, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""  # without brackets, the end of an IPv6 address is ambiguous
    if scheme != "tcp" or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise OSError(errno.EINVAL, "no tcp address; it looks like tcp:host:port or tcp:[ipv6]:port", address)
    return host, int(port)
