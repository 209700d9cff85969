"""The serving pool with made-up jobs: who runs what, how many at once, in which order, and how it ends."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from eventually import PATIENCE, eventually
from farcall.agent import serving as serving_module
from farcall.agent.follower import EXIT, LEAD, Follower
from farcall.agent.poller import READABLE, Poller
from farcall.agent.serving import Serving
from farcall.errors import UsageError
from farcall.futures import Future
from farcall.sleeping import asleep, on_serving_thread
from interleaving import Schedule, explore


class Origin:
    """Whom to answer; remembers how it was answered."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def answer(self, reply: Any) -> None:
        self.events.append(("now", reply.decode()) if isinstance(reply, bytes) else ("now", *reply))

    def queue_answer(self, reply: bytes) -> None:
        self.events.append(("later", reply.decode()))

    def flush_answers(self) -> None:
        if self.events[-1:] != ["flush"]:
            self.events.append("flush")


class FakeJob:
    """Says when it begins, does what it is told, and replies with its name."""

    def __init__(
        self,
        name: str,
        function: Callable[[], object] = lambda: None,
        kind: object = None,
        origin: Origin | None = None,
        must_run: bool = False,
        pieces: list[Any] | None = None,
    ) -> None:
        self.name = name
        self._pieces = pieces
        self.kind: object = name if kind is None else kind
        self.origin = origin
        self.must_run = must_run
        self.begun = threading.Event()
        self.ended = threading.Event()
        self.thread = ""
        self._function = function

    def run(self) -> bytes | list[Any] | None:
        self.thread = threading.current_thread().name
        self.begun.set()
        self._function()
        self.ended.set()
        return None if self.origin is None else self._pieces or self.name.encode()


class Blocking(FakeJob):
    """Runs until it is released; asleep in no wait of ours."""

    def __init__(self, name: str, **more: Any) -> None:
        self._release = threading.Event()
        super().__init__(name, lambda: self._release.wait(PATIENCE), **more)

    def release(self) -> None:
        self._release.set()

    def end(self) -> None:
        self.release()
        assert self.ended.wait(PATIENCE)


class Stage:
    """Pools that are closed at the end of the test, whatever happens."""

    def __init__(self) -> None:
        self._pollers: list[Poller] = []
        self._pools: list[Serving] = []
        self._blocking: list[Blocking] = []
        self.woken = 0

    def serving(self, limit: int = 4) -> Serving:
        poller = Poller()
        self._pollers.append(poller)
        pool = Serving("w", poller, limit, 0.0, self._wake_supervisor)
        self._pools.append(pool)
        pool.start()
        return pool

    def _wake_supervisor(self) -> None:
        self.woken += 1

    def blocking(self, name: str, **more: Any) -> Blocking:
        job = Blocking(name, **more)
        self._blocking.append(job)
        return job

    def close(self) -> None:
        for job in self._blocking:
            job.release()
        left = [name for pool in self._pools for name in pool.close(time.monotonic() + PATIENCE)]
        for poller in self._pollers:
            poller.close()
        assert left == []


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture(autouse=True)
def _nothing_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is slow is for the test to say, not for a machine that is busy otherwise.
    monkeypatch.setattr(serving_module, "SLOW", 1000.0)


def run(pool: Serving, *jobs: FakeJob) -> None:
    """Has the jobs come in at once, and waits until they have ended."""
    come_in(pool, *jobs)
    for job in jobs:
        assert job.ended.wait(PATIENCE)


def come_in(pool: Serving, *jobs: FakeJob) -> None:
    eventually(lambda: pool.asleep)
    pool.ready.extend(jobs)
    pool._poller.ring()


def depose(pool: Serving, job: FakeJob) -> None:
    """What the supervisor does about a leader that has been running this job for a while."""
    assert job.begun.wait(PATIENCE)
    pool.depose_stuck_leader()
    pool.depose_stuck_leader()


def run_by_a_follower(pool: Serving, job: Blocking) -> None:
    """Has it run, and the lead taken from the thread that runs it."""
    come_in(pool, job)
    depose(pool, job)
    eventually(lambda: pool.asleep)


# The leader


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
            pool._note_slow("known to be slow")  # each time: it proves quick
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
                pool._note_slow("job")
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
    pool._note_slow("slow")
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


class Stagehand(Serving):
    """A pool whose threads are the schedule's: it only hands out followers."""

    def __init__(self, schedule: Schedule) -> None:
        self.poller = Poller()
        super().__init__("w", self.poller, 4, 0.0, lambda: None)
        self.poller.close()
        self._lock = schedule.lock()  # type: ignore[assignment]
        self.made: list[Follower] = []
        self._leader = leader = Follower()
        self.leader = leader

    def _new_follower(self) -> Follower:
        follower = Follower()
        self.made.append(follower)
        return follower


@pytest.mark.parametrize("sleeps", [False, True], ids=["runs", "sleeps"])
@pytest.mark.parametrize(("files", "preemptions"), [(("agent/serving.py",), 1), ((), 2)], ids=["lines", "locks"])
def test_one_thread_leads_and_the_accounts_are_right_however_the_supervisor_comes_between(
    sleeps: bool, files: tuple[str, ...], preemptions: int
) -> None:
    def scenario(schedule: Schedule) -> Any:
        pool = Stagehand(schedule)
        follower = pool.leader
        follower.lead.begin()
        leads: list[bool] = []

        def run_job() -> None:
            if sleeps:
                pool._before_sleep(follower)
                schedule.step()
                pool._after_sleep(follower)
            leads.append(follower.lead.end())
            if not leads[0]:
                pool._follow(follower)

        def check() -> None:
            told = [one for one in pool.made if one._order is LEAD]
            assert len(told) + leads[0] == 1, "one leads"
            assert (pool._leader is follower) == leads[0]
            assert (pool._running, pool._sleeping) == (0, 0)
            assert len(pool._idle) == len(pool.made) - len(told) + (not leads[0]), "nobody is forgotten"

        return [run_job, lambda: pool._replace(follower)], check

    assert explore(scenario, files, preemptions) > 3


# The lead is handed over


def test_large_answers_do_not_keep_small_ones_back(stage: Stage) -> None:
    pool, small, large = stage.serving(), Origin(), Origin()
    last = FakeJob("last", lambda: flushed.append("flush" in small.events))
    flushed: list[bool] = []
    jobs = [FakeJob(str(n), origin=large, pieces=["a", "b"]) for n in range(serving_module._BURST)]
    run(pool, FakeJob("small", origin=small), *jobs, last)
    assert flushed == [True]


def test_a_large_answer_is_sent_at_once(stage: Stage) -> None:
    pool, origin = stage.serving(), Origin()
    run(pool, FakeJob("small", origin=origin), FakeJob("large", origin=origin, pieces=["start", "rest"]))
    eventually(lambda: pool.asleep)
    assert origin.events == [("later", "small"), ("now", "start", "rest"), "flush"]


def test_a_slow_job_does_not_hold_up_the_next(stage: Stage) -> None:
    pool, origin = stage.serving(), Origin()
    slow = stage.blocking("slow", origin=origin)
    quick = FakeJob("quick", origin=origin)
    come_in(pool, slow, quick)
    assert slow.begun.wait(PATIENCE)
    pool.depose_stuck_leader()
    assert not quick.begun.is_set(), "one look is not enough"
    pool.depose_stuck_leader()
    assert quick.ended.wait(PATIENCE)
    assert quick.thread != slow.thread
    eventually(lambda: origin.events == [("later", "quick"), "flush"])
    slow.end()
    eventually(lambda: origin.events[2:] == [("now", "slow")])


def test_a_leader_that_went_on_meanwhile_is_not_deposed(stage: Stage) -> None:
    pool = stage.serving()
    first, second = stage.blocking("first"), stage.blocking("second")
    come_in(pool, first, second)
    assert first.begun.wait(PATIENCE)
    pool.depose_stuck_leader()
    first.end()
    assert second.begun.wait(PATIENCE)
    pool.depose_stuck_leader()
    second.end()
    assert first.thread == second.thread
    eventually(lambda: pool.asleep)
    pool.depose_stuck_leader()
    pool.depose_stuck_leader()
    assert len(pool._threads) == 1


def test_answers_that_wait_are_sent_when_the_leader_is_deposed(stage: Stage) -> None:
    pool, origin = stage.serving(), Origin()
    slow, following = stage.blocking("slow"), stage.blocking("following")
    come_in(pool, FakeJob("quick", origin=origin), slow, following)
    assert slow.begun.wait(PATIENCE)
    assert origin.events == [("later", "quick")]
    depose(pool, slow)
    assert following.begun.wait(PATIENCE)
    assert origin.events == [("later", "quick"), "flush"], "before the new leader has run anything"


def test_answers_that_wait_are_sent_before_a_job_that_is_known_to_be_slow(stage: Stage) -> None:
    pool, origin = stage.serving(), Origin()
    first = stage.blocking("first", kind="slow")
    run_by_a_follower(pool, first)
    first.end()
    second, following = stage.blocking("second", kind="slow"), stage.blocking("following")
    come_in(pool, FakeJob("quick", origin=origin), second, following)
    assert second.begun.wait(PATIENCE)
    assert following.begun.wait(PATIENCE)
    assert origin.events == [("later", "quick"), "flush"]


def test_a_job_that_is_known_to_be_slow_is_run_with_the_lead_given_away_first(stage: Stage) -> None:
    pool = stage.serving()
    first = stage.blocking("first", kind="slow")
    run_by_a_follower(pool, first)
    first.end()
    second = stage.blocking("second", kind="slow")
    come_in(pool, second, quick := FakeJob("quick"))
    assert quick.ended.wait(PATIENCE), "though nobody has deposed anybody"
    assert not second.ended.is_set()


def test_a_job_that_took_long_is_known_to_be_slow(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "SLOW", -1.0)
    pool = stage.serving()
    run(pool, FakeJob("first", kind="slow"))
    second = stage.blocking("second", kind="slow")
    come_in(pool, second, quick := FakeJob("quick"))
    assert quick.ended.wait(PATIENCE)


def test_a_job_that_proves_quick_is_no_longer_taken_for_slow(stage: Stage) -> None:
    pool = stage.serving()
    first = stage.blocking("first", kind="sometimes")
    run_by_a_follower(pool, first)
    first.end()
    run(pool, FakeJob("second", kind="sometimes"))
    third = stage.blocking("third", kind="sometimes")
    come_in(pool, third, quick := FakeJob("quick"))
    assert third.begun.wait(PATIENCE)
    assert not quick.begun.is_set(), "the leader runs it itself again"
    third.release()
    assert quick.ended.wait(PATIENCE)


def test_what_is_remembered_of_slow_kinds_is_bounded(stage: Stage) -> None:
    pool = stage.serving()
    for number in range(5000):
        pool._note_slow(number)
    assert len(pool._slow) < 2000


# How many at once


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


# The end


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
