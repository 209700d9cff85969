"""Transports: links that carry frames between two workers over Unix sockets, TCP, TLS or memory, and their poller.

`base` has the interfaces. Nothing outside this package and `farcall._native` knows of framing, shared memory or rings.
"""

from farcall.transports.base import Buffer, Frame, Link, LinkOptions, Listener, Transport
from farcall.transports.memory import MemoryNetwork, MemoryTransport
from farcall.transports.network import (
    host_identity,
    interface_address,
    local_address_towards,
    local_addresses,
    network_identity,
)
from farcall.transports.registry import new_transport, register, unregister
from farcall.transports.tcp import TcpTransport
from farcall.transports.unix import UnixTransport

__all__ = [
    "Buffer",
    "Frame",
    "Link",
    "LinkOptions",
    "Listener",
    "MemoryNetwork",
    "MemoryTransport",
    "TcpTransport",
    "Transport",
    "UnixTransport",
    "host_identity",
    "interface_address",
    "local_address_towards",
    "local_addresses",
    "network_identity",
    "new_transport",
    "register",
    "unregister",
]
