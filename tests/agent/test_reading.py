"""The hand-over of the reader's role, over every interleaving: of lines with one preemption, of locks with two."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from reading_stage import Wire, idle_at_the_end, waiters

from farcall.agent import reading as reading_module
from farcall.agent.reading import Reading
from farcall.futures import DONE, Future
from farcall.sleeping import FOREVER, Gate
from interleaving import Schedule, explore

LINES = ("agent/reading.py", "farcall/futures.py")
DEPTHS = pytest.mark.parametrize(("files", "preemptions"), [(LINES, 1), ((), 2)], ids=["lines", "locks"])


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
    reading = wire.reading
    settled, pending, last = [reading_module.Seat(reading, thread, wire.call(thread)) for thread in (1, 2, 3)]
    gates = [Gate(), Gate(), Gate()]
    settled.gate, pending.gate, last.gate = gates
    settled.future.settle(DONE, 1)
    reading._queue.update({1: settled, 2: pending, 3: last})
    reading._holder = 9
    reading.leave()
    assert reading._holder == 2
    assert list(reading._queue.values()) == [settled, last]
    assert [gate.sleep(0.0) for gate in gates] == [False, True, False]
    last.future.settle(DONE, 3)
    reading.leave()
    assert reading._holder == 0, "those who are left need it no more"


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
                self._holder, _ = self._queue.popitem()
            else:
                self._holder = 0


class LooksBeforeItQueues(Reading):
    """Looks whether the role is free and queues in two steps."""

    def wait(self, future: Future[Any], deadline: float) -> None:
        if not self._holder:
            super().wait(future, deadline)
            return
        seat = reading_module.Seat(self, threading.get_ident(), future)
        seat.gate = self._new_gate()
        self._new_gate().open()  # a step: another thread may run here
        with self._lock:
            self._queue[seat.thread] = seat
        future.watch(seat.settled, waker=True, attended=True)
        while not future.done() and self._pass_time(seat, deadline):
            pass
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
