"""Large frames in chunks: they are put together in whatever order chunks come, and a sender that lies is refused."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.errors import ProtocolError
from farcall.transports.base import Frame
from farcall.transports.large_frames import (
    _MAX_UNFINISHED,
    CHUNK_HEADER_SIZE,
    MAX_BUFFERS,
    Assembler,
    chunks_of,
    pack_announcement,
    pack_chunk_header,
    pack_inline,
    pack_supply,
    sizes_of,
    unpack_inline,
)

LIMIT = 1 << 20


def new_buffer(size: int) -> memoryview:
    return memoryview(bytearray(size))


def contents(frame: Frame | None) -> tuple[bytes, list[bytes]] | None:
    return None if frame is None else (bytes(frame[0]), [bytes(buffer) for buffer in frame[1]])


def views(buffers: Sequence[bytes]) -> list[memoryview]:
    return [memoryview(buffer) for buffer in buffers]


some_frames = st.tuples(st.binary(max_size=100), st.lists(st.binary(max_size=60), max_size=4))


@given(some_frames)
def test_inline_frames_come_out_as_they_went_in(sent: tuple[bytes, list[bytes]]) -> None:
    frame, buffers = sent
    received = unpack_inline(pack_inline(frame, views(buffers)) + b"".join((frame, *buffers)), LIMIT)
    assert contents(received) == sent
    assert not any(buffer.readonly for buffer in received[1])


@given(st.lists(some_frames, min_size=1, max_size=4), st.integers(1, 40), st.randoms())
def test_frames_come_whole_whatever_goes_between_their_chunks(
    sent: list[tuple[bytes, list[bytes]]], chunk_bytes: int, random: Random
) -> None:
    assembler = Assembler(new_buffer, LIMIT)
    rest: dict[int, list[bytes]] = {}
    for number, (frame, buffers) in enumerate(sent):
        chunks = chunks_of(frame, views(buffers), chunk_bytes)
        rest[number] = [pack_chunk_header(number) + bytes(chunk) for chunk in chunks]
    received = {}
    for number, (frame, buffers) in enumerate(sent):
        whole = assembler.announce(pack_announcement(number, frame, views(buffers)))
        assert (whole is not None) == (not rest[number])
        if whole is not None:
            received[number] = contents(whole)
            del rest[number]
    while rest:
        number = random.choice(sorted(rest))
        whole = assembler.add_chunk(rest[number].pop(0))
        assert (whole is not None) == (not rest[number])
        if whole is not None:
            received[number] = contents(whole)
            del rest[number]
    assert received == dict(enumerate(sent))


def test_chunks_end_where_the_frame_or_a_buffer_ends() -> None:
    chunks = [bytes(chunk) for chunk in chunks_of(b"frame", views([b"", b"12345678"]), 4)]
    assert chunks == [b"fram", b"e", b"1234", b"5678"]


def test_buffers_that_were_asked_for_complete_their_frame() -> None:
    asked: list[tuple[int, list[bytes]]] = []

    def complete(segment: int, buffers: Sequence[memoryview]) -> Frame:
        asked.append((segment, [bytes(buffer) for buffer in buffers]))
        return b"the frame", buffers

    assembler = Assembler(new_buffer, LIMIT, complete)
    assert assembler.announce(pack_supply(1, 77, views([b"one", b"two"]))) is None
    assert assembler.add_chunk(pack_chunk_header(1) + b"one") is None
    assert contents(assembler.add_chunk(pack_chunk_header(1) + b"two")) == (b"the frame", [b"one", b"two"])
    assert asked == [(77, [b"one", b"two"])]


def test_buffers_that_nobody_can_ask_for_are_refused() -> None:
    assembler = Assembler(new_buffer, LIMIT)
    assembler.announce(pack_supply(1, 77, views([b"one"])))
    with pytest.raises(ProtocolError, match="not asked for"):
        assembler.add_chunk(pack_chunk_header(1) + b"one")


# Senders that lie


@pytest.mark.parametrize("cut", [1, 7, 8, 15])
def test_headers_that_are_too_short_are_refused(cut: int) -> None:
    with pytest.raises(ProtocolError, match="too short"):
        unpack_inline(pack_inline(b"", views([b"buffer"]))[:cut], LIMIT)
    with pytest.raises(ProtocolError, match="too short"):
        Assembler(new_buffer, LIMIT).announce(pack_announcement(1, b"frame", [])[:cut])
    with pytest.raises(ProtocolError, match="too short"):
        Assembler(new_buffer, LIMIT).add_chunk(pack_chunk_header(1)[: min(cut, CHUNK_HEADER_SIZE - 1)])


@pytest.mark.parametrize("change", [-1, 1])
def test_inline_frames_whose_sizes_do_not_add_up_are_refused(change: int) -> None:
    data = pack_inline(b"frame", views([b"buffer"])) + b"framebuffer!"
    with pytest.raises(ProtocolError, match="do not add up"):
        unpack_inline(data[: len(data) - 1 + change], LIMIT)


def test_frames_beyond_the_limit_are_refused_before_any_memory_is_taken() -> None:
    def refuse(size: int) -> memoryview:
        raise AssertionError("memory was taken")

    assembler = Assembler(refuse, LIMIT)
    for sizes in ((LIMIT + 1,), (0, LIMIT + 1), (1, LIMIT // 2, LIMIT // 2), (0, 1 << 63, 1 << 63)):
        with pytest.raises(ProtocolError, match="max_message_size"):
            assembler.announce(struct.pack(f"<BBHI{len(sizes)}Q", 2, 0, len(sizes) - 1, 1, *sizes))
        with pytest.raises(ProtocolError, match="max_message_size"):
            unpack_inline(struct.pack(f"<BBHI{len(sizes)}Q", 1, 0, len(sizes), 0, *sizes), LIMIT)


def test_memory_is_taken_as_bytes_come() -> None:
    taken: list[int] = []

    def note(size: int) -> memoryview:
        taken.append(size)
        return new_buffer(size)

    assembler = Assembler(note, LIMIT)
    assembler.announce(pack_announcement(1, b"frame", views([b"1234", b"56"])))
    assert taken == [5]
    assembler.add_chunk(pack_chunk_header(1) + b"frame")
    assert taken == [5, 4]
    assembler.add_chunk(pack_chunk_header(1) + b"1234")
    assert taken == [5, 4, 2]


def test_memory_that_is_not_to_be_had_is_a_protocol_error() -> None:
    def fail(size: int) -> memoryview:
        raise MemoryError("there is no memory")

    with pytest.raises(ProtocolError, match="there is no memory"):
        Assembler(fail, LIMIT).announce(pack_announcement(1, b"frame", []))


def test_chunks_that_do_not_fit_are_refused() -> None:
    assembler = Assembler(new_buffer, LIMIT)
    with pytest.raises(ProtocolError, match="chunk of frame 1, which it has not announced"):
        assembler.add_chunk(pack_chunk_header(1) + b"x")
    assembler.announce(pack_announcement(1, b"frame", views([b"buffer"])))
    for data in (b"", b"framed", b"framebuffer"):
        with pytest.raises(ProtocolError, match="does not fit into its frame"):
            assembler.add_chunk(pack_chunk_header(1) + data)
    assembler.add_chunk(pack_chunk_header(1) + b"frame")
    assert contents(assembler.add_chunk(pack_chunk_header(1) + b"buffer")) == (b"frame", [b"buffer"])
    with pytest.raises(ProtocolError, match="not announced"):
        assembler.add_chunk(pack_chunk_header(1) + b"x")


def test_a_frame_cannot_be_announced_twice() -> None:
    assembler = Assembler(new_buffer, LIMIT)
    assembler.announce(pack_announcement(1, b"frame", []))
    with pytest.raises(ProtocolError, match="announced frame 1 twice"):
        assembler.announce(pack_announcement(1, b"frame", []))


def test_frames_under_way_are_bounded() -> None:
    assembler = Assembler(new_buffer, LIMIT)
    for number in range(_MAX_UNFINISHED):
        assembler.announce(pack_announcement(number, b"frame", []))
    with pytest.raises(ProtocolError, match="too many frames at once"):
        assembler.announce(pack_announcement(_MAX_UNFINISHED, b"frame", []))


def test_a_frame_with_too_many_buffers_is_an_error_of_its_sender() -> None:
    assert len(sizes_of([memoryview(b"")] * MAX_BUFFERS)) == 8 * MAX_BUFFERS
    with pytest.raises(ValueError, match="at most 65535 are allowed"):
        pack_announcement(1, b"", [memoryview(b"")] * (MAX_BUFFERS + 1))
