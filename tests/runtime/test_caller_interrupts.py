"""Calls with references that a signal handler interrupts while they are sent: made or not made, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from farcall import RRef
from farcall.testing import LocalGroup
from gates import SOON
from interruption import At, Interrupt
from reference_stage import expect_nothing_left

FILES = ("runtime/caller.py", "runtime/reference_store.py")


def name_owner(rref: RRef[str]) -> str:
    return rref.owner_name()


def call(group: LocalGroup, rref: RRef[str]) -> Any:
    return group.agents[0].calling.call("worker1", name_owner, (rref,), None, SOON).wait


def call_remote(group: LocalGroup, rref: RRef[str]) -> Any:
    return group.remote(0, "worker1", name_owner, args=(rref,)).to_here


@pytest.mark.parametrize("act", [call, call_remote])
def test_an_interrupted_call_with_a_reference_leaves_nothing(act: Callable[[LocalGroup, RRef[str]], Any]) -> None:
    with LocalGroup(2) as group:
        rref = group.rref(0, "passed")
        assert act(group, rref)() == "worker0"
        with At(FILES, ()) as counting:
            wait = act(group, rref)
        assert wait() == "worker0"
        for point in range(counting.passed):
            rref, wait = group.rref(0, "passed"), None
            with At(FILES, (point,)) as interrupted:
                try:
                    wait = act(group, rref)
                except Interrupt:
                    pass
            assert interrupted.has_acted
            assert wait is None
            assert act(group, rref)() == "worker0"  # it works again
        del rref, wait
        expect_nothing_left(group.agents)
