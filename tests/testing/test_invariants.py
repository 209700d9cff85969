"""Each invariant says no where it is broken. (What the simulated network finds with them is tested with it.)"""

from __future__ import annotations

import pytest

from farcall.protocol.ids import ForkId, RRefId
from farcall.testing.invariants import BrokenInvariant, check_empty, check_kept, check_rest, check_settled
from farcall.testing.simulated_workers import CONFIRMED, ORPHANED, REFUSED, Handle, Parcel, SimulatedWorker
from farcall.testing.simulation import SimulatedNetwork, parse

THEIRS = RRefId(1, 1, 1)


def settled_after_the_loss_of_one(steps: str = "make 0") -> SimulatedWorker:
    network = SimulatedNetwork(3)
    for step in parse(steps + "; crash 1; tell 0 1"):
        network.step(*step)
    return network.workers[0]


def test_settled_holds_after_a_loss() -> None:
    check_settled(settled_after_the_loss_of_one())


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda w: w.references.owned[RRefId(0, 0, 1)].forks.update({ForkId(0, 1): 1}), "counts a fork"),
        (lambda w: w.references.peers.update({1: w.references.peers[2]}), "counts it among its peers"),
        (lambda w: w.references.numbers.update({1: 1}), "counts it among its peers"),
        (lambda w: setattr(w.references.held[ForkId(0, 1)], "parent", 1), "means to tell the parent"),
        (lambda w: w.references.held[ForkId(0, 1)].children.update({ForkId(0, 9): 1}), "waits for a child"),
        (lambda w: setattr(w.references.held[ForkId(0, 1)], "reference", THEIRS), "holds fork 0:1"),
    ],
)
def test_settled_is_broken_by_any_trace_of_the_lost(spoil: object, what: str) -> None:
    worker = settled_after_the_loss_of_one("make 0; call 0 2")
    spoil(worker)  # type: ignore[operator]
    with pytest.raises(BrokenInvariant, match=f"SETTLED: .*{what}"):
        check_settled(worker)


def test_d3_is_broken_by_messages_kept_for_the_lost() -> None:
    worker = settled_after_the_loss_of_one()
    worker.delivery.joined(1)
    worker.delivery.send(1, Parcel((), False))
    with pytest.raises(BrokenInvariant, match="D3: worker 0 keeps messages for worker 1"):
        check_settled(worker)


def test_d2_is_broken_by_a_message_that_was_forgotten() -> None:
    worker = SimulatedNetwork(2).workers[0]
    number = worker.delivery.send(1, Parcel((), False))
    check_kept(worker, 1, [number])
    worker.delivery.acknowledged(1, number)
    with pytest.raises(BrokenInvariant, match="D2: worker 0 forgot its message 1 to worker 1"):
        check_kept(worker, 1, [number])


@pytest.mark.parametrize(
    ("standing", "owner_lives", "deaths", "what"),
    [
        (ORPHANED, True, 1, "whose owner lives"),
        (REFUSED, True, 0, "and nobody died"),
        (CONFIRMED, True, 1, "and its owner has no value"),
        (CONFIRMED, False, 1, "whose owner is dead"),
    ],
)
def test_promised_is_broken_by(standing: str, owner_lives: bool, deaths: int, what: str) -> None:
    workers = SimulatedNetwork(2).workers
    workers[1].alive = owner_lives
    workers[0].handles[1] = Handle(THEIRS, ForkId(1, 1), standing)
    with pytest.raises(BrokenInvariant, match=f"PROMISED: .*{what}"):
        check_rest(workers, deaths)


def test_empty_does_not_look_at_the_dead() -> None:
    network = SimulatedNetwork(2)
    network.step("make", 0)
    with pytest.raises(BrokenInvariant, match="EMPTY: worker 0 still has owned: reference 0:1 owned by 0"):
        check_empty(network.workers)
    network.step("crash", 0)
    check_empty(network.workers)
