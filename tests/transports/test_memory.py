from __future__ import annotations

import select
import threading
from collections.abc import Iterator

import pytest

from farcall.testing.conformance import PATIENCE, TransportConformance, accept, in_thread, open_pair, polls, read
from farcall.transports.memory import MemoryNetwork, MemoryTransport


class TestMemoryTransport(TransportConformance):
    @pytest.fixture
    def transport(self) -> MemoryTransport:
        return MemoryTransport(MemoryNetwork(backlog=8))

    @pytest.fixture
    def crowded_address(self, transport: MemoryTransport) -> Iterator[str]:
        listener = transport.listen()
        waiting = [transport.connect(listener.address, 1.0) for _ in range(8)]
        yield listener.address
        listener.close()
        for channel in waiting:
            channel.close()


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork(backlog=1)


def test_transports_of_one_network_reach_each_other(network: MemoryNetwork) -> None:
    listener = MemoryTransport(network).listen("ignored")
    ours, theirs = open_pair(MemoryTransport(network), listener)
    ours.send(b"hello")
    assert read(theirs, 5) == b"hello"
    for end in (ours, theirs, listener):
        end.close()


def test_networks_know_nothing_of_each_other(network: MemoryNetwork) -> None:
    listener = MemoryTransport(network).listen()
    with pytest.raises(ConnectionRefusedError, match="nobody listens there"):
        MemoryTransport(MemoryNetwork()).connect(listener.address, PATIENCE)
    listener.close()


def test_an_address_is_never_used_again(network: MemoryNetwork) -> None:
    listeners = [network.listen()]
    listeners[0].close()
    listeners.append(network.listen())
    assert [listener.address for listener in listeners] == ["memory:1", "memory:2"]
    listeners[1].close()


@pytest.fixture
def somebody_waits(network: MemoryNetwork) -> threading.Event:
    """Set once a thread waits for something to change in the network."""
    entered = threading.Event()

    class Watched(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            entered.set()  # nobody else gets the lock before this thread waits
            return super().wait(timeout)

    network._changed = Watched()
    return entered


def test_who_waits_for_room_goes_on_when_somebody_is_accepted(
    network: MemoryNetwork, somebody_waits: threading.Event
) -> None:
    listener = network.listen()
    first = network.connect(listener.address, PATIENCE)
    second = []
    join = in_thread(lambda: second.append(network.connect(listener.address, 3 * PATIENCE)))
    assert somebody_waits.wait(PATIENCE)
    accepted = [accept(listener), accept(listener)]
    join()
    for end in (first, *second, *accepted, listener):
        end.close()
    assert len(second) == 1


def test_who_waits_for_room_is_refused_when_the_listener_closes(
    network: MemoryNetwork, somebody_waits: threading.Event
) -> None:
    listener = network.listen()
    first = network.connect(listener.address, PATIENCE)
    join = in_thread(network.connect, listener.address, 3 * PATIENCE)
    assert somebody_waits.wait(PATIENCE)
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        join()
    assert polls(first, select.POLLIN)
    first.close()
