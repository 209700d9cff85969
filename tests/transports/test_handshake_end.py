"""The two ends of a link are not established at the same moment: what one sends early reaches the other whole."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from farcall.errors import ProtocolError
from farcall.transports.base import LinkOptions
from farcall.transports.stream import StreamLink

NewPair = Callable[[], tuple[StreamLink, StreamLink]]
EARLY = [
    pytest.param(b"control", [], id="small"),
    pytest.param(b"c" * 5000, [], id="larger than a frame of a handshake"),
    pytest.param(b"call", [b"array" * 100], id="with a buffer"),
    pytest.param(b"call", [b"array" * 30_000], id="in chunks"),
]


def receive(link: StreamLink) -> tuple[bytes, list[bytes]]:
    while not (frames := link.receive()):
        pass
    ((frame, buffers),) = frames
    return bytes(frame), [bytes(buffer) for buffer in buffers]


@pytest.mark.parametrize(("frame", "buffers"), EARLY)
def test_frames_behind_the_handshake_are_received_once_the_link_is_established(
    new_pair: NewPair, options: LinkOptions, frame: bytes, buffers: list[bytes]
) -> None:
    one, other = new_pair()
    one.send(b"proof")
    one.send(b"welcome")
    one.establish(options)
    one.send(frame, [memoryview(buffer) for buffer in buffers])
    assert [receive(other), receive(other)] == [(b"proof", []), (b"welcome", [])]
    other.establish(options)
    assert other.wait(1.0)
    assert receive(other) == (frame, buffers)


def test_a_handshake_may_come_byte_by_byte(new_pair: NewPair) -> None:
    one, other = new_pair()
    copy, reader = new_pair()
    one.send(b"hello")
    sent = os.read(other.fileno(), 1000)
    for at in range(len(sent)):
        assert reader.receive() == []
        os.write(copy.fileno(), sent[at : at + 1])
    assert reader.receive() == [(b"hello", ())]
    assert reader.receive() == []


def test_an_internal_frame_before_the_end_of_the_handshake_is_refused(new_pair: NewPair, options: LinkOptions) -> None:
    one, other = new_pair()
    one.establish(options)
    one.send(b"frame", [memoryview(b"buffer")])
    with pytest.raises(ProtocolError, match="sent an internal frame before its handshake was over"):
        other.receive()
