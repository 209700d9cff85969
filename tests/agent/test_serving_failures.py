"""The serving pool when something fails: jobs, answers, and the system that has no more threads."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest
from serving_stage import FakeJob, Origin, Stage, come_in, depose, run

from eventually import PATIENCE, eventually
from farcall.futures import Future


class Failing(FakeJob):
    """Raises what no job should, and says so in its reply."""

    def __init__(self, error: BaseException, **more: Any) -> None:
        def fail() -> None:
            raise error

        super().__init__("failing", fail, **more)

    def failed(self, error: BaseException) -> bytes:
        return repr(error).encode()


@pytest.mark.parametrize("error", [MemoryError("all gone"), SystemExit(3)], ids=repr)
def test_what_escapes_from_a_job_is_told_and_the_leader_leads_on(
    stage: Stage, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    pool, origin = stage.serving(limit=1), Origin()
    with caplog.at_level(logging.ERROR, "farcall"):
        run(pool, *[FakeJob("before")])
        come_in(pool, Failing(error, origin=origin), after := FakeJob("after"))
        assert after.ended.wait(PATIENCE)
    eventually(lambda: origin.events == [("later", repr(error)), "flush"])
    assert "worker 'w': a job of kind 'failing' failed" in caplog.text
    assert len(pool._threads) == 1
    eventually(lambda: not pool.is_busy())


def test_what_escapes_from_a_job_of_a_follower_is_told_and_its_place_is_free_again(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    pool, origin = stage.serving(limit=1), Origin()
    with caplog.at_level(logging.ERROR, "farcall"):
        for _ in range(3):
            pool._slow.note("known to be slow")  # each time: it proves quick
            come_in(pool, Failing(MemoryError(), kind="known to be slow", origin=origin))
            eventually(lambda: not pool.is_busy())
    eventually(lambda: origin.events == [("now", "MemoryError()")] * 3)
    run(pool, FakeJob("after"))


@pytest.mark.parametrize("slow", [False, True], ids=["leader", "follower"])
def test_an_answer_that_cannot_be_sent_ends_no_thread(
    stage: Stage, caplog: pytest.LogCaptureFixture, slow: bool
) -> None:
    class Broken(Origin):
        def answer(self, reply: Any) -> None:
            raise MemoryError

    pool = stage.serving(limit=1)
    with caplog.at_level(logging.ERROR, "farcall"):
        for _ in range(3):
            if slow:
                pool._slow.note("job")
            run(pool, FakeJob("job", origin=Broken(), pieces=["large", "one"]))
            eventually(lambda: not pool.is_busy())
    assert "a thread that serves failed, and goes on" in caplog.text
    run(pool, after := FakeJob("after", origin=(origin := Origin())))
    eventually(lambda: origin.events == [("later", "after"), "flush"])
    assert after.thread in {thread.name for thread in pool._threads}


def test_what_escapes_from_the_last_jobs_of_a_pool_that_closes(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    pool = stage.serving()
    assert pool.close(time.monotonic() + PATIENCE) == []
    with caplog.at_level(logging.ERROR, "farcall"):
        pool.submit(Failing(MemoryError(), must_run=True))
        pool.submit(after := FakeJob("after", must_run=True))
    assert after.ended.is_set()


# No more threads


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set the system has no thread to give."""
    lacking = threading.Event()
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if lacking.is_set():
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    return lacking


def test_a_stuck_leader_is_deposed_as_soon_as_there_is_a_thread_for_it(
    stage: Stage, no_threads: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    pool = stage.serving()
    slow, quick = stage.blocking("slow"), FakeJob("quick")
    come_in(pool, slow, quick)
    no_threads.set()
    for _ in range(3):
        depose(pool, slow)
    assert not quick.begun.is_set()
    assert [record.levelname for record in caplog.records] == ["WARNING"], "said once, not at each tick"
    no_threads.clear()
    depose(pool, slow)
    assert quick.ended.wait(PATIENCE)
    slow.end()
    eventually(lambda: not pool.is_busy())


def test_a_stuck_leader_that_was_not_deposed_for_want_of_threads_leads_on(
    stage: Stage, no_threads: threading.Event
) -> None:
    pool = stage.serving()
    slow = stage.blocking("slow")
    come_in(pool, slow)
    no_threads.set()
    depose(pool, slow)
    slow.end()
    run(pool, after := FakeJob("after"))
    assert after.thread == slow.thread


def test_the_leader_runs_a_slow_job_itself_if_there_is_no_thread_to_lead(
    stage: Stage, no_threads: threading.Event
) -> None:
    pool = stage.serving()
    pool._slow.note("slow")
    no_threads.set()
    run(pool, slow := FakeJob("slow"), after := FakeJob("after"))
    assert slow.thread == after.thread
    eventually(lambda: not pool.is_busy())


@pytest.mark.parametrize("deposed", [False, True], ids=["leads on", "deposed later"])
def test_a_leader_that_sleeps_while_there_is_no_thread_to_lead(
    stage: Stage, no_threads: threading.Event, deposed: bool
) -> None:
    pool = stage.serving(limit=1)
    future: Future[int] = Future()
    no_threads.set()
    sleeper, other = FakeJob("sleeper", future.wait), FakeJob("other")
    come_in(pool, sleeper, other)
    eventually(lambda: pool._sleeping)
    assert not other.begun.is_set()
    if deposed:
        no_threads.clear()
        depose(pool, sleeper)
        assert other.ended.wait(PATIENCE), "the sleeper does not count for the limit"
    future.set_result(1)
    assert sleeper.ended.wait(PATIENCE)
    assert other.ended.wait(PATIENCE)
    eventually(lambda: not pool.is_busy())
    assert (pool._running, pool._sleeping) == (0, 0)


def test_a_follower_that_sleeps_while_there_is_no_thread_to_take_its_place(
    stage: Stage, no_threads: threading.Event
) -> None:
    pool = stage.serving(limit=1)
    go, future = threading.Event(), Future[int]()
    follower = FakeJob("follower", lambda: (go.wait(PATIENCE), future.wait()))
    come_in(pool, follower)
    depose(pool, follower)
    eventually(lambda: pool.asleep)
    other = FakeJob("other")
    pool.submit(other)
    no_threads.set()
    go.set()
    assert other.ended.wait(PATIENCE), "the leader runs it"
    future.set_result(1)
    assert follower.ended.wait(PATIENCE)
    eventually(lambda: not pool.is_busy())
    assert pool._running == 0
