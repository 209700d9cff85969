"""Sockets for a store: where to listen, where to connect, and which of our addresses others can reach.

Not about what is said on them. A *name* that resolves to nothing but loopback (many systems map their own host name to
127.0.1.1) says only "this machine": then the machine's other addresses count, for others use the name from elsewhere.
`localhost` and literal loopback addresses mean loopback.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from collections.abc import Sequence
from typing import Any, Final

from farcall.errors import RendezvousError
from farcall.transports.network import is_loopback, local_address_towards, local_addresses, numeric_host

BIND_PATIENCE: Final = 0.5
"""Seconds that a port may still be taken: by whoever is just closing it."""

_BACKLOG: Final = 1024


def host_port(host: str, port: int) -> str:
    """As it stands in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def peer_text(sock: socket.socket) -> str:
    """The other end, for messages to people."""
    try:
        peer = sock.getpeername()
    except OSError:
        return "a connection that is gone"
    return host_port(numeric_host(peer), peer[1])


def loopback_text(sockaddr: tuple[Any, ...]) -> str:
    """An address on loopback as both ends of a connection to it write it; empty for any other, which may be translated
    on its way."""
    host = numeric_host(sockaddr)
    if not is_loopback(host):
        return ""
    address = ipaddress.ip_address(host)
    return host_port(str(getattr(address, "ipv4_mapped", None) or address), sockaddr[1])


def reachable_addresses() -> list[str]:
    """This machine's addresses, those that others can reach first: the default route's, the rest, then loopback."""
    addresses = [address for address in local_addresses() if not ipaddress.ip_address(address).is_link_local]
    try:
        # An address set aside for documentation: no packet is sent, only the default route is looked up.
        default = local_address_towards("203.0.113.1", 9)
    except OSError:
        default = ""
    return sorted(addresses, key=lambda address: (is_loopback(address), address != default))


def resolve(host: str) -> list[str]:
    """The numeric addresses of a host, best first. Raises `OSError` if the name is unknown."""
    addresses = _look_up(host)
    if _means_this_machine(host, addresses):
        return [address for address in reachable_addresses() if not is_loopback(address)] + addresses
    return addresses


def listen(host: str, ports: Sequence[int]) -> socket.socket:
    """Listens on the first free port of a host that is this machine. Port 0 is any; host "" is all addresses.

    Raises `RendezvousError` if the host is not this machine, or every port is taken.
    """
    try:
        addresses = _look_up(host) if host else [""]
    except OSError as error:
        raise RendezvousError(
            f"rank 0 cannot host the store at {host}: the name cannot be resolved ({error}); use an address of rank 0"
        ) from error
    if _means_this_machine(host, addresses):
        addresses = [""]
    deadline = time.monotonic() + BIND_PATIENCE
    while True:
        for port in ports:
            listener = _listen_on_one(host, addresses, port)
            if listener is not None:
                return listener
        if time.monotonic() >= deadline:
            raise RendezvousError(
                f"rank 0 cannot host the store at {host or 'this machine'}: port {', '.join(map(str, ports))} is taken "
                "by another process, perhaps another worker that also has rank 0; give each worker a rank of its own, "
                "end that process or choose another port"
            )
        time.sleep(0.02)


def listen_at_once(host: str, port: int) -> socket.socket:
    """Listens on a port of a host if that is this machine and the port is free. Raises `OSError` if not."""
    addresses = _look_up(host) if host else [""]
    if _means_this_machine(host, addresses):
        addresses = [""]
    failures: list[OSError] = []
    for address in addresses:
        try:
            return _listen_at(address, port)
        except OSError as error:
            failures.append(error)
    # A taken port says that one of the addresses is ours, which counts for more than those that are not.
    raise next((error for error in failures if error.errno == errno.EADDRINUSE), failures[0])


def connect(host: str, port: int, timeout: float) -> socket.socket:
    """A connection to the first address of the host that takes one. Raises `OSError`."""
    deadline = time.monotonic() + timeout
    addresses = resolve(host)
    failure = OSError(f"{host} has no address")
    for tried, address in enumerate(addresses):
        remaining = max(0.001, deadline - time.monotonic())
        try:
            return _connect_to(address, port, remaining / (len(addresses) - tried))
        except OSError as error:
            failure = error
    raise failure


def keep_alive(sock: socket.socket) -> None:
    """Has the kernel notice within half a minute that the other machine is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _look_up(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(numeric_host(sockaddr) for *_, sockaddr in found))


def _means_this_machine(host: str, addresses: Sequence[str]) -> bool:
    if not host or host.lower().rstrip(".").endswith("localhost"):
        return False
    try:
        ipaddress.ip_address(host)
        return False
    except ValueError:
        return all(is_loopback(address) for address in addresses)


def _listen_on_one(host: str, addresses: Sequence[str], port: int) -> socket.socket | None:
    """None if the port is taken. Raises `RendezvousError` if none of the addresses can be listened on at all."""
    failures: dict[int | None, OSError] = {}
    for address in addresses:
        try:
            return _listen_at(address, port)
        except OSError as error:
            failures[error.errno] = error
    if errno.EADDRINUSE in failures:
        return None
    if errno.EADDRNOTAVAIL in failures:
        raise RendezvousError(
            f"rank 0 cannot host the store at {host}: {', '.join(addresses)} is no address of this machine, "
            f"which has {', '.join(reachable_addresses())}; rank 0 must run where the address says"
        )
    failure = next(iter(failures.values()))
    raise RendezvousError(f"rank 0 cannot host the store at {host_port(host, port)}: {failure.strerror}") from failure


def _listen_at(address: str, port: int) -> socket.socket:
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    if not address:
        return socket.create_server(("", port), backlog=_BACKLOG)
    family, *_, sockaddr = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(sockaddr, family=family, backlog=_BACKLOG)


def _connect_to(address: str, port: int, timeout: float) -> socket.socket:
    family, kind, protocol, _, sockaddr = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # Without it, a connection whose own port happens to be the store's would keep the store from listening there.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.settimeout(timeout)
        sock.connect(sockaddr)
        if sock.getsockname() == sock.getpeername():
            # TCP lets a socket connect to itself when the kernel picks the very port it wants to reach.
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
        keep_alive(sock)
    except BaseException:
        sock.close()
        raise
    return sock
