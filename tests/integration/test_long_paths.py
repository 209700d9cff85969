"""Workers that are far apart: a relay delays everything between them, as a long path does.

What is sent on a long path takes its time to arrive. Nothing that farcall does may wait for an answer in between, so
the time of a transfer is that of its bytes, and one round trip. The relay has a bandwidth, far below what a slow
machine can do, so that these times do not depend on the machine.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from time import monotonic, sleep
from typing import Any

import pytest

from farcall import wait_all
from farcall.security.encryption import Encryption
from farcall.testing import LocalGroup
from farcall.transports.base import Transport
from farcall.transports.tcp import TcpListener, TcpTransport
from group_stage import call, echo, start

pytestmark = pytest.mark.timeout(60)

DELAY_S = 0.15
"""One way. So a round trip takes 0.3 s."""
BYTES_PER_S = 1 << 24
PIECE_BYTES = 1 << 16
BULK_BYTES = 1 << 24


class Relay:
    """Forwards connections to a port of loopback, in both directions with a delay and a bandwidth."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._start(self._accept)

    def _start(self, function: Any, *args: Any) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            there = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += [here, there]
            for source, sink in ((here, there), (there, here)):
                under_way: deque[tuple[float, bytes]] = deque()
                has_more = threading.Semaphore(0)
                self._start(self._read, source, under_way, has_more)
                self._start(self._write, sink, under_way, has_more)

    def _read(
        self, source: socket.socket, under_way: deque[tuple[float, bytes]], has_more: threading.Semaphore
    ) -> None:
        """What was read arrives when the bytes before it have arrived. An empty piece is the end."""
        arrives = 0.0
        data = b"-"
        while data:
            try:
                data = source.recv(PIECE_BYTES)
            except OSError:
                data = b""
            arrives = max(arrives, monotonic() + DELAY_S) + len(data) / BYTES_PER_S
            under_way.append((arrives, data))
            has_more.release()

    def _write(self, sink: socket.socket, under_way: deque[tuple[float, bytes]], has_more: threading.Semaphore) -> None:
        try:
            while has_more.acquire():
                arrives, data = under_way.popleft()
                sleep(max(0.0, arrives - monotonic()))
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
        except OSError:
            pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()


class RelayedTransport(TcpTransport):
    """TCP whose listeners have the address of a relay."""

    def __init__(self, relays: list[Relay], encryption: Encryption | None) -> None:
        super().__init__(encryption, even_on_loopback=True)
        self._relays = relays

    def listen(self, host: str | None, handshake_limit: int) -> TcpListener:
        listener = super().listen(host, handshake_limit)
        self._relays.append(Relay(int(listener.address.rpartition(":")[2])))
        listener.address = f"tcp:127.0.0.1:{self._relays[-1].port}"
        return listener


@pytest.fixture(params=["clear text", "encrypted"])
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalGroup]:
    """Two workers that are connected."""
    relays: list[Relay] = []

    def new_transport(group: LocalGroup) -> Transport:
        return RelayedTransport(relays, Encryption() if request.param == "encrypted" else None)

    monkeypatch.setattr(LocalGroup, "_new_transport", new_transport)
    try:
        with LocalGroup(2, transport="tcp") as group:
            assert call(group.agents[0], 1, echo, 1) == 1
            yield group
    finally:
        for relay in relays:
            relay.close()


class Counter:
    """A value whose methods return another one."""

    def __init__(self, count: int) -> None:
        self.count = count

    def next(self) -> Counter:
        return Counter(self.count + 1)


def test_a_chain_of_calls_takes_one_round_trip_and_one_for_the_value(group: LocalGroup) -> None:
    began = monotonic()
    reference = group.remote(0, 1, Counter, (0,))
    for _ in range(20):
        reference = reference.remote().next()
    assert reference.to_here().count == 20
    assert monotonic() - began < 10 * DELAY_S  # two round trips are four delays; one for each call would be forty


def test_calls_in_a_row_take_one_round_trip(group: LocalGroup) -> None:
    began = monotonic()
    assert wait_all([start(group.agents[0], 1, echo, number) for number in range(500)]) == list(range(500))
    assert monotonic() - began < 10 * DELAY_S


def test_large_data_uses_the_bandwidth_of_a_long_path(group: LocalGroup) -> None:
    """With a round trip for each chunk of 512 KiB, it would take ten seconds."""
    began = monotonic()
    assert call(group.agents[0], 1, len, bytes(BULK_BYTES), timeout=50) == BULK_BYTES
    assert monotonic() - began < BULK_BYTES / BYTES_PER_S / 0.8 + 4 * DELAY_S
