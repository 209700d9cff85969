"""Calls in torch's profiler: their names, what comes back from where they ran, and what is not shown."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from script_stage import script
from torch.autograd.profiler_legacy import profile

from farcall.pytorch import api, envelopes, functions, profiler
from farcall.pytorch.autograd import post
from farcall.pytorch.internal import RPCExecMode
from farcall.testing.local import LocalGroup

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.timeout(30)]


@script
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x.mul(2)


def passed_on(to: str, x: torch.Tensor) -> Any:
    return api.rpc_sync(to, doubled, (x,))


@functions.async_execution
def later(to: str, x: torch.Tensor) -> Any:
    return api.rpc_async(to, doubled, (x,))


def fails() -> None:
    raise ValueError("meant")


class Counter:
    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x.add(1)


@pytest.fixture
def group() -> Iterator[LocalGroup]:
    with LocalGroup(2) as group:
        post.begin(0)
        yield group
        post.end()


def events_of(action: Callable[[], Any], **settings: Any) -> list[Any]:
    with profile(**settings) as profiled:
        action()
    return list(profiled.function_events)


def names(events: list[Any]) -> list[str]:
    return [event.name for event in events]


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (doubled, (ONE,), "doubled"),
        (Counter, (), "Counter"),
        (torch.mul, (ONE, 2), "aten::mul"),
        (tripled, (ONE,), tripled.qualified_name),
        (functools.partial(doubled, ONE), (), "partial(doubled)"),
    ],
)
def test_a_call_has_the_name_of_its_function(function: Any, args: Any, name: str) -> None:
    shown = events_of(lambda: api.rpc_sync("worker1", function, args))
    assert shown[0].name.startswith("rpc_sync#")
    assert name in shown[0].name
    assert shown[0].name.endswith("(worker0 -> worker1)")
    assert not shown[0].is_remote
    assert shown[0].is_async


def test_the_ways_to_call_are_told_apart() -> None:
    def call() -> None:
        api.rpc_async(1, doubled, (ONE,)).wait()
        api.remote(1, doubled, (ONE,))._get_profiling_future().wait()

    local = [event.name for event in events_of(call) if not event.is_remote]
    assert local == ["rpc_async#doubled(worker0 -> worker1)", "rpc_remote#doubled(worker0 -> worker1)"]


def test_what_happened_at_the_other_worker_comes_back_within_the_time_of_the_call() -> None:
    call, *inside = events_of(lambda: api.rpc_sync(1, doubled, (ONE,)))
    assert f"{call.name}#remote_op: aten::mul" in names(inside)
    for event in inside:
        assert event.is_remote
        assert event.name.startswith(f"{call.name}#remote_op: ")
        assert call.time_range.start <= event.time_range.start
        assert event.time_range.end <= call.time_range.end


def test_how_tensors_travel_is_not_shown() -> None:
    large = torch.ones(100, 100)
    shown = events_of(lambda: api.rpc_sync(1, torch.neg, (large,)))
    assert names(shown) == [shown[0].name, f"{shown[0].name}#remote_op: aten::neg"]


def test_calls_of_calls_come_back_with_all_their_names() -> None:
    for function, mode in ((passed_on, RPCExecMode.SYNC), (later, RPCExecMode.ASYNC)):
        shown = events_of(lambda called=function: api.rpc_sync(1, called, ("worker1", ONE)))
        outer = f"rpc_sync#{function.__name__}(worker0 -> worker1)"
        inner = f"{outer}#remote_op: rpc_{mode.value}#doubled(worker1 -> worker1)"
        assert names(shown).count(inner) == 1
        assert names(shown).count(f"{inner}#remote_op: aten::mul") == 1


def test_a_remote_call_is_shown_when_its_function_has_run() -> None:
    def call() -> None:
        api.remote(1, torch.add, (ONE, 1))._get_profiling_future().wait()

    assert "rpc_remote#aten::add(worker0 -> worker1)#remote_op: aten::add" in names(events_of(call))


def test_a_remote_call_whose_function_fails_is_shown_too() -> None:
    def call() -> None:
        api.remote(1, fails)._get_profiling_future().wait()

    assert names(events_of(call)) == ["rpc_remote#fails(worker0 -> worker1)"]


def test_a_remote_call_without_a_profiler_has_no_profiling_future() -> None:
    with pytest.raises(RuntimeError, match="was the profiler enabled"):
        api.remote(1, doubled, (ONE,))._get_profiling_future()


def test_fetching_is_one_event_and_nothing_at_the_owner() -> None:
    rref = api.remote(1, doubled, (ONE,))
    assert names(events_of(rref.to_here)) == ["to_here#(worker0)->(worker1)"]
    assert not profiler._thread.silent


def test_a_call_on_a_proxy_is_a_call_that_invokes() -> None:
    rref = api.remote(1, Counter)
    shown = names(events_of(lambda: rref.rpc_sync().add(ONE)))
    assert "rpc_sync#_local_invoke(worker0 -> worker1)" in shown
    assert "rpc_sync#_local_invoke(worker0 -> worker1)#remote_op: aten::add" in shown


def test_a_call_that_fails_is_shown_alone() -> None:
    def call() -> None:
        with pytest.raises(ValueError, match="meant"):
            api.rpc_sync(1, fails)

    assert names(events_of(call)) == ["rpc_sync#fails(worker0 -> worker1)"]


def test_two_calls_of_one_function_are_two() -> None:
    def call() -> None:
        for future in [api.rpc_async(1, doubled, (ONE,)) for _ in range(2)]:
            future.wait()

    shown = names(events_of(call))
    assert shown.count("rpc_async#doubled(worker0 -> worker1)") == 2
    assert shown.count("rpc_async#doubled(worker0 -> worker1)#remote_op: aten::mul") == 2


def test_a_call_that_has_not_ended_is_not_shown() -> None:
    gate.clear()
    futures: list[Any] = []
    assert events_of(lambda: futures.append(api.rpc_async(1, at_the_gate))) == []
    gate.set()
    futures[0].wait()


gate = threading.Event()


def at_the_gate() -> None:
    gate.wait(10)


def test_the_settings_of_the_profiler_hold_at_the_other_worker_as_well() -> None:
    def remote_mul(**settings: Any) -> Any:
        shown = events_of(lambda: api.rpc_sync(1, doubled, (torch.ones(8),)), **settings)
        return next(event for event in shown if event.name.endswith("aten::mul"))

    plain, rich = remote_mul(), remote_mul(record_shapes=True, profile_memory=True)
    assert (plain.input_shapes, plain.cpu_memory_usage) == ([], 0)
    assert rich.input_shapes[0] == [8]
    assert rich.cpu_memory_usage >= 32


def test_without_a_profiler_nothing_rides_along() -> None:
    agent, info = api._get_current_rpc_agent(), api.get_worker_info(1)
    assert not envelopes.rides_along(agent, info)
    with profile():
        assert envelopes.rides_along(agent, info)


def test_the_other_profiler_shows_no_calls() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        assert not profiler.is_profiled()
        api.rpc_sync(1, doubled, (ONE,))
    assert not [event.name for event in profiled.events() if "rpc_" in event.name]


def test_a_thread_that_nobody_profiles_is_not_shown() -> None:
    def call() -> None:
        thread = threading.Thread(target=api.rpc_sync, args=(1, doubled, (ONE,)))
        thread.start()
        thread.join()

    assert events_of(call) == []


def test_the_next_call_can_be_given_a_name() -> None:
    profiler.RemoteProfilerManager.set_current_profiling_key("mine")
    with pytest.raises(RuntimeError, match="'mine'"):
        profiler.RemoteProfilerManager.set_current_profiling_key("another")

    def call() -> None:
        api.rpc_sync(1, doubled, (ONE,))
        api.rpc_sync(1, torch.neg, (ONE,))

    shown = [event.name for event in events_of(call) if not event.is_remote]
    assert shown == ["mine", "rpc_sync#aten::neg(worker0 -> worker1)"]


def test_a_worker_s_thread_is_profiled_only_while_the_function_runs() -> None:
    events_of(lambda: api.rpc_sync(1, doubled, (ONE,)))
    assert not api.rpc_sync(1, torch.autograd._profiler_enabled)


def test_a_profiler_that_was_left_on_in_a_worker_s_thread_keeps_what_it_sees() -> None:
    visit = profiler._Visit(None, profiler.Settings())

    def run() -> list[str]:
        with profile() as mine, visit.around():
            torch.ones(1).neg()
        visit.finished()
        return names(mine.function_events)

    assert "aten::neg" in run()
    assert visit.pack([])[1].events == []


def test_reports_that_nobody_asks_for_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "_MOST_KEPT", 2)
    for number in "abc":
        profiler._Visit(number, profiler.Settings()).finished()
    assert [number for number in profiler._kept if number in "abc"] == ["b", "c"]
    profiler._kept.clear()
