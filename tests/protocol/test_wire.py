"""Messages as bytes: any messages, in any chunking, come out as they went in; what is no message is refused."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from farcall.errors import ProtocolError
from farcall.protocol import wire
from farcall.protocol.wire import (
    CALL,
    CONTROL,
    FAILURE,
    HEADER,
    LARGE,
    MAX_BUFFERS,
    MAX_HEAD,
    MAX_MESSAGE,
    REMOTE,
    RESULT,
    Decoder,
    Message,
    as_shared,
    encode,
    encode_returned,
    encode_shared,
    encode_start,
    unanswered,
)

Plain = tuple[int, int, bytes, bytes, list[bytes]]


def plain(message: Message) -> Plain:
    """A message with all its bytes as `bytes`, to be compared."""
    kind, call_id, head, body, buffers = message
    assert isinstance(head, bytes)
    return kind, call_id, head, bytes(body), [bytes(buffer) for buffer in buffers]


def encoded(message: Plain) -> bytes:
    kind, call_id, head, body, buffers = message
    if buffers:
        return encode_start(kind, call_id, head, body, [memoryview(b) for b in buffers]) + b"".join(buffers)
    return encode(kind, call_id, head, body)


def decoded(stream: bytes, sizes: Iterator[int], into_space: Iterator[int]) -> list[Plain]:
    """What a decoder makes of the stream: fed in chunks of these sizes, or into its space as much at a time."""
    decoder = Decoder()
    messages: list[Plain] = []
    at = 0
    while at < len(stream):
        space = decoder.space
        if space is None:
            chunk = stream[at : at + next(sizes)]
            messages += map(plain, decoder.feed(chunk))
            at += len(chunk)
        else:
            count = min(space.nbytes, next(into_space), len(stream) - at)
            space[:count] = stream[at : at + count]
            messages += map(plain, decoder.filled(count))
            at += count
    assert decoder.space is None
    assert decoder.feed(b"") == []
    return messages


def header(kind: int = CALL, flags: int = 0, count: int = 0, head: int = 0, body: int = 0) -> bytes:
    return HEADER.pack(kind, flags, count, head, body, 1)


def for_ever(*sizes: int) -> Iterator[int]:
    while True:
        yield from sizes


kinds = st.sampled_from([CALL, RESULT, FAILURE])
ids = st.integers(0, 2**64 - 1)
some_bytes = st.one_of(
    st.binary(max_size=40),
    st.builds(
        lambda byte, size: bytes([byte]) * size, st.integers(0, 255), st.sampled_from([LARGE, LARGE + 1, 70_000])
    ),
)
messages_strategy = st.lists(
    st.tuples(kinds, ids, some_bytes, some_bytes, st.one_of(st.just([]), st.lists(some_bytes, max_size=4))), max_size=5
)
# At last a large one, so that a large message does not take a million steps.
chunks = st.lists(st.integers(1, 1000), max_size=6).map(lambda sizes: [*sizes, 40_000])


@given(messages_strategy, chunks, chunks)
@settings(deadline=None)
def test_any_messages_in_any_chunking_come_out_as_they_went_in(
    messages: list[Plain], sizes: list[int], into_space: list[int]
) -> None:
    stream = b"".join(map(encoded, messages))
    assert decoded(stream, for_ever(*sizes), for_ever(*into_space)) == messages


SMALL: list[Plain] = [
    (CALL, 1, b"head", b"body", []),
    (RESULT, 2**64 - 1, b"", b"", []),
    (CALL, 3, b"h", b"b", [b"one", b"", b"three"]),
    (FAILURE, 0, b"", b"x", []),
    (RESULT, 5, b"", b"", [b"", b""]),
    (CALL, 6, b"", b"", [b"only a buffer"]),
]


@pytest.mark.parametrize("size", range(1, 60))
def test_every_small_chunking(size: int) -> None:
    stream = b"".join(map(encoded, SMALL))
    assert decoded(stream, for_ever(size), for_ever(size)) == SMALL


def test_every_split_in_two() -> None:
    stream = b"".join(map(encoded, SMALL))
    for at in range(1, len(stream)):
        assert decoded(stream, iter([at, len(stream)]), for_ever(3)) == SMALL


@pytest.mark.parametrize("size", [0, 1, LARGE - 1, LARGE, LARGE + 1])
@pytest.mark.parametrize("place", ["head", "body", "buffer"])
def test_the_border_of_large(size: int, place: str) -> None:
    data = b"\x5a" * size
    before: Plain = (CALL, 1, b"before", b"", [])
    message: Plain = (
        CALL,
        2,
        data if place == "head" else b"h",
        data if place == "body" else b"b",
        [data, b"last"] if place == "buffer" else [],
    )
    stream = encoded(before) + encoded(message) + encoded(before)
    expected = [before, message, before]
    assert decoded(stream, iter([len(stream)]), for_ever(1)) == expected  # all at once
    assert decoded(stream, for_ever(len(encoded(before)) + HEADER.size), for_ever(1000)) == expected


@pytest.mark.parametrize(("head", "body"), [(0, LARGE), (LARGE, 0)])
def test_a_message_is_large_from_the_first_byte_beyond_the_border(head: int, body: int) -> None:
    small, large = Decoder(), Decoder()
    small.feed(header(head=head, body=body))
    large.feed(header(head=head and head + 1, body=body and body + 1))
    assert small.space is None
    assert large.space is not None


def test_a_large_message_is_received_into_its_final_place() -> None:
    decoder = Decoder()
    body = bytes(range(256)) * 1024
    stream = encode(RESULT, 9, b"", body)
    assert decoder.feed(stream[:1000]) == []
    space = decoder.space
    assert space is not None
    assert space.nbytes == len(stream) - 1000, "all of the rest fits"
    space[:] = stream[1000:]
    ((kind, call_id, head, received, buffers),) = decoder.filled(len(stream) - 1000)
    assert (kind, call_id, head, bytes(received), list(buffers)) == (RESULT, 9, b"", body, [])
    assert decoder.space is None
    assert isinstance(received, memoryview)
    assert received.obj is space.obj, "not copied again"
    assert decoder._large is None, "its memory is the receiver's alone"


def test_each_buffer_has_memory_of_its_own_that_may_be_written() -> None:
    decoder = Decoder()
    big, small = b"b" * (LARGE * 2), b"small"
    stream = encode_start(RESULT, 1, b"", b"body", [memoryview(big), memoryview(small)])
    assert decoder.feed(stream) == []
    spaces = []
    messages: list[Message] = []
    for part in (big, small):
        space = decoder.space
        assert space is not None
        assert space.nbytes == len(part)
        spaces.append(space)
        space[:] = part
        messages += decoder.filled(len(part))
    ((_, _, _, _, buffers),) = messages
    assert [buffer is space.obj for buffer, space in zip(buffers, spaces, strict=True)] == [True, True]
    assert all(isinstance(buffer, bytearray) for buffer in buffers)


def test_the_table_of_sizes_may_be_split_anywhere() -> None:
    message: Plain = (CALL, 7, b"h", b"b", [bytes([number]) * number for number in range(10)])
    stream = encoded(message)
    for at in range(1, HEADER.size + 8 * 10 + 1):
        assert decoded(stream, iter([at, len(stream)]), for_ever(5)) == [message]


def test_as_many_buffers_as_there_may_be() -> None:
    message: Plain = (CALL, 7, b"", b"b", [b"x"] * MAX_BUFFERS)
    assert decoded(encoded(message), for_ever(100_000), for_ever(1)) == [message]
    with pytest.raises(ProtocolError, match=f"has {MAX_BUFFERS + 1} out-of-band buffers; at most {MAX_BUFFERS}"):
        encode_start(CALL, 1, b"", b"", [memoryview(b"")] * (MAX_BUFFERS + 1))


def test_the_layout() -> None:
    assert encode(RESULT, 0x0102, b"he", b"body") == (
        b"\2\0" + b"\0\0" + b"\2\0\0\0" + b"\4\0\0\0\0\0\0\0" + b"\2\1\0\0\0\0\0\0" + b"he" + b"body"
    )
    buffers = [memoryview(b"abc"), memoryview(struct.pack("<2Q", 1, 2)).cast("Q")]
    assert encode_start(CALL, 1, b"h", b"b", buffers) == (
        b"\1\0" + b"\2\0" + b"\1\0\0\0" + b"\1\0\0\0\0\0\0\0" + b"\1\0\0\0\0\0\0\0" + struct.pack("<2Q", 3, 16) + b"hb"
    ), "sizes are in bytes, whatever the items are"
    assert encode_shared(CALL, 1, b"h", b"b", [3, 16], 0x0A0B, 7) == (
        b"\1\1"
        + b"\2\0"
        + b"\1\0\0\0"
        + b"\1\0\0\0\0\0\0\0"
        + b"\1\0\0\0\0\0\0\0"
        + struct.pack("<2Q", 3, 16)
        + b"\x0b\x0a\0\0"
        + b"\7\0\0\0"
        + b"hb"
    )
    assert encode_returned(RESULT, 1, b"h", b"b", [3, 16], 7, [64, 0]) == (
        b"\2\4"
        + b"\2\0"
        + b"\1\0\0\0"
        + b"\1\0\0\0\0\0\0\0"
        + b"\1\0\0\0\0\0\0\0"
        + struct.pack("<2Q", 3, 16)
        + b"\7\0\0\0\0\0\0\0"
        + struct.pack("<2Q", 64, 0)
        + b"hb"
    )
    assert HEADER.size == 24


def test_a_message_with_buffers_can_be_told_to_have_them_in_shared_memory() -> None:
    buffers = [memoryview(b"abc"), memoryview(bytes(16))]
    whole = encode_start(REMOTE, 0, b"head", b"body", buffers)
    shared = encode_shared(REMOTE, 0, b"head", b"body", [3, 16], 12, 34)
    assert as_shared(whole, 12, 34) == shared
    before = encode(CONTROL, 0, b"", b"letters") + encode(CONTROL, 0, b"x", b"")
    assert as_shared(before + whole, 12, 34) == before + shared


@pytest.mark.parametrize("way", ["shared", "returned"])
@pytest.mark.parametrize("body", [b"", b"body", b"b" * (LARGE + 1)])
def test_buffers_in_shared_memory_are_asked_for_once_however_the_message_is_split(body: bytes, way: str) -> None:
    asked: list[tuple[object, ...]] = []

    def found(*where: Any) -> list[memoryview]:
        asked.append(tuple(list(each) if isinstance(each, tuple) else each for each in where))
        return [memoryview(bytes(size)) for size in where[-1]]

    sizes = [5, 0, LARGE]
    if way == "shared":
        stream, place = encode_shared(RESULT, 9, b"head", body, sizes, 12, 34), (12, 34, sizes)
    else:
        stream, place = (
            encode_returned(RESULT, 9, b"head", body, sizes, 34, [0, 64, 1 << 40]),
            (34, [0, 64, 1 << 40], sizes),
        )
    stream += encode(CALL, 1, b"next", b"")
    for at in range(1, min(len(stream), 150)):
        decoder = Decoder()
        setattr(decoder, way, found)
        messages: list[Message] = []
        for rest in (stream[:at], stream[at:]):
            while rest:
                space = decoder.space
                if space is None:
                    messages += decoder.feed(rest)
                    break
                count = min(space.nbytes, len(rest))
                space[:count] = rest[:count]
                messages += decoder.filled(count)
                rest = rest[count:]
        buffers = [bytes(5), b"", bytes(LARGE)]
        assert list(map(plain, messages)) == [(RESULT, 9, b"head", body, buffers), (CALL, 1, b"next", b"", [])]
        assert asked == [place]
        asked.clear()


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (header(kind=0), r"unknown kind 0 \(flags 0\)"),
        (header(kind=14), r"unknown kind 14 \(flags 0\)"),
        (header(kind=255, count=2) + bytes(16), "unknown kind 255"),
        (header(flags=1), r"unknown kind 1 \(flags 1\)"),
        (header(flags=3, count=1) + bytes(16), r"unknown kind 1 \(flags 3\)"),
        (header(flags=4), r"unknown kind 1 \(flags 4\)"),
        (header(flags=5, count=1) + bytes(24), r"unknown kind 1 \(flags 5\)"),
        (header(flags=6, count=1) + bytes(24), r"unknown kind 1 \(flags 6\)"),
        (header(flags=8, count=1) + bytes(24), r"unknown kind 1 \(flags 8\)"),
        (header(kind=13, flags=4, count=1) + bytes(24), r"unknown kind 13 \(flags 4\)"),
        (header(flags=4, count=1) + bytes(24), "said to be in shared memory of this side, which are not"),
        (header(flags=4, count=1) + struct.pack("<3Q", MAX_MESSAGE + 1, 1, 0), f"a message of {MAX_MESSAGE + 1} bytes"),
        (header(kind=13, flags=1, count=1) + bytes(16), r"unknown kind 13 \(flags 1\)"),
        (header(flags=1, count=1) + bytes(16), "in shared memory, of which there is none here"),
        (
            header(flags=1, count=1) + struct.pack("<QII", MAX_MESSAGE + 1, 1, 1),
            f"a message of {MAX_MESSAGE + 1} bytes",
        ),
        (header(head=MAX_HEAD + 1), f"a head of {MAX_HEAD + 1} bytes was announced"),
        (header(body=MAX_MESSAGE + 1), f"a message of {MAX_MESSAGE + 1} bytes"),
        (header(body=2**64 - 1), f"a message of {2**64 - 1} bytes"),
        (header(count=2) + struct.pack("<2Q", MAX_MESSAGE, 1), f"a message of {MAX_MESSAGE + 1} bytes"),
    ],
)
def test_what_cannot_be_a_message_is_refused(stream: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        Decoder().feed(stream)


def test_a_message_of_unknown_kind_is_refused_as_soon_as_its_header_is_there() -> None:
    with pytest.raises(ProtocolError, match="unknown kind 71"):
        Decoder().feed(header(kind=ord("G"), count=0xFFFF))


@given(st.lists(st.one_of(st.binary(max_size=60), st.builds(header, kinds, count=st.integers(0, 3))), max_size=6))
@example([b"GET / HTTP/1.1\r\nHost: example\r\n\r\n"])
@settings(deadline=None)
def test_garbage_is_refused_with_our_error_or_waited_for(pieces: Sequence[bytes]) -> None:
    decoder = Decoder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MAX_MESSAGE", 1 << 20)  # garbage may announce much; this machine has only so much memory
        try:
            for piece in pieces:
                rest = piece
                while rest:
                    if decoder.space is None:
                        decoder.feed(rest)
                        break
                    count = min(decoder.space.nbytes, len(rest))
                    decoder.space[:count] = rest[:count]
                    decoder.filled(count)
                    rest = rest[count:]
        except ProtocolError:
            pass


def test_a_message_that_is_sent_again_has_no_call_id() -> None:
    message = encode(REMOTE, (1 << 63) + 5, b"head", b"body")
    assert unanswered(message) == encode(REMOTE, 0, b"head", b"body")
    view = memoryview(b"buffer")
    assert unanswered(encode_start(REMOTE, 5, b"h", b"b", [view])) == encode_start(REMOTE, 0, b"h", b"b", [view])
