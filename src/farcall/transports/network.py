"""The network addresses of this machine, and which of them a peer can reach. Opens no connection, sends no packet.

The name of this host is not used, because such names are often missing, or resolve to loopback. Instead, the kernel's
tables are used: its interfaces, and its route to a peer.

Rules
- An address is numeric text as in `tcp` addresses: `192.0.2.7`, `fd00::7`, or with the interface where IPv6 needs it,
  `fe80::7%eth0`.
- If the kernel does not provide a table, the result has fewer addresses (loopback only), and nothing is raised. Wrong
  arguments raise an error.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import ipaddress
import os
import socket
import struct
import uuid
from typing import Any, Final

from farcall.errors import UsageError

_SIOCGIFFLAGS: Final = 0x8913  # netdevice(7)
_SIOCGIFADDR: Final = 0x8915
_IFF_UP: Final = 0x1
_SO_NETNS_COOKIE: Final = 71  # asm-generic/socket.h
_UNUSABLE_V6: Final = 0x08 | 0x40  # IFA_F_DADFAILED, IFA_F_TENTATIVE of linux/if_addr.h: binding to it would fail


def numeric_host(sockaddr: tuple[Any, ...]) -> str:
    """Returns the host of a socket address as text. A link-local IPv6 address ends with `%` and its interface.

    Args:
        sockaddr: An IPv4 or IPv6 address as the socket module returns it. This is not checked.
    """
    host: str = sockaddr[0]
    scope: int = sockaddr[3] if len(sockaddr) == 4 else 0
    if not scope or "%" in host:
        return host
    try:
        return f"{host}%{socket.if_indextoname(scope)}"
    except OSError:
        return f"{host}%{scope}"


def is_loopback(host: str) -> bool:
    """Returns whether a numeric address, IPv4 or IPv6, is a loopback address.

    Raises:
        ValueError: `host` is not a numeric address; also for a host name and for empty text.
    """
    address = ipaddress.ip_address(host)
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def is_local(host: str) -> bool:
    """Returns whether `host` is a numeric address of this machine; False for a host name and for empty text."""
    try:
        return is_loopback(host) or host in local_addresses()
    except ValueError:  # a host name, which may resolve to any host
        return False


def resolve(host: str, port: int, kind: socket.SocketKind) -> list[tuple[Any, ...]]:
    """Returns the addresses of a host, in the form of `socket.getaddrinfo`: one tuple for each address.

    Args:
        host: A host name or a numeric address.
        port: The port that the addresses get; 0 for any.
        kind: The kind of socket that the addresses are for, such as `socket.SOCK_STREAM`.

    Raises:
        OSError: The host cannot be resolved. The text of the error contains `host`.
    """
    try:
        return list(socket.getaddrinfo(host, port, type=kind))
    except (socket.gaierror, ValueError) as error:  # ValueError: text that cannot be a host name
        raise OSError(errno.EHOSTUNREACH, f"cannot resolve the host: {error}", host) from error


def local_addresses() -> list[str]:
    """Returns the addresses of all interfaces that are up, interface by interface; at least 127.0.0.1."""
    return [address for addresses in _interfaces().values() for address in addresses] or ["127.0.0.1"]


def interface_address(interface: str) -> str:
    """Returns the address to listen on for an interface.

    Args:
        interface: The name of an interface (`eth0`), or an address of this machine.

    Returns:
        For a name, the IPv4 address of the interface, or an IPv6 address if it has no IPv4 address. An address is
        returned unchanged.

    Raises:
        UsageError: `interface` is neither an interface that is up nor an address of this machine. The error lists the
            interfaces and their addresses.
    """
    interfaces = _interfaces()
    addresses = interfaces.get(interface)
    if addresses:
        return min(addresses, key=_preference)
    if _is_ours(interface):
        return interface
    there_are = "; ".join(f"{name}: {', '.join(addresses)}" for name, addresses in interfaces.items())
    raise UsageError(
        f"{interface!r} is neither an interface that is up nor an address of this machine. "
        f"Name one of these interfaces or addresses: {there_are or 'none could be found'}"
    )


def local_address_towards(host: str, port: int) -> str:
    """Returns the address of this machine at which a peer can reach it. Sends nothing.

    Args:
        host: The host of the peer, a name or a numeric address.
        port: A port of the peer. It does not matter which.

    Returns:
        The source address that the kernel would use on its route to the peer.

    Raises:
        OSError: The host cannot be resolved, or there is no route to it.
    """
    failure = OSError(errno.EHOSTUNREACH, "the host has no address", host)
    for family, kind, protocol, _, peer in resolve(host, port, socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(peer)  # a datagram socket only looks up the route
                return numeric_host(probe.getsockname())
            except OSError as error:
                failure = OSError(error.errno, f"no route: {error.strerror}", host)
    raise failure


def network_identity(sock: socket.socket | None = None) -> str:
    """Returns text that is the same for all sockets in one network namespace of one kernel.

    Such sockets have the same loopback interface. The text is the identity of the kernel (`host_identity`), a slash,
    and the identity of the namespace. Virtual machines that were cloned while running may have the same text.

    Args:
        sock: The socket, which must be open; None for the network namespace of the current thread.
    """
    with contextlib.ExitStack() as stack:
        if sock is None:
            sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        try:
            # The namespace of the socket, which may differ from that of this thread (setns). Needs Linux 5.14.
            (cookie,) = struct.unpack("Q", sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8))
            namespace = f"cookie {cookie}"
        except (OSError, struct.error):
            try:
                namespace = f"inode {os.stat('/proc/thread-self/ns/net').st_ino}"
            except OSError:
                namespace = "unknown"
    return f"{_this_host()}/{namespace}"


@functools.cache
def _this_host() -> str:
    """Returns the text of `host_identity`. Reads it only once: a later read could fail for lack of descriptors."""
    return host_identity()


def are_on_one_host(one: str, other: str) -> bool:
    """Returns whether two texts from `network_identity` come from one kernel. Their format is not checked."""
    return one.partition("/")[0] == other.partition("/")[0]


def host_identity() -> str:
    """Returns text that identifies the running kernel: the same in all processes and containers under it.

    The text is a hint, not a proof: virtual machines that were cloned while running may have the same text. Raises
    nothing.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return f"{socket.gethostname()}-{uuid.getnode():012x}"


def _interfaces() -> dict[str, list[str]]:
    """Returns the addresses of every interface that is up, by its name, IPv4 before IPv6.

    Interfaces without an address are left out. Returns an empty dictionary if the kernel does not list its interfaces.
    """
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return {}
    found: dict[str, list[str]] = {name: [] for name in names}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            if not _is_up(probe, name):
                del found[name]
                continue
            try:
                answer = _ask(probe, _SIOCGIFADDR, name)
            except OSError:
                continue  # it has no IPv4 address
            found[name].append(socket.inet_ntop(socket.AF_INET, answer[20:24]))
    for name, address in _ipv6_addresses():
        if name in found:
            found[name].append(address)
    return {name: addresses for name, addresses in found.items() if addresses}


def _is_up(probe: socket.socket, name: str) -> bool:
    """Returns whether an interface is up; False if it does not exist. `probe` is any IPv4 socket."""
    try:
        (flags,) = struct.unpack_from("H", _ask(probe, _SIOCGIFFLAGS, name), 16)
    except OSError:
        return False
    return bool(flags & _IFF_UP)


def _ask(probe: socket.socket, question: int, interface: str) -> bytes:
    # A struct ifreq: the name in 16 bytes, then at most 24 bytes for the answer.
    """Returns the kernel's answer to the ioctl `question` about an interface: a struct ifreq.

    Raises `OSError` if the kernel has no answer. `probe` is any IPv4 socket.
    """
    return fcntl.ioctl(probe, question, struct.pack("16s24x", interface.encode()))


def _ipv6_addresses() -> list[tuple[str, str]]:
    """Returns pairs of interface name and usable IPv6 address; an empty list if the kernel has no table of them.

    A line of the table has: address, index, prefix, scope, flags, interface.
    """
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as table:
            rows = [line.split() for line in table]
    except OSError:
        return []
    found = []
    for digits, _, _, _, flags, name in rows:
        if int(flags, 16) & _UNUSABLE_V6:
            continue
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        found.append((name, f"{address}%{name}" if address.is_link_local else str(address)))
    return found


def _preference(address: str) -> tuple[bool, bool]:
    """Returns a key for sorting addresses: whether the address is IPv6, and whether it is link-local.

    So IPv4 comes before IPv6. Within each version, link-local addresses come last. Raises `ValueError` if `address` is
    not numeric.
    """
    parsed = ipaddress.ip_address(address)
    return parsed.version == 6, parsed.is_link_local


def _is_ours(address: str) -> bool:
    """Returns whether this machine can listen at an address, by trying to bind to it. False if it is not numeric.

    The list of interfaces is not enough: the kernel accepts more addresses than interfaces have, such as 127.0.0.2.
    """
    try:
        parsed = ipaddress.ip_address(address)
        if parsed.is_unspecified or parsed.is_multicast:
            return False
        family, kind, protocol, _, sockaddr = socket.getaddrinfo(
            address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(sockaddr)
    except (ValueError, OSError):
        return False
    return True
