"""Fixtures that several tests of the transports use."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from segment_ends import Ends, count_from_here

from farcall.testing.conformance import FakeWorker
from farcall.transports.base import LinkOptions
from farcall.transports.buffer_pool import BufferPool
from farcall.transports.poller import Poller
from farcall.transports.shm_segments import SegmentPool
from farcall.transports.stream import StreamLink


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory with a short path, which pytest's own may not have."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def new_worker() -> Iterator[Callable[..., FakeWorker]]:
    """Creates stand-ins for workers, and closes them after the test."""
    workers: list[FakeWorker] = []

    def new(*args: Any, **options: Any) -> FakeWorker:
        workers.append(FakeWorker(*args, **options))
        return workers[-1]

    yield new
    for worker in workers:
        worker.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The writer and the reader of shared segments."""
    ends = Ends()
    yield ends
    ends.close()


@pytest.fixture
def segments_from_here() -> None:
    """`mapping_count` and `descriptor_count` count only what the test makes."""
    count_from_here()


HANDSHAKE_LIMIT = 1000
NewPair = Callable[[], tuple[StreamLink, StreamLink]]


@pytest.fixture
def poller() -> Iterator[Poller]:
    poller = Poller(0.0)
    yield poller
    poller.close()


@pytest.fixture
def options(poller: Poller) -> LinkOptions:
    """For links without shared memory, of one worker."""
    segments = SegmentPool(0, 0, lambda problem: None)
    return LinkOptions(poller, segments, BufferPool(0), 0.0, copy_shared=False, max_frame_size=1 << 24)


@pytest.fixture
def new_pair(poller: Poller) -> Iterator[NewPair]:
    """Makes the two ends of a connection, in their handshakes."""
    made: list[StreamLink] = []

    def new_pair() -> tuple[StreamLink, StreamLink]:
        one, other = (StreamLink(end, "the other end", HANDSHAKE_LIMIT) for end in socket.socketpair())
        made.extend((one, other))
        return one, other

    yield new_pair
    for link in made:
        poller.unwatch(link)
        link.close()
