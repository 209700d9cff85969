"""What encryption costs: the transport between hosts in the clear and encrypted, side by side, in alternating rounds.

Two processes on this machine, connected by the TCP transport over loopback; in farcall itself loopback is never
encrypted. One sends a large buffer, the other receives it and says so. Also the round trip of a small frame.

    python benchmarks/encryption.py                 # 5 rounds of 256 MiB
    python benchmarks/encryption.py --rounds 3 --megabytes 64
"""

from __future__ import annotations

import argparse
import multiprocessing
import select
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Final

from farcall.security.encryption import Encryption
from farcall.transports.base import Frame, Link, LinkOptions
from farcall.transports.buffer_pool import default_buffer_pool
from farcall.transports.poller import Poller
from farcall.transports.shm_segments import SegmentPool
from farcall.transports.tcp import TcpTransport

SMALL: Final = bytes(64)
TRIPS: Final = 500
TIMEOUT_S: Final = 60.0
HANDSHAKE_LIMIT: Final = 1 << 16


def transport(encrypted: bool) -> TcpTransport:
    """Returns the transport, as between hosts, though there is only one."""
    return TcpTransport(Encryption(), even_on_loopback=True) if encrypted else TcpTransport()


@contextmanager
def established(link: Link) -> Iterator[Link]:
    """Ends the handshake of a link, as a worker does. Closes the link at the end."""
    poller, received = Poller(0.0), default_buffer_pool()
    segments = SegmentPool(0, 0, lambda problem: None)
    options = LinkOptions(poller, segments, received, 0.0, copy_shared=False, max_frame_size=1 << 40)
    link.establish(options, time.monotonic() + TIMEOUT_S)
    try:
        yield link
    finally:
        link.close()
        received.close()
        poller.close()


def serve(encrypted: bool, control: Connection) -> None:
    """The other end: sends small frames back, then receives a large one and says so."""
    listener = transport(encrypted).listen("127.0.0.1", HANDSHAKE_LIMIT)
    control.send(listener.address)
    accepted = None
    while accepted is None:
        select.select([listener], [], [], TIMEOUT_S)
        accepted = listener.accept()
    _receive(accepted)
    with established(accepted) as link:
        link.send(b"welcome")
        for _ in range(TRIPS):
            link.send(_receive(link)[0])
        _receive(link)
        link.send(b"done")
        control.recv()
    listener.close()


def measure(encrypted: bool, size: int) -> tuple[float, float]:
    """One round. Returns gigabytes per second one way, and microseconds of a small round trip (median)."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(encrypted, theirs))
    process.start()
    connected = transport(encrypted).connect(ours.recv(), TIMEOUT_S, HANDSHAKE_LIMIT)
    connected.send(b"hello")
    _receive(connected)
    with established(connected) as link:
        trips = []
        for _ in range(TRIPS):
            began = time.perf_counter()
            link.send(SMALL)
            _receive(link)
            trips.append(time.perf_counter() - began)
        data = memoryview(bytearray(size))
        began = time.perf_counter()
        link.send(b"", [data])
        _receive(link)
        seconds = time.perf_counter() - began
        ours.send("done")
        process.join(TIMEOUT_S)
    return size / seconds / 1e9, statistics.median(trips) * 1e6


def _receive(link: Link) -> Frame:
    while not (frames := link.receive()):
        link.wait(TIMEOUT_S)
    return frames[0]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="encryption.py", description="What encryption between hosts costs.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=256)
    options = parser.parse_args()
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(options.rounds):
        for encrypted in (False, True) if number % 2 == 0 else (True, False):
            found[encrypted].append(measure(encrypted, options.megabytes << 20))
    rates = {encrypted: statistics.median(rate for rate, _ in rounds) for encrypted, rounds in found.items()}
    trips = {encrypted: statistics.median(trip for _, trip in rounds) for encrypted, rounds in found.items()}
    for encrypted, label in ((False, "in the clear"), (True, "encrypted (TLS 1.3)")):
        print(f"{label}: {rates[encrypted]:.2f} GB/s, a small round trip {trips[encrypted]:.0f} µs")
    print(f"encrypted is {rates[True] / rates[False]:.2f} of the bandwidth, medians of {options.rounds} rounds")


if __name__ == "__main__":
    main()
