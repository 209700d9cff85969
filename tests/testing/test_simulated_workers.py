"""A simulated worker's copies and snapshots: the exploration stands on them."""

from __future__ import annotations

from planted_bugs import G2Dropped, NoDeduplication

from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_messages import Carried, ForkRequest
from farcall.testing.random_schedules import RandomSchedule
from farcall.testing.simulated_workers import CONFIRMED, PENDING, Parcel, SimulatedWorker


def joined(me: int = 0) -> SimulatedWorker:
    worker = SimulatedWorker(me)
    for peer in range(3):
        worker.join(peer)
    return worker


def test_a_copy_is_in_the_same_state_whatever_happened_before() -> None:
    for seed in range(200):
        schedule = RandomSchedule(seed)
        for _ in range(20):
            schedule._make_one_step()
        for worker in schedule.network.workers.values():
            assert worker.copy().snapshot() == worker.snapshot()


def test_a_copy_shares_nothing_that_changes() -> None:
    worker = joined()
    worker.make()
    worker.call(1)
    worker.send((1, 2), 2)
    worker.draft(2, 2)
    before = worker.snapshot()
    copy = worker.copy()
    copy.lose(1)
    copy.drop(1)
    copy.receive(2, 1, Parcel((), False))
    copy.make()
    assert worker.snapshot() == before
    assert copy.snapshot() != before


def test_a_copy_has_the_same_protocols() -> None:
    copy = SimulatedWorker(0, G2Dropped, NoDeduplication).copy()
    assert type(copy.references) is G2Dropped
    assert type(copy.delivery) is NoDeduplication


def test_a_snapshot_does_not_depend_on_how_the_program_numbers_its_handles() -> None:
    one, other = joined(), joined()
    for worker in (one, other):
        worker.make()
        worker.make()
    first, second = one.handles.pop(1), one.handles.pop(2)
    one.handles.update({8: second, 9: first})
    assert one.snapshot() == other.snapshot()


def test_everything_that_decides_is_in_the_snapshot() -> None:
    seen = {joined().snapshot()}
    for change in (
        lambda worker: worker.make(),
        lambda worker: worker.call(1),
        lambda worker: worker.lose(1),
        lambda worker: worker.join(9),
        lambda worker: worker.unknown.add(9),
        lambda worker: worker.references.new_fork(),
        lambda worker: worker.references.new_reference(1),
        lambda worker: worker.delivery.send(1, Parcel((), False)),
        lambda worker: worker.delivery.receive(1, 1),
        lambda worker: worker.delivery.receive(1, 2),
        lambda worker: setattr(worker, "alive", False),
    ):
        worker = joined()
        change(worker)
        assert worker.snapshot() not in seen
        seen.add(worker.snapshot())


def test_handles_arrive_pending_from_users_and_confirmed_from_the_owner() -> None:
    worker = joined()
    from_user = Carried(RRefId(1, 1, 1), ForkId(2, 1))
    from_owner = Carried(RRefId(1, 1, 1), ForkId(1, 1))
    worker.receive(2, 1, Parcel((from_user,), False))
    worker.receive(1, 1, Parcel((from_owner,), False))
    assert [handle.standing for handle in worker.handles.values()] == [PENDING, CONFIRMED]
    assert worker.outbox == []
    assert worker.lent() == [1]
    worker.keep(1)
    assert [(to, type(payload)) for to, _, payload in worker.outbox] == [(1, ForkRequest)]
    assert worker.lent() == []


def test_nothing_is_taken_that_names_a_worker_of_whom_it_was_not_told() -> None:
    worker = joined()
    worker.unknown.add(5)
    for carried in (
        Carried(RRefId(5, 1, 1), ForkId(1, 1)),
        Carried(RRefId(1, 5, 1), ForkId(1, 1)),
        Carried(RRefId(1, 1, 1), ForkId(5, 1)),
    ):
        assert not worker.receive(1, 1, Parcel((carried,), False))
    assert not worker.receive(5, 1, Parcel((), False))
    assert not worker.handles
    assert worker.receive(1, 1, Parcel((Carried(RRefId(1, 1, 1), ForkId(1, 1)),), False))
