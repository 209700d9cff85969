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
    """The transport with the scheme `tcp`, for workers on different hosts.

    Args:
        encryption: The certificates of this worker, with which links between hosts are encrypted. None to encrypt no
            link.
        even_on_loopback: True to encrypt links on loopback as well, for tests without a second host. Has no effect if
            `encryption` is None.
    """

    scheme = "tcp"

    def __init__(self, encryption: Encryption | None = None, even_on_loopback: bool = False) -> None:
        self._encryption = encryption
        self._even_on_loopback = even_on_loopback

    def _encryption_for(self, host: str) -> Encryption | None:
        """Returns the certificates for a link to a listener at the numeric address `host`; None for no encryption.

        Raises `ValueError` if the address is not numeric.
        """
        return self._encryption if self._even_on_loopback or not is_loopback(host) else None

    def listen(self, host: str | None, handshake_limit: int) -> TcpListener:
        """Returns a listener on a free port.

        Args:
            host: An address of this machine, or a name for it; None or empty text for 127.0.0.1.
            handshake_limit: The most bytes of a frame that an accepted link receives before it is established.

        Raises:
            OSError: `host` cannot be resolved, is not an address of this machine, or stands for all of them
                (`0.0.0.0`), to which other workers could not connect.
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
        """Connects to a listener, and returns the link, which is in its handshake.

        The link is encrypted if this transport has certificates and the listener is not on loopback. All addresses of a
        host name are tried one after the other.

        Args:
            address: The address of the listener, such as `tcp:192.0.2.7:4000`.
            timeout: How many seconds to wait at most. Only resolving a host name may take longer.
            handshake_limit: The most bytes of a frame that the link receives before it is established.

        Raises:
            OSError: The address is not valid, or nothing listens there.
            TimeoutError: The timeout has expired; at once if it is 0.
            EncryptionError: Only one end uses encryption, or one end refuses the certificate of the other.
            ProtocolError: The program that listens there is not a worker.
        """
        return self._connect(address, timeout, handshake_limit, self._encryption_for)

    def connect_encrypted(self, address: str, timeout: float, handshake_limit: int) -> StreamLink:
        """Connects to a listener, and returns the link, which is in its handshake. Encrypts it even on loopback.

        All addresses of a host name are tried one after the other.

        Args:
            address: The address of the listener, such as `tcp:127.0.0.1:4000`.
            timeout: How many seconds to wait at most. Only resolving a host name may take longer.
            handshake_limit: The most bytes of a frame that the link receives before it is established.

        Raises:
            EncryptionError: This worker has no certificates, the other end does not encrypt, or one end refuses the
                certificate of the other.
            OSError: The address is not valid, or nothing listens there.
            TimeoutError: The timeout has expired; at once if it is 0.
            ProtocolError: The program that listens there is not a worker.
        """
        if self._encryption is None:
            raise EncryptionError(
                f"{address} is on another host or in another network namespace and wants encryption, and this worker "
                "does not encrypt: encrypt_between_hosts must be the same at all workers"
            )
        return self._connect(address, timeout, handshake_limit, lambda host: self._encryption)

    def _connect(
        self, address: str, timeout: float, handshake_limit: int, encryption_for: Callable[[str], Encryption | None]
    ) -> StreamLink:
        """Connects to the listener at `address`, and returns the link, which is in its handshake.

        Tries all numeric addresses of the host in turn, each for an equal share of `timeout`, which is in seconds.
        `encryption_for` returns the certificates to use for a numeric address; None for no encryption. The link
        receives frames of at most `handshake_limit` bytes before it is established.

        Raises `OSError` if `address` is not valid. If no attempt succeeds, raises the error of the last one:
        `TimeoutError`, `EncryptionError`, another `ProtocolError` if no worker listens there, or another `OSError`.
        """
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
    """A listening TCP socket on one address. `accept` returns the links of workers that connect to it.

    Args:
        sock: The socket. The listener takes it over and closes it.
        encryption: The certificates for encrypted links; None to encrypt no link.
        must_encrypt: True to encrypt every link. False to encrypt a link only if the other end begins with TLS.
            Ignored if `encryption` is None.
        handshake_limit: The most bytes of a frame that an accepted link receives before it is established.
    """

    def __init__(
        self, sock: socket.socket, encryption: Encryption | None, must_encrypt: bool, handshake_limit: int
    ) -> None:
        self.address = _format_address(sock.getsockname())
        self._socket: OwnSocket | None = OwnSocket(sock)
        self._encryption = encryption
        self._must_encrypt = must_encrypt
        self._handshake_limit = handshake_limit

    def fileno(self) -> int:
        """Returns a file descriptor that is readable when a link can be accepted.

        Raises:
            OSError: The listener is closed.
        """
        return self._open_socket().fileno()

    def _open_socket(self) -> OwnSocket:
        """Returns the listening socket. Raises `OSError` if the listener is closed."""
        if self._socket is None:
            raise OSError(errno.EBADF, f"the listener at {self.address} is closed")
        return self._socket

    def accept(self) -> StreamLink | None:
        """Returns the next link, which is in its handshake; None if nobody has connected. Does not wait.

        Raises:
            OSError: The listener is closed, or the process has no file descriptors left.
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
        """Closes the descriptor in a forked child. The parent continues to listen. Raises nothing."""
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.abandon()


class _LoopbackLink(StreamLink):
    """A link that was accepted on loopback, by a worker that has certificates.

    The other end decides whether the link is encrypted: the first byte that arrives shows it. The constructor sends
    nothing.

    Args:
        sock: The connected socket. The link takes it over and closes it.
        address: The address of the other end, for log and error messages.
        handshake_limit: The most bytes of a frame that the link receives before it is established.
        encryption: The certificates of this worker. They are used if the other end begins with TLS.
    """

    def __init__(self, sock: socket.socket, address: str, handshake_limit: int, encryption: Encryption) -> None:
        super().__init__(sock, address, handshake_limit, network_identity(sock))
        self._encryption: Encryption | None = encryption

    def receive(self) -> list[Frame]:
        """Returns the frames that have arrived; an empty list if no frame is complete. Does not wait.

        Before the first frame, finds out whether the other end encrypts.

        Raises:
            ConnectionError: The link is closed or broken, the TLS handshake has failed, or the other end has closed the
                link and all frames were returned before.
            ProtocolError: The other end has sent bytes that are not a frame, or a frame that is too large.
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
        """Uses `encryption` from now on if the first byte is that of TLS. Leaves the byte in the socket.

        Raises `BlockingIOError` if no byte has arrived yet, and `OSError` if the link is closed or broken.
        """
        sock = self._open_socket()
        if sock.recv(1, socket.MSG_PEEK) == _TLS_HANDSHAKE:
            from farcall.transports.tls import TlsSocket

            encryption.listening()  # if this raises, the socket is unchanged
            self._socket, self.network = TlsSocket(sock, encryption, listens=True), ""  # the descriptor is the same
            if self._is_closed:  # by another thread, which has closed the old socket object
                self.close()
        self._encryption = None


def _encrypt(sock: socket.socket, encryption: Encryption, seconds: float) -> OwnSocket:
    """Returns an encrypted socket over a connected one, after the TLS handshake.

    Raises `TimeoutError` if the handshake is not done after `seconds`; with 0, unless it can be completed at once.
    Raises another `OSError`, such as `EncryptionError`, if the handshake fails.
    """
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
    """Connects a socket to an address of the socket module.

    Raises `TimeoutError` after `seconds`, at once if `seconds` is 0 or negative, and `OSError` if the connection is
    refused or fails.
    """
    if seconds <= 0:
        raise TimeoutError
    sock.settimeout(min(seconds, _MAX_WAIT_S))
    sock.connect(sockaddr)
    # On one host, a connection to a free port may get that same port as its source. Then TCP connects it to itself.
    if sock.getsockname() == sockaddr:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


def _tuned(sock: socket.socket) -> socket.socket:
    """Sets options of a TCP socket and returns it: TCP_NODELAY, to send small frames at once, and SO_KEEPALIVE."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock


def _format_address(sockaddr: Any) -> str:
    """Returns the address `tcp:host:port` or `tcp:[ipv6]:port` for an address of the socket module."""
    host = numeric_host(sockaddr)
    return f"tcp:[{host}]:{sockaddr[1]}" if ":" in host else f"tcp:{host}:{sockaddr[1]}"


def _parse_address(address: str) -> tuple[str, int]:
    """Returns the host and port of an address `tcp:host:port` or `tcp:[ipv6]:port`.

    Raises `OSError` if it is not valid.
    """
    scheme, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""  # without brackets, the end of an IPv6 address is ambiguous
    if scheme != "tcp" or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise OSError(errno.EINVAL, "no tcp address; it looks like tcp:host:port or tcp:[ipv6]:port", address)
    return host, int(port)
