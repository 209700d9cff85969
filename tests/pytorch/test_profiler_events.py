"""What is shown of calls: where their marks were, and when what came from elsewhere is said to have happened."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd.profiler_legacy import profile
from torch.autograd.profiler_util import FunctionEvent

from farcall.pytorch import profiler
from farcall.pytorch.profiler import Event, ProfiledCall, Report, travelling, with_calls


def event(name: str, start: float, end: float, **more: Any) -> Any:
    return FunctionEvent(id=1, name=name, thread=3, start_us=start, end_us=end, stack=[], **more)


def marked(key: str) -> tuple[ProfiledCall, str]:
    """A call, and the name of its mark."""
    with profile():  # torch's own end of it would take the mark
        call = ProfiledCall(key)
        mark = next(reversed(profiler._marks._calls))
        profiler._marks._calls.pop(mark)
    profiler._marks._calls[mark] = call
    return call, mark


def test_a_mark_leads_to_its_call_and_begins_with_its_name() -> None:
    call, mark = marked("key")
    assert mark.startswith("key#")
    assert profiler._marks.take(mark) is call
    assert profiler._marks.take(mark) is None


def test_what_came_is_shown_in_the_middle_of_its_call() -> None:
    call, mark = marked("key")
    call.ended(Report(40.0, [Event.of(event("op", 10.0, 20.0, node_id=2, scope=7, is_async=True))]))
    call.took = 100.0
    shown = with_calls([event(mark, 1000.0, 1001.0, node_id=1)])
    (outer, inner) = shown
    assert (outer.name, outer.node_id, outer.thread, outer.is_remote) == ("key", 1, 3, False)
    assert (outer.time_range.start, outer.time_range.end) == (1000.0, 1100.0)
    assert (inner.name, inner.node_id, inner.is_remote, inner.scope) == ("key#remote_op: op", 2, True, 7)
    assert (inner.time_range.start, inner.time_range.end) == (1040.0, 1050.0)


def test_a_callee_s_clock_that_runs_fast_moves_nothing_before_its_call() -> None:
    call, mark = marked("key")
    call.ended(Report(500.0, [Event.of(event("op", 0.0, 500.0))]))
    call.took = 100.0
    assert with_calls([event(mark, 1000.0, 1001.0)])[1].time_range.start == 1000.0


def test_a_call_without_an_end_is_left_out_and_other_events_stay_in_order() -> None:
    _, mark = marked("key")
    shown = with_calls(
        [event("late", 9.0, 10.0), event(mark, 5.0, 6.0), event("inner", 1.0, 2.0), event("outer", 1.0, 4.0)]
    )
    assert [each.name for each in shown] == ["outer", "inner", "late"]


def test_events_travel_as_plain_values() -> None:
    with profile(record_shapes=True, profile_memory=True) as profiled:
        torch.ones(4).neg()
    sent = travelling(profiled.function_events)
    (back,) = (each for each in pickle.loads(pickle.dumps(sent)) if each.name == "aten::neg")
    assert back.input_shapes == [[4]]
    assert back.cpu_memory_usage == 16


def test_kernels_travel_too() -> None:
    launched = event("op", 0.0, 1.0, use_device="cuda")
    launched.append_kernel("kernel", 0, 5.0)
    (kernel,) = Event.of(launched).shown("key", 0.0).kernels
    assert (kernel.name, kernel.device, kernel.duration) == ("kernel", 0, 5.0)


def test_memory_that_belongs_to_no_function_does_not_travel() -> None:
    assert travelling([SimpleNamespace(name="[memory]")]) == []


def test_marks_that_nobody_takes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "_MOST_CALLS", 2)
    marks = profiler._Marks()
    first, *others = [marks.new(SimpleNamespace(key="key")) for _ in range(3)]  # type: ignore[arg-type]
    assert marks.take(first) is None
    assert all(marks.take(each) is not None for each in others)
