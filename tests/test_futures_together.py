"""Many futures at once: `collect_all` and `wait_all`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from eventually import eventually
from farcall.futures import DONE, Future, collect_all, run_callbacks, wait_all
from future_stage import Drivable, done, failed, failed_seen, has_sleeper, warned


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


def test_each_failure_among_all_is_reported_unless_it_was_looked_at() -> None:
    def make() -> None:
        collect_all([failed(ValueError("a")), failed_seen(ValueError("b")), failed(ValueError("c"))]).wait()

    assert sorted(warned(make)) == [
        "nobody looked at a future that failed with ValueError: a",
        "nobody looked at a future that failed with ValueError: c",
    ]
