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


# Calls

# torch's own, whatever is put in the place of its module later: its C++ profiler can be told by nobody else.
_set_default_node_id: Final = torch._C._distributed_rpc._set_profiler_node_id
_profiler_enabled: Final = torch.autograd._profiler_enabled
_profiler_type: Final = torch._C._autograd._profiler_type
_LEGACY: Final = torch._C._profiler.ActiveProfilerType.LEGACY
_MOST_KEPT: Final = 1 << 10
"""Reports of remote calls that nobody has asked for; those who made them have died."""


class Settings(NamedTuple):
    """What a profiler records."""

    use_cuda: bool = False
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False

    def config(self) -> Any:
        """The same for torch's profiler here."""
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
    """Says which worker this process is: the `node_id` of what its profilers record from now on.

    `init_rpc` says it. Raises `RuntimeError` for a negative number, `TypeError` for anything else than a number.
    """
    _set_default_node_id(default_node_id)


def _get_should_profile() -> bool:
    """Whether a profiler that can show calls is on in this thread: the legacy one."""
    return bool(_profiler_enabled()) and bool(_profiler_type() == _LEGACY)


def is_profiled() -> bool:
    """Whether the calls of this thread are shown in a profiler."""
    return not _thread.silent and _get_should_profile()


@contextmanager
def _unrecorded() -> Iterator[None]:
    """What this thread does inside is not shown: how tensors travel is none of the program's operators."""
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)


@contextmanager
def shown_as(name: str) -> Iterator[None]:
    """What this thread does inside is not shown, but a record of that name is, if a profiler is on."""
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
    """Names calls in the profiler."""

    @staticmethod
    def set_current_profiling_key(key: str) -> None:
        """The next profiled call of this thread has that name. Raises `RuntimeError` if one is set already."""
        if _thread.key is not None:
            raise RuntimeError(f"the next call has a profiling key already, {_thread.key!r}: make that call first")
        _thread.key = key


def profiled_name(function: Callable[..., Any]) -> str:
    """The name of a function in the profiler that is no builtin operator."""
    if isinstance(function, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(function))
    return getattr(function, "__qualname__", None) or callable_name(function)


def key_of(agent: Agent, departure: Departure) -> str:
    """The name of a call in the profiler."""
    name = _find_builtin(departure.function) or profiled_name(departure.function)
    return _build_rpc_profiling_key(departure.mode, name, agent.info.name, departure.to.name)


# At the caller


class _Trip(Trip):
    """A call that is profiled."""

    def __init__(self, agent: Agent, departure: Departure) -> None:
        self._agent = agent
        self._to = departure.to
        key, _thread.key = _thread.key, None
        self._settings = _thread.settings
        self._number = uuid.uuid4().hex if departure.mode is RPCExecMode.REMOTE else None
        self._call = ProfiledCall(key or key_of(agent, departure))

    @contextmanager
    def handling(self) -> Iterator[None]:
        if not _profiler_enabled():
            yield
            return
        with _unrecorded():
            yield

    def pack(self, tensors: Tensors) -> tuple[Tensors, Any]:
        return tensors, (self._number, tuple(self._settings))

    def unpack(self, tensors: Tensors, words: Any) -> Tensors:
        self._call.ended(words)
        return tensors

    def failed(self, error: BaseException) -> None:
        self._call.ended(None)

    def referenced(self, rref: Any) -> None:
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
    """A call whose caller profiles."""

    def __init__(self, number: str | None, settings: Settings) -> None:
        self._number = number
        self._settings = settings
        self._began = perf_counter()
        self._events: list[Any] = []
        self._report: Report | None = None

    @contextmanager
    def around(self) -> Iterator[None]:
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
        took = (perf_counter() - self._began) * 1e6
        self._report = Report(took, travelling(with_calls(self._events)))
        if self._number is not None:
            _kept[self._number] = self._report
            if len(_kept) > _MOST_KEPT:
                _kept.pop(next(iter(_kept)), None)

    def pack(self, tensors: Tensors) -> tuple[Tensors, Any]:
        return tensors, self._report


_kept: Final[dict[str, Report]] = {}
"""Of remote calls, until their callers ask."""


def _report_of(rref: Any, number: str) -> Future[Report | None]:
    """Of a remote call, when its function has run; None if it failed."""
    value: Future[Any] = rref._value_here()
    return value.then(lambda _: _kept.pop(number, None))


mark_async(_report_of, _report_of, lambda name, result: result)


class ProfilerRider:
    """The profiler, as what rides along with calls."""

    key = "profiler"

    def concerns(self, agent: Agent, to: WorkerInfo) -> bool:
        """See `Rider`."""
        return _profiler_enabled() and is_profiled()  # not bool(): it is on the path of every call

    def board(self, agent: Agent, departure: Departure) -> Trip:
        """See `Rider`."""
        return _Trip(agent, departure)

    def visit(self, agent: Agent, caller: WorkerInfo, words: Any) -> Visit:
        """See `Rider`."""
        number, settings = words
        return _Visit(number, Settings(*settings))


def _note_settings(start_trace: Callable[[Any], None]) -> Callable[[Any], None]:
    """torch does not tell what the profiler of a thread records; so it is noted when it is started."""

    def _start_trace(self: Any) -> None:
        start_trace(self)
        chosen: Mapping[str, Any] = vars(self)
        _thread.settings = Settings(*(bool(chosen.get(name)) for name in Settings._fields))

    return _start_trace


RIDERS.append(ProfilerRider())
profiler_legacy.profile._start_trace = _note_settings(profiler_legacy.profile._start_trace)
listen()
