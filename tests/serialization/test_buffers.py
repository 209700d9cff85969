"""Plain memory as arguments and results: it comes out as it went in, and not through the pickle where it is large."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from payload_stage import train

from farcall.errors import SerializationError
from farcall.serialization import dumps_arguments, dumps_result, loads, loads_arguments
from farcall.serialization.buffers import BUFFER_MIN_BYTES, has_buffer, wrap_buffers

SIZES = (0, 1, BUFFER_MIN_BYTES - 8, BUFFER_MIN_BYTES, BUFFER_MIN_BYTES + 8, 70_000)
MAKERS: dict[str, Any] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "array": lambda data: array("q", data[: len(data) // 8 * 8]),
    "view": lambda data: memoryview(bytearray(data)),
    "view of bytes": memoryview,
}


def received(buffers: Sequence[memoryview]) -> list[bytearray]:
    """What comes at the other end: memory that may be written, and is nobody else's."""
    return [bytearray(buffer) for buffer in buffers]


def there(value: Any) -> Any:
    """A result as it arrives."""
    body, buffers = dumps_result(train, value)
    return loads(body, received(buffers))


def arguments_there(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    body, buffers = dumps_arguments(train, args, kwargs)
    return loads_arguments(body, received(buffers))


def pattern(size: int) -> bytes:
    return (bytes(range(256)) * (size // 256 + 1))[:size]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", MAKERS)
def test_it_arrives_as_it_was(kind: str, size: int) -> None:
    value = MAKERS[kind](pattern(size))
    positional, named = arguments_there(value, 1, again=value)
    for found in (there(value), positional[0], named["again"]):
        assert type(found) is type(value)
        assert found == value
        if kind.startswith("view"):
            assert (found.format, found.shape, found.readonly) == (value.format, value.shape, value.readonly)
    assert positional[1] == 1


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_large_does_not_go_through_the_pickle(kind: str) -> None:
    value = MAKERS[kind](pattern(BUFFER_MIN_BYTES))
    for body, buffers in (
        dumps_result(train, value),
        dumps_arguments(train, (value,)),
        dumps_arguments(train, (), {"a": value}),
    ):
        assert [bytes(buffer) for buffer in buffers] == [bytes(value)]
        assert len(body) < 1000


@pytest.mark.parametrize("kind", ["bytes", "bytearray", "array"])
def test_what_is_small_is_left_to_pickle(kind: str) -> None:
    value = MAKERS[kind](pattern(BUFFER_MIN_BYTES - 8))
    assert dumps_result(train, value)[1] == []
    ((same,), _) = wrap_buffers([(value,), {}])
    assert same is value


@pytest.mark.parametrize("kind", ["bytearray", "array", "view"])
def test_it_can_be_written_where_it_arrives_and_is_not_the_senders(kind: str) -> None:
    value = MAKERS[kind](pattern(BUFFER_MIN_BYTES))
    body, buffers = dumps_result(train, value)
    arrived = received(buffers)
    found = loads(body, arrived)
    found[0] = 77
    assert (found[0], value[0]) == (77, MAKERS[kind](pattern(BUFFER_MIN_BYTES))[0])
    if kind != "view":
        arrived[0][:8] = b"overrun!"
        assert found[0] == 77 or kind == "bytearray", "an array's memory is its own"


def test_bytes_do_not_change_with_the_memory_they_came_in() -> None:
    body, buffers = dumps_result(train, pattern(BUFFER_MIN_BYTES))
    arrived = received(buffers)
    found = loads(body, arrived)
    arrived[0][:] = bytes(BUFFER_MIN_BYTES)
    assert found == pattern(BUFFER_MIN_BYTES)


def test_one_object_that_is_several_arguments_is_one_object_there() -> None:
    value, other = bytearray(BUFFER_MIN_BYTES), bytearray(BUFFER_MIN_BYTES)
    _, buffers = dumps_arguments(train, (value, value, other))
    assert len(buffers) == 2
    (first, second, third), named = arguments_there(value, value, other, again=value)
    assert first is second is named["again"]
    assert first is not third
    (first, inside), _ = arguments_there(value, [value])
    assert first is not inside[0]
    assert first == inside[0]


formats = st.sampled_from("bB?hHiIlLqQnNfdP")


@given(formats, st.lists(st.integers(1, 6), max_size=4), st.booleans(), st.integers(0, 3))
@settings(deadline=None)
def test_any_view_arrives_with_its_format_and_shape(form: str, shape: list[int], readonly: bool, cut: int) -> None:
    size = int(np.prod(shape, dtype=int)) * memoryview(bytes(8)).cast(form).itemsize  # type: ignore[call-overload]
    memory: Any = memoryview(bytearray(n % 2 for n in range(size)))
    view = memory.cast(form, shape) if shape else memory.cast(form, [])
    view = view.toreadonly() if readonly else view
    if len(shape) == 1:
        view = view[:: cut - 2] if cut < 2 else view[::cut]
    for found in (there(view), arguments_there(view)[0][0], there([view])[0]):
        assert (found.format, found.shape, found.readonly) == (view.format, view.shape, readonly)
        assert found.tolist() == view.tolist()
        assert found.c_contiguous


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("size", [10, 300])
def test_a_view_with_gaps_or_in_another_order_arrives_equal(order: Any, size: int) -> None:
    matrix = np.arange(size * size, dtype=np.int64).reshape(size, size).copy(order)
    for view in (matrix.data, matrix[1:, 2:].data, matrix[::-2].data, matrix.T.data):
        found = there(view)
        assert found.shape == view.shape
        assert np.array_equal(np.asarray(found), np.asarray(view))
        found[0, 0] = -5
        assert view[0, 0] != -5


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_a_view_of_nothing_arrives_as_one(shape: tuple[int, ...]) -> None:
    found = there(np.zeros(shape, np.int32).data)
    assert (found.format, found.nbytes) == ("i", 0)


@pytest.mark.parametrize(
    "view",
    [
        memoryview((ctypes.c_int * 4)(1, 2, 3)),
        np.zeros(3, ">i4").data,
        np.zeros(3, [("a", "i4"), ("b", "f8")]).data,
        np.zeros(3, complex).data,
    ],
    ids=["ctypes", "big-endian", "structured", "complex"],
)
def test_a_view_that_could_not_be_made_again_is_refused_by_its_sender(view: memoryview) -> None:
    with pytest.raises(SerializationError, match=r"(?s)argument.*memoryview of format .* send view\.tobytes\(\)"):
        dumps_arguments(train, (view,))
    with pytest.raises(SerializationError, match=r"send view\.tobytes\(\)"):
        dumps_result(train, view)
    assert there(view.tobytes()) == view.tobytes()


def test_a_view_that_was_released_is_refused_by_its_sender() -> None:
    view = memoryview(bytearray(BUFFER_MIN_BYTES))
    view.release()
    with pytest.raises(SerializationError, match="released"):
        dumps_arguments(train, (view,))


def test_subclasses_are_left_to_pickle() -> None:
    class Sub(bytes):
        pass

    assert not has_buffer((Sub(BUFFER_MIN_BYTES), 1, "x" * BUFFER_MIN_BYTES, [b"" * BUFFER_MIN_BYTES]))
    assert has_buffer((1, b""))
