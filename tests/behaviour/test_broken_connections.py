"""Connections that break: calls under way fail, the next call connects anew, and nothing about references is lost."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from eventually import eventually
from farcall import RpcTimeoutError, RRef, WorkerLostError
from farcall.testing import Failure, LocalGroup, faults
from gates import SOON, arrived, new_gate, wait_at
from group_stage import NewGroup, call, echo, run, runs, start
from reference_values import Shelf, expect_no_references, fetch

pytestmark = pytest.mark.timeout(60)

SHORT = 0.2
"""Seconds: the timeout of a call that is lost on its way."""

ABOUT_REFERENCES = ["PYTHON_REMOTE_CALL", "RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE"]


def names(group: LocalGroup) -> list[list[str]]:
    return [[info.name for info in agent.get_worker_infos()] for agent in group.agents]


def test_a_connection_that_breaks_fails_its_calls_and_no_others(make_faulty_group: NewGroup) -> None:
    group = make_faulty_group(3, heartbeat_patience=600)
    gate = new_gate("cut")
    cut, spared = start(group.agents[0], 1, wait_at, "cut"), start(group.agents[0], 2, wait_at, "cut", "spared")
    eventually(
        lambda: (
            group.agents[1].get_metrics()["threads_running"] == group.agents[2].get_metrics()["threads_running"] == 1
        )
    )
    faults(group.agents[0]).cut("worker1")
    error = cut.exception(SOON)
    assert isinstance(error, WorkerLostError)
    assert error.worker == "worker1"
    for caller, to in ((group.agents[0], 1), (group.agents[1], 0)):
        with pytest.raises(WorkerLostError):
            call(caller, to, echo, 1, timeout=1.0)
    assert call(group.agents[2], 1, echo, 3) == 3
    gate.set()
    assert spared.wait() == "spared"


def test_the_next_call_connects_anew_and_nobody_is_taken_for_lost(make_faulty_group: NewGroup) -> None:
    group = make_faulty_group(2, heartbeat_interval=0.05, heartbeat_patience=600)
    for _ in range(3):
        assert call(group.agents[0], 1, echo, 1) == 1
        assert call(group.agents[1], 0, echo, 1) == 1
        faults(group.agents[0]).cut("worker1")
        faults(group.agents[0]).heal("worker1")
        eventually(lambda: can_call(group.agents[0], 1))
        eventually(lambda: can_call(group.agents[1], 0))
    assert names(group) == [["worker0", "worker1"]] * 2


def can_call(agent: Any, to: int) -> bool:
    """A call made in the moment after a cut may still go to the broken connection."""
    try:
        return bool(call(agent, to, echo, True))
    except WorkerLostError:
        return False


def test_many_threads_connect_at_once_and_all_get_their_replies(
    make_group: NewGroup, background: ThreadPoolExecutor
) -> None:
    for _ in range(5):
        group = make_group(3)
        jobs = [background.submit(call, group.agents[n % 3], (n + 1) % 3, echo, n) for n in range(24)]
        assert [job.result(SOON) for job in jobs] == list(range(24))


# -- No call runs twice


@pytest.mark.parametrize(("failure", "ran"), [(Failure.REQUEST_LOST, []), (Failure.REPLY_LOST, ["a"])])
def test_a_call_that_is_lost_ends_at_its_timeout_and_is_not_sent_again(
    make_faulty_group: NewGroup, failure: Failure, ran: list[str]
) -> None:
    group = make_faulty_group(2, messages_to_fail=["PYTHON_CALL"], failures={"PYTHON_CALL": failure})
    with pytest.raises(RpcTimeoutError):
        call(group.agents[0], 1, run, "a", timeout=SHORT)
    assert runs == ran
    assert call(group.agents[0], 1, run, "a") == "a"
    group.shutdown()
    assert runs == [*ran, "a"]


def test_a_call_that_was_under_way_when_the_connection_broke_runs_once(make_faulty_group: NewGroup) -> None:
    group = make_faulty_group(2, heartbeat_patience=600)
    gate = new_gate("under way")
    future = start(group.agents[0], 1, wait_and_run, "under way")
    assert arrived["under way"].wait(SOON)
    faults(group.agents[0]).cut("worker1")
    assert isinstance(future.exception(SOON), WorkerLostError)
    faults(group.agents[0]).heal()
    gate.set()
    eventually(lambda: can_call(group.agents[0], 1))
    group.shutdown()
    assert runs == ["ran"]


def wait_and_run(gate: str) -> None:
    wait_at(gate)
    run("ran")


# -- References


@pytest.mark.parametrize("failure", [Failure.ERROR, Failure.REQUEST_LOST, Failure.REPLY_LOST])
@pytest.mark.parametrize("message", ABOUT_REFERENCES)
def test_every_message_about_references_arrives_once_though_it_failed_before(
    make_faulty_group: NewGroup, message: str, failure: Failure
) -> None:
    group = make_faulty_group(3, messages_to_fail=[message], num_fail_sends=2, failures={message: failure})
    shelf = group.remote(0, 1, make_once, ("tea",))
    eventually(shelf.confirmed_by_owner)
    assert call(group.agents[0], 2, keep_and_fetch, shelf) == ["tea"]
    del shelf
    expect_no_references(group)
    assert runs == ["tea"], "the function of a remote call runs once"


def make_once(item: str) -> list[str]:
    return [run(item)]


def keep_and_fetch(shelf: RRef[list[str]]) -> list[str]:
    eventually(shelf.confirmed_by_owner)
    return shelf.to_here(timeout=SOON)


@pytest.mark.parametrize("failure", [Failure.ERROR, Failure.REQUEST_LOST, Failure.REPLY_LOST])
def test_references_of_a_call_that_fails_are_given_back(make_faulty_group: NewGroup, failure: Failure) -> None:
    group = make_faulty_group(3)
    value = Shelf("tea")
    is_alive = weakref.ref(value)
    mine, theirs = group.rref(0, value), group.remote(0, 2, Shelf, ("tea",))
    del value
    eventually(theirs.confirmed_by_owner)
    faults(group.agents[0]).fail("PYTHON_CALL", 1, failure)
    with pytest.raises((RpcTimeoutError, WorkerLostError)):
        call(group.agents[0], 1, echo, [mine, theirs], timeout=SHORT)
    faults(group.agents[0]).fail("PYTHON_CALL", 0)
    assert call(group.agents[0], 1, fetch, mine).items == ["tea"]
    assert call(group.agents[0], 1, fetch, theirs).items == ["tea"]
    del mine, theirs
    expect_no_references(group)
    eventually(lambda: is_alive() is None)


def test_references_are_used_and_dropped_while_connections_break(make_faulty_group: NewGroup) -> None:
    group = make_faulty_group(3, heartbeat_patience=600)
    for number in range(10):
        rref = group.remote(0, 1, echo, (number,))
        faults(group.agents[0]).cut("worker1")
        faults(group.agents[0]).heal("worker1")
        eventually(lambda rref=rref, number=number: value_of(rref) == number)
        eventually(lambda rref=rref, number=number: passed(group, rref) == number)
    del rref
    expect_no_references(group)


def value_of(rref: RRef[int]) -> int | None:
    try:
        return rref.to_here(timeout=SOON)
    except WorkerLostError:
        return None


def passed(group: LocalGroup, rref: RRef[int]) -> Any:
    try:
        return call(group.agents[0], 2, fetch, rref)
    except WorkerLostError:
        return None
