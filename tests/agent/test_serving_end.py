"""How threads of the serving pool retire, and how the pool closes."""

from __future__ import annotations

import time

import pytest
from serving_stage import FakeJob, Origin, Stage, come_in, depose, run, run_by_a_follower

from eventually import PATIENCE, eventually
from farcall.agent import serving as serving_module
from farcall.agent.follower import EXIT
from farcall.futures import Future


def test_idle_threads_retire(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "_IDLE_LIFE", 0.001)
    pool = stage.serving()
    jobs = [stage.blocking(str(number)) for number in range(4)]
    come_in(pool, *jobs)
    for job in jobs:
        depose(pool, job)
    assert len({job.thread for job in jobs}) == 4
    for job in jobs:
        job.end()
    eventually(lambda: len(pool._threads) == 1)
    assert pool._idle == []
    run(pool, FakeJob("after"))


def test_a_thread_that_has_just_been_told_something_does_not_retire(stage: Stage) -> None:
    pool = stage.serving()
    first = stage.blocking("first")
    run_by_a_follower(pool, first)
    first.end()
    eventually(lambda: pool._idle)
    (follower,) = pool._idle
    assert pool._may_retire(follower)
    assert not pool._may_retire(follower), "somebody has taken it from the idle ones"
    follower.tell(EXIT)


def test_an_idle_thread_is_used_again(stage: Stage) -> None:
    pool = stage.serving()
    for number in range(3):
        job = stage.blocking(str(number))
        run_by_a_follower(pool, job)
        job.end()
        eventually(lambda: pool._idle)
    assert len(pool._threads) == 2


def test_close_ends_all_threads(stage: Stage) -> None:
    pool = stage.serving()
    jobs = [stage.blocking(str(number)) for number in range(3)]
    come_in(pool, *jobs)
    for job in jobs:
        depose(pool, job)
    for job in jobs:
        job.end()
    eventually(lambda: len(pool._idle) == 3)
    assert pool.close(time.monotonic() + PATIENCE) == []
    assert not pool._threads


def test_close_does_not_wait_beyond_its_deadline_and_names_who_is_left(stage: Stage) -> None:
    pool = stage.serving()
    led, followed = stage.blocking("led"), stage.blocking("followed")
    run_by_a_follower(pool, followed)
    come_in(pool, led)
    assert led.begun.wait(PATIENCE)
    assert sorted(pool.close(time.monotonic())) == sorted([led.thread, followed.thread])
    pool.depose_stuck_leader()
    pool.depose_stuck_leader()
    led.release()
    followed.release()
    assert pool.close(time.monotonic() + PATIENCE) == []


def test_a_job_may_close_the_pool_it_runs_in(stage: Stage) -> None:
    pool = stage.serving()
    left: list[str] = []
    run(pool, FakeJob("closing", lambda: left.extend(pool.close(time.monotonic() + PATIENCE))))
    assert left == []


def test_answers_that_wait_are_sent_when_the_pool_closes(stage: Stage) -> None:
    pool, origin = stage.serving(), Origin()
    blocked = stage.blocking("blocked")
    come_in(pool, FakeJob("quick", origin=origin), blocked)
    assert blocked.begun.wait(PATIENCE)
    pool.close(time.monotonic())
    blocked.release()
    assert pool.close(time.monotonic() + PATIENCE) == []
    assert origin.events == [("later", "quick"), "flush"]


def test_a_job_that_sleeps_in_a_wait_while_the_pool_closes(stage: Stage) -> None:
    pool = stage.serving(limit=1)
    future: Future[int] = Future()
    job = FakeJob("waiting", lambda: future.wait())
    come_in(pool, job)
    eventually(lambda: future._watchers)
    left = pool.close(time.monotonic())
    assert job.thread in left
    future.set_result(1)
    assert pool.close(time.monotonic() + PATIENCE) == []


def test_what_must_run_is_run_though_the_pool_closes_and_nothing_else_is(stage: Stage) -> None:
    pool = stage.serving()
    blocked = stage.blocking("blocked")
    come_in(pool, blocked)
    assert blocked.begun.wait(PATIENCE)
    pool.submit(callback := FakeJob("callback", must_run=True))
    pool.submit(call := FakeJob("call"))
    pool.close(time.monotonic())
    blocked.release()
    assert pool.close(time.monotonic() + PATIENCE) == []
    assert callback.ended.is_set()
    pool.submit(late := FakeJob("late", must_run=True))
    pool.submit(late_call := FakeJob("late call"))
    assert late.ended.is_set()
    assert not call.begun.is_set()
    assert not late_call.begun.is_set()
