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
- The result of a call by `remote` stays on the callee. Its events are fetched by a second call, which is not shown.
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
"""Stands between the name of a call and the name of an event of the callee, in the name of a shown event."""
_MOST_CALLS: Final = 1 << 16

parse_records: Final = profiler_legacy._parse_legacy_records
"""Torch's own function: takes what `_disable_profiler_legacy` returned, and returns its events."""


class Event(NamedTuple):
    """An event of torch's profiler as plain values, so that it can be sent from the callee to the caller.

    The values are not checked. `Event.of` makes one from torch's `FunctionEvent`, whose attributes have the same names.

    Attributes:
        node_id: The rank of the worker that recorded it; -1 if it was not set.
        name: The name of the operator or block.
        thread: The number of the thread, as torch counts threads.
        start: When it began, in microseconds since the profiler that recorded it was started.
        end: When it ended, on the same clock.
        input_shapes: The shapes of the arguments; empty if they were not recorded.
        stack: The lines of the Python stack; empty if it was not recorded.
        scope: Torch's number for the kind of the record, for example a function or a user's block.
        cpu_memory_usage: Bytes of CPU memory that it allocated, less those that it freed.
        device_memory_usage: Bytes of memory of a device such as a GPU that it allocated, less those that it freed.
        is_async: Whether it ended in another thread than it began in.
        sequence_nr: Torch's number that links a backward operator to its forward operator; -1 for none.
        fwd_thread: The thread of the forward operator, for a backward operator; None for none.
        flops: How many floating-point operations it made; None or 0 if they were not counted.
        use_device: The kind of device that was profiled, such as `cuda`; None for the CPU only.
        kernels: Name, device number and microseconds of each kernel that it ran on a device; empty for none.
    """

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
        """Returns an `Event` with the values of `event`, which is a `FunctionEvent` of torch's.

        Raises `AttributeError` if `event` is any other object.
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

        Its name is `call`, the text `#remote_op: `, and the name of this event.

        Args:
            call: The name of the call in that profiler, for example `rpc_sync#add(worker0 -> worker1)`.
            shift: Microseconds to add to the start and the end of this event; may be 0.
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
"""Ids for events that are made here. They start high, because torch counts its own events from 1."""


class Report(NamedTuple):
    """What the callee sends back about one profiled call.

    Attributes:
        took: How many microseconds the function ran. If it returned a future, how many until that future was done.
        events: What the profiler of the callee recorded meanwhile; empty if it recorded nothing.
    """

    took: float
    events: Sequence[Event]


class ProfiledCall:
    """One call that was made in this thread while a profiler was active.

    Create it when the call is made, and call `ended` when it has ended. `events` then returns the call as torch's
    events.

    Attributes:
        key: The name of the call in the profiler, for example `rpc_sync#add(worker0 -> worker1)`.
        took: How many microseconds the call took; None until `ended` is called.
        report: What the callee sent back about the call; None if the call has not ended, or has failed.
    """

    def __init__(self, key: str) -> None:
        """Starts the clock of the call, and adds a mark to the records of this thread's profiler.

        A mark is a short record with a unique name, which `with_calls` later replaces by the events of the call.
        Without an active profiler no mark is recorded.

        Args:
            key: The name of the call in the profiler, for example `rpc_sync#add(worker0 -> worker1)`.
        """
        self.key = key
        self.took: float | None = None
        """Microseconds from the start to the end of the call; None until it has ended."""
        self.report: Report | None = None
        """What the callee sent back about the call; None if it has not ended, or has failed."""
        mark = _marks.new(self)
        with torch.autograd.profiler.record_function(mark):
            self._began = perf_counter()

    def ended(self, report: Report | None) -> None:
        """Records that the call has ended now. If it is called again, the last call counts.

        Args:
            report: What the callee sent back about the call; None if the call failed or no report came.
        """
        self.report = report
        self.took = (perf_counter() - self._began) * 1e6

    def events(self, mark: Any) -> Iterable[Any]:
        """Yields torch's event for the call, then the events of the callee; nothing if the call has not ended.

        Without a report of the callee, yields only the event for the call.

        Args:
            mark: The `FunctionEvent` that torch made of the mark, the short record that this call left in the profiler.
                Its start is the start of the call.
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
    """The profiled calls by the names of their marks: the short records that stand for them in the profiler's records.

    If there are more than `_MOST_CALLS` calls, the oldest is dropped. The constructor takes no arguments.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._calls: dict[str, ProfiledCall] = {}

    def new(self, call: ProfiledCall) -> str:
        """Stores `call`, and returns a unique name for its mark: the short record of the call in the profiler.

        Deletes the oldest call if there are more than `_MOST_CALLS`. Its mark is then shown as it is.
        """
        with self._lock:
            mark = f"{call.key}#call {next(self._numbers)}"
            self._calls[mark] = call
            if len(self._calls) > _MOST_CALLS:
                del self._calls[next(iter(self._calls))]
        return mark

    def take(self, mark: str) -> ProfiledCall | None:
        """Removes and returns the call whose mark has the name `mark`; None if no call has such a mark.

        A mark is the short record that stands for a call in the records of the profiler.
        """
        return self._calls.pop(mark, None)


_marks: Final = _Marks()


def with_calls(events: Iterable[Any]) -> list[Any]:
    """Returns the events of a profiler with each mark replaced by the events of its call, in torch's order.

    A mark is the short record that a `ProfiledCall` leaves in the profiler. The mark of a call that has not ended is
    removed. Torch's order is by start; of two events with the same start, the longer one comes first.

    Args:
        events: `FunctionEvent`s of torch's. No events give an empty list.
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
    """Converts `FunctionEvent`s of torch's to `Event`s, which can be sent; returns an empty list for no events.

    Leaves out the events in which torch records memory that belongs to no function.
    """
    return [Event.of(event) for event in events if event.name != MEMORY_EVENT_NAME]


def _parse_legacy_records(thread_records: Any) -> list[Any]:
    """Replaces torch's function of this name: returns the profiler's events, with those of remote calls among them.

    Args:
        thread_records: What torch's `_disable_profiler_legacy` returned: one list of records for each thread. Records
            without calls give the events that torch would return.
    """
    return with_calls(parse_records(thread_records))


def listen() -> None:
    """Makes torch's legacy profiler show remote calls, by replacing its function `_parse_legacy_records`.

    A second call has no further effect.
    """
    profiler_legacy._parse_legacy_records = _parse_legacy_records


# Calls

# torch's own, whatever is put in the place of its module later: its C++ profiler can be told by nobody else.
_set_default_node_id: Final = torch._C._distributed_rpc._set_profiler_node_id
_profiler_enabled: Final = torch.autograd._profiler_enabled
_profiler_type: Final = torch._C._autograd._profiler_type
_LEGACY: Final = torch._C._profiler.ActiveProfilerType.LEGACY
_MOST_KEPT: Final = 1 << 10
"""How many reports of calls by `remote` are kept at most. Callers that died never fetch theirs."""


class Settings(NamedTuple):
    """What a profiler records. All fields are False by default, and are not checked.

    Attributes:
        use_cuda: The times of CUDA kernels. Ignored on a machine without CUDA.
        record_shapes: The shapes of arguments.
        profile_memory: How much memory is allocated and freed.
        with_stack: The Python stack of each operator.
        with_flops: Estimates of floating-point operations.
        with_modules: The modules to which operators belong.
    """

    use_cuda: bool = False
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False

    def config(self) -> Any:
        """Returns these settings as a `ProfilerConfig` of torch's.

        `use_cuda` is ignored on a machine without CUDA.
        """
        kind = ProfilerState.CUDA if self.use_cuda and torch.cuda.is_available() else ProfilerState.CPU
        return ProfilerConfig(kind, *self[1:], torch._C._profiler._ExperimentalConfig())


class _Thread(threading.local):
    """What the profiler needs to know about the current thread. Each thread has its own values.

    Attributes:
        settings: The settings of the profiler that was started last in this thread; the defaults if none was started.
        key: The name of the next profiled call of this thread, in place of the usual one; None for the usual one.
        silent: Whether the calls of this thread are hidden from the profiler.
    """

    settings = Settings()
    key: str | None = None
    silent = False


_thread = _Thread()


def _set_profiler_node_id(default_node_id: int) -> None:
    """Sets the `node_id` of all events that profilers of this process record from now on. `init_rpc` calls this.

    Args:
        default_node_id: The rank of this worker; it tells the events of several workers apart. A negative number raises
            `RuntimeError`. Anything but a number raises `TypeError`.
    """
    _set_default_node_id(default_node_id)


def _get_should_profile() -> bool:
    """Returns True if torch's legacy profiler is active in this thread.

    Returns False if none or another profiler is active: only the legacy profiler can show calls.
    """
    return bool(_profiler_enabled()) and bool(_profiler_type() == _LEGACY)


def is_profiled() -> bool:
    """Returns True if a call that this thread makes now is shown in a profiler.

    That is so while torch's legacy profiler is active in this thread, except inside a `with shown_as(...)` block, which
    shows everything in it as one record.
    """
    return not _thread.silent and _get_should_profile()


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Context manager: inside it, torch's profiler records no operators of this thread; after it, it does again.

    It hides the operators that torch runs to send tensors, because the program did not call them. Without an active
    profiler it has no effect.
    """
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)


@contextmanager
def shown_as(name: str) -> Iterator[None]:
    """Context manager: the profiler shows everything that this thread does inside it as one record called `name`.

    Calls and operators inside it are not shown themselves. Without an active profiler it has no effect.
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
    """Sets the name that the profiler shows for a call. It has torch's name, and is used without an instance."""

    @staticmethod
    def set_current_profiling_key(key: str) -> None:
        """Sets the name that the profiler shows for the next call that this thread makes while a profiler is active.

        Args:
            key: The name, in place of the usual one such as `rpc_sync#add(worker0 -> worker1)`. If empty, the usual
                name is used. It is not checked.

        Raises:
            RuntimeError: A name was set before, and no profiled call has used it yet.
        """
        if _thread.key is not None:
            raise RuntimeError(f"the next call has a profiling key already, {_thread.key!r}: make that call first")
        _thread.key = key


def profiled_name(function: Callable[..., Any]) -> str:
    """Returns the name that the profiler shows for a function other than a builtin operator of torch.

    For a script function that is its qualified name, such as `__torch__.service.predict`. For others it is
    `__qualname__` or, without one, another readable name, such as that of its class. Raises nothing.
    """
    if isinstance(function, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(function))
    return getattr(function, "__qualname__", None) or callable_name(function)


def key_of(agent: Agent, departure: Departure) -> str:
    """Returns the name that the profiler shows for a call, such as `rpc_sync#add(worker0 -> worker1)`.

    `agent` is the agent of this worker, which is the caller. The other argument is the call: the callee, the function,
    and how it is called.
    """
    name = _find_builtin(departure.function) or profiled_name(departure.function)
    return _build_rpc_profiling_key(departure.mode, name, agent.info.name, departure.to.name)


# At the caller


class _Trip(Trip):
    """Does the profiler's work for one call that this worker makes.

    Create it in the thread that makes the call, while its profiler is active. That starts the call in the profiler. The
    arguments are the agent of this worker, and the call: the callee, the function, and how it is called.
    """

    def __init__(self, agent: Agent, departure: Departure) -> None:
        self._agent = agent
        self._to = departure.to
        key, _thread.key = _thread.key, None
        self._settings = _thread.settings
        self._number = uuid.uuid4().hex if departure.mode is RPCExecMode.REMOTE else None
        self._call = ProfiledCall(key or key_of(agent, departure))

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Context manager: hides the operators of torch that pickling and unpickling run from this thread's profiler.

        Without an active profiler it has no effect.
        """
        if not _profiler_enabled():
            yield
            return
        with _unrecorded():
            yield

    def pack(self, tensors: Tensors) -> tuple[Tensors, Any]:
        """Returns `tensors` unchanged, and the data for the profiler at the callee.

        The data are a pair. The first item is the number under which the callee keeps its report of a call by `remote`;
        None for any other call. The second is the settings of this thread's profiler, as a tuple.
        """
        return tensors, (self._number, tuple(self._settings))

    def unpack(self, tensors: Tensors, words: Any) -> Tensors:
        """Records that the call has ended, and returns `tensors` unchanged.

        Args:
            tensors: The tensors of the reply; may be empty.
            words: The `Report` that came from the callee: how long the function ran, and its events. None if none came.
        """
        self._call.ended(words)
        return tensors

    def failed(self, error: BaseException) -> None:
        """Records that the call has ended without a report. `error` is ignored."""
        self._call.ended(None)

    def referenced(self, rref: Any) -> None:
        """Starts to fetch the callee's report of a call by `remote`. Records the end of the call when the report comes.

        A report says how long the function ran, and what the profiler recorded there. If it cannot be fetched, the call
        is recorded as ended without one. Raises nothing.

        Args:
            rref: The reference that `remote` returns. Its profiling future, which `rref._get_profiling_future()`
                returns, is done when the end is recorded.
        """

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
    """Does the profiler's work for one call that this worker runs for another: makes a `Report` for the caller.

    Args:
        number: Under which number the report is kept until the caller fetches it, for a call by `remote`. None for
            other calls, whose report is sent with the reply.
        settings: What the profiler of the caller records. The profiler here records the same.
    """

    def __init__(self, number: str | None, settings: Settings) -> None:
        self._number = number
        self._settings = settings
        self._began = perf_counter()
        self._events: list[Any] = []
        self._report: Report | None = None

    @contextmanager
    def around(self) -> Iterator[None]:
        """Context manager: runs the function under a profiler with the caller's settings.

        If a profiler is active in this thread already, the function runs under that one, and the report has no events.
        """
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
        """Makes the report: how long the function ran, and its events.

        For a call by `remote`, keeps the report in `_kept` until the caller fetches it. If there are more than
        `_MOST_KEPT` reports, the oldest is dropped.
        """
        took = (perf_counter() - self._began) * 1e6
        self._report = Report(took, travelling(with_calls(self._events)))
        if self._number is not None:
            _kept[self._number] = self._report
            if len(_kept) > _MOST_KEPT:
                _kept.pop(next(iter(_kept)), None)

    def pack(self, tensors: Tensors) -> tuple[Tensors, Any]:
        """Returns `tensors` unchanged, and the report for the caller: how long the function ran, and its events.

        The report is None if `finished` was not called.
        """
        return tensors, self._report


_kept: Final[dict[str, Report]] = {}
"""Reports of calls by `remote`, by number, until the callers fetch them."""


def _report_of(rref: Any, number: str) -> Future[Report | None]:
    """Called remotely: waits until the function of a call by `remote` has run, and returns the report about the call.

    Args:
        rref: The reference to the result of the call. This worker must own it; otherwise the call fails.
        number: The number of the report. A report can be fetched once.

    Returns:
        A future of the report, which says how long the function ran and has its events; of None if there is no report
        with that number. The future fails if the function raised.
    """
    value: Future[Any] = rref._value_here()
    return value.then(lambda _: _kept.pop(number, None))


mark_async(_report_of, _report_of, lambda name, result: result)


class ProfilerRider:
    """The interceptor that sends the profiler's settings to the callee, and brings its events back.

    It takes part in a call if torch's legacy profiler is active in the calling thread. The constructor takes no
    arguments.
    """

    key = "profiler"

    def concerns(self, agent: Agent, to: WorkerInfo) -> bool:
        """Returns True if torch's legacy profiler is active in the current thread and shows its calls, else False.

        `agent` and `to` are ignored.
        """
        return _profiler_enabled() and is_profiled()  # not bool(): it is on the path of every call

    def board(self, agent: Agent, departure: Departure) -> Trip:
        """Returns the object that does the profiler's work for one call that the current thread makes.

        In the profiler, the call begins now.

        `agent` is the agent of this worker. The other argument is the call: the callee, the function, and how it is
        called. Call this only if `concerns` returned True.
        """
        return _Trip(agent, departure)

    def visit(self, agent: Agent, caller: WorkerInfo, words: Any) -> Visit:
        """Returns the object that does the profiler's work for one call that has come from another worker.

        Args:
            agent: The agent of this worker; ignored.
            caller: The worker that calls; ignored.
            words: The data that the caller sent: a pair of the number under which the report is kept, or None,
                and the settings of the caller's profiler. Anything but a pair with a valid tuple of settings raises
                `TypeError` or `ValueError`.
        """
        number, settings = words
        return _Visit(number, Settings(*settings))


def _note_settings(start_trace: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns a replacement of torch's `profile._start_trace` that also stores the profiler's settings for this thread.

    Torch has no way to ask an active profiler for its settings.

    Args:
        start_trace: The method to replace. The replacement calls it first.
    """

    def _start_trace(self: Any) -> None:
        start_trace(self)
        chosen: Mapping[str, Any] = vars(self)
        _thread.settings = Settings(*(bool(chosen.get(name)) for name in Settings._fields))

    return _start_trace


RIDERS.append(ProfilerRider())
profiler_legacy.profile._start_trace = _note_settings(profiler_legacy.profile._start_trace)
listen()
