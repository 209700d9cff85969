from __future__ import annotations

import pytest

from eventually import eventually
from farcall.backends.interface import MembershipChange
from farcall.errors import RpcTimeoutError
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import call, echo, start


def test_a_worker_that_does_nothing_has_nothing_under_way(group: LocalGroup) -> None:
    assert call(group["worker0"], "worker1", echo, 1) == 1
    assert group["worker1"].under_way() == "something that is just ending"


def test_what_runs_and_who_called_it(group: LocalGroup) -> None:
    gate = new_gate("long")
    future = start(group["worker0"], "worker1", wait_at, "long")
    assert arrived["long"].wait(SOON)
    assert group["worker1"].under_way() == "`wait_at`, called by worker 'worker0'"
    assert group["worker0"].under_way() == "a call of `wait_at` on worker 'worker1'"
    assert not group["worker0"].is_idle()
    gate.set()
    future.wait()


def test_a_function_whose_caller_has_given_up_is_named_too(group: LocalGroup) -> None:
    gate = new_gate("given up")
    with pytest.raises(RpcTimeoutError):
        call(group["worker0"], "worker1", wait_at, "given up", timeout=0.01)
    assert arrived["given up"].wait(SOON)
    assert group["worker0"].is_idle()
    assert group["worker1"].under_way() == "`wait_at`, called by worker 'worker0'"
    gate.set()


def test_only_some_of_many_are_named(group: LocalGroup) -> None:
    gate = new_gate("many")
    futures = [start(group["worker0"], "worker1", wait_at, "many") for _ in range(8)]
    text = group["worker0"].under_way()
    assert text.count("`wait_at`") == 5
    assert text.endswith(", 3 more")
    gate.set()
    for future in futures:
        future.wait()


def test_a_membership_callback_is_named() -> None:
    gate = new_gate("watching")

    def look(change: MembershipChange) -> None:
        wait_at("watching")

    with LocalGroup(2, is_open=True) as group:
        eventually(lambda: len(group[0].get_worker_infos()) == 2)
        group[0].watch_members(look)
        group.leave("worker1")
        assert arrived["watching"].wait(SOON)
        assert "the membership callback `" in group[0].under_way()
        assert "look`" in group[0].under_way()
        gate.set()
