"""The reader's role when a wait is interrupted at any point of it: by Ctrl-C, or by a wait within the wait."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from typing import Any

import pytest
from reading_stage import AlwaysTurns, NoTurns, Wire, idle_at_the_end

from farcall.agent import reading as reading_module
from farcall.agent.reading import Reading
from farcall.agent.turns import Turns
from farcall.errors import UsageError
from farcall.futures import Future
from farcall.sleeping import FOREVER
from interleaving import Schedule, explore
from interruption import At, Interrupt

MACHINE = ("agent/reading.py",)

# Ctrl-C


@pytest.mark.parametrize("turns", [AlwaysTurns, NoTurns])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_an_interrupt_at_any_point_leaves_the_role_to_others(
    twice: bool, turns: type[Turns], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread is interrupted at each point of the machine in turn; whoever else waits must still be served.

    Twice: in the midst of reading, and again at each point after it.
    """
    monkeypatch.setattr(Wire, "turns", turns)
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


@pytest.mark.parametrize("turns", [AlwaysTurns, NoTurns])
@pytest.mark.parametrize("replies", [(2, 1, 0), (1, 0, 2), (1, 2, 0)], ids=["queues", "reads", "settled within"])
def test_a_wait_at_any_point_of_a_wait_is_served_or_refused(
    replies: tuple[int, ...], turns: type[Turns], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nested wait takes the outer one's role and leaves it there; no other thread reads meanwhile."""
    monkeypatch.setattr(Wire, "turns", turns)
    assert waits_within_a_wait(replies, Reading) == {"served", "refused"}


class ForgetsTheOuterWait(Reading):
    """Takes the thread from the queue when its inner wait ends."""

    def _stand_up(self, seat: reading_module.Seat) -> None:
        self._queue.pop(seat.thread, None)


@pytest.mark.parametrize("turns", [AlwaysTurns, NoTurns])
def test_an_outer_wait_queues_again_when_the_inner_one_ends(
    turns: type[Turns], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wire, "turns", turns)
    with pytest.raises((AssertionError, RuntimeError)):
        waits_within_a_wait((1, 2, 0), ForgetsTheOuterWait)


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
