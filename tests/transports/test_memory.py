"""What the memory transport does beyond the rules that `test_conformance` checks: its networks and its addresses."""

from __future__ import annotations

import threading

import pytest

from farcall.testing.conformance import (
    HANDSHAKE_LIMIT,
    TIMEOUT_S,
    accept,
    assert_ends,
    in_thread,
    open_links,
    receive,
)
from farcall.transports.memory import MemoryNetwork, MemoryTransport
from farcall.transports.stream import StreamLink


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork(backlog=1)


def test_transports_of_one_network_reach_each_other(network: MemoryNetwork) -> None:
    listener = MemoryTransport(network).listen("ignored", HANDSHAKE_LIMIT)
    ours, theirs = open_links(MemoryTransport(network), listener)
    ours.send(b"hello")
    assert receive(theirs) == b"hello"
    for end in (ours, theirs, listener):
        end.close()


def test_networks_know_nothing_of_each_other(network: MemoryNetwork) -> None:
    listener = MemoryTransport(network).listen(None, HANDSHAKE_LIMIT)
    with pytest.raises(ConnectionRefusedError, match="nobody listens there"):
        MemoryTransport(MemoryNetwork()).connect(listener.address, TIMEOUT_S, HANDSHAKE_LIMIT)
    listener.close()


def test_an_address_is_never_used_again(network: MemoryNetwork) -> None:
    listeners = [network.listen(HANDSHAKE_LIMIT)]
    listeners[0].close()
    listeners.append(network.listen(HANDSHAKE_LIMIT))
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


def test_a_connect_that_waits_for_room_goes_on_when_somebody_is_accepted(
    network: MemoryNetwork, somebody_waits: threading.Event
) -> None:
    listener = network.listen(HANDSHAKE_LIMIT)
    first = network.connect(listener.address, TIMEOUT_S, HANDSHAKE_LIMIT)
    second: list[StreamLink] = []
    join = in_thread(lambda: second.append(network.connect(listener.address, 3 * TIMEOUT_S, HANDSHAKE_LIMIT)))
    assert somebody_waits.wait(TIMEOUT_S)
    accepted = [accept(listener), accept(listener)]
    join()
    for end in (first, *second, *accepted):
        end.close()
    listener.close()
    assert len(second) == 1


def test_a_connect_that_waits_for_room_is_refused_when_the_listener_closes(
    network: MemoryNetwork, somebody_waits: threading.Event
) -> None:
    listener = network.listen(HANDSHAKE_LIMIT)
    first = network.connect(listener.address, TIMEOUT_S, HANDSHAKE_LIMIT)
    join = in_thread(network.connect, listener.address, 3 * TIMEOUT_S, HANDSHAKE_LIMIT)
    assert somebody_waits.wait(TIMEOUT_S)
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        join()
    assert_ends(first)
    first.close()
