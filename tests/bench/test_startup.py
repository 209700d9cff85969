from __future__ import annotations

import time
from typing import Any, ClassVar

import pytest

from farcall.bench import startup
from farcall.bench.startup import Joiner, Starter
from farcall.bench.system import Address, Caller, System


class Group:
    """Says what was done with it."""

    def __init__(self, said: list[str]) -> None:
        self._said = said

    def call_all(self) -> None:
        self._said.append("called all")

    def close(self) -> None:
        self._said.append("closed")


class Played(System):
    """A system that says what it was told to do."""

    label = "a play"
    name = "play"

    def __init__(self, spawns: bool) -> None:
        self.spawns = spawns
        self.said: list[str] = []

    def load(self) -> None:
        self.said.append("loaded")

    def connect(self, address: Address) -> Caller:
        raise NotImplementedError

    def spawn(self, workers: int, address: Address) -> Any:
        self.said.append(f"spawned {workers}")
        return Group(self.said)

    def member(self, rank: int, address: Address) -> Any:
        self.said.append(f"joined as {rank} of {address.ends}")
        return Group(self.said)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a second later."""
    seconds = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))


def test_a_system_that_starts_workers_by_itself_is_told_to_and_all_are_called() -> None:
    system = Played(spawns=True)
    starter = Starter(system)
    assert system.said == ["loaded"]  # not in the time that is measured
    assert 0 <= starter.start(3) < 10
    starter.close()
    assert system.said == ["loaded", "spawned 3", "called all", "closed"]


class PlayedEndpoints:
    """Processes that say what was done with them."""

    said: ClassVar[list[str]] = []

    def address(self, ends: int) -> Address:
        return Address(1, "/nowhere", ends)

    def start(self, what: str, **_: object) -> str:
        return what

    def wait_until_up(self, *_: object) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.said.append("ended")


class Stubborn:
    """A connection that cannot be closed."""

    def noop(self) -> None:
        pass

    def close(self) -> None:
        PlayedEndpoints.said.append("not closed")
        raise OSError("cannot be closed")


def test_all_is_ended_though_a_connection_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "Endpoints", PlayedEndpoints)
    monkeypatch.setattr(PlayedEndpoints, "said", [])
    monkeypatch.setattr(Played, "connect", lambda self, address: Stubborn())
    starter = Starter(Played(spawns=False))
    starter.start(2)
    with pytest.raises(OSError, match="cannot be closed"):
        starter.close()
    assert PlayedEndpoints.said == ["not closed", "not closed", "ended"]


def test_who_joins_says_when_it_began_had_joined_and_had_called_all(clock: None) -> None:
    system = Played(spawns=False)
    joiner = Joiner(system)
    assert joiner.join(rank=2, address=Address(1, "/nowhere", 4)) == (0.0, 1.0, 2.0)
    assert joiner.leave() == 1.0
    assert system.said == ["loaded", "joined as 2 of 4", "called all", "closed"]
