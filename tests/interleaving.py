"""Runs threads one at a time, in every order that matters: a scheduler that the test controls.

The threads of a scenario are real, but only one runs at any moment. At each lock and gate, and at each line of the
files that are named, the running thread asks the schedule who goes on. `explore` runs the scenario again and again,
each time with another schedule, until all with at most `preemptions` switches away from a thread that could have gone
on have been run (switches at a thread that blocks or ends are free, and all of them are tried). Most bugs of such
machines need one or two preemptions.

A schedule in which somebody blocks for ever is found at once, not by a time limit: nobody can go on, and not all have
ended. `Deadlock` says who sleeps where.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from farcall.gate import Gate


class Deadlock(AssertionError):
    """Nobody can go on: a wake-up was lost, or two threads wait for each other."""


class _Abandoned(BaseException):
    """Ends the threads of a run that has failed."""


@dataclass
class _Thread:
    name: str
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    blocked: Callable[[], bool] | None = None  # can go on when this is true
    where: str = ""
    ended: bool = False


class Schedule:
    """One run: who goes on at each step. `path` is what was chosen, `options` what could have been."""

    def __init__(self, prefix: Sequence[int], files: tuple[str, ...]) -> None:
        self._prefix = prefix
        self._files = files
        self.path: list[int] = []
        self.options: list[list[int]] = []
        self.continues: list[int | None] = []  # who could have gone on without a switch
        self._threads: list[_Thread] = []
        self._current = -1
        self._all_ended = threading.Event()
        self._error: BaseException | None = None
        self._free = True  # nobody is scheduled: the scenario is being set up, or checked, or a choice is being made

    # For the scenario

    def lock(self) -> ControlledLock:
        """A lock whose every use is a step."""
        return ControlledLock(self)

    def gate(self) -> ControlledGate:
        """A gate whose every use is a step."""
        return ControlledGate(self)

    def step(self, ready: Callable[[], bool] | None = None, where: str = "") -> None:
        """The running thread may be switched away from here, and must be until `ready()`."""
        if self._free:
            return
        me = self._threads[self._current]
        me.blocked = ready
        me.where = where
        self._switch(me)
        me.blocked = None

    # The run

    def run(self, bodies: Sequence[Callable[[], object]]) -> None:
        self._threads = [_Thread(f"thread {index}") for index in range(len(bodies))]
        workers = [
            threading.Thread(target=self._live, args=(thread, body), name=thread.name, daemon=True)
            for thread, body in zip(self._threads, bodies, strict=True)
        ]
        for worker in workers:
            worker.start()
        self._free = False
        self._hand_over(None)
        self._all_ended.wait()
        for worker in workers:
            worker.join()
        self._free = True
        if self._error is not None:
            raise self._error

    def _live(self, thread: _Thread, body: Callable[[], object]) -> None:
        thread.go.acquire()
        try:
            if self._error is None:
                sys.settrace(self._trace)
                body()
        except _Abandoned:
            pass
        except BaseException as error:
            self._fail(error)
        finally:
            sys.settrace(None)
            thread.ended = True
            self._hand_over(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self._files):
            return None
        if event == "line":
            self.step()
        return self._trace

    def _switch(self, me: _Thread) -> None:
        if self._error is not None:
            raise _Abandoned
        if self._hand_over(me):
            me.go.acquire()
        if self._error is not None:
            raise _Abandoned

    def _hand_over(self, me: _Thread | None) -> bool:
        """Chooses who goes on and lets it; True if that is another than `me`."""
        if self._error is None:
            self._free = True  # what is asked here may be in a traced file
            runnable = [
                index
                for index, thread in enumerate(self._threads)
                if not thread.ended and (thread.blocked is None or thread.blocked())
            ]
            self._free = False
            if runnable:
                following = self._choose(runnable, me)
                self._current = following
                if self._threads[following] is me:
                    return False
                self._threads[following].go.release()
                return True
            if any(not thread.ended for thread in self._threads):
                asleep = [f"{thread.name} at {thread.where}" for thread in self._threads if not thread.ended]
                self._fail(Deadlock("nobody can go on: " + ", ".join(asleep)))
        waiting = next((index for index, thread in enumerate(self._threads) if not thread.ended), None)
        if waiting is None:
            self._all_ended.set()
        elif self._threads[waiting] is not me:
            self._current = waiting
            self._threads[waiting].go.release()
            return True
        return False

    def _choose(self, runnable: list[int], me: _Thread | None) -> int:
        current = self._current if me is not None and self._current in runnable else None
        ordered = [current, *(index for index in runnable if index != current)] if current is not None else runnable
        number = len(self.path)
        chosen = self._prefix[number] if number < len(self._prefix) else ordered[0]
        assert chosen in ordered, "the scenario is not deterministic: a schedule could not be replayed"
        self.path.append(chosen)
        self.options.append(ordered)
        self.continues.append(current)
        return chosen

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error


class ControlledLock:
    """A lock under the schedule's control, which its holder may take again."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._holder = 0
        self._depth = 0

    def __enter__(self) -> ControlledLock:
        me = threading.get_ident()
        self._schedule.step(lambda: self._holder in (0, me), "a lock")
        self._holder = me
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = 0
        self._schedule.step()

    def _is_owned(self) -> bool:
        return self._holder == threading.get_ident()


class ControlledGate(Gate):
    """A gate under the schedule's control. A deadline before infinity may pass at any moment."""

    __slots__ = ("_open", "_schedule")

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._open = False

    def open(self, _: object = None) -> None:
        self._open = True
        self._schedule.step()

    def sleep(self, deadline: float) -> bool:
        self._schedule.step(None if deadline < float("inf") else (lambda: self._open), "a gate")
        opened, self._open = self._open, False
        return opened


def explore(
    scenario: Callable[[Schedule], tuple[Sequence[Callable[[], object]], Callable[[], None]]],
    files: tuple[str, ...],
    preemptions: int,
    at_most: int = 200_000,
) -> int:
    """Runs the scenario under every schedule; how many there were. Raises what a run raised, noting its schedule.

    `scenario(schedule)` gives the threads' bodies and a check for the end. `files` are the names of the files whose
    every line is a step, besides each use of a lock or gate.
    """
    todo: list[list[int]] = [[]]
    runs = 0
    while todo:
        prefix = todo.pop()
        schedule = Schedule(prefix, files)
        bodies, check = scenario(schedule)
        runs += 1
        assert runs <= at_most, f"more than {at_most} schedules: make the scenario smaller"
        try:
            # A collection would run finalizers of what other tests have left, and their lines would be steps, too.
            gc.disable()
            try:
                schedule.run(bodies)
            finally:
                gc.enable()
            check()
        except BaseException as error:
            error.add_note(f"schedule {schedule.path} (run {runs})")
            raise
        spent = _preemptions(schedule, len(prefix))
        for number in range(len(prefix), len(schedule.path)):
            for option in schedule.options[number]:
                if option == schedule.path[number]:
                    continue
                cost = 1 if schedule.continues[number] is not None else 0
                if spent + cost <= preemptions:
                    todo.append([*schedule.path[:number], option])
            spent += _is_preemption(schedule, number)
    return runs


def _is_preemption(schedule: Schedule, number: int) -> int:
    current = schedule.continues[number]
    return 1 if current is not None and schedule.path[number] != current else 0


def _preemptions(schedule: Schedule, upto: int) -> int:
    return sum(_is_preemption(schedule, number) for number in range(upto))
