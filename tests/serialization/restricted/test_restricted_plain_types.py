"""Types of plain data, and what a pickle may give them."""

from __future__ import annotations

import decimal
import pathlib
import pickle
import uuid
from collections import Counter, OrderedDict, deque
from fractions import Fraction
from typing import Any

import pytest

from farcall.errors import NotAllowedError
from farcall.protocol.ids import WorkerInfo
from farcall.security.allowed import AllowList
from farcall.serialization.restricted.exceptions import is_sound
from farcall.serialization.restricted.plain_types import is_reserved
from farcall.serialization.restricted.unpickler import loads_restricted

NOTHING = AllowList([])


class Reduced:
    """What a pickle can be made to say."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> Any:
        return self._parts


@pytest.mark.parametrize(
    "value",
    [
        {1, 2}, frozenset({3}), bytearray(b"x"), OrderedDict(a=1), deque([1, 2]), deque([1, 2], 5), Counter("aab"),
        Fraction(-1, 3), Fraction(7), decimal.Decimal("1.50"), range(0, 10**12, 3), slice(1, None),
        pathlib.PosixPath("/a/b"), pathlib.PurePosixPath("c"), uuid.UUID(int=7), WorkerInfo("w", 1),
    ],
)  # fmt: skip
def test_what_pickle_writes_arrives(value: Any) -> None:
    for protocol in (3, 4, 5):
        arrived = loads_restricted(pickle.dumps(value, protocol), (), NOTHING)
        assert type(arrived) is type(value)
        assert arrived == value
    if isinstance(value, deque):
        assert arrived.maxlen == value.maxlen


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (bytearray, (1 << 60,)),
        (set, (range(1 << 60),)),
        (frozenset, (range(1 << 60),)),
        (deque, (range(1 << 60),)),
        (Counter, (range(1 << 60),)),
        (OrderedDict, (range(1 << 60),)),
        (Fraction, ("1e999999999",)),
        (Fraction, (decimal.Decimal("1e999999999"),)),
        (Fraction, (1, decimal.Decimal("1e999999999"))),
    ],
)
def test_a_few_bytes_do_not_take_all_memory_or_time(function: Any, args: Any) -> None:
    with pytest.raises(NotAllowedError, match="with arguments that are not allowed"):
        loads_restricted(pickle.dumps(Reduced(function, args)), (), NOTHING)


def test_nor_by_a_constructor_that_is_passed_by() -> None:
    payload = b"\x80\x04cbuiltins\nfrozenset\n" + pickle.dumps((range(1 << 60),), 3)[2:-1] + b"\x81."
    with pytest.raises(NotAllowedError, match="with arguments that are not allowed"):
        loads_restricted(payload, (), NOTHING)


@pytest.mark.parametrize(
    ("function", "args", "state"),
    [
        (pathlib.PosixPath, ("/harmless",), (None, {"_str": "/etc/passwd"})),
        (Fraction, (1, 2), (None, {"_numerator": "x"})),
        (OrderedDict, (), {"items": 1}),
        (Counter, (), {"items": 1}),
        (deque, (), {"append": 1}),
    ],
)
def test_what_needs_no_state_gets_none(function: Any, args: Any, state: Any) -> None:
    with pytest.raises(NotAllowedError, match="tries to set a state"):
        loads_restricted(pickle.dumps(Reduced(function, args, state)), (), NOTHING)


FAR = -(10**12)


@pytest.mark.parametrize(
    "forged",
    [
        Reduced(UnicodeDecodeError, ("utf8", b"abc", FAR, FAR + 1, "r")),
        Reduced(UnicodeTranslateError, ("abc", FAR, FAR + 1, "r")),
        Reduced(UnicodeDecodeError, ("utf8", b"abc", 0, 1, "r"), {"start": FAR, "end": FAR + 1}),
        Reduced(UnicodeDecodeError, ("utf8", b"abc", 0, 1, "r"), {"object": 5}),
        Reduced(UnicodeEncodeError, ("utf8", "abc", 0, 1, "r"), {"object": b"abc"}),
    ],
)
def test_an_exception_does_not_show_other_memory(forged: Any) -> None:
    with pytest.raises(NotAllowedError):
        loads_restricted(pickle.dumps(forged), (), NOTHING)


def test_sound_ones_arrive() -> None:
    for error in (
        UnicodeDecodeError("utf8", b"abc", 0, 1, "r"),
        UnicodeEncodeError("utf8", "abc", 1, 3, "r"),
        UnicodeTranslateError("abc", 0, 3, "r"),
        UnicodeError("u"),
    ):
        assert is_sound(error)
        assert str(loads_restricted(pickle.dumps(error), (), NOTHING)) == str(error)
    assert is_sound(7)


def test_reserved_names() -> None:
    assert is_reserved("__reduce_ex__")
    assert not is_reserved("__notes__")
    assert not is_reserved("__private")
    assert not is_reserved("_a")
