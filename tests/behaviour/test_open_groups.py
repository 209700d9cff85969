"""Workers that join and leave while others work, and what the others are told."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import farcall as rpc
from eventually import eventually
from farcall import OwnerLostError, RendezvousError, RpcAgent, UnknownWorkerError, WorkerInfo, WorkerLostError
from farcall.testing import LocalGroup, faults
from gates import SOON, arrived, new_gate, wait_at
from group_stage import NewGroup, call, echo, start
from worker_processes import StartWorkers

pytestmark = pytest.mark.timeout(60)


def names(agent: RpcAgent) -> list[str]:
    return sorted(info.name for info in agent.get_worker_infos())


def watch(agent: RpcAgent) -> list[tuple[str, str]]:
    """Everything that this worker is told of changes from now on."""
    seen: list[tuple[str, str]] = []
    agent.watch_members(lambda change: seen.append((change.kind, change.worker.name)))
    return seen


@pytest.fixture
def opened(make_group: NewGroup) -> LocalGroup:
    """An open group of three workers that know each other."""
    group = make_group(3, is_open=True, heartbeat_patience=600)
    eventually(lambda: all(len(names(agent)) == 3 for agent in group.agents))
    return group


# -- Joining


def test_a_worker_joins_while_others_work_and_all_are_told(opened: LocalGroup) -> None:
    gate = new_gate("work")
    working = start(opened.agents[0], "worker1", wait_at, "work", "done")
    assert arrived["work"].wait(SOON)
    seen = [watch(agent) for agent in opened.agents]
    with pytest.raises(UnknownWorkerError):
        call(opened.agents[0], "late", echo, 1)
    late = opened.join("late")
    assert call(late.agent, "worker0", echo, 1) == 1
    eventually(lambda: all(each == [("joined", "late")] for each in seen))
    for agent in opened.agents:
        assert call(agent, "late", echo, 2) == 2
        assert names(agent) == ["late", "worker0", "worker1", "worker2"]
    gate.set()
    assert working.wait() == "done"


def test_a_name_belongs_to_one_worker_at_a_time(make_group: NewGroup) -> None:
    group = make_group(1, is_open=True, init_timeout=1)
    group.join("late")
    with pytest.raises(RendezvousError, match="'late'"):
        group.join("late")
    assert call(group.agents[0], "late", echo, 1) == 1
    group.leave("late")
    assert call(group.join("late").agent, "worker0", echo, 2) == 2


def test_a_worker_that_comes_again_under_its_name_is_another_one(opened: LocalGroup) -> None:
    first = opened.join("again")
    eventually(lambda: "again" in names(opened.agents[0]))
    old = opened.agents[0].get_worker_info("again")
    rref: rpc.RRef[list[Any]] = opened.remote(0, "again", list)
    assert rref.to_here() == []
    opened.leave("again")
    eventually(lambda: "again" not in names(opened.agents[0]))
    second = opened.join("again")
    eventually(lambda: "again" in names(opened.agents[0]))
    new = opened.agents[0].get_worker_info("again")
    assert (old.name, new.name) == ("again", "again")
    assert old.id != new.id
    assert call(opened.agents[0], new, echo, 1) == 1
    with pytest.raises(WorkerLostError):
        call(opened.agents[0], old, echo, 1)
    with pytest.raises(OwnerLostError):
        rref.to_here()
    assert first is not second


# -- Leaving


@pytest.mark.parametrize("graceful", [False, True])
def test_all_know_at_once_that_a_worker_has_left(opened: LocalGroup, graceful: bool) -> None:
    for agent in opened.agents:
        for name in opened.names:
            assert call(agent, name, echo, 1) == 1
    seen = [watch(agent) for agent in opened.agents][:2]
    opened.leave("worker2", graceful=graceful)
    eventually(lambda: all(each == [("left", "worker2")] for each in seen))
    for agent in opened.agents:
        assert names(agent) == ["worker0", "worker1"]
        with pytest.raises(WorkerLostError, match="worker 'worker2' has left the group") as caught:
            call(agent, "worker2", echo, 1)
        assert caught.value.worker == "worker2"
    assert call(opened.agents[0], "worker1", echo, 1) == 1


def test_a_worker_that_leaves_gracefully_ends_what_runs_there_first(
    opened: LocalGroup, background: ThreadPoolExecutor
) -> None:
    gate = new_gate("work")
    future = start(opened.agents[0], "worker1", wait_at, "work", "done")
    assert arrived["work"].wait(SOON)
    leaving = background.submit(opened.leave, "worker1", True)
    assert call(opened.agents[0], "worker2", echo, 1) == 1
    assert not future.done()
    gate.set()
    assert future.wait() == "done"
    leaving.result(SOON)


def test_a_worker_that_leaves_gives_back_the_references_that_it_holds(opened: LocalGroup) -> None:
    rref = opened.rref(0, ["value"])
    call(opened.agents[0], "worker1", keep, rref)
    del rref
    eventually(lambda: [owned.holders for owned in opened.references(0).owned] == [("worker1",)])
    opened.leave("worker1", graceful=True)
    eventually(lambda: not opened.references(0).owned)
    kept.clear()


kept: list[Any] = []


def keep(value: Any) -> None:
    kept.append(value)


def test_workers_join_and_leave_many_times(opened: LocalGroup) -> None:
    for number in range(10):
        agent = opened.join(f"guest{number}").agent
        assert call(agent, "worker0", echo, number) == number
        eventually(lambda number=number: f"guest{number}" in names(opened.agents[1]))
        assert call(opened.agents[1], f"guest{number}", echo, number) == number
        opened.leave(f"guest{number}", graceful=number % 2 == 0)
    eventually(lambda: all(names(agent) == ["worker0", "worker1", "worker2"] for agent in opened.agents))


# -- Membership callbacks


def test_callbacks_get_one_change_after_the_other_and_may_make_calls(opened: LocalGroup) -> None:
    seen: list[Any] = []
    at_once: list[int] = []
    running = threading.Lock()

    def callback(change: Any) -> None:
        if not running.acquire(blocking=False):
            at_once.append(1)
            return
        seen.append((change.kind, change.worker, call(opened.agents[0], "worker1", echo, change.worker.name)))
        running.release()

    opened.agents[0].watch_members(callback)
    joined = [opened.join(f"guest{number}") for number in range(3)]
    infos = [agent.info for agent in joined]
    eventually(lambda: len(seen) == 3)
    assert at_once == []
    assert all(each in seen for each in [("joined", info, info.name) for info in infos])
    assert all(isinstance(info, WorkerInfo) for info in infos)
    opened.agents[0].unwatch_members(callback)
    opened.leave("guest0")
    eventually(lambda: "guest0" not in names(opened.agents[0]))
    assert len(seen) == 3


def test_a_callback_that_raises_is_logged_and_stops_no_other(
    opened: LocalGroup, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(change: Any) -> None:
        raise ValueError("in the callback")

    opened.agents[0].watch_members(fail)
    seen = watch(opened.agents[0])
    with caplog.at_level(logging.ERROR, "farcall"):
        opened.join("late")
        eventually(lambda: seen == [("joined", "late")] and "in the callback" in caplog.text)
    assert call(opened.agents[0], "late", echo, 1) == 1


def test_a_callback_that_cannot_be_called_is_refused(alone: None) -> None:
    with pytest.raises(rpc.UsageError, match="must be a function of one MembershipChange"):
        rpc.add_membership_callback("print")  # type: ignore[arg-type]
    rpc.remove_membership_callback(print)  # was never added: nothing happens


# -- Losses


def test_a_worker_that_nobody_hears_is_lost_for_all(make_faulty_group: NewGroup) -> None:
    group = make_faulty_group(3, is_open=True, heartbeat_interval=0.05, heartbeat_patience=0.5)
    eventually(lambda: all(len(names(agent)) == 3 for agent in group.agents))
    seen = [watch(agent) for agent in group.agents][:2]
    gate = new_gate("lost")
    pending = start(group.agents[0], "worker2", wait_at, "lost", timeout=0)
    assert arrived["lost"].wait(SOON)
    for other in ("worker0", "worker1"):
        faults(group.agents[2]).freeze(other)
    assert isinstance(pending.exception(SOON), WorkerLostError)
    gate.set()
    eventually(lambda: all(each == [("lost", "worker2")] for each in seen))
    with pytest.raises(WorkerLostError, match="worker 'worker2' was lost"):
        call(group.agents[0], "worker2", echo, 1)
    assert call(group.agents[0], "worker1", echo, 1) == 1


def test_a_worker_that_is_busy_in_all_its_threads_is_not_lost(make_group: NewGroup) -> None:
    patience = 0.8
    group = make_group(2, num_worker_threads=1, heartbeat_interval=0.1, heartbeat_patience=patience)
    seen = watch(group.agents[0])
    gate = new_gate("busy")
    futures = [start(group.agents[0], "worker1", wait_at, "busy", timeout=0) for _ in range(20)]
    assert arrived["busy"].wait(SOON)
    until = time.monotonic() + 2 * patience
    eventually(lambda: time.monotonic() > until)
    gate.set()
    assert [future.wait() for future in futures] == [None] * 20
    assert seen == []


# -- Processes


def test_processes_join_and_leave_an_open_group(workers: StartWorkers) -> None:
    """w0 starts the group and hosts the store. When it leaves, w1 and w2 go on, and w3 still can join."""
    script = """
    changes = []
    def pid(): return os.getpid()
    join()
    rpc.add_membership_callback(lambda change: changes.append([change.kind, change.worker.name]))
    report(up=True)
    if RANK == 0:
        assert wait_for(lambda: names() == ["w0", "w1", "w2"], 20)
        report(pids=[rpc.rpc_sync(name, pid) for name in ("w1", "w2")])
        rpc.shutdown(timeout=20)
    else:
        assert wait_for(lambda: names() == ["w1", "w2", "w3"], 30)
        report(names=[rpc.rpc_sync(name, rpc.get_worker_info).name for name in names()], changes=changes)
        assert wait_for(lambda: os.path.exists("end"), 30)
        rpc.shutdown(timeout=20)
    """
    group = workers(script, n=4, order=(0,))
    for rank in (1, 2):
        group.wait_for(rank - 1, "up")
        group.start(rank)
    assert group.wait_for(0, "pids") == [group.processes[rank].pid for rank in (1, 2)]
    assert group.wait(0) == 0
    group.start(3)
    for rank in (1, 2, 3):
        assert group.wait_for(rank, "names") == ["w1", "w2", "w3"]
    (group.directory / "end").touch()
    group.finish()
    for rank in (1, 2):
        assert ["left", "w0"] in group.reports(rank)["changes"]
        assert ["joined", "w3"] in group.reports(rank)["changes"]
        assert not [change for change in group.reports(rank)["changes"] if change[0] == "lost"]
