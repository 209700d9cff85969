"""What a test does to a worker while it runs: cutting it off, freezing it, slowing it down."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest

from eventually import eventually
from farcall import RpcTimeoutError, UnknownWorkerError, UsageError, WorkerLostError
from farcall.testing import LocalGroup, faults, faulty_relay
from gates import SOON, arrived, new_gate, wait_at
from group_stage import NewGroup, call, connect_all, echo, start
from reference_stage import expect_confirmed, expect_nothing_left, remote

MOMENT = 0.3
PATIENT = {"heartbeat_patience": 30.0}
"""So that nobody is taken for dead on a slow machine."""


@pytest.fixture
def group(new_group: NewGroup) -> LocalGroup:
    """Three workers that are all connected with all."""
    group = new_group(**PATIENT)
    connect_all(group)
    return group


# -- cut


def test_a_worker_that_is_cut_off_cannot_be_reached_until_it_is_healed(group: LocalGroup) -> None:
    gate = new_gate("cut")
    future = start(group.agents[0], 1, wait_at, "cut")
    assert arrived["cut"].wait(SOON)
    faults(group.agents[0]).cut("worker1")
    with pytest.raises(WorkerLostError, match="the faulty agent has cut worker 'worker1' off; it can be reached"):
        future.wait()
    gate.set()
    for caller, to in ((group.agents[0], 1), (group.agents[1], 0)):
        with pytest.raises(WorkerLostError):
            call(caller, to, echo, 1, timeout=1.0)
    assert call(group.agents[0], 2, echo, 2) == 2
    assert call(group.agents[2], 1, echo, 3) == 3
    faults(group.agents[0]).heal("worker1")
    assert call(group.agents[0], 1, echo, 4) == 4
    assert call(group.agents[1], 0, echo, 5) == 5


def test_a_cut_worker_is_not_lost_and_what_was_to_be_said_arrives_afterwards(new_group: NewGroup) -> None:
    group = new_group(2, heartbeat_interval=0.1, heartbeat_patience=30.0)
    rref = remote(group.agents[0], 1, list, "x")
    expect_confirmed(rref)
    faults(group.agents[0]).cut("worker1")
    del rref
    eventually(lambda: not group.references(0).held)
    assert [info.name for info in group.agents[0].get_worker_infos()] == ["worker0", "worker1"]
    faults(group.agents[0]).heal()
    expect_nothing_left(group.agents)
    group.shutdown()


def test_a_worker_that_is_cut_off_for_too_long_is_lost(new_group: NewGroup) -> None:
    group = new_group(2, heartbeat_interval=0.05, heartbeat_patience=0.5)
    assert call(group.agents[0], 1, echo, 1) == 1
    faults(group.agents[0]).cut("worker1")
    eventually(lambda: len(group.agents[0].get_worker_infos()) == 1)
    with pytest.raises(WorkerLostError, match="worker 'worker1' was lost"):
        call(group.agents[0], 1, echo, 1)


# -- freeze


def test_nothing_passes_to_and_from_a_frozen_worker_and_nothing_gets_lost(group: LocalGroup) -> None:
    gate = new_gate("frozen")
    answer = start(group.agents[0], 1, wait_at, "frozen", "answered")
    assert arrived["frozen"].wait(SOON)
    faults(group.agents[0]).freeze("worker1")
    gate.set()
    there, back = start(group.agents[0], 1, echo, 1), start(group.agents[1], 0, echo, 2)
    with pytest.raises(RpcTimeoutError):
        call(group.agents[0], 1, echo, 3, timeout=MOMENT)
    assert [future.done() for future in (answer, there, back)] == [False, False, False]
    assert call(group.agents[2], 1, echo, 4) == 4
    faults(group.agents[0]).heal("worker1")
    assert [answer.wait(), there.wait(), back.wait()] == ["answered", 1, 2]


def test_no_connection_is_made_with_a_frozen_worker(new_group: NewGroup) -> None:
    group = new_group(2, **PATIENT)
    faults(group.agents[1]).freeze("worker0")
    with pytest.raises(RpcTimeoutError, match="did not answer the handshake in time"):
        call(group.agents[0], 1, echo, 1, timeout=MOMENT)
    faults(group.agents[1]).heal()
    assert call(group.agents[0], 1, echo, 1) == 1


def test_a_frozen_worker_is_found_by_its_heartbeat(new_group: NewGroup) -> None:
    group = new_group(2, heartbeat_interval=0.05, heartbeat_patience=0.5)
    gate = new_gate("waiting")
    future = start(group.agents[0], 1, wait_at, "waiting", timeout=0)
    assert arrived["waiting"].wait(SOON)
    faults(group.agents[0]).freeze("worker1")
    with pytest.raises(WorkerLostError, match="worker 'worker1' was lost"):
        future.wait()
    gate.set()


def test_much_may_wait_for_a_frozen_worker(group: LocalGroup) -> None:
    faults(group.agents[0]).freeze("worker1")
    futures = [start(group.agents[0], 1, len, bytes(1_000_000)) for _ in range(5)]
    faults(group.agents[0]).heal("worker1")
    assert [future.wait() for future in futures] == [1_000_000] * 5


def test_what_was_delayed_waits_too(group: LocalGroup) -> None:
    mine = faults(group.agents[0])
    mine.delay("PYTHON_CALL", MOMENT)
    new_gate("delayed").set()
    future = start(group.agents[0], 1, wait_at, "delayed", "done")
    mine.freeze("worker1")
    assert not arrived["delayed"].wait(2 * MOMENT)
    mine.heal()
    assert future.wait() == "done"


def test_a_shutdown_ends_though_somebody_is_frozen(group: LocalGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faulty_relay, "CLOSE_TIMEOUT_S", 2 * SOON)
    faults(group.agents[0]).freeze("worker1")
    future = start(group.agents[0], 1, echo, 1, timeout=0)
    began = monotonic()
    group.shutdown(graceful=False)
    assert monotonic() - began < SOON / 2
    with pytest.raises(Exception, match="shut down before the call ended"):
        future.wait()


# -- slow


def test_every_message_to_and_from_a_slow_worker_takes_longer(group: LocalGroup) -> None:
    faults(group.agents[0]).slow("worker1", MOMENT)
    for caller, to in ((group.agents[0], 1), (group.agents[1], 0)):
        began = monotonic()
        assert call(caller, to, echo, 1) == 1
        assert monotonic() - began >= 2 * MOMENT
    began = monotonic()
    assert call(group.agents[0], 2, echo, 1) == 1
    assert call(group.agents[2], 1, echo, 1) == 1
    assert monotonic() - began < 2 * MOMENT
    with pytest.raises(RpcTimeoutError):
        call(group.agents[0], 1, echo, 1, timeout=MOMENT)
    faults(group.agents[0]).heal("worker1")
    began = monotonic()
    assert call(group.agents[0], 1, echo, 1) == 1
    assert monotonic() - began < 2 * MOMENT


# -- changing them


def test_healing_all_is_one_call(group: LocalGroup) -> None:
    faults(group.agents[0]).cut("worker1")
    faults(group.agents[0]).freeze("worker2")
    with pytest.raises(WorkerLostError):
        call(group.agents[0], 1, echo, 1)
    faults(group.agents[0]).heal()
    assert call(group.agents[0], 1, echo, 1) == call(group.agents[0], 2, echo, 1) == 1
    faults(group.agents[0]).heal("worker1")


def test_the_last_word_counts(group: LocalGroup) -> None:
    faults(group.agents[0]).freeze("worker1")
    faults(group.agents[0]).slow("worker1", 0.01)
    assert call(group.agents[0], 1, echo, 1) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mine: mine.cut("worker7"), "there is no worker 'worker7'"),
        (lambda mine: mine.freeze("worker7"), "there is no worker 'worker7'"),
        (lambda mine: mine.slow("worker7", 1), "there is no worker 'worker7'"),
        (lambda mine: mine.heal("worker7"), "there is no worker 'worker7'"),
    ],
)
def test_workers_that_are_not_there_are_refused(group: LocalGroup, change: Callable[[Any], None], message: str) -> None:
    with pytest.raises(UnknownWorkerError, match=message):
        change(faults(group.agents[0]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mine: mine.slow("worker1", -1), "a delay must be 0 or more seconds"),
        (lambda mine: mine.delay("PYTHON_CALL", -1), "a delay must be 0 or more seconds"),
        (lambda mine: mine.delay("CALL", 1), "there is no message 'CALL'"),
        (lambda mine: mine.fail("CALL"), "there is no message 'CALL'"),
        (lambda mine: mine.fail("PYTHON_CALL", -1), "must be 0 or more"),
        (lambda mine: mine.fail("PYTHON_CALL", failure="burnt"), "cannot fail by 'burnt'"),
    ],
)
def test_what_cannot_be_is_refused(group: LocalGroup, change: Callable[[Any], None], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        change(faults(group.agents[0]))
