"""Calls in torch's profiler: what is recorded, where, and how it gets to the caller that profiles.

A call that is made under `torch.autograd.profiler_legacy.profile` shows there as `rpc_sync#name(caller -> callee)`. The
function runs under a profiler of its own at the callee, and its events come back with the reply. Calls that the
function makes show there in the same way, so those of any depth come back. `torch.profiler` shows no calls; with
torch's own RPC it does not either.

Theory of operation: the legacy profiler records what happens in a thread, and `profile` makes `FunctionEvent`s of the
records at its end. Nothing can be added to its records, and a record that ends in another thread than it began in is
not found again. So a call leaves only a *mark* in the records, a short record with a unique name, and is described
here. When the events are made, each mark is replaced by the events of its call.

Rules
- A program that does not profile pays one question to torch in each call.
- A function runs under the settings of its caller's profiler: shapes, memory, stacks.
- The result of a remote call stays where it is. Its events are fetched by a call of their own, which is not shown.
- What an async function does before it returns its future is recorded, and so are the calls that it started, however
  late they end.
- Times are in microseconds, as in torch. Times of events from another worker count from the start of the function
  there, because the clocks of two workers have nothing in common. They are shown in the middle of their call, as if the
  request had taken as long as the reply.
- A call that has not ended is not shown, as torch shows nothing that has not ended.
- A profiler may be switched off without anybody asking for its events, so the number of remembered calls is limited.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch
from torch.autograd import ProfilerConfig, ProfilerState, profiler_legacy
from torch.autograd.profiler_util import MEMORY_EVENT_NAME, FunctionEvent
from torch.jit._builtins import _find_builtin

from farcall.functions import mark_async
from farcall.futures import Future
from farcall.protocol.ids import WorkerInfo
from farcall.pytorch.envelopes import RIDERS, Departure, Tensors, Trip, Visit
from farcall.pytorch.futures import RpcFuture
from farcall.pytorch.internal import RPCExecMode, _build_rpc_profiling_key
from farcall.runtime.agent import Agent
from farcall.serialization import callable_name

# Events

REMOTE_OP: Final = "#remote_op: "
"""Between the name of a call and that of what happened in it at the other worker."""
_MOST_CALLS: Final = 1 << 16

parse_records: Final = profiler_legacy._parse_legacy_records
"""torch's own: the events of what `_disable_profiler_legacy` returns."""


class Event(NamedTuple):
    """An event of torch's profiler as plain values, so that it can be sent to the caller."""

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
        """Returns the event that describes a `FunctionEvent` of torch's.

        Raises `AttributeError` for any other object.
        """
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
        """Returns the event as a `FunctionEvent` of torch's, for the profiler of the caller.

        Args:
            call: The name of the call in that profiler. The name of the event begins with it.
            shift: Microseconds to add to its times.
        """
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
    """What the callee reports about a profiled call. `took` is in microseconds."""

    took: float
    """From the function's beginning to its end, or to that of the future that it returned."""
    events: Sequence[Event]


class ProfiledCall:
    """One call that began in this thread while a profiler was active."""

    def __init__(self, key: str) -> None:
        """Leaves a mark in the records of the profiler. `key` is the name of the call there."""
        self.key = key
        self.took: float | None = None
        """Once it has ended: how long it took."""
        self.report: Report | None = None
        """What the other worker has told of it; nothing if it failed."""
        mark = _marks.new(self)
        with torch.autograd.profiler.record_function(mark):
            self._began = perf_counter()

    def ended(self, report: Report | None) -> None:
        """Records that the call has ended now. `report` is what the callee reported; None if the call failed."""
        self.report = report
        self.took = (perf_counter() - self._began) * 1e6

    def events(self, mark: Any) -> Iterable[Any]:
        """Yields torch's events for the call and for what happened in it at the callee; nothing if it has not ended.

        Args:
            mark: The event of the mark that the call has left.
        """
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
    """The calls that have left marks, by the names of the marks. At most `_MOST_CALLS` are kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._calls: dict[str, ProfiledCall] = {}

    def new(self, call: ProfiledCall) -> str:
        """Remembers a call, and returns a unique name for its mark. Forgets the oldest call if there are too many."""
        with self._lock:
            mark = f"{call.key}#call {next(self._numbers)}"
            self._calls[mark] = call
            if len(self._calls) > _MOST_CALLS:
                del self._calls[next(iter(self._calls))]
        return mark

    def take(self, mark: str) -> ProfiledCall | None:
        """Returns the call with a mark, and forgets it; None if there is none."""
        return self._calls.pop(mark, None)


_marks: Final = _Marks()


def with_calls(events: Iterable[Any]) -> list[Any]:
    """Returns torch's events with each mark replaced by the events of its call, ordered as torch orders events.

    Marks of calls that have not ended are removed. Returns an empty list for no events.
    """
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
    """Returns torch's events in the form in which they are sent to the caller; an empty list for no events.

    Memory events that belong to no function are left out.
    """
    return [Event.of(event) for event in events if event.name != MEMORY_EVENT_NAME]


def _parse_legacy_records(thread_records: Any) -> list[Any]:
    """Replaces torch's function of this name: returns the events of the records, including those of calls."""
    return with_calls(parse_records(thread_records))


def listen() -> None:
    """Makes torch's profiler show calls from now on. Does nothing the second time."""
    profiler_legacy._parse_legacy_records = _parse_legacy_records


# Calls

# torch's own, whatever is put in the place of its module later: its C++ profiler can be told by nobody else.
_set_default_node_id: Final = torch._C._distributed_rpc._set_profiler_node_id
_profiler_enabled: Final = torch.autograd._profiler_enabled
_profiler_type: Final = torch._C._autograd._profiler_type
_LEGACY: Final = torch._C._profiler.ActiveProfilerType.LEGACY
_MOST_KEPT: Final = 1 << 10
"""Reports of remote calls that nobody has asked for; those who made them have died."""


class Settings(NamedTuple):
    """What a profiler records; the names are those of `torch.autograd.profiler_legacy.profile`."""

    use_cuda: bool = False
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False

    def config(self) -> Any:
        """Returns the `ProfilerConfig` of torch's with these settings. CUDA is recorded only if this machine has it."""
        kind = ProfilerState.CUDA if self.use_cuda and torch.cuda.is_available() else ProfilerState.CPU
        return ProfilerConfig(kind, *self[1:], torch._C._profiler._ExperimentalConfig())


class _Thread(threading.local):
    settings = Settings()
    """Of the profiler that was started in this thread last."""
    key: str | None = None
    """For its next call, in the place of the usual one."""
    silent = False
    """Whether its calls are not shown."""


_thread = _Thread()


def _set_profiler_node_id(default_node_id: int) -> None:
    """Sets the `node_id` of everything that profilers of this process record from now on. `init_rpc` calls this.

    Raises `RuntimeError` for a negative number, and `TypeError` for anything but a number.
    """
    _set_default_node_id(default_node_id)


def _get_should_profile() -> bool:
    """Returns whether torch's legacy profiler, the only one that can show calls, is active in this thread."""
    return bool(_profiler_enabled()) and bool(_profiler_type() == _LEGACY)


def is_profiled() -> bool:
    """Returns whether calls of this thread are shown in a profiler. Always False inside `shown_as`."""
    return not _thread.silent and _get_should_profile()


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Context manager: torch's profiler records nothing of this thread inside.

    Sending tensors runs operators of torch that are not the program's.
    """
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)


@contextmanager
def shown_as(name: str) -> Iterator[None]:
    """Context manager: if a profiler is active, this thread's operators inside are shown as one record called `name`.

    Does nothing if no profiler is active.
    """
    if not is_profiled():
        yield
        return
    _thread.silent = True
    try:
        with torch.autograd.profiler.record_function(name), _unrecorded():
            yield
    finally:
        _thread.silent = False


class RemoteProfilerManager:
    """Sets the names of calls in the profiler, as torch's class of this name does."""

    @staticmethod
    def set_current_profiling_key(key: str) -> None:
        """Sets the name of the next profiled call of this thread.

        Raises:
            RuntimeError: A name was set before and not used yet.
        """
        if _thread.key is not None:
            raise RuntimeError(f"the next call has a profiling key already, {_thread.key!r}: make that call first")
        _thread.key = key


def profiled_name(function: Callable[..., Any]) -> str:
    """Returns the name that the profiler shows for a function that is not a builtin operator. Raises nothing.

    For a script function it is the qualified name, else `__qualname__` or another readable name.
    """
    if isinstance(function, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(function))
    return getattr(function, "__qualname__", None) or callable_name(function)


def key_of(agent: Agent, departure: Departure) -> str:
    """Returns the name that the profiler shows for a call, such as `rpc_sync#add(worker0 -> worker1)`."""
    name = _find_builtin(departure.function) or profiled_name(departure.function)
    return _build_rpc_profiling_key(departure.mode, name, agent.info.name, departure.to.name)


# At the caller


class _Trip(Trip):
    """The profiler's part in one call that this worker makes. The profiler of this thread must be active."""

    def __init__(self, agent: Agent, departure: Departure) -> None:
        self._agent = agent
        self._to = departure.to
        key, _thread.key = _thread.key, None
        self._settings = _thread.settings
        self._number = uuid.uuid4().hex if departure.mode is RPCExecMode.REMOTE else None
        self._call = ProfiledCall(key or key_of(agent, departure))

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Context manager: hides the operators of torch that pickling and unpickling run."""
        if not _profiler_enabled():
            yield
            return
        with _unrecorded():
            yield

    def pack(self, tensors: Tensors) -> tuple[Tensors, Any]:
        """Returns the tensors unchanged, and the settings of the profiler for the callee."""
        return tensors, (self._number, tuple(self._settings))

    def unpack(self, tensors: Tensors, words: Any) -> Tensors:
        """Ends the call with the report of the callee, and returns the tensors unchanged. The report may be None."""
        self._call.ended(words)
        return tensors

    def failed(self, error: BaseException) -> None:
        """Ends the call without a report. The error itself is not used."""
        self._call.ended(None)

    def referenced(self, rref: Any) -> None:
        """Fetches the report of a remote call, and ends the call when the report arrives or cannot be fetched."""

        def told(done: Future[Any]) -> None:
            self._call.ended(None if done.exception() is not None else done.value())

        try:
            asked = self._agent.call(self._to, _report_of, (rref, self._number), None, 0.0, True)
        except RuntimeError as error:  # the remote call has failed already; who uses the reference hears of it
            asked = Future()
            asked.set_exception(error)
        rref._set_profiling_future(RpcFuture(asked.then(told)))


# At the callee


class _Visit(Visit):
    """The profiler's part in one call that this worker runs for another. Makes a report for the caller."""

    def __init__(self, number: str | None, settings: Settings) -> None:
        self._number = number
        self._settings = settings
        self._began = perf_counter()
        self._events: list[Any] = []
        self._report: Report | None = None

    @contextmanager
    def around(self) -> Iterator[None]:
        """Context manager: profiles the function with the caller's settings, unless a profiler is active already."""
        if _profiler_enabled():  # somebody has switched one on in this thread, and left it: what runs is that one's
            yield
            return
        _thread.settings = self._settings  # those of the calls that it makes
        torch.autograd._enable_profiler_legacy(self._settings.config())
        self._began = perf_counter()
        try:
            yield
        finally:
            if _profiler_enabled():
                self._events = parse_records(torch.autograd._disable_profiler_legacy())

    def finished(self) -> None:
        """Makes the report, and keeps it for the caller if it is a remote call."""
        took = (perf_counter() - self._began) * 1e6
        self._report = Report(took, travelling(with_calls(self._events)))
        if self._number is not None:
            _kept[self._number] = self._report
            if len(_kept) > _MOST_KEPT:
                _kept.pop(next(iter(_kept)), None)

    def pack(self, tensors: Tensors) -> tuple[Tensors, Any]:
        """Returns the tensors unchanged, and the report."""
        return tensors, self._report


_kept: Final[dict[str, Report]] = {}
"""Of remote calls, until their callers ask."""


def _report_of(rref: Any, number: str) -> Future[Report | None]:
    """Called remotely: returns a future of the report of a remote call, when its function has run.

    The result is None if there is no report with that number. The future fails if the function failed.
    """
    value: Future[Any] = rref._value_here()
    return value.then(lambda _: _kept.pop(number, None))


mark_async(_report_of, _report_of, lambda name, result: result)


class ProfilerRider:
    """The interceptor that takes the profiler's settings to the callee and its events back to the caller."""

    key = "profiler"

    def concerns(self, agent: Agent, to: WorkerInfo) -> bool:
        """Returns whether the calls of the current thread are shown in a profiler."""
        return _profiler_enabled() and is_profiled()  # not bool(): it is on the path of every call

    def board(self, agent: Agent, departure: Departure) -> Trip:
        """Returns the profiler's part in a call that the current thread makes, which begins now."""
        return _Trip(agent, departure)

    def visit(self, agent: Agent, caller: WorkerInfo, words: Any) -> Visit:
        """Returns the profiler's part in a call that has come from another worker.

        Args:
            agent: The agent of this worker.
            caller: The worker that calls.
            words: The number of the report and the settings, as `pack` returned them. Raises `TypeError` or
                `ValueError` if they are anything else.
        """
        number, settings = words
        return _Visit(number, Settings(*settings))


def _note_settings(start_trace: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns a version of `profile._start_trace` that also records the settings of the profiler for this thread.

    torch does not tell the settings of an active profiler.
    """

    def _start_trace(self: Any) -> None:
        start_trace(self)
        chosen: Mapping[str, Any] = vars(self)
        _thread.settings = Settings(*(bool(chosen.get(name)) for name in Settings._fields))

    return _start_trace


RIDERS.append(ProfilerRider())
profiler_legacy.profile._start_trace = _note_settings(profiler_legacy.profile._start_trace)
listen()
