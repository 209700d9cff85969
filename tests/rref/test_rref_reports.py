"""What a worker tells of its references: the inventory, the counters that torch has, and how they are given up."""

from __future__ import annotations

import re
import weakref
from typing import Any

import pytest

import farcall
from eventually import eventually
from farcall import ReferenceRefusedError, RpcBackendOptions, RRef, UsageError
from farcall.testing import LocalGroup
from gates import new_gate, wait_at
from group_stage import call, echo
from reference_stage import expect_confirmed, expect_nothing_left, here, remote
from reference_values import Shelf, ShelfError, fail, fetch, keep, kept

pytestmark = pytest.mark.timeout(30)


def line_of(text: str) -> bool:
    return re.search(r"test_rref_reports\.py:\d+$", text) is not None


def test_references_lists_what_is_owned_and_held(this_worker: LocalGroup) -> None:
    own = RRef(Shelf())
    other = farcall.remote("worker1", Shelf)
    call(this_worker.agents[0], 2, keep, own)
    expect_confirmed(other)
    inventory = farcall.references()
    ((owned,), (held,)) = inventory.owned, inventory.held
    assert (owned.type, owned.handles, owned.holders) == ("Shelf", 1, ("worker2",))
    assert line_of(owned.created_at), owned
    assert (held.owner, held.confirmed, held.dropped, held.pending) == ("worker1", True, False, ())
    assert line_of(held.created_at), held
    shown = str(inventory)
    assert "owns 1, holds 1" in shown
    assert "(Shelf), held 1 here, 1 by 'worker2'; made at " in shown
    assert "owned by 'worker1', confirmed; made at " in shown
    there = this_worker.agents[1].reference_store.inventory()
    assert there.owned[0].created_at == "the request of 'worker0'"
    assert there.owned[0].holders == ("worker0",)
    kept.clear()
    del own, other
    expect_nothing_left(this_worker.agents)
    assert farcall.references().owned == farcall.references().held == ()


def test_a_value_that_is_not_there_or_failed_is_listed_so(this_worker: LocalGroup) -> None:
    gate = new_gate("listed")
    pending = farcall.remote("worker0", wait_at, args=("listed",))
    failed = farcall.remote("worker0", fail, args=("empty",))
    with pytest.raises(ShelfError):
        failed.to_here()
    assert [owned.type for owned in farcall.references().owned] == [
        "",
        "failed: reference_values.ShelfError: ('empty', 7)",
    ]
    assert "(no value yet)" in str(farcall.references())
    gate.set()
    pending.to_here()


def test_a_stack_is_recorded_on_request() -> None:
    with LocalGroup(2, RpcBackendOptions(record_stacks=True)):
        own = make_in_a_function()
        (owned,) = farcall.references().owned
        assert "in make_in_a_function" in owned.created_at
        assert "in test_a_stack_is_recorded_on_request" in owned.created_at
        assert own.is_owner()


def make_in_a_function() -> RRef[int]:
    return RRef(5)


def test_the_counters_that_torch_has(this_worker: LocalGroup) -> None:
    zero = {"num_owner_rrefs": "0", "num_pending_users": "0", "num_pending_futures": "0", "num_forks": "0"}
    assert farcall._rref_context_get_debug_info() == zero
    gate = new_gate("counted")
    own, pending = RRef(5), farcall.remote("worker0", wait_at, args=("counted",))
    call(this_worker.agents[0], 2, keep, own)
    assert farcall._rref_context_get_debug_info() == {
        "num_owner_rrefs": "2", "num_pending_users": "0", "num_pending_futures": "1", "num_forks": "1"
    }  # fmt: skip
    gate.set()
    kept.clear()
    pending.to_here()
    del own, pending
    expect_nothing_left(this_worker.agents)
    assert farcall._rref_context_get_debug_info() == zero


def test_all_handles_of_others_can_be_given_up(this_worker: LocalGroup) -> None:
    own, other = RRef(5), farcall.remote("worker1", echo, args=(6,))
    expect_confirmed(other)
    farcall._delete_all_user_and_unforked_owner_rrefs()
    with pytest.raises(UsageError, match="all references of this worker were deleted"):
        other.to_here()
    with pytest.raises(UsageError, match="were deleted"):
        call(this_worker.agents[0], 2, fetch, other)
    with pytest.raises(UsageError, match="were deleted"):
        other.remote().bit_length()
    assert own.to_here() == 5
    expect_nothing_left([this_worker.agents[1]])


def test_the_context_is_not_destroyed_while_references_are_left(this_worker: LocalGroup) -> None:
    rref = RRef(5)
    with pytest.raises(UsageError, match=r"references are left on worker 'worker0': it owns 1, holds 0"):
        farcall._destroy_rref_context(ignore_leak=False)
    assert rref.to_here() == 5
    farcall._destroy_rref_context(ignore_leak=True)
    del rref
    assert farcall.references().owned == ()
    farcall._destroy_rref_context(ignore_leak=False)


def own_shelf(group: LocalGroup) -> RRef[Any]:
    return here(group.agents[1], Shelf())


def test_a_worker_whose_context_was_destroyed_goes_on(this_worker: LocalGroup) -> None:
    own, other = RRef(Shelf()), farcall.remote("worker1", Shelf)
    held = weakref.ref(own.local_value())
    call(this_worker.agents[0], 2, keep, own)
    del own
    farcall._destroy_rref_context(ignore_leak=True)
    eventually(lambda: held() is None)  # the serving pool may be letting go of it just now
    with pytest.raises(UsageError, match="the references of this worker were destroyed"):
        other.to_here()
    with pytest.raises(ReferenceRefusedError, match=r"'worker0' does not own .* any more: its value was released"):
        fetch(kept[0])
    assert RRef(5).to_here() == 5
    assert farcall.remote("worker1", echo, args=(6,)).to_here() == 6
    assert remote(this_worker.agents[1], 0, echo, 7).to_here() == 7
    returned = call(this_worker.agents[0], 1, own_shelf, this_worker)
    assert returned.rpc_sync().put("tea") == 1
    del returned
    kept.clear()
    expect_nothing_left(this_worker.agents)
