"""Any number of threads may send large frames at once, and the limit for frames that are not complete is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from farcall._native import rings
from farcall.testing.conformance import (
    HANDSHAKE_LIMIT,
    TIMEOUT_S,
    FakeWorker,
    LinkPair,
    establish,
    open_links,
    receive_frames,
    receive_until,
)
from farcall.transports.base import Link, LinkOptions
from farcall.transports.large_frames import MAX_INTERLEAVED
from farcall.transports.stream import StreamLink
from farcall.transports.unix import UnixLink, UnixTransport

EXTRA = 30
FRAME_BYTES = 1 << 20
"""More than a ring, or the buffers of a Unix socket, can hold."""


def send_from_many_threads(one: Link, other: Link) -> None:
    """Sends one large frame from each of many threads. Reads only when all threads have announced their frames."""
    frames = [bytes([number]) * FRAME_BYTES for number in range(MAX_INTERLEAVED + EXTRA)]
    senders = [threading.Thread(target=one.send, args=(frame,), daemon=True) for frame in frames]
    for sender in senders:
        sender.start()
    # Those without a permit queue their frames and return. All others wait, because the other end does not read.
    receive_until([], lambda: sum(sender.is_alive() for sender in senders) == MAX_INTERLEAVED)
    received = receive_frames(other, len(frames), one.flush)
    for sender in senders:
        sender.join(TIMEOUT_S)
    assert sorted(bytes(frame) for frame, _ in received) == frames
    assert not one.unsent_bytes()


def test_more_threads_than_the_limit_send_large_frames_through_a_socket(
    new_pair: Callable[[], tuple[StreamLink, StreamLink]], options: LinkOptions
) -> None:
    one, other = new_pair()
    one.establish(options)
    other.establish(options)
    send_from_many_threads(one, other)
    send_from_many_threads(one, other)  # the permits were given back


@pytest.mark.skipif(rings is None, reason="the C extension is not there")
def test_more_threads_than_the_limit_send_large_frames_through_a_ring(
    root: Path, new_worker: Callable[..., FakeWorker]
) -> None:
    transport = UnixTransport([str(root)])
    listener = transport.listen(None, HANDSHAKE_LIMIT)
    too_little = {"shared_memory": FRAME_BYTES // 2}
    pair = LinkPair(*open_links(transport, listener), new_worker(**too_little), new_worker(**too_little))
    establish(pair)
    assert isinstance(pair.ours, UnixLink)
    assert pair.ours.ring is not None
    send_from_many_threads(pair.ours, pair.theirs)
    send_from_many_threads(pair.ours, pair.theirs)
    assert not pair.ours.counts().bytes_shared_out
    pair.close()
    listener.close()
