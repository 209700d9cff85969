"""References by themselves: how they are made, and how their values are had."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import farcall as rpc
from eventually import eventually
from farcall import NotInitializedError, RpcTimeoutError, RRef, SerializationError, UsageError, WorkerInfo
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import call, echo
from reference_values import Shelf, ShelfError, expect_no_references, fail

pytestmark = pytest.mark.timeout(30)

SHORT = 0.05
"""Seconds: the timeout of a wait for a value that does not come before the test lets it."""

owners = pytest.mark.parametrize("to", [0, 1], ids=["owned here", "owned by another worker"])


def test_the_result_of_a_remote_call_stays_where_it_was_made(group: LocalGroup) -> None:
    rref = group.remote(0, "worker1", Shelf, ("tea", "milk"))
    assert rref.to_here().items == ["tea", "milk"]
    assert rref.owner() == WorkerInfo("worker1", 1)
    assert rref.owner_name() == "worker1"
    assert not rref.is_owner()
    (owned,) = group.references(1).owned
    assert (owned.type, owned.holders) == ("Shelf", ("worker0",))


@owners
def test_a_remote_call_does_not_wait_for_its_function(group: LocalGroup, to: int) -> None:
    gate = new_gate("remote")
    rref = group.remote(0, to, wait_at, ("remote", "done"))
    assert arrived["remote"].wait(SOON)
    eventually(rref.confirmed_by_owner)
    gate.set()
    assert rref.to_here() == "done"


def test_the_owner_gets_the_value_itself_and_others_get_copies(group: LocalGroup) -> None:
    shelf = Shelf("tea")
    rref = group.rref(0, shelf)
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.local_value() is rref.to_here() is shelf
    assert call(group.agents[0], 1, change_a_copy, rref) == ["tea", "mine"]
    assert shelf.items == ["tea"]


def change_a_copy(rref: RRef[Shelf]) -> list[str]:
    shelf = rref.to_here()
    shelf.items.append("mine")
    return shelf.items


def test_the_value_of_a_remote_call_to_oneself_is_the_value_itself(group: LocalGroup) -> None:
    rref = group.remote(0, 0, Shelf, ("tea",))
    assert rref.is_owner()
    assert rref.to_here() is rref.local_value()


def test_local_value_is_refused_on_other_workers(group: LocalGroup) -> None:
    rref = group.remote(0, "worker1", Shelf)
    with pytest.raises(UsageError, match=r"belongs to worker 'worker1': local_value\(\) works only there"):
        rref.local_value()


@owners
def test_to_here_ends_at_its_timeout_and_can_be_tried_again(group: LocalGroup, to: int) -> None:
    gate = new_gate("slow")
    rref = group.remote(0, to, wait_at, ("slow", 5))
    with pytest.raises(RpcTimeoutError):
        rref.to_here(timeout=SHORT)
    gate.set()
    assert rref.to_here() == 5


@owners
def test_the_default_timeout_of_a_reference_is_that_of_the_worker(group: LocalGroup, to: int) -> None:
    gate = new_gate("slow")
    group.agents[0].rpc_timeout = SHORT
    rref = group.remote(0, to, wait_at, ("slow", 5))
    with pytest.raises(RpcTimeoutError):
        rref.to_here()
    with pytest.raises(RpcTimeoutError):
        rref.rpc_sync().bit_length()
    gate.set()


@owners
def test_a_reference_can_be_awaited(group: LocalGroup, to: int) -> None:
    async def both() -> list[Any]:
        values = [await group.remote(0, to, echo, (5,)), await group.rref(0, 6)]
        with pytest.raises(ShelfError, match="empty"):
            await group.remote(0, to, fail, ("empty",))
        return values

    assert asyncio.run(both()) == [5, 6]


def test_references_are_equal_if_they_came_from_the_same_call(group: LocalGroup) -> None:
    first, second = group.remote(0, 1, echo, (5,)), group.remote(0, 1, echo, (5,))
    assert first == copy.copy(first)
    assert first == call(group.agents[0], 2, echo, first)
    assert first != second
    assert {first: 1}[copy.copy(first)] == 1
    assert group.rref(0, "same") != group.rref(0, "same")
    assert repr(first) == call(group.agents[0], 2, repr, first) == "<RRef 0:1 owned by 'worker1'>"


def test_a_reference_cannot_be_pickled_or_copied_deeply_outside_of_a_call(group: LocalGroup) -> None:
    rref = group.remote(0, 1, Shelf)
    for value in (rref, [1, {2: rref}], rref.rpc_sync(), rref.rpc_sync().put):
        with pytest.raises(SerializationError, match=r"only as an argument or result of a remote call"):
            pickle.dumps(value)
    for value in (rref, [rref], rref.rpc_sync()):
        with pytest.raises(UsageError, match=r"cannot be deep-copied"):
            copy.deepcopy(value)


def test_a_reference_in_an_exception_arrives_as_text(group: LocalGroup) -> None:
    rref = group.remote(0, 1, Shelf)
    with pytest.raises(Exception, match="RRef 0:1") as caught:
        call(group.agents[0], 2, raise_with, rref)
    del rref, caught
    expect_no_references(group)


def raise_with(rref: RRef[Any]) -> None:
    raise LookupError(rref)


def test_without_a_worker_there_are_no_references() -> None:
    uses: list[Callable[[], object]] = [lambda: RRef(1), lambda: rpc.remote("worker1", list), rpc.references]
    for use in uses:
        with pytest.raises(NotInitializedError, match="init_rpc"):
            use()


def test_the_functions_of_the_package_make_references(alone: None) -> None:
    assert rpc.remote("alone", max, args=(3, 4), timeout=5.0).to_here() == 4
    assert rpc.remote("alone", sorted, args=([3, 1],), kwargs={"reverse": True}).to_here() == [3, 1]
    mine = RRef([1, 2, 3], type_hint=list[int])
    assert mine.local_value() == [1, 2, 3]
    assert [owned.type for owned in rpc.references().owned if owned.handles] == ["list"]
    assert __file__ in rpc.references().owned[-1].created_at


def test_a_value_that_cannot_be_pickled_is_used_where_it_is(group: LocalGroup) -> None:
    rref = group.remote(0, 1, make_generator)
    with pytest.raises(SerializationError, match="cannot be pickled"):
        rref.to_here()
    assert rref.rpc_sync().__next__() == 0
    assert rref.rpc_sync().__next__() == 1


def make_generator() -> Any:
    return (number for number in range(5))


def test_what_is_wrong_with_a_remote_call_is_raised_at_once_and_leaves_nothing(group: LocalGroup) -> None:
    rref = group.rref(0, 5)
    with pytest.raises(SerializationError):
        group.remote(0, 1, echo, (rref, make_generator()))
    with pytest.raises(UsageError):
        group.remote(0, "nobody", echo, (rref,))
    del rref
    expect_no_references(group)
