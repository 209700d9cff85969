"""The conformance suite of links, over every kind of link that there is."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farcall._native import rings
from farcall.security.encryption import Encryption
from farcall.testing.conformance import HANDSHAKE_LIMIT, TIMEOUT_S, TransportConformance
from farcall.transports.memory import MemoryNetwork, MemoryTransport
from farcall.transports.tcp import TcpTransport
from farcall.transports.tls import TlsSocket
from farcall.transports.unix import UnixTransport


class TestMemory(TransportConformance):
    @pytest.fixture
    def network(self) -> MemoryNetwork:
        return MemoryNetwork(backlog=8)

    @pytest.fixture
    def transport(self, network: MemoryNetwork) -> MemoryTransport:
        return MemoryTransport(network)

    @pytest.fixture
    def full_address(self, transport: MemoryTransport) -> Iterator[str]:
        listener = transport.listen(None, HANDSHAKE_LIMIT)
        waiting = [transport.connect(listener.address, 1.0, HANDSHAKE_LIMIT) for _ in range(8)]
        yield listener.address
        listener.close()
        for link in waiting:
            link.close()

    @pytest.fixture
    def connect_raw(self, listener: Any) -> Callable[[str], socket.socket]:
        def connect(_: str) -> socket.socket:
            ours, theirs = socket.socketpair()
            listener.waiting.append(theirs)
            os.eventfd_write(listener.fileno(), 1)
            return ours

        return connect


class TestUnixWithoutRings(TransportConformance):
    """As without the C extension."""

    use_rings = False
    large_frames_wait = False

    @pytest.fixture
    def transport(self, root: Path) -> UnixTransport:
        return UnixTransport([str(root)])

    @pytest.fixture
    def full_address(self, root: Path) -> Iterator[str]:
        path = root / "full.sock"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen(0)
            clients = fill_queue(lambda: socket.socket(socket.AF_UNIX), str(path))
            yield f"unix:{path}"
            for client in clients:
                client.close()

    @pytest.fixture
    def connect_raw(self) -> Callable[[str], socket.socket]:
        def connect(address: str) -> socket.socket:
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(address.removeprefix("unix:"))
            return sock

        return connect


@pytest.mark.skipif(rings is None, reason="the C extension is not there")
class TestUnixWithRings(TestUnixWithoutRings):
    use_rings = True


class TestUnixWithoutSharedMemory(TestUnixWithoutRings):
    """The option `shared_memory=0` turns rings off, too."""

    use_rings = True
    shared_memory = 0
    large_frames_wait = True


@pytest.mark.skipif(rings is None, reason="the C extension is not there")
class TestUnixWithRingsAndLittleSharedMemory(TestUnixWithoutRings):
    """All large data goes through the ring in chunks, because no segment can be had."""

    use_rings = True
    shared_memory = 1
    large_frames_wait = True


class TestTcp(TransportConformance):
    @pytest.fixture
    def transport(self) -> TcpTransport:
        return TcpTransport()

    @pytest.fixture
    def full_address(self) -> Iterator[str]:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen(0)
            host, port = server.getsockname()
            clients = fill_queue(socket.socket, (host, port), 4)
            yield f"tcp:{host}:{port}"
            for client in clients:
                client.close()

    @pytest.fixture
    def connect_raw(self) -> Callable[[str], socket.socket]:
        return connect_tcp


@pytest.fixture(scope="module")
def encryption() -> Encryption:
    return Encryption()


class TestTls(TestTcp):
    @pytest.fixture
    def transport(self, encryption: Encryption) -> TcpTransport:
        return TcpTransport(encryption, even_on_loopback=True)

    @pytest.fixture
    def connect_raw(self, encryption: Encryption) -> Callable[[str], Any]:
        def connect(address: str) -> TlsSocket:
            sock = TlsSocket(connect_tcp(address), encryption, listens=False)
            sock.do_handshake(TIMEOUT_S)
            sock.settimeout(TIMEOUT_S)
            return sock

        return connect


def connect_tcp(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    return socket.create_connection((host, int(port)))


def fill_queue(new_socket: Callable[[], socket.socket], address: Any, count: int = 1000) -> list[socket.socket]:
    """Connects until no more connections can wait, or so many do."""
    clients: list[socket.socket] = []
    while len(clients) < count:
        client = new_socket()
        client.setblocking(False)
        clients.append(client)
        if client.connect_ex(address) and count == 1000:
            break
    return clients
