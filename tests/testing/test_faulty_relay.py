from __future__ import annotations

import threading
from time import monotonic

import pytest

from eventually import eventually
from farcall.testing import Faults, faulty_relay
from farcall.testing.faulty_relay import Relay
from farcall.testing.faulty_transport import FaultyTransport
from farcall.transports.memory import MemoryNetwork, MemoryTransport
from gates import SOON


def start(faults: Faults) -> Relay:
    """With a link, whose agent closes its end at once."""
    transport = FaultyTransport(MemoryTransport(MemoryNetwork()), faults)
    listener = transport.listen()
    try:
        transport.connect(listener.address, SOON).close()
    finally:
        listener.close()
    return faults.relay


def test_what_is_to_come_comes_in_its_order(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = start(faults)
    came: list[str] = []
    done = threading.Event()
    now = monotonic()
    with relay.lock, monkeypatch.context() as patch:
        patch.setattr(faulty_relay, "monotonic", lambda: now)  # all is said at one time, on a slow machine too
        relay.later(0.02, done.set)
        relay.later(0.01, lambda: came.append("second"))
        relay.later(0.0, lambda: came.append("first"))
        relay.later(0.01, lambda: came.append("third"))
    assert done.wait(SOON)
    assert came == ["first", "second", "third"]


def test_a_link_that_was_closed_is_forgotten(faults: Faults) -> None:
    relay = start(faults)
    eventually(lambda: not relay.links)


def test_the_end_drops_what_was_to_come(faults: Faults) -> None:
    relay = start(faults)
    came: list[int] = []
    with relay.lock:
        relay.later(0.05, lambda: came.append(1))
    relay.close()
    relay.close()
    assert relay.is_closing
    assert not came
    assert "farcall-faults" not in [thread.name for thread in threading.enumerate()]


def test_nothing_is_connected_after_the_end(faults: Faults) -> None:
    faults.relay.close()
    with pytest.raises(OSError, match="the faulty agent has ended"):
        start(faults)
