"""The leader's function waits for a moment with the lead kept; and waiting does not make a function slow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from serving_stage import FakeJob, Stage, come_in, run, run_by_a_follower

from eventually import PATIENCE, eventually
from farcall.agent import serving as serving_module
from farcall.agent.serving import Serving
from farcall.agent.spinning import Dozing
from farcall.sleeping import asleep


class Doze(FakeJob):
    """Dozes until it is woken."""

    def __init__(self, pool: Serving) -> None:
        self._woken = threading.Event()
        self.dozing = threading.Event()
        self.found: Any = None
        self._pool = pool
        super().__init__("doze", self._doze)

    def _doze(self) -> None:
        self.found = self._pool.doze(Dozing(), self._poll)

    def _poll(self, milliseconds: int) -> list[str]:
        self.dozing.set()
        assert milliseconds == 1
        assert self._woken.wait(PATIENCE)
        return ["it"]

    def wake(self) -> None:
        self._woken.set()


def test_the_leaders_function_dozes_and_finds_what_came(stage: Stage) -> None:
    pool = stage.serving()
    job = Doze(pool)
    job.wake()
    run(pool, job)
    assert job.found == ["it"]
    assert len(pool._threads) == 1


def test_only_the_leader_has_a_lead_to_keep(stage: Stage) -> None:
    pool = stage.serving()
    nobody = threading.Event()  # polled by nobody: it would have no `wait(1)` to come back from

    def poll(milliseconds: int) -> list[str]:
        nobody.set()
        return ["it"]

    assert pool.doze(Dozing(), poll) is None, "a thread that is not of this pool"
    found: list[Any] = []
    follower = stage.blocking("follower")
    follower._function = lambda: (follower._release.wait(PATIENCE), found.append(pool.doze(Dozing(), poll)))
    run_by_a_follower(pool, follower)
    follower.end()
    assert found == [None]
    assert not nobody.is_set()


@pytest.mark.parametrize("then", ["ends", "sleeps"])
def test_while_the_leader_dozes_nobody_else_takes_what_is_ready(stage: Stage, then: str) -> None:
    pool = stage.serving()
    sleeps, release = threading.Event(), threading.Event()
    follower = stage.blocking("follower")

    def wait_and_perhaps_sleep() -> None:
        follower._release.wait(PATIENCE)
        if then == "sleeps":
            with asleep():
                sleeps.set()
                assert release.wait(PATIENCE)

    follower._function = wait_and_perhaps_sleep
    run_by_a_follower(pool, follower)
    dozes, ready = Doze(pool), FakeJob("ready")
    come_in(pool, dozes, ready)
    assert dozes.dozing.wait(PATIENCE)
    follower.release()
    if then == "sleeps":
        assert sleeps.wait(PATIENCE)
    else:
        eventually(lambda: len(pool._idle) == 1)
    assert not ready.begun.is_set()
    dozes.wake()
    assert ready.ended.wait(PATIENCE)
    assert ready.thread == dozes.thread, "the leader was back in a moment"
    release.set()
    assert follower.ended.wait(PATIENCE)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, *_: object) -> None:
        self.now += 10


def sleep_in_a_wait(pool: Serving, clock: Clock) -> None:
    with asleep():
        clock.pass_by()


def doze(pool: Serving, clock: Clock) -> None:
    pool.doze(Dozing(), clock.pass_by)


def work(pool: Serving, clock: Clock) -> None:
    clock.pass_by()


def doze_and_work(pool: Serving, clock: Clock) -> None:
    doze(pool, clock)
    work(pool, clock)


def sleep_and_work(pool: Serving, clock: Clock) -> None:
    sleep_in_a_wait(pool, clock)
    work(pool, clock)


@pytest.mark.parametrize(
    ("function", "slow"),
    [(sleep_in_a_wait, False), (doze, False), (work, True), (doze_and_work, True), (sleep_and_work, True)],
)
def test_a_function_is_slow_by_what_it_does_and_not_by_what_it_waits_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, function: Callable[[Serving, Clock], None], slow: bool
) -> None:
    clock = Clock()
    monkeypatch.setattr(serving_module, "SLOW", 1.0)
    monkeypatch.setattr(serving_module, "perf_counter", clock)
    pool = stage.serving()
    run(pool, FakeJob("first", lambda: function(pool, clock), kind="kind"))
    eventually(lambda: pool.asleep and not pool.is_busy())
    assert ("kind" in pool._slow) is slow


def test_a_follower_that_only_waited_is_not_slow_any_more(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(serving_module, "SLOW", 1.0)
    monkeypatch.setattr(serving_module, "perf_counter", clock)
    pool = stage.serving()
    run(pool, FakeJob("first", clock.pass_by, kind="kind"))
    eventually(lambda: pool.asleep)
    assert "kind" in pool._slow
    run(pool, FakeJob("second", lambda: sleep_in_a_wait(pool, clock), kind="kind"))
    eventually(lambda: "kind" not in pool._slow)
