"""Requests and replies as bytes, whole and in pieces."""

from __future__ import annotations

import pytest

from farcall.errors import ProtocolError, RendezvousError
from farcall.rendezvous import messages
from farcall.rendezvous.messages import (
    Add,
    Collect,
    Delete,
    Done,
    Entries,
    Failed,
    Get,
    GoodBye,
    Number,
    Read,
    Reply,
    Request,
    Set,
    SetNew,
    TimedOut,
    Value,
    pack_reply,
    pack_request,
    take_frame,
    unpack_reply,
    unpack_request,
)

REQUESTS = [
    Set(1, "k", b"v"),
    SetNew(2, "k", b""),
    Get(3, "k", 1.5),
    Add(4, "k", -7),
    Delete(5, "k"),
    Read(6, ""),
    Collect(7, "p/", 3, float("inf")),
    GoodBye(),
]
REPLIES = [Done(1), Value(2, b"\0"), Number(3, -1), Entries(4, {"k": b"v"}), TimedOut(5, ("a",)), Failed(6, "ß")]


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_request_arrives_as_it_was(request_: Request) -> None:
    frame = take_frame(bytearray(pack_request(request_)))
    assert frame is not None
    assert unpack_request(frame) == request_


@pytest.mark.parametrize("reply", REPLIES)
def test_a_reply_arrives_as_it_was(reply: Reply) -> None:
    frame = take_frame(bytearray(pack_reply(reply)))
    assert frame is not None
    assert unpack_reply(frame) == reply


def test_frames_are_taken_one_by_one_however_they_come() -> None:
    stream = pack_request(Delete(1, "a")) + pack_request(Delete(2, "b"))
    buffer, taken = bytearray(), []
    for byte in stream:
        buffer.append(byte)
        if (frame := take_frame(buffer)) is not None:
            taken.append(unpack_request(frame))
    assert taken == [Delete(1, "a"), Delete(2, "b")]
    assert not buffer


def test_a_length_beyond_the_limit_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(ProtocolError, match="4294967295 bytes was announced"):
        take_frame(bytearray(b"\xff\xff\xff\xff"))


def test_a_request_beyond_the_limit_is_refused_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 100)
    with pytest.raises(RendezvousError, match="too large for the store"):
        pack_request(Set(1, "k", bytes(101)))


def test_a_reply_beyond_the_limit_becomes_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 100)
    frame = take_frame(bytearray(pack_reply(Value(9, bytes(101)))))
    assert frame is not None
    reply = unpack_reply(frame)
    assert isinstance(reply, Failed)
    assert reply.id == 9


@pytest.mark.parametrize(
    "garbage", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa4what", b"\xa2\xff\xff", b"\x91" * 100_000]
)
def test_garbage_is_a_protocol_error(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_request(garbage)
    with pytest.raises(ProtocolError):
        unpack_reply(garbage)
