"""What comes through a channel is received into memory that earlier messages lay in, and is its receiver's alone."""

from __future__ import annotations

import gc
from time import monotonic
from typing import Any

import numpy as np
import pytest

from eventually import eventually
from farcall.agent.lanes import IDLE
from farcall.testing import LocalGroup
from group_stage import call, echo

pytestmark = pytest.mark.timeout(60)

SIZE = 4 << 20


def where(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again_when_the_array_is_gone_and_not_before() -> None:
    array = np.arange(SIZE, dtype=np.uint8)
    with LocalGroup(2) as group:
        first = call(group[0], 1, echo, array)
        second = call(group[0], 1, echo, array)
        assert where(first) != where(second)
        first[:] = 7
        assert np.array_equal(second, array)
        at = where(first)
        del first
        gc.collect()
        third = call(group[0], 1, echo, array)
        assert where(third) == at
        assert np.array_equal(third, array)
        assert third.flags.writeable
        eventually(lambda: group[1]._received.kept() >= SIZE)


def test_what_nobody_uses_is_given_back_after_a_while() -> None:
    with LocalGroup(2) as group:
        call(group[0], 1, echo, np.arange(SIZE, dtype=np.uint8))
        for agent in group:
            eventually(lambda agent=agent: agent._received.kept() >= SIZE)  # type: ignore[misc]
            agent._beat(monotonic())
            assert agent._received.kept() >= SIZE
            agent._beat(monotonic() + IDLE + 1.0)
            assert agent._received.kept() == 0


def test_a_worker_that_has_ended_keeps_nothing() -> None:
    with LocalGroup(2) as group:
        kept = [agent._received for agent in group]
        array = call(group[0], 1, echo, np.arange(SIZE, dtype=np.uint8))
    assert [memory.kept() for memory in kept] == [0, 0]
    assert array[5] == 5
    del array
    assert [memory.kept() for memory in kept] == [0, 0]
