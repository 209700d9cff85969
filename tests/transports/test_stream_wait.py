"""The wait on a socket: a thread spins before it sleeps, but only if its last wait was short."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator

import pytest

from farcall.protocol.handshake import pack_prologue
from farcall.transports import stream
from farcall.transports.base import LinkOptions
from farcall.transports.large_frames import CHUNK_HEADER_SIZE, pack_announcement, pack_chunk_header
from farcall.transports.stream import INTERNAL, WORD, StreamLink

LONG_S = 30.0


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The sleeps so far, in seconds. A sleep ends at once."""
    asked: list[float] = []

    def sleep(poll: select.poll, seconds: float) -> bool:
        asked.append(seconds)
        return bool(poll.poll(0))

    monkeypatch.setattr(stream, "sleep_in_poll", sleep)
    return asked


@pytest.fixture
def ends(options: LinkOptions) -> Iterator[tuple[StreamLink, socket.socket]]:
    """An established link that spins for a long time, and the socket at its other end."""
    ours, theirs = socket.socketpair()
    link = StreamLink(ours, "nowhere", 1 << 16)
    link.establish(options._replace(spin_s=LONG_S))
    with theirs:
        yield link, theirs
        link.close()


def test_a_thread_sleeps_at_once_if_no_wait_was_short_before(
    ends: tuple[StreamLink, socket.socket], sleeps: list[float]
) -> None:
    assert ends[0].wait(0.0) is False
    assert len(sleeps) == 1


def test_a_thread_spins_after_a_short_wait(
    ends: tuple[StreamLink, socket.socket], sleeps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, theirs = ends
    theirs.send(pack_prologue() + WORD.pack(1) + b"x")
    assert link.wait(LONG_S)
    assert link.receive() == [(b"x", ())]
    looks = iter(range(100))

    def send_after_some_looks() -> float:
        if next(looks) == 20:
            theirs.send(b"x")
        return time.monotonic()

    monkeypatch.setattr(stream, "monotonic", send_after_some_looks)
    assert link.wait(LONG_S)
    assert sleeps == []


def test_a_thread_sleeps_in_the_middle_of_a_large_frame(
    ends: tuple[StreamLink, socket.socket], sleeps: list[float]
) -> None:
    link, theirs = ends
    announcement = pack_announcement(1, bytes(200), ())
    chunk = WORD.pack((CHUNK_HEADER_SIZE + 200) | INTERNAL) + pack_chunk_header(1) + bytes(100)
    theirs.send(pack_prologue() + WORD.pack(len(announcement) | INTERNAL) + announcement + chunk)
    assert link.wait(LONG_S)
    assert link.receive() == []
    theirs.send(bytes(50))
    assert link.wait(LONG_S)
    assert link.receive() == []
    assert link.wait(0.0) is False
    assert len(sleeps) == 1
    theirs.send(bytes(50))
    assert link.wait(LONG_S)
    assert [bytes(frame) for frame, _ in link.receive()] == [bytes(200)]


def test_a_signal_handler_may_wait_while_its_thread_waits(
    ends: tuple[StreamLink, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, theirs = ends
    inner: list[bool] = []

    def sleep(poll: select.poll, seconds: float) -> bool:
        theirs.send(b"x")
        inner.append(link.wait(LONG_S))
        return bool(poll.poll(0))

    monkeypatch.setattr(stream, "sleep_in_poll", sleep)
    assert link.wait(LONG_S)
    assert inner == [True]
