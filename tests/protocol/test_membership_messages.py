"""Messages about the group as bytes: read again as they were, and refused if they are none of ours."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.errors import ProtocolError
from farcall.protocol.membership_messages import (
    Ack,
    Alive,
    Compare,
    Member,
    Message,
    News,
    Ping,
    Probe,
    Wanted,
    decode,
    encode,
)
from farcall.protocol.ranges import LARGEST

numbers = st.integers(1, LARGEST)
digests = st.integers(0, 2**64 - 1)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
ranges = st.lists(st.tuples(numbers, numbers).map(lambda pair: (min(pair), max(pair))), max_size=4).map(tuple)
members = st.builds(
    Member,
    number=numbers,
    name=texts.filter(str.isprintable),
    rank=st.integers(-1, LARGEST),
    host=texts,
    addresses=st.lists(texts, max_size=3).map(tuple),
)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Ping, digest=digests),
    st.builds(Ack, digest=digests),
    st.builds(News, members=st.lists(members, max_size=3).map(tuple), left=ranges, lost=ranges),
    st.builds(Compare, here=ranges, gone=ranges),
    st.builds(Wanted, numbers=ranges),
    st.builds(Probe, targets=st.lists(numbers, max_size=4).map(tuple)),
    st.builds(Alive, target=numbers),
)


@given(messages)
def test_what_is_encoded_is_read_again(message: Message) -> None:
    again = decode(encode(message))
    assert again == message
    assert type(again) is type(message)


def test_a_ping_is_small() -> None:
    assert len(encode(Ping(2**64 - 1))) <= 11


@given(st.binary(max_size=40))
def test_other_bytes_are_refused(body: bytes) -> None:
    try:
        message = decode(body)
    except ProtocolError:
        return
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "content",
    [
        [99, 1],  # no such kind
        [6, -1],  # numbers begin at 0
        [6, LARGEST + 1],
        [5, [[2, 1]]],
        [4, [], [[7, 3]]],
        [3, [], [[7, 3]], []],
        [3, [], [], [[7, 3]]],
        [3, [[1, "a", 0]], [], []],  # half a member
        {"digest": 1},
    ],
)
def test_what_cannot_be_is_refused(content: object) -> None:
    with pytest.raises(ProtocolError, match="a message about the group's members"):
        decode(msgspec.msgpack.encode(content))
