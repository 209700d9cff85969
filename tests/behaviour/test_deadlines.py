"""Deadlines: the time that is left travels with a call, and everything that the call leads to keeps to it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from time import monotonic
from typing import Any

import pytest

import farcall
from eventually import eventually
from farcall import Future, RpcTimeoutError, UsageError
from farcall.functions import async_execution
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import NewGroup, call, run, runs, start

pytestmark = pytest.mark.timeout(30)

SHORT = 0.05


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers wait for the word of the callee whether a call had started, however slow the machine is."""
    monkeypatch.setattr("farcall.deadlines.EXPIRY_GRACE_S", SOON)
    monkeypatch.setattr("farcall.deadlines._SLACK_S", SOON + 1)


def time_left() -> float | None:
    return farcall.remaining()


def time_left_in(group: LocalGroup, to: int, timeout: float = -1.0) -> float | None:
    """Runs on worker1: what a function has left that this one calls."""
    left: float | None = call(group.agents[1], to, time_left, timeout=timeout)
    return left


async def time_left_in_coroutine(group: LocalGroup) -> tuple[float | None, float | None]:
    here = farcall.remaining()
    await asyncio.sleep(0)
    there = await asyncio.create_task(ask_for_time_left(group))
    return here, there


async def ask_for_time_left(group: LocalGroup) -> float | None:
    left: float | None = await start(group.agents[1], 2, time_left, timeout=-1)
    return left


def test_a_call_knows_how_much_time_it_has_left(group: LocalGroup) -> None:
    left = call(group.agents[0], 1, time_left, timeout=20)
    assert 19 < left <= 20.01
    assert call(group.agents[0], 1, time_left, timeout=0) is None
    assert 59 < call(group.agents[0], 1, time_left, timeout=-1) <= 60.01
    assert farcall.remaining() is None


def test_a_nested_call_inherits_what_is_left(group: LocalGroup) -> None:
    assert 19 < call(group.agents[0], 1, time_left_in, group, 2, timeout=20) <= 20.01
    assert 99 < call(group.agents[0], 1, time_left_in, group, 2, timeout=100) <= 100.01, "the default is no limit there"
    assert 19 < call(group.agents[0], 1, time_left_in, group, 2, 50.0, timeout=20) <= 20.01
    assert 19 < call(group.agents[0], 1, time_left_in, group, 2, 0.0, timeout=20) <= 20.01
    assert 4 < call(group.agents[0], 1, time_left_in, group, 2, 5.0, timeout=20) <= 5.01


def test_the_default_timeout_applies_where_there_is_no_other_limit(group: LocalGroup) -> None:
    assert 59 < call(group.agents[0], 1, time_left_in, group, 2, timeout=0) <= 60.01
    with farcall.deadline(120):
        assert 119 < call(group.agents[0], 1, time_left, timeout=-1) <= 120.01
        assert 4 < call(group.agents[0], 1, time_left, timeout=5) <= 5.01
    with farcall.deadline(None):
        assert call(group.agents[0], 1, time_left, timeout=-1) is None


def test_coroutines_and_their_tasks_inherit_it_too(group: LocalGroup) -> None:
    here, there = call(group.agents[0], 1, time_left_in_coroutine, group, timeout=20)
    assert 19 < there <= here <= 20.01


@async_execution
def time_left_in_callback(group: LocalGroup) -> Future[Any]:
    return start(group.agents[1], 2, time_left, timeout=-1).then(
        lambda _: call(group.agents[1], 2, time_left, timeout=-1)
    )


def run_own_loop(group: LocalGroup) -> tuple[float | None, float | None]:
    return asyncio.run(time_left_in_coroutine(group))


def test_an_event_loop_that_a_function_runs_inherits_it_too(group: LocalGroup) -> None:
    for left in call(group.agents[0], 1, run_own_loop, group, timeout=20):
        assert 19 < left <= 20.01


kept_contexts: list[contextvars.Context] = []


def keep_context() -> None:
    kept_contexts.append(contextvars.copy_context())


def time_left_in_kept_context() -> list[float | None]:
    """Runs on worker1: what a thread has left that runs in the context which an earlier function has kept."""
    found: list[float | None] = []
    thread = threading.Thread(target=kept_contexts.pop().run, args=(lambda: found.append(farcall.remaining()),))
    thread.start()
    thread.join()
    return found


def test_a_thread_with_the_context_of_an_earlier_function_inherits_nothing(group: LocalGroup) -> None:
    call(group.agents[0], 1, keep_context, timeout=10)
    assert call(group.agents[0], 1, time_left_in_kept_context, timeout=20) == [None]


def test_callbacks_inherit_it_too(group: LocalGroup) -> None:
    assert 19 < call(group.agents[0], 1, time_left_in_callback, group, timeout=20) <= 20.01


def time_left_detached(group: LocalGroup) -> tuple[float | None, float | None]:
    with farcall.detached():
        return farcall.remaining(), call(group.agents[1], 2, time_left, timeout=-1)


def test_a_detached_call_inherits_nothing(group: LocalGroup) -> None:
    here, there = call(group.agents[0], 1, time_left_detached, group, timeout=20)
    assert here is None
    assert 59 < there <= 60.01


def test_the_nearest_of_nested_blocks_counts() -> None:
    assert farcall.remaining() is None
    with farcall.deadline(100):
        with farcall.deadline(5):
            left = farcall.remaining()
            assert left is not None
            assert 4 < left <= 5
        with farcall.deadline(500):
            left = farcall.remaining()
            assert left is not None
            assert 99 < left <= 100
        with farcall.detached():
            assert farcall.remaining() is None
    assert farcall.remaining() is None


@pytest.mark.parametrize("seconds", [-1, float("nan"), "1", True, -0.1])
def test_a_wrong_deadline_is_refused(seconds: Any) -> None:
    with pytest.raises(UsageError, match="0 or more seconds"):
        farcall.deadline(seconds)


def test_a_block_is_entered_once() -> None:
    block = farcall.deadline(1)
    with block:
        pass
    with pytest.raises(UsageError, match="once"), block:
        pass


def test_a_call_ends_with_the_block_around_it(group: LocalGroup) -> None:
    gate = new_gate("late")
    began = monotonic()
    with pytest.raises(RpcTimeoutError) as caught, farcall.deadline(0.2):
        call(group.agents[0], 1, wait_at, "late", timeout=-1)
    assert monotonic() - began >= 0.2
    assert caught.value.started is True
    gate.set()


def test_no_call_is_made_when_the_time_is_over(group: LocalGroup) -> None:
    with farcall.deadline(0):
        with pytest.raises(RpcTimeoutError, match="deadline"):
            call(group.agents[0], 1, run, "too late", timeout=-1)
        with pytest.raises(RpcTimeoutError, match="deadline"):
            group.agents[0].remote(1, run, ("too late",), None)
        assert farcall.remaining() == 0.0
        assert farcall.cancelled()
    assert call(group.agents[0], 1, run, "in time") == "in time"
    assert runs == ["in time"]


def test_every_wait_ends_with_the_block_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall.deadlines._SLACK_S", 0.01)
    future: Future[int] = Future()
    with pytest.raises(RpcTimeoutError, match="deadline"), farcall.deadline(SHORT):
        future.wait()
    with pytest.raises(RpcTimeoutError, match="deadline"):
        asyncio.run(await_within(future, SHORT))
    assert not future.done()
    with farcall.deadline(SOON), pytest.raises(TimeoutError, match=r"not done within 0\.01 s"):
        future.result(0.01)


async def await_within(future: Future[int], seconds: float) -> None:
    with farcall.deadline(seconds):
        await asyncio.shield(wait_for(future))


async def wait_for(future: Future[int]) -> int:
    return await future


def test_a_call_that_waits_for_a_thread_longer_than_its_timeout_is_not_run(make_group: NewGroup) -> None:
    group = make_group(2, num_worker_threads=1)
    gate = new_gate("busy")
    busy = start(group.agents[0], 1, wait_at, "busy")
    assert arrived["busy"].wait(SOON)
    late = [start(group.agents[0], 1, run, number, timeout=SHORT) for number in range(20)]
    for future in late:
        with pytest.raises(RpcTimeoutError, match="had not started") as caught:
            future.wait()
        assert caught.value.started is False
    gate.set()
    busy.wait()
    assert call(group.agents[0], 1, run, "in time") == "in time"
    assert runs == ["in time"]
    counts = group.agents[1].get_metrics()
    assert counts["calls_expired"] + counts["calls_cancelled"] == 20


def test_a_timeout_says_that_the_function_had_started(group: LocalGroup) -> None:
    gate = new_gate("late")
    with pytest.raises(RpcTimeoutError, match="had started there, and was told to stop") as caught:
        call(group.agents[0], 1, wait_at, "late", timeout=SHORT)
    assert caught.value.started is True
    future = start(group.agents[0], 1, wait_at, "late", timeout=SHORT)
    eventually(future.done)
    error = future.exception()
    assert isinstance(error, RpcTimeoutError)
    assert error.started is True
    gate.set()


over: dict[str, threading.Event] = {}


def wait_until_cancelled(name: str) -> str:
    """Runs until nobody wants its result."""
    arrived[name].set()
    eventually(farcall.cancelled)
    over[name].set()
    return "what nobody wants"


def new_wait(name: str) -> threading.Event:
    new_gate(name)
    over[name] = threading.Event()
    return over[name]


def test_a_function_sees_that_its_time_is_over(group: LocalGroup) -> None:
    ended = new_wait("polling")
    with pytest.raises(RpcTimeoutError):
        call(group.agents[0], 1, wait_until_cancelled, "polling", timeout=SHORT)
    assert ended.wait(SOON)


def test_a_remote_call_has_a_timeout_of_its_own(group: LocalGroup) -> None:
    ended = new_wait("kept")
    handle = group.agents[0].remote(1, wait_until_cancelled, ("kept",), None, 0.2)
    rref: farcall.RRef[Any] = farcall.RRef.of(handle)
    with pytest.raises(RpcTimeoutError, match="wait_until_cancelled") as caught:
        rref.to_here(SOON)
    assert caught.value.started is True
    assert ended.wait(SOON)


def test_a_remote_call_inherits_a_deadline_and_not_the_default_timeout(make_group: NewGroup) -> None:
    group = make_group(2, rpc_timeout=SHORT)
    call(group.agents[0], 1, time_left)  # connects
    gate = new_gate("slow")
    unlimited: farcall.RRef[Any] = farcall.RRef.of(group.agents[0].remote(1, wait_at, ("slow", "came"), None))
    new_wait("kept")
    with farcall.deadline(0.2):
        limited: farcall.RRef[Any] = farcall.RRef.of(group.agents[0].remote(1, wait_until_cancelled, ("kept",), None))
    with pytest.raises(RpcTimeoutError):
        limited.to_here(SOON)
    gate.set()
    assert unlimited.to_here(SOON) == "came"


def test_a_remote_call_of_a_worker_to_itself_keeps_to_it_too(group: LocalGroup) -> None:
    ended = new_wait("own")
    with farcall.deadline(0.1):
        rref: farcall.RRef[Any] = farcall.RRef.of(group.agents[0].remote(0, wait_until_cancelled, ("own",), None))
    with pytest.raises(RpcTimeoutError):
        rref.to_here(SOON)
    assert ended.wait(SOON)
