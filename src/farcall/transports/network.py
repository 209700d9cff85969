"""Which addresses this machine has, and which of them a peer can reach. It opens no connection and sends no packet.

Host names are never asked: they are often missing, or resolve to loopback. The kernel's own tables are: its interfaces,
and its route to a peer.

Rules
- An address is numeric text as `tcp` takes it: `192.0.2.7`, `fd00::7`, and with the interface where IPv6 needs it,
  `fe80::7%eth0`.
- What cannot be found out makes the answer poorer (loopback only), never an exception; a wrong question raises.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
import uuid
from typing import Any, Final

from farcall.errors import UsageError

_SIOCGIFFLAGS: Final = 0x8913  # netdevice(7)
_SIOCGIFADDR: Final = 0x8915
_IFF_UP: Final = 0x1
_UNUSABLE_V6: Final = 0x08 | 0x40  # IFA_F_DADFAILED, IFA_F_TENTATIVE of linux/if_addr.h: binding to it would fail


def numeric_host(sockaddr: tuple[Any, ...]) -> str:
    """The host of an IPv4 or IPv6 socket address as text, with `%interface` where the address has a scope."""
    host: str = sockaddr[0]
    scope: int = sockaddr[3] if len(sockaddr) == 4 else 0
    if not scope or "%" in host:
        return host
    try:
        return f"{host}%{socket.if_indextoname(scope)}"
    except OSError:
        return f"{host}%{scope}"


def is_loopback(host: str) -> bool:
    """Whether a numeric address leads back to this machine only."""
    address = ipaddress.ip_address(host)
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def is_local(host: str) -> bool:
    """Whether it is a numeric address of this machine's own."""
    try:
        return is_loopback(host) or host in local_addresses()
    except ValueError:  # a name, which may lead anywhere
        return False


def resolve(host: str, port: int, kind: socket.SocketKind) -> list[tuple[Any, ...]]:
    """All that `getaddrinfo` says, and `OSError` with the host's name if it says nothing."""
    try:
        return list(socket.getaddrinfo(host, port, type=kind))
    except (socket.gaierror, ValueError) as error:  # ValueError: what can be no host name at all
        raise OSError(errno.EHOSTUNREACH, f"cannot resolve the host: {error}", host) from error


def local_addresses() -> list[str]:
    """The addresses of all interfaces that are up, interface by interface; at least loopback."""
    return [address for addresses in _interfaces().values() for address in addresses] or ["127.0.0.1"]


def interface_address(interface: str) -> str:
    """The address to listen on for an interface's name (`eth0`) or for an address of this machine.

    A name gives its IPv4 address, else its IPv6 address; an address is given back as it is.
    Raises `UsageError`, with the interfaces there are, for anything else.
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
    """Our own address on the way to a peer, which is where the peer can reach us.

    Raises `OSError` if the host cannot be resolved or no route leads there. Nothing is sent.
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


def host_identity() -> str:
    """Text that is the same for two processes under one kernel, in different containers too.

    A hint for what may be worth a try, not a proof: machines cloned while they ran may share it.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return f"{socket.gethostname()}-{uuid.getnode():012x}"


def _interfaces() -> dict[str, list[str]]:
    """Every interface that is up and has addresses: IPv4 before IPv6."""
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
    try:
        (flags,) = struct.unpack_from("H", _ask(probe, _SIOCGIFFLAGS, name), 16)
    except OSError:
        return False
    return bool(flags & _IFF_UP)


def _ask(probe: socket.socket, question: int, interface: str) -> bytes:
    # A struct ifreq: the name in 16 bytes, then the answer, of no more than 24.
    return fcntl.ioctl(probe, question, struct.pack("16s24x", interface.encode()))


def _ipv6_addresses() -> list[tuple[str, str]]:
    """Pairs of interface and address; a line of the table is: address, index, prefix, scope, flags, interface."""
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
    parsed = ipaddress.ip_address(address)
    return parsed.version == 6, parsed.is_link_local


def _is_ours(address: str) -> bool:
    """Whether one can listen there. Only the kernel knows all of its addresses: 127.0.0.2, aliases."""
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
