"""How the two ends of a Unix link agree on a ring and on shared memory, and what a peer can do to that."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import pytest

from farcall._native import rings
from farcall.errors import ProtocolError
from farcall.testing.conformance import (
    HANDSHAKE_LIMIT,
    PROLOGUE,
    TIMEOUT_S,
    FakeWorker,
    LinkPair,
    accept,
    establish,
    exchange,
    in_thread,
    new_buffers,
    open_links,
    receive,
    receive_with_buffers,
)
from farcall.transports.base import Link
from farcall.transports.stream import INTERNAL
from farcall.transports.unix import (
    RING_BYTES,
    SETUP,
    SETUP_DONE,
    UnixLink,
    UnixListener,
    UnixTransport,
    _new_ring_memory,
)

NewWorker = Callable[..., FakeWorker]
needs_rings = pytest.mark.skipif(rings is None, reason="the C extension is not there")

KINDS: dict[str, dict[str, Any]] = {
    "everything": {},
    "no rings": {"use_rings": False},
    "no shared memory": {"shared_memory": 0},
}
"""Options of workers."""


@pytest.fixture
def transport(root: Path) -> UnixTransport:
    return UnixTransport([str(root)])


@pytest.fixture
def listener(transport: UnixTransport) -> Iterator[UnixListener]:
    listener = transport.listen(None, HANDSHAKE_LIMIT)
    yield listener
    listener.close()


def has_ring(link: Link) -> bool:
    assert isinstance(link, UnixLink)
    return link.ring is not None


def descriptor_count() -> int:
    return len(os.listdir("/proc/self/fd"))


# Two ends that agree


@pytest.mark.parametrize("ours", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("theirs", KINDS.values(), ids=KINDS)
def test_frames_go_through_a_ring_if_both_ends_can(
    transport: UnixTransport,
    listener: UnixListener,
    new_worker: NewWorker,
    ours: dict[str, Any],
    theirs: dict[str, Any],
) -> None:
    pair = LinkPair(*open_links(transport, listener), new_worker(**ours), new_worker(**theirs))
    establish(pair)
    expected = rings is not None and not ours and not theirs
    assert has_ring(pair.ours) == has_ring(pair.theirs) == expected
    for sender, receiver in pair.directions():
        sender.send(b"small")
        assert receive(receiver) == b"small"
        join = in_thread(sender.send, b"large", new_buffers([1 << 20], 1))
        frame, (buffer,) = receive_with_buffers(receiver)
        join()
        assert (frame, buffer) == (b"large", new_buffers([1 << 20], 1)[0])
    pair.close()


@needs_rings
def test_a_link_takes_three_descriptors_at_each_end(
    transport: UnixTransport, listener: UnixListener, new_worker: NewWorker
) -> None:
    """A group of 100 workers on one host has 9,900 links."""
    workers = new_worker(), new_worker()
    first = LinkPair(*open_links(transport, listener), *workers)
    establish(first)
    before = descriptor_count()
    pair = LinkPair(*open_links(transport, listener), *workers)
    establish(pair)
    assert has_ring(pair.ours)
    assert descriptor_count() - before <= 2 * 3
    assert rings.mapping_size(RING_BYTES) <= 1 << 18
    pair.close()
    first.close()
    del pair
    assert descriptor_count() < before


@needs_rings
@pytest.mark.parametrize("failing", ["memfd_create", "ftruncate"])
def test_a_ring_that_cannot_be_made_is_done_without(
    transport: UnixTransport,
    listener: UnixListener,
    new_worker: NewWorker,
    monkeypatch: pytest.MonkeyPatch,
    failing: str,
) -> None:
    pair = LinkPair(*open_links(transport, listener), new_worker(), new_worker())
    for worker in (pair.our_worker, pair.their_worker):
        worker.options.segments.probe_descriptor()  # so that only the ring fails
    before = descriptor_count()

    def fail(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, fail)
        establish(pair)
    assert not has_ring(pair.ours)
    assert not has_ring(pair.theirs)
    # The accepted end has waited on its socket here, for which it has a descriptor (`WakeUp`).
    assert descriptor_count() <= before + 1
    pair.ours.send(b"through the socket")
    assert receive(pair.theirs) == b"through the socket"
    pair.close()


# A hostile end that connects


@contextmanager
def accepted_link(listener: UnixListener, worker: FakeWorker) -> Iterator[tuple[socket.socket, Link]]:
    """A raw socket, and an established link to it that waits for SETUP."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(TIMEOUT_S)
        raw.connect(listener.address.removeprefix("unix:"))
        link = accept(listener)
        raw.sendall(PROLOGUE + b"\x05\0\0\0hello")
        assert receive(link) == b"hello"
        link.send(b"welcome")
        assert raw.recv(100)
        link.establish(worker.options)
        yield raw, link
        link.close()


def packed(internal: bytes) -> bytes:
    return (len(internal) | INTERNAL).to_bytes(4, "little") + internal


def setup(has_ring: bool = True, capacity: int = RING_BYTES, descriptor: int = -1, token: bytes = bytes(16)) -> bytes:
    return packed(struct.pack("<BBxxIi16s", SETUP, has_ring, capacity, descriptor, token))


@contextmanager
def ring_descriptors() -> Iterator[list[int]]:
    """What an honest end sends along with SETUP."""
    descriptors = [_new_ring_memory() if rings is not None else os.memfd_create("ring")]
    descriptors += [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def flags_of_setup_done(raw: socket.socket) -> int:
    """Returns the flags of the SETUP_DONE that comes next."""
    data, descriptors, _, _ = socket.recv_fds(raw, 28, 3)
    for descriptor in descriptors:
        os.close(descriptor)
    assert data[4] == SETUP_DONE
    return data[5]


@needs_rings
def test_an_honest_setup_gets_a_ring(listener: UnixListener, new_worker: NewWorker) -> None:
    """The tests below would mean nothing if this failed."""
    with accepted_link(listener, new_worker()) as (raw, link), ring_descriptors() as descriptors:
        socket.send_fds(raw, [setup()], descriptors)
        assert link.wait(TIMEOUT_S)
        assert link.receive() == []
        assert flags_of_setup_done(raw) == 1
        assert has_ring(link)
        link.send(b"into the ring")
        raw.sendall(b"!")
        with pytest.raises(ProtocolError, match="sent bytes beside its ring"):
            receive(link)


def unsealed_memory() -> int:
    memory = os.memfd_create("ring")
    os.ftruncate(memory, rings.mapping_size(RING_BYTES))
    return memory


def small_memory() -> int:
    memory = os.memfd_create("ring", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 4096)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return memory


@needs_rings
@pytest.mark.parametrize(
    "offer", ["unsealed", "small", "no memory", "event as memory", "no events", "no descriptors", "other capacity"]
)
def test_an_offer_that_cannot_be_used_leaves_the_link_on_its_socket(
    listener: UnixListener, new_worker: NewWorker, offer: str
) -> None:
    """Descriptors may also be missing because this process has none left."""
    with accepted_link(listener, new_worker()) as (raw, link), ring_descriptors() as descriptors:
        before = descriptor_count()
        made = []
        if offer in ("unsealed", "small"):
            made = [unsealed_memory() if offer == "unsealed" else small_memory()]
        sent = {
            "no memory": descriptors[1:],
            "event as memory": [descriptors[1], *descriptors[1:]],
            "no events": descriptors[:1],
            "no descriptors": [],
            "other capacity": descriptors,
        }.get(offer, [*made, *descriptors[1:]])
        request = setup(capacity=2 * RING_BYTES if offer == "other capacity" else RING_BYTES)
        socket.send_fds(raw, [request], sent)
        for descriptor in made:
            os.close(descriptor)
        assert link.wait(TIMEOUT_S)
        assert link.receive() == []
        is_shortage = offer in ("no memory", "no events", "no descriptors")
        assert flags_of_setup_done(raw) == (4 if is_shortage else 0)  # 4: a ring may be possible later
        assert not has_ring(link)
        # The segment that this end offers in turn, whose mapping has a descriptor as well, is all that is new.
        assert descriptor_count() - before <= 2
        raw.sendall(b"\x05\0\0\0frame")
        assert receive(link) == b"frame"


@needs_rings
@pytest.mark.parametrize("place", [1, 2])
def test_descriptors_that_are_no_events_are_refused(
    listener: UnixListener, new_worker: NewWorker, tmp_path: Path, place: int
) -> None:
    """Writing to them could block this process, or write into a file of its user."""
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with accepted_link(listener, new_worker()) as (raw, link), ring_descriptors() as descriptors:
        sent = list(descriptors)
        sent[place] = file
        socket.send_fds(raw, [setup()], sent)
        with pytest.raises(ProtocolError, match="sent descriptors that are no events"):
            receive(link)
    os.close(file)
    assert (tmp_path / "file").read_bytes() == b""


def test_more_descriptors_than_a_ring_has_are_refused(listener: UnixListener, new_worker: NewWorker) -> None:
    before = descriptor_count()
    with accepted_link(listener, new_worker()) as (raw, link), ring_descriptors() as descriptors:
        for byte in setup()[:2]:
            socket.send_fds(raw, [bytes([byte])], descriptors)
        with pytest.raises(ProtocolError, match="descriptors that nobody asked for"):
            receive(link)
        link.close()
        del link
    assert descriptor_count() <= before + 7  # the poller of the worker, and a segment that it has offered


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (packed(b""), "empty internal frame"),
        (packed(bytes([SETUP])), "a SETUP of 1 bytes"),
        (packed(setup()[4:] + b"!"), "a SETUP of 29 bytes"),
        (packed(bytes([SETUP_DONE]) + bytes(23)), "kind 10 before the link was set up"),
        (packed(bytes([1]) + bytes(23)), "kind 1 before the link was set up"),
        (setup(has_ring=False) + setup(has_ring=False), "internal frame of unknown kind 9"),
    ],
)
def test_what_is_no_setup_is_refused(listener: UnixListener, new_worker: NewWorker, data: bytes, expected: str) -> None:
    with accepted_link(listener, new_worker()) as (raw, link):
        raw.sendall(data)
        with pytest.raises(ProtocolError, match=expected):
            receive(link)


@pytest.mark.parametrize("descriptor", [0, 1 << 30, -7])
def test_a_segment_that_is_not_there_is_not_used(
    listener: UnixListener, new_worker: NewWorker, descriptor: int
) -> None:
    with accepted_link(listener, new_worker()) as (raw, link):
        raw.sendall(setup(has_ring=False, descriptor=descriptor))
        assert link.wait(TIMEOUT_S)
        assert link.receive() == []
        assert flags_of_setup_done(raw) == 0
        raw.sendall(packed(struct.pack("<BBHiIxxxxQ", 4, 0, 1, 3, 1, 100_000)))
        with pytest.raises(ProtocolError, match="in shared memory, which this end has not agreed to"):
            receive(link)


# A hostile end that was connected to


@contextmanager
def connected_link(transport: UnixTransport, root: Path) -> Iterator[tuple[UnixLink, socket.socket]]:
    """A link that is about to be established, and a raw socket at its other end."""
    path = str(root / "raw.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        link = transport.connect(f"unix:{path}", TIMEOUT_S, HANDSHAKE_LIMIT)
        raw, _ = server.accept()
    with raw:
        raw.settimeout(TIMEOUT_S)
        link.send(b"hello")
        raw.recv(100)
        raw.sendall(PROLOGUE + b"\x07\0\0\0welcome")
        assert receive(link) == b"welcome"
        yield link, raw
    link.close()


def setup_done(flags: int) -> bytes:
    return packed(struct.pack("<BBxxi16s", SETUP_DONE, flags, -1, bytes(16)))


@pytest.mark.parametrize("answer", ["not offered", "no descriptors", "no events"])
def test_a_ring_that_was_accepted_wrongly_breaks_the_link(
    transport: UnixTransport, root: Path, new_worker: NewWorker, answer: str
) -> None:
    if rings is None and answer != "not offered":
        pytest.skip("the C extension is not there")
    worker = new_worker(use_rings=answer != "not offered")
    before = descriptor_count()
    with connected_link(transport, root) as (link, raw):
        join = in_thread(link.establish, worker.options, monotonic() + TIMEOUT_S)
        _, offered, _, _ = socket.recv_fds(raw, 32, 3)
        sent = {"not offered": [], "no descriptors": [], "no events": [raw.fileno()] * 2}[answer]
        socket.send_fds(raw, [setup_done(1)], sent)
        with pytest.raises(ConnectionError) as caught:
            join()
        assert isinstance(caught.value, ProtocolError) == (answer != "no descriptors")
        for descriptor in offered:
            os.close(descriptor)
    del link
    assert descriptor_count() <= before + 2  # a segment that was offered


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (packed(bytes([SETUP_DONE])), "a SETUP_DONE of 1 bytes"),
        (packed(setup_done(0)[4:] + b"!"), "a SETUP_DONE of 25 bytes"),
        (setup(has_ring=False), "kind 9 before the link was set up"),
        (b"\x05\0\0\0frame", "sent a frame before the link was set up"),
    ],
)
def test_what_is_no_setup_done_is_refused(
    transport: UnixTransport, root: Path, new_worker: NewWorker, data: bytes, expected: str
) -> None:
    with connected_link(transport, root) as (link, raw):
        join = in_thread(link.establish, new_worker().options, monotonic() + TIMEOUT_S)
        raw.sendall(data)
        with pytest.raises(ProtocolError, match=expected):
            join()


def test_frames_right_behind_setup_done_stay_for_the_reader(
    transport: UnixTransport, root: Path, new_worker: NewWorker
) -> None:
    """The poller sees them only as long as they are in the socket."""
    with connected_link(transport, root) as (link, raw):
        join = in_thread(link.establish, new_worker().options, monotonic() + TIMEOUT_S)
        raw.sendall(setup_done(0) + b"\x05\0\0\0frame")
        join()
        assert receive(link) == b"frame"


# A hostile ring


@needs_rings
@pytest.mark.parametrize("kind", ["positions", "sizes", "everything"])
def test_garbage_in_the_ring_breaks_the_link(listener: UnixListener, new_worker: NewWorker, kind: str) -> None:
    with accepted_link(listener, new_worker()) as (raw, link), ring_descriptors() as descriptors:
        socket.send_fds(raw, [setup()], descriptors)
        assert link.wait(TIMEOUT_S)
        assert link.receive() == []
        memory = descriptors[0]
        if kind == "positions":
            os.pwrite(memory, (1 << 40).to_bytes(8, "little"), 0)
        elif kind == "sizes":
            os.pwrite(memory, b"\xff" * 64, 4096)
            os.pwrite(memory, (64).to_bytes(8, "little"), 0)
        else:
            os.pwrite(memory, Random(1).randbytes(rings.mapping_size(RING_BYTES)), 0)
        assert link.wait(TIMEOUT_S)
        with pytest.raises(ProtocolError):
            link.receive()


@needs_rings
def test_internal_frames_in_pieces_are_bounded(
    transport: UnixTransport, listener: UnixListener, new_worker: NewWorker
) -> None:
    pair = LinkPair(*open_links(transport, listener), new_worker(), new_worker())
    establish(pair)
    assert isinstance(pair.ours, UnixLink)
    for number in range(100):  # each begins one more
        assert pair.ours.ring.send_internal(struct.pack("<BBxxI", 11, 0, number) + b"piece")
    with pytest.raises(ProtocolError, match="internal frames that do not end"):
        pair.theirs.receive()
    pair.close()


@needs_rings
def test_frames_of_the_handshake_never_go_through_the_ring(
    transport: UnixTransport, listener: UnixListener, new_worker: NewWorker
) -> None:
    """No memory is shared before both ends have proved who they are."""
    ours, theirs = open_links(transport, listener)
    before = descriptor_count()
    exchange(ours, theirs)
    theirs.establish(new_worker().options)
    assert not has_ring(ours)
    assert not has_ring(theirs)
    assert descriptor_count() == before + 6  # the poller of the new worker
    for link in (ours, theirs):
        link.close()
