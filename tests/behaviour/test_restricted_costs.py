"""A short message must not cost a worker much: its memory, its time, or its C stack.

Pickle sends what is there twice only once, so a few bytes can stand for any number of copies.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from farcall import RpcBackendOptions
from farcall.collectives import Key, _time_is_over
from farcall.errors import RemoteError, RpcError
from farcall.testing import LocalGroup

SOON = 20.0


class Reduced:
    """What a pickle can be made to say."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> Any:
        return self._parts


received: list[Any] = []


def receive(value: Any) -> None:
    received.append(value)


@pytest.fixture
def group() -> Iterator[LocalGroup]:
    received.clear()
    with LocalGroup(2, RpcBackendOptions(allow=[__name__])) as group:
        yield group
    received.clear()


def call(group: LocalGroup, function: Any, *args: Any) -> Any:
    return group.agents[0].call("worker1", function, args, None, SOON).wait()


def in_arrays(value: Any) -> Any:
    array = np.empty(1, object)
    array[0] = value
    return array


def nested(hold: Any, levels: int) -> Any:
    value: Any = None
    for _ in range(levels):
        value = hold(value)
    return value


HOLDERS = [
    pytest.param(lambda value: deque([value]), id="deques"),
    pytest.param(lambda value: slice(value, None), id="slices"),
    pytest.param(in_arrays, id="arrays"),
    pytest.param(lambda value: deque([in_arrays(value)]), id="arrays in deques"),
    pytest.param(lambda value: Reduced(OSError, (), {"filename": value}), id="exceptions"),
    pytest.param(lambda value: Reduced(StopIteration, (value,)), id="arguments of exceptions"),
]


@pytest.mark.parametrize("hold", HOLDERS)
def test_what_the_interpreter_frees_recursively_is_not_nested_deeply(group: LocalGroup, hold: Any) -> None:
    call(group, receive, nested(hold, 4))
    with pytest.raises(RpcError, match="nested more than 30 deep"):
        call(group, receive, nested(hold, 40))
    assert len(received) == 1


_SHARED = b"x" * (1 << 20)
_TEXT = "1" * (1 << 20)


@pytest.mark.parametrize(
    "forged",
    [
        pytest.param(Reduced(range, (0, 1 << 100_000, 1 << 50_000)), id="a division of large numbers"),
        pytest.param(Reduced(Decimal, (1 << 100_000,)), id="a large number in another base"),
        pytest.param(Reduced(frozenset, ([(1, 2)],)), id="hashes that nobody has counted"),
        pytest.param(Reduced(set, ([(1, 2)],)), id="the same in a set"),
        pytest.param([Reduced(bytearray, (_SHARED,)) for _ in range(100)], id="copies of bytes"),
        pytest.param([Reduced(Decimal, (_TEXT,)) for _ in range(100)], id="copies of a text"),
        pytest.param(np.zeros(1, [("a", "O", (1 << 20,))]), id="records of many objects"),
        pytest.param(
            Reduced(np.dtype, ("T,i4", False, True), (3, "|", None, None, None, -1, -1, 0)), id="texts in a record"
        ),
        pytest.param(
            Reduced(np.dtype, ("i4," * 1000, False, True), (3, "|", None, None, None, -1, -1, 0)),
            id="a text of records",
        ),
        pytest.param(
            Reduced(
                np.dtype, ("M8", False, True), (4, "<", None, None, None, -1, -1, 0, ({}, (b"s],O,M8[s", 1, 1, 1)))
            ),
            id="a unit of records",
        ),
    ],
)
def test_a_value_that_costs_more_than_it_sends_is_refused(group: LocalGroup, forged: Any) -> None:
    with pytest.raises(RpcError, match=r"not allowed|cannot be rebuilt"):
        call(group, receive, forged)
    assert received == []


def test_values_that_look_alike_arrive(group: LocalGroup) -> None:
    values = [
        range(0, 1 << 200, 3),
        Decimal("1E+20"),
        {(1, 2), 3},
        frozenset([(1, 2)]),
        [bytearray(b"x" * 1000) for _ in range(100)],
        [Decimal(number) for number in range(1000)],
        1 << 100_000,
        slice(1, 2),
    ]
    call(group, receive, values)
    assert received == [values]


def test_the_time_of_one_who_waits_is_a_number(group: LocalGroup) -> None:
    key = Key(("worker0", "worker1"), (0, 1), 0)
    with pytest.raises(RpcError, match="in place of a time"):
        call(group, _time_is_over, key, Decimal("1E+7"))


# Failures of a callee


def fail(kind: str) -> None:
    raise _Forged(kind, 0)


class _Forged(Exception):
    """Has itself replaced on its way out."""


def _node(**given: Any) -> tuple[Any, ...]:
    fields: dict[str, Any] = {"type": "E", "message": "m", "notes": [], "recipe": None}
    fields |= {"cause": None, "context": None, "last": False}
    return tuple((fields | given).values())


def _bare(args: list[Any]) -> tuple[Any, ...]:
    return "bare", pickle.dumps(ValueError, 5), (args, {}, {})


def _nodes(kind: str) -> list[Any]:
    if kind == "notes":
        return [_node(notes=["x" * 100_000] * 2000)]
    if kind == "names":
        return [_node(type="x" * 1_000_000)] * 100
    if kind == "pickles":
        return [_node(recipe=_bare([(1, pickle.dumps(list(range(1000)), 5), "x")] * 2000))]
    if kind == "values":
        return [_node(recipe=_bare([(0, 1)] * 50_000))] * 10
    if kind == "members":
        group: tuple[Any, ...] = ("group", pickle.dumps(ExceptionGroup, 5), ([], {}, {}), "m", [0] * 100_000)
        return [_node(), *[_node(recipe=group)] * 10]
    return [_node(recipe=_bare([(0, "x")]), notes=["a note"])]


@pytest.fixture
def forging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures with the exception `_Forged` are written by hand."""
    real = pickle.dumps

    def dumps(value: Any, *args: Any, **kwargs: Any) -> bytes:
        if type(value) is tuple and len(value) == 3 and type(value[2]) is list and "_Forged" in str(value[2][0][0]):
            value = (*value[:2], _nodes(value[2][0][3][2][0][0][1]))
        return real(value, *args, **kwargs)

    monkeypatch.setattr(pickle, "dumps", dumps)


@pytest.mark.parametrize("allow", [None, [__name__]], ids=["trusted", "restricted"])
@pytest.mark.parametrize("kind", ["notes", "names", "pickles", "values", "members"])
def test_a_failure_that_uses_the_same_again_and_again_is_not_read(
    forging: None, kind: str, allow: list[str] | None
) -> None:
    with LocalGroup(2, RpcBackendOptions(allow=allow)) as group:
        with pytest.raises(ValueError, match="x") as plain:
            call(group, fail, "one")
        assert "a note" in plain.value.__notes__
        with pytest.raises(RemoteError, match="again and again"):
            call(group, fail, kind)
