"""The hand-over of the reader's role where replies may come in a ring, over every interleaving.

The connection is a model of a ring and a socket, in which a look at the ring that follows AWAKE = 0, and the knock, are
there already (`test_shortcuts_reordered.py` shows those). What is shown here is that nobody sleeps at the socket, or
has it watched, while AWAKE is 1: a reply in the ring would wake nobody.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from typing import Any

import pytest
from reading_stage import AlwaysTurns, NoTurns, Wire, idle_at_the_end

from farcall.agent.reading import Reading, Seat
from farcall.agent.turns import Turns
from farcall.futures import Future
from farcall.sleeping import FOREVER, Gate
from interleaving import Deadlock, Schedule, explore
from interruption import At, Interrupt

MACHINE = ("agent/reading.py",)


class RingWire(Wire):
    """A connection on which replies come in the ring while it is awake, and through the socket else."""

    def __init__(self, schedule: Schedule, reading: type[Reading] = Reading) -> None:
        self.awake = False
        self.ring: deque[int] = deque()
        self.chore = False  # the serving pool was told to read what is in the ring
        super().__init__(schedule, reading)

    def reply(self, number: int) -> None:
        (self.ring if self.awake else self.arrived).append(number)
        self._schedule.step()

    def rest(self) -> bool:
        self.awake = False
        return bool(self.ring)

    def take_one(self) -> None:
        if self.ring:
            self.arrived.appendleft(self.ring.popleft())
        if self.arrived:
            super().take_one()

    def read_until(self, future: Future[Any], deadline: float, nested: bool = False) -> None:
        self.enter()
        try:
            while not future.done() and not self.reading.line:
                self.awake = True
                self._schedule.step()  # it looks; what comes now comes in the ring
                if not (self.ring or self.arrived) and not self.rest():
                    self._schedule.step(lambda: bool(self.arrived), "asleep at the socket")
                self.take_one()
        finally:
            self.readers = 0

    def watch_in_background(self, on: bool) -> None:
        super().watch_in_background(on)
        if on and self.rest():
            self.chore = True

    def background_reader(self) -> None:
        while self.pending:
            self._schedule.step(
                lambda: self.chore or (self.watched and bool(self.arrived)) or not self.pending, "the poller"
            )
            self.chore = False
            if self.reading.enter_in_background():
                self.enter_in_background()
                self.reading.leave()

    def enter_in_background(self) -> None:
        self.background = True
        self.enter()
        while self.ring or self.arrived:
            self.take_one()
        self.readers = 0
        self.background = False

    def supervisor(self) -> None:
        """Has replies read that nobody reads."""
        while self.pending:
            self._schedule.step(lambda: self.left_unattended or not self.pending, "the supervisor")
            self.left_unattended = False
            self.reading.look_after()


def beside_a_callback(schedule: Schedule, replies: tuple[int, ...], reading: type[Reading] = Reading) -> Any:
    """A thread waits, a callback hangs on another reply, and the pool reads what nobody else does."""
    wire = RingWire(schedule, reading)
    waited, watched = wire.call(0), wire.call(1)
    called: list[int] = []

    def wait() -> None:
        wire.reading.wait(waited, FOREVER)
        assert waited.done()

    def attend() -> None:
        watched.watch(lambda future: called.append(future.value()), waker=False)
        wire.reading.attend()

    def replying() -> None:
        for number in replies:
            wire.reply(number)

    def check() -> None:
        idle_at_the_end(wire)
        assert called == [1]

    return [wait, attend, wire.background_reader, replying], check


@pytest.mark.parametrize("turns", [AlwaysTurns, NoTurns])
@pytest.mark.parametrize("replies", [(0, 1), (1, 0)])
def test_replies_in_the_ring_are_read_by_whoever_is_left(
    replies: tuple[int, ...], turns: type[Turns], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RingWire, "turns", turns)
    assert explore(lambda schedule: beside_a_callback(schedule, replies), (), 1) > 100


@pytest.mark.parametrize("turns", [AlwaysTurns, NoTurns])
def test_a_reply_that_comes_when_the_reader_has_left_is_looked_after(
    turns: type[Turns], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it, and AWAKE is 1 still: it is found when the supervisor has the connection watched."""
    monkeypatch.setattr(RingWire, "turns", turns)

    def scenario(schedule: Schedule) -> Any:
        wire = RingWire(schedule)
        waited, unread = wire.call(0), wire.call(1)

        def replying() -> None:
            wire.reply(0)
            wire.reply(1)

        def check() -> None:
            idle_at_the_end(wire)
            assert unread.done()

        bodies = [lambda: wire.reading.wait(waited, FOREVER), replying, wire.background_reader, wire.supervisor]
        return bodies, check

    assert explore(scenario, (), 1) > 100


@pytest.mark.parametrize("urgent", [False, True])
def test_an_interrupt_at_any_point_leaves_what_is_in_the_ring_to_somebody(urgent: bool) -> None:
    for point in itertools.count(2):  # from where the role is taken; before, all is as it was
        wire = RingWire(Schedule((), ()))
        mine, other = wire.call(0), wire.call(1)
        wire.awake = True
        wire.reply(0)
        wire.reading._urgent = urgent
        with contextlib.suppress(Interrupt), At(MACHINE, (point,)) as at:
            wire.reading.wait(mine, FOREVER)
        wire.reply(1)  # in the ring, or through the socket
        if wire.left_unattended or not mine.done():  # `Outgoing.drive` sees to the latter
            wire.reading.look_after()
        assert wire.watched, at.places
        assert wire.chore or (wire.arrived and not wire.awake), f"nobody is woken, after an interrupt at {at.places}"
        assert not other.done()
        if not at.has_acted:
            assert point > 2
            return


def test_the_background_reader_does_not_watch_on_while_another_reads() -> None:
    """Or the ring would be awake when that one leaves, and be watched by nobody who looks into it."""
    wire = RingWire(Schedule((), ()))
    waited, _ = wire.call(0), wire.call(1)
    wire.reading.attend()
    assert wire.watched
    assert wire.reading.enter_in_background()
    seat = Seat(wire.reading, 7, waited)
    seat.gate = Gate()
    wire.reading._queue[7] = seat
    wire.reading.leave()
    assert wire.reading._holder == 7
    assert not wire.watched
    wire.awake = True  # it reads
    wire.reading.leave()
    assert wire.watched
    assert not wire.awake


def explore_both_orders() -> None:
    for replies in [(0, 1), (1, 0)]:
        explore(lambda schedule, replies=replies: beside_a_callback(schedule, replies), (), 1)


def test_planted_a_watch_that_goes_on_while_somebody_reads_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingWire, "turns", NoTurns)
    monkeypatch.setattr(Reading, "_unwatch", lambda self: None)
    with pytest.raises(AssertionError):
        explore_both_orders()


def test_planted_a_watch_beside_a_ring_that_is_awake_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingWire, "watch_in_background", Wire.watch_in_background)
    with pytest.raises(Deadlock):
        explore_both_orders()
