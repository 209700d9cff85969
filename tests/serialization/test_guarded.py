"""Unpickling that asks first: what is refused is not loaded, and nothing of it has run."""

from __future__ import annotations

import datetime
import os
import pathlib
import pickle
import sys
from collections import OrderedDict
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.errors import NotAllowedError, SerializationError
from farcall.security.allowed import Allowed
from farcall.serialization.guarded import loads_arguments_guarded, loads_guarded, loads_plain
from farcall.serialization.pickler import dumps, dumps_arguments

NOTHING = Allowed([])
table: dict[str, int] = {}


class Stateful:
    def __init__(self, *parts: object) -> None:
        self.parts = list(parts)


class System:
    def __reduce__(self) -> Any:
        return os.system, ("echo should never run",)


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, "x", b"y", None, True, 3j]},
        {1, 2},
        frozenset({3}),
        OrderedDict(a=1),
        datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
        bytearray(b"z"),
        range(3),
        ValueError("v"),
        NotAllowedError("n"),
    ],
)
def test_plain_data_passes(value: Any) -> None:
    payload, buffers = dumps(value)
    assert repr(loads_guarded(payload, buffers, NOTHING)) == repr(value)


@pytest.mark.parametrize("size", [3, 30_000])
def test_arrays_pass(size: int) -> None:
    for value in (np.arange(size), np.float64(1.5), np.array(["a", "b"])):
        payload, buffers = dumps(value)
        assert (loads_guarded(payload, buffers, NOTHING) == value).all()


def named(module: str, name: str) -> bytes:
    """A pickle that loads that name, and nothing else."""
    return b"\x80\x04" + b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93."


@pytest.mark.parametrize(
    "payload",
    [
        pickle.dumps(System()),
        b"cos\nsystem\n(S'echo no'\ntR.",
        b"(ios\nsystem\nS'echo no'\n.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x041+1\x85R.",
        named("datetime", "sys.modules"),
        named("datetime", "timedelta.__subclasses__"),
        named("no_such_module", "f"),
    ],
)
def test_what_is_not_allowed_is_refused_before_it_is_loaded(payload: bytes) -> None:
    with pytest.raises(NotAllowedError, match="not allowed"):
        loads_guarded(payload, (), NOTHING)


def test_nothing_is_imported_for_it() -> None:
    sys.modules.pop("antigravity", None)
    with pytest.raises(NotAllowedError):
        loads_guarded(b"cantigravity\nfly\n.", (), NOTHING)
    assert "antigravity" not in sys.modules


def test_a_name_that_leads_through_a_function_is_refused() -> None:
    allowed = Allowed(["os.path.join", "os.path.join.__globals__"])
    with pytest.raises(NotAllowedError, match="no class"):
        loads_guarded(named("os.path", "join.__globals__"), (), allowed)


def test_persistent_ids_and_garbage_are_refused() -> None:
    with pytest.raises(NotAllowedError, match="persistent id"):
        loads_guarded(b"\x80\x04\x8c\x01aQ.", (), NOTHING)
    with pytest.raises(SerializationError):
        loads_guarded(b"no pickle", (), NOTHING)


def test_arguments_pass_and_what_are_none_does_not() -> None:
    payload, buffers = dumps_arguments("f", (1, "two"), {"three": 3})
    assert loads_arguments_guarded(payload, buffers, NOTHING) == ((1, "two"), {"three": 3})
    assert loads_arguments_guarded(b"", (), NOTHING) == ((), {})
    with pytest.raises(SerializationError):
        loads_arguments_guarded(pickle.dumps(7), (), NOTHING)


def test_plain_means_plain() -> None:
    assert loads_plain(pickle.dumps(("w", [1, None, 2j, b"x"]))) == ("w", [1, None, 2j, b"x"])
    for wrong in ({1}, System(), datetime.date(2020, 1, 1)):
        with pytest.raises(NotAllowedError, match="plain data"):
            loads_plain(pickle.dumps(wrong, 0))


@given(st.binary(max_size=100))
def test_no_bytes_raise_anything_but_our_errors(data: bytes) -> None:
    try:
        loads_guarded(data, (), NOTHING)
    except (NotAllowedError, SerializationError):
        pass


def changing(module: str, name: str) -> bytes:
    """Sets `_farcall_exposed` of what that name leads to."""
    return b"\x80\x04" + named(module, name)[2:-1] + b"N}\x8c\x10_farcall_exposed\x88s\x86b."


@pytest.mark.parametrize(
    ("module", "name"), [("pathlib", "PosixPath"), ("fractions", "Fraction"), ("farcall.rref", "_receive")]
)
def test_a_pickle_cannot_change_what_it_names(module: str, name: str) -> None:
    with pytest.raises(NotAllowedError, match="wanted to change"):
        loads_guarded(changing(module, name), (), NOTHING)
    assert not hasattr(getattr(sys.modules[module], name), "_farcall_exposed")


def test_what_a_pickle_has_made_gets_its_state() -> None:
    made = Stateful(pathlib.PosixPath("/x"), [Fraction(1, 2)])
    payload, buffers = dumps([made, made, np.arange(30_000)])
    first, second, array = loads_guarded(payload, buffers, Allowed([f"{__name__}.Stateful"]))
    assert first is second
    assert vars(first) == vars(made)
    assert array.sum() == np.arange(30_000).sum()


def test_a_table_of_a_module_is_not_handed_out() -> None:
    with pytest.raises(NotAllowedError, match="no function and no class"):
        loads_guarded(named(__name__, "table"), (), Allowed([__name__]))
    assert loads_guarded(named(__name__, "table"), (), Allowed([f"{__name__}.table"])) is table
