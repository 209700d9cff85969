"""Callbacks of futures: in their order, each once, in chains of any length, and what they raise."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from eventually import eventually
from farcall.futures import DONE, FAILED, Future, run_callbacks
from future_stage import Drivable, done, has_sleeper


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
