"""What an agent counts: calls, errors, bytes, resends and threads, in sum and for each peer, over lost connections."""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from agent_stage import add, fail, forward, note

from eventually import eventually
from farcall.agent.counting import Counting
from farcall.backends.interface import Metrics, PeerMetrics
from farcall.errors import RpcTimeoutError, ShutdownError
from farcall.rref import RRef
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import call, echo, start

PEER = set(PeerMetrics.__annotations__)
NOTHING = dict.fromkeys(PEER, 0)


def test_all_names_are_there_from_the_beginning(group: LocalGroup) -> None:
    metrics = group[0].get_metrics()
    assert set(metrics) == PEER | set(Metrics.__annotations__)
    assert metrics["peers"] == {"worker0": NOTHING, "worker1": NOTHING, "worker2": NOTHING}
    assert {name: metrics[name] for name in PEER} == NOTHING  # type: ignore[literal-required]
    assert metrics["threads"] >= 1


def test_calls_are_counted_at_both_ends(group: LocalGroup) -> None:
    for _ in range(5):
        call(group[0], "worker1", echo, 1)
    for _ in range(3):
        call(group[0], "worker2", echo, 1)
    call(group[2], "worker0", echo, 1)
    metrics = group[0].get_metrics()
    assert (metrics["calls_made"], metrics["calls_served"], metrics["calls_failed"]) == (8, 1, 0)
    assert {name: (peer["calls_made"], peer["calls_served"]) for name, peer in metrics["peers"].items()} == {
        "worker0": (0, 0),
        "worker1": (5, 0),
        "worker2": (3, 1),
    }
    assert group[1].get_metrics()["peers"]["worker0"]["calls_served"] == 5


def test_what_is_said_about_references_is_no_call(group: LocalGroup) -> None:
    handles = [group[0].remote("worker1", echo, (1,), None)]
    eventually(lambda: handles[0].confirmed and group[0].is_idle() and group[1].is_idle())
    assert group[1].get_metrics()["calls_served"] == group[0].get_metrics()["calls_made"] == 0
    assert call(group[0], "worker1", len, [RRef.of(handles[0])]) == 1
    handles.clear()
    eventually(lambda: group[0].is_idle() and group[1].is_idle())
    assert group[1].get_metrics()["calls_served"] == group[0].get_metrics()["calls_made"] == 1


def test_bytes_are_counted_at_both_ends(group: LocalGroup) -> None:
    size = 1 << 20
    assert call(group[0], "worker1", len, bytearray(size)) == size
    ours, theirs = (group[n].get_metrics()["peers"][f"worker{1 - n}"] for n in (0, 1))
    assert size < ours["bytes_out"] < size + 2000
    assert size < theirs["bytes_in"] < size + 2000
    assert 30 < ours["bytes_in"] < 2000
    assert 30 < theirs["bytes_out"] < 2000
    assert len(call(group[1], "worker0", bytearray, size)) == size
    ours, theirs = (group[n].get_metrics()["peers"][f"worker{1 - n}"] for n in (0, 1))
    assert 2 * size < ours["bytes_out"] < 2 * size + 4000
    assert 2 * size < theirs["bytes_in"] < 2 * size + 4000
    assert ours["bytes_waiting"] == theirs["bytes_waiting"] == 0
    small = group[0].get_metrics()["bytes_out"]
    call(group[0], "worker1", echo, 1)
    assert 30 < group[0].get_metrics()["bytes_out"] - small < 200


def test_errors_are_counted_whatever_they_are(group: LocalGroup) -> None:
    gate = new_gate("late")
    with pytest.raises(LookupError):
        call(group[0], "worker1", fail, LookupError())
    with pytest.raises(RpcTimeoutError):
        call(group[0], "worker1", wait_at, "late", timeout=0.05)
    call(group[0], "worker1", echo, 1)
    gate.set()
    assert group[0].get_metrics()["peers"]["worker1"]["calls_failed"] == 2
    assert group[0].get_metrics()["calls_failed"] == 2


def test_what_is_under_way(new_group: Any) -> None:
    group = new_group(2, num_worker_threads=1)
    gate = new_gate("slow")
    futures = [start(group[0], "worker1", wait_at, "slow")]
    assert arrived["slow"].wait(SOON)
    futures += [start(group[0], "worker1", add, 1) for _ in range(3)]
    eventually(lambda: group[1].get_metrics()["queue_length"] == 3)
    metrics = group[1].get_metrics()
    assert (metrics["threads_running"], metrics["threads_waiting"]) == (1, 0)
    assert group[0].get_metrics()["calls_pending"] == 4
    gate.set()
    for future in futures:
        future.wait()
    assert group[0].get_metrics()["calls_pending"] == 0
    assert group[1].get_metrics()["queue_length"] == 0


def test_functions_that_wait_for_calls_of_their_own(group: LocalGroup) -> None:
    gate = new_gate("nested")
    future = start(group[0], "worker1", forward, group, "worker1", "worker2", wait_at, "nested")
    assert arrived["nested"].wait(SOON)
    eventually(lambda: group[1].get_metrics()["threads_waiting"] == 1)
    gate.set()
    future.wait()
    assert group[1].get_metrics()["threads_waiting"] == 0


def test_counts_outlive_connections(group: LocalGroup) -> None:
    gate = new_gate("cut")
    call(group[0], "worker1", echo, 1)
    future = start(group[0], "worker1", wait_at, "cut")
    assert arrived["cut"].wait(SOON)
    group[0]._peers["worker1"].connection.lose("a test cut it")  # type: ignore[union-attr]
    assert future.exception() is not None
    gate.set()
    call(group[0], "worker1", note, 1)
    peer = group[0].get_metrics()["peers"]["worker1"]
    assert (peer["calls_made"], peer["calls_failed"], peer["calls_pending"]) == (3, 1, 0)
    assert group[0].calls_started() == 3
    eventually(lambda: group[1].get_metrics()["peers"]["worker0"]["calls_served"] == 3)


def test_resends_are_counted(group: LocalGroup) -> None:
    handle = group[0].remote("worker1", echo, (1,), None)
    assert group[0].get_metrics()["resends"] == 0
    group[0].group._posts[1].resends += 2
    metrics = group[0].get_metrics()
    assert (metrics["resends"], metrics["peers"]["worker1"]["resends"], metrics["calls_made"]) == (2, 2, 0)
    del handle


def test_debug_info_is_text(group: LocalGroup) -> None:
    call(group[0], "worker1", echo, 1)
    info = group[0].get_debug_info()
    assert info["agent.calls_made"] == "1"
    assert all(name.startswith("agent.") and isinstance(value, str) for name, value in info.items())


def test_a_report_of_nothing() -> None:
    group: Any = SimpleNamespace(
        ends=lambda: {0: (None, SimpleNamespace(resends=0))}, name_of=lambda number: "a", silences=lambda: {"a": 1.5}
    )
    metrics = Counting().report([], group, {"queue_length": 4})
    assert metrics == {**NOTHING, "queue_length": 4, "peers": {"a": {**NOTHING, "heartbeat_age": 1.5}}}


def test_who_joins_between_two_looks_is_in_the_next_report() -> None:
    group: Any = SimpleNamespace(ends=dict, name_of=str, silences=lambda: {"newcomer": 0.0})
    assert Counting().report([], group, {})["peers"] == {}


# -- waiting for the others


def test_join_and_sync_wait_for_all_again_and_again(group: LocalGroup) -> None:
    for wait in (lambda agent: agent.join(timeout=SOON), lambda agent: agent.sync(timeout=SOON)) * 2:
        early: list[bool] = []
        threads = [threading.Thread(target=wait, args=(group[n],)) for n in (0, 1)]
        for thread in threads:
            thread.start()
        threads[0].join(0.02)
        early.append(threads[0].is_alive())
        wait(group[2])
        for thread in threads:
            thread.join(SOON)
        assert early == [True]
        assert not any(thread.is_alive() for thread in threads)
    assert call(group[0], "worker1", echo, 1) == 1


def test_join_says_who_is_missing_and_the_worker_goes_on(group: LocalGroup) -> None:
    with pytest.raises(
        ShutdownError, match=r"waited for the others in join\(\), but 'worker1', 'worker2' did not come"
    ):
        group[0].join(timeout=0.05)
    with pytest.raises(ShutdownError, match=r"sync\(\) has not been called there.*this worker goes on"):
        group[0].sync(timeout=0.05)
    assert call(group[0], "worker1", echo, 1) == 1


def test_join_waits_for_calls(group: LocalGroup) -> None:
    gate = new_gate("joined")
    future = start(group[0], "worker1", wait_at, "joined")
    assert arrived["joined"].wait(SOON)
    with pytest.raises(ShutdownError, match=r"gave up in join\(\) while calls were still under way here: a call of"):
        group[0].join(timeout=0.05)
    gate.set()
    future.wait()


def test_who_has_joined_to_leave_takes_nobody_for_lost(new_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (agent,) = new_group(1)
    submitted: list[Any] = []
    agent.join(timeout=SOON)
    monkeypatch.setattr(agent._serving, "run_aside", submitted.append)
    agent.group.examine(0)
    assert len(submitted) == 1
    monkeypatch.undo()
    agent.join(shutdown=True, timeout=SOON)
    monkeypatch.setattr(agent._serving, "run_aside", submitted.append)
    agent.group.examine(0)
    assert len(submitted) == 1


def test_an_agent_keeps_a_copy_of_its_options(group: LocalGroup) -> None:
    with pytest.raises(Exception, match="an agent has taken these options"):
        group[0].options.spin = 1
    assert dataclasses.replace(group[0].options) == group[1].options
