"""Futures: their result or error, waiting for it, and the source that is driven by who waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from eventually import eventually
from farcall.futures import DONE, FAILED, UNLOADED, Future, run_callbacks, settle_failed
from farcall.gate import FOREVER
from future_stage import Drivable, LateReply, done, failed, failed_seen, has_sleeper

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


# The source


def test_who_waits_drives_the_source() -> None:
    source = Drivable()
    future = source.future(3)
    assert future.wait() == 3
    assert source.driven == [(future, FOREVER)]
    assert source.attended == 0, "a thread that waits reads for itself"


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


def test_a_callback_has_the_source_drive_in_background_as_long_as_it_is_pending() -> None:
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
    derived.drive_in_background()  # a source too, but there is nothing to do


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
