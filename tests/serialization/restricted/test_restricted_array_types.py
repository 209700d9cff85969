"""Element types of arrays: those that numpy sends arrive as they were, forged ones are refused."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from farcall.errors import NotAllowedError, SerializationError
from farcall.security.allowed import AllowList
from farcall.serialization.restricted.arrays import PendingDtype
from farcall.serialization.restricted.unpickler import loads_restricted

NOTHING = AllowList([])


@pytest.mark.parametrize(
    "wanted",
    [
        "f8", ">i4", "?", "c16", "<U5", ">U5", "S3", "V8", "O", "M8[ns]", ">m8[3s]", "m8",
        [("a", "f8"), ("b", "O")],
        [(("title", "a"), "f8"), ("b", "S2")],
        ("f4", (2, 3)),
        [("a", [("b", ">f4", (2,))])],
        np.dtype([("a", "i1"), ("b", "f8")], align=True),
        {"names": ["b", "a"], "formats": ["i1", "f8"], "offsets": [20, 3], "itemsize": 40},
    ],
)  # fmt: skip
def test_what_numpy_sends_arrives(wanted: Any) -> None:
    array = np.zeros(3, wanted)
    for value in (array, array.dtype, [array.dtype, array, array.dtype]):
        payload = pickle.dumps(value, 5)
        assert repr(loads_restricted(payload, (), NOTHING)) == repr(value)
    again = loads_restricted(pickle.dumps(array.dtype, 5), (), NOTHING)
    assert again == array.dtype
    assert again.__reduce__() == array.dtype.__reduce__()


class Forged:
    """A type with that state, and perhaps with one more."""

    def __init__(self, *state: Any) -> None:
        self._state = state

    def __reduce__(self) -> Any:
        return np.dtype, ("V8", False, True), self._state


class Array:
    def __init__(self, dtype: Any, raw: bytes) -> None:
        self._state = (1, (1,), dtype, False, raw)

    def __reduce__(self) -> Any:
        return (*np.zeros(0).__reduce__()[:2], self._state)


def test_bytes_do_not_become_pointers() -> None:
    lying = Forged(3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)
    assert loads_restricted(pickle.dumps(lying, 5), (), NOTHING).hasobject
    with pytest.raises(SerializationError):
        loads_restricted(pickle.dumps(Array(lying, b"A" * 8), 5), (), NOTHING)


@pytest.mark.parametrize(
    "state",
    [
        (3, "|", None, ("a",), {"a": (np.dtype("f8"), 4096)}, 8, 1, 0),
        (3, "|", None, ("a",), {"a": (np.dtype("f8"), -8)}, 8, 1, 0),
        (3, "|", None, ("a",), {"a": ("f8", 0)}, 8, 1, 0),
        (3, "|", ("f8", (1,)), None, None, 8, 1, 0),
        (3, "|", None, ("a", "b"), {"a": (np.dtype("O"), 0), "b": (np.dtype("f8"), 0)}, 8, 1, 0),
        (3,),
    ],
)
def test_what_numpy_would_not_make_is_refused(state: Any) -> None:
    with pytest.raises(SerializationError):
        loads_restricted(pickle.dumps(Forged(*state), 5), (), NOTHING)


def test_a_type_is_made_once_and_not_left_unfinished() -> None:
    payload = pickle.dumps(np.dtype("V8"), 3)  # without frames, which have lengths
    state = payload[payload.index(b"R") + 3 : -2]  # behind REDUCE and BINPUT, up to BUILD
    with pytest.raises(NotAllowedError, match="tries to change"):
        loads_restricted(payload[:-1] + state + b"b.", (), NOTHING)
    with pytest.raises(SerializationError, match="has no contents"):
        loads_restricted(payload[: payload.index(b"R") + 1] + b".", (), NOTHING)
    with pytest.raises(TypeError):
        np.zeros(1, PendingDtype("f8"))  # type: ignore[call-overload]


def test_types_that_hold_pointers_under_another_name_are_refused() -> None:
    class Text:
        def __reduce__(self) -> Any:
            return np.dtype, ("T", False, True), np.dtype("f8").__reduce__()[2]

    with pytest.raises(SerializationError, match=r"not supported|not understood"):
        loads_restricted(pickle.dumps(Text(), 5), (), NOTHING)


def test_records_are_not_nested_without_an_end() -> None:
    nested: np.dtype[Any] = np.dtype("f8")
    for _ in range(100):
        nested = np.dtype([("a", nested)])
    with pytest.raises(SerializationError, match="nested"):
        loads_restricted(pickle.dumps(nested, 5), (), NOTHING)
