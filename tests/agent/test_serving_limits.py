"""How many jobs the serving pool runs at once: waits free their places, and who is busy."""

from __future__ import annotations

import os
import threading

import pytest
from serving_stage import FakeJob, Stage, come_in, depose, run, run_by_a_follower

from eventually import PATIENCE, eventually
from farcall.agent.poller import READABLE
from farcall.futures import Future
from farcall.sleeping import asleep, on_serving_thread


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_no_more_jobs_run_at_once_than_allowed(stage: Stage, limit: int) -> None:
    pool = stage.serving(limit)
    jobs = [stage.blocking(str(number)) for number in range(limit + 3)]
    come_in(pool, *jobs)
    for job in jobs[:limit]:
        depose(pool, job)
    eventually(lambda: pool.asleep)
    assert [job.begun.is_set() for job in jobs] == [True] * limit + [False] * 3
    for number in range(3):
        jobs[number].end()
        assert jobs[limit + number].begun.wait(PATIENCE), "the next takes its place"
        assert [job.begun.is_set() for job in jobs[limit:]] == [True] * (number + 1) + [False] * (2 - number)
    for job in jobs[3:]:
        job.end()
    eventually(lambda: not pool.is_busy())


def test_the_leader_reads_on_while_all_places_are_taken(stage: Stage) -> None:
    pool = stage.serving(limit=1)
    blocked = stage.blocking("blocked")
    run_by_a_follower(pool, blocked)
    rung = threading.Event()
    event = os.eventfd(1)
    pool._poller.add(event, lambda _: (os.eventfd_read(event), rung.set()), READABLE)
    assert rung.wait(PATIENCE)
    pool._poller.remove(event)
    os.close(event)


def test_a_job_that_waits_for_a_future_frees_its_place(stage: Stage) -> None:
    pool = stage.serving(limit=1)
    future: Future[str] = Future()
    got: list[str] = []
    waiting = FakeJob("waiting", lambda: got.append(future.wait()))
    settling = FakeJob("settling", lambda: future.set_result("settled by the next"))
    run(pool, waiting, settling)
    assert got == ["settled by the next"]
    eventually(lambda: not pool.is_busy())


def test_a_follower_that_comes_to_wait_has_its_place_taken_at_once(stage: Stage) -> None:
    pool = stage.serving(limit=1)
    future: Future[str] = Future()
    go_on = threading.Event()

    def first_busy_then_waiting() -> None:
        go_on.wait(PATIENCE)
        future.wait()

    waiting = FakeJob("waiting", first_busy_then_waiting)
    settling = FakeJob("settling", lambda: future.set_result("x"))
    come_in(pool, waiting)
    depose(pool, waiting)
    eventually(lambda: pool.asleep)
    pool.submit(settling)
    eventually(lambda: pool.asleep)
    assert not settling.begun.is_set()
    go_on.set()
    assert waiting.ended.wait(PATIENCE)
    eventually(lambda: not pool.is_busy())


def test_one_that_wakes_beyond_the_limit_gives_its_place_to_nobody(stage: Stage) -> None:
    pool = stage.serving(limit=1)
    future: Future[int] = Future()
    woken = FakeJob("woken", lambda: future.wait())
    running, following = stage.blocking("running"), FakeJob("following")
    come_in(pool, woken, running, following)
    depose(pool, running)  # which runs in the place of the one that sleeps
    eventually(lambda: pool.asleep)
    future.set_result(1)
    eventually(lambda: pool._idle)
    assert woken.ended.is_set()
    assert not following.begun.is_set()
    running.end()
    assert following.ended.wait(PATIENCE)


@pytest.mark.parametrize("limit", [1, 2])
def test_waits_nested_to_any_depth_end(stage: Stage, limit: int) -> None:
    pool = stage.serving(limit)
    depth = 40
    futures: list[Future[int]] = [Future() for _ in range(depth + 1)]

    def nested(level: int) -> None:
        if level < depth:
            pool.submit(jobs[level + 1])
            futures[level].set_result(futures[level + 1].wait() + 1)
        else:
            futures[level].set_result(0)

    jobs = [FakeJob(str(level), lambda level=level: nested(level), kind="nested") for level in range(depth + 1)]
    pool.submit(jobs[0])
    assert futures[0].result(PATIENCE) == depth
    eventually(lambda: not pool.is_busy())
    eventually(lambda: len(pool._threads) <= limit + 1)  # the leader, and as many as may be idle


def test_a_wait_within_a_wait_counts_once(stage: Stage) -> None:
    pool = stage.serving(limit=1)
    seen: list[int] = []

    def nested() -> None:
        with asleep():
            with asleep():
                pass
            seen.append(pool._running)
        seen.append(pool._running)

    run(pool, FakeJob("leader", nested))
    eventually(lambda: pool.asleep and not pool.is_busy())
    blocked = stage.blocking("blocked")
    run_by_a_follower(pool, blocked)
    blocked.end()
    eventually(lambda: not pool.is_busy())
    assert seen == [0, 1]


def test_a_job_knows_that_it_runs_for_others(stage: Stage) -> None:
    pool = stage.serving()
    seen: list[bool] = []
    run(pool, FakeJob("job", lambda: seen.append(on_serving_thread())))
    assert seen == [True]


def test_busy_is_whoever_has_something_to_run_or_runs_it(stage: Stage) -> None:
    pool = stage.serving(limit=1)
    eventually(lambda: pool.asleep)
    assert not pool.is_busy()
    led, waiting = stage.blocking("led"), stage.blocking("waiting")
    come_in(pool, led)
    assert led.begun.wait(PATIENCE)
    assert pool.is_busy(), "the leader runs it"
    depose(pool, led)
    eventually(lambda: pool.asleep)
    assert pool.is_busy(), "a follower runs it"
    pool.submit(waiting)
    led.end()
    assert waiting.begun.wait(PATIENCE)
    assert pool.is_busy()
    waiting.end()
    eventually(lambda: not pool.is_busy())


def test_busy_is_a_leader_that_has_just_taken_a_job(stage: Stage) -> None:
    pool = stage.serving()
    busy: list[bool] = []

    class Curious(FakeJob):
        @property
        def kind(self) -> object:  # looked at between the two
            busy.append(pool.is_busy())
            return "curious"

        @kind.setter
        def kind(self, _: object) -> None:
            pass

    run(pool, Curious("job"))
    assert busy == [True]
