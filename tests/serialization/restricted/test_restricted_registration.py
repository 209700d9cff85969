"""What an edge registers as plain data is made at restricted workers, by what it registers for it."""

from __future__ import annotations

from typing import Any

import pytest

from farcall.errors import NotAllowedError
from farcall.serialization import arrays, dtype_code, dumps, loads_restricted, register_array_type, register_plain


class Made:
    """What is made."""

    def __init__(self, how: str, value: int) -> None:
        self.how, self.value = how, value

    def __reduce__(self) -> tuple[Any, ...]:
        return make, (self.value,)


class Changed(Made):
    """One whose pickle wants to change what was made."""

    def __reduce__(self) -> tuple[Any, ...]:
        return make, (self.value,), {"value": 5}


def make(value: int) -> Made:
    return Made("unchecked", value)


def make_checked(value: int) -> Made:
    return Made("checked", value)


class Nothing:
    """A guard that allows nothing."""

    def check_name(self, module: str, name: str) -> None:
        raise NotAllowedError(f"{module}.{name}")

    def check_found(self, module: str, name: str, found: object) -> None:
        raise NotAllowedError(f"{module}.{name}")


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    from farcall.serialization.restricted import unpickler

    monkeypatch.setattr(unpickler, "_REGISTERED", {})
    register_plain(make, make_checked)


def test_nothing_is_plain_that_nobody_registered() -> None:
    with pytest.raises(NotAllowedError, match="make"):
        loads_restricted(*dumps(Made("", 1)), Nothing())


@pytest.mark.usefixtures("_registered")
def test_the_checked_one_is_called() -> None:
    got = loads_restricted(*dumps([Made("", 1), Made("", 2)]), Nothing())
    assert [(each.how, each.value) for each in got] == [("checked", 1), ("checked", 2)]


@pytest.mark.usefixtures("_registered")
def test_what_was_made_is_not_changed() -> None:
    with pytest.raises(NotAllowedError, match="change"):
        loads_restricted(*dumps(Changed("", 1)), Nothing())


# Kinds of arrays of an edge


class Wrapped:
    """An array of an edge's kind."""

    def __init__(self, array: Any) -> None:
        self.array = array


@pytest.fixture
def _registered_type(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = pytest.importorskip("numpy")
    monkeypatch.setattr(arrays, "_registered", arrays._RegisteredType())
    arrays.detect_numpy() if arrays.ARRAYS else arrays._set_up_numpy(numpy)
    monkeypatch.setattr(arrays, "ARRAYS", set(arrays.ARRAYS))
    monkeypatch.setattr(arrays, "_known_headers", {})


def pack(value: Wrapped, start: bytes) -> arrays.Packed | None:
    if value.array.ndim == 2:
        return None
    code = dtype_code(value.array.dtype.name)
    assert code is not None
    head = arrays.pack_array_header(code, value.array.shape)
    assert head is not None
    return start + head + value.array.tobytes(), []


@pytest.mark.usefixtures("_registered_type")
def test_a_kind_goes_without_pickle_and_arrives_as_one() -> None:
    import numpy

    register_array_type(Wrapped, pack, Wrapped)
    payload, _ = arrays.pack_array(Wrapped(numpy.arange(3))) or (b"", [])
    found = arrays.unpack_arrays(payload, [])
    assert type(found) is Wrapped
    assert found.array.tolist() == [0, 1, 2]
    packed = arrays.pack_arguments([Wrapped(numpy.arange(2)), numpy.arange(3)])
    assert packed is not None
    first, second = arrays.unpack_arrays(*packed)
    assert (type(first), type(second)) == (Wrapped, numpy.ndarray)
    assert arrays.pack_array(Wrapped(numpy.ones((2, 2)))) is None


@pytest.mark.usefixtures("_registered_type")
def test_a_kind_that_is_not_known_is_refused_and_so_are_its_truth_values() -> None:
    import numpy

    register_array_type(Wrapped, pack, Wrapped)
    payload, _ = arrays.pack_array(Wrapped(numpy.arange(3))) or (b"", [])
    truths, _ = arrays.pack_array(Wrapped(numpy.array([True]))) or (b"", [])
    with pytest.raises(ValueError, match="not registered on this worker"):
        arrays.unpack_arrays(truths, [])
    arrays._registered.make = None
    with pytest.raises(ValueError, match="not registered on this worker"):
        arrays.unpack_arrays(payload, [])
