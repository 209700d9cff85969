"""References as a program sees them: made by `remote` or here, their values, and what they look like."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_type_hints

import pytest

import farcall
from farcall import (
    NotInitializedError,
    RpcTimeoutError,
    RRef,
    SerializationError,
    UnknownWorkerError,
    UsageError,
    WorkerInfo,
)
from farcall.testing import LocalGroup
from gates import SOON, arrived, gates, new_gate, wait_at
from group_stage import call, echo
from reference_stage import expect_confirmed, here, remote, tables
from reference_values import Shelf, ShelfError, fail

pytestmark = pytest.mark.timeout(30)


# -- Made by remote


def test_a_remote_call_leaves_its_result_there(group: LocalGroup) -> None:
    rref = remote(group.agents[0], "worker1", Shelf, "tea", "milk")
    assert rref.to_here().items == ["tea", "milk"]
    assert rref.owner() == WorkerInfo("worker1", 1)
    assert rref.owner_name() == "worker1"
    assert not rref.is_owner()


def test_a_remote_call_does_not_wait(group: LocalGroup) -> None:
    gate = new_gate("remote")
    rref = remote(group.agents[0], 1, wait_at, "remote", "done")
    assert arrived["remote"].wait(SOON)
    expect_confirmed(rref)  # long before there is a value
    gate.set()
    assert rref.to_here() == "done"


def test_the_functions_of_the_package(this_worker: LocalGroup) -> None:
    rref: RRef[int] = farcall.remote("worker1", max, args=(3, 4), timeout=5.0)
    assert rref.to_here() == 4
    assert farcall.remote("worker2", sorted, args=([3, 1],), kwargs={"reverse": True}).to_here() == [3, 1]
    assert isinstance(rref, RRef)


def test_a_worker_may_ask_itself(group: LocalGroup) -> None:
    rref = remote(group.agents[0], 0, Shelf, "tea")
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.to_here().items == ["tea"]
    assert rref.to_here() is rref.local_value()
    assert call(group.agents[1], 2, echo, 1) == 1


def test_to_whom_is_checked_as_in_a_call(group: LocalGroup) -> None:
    with pytest.raises(UnknownWorkerError, match="there is no worker 'worker9' in this group"):
        remote(group.agents[0], "worker9", max, 1, 2)
    with pytest.raises(UsageError, match="cannot be called"):
        group.agents[0].calling.remote(1, 5, (), None)  # type: ignore[arg-type]
    with pytest.raises(SerializationError, match=r"argument 1 .*cannot be pickled"):
        remote(group.agents[0], 1, echo, threading.Lock())
    assert tables(group.agents[0]) == {}


@pytest.mark.parametrize("to", [["worker1"], {}, None, 1.5])
def test_whom_nobody_can_be_is_refused(group: LocalGroup, to: Any) -> None:
    with pytest.raises(UsageError, match="must be a worker's name, rank or WorkerInfo"):
        remote(group.agents[0], to, max, 1, 2)


def test_lambdas_async_execution_and_coroutines_as_callees(group: LocalGroup) -> None:
    base = 40
    assert remote(group.agents[0], 1, lambda: base + 2).to_here() == 42
    shelf = Shelf("tea")
    assert remote(group.agents[0], 1, shelf.later, 4).to_here() == 5
    assert remote(group.agents[0], 1, shelf.soon, 4).to_here() == 5


def test_an_argument_may_be_changed_after_the_call(group: LocalGroup) -> None:
    numpy = pytest.importorskip("numpy")
    gate = new_gate("changed")
    blocker = remote(group.agents[0], 1, wait_at, "changed")
    array = numpy.zeros(100_000)
    rref = remote(group.agents[0], 1, echo, array)
    array[:] = 7.0
    gate.set()
    assert rref.to_here().sum() == 0.0
    assert blocker.to_here() is None


def test_an_argument_may_be_changed_after_a_call_to_oneself(group: LocalGroup) -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros(100_000)
    rref = remote(group.agents[0], 0, echo, array)
    rref.to_here()
    array[:] = 7.0
    assert rref.to_here().sum() == 0.0, "the value is the caller's own memory"


# -- Made here


def test_a_value_of_this_worker(this_worker: LocalGroup) -> None:
    shelf = Shelf("tea")
    rref = RRef(shelf)
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.owner_name() == "worker0"
    assert rref.local_value() is rref.to_here() is shelf
    assert rref._get_type() is Shelf


def test_a_type_hint_is_accepted(this_worker: LocalGroup) -> None:
    assert RRef([1], type_hint=list[int]).local_value() == [1]


def test_a_reference_needs_a_worker() -> None:
    with pytest.raises(NotInitializedError, match="init_rpc"):
        RRef(1)


def test_others_see_what_the_owner_changes(group: LocalGroup) -> None:
    shelf = Shelf()
    rref = here(group.agents[0], shelf)
    assert call(group.agents[0], 1, put_twice, rref, "tea") == 2
    assert shelf.items == ["tea", "tea"]


def put_twice(rref: RRef[Shelf], item: str) -> Any:
    rref.rpc_sync().put(item)
    return rref.rpc_sync().put(item)


# -- The value


def test_local_value_is_for_the_owner_only(group: LocalGroup) -> None:
    rref = remote(group.agents[0], "worker1", Shelf)
    with pytest.raises(UsageError, match=r"belongs to worker 'worker1': local_value\(\) works only there; use to_here"):
        rref.local_value()
    assert call(group.agents[0], 1, local_type, rref) is Shelf


def local_type(rref: RRef[Any]) -> Any:
    assert rref.is_owner()
    return type(rref.local_value())


def test_a_copy_is_a_copy(group: LocalGroup) -> None:
    rref = remote(group.agents[0], 1, Shelf, "tea")
    rref.to_here().items.append("mine")
    assert rref.to_here().items == ["tea"]


@pytest.mark.parametrize(
    ("to", "error"),
    [
        pytest.param(0, "did not exist within 0.05 s", id="at the owner"),
        pytest.param(1, "worker 'worker1' did not answer `to_here` within 0.05 s", id="elsewhere"),
    ],
)
def test_to_here_has_a_timeout(group: LocalGroup, to: int, error: str) -> None:
    gate = new_gate("slow")
    rref = remote(group.agents[0], to, wait_at, "slow", 5)
    with pytest.raises(RpcTimeoutError, match=error):
        rref.to_here(timeout=0.05)
    gate.set()
    assert rref.to_here() == 5


def test_the_default_timeout_is_the_workers(group: LocalGroup) -> None:
    gate = new_gate("default")
    remote(group.agents[0], 1, int).to_here()  # connecting may take longer than the timeout
    group.agents[0].calling.rpc_timeout = 0.05
    rrefs = [remote(group.agents[0], to, wait_at, "default", 5) for to in (0, 1)]
    for rref in rrefs:
        with pytest.raises(RpcTimeoutError):
            rref.to_here()
    with pytest.raises(RpcTimeoutError):
        rrefs[1].rpc_sync().bit_length()
    gate.set()


@pytest.mark.parametrize("to", [0, 1], ids=["at the owner", "elsewhere"])
def test_the_type_has_a_timeout(group: LocalGroup, to: int) -> None:
    gate = new_gate("type")
    rref = remote(group.agents[0], to, wait_at, "type", 5)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(rref._get_type, timeout=0.05)
        try:
            with pytest.raises(RpcTimeoutError):
                asked.result(3)
        finally:
            gate.set()
    assert rref._get_type() is int


@pytest.mark.parametrize("use", ["to_here", "rpc_sync", "_get_type"])
def test_a_timeout_below_zero_is_refused(group: LocalGroup, use: str) -> None:
    rref = remote(group.agents[0], 1, Shelf)
    with pytest.raises(UsageError, match="a timeout must be 0"):
        TIMED[use](rref)


TIMED: dict[str, Callable[[RRef[Any]], Any]] = {
    "to_here": lambda rref: rref.to_here(timeout=-5),
    "rpc_sync": lambda rref: rref.rpc_sync(timeout=-5).put("tea"),
    "_get_type": lambda rref: rref._get_type(timeout=-5),
}


def test_type_and_presence(group: LocalGroup) -> None:
    gate = new_gate("presence")
    for to in (0, 1):
        gates["presence"].clear()
        rref = remote(group.agents[0], to, wait_at, "presence", Shelf())
        present = rref._get_future()
        type_later = rref._get_type(blocking=False)
        assert not present.done()
        assert not type_later.done()
        gate.set()
        assert present.wait() is None
        assert type_later.wait() is Shelf
        assert rref._get_type() is Shelf
        assert rref._get_type(timeout=SOON, blocking=True) is Shelf


def test_awaiting_a_reference_fetches_its_value(group: LocalGroup) -> None:
    async def both() -> list[Any]:
        return [
            await remote(group.agents[0], 1, echo, 5),
            await remote(group.agents[0], 0, echo, 6),
            await here(group.agents[0], 7),
        ]

    assert asyncio.run(both()) == [5, 6, 7]


def test_awaiting_a_reference_whose_function_failed(group: LocalGroup) -> None:
    async def one(to: int) -> Any:
        return await remote(group.agents[0], to, fail, "empty")

    for to in (0, 1):
        with pytest.raises(ShelfError, match="empty"):
            asyncio.run(one(to))


# -- What it looks like


def test_equal_hashed_and_shown_by_what_it_refers_to(group: LocalGroup) -> None:
    first, second = remote(group.agents[0], 1, echo, 5), remote(group.agents[0], 1, echo, 5)
    assert first == copy.copy(first)
    assert first != second
    assert first != 5
    assert {first: 1}[copy.copy(first)] == 1
    assert repr(first) == "<RRef 0:1 owned by 'worker1'>"
    assert call(group.agents[0], 2, repr, first) == repr(first)
    assert repr(first.rpc_sync()) == "<RRef 0:1 owned by 'worker1'>.rpc_sync()"
    assert [repr(proxy())[-8:] for proxy in (first.rpc_async, first.remote)] == ["_async()", "remote()"]


def test_it_is_generic_in_its_type() -> None:
    assert get_type_hints(put_twice)["rref"] == RRef[Shelf]
    assert RRef[int] != RRef[str]


def test_a_copy_is_the_same_handle(group: LocalGroup) -> None:
    rref = remote(group.agents[0], 1, echo, 5)
    expect_confirmed(rref)
    other = copy.copy(rref)
    del rref
    gc.collect()
    call(group.agents[0], 1, echo, 0)
    assert other.to_here() == 5
    assert other.confirmed_by_owner()
