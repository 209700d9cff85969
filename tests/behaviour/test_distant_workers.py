"""Calls to a worker that is far away: those that follow do not wait for the replies to those before.

A frozen connection stands for the longest delay there is. What can be done on it needs no round trip.
"""

from __future__ import annotations

import pytest

from farcall import wait_all
from farcall.testing import faults
from group_stage import NewGroup, call, echo, start

pytestmark = pytest.mark.timeout(30)


class Counter:
    """A value whose methods return another one."""

    def __init__(self, count: int) -> None:
        self.count = count

    def next(self) -> Counter:
        return Counter(self.count + 1)


def test_a_chain_of_calls_on_a_reference_that_is_not_there_yet_waits_for_no_reply(make_faulty_group: NewGroup) -> None:
    group = make_faulty_group(2, heartbeat_patience=600)
    assert call(group.agents[0], 1, echo, 1) == 1
    faults(group.agents[0]).freeze("worker1")
    reference = group.remote(0, 1, Counter, (0,))
    for _ in range(10):
        reference = reference.remote().next()
    faults(group.agents[0]).heal("worker1")
    assert reference.to_here().count == 10


def test_calls_in_a_row_wait_for_no_reply(make_faulty_group: NewGroup) -> None:
    group = make_faulty_group(2, heartbeat_patience=600)
    assert call(group.agents[0], 1, echo, 1) == 1
    faults(group.agents[0]).freeze("worker1")
    futures = [start(group.agents[0], 1, echo, number) for number in range(1000)]
    assert not any(future.done() for future in futures)
    faults(group.agents[0]).heal("worker1")
    assert wait_all(futures) == list(range(1000))
