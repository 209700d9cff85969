"""The hand-over of the reader's role, over every interleaving: of lines with one preemption, of locks with two."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from farcall.agent import reading as reading_module
from farcall.agent.reading import Reading
from farcall.errors import UsageError
from farcall.futures import DONE, Future, run_callbacks
from farcall.sleeping import FOREVER, Gate
from interleaving import Schedule, explore
from interruption import At, Interrupt

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

    def read_until(self, future: Future[Any], deadline: float, nested: bool = False) -> None:
        outer = 0
        if nested:
            outer, self.readers = self.readers, 0  # this very thread, further out
        self.enter()
        while not future.done():
            self._schedule.step(
                (lambda: bool(self.arrived)) if deadline == FOREVER else None, "reading, with nothing to read"
            )
            if not self.arrived:
                break  # the deadline
            self.take_one()
        self.readers = outer

    dozes = False

    def doze(self, gate: Any) -> None:
        if self.dozes:
            gate.sleep(FOREVER)

    def check_wait(self) -> None:
        if self.sending:
            raise UsageError("sending")

    sending = False

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


@DEPTHS
def test_a_thread_that_dozes_in_the_queue_is_woken_by_its_reply_and_by_the_role(
    monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], preemptions: int
) -> None:
    monkeypatch.setattr(Wire, "dozes", True)
    assert explore(waiters((0, 1)), files, preemptions) > 100


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

            def read_until(future: Future[Any], deadline: float, nested: bool = False) -> None:
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


def test_the_role_goes_to_a_thread_whose_reply_has_not_come() -> None:
    """One whose reply has come is awake, or about to be: it would hand the role on, and nobody would read meanwhile."""
    wire = Wire(Schedule((), ()))
    settled, pending, last = [reading_module.Seat(Gate(), thread, wire.call(thread)) for thread in (1, 2, 3)]
    settled.future.settle(DONE, 1)
    reading = wire.reading
    reading._queue.extend((settled, pending, last))
    reading._holder = 9
    reading.leave()
    assert reading._holder == 2
    assert list(reading._queue) == [settled, last]
    assert [seat.gate.sleep(0.0) for seat in (settled, pending, last)] == [False, True, False]
    last.future.settle(DONE, 3)
    reading.leave()
    assert reading._holder == 0, "those who are left need it no more"


# Ctrl-C

MACHINE = ("agent/reading.py",)


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_an_interrupt_at_any_point_leaves_the_role_to_others(twice: bool) -> None:
    """A thread is interrupted at each point of the machine in turn; whoever else waits must still be served.

    Twice: in the midst of reading, and again at each point after it.
    """
    places: set[str] = set()
    for point in itertools.count():
        hit: list[str] = []

        def scenario(schedule: Schedule, point: int = point, hit: list[str] = hit) -> Any:
            wire = Wire(schedule)
            mine, other = wire.call(0), wire.call(1)
            read_until = wire.read_until

            def interrupted_reading(future: Future[Any], deadline: float, nested: bool = False) -> None:
                if twice and future is mine:
                    raise Interrupt
                read_until(future, deadline)

            wire.read_until = interrupted_reading  # type: ignore[method-assign]

            def interrupted() -> None:
                with contextlib.suppress(Interrupt), At(MACHINE, (point,)) as at:
                    wire.reading.wait(mine, FOREVER)
                hit.extend(at.places)

            def wait() -> None:
                wire.reading.wait(other, FOREVER)
                assert other.value() == 1

            def replying() -> None:
                wire.reply(0)
                wire.reply(1)

            return [interrupted, wait, replying], lambda: idle_at_the_end(wire)

        explore(scenario, (), preemptions=1)
        places.update(hit)
        if not hit:
            break
    assert len(places) > 10


@pytest.mark.parametrize("urgent", [False, True])
def test_an_interrupt_at_any_point_leaves_the_replies_to_somebody(urgent: bool) -> None:
    """Nobody else waits: then the connection is watched in the background, or the supervisor is told."""
    for point in itertools.count(2):  # from where the role is taken; before, all is as it was
        wire = Wire(Schedule((), ()))
        mine, other = wire.call(0), wire.call(1)
        if urgent:
            other.watch(lambda _: None, waker=False)
            wire.reading.attend()
        wire.arrived.append(0)
        with contextlib.suppress(Interrupt), At(MACHINE, (point,)) as at:
            wire.reading.wait(mine, FOREVER)
        idle_at_the_end(wire)
        assert wire.watched or (wire.left_unattended and not urgent), at.places
        wire.reading.look_after()
        assert wire.watched, at.places
        if not at.has_acted:
            assert point >= 3
            return


# Waiting in the midst of a wait, as signal handlers and finalizers do


@pytest.mark.parametrize("replies", [(2, 1, 0), (1, 0, 2), (1, 2, 0)], ids=["queues", "reads", "settled within"])
def test_a_wait_at_any_point_of_a_wait_is_served_or_refused(replies: tuple[int, ...]) -> None:
    """The nested wait takes the outer one's role and leaves it there; no other thread reads meanwhile."""
    assert waits_within_a_wait(replies, Reading) == {"served", "refused"}


class PassesAnInnerWait(Reading):
    """Gives the role to an outer wait whose thread still waits further in, and gives it up there."""

    def _next(self) -> reading_module.Seat | None:
        return next((seat for seat in self._queue if not seat.future.done()), None)


def test_the_role_does_not_pass_an_inner_wait() -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        waits_within_a_wait((1, 2, 0), PassesAnInnerWait)


def waits_within_a_wait(replies: tuple[int, ...], reading: type[Reading]) -> set[str]:
    """A thread that waits for 0 waits for 1 at each point of it, and another waits for 2; what became of the former."""
    waited: set[str] = set()
    for point in itertools.count():
        hit: list[str] = []

        def scenario(schedule: Schedule, point: int = point, hit: list[str] = hit) -> Any:
            wire = Wire(schedule, reading)
            outer, inner, other = wire.call(0), wire.call(1), wire.call(2)
            refused: list[str] = []

            def handle() -> None:
                tracer = sys.gettrace()
                sys.settrace(None)
                try:
                    wire.reading.wait(inner, FOREVER)
                    waited.add("served")
                    assert inner.value() == 1
                except UsageError as error:
                    refused.append(str(error))
                    waited.add("refused")
                finally:
                    sys.settrace(tracer)

            def interrupted() -> None:
                with At(MACHINE, (point,), handle) as at:
                    wire.reading.wait(outer, FOREVER)
                assert outer.value() == 0
                hit.extend(at.places)

            def wait() -> None:
                wire.reading.wait(other, FOREVER)
                assert other.value() == 2

            wire.arrived.extend(replies)
            return [interrupted, wait], lambda: idle_at_the_end(wire)

        explore(scenario, (), preemptions=1)
        if not hit:
            assert point > 10
            break
    return waited


def test_a_wait_in_the_midst_of_reading_uses_the_role_and_leaves_it() -> None:
    def scenario(schedule: Schedule) -> Any:
        wire = Wire(schedule)
        outer, inner, other = wire.call(0), wire.call(1), wire.call(2)
        read_until = wire.read_until

        def interrupted_reading(future: Future[Any], deadline: float, nested: bool = False) -> None:
            if future is outer:
                wire.enter()
                wire.reading.wait(inner, FOREVER)
                assert inner.value() == 1
                assert wire.reading._holder == threading.get_ident()
                wire.readers -= 1
            read_until(future, deadline, nested)

        wire.read_until = interrupted_reading  # type: ignore[method-assign]

        def wait(future: Future[Any]) -> None:
            wire.reading.wait(future, FOREVER)
            assert future.done()

        def replying() -> None:
            for number in (2, 1, 0):
                wire.reply(number)

        return [lambda: wait(outer), lambda: wait(other), replying], lambda: idle_at_the_end(wire)

    assert explore(scenario, (), 1) > 20


def test_a_thread_that_is_sending_cannot_wait_behind_another_reader() -> None:
    wire = Wire(Schedule((), ()))
    wire.reading._holder = -1  # somebody else reads
    wire.sending = True
    with pytest.raises(UsageError, match="sending"):
        wire.reading.wait(wire.call(0), FOREVER)
    assert not wire.reading._queue


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
        seat = reading_module.Seat(self._new_gate(), threading.get_ident(), future)
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
