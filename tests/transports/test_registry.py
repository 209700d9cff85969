from __future__ import annotations

from collections.abc import Iterator

import pytest

from farcall import transports
from farcall.errors import UsageError
from farcall.testing.conformance import PATIENCE, accept
from farcall.transports.memory import MemoryNetwork, MemoryTransport
from farcall.transports.registry import connect, register, transport, unregister
from farcall.transports.sockets import SocketChannel
from farcall.transports.tcp import TcpTransport
from farcall.transports.unix import UnixTransport


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def registered(network: MemoryNetwork) -> Iterator[None]:
    register("memory", lambda: MemoryTransport(network))
    yield
    unregister("memory")


def test_transports_are_found_by_name() -> None:
    assert type(transport("unix")) is UnixTransport
    assert type(transport("tcp")) is TcpTransport


def test_every_agent_gets_its_own() -> None:
    assert transport("tcp") is not transport("tcp")


@pytest.mark.usefixtures("registered")
def test_a_transport_of_ones_own_can_be_registered() -> None:
    assert type(transport("memory")) is MemoryTransport
    with pytest.raises(UsageError, match="'memory' is registered already"):
        register("memory", TcpTransport)
    assert type(transport("memory")) is MemoryTransport


@pytest.mark.parametrize("call", [transport, unregister])
def test_an_unknown_name_is_answered_with_those_there_are(call) -> None:
    with pytest.raises(UsageError, match="no transport named 'carrier_pigeon'; there are tcp, unix"):
        call("carrier_pigeon")


@pytest.mark.parametrize("name", ["", "a:b", "a b", "ü", "1"])
def test_a_name_must_fit_into_an_address(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be a transport's name"):
        register(name, TcpTransport)
    with pytest.raises(UsageError, match="there is no transport"):
        transport(name)


def test_connect_takes_the_first_address_that_works(network: MemoryNetwork) -> None:
    memory = MemoryTransport(network)
    listener = memory.listen()
    addresses = ["carrier:pigeon", "tcp:no-port", "memory:999", listener.address, "memory:1000"]
    channel = connect(addresses, PATIENCE, [TcpTransport(), memory])
    assert channel.address == listener.address
    for end in (channel, accept(listener), listener):
        end.close()


def test_connect_leaves_time_for_the_next_address() -> None:
    shares = []

    class Recorded(MemoryTransport):
        def connect(self, address: str, timeout: float) -> SocketChannel:
            shares.append(timeout)
            return super().connect(address, timeout)

    memory = Recorded(MemoryNetwork(backlog=1))
    full, listener = memory.listen(), memory.listen()
    waiting = memory.connect(full.address, PATIENCE)
    channel = connect([full.address, listener.address], 0.2, [memory])
    assert channel.address == listener.address
    assert 0 < shares[1] <= 0.1
    assert 0 <= shares[2] <= 0.1
    for end in (waiting, channel, full, listener):
        end.close()


def test_connect_tells_the_reasons_of_all(network: MemoryNetwork) -> None:
    with pytest.raises(ConnectionRefusedError) as caught:
        connect(["tcp:no-port", "memory:7"], PATIENCE, [TcpTransport(), MemoryTransport(network)])
    assert "tcp:no-port: no tcp address" in str(caught.value)
    assert "memory:7: nobody listens there" in str(caught.value)


def test_connect_ends_at_its_timeout() -> None:
    memory = MemoryTransport(MemoryNetwork(backlog=1))
    full = memory.listen()
    waiting = memory.connect(full.address, PATIENCE)
    with pytest.raises(TimeoutError, match=full.address):
        connect([full.address, full.address], 0.1, [memory])
    waiting.close()
    full.close()


@pytest.mark.parametrize("addresses", [[], ["carrier:pigeon"]])
def test_connect_says_when_no_transport_fits(network: MemoryNetwork, addresses: list[str]) -> None:
    with pytest.raises(OSError, match=r"none of the addresses .* can be reached by memory, tcp"):
        connect(addresses, PATIENCE, [MemoryTransport(network), TcpTransport()])


def test_the_layer_exports_what_it_says() -> None:
    assert sorted(transports.__all__) == transports.__all__
    assert all(hasattr(transports, name) for name in transports.__all__)
