"""A worker's agent: whom it calls, what it refuses, and calls nested, from many threads, and failed."""

from __future__ import annotations

import errno
import gc
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import numpy as np
import pytest
from agent_stage import add, bounce, forward, note, seen, thread_name

from farcall import UnknownWorkerError, UsageError, WorkerInfo
from farcall.futures import Future
from farcall.gathering import collect_all, wait_all
from farcall.testing import LocalGroup
from farcall.transports.base import Channel
from farcall.transports.memory import MemoryListener
from gates import SOON
from group_stage import call, echo, start

pytestmark = pytest.mark.timeout(30)


# -- whom


@pytest.mark.parametrize("to", ["worker1", 1, WorkerInfo("worker1", 1)])
def test_a_worker_is_called_by_name_rank_or_info(group: LocalGroup, to: Any) -> None:
    assert call(group[0], to, thread_name).startswith("farcall-worker1-")


def test_everybody_calls_everybody_and_itself(group: LocalGroup) -> None:
    for caller in group:
        for to in group.names:
            assert call(caller, to, thread_name).startswith(f"farcall-{to}-")


def test_worker_infos_are_equal_everywhere_and_sorted_by_rank(group: LocalGroup) -> None:
    expected = [WorkerInfo(name, rank) for rank, name in enumerate(group.names)]
    assert [agent.get_worker_infos() for agent in group] == [expected] * 3
    assert group[1].get_worker_info() == expected[1]
    assert group[0].get_worker_info("worker2") == group[0].get_worker_info(2) == expected[2]
    assert call(group[0], 1, echo, expected[2]) == expected[2]
    assert len({*expected, WorkerInfo("worker1", 1)}) == 3


@pytest.mark.parametrize("to", ["worker7", 3, -1, "", WorkerInfo("worker1", 2)])
def test_a_wrong_name_or_rank_is_answered_with_the_right_ones(group: LocalGroup, to: Any) -> None:
    with pytest.raises(UnknownWorkerError) as caught:
        start(group[0], to, echo, 1)
    assert repr(to) in str(caught.value)
    assert "'worker0' (rank 0), 'worker1' (rank 1), 'worker2' (rank 2)" in str(caught.value)
    with pytest.raises(UnknownWorkerError):
        group[0].get_worker_info(to)


@pytest.mark.parametrize("to", [None, b"worker1", ("worker1",), 3.5])
def test_what_can_be_no_worker_is_refused(group: LocalGroup, to: Any) -> None:
    with pytest.raises(UsageError, match="must be a worker's name, rank or WorkerInfo"):
        start(group[0], to, echo, 1)


@pytest.mark.parametrize("to", [["worker1"], {"name": "worker1"}])
def test_what_cannot_even_be_hashed_is_refused_in_the_same_words(group: LocalGroup, to: Any) -> None:
    with pytest.raises(UsageError, match="must be a worker's name, rank or WorkerInfo"):
        start(group[0], to, echo, 1)


# -- what


@pytest.mark.parametrize("function", [None, "print", 3, b"x"])
def test_what_cannot_be_called_is_refused(group: LocalGroup, function: Any) -> None:
    with pytest.raises(UsageError, match="cannot be called: give a function"):
        group[0].call(1, function, (), None, SOON)


@pytest.mark.parametrize(
    ("args", "kwargs", "result"),
    [
        ((2,), None, 3),
        ((2, 3), {}, 5),
        ([2, 3], None, 5),
        (None, {"left": 2, "right": 3}, 5),
        ((2,), {"right": 3}, 5),
        ((), {"left": 2}, 3),
    ],
)
def test_arguments_arrive_in_every_form(group: LocalGroup, args: Any, kwargs: Any, result: int) -> None:
    assert group[0].call(1, add, args, kwargs, SOON).wait() == result


def test_arguments_and_results_are_copies(group: LocalGroup) -> None:
    sent = [1, {"a": [2]}]
    back = call(group[0], 1, echo, sent)
    assert back == sent
    assert back is not sent
    assert back[1]["a"] is not sent[1]["a"]


def test_wrong_arguments_raise_what_they_raise_at_home(group: LocalGroup) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'left'"):
        call(group[0], 1, add)


@pytest.mark.parametrize("args", [np.arange(3), np.arange(1), 5, {1: 2}.values()], ids=str)
def test_arguments_that_are_no_sequence_are_refused(group: LocalGroup, args: Any) -> None:
    for function in (echo, lambda value: value):
        with pytest.raises(UsageError, match="`args` must be a tuple or list of arguments, not a "):
            group[0].call(1, function, args, None, SOON)
        with pytest.raises(UsageError, match="`args` must be a tuple or list of arguments, not a "):
            group[0].calling.remote(1, function, args, None)


# -- nested


def test_a_function_calls_on(group: LocalGroup) -> None:
    assert call(group[0], 1, forward, group, "worker1", "worker2", add, 1, 2) == 3


@pytest.mark.parametrize("there", ["worker1", "worker0"])
def test_a_hundred_deep_with_one_thread(new_group: Callable[..., LocalGroup], there: str) -> None:
    group = new_group(2, num_worker_threads=1)
    assert call(group[0], there, bounce, group, there, "worker0", 100, timeout=3 * SOON) == 100


def test_many_nested_at_once_with_one_thread(
    new_group: Callable[..., LocalGroup], background: ThreadPoolExecutor
) -> None:
    group = new_group(3, num_worker_threads=1)
    jobs = [
        background.submit(call, group[n % 3], (n + 1) % 3, bounce, group, f"worker{(n + 1) % 3}", f"worker{n % 3}", 10)
        for n in range(24)
    ]
    assert [job.result(3 * SOON) for job in jobs] == [10] * 24


def test_callbacks_may_call_and_wait(new_group: Callable[..., LocalGroup]) -> None:
    group = new_group(2, num_worker_threads=1)
    chained = start(group[0], 1, echo, 1)
    for _ in range(10):
        chained = chained.then(lambda future: call(group[0], 1, add, future.value()))
    assert chained.wait() == 11


# -- many threads


def test_replies_of_many_threads_are_not_mixed_up(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    def work(thread: int) -> bool:
        caller = group[thread % 3]
        return all(call(caller, (thread + n) % 3, echo, (thread, n)) == (thread, n) for n in range(60))

    assert all(background.map(work, range(16)))


def test_calls_of_one_caller_begin_in_their_order(new_group: Callable[..., LocalGroup]) -> None:
    group = new_group(2, num_worker_threads=1)
    seen.clear()
    wait_all([start(group[0], 1, note, number) for number in range(300)])
    assert seen == list(range(300))


def test_collect_all_and_then_over_calls(group: LocalGroup) -> None:
    futures = [start(group[0], to, add, to) for to in range(3)]
    total = collect_all(futures).then(lambda done: sum(future.value() for future in done.value()))
    assert total.wait() == 1 + 2 + 3


# -- failures nobody looks at


def test_a_failure_nobody_looks_at_is_reported_once(group: LocalGroup) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start(group[0], 1, add)
        deadline = monotonic() + SOON
        while not caught and monotonic() < deadline:
            call(group[0], 1, echo, 1)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "`add`" in text
    assert "'worker1'" in text
    assert "TypeError" in text


def test_a_failure_somebody_looked_at_is_not_reported(group: LocalGroup) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        futures = [start(group[0], 1, add) for _ in range(3)]
        assert all(isinstance(future.exception(), TypeError) for future in futures)
        chained = start(group[0], 1, add).then(lambda future: type(future.exception()))
        assert chained.wait() is TypeError
        with pytest.raises(TypeError):
            call(group[0], 1, add)
        del futures, chained
    assert caught == []


def test_wait_all_has_seen_all_the_failures(group: LocalGroup) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            wait_all([start(group[0], 1, add) for _ in range(3)])
        except TypeError as error:
            error.__traceback__ = None  # it holds the futures
        gc.collect()
    assert caught == []


def test_who_was_out_of_descriptors_listens_again_though_no_connection_was_closed(
    new_group: Callable[..., LocalGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = MemoryListener.accept
    failed: set[str] = set()

    def accept_later(listener: MemoryListener) -> Channel | None:
        if listener.address not in failed:
            failed.add(listener.address)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(MemoryListener, "accept", accept_later)
    group = new_group(2, heartbeat_interval=0.05)
    assert call(group[0], 1, add, 1, 2) == 3
    assert failed


def test_others_may_have_things_looked_after(group: LocalGroup) -> None:
    """As the agent does with what it has to say of references: every few milliseconds, while there is something."""
    left = [1, 2, 3]
    done: Future[None] = Future()

    def work_off() -> None:
        left.pop()
        if not left:
            done.set_result(None)

    rouse = group[0].look_after(lambda: bool(left), work_off)
    rouse()
    assert done.block(monotonic() + 10)
    assert group[0].book.needs_help in [has_work for has_work, _ in group[0]._chores]
