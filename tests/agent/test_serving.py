"""The serving pool with made-up jobs: who runs what, in which order, and how it is answered."""

from __future__ import annotations

import logging
import os
import threading
from time import monotonic

import pytest
from serving_stage import FakeJob, Origin, Stage, come_in, depose, run

from eventually import PATIENCE, eventually
from farcall.agent import serving as serving_module
from farcall.agent.poller import READABLE
from farcall.agent.spinning import Spinning
from farcall.errors import UsageError
from farcall.futures import Future


def test_the_leader_runs_what_is_submitted_and_answers(stage: Stage) -> None:
    pool, origin = stage.serving(), Origin()
    pool.submit(FakeJob("job", origin=origin))
    eventually(lambda: origin.events == [("later", "job"), "flush"])


def test_one_thread_is_enough_for_jobs_that_are_quick(stage: Stage) -> None:
    pool = stage.serving()
    jobs = [FakeJob(str(number)) for number in range(20)]
    for job in jobs:
        run(pool, job)
    assert {job.thread for job in jobs} == {"farcall-w-1"}


def test_a_job_without_an_answer_answers_nobody(stage: Stage) -> None:
    pool = stage.serving()
    run(pool, FakeJob("callback"))
    eventually(lambda: not pool.is_busy())


def test_the_answers_of_a_burst_are_sent_together(stage: Stage) -> None:
    pool, origin = stage.serving(), Origin()
    jobs = [FakeJob(str(number), origin=origin) for number in range(serving_module._BURST + 2)]
    run(pool, *jobs)
    eventually(lambda: origin.events.count("flush") == 2)
    queued = [("later", job.name) for job in jobs]
    assert origin.events == [
        *queued[: serving_module._BURST],
        "flush",
        *queued[serving_module._BURST :],
        "flush",
    ]


def test_the_leader_says_for_how_long_it_slept_before_something_came(stage: Stage) -> None:
    class Noting(Spinning):
        slept_for: list[float]

        def slept(self, seconds: float) -> None:
            self.slept_for.append(seconds)

    spinning = Noting(0.0)
    spinning.slept_for = []
    pool = stage.serving(spinning=spinning)
    began = monotonic()
    run(pool, FakeJob("job"))
    assert len(spinning.slept_for) == 1
    assert 0 < spinning.slept_for[0] < monotonic() - began + PATIENCE


def test_jobs_begin_in_the_order_in_which_they_came(stage: Stage) -> None:
    pool = stage.serving(limit=1)
    begun: list[int] = []
    first = stage.blocking("first")
    jobs = [FakeJob(str(number), lambda number=number: begun.append(number)) for number in range(50)]
    come_in(pool, first, *jobs[:25])
    depose(pool, first)
    for job in jobs[25:]:
        pool.submit(job)
    first.release()
    assert jobs[-1].ended.wait(PATIENCE)
    assert begun == list(range(50))


def test_what_comes_over_a_descriptor_is_handled_by_the_leader(stage: Stage) -> None:
    pool = stage.serving()
    reading, writing = os.pipe()
    came: list[bytes] = []
    job = FakeJob("read")

    def handle(events: int) -> None:
        assert events == READABLE
        came.append(os.read(reading, 10))
        pool.ready.append(job)

    pool._poller.add(reading, handle, READABLE)
    eventually(lambda: pool.asleep)
    woken = stage.woken
    os.write(writing, b"x")
    assert job.ended.wait(PATIENCE)
    assert came == [b"x"]
    assert stage.woken > woken, "the supervisor is told that something goes on"
    pool._poller.remove(reading)
    os.close(reading)
    os.close(writing)


def test_a_handler_that_fails_does_not_end_the_service(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    pool = stage.serving()
    reading, writing = os.pipe()

    def handle(_: int) -> None:
        os.read(reading, 10)
        raise ValueError("in a handler")

    pool._poller.add(reading, handle, READABLE)
    with caplog.at_level(logging.ERROR, "farcall"):
        os.write(writing, b"x")
        eventually(lambda: caplog.records)
    assert "worker 'w': reading from a connection failed" in caplog.text
    run(pool, FakeJob("after"))
    pool._poller.remove(reading)
    os.close(reading)
    os.close(writing)


def test_a_finalizer_that_waits_in_the_midst_of_reading_is_refused(stage: Stage) -> None:
    pool = stage.serving()
    reading, writing = os.pipe()
    refused: list[str] = []

    def handle(_: int) -> None:
        os.read(reading, 10)
        with pytest.raises(UsageError) as caught:
            Future[int]().result(timeout=PATIENCE)
        refused.append(str(caught.value))

    pool._poller.add(reading, handle, READABLE)
    os.write(writing, b"x")
    eventually(lambda: refused)
    assert "a finalizer cannot wait for a call here" in refused[0]
    run(pool, FakeJob("after"))
    assert (pool._running, pool._sleeping) == (0, 0)
    pool._poller.remove(reading)
    os.close(reading)
    os.close(writing)


def test_the_supervisor_is_woken_for_jobs_and_not_for_what_merely_comes(stage: Stage) -> None:
    pool = stage.serving()
    handled = threading.Event()
    bell = os.eventfd(0)
    try:
        pool._poller.add(bell, lambda _: (os.eventfd_read(bell), handled.set()), READABLE)  # type: ignore[arg-type, return-value]
        before = stage.woken
        os.eventfd_write(bell, 1)
        assert handled.wait(PATIENCE)
        eventually(lambda: pool.asleep)
        assert stage.woken == before, "a heartbeat is nothing that could prove slow"
        job = stage.blocking("slow")
        pool.submit(job)
        eventually(lambda: stage.woken == before + 1)
        job.release()
    finally:
        pool._poller.remove(bell)
        os.close(bell)
