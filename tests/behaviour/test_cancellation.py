"""Cancellation: what nobody waits for any more is stopped, on the callee and on all workers that it has called."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import farcall
from eventually import eventually
from farcall import CallCancelledError, Future, RRef
from farcall.functions import async_execution
from farcall.futures import collect_all
from farcall.testing import LocalGroup
from gates import SOON, arrived, await_at, gates, new_gate, wait_at
from group_stage import NewGroup, call, echo, run, runs, start

pytestmark = pytest.mark.timeout(30)

ended: dict[str, list[str]] = {}
"""By name: how functions of this test have ended."""


def new_stage(name: str) -> list[str]:
    new_gate(name)
    ended[name] = []
    return ended[name]


def poll(name: str) -> str:
    """Runs until nobody wants its result."""
    arrived[name].set()
    eventually(farcall.cancelled)
    ended[name].append("cancelled")
    return "what nobody wants"


async def sleep_long(name: str) -> None:
    arrived[name].set()
    try:
        await asyncio.sleep(2 * SOON)
    except asyncio.CancelledError:
        ended[name].append("cancelled")
        raise
    finally:
        ended[name].append("finally")


def no_references(group: LocalGroup) -> bool:
    gc.collect()
    return not any(group.references(rank).owned or group.references(rank).held for rank in range(len(group.agents)))


# The future


def test_a_future_is_cancelled_at_once_and_once(group: LocalGroup) -> None:
    stage = new_stage("f")
    future = start(group.agents[0], 1, poll, "f")
    assert arrived["f"].wait(SOON)
    assert not future.cancelled()
    assert future.cancel() is True
    assert future.done()
    assert future.cancelled()
    assert future.cancel() is False
    for look in (future.wait, future.result, future.value, future.exception):
        with pytest.raises(CallCancelledError, match="`poll` on worker 'worker1'") as caught:
            look()
        assert not isinstance(caught.value, asyncio.CancelledError)
    eventually(lambda: stage == ["cancelled"])
    assert call(group.agents[0], 1, echo, "after") == "after"
    assert group.agents[0].get_metrics()["calls_pending"] == 0
    assert group.agents[1].get_metrics()["calls_cancelled"] == 1


def test_a_future_that_is_done_is_not_cancelled(group: LocalGroup) -> None:
    future = start(group.agents[0], 1, echo, 7)
    assert future.wait() == 7
    assert future.cancel() is False
    assert not future.cancelled()
    assert future.wait() == 7


def test_a_call_that_has_not_started_is_not_run(make_group: NewGroup) -> None:
    group = make_group(2, num_worker_threads=1)
    gate = new_gate("busy")
    busy = start(group.agents[0], 1, wait_at, "busy")
    assert arrived["busy"].wait(SOON)
    futures = [start(group.agents[0], 1, run, number) for number in range(5)]
    for future in futures[:4]:
        assert future.cancel()
    gate.set()
    busy.wait()
    assert futures[4].wait() == 4
    assert runs == [4]


def test_threads_that_wait_for_the_call_are_woken(group: LocalGroup) -> None:
    new_stage("waited")
    future = start(group.agents[0], 1, poll, "waited")
    seen: list[type[BaseException]] = []

    def wait() -> None:
        try:
            future.wait()
        except BaseException as error:
            seen.append(type(error))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert arrived["waited"].wait(SOON)
    future.cancel()
    for thread in threads:
        thread.join(SOON)
    assert seen == [CallCancelledError] * 3


def test_a_caller_does_not_wait_for_a_callee_that_does_not_look(group: LocalGroup) -> None:
    gate = new_gate("deaf")
    future = start(group.agents[0], 1, wait_at, "deaf", "late")
    waiter = threading.Thread(target=lambda: future.block(float("inf")))
    waiter.start()
    assert arrived["deaf"].wait(SOON)
    future.cancel()
    waiter.join(SOON)
    assert not waiter.is_alive()
    assert call(group.agents[0], 1, echo, 1) == 1
    gate.set()
    assert call(group.agents[0], 1, echo, 2) == 2


def test_what_is_derived_cancels_what_it_is_derived_from(group: LocalGroup) -> None:
    stage = new_stage("then")
    future = start(group.agents[0], 1, poll, "then")
    ran: list[int] = []
    derived = future.then(lambda _: ran.append(1)).then(lambda _: ran.append(2))
    assert arrived["then"].wait(SOON)
    assert derived.cancel()
    assert future.cancelled()
    assert derived.cancelled()
    eventually(lambda: stage == ["cancelled"])
    assert not ran


def test_all_of_a_collection_are_cancelled(group: LocalGroup) -> None:
    new_stage("all")
    futures = [start(group.agents[0], rank, poll, "all") for rank in (1, 2)]
    together = collect_all(futures)
    assert together.cancel()
    assert all(future.cancelled() for future in futures)


def test_a_future_made_by_hand_can_be_cancelled_and_then_settled_in_vain() -> None:
    future: Future[int] = Future()
    seen: list[bool] = []
    future.add_done_callback(lambda done: seen.append(done.cancelled()))
    assert future.cancel()
    future.set_result(1)
    future.set_exception(ValueError())
    assert seen == [True]
    with pytest.raises(CallCancelledError):
        future.wait()


def test_a_cancelled_future_that_nobody_looks_at_is_no_failure(
    group: LocalGroup, recwarn: pytest.WarningsRecorder
) -> None:
    new_stage("unseen")
    start(group.agents[0], 1, poll, "unseen").cancel()
    gc.collect()
    assert not recwarn.list


# Coroutines and asyncio


def test_a_coroutine_gets_cancelled_error_at_its_await(group: LocalGroup) -> None:
    stage = new_stage("coroutine")
    future = start(group.agents[0], 1, sleep_long, "coroutine")
    assert arrived["coroutine"].wait(SOON)
    future.cancel()
    eventually(lambda: stage == ["cancelled", "finally"])
    assert call(group.agents[0], 1, await_soon) == "done"


async def await_soon() -> str:
    await asyncio.sleep(0)
    return "done"


def test_a_cancelled_task_cancels_its_call(group: LocalGroup) -> None:
    stage = new_stage("task")

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(start(group.agents[0], 1, sleep_long, "task"), 0.1)

    asyncio.run(main())
    eventually(lambda: stage == ["cancelled", "finally"])


async def raise_cancelled() -> None:
    raise asyncio.CancelledError("of its own")


def test_a_function_that_cancels_itself_fails_its_call(group: LocalGroup) -> None:
    with pytest.raises(CallCancelledError, match="of its own"):
        call(group.agents[0], 1, raise_cancelled)
    future = start(group.agents[0], 1, raise_cancelled)
    eventually(future.done)
    assert future.cancelled()


returned: dict[str, Future[Any]] = {}


@async_execution
def return_future(name: str) -> Future[Any]:
    returned[name] = Future()
    arrived[name].set()
    return returned[name]


def test_the_future_of_an_asynchronous_function_is_cancelled(group: LocalGroup) -> None:
    new_stage("future")
    future = start(group.agents[0], 1, return_future, "future")
    assert arrived["future"].wait(SOON)
    future.cancel()
    eventually(returned["future"].cancelled)


# Nested calls


def call_down(group: LocalGroup, name: str, depth: int) -> Any:
    """Runs on worker1 and worker2 in turns: each waits for the next, and the last one polls."""
    try:
        if depth == 0:
            return poll(name)
        here, there = 1 + depth % 2, f"worker{1 + (depth - 1) % 2}"
        return call(group.agents[here], there, call_down, group, name, depth - 1)
    except BaseException as error:
        ended[name].append(type(error).__name__)
        raise


def test_it_travels_down_nested_calls(group: LocalGroup) -> None:
    stage = new_stage("chain")
    future = start(group.agents[0], 1, call_down, group, "chain", 20)
    assert arrived["chain"].wait(SOON)
    future.cancel()
    eventually(lambda: len(stage) == 21)
    assert sorted(stage) == ["CancelledError"] * 20 + ["cancelled"]


def test_a_timeout_travels_down_nested_calls(group: LocalGroup) -> None:
    stage = new_stage("late chain")
    with pytest.raises(farcall.RpcTimeoutError):
        call(group.agents[0], 1, call_down, group, "late chain", 5, timeout=0.2)
    eventually(lambda: len(stage) == 6)
    assert sorted(stage) == ["CancelledError"] * 5 + ["cancelled"]


def try_all_waits(group: LocalGroup, name: str) -> None:
    poll(name)
    mine: Future[int] = Future()
    for wait in (
        mine.wait,
        lambda: call(group.agents[1], 2, run, "after the end"),
        lambda: start(group.agents[1], 2, run, "after the end"),
        lambda: group.agents[1].remote(2, run, ("after the end",), None),
        lambda: group.agents[1].remote(1, run, ("after the end",), None),
    ):
        try:
            wait()
        except asyncio.CancelledError:
            ended[name].append("raised")
    with farcall.detached():
        assert farcall.cancelled()
        ended[name].append(call(group.agents[1], 2, run, "detached"))


def test_a_cancelled_function_makes_no_call_and_waits_for_nothing_unless_detached(group: LocalGroup) -> None:
    stage = new_stage("waits")
    future = start(group.agents[0], 1, try_all_waits, group, "waits")
    assert arrived["waits"].wait(SOON)
    future.cancel()
    eventually(lambda: "detached" in stage)
    assert stage == ["cancelled", *["raised"] * 5, "detached"]
    assert runs == ["detached"]


shared: dict[str, Future[Any]] = {}


def wait_for_shared(name: str) -> None:
    arrived[name].set()
    try:
        shared[name].wait()
    except asyncio.CancelledError:
        ended[name].append("cancelled")
        raise


@pytest.mark.parametrize("is_call", [True, False], ids=["a call", "made by hand"])
def test_a_cancelled_function_stops_waiting_for_what_is_not_its_own(group: LocalGroup, is_call: bool) -> None:
    stage = new_stage("shared")
    gate = new_gate("other")
    shared["shared"] = start(group.agents[1], 2, wait_at, "other", "came") if is_call else Future()
    future = start(group.agents[0], 1, wait_for_shared, "shared")
    assert arrived["shared"].wait(SOON)
    future.cancel()
    eventually(lambda: stage == ["cancelled"])
    assert not shared["shared"].done(), "others may wait for it"
    gate.set()
    if is_call:
        assert shared["shared"].wait() == "came"


def call_detached(group: LocalGroup, name: str) -> None:
    with farcall.detached():
        call(group.agents[1], 2, await_at, name)
    ended[name].append("done")


def test_a_detached_call_goes_on(group: LocalGroup) -> None:
    stage = new_stage("detached")
    gate = new_gate("detached")
    future = start(group.agents[0], 1, call_detached, group, "detached")
    assert arrived["detached"].wait(SOON)
    future.cancel()
    gate.set()
    eventually(lambda: stage == ["done"])


# Blocks, Ctrl-C, lost callers


def test_a_block_that_is_left_by_an_exception_cancels_its_calls(group: LocalGroup) -> None:
    names = ["called", "kept", "kept here"]
    stages = [new_stage(name) for name in names]
    with pytest.raises(ZeroDivisionError), farcall.deadline(SOON):  # noqa: PT012 (all of it is the block)
        future = start(group.agents[0], 1, poll, names[0])
        rref: RRef[Any] = RRef.of(group.agents[0].remote(2, poll, (names[1],), None))
        own: RRef[Any] = RRef.of(group.agents[0].remote(0, poll, (names[2],), None))
        assert all(arrived[name].wait(SOON) for name in names)
        raise ZeroDivisionError
    assert future.cancelled()
    for each in (rref, own):
        with pytest.raises(CallCancelledError, match="poll"):
            each.to_here(SOON)
    eventually(lambda: stages == [["cancelled"]] * 3)
    del rref, own, each
    eventually(lambda: no_references(group))


def test_a_block_that_is_left_normally_cancels_nothing(group: LocalGroup) -> None:
    gate = new_gate("block")
    with farcall.deadline(SOON):
        future = start(group.agents[0], 1, wait_at, "block", 7)
    gate.set()
    assert future.wait() == 7


class Poll:
    """A value whose method polls, as `poll` does."""

    def run(self, name: str) -> str:
        return poll(name)


CALLS: dict[str, Callable[[str], object]] = {
    "rpc_sync": lambda name: farcall.rpc_sync("worker1", poll, args=(name,)),
    "worker": lambda name: farcall.worker("worker1").call(poll, name),
    "reference": lambda name: farcall.worker("worker1").keep(Poll).call(Poll.run, name),
}


@pytest.mark.parametrize("way", CALLS)
def test_ctrl_c_in_a_blocking_call_cancels_it(group_of_this_worker: LocalGroup, way: str) -> None:
    stage = new_stage("ctrl-c")

    def press() -> None:
        assert arrived["ctrl-c"].wait(SOON)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        CALLS[way]("ctrl-c")
    presser.join()
    eventually(lambda: stage == ["cancelled"])


def test_the_loss_of_the_caller_cancels_its_calls(make_group: NewGroup) -> None:
    group = make_group(3, is_open=True)
    eventually(lambda: all(len(worker.get_worker_infos()) == 3 for worker in group.agents))
    stage = new_stage("lost")
    future = start(group.agents[0], "worker1", call_down, group, "lost", 4)
    assert arrived["lost"].wait(SOON)
    other = start(group.agents[2], "worker1", wait_at, "lost", "came")
    group.agents[0].shutdown(graceful=False)
    eventually(lambda: len(stage) == 5)
    assert isinstance(future.exception(), farcall.RpcError)
    assert not other.done(), "another caller's call is not touched"
    gates["lost"].set()
    assert other.wait() == "came"


def keep_and_share(rref: RRef[Any]) -> None:
    held.append(rref)


held: list[Any] = []


def test_the_loss_of_the_caller_cancels_a_remote_call_only_if_nobody_else_has_a_reference(make_group: NewGroup) -> None:
    group = make_group(3, is_open=True)
    eventually(lambda: all(len(worker.get_worker_infos()) == 3 for worker in group.agents))
    alone, common = new_stage("alone"), new_stage("common")
    first: RRef[Any] = RRef.of(group.agents[0].remote("worker1", poll, ("alone",), None))
    second: RRef[Any] = RRef.of(group.agents[0].remote("worker1", await_at, ("common",), None))
    held.clear()
    call(group.agents[0], "worker2", keep_and_share, second)
    assert arrived["alone"].wait(SOON)
    assert arrived["common"].wait(SOON)
    eventually(lambda: held[0].confirmed_by_owner())
    group.agents[0].shutdown(graceful=False)
    eventually(lambda: alone == ["cancelled"])
    gates["common"].set()
    assert held[0].to_here(SOON) == "common"
    assert not common
    held.clear()
    del first, second


# References


class Value:
    pass


made: list[weakref.ref[Any]] = []


def make_reference(group: LocalGroup, name: str) -> RRef[Any]:
    """Runs on worker1: returns a reference, though nobody wants it any more."""
    poll(name)
    value = Value()
    made.append(weakref.ref(value))
    return group.rref(1, value)


def test_references_in_the_result_of_a_cancelled_call_are_freed(group: LocalGroup) -> None:
    made.clear()
    new_stage("reply")
    future = start(group.agents[0], 1, make_reference, group, "reply")
    assert arrived["reply"].wait(SOON)
    future.cancel()
    eventually(lambda: made and made[0]() is None)
    eventually(lambda: no_references(group))


def take_reference(rref: RRef[Any], name: str) -> None:
    poll(name)


@pytest.mark.parametrize("has_started", [True, False], ids=["started", "not started"])
def test_references_in_the_arguments_of_a_cancelled_call_are_freed(make_group: NewGroup, has_started: bool) -> None:
    group = make_group(2, num_worker_threads=1)
    gate = new_gate("busy")
    if not has_started:
        busy = start(group.agents[0], 1, wait_at, "busy")
        assert arrived["busy"].wait(SOON)
    new_stage("argument")
    value = Value()
    is_alive = weakref.ref(value)
    future = start(group.agents[0], 1, take_reference, group.rref(0, value), "argument")
    del value
    if has_started:
        assert arrived["argument"].wait(SOON)
    future.cancel()
    gate.set()  # the only thread of the callee must be free to say that the reference has gone
    if not has_started:
        busy.wait()
    eventually(lambda: gc.collect() >= 0 and is_alive() is None)
    eventually(lambda: no_references(group))


def test_cancels_and_replies_that_cross_leave_nothing_behind(group: LocalGroup) -> None:
    for _ in range(300):
        future = start(group.agents[0], 1, group.rref, 1, Value())
        future.cancel()
        if not future.cancelled():
            future.wait()
        del future
    assert call(group.agents[0], 1, echo, "after") == "after"
    eventually(lambda: no_references(group))
    assert group.agents[0].get_metrics()["calls_pending"] == 0


def test_a_wait_for_a_value_that_is_cancelled_leaves_the_value_alone(group: LocalGroup) -> None:
    gate = new_gate("value")
    rref: RRef[Any] = RRef.of(group.agents[0].remote(1, wait_at, ("value", "came"), None))
    own: RRef[Any] = RRef.of(group.agents[0].remote(0, wait_at, ("value", "came"), None))

    async def ask(which: RRef[Any]) -> Any:
        return await which

    async def main(which: RRef[Any]) -> Any:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(which), 0.05)

    asyncio.run(main(rref))
    asyncio.run(main(own))
    gate.set()
    assert rref.to_here(SOON) == own.to_here(SOON) == "came"


# Interruptible functions


@farcall.interruptible
def compute(name: str) -> int:
    arrived[name].set()
    total = 0
    try:
        while True:
            total += 1
    finally:
        ended[name].append("interrupted")


@farcall.interruptible
def compute_a_little(name: str) -> int:
    arrived[name].set()
    return sum(range(200))


@farcall.interruptible
def call_often(group: LocalGroup, name: str) -> None:
    arrived[name].set()
    try:
        while True:
            call(group.agents[1], 2, echo, 1)
    finally:
        ended[name].append("interrupted")


def test_an_interruptible_function_is_interrupted(group: LocalGroup) -> None:
    stage = new_stage("compute")
    future = start(group.agents[0], 1, compute, "compute")
    assert arrived["compute"].wait(SOON)
    future.cancel()
    eventually(lambda: stage == ["interrupted"])
    stage = new_stage("late")
    with pytest.raises(farcall.RpcTimeoutError):
        call(group.agents[0], 1, compute, "late", timeout=0.1)
    eventually(lambda: stage == ["interrupted"])
    assert call(group.agents[0], 1, compute_a_little, "late") == 19900


def test_an_interrupt_never_hits_another_request_or_the_library(
    group: LocalGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """Cancels at all points of short functions: the requests behind them, and the links, must not notice."""
    new_stage("short")
    for number in range(300):
        future = start(group.agents[0], 1, compute_a_little, "short")
        behind = start(group.agents[0], 1, echo, number)
        if number % 3:
            arrived["short"].wait(SOON)
        future.cancel()
        arrived["short"].clear()
        assert behind.wait() == number
    assert caplog.records == []


def test_an_interruptible_function_that_makes_calls_harms_no_link(
    group: LocalGroup, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(30):
        stage = new_stage("calls")
        others = [start(group.agents[1], 2, echo, each) for each in range(10)]
        future = start(group.agents[0], 1, call_often, group, "calls")
        assert arrived["calls"].wait(SOON)
        threading.Event().wait(0.0005 * (number % 5))
        future.cancel()
        eventually(lambda stage=stage: stage == ["interrupted"])  # type: ignore[misc]
        assert [other.wait() for other in others] == list(range(10))
    assert caplog.records == []
    assert group.agents[1].get_metrics()["calls_pending"] == 0


def test_an_interruptible_function_is_an_ordinary_one_where_it_is_defined() -> None:
    new_stage("here")
    assert compute_a_little("here") == 19900
    assert compute_a_little.__name__ == "compute_a_little"
    with pytest.raises(TypeError, match="async def"):
        farcall.interruptible(sleep_long)
