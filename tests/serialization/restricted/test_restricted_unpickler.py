"""Unpickling that asks first: what is refused is not loaded, and nothing of it has run."""

from __future__ import annotations

import copyreg
import datetime
import enum
import os
import pathlib
import pickle
import sys
from collections import OrderedDict
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.errors import NotAllowedError, SerializationError
from farcall.security.allowed import AllowList
from farcall.serialization.payload import dumps, dumps_arguments
from farcall.serialization.references import offering, take_offered
from farcall.serialization.restricted.unpickler import loads_plain, loads_restricted, loads_restricted_arguments

NOTHING = AllowList([])
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
    assert repr(loads_restricted(payload, buffers, NOTHING)) == repr(value)


@pytest.mark.parametrize("size", [3, 30_000])
def test_arrays_pass(size: int) -> None:
    for value in (np.arange(size), np.float64(1.5), np.array(["a", "b"])):
        payload, buffers = dumps(value)
        assert (loads_restricted(payload, buffers, NOTHING) == value).all()


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
        loads_restricted(payload, (), NOTHING)


def test_nothing_is_imported_for_it() -> None:
    sys.modules.pop("antigravity", None)
    with pytest.raises(NotAllowedError):
        loads_restricted(b"cantigravity\nfly\n.", (), NOTHING)
    assert "antigravity" not in sys.modules


def test_a_name_that_leads_through_a_function_is_refused() -> None:
    allowed = AllowList(["os.path.join", "os.path.join.__globals__"])
    with pytest.raises(NotAllowedError, match="not a class"):
        loads_restricted(named("os.path", "join.__globals__"), (), allowed)


def test_persistent_ids_and_garbage_are_refused() -> None:
    with pytest.raises(NotAllowedError, match="persistent id"):
        loads_restricted(b"\x80\x04\x8c\x01aQ.", (), NOTHING)
    with pytest.raises(SerializationError):
        loads_restricted(b"no pickle", (), NOTHING)


def test_arguments_pass_and_what_are_none_does_not() -> None:
    payload, buffers = dumps_arguments("f", (1, "two"), {"three": 3})
    assert loads_restricted_arguments(payload, buffers, NOTHING) == ((1, "two"), {"three": 3})
    assert loads_restricted_arguments(b"", (), NOTHING) == ((), {})
    wrong: Any
    for wrong in (7, [1, 2], [(), []]):
        with pytest.raises(SerializationError):
            loads_restricted_arguments(pickle.dumps(wrong), (), NOTHING)


def test_plain_means_plain() -> None:
    assert loads_plain(pickle.dumps(("w", [1, None, 2j, b"x"]))) == ("w", [1, None, 2j, b"x"])
    for wrong in (bytearray(b"x"), System(), datetime.date(2020, 1, 1)):
        with pytest.raises(NotAllowedError, match="plain data"):
            loads_plain(pickle.dumps(wrong, 3))


@given(st.binary(max_size=100))
def test_no_bytes_raise_anything_but_our_errors(data: bytes) -> None:
    try:
        loads_restricted(data, (), NOTHING)
    except (NotAllowedError, SerializationError):
        pass


def changing(module: str, name: str) -> bytes:
    """Sets `_farcall_exposed` of what that name leads to."""
    return b"\x80\x04" + named(module, name)[2:-1] + b"N}\x8c\x10_farcall_exposed\x88s\x86b."


@pytest.mark.parametrize(
    ("module", "name"), [("pathlib", "PosixPath"), ("fractions", "Fraction"), ("farcall.rref", "_receive")]
)
def test_a_pickle_cannot_change_what_it_names(module: str, name: str) -> None:
    with pytest.raises(NotAllowedError, match="tries to change"):
        loads_restricted(changing(module, name), (), NOTHING)
    assert not hasattr(getattr(sys.modules[module], name), "_farcall_exposed")


def test_what_a_pickle_has_made_gets_its_state() -> None:
    made = Stateful(pathlib.PosixPath("/x"), [Fraction(1, 2)])
    payload, buffers = dumps([made, made, np.arange(30_000)])
    first, second, array = loads_restricted(payload, buffers, AllowList([f"{__name__}.Stateful"]))
    assert first is second
    assert vars(first) == vars(made)
    assert array.sum() == np.arange(30_000).sum()


# What a pickle calls and changes


class Reduced:
    """What a pickle can be made to say."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> Any:
        return self._parts


class Restored:
    """Takes any state, as some classes do."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state


class Colour(enum.Enum):
    RED = 1


settings: dict[str, Any] = {"debug": False}
the_one = Stateful()


def get_settings() -> dict[str, Any]:
    return settings


def get_the_one() -> Stateful:
    return the_one


def get_way_out() -> Any:
    return os.getpid


def label(value: object) -> str:
    return f"item {value}"


OURS = AllowList([__name__])


@pytest.mark.parametrize(
    "forged",
    [
        Reduced(get_the_one, (), {"parts": 1}),
        Reduced(get_the_one, (), (None, {"parts": 1})),
        Reduced(get_settings, (), None, None, iter([("debug", True)])),
        Reduced(get_settings, (), None, None, iter([("debug", True), ("more", True)])),
        Reduced(Colour, (1,), {"_value_": 2}),
    ],
)
def test_what_a_function_gave_is_not_changed(forged: Any) -> None:
    with pytest.raises(NotAllowedError, match="tries to change"):
        loads_restricted(pickle.dumps(forged), (), OURS)
    assert settings == {"debug": False}
    assert the_one.parts == []
    assert Colour.RED.value == 1


def test_a_handle_of_a_message_is_not_changed() -> None:
    class Handle:
        owner = "b"

    handle = Handle()
    with offering([handle]), pytest.raises(NotAllowedError, match="tries to change"):
        loads_restricted(pickle.dumps(Reduced(take_offered, (0,), {"owner": "c"})), (), NOTHING)
    assert handle.owner == "b"


def test_only_what_was_named_is_called() -> None:
    way_out = pickle.dumps(Reduced(get_way_out, ()), 3)[:-1]
    assert loads_restricted(way_out + b".", (), OURS) is os.getpid
    for call in (b")R.", b")\x81.", b")}\x92."):
        with pytest.raises(NotAllowedError, match="tries to call"):
            loads_restricted(way_out + call, (), OURS)
    for old in (b"0(" + named(__name__, "Stateful")[2:-1] + b"o.", b"0(i" + __name__.encode() + b"\nStateful\n."):
        with pytest.raises(NotAllowedError, match="old protocol"):
            loads_restricted(way_out + old, (), OURS)


def test_what_was_loaded_before_is_not_handed_out_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg._extension_cache, 77, os.system)  # type: ignore[attr-defined]
    with pytest.raises(NotAllowedError, match="old protocol"):
        loads_restricted(b"\x80\x04\x82\x4d.", (), NOTHING)


@pytest.mark.parametrize("name", ["__reduce_ex__", "__reduce__", "__module__", "__class__", "__setstate__", "__dict__"])
def test_a_state_does_not_say_how_the_value_is_pickled(name: str) -> None:
    for made in (ValueError, Stateful, Restored):
        for state in ({name: label}, (None, {name: label}), ({name: label}, None)):
            with pytest.raises((NotAllowedError, SerializationError)):
                loads_restricted(pickle.dumps(Reduced(made, (), state)), (), OURS)


class Lookalike(str): ...


@pytest.mark.parametrize("state", [{Lookalike("__reduce_ex__"): label}, {7: label}, OrderedDict(__reduce_ex__=label)])
def test_names_of_attributes_are_texts_in_dicts(state: Any) -> None:
    with pytest.raises(NotAllowedError, match="not allowed"):
        loads_restricted(pickle.dumps(Reduced(Stateful, (), state)), (), OURS)


def test_what_exceptions_have_arrives_with_them() -> None:
    error = ValueError("v", 1)
    error.add_note("noted")
    error.more = {"a": 1}  # type: ignore[attr-defined]
    arrived = loads_restricted(pickle.dumps(error), (), NOTHING)
    assert arrived.args == ("v", 1)
    assert vars(arrived) == {"__notes__": ["noted"], "more": {"a": 1}}
    assert loads_restricted(pickle.dumps(FileNotFoundError(2, "no", "x")), (), NOTHING).filename == "x"


def test_a_table_of_a_module_is_not_handed_out() -> None:
    with pytest.raises(NotAllowedError, match="neither a function nor a class"):
        loads_restricted(named(__name__, "table"), (), AllowList([__name__]))
    assert loads_restricted(named(__name__, "table"), (), AllowList([f"{__name__}.table"])) is table


# What opcodes call

ran: list[Any] = []


def run(*args: object) -> None:
    ran.append(args)


def get_function() -> Any:
    """Hands out something to be called, as a function of a service may."""
    return run


def given_state(cls: str, name: str, then: bytes) -> bytes:
    """An object of that class gets a function as an attribute, by a state; then come more opcodes."""
    module, _, cls = cls.rpartition(".")
    function = named(__name__, "get_function")[2:-1] + b")R"
    state = b"}\x8c" + bytes([len(name)]) + name.encode() + function + b"s"
    return b"\x80\x04" + named(module, cls)[2:-1] + b")\x81" + state + b"b" + then + b"."


@pytest.mark.parametrize("cls", ["builtins.ValueError", f"{__name__}.Stateful"])
@pytest.mark.parametrize(
    ("name", "then"),
    [
        ("append", b"K\1a"),
        ("append", b"(K\1e"),
        ("extend", b"K\1a"),
        ("extend", b"(K\1e"),
        ("add", b"(K\1\x90"),
        ("update", b"(K\1\x90"),
        ("__setitem__", b"K\1K\1s"),
        ("__setstate__", b"}K\1K\1sb"),
        ("__getattr__", b"}K\1K\1sb"),
    ],
)
def test_an_attribute_is_not_called(cls: str, name: str, then: bytes) -> None:
    with pytest.raises((NotAllowedError, SerializationError)):
        loads_restricted(given_state(cls, name, then), (), OURS)
    assert ran == []


class Pooled:
    """Is found again by those who look for it."""

    known: ClassVar[dict[str, Pooled]] = {}
    limit = 5

    def __new__(cls, name: str) -> Pooled:
        return cls.known.setdefault(name, super().__new__(cls))


class MetaSingle(type):
    only: Any = None

    def __call__(cls) -> Any:
        MetaSingle.only = MetaSingle.only or super().__call__()
        return MetaSingle.only


class Single(metaclass=MetaSingle):
    limit = 5


class Watched:
    """Notes all that are made, by `__init__`."""

    all: ClassVar[list[Watched]] = []

    def __init__(self) -> None:
        self.all.append(self)


def test_what_a_class_hands_out_again_is_not_changed() -> None:
    kept = Pooled("a"), Single()
    for forged in (Reduced(Pooled, ("a",), {"limit": 0}), Reduced(Single, (), {"limit": 0})):
        with pytest.raises(NotAllowedError, match="has not created"):
            loads_restricted(pickle.dumps(forged), (), OURS)
    assert [each.limit for each in kept] == [5, 5]


def test_what_is_new_gets_its_state_though_others_know_it() -> None:
    arrived = loads_restricted(pickle.dumps(Reduced(Watched, (), {"limit": 0})), (), OURS)
    assert Watched.all == [arrived]
    assert arrived.limit == 0
    Watched.all.clear()


def test_a_date_of_a_class_of_its_own_is_checked_too() -> None:
    with pytest.raises(NotAllowedError, match="arguments that are not allowed"):
        loads_restricted(pickle.dumps(Reduced(OwnDate, (b"\0\0\1\0",))), (), OURS)
    assert loads_restricted(pickle.dumps(OwnDate(2024, 2, 29)), (), OURS) == OwnDate(2024, 2, 29)


class OwnDate(datetime.date): ...
