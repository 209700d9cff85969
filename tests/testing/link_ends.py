"""Links of a faulty agent whose other ends are in the hands of the test."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

from farcall.protocol.handshake import Challenge, Hello, Proof, Welcome, encode
from farcall.testing import Faults
from farcall.testing.faulty_link import FaultyLink, FaultyTransport
from farcall.transports.base import Link, LinkOptions, Transport
from farcall.transports.buffer_pool import BufferPool
from farcall.transports.memory import MemoryNetwork, MemoryTransport
from farcall.transports.poller import Poller
from farcall.transports.shm_buffers import default_segment_pool
from gates import SOON

HANDSHAKE_LIMIT = 4096
HELLO = Hello("group", "worker0", 0, "worker1", wanted_number=1)
THEIR_HELLO = Hello("group", "worker1", 1, "worker0", number=1)
WELCOME = Welcome("worker1", 1, 1)


class LinkEnds:
    """worker0, which is a faulty agent in its place, and the plain ends of its links to worker1."""

    def __init__(self, faults: Faults, inner: Transport | None = None) -> None:
        self.faults = faults
        inner = inner if inner is not None else MemoryTransport(MemoryNetwork())
        self.transport = FaultyTransport(inner, faults)
        self.inner = inner
        self._listener = inner.listen(None, HANDSHAKE_LIMIT)
        self._pools = [default_segment_pool(name, 1 << 24) for name in ("worker0", "worker1")]
        self._pollers = [Poller(0.0), Poller(0.0)]
        self._opened: list[Link] = []

    def options(self, which: int) -> LinkOptions:
        return LinkOptions(self._pollers[which], self._pools[which], BufferPool(0), 0.0, False, 1 << 28)

    def open(self) -> tuple[FaultyLink, Link]:
        """Returns both ends of a link to worker1, in its handshake."""
        ours = self.transport.connect(self._listener.address, SOON, HANDSHAKE_LIMIT)
        self._opened.append(ours)
        theirs = self._listener.accept()
        assert theirs is not None
        self._opened.append(theirs)
        return ours, theirs

    def connect(self) -> tuple[FaultyLink, Link]:
        """Returns both ends of an established link to worker1."""
        ours, theirs = self.open()
        for sender, receiver, message in (
            (ours, theirs, HELLO),
            (theirs, ours, Challenge(b"nonce")),
            (ours, theirs, Proof(b"mac")),
            (theirs, ours, WELCOME),
        ):
            sender.send(encode(message))
            assert receive(receiver) == (encode(message), [])
        theirs.establish(self.options(1))
        _establish_both(ours, self.options(0), theirs)
        return ours, theirs

    def accept(self) -> tuple[FaultyLink, Link]:
        """Returns both ends of a link that worker1 has opened, established."""
        listener = self.transport.listen(None, HANDSHAKE_LIMIT)
        theirs = self.inner.connect(listener.address, SOON, HANDSHAKE_LIMIT)
        self._opened.append(theirs)
        ours = listener.accept()
        assert ours is not None
        self._opened.append(ours)
        listener.close()
        for sender, receiver, message in (
            (theirs, ours, THEIR_HELLO),
            (ours, theirs, Challenge(b"nonce")),
            (theirs, ours, Proof(b"mac")),
            (ours, theirs, Welcome("worker0", 0, 0)),
        ):
            sender.send(encode(message))
            if receiver is ours or not isinstance(message, Welcome):
                assert receive(receiver) == (encode(message), [])
        ours.establish(self.options(0))
        assert receive(theirs) == (encode(Welcome("worker0", 0, 0)), [])
        _establish_both(theirs, self.options(1), ours)
        return ours, theirs

    def close(self) -> None:
        for link in self._opened:
            link.close()
        self._listener.close()
        self.faults.relay.close()
        for poller in self._pollers:
            poller.close()
        for pool in self._pools:
            pool.close()


def _establish_both(connecting: Link, options: LinkOptions, accepting: Link) -> None:
    """Establishes the connecting end. The accepting end is established already, and is read meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(connecting.establish, options, monotonic() + SOON)
        while not done.done():
            accepting.wait(0.005)
            assert accepting.receive() == []
        done.result()


def receive(link: Link, seconds: float = SOON) -> tuple[bytes, list[bytes]]:
    """Returns the next frame and its buffers. Raises what the link raises; `TimeoutError` if nothing comes."""
    ((frame, buffers),) = receive_some(link, seconds)
    return bytes(frame), [bytes(buffer) for buffer in buffers]


def receive_some(link: Link, seconds: float = SOON) -> Sequence[tuple[Any, Any]]:
    deadline = monotonic() + seconds
    while not (frames := link.receive()):
        left = deadline - monotonic()
        if left <= 0 or not link.wait(left):
            raise TimeoutError(f"nothing came on the link within {seconds} s")
    return frames
