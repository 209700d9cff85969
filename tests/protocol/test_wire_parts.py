"""Messages that come in parts: however they are cut and whatever comes in between, they come out as they went in."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.errors import ProtocolError
from farcall.protocol.wire import (
    CALL,
    HEADER,
    PART,
    RESULT,
    Decoder,
    Message,
    Sizes,
    encode,
    encode_in_parts,
    encode_part,
)


def parts_of(call_id: int, head: bytes, body: bytes, buffers: list[bytes], size: int) -> Iterator[bytes]:
    """A message, as it goes: its start, then parts of that size."""
    yield encode_in_parts(CALL, call_id, head, body, [memoryview(buffer) for buffer in buffers])
    for piece in (head, body, *buffers):
        for begin in range(0, len(piece), size):
            part = piece[begin : begin + size]
            yield encode_part(call_id, len(part)) + part


def decode(stream: bytes, chunks: Iterator[int]) -> list[Message]:
    decoder, messages, at = Decoder(), list[Message](), 0
    while at < len(stream):
        count = next(chunks)
        space = decoder.space
        if space is None:
            messages += decoder.feed(stream[at : at + count])
        else:
            count = min(count, space.nbytes, len(stream) - at)
            space[:count] = stream[at : at + count]
            messages += decoder.filled(count)
        at += count
    assert decoder.space is None
    return messages


CONTENTS = st.tuples(st.binary(max_size=30), st.binary(max_size=300), st.lists(st.binary(max_size=200), max_size=4))


@given(st.data(), st.lists(CONTENTS, min_size=1, max_size=4), st.integers(1, 120))
def test_any_interleaving_in_any_chunking(
    data: st.DataObject, contents: list[tuple[bytes, bytes, list[bytes]]], size: int
) -> None:
    under_way = {number: parts_of(number, *each, size) for number, each in enumerate(contents)}
    stream = b""
    between = 0
    while under_way:
        number = data.draw(st.sampled_from([*under_way, -1]))
        if number < 0:
            stream += encode(RESULT, 1000 + between, b"", b"small")
            between += 1
        elif (piece := next(under_way[number], None)) is None:
            del under_way[number]
        else:
            stream += piece
    chunks = data.draw(st.lists(st.integers(1, 200), min_size=1))
    messages = decode(stream, cycle(chunks))
    small = [message for message in messages if message[0] == RESULT]
    assert [(message[1], bytes(message[3])) for message in small] == [(1000 + n, b"small") for n in range(between)]
    large = {
        call_id: (head, bytes(body), [bytes(buffer) for buffer in buffers])
        for kind, call_id, head, body, buffers in messages
        if kind == CALL
    }
    assert large == dict(enumerate(contents))


def test_one_without_contents_is_whole_at_once() -> None:
    assert Decoder().feed(encode_in_parts(CALL, 3, b"", b"", [])) == [(CALL, 3, b"", b"", [])]


def test_its_parts_are_received_into_their_final_place() -> None:
    decoder = Decoder()
    assert decoder.feed(encode_in_parts(CALL, 3, b"", b"", [memoryview(bytes(1000))])) == []
    assert decoder.space is None
    decoder.feed(encode_part(3, 600) + b"a" * 100)
    assert decoder.space is not None
    assert decoder.space.nbytes == 500  # of the part, though the message is longer
    decoder.space[:] = b"b" * 500
    assert decoder.filled(500) == []
    assert decoder.space is None
    decoder.feed(encode_part(3, 400))
    space = decoder.space
    assert space is not None
    space[:] = b"c" * 400
    ((_, _, _, _, (buffer,)),) = decoder.filled(400)
    assert bytes(buffer) == b"a" * 100 + b"b" * 500 + b"c" * 400


BEGUN = encode_in_parts(CALL, 3, b"", b"", [memoryview(bytes(10))])


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (encode_part(3, 5), "had not begun, call 3"),
        (BEGUN + encode_part(4, 5), "had not begun, call 4"),
        (BEGUN + encode_part(3, 0), "a part of 0 bytes"),
        (BEGUN + BEGUN, "call 3, that had begun"),
        (BEGUN + encode_part(3, 11) + bytes(10), "longer than the rest"),
        (BEGUN + encode_part(3, 10) + bytes(10) + encode_part(3, 1), "had not begun"),
        (HEADER.pack(PART, 2, 0, 0, 5, 3), "unknown kind 13"),
        (HEADER.pack(CALL, 3, 1, 0, 5, 3), "flags 3"),
    ],
)
def test_what_cannot_be_is_refused(stream: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        Decoder().feed(stream)


def test_too_long_a_part_is_refused_when_it_goes_on() -> None:
    decoder = Decoder()
    decoder.feed(BEGUN + encode_part(3, 11))
    assert decoder.space is not None
    with pytest.raises(ProtocolError, match="longer than the rest"):
        decoder.filled(10)


def test_its_limits_are_those_of_any_message() -> None:
    decoder = Decoder()
    decoder.limits = Sizes(message=9)
    with pytest.raises(ProtocolError, match="max_message_size"):
        decoder.feed(BEGUN)


def test_not_too_many_at_once() -> None:
    decoder = Decoder()
    for call_id in range(4096):
        decoder.feed(encode_in_parts(CALL, call_id, b"", b"x", []))
    with pytest.raises(ProtocolError, match="too many"):
        decoder.feed(encode_in_parts(CALL, 4096, b"", b"x", []))
