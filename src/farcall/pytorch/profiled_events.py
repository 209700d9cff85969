"""What torch's profiler has to show of calls: their own events, and those that came from where they ran.

The profiler (the legacy one: torch profiles no calls with the other) records what happens in a thread, and `profile`
makes `FunctionEvent`s of it at its end. Nothing can be added to its records, and a record that ends in another thread
than it began in is not found again. So a call leaves only a *mark* there, a short record with a name of its own, and is
described here; where the events are made, each mark is replaced by what became of the call.

Rules
- Times are microseconds, as in torch. Those of events that came from elsewhere count from when the function was begun
  there: clocks of two workers have nothing in common. Shown here, they stand in the middle of their call, as if its way
  there had taken as long as its way back.
- A call that has not ended is not shown, as torch shows nothing that has not ended.
- A profiler may be switched off and nobody ask for its events, so only so many calls are remembered.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import MEMORY_EVENT_NAME, FunctionEvent

REMOTE_OP: Final = "#remote_op: "
"""Between the name of a call and that of what happened in it at the other worker."""
_MOST_CALLS: Final = 1 << 16

parse_records: Final = profiler_legacy._parse_legacy_records
"""torch's own: the events of what `_disable_profiler_legacy` returns."""


class Event(NamedTuple):
    """An event on its way to the caller: plain values, so that it travels anywhere."""

    node_id: int
    name: str
    thread: int
    start: float
    end: float
    input_shapes: Sequence[Any]
    stack: Sequence[str]
    scope: int
    cpu_memory_usage: int
    device_memory_usage: int
    is_async: bool
    sequence_nr: int
    fwd_thread: int | None
    flops: int | None
    use_device: str | None
    kernels: Sequence[tuple[str, int, float]]

    @classmethod
    def of(cls, event: Any) -> Event:
        """Of torch's event."""
        return cls(
            event.node_id,
            event.name,
            event.thread,
            event.time_range.start,
            event.time_range.end,
            event.input_shapes,
            event.stack,
            event.scope,
            event.cpu_memory_usage,
            event.device_memory_usage,
            event.is_async,
            event.sequence_nr,
            event.fwd_thread,
            event.flops,
            event.use_device,
            [tuple(kernel) for kernel in event.kernels],
        )

    def shown(self, call: str, shift: float) -> Any:
        """As torch's event at the caller, in the call of that name."""
        name = f"{call}{REMOTE_OP}{self.name}"
        shown = FunctionEvent(
            id=next(_ids),
            node_id=self.node_id,
            name=name,
            trace_name=name,
            thread=self.thread,
            start_us=self.start + shift,
            end_us=self.end + shift,
            fwd_thread=self.fwd_thread,
            input_shapes=self.input_shapes,
            stack=list(self.stack),
            scope=self.scope,
            use_device=self.use_device,
            cpu_memory_usage=self.cpu_memory_usage,
            device_memory_usage=self.device_memory_usage,
            is_async=self.is_async,
            is_remote=True,
            sequence_nr=self.sequence_nr,
            is_legacy=True,
            flops=self.flops,
        )
        for kernel in self.kernels:
            shown.append_kernel(*kernel)
        return shown


_ids: Final = itertools.count(1 << 48)
"""Of events that torch has not numbered itself; it counts from 1."""


class Report(NamedTuple):
    """What a callee tells of a call."""

    took: float
    """From the function's beginning to its end, or to that of the future that it returned."""
    events: Sequence[Event]


class ProfiledCall:
    """One call that a profiler saw begin in this thread."""

    def __init__(self, key: str) -> None:
        """Leaves its mark. `key`: its name in the profiler."""
        self.key = key
        self.took: float | None = None
        """Once it has ended: how long it took."""
        self.report: Report | None = None
        """What the other worker has told of it; nothing if it failed."""
        mark = _marks.new(self)
        with torch.autograd.profiler.record_function(mark):
            self._began = perf_counter()

    def ended(self, report: Report | None) -> None:
        """The reply is there, or an error."""
        self.report = report
        self.took = (perf_counter() - self._began) * 1e6

    def events(self, mark: Any) -> Iterable[Any]:
        """torch's events of the call, for that of its mark."""
        if self.took is None:
            return
        start = mark.time_range.start
        yield FunctionEvent(
            id=mark.id,
            node_id=mark.node_id,
            name=self.key,
            trace_name=self.key,
            thread=mark.thread,
            start_us=start,
            end_us=start + self.took,
            fwd_thread=mark.fwd_thread,
            input_shapes=mark.input_shapes,
            stack=mark.stack,
            scope=mark.scope,
            is_async=True,
            sequence_nr=mark.sequence_nr,
            is_legacy=True,
            flops=mark.flops,
        )
        if self.report is not None:
            shift = start + max(0.0, self.took - self.report.took) / 2
            for event in self.report.events:
                yield event.shown(self.key, shift)


class _Marks:
    """The calls that have left marks, by their names."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._calls: dict[str, ProfiledCall] = {}

    def new(self, call: ProfiledCall) -> str:
        with self._lock:
            mark = f"{call.key}#call {next(self._numbers)}"
            self._calls[mark] = call
            if len(self._calls) > _MOST_CALLS:
                del self._calls[next(iter(self._calls))]
        return mark

    def take(self, mark: str) -> ProfiledCall | None:
        return self._calls.pop(mark, None)


_marks: Final = _Marks()


def with_calls(events: Iterable[Any]) -> list[Any]:
    """These events of torch's, with the calls in the place of their marks; in the order in which torch has them."""
    shown: list[Any] = []
    for event in events:
        call = _marks.take(event.name)
        if call is None:
            shown.append(event)
        else:
            shown.extend(call.events(event))
    shown.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    return shown


def travelling(events: Iterable[Any]) -> list[Event]:
    """These events of torch's for the caller, without those of memory that belongs to no function."""
    return [Event.of(event) for event in events if event.name != MEMORY_EVENT_NAME]


def _parse_legacy_records(thread_records: Any) -> list[Any]:
    """In the place of torch's: the events of these records, and those of calls."""
    return with_calls(parse_records(thread_records))


def listen() -> None:
    """Has torch's profiler show calls. Twice is once."""
    profiler_legacy._parse_legacy_records = _parse_legacy_records
