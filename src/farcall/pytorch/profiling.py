"""Calls in torch's profilers: what is measured, where, and how it comes to who profiles.

A call that is made under `torch.autograd.profiler_legacy.profile` shows there as `rpc_sync#name(caller -> callee)`. The
function runs under a profiler of its own at the callee, and its events come back with the reply (`profiled_events`).
Calls that it makes itself show there in the same way, so those of any depth come back. `torch.profiler` shows no calls;
with torch's own RPC it does not either.

Rules
- Who does not profile pays one question to torch in each call.
- A function runs under the settings of its caller's profiler: shapes, memory, stacks.
- The result of a remote call stays where it is; its events are asked for by a call of their own, which no one sees.
- What an async function does before it returns its future is seen, and the calls that it began, however late they end.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch
from torch.autograd import ProfilerConfig, ProfilerState, profiler_legacy
from torch.jit._builtins import _find_builtin

from farcall.agent import Agent
from farcall.functions import mark_async
from farcall.futures import Future
from farcall.protocol.ids import WorkerInfo
from farcall.pytorch.envelopes import RIDERS, Departure, Tensors, Trip, Visit
from farcall.pytorch.futures import RpcFuture
from farcall.pytorch.internal import RPCExecMode, _build_rpc_profiling_key
from farcall.pytorch.profiled_events import ProfiledCall, Report, listen, parse_records, travelling, with_calls
from farcall.serialization import callable_name

# torch's own, whatever is put in the place of its module later: it needs no agent.
_set_profiler_node_id: Any = torch._C._distributed_rpc._set_profiler_node_id

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


def is_profiled() -> bool:
    """Whether a profiler that shows calls is on in this thread."""
    return bool(_profiler_enabled()) and not _thread.silent and _profiler_type() == _LEGACY


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


def key_of(agent: Agent, departure: Departure) -> str:
    """The name of a call in the profiler."""
    function = departure.function
    name = _find_builtin(function)
    if name is None:
        if isinstance(function, torch.jit.ScriptFunction):
            name = torch._jit_internal._qualified_name(function)
        else:
            name = getattr(function, "__qualname__", None) or callable_name(function)
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
