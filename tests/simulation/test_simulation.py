"""Reference counting on the simulated network: a Hypothesis state machine over it, and its steps one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from farcall.protocol.ids import ForkId
from farcall.protocol.reference_messages import CancelCreate
from farcall.runtime.reference_outbox import pack_control
from farcall.runtime.reference_store import ReferenceStore
from simulation.forgeries import forgeries
from simulation.invariants import (
    CONFIRMED,
    ORPHANED,
    PENDING,
    REFUSED,
    BrokenInvariant,
    check_answered,
    check_live,
    check_settled,
    check_unreported,
)
from simulation.planted_bugs import Bug, planted
from simulation.random_schedules import limited_claims
from simulation.reference_state import genuine
from simulation.schedules import parse, show
from simulation.simulation import SimulatedNetwork

ANY = st.integers(0, 11)
"""Chooses one of several, whatever their number: small numbers shrink well."""


class ReferencesUnderAnySchedule(RuleBasedStateMachine):
    """Hypothesis plays the programs, the network and the machines."""

    @initialize(workers=st.integers(2, 4))
    def begin(self, workers: int) -> None:
        self.network = SimulatedNetwork(workers)

    def choose(self, among: Any, number: int) -> Any:
        among = list(among)
        return among[number % len(among)] if among else -1  # -1 is nobody, and makes the step impossible

    def someone(self, number: int) -> int:
        return int(self.choose(self.network.alive, number).me)

    def anyone(self, number: int) -> int:
        return number % len(self.network.workers)

    def handle_of(self, worker: int, number: int) -> int:
        return int(self.choose(self.network.workers[worker].handles, number))

    @rule(worker=ANY)
    def make(self, worker: int) -> None:
        self.network.step("make", self.someone(worker))

    @rule(worker=ANY, handle=ANY)
    def cancel(self, worker: int, handle: int) -> None:
        me = self.someone(worker)
        self.network.step("cancel", me, self.handle_of(me, handle))

    @rule(end=ANY, call=ANY)
    def give_up(self, end: int, call: int) -> None:
        ends = [each for each in self.network.ends if each.is_client and each.pending]
        if ends:
            chosen = self.choose(ends, end)
            self.network.step("giveup", chosen.me, chosen.number, self.choose(chosen.pending, call))

    @rule(worker=ANY, owner=ANY)
    def call(self, worker: int, owner: int) -> None:
        self.network.step("call", self.someone(worker), self.anyone(owner))

    @rule(word=st.sampled_from(["on", "fetch", "drop"]), worker=ANY, number=ANY)
    def use_handle(self, word: str, worker: int, number: int) -> None:
        me = self.someone(worker)
        self.network.step(word, me, self.handle_of(me, number))

    @rule(word=st.sampled_from(["pass", "use", "call"]), worker=ANY, to=ANY, number=ANY)
    def pass_one(self, word: str, worker: int, to: int, number: int) -> None:
        me = self.someone(worker)
        self.network.step(word, me, self.anyone(to), self.handle_of(me, number))

    @rule(worker=ANY, to=ANY)
    def pass_all(self, worker: int, to: int) -> None:
        me = self.someone(worker)
        self.network.step("pass", me, self.anyone(to), *self.network.workers[me].handles)

    @precondition(lambda self: self.network.ends)
    @rule(end=ANY, number=ANY)
    def return_one(self, end: int, number: int) -> None:
        at = self.choose(self.network.ends, end)
        self.network.step("return", at.me, at.number, self.handle_of(at.me, number))

    @rule(word=st.sampled_from(["send", "send", "send", "interrupt"]), worker=ANY, number=ANY)
    def finish_sending(self, word: str, worker: int, number: int) -> None:
        me = self.someone(worker)
        self.network.step(word, me, self.choose(self.network.workers[me].drafts, number))

    @rule(worker=ANY, number=ANY)
    def run_request(self, worker: int, number: int) -> None:
        me = self.someone(worker)
        self.network.step("run", me, self.choose(self.network.workers[me].invocations, number))

    @rule(word=st.sampled_from(["work", "report", "retry"]), worker=ANY)
    def work(self, word: str, worker: int) -> None:
        self.network.step(word, self.someone(worker))

    @rule(word=st.sampled_from(["connect", "connect", "fail"]), worker=ANY, number=ANY)
    def connect(self, word: str, worker: int, number: int) -> None:
        me = self.someone(worker)
        self.network.step(word, me, self.choose(self.network.workers[me].to_connect, number))

    @precondition(lambda self: self.network.frames)
    @rule(word=st.sampled_from(["deliver", "deliver", "deliver", "again", "discard"]), number=ANY)
    def move(self, word: str, number: int) -> None:
        self.network.step(word, self.choose(self.network.frames, number))

    @precondition(lambda self: self.network.ends)
    @rule(number=ANY)
    def close(self, number: int) -> None:
        self.network.step("close", self.choose(self.network.ends, number).number)

    @precondition(lambda self: self.network.deaths < 2 and len(self.network.alive) > 1)
    @rule(worker=ANY)
    def crash(self, worker: int) -> None:
        self.network.step("crash", self.someone(worker))

    @precondition(lambda self: self.network.untold)
    @rule(number=ANY)
    def remove(self, number: int) -> None:
        self.network.step("remove", *self.choose(self.network.untold, number))

    @precondition(lambda self: self.network.deaths and len(self.network.workers) < 6)
    @rule()
    def restart(self) -> None:
        self.network.step("restart")

    @precondition(lambda self: self.network.unintroduced)
    @rule(number=ANY)
    def add(self, number: int) -> None:
        self.network.step("add", *self.choose(self.network.unintroduced, number))

    @rule(worker=ANY, kind=st.integers(0, 60))
    def illegal(self, worker: int, kind: int) -> None:
        self.network.step("illegal", self.someone(worker), kind)

    @invariant()
    def all_workers(self) -> None:
        check_live(self.network.workers)
        check_unreported(self.network.workers)
        check_answered(self.network.workers)
        for worker in self.network.alive:
            check_settled(worker)
            worker.check()

    def teardown(self) -> None:
        if hasattr(self, "network"):
            self.network.finish()  # EMPTY and PROMISED


# Derandomized: the same in every run. `make simulate` looks for what is new.
TestReferences = ReferencesUnderAnySchedule.TestCase
TestReferences.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


# -- steps


def play(text: str, workers: int = 3) -> SimulatedNetwork:
    network = SimulatedNetwork(workers)
    for step in parse(text):
        assert network.step(*step), f"{step} is impossible"
    return network


def statuses(network: SimulatedNetwork, worker: int) -> list[str]:
    return [handle.status for handle in network.workers[worker].handle_statuses()]


def values(network: SimulatedNetwork, worker: int) -> int:
    return network.workers[worker].store.table_sizes()["values"]


CALLED = "call 1 0; send 1 3; deliver 1; run 0 1; deliver 2"
"""Worker 1 has made a remote call at worker 0, and has its reply. Its handle is number 2."""


def test_a_remote_call_is_confirmed_and_ends() -> None:
    network = play("call 1 0; send 1 3; deliver 1; run 0 1")
    assert statuses(network, 1) == [PENDING]
    network.step("deliver", 2)
    assert statuses(network, 1) == [CONFIRMED]
    assert values(network, 0) == 1
    network.finish()
    assert values(network, 0) == 0


def test_handles_go_several_at_once_and_end_with_the_call_if_they_are_only_used() -> None:
    network = play(
        "make 0; make 0; pass 0 1 1 2; send 0 3; use 0 2 1; send 0 4; deliver 1; run 1 1; deliver 2; run 2 1"
    )
    assert statuses(network, 1) == [CONFIRMED, CONFIRMED]
    assert statuses(network, 2) == []
    network.finish()


def test_a_frame_that_is_lost_with_its_link_is_sent_again_and_taken_once() -> None:
    network = play("call 1 0; send 1 3; close 0; discard 1; connect 1 0; again 2; deliver 2; run 0 1")
    assert len(network.workers[0].counts.owned) == 1
    assert values(network, 0) == 1
    assert not network.workers[0].invocations  # it ran once
    network.finish()
    assert network.deaths == 0


def test_only_what_is_on_a_link_that_breaks_can_be_lost() -> None:
    network = play("call 1 0; send 1 3")
    assert not network.step("discard", 1)
    network.step("close", 1)  # the end of worker 0
    assert network.step("discard", 1)
    assert statuses(network, 1) == [PENDING]
    network.rest()
    assert statuses(network, 1) == [CONFIRMED]


def test_what_is_sent_on_a_link_whose_other_end_is_closed_is_sent_again() -> None:
    network = play("call 1 0; close 1; send 1 3")
    assert not network.frames
    network.finish()
    assert network.workers[1].delivery.sent() == 2  # the call, and the end of the handle


def test_an_interrupted_call_is_made_all_the_same() -> None:
    network = play("call 1 0; interrupt 1 3")
    assert not network.frames
    network.rest()
    assert statuses(network, 1) == [CONFIRMED]
    assert values(network, 0) == 1


def test_the_owner_hears_nothing_of_a_handle_that_is_dropped_soon() -> None:
    network = play(f"{CALLED}; use 1 2 2; send 1 4; deliver 3; run 2 1")
    network.rest()
    assert network.workers[2].delivery.links[0].last == 0
    assert network.workers[0].counts.owned[genuine(0, 1, 1)].forks == {ForkId(1, 1): 1}


def test_the_owner_counts_a_handle_that_is_kept() -> None:
    network = play(f"{CALLED}; pass 1 2 2; send 1 4; deliver 3; run 2 1")
    assert statuses(network, 2) == [PENDING]
    network.rest()
    assert statuses(network, 2) == [CONFIRMED]
    assert network.workers[0].counts.owned[genuine(0, 1, 1)].forks == {ForkId(1, 1): 1, ForkId(1, 2): 2}
    network.finish()


def test_a_handle_is_held_until_the_remote_call_on_it_has_come() -> None:
    network = play(f"{CALLED}; on 1 2; send 1 6; drop 1 2")
    assert not network.workers[1].counts.held[ForkId(1, 1)].dropped
    network.rest()
    assert not network.workers[0].has_refused
    assert list(network.workers[1].counts.held) == [ForkId(1, 2)]
    assert values(network, 0) == 1  # of the call on it


def test_a_use_waits_for_a_value_that_is_still_to_come() -> None:
    network = play("call 1 0; fetch 1 2; deliver 1")
    assert not network.step("run", 0, 1)
    assert network.step("send", 1, 3)
    network.step("deliver", 2)
    assert network.step("run", 0, 2)  # the remote call
    assert network.step("run", 0, 1)
    assert not network.workers[0].has_refused


def test_survivors_hear_of_a_death_each_at_its_own_time() -> None:
    network = play(
        "make 0; pass 0 1 1; send 0 2; pass 0 2 1; send 0 3; deliver 1; run 1 1; deliver 2; run 2 1; crash 0"
    )
    network.step("remove", 1, 0)
    assert (statuses(network, 1), statuses(network, 2)) == ([ORPHANED], [CONFIRMED])
    network.step("remove", 2, 0)
    assert statuses(network, 2) == [ORPHANED]


def test_what_the_dead_have_sent_arrives_until_the_receiver_hears_of_the_death() -> None:
    network = play("make 0; pass 0 1 1; send 0 2; pass 0 2 1; send 0 3; crash 0; remove 2 0; deliver 1; run 1 1")
    assert statuses(network, 1) == [CONFIRMED]
    network.step("deliver", 2)
    assert not network.workers[2].counts.held


def test_a_child_whose_parent_died_with_the_only_confirmed_handle_is_refused() -> None:
    network = play(
        "make 0; pass 0 1 1; send 0 2; drop 0 1; work 0; deliver 1; run 1 1; pass 1 2 2; send 1 3; crash 1; remove 0 1"
    )
    network.step(*next(("deliver", number) for number, (end, _) in network.frames.items() if end.me == 2))
    network.rest()
    assert statuses(network, 2) == [REFUSED]
    network.finish()


def test_a_restarted_worker_has_a_new_number_and_is_known_to_who_heard_of_it() -> None:
    network = play("crash 1; restart")
    assert not network.step("call", 0, 3)
    assert network.step("add", 0, 3)
    assert network.step("call", 0, 3)
    assert network.step("call", 3, 2)  # the connection tells worker 2
    assert network.workers[2].knows(3)
    network.finish()


def test_a_frame_that_names_a_worker_of_which_the_receiver_has_not_heard_waits() -> None:
    network = play("crash 1; restart; add 0 3; call 3 3; run 3 2; pass 3 0 1; send 3 3; deliver 1; run 0 1")
    assert network.step("pass", 0, 2, 2)
    network.step("send", 0, 3)
    assert not network.step("deliver", 2)
    network.rest()
    assert statuses(network, 2) == [CONFIRMED]
    network.finish()


def test_a_claim_with_a_wrong_token_is_refused_when_the_reference_is_created() -> None:
    with limited_claims():
        network = play("call 1 0; claim 2 0 1 1; seek 2 0 1 1; seek 2 0 1 2")
        assert len(network.workers[0].store.forged_values()) == 2
        for step in parse("send 1 3; deliver 1; run 0 2; work 0"):
            network.step(*step)
        assert len(network.workers[0].store.forged_values()) == 1  # of what may still be created
        assert network.workers[0].store.refusals.counts() == {2: 1}
        network.finish()


def test_what_is_forged_is_refused_and_counted_for_its_sender() -> None:
    network = play("make 0; pass 0 1 1; send 0 2; deliver 1; run 1 1")
    kinds = len(forgeries(network.workers[0].counts, 2))
    for kind in range(kinds):
        assert network.step("forge", 2, 0, kind)
    # What is said with a wrong token is tried in the name of the holder, too.
    assert network.workers[0].store.refusals.counts() == {1: 1, 2: kinds - 1}
    assert statuses(network, 1) == [CONFIRMED]


@pytest.mark.parametrize(
    "step",
    ["make 7", "drop 0 1", "pass 0 1 1", "pass 0 7 1", "pass 0 1", "use 0 1 1", "return 0 0 1", "send 0 1",
     "interrupt 0 1", "on 0 1", "fetch 0 1", "run 0 1", "work 0", "report 0", "connect 0 1", "fail 0 1", "retry 0",
     "deliver 1", "again 1", "discard 1", "close 0", "crash 7", "remove 0 1", "restart", "add 0 1", "call 0 7",
     "illegal 7 1", "forge 0 0 1", "forge 1 0 1", "claim 0 0 1 1", "seek 7 0 1 1"],
)  # fmt: skip
def test_what_is_impossible_does_not_happen_and_is_not_in_the_schedule(step: str) -> None:
    network = SimulatedNetwork(3)
    assert not network.step(*parse(step)[0])
    assert network.schedule == []


def test_a_schedule_is_text_and_text_is_a_schedule() -> None:
    schedule = [("call", 1, 0), ("deliver", 1), ("restart",)]
    assert show(schedule) == "call 1 0; deliver 1; restart"
    assert parse(show(schedule)) == schedule
    assert parse(" call 1 0;;\n restart ; ") == [("call", 1, 0), ("restart",)]
    with pytest.raises(ValueError, match="x"):
        parse("call x")


# -- what is broken is found


def test_an_exception_of_the_store_breaks_lawful_and_brings_its_schedule() -> None:
    raising = Bug("Raises", ReferenceStore, (("delivery = self._outboxes.delivery\n", "raise KeyError('nothing')\n"),))
    with planted(raising), pytest.raises(BrokenInvariant, match=r"LAWFUL: 'deliver 1' raised KeyError") as caught:
        play("make 0; call 1 0; send 1 3; deliver 1")
    assert show(caught.value.schedule) == "make 0; call 1 0; send 1 3; deliver 1"


KEPT = f"{CALLED}; pass 1 2 2; send 1 4; deliver 3; run 2 1"


@pytest.mark.parametrize(
    ("steps", "spoil", "step", "broken"),
    [
        (CALLED, lambda n: n.workers[0].counts.owned[genuine(0, 1, 1)].forks.clear(), "make 2", "LIVE"),
        (KEPT, lambda n: n.workers[1].counts.parents.clear(), "make 2", "UNREPORTED"),
        (f"{KEPT}; report 2", lambda n: n.workers[2].delivery.links[0].unacknowledged.clear(), "make 1", "ANSWERED"),
        (KEPT, lambda n: n.workers[1].handles[2].__setattr__("confirmed", False), "make 1", "HANDLES"),
    ],
)  # fmt: skip
def test_every_step_is_checked(steps: str, spoil: Callable[[SimulatedNetwork], object], step: str, broken: str) -> None:
    network = play(steps)
    spoil(network)
    with pytest.raises(BrokenInvariant, match=broken):
        network.step(*parse(step)[0])


def test_empty_is_broken_by_whatever_is_left() -> None:
    network = play("make 0")
    network.workers[0].counts.parents[ForkId(0, 5)] = ForkId(0, 4)
    with pytest.raises(BrokenInvariant, match="EMPTY: worker 0 still has pending children: fork 0:5"):
        network.finish()


def test_promised_is_broken_by_a_handle_that_waits_for_ever() -> None:
    network = play("call 1 0; send 1 3; deliver 1; run 0 1")
    network.frames.clear()
    with pytest.raises(BrokenInvariant, match="PROMISED: worker 1 has a pending handle"):
        network.rest()


def test_promised_is_broken_by_a_network_that_never_comes_to_rest() -> None:
    network = play("make 0")
    worker = network.workers[0]

    def again() -> None:
        worker.due.append(again)

    again()
    with pytest.raises(BrokenInvariant, match="PROMISED: it never comes to rest: work 0 again and again"):
        network.rest()


# Cancellation


def remote_call(network: SimulatedNetwork) -> int:
    """Worker 0 makes a remote call at worker 1, and sends it. Returns the number of the handle."""
    assert network.step("call", 0, 1)
    worker = network.workers[0]
    assert network.step("send", 0, max(worker.drafts))
    return max(worker.handles)


def deliver_all(network: SimulatedNetwork) -> None:
    """Delivers all frames, and has each worker do what it has put off."""
    while network.frames:
        assert network.step("deliver", min(network.frames))
        for worker in list(network.workers):
            network.step("work", worker)


@pytest.mark.parametrize("times", [1, 2])
def test_a_remote_call_that_is_cancelled_does_not_run_and_its_reference_is_counted(times: int) -> None:
    network = SimulatedNetwork(3)
    handle = remote_call(network)
    deliver_all(network)
    assert network.workers[1].invocations
    for _ in range(times):
        assert network.step("cancel", 0, handle)
    deliver_all(network)
    assert not network.workers[1].invocations
    assert not network.workers[1].store.creations
    assert network.workers[0].handles[handle].confirmed
    network.finish()


def test_a_cancel_that_crosses_the_reply_changes_nothing() -> None:
    network = SimulatedNetwork(3)
    handle = remote_call(network)
    deliver_all(network)
    assert network.step("run", 1, min(network.workers[1].invocations))
    assert network.step("cancel", 0, handle)
    deliver_all(network)
    assert network.workers[0].handles[handle].confirmed
    network.finish()


def test_a_cancel_during_a_reconnect_follows_its_remote_call() -> None:
    network = SimulatedNetwork(3)
    handle = remote_call(network)
    lost = min(network.frames)
    assert network.step("close", 0)
    assert network.step("discard", lost)
    assert network.step("cancel", 0, handle)
    assert network.step("connect", 0, 1)
    deliver_all(network)
    assert not network.workers[1].invocations, "the call was sent again, and its cancellation after it"
    network.finish()


def test_two_cancels_that_follow_their_remote_call_in_one_frame_are_one() -> None:
    network = SimulatedNetwork(2)
    assert network.step("call", 0, 1)
    handle = max(network.workers[0].handles)
    assert network.step("close", 0)
    for _ in range(2):
        assert network.step("cancel", 0, handle)
    assert network.step("send", 0, max(network.workers[0].drafts))
    assert network.step("connect", 0, 1)
    deliver_all(network)
    assert not network.workers[1].invocations
    assert not network.workers[1].store.creations
    network.finish()


def test_a_cancel_of_a_call_with_references_frees_them() -> None:
    network = SimulatedNetwork(3)
    assert network.step("make", 0)
    worker = network.workers[0]
    assert network.step("pass", 0, 1, max(worker.handles))
    assert network.step("send", 0, max(worker.drafts))
    end = next(end for end in network.ends if end.is_client)
    assert network.step("giveup", 0, end.number, min(end.pending))
    deliver_all(network)
    assert not network.workers[1].handles
    assert not network.workers[1].invocations
    network.finish()


def test_a_cancel_of_another_workers_remote_call_is_refused() -> None:
    network = SimulatedNetwork(3)
    handle = network.workers[0].handles[remote_call(network)]
    deliver_all(network)
    network.step("connect", 2, 1)
    store = network.workers[1].store
    store.refusals.is_strict = False
    assert handle.fork is not None
    store.receive_control(2, pack_control(0, [(1, CancelCreate(handle.reference, handle.fork))]))
    store.process()
    assert network.workers[1].invocations
    assert store.refusals.counts() == {2: 1}
