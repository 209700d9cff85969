"""The first deadline of a connection: never later than the true one."""

from __future__ import annotations

from typing import Any, NamedTuple

from farcall.agent.deadlines import Deadlines
from farcall.sleeping import FOREVER


class Clock:
    """The supervisor, as far as it is told."""

    def __init__(self) -> None:
        self.told: list[float] = []

    def deadline_set(self, deadline: float) -> None:
        self.told.append(deadline)


class Call(NamedTuple):
    deadline: float


def test_the_first_is_kept_and_the_supervisor_told() -> None:
    clock: Any = Clock()
    deadlines = Deadlines(clock)
    assert deadlines.first == FOREVER
    deadlines.note(5.0)
    deadlines.note(7.0)
    assert deadlines.first == 5.0
    assert clock.told == [5.0, 7.0]


def test_those_whose_time_is_over_end_and_the_first_of_the_others_is_found() -> None:
    clock: Any = Clock()
    deadlines = Deadlines(clock)
    calls: Any = [Call(9.0), Call(1.0), Call(4.0), Call(3.0), Call(FOREVER)]
    ended: list[Any] = []
    deadlines.note(1.0)
    deadlines.expire(calls, 3.0, ended.append)
    assert ended == [calls[1], calls[3]]
    assert deadlines.first == 4.0


def test_nothing_is_left_where_all_have_ended() -> None:
    clock: Any = Clock()
    deadlines = Deadlines(clock)
    deadlines.note(1.0)
    deadlines.expire([], 3.0, print)
    assert deadlines.first == FOREVER
