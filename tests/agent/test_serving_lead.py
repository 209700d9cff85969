"""The lead of the serving pool: handed over when a job is slow, and one thread has it at any moment."""

from __future__ import annotations

from typing import Any

import pytest
from serving_stage import FakeJob, Origin, Stage, come_in, depose, run, run_by_a_follower

from eventually import PATIENCE, eventually
from farcall.agent import serving as serving_module
from farcall.agent.follower import LEAD, Follower
from farcall.agent.poller import Poller
from farcall.agent.serving import Serving
from farcall.agent.spinning import Spinning
from interleaving import Schedule, explore


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
        pool._slow.note(number)
    assert len(pool._slow) < 2000


class Stagehand(Serving):
    """A pool whose threads are the schedule's: it only hands out followers."""

    def __init__(self, schedule: Schedule) -> None:
        self.poller = Poller()
        super().__init__("w", self.poller, 4, Spinning(0.0), lambda: None)
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
