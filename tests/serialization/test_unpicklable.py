from __future__ import annotations

import threading
from collections import OrderedDict, deque
from functools import partial
from typing import Any

import cloudpickle
import pytest

from farcall.serialization.unpicklable import class_name, find_unpicklable, type_name

LOCK = threading.Lock()


def is_picklable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except TypeError:
        return False
    return True


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
        ([[[[[[[LOCK]]]]]]], "[0]" * 7),
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
    assert find_unpicklable("it", value, is_picklable) == ("it" + way, LOCK)


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
