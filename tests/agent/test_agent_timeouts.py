"""How long calls of an agent take at most, and what becomes of those that take longer."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import pytest

from eventually import eventually
from farcall import RpcTimeoutError, UsageError
from farcall.gathering import wait_all
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import call, echo, start

pytestmark = pytest.mark.timeout(30)


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


def test_asking_again_and_again_leaves_nothing_at_the_future(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    gate = new_gate("later")
    future = start(group[0], 1, wait_at, "later", 7)
    reader = background.submit(start(group[0], 1, wait_at, "later", 8).wait)
    arrived["later"].wait(SOON)
    eventually(lambda: group[0]._connections.copy().popitem()[0]._reading._holder)
    for _ in range(20):
        with pytest.raises(TimeoutError):
            future.result(0.001)
    left = len(future._watchers)
    gate.set()
    assert (future.wait(), reader.result(SOON)) == (7, 8)
    assert left == 0
