"""Failures of futures that nobody has looked at: each is reported once, and what was looked at is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from farcall.futures import FAILED, UNLOADED, Future
from future_stage import LateReply, done, failed, failed_seen, warned


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


def test_a_second_failure_by_hand_is_refused_without_a_report_of_its_own() -> None:
    def make() -> None:
        future = failed_seen(ValueError("first"))
        with pytest.raises(RuntimeError):
            future.set_exception(ValueError("second"))

    assert warned(make) == []
