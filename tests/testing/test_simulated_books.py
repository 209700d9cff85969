"""The book of a real agent on the simulated network: random schedules run clean, and its checks say no."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from farcall.agent.hearing import create_answered
from farcall.errors import OwnerLost, ReferenceRefused
from farcall.protocol.ids import ForkId, RRefId
from farcall.testing import simulated_books
from farcall.testing.invariants import BrokenInvariant
from farcall.testing.random_schedules import RandomSchedule, replay
from farcall.testing.simulated_books import BookWorker
from farcall.testing.simulated_workers import CONFIRMED, PENDING
from farcall.testing.simulation import SimulatedNetwork, parse, show


@pytest.mark.parametrize("block", range(4))
def test_seeded_schedules_run_clean(block: int) -> None:
    for seed in range(block * 500, block * 500 + 500):
        RandomSchedule(seed, new_worker=BookWorker).run()


def test_everything_happens_in_some_schedule() -> None:
    words = {step[0] for seed in range(300) for step in RandomSchedule(seed, new_worker=BookWorker).run().schedule}
    assert words == {
        "make", "call", "pass", "use", "draft", "drop", "keep", "deliver", "again", "lose", "resend", "ack", "cut",
        "heal", "crash", "tell", "restart", "greet", "illegal", "ask", "answer", "tend", "work", "count", "mail",
        "along",
    }  # fmt: skip


def test_a_printed_schedule_plays_again() -> None:
    for seed in range(50):
        schedule = RandomSchedule(seed, new_worker=BookWorker)
        workers = len(schedule.network.workers)
        network = schedule.run()
        again = replay(parse(show(network.schedule)), workers, new_worker=BookWorker)
        assert again.schedule == network.schedule
        for one, other in zip(again.workers.values(), network.workers.values(), strict=True):
            assert one.snapshot() == other.snapshot()


def play(text: str, workers: int = 3) -> SimulatedNetwork:
    network = SimulatedNetwork(workers, new_worker=BookWorker)
    for step in parse(text):
        assert network.step(*step), f"{step} cannot happen"
    return network


def book_worker(network: SimulatedNetwork, number: int) -> BookWorker:
    worker = network.workers[number]
    assert isinstance(worker, BookWorker)
    return worker


def test_an_answered_call_takes_the_strokes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []

    def noted(*call: Any) -> Any:
        value = create_answered(*call)
        taken.append(value is not None)
        return value

    monkeypatch.setattr(simulated_books, "create_answered", noted)
    network = play("ask 1 0; deliver 1 0 1")
    assert taken == [True]
    assert not network.workers[0].references.owned, "it is counted once it was answered"
    assert network.workers[0].values == {RRefId(0, 1, 1)}
    network.step("count", 0)
    assert network.workers[0].references.owned.keys() == {RRefId(0, 1, 1)}
    network.step("answer", 1, 0, 1)
    assert [handle.standing for handle in network.workers[1].handles.values()] == [PENDING]
    network.step("tend", 1)
    assert [handle.standing for handle in network.workers[1].handles.values()] == [CONFIRMED]
    network.step("drop", 1, 1)
    assert not network.under_way
    network.step("tend", 1)
    network.step("mail", 1, 0)
    assert list(network.under_way) == [(1, 0, 2)]
    network.finish()
    assert network.workers[0].released == {RRefId(0, 1, 1)}


def test_a_draft_is_undone_and_what_went_before_it_is_sent() -> None:
    network = play("make 0; call 0 1; deliver 0 1 1; call 0 1; drop 0 2; ack 0 1; tend 0; draft 0 1 1")
    assert (0, 1, 3) in network.under_way, "the end of the first handle"
    assert network.workers[0].references.owned[RRefId(0, 0, 1)].forks == {}
    network.finish()


def test_a_call_at_a_lost_worker_makes_a_handle_that_leads_nowhere() -> None:
    network = play("crash 1; tell 0 1; ask 0 1")
    real = book_worker(network, 0)._real([1])[0]
    with pytest.raises(OwnerLost, match="worker1"):
        real.check()
    del real
    network.finish()


def test_it_is_not_copied() -> None:
    with pytest.raises(TypeError, match="play its schedule again"):
        BookWorker(0).copy()


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda w: w.delivery.send(0, None), "POSTED: worker 1 has given 2 numbers"),
        (lambda w: w.book.mailboxes.owed.update({9: None}), "POSTED: worker 1 has something to say to worker 9"),
        (lambda w: w.book._values.clear(), "VALUES: worker 1 has no value"),
        (lambda w: w.references.owned.clear(), "VALUES: worker 1 keeps the value"),
        (lambda w: setattr(w.references.owned[RRefId(1, 1, 1)], "handles", 0), "HANDLES: .*of its own"),
        (lambda w: w.references.held.clear(), "HANDLES: .*tables do not know"),
        (lambda w: setattr(w._real([2])[0], "new_error", OwnerLost), "HANDLES: .*leads nowhere"),
        (lambda w: setattr(w.references.held[ForkId(1, 1)], "dropped", True), "HANDLES: .*dropped"),
        (lambda w: setattr(w._real([2])[0], "confirmed", True), "HANDLES: .*handle.confirmed=True; it is unconfirmed"),
        (lambda w: w.book._handles.clear(), "HANDLES: .*could not find it"),
    ],
)
def test_what_is_wrong_with_a_book_is_said(spoil: Callable[[BookWorker], Any], what: str) -> None:
    worker = book_worker(play("make 1; call 1 0"), 1)
    worker.check()
    spoil(worker)
    with pytest.raises(BrokenInvariant, match=what):
        worker.check()


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda w: w.book.left.append((0, 1)), "chores"),
        (lambda w: w.book.mailboxes.asked.update({0: 1}), "answers to be awaited"),
        (lambda w: w.book._origins.update({RRefId(1, 1, 1): "here"}), "origins of values"),
        (lambda w: w.book._handles.update({ForkId(1, 1): None}), "handles"),
        (lambda w: w.things.append(lambda: 1), "values"),
    ],
)
def test_what_is_left_of_a_book_is_said(spoil: Callable[[BookWorker], Any], what: str) -> None:
    network = play("make 1; call 1 0")
    network.finish()
    worker = book_worker(network, 1)
    spoil(worker)
    with pytest.raises(BrokenInvariant, match=f"EMPTY: the book of worker 1 still has {what}"):
        worker.check(at_the_end=True)


def test_the_owner_passes_on_what_has_come_back_too_late_and_its_receiver_finds_an_error() -> None:
    network = play(
        "make 2; pass 2 1 1; deliver 2 1 1; drop 2 1; work 2; pass 1 0 1; crash 1; tell 2 1; deliver 1 0 1; "
        "pass 0 2 1; deliver 0 2 1; pass 2 0 2"
    )
    reference = RRefId(2, 2, 1)
    assert reference in network.workers[2].released
    assert network.step("deliver", 2, 0, 2)
    assert [handle.standing for handle in network.workers[0].handles.values()] == [PENDING, CONFIRMED]
    with pytest.raises(ReferenceRefused):
        book_worker(network, 2).book.value(reference).value()
    network.finish()
