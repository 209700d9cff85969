"""What the TCP transport does beyond the rules that `test_conformance` checks: names, addresses, options of sockets."""

from __future__ import annotations

import gc
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from farcall.testing.conformance import HANDSHAKE_LIMIT, TIMEOUT_S, open_links, oserror_of, receive
from farcall.transports import network
from farcall.transports.stream import StreamLink
from farcall.transports.tcp import TcpListener, TcpTransport


@contextmanager
def full_server() -> Iterator[socket.socket]:
    """A server that accepts nobody, and whose queue of connections is full."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        clients = [socket.socket() for _ in range(4)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield server
        for client in clients:
            client.close()


@pytest.fixture
def transport() -> TcpTransport:
    return TcpTransport()


@pytest.fixture
def listener(transport: TcpTransport) -> Iterator[TcpListener]:
    listener = transport.listen(None, HANDSHAKE_LIMIT)
    yield listener
    listener.close()


def connect(transport: TcpTransport, address: str, timeout: float = TIMEOUT_S) -> StreamLink:
    return transport.connect(address, timeout, HANDSHAKE_LIMIT)


def port_of(listener: TcpListener) -> int:
    return int(listener.address.rpartition(":")[2])


def link_local() -> list[str]:
    return [address for address in network.local_addresses() if address.startswith("fe80:")]


# Listening


def test_the_default_is_loopback(listener: TcpListener) -> None:
    assert listener.address.startswith("tcp:127.0.0.1:")


@pytest.mark.skipif("::1" not in network.local_addresses(), reason="this machine has no IPv6")
def test_ipv6_loopback(transport: TcpTransport) -> None:
    listener = transport.listen("::1", HANDSHAKE_LIMIT)
    assert listener.address.startswith("tcp:[::1]:")
    ours, theirs = open_links(transport, listener)
    assert ours.address == listener.address
    assert theirs.address.startswith("tcp:[::1]:")
    ours.send(b"six")
    assert receive(theirs) == b"six"
    for end in (ours, theirs, listener):
        end.close()


@pytest.mark.skipif(not link_local(), reason="no interface has a link-local address")
def test_link_local_addresses_carry_their_interface(transport: TcpTransport) -> None:
    host = link_local()[0]
    listener = transport.listen(host, HANDSHAKE_LIMIT)
    assert listener.address.startswith(f"tcp:[{host}]:")
    ours, theirs = open_links(transport, listener)
    assert theirs.address.startswith(f"tcp:[{host}]:")
    for end in (ours, theirs, listener):
        end.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_listening_on_every_address_at_once_is_refused(transport: TcpTransport, host: str) -> None:
    with pytest.raises(OSError, match="listen on one interface's") as caught:
        transport.listen(host, HANDSHAKE_LIMIT)
    assert host in str(caught.value)


def test_listening_on_an_address_of_another_machine_is_refused(transport: TcpTransport) -> None:
    with pytest.raises(OSError, match=r"Cannot assign.*203\.0\.113\.77"):
        transport.listen("203.0.113.77", HANDSHAKE_LIMIT)


def test_a_connection_that_was_given_up_before_it_was_accepted_is_skipped(
    listener: TcpListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def abort(_: socket.socket) -> None:
        raise ConnectionAbortedError(103, "Software caused connection abort")

    monkeypatch.setattr(socket.socket, "accept", abort)
    assert listener.accept() is None


# Links


def test_both_ends_are_tuned_for_small_messages_and_dead_peers(transport: TcpTransport, listener: TcpListener) -> None:
    for link in open_links(transport, listener):
        with socket.fromfd(link.fileno(), socket.AF_INET, socket.SOCK_STREAM) as sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        link.close()


def test_links_on_loopback_tell_the_network_namespace(transport: TcpTransport, listener: TcpListener) -> None:
    """Only the end that connects, as long as nothing is encrypted: the other end has no other link to expect."""
    ours, theirs = open_links(transport, listener)
    with socket.fromfd(ours.fileno(), socket.AF_INET, socket.SOCK_STREAM) as sock:
        assert ours.network == network.network_identity(sock) != ""
    assert ours.binding == theirs.binding == b""
    for end in (ours, theirs):
        end.close()


# Addresses


@pytest.mark.parametrize(
    "address",
    [
        *("tcp:127.0.0.1", "tcp:127.0.0.1:", "tcp:127.0.0.1:0", "tcp:127.0.0.1:65536", "tcp:127.0.0.1:-1"),
        *("tcp:h:٣", "tcp::4000", "tcp:::1:4000", "tcp:[]:4000", "unix:127.0.0.1:4000", "127.0.0.1:4000"),
    ],
)
def test_malformed_addresses_are_refused_and_shown(transport: TcpTransport, address: str) -> None:
    with pytest.raises(OSError, match="it looks like tcp:host:port") as caught:
        connect(transport, address)
    assert address in str(caught.value)


def test_a_name_that_cannot_be_resolved_is_refused_and_shown(
    transport: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unresolved(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    with pytest.raises(OSError, match=r"cannot resolve the host.*no\.such\.host") as caught:
        connect(transport, "tcp:no.such.host:4000")
    assert not isinstance(caught.value, socket.gaierror)


@pytest.mark.parametrize("host", ["a..b", "x" * 300, "\ud800", "a\0b"])
def test_what_can_be_no_name_is_refused_without_asking_anybody(transport: TcpTransport, host: str) -> None:
    with pytest.raises(OSError, match="cannot resolve the host"):
        connect(transport, f"tcp:{host}:4000")


@pytest.fixture
def resolve_to(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has every name resolve to these addresses."""

    def resolve_to(*sockaddrs: tuple[str, int]) -> None:
        answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", sockaddr) for sockaddr in sockaddrs]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)

    return resolve_to


def test_all_addresses_of_a_name_are_tried(
    transport: TcpTransport, listener: TcpListener, resolve_to: Callable[..., None]
) -> None:
    nobody = transport.listen(None, HANDSHAKE_LIMIT)
    nobody.close()
    resolve_to(("127.0.0.1", port_of(nobody)), ("127.0.0.1", port_of(listener)))
    link = connect(transport, "tcp:some.host:4000")
    assert link.address == "tcp:some.host:4000"
    link.close()


def test_an_address_that_does_not_answer_leaves_time_for_the_next(
    transport: TcpTransport, listener: TcpListener, resolve_to: Callable[..., None]
) -> None:
    with full_server() as server:
        resolve_to(server.getsockname(), ("127.0.0.1", port_of(listener)))
        connect(transport, "tcp:some.host:4000", 1.0).close()


def test_no_time_at_all_is_a_timeout(transport: TcpTransport, listener: TcpListener) -> None:
    assert isinstance(oserror_of(connect, transport, listener.address, 0.0), TimeoutError)


def test_a_timeout_may_be_infinite(transport: TcpTransport, listener: TcpListener) -> None:
    connect(transport, listener.address, float("inf")).close()


def test_a_connection_of_a_port_with_itself_is_refused(
    transport: TcpTransport, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FromThatPort(socket.socket):
        def connect(self, sockaddr: Any) -> None:
            self.bind(sockaddr)
            super().connect(sockaddr)
            assert self.getpeername() == self.getsockname()

    monkeypatch.setattr(socket, "socket", FromThatPort)
    with pytest.raises(ConnectionRefusedError):
        connect(transport, f"tcp:127.0.0.1:{free_port}")


def test_a_failed_connect_keeps_no_local_variable_of_its_caller_alive(transport: TcpTransport) -> None:
    class Local:
        pass

    def attempt() -> weakref.ref[Local]:
        local = Local()
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"tcp:127.0.0.1:{server.getsockname()[1]}"
        try:
            connect(transport, address)
        except ConnectionRefusedError:
            return weakref.ref(local)
        pytest.fail("somebody listens there")

    gc.disable()
    try:
        assert attempt()() is None
    finally:
        gc.enable()
