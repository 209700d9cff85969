"""What runs for others: callees of every kind, who waits for whom, and callbacks of the results."""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest
from agent_stage import Counter, add, add_async, fail

from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import call, echo, start

pytestmark = pytest.mark.timeout(30)


# -- callees of every kind


def outer(base: int) -> Callable[[int], int]:
    def inner(value: int) -> int:
        return base + value

    return inner


def default_and_keyword(a: int, /, b: int = 2, *rest: int, c: int, **more: int) -> tuple[Any, ...]:
    return a, b, rest, c, more


@pytest.mark.parametrize(
    ("function", "args", "result"),
    [
        (add, (1, 2), 3),
        (Counter, (5,), Counter(5)),
        (Counter.double, (4,), 8),
        (Counter.name_and, (4,), ("Counter", 4)),
        (Counter(10).plus, (4,), 14),
        (Counter(10), (4,), 14),
        (Counter(10).double, (4,), 8),
        (Counter.plus, (Counter(1), 2), 3),
        (outer(100), (1,), 101),
        (lambda value: value * 3, (2,), 6),
        (functools.partial(add, 1), (2,), 3),
        (functools.partial(functools.partial(add, 1), 2), (), 3),
        (functools.partial(lambda a, b: a - b, 5), (3,), 2),
        (max, (1, 5, 3), 5),
        (len, ("four",), 4),
        (int, ("7",), 7),
        (dict, ([("a", 1)],), {"a": 1}),
        ([1, 2, 3].count, (2,), 1),
        ("a-b".split, ("-",), ["a", "b"]),
        (str.upper, ("x",), "X"),
        (operator.itemgetter(1), ("ab",), "b"),
        (operator.attrgetter("real"), (3,), 3),
        (operator.methodcaller("upper"), ("x",), "X"),
        (functools.reduce, (operator.add, [1, 2, 3]), 6),
        (add_async, (1, 2), 3),
        (functools.partial(add_async, 1), (2,), 3),
        (dict.fromkeys, ("ab",), {"a": None, "b": None}),
    ],
)
def test_every_kind_of_callee(
    group: LocalGroup, function: Callable[..., Any], args: tuple[Any, ...], result: Any
) -> None:
    for to in (1, 0, 1):
        assert call(group[0], to, function, *args) == result


def test_parameters_of_every_kind(group: LocalGroup) -> None:
    assert call(group[0], 1, default_and_keyword, 1, c=3) == (1, 2, (), 3, {})
    assert call(group[0], 1, default_and_keyword, 1, 4, 5, 6, c=3, d=9) == (1, 4, (5, 6), 3, {"d": 9})
    assert call(group[0], 1, lambda *args, **kwargs: (args, kwargs), 1, x=2) == ((1,), {"x": 2})


def test_a_lambda_sees_the_values_it_had(group: LocalGroup) -> None:
    functions = [lambda number=number: number for number in range(3)]
    assert [call(group[0], 1, function) for function in functions] == [0, 1, 2]


@functools.cache
def cached(value: int) -> int:
    return value + 1


def test_a_decorated_function(group: LocalGroup) -> None:
    assert call(group[0], 1, cached, 4) == 5


# -- who waits for whom


def test_a_function_that_blocks_does_not_delay_others(group: LocalGroup) -> None:
    gate = new_gate("slow")
    slow = [start(group[0], 1, wait_at, "slow", n) for n in range(8)]
    assert arrived["slow"].wait(SOON)
    for caller in group:
        began = monotonic()
        assert call(caller, 1, echo, "quick") == "quick"
        assert monotonic() - began < 0.5
    assert not any(future.done() for future in slow)
    gate.set()
    assert [future.wait() for future in slow] == list(range(8))


def test_no_more_functions_run_at_once_than_allowed(new_group: Callable[..., LocalGroup]) -> None:
    group = new_group(2, num_worker_threads=3)
    new_gate("go")
    _running.clear()
    futures = [start(group[0], 1, count_running) for _ in range(40)]
    highest = max(future.wait() for future in futures)
    assert 1 <= highest <= 3


_running: list[int] = []


def count_running() -> int:
    _running.append(1)
    count = len(_running)
    sum(itertools.islice(itertools.count(), 20_000))
    _running.pop()
    return count


# -- callbacks


def test_a_callback_that_raises_a_base_exception_ends_no_thread(
    group: LocalGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    for _ in range(3):
        done = threading.Event()
        future = start(group[0], 1, echo, 1)
        future.add_done_callback(lambda _, done=done: (done.set(), fail(SystemExit(3))))
        assert done.wait(SOON)
    assert call(group[1], 0, echo, "alive") == "alive"
    group.shutdown(graceful=True, timeout=2)


def test_a_callback_that_fails_is_logged(group: LocalGroup, caplog: pytest.LogCaptureFixture) -> None:
    future = start(group[0], 1, echo, 1)
    future.add_done_callback(lambda _: fail(ValueError("in the callback")))
    assert future.then(lambda done: done.value()).wait() == 1
    deadline = monotonic() + SOON
    while "in the callback" not in caplog.text and monotonic() < deadline:
        call(group[0], 1, echo, 1)
    assert "in the callback" in caplog.text
