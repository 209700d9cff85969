"""Where to listen and where to connect, on loopback."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest

from farcall.errors import RendezvousError, UsageError
from farcall.rendezvous import addresses
from farcall.rendezvous.addresses import (
    connect,
    host_port,
    keep_alive,
    listen,
    loopback_text,
    peer_text,
    reachable_addresses,
    resolve,
)
from farcall.transports.network import is_loopback


@pytest.fixture
def own_name(monkeypatch: pytest.MonkeyPatch) -> str:
    """A host name that means loopback, as many systems have it for their own."""
    look_up = socket.getaddrinfo

    def answer(host: str, *args: object, **options: object) -> object:
        return look_up("127.0.1.1" if host == "myhost" else host, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    monkeypatch.setattr(addresses, "reachable_addresses", lambda: ["127.0.0.1"])
    return "myhost"


def test_addresses_as_in_a_url() -> None:
    assert host_port("10.0.0.1", 80) == "10.0.0.1:80"
    assert host_port("::1", 80) == "[::1]:80"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"])
def test_loopback_is_known(address: str) -> None:
    assert is_loopback(address)
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("fe80::1%lo")


def test_the_addresses_of_the_default_route_come_first_and_loopback_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        addresses, "local_addresses", lambda: ["127.0.0.1", "::1", "172.17.0.1", "fe80::1%e", "10.0.0.9"]
    )
    monkeypatch.setattr(addresses, "local_address_towards", lambda host, port: "10.0.0.9")
    assert reachable_addresses() == ["10.0.0.9", "172.17.0.1", "127.0.0.1", "::1"]


def test_no_default_route_is_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_route(host: str, port: int) -> str:
        raise OSError("no route")

    monkeypatch.setattr(addresses, "local_addresses", lambda: ["127.0.0.1", "10.0.0.9"])
    monkeypatch.setattr(addresses, "local_address_towards", no_route)
    assert reachable_addresses() == ["10.0.0.9", "127.0.0.1"]


def test_literal_addresses_and_localhost_mean_what_they_say() -> None:
    assert resolve("127.0.0.1") == ["127.0.0.1"]
    assert resolve("::1") == ["::1"]
    assert all(map(is_loopback, resolve("localhost")))


def test_an_own_name_that_means_loopback_means_this_machine(own_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "reachable_addresses", lambda: ["10.0.0.9", "127.0.0.1"])
    assert resolve(own_name) == ["10.0.0.9", "127.0.1.1"]
    with listen(own_name, [0]) as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_listens_there_and_nowhere_else(host: str) -> None:
    with listen(host, [0]) as listener:
        assert is_loopback(listener.getsockname()[0])
        with connect(host, listener.getsockname()[1], 10) as sock:
            assert sock.getpeername()[0] == listener.getsockname()[0]


def test_listens_everywhere_when_no_host_is_given() -> None:
    with listen("", [0]) as listener:
        for address in ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.1",):
            connect(address, listener.getsockname()[1], 10).close()


def test_listens_on_the_first_free_port(occupied: Callable[..., socket.socket], free_port: int) -> None:
    taken = occupied().getsockname()[1]
    with listen("127.0.0.1", [taken, free_port]) as listener:
        assert listener.getsockname()[1] == free_port


def test_no_ports_are_a_clear_error() -> None:
    with pytest.raises(UsageError, match=r"cannot listen at 127\.0\.0\.1 without a port to try"):
        listen("127.0.0.1", [])


def test_a_port_that_is_taken_is_a_clear_error(
    occupied: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "BIND_TIMEOUT_S", 0.0)
    port = occupied().getsockname()[1]
    with pytest.raises(
        RendezvousError, match=f"port {port} is taken by another process, perhaps another worker that also"
    ):
        listen("127.0.0.1", [port])


def test_a_port_that_is_just_being_closed_is_waited_for(
    occupied: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "BIND_TIMEOUT_S", 30.0)
    other = occupied()
    port = other.getsockname()[1]
    monkeypatch.setattr(time, "sleep", lambda seconds: other.close())
    listen("127.0.0.1", [port]).close()


def test_a_port_with_old_connections_is_free() -> None:
    with listen("127.0.0.1", [0]) as first:
        port = first.getsockname()[1]
        with connect("127.0.0.1", port, 10) as sock:
            accepted, _ = first.accept()
            first.close()
            with accepted, listen("127.0.0.1", [port]):
                assert sock.getpeername()[1] == port


def test_a_host_that_is_elsewhere_is_a_clear_error() -> None:
    with pytest.raises(RendezvousError, match=r"203.0.113.77 is not an address of this machine, which has .*127.0.0.1"):
        listen("203.0.113.77", [0])


def test_a_name_that_nobody_knows_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(RendezvousError, match="cannot be resolved"):
        listen("no.such.host.invalid", [0])


def test_a_port_that_is_not_ours_to_take_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(address: str, port: int) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(addresses, "_listen_at", forbidden)
    with pytest.raises(RendezvousError, match=r"127.0.0.1:80: Permission denied"):
        listen("127.0.0.1", [80])


def test_connecting_tries_every_address_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "resolve", lambda host: ["127.0.0.3", "127.0.0.2"])
    with listen("127.0.0.2", [0]) as listener, connect("name", listener.getsockname()[1], 10) as sock:
        assert sock.getpeername()[0] == "127.0.0.2"


def test_connecting_to_nobody_is_refused(free_port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        connect("127.0.0.1", free_port, 10)


def test_a_connection_to_itself_is_nobody(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bound(socket.socket):
        def connect(self, address: object) -> None:
            self.bind(("127.0.0.1", free_port))  # as the kernel may choose by chance
            super().connect(address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "socket", Bound)
    with pytest.raises(ConnectionRefusedError, match="nobody listens there"):
        connect("127.0.0.1", free_port, 10)


def test_a_dead_machine_is_noticed_by_the_kernel() -> None:
    with socket.socket() as sock:
        keep_alive(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10


def test_the_other_end_reads_well() -> None:
    with listen("::1", [0]) as listener, connect("::1", listener.getsockname()[1], 10) as sock:
        assert peer_text(sock) == f"[::1]:{listener.getsockname()[1]}"
    with socket.socket() as unconnected:
        assert peer_text(unconnected) == "a connection that is gone"


# -- listening for an open group


def test_listening_at_once_takes_a_free_port_of_this_machine() -> None:
    with addresses.listen_at_once("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            addresses.listen_at_once("127.0.0.1", port)


def test_listening_at_once_says_what_is_in_the_way() -> None:
    with pytest.raises(OSError, match="Cannot assign"):
        addresses.listen_at_once("192.0.2.1", 0)


def test_a_taken_port_counts_for_more_than_an_address_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with addresses.listen_at_once("127.0.0.1", 0) as listener:
        monkeypatch.setattr(addresses, "_look_up", lambda host: ["192.0.2.1", "127.0.0.1"])
        with pytest.raises(OSError, match="in use"):
            addresses.listen_at_once("somewhere", listener.getsockname()[1])


def test_a_name_that_means_this_machine_is_listened_for_on_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_look_up", lambda host: ["127.0.1.1"])
    with addresses.listen_at_once("myself", 0) as listener:
        assert listener.getsockname()[0] in ("0.0.0.0", "::")


@pytest.mark.parametrize(
    ("sockaddr", "text"),
    [
        (("127.0.0.1", 4), "127.0.0.1:4"),
        (("::ffff:127.0.0.1", 4, 0, 0), "127.0.0.1:4"),
        (("::1", 4, 0, 0), "[::1]:4"),
        (("192.0.2.7", 4), ""),
        (("fe80::7", 4, 0, 999999), ""),
    ],
)
def test_both_ends_of_loopback_write_it_alike(sockaddr: tuple[object, ...], text: str) -> None:
    assert loopback_text(sockaddr) == text
