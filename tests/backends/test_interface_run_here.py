"""What is run for others, by agents written elsewhere: whatever a function may be, its caller hears of its outcome."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from farcall.backends import run_here
from farcall.functions import async_execution
from farcall.futures import Future
from gates import SOON


def test_a_function_is_run_at_once() -> None:
    assert run_here(max, (3, 4)).value() == 4
    assert run_here(int, ("7",), {"base": 8}).value() == 7
    assert run_here(dict).value() == {}


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_it_raises_is_the_callers(error: BaseException) -> None:
    def fail() -> None:
        raise error

    assert run_here(fail).exception() is error


def test_a_function_that_answers_later() -> None:
    promised: Future[int] = Future()

    @async_execution
    def later() -> Future[int]:
        return promised

    future = run_here(later)
    assert not future.done()
    promised.set_result(3)
    assert future.value() == 3


def test_a_function_that_promises_to_answer_later_and_does_not() -> None:
    @async_execution
    def later() -> Any:
        return 3

    with pytest.raises(TypeError, match=r"must return a Future, but `.*later` returned a "):
        run_here(later).value()


def test_a_coroutine_runs_to_its_end_also_where_a_loop_runs() -> None:
    async def square(number: int) -> int:
        await asyncio.sleep(0)
        return number * number

    async def fail() -> None:
        raise LookupError("nothing there")

    async def ask() -> Any:
        return await run_here(square, (12,))

    assert run_here(square, (12,)).result(SOON) == 144
    assert asyncio.run(ask()) == 144
    assert isinstance(run_here(fail).exception(SOON), LookupError)
