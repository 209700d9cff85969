"""Settling a future against watching it: interrupted at any point, and over every interleaving of lines."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from farcall import futures
from farcall.futures import DONE, UNLOADED, Future, collect_all, run_callbacks
from future_stage import LateReply
from interleaving import Schedule, explore
from interruption import At, Interrupt

# An interrupt at any point


@pytest.mark.parametrize("derivations", [0, 2])
def test_an_interrupt_at_any_point_of_settling_loses_no_watcher(derivations: int) -> None:
    for point in itertools.count():
        future: Future[int] = Future()
        got: list[str] = []
        future.watch(lambda _, got=got: got.append("waker"), waker=True)
        future.add_done_callback(lambda _, got=got: got.append("callback"))
        last = future
        for _ in range(derivations):
            last = last.then(lambda f: f.value())
        all_of_them = collect_all([future, last])
        callbacks = None
        with contextlib.suppress(Interrupt), At(("farcall/futures.py",), (point,)) as at:
            callbacks = future.settle(DONE, 1)
        run_callbacks(future, callbacks)
        if future.done():
            run_callbacks(future, future.wake())  # what who was interrupted does
        else:
            run_callbacks(future, future.settle(DONE, 1))
        assert got.count("callback") == 1, at.places
        assert "waker" in got, at.places
        assert last.done(), at.places
        assert all_of_them.done(), at.places
        if not at.has_acted:
            assert point > 3
            return


def test_an_interrupt_at_any_point_of_running_callbacks_leaves_none_behind() -> None:
    for point in itertools.count():
        future: Future[int] = Future()
        got: list[str] = []
        derived = [future.then(lambda f: f.value()) for _ in range(2)]
        failing = future.then(lambda f: f.value() / 0)
        last: list[Future[Any]] = [derived[0].then(lambda f: f.value()), failing.then(lambda f: f.exception())]
        future.add_done_callback(lambda _, got=got: got.append("callback"))
        callbacks = future.settle(DONE, 1)
        with contextlib.suppress(Interrupt), At(("farcall/futures.py",), (point,)) as at:
            run_callbacks(future, callbacks)
        run_callbacks(future, callbacks)  # what was left, as who was interrupted does
        waited_for: list[Future[Any]] = [*derived, failing, *last]
        for one in waited_for:
            assert one.done(), at.places
            one.exception()
        assert got == ["callback"] or at.places[0].startswith("_DoneCallback"), at.places
        if not at.has_acted:
            assert point > 10
            return


# Interleavings: of every line, with two preemptions.

LINES = ("farcall/futures.py",)
PREEMPTIONS = 2

Bodies = tuple[list[Callable[[], object]], Callable[[], None]]


@pytest.fixture
def exploring(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`explore`, with all locks and gates of the module under the schedule's control."""

    def run(scenario: Callable[[Schedule], Bodies], preemptions: int = PREEMPTIONS) -> int:
        def controlled(schedule: Schedule) -> Bodies:
            monkeypatch.setattr(futures, "_settling", schedule.lock())
            monkeypatch.setattr(futures, "Gate", schedule.gate)
            monkeypatch.setattr(futures, "threading", SimpleNamespace(Lock=schedule.lock))
            return scenario(schedule)

        return explore(controlled, LINES, preemptions)

    return run


def settler(future: Future[Any], value: Any) -> Callable[[], None]:
    return lambda: run_callbacks(future, future.settle(DONE, value))


def watching_while_it_is_settled(new: Callable[[], Future[Any]]) -> Callable[[Schedule], Bodies]:
    def scenario(_: Schedule) -> Bodies:
        future = new()
        called: list[Any] = []
        woken: list[Any] = []
        future.watch(lambda f: called.append(f.value()), waker=False)

        def watch() -> None:
            future.watch(lambda f: called.append(f.value()), waker=False)
            future.watch(lambda f: woken.append(f.value()), waker=True)

        def check() -> None:
            assert (called, woken) == ([1, 1], [1])
            assert not future._watchers

        return [watch, settler(future, 1)], check

    return scenario


def test_each_watcher_is_called_once_however_settling_comes_between(exploring: Callable[..., int]) -> None:
    assert exploring(watching_while_it_is_settled(Future)) > 100


def _step() -> None:
    """Another thread may run here: `exploring` has put a gate of its schedule in place of this one."""
    futures.Gate().open()  # type: ignore[attr-defined]


class ChecksBeforeItWatches(Future[Any]):
    """Looks whether it is settled, then adds the watcher."""

    def watch(self, watcher: futures.Watcher, *, waker: bool, attended: bool = False) -> None:
        if self._state:
            watcher(self)
            return
        _step()
        self._watchers.append((waker, watcher))


class WritesTheStateFirst(Future[Any]):
    """Says that it is settled before the value is there."""

    def settle(self, state: int, value: Any) -> futures.Callbacks | None:
        self._state = state
        _step()
        self._value = value
        return self.wake()


class LeavesALateWatcherInTheList(Future[Any]):
    """Calls a watcher that came late, and does not see whether the settler does so too."""

    def watch(self, watcher: futures.Watcher, *, waker: bool, attended: bool = False) -> None:
        self._watchers.append((waker, watcher))
        _step()
        if self._state:
            watcher(self)


@pytest.mark.parametrize("bug", [ChecksBeforeItWatches, WritesTheStateFirst, LeavesALateWatcherInTheList])
def test_a_planted_bug_is_caught(bug: type[Future[Any]], exploring: Callable[..., int]) -> None:
    with pytest.raises(AssertionError):
        exploring(watching_while_it_is_settled(bug), preemptions=1)


def test_a_wake_up_is_never_lost(exploring: Callable[..., int]) -> None:
    def scenario(_: Schedule) -> Bodies:
        future: Future[int] = Future()

        def wait() -> None:
            assert future.wait() == 1

        def check() -> None:
            assert not future._watchers

        return [wait, settler(future, 1)], check

    assert exploring(scenario) > 100


def test_a_wait_whose_time_ends_as_it_is_settled(exploring: Callable[..., int]) -> None:
    def scenario(_: Schedule) -> Bodies:
        future: Future[int] = Future()

        def wait() -> None:
            try:
                assert future.result(0) == 1
            except TimeoutError:
                pass

        def check() -> None:
            assert future.wait() == 1
            assert not future._watchers

        return [wait, settler(future, 1)], check

    assert exploring(scenario) > 100


def test_of_two_who_settle_one_wins(exploring: Callable[..., int]) -> None:
    def scenario(_: Schedule) -> Bodies:
        future: Future[int] = Future()
        seen: list[int] = []
        refused: list[int] = []
        future.add_done_callback(lambda f: seen.append(f.value()))

        def settle(number: int) -> None:
            try:
                future.set_result(number)
            except RuntimeError:
                refused.append(number)

        def check() -> None:
            assert sorted([*seen, *refused]) == [1, 2]
            assert seen == [future.value()]

        return [lambda: settle(1), lambda: settle(2)], check

    assert exploring(scenario) > 100


def test_a_failure_that_was_seen_just_as_it_was_set_is_not_reported(exploring: Callable[..., int]) -> None:
    error = ValueError("seen")

    def scenario(_: Schedule) -> Bodies:
        future: Future[int] = Future()

        def look() -> None:
            assert future.exception() is error

        def check() -> None:
            assert future._report is not None
            assert future._report.seen

        return [look, lambda: future.set_exception(error)], check

    assert exploring(scenario) > 100


def test_two_who_want_the_value_load_it_once(exploring: Callable[..., int]) -> None:
    def scenario(schedule: Schedule) -> Bodies:
        future: Future[int] = Future()
        reply = LateReply((DONE, 6), schedule.lock())
        future.settle(UNLOADED, reply)

        def want() -> None:
            assert future.value() == 6

        def check() -> None:
            assert reply.loaded == 1

        return [want, want], check

    assert exploring(scenario) > 100


def test_all_are_collected_however_they_are_settled(exploring: Callable[..., int]) -> None:
    def scenario(_: Schedule) -> Bodies:
        pair: list[Future[int]] = [Future(), Future()]
        called: list[list[Future[int]]] = []

        def collect() -> None:
            collected = collect_all(pair)
            collected.add_done_callback(lambda f: called.append(f.value()))

        def check() -> None:
            assert called == [pair]

        return [collect, settler(pair[0], 0), settler(pair[1], 1)], check

    assert exploring(scenario, preemptions=1) > 100


def test_a_callback_is_run_by_its_settler_or_by_who_hung_it_on_and_by_nobody_else(
    exploring: Callable[..., int],
) -> None:
    """Who merely waits may be on the point of reading the connection, where user code must not run."""

    def scenario(_: Schedule) -> Bodies:
        future: Future[int] = Future()
        ran: list[str] = []
        future.add_done_callback(lambda _: ran.append(threading.current_thread().name))

        def wait() -> None:
            future.watch(lambda _: None, waker=True, attended=True)

        def check() -> None:
            assert ran == ["thread 1"]

        return [wait, settler(future, 1)], check

    assert exploring(scenario, preemptions=1) > 10
