"""Sockets for a store: where to listen, where to connect, and which addresses of this machine others can reach.

A host *name* that resolves only to loopback addresses means "this machine", because many systems map their own host
name to 127.0.1.1. Other machines reach this one by the same name at its other addresses, so those are used as well.
`localhost` and literal loopback addresses mean loopback only.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from farcall.errors import RendezvousError
from farcall.transports.network import is_loopback, local_address_towards, local_addresses, numeric_host

BIND_TIMEOUT_S: Final = 0.5
"""How many seconds `listen` retries a taken port, because the process that has it may just be ending."""

_BACKLOG: Final = 1024


def host_port(host: str, port: int) -> str:
    """Returns `host:port` as it is written in a URL, with brackets around an IPv6 address. Nothing is checked."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def peer_text(sock: socket.socket) -> str:
    """Returns the address of a TCP socket's other end as `host:port`, for messages.

    Returns a placeholder text if the socket is closed or not connected.
    """
    try:
        peer = sock.getpeername()
    except OSError:
        return "a connection that is gone"
    return host_port(numeric_host(peer), peer[1])


def loopback_text(sockaddr: tuple[Any, ...]) -> str:
    """Returns a loopback address as `host:port`; empty for any other address.

    The handshake compares the store's address as both ends of the connection see it. Addresses other than loopback
    cannot be compared, because they may be translated on the way.

    Args:
        sockaddr: An IPv4 or IPv6 address as `getsockname` returns it. Raises `ValueError` if its host is not numeric.
    """
    host = numeric_host(sockaddr)
    if not is_loopback(host):
        return ""
    address = ipaddress.ip_address(host)
    return host_port(str(getattr(address, "ipv4_mapped", None) or address), sockaddr[1])


def reachable_addresses() -> list[str]:
    """Returns the numeric addresses of this machine, the best first.

    The address of the default route comes first, then all others, and loopback last. Link-local addresses are left out.
    A machine without a network has loopback addresses only. Raises nothing.
    """
    addresses = [address for address in local_addresses() if not ipaddress.ip_address(address).is_link_local]
    try:
        # 203.0.113.0/24 is reserved for documentation. No packet is sent; the kernel only looks up the default route.
        default = local_address_towards("203.0.113.1", 9)
    except OSError:
        default = ""
    return sorted(addresses, key=lambda address: (is_loopback(address), address != default))


def resolve(host: str) -> list[str]:
    """Returns the numeric addresses of a host, the best first.

    A host name other than `localhost` that has only loopback addresses means this machine. The other addresses of this
    machine come first then. Raises `OSError` if the name is empty or cannot be resolved.
    """
    addresses = _look_up(host)
    if _means_this_machine(host, addresses):
        return [address for address in reachable_addresses() if not is_loopback(address)] + addresses
    return addresses


def listen(host: str, ports: Sequence[int]) -> socket.socket:
    """Listens on the first free port of a list, and returns the listening socket. Rank 0 calls it to host the store.

    If all ports are taken, tries again for `BIND_TIMEOUT_S` seconds.

    Args:
        host: A name or address of this machine; "" listens on all addresses.
        ports: The ports to try, in this order. Port 0 lets the kernel choose. An empty list counts as taken.

    Raises:
        RendezvousError: The host cannot be resolved or is not this machine, every port is taken, or listening is not
            permitted. The message says what to do.
    """
    try:
        addresses = _look_up(host) if host else [""]
    except OSError as error:
        raise RendezvousError(
            f"rank 0 cannot host the store at {host}: the name cannot be resolved ({error}); "
            "use an address of the machine of rank 0"
        ) from error
    if _means_this_machine(host, addresses):
        addresses = [""]
    deadline = time.monotonic() + BIND_TIMEOUT_S
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
    """Listens on one port without retrying, and returns the listening socket.

    Args:
        host: A name or address of this machine; "" listens on all addresses.
        port: The port; 0 lets the kernel choose.

    Raises:
        OSError: The host cannot be resolved or is not this machine, or the port is taken (errno `EADDRINUSE`).
    """
    addresses = _look_up(host) if host else [""]
    if _means_this_machine(host, addresses):
        addresses = [""]
    failures: list[OSError] = []
    for address in addresses:
        try:
            return _listen_at(address, port)
        except OSError as error:
            failures.append(error)
    # A taken port shows that this address is one of this machine's, so it is the most useful failure to report.
    raise next((error for error in failures if error.errno == errno.EADDRINUSE), failures[0])


def connect(host: str, port: int, timeout: float) -> socket.socket:
    """Connects to the first address of a host that accepts the connection.

    Args:
        host: A name or a numeric address.
        port: The port.
        timeout: Seconds for all attempts together; each address gets an equal share of what is left. Even with 0 each
            address is tried for a moment.

    Returns:
        The connected socket, with TCP keep-alive.

    Raises:
        OSError: The host cannot be resolved, or no address accepted. The error is that of the last address.
    """
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
    """Turns on TCP keep-alive, so that the kernel notices within 30 seconds that the other machine is gone.

    Also turns off Nagle's algorithm (TCP_NODELAY). Raises `OSError` if the socket is closed, or is not a TCP socket.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def stop_keep_alive(sock: socket.socket) -> None:
    """Turns TCP keep-alive off, so that an idle connection survives a network failure.

    Does nothing on a closed socket.
    """
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)


def _look_up(host: str) -> list[str]:
    """Returns the numeric addresses of a host name or address, without duplicates.

    Raises `OSError` if the host is empty or cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except ValueError as error:  # text that cannot be a host name: a label that is too long, a null byte
        raise OSError(errno.EHOSTUNREACH, f"cannot resolve the host: {error}") from error
    return list(dict.fromkeys(numeric_host(sockaddr) for *_, sockaddr in found))


def _means_this_machine(host: str, addresses: Sequence[str]) -> bool:
    """Returns True for a host name, other than localhost, whose `addresses` are all loopback addresses.

    Many systems map their own host name to loopback, so such a name means this machine. Returns False for a numeric
    address and for "".
    """
    if not host or host.lower().rstrip(".").endswith("localhost"):
        return False
    try:
        ipaddress.ip_address(host)
        return False
    except ValueError:
        return all(is_loopback(address) for address in addresses)


def _listen_on_one(host: str, addresses: Sequence[str], port: int) -> socket.socket | None:
    """Listens on a port of the first of the numeric `addresses` that allows it. Returns None if the port is taken.

    `addresses` must not be empty. `host` is their name, for messages. Raises `RendezvousError` if listening failed on
    every address for another reason.
    """
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
            f"rank 0 cannot host the store at {host}: {', '.join(addresses)} is not an address of this machine, "
            f"which has {', '.join(reachable_addresses())}; start rank 0 on the machine with that address"
        )
    failure = next(iter(failures.values()))
    raise RendezvousError(f"rank 0 cannot host the store at {host_port(host, port)}: {failure.strerror}") from failure


def _listen_at(address: str, port: int) -> socket.socket:
    """Returns a socket that listens at a numeric address; "" is all addresses, IPv4 and IPv6. Port 0 is any free port.

    Raises `OSError` if the address is not this machine's, or the port is taken.
    """
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    if not address:
        return socket.create_server(("", port), backlog=_BACKLOG)
    family, *_, sockaddr = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(sockaddr, family=family, backlog=_BACKLOG)


def _connect_to(address: str, port: int, timeout: float) -> socket.socket:
    """Returns a socket connected to a numeric address, with TCP keep-alive. Its timeout is `timeout` seconds.

    `timeout` must be more than 0. Raises `OSError` if no program accepts the connection within `timeout` seconds. The
    socket is closed then.
    """
    family, kind, protocol, _, sockaddr = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # The kernel may choose the store's port as our own port. Without SO_REUSEADDR the store could not listen then.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.settimeout(timeout)
        sock.connect(sockaddr)
        if sock.getsockname() == sock.getpeername():
            # If the kernel chooses the destination's port as our own, TCP connects the socket to itself.
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
        keep_alive(sock)
    except BaseException:
        sock.close()
        raise
    return sock
