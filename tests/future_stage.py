"""Futures in every state, and sources that settle them, for the tests of futures."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

from farcall.futures import DONE, Future, UnseenFailureWarning, run_callbacks


def failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def failed_seen(error: BaseException) -> Future[Any]:
    future = failed(error)
    future.exception()
    return future


def done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def has_sleeper(future: Future[Any]) -> bool:
    return any(waker for waker, _ in future._watchers)


class Drivable:
    """A source that settles what it is told to when it is driven."""

    def __init__(self) -> None:
        self.attended = 0
        self.driven: list[tuple[Future[Any], float]] = []
        self.settles: dict[Future[Any], Any] = {}

    def future(self, result: Any = None, *, settled: bool = True) -> Future[Any]:
        future: Future[Any] = Future()
        future._source = self
        if settled:
            self.settles[future] = result
        return future

    def drive(self, future: Future[Any], deadline: float) -> None:
        self.driven.append((future, deadline))
        if future in self.settles:
            run_callbacks(future, future.settle(DONE, self.settles.pop(future)))

    def drive_in_background(self) -> None:
        self.attended += 1


class LateReply:
    """A reply that is loaded by whoever wants it."""

    def __init__(self, outcome: tuple[int, Any], lock: Any = None) -> None:
        self.lock = lock if lock is not None else threading.Lock()
        self.loaded = 0
        self._outcome = outcome

    def load(self) -> tuple[int, Any]:
        self.loaded += 1
        return self._outcome


def warned(make: Callable[[], object]) -> list[str]:
    """The warnings of what was made and dropped."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
        gc.collect()
    assert all(warning.category is UnseenFailureWarning for warning in caught)
    return [str(warning.message) for warning in caught]
