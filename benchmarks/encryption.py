"""What encryption costs: the transport between hosts in the clear and encrypted, side by side, in alternating rounds.

Two processes on this machine, connected by the TCP transport over loopback; in farcall itself loopback is never
encrypted. One sends, the other reads all and says so. Also the round trip of a small message, one by one.

    python benchmarks/encryption.py                 # 5 rounds of 256 MiB
    python benchmarks/encryption.py --rounds 3 --megabytes 64
"""

from __future__ import annotations

import argparse
import multiprocessing
import select
import statistics
import time
from multiprocessing.connection import Connection
from typing import Final

from farcall.security.encryption import Encryption
from farcall.transports.base import Channel
from farcall.transports.tcp import TcpTransport

CHUNK: Final = 1 << 18
SMALL: Final = bytes(64)
TRIPS: Final = 500
PATIENCE: Final = 60.0


def transport(encrypted: bool) -> TcpTransport:
    """The transport, as between hosts, though there is only one."""
    return TcpTransport(Encryption(), even_on_loopback=True) if encrypted else TcpTransport()


def serve(encrypted: bool, size: int, control: Connection) -> None:
    """The other end: sends small messages back, then reads until all is there and says so."""
    listener = transport(encrypted).listen("127.0.0.1")
    control.send(listener.address)
    channel = None
    while channel is None:
        _wait(listener.fileno(), select.POLLIN)
        channel = listener.accept()
    for _ in range(TRIPS):
        _send(channel, _receive(channel, len(SMALL)))
    _send(channel, _receive(channel, size)[:1])
    control.recv()
    channel.close()
    listener.close()


def measure(encrypted: bool, size: int) -> tuple[float, float]:
    """One round: gigabytes per second one way, and microseconds of a small round trip (median)."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(encrypted, size, theirs))
    process.start()
    channel = transport(encrypted).connect(ours.recv(), PATIENCE)
    trips = []
    for _ in range(TRIPS):
        began = time.perf_counter()
        _send(channel, SMALL)
        _receive(channel, len(SMALL))
        trips.append(time.perf_counter() - began)
    data = bytes(size)
    began = time.perf_counter()
    _send(channel, data)
    _receive(channel, 1)
    seconds = time.perf_counter() - began
    ours.send("done")
    process.join(PATIENCE)
    channel.close()
    return size / seconds / 1e9, statistics.median(trips) * 1e6


def _send(channel: Channel, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[channel.send(rest[:CHUNK]) :]
        except BlockingIOError:
            _wait(channel.fileno(), select.POLLOUT)


def _receive(channel: Channel, size: int) -> bytes:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        try:
            count = channel.receive_into(rest)
        except BlockingIOError:
            _wait(channel.fileno(), select.POLLIN)
            continue
        if not count:
            raise EOFError("the other end has closed the channel")
        rest = rest[count:]
    return bytes(data[:64])


def _wait(descriptor: int, event: int) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    poll.poll(PATIENCE * 1000)


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
