"""What an edge registers as plain data is made at restricted workers, by what it registers for it."""

from __future__ import annotations

from typing import Any

import pytest

from farcall.errors import NotAllowedError
from farcall.serialization import code_of, dumps, loads_guarded, plain_arrays, register_kind, register_plain


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
    from farcall.serialization import guarded

    monkeypatch.setattr(guarded, "_PLAIN", {})
    register_plain(make, make_checked)


def test_nothing_is_plain_that_nobody_registered() -> None:
    with pytest.raises(NotAllowedError, match="make"):
        loads_guarded(*dumps(Made("", 1)), Nothing())


@pytest.mark.usefixtures("_registered")
def test_the_checked_one_is_called() -> None:
    got = loads_guarded(*dumps([Made("", 1), Made("", 2)]), Nothing())
    assert [(each.how, each.value) for each in got] == [("checked", 1), ("checked", 2)]


@pytest.mark.usefixtures("_registered")
def test_what_was_made_is_not_changed() -> None:
    with pytest.raises(NotAllowedError, match="change"):
        loads_guarded(*dumps(Changed("", 1)), Nothing())


# Kinds of arrays of an edge


class Wrapped:
    """An array of an edge's kind."""

    def __init__(self, array: Any) -> None:
        self.array = array


@pytest.fixture
def _kind(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = pytest.importorskip("numpy")
    monkeypatch.setattr(plain_arrays, "_kind", plain_arrays._Kind())
    plain_arrays.notice() if plain_arrays.ARRAYS else plain_arrays._learn(numpy)
    monkeypatch.setattr(plain_arrays, "ARRAYS", set(plain_arrays.ARRAYS))
    monkeypatch.setattr(plain_arrays, "_heads", {})


def pack(value: Wrapped, start: bytes) -> plain_arrays.Packed | None:
    if value.array.ndim == 2:
        return None
    code = code_of(value.array.dtype.name)
    assert code is not None
    head = plain_arrays.head_of(code, value.array.shape)
    assert head is not None
    return start + head + value.array.tobytes(), []


@pytest.mark.usefixtures("_kind")
def test_a_kind_goes_without_pickle_and_arrives_as_one() -> None:
    import numpy

    register_kind(Wrapped, pack, Wrapped)
    payload, _ = plain_arrays.pack_value(Wrapped(numpy.arange(3))) or (b"", [])
    found = plain_arrays.unpack(payload, [])
    assert type(found) is Wrapped
    assert found.array.tolist() == [0, 1, 2]
    packed = plain_arrays.pack_arguments([Wrapped(numpy.arange(2)), numpy.arange(3)])
    assert packed is not None
    first, second = plain_arrays.unpack(*packed)
    assert (type(first), type(second)) == (Wrapped, numpy.ndarray)
    assert plain_arrays.pack_value(Wrapped(numpy.ones((2, 2)))) is None


@pytest.mark.usefixtures("_kind")
def test_a_kind_that_is_not_known_is_refused_and_so_are_its_truth_values() -> None:
    import numpy

    register_kind(Wrapped, pack, Wrapped)
    payload, _ = plain_arrays.pack_value(Wrapped(numpy.arange(3))) or (b"", [])
    truths, _ = plain_arrays.pack_value(Wrapped(numpy.array([True]))) or (b"", [])
    with pytest.raises(ValueError, match="not known here"):
        plain_arrays.unpack(truths, [])
    plain_arrays._kind.make = None
    with pytest.raises(ValueError, match="not known here"):
        plain_arrays.unpack(payload, [])
