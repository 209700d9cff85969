"""Many calls at once: from many threads, in bursts, between all workers. Every caller gets its own result."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from eventually import eventually
from farcall import wait_all
from farcall.testing import LocalGroup
from gates import SOON
from group_stage import NewGroup, call, echo, run, runs, start
from worker_processes import StartWorkers

pytestmark = pytest.mark.timeout(60)


def test_sixteen_threads_call_at_once_and_no_reply_is_mixed_up(
    group: LocalGroup, background: ThreadPoolExecutor
) -> None:
    barrier = threading.Barrier(16)

    def work(thread: int) -> bool:
        barrier.wait(SOON)
        caller = group.agents[thread % 3]
        return all(call(caller, (thread + n) % 3, echo, (thread, n)) == (thread, n) for n in range(60))

    assert all(background.map(work, range(16)))


def test_sixteen_threads_mix_calls_futures_references_and_callbacks(
    group: LocalGroup, background: ThreadPoolExecutor
) -> None:
    barrier = threading.Barrier(16)

    def work(thread: int) -> list[Any]:
        barrier.wait(SOON)
        found = []
        for n in range(10):
            mark = (thread, n)
            future = start(group.agents[0], 1, echo, mark)
            rref = group.remote(0, 2, echo, (mark,))
            chained = start(group.agents[0], 2, echo, mark).then(lambda done: done.value())
            found += [call(group.agents[0], 1, echo, mark), future.wait(), rref.to_here(timeout=SOON), chained.wait()]
        return found

    assert list(background.map(work, range(16))) == [
        [(thread, n) for n in range(10) for _ in range(4)] for thread in range(16)
    ]


def test_a_burst_of_ten_thousand_calls_arrives_complete(group: LocalGroup) -> None:
    futures = [start(group.agents[0], 1, echo, number, timeout=60) for number in range(10_000)]
    assert wait_all(futures) == list(range(10_000))
    assert group.agents[0].get_metrics()["calls_pending"] == 0


def test_a_burst_that_nobody_waits_for_is_done_by_itself(make_group: NewGroup) -> None:
    group = make_group(2, num_worker_threads=1)
    futures = [start(group.agents[0], 1, run, number, timeout=60) for number in range(2_000)]
    eventually(lambda: all(future.done() for future in futures))
    assert runs == list(range(2_000))


def test_a_burst_between_processes_runs_once_each_in_order(workers: StartWorkers) -> None:
    script = """
    ran = []
    def note(number):
        ran.append(number)
        return number
    start(num_worker_threads=1)
    if RANK == 0:
        futures = [rpc.rpc_async("w1", note, args=(number,)) for number in range(10_000)]
        report(right=[future.wait() for future in futures] == list(range(10_000)))
        for number in range(10_000, 12_000):
            rpc.rpc_async("w1", note, args=(number,))  # nobody keeps the future
        def threads_call(thread):
            right.append(all(rpc.rpc_sync("w1", pow, args=(thread, n)) == thread ** n for n in range(100)))
        right = []
        threads = [threading.Thread(target=threads_call, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        report(threads=right)
    rpc.shutdown()
    report(ran=ran == list(range(12_000)))
    """
    caller, callee = workers(script).finish()
    assert caller["right"] is True
    assert caller["threads"] == [True] * 16
    assert callee["ran"] is True
