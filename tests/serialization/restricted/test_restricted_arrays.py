"""Arrays out of pickles that are not trusted: what numpy writes arrives as it was, everything else is refused.

The attacks were real: against numpy's own functions each of them crashes the process, or reads or writes memory that is
not the array's.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from farcall.errors import NotAllowedError, SerializationError
from farcall.security.allowed import _NUMPY_NAMES, AllowList
from farcall.serialization.restricted.arrays import NDARRAY, STAND_INS
from farcall.serialization.restricted.unpickler import loads_restricted

NOTHING = AllowList([])
_reconstruct: Any = np.zeros(0).__reduce__()[0]  # type: ignore[index]
_frombuffer: Any = np.zeros(1).__reduce_ex__(5)[0]
_scalar: Any = np.float64(0).__reduce__()[0]  # type: ignore[index]


def sent(value: Any, protocol: int = 5, beside: Callable[[bytes], Any] | None = None) -> Any:
    """What arrives; `beside` is what the memory becomes that travels beside the pickle, if any does."""
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(value, protocol, buffer_callback=buffers.append if beside else None)
    return loads_restricted(payload, [beside(bytes(buffer.raw())) for buffer in buffers] if beside else (), NOTHING)


def assert_same(arrived: Any, array: Any) -> None:
    assert type(arrived) is np.ndarray
    assert arrived.dtype == array.dtype
    assert arrived.shape == array.shape
    assert arrived.flags.f_contiguous == array.flags.f_contiguous or not array.flags.forc
    if array.dtype.hasobject:
        assert arrived.tolist() == array.tolist()
    else:
        assert arrived.tobytes() == array.tobytes()  # not a number is never equal


WAYS: list[tuple[int, Callable[[bytes], Any] | None]] = [
    (3, None), (4, None), (5, None), (5, bytearray), (5, lambda raw: memoryview(bytearray(raw))), (5, bytes),
]  # fmt: skip

SCALARS = (
    npst.boolean_dtypes() | npst.integer_dtypes(endianness="?") | npst.floating_dtypes(endianness="?")
    | npst.complex_number_dtypes() | npst.datetime64_dtypes(endianness="?") | npst.timedelta64_dtypes()
    | npst.byte_string_dtypes(max_len=5) | npst.unicode_string_dtypes(max_len=5, endianness="?")
)  # fmt: skip
DTYPES = SCALARS | npst.array_dtypes(SCALARS, max_size=3, allow_subarrays=True)
SHAPES = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


def laid_out(array: Any, layout: str) -> Any:
    if layout == "F":
        return np.asfortranarray(array)
    if layout == "gaps" and array.ndim:
        return array[::2]
    if layout == "turned" and array.ndim > 2:
        return array.transpose(0, 2, 1)
    return array


@given(
    DTYPES.flatmap(lambda dtype: npst.arrays(dtype, SHAPES)),
    st.sampled_from(["C", "F", "gaps", "turned"]),
    st.sampled_from(WAYS),
)
def test_arrays_of_all_plain_types_arrive(array: Any, layout: str, way: Any) -> None:
    array = laid_out(array, layout)
    arrived = sent(array, *way)
    assert_same(arrived, array)
    one, same = sent([array, array], *way)
    assert one is same


PLAIN = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=3) | st.binary(max_size=3)


@given(npst.arrays(object, SHAPES, elements=PLAIN, fill=st.nothing()), st.sampled_from(["C", "F", "gaps"]))
def test_arrays_of_objects_arrive(array: Any, layout: str) -> None:
    assert_same(sent(laid_out(array, layout)), laid_out(array, layout))


def test_arrays_in_arrays_and_in_records_arrive() -> None:
    outer = np.empty(3, object)
    outer[0], outer[1], outer[2] = np.arange(3), np.array(5), [np.zeros(1)]
    arrived = sent(outer)
    assert [type(value) for value in arrived] == [np.ndarray, np.ndarray, list]
    assert (arrived[0] == outer[0]).all()
    assert arrived[1].shape == ()
    record = np.array(
        [(1, [2], (3.0, "x")), (4, None, (5.0, {}))], [("a", "i4"), ("b", "O"), ("c", [("d", "f8"), ("e", "O")])]
    )
    assert_same(sent(record), record)


@pytest.mark.parametrize(
    "array", [np.zeros((3, 0, 2)), np.array(7), np.zeros(2, "V0"), np.ndarray((2,), "S0"), np.ndarray((2,), "U0"),
              np.array("2020-01-01", "M8[D]"), np.zeros((0, 2), object, order="F"), np.zeros(2, "g")],
)  # fmt: skip
def test_arrays_of_nothing_and_of_no_dimension(array: Any) -> None:
    for way in WAYS:
        assert_same(sent(array, *way), array)


@pytest.mark.parametrize(
    "value",
    [
        np.float64(1.5), np.int8(-1), np.bool_(True), np.complex64(2j), np.longdouble(1) / 3, np.str_("héé"),
        np.str_(""), np.bytes_(b"x"), np.datetime64("2020-01-01"), np.timedelta64(3, "s"), np.void(b"abc"),
        np.array((1, 2.5), [("a", "i4"), ("b", ">f8")])[()], np.array((1, [2]), [("a", "i4"), ("b", "O")])[()],
    ],
)  # fmt: skip
def test_scalars_arrive(value: Any) -> None:
    arrived = sent(value)
    assert type(arrived) is type(value)
    assert arrived.dtype == value.dtype
    assert arrived == value


def test_what_came_beside_the_pickle_is_used_where_it_is() -> None:
    memory = bytearray(np.arange(4).tobytes())
    payload = pickle.dumps(np.arange(4), 5, buffer_callback=lambda _: False)
    array = loads_restricted(payload, [memory], NOTHING)
    array[0] = 9
    assert memory[0] == 9
    with pytest.raises(BufferError):
        memory.append(1)  # it stays where it is while the array lives
    assert not loads_restricted(payload, [bytes(memory)], NOTHING).flags.writeable
    assert sent(np.arange(8)[::2]).flags.writeable
    assert sent(np.arange(8)[::2]).flags.owndata


def test_pickles_of_both_numpys_are_read_by_either() -> None:
    here = pickle.dumps([np.arange(6)[::2], np.float64(2.5)], 3)
    for core in (b"numpy.core.", b"numpy._core."):
        array, number = loads_restricted(here.replace(b"numpy._core.", core).replace(b"numpy.core.", core), (), NOTHING)
        assert array.tolist() == [0, 2, 4]
        assert number == 2.5
    assert {".".join(name) for name in STAND_INS} == _NUMPY_NAMES, "what may be named is what there are stand-ins for"


# Attacks


class Reduced:
    """What a pickle can be made to say."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> Any:
        return self._parts


OBJECTS = np.dtype([("a", "O")])
EIGHT = np.frombuffer(b"A" * 8, "u1").copy()


@pytest.mark.parametrize(
    "args",
    [
        ((1,), "O", bytearray(b"A" * 8)),
        ((64,), "u1", bytearray(8), -4096),
        ((1000,), "u1", bytearray(8), 0, (1000,)),
        ((8,), "u1", bytearray(8), 0, (-1,)),
        ((1,), OBJECTS, bytearray(b"A" * 8)),
        ((1,), "T", bytearray(16)),
        ((4096,), "u1"),
    ],
)
def test_the_class_of_arrays_is_not_called(args: Any) -> None:
    for forged in (Reduced(np.ndarray, args), Reduced(np.ndarray.__new__, (np.ndarray, *args))):
        with pytest.raises(NotAllowedError):
            sent(forged)
    payload = b"\x80\x04\x8c\x05numpy\x8c\x07ndarray\x93" + pickle.dumps(args, 3)[2:-1] + b"\x81."  # NEWOBJ
    with pytest.raises(NotAllowedError, match=r"numpy\.ndarray"):
        loads_restricted(payload, (), NOTHING)


def test_the_class_of_arrays_is_not_handed_out() -> None:
    with pytest.raises(NotAllowedError, match=r"numpy\.ndarray"):
        sent([np.ndarray])
    assert not callable(NDARRAY)


def state(dtype: Any, contents: Any, shape: Any = (1,)) -> tuple[Any, ...]:
    return 1, shape, dtype, False, contents


@pytest.mark.parametrize(
    "wrong",
    [
        state(np.dtype("O"), b"A" * 8),
        state(OBJECTS, b"A" * 8),
        state(np.dtype("u1"), b"A", (2,)),
        state(np.dtype("u1"), b"AB"),
        state(np.dtype("u1"), b"", (65536,)),
        state(np.dtype(("u1", (2,))), b"", (0,)),
        state(np.dtype("f8"), [1.0]),
        state(np.dtype("O"), [1, 2]),
        state(np.dtype("O"), (1,)),
        state(np.dtype(("u1", (2,))), b"AB"),
        state(np.dtype("u1"), b"AB", (-1, -2)),
        state(np.dtype("u1"), b"A", [1]),
        state(np.dtype("u1"), b"", (1 << 62, 0, 1 << 62)),
        state("u1", b"A"),
        state(np.dtype("u1"), EIGHT, (8,)),
        (1, (1,)),
        None,
    ],
)
def test_a_state_that_does_not_fit_is_refused(wrong: Any) -> None:
    with pytest.raises(SerializationError):
        sent(Reduced(_reconstruct, (np.ndarray, (0,), b"b"), wrong))


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (_frombuffer, (bytearray(8), np.dtype("O"), (1,), "C")),
        (_frombuffer, (bytearray(8), OBJECTS, (1,), "C")),
        (_frombuffer, (bytearray(8), "u1", (8,), "C")),
        (_frombuffer, (bytearray(8), np.dtype("u1"), (4,), "C")),
        (_frombuffer, (bytearray(8), np.dtype("f8"), (2,), "C")),
        (_frombuffer, (EIGHT, np.dtype("f8"), (1,), "C")),
        (_frombuffer, (bytearray(8), np.dtype("u1"), (8,), "X")),
        (_frombuffer, (bytearray(8), np.dtype("u1"), (2, 4), "K", (0, 0))),
        (_scalar, (np.dtype("O"), b"A" * 8)),
        (_scalar, (np.dtype("O"), 1)),
        (_scalar, (OBJECTS, b"A" * 8)),
        (_scalar, (OBJECTS, EIGHT)),
        (_scalar, (OBJECTS, np.array(5))),
        (_scalar, (np.dtype("V100"), b"A" * 8)),
        (_scalar, (np.dtype("f8"), EIGHT)),
        (_scalar, (np.dtype("f8"),)),
    ],
)
def test_memory_that_does_not_fit_is_refused(function: Any, args: Any) -> None:
    with pytest.raises(SerializationError):
        sent(Reduced(function, args))


def test_an_array_without_contents_shows_nothing() -> None:
    with pytest.raises(SerializationError, match="has no contents"):
        sent(Reduced(_reconstruct, (np.ndarray, (65536,), b"b")))


def test_an_array_is_made_once_and_then_not_changed() -> None:
    payload = pickle.dumps(np.arange(8)[::2], 3)
    build = payload.index(b"R") + 3  # behind REDUCE and BINPUT
    for more in (payload[build:-2] + b"b", b"K\x00K\x01s", b"K\x01a", b"(K\x00K\x01u", b"(K\x01e", b"(K\x01\x90"):
        with pytest.raises(NotAllowedError, match="tries to change"):
            loads_restricted(payload[:-1] + more + b".", (), NOTHING)
    before = payload[:build] + b"2" + payload[build:-1]  # two of it, and then each gets a state
    with pytest.raises(NotAllowedError, match="old protocol"):
        loads_restricted(before + b"0" + payload[build:-1] + b".", (), NOTHING)


def test_what_is_not_supported_says_so() -> None:
    itself = np.empty(1, object)
    itself[0] = itself
    with pytest.raises(SerializationError, match="contains itself"):
        sent(itself)
    itself[0] = None
    for array in (np.ma.array([1], mask=[True]), np.zeros((1, 1)).view(np.recarray)):
        with pytest.raises(NotAllowedError):
            sent(array)

    with pytest.raises(SerializationError, match="subclasses"):
        loads_restricted(
            pickle.dumps(np.zeros(4)[::2], 3).replace(b"cnumpy\nndarray\n", b"cbuiltins\nset\n"), (), NOTHING
        )
