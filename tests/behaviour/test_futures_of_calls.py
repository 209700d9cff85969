"""Futures of calls: they are done without anybody waiting, and can be waited for from threads and event loops."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import farcall as rpc
from eventually import eventually
from farcall import Future, collect_all, wait_all
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import call, echo, start

pytestmark = pytest.mark.timeout(30)


def fail(error: BaseException) -> None:
    raise error


# -- Nobody waits


def test_a_future_is_done_though_nobody_waits_for_it(group: LocalGroup) -> None:
    futures = [start(group.agents[0], to, echo, to) for to in range(3)]
    eventually(lambda: all(future.done() for future in futures))
    assert [future.value() for future in futures] == [0, 1, 2]


def test_a_future_that_is_not_done_has_no_value_and_says_so(group: LocalGroup) -> None:
    gate = new_gate("pending")
    future = start(group.agents[0], 1, wait_at, "pending", 7)
    assert arrived["pending"].wait(SOON)
    assert not future.done()
    with pytest.raises(RuntimeError):
        future.value()
    gate.set()
    assert future.wait() == future.value() == 7
    assert future.done()


def test_callbacks_run_though_nobody_waits(group: LocalGroup) -> None:
    gate = new_gate("pending")
    future = start(group.agents[0], 1, wait_at, "pending", 7)
    seen: list[Any] = []
    for number in range(3):
        future.add_done_callback(lambda done, number=number: seen.append((number, done.value())))
    assert seen == []
    gate.set()
    eventually(lambda: len(seen) == 3)
    assert seen == [(0, 7), (1, 7), (2, 7)], "in the order in which they were added"
    future.add_done_callback(lambda done: seen.append("at once"))
    assert seen[-1] == "at once"


def test_a_callback_can_be_removed_until_it_has_run(group: LocalGroup) -> None:
    gate = new_gate("pending")
    future = start(group.agents[0], 1, wait_at, "pending", 7)
    seen: list[Any] = []
    future.add_done_callback(seen.append)
    future.add_done_callback(seen.append)
    assert future.remove_done_callback(seen.append) == 2
    gate.set()
    assert future.wait() == 7
    assert future.then(lambda done: done.value()).wait() == 7
    assert seen == []


def test_then_gives_the_result_or_the_error_of_its_callback(group: LocalGroup) -> None:
    assert (
        start(group.agents[0], 1, echo, 3)
        .then(lambda done: done.value() + 1)
        .then(lambda done: done.value() * 10)
        .wait()
        == 40
    )
    failed = start(group.agents[0], 1, fail, LookupError("no")).then(lambda done: done.value())
    with pytest.raises(LookupError, match="no"):
        failed.wait()
    broken = start(group.agents[0], 1, echo, 0).then(lambda done: 1 // done.value())
    eventually(broken.done)
    assert isinstance(broken.exception(), ZeroDivisionError)


def test_an_error_of_a_callback_is_logged_and_stops_no_other(
    group: LocalGroup, caplog: pytest.LogCaptureFixture
) -> None:
    gate = new_gate("pending")
    future = start(group.agents[0], 1, wait_at, "pending", 7)
    seen: list[Any] = []
    future.add_done_callback(lambda _: fail(ValueError("in the callback")))
    future.add_done_callback(lambda done: seen.append(done.value()))
    with caplog.at_level(logging.ERROR, "farcall"):
        gate.set()
        eventually(lambda: seen == [7] and "in the callback" in caplog.text)


def test_a_callback_that_exits_ends_no_thread_of_the_worker(group: LocalGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    for _ in range(20):  # more than there are threads
        done = threading.Event()
        future = start(group.agents[0], 1, echo, 1)
        future.add_done_callback(lambda _, done=done: (done.set(), fail(SystemExit(3))))
        assert done.wait(SOON)
    assert call(group.agents[1], 0, echo, "alive") == "alive"
    group.shutdown(graceful=True, timeout=SOON)


# -- Many futures


def test_collect_all_is_done_when_all_are_and_fails_with_none(group: LocalGroup) -> None:
    gate = new_gate("last")
    futures = [
        start(group.agents[0], 1, echo, 1),
        start(group.agents[0], 2, fail, LookupError()),
        start(group.agents[0], 1, wait_at, "last", 3),
    ]
    together = collect_all(futures)
    eventually(lambda: futures[0].done() and futures[1].done())
    assert not together.done()
    gate.set()
    eventually(together.done)
    good, bad, last = together.value()
    assert (good.value(), last.value()) == (1, 3)
    assert isinstance(bad.exception(), LookupError)


def test_wait_all_gives_the_results_in_order_or_the_first_error_when_all_are_done(group: LocalGroup) -> None:
    assert wait_all([start(group.agents[0], n % 3, echo, n) for n in range(30)]) == list(range(30))
    gate = new_gate("last")
    futures = [
        start(group.agents[0], 1, wait_at, "last"),
        start(group.agents[0], 1, fail, LookupError("first")),
        start(group.agents[0], 1, fail, ValueError("second")),
    ]
    eventually(lambda: futures[1].done() and futures[2].done())
    gate.set()
    with pytest.raises(LookupError, match="first"):
        wait_all(futures)
    assert all(future.done() for future in futures)


def test_the_calls_of_a_block_are_waited_for_at_its_end(alone: None) -> None:
    from farcall import _wait_all

    gate = new_gate("block")
    with _wait_all():
        futures = [rpc.rpc_async("alone", wait_at, args=("block", n)) for n in range(3)]
        assert arrived["block"].wait(SOON)
        gate.set()
    assert [future.done() for future in futures] == [True] * 3
    assert [future.value() for future in futures] == [0, 1, 2]


# -- From many threads


def test_many_threads_that_wait_for_one_future_get_the_same_object(
    group: LocalGroup, background: ThreadPoolExecutor
) -> None:
    gate = new_gate("shared")
    future = start(group.agents[0], 1, wait_at, "shared", [1, 2])
    waiting = [background.submit(future.wait) for _ in range(16)]
    gate.set()
    results = [one.result(SOON) for one in waiting]
    assert all(result is results[0] for result in results)
    assert results[0] == [1, 2]


def test_a_future_can_be_waited_for_by_another_thread_than_the_caller(
    group: LocalGroup, background: ThreadPoolExecutor
) -> None:
    gate = new_gate("crossed")
    futures = [start(group.agents[0], 1, wait_at, "crossed", n) for n in range(8)]
    waiting = [background.submit(future.wait) for future in reversed(futures)]
    assert call(group.agents[0], 1, echo, "meanwhile") == "meanwhile"
    gate.set()
    assert [one.result(SOON) for one in waiting] == list(reversed(range(8)))


def test_a_future_of_a_call_cannot_be_settled_by_hand(group: LocalGroup) -> None:
    gate = new_gate("pending")
    future = start(group.agents[0], 1, wait_at, "pending", 7)
    for settle in (lambda: future.set_result(1), lambda: future.set_exception(ValueError())):
        with pytest.raises(RuntimeError):
            settle()
    gate.set()
    assert future.wait() == 7


def test_a_future_made_by_hand_is_settled_once_and_wakes_all_who_wait(background: ThreadPoolExecutor) -> None:
    future: Future[int] = Future()
    waiting = [background.submit(future.wait) for _ in range(4)]
    future.set_result(5)
    assert [one.result(SOON) for one in waiting] == [5] * 4
    with pytest.raises(RuntimeError):
        future.set_result(6)
    assert future.wait() == 5


# -- From event loops


def test_futures_are_awaited_in_an_event_loop(group: LocalGroup) -> None:
    async def ask() -> list[Any]:
        results = await asyncio.gather(*(start(group.agents[0], n % 3, echo, n) for n in range(20)))
        with pytest.raises(LookupError):
            await start(group.agents[0], 1, fail, LookupError())
        futures: list[Any] = [start(group.agents[0], 1, echo, 1), start(group.agents[0], 2, echo, 2)]
        done, pending = await asyncio.wait(futures)
        assert not pending
        in_order = [await each for each in asyncio.as_completed([start(group.agents[0], 1, echo, 3)])]
        return [*results, sorted([future.value() for future in done]), in_order]

    assert asyncio.run(ask()) == [*range(20), [1, 2], [3]]


def test_event_loops_of_many_threads_await_at_once(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    async def ask(thread: int) -> list[Any]:
        return await asyncio.gather(*(start(group.agents[thread % 3], n % 3, echo, (thread, n)) for n in range(30)))

    results = list(background.map(lambda thread: asyncio.run(ask(thread)), range(8)))
    assert results == [[(thread, n) for n in range(30)] for thread in range(8)]


def test_an_await_that_is_shielded_leaves_the_call_alone(group: LocalGroup) -> None:
    async def ask() -> Any:
        future = start(group.agents[0], 1, wait_at, "awaited", 7)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(awaited(future)), 0.01)
        gate.set()
        return await future

    async def awaited(future: Any) -> Any:
        return await future

    gate = new_gate("awaited")
    assert asyncio.run(ask()) == 7


def test_a_callback_that_is_added_in_an_event_loop_runs_in_that_loop(group: LocalGroup) -> None:
    async def ask() -> tuple[Any, int]:
        seen: asyncio.Future[tuple[Any, int]] = asyncio.get_running_loop().create_future()
        future = start(group.agents[0], 1, wait_at, "loop", 7)
        future.add_done_callback(lambda done: seen.set_result((done.value(), threading.get_ident())))
        gate.set()
        return await asyncio.wait_for(seen, SOON)

    gate = new_gate("loop")
    assert asyncio.run(ask()) == (7, threading.get_ident())
