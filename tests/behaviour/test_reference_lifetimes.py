"""When the value of a reference goes: when the last reference to it anywhere has gone, and not before."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import farcall as rpc
from eventually import eventually
from farcall import ReferenceRefusedError, RRef, UsageError
from farcall.api import _delete_all_user_and_unforked_owner_rrefs, _destroy_rref_context, _rref_context_get_debug_info
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import NewGroup, call, echo, start
from reference_values import Shelf, ShelfError, expect_no_references, fail, fetch, keep, kept

pytestmark = pytest.mark.timeout(60)

values: list[weakref.ref[Any]] = []
"""Every shelf that `make_shelf` has made."""


@pytest.fixture(autouse=True)
def _keep_nothing() -> Iterator[None]:
    for each in (kept, values):
        each.clear()
    yield
    for each in (kept, values):
        each.clear()


def make_shelf() -> Shelf:
    shelf = Shelf()
    values.append(weakref.ref(shelf))
    return shelf


def alive() -> int:
    """How many of these shelves there are."""
    return sum(value() is not None for value in values)


# -- One value


@pytest.mark.parametrize("to", [0, 1], ids=["owned here", "owned by another worker"])
def test_a_value_goes_when_its_only_reference_is_dropped(group: LocalGroup, to: int) -> None:
    rref = group.remote(0, to, make_shelf)
    assert rref.to_here(timeout=SOON).items == []
    for n in range(3):
        call(group.agents[0], to, echo, n)
    assert values[0]() is not None
    del rref
    eventually(lambda: values[0]() is None)
    expect_no_references(group)


def test_a_value_made_here_goes_when_its_only_reference_is_dropped(group: LocalGroup) -> None:
    rref = group.rref(0, make_shelf())
    gc.collect()
    assert alive() == 1
    del rref
    eventually(lambda: alive() == 0)


def test_a_value_lives_as_long_as_any_worker_holds_a_reference(group: LocalGroup) -> None:
    first = group.rref(1, make_shelf())
    call(group.agents[1], 0, keep, first)
    call(group.agents[1], 2, keep, first)
    del first
    gc.collect()
    for worker in (0, 2):
        eventually(lambda worker=worker: group.references(worker).held[0].confirmed)
    assert alive() == 1
    kept.pop(0)
    eventually(lambda: not group.references(0).held)
    for _ in range(3):
        call(group.agents[2], 1, echo, 0)
    assert alive() == 1
    assert kept[0].to_here(timeout=SOON).items == []
    kept.clear()
    eventually(lambda: alive() == 0)
    expect_no_references(group)


def test_a_value_lives_while_a_function_runs_that_was_given_a_reference(group: LocalGroup) -> None:
    gate = new_gate("function")
    rref = group.remote(0, 1, make_shelf)
    future = start(group.agents[0], 2, use_after, rref, "function")
    del rref
    assert arrived["function"].wait(SOON)
    gc.collect()
    for _ in range(3):
        call(group.agents[0], 1, echo, 0)
    assert alive() == 1
    gate.set()
    assert future.wait() == 1
    eventually(lambda: alive() == 0)


def use_after(rref: RRef[Shelf], gate: str) -> Any:
    wait_at(gate)
    return rref.rpc_sync(timeout=SOON).put("tea")


def test_a_call_holds_its_reference_until_it_is_answered(group: LocalGroup) -> None:
    """Nobody keeps the references in these chains, and their values do not exist yet."""
    gate = new_gate("held")
    future = group.remote(0, 1, wait_at, ("held", Shelf("tea"))).rpc_async(timeout=SOON).put("milk")
    chained = group.remote(0, 1, wait_at, ("held", Shelf("tea"))).remote().put("milk").remote().bit_length()
    gc.collect()
    assert arrived["held"].wait(SOON)
    for _ in range(50):
        group.references(0)  # which tells the owner what was dropped
        call(group.agents[0], 1, echo, 0)
    gate.set()
    assert future.wait() == 2
    assert chained.to_here(timeout=SOON) == 2
    del chained
    expect_no_references(group)


def test_a_reference_that_is_dropped_before_its_function_has_ended_frees_the_value(group: LocalGroup) -> None:
    gate = new_gate("dropped")
    rref = group.remote(0, 1, make_shelf_at, ("dropped",))
    assert arrived["dropped"].wait(SOON)
    del rref
    gate.set()
    eventually(lambda: len(values) == 1)
    eventually(lambda: alive() == 0)
    expect_no_references(group)


def make_shelf_at(gate: str) -> Shelf:
    wait_at(gate)
    return make_shelf()


def test_the_finalizer_of_a_value_may_make_calls_and_holds_up_nobody(group: LocalGroup) -> None:
    gate = new_gate("finalizer")
    rref = group.rref(1, Finalized(group))
    call(group.agents[1], 0, keep, rref)
    del rref
    kept.clear()
    assert arrived["finalizer"].wait(SOON)
    assert call(group.agents[0], 1, echo, "served") == "served"
    gate.set()
    eventually(lambda: finalized == ["asked"])
    expect_no_references(group)


finalized: list[Any] = []


class Finalized:
    def __init__(self, group: LocalGroup) -> None:
        finalized.clear()
        self.group = group

    def __del__(self) -> None:
        call(self.group.agents[1], 2, wait_at, "finalizer")
        finalized.append(call(self.group.agents[1], 0, echo, "asked"))


# -- Many values


def test_a_thousand_references_made_and_dropped_leave_nothing(group: LocalGroup) -> None:
    for number in range(1000):
        rref = group.remote(0, 1, make_shelf)
        if number % 2:
            call(group.agents[0], 2, len, [rref])
        if number % 3 == 0:
            call(group.agents[0], 1, len, [rref])
        if number % 5 == 0:
            call(group.agents[0], 2, keep, rref)
        if number % 7 == 0:
            rref.rpc_sync().put("tea")
    del rref
    kept.clear()
    expect_no_references(group)
    eventually(lambda: alive() == 0)
    assert len(values) == 1000


def test_references_dropped_by_many_threads_at_once_leave_nothing(
    group: LocalGroup, background: ThreadPoolExecutor
) -> None:
    references = [group.remote(0, 1 + n % 2, make_shelf) for n in range(400)]
    barrier = threading.Barrier(8)

    def drop() -> None:
        barrier.wait(SOON)
        while references:
            try:
                references.pop()
            except IndexError:
                return

    for job in [background.submit(drop) for _ in range(8)]:
        job.result(SOON)
    expect_no_references(group)
    eventually(lambda: alive() == 0)


def test_references_in_a_result_that_nobody_reads_are_given_back(group: LocalGroup) -> None:
    future = start(group.agents[0], 1, make_references, group)
    eventually(future.done)
    del future
    expect_no_references(group)
    eventually(lambda: alive() == 0)
    assert len(values) == 10


def make_references(group: LocalGroup) -> list[RRef[Shelf]]:
    return [group.rref(1, make_shelf()) for _ in range(10)]


@pytest.mark.parametrize("to", [0, 1], ids=["owned here", "owned by another worker"])
def test_an_error_that_was_handled_keeps_no_reference(group: LocalGroup, to: int) -> None:
    """Not even until the garbage collector runs."""
    gc.collect()
    gc.disable()
    try:
        use_in_vain(group, to)
        eventually(lambda: not any(group.references(rank).owned or group.references(rank).held for rank in range(2)))
    finally:
        gc.enable()


def use_in_vain(group: LocalGroup, to: int) -> None:
    rref = group.remote(0, to, fail, ("early",))
    for use in (lambda: rref.to_here(), lambda: rref.rpc_sync().put("x"), lambda: rref.rpc_async().put("x").wait()):
        try:
            use()
        except ShelfError:
            pass


# -- Reports


def test_the_inventory_names_owners_holders_and_the_line_that_made_a_reference(group: LocalGroup) -> None:
    own, other = group.rref(0, Shelf()), group.remote(0, 1, Shelf)
    call(group.agents[0], 2, keep, own)
    eventually(other.confirmed_by_owner)
    ((owned,), (held,)) = group.references(0).owned, group.references(0).held
    assert (owned.type, owned.handles, owned.holders) == ("Shelf", 1, ("worker2",))
    assert (held.owner, held.confirmed) == ("worker1", True)
    assert __file__ in owned.created_at
    assert __file__ in held.created_at
    assert "owns 1, holds 1" in str(group.references(0))
    assert "the request of 'worker0'" in group.references(1).owned[0].created_at


def test_the_inventory_says_which_values_are_not_there_or_failed(group: LocalGroup) -> None:
    gate = new_gate("listed")
    pending, failed = group.remote(0, 0, wait_at, ("listed",)), group.remote(0, 0, fail, ("empty",))
    with pytest.raises(ShelfError):
        failed.to_here()
    assert "no value yet" in str(group.references(0))
    assert "failed: " in str(group.references(0))
    gate.set()
    pending.to_here()


def test_the_whole_stack_is_recorded_on_request(make_group: NewGroup) -> None:
    group = make_group(2, record_stacks=True)
    rref = group.rref(0, 5)
    (owned,) = group.references(0).owned
    assert "in test_the_whole_stack_is_recorded_on_request" in owned.created_at
    assert rref.is_owner()


def test_a_graceful_shutdown_logs_the_references_that_are_left_and_nothing_else(
    make_group: NewGroup, caplog: pytest.LogCaptureFixture
) -> None:
    group = make_group(3)
    own, other = group.rref(0, Shelf()), group.remote(0, 1, Shelf)
    call(group.agents[0], 2, keep, own)
    with caplog.at_level(logging.WARNING, "farcall"):
        group.shutdown()
    lines = sorted(record.getMessage() for record in caplog.records)
    assert len(lines) == 3
    assert "worker 'worker0' shuts down with references left: it owns 1, holds 1" in lines[0]
    assert "1 by 'worker2'" in lines[0]
    assert "worker 'worker1' shuts down with references left: it owns 1, holds 0" in lines[1]
    assert "worker 'worker2' shuts down with references left: it owns 0, holds 1" in lines[2]
    del own, other


def test_a_graceful_shutdown_with_no_shared_references_is_silent(
    make_group: NewGroup, caplog: pytest.LogCaptureFixture
) -> None:
    group = make_group(3)
    own = group.rref(0, Shelf())
    references = [group.remote(0, 1, Shelf) for _ in range(10)]
    assert call(group.agents[0], 2, fetch, references[0]).items == []
    del references
    with caplog.at_level(logging.WARNING, "farcall"):
        group.shutdown()
    assert caplog.text == ""
    assert own.local_value().items == []


# -- Giving up all references


def test_the_counters_that_torch_has(group_of_this_worker: LocalGroup) -> None:
    zero = {"num_owner_rrefs": "0", "num_pending_users": "0", "num_pending_futures": "0", "num_forks": "0"}
    assert _rref_context_get_debug_info() == zero
    gate = new_gate("counted")
    own, pending = RRef(5), rpc.remote("worker0", wait_at, args=("counted",))
    call(group_of_this_worker.agents[0], 2, keep, own)
    assert _rref_context_get_debug_info() == {
        **zero,
        "num_owner_rrefs": "2",
        "num_pending_futures": "1",
        "num_forks": "1",
    }
    gate.set()
    pending.to_here()
    kept.clear()
    del own, pending
    eventually(lambda: _rref_context_get_debug_info() == zero)


def test_all_references_to_values_of_others_can_be_given_up(group_of_this_worker: LocalGroup) -> None:
    own, other = RRef(5), rpc.remote("worker1", make_shelf)
    assert other.to_here().items == []
    _delete_all_user_and_unforked_owner_rrefs()
    with pytest.raises(UsageError, match="all references of this worker were deleted"):
        other.to_here()
    with pytest.raises(UsageError, match="were deleted"):
        call(group_of_this_worker.agents[0], 2, fetch, other)
    assert own.to_here() == 5
    eventually(lambda: alive() == 0)


def test_references_can_be_destroyed_and_new_ones_made(group_of_this_worker: LocalGroup) -> None:
    own = RRef(make_shelf())
    call(group_of_this_worker.agents[0], 2, keep, own)
    with pytest.raises(UsageError, match=r"references are left on worker 'worker0': it owns 1, holds 0"):
        _destroy_rref_context(ignore_leak=False)
    assert own.to_here().items == []
    del own
    _destroy_rref_context(ignore_leak=True)
    eventually(lambda: alive() == 0)
    with pytest.raises(ReferenceRefusedError):
        kept[0].to_here()
    assert RRef(5).to_here() == 5
    assert rpc.remote("worker1", echo, args=(6,)).to_here() == 6
