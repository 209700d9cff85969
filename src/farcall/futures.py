"""Futures: results that will be there later.

A future is settled once: by `set_result`, by `set_exception`, or by the reply of a call. A thread that waits for the
future of a call does not sleep until another thread has read the reply. It drives the future's *source* (the
connection), which reads. A future that was made by hand has no source, and waiting for it is plain sleeping.

Rules
- Settling needs no lock: the state is written last, and watchers are kept in a list from which the settling thread and
  a late watcher both `pop`. So each watcher runs exactly once, whichever comes first.
- A *waker* is a watcher that only wakes a thread. It runs at once, wherever the future is settled, and may run twice if
  Ctrl-C comes in between. A *callback* is user code. The settling thread gets the callbacks and chooses where to run
  them, so that none runs under a lock or in the middle of reading. A callback runs once, whatever the callbacks before
  it raise.
- Chains of `then` of any length are walked up and down in loops, so they need no stack.
- A callback runs in the scope (`deadlines`) in which it was added: calls that it makes inherit the same deadline.
- A future is cancelled at once, and threads that wait for it get `CallCancelledError`. Code that waits and is itself
  cancelled gets `asyncio.CancelledError` instead.
- The reply of a call is unpickled by the thread that wants the value, not by the thread that read it (`Unloaded`).
- A done callback that is added where an event loop runs is called in that loop, as asyncio's own waits expect.
- A failure that nobody looked at before the future was dropped is reported once, as an `UnseenFailureWarning`. It
  points at the line that made the call (`made_by`), or, if that is not known, at the line that dropped the future.

`collect_all`, `wait_all` and blocks of `_wait_all` are for many futures at once. A thread that waits for all of them
drives each in turn, so that no thread has to be woken.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import get_ident
from time import monotonic
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar, cast

from farcall.deadlines import Scope, find_scope, raise_if_cancelled, run_in_scope
from farcall.errors import CallCancelledError
from farcall.gate import FOREVER, Gate, running_loop

if TYPE_CHECKING:
    import asyncio
    import concurrent.futures

T = TypeVar("T")
S = TypeVar("S")

logger = logging.getLogger("farcall")

PENDING: Final = 0
"""The state of a future that has neither a result nor an exception yet."""
DONE: Final = 1
"""The state of a future that has a result."""
FAILED: Final = 2
"""The state of a future that has an exception."""
UNLOADED: Final = 3
"""The state of a future whose reply has arrived and is not unpickled yet: it has a result or an exception."""


Watcher: TypeAlias = Callable[[Any], Any]
"""A function that is called with the future when it is complete. A *waker* only wakes a thread, and returns callbacks
to run next, or None. A *callback* is code of users, and returns a `Followed`, or None.
"""
Callbacks: TypeAlias = list[Watcher]
"""Callbacks of a complete future that have not run yet; `run_callbacks` runs them."""

Place: TypeAlias = tuple[CodeType, int, dict[str, Any]]
"""A place in a program: the code, the offset of the instruction, and the globals. A frame would keep its locals."""

_OWN_CODE: Final = __file__.rpartition("/")[0] + "/"

_settling = threading.RLock()  # guards no user code: only the check and the two writes of settling by hand


class UnseenFailureWarning(RuntimeWarning):
    """A call failed, and its future was dropped before the program looked at the result."""


class Followed(NamedTuple):
    """What `run_callbacks` has to do after a callback, because the callback has completed another future.

    `callbacks` are the callbacks of `future` that have to run next; None if there are none. `interrupt` is a
    `KeyboardInterrupt` or `SystemExit` that the callback raised and that the program must get; else None.
    """

    future: Future[Any]
    callbacks: Callbacks | None
    interrupt: BaseException | None = None


class Source(Protocol):
    """The object that completes a future, such as a connection. A waiting thread can drive it instead of sleeping."""

    def drive(self, future: Future[Any], deadline: float) -> None:
        """Blocks until the future is complete, or until `deadline`, in seconds of `time.monotonic`.

        Raises nothing when the deadline passes; the future is then not complete.
        """

    def drive_in_background(self) -> None:
        """Arranges that the futures of this source are completed soon although no thread waits for them.

        Does not block.
        """


class Unloaded(Protocol):
    """A reply that is not unpickled yet.

    `load` unpickles it, and returns `DONE` and the result, or `FAILED` and the exception; it never raises. `lock` is
    held during that.
    """

    lock: AbstractContextManager[Any]

    def load(self) -> tuple[int, Any]: ...


class Future(Generic[T]):
    """The result of a call that may not be there yet. `rpc_async` returns one.

    A function marked by `async_execution` creates one itself, and completes it with `set_result` or `set_exception`. A
    future can be awaited with `await`, but cannot be sent to another worker.

    Args:
        devices: Ignored. Programs written for torch pass it.

    Example:
        >>> future = farcall.rpc_async("worker1", max, args=(3, 4))
        >>> future.wait()
        4
    """

    # `_place` is not set by the constructor: most futures go without.
    __slots__ = ("__weakref__", "_place", "_reply", "_report", "_source", "_state", "_value", "_watchers")

    def __init__(self, *, devices: object = None) -> None:
        # `devices` is accepted for programs written for torch, where it names GPUs.
        self._state = PENDING
        self._value: Any = None
        self._watchers: list[tuple[bool, Watcher]] = []
        self._source: Source | Future[Any] | None = None
        self._report: _FailureReport | None = None
        self._reply: Unloaded | None = None  # there until it is loaded

    # Waiting

    def wait(self) -> T:
        """Waits until the future is complete, and returns the result. There is no limit but the timeout of the call.

        Raises:
            Exception: The exception of the call: that of the function, `RpcTimeoutError`, `WorkerLostError` or another
                `RpcError`.
        """
        if not self._state:
            self.block(FOREVER)
        try:
            return self.value()
        finally:
            del self  # see `value`

    def result(self, timeout: float | None = None) -> T:
        """Waits until the future is complete, and returns the result.

        Args:
            timeout: How many seconds to wait; None means no limit. 0 does not wait.

        Raises:
            TimeoutError: The future is not complete after `timeout` seconds. The call itself continues.
            Exception: The exception of the call.
        """
        self._block_for(timeout)
        try:
            return self.value()
        finally:
            del self  # see `value`

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits until the future is complete, and returns the exception of the call; None if the call succeeded.

        Args:
            timeout: How many seconds to wait; None means no limit. 0 does not wait.

        Raises:
            TimeoutError: The future is not complete after `timeout` seconds. The call itself continues.
            CallCancelledError: The future was cancelled.
        """
        self._block_for(timeout)
        if self._load() != FAILED:
            return None
        if type(self._value) is CallCancelledError:
            raise_if_cancelled(self._value)
            raise self._value
        return cast(BaseException, self._value)

    def value(self) -> T:
        """Returns the result of a future that is complete. Does not wait.

        Raises:
            RuntimeError: The future is not complete.
            Exception: The exception of the call.
        """
        if self._state == DONE:
            return self._value  # type: ignore[no-any-return]  # not cast(): a call, on the path of every result
        if not self._state:
            raise RuntimeError("the future is not done: call wait(), or ask done() first")
        if self._load() == FAILED:
            raise_if_cancelled(self._value)
            try:
                raise self._value  # what the function raised, or why the call failed
            finally:
                # The error's traceback holds this frame and those that called it. Would they hold the future, which
                # holds the error, then all that was met on the way, references too, stayed until garbage collection.
                del self
        return self._value  # type: ignore[no-any-return]

    def done(self) -> bool:
        """Returns whether the future has a result or an exception."""
        return self._state != PENDING

    def failed_with(self) -> BaseException | None:
        """Returns the exception of a complete future; None if it has a result or is not complete. Never raises."""
        return cast(BaseException, self._value) if self._load() == FAILED else None

    def _block_for(self, timeout: float | None) -> None:
        """Waits until the future is complete. Raises `TimeoutError` after `timeout` seconds; None means no limit."""
        if not self._state and not self.block(FOREVER if timeout is None else monotonic() + timeout):
            raise TimeoutError(f"{self!r} was not done within {timeout} s")

    def block(self, deadline: float) -> bool:
        """Waits until the future is complete or the deadline passes. Returns whether the future is complete.

        Does not raise the exception of the call.

        Args:
            deadline: When to stop, in seconds of `time.monotonic`; `FOREVER` means no limit. If it has passed, the
                method does not wait.
        """
        if not isinstance(self._source, Future):  # as nearly always
            return self._state != PENDING or self._block_alone(deadline)
        chain = [self]
        while isinstance(source := chain[-1]._source, Future) and not source._state:
            chain.append(source)  # the one by whose callback it is settled
        return all(future._state or future._block_alone(deadline) for future in reversed(chain))

    def _block_alone(self, deadline: float) -> bool:
        """Waits for this future until `deadline`, but not for futures that this one is derived from by `then`.

        Returns whether it is complete.
        """
        source = self._source
        if source is not None and not isinstance(source, Future):
            source.drive(self, deadline)
        if not self._state:
            gate = Gate()
            self.watch(gate.open, waker=True, attended=True)
            if not self._state:
                self._sleep(gate, deadline)
                self.forget(gate.open)
        return self._state != PENDING

    def _sleep(self, gate: Gate, deadline: float) -> None:
        """Sleeps until the gate is opened. Raises if the scope of the code that waits is over, as `Scope.limit`."""
        scope = find_scope()
        if scope is None:
            gate.sleep(deadline)
            return
        deadline = scope.limit_wait(deadline)
        waker = scope.add_waker(gate.open)
        try:
            gate.sleep(deadline)
        finally:
            scope.discard(waker)
        if not self._state:
            scope.check()

    def drive_in_background(self) -> None:
        """Does nothing: as the source of a future of `then`, this future is watched already."""

    def hasten(self) -> None:
        """Arranges that the future is completed soon although no thread waits in `wait` or `block`. Does not block.

        For waits of other libraries, which do not read replies themselves. Does nothing if the future is complete.
        """
        if not self._state and self._source is not None:
            self._source.drive_in_background()

    def __await__(self) -> Generator[Any, None, T]:
        """Waits without blocking the event loop, and returns the result. Raises the exception of the call."""
        if not self._state:
            import asyncio  # not at the head: importing it would be half the time of `import farcall`

            loop = asyncio.get_running_loop()
            waiter = loop.create_future()

            def go_on() -> None:
                if not waiter.done():  # cancelled meanwhile
                    waiter.set_result(None)

            def wake(_: object = None) -> None:
                try:
                    loop.call_soon_threadsafe(go_on)
                except RuntimeError:
                    pass  # the loop is closed: nobody awaits any more

            scope = find_scope()
            waker = timer = None
            if scope is not None:
                until = scope.limit_wait(FOREVER)
                waker = scope.add_waker(wake)
                if until != FOREVER:
                    timer = loop.call_later(max(0.0, until - monotonic()), go_on)
            self.watch(wake, waker=True)
            try:
                yield from waiter
            except BaseException:  # the task was cancelled, or its coroutine was closed
                self.cancel()
                raise
            finally:
                self.forget(wake)
                if scope is not None and waker is not None:
                    scope.discard(waker)
                    if timer is not None:
                        timer.cancel()
            if scope is not None and not self._state:
                scope.check()
        try:
            return self.value()
        finally:
            del self  # see `value`

    # Callbacks

    def then(self, callback: Callable[[Future[T]], S]) -> Future[S]:
        """Returns a new future for the result of `callback(self)`, which runs when this future is complete.

        The callback runs at once, in this thread, if this future is complete already. It also runs if the call failed.

        Args:
            callback: A function of this future, which is complete then. If it raises, the new future fails with that
                exception.
        """
        derived: Future[S] = Future()
        derived._source = self
        derived.made_by(sys._getframe(1))
        self.watch(_Then(callback, derived, find_scope()), waker=False)
        return derived

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        """Registers `callback(self)` to be called when the future is complete, or at once if it is already.

        Exceptions of the callback are logged. If an event loop runs in the current thread, the callback runs in that
        loop; otherwise in the thread that completes the future.
        """
        self.watch(_DoneCallback(callback, running_loop()), waker=False)

    def remove_done_callback(self, callback: Callable[[Future[T]], object]) -> int:
        """Removes a callback that `add_done_callback` has added. Returns how many times it was removed.

        Returns 0 if the callback was not added or has run already.
        """
        removed = 0
        for entry in list(self._watchers):
            if isinstance(entry[1], _DoneCallback) and entry[1].callback == callback:
                try:
                    self._watchers.remove(entry)
                    removed += 1
                except ValueError:
                    pass  # settled meanwhile: it runs
        return removed

    def cancel(self) -> bool:
        """Cancels the future, and with it the call that it is of: the callee is told to stop.

        The future is cancelled at once, and does not wait for the callee. Cancelling what `then` gave cancels this
        future too, and cancelling what `collect_all` gave cancels all of its futures. `set_result` and
        `set_exception` of a cancelled future do nothing.

        Returns:
            True; False if the future is done already.
        """
        is_cancelled = self.cancel_alone()
        future: Future[Any] | None = self if is_cancelled else None
        while future is not None:  # in a loop: the chain may be long
            source = future.cancel_source()
            future = source if source is not None and source.cancel_alone() else None
        return is_cancelled

    def cancel_source(self) -> Future[Any] | None:
        """Cancels what a future of `collect_all` waits for. Returns what a future of `then` is derived from."""
        if isinstance(self._source, _All):
            self._source.cancel()
        return self._source if isinstance(self._source, Future) else None

    def cancel_alone(self) -> bool:
        """Cancels this future, but not the future or call from which it was made, such as by `then`.

        Returns True if the future was cancelled; False, with nothing changed, if it was complete already.
        """
        with _settling:
            if self._state:
                return False
            self._value = CallCancelledError("the future was cancelled")
            self._state = FAILED
        run_callbacks(self, self.wake())
        return True

    def cancelled(self) -> bool:
        """Returns whether the future, or the call that it is of, was cancelled. False if it is not complete."""
        if self._state == UNLOADED:
            self._load_reply()
        if self._state != FAILED or type(self._value) is not CallCancelledError:
            return False
        if self._report is not None:
            self._report.seen = True  # the callee has cancelled it
        return True

    def as_concurrent(self) -> concurrent.futures.Future[T]:
        """Returns a `concurrent.futures.Future` with the same outcome, for libraries that take only those.

        Cancelling the returned future cancels this one.
        """
        from concurrent.futures import Future as ConcurrentFuture  # not at the head: `import farcall` does without

        view: ConcurrentFuture[T] = ConcurrentFuture()
        # Whether it was completed or cancelled first: only one of the two may tell the threads that wait for the view.
        is_told = threading.Lock()

        def complete(future: Future[T]) -> None:
            error = future.failed_with()
            if future.cancelled():
                view.cancel()
            elif is_told.acquire(blocking=False) and view.set_running_or_notify_cancel():
                if error is None:
                    view.set_result(future.value())
                else:
                    view.set_exception(error)

        def cancel(view: ConcurrentFuture[T]) -> None:
            if view.cancelled() and is_told.acquire(blocking=False):
                view.set_running_or_notify_cancel()
                self.cancel()

        view.add_done_callback(cancel)
        self.watch(complete, waker=False)
        return view

    @property
    def _condition(self) -> NoReturn:  # the first thing that concurrent.futures.wait and as_completed look for
        """Raises `AttributeError`: `concurrent.futures.wait` and `as_completed` do not work with farcall futures."""
        raise AttributeError(
            "concurrent.futures.wait and as_completed take only futures of their own kind: use farcall.wait or "
            "farcall.as_completed, give them future.as_concurrent(), or use asyncio.wait in an event loop"
        )

    def watch(self, watcher: Watcher, *, waker: bool, attended: bool = False) -> None:
        """Registers `watcher(self)` to be called when the future is complete, or at once if it is already.

        Args:
            watcher: A function of the future. One that only wakes a thread returns callbacks to run next, or None; code
                of users returns a `Followed`, or None.
            waker: Whether the watcher only wakes a thread, so that it can run anywhere. False for code of users.
            attended: Whether this thread will wait for the future itself. If not, the source (the connection) is told
                to read the reply although no thread waits.
        """
        entry = (waker, watcher)
        self._watchers.append(entry)
        if self._state:
            try:
                self._watchers.remove(entry)
            except ValueError:
                return  # the settler has seen it
            if self._report is not None and not waker:
                self._report.seen = True
            run_callbacks(self, watcher(self) if waker else [watcher])
        elif self._source is not None and not attended:
            self._source.drive_in_background()

    def forget(self, watcher: Watcher) -> None:
        """Removes a waker that `watch` has added. Does nothing if it has run already or was never added."""
        try:
            self._watchers.remove((True, watcher))
        except ValueError:
            pass  # it has run

    # Settling

    def set_result(self, result: T) -> None:
        """Completes the future with a result, and runs its callbacks.

        Raises:
            RuntimeError: The future is complete already. It keeps its result.
        """
        self._settle_by_hand(DONE, result, None)
        run_callbacks(self, self.wake())

    def set_exception(self, error: BaseException) -> None:
        """Completes the future with an exception, and runs its callbacks.

        Raises:
            RuntimeError: The future is complete already. It keeps its result.
            TypeError: `error` is not an exception.
        """
        if not isinstance(error, BaseException):
            raise TypeError(f"set_exception takes an exception, not {error!r}")
        if not hasattr(self, "_place"):
            self.made_by(sys._getframe(1))
        self._settle_by_hand(FAILED, error, lambda: _unseen(error))
        run_callbacks(self, self.wake())

    def _settle_by_hand(self, state: int, value: Any, describe: Callable[[], str] | None) -> None:
        """Completes the future without running its callbacks. Raises `RuntimeError` if it is complete already.

        Args:
            state: `DONE` or `FAILED`.
            value: The result or the exception.
            describe: For a failure, returns the text of the warning if nobody looks at it; None for a result.
        """
        with _settling:
            if self._state:
                if self.cancelled():
                    return  # the program that settles it need not know that nobody wants the result any more
                raise RuntimeError(f"{self!r} has a result already; a future can be completed only once")
            if describe is not None:
                self.report_unseen(describe)
            self._value = value
            self._state = state

    def settle_first(self, state: int, value: Any, describe: Callable[[], str] | None) -> bool:
        """Completes a future that several threads may complete, without waking anybody: `wake` must follow.

        Returns True; False if the future is complete already, and nothing was changed.

        Args:
            state: `DONE`, `FAILED` or `UNLOADED`.
            value: The result, the exception, or the reply that is not unpickled yet.
            describe: For a failure, returns the text of the warning if nobody looks at it; None for no warning.
        """
        with _settling:
            if self._state:
                return False
            if describe is not None:
                self.report_unseen(describe)
            if state == UNLOADED:
                self._reply = value
            else:
                self._value = value
            self._state = state
            return True

    def settle_as(self, other: Future[T]) -> bool:
        """As `settle_first`, with the outcome of another future, which is complete and which nobody else looks at."""
        report = other._report
        if report is not None:
            report.seen = True
        value = other._reply if other._state == UNLOADED else other._value
        return self.settle_first(other._state, value, report.describe if report is not None else None)

    def settle(self, state: int, value: Any) -> Callbacks | None:
        """Completes the future and runs its wakers, the watchers that only wake a thread.

        The future must not be complete yet; this is not checked.

        Args:
            state: `DONE`, `FAILED` or `UNLOADED`.
            value: The result, the exception, or the reply that is not unpickled yet.

        Returns:
            The callbacks, which the caller has to pass to `run_callbacks` when it holds no lock; None if there are
            none.
        """
        if state == UNLOADED:
            self._reply = value
        else:
            self._value = value
        self._state = state  # last: whoever sees it sees the value too
        return self.wake() if self._watchers else None

    def wake(self) -> Callbacks | None:
        """Runs the wakers of a complete future, the watchers that only wake a thread.

        Returns its callbacks, for `run_callbacks`; None if there are none. If a signal handler interrupts this method
        by an exception, no watcher is lost, and it can be called again.
        """
        callbacks: Callbacks = []
        watchers = self._watchers
        entry = None
        try:
            while True:
                if not watchers:
                    break  # not `while watchers:`; `run_callbacks` says why
                try:
                    entry = watchers[0]
                    watchers.remove(entry)
                except (IndexError, ValueError):
                    entry = None
                    continue  # a watcher that came late took it
                waker, watcher = entry
                # Not append(): Ctrl-C may come as that returns.
                callbacks += (watcher(self) or ()) if waker else [watcher]
                entry = None
        except BaseException:
            if entry is not None and entry not in watchers:
                watchers.insert(0, entry)
            watchers[:0] = [(False, callback) for callback in callbacks]
            raise
        if callbacks and self._report is not None:
            self._report.seen = True  # the callbacks were handed the failure
        return callbacks or None

    def made_by(self, frame: FrameType) -> None:
        """Records the frame that created the future. An `UnseenFailureWarning` about the future points to that line.

        Replaces an earlier frame. Only the place is kept, not the frame itself.
        """
        self._place = frame.f_code, frame.f_lasti, frame.f_globals
        if self._report is not None:  # another thread has settled it in the meantime
            self._report.place = self._place

    def report_unseen(self, describe: Callable[[], str]) -> None:
        """Arranges an `UnseenFailureWarning` if the future is dropped before the program looks at its failure.

        Args:
            describe: Returns the text of the warning. Called only if there is one.
        """
        if self._report is not None:
            self._report.seen = True  # settling was interrupted, and is done again
        report = self._report = _FailureReport(describe)
        report.place = getattr(self, "_place", None)  # after that: see `made_by`

    def _load_reply(self) -> None:
        """Unpickles the reply if there is one that was not unpickled yet."""
        reply = self._reply
        if reply is not None:
            with reply.lock:
                if self._reply is not None:
                    state, self._value = reply.load()
                    self._state = state
                    self._reply = None

    def _load(self) -> int:
        """Unpickles the reply if that was not done yet, and marks a failure as seen.

        Returns the state, `DONE` or `FAILED`; `PENDING` if the future is not complete.
        """
        self._load_reply()
        if self._report is not None:
            self._report.seen = True
        return self._state

    def __reduce__(self) -> NoReturn:
        """Raises `TypeError`: a future cannot be pickled."""
        raise TypeError(
            "a Future cannot be sent to another worker: return its value, or mark the function with "
            "functions.async_execution, and its caller gets what the future is settled with"
        )

    def __repr__(self) -> str:
        state = {PENDING: "pending", DONE: "done", FAILED: "failed", UNLOADED: "done"}[self._state]
        return f"<{type(self).__name__} {state}>"


class _DoneCallback:
    """A user's callback, and the event loop in which it has to run; None for the thread that completes the future."""

    __slots__ = ("_loop", "_scope", "callback")

    def __init__(self, callback: Callable[[Any], object], loop: asyncio.AbstractEventLoop | None) -> None:
        self.callback = callback
        self._loop = loop
        self._scope = find_scope()

    def __call__(self, future: Future[Any]) -> Followed | None:
        """Runs the callback, in its event loop if it has one. Returns what follows (see `Followed`), or None.

        Raises nothing.
        """
        if self._loop is None:
            return self._run(future)
        try:
            self._loop.call_soon_threadsafe(self._run, future)
        except RuntimeError:
            pass  # the loop is closed, and all that was to happen in it is off
        return None

    def _run(self, future: Future[Any]) -> Followed | None:
        """Runs the callback and logs its exception. Returns what follows (see `Followed`), or None."""
        try:
            if self._scope is None:
                self.callback(future)
            else:
                run_in_scope(self._scope, self.callback, future)
        except BaseException as error:  # whatever it is: the callbacks behind it must run
            logger.exception("a callback of %r failed", future)
            interrupt = _meant_for_the_program(error, future)
            return Followed(future, [], interrupt) if interrupt else None
        return None


@dataclass(slots=True, eq=False)
class _Then:
    """The callback that `then` adds: completes the derived future with the outcome of the user's callback."""

    callback: Callable[[Any], Any]
    derived: Future[Any]
    scope: Scope | None

    def __call__(self, future: Future[Any]) -> Followed | None:
        """Runs the user's callback, and completes the derived future with its outcome.

        Returns what follows, or None.
        """
        derived = self.derived
        if derived.cancelled():
            return None
        try:
            result = self.callback(future) if self.scope is None else run_in_scope(self.scope, self.callback, future)
        except BaseException as error:
            interrupt = _meant_for_the_program(error, future)
            callbacks = None if derived._state else settle_failed(derived, error)
            # Here, not after the `try`: since 3.12 the way there is a jump back, at which an interrupt may come.
            return Followed(derived, callbacks, interrupt) if callbacks or interrupt else None
        callbacks = None if derived._state else derived.settle(DONE, result)  # if not by hand meanwhile
        return Followed(derived, callbacks) if callbacks else None

    def interrupted(self, error: BaseException) -> Followed:
        """Fails the derived future with an exception that a signal handler raised while the callback ran.

        Returns what `run_callbacks` has to do next. If the derived future is complete already, only its watchers are
        run. So no thread waits for it for ever.
        """
        done = self.derived._state
        return Followed(self.derived, self.derived.wake() if done else settle_failed(self.derived, error))


class _FailureReport:
    """Issues an `UnseenFailureWarning` when it is garbage-collected, unless `seen` was set to True.

    It is a separate object so that futures without a failure need no finalizer.

    Args:
        describe: Returns the text of the warning.
    """

    __slots__ = ("describe", "place", "seen")

    def __init__(self, describe: Callable[[], str]) -> None:
        self.describe = describe
        self.place: Place | None = None
        self.seen = False

    def __del__(self) -> None:
        """Issues the warning, at the place that made the call if it is known, unless the failure was seen."""
        if getattr(self, "seen", True):  # it is not there if Ctrl-C came as this was made
            return
        place = self.place
        if place is None or place[0].co_filename.startswith(_OWN_CODE):
            place = _place_outside()
        if place is None:
            warnings.warn(self.describe(), UnseenFailureWarning, stacklevel=2)
            return
        code, at, names = place
        lines = (line for start, end, line in code.co_lines() if start <= at < end and line is not None)
        warnings.warn_explicit(
            self.describe(),
            UnseenFailureWarning,
            code.co_filename,
            next(lines, code.co_firstlineno),
            names.get("__name__"),
            names.setdefault("__warningregistry__", {}),
        )


def _place_outside() -> Place | None:
    """Returns the innermost place in the stack of this thread that is not farcall's code; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_CODE):
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") == "threading":  # a thread of ours
        return None
    return frame.f_code, frame.f_lasti, frame.f_globals


def run_callbacks(future: Future[Any], callbacks: Callbacks | None, waiting: bool = False) -> None:
    """Runs callbacks that `settle` or `wake` returned, and the callbacks that follow from them.

    Each callback is removed from the list before it runs. If one is interrupted by an exception of a signal handler,
    the others still run before that exception is raised.

    Args:
        future: The future that is complete.
        callbacks: Its callbacks; None or an empty list does nothing.
        waiting: Whether this thread belongs to the program. Then a `KeyboardInterrupt` or `SystemExit` of a callback is
            raised at the end.
    """
    if not callbacks:
        return
    interrupt = callback = None
    todo = [Followed(future, callbacks)]
    try:
        # On Python 3.13 an interrupt at the end of a `while todo:` loop would pass by the handlers of this `try`
        # (CPython issue 130279): the jump back to a condition is not covered by them, the jump of `while True` is.
        while True:
            if not todo:
                break
            future, callbacks, _ = todo[-1]
            if not callbacks:
                todo.pop()
                continue
            callback = callbacks[0]
            del callbacks[0]  # not pop(): Ctrl-C may come as that returns, and the callback would be lost
            followed = callback(future)
            if followed is not None:
                interrupt = followed.interrupt or interrupt
                todo.append(followed)
            callback = None
    except BaseException as error:
        if isinstance(callback, _Then):
            todo.append(callback.interrupted(error))
        for future, callbacks, _ in reversed(todo):
            run_callbacks(future, callbacks)
        raise
    if interrupt is not None and waiting:
        raise interrupt


def settle_failed(future: Future[Any], error: BaseException) -> Callbacks | None:
    """Completes a future with an exception, and arranges an `UnseenFailureWarning` if the program never looks at it.

    Returns the callbacks for `run_callbacks`; None if there are none. The future must not be complete; this is not
    checked.
    """
    future.report_unseen(lambda: _unseen(error))
    return future.settle(FAILED, error)


def failed_future(error: BaseException) -> Future[Any]:
    """Returns a future that has failed with `error` already."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def _meant_for_the_program(error: BaseException, future: Future[Any]) -> BaseException | None:
    """Returns `error` if it is a `KeyboardInterrupt` or `SystemExit` in the main thread, else None.

    Also returns None if the future itself has failed with this error: then the error came from the call.
    """
    leaves = isinstance(error, (KeyboardInterrupt, SystemExit)) and error is not future._value
    return error if leaves and threading.current_thread() is threading.main_thread() else None


def _unseen(error: BaseException) -> str:
    """Returns the text of the warning about a failure that the program never looked at."""
    return f"nobody looked at a future that failed with {type(error).__name__}: {error}"


def wait_or_cancel(future: Future[T]) -> T:
    """Returns the result of a call that only this thread knows: if the wait is interrupted, the call is cancelled."""
    try:
        return future.wait()
    except BaseException:
        future.cancel()
        raise
    finally:
        del future  # see `Future.value`


# -- Many futures at once


class _All:
    """The source of a future of `collect_all`: a thread that waits for it waits for each of the futures in turn."""

    def __init__(self, futures: list[Future[Any]]) -> None:
        self._futures = futures

    def drive(self, future: Future[Any], deadline: float) -> None:
        """Waits for each of the futures until `deadline`, in seconds of `time.monotonic`."""
        for each in self._futures:
            each.block(deadline)

    def drive_in_background(self) -> None:
        """Arranges that all futures are completed soon although no thread waits for them. Does not block."""
        for each in self._futures:
            if each._source is not None:
                each._source.drive_in_background()

    def cancel(self) -> None:
        for each in self._futures:
            each.cancel()


def _checked(futures: Iterable[Future[Any]]) -> list[Future[Any]]:
    """Returns the futures as a list. Raises `TypeError` if one of them is not a `farcall.Future`."""
    all_futures = list(futures)
    for future in all_futures:
        if not isinstance(future, Future):
            raise TypeError(f"collect_all and wait_all take farcall futures, as rpc_async gives them, not {future!r}")
    return all_futures


def collect_all(futures: Iterable[Future[Any]]) -> Future[list[Future[Any]]]:
    """Returns a future that is complete when all given futures are complete, whether they succeeded or failed.

    Args:
        futures: The futures.

    Returns:
        A future of the list of the given futures. For no futures it is complete at once, with an empty list.

    Raises:
        TypeError: One of `futures` is not a `farcall.Future`.
    """
    all_futures = _checked(futures)
    collected: Future[list[Future[Any]]] = Future()
    collected._source = _All(all_futures)
    if not all_futures:
        collected.set_result([])
        return collected
    remaining = set(map(id, all_futures))
    lock = threading.Lock()

    def one_done(future: Future[Any]) -> Callbacks | None:
        with lock:
            remaining.discard(id(future))  # not counted: a waker may run twice
            if remaining:
                return None
        callbacks = collected.wake() if collected._state else collected.settle(DONE, all_futures)
        return [lambda _: Followed(collected, callbacks)] if callbacks else None

    for future in all_futures:
        future.watch(one_done, waker=True, attended=True)
    return collected


class _Some(_All):
    """The source of a `DerivedFuture`."""

    def drive(self, future: Future[Any], deadline: float) -> None:
        """Does nothing: the futures have callbacks, so they are completed although no thread waits for them."""


class DerivedFuture(Future[T]):
    """A future that its maker completes in callbacks of other futures. Cancelling it cancels all of them.

    Args:
        futures: The other futures.
    """

    __slots__ = ()

    def __init__(self, futures: list[Future[Any]]) -> None:
        super().__init__()
        self._source: Any = _Some(futures)


def wait_all(futures: Iterable[Future[Any]]) -> list[Any]:
    """Waits until all futures are complete, and returns their results in order; an empty list for no futures.

    Args:
        futures: The futures.

    Raises:
        TypeError: One of `futures` is not a `farcall.Future`.
        Exception: The exception of the first future in the list that failed. It is raised when all are complete.
    """
    all_futures = _checked(futures)
    for future in all_futures:
        if not future._state:
            future.block(FOREVER)
    for future in all_futures:
        if future._state != DONE:
            future._load()  # all failures are seen, though only one can be raised
    return [future.value() for future in all_futures]


class AwaitedTogether(dict[int, list[Future[Any]]]):
    """The futures that blocks of `_wait_all` will wait for, by thread.

    Empty, and so false, while there is no such block.
    """

    def note(self, future: Future[Any]) -> None:
        """Adds the future of a call to the block that this thread is in; does nothing outside of a block."""
        futures = self.get(get_ident())
        if futures is not None:
            futures.append(future)


awaited_together: Final = AwaitedTogether()


@contextmanager
def _wait_all() -> Iterator[None]:
    """Context manager: at its end, waits for the futures of all calls that this thread has made by `rpc_async` inside.

    Blocks can be nested; each waits for its own calls. A block without calls waits for nothing. If the block itself
    raises an exception, that exception is raised when the calls are done.

    Raises:
        Exception: The exception of the first call that failed, in the order of the calls, when all calls are done.
    """
    thread = get_ident()
    outer = awaited_together.get(thread)
    futures: list[Future[Any]] = []
    awaited_together[thread] = futures
    try:
        yield
    except Exception:
        for future in futures:
            future.block(FOREVER)
            if not future.cancelled():
                future.exception()  # is seen, though another error is raised
        raise
    finally:
        if outer is None:
            del awaited_together[thread]
        else:
            awaited_together[thread] = outer
    wait_all(futures)
