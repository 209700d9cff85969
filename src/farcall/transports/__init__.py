"""How buffers travel: non-blocking channels of bytes behind one small interface.

`base` is the contract; `tcp`, `unix` and `memory` keep it, the three of them over `sockets`; `registry` finds them by
name; `network` knows this machine's addresses. The layer knows no message and has no thread.
"""

from farcall.transports.base import Buffer, Channel, Listener, Transport
from farcall.transports.memory import MemoryNetwork, MemoryTransport
from farcall.transports.network import host_identity, interface_address, local_address_towards, local_addresses
from farcall.transports.registry import connect, register, transport, unregister
from farcall.transports.sockets import SocketChannel, SocketListener
from farcall.transports.tcp import TcpTransport
from farcall.transports.unix import UnixTransport

__all__ = [
    "Buffer",
    "Channel",
    "Listener",
    "MemoryNetwork",
    "MemoryTransport",
    "SocketChannel",
    "SocketListener",
    "TcpTransport",
    "Transport",
    "UnixTransport",
    "connect",
    "host_identity",
    "interface_address",
    "local_address_towards",
    "local_addresses",
    "register",
    "transport",
    "unregister",
]
