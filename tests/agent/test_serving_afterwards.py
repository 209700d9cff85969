"""What a function leaves to be done when its reply has gone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from serving_stage import FakeJob, Origin, Stage, come_in, depose, run, run_by_a_follower

from eventually import PATIENCE, eventually


def test_it_is_done_when_the_reply_has_gone(stage: Stage) -> None:
    pool, origin = stage.serving(), Origin()
    run(pool, FakeJob("call", lambda: pool.afterwards(lambda: origin.events.append("done")), origin=origin))
    eventually(lambda: origin.events == [("later", "call"), "flush", "done"])


def test_it_is_done_before_anything_else_is_run(stage: Stage) -> None:
    pool, origin = stage.serving(), Origin()
    first = FakeJob("first", lambda: pool.afterwards(lambda: origin.events.append("done")), origin=origin)
    run(pool, first, FakeJob("second", lambda: origin.events.append("runs"), origin=origin))
    eventually(lambda: origin.events == [("later", "first"), "flush", "done", "runs", ("later", "second"), "flush"])


def test_several_are_all_done(stage: Stage) -> None:
    pool, done = stage.serving(), [0]
    job = FakeJob("call", lambda: [pool.afterwards(partial(done.append, each)) for each in (1, 2, 3)])
    run(pool, job)
    eventually(lambda: sorted(done) == [0, 1, 2, 3])


def test_a_function_that_does_not_lead_does_it_at_once(stage: Stage) -> None:
    pool, done = stage.serving(), []
    job = stage.blocking("slow")
    wait = job._function
    job._function = lambda: [wait(), pool.afterwards(lambda: done.append(len(pool.ready))), done.append("returns")]
    run_by_a_follower(pool, job)
    job.end()
    assert done == [0, "returns"]


def test_outside_of_the_pool_it_is_done_at_once(stage: Stage) -> None:
    done: list[int] = []
    stage.serving().afterwards(lambda: done.append(1))
    assert done == [1]


def test_the_next_leader_does_what_a_slow_function_left(stage: Stage) -> None:
    pool, done = stage.serving(), []
    job = stage.blocking("slow")
    wait = job._function
    job._function = lambda: [pool.afterwards(lambda: done.append(job.ended.is_set())), wait()]
    come_in(pool, job)
    depose(pool, job)
    eventually(lambda: done == [False])
    job.end()


def test_one_that_fails_is_logged_and_harms_nothing(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    pool, origin = stage.serving(), Origin()

    def fail() -> Any:
        raise ValueError("no luck")

    run(pool, FakeJob("call", lambda: pool.afterwards(fail), origin=origin))
    eventually(lambda: "no luck" in caplog.text)
    after = FakeJob("after", origin=origin)
    come_in(pool, after)
    assert after.ended.wait(PATIENCE)
    eventually(lambda: origin.events[-2:] == [("later", "after"), "flush"])
