"""Plain arrays without pickle: what arrives is what pickle would bring, and what is no such thing is left to pickle."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from payload_stage import train

from farcall.errors import NotAllowedError, SerializationError
from farcall.serialization import (
    OUT_OF_BAND_MIN_BYTES,
    arrays,
    dumps_arguments,
    dumps_result,
    loads,
    loads_arguments,
    loads_restricted,
)
from farcall.serialization.arrays import (
    ARRAYS_MARK,
    MAX_ARRAYS,
    pack_arguments,
    pack_array,
    unpack_arrays,
    unpack_small_array,
)

TYPES = ("?", "b", "B", "h", "H", "i", "I", "l", "L", "e", "f", "d", "F", "D")


class Everything:
    """Allows all names, and notes them."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def check_name(self, module: str, name: str) -> None:
        self.asked.append(f"{module}.{name}")

    def check_found(self, module: str, name: str, found: object) -> None:
        pass


class Nothing(Everything):
    def check_name(self, module: str, name: str) -> None:
        raise NotAllowedError(f"{module}.{name}")


@pytest.fixture(autouse=True)
def known() -> None:
    arrays.detect_numpy()


def received(buffers: Sequence[memoryview]) -> list[bytearray]:
    return [bytearray(buffer) for buffer in buffers]


def there(*args: Any) -> tuple[Any, ...]:
    """Arguments as they arrive."""
    body, buffers = dumps_arguments(train, args)
    assert body[0] == ARRAYS_MARK, "these go without pickle"
    found, named = loads_arguments(body, received(buffers))
    assert named == {}
    return found


def check_equal(found: Any, sent: Any) -> None:
    assert type(found) is np.ndarray
    assert found.dtype == sent.dtype
    assert found.shape == sent.shape
    assert found.flags.c_contiguous
    assert found.flags.aligned
    assert found.flags.writeable == sent.flags.writeable
    assert found.tobytes() == sent.tobytes()
    assert not np.shares_memory(found, sent)


@pytest.mark.parametrize("letter", TYPES)
@pytest.mark.parametrize("shape", [(3,), (), (2, 5), (1, 2, 3, 4), (5000, 8), (0,), (2, 0, 3)])
def test_an_array_arrives_as_it_was(letter: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(letter)
    (found,) = there(array)
    check_equal(found, array)
    body, buffers = dumps_result(train, array)
    assert body[0] == ARRAYS_MARK
    check_equal(loads(body, received(buffers)), array)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_several_arrays_arrive_each_in_its_place(data: st.DataObject) -> None:
    dtypes = st.sampled_from([np.dtype(letter) for letter in TYPES])
    shapes = arrays_of.array_shapes(max_dims=4, max_side=60)
    sent = tuple(data.draw(arrays_of.arrays(data.draw(dtypes), data.draw(shapes), fill=st.just(1))) for _ in range(3))
    for found, array in zip(there(*sent), sent, strict=True):
        check_equal(found, array)


def test_a_small_array_is_in_the_payload_and_a_large_one_beside_it_uncopied() -> None:
    small, large = np.zeros(OUT_OF_BAND_MIN_BYTES - 1, "u1"), np.zeros(OUT_OF_BAND_MIN_BYTES, "u1")
    assert pack_array(small)[1] == []  # type: ignore[index]
    body, (buffer,) = pack_array(large)  # type: ignore[misc]
    assert len(body) < 40
    large[7] = 3
    assert buffer[7] == 3
    memory = bytearray(buffer)
    found = unpack_arrays(body, [memory])
    found[0] = 9
    assert memory[0] == 9, "it uses the memory that came"
    with pytest.raises(BufferError):
        memory.append(0)


def test_what_cannot_be_written_to_arrives_so() -> None:
    for size in (10, 100_000):
        array = np.zeros(size)
        array.flags.writeable = False
        check_equal(there(array)[0], array)


class Kind(np.ndarray):
    pass


LEFT = {
    "columns first": np.ones((3, 4), order="F"),
    "with gaps": np.ones((4, 4))[:, ::2],
    "objects": np.array([None, "x"]),
    "records": np.zeros(3, "i4,f4"),
    "texts": np.array(["abc"]),
    "times": np.array(["2020-01-01"], "M8[D]"),
    "other byte order": np.ones(3, ">f8"),
    "a type with something attached": np.ones(3, np.dtype("f8", metadata={"unit": "m"})),
    "a subclass": np.ones(3).view(Kind),
    "many dimensions": np.ones((1,) * 9),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_arrays_are_left_to_pickle(name: str) -> None:
    array = LEFT[name]
    body, buffers = dumps_arguments(train, (array,))
    assert body[0] != ARRAYS_MARK
    ((found,), _) = loads_arguments(body, received(buffers))
    assert type(found) is type(array)
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert found.tolist() == array.tolist()


def test_what_is_not_arrays_alone_is_left_to_pickle() -> None:
    array = np.ones(3)
    for args in ((array, 1), (1, array), ([array],), (array, array), (array,) * (MAX_ARRAYS + 1)):
        assert dumps_arguments(train, args)[0][0] != ARRAYS_MARK
    assert dumps_arguments(train, (array,), {"rate": 1})[0][0] != ARRAYS_MARK
    (one, other), _ = loads_arguments(*dumps_arguments(train, (array, array)))
    assert one is other


def test_the_guard_is_asked_once_about_arrays() -> None:
    guard = Everything()
    array = np.arange(5)
    found = loads_restricted(*dumps_result(train, array), guard)
    assert found.tolist() == array.tolist()
    assert guard.asked == ["numpy.ndarray"]
    with pytest.raises(NotAllowedError):
        loads_restricted(*dumps_result(train, array), Nothing())


def packed(count: int, code: int, lengths: Sequence[int], contents: bytes = b"") -> bytes:
    return struct.pack(f"<BBBB{len(lengths)}Q", ARRAYS_MARK, count, code, len(lengths), *lengths) + contents


HOSTILE = {
    "nothing": bytes((ARRAYS_MARK,)),
    "no array": bytes((ARRAYS_MARK, 1)),
    "an unknown type": packed(0, 99, (8,), bytes(8)),
    "too few bytes": packed(0, 2, (8,), bytes(7)),
    "too many bytes": packed(0, 2, (8,), bytes(9)),
    "bytes for no element": packed(0, 2, (0,), bytes(1)),
    "no element, and a length that is none": packed(0, 2, (0, 1 << 63)),
    "lengths that overflow": packed(0, 2, (1 << 63, 1 << 63), bytes(8)),
    "lengths that cancel out": packed(0, 2, (1 << 32, 1 << 32), bytes(8)),
    "no buffer": packed(0, 2, (1 << 20,)),
    "too many dimensions": struct.pack("<BBBB", ARRAYS_MARK, 0, 2, 200) + bytes(1600),
}


@pytest.mark.parametrize("letter", TYPES)
def test_a_small_array_alone_is_made_quicker_and_is_the_same(letter: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(letter)
    payload, _ = pack_array(array) or (b"", [])
    for _ in range(2):  # the second time what its head says is known
        found = unpack_small_array(payload)
        check_equal(found, array)
        found[0, 0] = 1
        check_equal(unpack_small_array(payload), array)
    assert unpack_small_array(bytearray(payload)) is None, "what could change meanwhile is left to the long way"
    check_equal(unpack_arrays(bytearray(payload), []), array)


def test_a_small_array_is_in_memory_that_nobody_can_move() -> None:
    found = unpack_small_array((pack_array(np.arange(3)) or (b"", []))[0])
    assert found.flags.owndata
    assert found.base is None


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_else_is_made_quicker(name: str) -> None:
    for _ in range(2):
        assert unpack_small_array(HOSTILE[name]) is None


def test_several_arrays_large_ones_and_those_that_can_only_be_read_go_the_long_way() -> None:
    fixed = np.arange(3)
    fixed.flags.writeable = False
    for packed_array in (
        pack_array(fixed),
        pack_array(np.zeros(OUT_OF_BAND_MIN_BYTES, "u1")),
        pack_arguments((np.arange(3), np.arange(3))),
    ):
        assert packed_array is not None
        assert unpack_small_array(packed_array[0]) is None


def test_what_is_known_of_heads_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_MAX_KNOWN_HEADERS", 3)
    monkeypatch.setattr(arrays, "_known_headers", {})
    for length in range(1, 9):
        array = np.arange(length)
        check_equal(unpack_small_array((pack_array(array) or (b"", []))[0]), array)
        assert len(arrays._known_headers) <= 3


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_such_payload_is_refused(name: str) -> None:
    with pytest.raises(SerializationError):
        loads(HOSTILE[name], [])
    with pytest.raises(SerializationError):
        loads_restricted(HOSTILE[name], [], Everything())


def test_a_buffer_of_another_size_is_refused_and_one_too_many() -> None:
    body, (buffer,) = pack_array(np.zeros(20_000, "u1"))  # type: ignore[misc]
    for buffers in ([bytes(19_999)], [bytes(20_001)], [buffer, buffer]):
        with pytest.raises(SerializationError):
            loads(body, buffers)


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_bytes_give_an_array_or_an_error(data: bytes) -> None:
    try:
        found = loads(bytes((ARRAYS_MARK,)) + data, [])
    except SerializationError:
        return
    for array in found if type(found) is tuple else (found,):
        array.sum()


def test_pickles_do_not_begin_so_and_no_pickle_is_needed_to_notice_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(pickle.dumps(None, protocol)[0] != ARRAYS_MARK for protocol in range(6))
    monkeypatch.setattr(arrays, "ARRAYS", set())
    assert unpack_arrays(packed(0, 2, (2,), b"ab"), []).tolist() == [97, 98]
    assert {np.ndarray} == arrays.ARRAYS


def test_the_first_array_that_pickle_meets_makes_it_known() -> None:
    known = arrays.ARRAYS.copy()
    arrays.ARRAYS.clear()
    try:
        dumps_result(train, np.ones(3))
        assert {np.ndarray} == arrays.ARRAYS
    finally:
        arrays.ARRAYS.update(known)


def test_no_more_arrays_than_a_byte_can_count_are_packed() -> None:
    assert pack_arguments([np.ones(1) for _ in range(MAX_ARRAYS)]) is not None
    assert pack_arguments([np.ones(1) for _ in range(MAX_ARRAYS + 1)]) is None
