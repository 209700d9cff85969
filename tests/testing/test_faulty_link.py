"""What becomes of messages that fail: each way of failing, for each message."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any, cast

import pytest
from link_ends import LinkEnds, receive

from eventually import eventually
from farcall import RpcTimeoutError, RRef, WorkerLostError
from farcall.protocol.frames import CONTROL, pack_message
from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_messages import UserDeleted
from farcall.runtime.handles import Handle
from farcall.runtime.reference_outbox import pack_control
from farcall.testing import Failure, Faults, FaultyRpcBackendOptions, LocalGroup, faults, faulty_link
from farcall.transports.base import Link
from gates import SOON, arrived, new_gate, wait_at
from group_stage import NewGroup, call, echo, run, runs, start
from reference_stage import expect_confirmed, expect_nothing_left, here, remote, tables
from reference_values import Shelf, fetch

ABOUT_REFERENCES = ["RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE", "PYTHON_REMOTE_CALL"]
MOMENT = 0.3
"""Seconds for a call that is to end by its timeout."""


@pytest.fixture(autouse=True)
def _no_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends after some seconds in any case is to end for its own reason here."""
    monkeypatch.setattr(faulty_link, "MAX_LATE_S", 1000.0)
    monkeypatch.setattr(faulty_link, "MAX_BUSY_S", 1000.0)


def all_fail(names: list[str], failure: Failure, sends: int = 1) -> dict[str, Any]:
    return {
        "messages_to_fail": names,
        "num_fail_sends": sends,
        "failures": dict.fromkeys(names, failure),
    }


# -- calls


def test_a_call_that_fails_raises_at_once_and_alone(new_group: NewGroup) -> None:
    group = new_group(2)
    gate = new_gate("alone")
    other = start(group.agents[0], 1, wait_at, "alone", "unharmed")
    assert arrived["alone"].wait(SOON)
    faults(group.agents[0]).fail("PYTHON_CALL", sends=2)
    for attempt in (1, 2):
        with pytest.raises(WorkerLostError) as caught:
            call(group.agents[0], 1, run, "a", timeout=0)
        assert caught.value.worker == "worker1"
        assert "worker 'worker1' was not asked for `group_stage.run`: " in str(caught.value)
        assert f"the faulty agent let this PYTHON_CALL fail (error; {attempt} of 2 sends)" in str(caught.value)
    assert call(group.agents[0], 1, run, "a") == "a"
    with pytest.raises(WorkerLostError, match="1 of 2 sends"):
        call(group.agents[0], 1, run, "b")
    assert call(group.agents[1], 0, run, "c") == "c"  # another sender
    assert runs == ["a", "c"]
    gate.set()
    assert other.wait() == "unharmed"


def test_a_function_by_value_fails_too(new_group: NewGroup) -> None:
    group = new_group(2, messages_to_fail=["SCRIPT_CALL"])
    with pytest.raises(WorkerLostError, match="was not asked for a function or a value"):
        call(group.agents[0], 1, lambda: 1)


def test_a_worker_may_fail_to_call_itself(new_group: NewGroup) -> None:
    group = new_group(1, messages_to_fail=["PYTHON_CALL"])
    with pytest.raises(WorkerLostError, match="worker 'worker0' was not asked"):
        call(group.agents[0], 0, run, 1)
    assert call(group.agents[0], 0, run, 1) == 1


@pytest.mark.parametrize(("failure", "ran"), [(Failure.REQUEST_LOST, []), (Failure.REPLY_LOST, ["a"])])
def test_a_call_that_is_lost_ends_by_its_timeout_and_runs_once_at_most(
    new_group: NewGroup, failure: Failure, ran: list[str]
) -> None:
    group = new_group(2, **all_fail(["PYTHON_CALL"], failure))
    began = monotonic()
    with pytest.raises(RpcTimeoutError, match="worker 'worker1' did not answer"):
        call(group.agents[0], 1, run, "a", timeout=MOMENT)
    assert monotonic() - began >= MOMENT
    assert runs == ran
    assert call(group.agents[0], 1, run, "a") == "a"  # the same again: it goes through
    assert runs == [*ran, "a"]
    group.shutdown()


def test_a_late_call_arrives_behind_the_next_one_and_its_answer_is_for_nobody(new_group: NewGroup) -> None:
    group = new_group(2, **all_fail(["PYTHON_CALL"], Failure.LATE))
    first = start(group.agents[0], 1, run, "first", timeout=MOMENT)
    with pytest.raises(RpcTimeoutError):
        first.wait()
    assert runs == []
    faults(group.agents[0]).fail("PYTHON_CALL", sends=0)
    assert call(group.agents[0], 1, run, "second") == "second"
    eventually(lambda: len(runs) == 2)
    assert runs == ["second", "first"]
    assert call(group.agents[0], 1, run, "third") == "third"
    group.shutdown()
    assert runs == ["second", "first", "third"]


def test_a_fetch_fails_by_its_own_name(new_group: NewGroup) -> None:
    group = new_group(2, **all_fail(["PYTHON_RREF_FETCH_CALL"], Failure.REQUEST_LOST))
    shelf = remote(group.agents[0], 1, Shelf, "tea")
    assert shelf.rpc_sync().size() == 1
    with pytest.raises(RpcTimeoutError):
        shelf.to_here(timeout=MOMENT)
    assert shelf.to_here().items == ["tea"]
    del shelf
    expect_nothing_left(group.agents)


@pytest.mark.parametrize("failure", Failure)
@pytest.mark.parametrize("owner", [0, 1, 2])
def test_references_of_a_call_that_fails_do_not_leak(new_group: NewGroup, failure: Failure, owner: int) -> None:
    group = new_group(3)
    rref = remote(group.agents[0], owner, list, "x")
    if owner:
        expect_confirmed(rref)
    faults(group.agents[0]).fail("PYTHON_CALL", 1, failure)
    future = start(group.agents[0], 1, take_and_give, rref, timeout=MOMENT)
    with pytest.raises((RpcTimeoutError, WorkerLostError)):
        future.wait()
    faults(group.agents[0]).fail("PYTHON_CALL", 0)
    assert call(group.agents[0], 1, fetch, rref) == ["x"]
    del rref, future
    expect_nothing_left(group.agents)
    group.shutdown()
    assert len(runs) == (failure in (Failure.REPLY_LOST, Failure.LATE))


def take_and_give(rref: RRef[Any]) -> RRef[Any]:
    runs.append("given")
    return rref


def test_large_arguments_and_results_pass(new_group: NewGroup) -> None:
    group = new_group(2, messages_to_delay={"PYTHON_CALL": 0.01})
    value = [b"x" * 3_000_000, bytearray(b"y" * 500_000)]
    assert call(group.agents[0], 1, echo, value) == value


def test_a_delayed_call_is_overtaken(new_group: NewGroup) -> None:
    group = new_group(2, messages_to_delay={"PYTHON_RREF_FETCH_CALL": MOMENT})
    rref = remote(group.agents[0], 1, echo, "tea")
    with pytest.raises(RpcTimeoutError):
        rref.to_here(timeout=MOMENT / 3)
    began = monotonic()
    future = group.agents[0].calling.call_on(
        cast(Handle, rref._handle), b"\2", "to_here", (), None, SOON, unattended=True
    )
    assert call(group.agents[0], 1, run, 1) == 1
    assert not future.done()
    assert future.wait() == "tea"
    assert monotonic() - began >= MOMENT
    faults(group.agents[0]).delay("PYTHON_RREF_FETCH_CALL", 0)
    assert rref.to_here(timeout=SOON) == "tea"
    del rref, future
    expect_nothing_left(group.agents)


def test_what_is_late_arrives_in_the_end_though_nothing_is_sent_again(
    new_group: NewGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faulty_link, "MAX_LATE_S", 0.05)
    group = new_group(2, **all_fail(["PYTHON_CALL"], Failure.LATE))
    assert call(group.agents[0], 1, run, "late") == "late"
    group.shutdown()
    assert runs == ["late"]


# -- what must arrive


@pytest.fixture
def new_ends() -> Iterator[Callable[[Failure], LinkEnds]]:
    """Makes the ends of links on which deletions of references fail once, in that way."""
    made: list[LinkEnds] = []

    def new_ends(failure: Failure) -> LinkEnds:
        options = FaultyRpcBackendOptions(**all_fail(["RREF_USER_DELETE"], failure))
        made.append(LinkEnds(Faults("worker0", options, lambda name: None)))
        return made[-1]

    yield new_ends
    for ends in made:
        ends.close()


def delete(acknowledged: int, *numbers: int) -> bytes:
    messages = [(number, UserDeleted(RRefId(1, 0, number), ForkId(0, number))) for number in numbers]
    return pack_message(CONTROL, pack_control(acknowledged, messages))


def expect(link: Link, *frames: bytes) -> None:
    """These frames come next."""
    for frame in frames:
        assert receive(link) == (frame, [])


def expect_end(link: Link) -> None:
    """The link ends, with nothing more in it. A link that the faulty agent broke says so."""
    with pytest.raises(ConnectionError) as caught:
        receive(link)
    if isinstance(link, faulty_link.FaultyLink):
        assert "the faulty agent let this RREF_USER_DELETE fail" in str(caught.value)


@pytest.mark.parametrize("failure", [Failure.ERROR, Failure.REQUEST_LOST])
def test_what_is_lost_does_not_arrive_and_its_connection_ends(
    new_ends: Callable[[Failure], LinkEnds], failure: Failure
) -> None:
    lost = new_ends(failure)
    ours, theirs = lost.connect()
    ours.send(delete(3, 1))
    expect(theirs, delete(3))  # the acknowledgement arrives
    expect_end(ours)
    expect_end(theirs)
    with pytest.raises(ConnectionError, match="the faulty agent let this RREF_USER_DELETE fail"):
        ours.send(delete(0, 1))
    ours, theirs = lost.connect()
    ours.send(delete(0, 1))
    expect(theirs, delete(0, 1))


def test_what_is_not_acknowledged_arrives_each_time(new_ends: Callable[[Failure], LinkEnds]) -> None:
    deaf = new_ends(Failure.REPLY_LOST)
    ours, theirs = deaf.connect()
    second, other = deaf.accept()
    ours.send(delete(0, 7))
    expect(theirs, delete(0, 7))
    for end, our_end in ((theirs, ours), (other, second)):  # whatever connection it comes on
        end.send(delete(8))
        expect(our_end, delete(6))
    expect_end(ours)
    expect_end(theirs)
    second.send(delete(0, 7))
    expect(other, delete(0, 7))
    other.send(delete(8))
    expect(second, delete(8))


def test_what_is_late_arrives_on_its_own_connection_after_it_was_sent_again(
    new_ends: Callable[[Failure], LinkEnds],
) -> None:
    late = new_ends(Failure.LATE)
    ours, theirs = late.connect()
    ours.send(delete(0, 7))
    expect_end(ours)
    with pytest.raises(TimeoutError):
        receive(theirs, 0.05)
    again, there = late.connect()
    again.send(delete(0, 7))
    expect(there, delete(0, 7))
    expect(theirs, delete(0, 7))
    expect_end(theirs)
    again.send(delete(0, 7))
    expect(there, delete(0, 7))


@pytest.mark.parametrize("failure", Failure)
@pytest.mark.parametrize("name", ABOUT_REFERENCES)
def test_what_is_about_references_arrives_though_it_failed_three_times(
    new_group: NewGroup, name: str, failure: Failure
) -> None:
    group = new_group(3, **all_fail([name], failure, sends=3))
    shelf = remote(group.agents[0], 1, make_once, "tea")
    expect_confirmed(shelf)
    assert call(group.agents[0], 2, keep_and_fetch, shelf) == ["tea"]
    del shelf
    expect_nothing_left(group.agents)
    assert runs == ["tea"]
    assert sum(agent.get_metrics()["resends"] for agent in group.agents) >= (1 if failure is Failure.LATE else 3)
    group.shutdown()


def keep_and_fetch(shelf: RRef[list[str]]) -> list[str]:
    expect_confirmed(shelf)  # what is not kept for a moment is not asked for
    return shelf.to_here()


def make_once(item: str) -> list[str]:
    return [run(item)]


@pytest.mark.parametrize("failure", Failure)
def test_all_tables_are_empty_after_everything_failed_under_load(
    new_group: NewGroup, background: ThreadPoolExecutor, failure: Failure
) -> None:
    group = new_group(
        3,
        **all_fail(["RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE"], failure, sends=2),
        messages_to_delay={"RREF_USER_DELETE": 0.02, "RREF_CHILD_ACCEPT": 0.01, "PYTHON_CALL": 0.005},
    )

    def work(number: int) -> Any:
        caller, owner, third = (group.agents[(number + step) % 3] for step in range(3))
        rref = remote(caller, owner.info.name, list, "ab")
        try:
            return call(caller, third.info.name, pass_around, rref)
        except WorkerLostError:  # a connection broke that was busy for too long
            return "lost"

    results = list(background.map(work, range(24)))
    assert {str(result) for result in results} <= {"['a', 'b']", "lost"}
    assert results.count("lost") < len(results) / 2
    expect_nothing_left(group.agents)
    group.shutdown()


def pass_around(rref: RRef[Any]) -> Any:
    return rref.to_here(timeout=SOON)


def test_calls_that_are_under_way_are_spared(new_group: NewGroup) -> None:
    """What was lost is sent again when they have ended."""
    group = new_group(2, **all_fail(["RREF_USER_DELETE"], Failure.REQUEST_LOST))
    rref = remote(group.agents[0], 1, list, "x")
    expect_confirmed(rref)
    gate = new_gate("spared")
    future = start(group.agents[0], 1, wait_at, "spared", "done")
    assert arrived["spared"].wait(SOON)
    del rref
    threading.Event().wait(0.2)
    assert tables(group.agents[1])["owned"] == 1
    gate.set()
    assert future.wait() == "done"
    expect_nothing_left(group.agents)


def test_the_error_of_a_broken_connection_says_who_broke_it(new_group: NewGroup) -> None:
    group = new_group(2, **all_fail(["PYTHON_REMOTE_CALL"], Failure.REQUEST_LOST))
    gate = new_gate("broken")
    future = start(group.agents[0], 1, wait_at, "broken")
    assert arrived["broken"].wait(SOON)
    rref = remote(group.agents[0], 1, echo, "tea")
    with pytest.raises(
        WorkerLostError, match=r"the faulty agent let this PYTHON_REMOTE_CALL fail \(request lost; 1 of 1"
    ):
        future.wait()
    gate.set()
    expect_confirmed(rref)
    assert rref.to_here() == "tea"
    del rref, future
    expect_nothing_left(group.agents)


def test_a_reference_in_a_lost_reply_does_not_leak(new_group: NewGroup) -> None:
    group = new_group(2, **all_fail(["PYTHON_CALL"], Failure.REPLY_LOST))
    with pytest.raises(RpcTimeoutError):
        call(group.agents[0], 1, new_reference, group, timeout=MOMENT)
    expect_nothing_left(group.agents)
    rref = call(group.agents[0], 1, new_reference, group)
    assert rref.to_here() == "new"
    del rref
    expect_nothing_left(group.agents)


def new_reference(group: LocalGroup) -> RRef[Any]:
    return here(group.agents[1], "new")
