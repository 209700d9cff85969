"""Transports by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from farcall import transports
from farcall.errors import UsageError
from farcall.security.encryption import Encryption
from farcall.transports.memory import MemoryNetwork, MemoryTransport
from farcall.transports.registry import new_transport, register, unregister
from farcall.transports.tcp import TcpTransport
from farcall.transports.tls import Encryption as Certificates
from farcall.transports.unix import UnixTransport


@pytest.fixture
def given() -> Iterator[list[Certificates | None]]:
    """Registers a transport `memory`. Holds the certificates that its factory was called with."""
    given: list[Certificates | None] = []

    def new_memory_transport(encryption: Certificates | None) -> MemoryTransport:
        given.append(encryption)
        return MemoryTransport(MemoryNetwork())

    register("memory", new_memory_transport)
    yield given
    unregister("memory")


def test_transports_are_found_by_name() -> None:
    assert type(new_transport("unix", None)) is UnixTransport
    assert type(new_transport("tcp", None)) is TcpTransport


def test_every_worker_gets_a_transport_of_its_own() -> None:
    assert new_transport("tcp", None) is not new_transport("tcp", None)


def test_transports_of_programs_can_be_registered(given: list[Certificates | None]) -> None:
    encryption = Encryption()
    assert type(new_transport("memory", encryption)) is MemoryTransport
    assert given == [encryption]
    with pytest.raises(UsageError, match="'memory' is registered already"):
        register("memory", TcpTransport)
    assert type(new_transport("memory", None)) is MemoryTransport


@pytest.mark.parametrize("call", [lambda name: new_transport(name, None), unregister], ids=["new", "unregister"])
def test_an_unknown_name_is_answered_with_the_known_ones(call: Callable[[str], object]) -> None:
    with pytest.raises(UsageError, match="no transport named 'carrier_pigeon'; there are tcp, unix"):
        call("carrier_pigeon")


@pytest.mark.parametrize("name", ["", "a:b", "a b", "ü", "1"])
def test_a_name_must_fit_into_an_address(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be a transport's name"):
        register(name, TcpTransport)
    with pytest.raises(UsageError, match="there is no transport"):
        new_transport(name, None)


def test_the_package_exports_what_it_says() -> None:
    assert sorted(transports.__all__) == transports.__all__
    assert all(hasattr(transports, name) for name in transports.__all__)
