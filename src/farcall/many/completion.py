"""`wait` and `as_completed`: which of several futures are complete, and which is next.

Both are those of `concurrent.futures`, for farcall's futures. `as_completed` is for `async for`, too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from time import monotonic
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from farcall.errors import UsageError
from farcall.futures import Future
from farcall.gate import FOREVER, Gate
from farcall.streams import Stream

T = TypeVar("T")

FIRST_COMPLETED: Final = "FIRST_COMPLETED"
"""`wait` returns when one of the futures is complete."""
FIRST_EXCEPTION: Final = "FIRST_EXCEPTION"
"""`wait` returns when one of the futures has failed, or all are complete."""
ALL_COMPLETED: Final = "ALL_COMPLETED"
"""`wait` returns when all futures are complete."""


class DoneAndNotDone(NamedTuple, Generic[T]):
    """What `wait` returns: its futures in two sets.

    Attributes:
        done: The futures that are complete: they have a result or an error, or were cancelled.
        not_done: The others.
    """

    done: set[Future[T]]
    not_done: set[Future[T]]


def wait(
    futures: Iterable[Future[T]],
    timeout: float | None = None,
    return_when: Literal["FIRST_COMPLETED", "FIRST_EXCEPTION", "ALL_COMPLETED"] = ALL_COMPLETED,
) -> DoneAndNotDone[T]:
    """Waits for several futures, and returns which of them are complete. Blocks: in an event loop use `as_completed`.

    Args:
        futures: The futures. If there are none, returns at once.
        timeout: How many seconds to wait at most; None for no limit. 0 does not wait.
        return_when: `FIRST_COMPLETED` to wait for one future, `ALL_COMPLETED` for all, `FIRST_EXCEPTION` for one that
            has failed, or else for all. A future that was cancelled is complete, and does not count as one that has
            failed.

    Returns:
        The sets `done` and `not_done`; after the timeout, as things are then. What the futures failed with is not
        raised.

    Raises:
        UsageError: One of `futures` is not a farcall future, or `timeout` or `return_when` is not valid.
    """
    if return_when not in (FIRST_COMPLETED, FIRST_EXCEPTION, ALL_COMPLETED):
        raise UsageError(
            f"`return_when` must be FIRST_COMPLETED, FIRST_EXCEPTION or ALL_COMPLETED, not {return_when!r}"
        )
    all_futures = _checked_futures("wait", futures)
    deadline = _deadline(timeout)
    gate = Gate()
    for future in all_futures:
        if not future.done():
            future.watch(gate.open, waker=True)
    try:
        while True:
            done = {future for future in all_futures if future.done()}
            if len(done) == len(all_futures) or (done and return_when == FIRST_COMPLETED):
                break
            if return_when == FIRST_EXCEPTION and any(_has_failed(future) for future in done):
                break
            if not gate.sleep(deadline):
                done = {future for future in all_futures if future.done()}
                break
    finally:
        for future in all_futures:
            future.forget(gate.open)
    return DoneAndNotDone(done, set(all_futures) - done)


def as_completed(futures: Iterable[Future[T]], timeout: float | None = None) -> Stream[Future[T]]:
    """Returns a stream of the futures in the order in which they are completed, for `for` and `async for`.

    Futures that are complete already come first. A future that is given twice comes once. What a future failed with is
    not raised here. Closing the stream cancels nothing.

    Args:
        futures: The futures. If there are none, the stream is empty.
        timeout: How many seconds from now all of them may take; None for no limit. After that, asking for a future that
            is not complete raises `TimeoutError`. The calls go on.

    Raises:
        UsageError: One of `futures` is not a farcall future, or `timeout` is not valid.
    """
    return _CompletedFutures(_checked_futures("as_completed", futures), timeout)


class _CompletedFutures(Stream[Future[T]]):
    """A stream of futures in the order in which they are completed. `as_completed` returns it.

    Args:
        futures: The futures, each once.
        timeout: How many seconds from now all of them may take; None for no limit. After that, asking for a future that
            is not complete raises `TimeoutError`.

    Raises:
        UsageError: `timeout` is neither None nor a number of at least 0.
    """

    def __init__(self, futures: list[Future[T]], timeout: float | None) -> None:
        self._deadline = _deadline(timeout)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._pending = dict.fromkeys(futures)
        self._ready: deque[Future[T]] = deque()
        self._signal: Future[None] | None = None
        for future in futures:
            future.watch(self._note, waker=True)

    def _note(self, future: Future[T]) -> None:
        """Called in any thread when a future is complete: it is the next of the stream. A second call does nothing."""
        with self._lock:
            if future not in self._pending:
                return
            del self._pending[future]
            self._ready.append(future)
            signal, self._signal = self._signal, None
        if signal is not None:
            signal.set_result(None)

    def _next(self) -> Future[T] | None:
        """Returns the next complete future; None if there is none now.

        After None, `_signal` is a future that completes when there is one; it is None if no future is left.
        """
        with self._lock:
            if self._ready:
                return self._ready.popleft()
            self._signal = Future() if self._pending else None
            return None

    def __next__(self) -> Future[T]:
        while (future := self._next()) is None:
            signal = self._signal
            if signal is None:
                if self._ready:  # it came in between
                    continue
                raise StopIteration
            if not signal.block(self._deadline):
                raise self._timeout_error()
        return future

    async def __anext__(self) -> Future[T]:
        import asyncio  # not at the head: `import farcall` does without

        while (future := self._next()) is None:
            signal = self._signal
            if signal is None:
                if self._ready:
                    continue
                raise StopAsyncIteration
            try:
                left = None if self._deadline == FOREVER else max(0.0, self._deadline - monotonic())
                async with asyncio.timeout(left):
                    await signal
            except TimeoutError:
                raise self._timeout_error() from None
            except asyncio.CancelledError:
                self.close()
                raise
        return future

    def _timeout_error(self) -> TimeoutError:
        """Returns the error to raise after the timeout. Its message has the number of futures that are not complete."""
        return TimeoutError(f"{len(self._pending)} futures were not done within {self._timeout:g} s; the calls go on")

    def close(self) -> None:
        """Ends the stream. The futures go on. May be called twice."""
        with self._lock:
            pending, self._pending = list(self._pending), {}
            self._ready.clear()
            signal, self._signal = self._signal, None
        for future in pending:
            future.forget(self._note)
        if signal is not None and not signal.done():
            signal.set_result(None)


def _checked_futures(name: str, futures: Iterable[Future[T]]) -> list[Future[T]]:
    """Returns the futures as a list, each once. `name` is the function that was called, for messages.

    Raises `UsageError` if `futures` is a mapping or cannot be iterated, or if one is not a farcall future.
    """
    if isinstance(futures, Mapping):
        raise UsageError(f"{name}() takes futures: give the values() of a mapping such as farcall.Futures")
    try:
        all_futures: list[Any] = list(futures)
    except TypeError:
        raise UsageError(f"{name}() takes an iterable of farcall futures, not {futures!r}") from None
    for future in all_futures:
        if not isinstance(future, Future):
            raise UsageError(f"{name}() takes farcall futures, as submit returns them, not {future!r}")
    return list(dict.fromkeys(all_futures))


def _deadline(timeout: float | None) -> float:
    """Returns the moment at which a wait of `timeout` seconds that begins now ends, as a time of the monotonic clock.

    Returns `FOREVER` for None. Raises `UsageError` if `timeout` is neither None nor a number of at least 0.
    """
    if timeout is None:
        return FOREVER
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise UsageError(f"the timeout must be 0 or more seconds, or None for no limit, not {timeout!r}")
    return monotonic() + timeout


def _has_failed(future: Future[Any]) -> bool:
    """Returns whether a future has failed with an error and was not cancelled. The future must be complete."""
    return not future.cancelled() and future.failed_with() is not None
