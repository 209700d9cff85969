"""Handles of references that could not be made, and those that an owner makes of what it was told of."""

from __future__ import annotations

import gc

import pytest

from eventually import eventually
from farcall.agent.handle import handle_here, stillborn
from farcall.errors import ReferenceRefused, WorkerLost
from farcall.rref import RRef
from farcall.testing import LocalGroup

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("owner", [0, 1])
def test_every_use_of_what_could_not_be_made_raises_and_nothing_is_left_of_it(owner: int) -> None:
    with LocalGroup(2) as group:
        book = group[0].book
        handle = stillborn(book, group[owner].book.me, lambda: WorkerLost("not made"))
        rref: RRef[int] = RRef.of(handle)
        assert rref.owner_name() == f"worker{owner}"
        assert rref.is_owner() == (owner == 0)
        for use in (rref.to_here, rref._get_future, rref.rpc_sync().bit_length, rref.remote().bit_length):
            with pytest.raises(WorkerLost, match="not made"):
                use()
        with pytest.raises(WorkerLost, match="not made"):
            group[0].call(1, type, (rref,), None, 5)
        del handle, rref, use
        gc.collect()
        eventually(lambda: not book.has_work() and not book.inventory().owned)
        assert group[0].call(1, max, (1, 2), None, 5).wait() == 2


def test_an_owner_that_is_told_of_a_reference_makes_a_handle_that_holds_the_value() -> None:
    with LocalGroup(2) as group:
        book = group[1].book
        handles = [group[0].remote(1, dict, None, None)]
        reference = handles[0].reference
        eventually(lambda: handles[0].confirmed)
        theirs = handle_here(book, reference, "a test")
        assert theirs.value is not None
        assert theirs.value.wait() == {}
        handles.clear()
        eventually(lambda: not group[0].book.has_work() and not group[0].book.inventory().held)
        assert len(book.inventory().owned) == 1
        del theirs
        eventually(lambda: not book.inventory().owned)
        with pytest.raises(ReferenceRefused, match="its value was released"):
            handle_here(book, reference, "a test")
