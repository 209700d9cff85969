"""The reference store: values and handles of one worker, under one lock, with the code of users outside of it.

Here the stores of a simulated network are used, because they are those of production without threads: what happens
between workers happens when a test says so. `tests/simulation` tries all of it in every order.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from farcall.errors import (
    ExpelledError,
    OwnerLostError,
    ProtocolError,
    ReferenceRefusedError,
    UsageError,
    WorkerLostError,
)
from farcall.protocol.frames import HANDLE_SIZE, unpack_references
from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_messages import Carried, UserDeleted
from farcall.runtime import reference_store
from farcall.runtime.handles import Handle
from farcall.runtime.reference_outbox import UnackedKeep, pack_control, unpack_control
from farcall.runtime.reference_store import UNREPORTED_INTERVALS, RandomTokens, ReferenceStore
from interruption import At, Interrupt
from simulation.schedules import parse
from simulation.simulation import SimulatedNetwork

FILES = ("runtime/reference_store.py", "runtime/reference_outbox.py", "protocol/refcount.py", "protocol/delivery.py")


def play(text: str, workers: int = 3) -> SimulatedNetwork:
    network = SimulatedNetwork(workers)
    for step in parse(text):
        assert network.step(*step), f"{step} is impossible"
    return network


def store_of(network: SimulatedNetwork, worker: int) -> ReferenceStore:
    return network.workers[worker].store


def store() -> ReferenceStore:
    return store_of(SimulatedNetwork(2), 0)


def sizes(store: ReferenceStore) -> dict[str, int]:
    """Returns the tables that are not empty."""
    return {table: size for table, size in store.table_sizes().items() if size}


class FakeConnection:
    """A connection that works."""

    def is_lost(self) -> bool:
        return False


# -- Values of this worker


def test_a_value_goes_with_its_last_handle() -> None:
    mine = store()
    gone = threading.Event()

    class Thing:
        def __del__(self) -> None:
            gone.set()

    first = mine.own(Thing())
    second = mine.share_own(first.reference, "here")
    del first
    mine.process()
    assert not gone.is_set()
    assert second.value is not None
    del second
    assert not gone.is_set()  # the end is only noted
    mine.process()
    assert gone.is_set()
    assert sizes(mine) == {}


def test_finalizers_of_values_run_without_the_lock_and_may_make_references() -> None:
    mine = store()
    made: list[Handle] = []
    other_thread_got_in = []

    class Thing:
        def __del__(self) -> None:
            made.append(mine.own("from a finalizer"))
            thread = threading.Thread(target=lambda: other_thread_got_in.append(mine.table_sizes()))
            thread.start()
            thread.join(10)

    handle = mine.own(Thing())
    del handle
    mine.process()
    assert len(made) == 1
    assert len(other_thread_got_in) == 1


def test_values_that_held_handles_let_them_go_in_the_same_round() -> None:
    mine = store()
    handle = mine.own("innermost")
    for _ in range(5):
        handle = mine.own([handle])
    del handle
    mine.process()
    assert sizes(mine) == {}


def test_the_owner_makes_no_handle_of_what_is_not_there() -> None:
    mine = store()
    with pytest.raises(ReferenceRefusedError, match="has no reference 0:9 owned by 0"):
        mine.share_own(RRefId(0, 0, 9), "here")
    assert sum(mine.refusals.counts().values()) == 1


def test_a_use_of_what_is_not_there_is_refused_and_counted() -> None:
    mine = store()
    handle = mine.own("here")
    assert mine.find_value(handle.reference, lambda: 1).value() == "here"
    wrong = handle.reference._replace(token=b"guessed".ljust(16))
    with pytest.raises(ReferenceRefusedError, match="or the request does not have its token"):
        mine.find_value(wrong, lambda: 1).value()
    assert mine.refusals.counts() == {1: 1}


def test_a_request_about_a_reference_must_name_one() -> None:
    with pytest.raises(ProtocolError, match="does not say which"):
        store().value_at(b"V" + bytes(HANDLE_SIZE - 1))


# -- Passing handles on


def test_nothing_is_passed_if_one_handle_leads_nowhere() -> None:
    network = play("make 0; make 1; pass 0 1 1; send 0 2; deliver 1; run 1 2")
    network.step("crash", 0)
    network.step("remove", 1, 0)
    mine = store_of(network, 1)
    own, orphan = network.workers[1].handles.values()
    with pytest.raises(OwnerLostError):
        mine.pass_on([own, orphan], 2, FakeConnection())
    with pytest.raises(OwnerLostError):
        mine.create_remote(2, [own, orphan], UnackedKeep(FakeConnection(), None), 1, b"callee", b"", b"")
    assert sizes(mine) == {"owned": 1, "values": 1, "origins": 1}
    assert mine.messages_sent() == 0


def test_nothing_is_passed_to_a_worker_that_is_lost() -> None:
    network = play("make 0; crash 1; remove 0 1")
    mine = store_of(network, 0)
    before = mine.table_sizes()
    (handle,) = network.workers[0].handles.values()
    with pytest.raises(WorkerLostError, match="worker '1' was lost: nothing can be asked of it"):
        mine.pass_on([handle], 1, FakeConnection())
    with pytest.raises(WorkerLostError, match="use another one"):
        mine.create_remote(1, [handle], UnackedKeep(FakeConnection(), None), 1, b"callee", b"", b"")
    assert mine.table_sizes() == before


def test_a_handle_of_another_store_is_not_passed() -> None:
    network = SimulatedNetwork(2)
    theirs = store_of(network, 1).own("theirs")
    with pytest.raises(UsageError, match="is of another group"):
        store_of(network, 0).pass_on([theirs], 1, FakeConnection())


def test_references_that_came_before_make_no_handles_again() -> None:
    network = SimulatedNetwork(2)
    handle = store_of(network, 0).own("passed")
    number, carried, _ = unpack_references(store_of(network, 0).pass_on([handle], 1, FakeConnection()), 0)
    received = store_of(network, 1).receive_references(0, number, carried)
    assert received is not None
    assert [each.reference for each in received] == [handle.reference]
    assert store_of(network, 1).receive_references(0, number, carried) is None
    assert sizes(store_of(network, 1))["held"] == 1


def test_a_fork_that_its_sender_cannot_have_made_is_refused_and_those_before_it_end() -> None:
    network = SimulatedNetwork(3)
    mine = store_of(network, 1)
    carried = [Carried(RRefId(0, 0, 1), ForkId(0, 1)), Carried(RRefId(0, 0, 2), ForkId(2, 1))]
    with pytest.raises(ProtocolError, match="fork 2:1 came from worker 0, who cannot have made it"):
        mine.receive_references(0, 1, carried)
    gc.collect()  # the traceback has held the first handle
    network.workers[1].work()
    frame = mine.take_control_frame(0)
    assert frame is None or unpack_control(frame.payload)
    assert "held" not in sizes(mine)


def test_many_references_are_received_in_parts_and_other_threads_get_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = SimulatedNetwork(2)
    owner, user = store_of(network, 0), store_of(network, 1)
    handles = [owner.own(number) for number in range(1000)]
    number, carried, _ = unpack_references(owner.pass_on(handles, 1, FakeConnection()), 0)
    seen: list[int] = []

    def let_in(seconds: float) -> None:
        thread = threading.Thread(target=lambda: seen.append(user.table_sizes()["held"]))
        thread.start()
        thread.join(10)

    monkeypatch.setattr(reference_store, "sleep", let_in)
    received = user.receive_references(0, number, carried)
    assert received is not None
    assert [handle.reference for handle in received] == [handle.reference for handle in handles]
    assert seen == [256, 512, 768]


# -- Remote calls


def test_a_remote_call_is_taken_once_and_only_from_its_creator() -> None:
    mine = store()
    reference, fork = RRefId(0, 1, 1), ForkId(1, 1)
    taken = mine.accept_create(1, 1, reference, fork, [])
    assert taken is not None
    value, handles = taken
    assert not value.done()
    assert handles == ()
    assert mine.accept_create(1, 1, reference, fork, []) is None
    with pytest.raises(ProtocolError, match="is not worker 1's to ask for"):
        mine.accept_create(1, 2, RRefId(0, 2, 1), ForkId(2, 1), [])
    with pytest.raises(ProtocolError, match="fork 1:1 is counted already"):
        mine.accept_create(1, 3, reference, fork, [])


def test_a_use_that_overtakes_the_creation_waits_for_the_same_value() -> None:
    mine = store()
    reference = RRefId(0, 1, 1)
    awaited = mine.find_value(reference, lambda: 1)
    assert not awaited.done()
    taken = mine.accept_create(1, 1, reference, ForkId(1, 1), [])
    assert taken is not None
    assert taken[0] is awaited


def test_a_value_that_never_comes_is_refused_when_its_creator_is_lost() -> None:
    network = SimulatedNetwork(2)
    mine = store_of(network, 0)
    awaited = mine.find_value(RRefId(0, 1, 1), lambda: 1)
    network.step("crash", 1)
    network.step("remove", 0, 1)
    with pytest.raises(ReferenceRefusedError):
        awaited.value()
    assert sizes(mine) == {}


def test_only_the_owner_confirms_a_remote_call_and_only_once() -> None:
    network = play("call 1 0")
    mine = store_of(network, 1)
    (handle,) = network.workers[1].handles.values()
    mine.confirm_created(2, 1)
    assert not handle.confirmed
    mine.confirm_created(0, 1)
    mine.confirm_created(0, 1)
    assert handle.confirmed
    assert mine.awaits_acknowledgement(0) is False


# -- The process of a worker


def test_process_is_scheduled_once_for_many_ends() -> None:
    network = SimulatedNetwork(2)
    mine, due = store_of(network, 0), network.workers[0].due
    handles = [mine.own(number) for number in range(10)]
    assert due == []
    handles.clear()
    assert len(due) == 1
    network.workers[0].work()
    assert sizes(mine) == {}
    assert due == []


def test_many_ends_are_told_in_one_frame() -> None:
    network = SimulatedNetwork(2)
    owner, user = store_of(network, 0), store_of(network, 1)
    handles = [owner.own(number) for number in range(50)]
    number, carried, _ = unpack_references(owner.pass_on(handles, 1, FakeConnection()), 0)
    received = user.receive_references(0, number, carried)
    assert received is not None
    received.clear()
    network.workers[1].work()  # there is no connection, so nothing is sent
    frame = user.take_control_frame(0)
    assert frame is not None
    acknowledged, messages = unpack_control(frame.payload)
    assert acknowledged == 1
    assert [type(message) for _, message in messages] == [UserDeleted] * 50
    assert user.take_control_frame(0) is None


def test_tables_that_were_large_give_their_memory_back() -> None:
    network = SimulatedNetwork(2)
    mine, owned = store_of(network, 0), network.workers[0].counts.owned
    handles = [mine.own(number) for number in range(5000)]
    large = owned.__sizeof__()
    handles.clear()
    mine.process()
    assert sizes(mine) == {}
    assert owned.__sizeof__() < large / 100


def test_messages_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(ProtocolError, match="a control message of 3 bytes"):
        store().receive_control(1, b"abc")


def test_an_acknowledgement_of_what_was_not_sent_is_refused() -> None:
    with pytest.raises(ProtocolError, match="acknowledged message 5"):
        store().receive_control(1, pack_control(5, []))


def test_a_worker_that_leaves_out_too_many_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall.protocol.watermark.MAX_RANGES", 20)
    mine = store()
    for number in range(2, 42, 2):
        assert mine.receive_references(1, number, ()) == []
    with pytest.raises(ProtocolError, match="left out too many numbers"):
        mine.receive_references(1, 42, ())
    mine.receive_control(1, pack_control(0, [(44, UserDeleted(RRefId(0, 1, 1), ForkId(1, 1)))]))
    with pytest.raises(ProtocolError, match="left out too many numbers"):  # production counts it as a refusal
        mine.process()


# -- Being cut off, giving up, the end


def test_a_worker_that_is_cut_off_keeps_its_values_and_forgets_the_others() -> None:
    network = play("make 0; pass 0 1 1; send 0 2; deliver 1; run 1 1; make 1; pass 1 2 3; send 1 4; work 1")
    mine = store_of(network, 1)
    theirs, own = network.workers[1].handles.values()
    mine.cut_off()
    with pytest.raises(ExpelledError, match="worker '1' \\(this one\\) was declared lost"):
        theirs.check()
    own.check()
    assert sizes(mine) == {"owned": 1, "values": 1, "origins": 1}
    mine.add_worker(9)
    with pytest.raises(WorkerLostError):
        mine.pass_on([own], 9, FakeConnection())


def test_handles_that_are_given_up_raise_and_their_owner_hears_of_their_end() -> None:
    network = play("make 0; pass 0 1 1; send 0 2; drop 0 1; deliver 1; run 1 1")
    mine = store_of(network, 1)
    (handle,) = network.workers[1].handles.values()
    mine.give_up_handles("it was given up")
    with pytest.raises(UsageError, match="it was given up"):
        handle.check()
    assert "held" not in sizes(mine)
    frame = mine.take_control_frame(0)
    assert frame is not None
    store_of(network, 0).receive_control(1, frame.payload)
    store_of(network, 0).process()
    assert store_of(network, 0).table_sizes()["values"] == 0


def test_values_that_are_forgotten_are_refused_to_others_and_counted_to_their_end() -> None:
    network = play("make 0; pass 0 1 1; send 0 2; deliver 1; run 1 1")
    mine = store_of(network, 0)
    reference = next(iter(network.workers[0].handles.values())).reference
    mine.forget("the references were destroyed")
    with pytest.raises(
        ReferenceRefusedError, match="does not own reference 0:1 owned by 0 any more: its value was released"
    ):
        mine.find_value(reference, lambda: 1).value()
    assert mine.table_sizes()["owned"] == 1
    mine.own("new references can be made")


def test_a_store_that_is_cleared_is_empty_and_says_nothing_of_what_is_dropped_later() -> None:
    network = play("make 1; pass 1 0 1; send 1 2; deliver 1; run 0 1; make 0")
    mine = store_of(network, 0)
    mine.clear()
    assert sizes(mine) == {}
    network.workers[0].handles.clear()
    gc.collect()
    mine.process()
    assert mine.take_control_frame(1) is None
    assert sizes(mine) == {}


# -- Finalizers at every point


SCHEDULE = (
    "call 1 0; send 1 3; deliver 1; run 0 1; deliver 2; "
    "pass 1 2 2; send 1 4; deliver 3; run 2 1; use 1 2 2; send 1 5; drop 1 2; deliver 4; work 1; run 2 3; report 2"
)


def test_a_finalizer_at_any_point_leaves_the_tables_consistent() -> None:
    """It drops handles, and makes some where it may. All invariants are checked after every step, and at the end."""
    network = play(SCHEDULE)
    network.finish()
    steps = network.schedule
    network = SimulatedNetwork(3)
    with At(FILES, ()) as counting:
        for step in steps:
            network.step(*step)
    acted, refused = 0, list[str]()
    for point in range(0, counting.passed, 31):  # all of them take a minute
        network = SimulatedNetwork(3)
        stores = [store_of(network, worker) for worker in range(3)]
        handles = [store.own("dropped by the finalizer") for store in stores]

        def finalize(stores: list[ReferenceStore] = stores, handles: list[Handle] = handles) -> None:
            handles.clear()
            for store in stores:
                try:
                    store.own("made by the finalizer")
                except UsageError as error:  # it interrupts a change
                    refused.append(str(error))

        with At(FILES, (point,), finalize) as interrupted:
            for step in steps:
                network.step(*step)
        acted += interrupted.has_acted
        handles.clear()
        network.finish()
    assert acted > 40
    assert len(refused) > 10
    assert all("a finalizer cannot make references" in each for each in refused)


# -- Exceptions of signal handlers at every point


PASSED = "call 1 0; send 1 3; deliver 1; run 0 1; deliver 2; make 1"
"""Worker 1 has handles of a value of worker 0 (2) and of its own (4)."""


def interrupted_everywhere(act: Callable[[SimulatedNetwork, UnackedKeep], object]) -> Iterator[tuple[Any, ...]]:
    """Has `act` interrupted at each of its points, each time in a new network."""
    for point in range(10_000):
        network = play(PASSED)
        unacked = UnackedKeep(network.ends[0], None)
        made = None
        with At(FILES, (point,)) as interrupted:
            try:
                made = act(network, unacked)  # lives until that is not traced any more
            except Interrupt:
                pass
        del made
        if not interrupted.has_acted:
            break
        yield network, unacked, interrupted.places


def test_an_interrupted_remote_call_was_made_or_not_and_leaves_no_gap() -> None:
    def create(network: SimulatedNetwork, unacked: UnackedKeep) -> object:
        handles = list(network.workers[1].handles.values())
        return store_of(network, 1).create_remote(0, handles, unacked, 9, b"hold", b"", b"")

    outcomes = set()
    for network, unacked, places in interrupted_everywhere(create):
        outcomes.add(bool(unacked.frame))
        if unacked.frame:  # the caller gives the connection up
            unacked.buffers = ()
            network.step("close", 0)
        assert network.step("call", 1, 0), places
        network.finish()
        assert network.workers[0].counts.workers[1].beyond == [], places
    assert outcomes == {False, True}


def test_an_interrupted_passing_of_handles_leaves_nothing_behind() -> None:
    def pass_on(network: SimulatedNetwork, unacked: UnackedKeep) -> object:
        handles = list(network.workers[1].handles.values())
        return store_of(network, 1).pass_on(handles, 0, network.ends[0])

    for network, _, _ in interrupted_everywhere(pass_on):
        if network.workers[1].delivery.unacknowledged(0):  # the caller gives the connection up
            network.step("close", 0)
        network.finish()


def test_an_interrupted_message_has_its_effects_once_when_it_comes_again() -> None:
    for point in range(10_000):
        network = SimulatedNetwork(2)
        owner, user = store_of(network, 0), store_of(network, 1)
        handle = owner.own("a value")
        number, carried, _ = unpack_references(owner.pass_on([handle], 1, FakeConnection()), 0)
        received = user.receive_references(0, number, carried)
        assert received is not None
        received.clear()
        network.workers[1].work()
        frame = user.take_control_frame(0)
        assert frame is not None
        assert [type(message) for _, message in unpack_control(frame.payload)[1]] == [UserDeleted]
        with At(FILES, (point,)) as interrupted:
            try:
                owner.receive_control(1, frame.payload)
            except Interrupt:
                pass
        owner.receive_control(1, frame.payload)  # the connection was closed, and the other end sends it again
        del handle
        owner.process()
        assert sizes(owner) == {}, interrupted.places
        if not interrupted.has_acted:
            break
    assert point > 10


# -- Tokens


def test_tokens_are_random_and_never_the_same() -> None:
    tokens = RandomTokens()
    drawn = [tokens() for _ in range(600)]
    assert len(set(drawn)) == 600
    assert {len(token) for token in drawn} == {16}
    assert RandomTokens()() not in drawn


def test_a_fork_that_is_given_up_before_it_was_reported_leaves_nothing() -> None:
    # Worker 0 makes a value, worker 1 gets a reference and passes it on to worker 2, which has it for a while.
    network = play("make 0; pass 0 1 1; send 0 2; deliver 1; run 1 1; pass 1 2 2; send 1 3; deliver 2; run 2 1")
    worker = network.workers[2]
    for _ in range(UNREPORTED_INTERVALS):
        worker.work()
    assert sizes(worker.store)["unreported"] == 2
    for number in list(worker.handles):
        worker.drop(number)
    for _ in range(UNREPORTED_INTERVALS - 1):
        worker.work()
    assert "unreported" not in sizes(worker.store)
