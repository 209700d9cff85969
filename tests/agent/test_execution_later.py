"""Functions that run for others and answer later: coroutines, and `async_execution`."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest
from agent_stage import Odd, add, add_async, raise_odd, settled, thread_name

from farcall import RpcTimeoutError, SerializationError
from farcall.functions import async_execution
from farcall.futures import Future
from farcall.gathering import collect_all
from farcall.testing import LocalGroup
from gates import SOON, arrived, await_at, new_gate
from group_stage import call, echo, start

pytestmark = pytest.mark.timeout(30)


# -- async def


def test_coroutines_run_side_by_side_and_hold_up_nobody(new_group: Callable[..., LocalGroup]) -> None:
    group = new_group(2, num_worker_threads=1)
    gate = new_gate("coroutine")
    futures = [start(group[0], 1, await_at, "coroutine") for _ in range(50)]
    assert arrived["coroutine"].wait(SOON)
    assert call(group[0], 1, echo, "served") == "served"
    assert call(group[0], 1, add_async, 1, 2) == 3
    gate.set()
    assert [future.wait() for future in futures] == ["coroutine"] * 50


def test_a_coroutine_that_waits_ends_with_its_worker(group: LocalGroup) -> None:
    new_gate("coroutine")
    future = start(group[0], 1, await_at, "coroutine")
    assert arrived["coroutine"].wait(SOON)
    began = monotonic()
    group[1].shutdown(graceful=False, timeout=0)
    assert monotonic() - began < 2
    assert future.exception(SOON) is not None


async def await_call(group: LocalGroup, here: str, there: str) -> int:
    one, two = await asyncio.gather(_add_on(group, here, there, 1), _add_on(group, here, there, 2))
    return one + two


async def _add_on(group: LocalGroup, here: str, there: str, value: int) -> int:
    return await start(group[here], there, add_async, value, 10)  # type: ignore[no-any-return]


def test_a_coroutine_awaits_calls_of_its_own(group: LocalGroup) -> None:
    assert call(group[0], 1, await_call, group, "worker1", "worker2") == 23
    assert call(group[0], 1, await_call, group, "worker1", "worker1") == 23


def test_futures_are_awaited_in_a_loop_of_the_users(group: LocalGroup) -> None:
    async def main() -> list[int]:
        results = await asyncio.gather(*(_add_on(group, "worker0", "worker1", n) for n in range(20)))
        with pytest.raises(Odd):
            await start(group[0], 1, raise_odd)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_add_on(group, "worker0", "worker1", 1), 0)
        with pytest.raises(RpcTimeoutError):
            await start(group[0], 1, await_at, "coroutine", timeout=0.05)
        return results

    gate = new_gate("coroutine")
    assert asyncio.run(main()) == list(range(10, 30))
    gate.set()


# -- async_execution


class Server:
    """Its functions answer later."""

    waiting: Future[str] = Future()

    @staticmethod
    @async_execution
    def static(value: int) -> Future[int]:
        return settled(value).then(lambda future: future.value() + 1)

    @classmethod
    @async_execution
    def of_class(cls, value: int) -> Future[tuple[str, int]]:
        return settled((cls.__name__, value))

    @async_execution
    def bound(self, value: int) -> Future[int]:
        return settled(value * 2)


@async_execution
def later(group: LocalGroup, here: str, there: str, value: int) -> Future[int]:
    return start(group[here], there, add, value).then(lambda future: future.value() + 10)  # type: ignore[no-any-return]


@async_execution
def all_later(group: LocalGroup, here: str, values: list[int]) -> Future[list[int]]:
    futures = [start(group[here], rank % 3, add, value) for rank, value in enumerate(values)]
    return collect_all(futures).then(lambda done: [future.value() for future in done.value()])


@async_execution
def hold_future() -> Future[str]:
    arrived["held"].set()
    return Server.waiting


@async_execution
def fails_later() -> Future[int]:
    return settled(0).then(lambda _: raise_odd())  # type: ignore[arg-type,return-value]


@async_execution
def fails_now() -> Future[int]:
    raise Odd(1, reason="now")


@async_execution
def forgets_the_future() -> Future[int]:
    return 5  # type: ignore[return-value]


@async_execution
def cannot_be_pickled_later() -> Future[Any]:
    return settled(threading.Lock())


def test_async_execution_beneath_every_kind_of_method(group: LocalGroup) -> None:
    assert call(group[0], 1, Server.static, 1) == 2
    assert call(group[0], 1, Server().static, 1) == 2
    assert call(group[0], 1, Server.of_class, 1) == ("Server", 1)
    assert call(group[0], 1, Server().bound, 4) == 8
    assert call(group[0], 1, functools.partial(Server.static, 1)) == 2
    assert call(group[0], 1, async_execution(lambda value: settled(value)), 3) == 3


def test_async_execution_chains_over_workers(group: LocalGroup) -> None:
    assert call(group[0], 1, later, group, "worker1", "worker2", 5) == 16
    assert call(group[0], 1, later, group, "worker1", "worker1", 5) == 16
    assert call(group[0], 1, all_later, group, "worker1", [1, 2, 3, 4]) == [2, 3, 4, 5]


def test_async_execution_holds_no_thread(new_group: Callable[..., LocalGroup]) -> None:
    group = new_group(2, num_worker_threads=1)
    Server.waiting = Future()
    new_gate("held")
    futures = [start(group[0], 1, hold_future) for _ in range(20)]
    assert arrived["held"].wait(SOON)
    assert call(group[0], 1, thread_name).startswith("farcall-worker1-")
    assert not any(future.done() for future in futures)
    Server.waiting.set_result("released")
    assert [future.wait() for future in futures] == ["released"] * 20


def test_async_execution_fails_now_and_later(group: LocalGroup) -> None:
    for function in (fails_later, fails_now):
        with pytest.raises(Odd):
            call(group[0], 1, function)
    with pytest.raises(TypeError, match="must return a Future, but what `forgets_the_future` returned is of type int"):
        call(group[0], 1, forgets_the_future)
    with pytest.raises(SerializationError, match="`cannot_be_pickled_later`"):
        call(group[0], 1, cannot_be_pickled_later)


def test_async_execution_times_out_like_any_call(group: LocalGroup) -> None:
    Server.waiting = Future()
    new_gate("held")
    began = monotonic()
    with pytest.raises(RpcTimeoutError, match="`hold_future`"):
        call(group[0], 1, hold_future, timeout=0.1)
    assert monotonic() - began < 0.6
    Server.waiting.set_result("too late")
    assert call(group[0], 1, echo, "alive") == "alive"
