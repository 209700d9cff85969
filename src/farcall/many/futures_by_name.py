"""`Futures`: futures by worker name, which are waited for together.

`result()` and `first(count)` are the same wait: for the first so many results. The wait is over when they are there, or
when so many futures have failed that they cannot be reached. Then what is still under way is cancelled.

The wait is a callback of every future, so it needs no thread. It decides under its lock and acts outside of it.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from functools import partial
from time import monotonic
from typing import Any, Generic, TypeVar

from farcall.errors import GroupCallError, UsageError
from farcall.futures import DerivedFuture, Future
from farcall.gate import FOREVER

T = TypeVar("T")

_MAX_NAMED = 3
"""How many failures the message of a `GroupCallError` describes; the others are in the exception."""


class Futures(Mapping[str, Future[T]]):
    """Futures by worker name, which are waited for together. `Workers.submit` returns them.

    Futures of your own work as well: `Futures({"a": one, "b": another})`.

    Args:
        futures: The futures, by names of any kind. The mapping is copied.

    Raises:
        UsageError: `futures` is not a mapping of farcall futures.

    Example:
        >>> futures = farcall.workers("shard*").submit(count_rows)
        >>> futures.first(2).result()
        {'shard0': 12, 'shard2': 9}
    """

    __slots__ = ("__weakref__", "_futures")

    def __init__(self, futures: Mapping[str, Future[T]]) -> None:
        if not isinstance(futures, Mapping):
            raise UsageError(f"Futures takes a mapping of farcall futures by name, not {futures!r}")
        self._futures = dict(futures)
        for future in self._futures.values():
            if not isinstance(future, Future):
                raise UsageError(f"Futures takes farcall futures, as submit returns them, not {future!r}")

    def __getitem__(self, name: str, /) -> Future[T]:
        return self._futures[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._futures)

    def __len__(self) -> int:
        return len(self._futures)

    def result(self, timeout: float | None = None) -> dict[str, T]:
        """Waits until all futures are complete, and returns their results by name.

        Args:
            timeout: How many seconds to wait; None means no limit. 0 does not wait. It is not checked.

        Returns:
            The results; an empty dict if there are no futures.

        Raises:
            GroupCallError: A future has failed. It is raised as soon as one fails; the others are cancelled.
            TimeoutError: Not all futures are complete after `timeout` seconds. The calls go on.
        """
        wait = _FirstResults(self._futures, len(self._futures))
        try:
            if not wait.future.block(FOREVER if timeout is None else monotonic() + timeout):
                late = ", ".join(repr(name) for name, future in self._futures.items() if not future.done())
                raise TimeoutError(f"{late} did not answer within {timeout:g} s; the calls go on")
            return wait.future.value()
        finally:
            wait.stop()  # a later failure must cancel nothing, because nobody waits any more
            del self, wait  # the traceback of an error holds this frame

    def first(self, count: int) -> Future[dict[str, T]]:
        """Returns a future of the first `count` results by name: a quorum. The rest is cancelled when they are there.

        The returned future fails with a `GroupCallError` as soon as so many have failed that `count` results are not
        possible any more. Cancelling the returned future cancels all futures.

        Args:
            count: The number of results, from 1 to the number of futures.

        Raises:
            UsageError: `count` is not such a number.
        """
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(self._futures):
            raise UsageError(f"first() takes a number from 1 to {len(self._futures)}, as many as there are: {count!r}")
        return _FirstResults(self._futures, count).future

    def done(self) -> bool:
        """Returns whether all futures are complete; True if there are none."""
        return all(future.done() for future in self._futures.values())

    def cancel(self) -> bool:
        """Cancels all futures that are not complete. Returns False if there were none: nothing was cancelled."""
        return cancel_all(self._futures.values())

    def __await__(self) -> Generator[Any, None, dict[str, T]]:
        """Waits until all futures are complete, without blocking the event loop. `await` gives the results by name.

        It raises `GroupCallError` as soon as one future fails; the others are cancelled. A task that is cancelled while
        it waits cancels all calls.
        """
        return _FirstResults(self._futures, len(self._futures)).future.__await__()

    def __repr__(self) -> str:
        done = sum(future.done() for future in self._futures.values())
        return f"<Futures of {', '.join(map(repr, self._futures))}, {done} of {len(self._futures)} done>"


class _FirstResults(Generic[T]):
    """The wait for the first `count` results of some futures. It begins at once, and ends by itself.

    Its `future` completes when they are there, and fails when so many have failed that they are not possible any more.
    In both cases the futures that are still under way are cancelled.

    Args:
        futures: The futures by name.
        count: How many results to wait for, not more than there are futures. 0 is reached at once.
    """

    def __init__(self, futures: Mapping[str, Future[T]], count: int) -> None:
        self.future: Future[dict[str, T]] = DerivedFuture(list(futures.values()))
        """Completes with the results by name, in the order of `futures`, or fails with a `GroupCallError`."""
        self._futures = futures
        self._count = count
        self._results: dict[str, T] = {}
        self._failures: dict[str, BaseException] = {}
        self._is_over = False
        self._lock = threading.Lock()
        if not count:
            self.future.set_result({})
        for name, future in futures.items():
            # Not add_done_callback: in an event loop that would run in the loop, which `result` may block.
            future.watch(partial(self._note, name), waker=False)

    def stop(self) -> None:
        """Ends the wait: `future` does not change, and nothing is cancelled any more. Does nothing if it is over."""
        with self._lock:
            self._is_over = True

    def _note(self, name: str, future: Future[T]) -> None:
        """Called with each future, and its name, when it is complete, in any thread. Raises nothing.

        Ends the wait if enough results are there, or too many futures have failed.
        """
        error = future.failed_with()  # unpickles the reply, so not under the lock
        with self._lock:
            if self._is_over:
                return
            if error is None:
                self._results[name] = future.value()
            else:
                self._failures[name] = error
            is_reached = len(self._results) == self._count
            if not is_reached and len(self._futures) - len(self._failures) >= self._count:
                return
            self._is_over = True
        if is_reached:
            cancel_all(self._futures.values())
            self.future.set_result({name: self._results[name] for name in self._futures if name in self._results})
        else:
            self._fail()

    def _fail(self) -> None:
        """Ends the wait with a `GroupCallError` of all failures that are there now, and cancels the rest.

        If one of the failures is no `Exception`, such as `SystemExit`, `future` fails with that one instead.
        """
        for name, future in self._futures.items():
            if future.done() and name not in self._failures and name not in self._results:
                error = future.failed_with()
                if error is None:
                    self._results[name] = future.value()
                else:
                    self._failures[name] = error
        cancel_all(self._futures.values())
        for error in self._failures.values():
            if not isinstance(error, Exception):  # SystemExit and the like are no members of an ExceptionGroup
                self.future.set_exception(error)
                return
        failures = {name: self._failures[name] for name in self._futures if name in self._failures}
        self.future.set_exception(group_call_error(failures, self._results, len(self._futures)))


def group_call_error(errors: Mapping[str, Any], results: Mapping[str, Any], size: int) -> GroupCallError:
    """Returns the error of a call on `size` workers that failed on some of them.

    `errors` and `results` are by worker name, and become those of the exception. The message describes the first three
    errors.
    """
    described = [f"{name!r} with {type(error).__name__}: {error}" for name, error in errors.items()]
    more = f"; and {len(described) - _MAX_NAMED} more" if len(described) > _MAX_NAMED else ""
    return GroupCallError(
        f"{len(errors)} of {size} workers failed: {'; '.join(described[:_MAX_NAMED])}{more}", errors, results
    )


def cancel_all(futures: Iterable[Future[Any]]) -> bool:
    """Cancels the futures that are not complete. Returns whether there was one; False for no futures."""
    is_any_cancelled = False
    for future in futures:
        is_any_cancelled |= future.cancel()
    return is_any_cancelled
