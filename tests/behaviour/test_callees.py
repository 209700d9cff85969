"""What can be called on another worker: functions by name, and functions, methods and objects by value."""

from __future__ import annotations

import asyncio
import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest

from farcall.testing import LocalGroup
from group_stage import call, echo
from worker_processes import StartWorkers

pytestmark = pytest.mark.timeout(60)


def add(left: int, right: int) -> int:
    return left + right


async def add_async(left: int, right: int) -> int:
    await asyncio.sleep(0)
    return left + right


def adder(base: int) -> Callable[[int], int]:
    def inner(value: int) -> int:
        return base + value

    return inner


@functools.cache
def cached(value: int) -> int:
    return value + 1


class Counter:
    def __init__(self, total: int = 0) -> None:
        self.total = total

    def plus(self, amount: int) -> int:
        self.total += amount
        return self.total

    def __call__(self, amount: int) -> int:
        return self.total + amount

    @staticmethod
    def double(value: int) -> int:
        return 2 * value

    @classmethod
    def name_and(cls, value: int) -> tuple[str, int]:
        return cls.__name__, value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counter) and other.total == self.total

    __hash__ = None  # type: ignore[assignment]


CALLEES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {
    "function": (add, (1, 2), 3),
    "class": (Counter, (5,), Counter(5)),
    "static method": (Counter.double, (4,), 8),
    "class method": (Counter.name_and, (4,), ("Counter", 4)),
    "bound method": (Counter(10).plus, (4,), 14),
    "unbound method": (Counter.plus, (Counter(1), 2), 3),
    "callable object": (Counter(10), (4,), 14),
    "closure": (adder(100), (1,), 101),
    "lambda": (lambda value: value * 3, (2,), 6),
    "partial": (functools.partial(add, 1), (2,), 3),
    "partial of a lambda": (functools.partial(lambda a, b: a - b, 5), (3,), 2),
    "decorated function": (cached, (4,), 5),
    "builtin": (max, (1, 5, 3), 5),
    "builtin type": (int, ("7",), 7),
    "method of a builtin object": ("a-b".split, ("-",), ["a", "b"]),
    "method of a builtin type": (str.upper, ("x",), "X"),
    "class method of a builtin type": (dict.fromkeys, ("ab",), {"a": None, "b": None}),
    "itemgetter": (operator.itemgetter(1), ("ab",), "b"),
    "coroutine function": (add_async, (1, 2), 3),
    "partial of a coroutine function": (functools.partial(add_async, 1), (2,), 3),
    "function that takes a function": (functools.reduce, (operator.add, [1, 2, 3]), 6),
}


@pytest.mark.parametrize("kind", CALLEES)
def test_every_kind_of_callee_runs_on_another_worker_and_on_this_one(group: LocalGroup, kind: str) -> None:
    function, args, result = CALLEES[kind]
    for to in (1, 0, 1):
        assert call(group.agents[0], to, function, *args) == result
    assert group.remote(0, 1, function, args).to_here() == result


def test_parameters_of_every_kind_are_passed_on(group: LocalGroup) -> None:
    def parameters(a: int, /, b: int = 2, *rest: int, c: int, **more: int) -> tuple[Any, ...]:
        return a, b, rest, c, more

    assert call(group.agents[0], 1, parameters, 1, c=3) == (1, 2, (), 3, {})
    assert call(group.agents[0], 1, parameters, 1, 4, 5, 6, c=3, d=9) == (1, 4, (5, 6), 3, {"d": 9})


def test_a_lambda_keeps_the_values_that_it_had_when_it_was_sent(group: LocalGroup) -> None:
    functions = [lambda number=number: number for number in range(3)]
    assert [call(group.agents[0], 1, function) for function in functions] == [0, 1, 2]


def test_a_bound_method_changes_a_copy_of_its_object(group: LocalGroup) -> None:
    counter = Counter(1)
    assert call(group.agents[0], 1, counter.plus, 2) == 3
    assert counter.total == 1


def test_functions_are_arguments_and_results_too(group: LocalGroup) -> None:
    assert call(group.agents[0], 1, sorted, ["a", "bb"], key=lambda text: -len(text)) == ["bb", "a"]
    assert call(group.agents[0], 1, adder, 5)(2) == 7
    assert call(group.agents[0], 1, echo, add) is add


def test_a_function_by_name_sees_the_globals_of_the_worker_that_runs_it_and_a_lambda_takes_its_own_along(
    workers: StartWorkers,
) -> None:
    script = """
    state = {"rank": RANK}
    rank = RANK
    class Point:
        def __init__(self, x): self.x = x
    def read(): return state["rank"]
    def change(): state["rank"] = 10 + RANK
    start()
    if RANK == 0:
        report(by_name=[rpc.rpc_sync(to, read) for to in range(SIZE)],
               by_value=[rpc.rpc_sync(to, lambda: rank) for to in range(SIZE)],
               of_a_class=type(rpc.rpc_sync("w1", Point, args=(3,))) is Point)
        rpc.rpc_sync("w1", change)
        report(changed=[rpc.rpc_sync(to, read) for to in range(SIZE)])
    rpc.shutdown()
    """
    facts = workers(script).finish()[0]
    assert facts == {"by_name": [0, 1], "by_value": [0, 0], "of_a_class": True, "changed": [0, 11]}
