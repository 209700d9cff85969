"""`_server_process_global_profile`: profiles what this worker runs for others, in all of its threads.

While one is entered, each function that is called from elsewhere runs under torch's legacy profiler. Of those that are
entered one inside the other, each has what was run while it was entered; the innermost says what is recorded.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import EventList

from farcall.api import current_agent, is_initialized

_PROFILE: Final = "profile of everything"


class _Range:
    """From one being entered to its being left."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.records: list[Any] = []


_ranges: Final[list[_Range]] = []
_lock: Final = threading.Lock()


@contextmanager
def _profiled() -> Iterator[None]:
    """Around one function."""
    ranges = list(_ranges)
    if not ranges or torch.autograd._profiler_enabled():  # it was switched on in this thread by somebody else
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


def _enable_server_process_global_profiler(config: Any) -> None:
    """Has all that is run for others profiled, from the next function on. Raises if this process is no worker."""
    agent: Any = current_agent()
    with _lock:
        _ranges.append(_Range(config))
        agent.surround(_PROFILE, _profiled)


def _disable_server_process_global_profiler() -> list[Any]:
    """The end of the innermost: the records of each function since. Raises `RuntimeError` if there is none."""
    with _lock:
        if not _ranges:
            raise RuntimeError("what this worker runs for others is not being profiled: nothing was entered")
        ended = _ranges.pop()
        if not _ranges and is_initialized():
            agent: Any = current_agent()
            agent.surround(_PROFILE, None)
    return ended.records


class _server_process_global_profile(profiler_legacy.profile):  # type: ignore[misc]  # noqa: N801 (torch's name)
    """As `torch.autograd.profiler_legacy.profile`, but of all that this worker runs for others while it is entered.

    It can be entered by a call: `rref = rpc.remote(worker, rpc._server_process_global_profile)`, then
    `rref.rpc_sync().__enter__()`.
    """

    entered: bool
    process_global_function_events: list[list[Any]]
    """Once it is left: for each function that was run, its events."""

    def __enter__(self) -> Any:
        """Begins. Raises `RuntimeError` the second time, and if this process is no worker."""
        if not self.enabled:
            return None
        if self.entered:
            raise RuntimeError("autograd profiler traces are not reentrant")
        _enable_server_process_global_profiler(self.config())
        self.entered = True
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> bool | None:
        """Ends, and makes `function_events` and `process_global_function_events`."""
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
