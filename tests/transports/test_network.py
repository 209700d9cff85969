from __future__ import annotations

import builtins
import io
import ipaddress
import socket
import uuid
from typing import Any

import pytest

from farcall.errors import UsageError
from farcall.transports import network
from farcall.transports.network import (
    host_identity,
    interface_address,
    is_local,
    local_address_towards,
    local_addresses,
    numeric_host,
)


def answer_files(monkeypatch: pytest.MonkeyPatch, contents: dict[str, str]) -> None:
    """Lets the module read these files, and no others."""

    def fake_open(path: str, **_: object) -> io.StringIO:
        if path not in contents:
            raise FileNotFoundError(2, "No such file or directory", path)
        return io.StringIO(contents[path])

    monkeypatch.setattr(builtins, "open", fake_open)


def answer_interfaces(monkeypatch: pytest.MonkeyPatch, interfaces: dict[str, list[str]]) -> None:
    monkeypatch.setattr(network, "_interfaces", lambda: interfaces)


def test_every_local_address_can_be_listened_on() -> None:
    addresses = local_addresses()
    assert "127.0.0.1" in addresses
    for address in addresses:
        family, kind, protocol, _, sockaddr = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.bind(sockaddr)


def test_local_addresses_degrade_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable() -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(socket, "if_nameindex", unavailable)
    assert local_addresses() == ["127.0.0.1"]


def test_without_the_table_of_ipv6_there_is_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_files(monkeypatch, {})
    addresses = local_addresses()
    assert "127.0.0.1" in addresses
    assert {ipaddress.ip_address(address).version for address in addresses} == {4}


def test_ipv6_addresses_are_read_with_their_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fd000000000000000000000000000002 04 40 00 82       lo\n"
        "fe8000000000000000fc00fffe000001 04 40 20 80       lo\n"
        "fd000000000000000000000000000003 04 40 00 40       lo\n"  # tentative
        "fd000000000000000000000000000004 04 40 00 88       lo\n"  # in use elsewhere
        "fd000000000000000000000000000005 09 40 00 80  absent0\n"
    )
    answer_files(monkeypatch, {"/proc/net/if_inet6": table})
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo")])
    assert local_addresses() == ["127.0.0.1", "::1", "fd00::2", "fe80::fc:ff:fe00:1%lo"]


def test_interfaces_that_are_down_or_vanish_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_files(monkeypatch, {})
    flags = network._ask

    def down(probe: socket.socket, question: int, interface: str) -> bytes:
        if interface == "down0":
            return bytes(40)
        return flags(probe, question, interface)

    monkeypatch.setattr(network, "_ask", down)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "down0"), (3, "vanished0")])
    assert network._interfaces() == {"lo": ["127.0.0.1"]}


def test_an_interface_gives_its_address() -> None:
    assert interface_address("lo") == "127.0.0.1"


@pytest.mark.parametrize(
    ("addresses", "best"),
    [
        (["fe80::1%x0", "fd00::1", "192.0.2.1"], "192.0.2.1"),
        (["fe80::1%x0", "fd00::1", "fd00::2"], "fd00::1"),
        (["fe80::1%x0"], "fe80::1%x0"),
    ],
)
def test_the_best_address_of_an_interface(monkeypatch: pytest.MonkeyPatch, addresses: list[str], best: str) -> None:
    answer_interfaces(monkeypatch, {"lo": ["127.0.0.1"], "x0": addresses})
    assert interface_address("x0") == best


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9"])
def test_an_address_of_this_machine_is_passed_through(address: str) -> None:
    assert interface_address(address) == address


@pytest.mark.parametrize("wrong", ["nope0", "203.0.113.77", "0.0.0.0", "::", "224.0.0.1", "localhost", "", "a\0b"])
def test_anything_else_is_answered_with_what_there_is(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    answer_interfaces(monkeypatch, {"lo": ["127.0.0.1", "::1"], "x0": ["192.0.2.1"]})
    with pytest.raises(UsageError) as caught:
        interface_address(wrong)
    assert str(caught.value).startswith(f"{wrong!r} is neither an interface that is up nor an address of this machine")
    assert str(caught.value).endswith("lo: 127.0.0.1, ::1; x0: 192.0.2.1")


def test_where_no_interface_is_found_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_interfaces(monkeypatch, {})
    with pytest.raises(UsageError, match="none could be found"):
        interface_address("eth0")


def test_the_local_address_is_that_of_the_route() -> None:
    assert local_address_towards("127.0.0.1", 9) == "127.0.0.1"
    assert local_address_towards("127.3.3.3", 9) in ("127.0.0.1", "127.3.3.3")


@pytest.mark.skipif("::1" not in local_addresses(), reason="this machine has no IPv6")
def test_the_local_address_is_that_of_the_route_in_ipv6() -> None:
    assert local_address_towards("::1", 9) == "::1"


def test_every_own_address_leads_to_itself() -> None:
    for address in local_addresses():
        assert local_address_towards(address, 9) == address


class Unreachable(socket.socket):
    def connect(self, sockaddr: Any) -> None:
        if sockaddr[0] != "127.0.0.1":
            raise OSError(101, "Network is unreachable")
        super().connect(sockaddr)


def resolve_to(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    answer = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (host, 9)) for host in hosts]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    monkeypatch.setattr(socket, "socket", Unreachable)


def test_a_name_is_reached_by_the_address_that_has_a_route(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, "192.0.2.1", "127.0.0.1")
    assert local_address_towards("some.host", 9) == "127.0.0.1"


def test_no_route_is_an_error_that_names_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_to(monkeypatch, "192.0.2.1")
    with pytest.raises(OSError, match=r"no route: Network is unreachable.*some\.host"):
        local_address_towards("some.host", 9)


def test_a_host_without_an_address_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match=r"cannot resolve the host.*a\.\.b"):
        local_address_towards("a..b", 9)
    resolve_to(monkeypatch)
    with pytest.raises(OSError, match=r"no address.*some\.host"):
        local_address_towards("some.host", 9)


@pytest.mark.parametrize(
    ("host", "yes"),
    [("127.0.0.7", True), ("::1", True), ("10.1.2.3", True), ("10.1.2.4", False), ("localhost", False), ("", False)],
)
def test_which_addresses_are_our_own(monkeypatch: pytest.MonkeyPatch, host: str, yes: bool) -> None:
    monkeypatch.setattr(network, "local_addresses", lambda: ["127.0.0.1", "10.1.2.3"])
    assert is_local(host) is yes


def test_a_scope_is_part_of_an_address() -> None:
    assert numeric_host(("192.0.2.1", 1)) == "192.0.2.1"
    assert numeric_host(("fd00::1", 1, 0, 0)) == "fd00::1"
    assert numeric_host(("fe80::1", 1, 0, socket.if_nametoindex("lo"))) == "fe80::1%lo"
    assert numeric_host(("fe80::1%lo", 1, 0, 1)) == "fe80::1%lo"
    assert numeric_host(("fe80::1", 1, 0, 99999)) == "fe80::1%99999"


def test_the_identity_of_the_host_is_that_of_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_identity() == host_identity()
    answer_files(monkeypatch, {"/proc/sys/kernel/random/boot_id": "3b1c\n"})
    assert host_identity() == "3b1c"


def test_without_a_boot_id_the_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_files(monkeypatch, {})
    monkeypatch.setattr(socket, "gethostname", lambda: "some-host")
    monkeypatch.setattr(uuid, "getnode", lambda: 0xABC)
    assert host_identity() == "some-host-000000000abc"
