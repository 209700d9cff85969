"""Each invariant says no where it is broken. (What the simulated network finds with them is tested with it.)"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from farcall.errors import OwnerLostError
from farcall.protocol import refcount
from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_messages import ForkRequest
from simulation.explored_worker import ExploredWorker
from simulation.invariants import (
    CONFIRMED,
    ORPHANED,
    REFUSED,
    BrokenInvariant,
    HandleStatus,
    check_answered,
    check_claims,
    check_empty,
    check_kept,
    check_live,
    check_rest,
    check_settled,
    check_unreported,
)
from simulation.reference_state import forged, genuine
from simulation.schedules import parse
from simulation.simulated_worker import SimulatedWorker
from simulation.simulation import SimulatedNetwork

THEIRS = genuine(1, 1, 1)
MESSAGE = ForkRequest(THEIRS, ForkId(0, 1))


def play(steps: str, workers: int = 3) -> SimulatedNetwork:
    network = SimulatedNetwork(workers)
    for step in parse(steps):
        assert network.step(*step), f"{step} is impossible"
    return network


def explored(me: int) -> ExploredWorker:
    worker = ExploredWorker(me)
    worker.add(0)
    worker.add(1)
    return worker


# -- LIVE, UNREPORTED, ANSWERED

PASSED_ON = "call 1 0; send 1 3; deliver 1; run 0 1; deliver 2; pass 1 2 2; send 1 4; deliver 3; run 2 1"
"""Worker 2 holds an unreported fork of what worker 1 created at worker 0."""


def test_live_is_broken_by_a_confirmed_fork_that_nobody_counts() -> None:
    network = play("make 0; pass 0 1 1; send 0 2; deliver 1")
    check_live(network.workers)
    network.workers[0].counts.owned[genuine(0, 0, 1)].forks.clear()
    with pytest.raises(BrokenInvariant, match="LIVE: worker 1 has fork 0:1 of reference 0:1 owned by 0 confirmed"):
        check_live(network.workers)


def test_unreported_is_broken_by_a_release() -> None:
    network = play(PASSED_ON)
    check_unreported(network.workers)
    network.workers[0].counts.owned.clear()
    with pytest.raises(BrokenInvariant, match=r"UNREPORTED: reference 1:1 .* was released, and worker 2 has an unrep"):
        check_unreported(network.workers)


def test_unreported_is_broken_by_a_parent_that_does_not_wait() -> None:
    network = play(PASSED_ON)
    network.workers[1].counts.parents.clear()
    with pytest.raises(BrokenInvariant, match="UNREPORTED: worker 1 does not wait for fork 1:2"):
        check_unreported(network.workers)


@pytest.mark.parametrize("steps", ["", "connect 2 0; deliver 5; work 0"])
def test_answered_is_broken_by_a_request_or_an_answer_that_is_forgotten(steps: str) -> None:
    network = play(f"{PASSED_ON}; report 2; {steps}")
    check_answered(network.workers)
    for worker in network.workers.values():
        for link in worker.delivery.links.values():
            link.unacknowledged.clear()
    with pytest.raises(BrokenInvariant, match="ANSWERED: worker 2 waits for an answer about fork 1:2"):
        check_answered(network.workers)


# -- SETTLED, D2, D3


def settled_after_a_loss() -> SimulatedWorker:
    return play("make 0; call 0 2; send 0 4; crash 1; remove 0 1").workers[0]


def test_settled_holds_after_a_loss() -> None:
    check_settled(settled_after_a_loss())


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda c: c.owned[genuine(0, 0, 1)].forks.update({ForkId(0, 1): 1}), "counts a fork"),
        (lambda c: c.owned.update({RRefId(0, 1, 1): refcount.OwnedEntry(False)}), "waits for the creator"),
        (lambda c: c.workers.update({1: c.workers[2]}), "counts it among the workers"),
        (lambda c: c.numbers.update({1: 1}), "counts it among the workers"),
        (lambda c: c.claims.update({1: 1}), "counts it among the workers"),
        (lambda c: setattr(c.held[ForkId(0, 1)], "parent", 1), "means to tell the parent"),
        (lambda c: c.held[ForkId(0, 1)].children.update({ForkId(0, 9): 1}), "waits for a child"),
        (lambda c: setattr(c.held[ForkId(0, 1)], "reference", THEIRS), "holds fork 0:1"),
    ],
)
def test_settled_is_broken_by_any_trace_of_the_lost(spoil: Callable[[object], object], what: str) -> None:
    worker = settled_after_a_loss()
    spoil(worker.counts)
    with pytest.raises(BrokenInvariant, match=f"SETTLED: .*{what}"):
        check_settled(worker)


def test_d3_is_broken_by_messages_kept_for_the_lost() -> None:
    worker = settled_after_a_loss()
    worker.delivery.joined(1)
    worker.delivery.send(1, MESSAGE)
    with pytest.raises(BrokenInvariant, match="D3: worker 0 keeps messages for worker 1"):
        check_settled(worker)


def test_d2_is_broken_by_a_message_that_was_forgotten() -> None:
    sender, receiver = explored(0), explored(1)
    sender.delivery.send(1, MESSAGE)
    check_kept(sender, receiver)
    sender.delivery.acknowledged(1, 1)
    with pytest.raises(BrokenInvariant, match="D2: worker 0 forgot its message 1 to worker 1"):
        check_kept(sender, receiver)
    receiver.delivery.receive(0, 1)
    check_kept(sender, receiver)


# -- PROMISED, FORGED, EMPTY


@pytest.mark.parametrize(
    ("status", "owner_lives", "deaths", "what"),
    [
        (ORPHANED, True, 1, "whose owner lives"),
        (REFUSED, True, 0, "and nobody died"),
        (CONFIRMED, True, 1, "and its owner has no value"),
        (CONFIRMED, False, 1, "whose owner is dead"),
    ],
)
def test_promised_is_broken_by(status: str, owner_lives: bool, deaths: int, what: str) -> None:
    workers = {0: explored(0), 1: explored(1)}
    workers[1].alive = owner_lives
    workers[0].handles[1] = HandleStatus(THEIRS, ForkId(1, 1), status)
    with pytest.raises(BrokenInvariant, match=f"PROMISED: .*{what}"):
        check_rest(workers, deaths)


def test_forged_is_broken_by_claims_that_are_not_counted_or_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = explored(0)
    assert worker.counts.may_still_be_created(RRefId(0, 1, 1), 1)
    check_claims(worker)
    worker.counts.claims[1] = 2
    with pytest.raises(BrokenInvariant, match=r"FORGED: worker 0 has noted \[.*\], and counts {1: 2}"):
        check_claims(worker)
    worker.counts.claims[1] = 1
    monkeypatch.setattr(refcount, "MAX_CLAIMS", 0)
    with pytest.raises(BrokenInvariant, match="FORGED"):
        check_claims(worker)


def test_forged_is_broken_by_a_claim_that_outlives_the_creation() -> None:
    worker = explored(0)
    wrong = forged(RRefId(0, 1, 1))
    assert worker.counts.may_still_be_created(wrong, 1)
    check_claims(worker)
    worker.counts.workers[1].add(1)
    with pytest.raises(BrokenInvariant, match="FORGED: worker 0 keeps what was claimed of reference 1:1"):
        check_claims(worker)


def test_empty_does_not_look_at_the_dead() -> None:
    worker = explored(0)
    worker.make()
    with pytest.raises(BrokenInvariant, match="EMPTY: worker 0 still has owned: reference 0:1 owned by 0"):
        check_empty({0: worker})
    worker.alive = False
    check_empty({0: worker})


# -- what a store adds


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda w: setattr(w.counts.owned[genuine(1, 1, 1)], "handles", 0), "HANDLES: .*which is not counted"),
        (lambda w: w.counts.held.clear(), "HANDLES: .*the counts do not know"),
        (lambda w: setattr(w.handles[2], "new_error", OwnerLostError), "HANDLES: .*which raises"),
        (lambda w: setattr(w.counts.held[ForkId(1, 1)], "dropped", True), "HANDLES: .*dropped"),
        (
            lambda w: setattr(w.handles[2], "confirmed", True),
            "HANDLES: .*handle.confirmed=True, though it is requested",
        ),
    ],
)
def test_a_store_that_contradicts_its_counts_is_broken(spoil: Callable[[SimulatedWorker], object], what: str) -> None:
    worker = play("make 1; call 1 0").workers[1]
    worker.handles = dict(zip((1, 2), worker.handles.values(), strict=True))
    worker.check()
    spoil(worker)
    with pytest.raises(BrokenInvariant, match=what):
        worker.check()


def test_quiet_is_broken_by_a_message_that_waits() -> None:
    worker = play("").workers[1]
    worker.check_quiet()
    worker.delivery.send(0, MESSAGE)
    with pytest.raises(BrokenInvariant, match=r"QUIET: worker 1 still has work: .*'unacknowledged': 1"):
        worker.check_quiet()


def test_a_store_that_keeps_something_is_not_empty() -> None:
    worker = play("").workers[1]
    worker.check_empty()
    worker.delivery.send(0, MESSAGE)
    with pytest.raises(BrokenInvariant, match="EMPTY: the store of worker 1 still has 1 unacknowledged"):
        worker.check_empty()
