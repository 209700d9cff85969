"""Replies that nobody waits for are read all the same, and not too eagerly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from farcall.agent import attendance
from farcall.agent.attendance import Attendance


class Scene:
    """A connection, a supervisor and a clock, made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.pending, self.lost, self.attended, self.looks = 100.0, True, False, 0, 0
        monkeypatch.setattr(attendance, "monotonic", lambda: self.now)
        self.connection: Any = SimpleNamespace(
            calls_started=0, has_pending=lambda: self.pending, is_lost=lambda: self.lost
        )
        self.supervisor: Any = SimpleNamespace(attend=self._attend)
        self.one = Attendance(self.connection, self.supervisor, self._look_after)

    def _attend(self, connection: object) -> None:
        assert connection is self.connection
        self.attended += 1

    def _look_after(self) -> None:
        self.looks += 1

    def tick(self, later: float) -> bool:
        self.now += later
        return self.one.tick(self.now)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_the_supervisor_is_told_once(scene: Scene) -> None:
    scene.one.unattended()
    scene.one.unattended()
    assert scene.attended == 1


def test_replies_that_nobody_reads_for_a_moment_are_looked_after_once(scene: Scene) -> None:
    scene.one.unattended()
    assert scene.tick(0.001)
    assert scene.looks == 0
    assert not scene.tick(0.006)
    assert scene.looks == 1
    assert not scene.tick(1)
    assert scene.looks == 1, "whoever reads now says so if it leaves something"
    scene.one.unattended()
    assert scene.attended == 2


def test_a_burst_of_calls_is_let_be_for_longer_but_not_for_ever(scene: Scene) -> None:
    scene.one.unattended()
    for _ in range(9):
        scene.connection.calls_started += 1
        assert scene.tick(0.01)
    scene.connection.calls_started += 1
    assert not scene.tick(0.02)
    assert scene.looks == 1


@pytest.mark.parametrize("why", ["settled", "lost"])
def test_nothing_is_looked_after_where_nothing_can_come(scene: Scene, why: str) -> None:
    scene.one.unattended()
    scene.pending, scene.lost = why != "settled", why == "lost"
    assert not scene.tick(1)
    assert scene.looks == 0
    assert scene.one.since == 0


def test_a_call_that_comes_just_as_the_last_one_is_settled_is_not_overlooked(scene: Scene) -> None:
    scene.one.unattended()

    def look() -> bool:
        scene.one.unattended()
        return False  # it came after the look

    scene.connection.has_pending = look
    assert not scene.tick(1)
    assert scene.attended == 2, "it found the connection unattended, and told the supervisor"
    assert scene.one.since == scene.now


def test_who_is_interrupted_as_it_tells_the_supervisor_tells_it_again(scene: Scene) -> None:
    def interrupted(connection: object) -> None:
        raise KeyboardInterrupt

    attend, scene.supervisor.attend = scene.supervisor.attend, interrupted
    with pytest.raises(KeyboardInterrupt):
        scene.one.unattended()
    scene.supervisor.attend = attend
    scene.one.unattended()
    assert scene.attended == 1
