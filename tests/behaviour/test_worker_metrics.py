"""What `get_metrics` counts: calls, failures, bytes and threads, in sum and for each peer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import pytest

import farcall as rpc
from eventually import eventually
from farcall import RpcTimeoutError
from farcall.api import _get_debug_info
from farcall.backends import Metrics
from farcall.testing import LocalGroup, faults
from gates import SOON, arrived, new_gate, wait_at
from group_stage import NewGroup, call, echo, start

pytestmark = pytest.mark.timeout(30)

PEER_NAMES = {
    "calls_made", "calls_failed", "calls_pending", "calls_served", "bytes_out", "bytes_in", "bytes_shared_out",
    "bytes_shared_in", "bytes_returned", "bytes_waiting", "resends", "references_refused", "heartbeat_age",
}  # fmt: skip


def fail(error: BaseException) -> None:
    raise error


def forward(group: LocalGroup, here: str, to: str, function: Any, *args: Any) -> Any:
    return call(group.agents[here], to, function, *args)


def test_all_names_are_there_from_the_beginning(group: LocalGroup) -> None:
    metrics = group.agents[0].get_metrics()
    assert set(metrics) == set(Metrics.__annotations__) | PEER_NAMES
    assert set(metrics["peers"]) == {"worker0", "worker1", "worker2"}
    every: list[Mapping[str, object]] = [metrics, *metrics["peers"].values()]
    for counts in every:
        assert {name: counts[name] for name in PEER_NAMES} == dict.fromkeys(PEER_NAMES, 0)
    assert metrics["threads"] >= 1


def test_calls_are_counted_at_both_ends(group: LocalGroup) -> None:
    for _ in range(5):
        call(group.agents[0], "worker1", echo, 1)
    for _ in range(3):
        call(group.agents[0], "worker2", echo, 1)
    call(group.agents[0], "worker0", echo, 1)
    call(group.agents[2], "worker0", echo, 1)
    metrics = group.agents[0].get_metrics()
    assert (metrics["calls_made"], metrics["calls_served"], metrics["calls_failed"]) == (9, 2, 0)
    assert {name: (peer["calls_made"], peer["calls_served"]) for name, peer in metrics["peers"].items()} == {
        "worker0": (1, 1),
        "worker1": (5, 0),
        "worker2": (3, 1),
    }
    assert group.agents[1].get_metrics()["peers"]["worker0"]["calls_served"] == 5


def test_calls_on_references_count_and_messages_about_references_do_not(group: LocalGroup) -> None:
    rref: rpc.RRef[list[int]] = group.remote(0, "worker1", list)
    eventually(rref.confirmed_by_owner)
    assert group.agents[0].get_metrics()["calls_made"] == group.agents[1].get_metrics()["calls_served"] == 0
    rref.rpc_sync().append(1)
    rref.to_here()
    assert group.agents[0].get_metrics()["calls_made"] == group.agents[1].get_metrics()["calls_served"] == 2
    del rref
    eventually(lambda: not group.references(1).owned)
    assert group.agents[0].get_metrics()["calls_made"] == group.agents[1].get_metrics()["calls_served"] == 2


def test_failed_calls_are_counted_whatever_the_reason(group: LocalGroup) -> None:
    gate = new_gate("late")
    with pytest.raises(LookupError):
        call(group.agents[0], "worker1", fail, LookupError())
    with pytest.raises(RpcTimeoutError):
        call(group.agents[0], "worker1", wait_at, "late", timeout=0.05)
    call(group.agents[0], "worker1", echo, 1)
    lost = start(group.agents[0], "worker2", wait_at, "late")
    eventually(lambda: group.agents[2].get_metrics()["threads_running"] == 1)
    gate.set()
    lost.exception()
    peers = group.agents[0].get_metrics()["peers"]
    assert (peers["worker1"]["calls_failed"], peers["worker2"]["calls_failed"]) == (2, 0)
    assert group.agents[0].get_metrics()["calls_failed"] == 2


def test_what_is_under_way_is_shown(make_group: NewGroup) -> None:
    group = make_group(2, num_worker_threads=1)
    gate = new_gate("slow")
    futures = [start(group.agents[0], "worker1", wait_at, "slow")]
    assert arrived["slow"].wait(SOON)
    futures += [start(group.agents[0], "worker1", echo, 1) for _ in range(3)]
    eventually(lambda: group.agents[1].get_metrics()["queue_length"] == 3)
    metrics = group.agents[1].get_metrics()
    assert (metrics["threads_running"], metrics["threads_waiting"]) == (1, 0)
    assert metrics["threads"] >= metrics["threads_running"] + metrics["threads_waiting"] + metrics["threads_idle"]
    assert group.agents[0].get_metrics()["calls_pending"] == 4
    assert group.agents[0].get_metrics()["peers"]["worker1"]["calls_pending"] == 4
    gate.set()
    for future in futures:
        future.wait()
    assert group.agents[0].get_metrics()["calls_pending"] == 0
    eventually(lambda: group.agents[1].get_metrics()["threads_running"] == 0)
    assert group.agents[1].get_metrics()["queue_length"] == 0


def test_functions_that_wait_for_calls_of_their_own_are_counted_apart(group: LocalGroup) -> None:
    gate = new_gate("nested")
    future = start(group.agents[0], "worker1", forward, group, "worker1", "worker2", wait_at, "nested")
    assert arrived["nested"].wait(SOON)
    eventually(lambda: group.agents[1].get_metrics()["threads_waiting"] == 1)
    assert group.agents[2].get_metrics()["threads_running"] == 1
    gate.set()
    future.wait()
    eventually(lambda: group.agents[1].get_metrics()["threads_waiting"] == 0)


def test_bytes_are_counted_at_both_ends(group: LocalGroup) -> None:
    size = 1 << 20
    assert call(group.agents[0], "worker1", len, bytes(size)) == size
    ours, theirs = (group.agents[n].get_metrics()["peers"][f"worker{1 - n}"] for n in (0, 1))
    assert size < ours["bytes_out"] < size + 4000
    assert size < theirs["bytes_in"] < size + 4000
    assert 0 < ours["bytes_in"] < 4000
    assert 0 < theirs["bytes_out"] < 4000
    assert len(call(group.agents[0], "worker1", bytes, size)) == size
    assert size < group.agents[0].get_metrics()["bytes_in"] < size + 8000
    eventually(
        lambda: group.agents[0].get_metrics()["bytes_waiting"] == group.agents[1].get_metrics()["bytes_waiting"] == 0
    )


def shared_bytes(counts: Mapping[str, object]) -> list[object]:
    return [counts[name] for name in ("bytes_shared_out", "bytes_shared_in", "bytes_returned")]


def test_bytes_in_shared_memory_are_counted_apart() -> None:
    size = 1 << 20
    with LocalGroup(2, transport="unix") as group:
        assert call(group.agents[0], "worker1", len, numpy.zeros(size, numpy.uint8)) == size
        ours, theirs = (group.agents[n].get_metrics()["peers"][f"worker{1 - n}"] for n in (0, 1))
        assert shared_bytes(ours) == [size, 0, 0]
        assert shared_bytes(theirs) == [0, size, 0]
        call(
            group.agents[0], "worker1", echo, numpy.zeros(size, numpy.uint8)
        )  # which goes back in the memory of the caller
        ours, theirs = (group.agents[n].get_metrics()["peers"][f"worker{1 - n}"] for n in (0, 1))
        assert shared_bytes(ours) == [2 * size, size, size]
        assert shared_bytes(theirs) == [size, 2 * size, 0]
        assert 2 * size < ours["bytes_out"] < 2 * size + 8000


def test_counts_outlive_a_connection(make_faulty_group: NewGroup) -> None:
    group = make_faulty_group(2, heartbeat_patience=600)
    gate = new_gate("cut")
    call(group.agents[0], "worker1", echo, 1)
    future = start(group.agents[0], "worker1", wait_at, "cut")
    assert arrived["cut"].wait(SOON)
    faults(group.agents[0]).cut("worker1")
    assert future.exception(SOON) is not None
    gate.set()
    faults(group.agents[0]).heal()
    call(group.agents[0], "worker1", echo, 1)
    peer = group.agents[0].get_metrics()["peers"]["worker1"]
    assert (peer["calls_made"], peer["calls_failed"], peer["calls_pending"]) == (3, 1, 0)
    eventually(lambda: group.agents[1].get_metrics()["peers"]["worker0"]["calls_served"] == 3)


def test_messages_about_references_that_are_sent_again_are_counted(make_faulty_group: NewGroup) -> None:
    group = make_faulty_group(2, messages_to_fail=["RREF_USER_DELETE"])
    rref: rpc.RRef[list[int]] = group.remote(0, 1, list)
    eventually(rref.confirmed_by_owner)
    assert group.agents[0].get_metrics()["resends"] == 0
    del rref
    eventually(lambda: not group.references(1).owned)
    eventually(lambda: group.agents[0].get_metrics()["peers"]["worker1"]["resends"] >= 1)


def test_debug_info_is_text(alone: None) -> None:
    rpc.rpc_sync("alone", int)
    info = _get_debug_info()
    assert info["agent.calls_made"] == "1"
    assert info["num_owner_rrefs"] == "0"
    assert all(isinstance(value, str) for value in info.values())
