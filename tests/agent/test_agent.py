"""A worker's agent: whom it calls, what it refuses, when it may go, and that nothing waits for ever."""

from __future__ import annotations

import gc
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial
from time import monotonic
from typing import Any

import numpy as np
import pytest
from agent_stage import add, bounce, call, echo, forward, note, seen, start, thread_name

from farcall import (
    NotInitializedError,
    RpcError,
    RpcTimeoutError,
    ShutdownError,
    UnknownWorkerError,
    UsageError,
    WorkerInfo,
    WorkerLost,
)
from farcall.futures import Future
from farcall.gathering import collect_all, wait_all
from farcall.testing import LocalGroup
from farcall.transports.base import Channel
from gates import SOON, arrived, new_gate, wait_at

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


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


# -- how long


@pytest.mark.parametrize("timeout", [-0.5, -2, -math.inf, math.nan])
def test_a_timeout_below_zero_is_refused(group: LocalGroup, timeout: float) -> None:
    with pytest.raises(UsageError, match="must be 0 \\(none\\) or more seconds"):
        start(group[0], 1, echo, 1, timeout=timeout)


def test_a_timeout_ends_on_time_though_the_callee_does_not(group: LocalGroup) -> None:
    gate = new_gate("late")
    began = monotonic()
    future = start(group[0], 1, wait_at, "late", timeout=0.2)
    with pytest.raises(RpcTimeoutError) as caught:
        future.wait()
    assert 0.2 <= monotonic() - began < 0.7
    assert isinstance(caught.value, TimeoutError)
    for part in ("'worker1'", "`wait_at`", "0.2 s", "longer timeout"):
        assert part in str(caught.value)
    gate.set()


def test_the_late_reply_is_dropped_and_harms_no_other(group: LocalGroup, caplog: pytest.LogCaptureFixture) -> None:
    gate = new_gate("late")
    with pytest.raises(RpcTimeoutError):
        call(group[0], 1, wait_at, "late", "the late reply", timeout=0.05)
    others = [start(group[0], 1, echo, number) for number in range(50)]
    gate.set()
    assert wait_all(others) == list(range(50))
    assert call(group[0], 1, echo, "after") == "after"
    assert caplog.records == []


def test_a_future_nobody_waits_for_ends_on_time_too(group: LocalGroup) -> None:
    gate = new_gate("late")
    over = threading.Event()
    began = monotonic()
    future = start(group[0], 1, wait_at, "late", timeout=0.2)
    future.add_done_callback(lambda _: over.set())
    assert over.wait(SOON)
    assert 0.2 <= monotonic() - began < 0.7
    assert isinstance(future.exception(), RpcTimeoutError)
    gate.set()


def test_each_of_many_calls_ends_at_its_own_time(group: LocalGroup) -> None:
    gate = new_gate("late")
    timeouts = [0.3, 0.1, 0.2, 0.15, 0.25]
    ended: dict[float, float] = {}
    began = monotonic()
    futures = []
    for timeout in timeouts:
        futures.append(start(group[0], 1, wait_at, "late", timeout=timeout))
        futures[-1].add_done_callback(lambda _, timeout=timeout: ended.setdefault(timeout, monotonic() - began))
    assert all(isinstance(future.exception(SOON), RpcTimeoutError) for future in futures)
    deadline = monotonic() + SOON
    while len(ended) < len(timeouts) and monotonic() < deadline:  # callbacks run in threads of their own
        call(group[0], 1, echo, 1)
    for timeout in timeouts:
        assert timeout <= ended[timeout] < timeout + 0.5
    gate.set()


def test_zero_is_no_timeout_and_the_agents_own_is_the_default(new_group: Callable[..., LocalGroup]) -> None:
    group = new_group(2, rpc_timeout=0.05)
    gate = new_gate("late")
    with pytest.raises(RpcTimeoutError, match=r"within 0\.05 s"):
        group[0].call(1, wait_at, ("late",), None, -1).wait()
    future = start(group[0], 1, wait_at, "late", "came", timeout=0)
    with pytest.raises(RpcTimeoutError):
        call(group[0], 1, wait_at, "late", timeout=0.1)
    assert not future.done()
    gate.set()
    assert future.wait() == "came"


def test_result_with_a_timeout_leaves_the_call_alone(group: LocalGroup) -> None:
    gate = new_gate("later")
    future = start(group[0], 1, wait_at, "later", 7)
    with pytest.raises(TimeoutError, match=r"not done within 0\.02 s"):
        future.result(0.02)
    with pytest.raises(TimeoutError):
        future.exception(0.02)
    gate.set()
    assert future.result(SOON) == 7
    assert future.exception() is None


def test_asking_again_and_again_leaves_nothing_at_the_future(group: LocalGroup, pool: ThreadPoolExecutor) -> None:
    gate = new_gate("later")
    future = start(group[0], 1, wait_at, "later", 7)
    reader = pool.submit(start(group[0], 1, wait_at, "later", 8).wait)
    arrived["later"].wait(SOON)
    while not group[0]._connections.copy().popitem()[0]._reading._holder:
        pass
    for _ in range(20):
        with pytest.raises(TimeoutError):
            future.result(0.001)
    left = len(future._watchers)
    gate.set()
    assert (future.wait(), reader.result(SOON)) == (7, 8)
    assert left == 0


# -- nested


def test_a_function_calls_on(group: LocalGroup) -> None:
    assert call(group[0], 1, forward, group, "worker1", "worker2", add, 1, 2) == 3


@pytest.mark.parametrize("there", ["worker1", "worker0"])
def test_a_hundred_deep_with_one_thread(new_group: Callable[..., LocalGroup], there: str) -> None:
    group = new_group(2, num_worker_threads=1)
    assert call(group[0], there, bounce, group, there, "worker0", 100, timeout=3 * SOON) == 100


def test_many_nested_at_once_with_one_thread(new_group: Callable[..., LocalGroup], pool: ThreadPoolExecutor) -> None:
    group = new_group(3, num_worker_threads=1)
    jobs = [
        pool.submit(call, group[n % 3], (n + 1) % 3, bounce, group, f"worker{(n + 1) % 3}", f"worker{n % 3}", 10)
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


def test_replies_of_many_threads_are_not_mixed_up(group: LocalGroup, pool: ThreadPoolExecutor) -> None:
    def work(thread: int) -> bool:
        caller = group[thread % 3]
        return all(call(caller, (thread + n) % 3, echo, (thread, n)) == (thread, n) for n in range(60))

    assert all(pool.map(work, range(16)))


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


# -- the end


def test_after_the_shutdown_every_call_is_refused(group: LocalGroup) -> None:
    agent = group[0]
    agent.shutdown(graceful=False, timeout=0)
    for to in ("worker0", "worker1", "nobody"):
        with pytest.raises(NotInitializedError, match="'worker0' has shut down"):
            start(agent, to, echo, 1)
    agent.shutdown(graceful=False, timeout=0)  # harmless


def test_the_others_cannot_reach_a_worker_that_shut_down(group: LocalGroup) -> None:
    assert call(group[0], 1, echo, 1) == 1
    group[1].shutdown(graceful=False, timeout=0)
    for _ in range(3):
        with pytest.raises(WorkerLost, match="'worker1'") as caught:
            call(group[0], 1, echo, 1)
        assert caught.value.worker == "worker1"
    assert call(group[0], 2, echo, 1) == 1
    with pytest.raises(WorkerLost, match="'worker1' cannot be reached"):
        call(group[2], 1, echo, 1)  # never was connected


def test_calls_under_way_fail_when_this_worker_shuts_down(group: LocalGroup, pool: ThreadPoolExecutor) -> None:
    gates = [new_gate(f"end {n}") for n in range(4)]
    waiting = [pool.submit(call, group[0], 1, wait_at, f"end {n}") for n in range(3)]
    future = start(group[0], 1, wait_at, "end 3")
    assert all(arrived[f"end {n}"].wait(SOON) for n in range(4))
    began = monotonic()
    group[0].shutdown(graceful=False, timeout=0)
    assert monotonic() - began < 1
    for one in waiting:
        with pytest.raises(RpcError, match="'worker0' \\(this one\\) shut down"):
            one.result(SOON)
    with pytest.raises(RpcError, match="`wait_at`"):
        future.wait()
    for gate in gates:
        gate.set()


def test_a_call_that_connects_while_this_worker_shuts_down_fails_at_once(
    group: LocalGroup, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = group[0]._peers["worker1"]
    connect = peer._open

    def connect_and_shut_down(deadline: float) -> Channel:
        channel = connect(deadline)
        pool.submit(group[0].shutdown, False, 0).result(SOON)
        return channel

    monkeypatch.setattr(peer, "_open", connect_and_shut_down)
    gate = new_gate("closing")
    calling = pool.submit(call, group[0], 1, wait_at, "closing", timeout=2)
    try:
        error: object = calling.exception(1)
    except TimeoutError as late:
        error = late
    gate.set()
    wait([calling], SOON)
    for connection in list(group[0]._connections):
        connection.close("left open")
    assert isinstance(error, RpcError), "it waits for a reply though this worker is closed"


def test_what_hangs_on_calls_under_way_ends_with_this_worker(group: LocalGroup) -> None:
    gate = new_gate("end")
    derived = [start(group[0], 1, wait_at, "end").then(lambda future: future.value()) for _ in range(3)]
    assert arrived["end"].wait(SOON)
    group[0].shutdown(graceful=False, timeout=0)
    gate.set()
    for future in derived:
        assert isinstance(future.exception(1), RpcError)


def test_graceful_waits_for_what_runs_anywhere(group: LocalGroup, pool: ThreadPoolExecutor) -> None:
    gate = new_gate("work")
    future = start(group[0], 1, forward, group, "worker1", "worker2", wait_at, "work", "done")
    assert arrived["work"].wait(SOON)
    leaving = [pool.submit(agent.shutdown, True, SOON) for agent in group]
    assert not any(one.done() for one in leaving)
    assert call(group[2], 0, echo, "still served") == "still served"
    gate.set()
    for one in leaving:
        one.result(SOON)
    assert future.wait() == "done"


def test_graceful_waits_for_callbacks_that_wait(group: LocalGroup, pool: ThreadPoolExecutor) -> None:
    seen.clear()
    hold: Future[None] = Future()
    start(group[0], 1, echo, 1).then(lambda _: (hold.wait(), call(group[0], 2, note, "called on"))).then(
        lambda future: future.exception()
    )
    leaving = [pool.submit(agent.shutdown, True, SOON) for agent in group]
    left_early = [one for one in leaving if one in wait(leaving, timeout=0.3, return_when=FIRST_COMPLETED).done]
    hold.set_result(None)
    for one in leaving:
        one.result(SOON)
    assert left_early == []
    assert seen == ["called on"]


def test_graceful_names_who_did_not_come(group: LocalGroup) -> None:
    began = monotonic()
    with pytest.raises(ShutdownError, match="'worker1', 'worker2' did not come in time"):
        group[0].shutdown(graceful=True, timeout=0.1)
    assert monotonic() - began < 1
    with pytest.raises(NotInitializedError):
        start(group[0], 1, echo, 1)


def test_graceful_says_that_work_was_left(group: LocalGroup, pool: ThreadPoolExecutor) -> None:
    gate = new_gate("work")
    future = start(group[0], 1, wait_at, "work")
    assert arrived["work"].wait(SOON)
    with pytest.raises(
        ShutdownError, match="calls were still under way here: a call of `wait_at` on worker 'worker1'; "
    ):
        group[0].shutdown(graceful=True, timeout=0.1)
    assert isinstance(future.exception(), RpcError)
    gate.set()


def test_shutting_down_with_a_function_running_says_so(group: LocalGroup, caplog: pytest.LogCaptureFixture) -> None:
    gate = new_gate("stuck")
    future = start(group[0], 1, wait_at, "stuck")
    assert arrived["stuck"].wait(SOON)
    with caplog.at_level(logging.WARNING, "farcall"):
        group[1].shutdown(graceful=False, timeout=0)
    assert "1 function(s) still run" in caplog.text
    assert isinstance(future.exception(SOON), WorkerLost)
    gate.set()


def test_a_group_that_is_not_whole_does_not_start() -> None:
    with pytest.raises(UsageError, match="give one for each"):
        LocalGroup(2, names=["one"])


def test_two_workers_of_one_name_do_not_start() -> None:
    with pytest.raises(RpcError, match="two workers are called 'same'"):
        LocalGroup(2, names=["same", "same"])


def test_a_local_group_knows_its_agents(group: LocalGroup) -> None:
    assert [agent.info.name for agent in group] == ["worker0", "worker1", "worker2"]
    assert (group["worker2"], len(group)) == (group[2], 3)
    assert call(group[0], 1, partial(echo, group)) is group
    with pytest.raises(UsageError, match="no worker 'worker9'"):
        group["worker9"]


def test_a_local_group_leaves_gracefully(new_group: Callable[..., LocalGroup]) -> None:
    group = new_group(4)
    futures = [start(agent, to, echo, to) for agent in group for to in range(4)]
    group.shutdown()
    assert [future.wait() for future in futures] == [0, 1, 2, 3] * 4
