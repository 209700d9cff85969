from __future__ import annotations

import threading
from collections import OrderedDict, deque
from functools import partial
from typing import Any

import pytest

from farcall.serialization.unpicklable import class_name, find_unpicklable, type_name

LOCK = threading.Lock()


def has_no_lock(value: Any) -> bool:
    """A stand-in for pickling: refuses what holds `LOCK`, by the parts of it that this test uses."""
    return not _holds_lock(value, 0)


def _holds_lock(value: Any, depth: int) -> bool:
    if value is LOCK:
        return True
    if depth > 40 or isinstance(value, (str, int, type, type(None))):
        return False
    if isinstance(value, dict):
        return any(_holds_lock(part, depth + 1) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return any(_holds_lock(part, depth + 1) for part in value)
    if isinstance(value, partial):
        return _holds_lock([value.func, value.args, value.keywords], depth + 1)
    if hasattr(value, "__self__"):
        return _holds_lock(value.__self__, depth + 1)
    if hasattr(value, "__code__"):
        used = [cell.cell_contents for cell in value.__closure__ or ()]
        used += [value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__]
        return _holds_lock([used, value.__defaults__], depth + 1)
    slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    return _holds_lock([slots, vars(value) if hasattr(value, "__dict__") else None], depth + 1)


class Holder:
    def __init__(self, part: Any) -> None:
        self.before = 1
        self.part = part

    def method(self) -> None: ...


class Slotted:
    __slots__ = ("part",)

    def __init__(self, part: Any) -> None:
        self.part = part


def closure() -> Any:
    lock = LOCK
    return lambda: lock


@pytest.mark.parametrize(
    ("value", "way"),
    [
        (LOCK, ""),
        ([0, LOCK], "[1]"),
        ((0, [LOCK]), "[1][0]"),
        ({"a": 1, "b": LOCK}, "['b']"),
        ({LOCK: 1}, f" → key {repr(LOCK)[:37]}..."),
        ({1, LOCK}, " → element"),
        (Holder({"x": LOCK}), ".part['x']"),
        (Slotted(LOCK), ".part"),
        (Holder(LOCK).method, ".__self__.part"),
        (partial(print, LOCK), ".args[0]"),
        (partial(print, end=LOCK), ".keywords['end']"),
        (partial(Holder(LOCK).method), ".func.__self__.part"),
        (deque([0, LOCK]), "[1]"),
        (OrderedDict(a=LOCK), "['a']"),
        (closure(), " → variable 'lock'"),
        (lambda: LOCK, " → global 'LOCK'"),
        (lambda x=LOCK: x, ".__defaults__[0]"),
        (ValueError("x", LOCK), " → part 1"),
    ],
)
def test_the_innermost_part_is_found(value: Any, way: str) -> None:
    def is_picklable(part: Any) -> bool:
        return LOCK not in part.args if isinstance(part, ValueError) else has_no_lock(part)

    assert find_unpicklable("it", value, is_picklable) == ("it" + way, LOCK)


def test_a_value_without_parts_is_to_blame_itself() -> None:
    assert find_unpicklable("it", 5, lambda part: False) == ("it", 5)


def test_a_value_that_raises_when_looked_into_is_to_blame_itself() -> None:
    class Closed:
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise ZeroDivisionError

    closed = Closed()
    assert find_unpicklable("it", [closed], lambda part: False) == ("it[0]", closed)


def test_a_value_that_reduces_to_a_name_has_no_parts() -> None:
    class Named:
        def __reduce_ex__(self, protocol: Any) -> Any:
            return "name"

    named = Named()
    assert find_unpicklable("it", named, lambda part: False) == ("it", named)


def test_circles_and_long_lists_come_to_an_end() -> None:
    circle: list[Any] = []
    circle.append([circle])
    path, _ = find_unpicklable("it", circle, lambda part: False)
    assert len(path) < 100
    trials = []
    long = [0] * 1_000_000
    assert find_unpicklable("it", long, lambda part: not trials.append(part)) == ("it", long)
    assert len(trials) == 1000


def test_type_names_are_full_but_for_builtins() -> None:
    assert type_name(3) == "int"
    assert type_name(LOCK) == "_thread.lock"
    assert type_name(Holder) == "type"
    assert class_name(OrderedDict) == "collections.OrderedDict"


def test_a_type_that_hides_its_name_is_named_all_the_same() -> None:
    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise ZeroDivisionError

    class Hidden(metaclass=Meta):
        pass

    assert type_name(Hidden()).endswith("Hidden")
