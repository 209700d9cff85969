"""Timeouts of calls: each call ends at its own time whatever the callee does, and a late reply is discarded."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from time import monotonic
from typing import Any

import pytest

import farcall as rpc
from eventually import eventually
from farcall import Future, RpcTimeoutError, RRef
from farcall.api import _set_rpc_timeout
from farcall.functions import async_execution
from farcall.futures import wait_all
from farcall.testing import LocalGroup, faults
from gates import SOON, arrived, await_at, new_gate, wait_at
from group_stage import NewGroup, call, echo, start

pytestmark = pytest.mark.timeout(30)

SHORT = 0.05
"""Seconds: the timeout of a call whose function does not end before the test lets it."""


def test_a_call_that_is_waited_for_ends_at_its_timeout(group: LocalGroup) -> None:
    gate = new_gate("late")
    began = monotonic()
    future = start(group.agents[0], 1, wait_at, "late", timeout=0.2)
    with pytest.raises(RpcTimeoutError) as caught:
        future.wait()
    assert monotonic() - began >= 0.2
    assert isinstance(caught.value, TimeoutError)
    for part in ("'worker1'", "`wait_at`", "0.2 s", "longer timeout"):
        assert part in str(caught.value)
    gate.set()


def test_a_future_that_nobody_waits_for_ends_at_its_timeout(group: LocalGroup) -> None:
    gate = new_gate("late")
    future = start(group.agents[0], 1, wait_at, "late", timeout=SHORT)
    eventually(future.done)
    assert isinstance(future.exception(), RpcTimeoutError)
    gate.set()


def test_the_callbacks_of_a_call_run_when_its_timeout_is_over(group: LocalGroup) -> None:
    gate = new_gate("late")
    over = threading.Event()
    future = start(group.agents[0], 1, wait_at, "late", timeout=SHORT)
    future.add_done_callback(lambda _: over.set())
    derived = start(group.agents[0], 1, wait_at, "late", timeout=SHORT).then(lambda done: type(done.exception()))
    assert over.wait(SOON)
    assert isinstance(future.exception(), RpcTimeoutError)
    eventually(derived.done)
    assert derived.value() is RpcTimeoutError
    gate.set()


def test_an_awaited_call_ends_at_its_timeout(group: LocalGroup) -> None:
    async def ask() -> Any:
        return await start(group.agents[0], 1, wait_at, "late", timeout=SHORT)

    gate = new_gate("late")
    with pytest.raises(RpcTimeoutError):
        asyncio.run(ask())
    gate.set()


def test_each_of_many_calls_ends_at_its_own_timeout_and_not_before(group: LocalGroup) -> None:
    gate = new_gate("late")
    began = monotonic()
    ended: dict[float, float] = {}
    unlimited = start(group.agents[0], 1, wait_at, "late", "came", timeout=0)
    for timeout in (0.2, 0.05, 0.1, 0.15, 1000.0):
        future = start(group.agents[0], 1, wait_at, "late", timeout=timeout)
        future.add_done_callback(
            lambda done, timeout=timeout: (done.exception(), ended.setdefault(timeout, monotonic() - began))
        )
    eventually(lambda: len(ended) == 4)
    assert all(seconds >= timeout for timeout, seconds in ended.items())
    assert 1000.0 not in ended
    assert not unlimited.done()
    gate.set()
    assert unlimited.wait() == "came"
    eventually(lambda: len(ended) == 5)


def test_zero_is_no_timeout_and_the_option_is_the_default(make_group: NewGroup) -> None:
    group = make_group(2, rpc_timeout=SHORT)
    gate = new_gate("late")
    with pytest.raises(RpcTimeoutError, match=r"within 0\.05 s"):
        group.agents[0].call(1, wait_at, ("late",), None, -1).wait()
    future = start(group.agents[0], 1, wait_at, "late", "came", timeout=0)
    with pytest.raises(RpcTimeoutError):
        call(group.agents[0], 1, wait_at, "late", timeout=2 * SHORT)
    assert not future.done()
    gate.set()
    assert future.wait() == "came"


def test_the_default_timeout_can_be_read_and_set(alone: None) -> None:
    assert rpc.get_rpc_timeout() == 60
    _set_rpc_timeout(SHORT)
    assert rpc.get_rpc_timeout() == SHORT
    gate = new_gate("late")
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("alone", wait_at, args=("late",))
    rref = rpc.remote("alone", wait_at, args=("late", "came"))
    with pytest.raises(RpcTimeoutError):
        rref.to_here()
    gate.set()
    assert rref.to_here(timeout=SOON) == "came"
    for wrong in (-1, "1", None, float("nan")):
        with pytest.raises(rpc.UsageError):
            _set_rpc_timeout(wrong)  # type: ignore[arg-type]
    assert rpc.get_rpc_timeout() == SHORT


def test_a_late_reply_is_discarded_and_harms_no_other_call(group: LocalGroup, caplog: pytest.LogCaptureFixture) -> None:
    gate = new_gate("late")
    with pytest.raises(RpcTimeoutError):
        call(group.agents[0], 1, wait_at, "late", "the late reply", timeout=SHORT)
    others = [start(group.agents[0], 1, echo, number) for number in range(50)]
    gate.set()
    assert wait_all(others) == list(range(50))
    assert call(group.agents[0], 1, echo, "after") == "after"
    assert group.agents[0].get_metrics()["calls_pending"] == 0
    assert caplog.records == []


class Value:
    pass


def make_reference_at(group: LocalGroup, gate: str) -> RRef[Any]:
    """Runs on worker1: returns a reference to a value of worker1, when the gate opens."""
    wait_at(gate)
    value = Value()
    made.append(weakref.ref(value))
    return group.rref(1, value)


made: list[weakref.ref[Any]] = []


@pytest.mark.parametrize("is_waited_for", [True, False], ids=["waited for", "not waited for"])
def test_references_in_a_late_reply_are_freed(group: LocalGroup, is_waited_for: bool) -> None:
    made.clear()
    gate = new_gate("late")
    future = start(group.agents[0], 1, make_reference_at, group, "late", timeout=SHORT)
    if is_waited_for:
        with pytest.raises(RpcTimeoutError):
            future.wait()
    else:
        eventually(future.done)
        future.exception()
    gate.set()
    eventually(lambda: made)
    eventually(lambda: made[0]() is None)
    eventually(lambda: not any(group.references(rank).owned or group.references(rank).held for rank in range(2)))


def take_reference_at(rref: RRef[Any], gate: str) -> None:
    wait_at(gate)


def test_references_in_the_arguments_of_a_call_that_timed_out_are_freed_when_its_function_has_ended(
    group: LocalGroup,
) -> None:
    gate = new_gate("late")
    value = Value()
    is_alive = weakref.ref(value)
    with pytest.raises(RpcTimeoutError):
        call(group.agents[0], 1, take_reference_at, group.rref(0, value), "late", timeout=SHORT)
    del value
    assert arrived["late"].wait(SOON)
    gc.collect()
    assert is_alive() is not None, "the function that runs has a reference to it"
    gate.set()
    eventually(lambda: is_alive() is None)


def test_a_limit_of_the_wait_leaves_the_call_alone(group: LocalGroup) -> None:
    gate = new_gate("later")
    future = start(group.agents[0], 1, wait_at, "later", 7)
    with pytest.raises(TimeoutError, match=r"not done within 0\.02 s"):
        future.result(0.02)
    with pytest.raises(TimeoutError):
        future.exception(0.02)
    gate.set()
    assert future.result(SOON) == 7
    assert future.exception() is None


by_hand: Future[str] = Future()


@async_execution
def return_future() -> Future[str]:
    return by_hand


def test_functions_that_answer_later_time_out_like_any_other(group: LocalGroup) -> None:
    global by_hand
    by_hand = Future()
    gate = new_gate("coroutine")
    with pytest.raises(RpcTimeoutError, match="`return_future`"):
        call(group.agents[0], 1, return_future, timeout=SHORT)
    with pytest.raises(RpcTimeoutError, match="`await_at`"):
        call(group.agents[0], 1, await_at, "coroutine", timeout=SHORT)
    by_hand.set_result("too late")
    gate.set()
    assert call(group.agents[0], 1, echo, "alive") == "alive"


def test_a_worker_that_does_not_answer_at_all_is_a_timeout_and_not_a_loss(make_faulty_group: NewGroup) -> None:
    """Neither a first call, which connects, nor a call on a connection takes longer than its timeout."""
    group = make_faulty_group(3, heartbeat_patience=600)
    assert call(group.agents[0], 1, echo, 1) == 1
    for name in ("worker1", "worker2"):
        faults(group.agents[0]).freeze(name)
        with pytest.raises(RpcTimeoutError):
            call(group.agents[0], name, echo, 1, timeout=4 * SHORT)
    faults(group.agents[0]).heal()
    assert [call(group.agents[0], to, echo, to) for to in (1, 2)] == [1, 2]
