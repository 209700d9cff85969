"""References that travel: to any worker, in anything, before their value exists or after."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from farcall import RRef, UsageError
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import NewGroup, call, echo, start
from reference_values import Box, Shelf, expect_no_references, fetch, fetch_all, keep, kept, references_in

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _keep_nothing() -> Iterator[None]:
    kept.clear()
    yield
    kept.clear()


CARRIERS: dict[str, Callable[[RRef[Any]], Any]] = {
    "itself": lambda rref: rref,
    "list": lambda rref: [rref],
    "nested": lambda rref: {"a": [(1, (rref,))]},
    "object": lambda rref: Box(Box(rref)),
    "key": lambda rref: {rref: "value"},
    "set": lambda rref: {rref},
    "twice": lambda rref: [rref, rref, copy.copy(rref)],
}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_reference_goes_to_any_worker_and_back_in_anything(group: LocalGroup, carrier: str) -> None:
    """Owned by each worker in turn, sent to each worker in turn: to third workers, to its owner, to oneself."""
    wrap = CARRIERS[carrier]
    for owner in range(3):
        for to in range(3):
            rref = group.remote(0, owner, echo, ("tea",))
            sent = wrap(rref)
            assert call(group.agents[0], to, fetch_all, sent) == ["tea"] * len(references_in(sent))
            back = call(group.agents[0], to, echo, wrap(rref))
            assert references_in(back) == references_in(sent)
            assert fetch_all(back) == ["tea"] * len(references_in(sent))
            del rref, sent, back
    expect_no_references(group)


@pytest.mark.parametrize("to", [0, 1, 2])
def test_a_closure_takes_the_references_along_that_it_uses(group: LocalGroup, to: int) -> None:
    send_in_closures(group, to)
    expect_no_references(group)


def send_in_closures(group: LocalGroup, to: int) -> None:
    rref = group.remote(0, 1, echo, ("tea",))
    assert call(group.agents[0], to, lambda: rref.to_here(timeout=SOON)) == "tea"
    assert call(group.agents[0], to, lambda found=rref: found) == rref


@pytest.mark.parametrize("to", [0, 1, 2])
def test_a_value_may_hold_a_reference(group: LocalGroup, to: int) -> None:
    inner = group.remote(0, 1, echo, ("tea",))
    outer = group.remote(0, to, Box, (inner,))
    assert outer.to_here().content == inner
    del inner
    gc.collect()
    assert outer.to_here().content.to_here() == "tea", "the box at its owner holds it"
    del outer
    expect_no_references(group)


def test_a_reference_is_passed_from_worker_to_worker_many_times(group: LocalGroup) -> None:
    rref = group.remote(0, 1, Shelf)
    for _ in range(3):
        assert call(group.agents[0], 1, pass_on, group, 1, [2, 0, 1, 2, 0], rref) == "at the end"
    assert rref.to_here().items == ["passed"] * 18
    del rref
    expect_no_references(group)


def pass_on(group: LocalGroup, here: int, path: list[int], rref: RRef[Shelf]) -> str:
    rref.rpc_sync(timeout=SOON).put("passed")
    if not path:
        return "at the end"
    return str(call(group.agents[here], path[0], pass_on, group, path[0], path[1:], rref))


def test_a_reference_can_be_passed_and_used_before_its_value_exists(group: LocalGroup) -> None:
    gate = new_gate("value")
    rref = group.remote(0, 1, wait_at, ("value", "tea"))
    futures = [start(group.agents[0], to, fetch, rref) for to in range(3)]
    both = group.remote(0, 2, fetch_all, ([rref, rref],))
    assert arrived["value"].wait(SOON)
    assert not any(future.done() for future in futures)
    gate.set()
    assert [future.wait() for future in futures] == ["tea"] * 3
    assert both.to_here() == ["tea", "tea"]
    del rref, both, futures
    expect_no_references(group)


def test_a_reference_that_was_passed_on_works_after_its_sender_has_dropped_it(group: LocalGroup) -> None:
    """The first holder may go before the owner has counted the second one."""
    for _ in range(50):
        rref = group.remote(0, 1, echo, ("tea",))
        call(group.agents[0], 2, keep, rref)
        del rref
    gc.collect()
    assert [each.to_here(timeout=SOON) for each in kept] == ["tea"] * 50
    kept.clear()
    expect_no_references(group)


def test_a_reference_returned_by_a_function_is_the_callers(group: LocalGroup) -> None:
    rref = call(group.agents[0], 1, make_reference, group)
    assert rref.owner_name() == "worker1"
    assert rref.rpc_sync().put("tea") == 1
    theirs = call(group.agents[0], 1, make_reference_elsewhere, group)
    assert theirs.owner_name() == "worker2"
    assert theirs.rpc_sync().put("tea") == 1
    del rref, theirs
    expect_no_references(group)


def make_reference(group: LocalGroup) -> RRef[Shelf]:
    return group.rref(1, Shelf())


def make_reference_elsewhere(group: LocalGroup) -> RRef[Shelf]:
    return group.remote(1, 2, Shelf)


def test_a_reference_of_another_group_is_refused(make_group: NewGroup) -> None:
    before, group = make_group(2), make_group(2)
    old, new = before.rref(0, "old"), group.rref(0, "new")
    for to in (0, 1):
        with pytest.raises(UsageError):
            call(group.agents[0], to, fetch, old)
        with pytest.raises(UsageError):
            group.remote(0, to, fetch, (old,))
    assert call(group.agents[0], 1, fetch, new) == "new"


def test_proxies_and_their_methods_go_where_references_go(group: LocalGroup) -> None:
    rref = group.remote(0, 1, Shelf, ("tea",))
    proxy = rref.rpc_sync(timeout=SOON)
    for to in range(3):
        before = len(rref.to_here().items)
        assert call(group.agents[0], to, proxy.put, "milk") == before + 1
        assert call(group.agents[0], to, put_by, proxy, "rice") == before + 2
        assert call(group.agents[0], to, echo, proxy).size() == before + 2
    del rref, proxy
    expect_no_references(group)


def put_by(proxy: Any, item: str) -> Any:
    return proxy.put(item)


def test_many_threads_make_pass_and_drop_references(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    barrier = threading.Barrier(8)

    def work(thread: int) -> int:
        barrier.wait(SOON)
        held = []
        for n in range(20):
            maker = (thread + n) % 3
            rref = group.remote(maker, (thread + 2 * n) % 3, echo, ((thread, n),))
            assert call(group.agents[maker], n % 3, fetch_all, [rref, {1: rref}]) == [(thread, n)] * 2
            back = call(group.agents[maker], (n + 1) % 3, echo, rref)
            assert back.to_here(timeout=SOON) == (thread, n)
            held.append(back)
            if len(held) > 5:
                assert held.pop(n % 5).to_here(timeout=SOON)[0] == thread
        return len(held)

    assert list(background.map(work, range(8))) == [5] * 8
    expect_no_references(group)
