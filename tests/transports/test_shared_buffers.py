"""Buffers between two processes of one host, here two ends in one process, in shared memory."""

from __future__ import annotations

import errno
import os
import struct
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest

from farcall.errors import ProtocolError
from farcall.transports.base import Broadcast, Frame, LinkOptions
from farcall.transports.shm_buffers import (
    COMMON,
    COMMON_MIN_BYTES,
    MISSING,
    OFFER,
    OPENED,
    RETURNED,
    SHARED,
    SharedBuffers,
    default_segment_pool,
)
from farcall.transports.unix import UnixLink, UnixTransport

SOON_S = 20.0


@pytest.fixture
def pair(options: LinkOptions) -> Iterator[tuple[UnixLink, UnixLink]]:
    """Both ends of a link, each with shared memory of its own."""
    pools = [default_segment_pool(name, 1 << 26) for name in ("one", "other")]
    one_options, other_options = (options._replace(segments=pool) for pool in pools)
    with tempfile.TemporaryDirectory(dir="/tmp") as directory, ThreadPoolExecutor(1) as background:
        transport = UnixTransport([directory])
        listener = transport.listen(None, 1000)
        one = transport.connect(listener.address, SOON_S, 1000)
        other = listener.accept()
        assert other is not None
        for sender, receiver in ((one, other), (other, one)):
            sender.send(b"hello")
            assert receiver.receive() == [(b"hello", ())]
        other.establish(other_options)
        established = background.submit(one.establish, one_options, monotonic() + SOON_S)
        while not established.done():
            other.wait(0.005)
            assert other.receive() == []
        established.result()
        yield one, other
        for link in (one, other):
            options.poller.unwatch(link)
            link.close()
        listener.close()
    for pool in pools:
        pool.close()


def receive(link: UnixLink, sender: UnixLink | None = None) -> list[bytes]:
    """Waits for one frame, and returns its buffers. The sender sends meanwhile what was queued."""
    deadline = monotonic() + SOON_S
    while not (frames := link.receive()):
        link.wait(0.01)
        if sender is not None:
            sender.flush()
        assert monotonic() < deadline, "no frame came"
    ((_, buffers),) = frames
    return [bytes(buffer) for buffer in buffers]


def test_empty_buffers_pass_among_others(pair: tuple[UnixLink, UnixLink]) -> None:
    contents = [b"x" * 100_000, b"", b"y"]
    for sender, receiver in (pair, pair[::-1], pair):
        for sent in (contents, contents[1:]):
            sender.send(b"frame", [memoryview(bytearray(content)) for content in sent])
            assert receive(receiver) == sent


def send_large(pair: tuple[UnixLink, UnixLink], size: int = 100_000) -> bytes:
    """Sends a buffer of so many bytes. Returns its contents."""
    content = os.urandom(size)
    pair[0].send(b"frame", [memoryview(bytearray(content))], monotonic())
    return content


def send_internal(link: UnixLink, *parts: bytes) -> None:
    """Sends an internal frame as a hostile process would."""
    link._send_internal(b"".join(parts))


def shared(descriptor: int, number: int, *sizes: int, has_frame: bool = False) -> bytes:
    return struct.pack(f"<BBHiIxxxx{len(sizes)}Q", SHARED, has_frame, len(sizes), descriptor, number, *sizes)


def common(descriptor: int, number: int, lease_descriptor: int, lease: int, *sizes: int) -> bytes:
    places = (descriptor, number, lease_descriptor, lease)
    return struct.pack(f"<BxHiIiI{len(sizes)}Q", COMMON, len(sizes), *places, *sizes)


def returned(number: int, *offsets_and_sizes: int) -> bytes:
    count = len(offsets_and_sizes) // 2
    return struct.pack(f"<BxHI{2 * count}Q", RETURNED, count, number, *offsets_and_sizes)


def missing(number: int, *sizes: int) -> bytes:
    return struct.pack(f"<BxHI{len(sizes)}Q", MISSING, len(sizes), number, *sizes)


# Segments that are sent back


def test_a_segment_can_be_used_again_as_soon_as_the_frame_that_returns_it_is_sent(options: LinkOptions) -> None:
    """The caller sends its next buffers while the thread that sent the reply is still in `send`."""
    pools = [default_segment_pool(name, 1 << 26) for name in ("caller", "callee")]
    requests: list[Frame | None] = []

    def to_callee(*parts: bytes) -> None:
        requests.append(callee.receive(b"".join(parts)))

    def to_caller(*parts: bytes) -> None:
        assert parts[0][0] == RETURNED
        reply = caller.receive(b"".join(parts))
        assert reply is not None
        assert [bytes(buffer) for buffer in reply[1]] == [b"1" * 100_000]
        del reply
        assert caller.send(b"second", [memoryview(b"2" * 100_000)])

    def supply(number: int, buffers: list[memoryview]) -> None:
        raise AssertionError("all segments can be opened")

    caller, callee = (
        SharedBuffers(options._replace(segments=pool), os.getpid(), send, supply)
        for pool, send in zip(pools, (to_callee, to_caller), strict=True)
    )
    assert callee.try_offer(*caller.offer())
    caller.note_opened()
    assert caller.send(b"first", [memoryview(b"1" * 100_000)])
    request = requests.pop()
    assert request is not None
    buffers = list(request[1])
    del request
    assert callee.send(b"reply", buffers)
    second = requests.pop()
    assert second is not None
    assert [bytes(buffer) for buffer in second[1]] == [b"2" * 100_000]
    del second
    for each in (caller, callee):
        each.close()
    for pool in pools:
        pool.close()


# A process that cannot open a segment


def refuse_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has this process be out of descriptors for segments."""
    real_open = os.open

    def fail(path: str, *arguments: int) -> int:
        if path.startswith("/proc/"):
            raise OSError(errno.EMFILE, "Too many open files", path)
        return real_open(path, *arguments)

    monkeypatch.setattr(os, "open", fail)


def test_buffers_that_the_reader_cannot_open_are_sent_another_way(
    pair: tuple[UnixLink, UnixLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    for size in (100_000, 3 << 20):
        with monkeypatch.context() as patch:
            refuse_to_open(patch)
            content = send_large(pair, size)
            assert other.wait(SOON_S)
            assert other.receive() == []  # it has asked for the buffers
            assert one.wait(SOON_S)
            assert one.receive() == []  # they are on their way
        assert receive(other, one) == [content]
        content = send_large(pair)
        assert receive(other, one) == [content], "through the socket or the ring, until the reader can open segments"
        send_internal(other, bytes([OPENED]))
        assert one.wait(SOON_S)
        assert one.receive() == []


# Buffers for several links, which are copied once


def send_common(link: UnixLink, broadcast: Broadcast) -> None:
    """Sends buffers that go to other links, too."""
    sent = broadcast.for_link()
    link.send(b"frame", sent)
    assert sent == []


def test_buffers_for_several_links_are_copied_once(pair: tuple[UnixLink, UnixLink]) -> None:
    one, other = pair
    content = bytearray(b"first" * COMMON_MIN_BYTES)
    with Broadcast([memoryview(content), memoryview(b"more")]) as broadcast:
        for _ in range(3):
            send_common(one, broadcast)
            content[:5] = b"later"  # the copy was made for the first of them
            assert [each[:5] for each in receive(other)] == [b"first", b"more"]
        first = broadcast.segment
        assert first is not None
    for _ in range(3):
        with Broadcast([memoryview(b"again" * COMMON_MIN_BYTES)]) as broadcast:
            send_common(one, broadcast)
            assert receive(other)[0][:5] == b"again"
        assert broadcast.segment is first, "nobody had the first copy any more"
    with Broadcast([memoryview(b"small" * 10_000)]) as broadcast:
        send_common(one, broadcast)
        assert receive(other)[0][:5] == b"small"
    assert broadcast.segment is None


def test_common_buffers_that_the_reader_cannot_open_are_sent_another_way(
    pair: tuple[UnixLink, UnixLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    content = b"first" * COMMON_MIN_BYTES
    with Broadcast([memoryview(content)]) as broadcast:
        with monkeypatch.context() as patch:
            refuse_to_open(patch)
            send_common(one, broadcast)
            assert other.wait(SOON_S)
            assert other.receive() == []  # it has asked for the buffers
            assert one.wait(SOON_S)
            assert one.receive() == []  # they are on their way
        assert receive(other, one) == [content]
        assert broadcast.segment is not None
        (lease,) = broadcast.segment.leases
    assert broadcast.segment.is_free()
    send_internal(other, missing(lease.place.number, 5))  # it has no lease any more
    with pytest.raises(ProtocolError, match="asked for what it was not sent"):
        receive(one)


# A process that lies


@pytest.mark.parametrize(
    "frame",
    [
        shared(-1, 1, 100_000),
        shared(0, 1, 100_000),
        shared(1 << 20, 1, 100_000),
        shared(0, 1, 1 << 62),
        shared(0, 1, 1 << 63, 1 << 63),
        shared(0, 1, has_frame=True),
        bytes([SHARED]),
        shared(0, 1, 5)[:-1],
        common(-1, 1, -1, 2, 2_000_000),
        common(0, 1, 0, 2, 2_000_000),
        common(0, 1, 0, 2, 1 << 62),
        common(0, 1, 0, 2, 5)[:-1],
        bytes([COMMON]),
        returned(1, 0, 10),
        returned(7, 0, 10),
        returned(1)[:-1],
        bytes([RETURNED]),
        missing(1, 100),
        missing(0),
        bytes([MISSING]),
        bytes([OFFER]),
        bytes([200]),
        bytes([0]),
    ],
)
def test_internal_frames_that_lie_break_the_link(pair: tuple[UnixLink, UnixLink], frame: bytes) -> None:
    send_internal(pair[0], frame)
    with pytest.raises(ProtocolError):
        receive(pair[1])


def number_of(link: UnixLink) -> int:
    """Returns the number of the only segment that the link has written."""
    assert link._shared is not None
    (segment,) = link._shared._writer._segments
    return int(segment.number)


@pytest.mark.parametrize("kind", ["returned", "missing"])
def test_buffers_come_back_once(pair: tuple[UnixLink, UnixLink], kind: str) -> None:
    """Else a process could have the other write into memory that belongs to another frame."""
    one, other = pair
    content = send_large(pair)
    assert receive(other) == [content]
    number = number_of(one)
    request = returned(number, 0, 100_000) if kind == "returned" else missing(number, 100_000)
    send_internal(other, request)
    with pytest.raises(ProtocolError, match=r"does not have|was not sent"):
        receive(one)


@pytest.mark.parametrize("places", [(0, 1 << 40), (1, 100), (64, 0, 100, 100), (1 << 62, 100)])
def test_buffers_come_back_at_places_of_their_segment_only(
    pair: tuple[UnixLink, UnixLink], places: tuple[int, ...]
) -> None:
    one, other = pair
    send_large(pair)
    assert other.wait(SOON_S)
    frames = other.receive()  # kept, so that the segment stays the reader's
    send_internal(other, returned(number_of(one), *places))
    with pytest.raises(ProtocolError):
        receive(one)
    assert len(frames) == 1


def test_offers_that_are_no_segments_are_ignored(pair: tuple[UnixLink, UnixLink]) -> None:
    one, other = pair
    for descriptor in (-1, 0, one.fileno(), 1 << 30):
        send_internal(one, struct.pack("<Bxxxi16s", OFFER, descriptor, bytes(16)))
    one.send(b"next", [memoryview(bytearray(b"x"))])
    assert receive(other) == [b"x"]
    assert one.receive() == []  # no OPENED came, and no frame
