"""Futures: what each name does, one thread at a time; then settling against watching, over every interleaving."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import itertools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from eventually import eventually
from farcall import futures
from farcall.futures import DONE, FAILED, UNLOADED, Future, UnseenFailureWarning, run_callbacks, settle_failed
from farcall.gathering import collect_all, wait_all
from farcall.sleeping import FOREVER, Gate, asleep, blocking_thread, on_serving_thread
from interleaving import Schedule, explore
from interruption import At, Interrupt


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def has_sleeper(future: Future[Any]) -> bool:
    return any(waker for waker, _ in future._watchers)


class Drivable:
    """A source that settles what it is told to when it is driven."""

    def __init__(self) -> None:
        self.attended = 0
        self.driven: list[tuple[Future[Any], float]] = []
        self.settles: dict[Future[Any], Any] = {}

    def future(self, result: Any = None, *, settled: bool = True) -> Future[Any]:
        future: Future[Any] = Future()
        future._source = self
        if settled:
            self.settles[future] = result
        return future

    def drive(self, future: Future[Any], deadline: float) -> None:
        self.driven.append((future, deadline))
        if future in self.settles:
            run_callbacks(future, future.settle(DONE, self.settles.pop(future)))

    def attend(self) -> None:
        self.attended += 1


# The result


def test_a_new_future_is_pending() -> None:
    future: Future[int] = Future()
    assert not future.done()
    assert repr(future) == "<Future pending>"
    with pytest.raises(RuntimeError, match="not done: call wait"):
        future.value()


def test_devices_are_accepted_as_torch_has_them() -> None:
    assert not Future(devices=["cuda:0"]).done()


def test_a_result() -> None:
    future = done(7)
    assert future.done()
    assert (future.wait(), future.result(), future.result(0), future.value()) == (7, 7, 7, 7)
    assert future.exception() is None
    assert repr(future) == "<Future done>"


def test_none_is_a_result_too() -> None:
    future = done(None)
    assert future.done()
    assert future.wait() is None


def test_an_error_is_raised_by_every_way_to_the_result_and_is_the_very_object() -> None:
    error = KeyError("gone")
    future = failed(error)
    assert future.done()
    for look in (future.wait, future.result, future.value):
        with pytest.raises(KeyError) as raised:
            look()
        assert raised.value is error
    assert future.exception() is error
    assert repr(future) == "<Future failed>"


def test_a_base_exception_is_an_error_like_any_other() -> None:
    with pytest.raises(SystemExit):
        failed(SystemExit(3)).wait()


@pytest.mark.parametrize("wrong", ["text", ValueError, None])
def test_only_an_exception_can_be_the_error(wrong: Any) -> None:
    future: Future[int] = Future()
    with pytest.raises(TypeError, match="takes an exception"):
        future.set_exception(wrong)
    assert not future.done()


@pytest.mark.parametrize("first", [done(1), failed(ValueError("first"))], ids=["done", "failed"])
def test_a_future_is_settled_once(first: Future[Any]) -> None:
    before = (first.exception(), first._value)
    with pytest.raises(RuntimeError, match="only once"):
        first.set_result(2)
    with pytest.raises(RuntimeError, match="only once"):
        first.set_exception(ValueError("second"))
    assert (first.exception(), first._value) == before


@pytest.mark.parametrize("look", [Future.result, Future.exception])
@pytest.mark.parametrize("timeout", [0, 0.001, -1])
def test_the_time_of_a_wait_ends_and_the_future_lives_on(look: Callable[..., Any], timeout: float) -> None:
    future: Future[int] = Future()
    with pytest.raises(TimeoutError, match=f"<Future pending> was not done within {timeout} s"):
        look(future, timeout)
    assert not future._watchers, "who has gone must be forgotten"
    future.set_result(1)
    assert future.result(0) == 1


@pytest.mark.parametrize("wait", [Future.wait, Future.result, lambda future: future.result(60)])
def test_a_sleeping_thread_is_woken(wait: Callable[[Future[int]], int], background: ThreadPoolExecutor) -> None:
    future: Future[int] = Future()
    waiting = [background.submit(wait, future) for _ in range(3)]
    eventually(lambda: len(future._watchers) == 3)
    future.set_result(5)
    assert [each.result() for each in waiting] == [5, 5, 5]


def test_exception_wakes_too(background: ThreadPoolExecutor) -> None:
    future: Future[int] = Future()
    waiting = background.submit(future.exception)
    eventually(lambda: has_sleeper(future))
    error = ValueError("later")
    future.set_exception(error)
    assert waiting.result() is error


def test_block_says_whether_it_is_settled_and_raises_nothing() -> None:
    assert failed_seen(ValueError("x")).block(FOREVER)
    assert not Future[int]().block(time.monotonic())


def failed_seen(error: BaseException) -> Future[Any]:
    future = failed(error)
    future.exception()
    return future


# Callbacks


def test_a_callback_gets_the_future_when_it_is_settled() -> None:
    future: Future[int] = Future()
    got: list[object] = []
    future.add_done_callback(got.append)
    assert not got
    future.set_result(1)
    assert got == [future]


def test_a_callback_of_a_future_that_is_done_runs_at_once() -> None:
    future = done(1)
    got: list[object] = []
    future.add_done_callback(got.append)
    assert got == [future]


def test_callbacks_run_in_their_order_each_once() -> None:
    future: Future[int] = Future()
    got: list[int] = []
    for number in range(5):
        future.add_done_callback(lambda _, number=number: got.append(number))
    future.set_result(1)
    future.add_done_callback(lambda _: got.append(5))
    assert got == [0, 1, 2, 3, 4, 5]


def test_what_a_callback_raises_is_logged_and_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    future: Future[int] = Future()
    got: list[object] = []
    future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(got.append)
    with caplog.at_level(logging.ERROR, "farcall"):
        future.set_result(1)
    assert got == [future]
    (record,) = caplog.records
    assert record.getMessage() == "a callback of <Future done> failed"
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_a_callback_that_exits_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    future: Future[int] = Future()
    got: list[object] = []

    def leave(_: Future[int]) -> None:
        raise SystemExit

    future.add_done_callback(leave)
    future.add_done_callback(got.append)
    with caplog.at_level(logging.ERROR, "farcall"):
        future.set_result(1)
    assert got == [future]
    assert len(caplog.records) == 1


def test_then_gives_a_future_of_what_the_callback_returns() -> None:
    future: Future[int] = Future()
    doubled = future.then(lambda f: 2 * f.value())
    text = doubled.then(lambda f: str(f.value()))
    assert not doubled.done()
    future.set_result(4)
    assert (doubled.wait(), text.wait()) == (8, "8")
    assert future.then(lambda f: f.wait() + 1).wait() == 5


@pytest.mark.parametrize("error", [ZeroDivisionError("in callback"), SystemExit(1)])
def test_then_fails_with_what_the_callback_raises(error: BaseException) -> None:
    def fail(_: Future[int]) -> None:
        raise error

    derived = done(1).then(fail)
    assert derived.exception() is error


def test_a_failure_goes_through_a_chain_of_then() -> None:
    future: Future[int] = Future()
    last = future.then(lambda f: f.wait() + 1).then(lambda f: f.wait() + 1)
    future.set_exception(KeyError("at the start"))
    with pytest.raises(KeyError, match="at the start"):
        last.wait()


def test_a_callback_may_wait_for_another_future(background: ThreadPoolExecutor) -> None:
    first: Future[int] = Future()
    second: Future[int] = Future()
    both = first.then(lambda f: f.value() + second.wait())
    settling = background.submit(first.set_result, 1)
    eventually(lambda: has_sleeper(second))
    assert not both.done()
    second.set_result(10)
    settling.result()
    assert both.wait() == 11


def test_a_callback_may_watch_and_settle_other_futures() -> None:
    first: Future[int] = Future()
    second: Future[int] = Future()
    got: list[str] = []
    first.add_done_callback(lambda _: second.add_done_callback(lambda _: got.append("second")))
    first.add_done_callback(lambda _: second.set_result(2))
    first.add_done_callback(lambda f: f.add_done_callback(lambda _: got.append("first")))
    first.set_result(1)
    assert got == ["second", "first"]


# The source


def test_who_waits_drives_the_source() -> None:
    source = Drivable()
    future = source.future(3)
    assert future.wait() == 3
    assert source.driven == [(future, FOREVER)]
    assert source.attended == 0, "who waits itself needs nobody to attend"


def test_a_wait_with_a_timeout_drives_until_then() -> None:
    source = Drivable()
    future = source.future(3)
    before = time.monotonic()
    assert future.result(100) == 3
    ((driven, deadline),) = source.driven
    assert driven is future
    assert before + 100 <= deadline <= time.monotonic() + 100


def test_a_future_that_its_source_gave_up_before_it_was_settled_is_waited_for(background: ThreadPoolExecutor) -> None:
    source = Drivable()
    future = source.future(settled=False)
    waiting = background.submit(future.wait)
    eventually(lambda: has_sleeper(future))
    run_callbacks(future, future.settle(DONE, 9))
    assert waiting.result() == 9


def test_a_callback_has_the_source_attend_as_long_as_it_is_pending() -> None:
    source = Drivable()
    future = source.future(3)
    future.add_done_callback(lambda _: None)
    assert source.attended == 1
    future.then(lambda _: None)
    assert source.attended == 2
    future.wait()
    future.add_done_callback(lambda _: None)
    assert source.attended == 2


def test_waiting_for_a_derived_future_drives_where_it_comes_from() -> None:
    source = Drivable()
    future = source.future(3)
    derived = future.then(lambda f: f.value() + 1).then(lambda f: f.value() * 2)
    assert derived.wait() == 8
    assert [driven for driven, _ in source.driven] == [future]
    derived.attend()  # a source too, but there is nothing to do


def test_settle_hands_the_callbacks_to_the_settler_and_runs_none() -> None:
    future: Future[int] = Future()
    woken: list[object] = []
    called: list[object] = []
    future.watch(called.append, waker=False)
    future.watch(woken.append, waker=True)
    callbacks = future.settle(DONE, 1)
    assert (woken, called) == ([future], [])
    run_callbacks(future, callbacks)
    assert called == [future]
    assert Future[int]().settle(DONE, 1) is None


def test_settle_failed_hands_out_the_callbacks() -> None:
    future: Future[int] = Future()
    got: list[BaseException | None] = []
    future.add_done_callback(lambda f: got.append(f.exception()))
    error = ValueError("x")
    run_callbacks(future, settle_failed(future, error))
    assert got == [error]


class LateReply:
    """A reply that is loaded by whoever wants it."""

    def __init__(self, outcome: tuple[int, Any], lock: Any = None) -> None:
        self.lock = lock if lock is not None else threading.Lock()
        self.loaded = 0
        self._outcome = outcome

    def load(self) -> tuple[int, Any]:
        self.loaded += 1
        return self._outcome


def test_a_reply_is_loaded_once_and_only_when_it_is_wanted() -> None:
    future: Future[int] = Future()
    reply = LateReply((DONE, 6))
    future.settle(UNLOADED, reply)
    assert future.done()
    assert repr(future) == "<Future done>"
    assert reply.loaded == 0
    assert (future.wait(), future.value(), future.exception()) == (6, 6, None)
    assert reply.loaded == 1


def test_a_reply_may_turn_out_to_be_a_failure() -> None:
    future: Future[int] = Future()
    error = ValueError("remote")
    future.settle(UNLOADED, LateReply((FAILED, error)))
    assert future.exception() is error
    with pytest.raises(ValueError, match="remote"):
        future.value()


@pytest.mark.parametrize("result", [SimpleNamespace(lock="a lock of the user's", load="heavy"), 5])
def test_a_result_that_looks_like_a_reply_is_a_result(result: Any) -> None:
    future: Future[Any] = Future()
    future.settle(UNLOADED, LateReply((DONE, result)))
    assert future.wait() is result
    assert future.exception() is None
    assert future.wait() is result


# await


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


def test_await_has_the_source_attend() -> None:
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
    with pytest.raises(AttributeError, match=r"use farcall\.wait_all"):
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


def test_a_cancelled_await_leaves_the_future_alone() -> None:
    future: Future[int] = Future()

    async def main() -> None:
        async def one() -> int:
            return await future

        task = asyncio.create_task(one())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not future.done()
        assert not future._watchers
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one(), 0.001)
        future.set_result(2)
        assert await future == 2

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
    task.get_coro().close()


# Many futures


def test_collect_all_is_done_when_all_are_and_gives_them() -> None:
    first: Future[int] = Future()
    second: Future[int] = Future()
    collected = collect_all([first, second])
    second.set_result(2)
    assert not collected.done()
    first.set_result(1)
    assert collected.wait() == [first, second]
    assert collect_all(iter([first, second])).wait() == [first, second]


def test_collect_all_of_nothing_is_done() -> None:
    assert collect_all([]).wait() == []


@pytest.mark.parametrize("function", [collect_all, wait_all])
def test_only_futures_can_be_waited_for(function: Callable[[list[Any]], Any]) -> None:
    with pytest.raises(
        TypeError, match="collect_all and wait_all take farcall futures, as rpc_async gives them, not 1"
    ):
        function([done(0), 1])


def test_collect_all_takes_a_future_twice() -> None:
    future: Future[int] = Future()
    collected = collect_all([future, future])
    future.set_result(1)
    assert collected.wait() == [future, future]


def test_collect_all_is_not_failed_by_a_failure() -> None:
    bad = failed(ValueError("one of them"))
    good = done(1)
    assert collect_all([bad, good]).wait() == [bad, good]
    with pytest.raises(ValueError, match="one of them"):
        bad.wait()


def test_waiting_for_all_drives_each_and_attends_to_each() -> None:
    source = Drivable()
    mine = [source.future(number) for number in range(3)]
    by_hand = done("by hand")
    collected = collect_all([*mine, by_hand])
    assert source.attended == 0, "nobody watches it yet"
    collected.add_done_callback(lambda _: None)
    assert source.attended == 3
    assert [future.value() for future in collected.wait()] == [0, 1, 2, "by hand"]
    assert [future for future, _ in source.driven] == mine


def test_collect_all_nests() -> None:
    source = Drivable()
    inner = collect_all([source.future(1), source.future(2)])
    outer = collect_all([inner, done(3)])
    outer.add_done_callback(lambda _: None)
    assert source.attended == 2
    assert [future.value() for future in inner.wait()] == [1, 2]
    assert outer.wait() == [inner, outer.value()[1]]


def test_callbacks_of_collect_all_are_handed_to_who_settles_the_last() -> None:
    first: Future[int] = Future()
    second: Future[int] = Future()
    got: list[object] = []
    collect_all([first, second]).add_done_callback(got.append)
    assert first.settle(DONE, 1) is None
    callbacks = second.settle(DONE, 2)
    assert not got
    run_callbacks(second, callbacks)
    assert len(got) == 1


def test_wait_all_gives_the_results_in_their_order() -> None:
    source = Drivable()
    assert wait_all([done("a"), source.future("b"), done("c")]) == ["a", "b", "c"]
    assert wait_all([]) == []


def test_wait_all_raises_the_first_error_in_that_order_when_all_are_done(background: ThreadPoolExecutor) -> None:
    slow: Future[int] = Future()
    first = failed(ValueError("first"))
    second = failed_seen(ValueError("second"))
    waiting = background.submit(wait_all, [slow, first, second])
    eventually(lambda: has_sleeper(slow))
    slow.set_result(1)
    with pytest.raises(ValueError, match="first"):
        waiting.result()


# Failures that nobody has looked at


def warned(make: Callable[[], object]) -> list[str]:
    """The warnings of what was made and dropped."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
        gc.collect()
    assert all(warning.category is UnseenFailureWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def test_a_failure_that_nobody_looks_at_is_reported_once() -> None:
    assert warned(lambda: failed(ValueError("lost"))) == ["nobody looked at a future that failed with ValueError: lost"]


def test_a_call_says_itself_what_failed() -> None:
    def make() -> None:
        future: Future[int] = Future()
        future.report_unseen(lambda: "nobody looked at `add` on worker 'b'")
        future.settle(UNLOADED, LateReply((FAILED, ValueError())))

    assert warned(make) == ["nobody looked at `add` on worker 'b'"]


def test_results_are_dropped_quietly() -> None:
    assert warned(lambda: done(1)) == []
    assert warned(Future) == []


def wait_in_vain(future: Future[Any]) -> None:
    with pytest.raises(ValueError, match="seen"):
        future.wait()


@pytest.mark.parametrize(
    "look",
    [
        wait_in_vain,
        Future.exception,
        lambda future: future.add_done_callback(lambda _: None),
        lambda future: future.then(lambda _: None),
    ],
    ids=["wait", "exception", "callback", "then"],
)
def test_a_failure_that_was_looked_at_is_dropped_quietly(look: Callable[[Future[Any]], object]) -> None:
    assert warned(lambda: look(failed(ValueError("seen")))) == []


def test_a_failure_that_a_waiting_callback_was_handed_is_dropped_quietly() -> None:
    def make() -> None:
        future: Future[int] = Future()
        future.add_done_callback(lambda _: None)
        future.set_exception(ValueError("seen"))

    assert warned(make) == []


def test_done_and_repr_are_no_look() -> None:
    def make() -> None:
        future = failed(ValueError("x"))
        assert future.done()
        repr(future)

    assert len(warned(make)) == 1


def test_a_chain_reports_its_last_failure_only() -> None:
    def make() -> None:
        future: Future[int] = Future()
        future.then(lambda f: f.wait()).then(lambda f: f.wait())
        future.set_exception(ValueError("along the chain"))

    assert warned(make) == ["nobody looked at a future that failed with ValueError: along the chain"]


def test_each_failure_among_all_is_reported_unless_it_was_looked_at() -> None:
    def make() -> None:
        collect_all([failed(ValueError("a")), failed_seen(ValueError("b")), failed(ValueError("c"))]).wait()

    assert sorted(warned(make)) == [
        "nobody looked at a future that failed with ValueError: a",
        "nobody looked at a future that failed with ValueError: c",
    ]


def test_a_second_failure_by_hand_is_refused_without_a_report_of_its_own() -> None:
    def make() -> None:
        future = failed_seen(ValueError("first"))
        with pytest.raises(RuntimeError):
            future.set_exception(ValueError("second"))

    assert warned(make) == []


# Sleeping


def test_a_gate_that_is_open_lets_one_pass_without_sleeping() -> None:
    gate = Gate()
    gate.open()
    gate.open()
    assert gate.sleep(0.0)
    assert not gate.sleep(0.0)
    gate.open("whatever it is called with")
    assert gate.rest(FOREVER)
    assert not gate.rest(time.monotonic() + 0.001)


def test_a_gate_wakes_who_sleeps_there(background: ThreadPoolExecutor) -> None:
    gate = Gate()
    sleeping = background.submit(gate.sleep, FOREVER)
    gate.open()
    assert sleeping.result(60)


def test_the_owner_of_a_thread_hears_when_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(blocking_thread, "before", lambda: said.append("before"))
    monkeypatch.setattr(blocking_thread, "after", lambda: said.append("after"))
    assert on_serving_thread()
    gate = Gate()
    gate.rest(0.0)
    gate.open()
    gate.sleep(FOREVER)
    assert not said, "it did not sleep, or sleeps for itself"
    gate.sleep(0.0)
    assert said == ["before", "after"]
    with pytest.raises(TimeoutError):
        Future[int]().result(0)
    assert said == ["before", "after"] * 2
    with pytest.raises(KeyboardInterrupt), asleep():
        raise KeyboardInterrupt
    assert said == ["before", "after"] * 3


def test_a_thread_without_an_owner_sleeps_all_the_same(background: ThreadPoolExecutor) -> None:
    assert not on_serving_thread()
    assert not background.submit(on_serving_thread).result()
    with asleep():
        pass


# Long chains


def test_a_long_chain_of_then_is_run_and_waited_for() -> None:
    last = Drivable().future(1)
    for _ in range(3000):
        last = last.then(lambda f: f.value() + 1)
    assert last.wait() == 3001


def test_a_long_chain_of_failures_is_run() -> None:
    first: Future[int] = Future()
    last = first
    for _ in range(3000):
        last = last.then(lambda f: f.value() + 1)
    first.set_exception(KeyError("at the start"))
    assert isinstance(last.exception(0), KeyError)


def test_callbacks_of_a_chain_run_depth_first() -> None:
    first: Future[int] = Future()
    got: list[str] = []
    first.then(lambda _: got.append("1")).then(lambda _: got.append("1.1")).then(lambda _: got.append("1.1.1"))
    first.then(lambda _: got.append("2")).then(lambda _: got.append("2.1"))
    first.set_result(0)
    assert got == ["1", "1.1", "1.1.1", "2", "2.1"]


def test_the_time_of_a_wait_ends_in_the_midst_of_a_chain() -> None:
    first: Future[int] = Future()
    last = first.then(lambda f: f.value()).then(lambda f: f.value())
    with pytest.raises(TimeoutError):
        last.result(timeout=0.01)
    first.set_result(3)
    assert last.wait() == 3


# Ctrl-C and exits in callbacks


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("way", ["then", "add_done_callback"])
def test_what_is_meant_for_the_program_leaves_a_waiting_main_thread_when_all_callbacks_have_run(
    error: BaseException, way: str
) -> None:
    future: Future[int] = Future()
    got: list[object] = []

    def leave(_: Future[int]) -> None:
        raise error

    derived = getattr(future, way)(leave)
    if way == "then":
        derived.add_done_callback(lambda f: got.append(f.exception()))
    future.add_done_callback(got.append)
    callbacks = future.settle(DONE, 1)
    with pytest.raises(type(error)) as caught:
        run_callbacks(future, callbacks, waiting=True)
    assert caught.value is error
    assert got == ([error, future] if way == "then" else [future])


def test_what_a_callback_raises_in_another_thread_is_not_for_the_program(background: ThreadPoolExecutor) -> None:
    future: Future[int] = Future()

    def leave(_: Future[int]) -> None:
        raise SystemExit(3)

    derived = future.then(leave)
    callbacks = future.settle(DONE, 1)
    background.submit(run_callbacks, future, callbacks, waiting=True).result()
    assert isinstance(derived.exception(), SystemExit)


def test_an_exit_that_the_future_has_failed_with_is_not_for_the_program() -> None:
    future: Future[int] = Future()
    derived = future.then(lambda f: f.value())
    callbacks = future.settle(FAILED, leaving := SystemExit(3))
    run_callbacks(future, callbacks, waiting=True)
    assert derived.exception() is leaving


# An interrupt at any point


@pytest.mark.parametrize("derivations", [0, 2])
def test_an_interrupt_at_any_point_of_settling_loses_no_watcher(derivations: int) -> None:
    for point in itertools.count():
        future: Future[int] = Future()
        got: list[str] = []
        future.watch(lambda _, got=got: got.append("waker"), waker=True)
        future.add_done_callback(lambda _, got=got: got.append("callback"))
        last = future
        for _ in range(derivations):
            last = last.then(lambda f: f.value())
        all_of_them = collect_all([future, last])
        callbacks = None
        with contextlib.suppress(Interrupt), At(("farcall/futures.py",), (point,)) as at:
            callbacks = future.settle(DONE, 1)
        run_callbacks(future, callbacks)
        if future.done():
            run_callbacks(future, future.wake())  # what who was interrupted does
        else:
            run_callbacks(future, future.settle(DONE, 1))
        assert got.count("callback") == 1, at.places
        assert "waker" in got, at.places
        assert last.done(), at.places
        assert all_of_them.done(), at.places
        if not at.has_acted:
            assert point > 3
            return


def test_an_interrupt_at_any_point_of_running_callbacks_leaves_none_behind() -> None:
    for point in itertools.count():
        future: Future[int] = Future()
        got: list[str] = []
        derived = [future.then(lambda f: f.value()) for _ in range(2)]
        last = derived[0].then(lambda f: f.value())
        future.add_done_callback(lambda _, got=got: got.append("callback"))
        callbacks = future.settle(DONE, 1)
        with contextlib.suppress(Interrupt), At(("farcall/futures.py",), (point,)) as at:
            run_callbacks(future, callbacks)
        run_callbacks(future, callbacks)  # what was left, as who was interrupted does
        for one in (*derived, last):
            assert one.done(), at.places
            one.exception()
        assert got == ["callback"] or at.places[0].startswith("_DoneCallback"), at.places
        if not at.has_acted:
            assert point > 10
            return


# Interleavings: of every line, with two preemptions.

LINES = ("farcall/futures.py",)
PREEMPTIONS = 2

Bodies = tuple[list[Callable[[], object]], Callable[[], None]]


@pytest.fixture
def exploring(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`explore`, with all locks and gates of the module under the schedule's control."""

    def run(scenario: Callable[[Schedule], Bodies], preemptions: int = PREEMPTIONS) -> int:
        def controlled(schedule: Schedule) -> Bodies:
            monkeypatch.setattr(futures, "_settling", schedule.lock())
            monkeypatch.setattr(futures, "Gate", schedule.gate)
            monkeypatch.setattr(futures, "threading", SimpleNamespace(Lock=schedule.lock))
            return scenario(schedule)

        return explore(controlled, LINES, preemptions)

    return run


def settler(future: Future[Any], value: Any) -> Callable[[], None]:
    return lambda: run_callbacks(future, future.settle(DONE, value))


def watching_while_it_is_settled(new: Callable[[], Future[Any]]) -> Callable[[Schedule], Bodies]:
    def scenario(_: Schedule) -> Bodies:
        future = new()
        called: list[Any] = []
        woken: list[Any] = []
        future.watch(lambda f: called.append(f.value()), waker=False)

        def watch() -> None:
            future.watch(lambda f: called.append(f.value()), waker=False)
            future.watch(lambda f: woken.append(f.value()), waker=True)

        def check() -> None:
            assert (called, woken) == ([1, 1], [1])
            assert not future._watchers

        return [watch, settler(future, 1)], check

    return scenario


def test_each_watcher_is_called_once_however_settling_comes_between(exploring: Callable[..., int]) -> None:
    assert exploring(watching_while_it_is_settled(Future)) > 100


class ChecksBeforeItWatches(Future[Any]):
    """Looks whether it is settled, then adds the watcher."""

    def watch(self, watcher: futures.Watcher, *, waker: bool, attended: bool = False) -> None:
        if self._state:
            watcher(self)
            return
        futures.Gate().open()  # a step: another thread may run here
        self._watchers.append((waker, watcher))


class WritesTheStateFirst(Future[Any]):
    """Says that it is settled before the value is there."""

    def settle(self, state: int, value: Any) -> futures.Callbacks | None:
        self._state = state
        futures.Gate().open()
        self._value = value
        return self.wake()


class LeavesALateWatcherInTheList(Future[Any]):
    """Calls a watcher that came late, and does not see whether the settler does so too."""

    def watch(self, watcher: futures.Watcher, *, waker: bool, attended: bool = False) -> None:
        self._watchers.append((waker, watcher))
        futures.Gate().open()
        if self._state:
            watcher(self)


@pytest.mark.parametrize("bug", [ChecksBeforeItWatches, WritesTheStateFirst, LeavesALateWatcherInTheList])
def test_a_planted_bug_is_caught(bug: type[Future[Any]], exploring: Callable[..., int]) -> None:
    with pytest.raises(AssertionError):
        exploring(watching_while_it_is_settled(bug), preemptions=1)


def test_a_wake_up_is_never_lost(exploring: Callable[..., int]) -> None:
    def scenario(_: Schedule) -> Bodies:
        future: Future[int] = Future()

        def wait() -> None:
            assert future.wait() == 1

        def check() -> None:
            assert not future._watchers

        return [wait, settler(future, 1)], check

    assert exploring(scenario) > 100


def test_a_wait_whose_time_ends_as_it_is_settled(exploring: Callable[..., int]) -> None:
    def scenario(_: Schedule) -> Bodies:
        future: Future[int] = Future()

        def wait() -> None:
            try:
                assert future.result(0) == 1
            except TimeoutError:
                pass

        def check() -> None:
            assert future.wait() == 1
            assert not future._watchers

        return [wait, settler(future, 1)], check

    assert exploring(scenario) > 100


def test_of_two_who_settle_one_wins(exploring: Callable[..., int]) -> None:
    def scenario(_: Schedule) -> Bodies:
        future: Future[int] = Future()
        seen: list[int] = []
        refused: list[int] = []
        future.add_done_callback(lambda f: seen.append(f.value()))

        def settle(number: int) -> None:
            try:
                future.set_result(number)
            except RuntimeError:
                refused.append(number)

        def check() -> None:
            assert sorted([*seen, *refused]) == [1, 2]
            assert seen == [future.value()]

        return [lambda: settle(1), lambda: settle(2)], check

    assert exploring(scenario) > 100


def test_a_failure_that_was_seen_just_as_it_was_set_is_not_reported(exploring: Callable[..., int]) -> None:
    error = ValueError("seen")

    def scenario(_: Schedule) -> Bodies:
        future: Future[int] = Future()

        def look() -> None:
            assert future.exception() is error

        def check() -> None:
            assert future._report is not None
            assert future._report.seen

        return [look, lambda: future.set_exception(error)], check

    assert exploring(scenario) > 100


def test_two_who_want_the_value_load_it_once(exploring: Callable[..., int]) -> None:
    def scenario(schedule: Schedule) -> Bodies:
        future: Future[int] = Future()
        reply = LateReply((DONE, 6), schedule.lock())
        future.settle(UNLOADED, reply)

        def want() -> None:
            assert future.value() == 6

        def check() -> None:
            assert reply.loaded == 1

        return [want, want], check

    assert exploring(scenario) > 100


def test_all_are_collected_however_they_are_settled(exploring: Callable[..., int]) -> None:
    def scenario(_: Schedule) -> Bodies:
        pair: list[Future[int]] = [Future(), Future()]
        called: list[list[Future[int]]] = []

        def collect() -> None:
            collected = collect_all(pair)
            collected.add_done_callback(lambda f: called.append(f.value()))

        def check() -> None:
            assert called == [pair]

        return [collect, settler(pair[0], 0), settler(pair[1], 1)], check

    assert exploring(scenario, preemptions=1) > 100


def test_a_callback_is_run_by_its_settler_or_by_who_hung_it_on_and_by_nobody_else(
    exploring: Callable[..., int],
) -> None:
    """Who merely waits may be on the point of reading the connection, where user code must not run."""

    def scenario(_: Schedule) -> Bodies:
        future: Future[int] = Future()
        ran: list[str] = []
        future.add_done_callback(lambda _: ran.append(threading.current_thread().name))

        def wait() -> None:
            future.watch(lambda _: None, waker=True, attended=True)

        def check() -> None:
            assert ran == ["thread 1"]

        return [wait, settler(future, 1)], check

    assert exploring(scenario, preemptions=1) > 10
