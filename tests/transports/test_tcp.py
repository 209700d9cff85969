from __future__ import annotations

import gc
import socket
import weakref
from collections.abc import Iterator

import pytest

from farcall.testing.conformance import PATIENCE, TransportConformance, open_pair, read, refusal
from farcall.transports import network, tcp
from farcall.transports.sockets import SocketChannel
from farcall.transports.tcp import TcpTransport


def crowded(server: socket.socket, host: str) -> list[socket.socket]:
    """Fills the queue of connections of a server that accepts none."""
    server.bind((host, 0))
    server.listen(0)
    clients = []
    for _ in range(4):
        client = socket.socket(server.family)
        client.setblocking(False)
        client.connect_ex(server.getsockname())
        clients.append(client)
    return clients


class TestTcpTransport(TransportConformance):
    @pytest.fixture
    def transport(self) -> TcpTransport:
        return TcpTransport()

    @pytest.fixture
    def crowded_address(self) -> Iterator[str]:
        with socket.socket() as server:
            clients = crowded(server, "127.0.0.1")
            yield f"tcp:127.0.0.1:{server.getsockname()[1]}"
            for client in clients:
                client.close()


def has_ipv6() -> bool:
    return "::1" in network.local_addresses()


def link_local() -> list[str]:
    return [address for address in network.local_addresses() if address.startswith("fe80:")]


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def test_the_default_is_loopback() -> None:
    listener = TcpTransport().listen()
    assert listener.address.startswith("tcp:127.0.0.1:")
    listener.close()


@needs_ipv6
def test_ipv6_loopback() -> None:
    transport = TcpTransport()
    listener = transport.listen("::1")
    assert listener.address.startswith("tcp:[::1]:")
    ours, theirs = open_pair(transport, listener)
    assert ours.address == listener.address
    assert theirs.address.startswith("tcp:[::1]:")
    ours.send(b"six")
    assert read(theirs, 3) == b"six"
    for end in (ours, theirs, listener):
        end.close()


@pytest.mark.skipif(not link_local(), reason="no interface has a link-local address")
def test_link_local_addresses_carry_their_interface() -> None:
    transport = TcpTransport()
    host = link_local()[0]
    listener = transport.listen(host)
    assert listener.address.startswith(f"tcp:[{host}]:")
    ours, theirs = open_pair(transport, listener)
    assert theirs.address.startswith(f"tcp:[{host}]:")
    for end in (ours, theirs, listener):
        end.close()


def test_both_ends_are_tuned_for_small_messages_and_dead_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Seen(SocketChannel):
        __slots__ = ()

        def __init__(self, sock: socket.socket, address: str) -> None:
            seen.append(
                (
                    sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY),
                    sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                )
            )
            super().__init__(sock, address)

    monkeypatch.setattr(tcp, "SocketChannel", Seen)
    transport = TcpTransport()
    listener = transport.listen()
    for end in (*open_pair(transport, listener), listener):
        end.close()
    assert seen == [(1, 1), (1, 1)]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_listening_on_every_address_at_once_is_refused(host: str) -> None:
    with pytest.raises(OSError, match="listen on one interface's") as caught:
        TcpTransport().listen(host)
    assert host in str(caught.value)


def test_listening_on_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match=r"Cannot assign.*203\.0\.113\.77"):
        TcpTransport().listen("203.0.113.77")


@pytest.mark.parametrize(
    "address",
    [
        *("tcp:127.0.0.1", "tcp:127.0.0.1:", "tcp:127.0.0.1:0", "tcp:127.0.0.1:65536", "tcp:127.0.0.1:-1"),
        *("tcp:h:٣", "tcp::4000", "tcp:::1:4000", "tcp:[]:4000", "unix:127.0.0.1:4000", "127.0.0.1:4000"),
    ],
)
def test_malformed_addresses_are_refused_and_shown(address: str) -> None:
    with pytest.raises(OSError, match="it looks like tcp:host:port") as caught:
        TcpTransport().connect(address, PATIENCE)
    assert address in str(caught.value)


def test_a_name_that_cannot_be_resolved_is_refused_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def unresolved(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    with pytest.raises(OSError, match=r"cannot resolve the host.*no\.such\.host") as caught:
        TcpTransport().connect("tcp:no.such.host:4000", PATIENCE)
    assert not isinstance(caught.value, socket.gaierror)


@pytest.mark.parametrize("host", ["a..b", "x" * 300, "\ud800", "a\0b"])
def test_what_can_be_no_name_is_refused_without_asking_anybody(host: str) -> None:
    with pytest.raises(OSError, match="cannot resolve the host"):
        TcpTransport().connect(f"tcp:{host}:4000", PATIENCE)


def resolve_to(monkeypatch: pytest.MonkeyPatch, *sockaddrs: tuple[str, int]) -> None:
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", sockaddr) for sockaddr in sockaddrs]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)


def test_all_addresses_of_a_name_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = TcpTransport()
    nobody, listener = transport.listen(), transport.listen()
    nobody.close()
    ports = [int(end.address.rpartition(":")[2]) for end in (nobody, listener)]
    resolve_to(monkeypatch, *(("127.0.0.1", port) for port in ports))
    channel = transport.connect("tcp:some.host:4000", PATIENCE)
    assert channel.address == "tcp:some.host:4000"
    channel.close()
    listener.close()


def test_an_address_that_does_not_answer_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = TcpTransport()
    listener = transport.listen()
    with socket.socket() as server:
        clients = crowded(server, "127.0.0.1")
        resolve_to(monkeypatch, server.getsockname(), ("127.0.0.1", int(listener.address.rpartition(":")[2])))
        transport.connect("tcp:some.host:4000", 0.5).close()
        for client in clients:
            client.close()
    listener.close()


def test_no_time_at_all_is_a_timeout() -> None:
    transport = TcpTransport()
    listener = transport.listen()
    assert isinstance(refusal(transport.connect, listener.address, 0.0), TimeoutError)
    listener.close()


def test_no_end_of_time_is_taken_too() -> None:
    transport = TcpTransport()
    listener = transport.listen()
    transport.connect(listener.address, float("inf")).close()
    listener.close()


def test_a_connection_of_a_port_with_itself_is_refused(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class FromThatPort(socket.socket):
        def connect(self, sockaddr: tuple[str, int]) -> None:
            self.bind(sockaddr)
            super().connect(sockaddr)
            assert self.getpeername() == self.getsockname()

    monkeypatch.setattr(socket, "socket", FromThatPort)
    with pytest.raises(ConnectionRefusedError):
        TcpTransport().connect(f"tcp:127.0.0.1:{free_port}", PATIENCE)


def test_who_could_not_connect_keeps_nothing_that_it_had_in_hand() -> None:
    class InHand:
        pass

    def attempt() -> weakref.ref[InHand]:
        in_hand = InHand()
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"tcp:127.0.0.1:{server.getsockname()[1]}"
        try:
            TcpTransport().connect(address, PATIENCE)
        except ConnectionRefusedError:
            return weakref.ref(in_hand)
        pytest.fail("somebody listens there")

    gc.disable()
    try:
        assert attempt()() is None
    finally:
        gc.enable()
