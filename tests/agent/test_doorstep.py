"""Connections that have not proved themselves: how many may be there, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from farcall.agent.doorstep import Doorstep
from farcall.security import Limits


class Knocking:
    """Somebody who has connected."""

    def __init__(self) -> None:
        self.dismissed: list[str] = []
        self.is_known = False

    def has_greeted(self) -> bool:
        return self.is_known

    def dismiss(self, kind: str, why: str) -> None:
        self.dismissed.append(kind)


@pytest.fixture
def strangers() -> Any:
    return Doorstep(Limits(most=2, patience=10.0))


def test_each_has_its_time(strangers: Any) -> None:
    first, second = Knocking(), Knocking()
    strangers.came(first, 0.0)
    strangers.came(second, 5.0)
    strangers.expire(9.9)
    assert first.dismissed == second.dismissed == []
    strangers.expire(10.0)
    assert (first.dismissed, second.dismissed) == (["silent"], [])
    strangers.expire(100.0)
    assert (first.dismissed, second.dismissed) == (["silent"], ["silent"]), "each once"
    assert len(strangers) == 0


def test_the_oldest_makes_way(strangers: Any) -> None:
    knocking = [Knocking() for _ in range(4)]
    for one in knocking:
        strangers.came(one, 0.0)
    assert [one.dismissed for one in knocking] == [["too many"], ["too many"], [], []]


def test_who_is_known_stays_and_takes_no_place(strangers: Any) -> None:
    known, silent, new = Knocking(), Knocking(), Knocking()
    strangers.came(silent, 0.0)
    strangers.came(known, 0.0)
    known.is_known = True
    strangers.came(new, 0.0)
    assert silent.dismissed == []
    strangers.expire(99.0)
    assert known.dismissed == []
    assert (silent.dismissed, new.dismissed) == (["silent"], ["silent"])


def test_who_is_gone_is_forgotten(strangers: Any) -> None:
    one = Knocking()
    strangers.came(one, 0.0)
    strangers.gone(one)
    strangers.gone(one)
    strangers.expire(99.0)
    assert one.dismissed == []
