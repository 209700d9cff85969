"""Handles of references that could not be made."""

from __future__ import annotations

import gc

import pytest

from eventually import eventually
from farcall.agent.handle import stillborn
from farcall.errors import WorkerLost
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
