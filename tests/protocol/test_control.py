"""Reference messages as bytes: whatever is packed is unpacked the same, and what cannot be one is refused."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.errors import ProtocolError
from farcall.protocol.control import (
    HANDLE_SIZE,
    MOST_HANDLES,
    encode_remote,
    pack_control,
    pack_handle,
    pack_remote,
    pack_section,
    unpack_control,
    unpack_handle,
    unpack_remote,
    unpack_section,
)
from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_messages import (
    Carried,
    ChildAccepted,
    CreateRequest,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    UserDeleted,
)
from farcall.protocol.wire import MAX_HEAD, REMOTE, encode

workers = st.integers(0, 2**32 - 1)
numbers = st.integers(0, 2**64 - 1)
references = st.builds(RRefId, workers, workers, numbers)
forks = st.builds(ForkId, workers, numbers)
kinds = st.sampled_from([CreateRequest, ForkRequest, ForkAccepted, ForkRefused, ChildAccepted, UserDeleted])
messages: Any = st.tuples(kinds, references, forks).map(lambda parts: parts[0](*parts[1:]))
carried = st.builds(Carried, references, forks)


@given(numbers, st.lists(st.tuples(numbers, messages), max_size=20))
def test_control_messages_come_out_as_they_went_in(acknowledged: int, sent: list[Any]) -> None:
    for convert in (bytes, bytearray, memoryview):
        upto, received = unpack_control(convert(pack_control(acknowledged, sent)))
        assert upto == acknowledged
        assert received == sent
        assert [type(message) for _, message in received] == [type(message) for _, message in sent]
        assert all(type(m.reference) is RRefId and type(m.fork) is ForkId for _, m in received)


@given(numbers, st.lists(carried, max_size=20), st.binary())
def test_sections_come_out_as_they_went_in(number: int, handles: list[Carried], rest: bytes) -> None:
    found = unpack_section(pack_section(number, handles) + rest)
    assert found == (number, handles, rest)
    assert all(type(handle) is Carried for handle in found[1])


@given(numbers, st.lists(carried, max_size=20), references, forks, st.binary())
def test_remote_calls_come_out_as_they_went_in(
    number: int, handles: list[Carried], reference: RRefId, fork: ForkId, rest: bytes
) -> None:
    packed = pack_remote(number, handles, reference, fork)
    assert packed == pack_section(number, handles) + pack_handle(reference, fork), "one layout, with handles or without"
    found = unpack_remote(packed + rest)
    assert found == (number, handles, reference, fork, rest)
    assert (type(found[2]), type(found[3])) == (RRefId, ForkId)


@given(numbers, numbers, references, forks, st.binary(), st.binary())
def test_a_remote_call_that_carries_nothing_is_encoded_as_any_other(
    call_id: int, number: int, reference: RRefId, fork: ForkId, callee: bytes, body: bytes
) -> None:
    head = pack_remote(number, [], reference, fork) + callee
    assert encode_remote(call_id, number, reference, fork, callee, body) == encode(REMOTE, call_id, head, body)


@given(references, forks, st.binary())
def test_handles_come_out_as_they_went_in(reference: RRefId, fork: ForkId, rest: bytes) -> None:
    packed = pack_handle(reference, fork)
    assert len(packed) == HANDLE_SIZE == 28
    assert unpack_handle(packed + rest) == (reference, fork, rest)


@given(st.binary(max_size=400))
def test_noise_is_refused_or_understood_and_nothing_else(data: bytes) -> None:
    for unpack in (unpack_control, unpack_section, unpack_handle, unpack_remote):
        try:
            found = unpack(data)  # type: ignore[operator]
        except ProtocolError:
            continue
        if unpack is unpack_control:
            assert pack_control(*found) == data
        elif unpack is unpack_section:
            assert pack_section(*found[:2]) + found[2] == data
        elif unpack is unpack_remote:
            assert pack_remote(*found[:4]) + found[4] == data
        else:
            assert pack_handle(*found[:2]) + found[2] == data


@given(st.lists(st.tuples(numbers, messages), min_size=1, max_size=3), st.data())
def test_a_control_message_that_was_cut_is_refused(sent: list[Any], data: st.DataObject) -> None:
    whole = pack_control(1, sent)
    end = data.draw(st.integers(0, len(whole) - 1).filter(lambda size: (size - 8) % 37))
    with pytest.raises(ProtocolError, match=rf"a control message of {end} bytes came, which cannot be"):
        unpack_control(whole[:end])


@given(st.lists(carried, min_size=1, max_size=3), st.data())
def test_a_section_that_was_cut_is_refused(handles: list[Carried], data: st.DataObject) -> None:
    whole = pack_section(1, handles)
    with pytest.raises(ProtocolError, match=r"has no place for them|does not carry as many"):
        unpack_section(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(st.lists(carried, max_size=3), st.data())
def test_the_front_of_a_remote_call_that_was_cut_is_refused(handles: list[Carried], data: st.DataObject) -> None:
    whole = pack_remote(1, handles, RRefId(1, 2, 3), ForkId(4, 5))
    with pytest.raises(ProtocolError, match=r"has no place for them|does not carry as many|does not say which"):
        unpack_remote(whole[: data.draw(st.integers(0, len(whole) - 1))])


@pytest.mark.parametrize("size", [0, 1, HANDLE_SIZE - 1])
def test_a_handle_that_was_cut_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match="does not say which"):
        unpack_handle(bytes(size))


@pytest.mark.parametrize("code", [6, 255])
def test_an_unknown_kind_is_refused(code: int) -> None:
    with pytest.raises(ProtocolError, match=f"unknown kind {code}"):
        unpack_control(struct.pack("<QQBIIQIQ", 0, 1, code, 0, 0, 1, 0, 1))


LAID_OUT = bytes.fromhex("01000000 02000000 0300000000000000 04000000 0500000000000000")
"""Reference 3 that worker 2 has made, of worker 1; fork 5 of worker 4."""


def test_the_layout() -> None:
    reference, fork = RRefId(1, 2, 3), ForkId(4, 5)
    section = bytes.fromhex("0900000000000000 0100") + LAID_OUT
    assert pack_handle(reference, fork) == LAID_OUT
    assert pack_section(9, [Carried(reference, fork)]) == section
    assert pack_remote(9, [Carried(reference, fork)], reference, fork) == section + LAID_OUT
    assert pack_remote(9, [], reference, fork) == bytes.fromhex("0900000000000000 0000") + LAID_OUT
    assert pack_control(7, []) == bytes.fromhex("0700000000000000")


@pytest.mark.parametrize(
    ("code", "kind"),
    [*enumerate([CreateRequest, ForkRequest, ForkAccepted, ForkRefused, ChildAccepted, UserDeleted])],
)
def test_the_number_of_each_kind(code: int, kind: Any) -> None:
    """Workers of other versions know them by it."""
    head = bytes.fromhex("0700000000000000 0600000000000000")
    assert pack_control(7, [(6, kind(RRefId(1, 2, 3), ForkId(4, 5)))]) == head + bytes([code]) + LAID_OUT


def test_a_section_with_as_many_handles_as_may_be_fits_into_a_head() -> None:
    """It must not fail: when it is made, the number of its message is taken. More are refused before, in the book."""
    handles = [Carried(RRefId(2**32 - 1, 2**32 - 1, 2**64 - 1), ForkId(2**32 - 1, 2**64 - 1))] * MOST_HANDLES
    section = pack_section(2**64 - 1, handles)
    assert unpack_section(section) == (2**64 - 1, handles, b"")
    assert len(section) + HANDLE_SIZE < MAX_HEAD
