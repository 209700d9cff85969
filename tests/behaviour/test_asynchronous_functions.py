"""Functions that answer later, `async def` and `async_execution`: they hold no thread while they wait."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import Any

import pytest

from eventually import eventually
from farcall import Future, collect_all
from farcall.functions import async_execution
from farcall.testing import LocalGroup
from gates import SOON, arrived, await_at, new_gate
from group_stage import NewGroup, call, echo, run, runs, start

pytestmark = pytest.mark.timeout(30)


class Odd(Exception):
    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def settled(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


# -- async def


async def add_async(left: int, right: int) -> int:
    await asyncio.sleep(0)
    return left + right


async def add_there(group: LocalGroup, here: str, there: str, value: int) -> Any:
    one, two = await asyncio.gather(
        start(group.agents[here], there, add_async, value, 1), start(group.agents[here], there, add_async, value, 2)
    )
    return one + two


async def note_loop() -> int:
    return id(asyncio.get_running_loop())


def test_coroutines_run_side_by_side_and_hold_no_thread(make_group: NewGroup) -> None:
    group = make_group(2, num_worker_threads=1)
    gate = new_gate("coroutine")
    futures = [start(group.agents[0], 1, await_at, "coroutine") for _ in range(50)]
    assert arrived["coroutine"].wait(SOON)
    assert call(group.agents[0], 1, echo, "served") == "served"
    assert call(group.agents[0], 1, add_async, 1, 2) == 3
    assert not any(future.done() for future in futures)
    gate.set()
    assert [future.wait() for future in futures] == ["coroutine"] * 50


def test_coroutines_share_one_event_loop_of_the_worker(group: LocalGroup) -> None:
    assert len({call(group.agents[caller], 1, note_loop) for caller in (0, 2, 0)}) == 1


def test_a_coroutine_awaits_calls_of_its_own(group: LocalGroup) -> None:
    for there in ("worker0", "worker1", "worker2"):
        assert call(group.agents[0], 1, add_there, group, "worker1", there, 10) == 23


def test_a_remote_call_of_a_coroutine_keeps_its_result(group: LocalGroup) -> None:
    rref = group.remote(0, 1, add_async, (1, 2))
    assert rref.to_here() == 3
    assert rref.owner_name() == "worker1"


ended: list[str] = []


async def wait_until_cancelled() -> None:
    try:
        runs.append("waits")
        await asyncio.Event().wait()
    finally:
        ended.append("cancelled")


def test_coroutines_are_cancelled_when_their_worker_shuts_down(group: LocalGroup) -> None:
    ended.clear()
    future = start(group.agents[0], 1, wait_until_cancelled)
    eventually(lambda: runs == ["waits"])
    group.agents[1].shutdown(graceful=False)
    assert future.exception(SOON) is not None
    assert ended == ["cancelled"]


# -- async_execution


class Server:
    """Its functions answer later."""

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
def add_later(group: LocalGroup, here: str, there: str, value: int) -> Future[Any]:
    return start(group.agents[here], there, add_async, value, 1).then(lambda future: future.value() + 10)


@async_execution
def add_everywhere(group: LocalGroup, here: str, values: list[int]) -> Future[Any]:
    futures = [start(group.agents[here], rank % 3, add_async, value, 1) for rank, value in enumerate(values)]
    return collect_all(futures).then(lambda done: [future.value() for future in done.value()])


by_hand: Future[str] = Future()


@async_execution
def return_by_hand() -> Future[str]:
    run("held")
    return by_hand


@async_execution
def settle_in_thread(value: int) -> Future[int]:
    future: Future[int] = Future()
    threading.Thread(target=future.set_result, args=(value,)).start()
    return future


@async_execution
def fail_later() -> Future[int]:
    def fail(_: Any) -> int:
        raise Odd(2, reason="later")

    return settled(0).then(fail)


@async_execution
def fail_now() -> Future[int]:
    raise Odd(1, reason="now")


@async_execution
def return_no_future() -> Future[int]:
    return 5  # type: ignore[return-value]


def test_async_execution_works_beneath_every_kind_of_method(group: LocalGroup) -> None:
    assert call(group.agents[0], 1, Server.static, 1) == 2
    assert call(group.agents[0], 1, Server().static, 1) == 2
    assert call(group.agents[0], 1, Server.of_class, 1) == ("Server", 1)
    assert call(group.agents[0], 1, Server().bound, 4) == 8
    assert call(group.agents[0], 1, functools.partial(Server.static, 1)) == 2
    assert call(group.agents[0], 1, async_execution(lambda value: settled(value)), 3) == 3
    assert group.remote(0, 1, Server.static, (1,)).to_here() == 2
    server = group.remote(0, 1, Server)
    assert server.rpc_sync().bound(4) == 8
    assert server.remote().static(4).to_here() == 5


def test_the_future_may_be_of_another_call_of_many_or_settled_by_a_thread(group: LocalGroup) -> None:
    assert call(group.agents[0], 1, add_later, group, "worker1", "worker2", 5) == 16
    assert call(group.agents[0], 1, add_later, group, "worker1", "worker1", 5) == 16
    assert call(group.agents[0], 1, add_everywhere, group, "worker1", [1, 2, 3, 4]) == [2, 3, 4, 5]
    assert call(group.agents[0], 1, settle_in_thread, 7) == 7


def test_no_thread_is_held_until_the_future_is_settled(make_group: NewGroup) -> None:
    global by_hand
    by_hand = Future()
    group = make_group(2, num_worker_threads=1)
    futures = [start(group.agents[0], 1, return_by_hand) for _ in range(20)]
    eventually(lambda: len(runs) == 20)
    assert call(group.agents[0], 1, echo, "served") == "served"
    assert not any(future.done() for future in futures)
    by_hand.set_result("released")
    assert [future.wait() for future in futures] == ["released"] * 20


def test_errors_of_async_execution_reach_the_caller(group: LocalGroup) -> None:
    for function, code in ((fail_now, 1), (fail_later, 2)):
        with pytest.raises(Odd) as caught:
            call(group.agents[0], 1, function)
        assert caught.value.code == code
    with pytest.raises(TypeError, match="must return a Future, but `return_no_future` returned a int"):
        call(group.agents[0], 1, return_no_future)


def test_async_execution_of_a_coroutine_function_is_refused_with_advice() -> None:
    with pytest.raises(TypeError, match="async"):
        async_execution(add_async)  # type: ignore[arg-type]
