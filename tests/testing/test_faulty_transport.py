from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator

import pytest

from eventually import eventually
from farcall.protocol.handshake import Hello, Proof, Purpose, pack
from farcall.protocol.wire import RESULT, encode
from farcall.testing import Faults
from farcall.testing.conformance import PATIENCE, Pair, TransportConformance, accept, open_pair, polls, read, refusal
from farcall.testing.faulty_transport import FaultyTransport
from farcall.transports.base import Transport
from farcall.transports.memory import MemoryNetwork, MemoryTransport
from farcall.transports.tcp import TcpTransport
from farcall.transports.unix import UnixTransport

HELLO = pack(Purpose.CALLS, Hello("group", "worker0", 0, "worker1", wanted_number=1)) + pack(
    Purpose.CALLS, Proof(b"mac")
)


@pytest.fixture(params=["memory", "unix", "tcp"])
def inner(request: pytest.FixtureRequest) -> Iterator[Transport]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        transports = {
            "memory": lambda: MemoryTransport(MemoryNetwork(backlog=8)),
            "unix": lambda: UnixTransport([directory]),
            "tcp": TcpTransport,
        }
        yield transports[request.param]()


class TestFaultyTransport(TransportConformance):
    @pytest.fixture
    def transport(self, inner: Transport, faults: Faults) -> Transport:
        return FaultyTransport(inner, faults)

    @pytest.fixture
    def crowded_address(self, transport: Transport) -> Iterator[str]:
        if transport.scheme != "memory":
            pytest.skip("the inner transport's own, and tested there")
        listener = transport.listen()
        waiting = [transport.connect(listener.address, 1.0) for _ in range(8)]
        yield listener.address
        listener.close()
        for channel in waiting:
            channel.close()

    def test_many_connections_are_kept_apart(self, transport: Transport, listener: object) -> None:
        if transport.scheme == "memory":
            pytest.skip("its backlog is short here")
        super().test_many_connections_are_kept_apart(transport, listener)  # type: ignore[arg-type]

    @pytest.mark.parametrize("gather", [False, True])
    def test_sending_to_a_closed_end_breaks_the_channel(self, pair: Pair, gather: bool) -> None:
        """When the link has seen it: until then the channel may fill up."""
        ours, theirs = pair
        theirs.close()

        def is_broken() -> bool:
            try:
                _ = ours.send_gather([b"a", b"b"]) if gather else ours.send(b"ab")
            except BlockingIOError:
                pass
            except ConnectionError:
                return True
            return False

        eventually(is_broken)

    def test_closing_gives_every_descriptor_back(self, transport: Transport) -> None:
        """A moment later, as the link must see it first."""

        def use() -> None:
            listener = transport.listen()
            for ours, theirs in [open_pair(transport, listener) for _ in range(5)]:
                ours.close()
                theirs.close()
            listener.close()
            refusal(transport.connect, listener.address, PATIENCE)

        use()
        eventually(lambda: not transport._faults.relay.links)  # type: ignore[attr-defined]
        before = len(os.listdir("/proc/self/fd"))
        use()
        eventually(lambda: len(os.listdir("/proc/self/fd")) == before)


@pytest.fixture
def transport(faults: Faults) -> FaultyTransport:
    return FaultyTransport(MemoryTransport(MemoryNetwork()), faults)


def test_a_channel_that_was_broken_on_purpose_says_so(transport: FaultyTransport, faults: Faults) -> None:
    listener = transport.listen()
    ours, theirs = open_pair(transport, listener)
    ours.send(HELLO)
    assert read(theirs, len(HELLO)) == HELLO
    faults.cut("worker1")
    assert polls(ours, 1)
    for use in (
        lambda: ours.receive(10),
        lambda: ours.receive_into(memoryview(bytearray(10))),
        lambda: ours.send(b"x"),
        lambda: ours.send_gather([b"x"]),
    ):
        with pytest.raises(ConnectionResetError, match="the faulty agent has cut worker 'worker1' off"):
            use()
    ours.close()
    with pytest.raises(OSError, match="is closed"):
        ours.receive(10)
    assert polls(theirs, 1)
    assert theirs.receive(10) == b""
    theirs.close()
    listener.close()


def test_order_is_kept_on_a_slow_way(transport: FaultyTransport, faults: Faults) -> None:
    listener = transport.listen()
    ours, theirs = open_pair(transport, listener)
    faults.slow("worker1", 0.02)
    messages = [HELLO, *(encode(RESULT, number, b"", b"x" * number) for number in range(50))]
    for message in messages:
        ours.send(message)
    expected = b"".join(messages)
    assert read(theirs, len(expected)) == expected
    for end in (ours, theirs, listener):
        end.close()


def test_without_descriptors_the_inner_channel_is_closed(
    transport: FaultyTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = MemoryTransport(transport._inner._network)  # type: ignore[attr-defined]
    listener = inner.listen()

    def out_of_descriptors() -> None:
        monkeypatch.undo()
        raise OSError(24, "Too many open files")

    connected = transport._inner.connect(listener.address, PATIENCE)
    theirs = accept(listener)
    monkeypatch.setattr(transport._inner, "connect", lambda *_: connected)
    monkeypatch.setattr(socket, "socketpair", out_of_descriptors)
    with pytest.raises(OSError, match="Too many open files"):
        transport.connect(listener.address, PATIENCE)
    assert polls(theirs, 1)
    assert theirs.receive(1) == b""
    theirs.close()
    listener.close()
