"""Calls that end at their time: settled once, by whoever comes first, with a thread that ends by itself."""

from __future__ import annotations

import threading
from time import monotonic
from typing import Any

import pytest

from eventually import eventually
from farcall.backends.interface import Expiry
from farcall.errors import RpcTimeoutError
from farcall.futures import Future
from gates import SOON


def over() -> RpcTimeoutError:
    return RpcTimeoutError("its time is over")


@pytest.fixture
def expiry() -> Expiry:
    return Expiry()


def test_an_answer_in_time(expiry: Expiry) -> None:
    good: Future[Any] = Future()
    bad: Future[Any] = Future()
    limited = [expiry.limit(future, monotonic() + SOON, over) for future in (good, bad)]
    assert not any(future.done() for future in limited)
    good.set_result(3)
    bad.set_exception(ValueError("no"))
    assert limited[0].value() == 3
    with pytest.raises(ValueError, match="no"):
        limited[1].value()


def test_an_answer_that_comes_too_late_is_dropped(expiry: Expiry) -> None:
    future: Future[Any] = Future()
    limited = expiry.limit(future, monotonic() + 0.01, over)
    with pytest.raises(RpcTimeoutError, match="its time is over"):
        limited.result(SOON)
    future.set_result(3)
    assert isinstance(limited.exception(), RpcTimeoutError)


def test_an_error_that_comes_too_late_warns_nobody(expiry: Expiry) -> None:
    future: Future[Any] = Future()
    limited = expiry.limit(future, monotonic(), over)
    assert isinstance(limited.exception(SOON), RpcTimeoutError)
    future.set_exception(ValueError("too late"))
    del future  # a warning is an error here


def test_an_earlier_deadline_wakes_the_clock(expiry: Expiry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall.backends.interface._MAX_SLEEP_S", 10 * SOON)
    first: Future[Any] = Future()
    long = expiry.limit(first, monotonic() + 5 * SOON, over)
    eventually(lambda: expiry._wake_at)  # it sleeps
    short = expiry.limit(Future(), monotonic() + 0.01, over)
    assert isinstance(short.exception(SOON), RpcTimeoutError)
    assert not long.done()
    first.set_result(None)
    expiry.limit(Future(), monotonic(), over).exception(SOON)  # the last one: the thread ends


def test_the_thread_ends_with_the_last_call_and_comes_again(expiry: Expiry) -> None:
    def clocks() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "farcall-expiry"]

    for _ in range(2):
        futures: list[Future[Any]] = [Future() for _ in range(5)]
        for future in futures:
            expiry.limit(future, monotonic() + SOON, over)
        assert len(clocks()) == 1
        for future in futures:
            future.set_result(None)
        eventually(lambda: not clocks())
