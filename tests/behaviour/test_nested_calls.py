"""Functions that call on while they run for another worker: to any depth, with any number of threads."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from farcall import RRef, collect_all
from farcall.testing import LocalGroup
from gates import SOON
from group_stage import NewGroup, call, echo, start

pytestmark = pytest.mark.timeout(60)

LONG = 3 * SOON
"""Seconds for many calls inside each other, on a slow machine too."""

any_number_of_threads = pytest.mark.parametrize("threads", [1, 2, 16])


def bounce(group: LocalGroup, here: str, there: str, depth: int) -> int:
    """Calls itself on the other worker and back; returns how many times."""
    if depth == 0:
        return 0
    return 1 + int(call(group.agents[here], there, bounce, group, there, here, depth - 1, timeout=LONG))


def bounce_by_reference(group: LocalGroup, here: str, there: str, depth: int) -> int:
    """As `bounce`, with a reference to each result."""
    if depth == 0:
        return 0
    rref: RRef[int] = group.remote(here, there, bounce_by_reference, (group, there, here, depth - 1))
    return 1 + rref.to_here(timeout=LONG)


async def bounce_async(group: LocalGroup, here: str, there: str, depth: int) -> int:
    """As `bounce`, in coroutines."""
    if depth == 0:
        return 0
    return 1 + int(await start(group.agents[here], there, bounce_async, group, there, here, depth - 1, timeout=LONG))


class Node:
    """An object on one worker that calls the next one by a reference."""

    def __init__(self, following: RRef[Any] | None) -> None:
        self.following = following

    def count(self) -> int:
        return 1 + (self.following.rpc_sync(timeout=LONG).count() if self.following else 0)


@any_number_of_threads
@pytest.mark.parametrize("function", [bounce, bounce_by_reference, bounce_async])
def test_two_workers_call_each_other_a_hundred_deep(make_group: NewGroup, threads: int, function: Any) -> None:
    group = make_group(2, num_worker_threads=threads)
    assert call(group.agents[0], "worker1", function, group, "worker1", "worker0", 100, timeout=LONG) == 100


@any_number_of_threads
def test_a_worker_calls_itself_a_hundred_deep(make_group: NewGroup, threads: int) -> None:
    group = make_group(1, num_worker_threads=threads)
    assert call(group.agents[0], "worker0", bounce, group, "worker0", "worker0", 100, timeout=LONG) == 100


@any_number_of_threads
def test_methods_of_references_call_each_other_in_a_chain(make_group: NewGroup, threads: int) -> None:
    group = make_group(3, num_worker_threads=threads)
    node: RRef[Any] | None = None
    for number in range(30):
        node = group.remote(0, number % 3, Node, (node,))
    assert node is not None
    assert node.rpc_sync(timeout=LONG).count() == 30


@any_number_of_threads
def test_many_nested_calls_at_once_between_three_workers(
    make_group: NewGroup, background: ThreadPoolExecutor, threads: int
) -> None:
    group = make_group(3, num_worker_threads=threads)
    jobs = [
        background.submit(
            call,
            group.agents[n % 3],
            (n + 1) % 3,
            bounce,
            group,
            f"worker{(n + 1) % 3}",
            f"worker{n % 3}",
            10,
            timeout=LONG,
        )
        for n in range(24)
    ]
    assert [job.result(LONG) for job in jobs] == [10] * 24


def fan_out(group: LocalGroup, here: str, depth: int) -> int:
    """Calls all workers at once, and each of them all workers again."""
    if depth == 0:
        return 1
    futures = [start(group.agents[here], to, fan_out, group, to, depth - 1, timeout=LONG) for to in group.names]
    return sum(future.value() for future in collect_all(futures).wait())


def test_calls_that_fan_out_at_each_level_end_with_one_thread_each(make_group: NewGroup) -> None:
    group = make_group(3, num_worker_threads=1)
    assert fan_out(group, "worker0", 4) == 3**4


def test_callbacks_may_call_and_wait_with_one_thread(make_group: NewGroup) -> None:
    group = make_group(2, num_worker_threads=1)
    chained = start(group.agents[0], 1, echo, 1)
    for _ in range(10):
        chained = chained.then(lambda future: call(group.agents[0], 1, echo, future.value() + 1))
    assert chained.wait() == 11


def call_back_in_a_loop(group: LocalGroup, here: str, there: str) -> list[int]:
    async def ask() -> list[int]:
        return list(await asyncio.gather(*(start(group.agents[here], there, echo, n) for n in range(10))))

    return asyncio.run(ask())


def test_a_function_may_run_an_event_loop_of_its_own(make_group: NewGroup) -> None:
    group = make_group(2, num_worker_threads=1)
    assert call(group.agents[0], 1, call_back_in_a_loop, group, "worker1", "worker0") == list(range(10))
