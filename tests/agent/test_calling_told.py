"""What a remote call makes is told without being asked, if it was plain and wanted the last time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from eventually import eventually
from farcall import RpcTimeoutError, RRef
from farcall.agent import calling as calling_module
from farcall.agent import execution
from farcall.agent.outgoing import Outgoing
from farcall.functions import async_execution
from farcall.futures import PENDING, Future
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import NewGroup, call
from reference_stage import expect_confirmed, expect_nothing_left, remote

pytestmark = pytest.mark.timeout(30)

made: list[str] = []
results: list[Any] = []


@pytest.fixture
def group(new_group: NewGroup) -> LocalGroup:
    made.clear()
    results.clear()
    return new_group(2)


def make(value: Any) -> Any:
    made.append(type(value).__name__)
    return value


def next_result() -> Any:
    result = results.pop(0)
    if isinstance(result, Exception):
        raise result
    return result


async def number_later() -> int:
    return 7


@async_execution
def number_in_a_future() -> Future[int]:
    future: Future[int] = Future()
    future.set_result(7)
    return future


def connection(group: LocalGroup) -> Outgoing:
    found = group[0].calling.peers[1].connection
    assert found is not None
    return found


def wanted(group: LocalGroup, function: Callable[..., Any], *args: Any) -> Any:
    """Makes and fetches it, so that it is known to be wanted."""
    return remote(group[0], 1, function, *args).to_here(timeout=SOON)


@pytest.mark.parametrize("value", [None, 7, 2**100, 0.5, True, "tea", "", 1j], ids=repr)
def test_plain_values_that_were_wanted_are_told_the_next_time(group: LocalGroup, value: Any) -> None:
    first = remote(group[0], 1, make, value)
    assert first._handle.told is None
    assert first.to_here() == value
    second = remote(group[0], 1, make, value)
    assert second._handle.told is not None
    asked = connection(group).calls_started
    found = second.to_here()
    assert (found, type(found)) == (value, type(value))
    assert connection(group).calls_started == asked, "nothing was asked for"
    assert len(made) == 2
    del first, second
    expect_nothing_left(group)
    assert not connection(group).pending


@pytest.mark.parametrize("function", [number_later, number_in_a_future])
def test_what_is_there_later_is_told_then(group: LocalGroup, function: Callable[[], Any]) -> None:
    assert wanted(group, function) == 7
    told = remote(group[0], 1, function)
    assert told._handle.told is not None
    assert told.to_here(timeout=SOON) == 7


def test_what_is_told_is_used_once_and_asked_for_from_then_on(group: LocalGroup) -> None:
    wanted(group, make, 1)
    rref = remote(group[0], 1, make, 2)
    asked = connection(group).calls_started
    assert [rref.to_here(), rref.to_here()] == [2, 2]
    assert connection(group).calls_started == asked + 1


@pytest.mark.parametrize("value", [[1], {}, b"memory", object], ids=repr)
def test_what_may_change_or_is_not_plain_is_asked_for(group: LocalGroup, value: Any) -> None:
    assert wanted(group, make, value) == value
    rref = remote(group[0], 1, make, value)
    assert rref._handle.told is None
    assert rref.to_here() == value


def test_what_turns_out_not_to_be_plain_is_asked_for_and_shows_what_it_is_by_then(group: LocalGroup) -> None:
    results[:] = [1, [1], 3]
    assert wanted(group, next_result) == 1
    rref = remote(group[0], 1, next_result)
    told = rref._handle.told
    assert told is not None
    eventually(lambda: told.done() or call(group[0], 1, len, ()))
    rref.rpc_sync().append(2)
    assert rref.to_here() == [1, 2]
    assert remote(group[0], 1, next_result)._handle.told is None, "it is not relied on again"


def test_a_long_text_is_asked_for(group: LocalGroup) -> None:
    wanted(group, make, "tea")
    rref = remote(group[0], 1, make, "tea" * 100_000)
    told = rref._handle.told
    assert told is not None
    assert rref.to_here() == "tea" * 100_000
    assert told.outcome()[0] == PENDING


def test_what_nobody_wants_is_not_told_again(group: LocalGroup) -> None:
    wanted(group, make, 1)
    in_vain = remote(group[0], 1, make, 2)
    assert in_vain._handle.told is not None
    del in_vain
    gc.collect()
    assert remote(group[0], 1, make, 3)._handle.told is None
    expect_nothing_left(group)
    eventually(lambda: not connection(group).pending)


@pytest.mark.filterwarnings("error")
def test_a_failure_is_told_and_raised_by_each_use_and_reported_by_none(group: LocalGroup) -> None:
    results[:] = [1, ValueError("no tea"), 3, ValueError("nobody looks")]
    assert wanted(group, next_result) == 1
    rref = remote(group[0], 1, next_result)
    for _ in range(2):
        with pytest.raises(ValueError, match="no tea"):
            rref.to_here(timeout=SOON)
    assert wanted(group, next_result) == 3
    unseen = remote(group[0], 1, next_result)
    told = unseen._handle.told
    assert told is not None
    eventually(lambda: told.done() or call(group[0], 1, len, ()))
    del rref, unseen
    expect_nothing_left(group)


def test_what_is_told_too_late_ends_by_the_timeout_and_can_be_had_afterwards(group: LocalGroup) -> None:
    new_gate("open").set()
    assert wanted(group, wait_at, "open", 1) == 1
    gate = new_gate("told")
    rref = remote(group[0], 1, wait_at, "told", 2)
    assert rref._handle.told is not None
    with pytest.raises(RpcTimeoutError, match=r"worker 'worker1' did not answer `to_here` within 0\.01 s"):
        rref.to_here(timeout=0.01)
    assert arrived["told"].wait(SOON)
    gate.set()
    assert rref.to_here(timeout=SOON) == 2


def test_what_is_lost_with_its_connection_is_asked_for_and_made_once(group: LocalGroup) -> None:
    new_gate("open").set()
    wanted(group, wait_at, "open", 1)
    gate = new_gate("lost")
    rref = remote(group[0], 1, wait_at, "lost", 2)
    assert arrived["lost"].wait(SOON)
    assert rref._handle.told is not None
    connection(group).lose("the test has it so", advice="")
    gate.set()
    assert rref.to_here(timeout=SOON) == 2
    expect_confirmed(rref)
    del rref
    expect_nothing_left(group)


def test_a_call_that_is_lost_before_it_arrives_is_sent_again_and_answered_to_nobody(
    group: LocalGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_gate("open").set()
    wanted(group, wait_at, "open", 1)
    one = connection(group)

    def lost(*_: object, **__: object) -> None:
        one.lose("the test has it so", advice="")

    first, second = new_gate("first"), new_gate("second")
    with monkeypatch.context() as patch:
        patch.setattr(one, "send_control", lost)
        again = remote(group[0], 1, wait_at, "first", "sent again")
    assert again._handle.told is None
    assert not one.pending
    group[0].book.resend(group[1].book.me)
    assert arrived["first"].wait(SOON)
    other = remote(group[0], 1, wait_at, "second", "another")
    assert other._handle.told is not None, "on a new connection, where ids are counted anew"
    first.set()
    assert again.to_here(timeout=SOON) == "sent again"
    second.set()
    assert other.to_here(timeout=SOON) == "another"


def test_who_only_may_be_told_something_is_idle(group: LocalGroup) -> None:
    new_gate("open").set()
    wanted(group, wait_at, "open", 1)
    gate = new_gate("idle")
    rref = remote(group[0], 1, wait_at, "idle", 2)
    assert arrived["idle"].wait(SOON)
    eventually(group[0].is_idle)
    assert connection(group).pending
    gate.set()
    assert rref.to_here(timeout=SOON) == 2


def test_no_memory_for_what_is_to_be_told_has_it_asked_for(
    group: LocalGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted(group, make, 1)

    def no_memory(value: Any) -> bytes:
        monkeypatch.undo()
        raise MemoryError("for the test")

    monkeypatch.setattr(execution, "dumps_atom", no_memory)
    assert remote(group[0], 1, make, 2).to_here(timeout=SOON) == 2
    assert "for the test" in caplog.text


def test_not_every_function_is_remembered_for_ever(group: LocalGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling_module, "_MOST_PLAIN", 2)
    for function in (int, float, str, bool):
        wanted(group, function)
    assert len(group[0].calling._plain) == 2
    assert isinstance(remote(group[0], 1, bool), RRef)
