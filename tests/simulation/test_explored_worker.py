"""Copies and snapshots of a worker: the exploration stands on them."""

from __future__ import annotations

from collections.abc import Callable

from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_messages import Carried, ForkRequest, UserDeleted
from simulation.explored_worker import ExploredWorker, PassedHandle
from simulation.invariants import CONFIRMED, PENDING

REFERENCE = RRefId(1, 1, 1)


def joined() -> ExploredWorker:
    worker = ExploredWorker(0)
    for other in range(3):
        worker.add(other)
    return worker


def busy() -> ExploredWorker:
    worker = joined()
    worker.make()
    worker.call(1)
    worker.pass_on(1, 2)
    worker.pass_on(2, 2)
    worker.receive(2, 1, PassedHandle(Carried(REFERENCE, ForkId(2, 1))))
    worker.receive(2, 3, PassedHandle(Carried(RRefId(0, 1, 1), ForkId(2, 2))))
    return worker


def test_a_copy_is_in_the_same_state() -> None:
    worker = busy()
    copy = worker.copy()
    assert copy.snapshot() == worker.snapshot()
    assert copy.outbox == []
    copy.drop(1)
    worker.drop(1)
    assert copy.snapshot() == worker.snapshot()


def test_a_copy_shares_nothing_that_changes() -> None:
    worker = busy()
    before = worker.snapshot()
    copy = worker.copy()
    copy.drop(1)
    copy.report(3)
    copy.remove(1)
    copy.receive(2, 2, PassedHandle(Carried(RRefId(0, 2, 1), ForkId(2, 3))))
    copy.make()
    assert worker.snapshot() == before
    assert copy.snapshot() != before


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
    changes: list[Callable[[ExploredWorker], object]] = [
        lambda worker: worker.make(),
        lambda worker: worker.call(1),
        lambda worker: worker.remove(1),
        lambda worker: worker.add(9),
        lambda worker: worker.counts.new_fork(),
        lambda worker: worker.counts.new_reference(1),
        lambda worker: worker.counts.may_still_be_created(RRefId(0, 1, 1), 2),
        lambda worker: worker.delivery.send(1, ForkRequest(REFERENCE, ForkId(1, 1))),
        lambda worker: worker.delivery.send(1, UserDeleted(REFERENCE, ForkId(1, 1))),
        lambda worker: worker.delivery.receive(1, 1),
        lambda worker: worker.delivery.receive(1, 2),
    ]
    for change in changes:
        worker = joined()
        change(worker)
        assert worker.snapshot() not in seen
        seen.add(worker.snapshot())


def test_handles_arrive_pending_from_users_and_confirmed_from_the_owner() -> None:
    worker = joined()
    worker.receive(2, 1, PassedHandle(Carried(REFERENCE, ForkId(2, 1))))
    worker.receive(1, 1, PassedHandle(Carried(REFERENCE, ForkId(1, 1))))
    assert [handle.status for handle in worker.handle_statuses()] == [PENDING, CONFIRMED]
    assert worker.outbox == []
    assert worker.unreported() == [1]
    worker.report(1)
    assert [(to, type(payload)) for to, _, payload in worker.outbox] == [(1, ForkRequest)]
    assert worker.unreported() == []
