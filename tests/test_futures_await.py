"""Futures in event loops: awaited, cancelled, and given to asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from farcall import CallCancelledError
from farcall.futures import DONE, Future
from future_stage import Drivable, done


def test_await_gives_the_result_that_another_thread_sets() -> None:
    future: Future[int] = Future()

    async def main() -> int:
        asyncio.get_running_loop().call_soon(threading.Thread(target=future.set_result, args=(8,)).start)
        return await future

    assert asyncio.run(main()) == 8
    assert not future._watchers


def test_await_of_a_future_that_is_done_does_not_suspend() -> None:
    with pytest.raises(StopIteration) as stopped:
        next(done(4).__await__())
    assert stopped.value.value == 4


def test_await_raises_the_error() -> None:
    future: Future[int] = Future()

    async def main() -> None:
        asyncio.get_running_loop().call_soon(future.set_exception, KeyError("remote"))
        with pytest.raises(KeyError, match="remote"):
            await future

    asyncio.run(main())


def test_await_has_the_source_drive_in_background() -> None:
    source = Drivable()
    future = source.future(settled=False)

    async def main() -> object:
        asyncio.get_running_loop().call_soon(lambda: future.settle(DONE, "read in the background"))
        return await future

    assert asyncio.run(main()) == "read in the background"
    assert (source.attended, source.driven) == (1, [])


@pytest.mark.parametrize("when", [asyncio.FIRST_COMPLETED, asyncio.FIRST_EXCEPTION, asyncio.ALL_COMPLETED])
def test_asyncio_wait_takes_our_futures_and_leaves_nothing_on_them(when: str, background: ThreadPoolExecutor) -> None:
    first: Future[int] = Future()
    second: Future[int] = Future()

    async def main() -> tuple[set[Any], set[Any]]:
        background.submit(first.set_exception, KeyError(1))
        if when == asyncio.ALL_COMPLETED:
            background.submit(second.set_result, 2)
        return await asyncio.wait({first, second}, return_when=when, timeout=20)  # type: ignore[type-var]

    finished, pending = asyncio.run(main())
    assert isinstance(first.exception(), KeyError)
    assert finished == ({first, second} if when == asyncio.ALL_COMPLETED else {first})
    assert pending == {first, second} - finished
    assert first._watchers == second._watchers == []


def test_asyncio_wait_with_a_timeout_gives_those_that_are_not_done() -> None:
    future: Future[int] = Future()

    async def main() -> Any:
        return await asyncio.wait([future], timeout=0.01)  # type: ignore[type-var]

    assert asyncio.run(main()) == (set(), {future})
    assert future._watchers == []


def test_a_callback_that_was_added_in_an_event_loop_runs_in_it(background: ThreadPoolExecutor) -> None:
    future: Future[int] = Future()
    threads: list[threading.Thread] = []

    async def main() -> None:
        ran = asyncio.Event()
        for each in (future, done(1)):
            ran.clear()
            each.add_done_callback(lambda _: (threads.append(threading.current_thread()), ran.set()))
            if each is future:
                background.submit(future.set_result, 1)
            else:
                assert len(threads) == 1, "not before the one who added it has gone on"
            await ran.wait()

    asyncio.run(main())
    assert threads == [threading.current_thread()] * 2


def test_a_callback_whose_loop_is_closed_is_dropped() -> None:
    future: Future[int] = Future()
    called: list[object] = []

    async def main() -> None:
        future.add_done_callback(called.append)

    asyncio.run(main())
    future.set_result(1)
    assert called == []


def test_a_callback_is_taken_back_as_often_as_it_was_added() -> None:
    future: Future[int] = Future()
    called: list[object] = []
    for callback in (called.append, print, called.append):
        future.add_done_callback(callback)
    assert future.remove_done_callback(called.append) == 2
    assert future.remove_done_callback(called.append) == 0
    future.set_result(1)
    assert called == []
    assert future.remove_done_callback(print) == 0


def test_nothing_can_be_cancelled() -> None:
    future: Future[int] = Future()
    assert future.cancelled() is False


@pytest.mark.parametrize("function", [concurrent.futures.wait, lambda fs: list(concurrent.futures.as_completed(fs))])
def test_concurrent_futures_says_at_once_what_to_use_instead(function: Callable[..., Any]) -> None:
    with pytest.raises(AttributeError, match=r"use farcall\.wait or farcall\.as_completed"):
        function([Future()])


def test_many_awaits_of_one_future() -> None:
    future: Future[int] = Future()

    async def main() -> list[int]:
        async def one() -> int:
            return await future

        tasks = [asyncio.create_task(one()) for _ in range(10)]
        await asyncio.sleep(0)
        assert len(future._watchers) == 10
        future.set_result(1)
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == [1] * 10


def test_a_cancelled_await_cancels_the_future() -> None:
    future: Future[int] = Future()

    async def main() -> None:
        async def one() -> int:
            return await future

        task = asyncio.create_task(one())
        other = asyncio.create_task(one())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert future.cancelled()
        assert not future._watchers
        with pytest.raises(CallCancelledError):
            await other

    asyncio.run(main())


def test_a_cancelled_await_of_a_shielded_future_leaves_it_alone() -> None:
    future: Future[int] = Future()

    async def main() -> None:
        async def one() -> int:
            return await future

        inner = asyncio.create_task(one())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(inner), 0.001)
        assert not future.done()
        future.set_result(2)
        assert await inner == 2

    asyncio.run(main())


def test_an_await_that_is_cancelled_just_when_the_future_is_settled() -> None:
    future: Future[int] = Future()

    complaints: list[object] = []

    async def main() -> None:
        async def one() -> int:
            return await future

        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
        task = asyncio.create_task(one())
        await asyncio.sleep(0)
        future.set_result(2)  # the wake-up is on its way through the loop
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    asyncio.run(main())
    assert future.wait() == 2
    assert complaints == []


def test_settling_after_the_loop_of_an_await_was_closed() -> None:
    future: Future[int] = Future()

    async def one() -> int:
        return await future

    loop = asyncio.new_event_loop()
    task = loop.create_task(one())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    future.set_result(2)
    assert future.wait() == 2
    # The task is left pending with its loop closed, as a killed loop would; say that it is meant.
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine = task.get_coro()
    assert coroutine is not None
    coroutine.close()
