"""`RRefs`: the verbs on the references of all workers of a selection."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import farcall
from eventually import eventually
from farcall import Future, GroupCallError, RpcTimeoutError, RRefs, UsageError, WorkerLostError
from farcall.testing import LocalGroup
from gates import SOON, new_gate, wait_at
from group_stage import NewGroup


class Shelf:
    def __init__(self, *items: str) -> None:
        self.items = list(items)

    def put(self, item: str) -> int:
        self.items.append(item)
        return len(self.items)

    async def put_later(self, item: str) -> int:
        return self.put(item)

    @farcall.functions.async_execution
    def ask(self, name: str) -> Future[str]:
        return farcall.worker(name).submit(my_name)

    def wait(self, gate: str) -> None:
        wait_at(gate)

    def owner(self, item: object = None) -> str:
        return my_name()

    def sell(self, item: str) -> None:
        self.items.remove(item)


def my_name() -> str:
    return farcall.get_worker_info().name


def test_call_and_submit_on_all(group: LocalGroup) -> None:
    shelves = group.workers(others=True).keep(Shelf, "tea")
    assert (list(shelves), len(shelves)) == (["worker1", "worker2"], 2)
    assert shelves["worker1"].call(Shelf.put, "salt") == 2
    assert shelves.call(Shelf.put, "soap") == {"worker1": 3, "worker2": 2}
    assert shelves.call(Shelf.put_later, item="x") == {"worker1": 4, "worker2": 3}
    assert shelves.call(Shelf.ask, "worker2") == {"worker1": "worker2", "worker2": "worker2"}
    assert shelves.submit(Shelf.owner).result(SOON) == {"worker1": "worker1", "worker2": "worker2"}
    assert len(shelves.submit(Shelf.owner).first(1).result(SOON)) == 1
    assert shelves.call(lambda shelf: shelf.items[0]) == {"worker1": "tea", "worker2": "tea"}
    assert repr(shelves) == "<RRefs on 'worker1', 'worker2'>"
    with pytest.raises(GroupCallError) as failed:
        shelves.call(Shelf.sell, "salt")
    assert list(failed.value.errors) == ["worker2"]
    assert isinstance(failed.value.errors["worker2"], ValueError)


class CountsPickles:
    """Counts how often it is pickled."""

    pickled = 0

    def __reduce__(self) -> tuple[Any, ...]:
        CountsPickles.pickled += 1
        return CountsPickles, ()


def test_arguments_are_pickled_once(group: LocalGroup) -> None:
    CountsPickles.pickled = 0
    shelves = group.workers().keep(Shelf)
    assert len(shelves.call(Shelf.owner, CountsPickles())) == 3
    assert CountsPickles.pickled == 1
    assert shelves.call(lambda shelf, more: len(shelf.items) + len(more), bytes(2_000_000)) == dict.fromkeys(
        ("worker0", "worker1", "worker2"), 2_000_000
    )
    both = RRefs({"here": shelves["worker1"], "there": shelves["worker1"], "other": group.rref("worker2", Shelf("x"))})
    counts = both.call(Shelf.put, "tea")
    assert ({counts["here"], counts["there"]}, counts["other"]) == ({1, 2}, 2)


def test_map_and_any(group: LocalGroup) -> None:
    stuck = new_gate("stuck")
    shelves = group.workers(others=True).keep(Shelf)
    assert sorted(set(shelves.map(Shelf.owner, range(8)))) == ["worker1", "worker2"]
    assert sum(shelves.call(lambda shelf: len(shelf.items)).values()) == 0
    assert len(list(shelves.map(Shelf.put, ["a", "b", "c", "d"]))) == 4
    assert sum(shelves.call(lambda shelf: len(shelf.items)).values()) == 4
    waiting = shelves["worker1"].submit(Shelf.wait, "stuck")
    anyone = shelves.any()
    assert {anyone.call(Shelf.owner) for _ in range(6)} == {"worker2"}
    assert anyone.options(timeout=SOON).submit(Shelf.owner).result(SOON) == "worker2"
    assert anyone.keep(Shelf.owner).to_here() == "worker2"
    stuck.set()
    waiting.result(SOON)
    assert {anyone.call(Shelf.owner) for _ in range(6)} == {"worker1", "worker2"}


def test_the_options_of_a_selection_stay_with_its_references(group: LocalGroup) -> None:
    stuck = new_gate("stuck")
    shelves = group.workers("worker1").options(timeout=0.05).keep(Shelf)
    with pytest.raises(GroupCallError) as failed:
        shelves.call(Shelf.wait, "stuck")
    assert isinstance(failed.value.errors["worker1"], RpcTimeoutError)
    with pytest.raises(RpcTimeoutError):
        shelves.any().call(Shelf.wait, "stuck")
    stuck.set()
    assert shelves.options(timeout=None).call(Shelf.put, "tea") == {"worker1": 1}


def length_of_all(shelves: RRefs[Shelf]) -> dict[str, int]:
    return shelves.options(timeout=SOON).call(Shelf.put, "more")


def test_references_may_be_sent(group: LocalGroup) -> None:
    shelves = group.workers("worker0", "worker2").keep(Shelf, "tea")
    assert group.worker("worker1").call(length_of_all, shelves) == {"worker0": 2, "worker2": 2}


def test_references_that_are_dropped_are_kept_until_their_calls_are_answered(group: LocalGroup) -> None:
    slow = new_gate("slow")
    futures = group.workers("worker1", "worker2").keep(wait_at, "slow", "tea").submit(len)
    gc.collect()
    eventually(lambda: group.references("worker1").owned)
    slow.set()
    assert futures.result(SOON) == {"worker1": 3, "worker2": 3}
    eventually(lambda: not group.references("worker1").owned and not group.references("worker0").held)


def test_a_lost_owner(make_group: NewGroup) -> None:
    group = make_group(3, is_open=True)
    shelves = group.workers(others=True).wait_joined(2, SOON).keep(Shelf)
    assert len(shelves.call(Shelf.put, "tea")) == 2
    group.leave("worker1")
    with pytest.raises(GroupCallError) as failed:
        shelves.call(Shelf.put, "salt")
    assert list(failed.value.errors) == ["worker1"]
    assert isinstance(failed.value.errors["worker1"], WorkerLostError)
    eventually(lambda: len(group.workers(others=True)) == 1)
    assert {shelves.any().call(Shelf.owner) for _ in range(4)} == {"worker2"}
    assert set(shelves.map(Shelf.owner, range(5))) == {"worker2"}


def test_what_are_no_references(group: LocalGroup) -> None:
    shelf = group.worker("worker1").keep(Shelf)
    assert RRefs({"mine": shelf}).call(Shelf.put, "tea") == {"mine": 1}
    wrong: Any
    for wrong in (3, [shelf], {"mine": 3}):
        with pytest.raises(UsageError, match="RRefs takes"):
            RRefs(wrong)
    nothing: Any = RRefs({})
    for use in (nothing.call, nothing.submit):
        with pytest.raises(UsageError, match="there are no references"):
            use(Shelf.put, "tea")
    with pytest.raises(UsageError, match="there are no references"):
        nothing.any()
