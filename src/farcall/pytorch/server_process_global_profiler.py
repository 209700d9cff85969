"""`_server_process_global_profile`: profiles the functions that this worker runs for others, in all threads.

While a profile is entered, each function that another worker calls here runs under torch's legacy profiler. Profiles
can be nested: each gets the records of all functions that ran while it was entered, and the innermost decides what is
recorded.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import EventList

from farcall.api import current_agent, is_initialized
from farcall.runtime.interceptors import ServerCall, ServerInterceptor


class _Recording:
    """One profile that was entered and not left yet. It collects records of functions that other workers call here.

    Args:
        config: A `torch.autograd.ProfilerConfig`: what is recorded. It is not checked.

    Attributes:
        records: What torch's profiler recorded, one entry for each function that has run; empty at first.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.records: list[Any] = []


_recordings: Final[list[_Recording]] = []
_lock: Final = threading.Lock()


@contextmanager
def _profile_function() -> Iterator[None]:
    """Context manager around one function: profiles it, and adds its records to all entered profiles.

    The profile that was entered last decides what is recorded. Does nothing if no profile is entered, or if this thread
    has an active profiler already.
    """
    ranges = list(_recordings)
    if not ranges or torch.autograd._profiler_enabled():  # this thread already has a profiler of another kind
        yield
        return
    torch.autograd._enable_profiler_legacy(ranges[-1].config)
    try:
        yield
    finally:
        if torch.autograd._profiler_enabled():
            records = torch.autograd._disable_profiler_legacy()
            for each in ranges:
                each.records.append(records)


class _ProfileInterceptor(ServerInterceptor):
    """An interceptor that profiles each function that this worker runs for others, while a profile is entered."""

    def intercept(self, call: ServerCall, proceed: Callable[[ServerCall], Any]) -> Any:
        """Runs the call, and profiles its function if a profile is entered. Returns and raises what the call does.

        Args:
            call: The call that has come from another worker.
            proceed: Runs the call that it is given.
        """
        with _profile_function():
            return proceed(call)


_interceptor: Final = _ProfileInterceptor()


def _enable_server_process_global_profiler(config: Any) -> None:
    """Enters a profile: from now on the functions that other workers call here are profiled, in all threads.

    Profiles can be nested; all of them get the records.

    Args:
        config: A `torch.autograd.ProfilerConfig`: what is recorded. It is not checked.

    Raises:
        RuntimeError: This process is not a worker.
    """
    agent: Any = current_agent()
    with _lock:
        _recordings.append(_Recording(config))
        if len(_recordings) == 1:
            agent.add_interceptor(_interceptor)


def _disable_server_process_global_profiler() -> list[Any]:
    """Leaves the profile that was entered last, and returns its records.

    Returns:
        One entry for each function that has run since the profile was entered, as torch's `_disable_profiler_legacy`
        returned it; an empty list if none has run.

    Raises:
        RuntimeError: No profile is entered.
    """
    with _lock:
        if not _recordings:
            raise RuntimeError(
                "the functions that this worker runs for others are not being profiled: nothing was entered"
            )
        ended = _recordings.pop()
        if not _recordings and is_initialized():
            agent: Any = current_agent()
            agent.remove_interceptor(_interceptor)
    return ended.records


class _server_process_global_profile(profiler_legacy.profile):  # type: ignore[misc]  # noqa: N801 (torch's name)
    """A profile of all functions that other workers call here, in all threads, while it is entered.

    The arguments are those of `torch.autograd.profiler_legacy.profile`, for example `record_shapes=True`; with
    `enabled=False` it does nothing. Another worker can enter it by a call: see the second example.

    Attributes:
        entered: True once the profile was entered. It can be entered only once.
        process_global_function_events: For each function that ran while the profile was entered, the list of its
            events. Set when the profile is left.

    Example:
        with rpc._server_process_global_profile() as profile:
            serve_other_workers()
        print(profile.key_averages())

        rref = rpc.remote("worker1", rpc._server_process_global_profile)
        rref.rpc_sync().__enter__()
    """

    entered: bool
    process_global_function_events: list[list[Any]]
    """Set when the profile is left: for each function that ran meanwhile, the list of its events."""

    def __enter__(self) -> Any:
        """Starts to profile, and returns this object.

        Does nothing and returns None if this object was created with `enabled=False`. Raises `RuntimeError` if it was
        entered before, or if this process is not a worker.
        """
        if not self.enabled:
            return None
        if self.entered:
            raise RuntimeError("autograd profiler traces are not reentrant")
        _enable_server_process_global_profiler(self.config())
        self.entered = True
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> bool | None:
        """Leaves the profile that was entered last, and sets `function_events` and `process_global_function_events`.

        The first are all events, the second a list of events for each function that ran meanwhile; both may be empty.
        Does nothing if this object was created with `enabled=False`. Returns False or None, so an error of the block is
        raised again. Raises `RuntimeError` if no profile is entered.
        """
        if not self.enabled:
            return None
        self.process_global_function_events = [
            profiler_legacy._parse_legacy_records(records) for records in _disable_server_process_global_profiler()
        ]
        self.function_events = EventList(
            list(itertools.chain.from_iterable(self.process_global_function_events)),
            use_device="cuda" if self.use_cuda else None,
            profile_memory=self.profile_memory,
        )
        self.function_events._build_tree()
        return False
