"""The hand-over of the reader's role, over every interleaving: of lines with one preemption, of locks with two."""

from __future__ import annotations

import linecache
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest

from farcall.agent import reading as reading_module
from farcall.agent.reading import Reading
from farcall.futures import DONE, FOREVER, Future, run_callbacks
from interleaving import Schedule, explore

LINES = ("agent/reading.py", "farcall/futures.py")
DEPTHS = pytest.mark.parametrize(("files", "preemptions"), [(LINES, 1), ((), 2)], ids=["lines", "locks"])


class Wire:
    """A connection as the role sees it: replies arrive in an order that the test chooses, at once."""

    def __init__(self, schedule: Schedule, reading: type[Reading] = Reading) -> None:
        self._schedule = schedule
        self.pending: dict[int, Future[int]] = {}
        self.arrived: deque[int] = deque()
        self.readers = 0
        self.watched = False
        self.left_unattended = False
        self.reading = reading(self, schedule.lock, schedule.gate)

    def call(self, number: int) -> Future[int]:
        future: Future[int] = Future()
        self.pending[number] = future
        return future

    def reply(self, number: int) -> None:
        self.arrived.append(number)
        self._schedule.step()

    # Readable

    def read_until(self, future: Future[Any], deadline: float) -> None:
        self.enter()
        while not future.done():
            self._schedule.step(
                (lambda: bool(self.arrived)) if deadline == FOREVER else None, "reading, with nothing to read"
            )
            if not self.arrived:
                break  # the deadline
            self.take_one()
        self.readers -= 1

    def enter(self) -> None:
        assert self.readers == 0, "two threads read at once"
        assert not self.watched or self.background, "read by a thread and watched in the background"
        self.readers += 1

    background = False

    def take_one(self) -> None:
        number = self.arrived.popleft()
        future = self.pending.pop(number, None)
        if future is not None:
            run_callbacks(future, future.settle(DONE, number))

    def watch_in_background(self, on: bool) -> None:
        self.watched = on

    def has_pending(self) -> bool:
        return bool(self.pending)

    def unattended(self) -> None:
        self.left_unattended = True

    def background_reader(self) -> None:
        """The serving pool: reads what is there whenever it is woken, until nothing is pending."""
        while self.pending:
            self._schedule.step(lambda: (self.watched and bool(self.arrived)) or not self.pending, "the poller")
            if self.watched and self.arrived and self.reading.enter_in_background():
                self.background = True
                self.enter()
                while self.arrived:
                    self.take_one()
                self.readers -= 1
                self.background = False
                self.reading.leave()


Scenario = Callable[[Schedule], tuple[Sequence[Callable[[], object]], Callable[[], None]]]


def idle_at_the_end(wire: Wire) -> None:
    assert not wire.reading._holder
    assert not wire.reading._queue
    assert wire.readers == 0


def waiters(replies: Sequence[int], reading: type[Reading] = Reading) -> Scenario:
    """As many threads as replies wait, each for its own; the replies come in that order."""

    def scenario(schedule: Schedule) -> Any:
        wire = Wire(schedule, reading)
        futures = [wire.call(number) for number in range(len(replies))]

        def wait(number: int) -> None:
            wire.reading.wait(futures[number], FOREVER)
            assert futures[number].value() == number

        def replying() -> None:
            for number in replies:
                wire.reply(number)

        bodies = [*(lambda number=number: wait(number) for number in range(len(replies))), replying]
        return bodies, lambda: idle_at_the_end(wire)

    return scenario


@DEPTHS
@pytest.mark.parametrize("replies", [(0, 1), (1, 0)])
def test_two_threads_wait_each_for_its_own_reply(
    replies: tuple[int, ...], files: tuple[str, ...], preemptions: int
) -> None:
    assert explore(waiters(replies), files, preemptions) > 100


def test_three_threads_wait_each_for_its_own_reply() -> None:
    assert explore(waiters((2, 0, 1)), (), 1) > 100


@DEPTHS
def test_two_threads_wait_for_one_future(files: tuple[str, ...], preemptions: int) -> None:
    def scenario(schedule: Schedule) -> Any:
        wire = Wire(schedule)
        future = wire.call(0)

        def wait() -> None:
            wire.reading.wait(future, FOREVER)
            assert future.value() == 0

        return [wait, wait, lambda: wire.reply(0)], lambda: idle_at_the_end(wire)

    assert explore(scenario, files, preemptions) > 100


@DEPTHS
def test_a_thread_whose_time_is_over_hands_on_the_role_it_was_just_given(
    files: tuple[str, ...], preemptions: int
) -> None:
    def scenario(schedule: Schedule) -> Any:
        wire = Wire(schedule)
        hasty, patient = wire.call(0), wire.call(1)

        def wait_patiently() -> None:
            wire.reading.wait(patient, FOREVER)
            assert patient.value() == 1

        def wait_hastily() -> None:
            wire.reading.wait(hasty, deadline=0.0)

        def replying() -> None:
            wire.reply(1)

        return [wait_patiently, wait_hastily, replying], lambda: idle_at_the_end(wire)

    assert explore(scenario, files, preemptions) > 100


@DEPTHS
def test_an_interrupted_thread_hands_the_role_on(files: tuple[str, ...], preemptions: int) -> None:
    class Interrupted(BaseException):
        pass

    def scenario(schedule: Schedule) -> Any:
        wire = Wire(schedule)
        mine, other = wire.call(0), wire.call(1)

        def interrupted_wait() -> None:
            original = wire.read_until

            def read_until(future: Future[Any], deadline: float) -> None:
                if future is mine:
                    wire.enter()
                    schedule.step()
                    wire.readers -= 1
                    raise Interrupted
                original(future, deadline)

            wire.read_until = read_until  # type: ignore[method-assign]
            try:
                wire.reading.wait(mine, FOREVER)
            except Interrupted:
                pass

        def wait() -> None:
            wire.reading.wait(other, FOREVER)
            assert other.value() == 1

        def replying() -> None:
            wire.reply(1)
            wire.reply(0)

        return [interrupted_wait, wait, replying], lambda: idle_at_the_end(wire)

    assert explore(scenario, files, preemptions) > 100


@DEPTHS
def test_a_callback_is_served_in_the_background_beside_a_waiting_thread(
    files: tuple[str, ...], preemptions: int
) -> None:
    def scenario(schedule: Schedule) -> Any:
        wire = Wire(schedule)
        waited, watched = wire.call(0), wire.call(1)
        called: list[int] = []

        def wait() -> None:
            wire.reading.wait(waited, FOREVER)
            assert waited.value() == 0

        def attend() -> None:
            watched.watch(lambda future: called.append(future.value()), waker=False)
            wire.reading.attend()

        def replying() -> None:
            wire.reply(1)
            wire.reply(0)

        def check() -> None:
            idle_at_the_end(wire)
            assert called == [1]

        return [wait, attend, wire.background_reader, replying], check

    assert explore(scenario, (), 1) > 100


@DEPTHS
def test_replies_that_nobody_reads_are_reported_when_the_reader_leaves(
    files: tuple[str, ...], preemptions: int
) -> None:
    def scenario(schedule: Schedule) -> Any:
        wire = Wire(schedule)
        waited, unread = wire.call(0), wire.call(1)

        def wait() -> None:
            wire.reading.wait(waited, FOREVER)

        def check() -> None:
            assert wire.left_unattended
            assert not unread.done()
            wire.reading.look_after()
            assert wire.watched

        return [wait, lambda: wire.reply(0)], check

    assert explore(scenario, files, preemptions) > 10


# Ctrl-C


def _line(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


class CtrlC(BaseException):
    """Stands for KeyboardInterrupt, at a line that the test chooses."""


def test_an_interrupt_at_any_line_leaves_the_role_to_others() -> None:
    """A thread is interrupted once, at each line of the machine in turn; whoever else waits must still be served."""
    interrupted_at = 0
    for line in range(1, 200):
        hit = []

        def scenario(schedule: Schedule, line: int = line, hit: list[int] = hit) -> Any:
            wire = Wire(schedule)
            mine, other = wire.call(0), wire.call(1)

            def interrupted() -> None:
                outer = sys.gettrace()
                count = 0

                def trace(frame: FrameType, event: str, argument: Any) -> Any:
                    nonlocal count
                    if not frame.f_code.co_filename.endswith("agent/reading.py"):
                        return None
                    # A tracer can raise where no signal can come: as a `with` ends but the lock is not yet released,
                    # and between a `finally` and its first call.
                    if event == "line" and not _line(frame).startswith(
                        ("with ", "while True", "try:", "interrupt", "tries")
                    ):
                        count += 1
                        if count == line:
                            hit.append(frame.f_lineno)
                            raise CtrlC
                    return trace

                sys.settrace(trace)
                try:
                    wire.reading.wait(mine, FOREVER)
                except CtrlC:
                    wire.readers = 0
                finally:
                    sys.settrace(outer)

            def wait() -> None:
                wire.reading.wait(other, FOREVER)
                assert other.value() == 1

            def replying() -> None:
                wire.reply(0)
                wire.reply(1)

            return [interrupted, wait, replying], lambda: None

        explore(scenario, (), preemptions=1)
        if not hit:
            break
        interrupted_at += 1
    assert interrupted_at > 20


# Planted bugs: each must be caught, or the exploration proves nothing.


class ForgetsTheQueue(Reading):
    """Leaves without handing the role on."""

    def leave(self) -> None:
        with self._lock:
            self._holder = 0


class PromotesWithoutWaking(Reading):
    """Hands the role on, but lets the new reader sleep."""

    def leave(self) -> None:
        with self._lock:
            if self._queue:
                seat = self._queue.popleft()
                self._holder = seat.thread
            else:
                self._holder = 0


class LooksBeforeItQueues(Reading):
    """Looks whether the role is free and queues in two steps."""

    def wait(self, future: Future[Any], deadline: float) -> None:
        if not self._holder:
            super().wait(future, deadline)
            return
        seat = reading_module.Seat(self._new_gate(), threading.get_ident())
        self._new_gate().open()  # a step: another thread may run here
        with self._lock:
            self._queue.append(seat)
        future.watch(seat.gate.open, waker=True, attended=True)
        while not future.done() and self._holder != seat.thread and seat.gate.sleep(deadline):
            pass
        if self._holder == seat.thread and not future.done():
            self._connection.read_until(future, deadline)
        self._end(threading.get_ident(), seat, future)


class KeepsTheRoleItWasJustGiven(Reading):
    """A thread that is handed the role just when its own reply comes does not hand it on."""

    def _end(self, me: int, seat: reading_module.Seat, future: Future[Any]) -> None:
        if self._holder != me or not future.done() or self._connection.has_pending():
            super()._end(me, seat, future)


@pytest.mark.parametrize(
    "bug", [ForgetsTheQueue, PromotesWithoutWaking, LooksBeforeItQueues, KeepsTheRoleItWasJustGiven]
)
def test_a_planted_bug_is_caught(bug: type[Reading]) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        explore(waiters((0, 1), bug), (), preemptions=2)
