"""`MapStream`: the results of a map over many workers.

Rules
- The code that iterates reads the items and sends them: a thread in `for`, a task in `async for`. So items are read
  only as they are needed, and the program's iterator never runs on a thread of farcall.
- Each item goes to the worker with the fewest items of this map under way, at most `per_worker` at a time.
- Items that were read and whose results were not taken yet are bounded: those under way, and as many again (at least
  `MIN_UNREAD`).
- The present workers are looked up again whenever the group changes.
- A worker that is lost gets no more items of the map. An item that was under way there fails with `WorkerLostError`, or
  goes to another worker if it may run more than once. An item that could not even be sent goes to another worker.
- If no worker is left, the items that are still to run fail, and the map ends.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from farcall.backends.interface import MembershipChange, RpcAgent
from farcall.errors import UnknownWorkerError, UsageError, WorkerLostError
from farcall.futures import Future
from farcall.gate import FOREVER
from farcall.many.futures_by_name import cancel_all
from farcall.streams import Stream

if TYPE_CHECKING:
    import asyncio

A_co = TypeVar("A_co", covariant=True)
R_co = TypeVar("R_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)
Target = TypeVar("Target")

MIN_UNREAD = 16
"""How many results at least may wait until they are taken, besides the items that are under way."""


class Outcome(Generic[A_co, R_co]):
    """What became of one item of a map: its result or its error. The stream of `outcomes()` of a map has these.

    Args:
        item: The item.
        worker: The name of the worker that ran it, or was to run it; empty if there was none.
        error: Why it failed; None if it did not.
        value: The result; None if it failed.
    """

    __slots__ = ("_error", "_item", "_value", "_worker")

    def __init__(self, item: A_co, worker: str, error: Exception | None, value: Any) -> None:
        self._item = item
        self._worker = worker
        self._error = error
        self._value = value

    @property
    def item(self) -> A_co:
        """The item."""
        return self._item

    @property
    def worker(self) -> str:
        """The name of the worker that ran the item, or was to run it; empty if there was none."""
        return self._worker

    @property
    def error(self) -> Exception | None:
        """Why the item failed; None if it did not."""
        return self._error

    def result(self) -> R_co:
        """Returns what the function returned for the item. Raises the error if the item failed."""
        if self._error is not None:
            raise self._error
        return cast(R_co, self._value)

    def __repr__(self) -> str:
        what = repr(self._value) if self._error is None else f"{type(self._error).__name__}: {self._error}"
        return f"<Outcome of {self._item!r} on {self._worker!r}: {what}>"


class MapTargets(ABC, Generic[Target]):
    """Where a map sends its items: the base class for maps on workers and on references.

    A *target* is one of the places to which an item can go: a worker, or a reference.

    Args:
        agent: The agent that makes the calls.
    """

    def __init__(self, agent: RpcAgent) -> None:
        self.agent = agent

    @abstractmethod
    def present(self) -> list[Target]:
        """Returns the targets that are there now, perhaps none."""

    @abstractmethod
    def name_of(self, target: Target) -> str:
        """Returns the name of the worker of a target."""

    def is_lost(self, target: Target, error: BaseException | None) -> bool:
        """Returns whether a call to a target failed because the worker of the target was lost.

        `error` is what the call failed with; None, and an error of the function itself, return False.
        """
        return isinstance(error, WorkerLostError) and error.worker == self.name_of(target)

    @abstractmethod
    def send(self, target: Target, item: Any) -> Future[Any]:
        """Sends an item to a target, and returns the future of its result.

        Raises:
            WorkerLostError: The worker cannot be reached. Nothing was sent.
            Exception: The item cannot be sent.
        """


def checked_per_worker(per_worker: int) -> int:
    """Returns `per_worker`. Raises `UsageError` if it is not a whole number of at least 1."""
    if isinstance(per_worker, bool) or not isinstance(per_worker, int) or per_worker < 1:
        raise UsageError(f"per_worker must be a whole number of at least 1, not {per_worker!r}")
    return per_worker


class _Entry:
    """An item of a map that was read, and what became of it so far. It was not sent at first.

    Args:
        index: Its position among the items, from 0 on.
        item: The item.
    """

    __slots__ = ("error", "future", "index", "item", "target", "worker")

    def __init__(self, index: int, item: Any) -> None:
        self.index = index
        self.item = item
        self.target: Any = None
        """Where it was last sent; None if it was not sent."""
        self.worker = ""
        """The name of the worker of `target`."""
        self.future: Future[Any] | None = None
        """The future of its result; None if it was not sent."""
        self.error: BaseException | None = None
        """Why it was not run yet; None if it was not tried."""


class _MapRun:
    """A map that runs: reads items, sends them to workers, and collects the results. It starts with `advance`.

    Only the code that iterates the results calls its methods, except `_arrive` and `_members_changed`, which any thread
    may call.

    Args:
        targets: Where the items go.
        items: An iterable, an async iterable, or both. `advance` raises if it is neither.
        per_worker: How many items are under way on each worker at a time, at least 1.
        retries: Whether an item whose worker was lost goes to another one. If False, it fails with `WorkerLostError`.
    """

    def __init__(self, targets: MapTargets[Any], items: Any, per_worker: int, retries: bool) -> None:
        self._targets = targets
        self._items = items
        self._per_worker = per_worker
        self._retries = retries
        self._is_started = False
        self._is_closed = False
        # Reading
        self._iterator: Iterator[Any] | None = None
        self._async_iterator: AsyncIterator[Any] | None = None
        self._reading: asyncio.Future[Any] | None = None
        self._read_ahead: deque[Any] = deque()
        self._is_read = False
        self._items_error: Exception | None = None
        self._taken = 0
        # Sending
        self._present: list[Any] = []
        self._must_look = True
        self._lost: set[Any] = set()
        self._under_way: dict[int, _Entry] = {}
        self._counts: dict[Any, int] = {}
        self._again: deque[_Entry] = deque()
        # Results
        self._lock = threading.Lock()
        self._arrived: deque[_Entry] = deque()
        self._signal: Future[None] | None = None
        self._finished: dict[int, Outcome[Any, Any]] = {}
        self._next_index = 0
        self._has_failed = False

    # What the streams use

    def advance(self, is_ordered: bool, is_async: bool) -> Outcome[Any, Any] | Future[None] | None:
        """Does what can be done now, without waiting: takes results that have come, and sends items.

        Args:
            is_ordered: Whether to return the outcomes in the order of the items, else as they come.
            is_async: Whether this is called by a task, which can read an async iterable.

        Returns:
            The next outcome; a future to wait for before the next call; or None at the end, and if the map is closed.

        Raises:
            UsageError: The items are an async iterable, and `is_async` is False.
            UnknownWorkerError: No worker is left for the items that were not read.
            Exception: The items raised it. It comes after the outcomes of the items before.
        """
        if self._is_closed:
            return None
        if not self._is_started:
            self._start(is_async)
        self._take_arrived()
        self._send_items(is_ordered)
        if self._finished and (not is_ordered or self._next_index in self._finished):
            index = self._next_index if is_ordered else next(iter(self._finished))
            self._next_index += 1
            return self._finished.pop(index)
        if self._under_way or self._arrived:
            return self._wait_for_change()
        if self._reading is not None and (self._present or not self._read_ahead):
            return self._wait_for_change()
        error = self._items_error
        if error is None and (not self._is_read or self._read_ahead) and not self._has_failed:
            error = UnknownWorkerError(f"no worker of {self._targets!r} is left for the other items")
        self.close()
        if error is not None:
            raise error
        return None

    def close(self) -> None:
        """Ends the map: cancels the calls under way, and reads no more items. Does not wait. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_started:
            self._targets.agent.unwatch_members(self._members_changed)
        cancel_all([entry.future for entry in self._under_way.values() if entry.future is not None])
        reading = self._reading
        if reading is not None:
            try:
                reading.get_loop().call_soon_threadsafe(reading.cancel)
            except RuntimeError:
                pass  # the loop is closed, and the task with it

    def _start(self, is_async: bool) -> None:
        """Begins to iterate the items, and to watch the group. `is_async` says whether a task calls this.

        Raises `UsageError` if the items are an async iterable only and `is_async` is False, and `TypeError` if they
        cannot be iterated.
        """
        if is_async and hasattr(self._items, "__aiter__"):
            self._async_iterator = aiter(self._items)
        elif hasattr(self._items, "__aiter__") and not hasattr(self._items, "__iter__"):
            raise UsageError("the items of this map are an async iterable: iterate the results with `async for`")
        else:
            self._iterator = iter(self._items)
        self._is_started = True
        self._targets.agent.watch_members(self._members_changed)

    # Reading items

    def _next_entry(self) -> _Entry | None:
        """Returns the next item that is to be sent: one that must be sent again, or a new one.

        Returns None if there is none now: all were read, too many results wait to be taken, a failure has ended the
        map, or the item of an async iterable is not there yet. An error of the iterable is kept for later.
        """
        if self._again:
            return self._again.popleft()
        window = len(self._present) * self._per_worker
        if self._has_failed or self._taken - self._next_index >= window + max(window, MIN_UNREAD):
            return None
        if self._read_ahead:
            item = self._read_ahead.popleft()
        elif self._is_read:
            return None
        elif self._iterator is None:
            self._start_reading()
            return None
        else:
            try:
                item = next(self._iterator)
            except StopIteration:
                self._is_read = True
                return None
            except Exception as error:
                self._is_read, self._items_error = True, error
                return None
        self._taken += 1
        return _Entry(self._taken - 1, item)

    def _start_reading(self) -> None:
        """Starts a task that reads one item of the async iterable, so that results can be taken meanwhile.

        Does nothing if one is being read.
        """
        if self._reading is None and self._async_iterator is not None:
            import asyncio  # not at the head: `import farcall` does without

            self._reading = asyncio.ensure_future(anext(self._async_iterator))
            self._reading.add_done_callback(self._note_read)

    def _note_read(self, reading: asyncio.Future[Any]) -> None:
        """Called in the event loop when `reading` has an item of the async iterable, has failed, or was cancelled."""
        self._reading = None
        error = None if reading.cancelled() else reading.exception()
        if reading.cancelled() or error is not None:
            self._is_read = True
        else:
            self._read_ahead.append(reading.result())
        if isinstance(error, Exception) and not isinstance(error, StopAsyncIteration):
            self._items_error = error
        self._wake()

    # Sending them

    def _send_items(self, is_ordered: bool) -> None:
        """Sends items to all targets that are free, until there are no more items or no free targets.

        With `is_ordered`, no new item is read after one has failed: the results after it are not wanted. If no target
        is left, the items that wait to be sent again fail.
        """
        if is_ordered and any(outcome.error is not None for outcome in self._finished.values()):
            self._has_failed = True  # the results behind it are not wanted
        while (target := self._free_target()) is not None:
            entry = self._next_entry()
            if entry is None:
                return
            self._send(entry, target)
        if not self._present and not self._under_way:
            while self._again:
                entry = self._again.popleft()
                self._finish(entry, entry.error)

    def _free_target(self) -> Any:
        """Returns the target with the fewest items under way; None if all have `per_worker` items, or there is none."""
        if self._must_look:
            self._must_look = False  # before the look: a change that comes now is looked at again
            self._present = [each for each in self._targets.present() if each not in self._lost]
        target = min(self._present, key=lambda each: self._counts.get(each, 0), default=None)
        return None if target is None or self._counts.get(target, 0) >= self._per_worker else target

    def _send(self, entry: _Entry, target: Any) -> None:
        """Sends an item to a target.

        If the worker cannot be reached, no more items go there, and this one is kept for another target. After another
        error the item has failed.
        """
        entry.target, entry.worker = target, self._targets.name_of(target)
        try:
            future = entry.future = self._targets.send(target, entry.item)
        except WorkerLostError as error:  # nothing was sent, so any other worker may have it
            self._note_lost(target)
            entry.error = error
            self._again.appendleft(entry)
            return
        except Exception as error:
            self._finish(entry, error)
            return
        self._under_way[entry.index] = entry
        self._counts[target] = self._counts.get(target, 0) + 1
        future.watch(partial(self._arrive, entry), waker=False)

    def _note_lost(self, target: Any) -> None:
        """Notes that the worker of a target is lost: no more items are sent there."""
        self._lost.add(target)
        self._must_look = True

    # Taking results

    def _take_arrived(self) -> None:
        """Takes the results that have come, and frees their targets. Does nothing if none has come.

        An item whose worker was lost is kept for another target if the map retries; else it has failed.
        """
        while self._arrived:
            entry = self._arrived.popleft()
            del self._under_way[entry.index]
            self._counts[entry.target] -= 1
            future = cast(Future[Any], entry.future)
            error = future.failed_with()
            if self._targets.is_lost(entry.target, error):
                self._note_lost(entry.target)
                if self._retries:
                    entry.error = error
                    self._again.append(entry)
                    continue
            self._finish(entry, error)

    def _finish(self, entry: _Entry, error: BaseException | None) -> None:
        """Keeps what became of an item until the program asks for it. `error` is why it failed; None if it did not."""
        value = cast(Future[Any], entry.future).value() if error is None else None
        self._finished[entry.index] = Outcome(entry.item, entry.worker, cast("Exception | None", error), value)

    def _arrive(self, entry: _Entry, _: Future[Any]) -> None:
        """Called in any thread when the result or error of an item has come."""
        with self._lock:
            self._arrived.append(entry)
        self._wake()

    def _members_changed(self, _: MembershipChange) -> None:
        """Called in any thread when the group has changed: the targets are looked up again."""
        self._must_look = True
        self._wake()

    def _wake(self) -> None:
        """Wakes the code that waits for a change; does nothing if none waits."""
        with self._lock:
            signal, self._signal = self._signal, None
        if signal is not None:
            signal.set_result(None)

    def _wait_for_change(self) -> Future[None]:
        """Returns a future that completes when a result has come, an item was read, or the group has changed.

        It is complete already if that has happened since it was last looked at.
        """
        signal: Future[None] = Future()
        with self._lock:
            if not self._arrived and not self._must_look and not self._read_ahead:
                self._signal = signal
                return signal
        signal.set_result(None)
        return signal


class _OutcomeStream(Stream[T_co]):
    """A stream of what became of the items of a map. The end of the stream, and its last reference, end the map.

    Args:
        run: The map.
        is_ordered: Whether the outcomes come in the order of the items; if False, as they come.
        of_outcome: Given an outcome, returns the item of the stream: its result, or the outcome itself. If it raises,
            the map ends, and the stream raises the error.
    """

    def __init__(self, run: _MapRun, is_ordered: bool, of_outcome: Callable[[Outcome[Any, Any]], T_co]) -> None:
        self._run: _MapRun | None = run
        self._is_ordered = is_ordered
        self._of_outcome = of_outcome
        self._is_begun = False

    def __next__(self) -> T_co:
        run = self._begun()
        try:
            while isinstance(step := run.advance(self._is_ordered, is_async=False), Future):
                step.block(FOREVER)
            if step is not None:
                return self._of_outcome(step)
        except BaseException:
            run.close()
            raise
        raise StopIteration

    async def __anext__(self) -> T_co:
        run = self._begun()
        try:
            while isinstance(step := run.advance(self._is_ordered, is_async=True), Future):
                await step
            if step is not None:
                return self._of_outcome(step)
        except BaseException:  # also a cancelled task
            run.close()
            raise
        raise StopAsyncIteration

    def close(self) -> None:
        """Ends the map: what is under way is cancelled, and no more items are read. May be called twice."""
        if self._run is not None:
            self._run.close()

    def _begun(self) -> _MapRun:
        """Returns the map, and notes that it is read. Raises `UsageError` if `outcomes` gave it to another stream."""
        if self._run is None:
            raise UsageError("the outcomes of this map are read, so its results cannot be")
        self._is_begun = True
        return self._run

    def __del__(self) -> None:
        run = getattr(self, "_run", None)
        if run is not None:
            run.close()


class MapStream(_OutcomeStream[R_co], Generic[A_co, R_co]):
    """The results of a map, in the order of the items. A failure is raised in its place, and cancels the rest.

    `map` of a selection of workers, and of references, returns one. Nothing runs before the first result is asked for.
    Iterating raises what the function raised for an item, and `UnknownWorkerError` if no worker is left.

    Args:
        targets: Where the items go: workers or references.
        items: An iterable, or an async iterable for `async for`.
        per_worker: How many items are under way on each worker at a time, at least 1.
        retries: Whether an item whose worker was lost goes to another one. If False, it fails with `WorkerLostError`.

    Raises:
        UsageError: `items` cannot be iterated.
    """

    def __init__(self, targets: MapTargets[Any], items: Any, per_worker: int, retries: bool) -> None:
        if not hasattr(items, "__aiter__"):
            try:
                iter(items)
            except TypeError:
                raise UsageError(f"map takes a function and an iterable of items, not {items!r}") from None
        super().__init__(_MapRun(targets, items, per_worker, retries), True, Outcome.result)

    def outcomes(self) -> Stream[Outcome[A_co, R_co]]:
        """Returns a stream of what became of each item, in the order in which they are done. It replaces this stream.

        A failure does not end that stream.

        Raises:
            UsageError: The results of this stream, or its outcomes, are read already.
        """
        if self._is_begun or self._run is None:
            raise UsageError("outcomes() must be asked for before the first result is read, and once")
        run, self._run = self._run, None
        return _OutcomeStream(run, False, _itself)


def _itself(outcome: Outcome[Any, Any]) -> Outcome[Any, Any]:
    """Returns `outcome`, for a stream whose items are the outcomes themselves."""
    return outcome
