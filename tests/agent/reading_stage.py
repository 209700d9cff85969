"""A connection as the reader's role sees it, and threads that wait for its replies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from farcall.agent.reading import Reading
from farcall.agent.turns import Bells, Turn, Turns
from farcall.errors import UsageError
from farcall.futures import DONE, Future, run_callbacks
from farcall.sleeping import FOREVER
from interleaving import Schedule


class EndlessTurn(Turn):
    """Lasts until its thread has looked in vain: what happens must not depend on the clock."""

    __slots__ = ("outcomes",)

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[bool] = []
        self.in_doubt = True  # so that it is told of each

    def begin(self, thread: int, behind: int, now: float) -> None:
        self._thread, self.until = thread, FOREVER

    def paid(self) -> None:
        self.outcomes.append(True)

    def missed(self) -> None:
        self.outcomes.append(False)


class AlwaysTurns(Turns):
    """Taken whether that pays or not: what happens must not depend on the clock."""

    __slots__ = ()

    def __init__(self, bells: Bells) -> None:
        super().__init__(bells)
        self.turn = EndlessTurn()

    def begin(self, thread: int, since: float, behind: int) -> None:
        """Nothing is learned."""
        self.turn.begin(thread, behind, since)

    def broken(self) -> None:
        """Nothing is learned."""


class NoTurns(AlwaysTurns):
    """Everybody sleeps until woken."""

    __slots__ = ()

    def bell(self) -> None:
        return None


class Wire:
    """A connection as the role sees it: replies arrive in an order that the test chooses, at once."""

    def __init__(self, schedule: Schedule, reading: type[Reading] = Reading) -> None:
        self._schedule = schedule
        self.pending: dict[int, Future[int]] = {}
        self.arrived: deque[int] = deque()
        self.readers = 0
        self.watched = False
        self.left_unattended = False
        self.reading = reading(self, schedule.lock, schedule.gate, self.turns(Bells(schedule.bell)))

    turns: type[Turns] = AlwaysTurns

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
        while not future.done() and (nested or not self.reading.line):
            self._schedule.step(
                (lambda: bool(self.arrived)) if deadline == FOREVER else None, "reading, with nothing to read"
            )
            if not self.arrived:
                break  # the deadline
            self.take_one()
        self.readers = outer

    def glance(self, future: Future[Any]) -> None:
        self.enter()
        self._schedule.step()
        while self.arrived and not future.done():
            self.take_one()
            self._schedule.step()
        self.readers -= 1

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
    assert not wire.reading.line
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
