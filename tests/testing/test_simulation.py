"""The reference protocol on the simulated network: a Hypothesis state machine over it, and its steps one by one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.references import References
from farcall.testing.invariants import BrokenInvariant, check_answered, check_live, check_settled
from farcall.testing.simulated_books import BookWorker
from farcall.testing.simulated_workers import CONFIRMED, ORPHANED, PENDING, REFUSED, SimulatedWorker
from farcall.testing.simulation import SimulatedNetwork, parse, show

ANY = st.integers(0, 11)
"""Chooses one of several, whatever their number: small numbers shrink well."""


class References_under_any_schedule(RuleBasedStateMachine):  # noqa: N801 - it is the name of a test
    """Hypothesis plays the programs, the network and the machines."""

    kind: type[SimulatedWorker] = SimulatedWorker

    @initialize(workers=st.integers(2, 4))
    def begin(self, workers: int) -> None:
        self.network = SimulatedNetwork(workers, new_worker=self.kind)

    def someone(self, number: int) -> int:
        return self.network.alive[number % len(self.network.alive)].me

    def anyone(self, number: int) -> int:
        return number % len(self.network.workers)

    def handle_of(self, worker: int, number: int) -> int | None:
        handles = list(self.network.workers[worker].handles)
        return handles[number % len(handles)] if handles else None

    @rule(worker=ANY)
    def make(self, worker: int) -> None:
        self.network.step("make", self.someone(worker))

    @rule(word=st.sampled_from(["call", "ask"]), worker=ANY, owner=ANY)
    def call(self, word: str, worker: int, owner: int) -> None:
        self.network.step(word, self.someone(worker), self.anyone(owner))

    @precondition(lambda self: self.network.answers)
    @rule(number=ANY)
    def answer(self, number: int) -> None:
        self.network.step("answer", *self.network.answers[number % len(self.network.answers)])

    @precondition(lambda self: self.network.chores())
    @rule(number=ANY)
    def do_a_chore(self, number: int) -> None:
        chores = self.network.chores()
        self.network.step(*chores[number % len(chores)])

    @rule(word=st.sampled_from(["pass", "use", "draft"]), worker=ANY, to=ANY, number=ANY)
    def pass_one(self, word: str, worker: int, to: int, number: int) -> None:
        me = self.someone(worker)
        if (handle := self.handle_of(me, number)) is not None:
            self.network.step(word, me, self.anyone(to), handle)

    @rule(worker=ANY, to=ANY)
    def pass_all(self, worker: int, to: int) -> None:
        me = self.someone(worker)
        self.network.step("pass", me, self.anyone(to), *self.network.workers[me].handles)

    @rule(worker=ANY)
    def abandon(self, worker: int) -> None:
        me = self.someone(worker)
        for child in list(self.network.workers[me].drafts)[:1]:
            self.network.step("abandon", me, child.number)

    @rule(worker=ANY, number=ANY)
    def drop(self, worker: int, number: int) -> None:
        me = self.someone(worker)
        if (handle := self.handle_of(me, number)) is not None:
            self.network.step("drop", me, handle)

    @precondition(lambda self: self.network.under_way)
    @rule(word=st.sampled_from(["deliver", "deliver", "deliver", "again", "lose"]), number=ANY)
    def move(self, word: str, number: int) -> None:
        keys = list(self.network.under_way)
        self.network.step(word, *keys[number % len(keys)])

    @rule(word=st.sampled_from(["resend", "ack", "cut", "heal"]), one=ANY, other=ANY)
    def trouble(self, word: str, one: int, other: int) -> None:
        self.network.step(word, self.anyone(one), self.anyone(other))

    @precondition(lambda self: self.network.deaths < 2 and len(self.network.alive) > 1)
    @rule(worker=ANY)
    def crash(self, worker: int) -> None:
        self.network.step("crash", self.someone(worker))

    @precondition(lambda self: self.network.untold)
    @rule(number=ANY)
    def tell(self, number: int) -> None:
        self.network.step("tell", *self.network.untold[number % len(self.network.untold)])

    @precondition(lambda self: self.network.deaths and len(self.network.workers) < 6)
    @rule()
    def restart(self) -> None:
        self.network.step("restart")

    @precondition(lambda self: self.network.ungreeted)
    @rule(number=ANY)
    def greet(self, number: int) -> None:
        self.network.step("greet", *self.network.ungreeted[number % len(self.network.ungreeted)])

    @rule(worker=ANY, kind=st.integers(0, 60))
    def illegal(self, worker: int, kind: int) -> None:
        self.network.step("illegal", self.someone(worker), kind)

    @invariant()
    def live(self) -> None:
        check_live(self.network.workers)

    @invariant()
    def answered(self) -> None:
        check_answered(self.network.workers, self.network.alive, self.network._asked)

    @invariant()
    def settled(self) -> None:
        for worker in self.network.alive:
            check_settled(worker)

    def teardown(self) -> None:
        if hasattr(self, "network"):
            self.network.finish()  # EMPTY and PROMISED


# Derandomized: the same in every run. `make simulate` looks for what is new.
TestReferences = References_under_any_schedule.TestCase
TestReferences.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


class Books_under_any_schedule(References_under_any_schedule):  # noqa: N801
    """The same, with the book of a real agent in each worker."""

    kind = BookWorker


TestBooks = Books_under_any_schedule.TestCase
TestBooks.settings = settings(TestReferences.settings, max_examples=100)


# -- steps


def play(text: str, workers: int = 3, **classes: Any) -> SimulatedNetwork:
    network = SimulatedNetwork(workers, **classes)
    for step in parse(text):
        assert network.step(*step), f"{step} cannot happen"
    return network


def standings(network: SimulatedNetwork, worker: int) -> list[str]:
    return [handle.standing for handle in network.workers[worker].handles.values()]


def test_a_remote_call_is_confirmed_and_ends() -> None:
    network = play("call 1 0; deliver 1 0 1")
    assert standings(network, 1) == [PENDING]
    network.step("ack", 1, 0)
    assert standings(network, 1) == [CONFIRMED]
    assert network.workers[0].values == {RRefId(0, 1, 1)}
    network.finish()
    assert network.workers[0].released == {RRefId(0, 1, 1)}


def test_handles_go_several_at_once_and_are_dropped_on_arrival_if_they_are_only_used() -> None:
    network = play("make 0; make 0; pass 0 1 1 2; use 0 2 1; deliver 0 1 1; deliver 0 2 1")
    assert standings(network, 1) == [CONFIRMED, CONFIRMED]
    assert standings(network, 2) == []
    network.finish()


def test_a_lost_message_is_sent_again_and_taken_once() -> None:
    network = play("call 1 0; lose 1 0 1; resend 1 0; again 1 0 1; deliver 1 0 1")
    assert len(network.workers[0].references.owned) == 1
    network.finish()


def test_a_cut_loses_what_is_on_the_link_and_is_no_loss_of_a_worker() -> None:
    network = play("call 1 0; cut 0 1")
    assert not network.under_way
    assert not network.step("deliver", 1, 0, 1)
    assert not network.step("resend", 1, 0)
    network.step("call", 1, 0)
    assert not network.under_way
    network.step("heal", 0, 1)
    assert sorted(network.under_way) == [(1, 0, 1), (1, 0, 2)]
    network.finish()
    assert network.deaths == 0


def test_an_acknowledgement_ends_the_keeping() -> None:
    network = play("call 1 0; deliver 1 0 1")
    assert not network.workers[1].delivery.is_quiet()
    network.step("ack", 1, 0)
    assert network.workers[1].delivery.is_quiet()


def test_an_acknowledgement_rides_on_a_message() -> None:
    network = play("call 1 0; deliver 1 0 1; make 0; pass 0 1 1; deliver 0 1 1")
    assert network.workers[1].delivery.is_quiet()
    assert standings(network, 1)[0] == CONFIRMED


def test_survivors_are_told_of_a_death_each_in_its_own_time() -> None:
    network = play("make 0; pass 0 1 1; pass 0 2 1; deliver 0 1 1; deliver 0 2 1; crash 0; tell 1 0")
    assert (standings(network, 1), standings(network, 2)) == ([ORPHANED], [CONFIRMED])
    network.step("tell", 2, 0)
    assert standings(network, 2) == [ORPHANED]


def test_what_the_dead_have_sent_arrives_until_the_receiver_is_told() -> None:
    network = play("make 0; pass 0 1 1; pass 0 2 1; crash 0; tell 2 0; deliver 0 1 1; deliver 0 2 1")
    assert (standings(network, 1), standings(network, 2)) == ([CONFIRMED], [])


def test_a_child_whose_parent_died_with_the_only_confirmed_handle_is_refused() -> None:
    network = play("make 0; pass 0 1 1; drop 0 1; deliver 0 1 1; pass 1 2 1; crash 1; tell 0 1; deliver 1 2 1")
    network.rest()
    assert standings(network, 2) == [REFUSED]
    network.finish()


def test_a_restarted_worker_has_a_new_number_and_is_known_to_whom_was_told() -> None:
    network = play("crash 1; restart; call 3 0")
    assert network.step("deliver", 3, 0, 1)  # not taken: worker 0 has not been told of its sender
    assert not network.workers[0].references.owned
    assert not network.step("call", 0, 3)
    assert network.step("greet", 0, 3)
    network.finish()


def test_what_names_a_worker_of_whom_nobody_told_is_taken_later() -> None:
    network = play("crash 1; restart; greet 0 3; call 3 3; pass 3 0 1; deliver 3 0 1; pass 0 2 1; deliver 0 2 1")
    assert standings(network, 2) == []
    network.rest()
    assert standings(network, 2) == [CONFIRMED]
    network.finish()


def test_a_draft_counts_until_it_is_abandoned() -> None:
    network = play("make 0; draft 0 1 1; drop 0 1")
    assert network.workers[0].values
    network.step("abandon", 0, 1)
    assert not network.workers[0].values
    network.finish()


@pytest.mark.parametrize(
    "step",
    ["make 7", "drop 0 1", "pass 0 1 1", "pass 0 7 1", "use 0 1 1", "draft 0 1 1", "abandon 0 1", "deliver 0 1 1",
     "again 0 1 1", "lose 0 1 1", "resend 0 7", "ack 7 0", "cut 0 0", "heal 0 1", "crash 7", "tell 0 1", "restart",
     "greet 0 1", "call 0 7", "illegal 7 1"],
)  # fmt: skip
def test_what_cannot_happen_does_not_and_is_not_in_the_schedule(step: str) -> None:
    network = SimulatedNetwork(3)
    assert not network.step(*parse(step)[0])
    assert network.schedule == []


def test_a_schedule_is_text_and_text_is_a_schedule() -> None:
    schedule = [("call", 1, 0), ("deliver", 1, 0, 1), ("restart",)]
    assert show(schedule) == "call 1 0; deliver 1 0 1; restart"
    assert parse(show(schedule)) == schedule
    assert parse(" call 1 0;;\n restart ; ") == [("call", 1, 0), ("restart",)]
    with pytest.raises(ValueError, match="x"):
        parse("call x")


# -- what is broken says so


class Raises(References):
    """It cannot create."""

    def create_requested(self, sender: int, reference: Any, fork: Any) -> list[Any]:
        raise KeyError("nothing here")


def test_an_exception_of_the_protocol_breaks_lawful_and_brings_its_schedule() -> None:
    network = play("make 0; call 1 0", new_worker=partial(SimulatedWorker, references=Raises))
    with pytest.raises(BrokenInvariant, match=r"LAWFUL: 'deliver 1 0 1' raised KeyError") as caught:
        network.step("deliver", 1, 0, 1)
    assert show(caught.value.schedule) == "make 0; call 1 0; deliver 1 0 1"


def test_live_is_broken_by_a_release_under_a_confirmed_handle() -> None:
    network = play("make 0; pass 0 1 1; deliver 0 1 1")
    network.workers[0].references.owned[RRefId(0, 0, 1)].forks.clear()
    with pytest.raises(BrokenInvariant, match="LIVE"):
        network.step("drop", 0, 1)


def test_lent_is_broken_by_a_release_under_a_lent_handle() -> None:
    network = play("call 1 0; deliver 1 0 1; ack 1 0; pass 1 2 1; deliver 1 2 1; drop 1 1")
    network.workers[0].released.add(RRefId(0, 1, 1))
    with pytest.raises(BrokenInvariant, match=r"LENT: reference 1:1 .* was released, and was lent to worker 2"):
        network.step("call", 2, 1)


def test_lent_is_broken_by_a_lender_that_does_not_wait() -> None:
    network = play("call 1 0; deliver 1 0 1; ack 1 0; pass 1 2 1; deliver 1 2 1")
    network.workers[1].references.parents.clear()
    with pytest.raises(BrokenInvariant, match="LENT: worker 1 does not know that it lent fork 1:2"):
        network.step("call", 2, 1)


def test_answered_is_broken_by_a_request_that_nobody_sent() -> None:
    network = play("call 1 0; deliver 1 0 1; pass 1 2 1; deliver 1 2 1; keep 2 1")
    network._asked.clear()
    with pytest.raises(BrokenInvariant, match="ANSWERED: worker 2 waits for an answer about fork 1:2"):
        network.step("call", 2, 1)


def test_empty_is_broken_by_whatever_is_left() -> None:
    network = play("make 0")
    network.workers[0].references.parents[ForkId(0, 5)] = ForkId(0, 4)
    with pytest.raises(BrokenInvariant, match="EMPTY: worker 0 still has pending children: fork 0:5"):
        network.finish()


def test_promised_is_broken_by_a_handle_that_waits_for_ever() -> None:
    network = play("call 1 0; deliver 1 0 1; ack 1 0; pass 1 2 1; deliver 1 2 1; keep 2 1")
    network.under_way.clear()
    network.not_taken.clear()
    with pytest.raises(BrokenInvariant, match="PROMISED: worker 2 has a pending handle"):
        network.rest()


def test_a_network_that_never_comes_to_rest_is_broken() -> None:
    network = play("call 1 0; lose 1 0 1")
    network.workers[1].delivery.lost(0)  # so that it sends nothing again
    with pytest.raises(BrokenInvariant, match="it never comes to rest: resend 1 0"):
        network.rest()
