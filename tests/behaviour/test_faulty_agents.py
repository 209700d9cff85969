"""The faulty agent of `farcall.testing`: messages and workers fail as the test tells them to."""

from __future__ import annotations

import threading

import pytest

from eventually import eventually
from farcall import RpcError, RpcTimeoutError, UnknownWorkerError, UsageError, WorkerLostError
from farcall.testing import Failure, FaultyRpcBackendOptions, LocalGroup, faults
from gates import SOON, arrived, new_gate, wait_at
from group_stage import NewGroup, call, echo, run, runs, start

pytestmark = pytest.mark.timeout(30)

SHORT = 0.2
"""Seconds: the timeout of a call that is lost, or comes too late."""


def test_so_many_sends_of_each_message_fail_and_no_other_call_does(make_faulty_group: NewGroup) -> None:
    group = make_faulty_group(2)
    gate = new_gate("other")
    other = start(group.agents[0], 1, wait_at, "other", "unharmed")
    assert arrived["other"].wait(SOON)
    faults(group.agents[0]).fail("PYTHON_CALL", sends=2)
    for attempt in (1, 2):
        with pytest.raises(
            WorkerLostError, match=rf"let this PYTHON_CALL fail \(error; {attempt} of 2 sends\)"
        ) as caught:
            call(group.agents[0], 1, run, "a", timeout=0)
        assert caught.value.worker == "worker1"
    assert call(group.agents[0], 1, run, "a") == "a"
    with pytest.raises(WorkerLostError, match="1 of 2 sends"):
        call(group.agents[0], 1, run, "b")  # other arguments: another message
    assert call(group.agents[1], 0, run, "c") == "c"  # another sender
    assert runs == ["a", "c"]
    gate.set()
    assert other.wait() == "unharmed"


def test_a_late_call_arrives_behind_the_next_one(make_faulty_group: NewGroup) -> None:
    group = make_faulty_group(2, messages_to_fail=["PYTHON_CALL"], failures={"PYTHON_CALL": Failure.LATE})
    with pytest.raises(RpcTimeoutError):
        call(group.agents[0], 1, run, "first", timeout=SHORT)
    assert runs == []
    faults(group.agents[0]).fail("PYTHON_CALL", sends=0)
    assert call(group.agents[0], 1, run, "second") == "second"
    eventually(lambda: runs == ["second", "first"])


def test_a_delayed_message_is_overtaken_by_others(make_faulty_group: NewGroup) -> None:
    group = make_faulty_group(2, messages_to_delay={"PYTHON_RREF_FETCH_CALL": 2 * SHORT})
    rref = group.remote(0, 1, echo, ("tea",))
    with pytest.raises(RpcTimeoutError):
        rref.to_here(timeout=SHORT)
    fetched: list[str] = []
    thread = threading.Thread(target=lambda: fetched.append(rref.to_here(timeout=SOON)))
    thread.start()
    assert call(group.agents[0], 1, echo, 1) == 1
    assert fetched == []
    thread.join(SOON)
    assert fetched == ["tea"]
    faults(group.agents[0]).delay("PYTHON_RREF_FETCH_CALL", 0)
    assert rref.to_here(timeout=SOON) == "tea"


def test_nothing_passes_a_frozen_connection_and_nothing_is_lost(make_faulty_group: NewGroup) -> None:
    group = make_faulty_group(3, heartbeat_patience=600)
    assert (call(group.agents[0], 1, echo, 1), call(group.agents[1], 0, echo, 2)) == (1, 2)
    faults(group.agents[0]).freeze("worker1")
    there, back = start(group.agents[0], 1, echo, 1), start(group.agents[1], 0, echo, 2)
    with pytest.raises(RpcTimeoutError):
        call(group.agents[0], 1, echo, 3, timeout=SHORT)
    assert not there.done()
    assert not back.done()
    assert call(group.agents[2], 1, echo, 4) == 4
    faults(group.agents[0]).heal("worker1")
    assert (there.wait(), back.wait()) == (1, 2)


def test_a_slow_worker_answers_later(make_faulty_group: NewGroup) -> None:
    group = make_faulty_group(2, heartbeat_patience=600)
    assert call(group.agents[0], 1, echo, 1) == 1
    faults(group.agents[0]).slow("worker1", 2 * SHORT)
    with pytest.raises(RpcTimeoutError):
        call(group.agents[0], 1, echo, 1, timeout=SHORT)
    assert call(group.agents[0], 1, echo, 2) == 2
    faults(group.agents[0]).heal()
    assert call(group.agents[0], 1, echo, 3) == 3


def test_wrong_faults_are_refused(make_faulty_group: NewGroup, make_group: NewGroup) -> None:
    group = make_faulty_group(2)
    with pytest.raises(UnknownWorkerError):
        faults(group.agents[0]).cut("worker7")
    with pytest.raises(UsageError):
        faults(group.agents[0]).fail("NO_MESSAGE")
    with pytest.raises(UsageError):
        faults(group.agents[0]).slow("worker1", -1)
    with pytest.raises(UsageError):
        FaultyRpcBackendOptions(messages_to_fail=["NO_MESSAGE"])
    with pytest.raises(UsageError):
        faults(make_group(1).agents[0])
    assert call(group.agents[0], 1, echo, 1) == 1


def test_a_group_in_one_process_takes_names_and_refuses_what_can_be_none() -> None:
    with LocalGroup(2, names=["first", "second"]) as group:
        assert call(group.agents["first"], "second", echo, 1) == 1
        assert call(group.agents["first"], "second", echo, group) is group, "it arrives as itself"
        with pytest.raises(UsageError, match="no worker 'third'"):
            group.agents["third"]
    for wrong in (
        lambda: LocalGroup(0),
        lambda: LocalGroup(2, names=["one"]),
        lambda: LocalGroup(1, names="w"),
        lambda: LocalGroup(1, options=5),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError):
            wrong()
    with pytest.raises(RpcError, match="the worker name 'same' is not unique"):
        LocalGroup(2, names=["same", "same"])
