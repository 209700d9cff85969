"""How many functions run at once on a worker, which of them count, and in which order they start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from eventually import eventually
from farcall import Future, RRef, collect_all, wait_all
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import NewGroup, call, echo, run, runs, start

pytestmark = pytest.mark.timeout(30)


class Turnstile:
    """Functions stop here, and the test lets them go one by one."""

    def __init__(self) -> None:
        self.came = 0
        self._lock = threading.Lock()
        self._go = threading.Semaphore(0)

    def stop(self) -> None:
        with self._lock:
            self.came += 1
        assert self._go.acquire(timeout=SOON)

    def let_go(self, number: int = 1) -> None:
        self._go.release(number)


turnstile = Turnstile()


@pytest.fixture(autouse=True)
def _new_turnstile() -> None:
    global turnstile
    turnstile = Turnstile()


def stop_at_turnstile() -> None:
    turnstile.stop()


def busy(group: LocalGroup) -> tuple[int, int]:
    """How many functions run on worker1, and how many wait for a thread."""
    metrics = group.agents[1].get_metrics()
    return metrics["threads_running"], metrics["queue_length"]


def test_functions_that_block_do_not_hold_up_others(group: LocalGroup) -> None:
    gate = new_gate("slow")
    slow = [start(group.agents[0], 1, wait_at, "slow", n) for n in range(8)]
    assert arrived["slow"].wait(SOON)
    for caller in group.agents:
        assert call(caller, 1, echo, "quick") == "quick"
        assert group.remote(caller.info.id, 1, echo, ("quick",)).to_here() == "quick"
    assert not any(future.done() for future in slow)
    gate.set()
    assert [future.wait() for future in slow] == list(range(8))


@pytest.mark.parametrize("threads", [1, 3])
def test_no_more_functions_run_at_once_than_there_are_worker_threads(make_group: NewGroup, threads: int) -> None:
    group = make_group(2, num_worker_threads=threads)
    futures = [start(group.agents[0], 1, stop_at_turnstile) for _ in range(10)]
    for ended in range(10):
        running = min(threads, 10 - ended)
        eventually(lambda running=running, ended=ended: busy(group) == (running, 10 - ended - running))
        assert turnstile.came == ended + running
        turnstile.let_go()
        eventually(lambda ended=ended: sum(future.done() for future in futures) == ended + 1)


def test_functions_of_remote_calls_and_methods_count_too(make_group: NewGroup) -> None:
    group = make_group(2, num_worker_threads=2)
    made = group.remote(0, 1, Turnstile)
    assert made.rpc_sync().came() == 0
    references = [group.remote(0, 1, stop_at_turnstile) for _ in range(2)]
    eventually(lambda: turnstile.came == 2)
    future = made.rpc_async().came()
    eventually(lambda: busy(group) == (2, 1))
    assert not future.done()
    turnstile.let_go(2)
    assert future.wait() == 0
    assert [rref.to_here() for rref in references] == [None, None]


# -- Waiting for a call of its own does not count

by_hand: Future[str] = Future()


def settle_by_hand(value: str) -> None:
    by_hand.set_result(value)


def give_back(value: str) -> str:
    return value


def wait_for_it(group: LocalGroup, way: str) -> Any:
    """Runs on worker1, whose only thread it has, and waits for something that has to run on worker1."""
    runs.append("waits")
    return WAYS[way](group)


WAYS: dict[str, Callable[[LocalGroup], Any]] = {
    "rpc_sync": lambda group: call(group.agents[1], 1, give_back, "done"),
    "wait": lambda group: start(group.agents[1], 1, give_back, "done").wait(),
    "result": lambda group: start(group.agents[1], 1, give_back, "done").result(SOON),
    "exception": lambda group: (future := start(group.agents[1], 1, give_back, "done")).exception() or future.value(),
    "then": lambda group: start(group.agents[1], 1, give_back, "do").then(lambda done: done.value() + "ne").wait(),
    "collect_all": lambda group: collect_all([start(group.agents[1], 1, give_back, "done")]).wait()[0].value(),
    "wait_all": lambda group: wait_all([start(group.agents[1], 1, give_back, "done")])[0],
    "to_here": lambda group: group.remote(1, 1, give_back, ("done",)).to_here(timeout=SOON),
    "to_here elsewhere": lambda group: group.remote(1, 0, ask_back, (group,)).to_here(timeout=SOON),
    "method": lambda group: group.rref(1, "done").rpc_sync(timeout=SOON).lower(),
    "future made by hand": lambda group: by_hand.wait(),
}


def ask_back(group: LocalGroup) -> Any:
    return call(group.agents[0], 1, give_back, "done")


@pytest.mark.parametrize("way", WAYS)
def test_a_function_that_waits_for_a_future_leaves_its_place_to_another(make_group: NewGroup, way: str) -> None:
    global by_hand
    by_hand = Future()
    group = make_group(2, num_worker_threads=1)
    future = start(group.agents[0], 1, wait_for_it, group, way)
    eventually(lambda: runs == ["waits"])
    if way == "future made by hand":
        call(group.agents[0], 1, settle_by_hand, "done")
    assert future.wait() == "done"


def test_functions_that_wait_for_a_value_that_is_not_there_yet_leave_their_places(make_group: NewGroup) -> None:
    """Many `to_here` and methods of one reference, with one thread at the owner: none of them holds it."""
    group = make_group(3, num_worker_threads=1)
    gate = new_gate("value")
    rref = group.remote(0, 2, wait_for_worker0, (group,))
    fetching = [start(group.agents[0], 1, fetch, rref) for _ in range(5)]
    measuring = [rref.rpc_async(timeout=SOON).bit_length() for _ in range(5)]
    there = [start(group.agents[0], 2, fetch, rref) for _ in range(5)]
    assert arrived["value"].wait(SOON)
    assert call(group.agents[0], 1, echo, "quick") == "quick"
    assert call(group.agents[0], 2, echo, "quick") == "quick"
    assert not any(future.done() for future in [*fetching, *measuring, *there])
    gate.set()
    assert [future.wait() for future in [*fetching, *there]] == [7] * 10
    assert [future.wait() for future in measuring] == [3] * 5


def wait_for_worker0(group: LocalGroup) -> Any:
    """Runs on worker2, and leaves its place while it waits."""
    return call(group.agents[2], 0, wait_at, "value", 7)


def fetch(rref: RRef[Any]) -> Any:
    return rref.to_here(timeout=SOON)


def test_a_function_that_has_waited_goes_on_though_all_places_are_taken(make_group: NewGroup) -> None:
    """It had its place before the others: it is not made to wait for one, which might never be free."""
    group = make_group(2, num_worker_threads=1)
    gate, blocked = new_gate("nested"), new_gate("blocked")
    waits = start(group.agents[0], 1, call_and_run, group)
    assert arrived["nested"].wait(SOON)
    blocks = start(group.agents[0], 1, wait_at, "blocked")
    assert arrived["blocked"].wait(SOON)
    gate.set()
    assert waits.wait() == "went on"
    blocked.set()
    blocks.wait()


def call_and_run(group: LocalGroup) -> str:
    call(group.agents[1], 0, wait_at, "nested")
    return "went on"


# -- Order


def test_calls_of_one_caller_start_in_the_order_in_which_they_were_made(make_group: NewGroup) -> None:
    group = make_group(2, num_worker_threads=1)
    wait_all([start(group.agents[0], 1, run, number) for number in range(300)])
    assert runs == list(range(300))


def test_calls_after_a_slow_one_keep_their_order(make_group: NewGroup) -> None:
    group = make_group(2, num_worker_threads=1)
    gate = new_gate("first")
    first = start(group.agents[0], 1, wait_at, "first")
    futures = [start(group.agents[0], 1, run, number) for number in range(100)]
    eventually(lambda: busy(group) == (1, 100))
    gate.set()
    wait_all([first, *futures])
    assert runs == list(range(100))


def test_no_call_runs_twice(group: LocalGroup) -> None:
    wait_all([start(group.agents[0], to, run, (to, number)) for number in range(200) for to in range(3)])
    assert sorted(runs) == [(to, number) for to in range(3) for number in range(200)]
