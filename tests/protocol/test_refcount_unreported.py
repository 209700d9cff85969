"""Unreported forks: a handle that was passed on and is soon dropped concerns its holder and its parent alone.

Worker 0 owns, 1 creates and passes to 2, which may pass to 3.
"""

from __future__ import annotations

import pytest

from farcall.errors import ProtocolError
from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.refcount import ForkState, ReferenceCounts
from farcall.protocol.reference_messages import (
    ChildAccepted,
    ConfirmHandle,
    ForkAccepted,
    ForkRequest,
    OrphanHandle,
    SendMessage,
    UserDeleted,
)
from protocol.refcount_stage import (
    CALLED,
    CHILD,
    FIRST,
    RECEIVED,
    REMOTE,
    REPORTED,
    came,
    confirmed,
    dropped,
    leads,
    lost,
    passed,
    reported,
    worker,
)
from simulation.reference_state import Event, apply, tables

GRANDCHILD = ForkId(2, 1)  # made by worker 2 for worker 3

DROPPED = dropped(REMOTE, CHILD)
PASSED = passed(REMOTE, CHILD, GRANDCHILD, to=3)
TOLD = SendMessage(1, ChildAccepted(REMOTE, CHILD))
GRANDCHILD_SETTLED = came(3, ChildAccepted(REMOTE, GRANDCHILD))


def test_an_unreported_fork_that_is_dropped_tells_its_parent_and_the_owner_never_hears_of_it() -> None:
    parent = worker(1, CALLED, confirmed(REMOTE, FIRST))
    user = worker(2)
    leads(parent, passed(REMOTE, FIRST, CHILD, to=2))
    leads(parent, dropped(REMOTE, FIRST))  # it keeps the value meanwhile
    leads(user, RECEIVED)
    assert user.held[CHILD].state is ForkState.UNREPORTED
    leads(user, DROPPED, TOLD)
    assert user.is_empty()
    assert not user.unreported
    leads(parent, came(2, ChildAccepted(REMOTE, CHILD)), SendMessage(0, UserDeleted(REMOTE, FIRST)))
    assert parent.is_empty()


def test_a_fork_that_is_reported_is_asked_for_once() -> None:
    user = worker(2, RECEIVED)
    leads(user, REPORTED, SendMessage(0, ForkRequest(REMOTE, CHILD)))
    assert user.held[CHILD].state is ForkState.REQUESTED
    assert not user.unreported
    leads(user, came(0, ForkAccepted(REMOTE, CHILD)), ConfirmHandle(REMOTE, CHILD), TOLD)
    leads(user, DROPPED, SendMessage(0, UserDeleted(REMOTE, CHILD)))


def test_an_unreported_fork_with_a_child_tells_its_parent_when_the_child_is_settled() -> None:
    user = worker(2, RECEIVED, PASSED)
    leads(user, DROPPED)
    leads(user, GRANDCHILD_SETTLED, TOLD)
    assert tables(user) == tables(worker(2))


def test_an_unreported_fork_does_not_tell_its_parent_while_it_is_held() -> None:
    user = worker(2, RECEIVED, PASSED)
    leads(user, GRANDCHILD_SETTLED)
    leads(user, DROPPED, TOLD)


def test_the_loss_of_the_parent_has_the_owner_asked_at_once() -> None:
    user = worker(2, RECEIVED)
    leads(user, lost(1), SendMessage(0, ForkRequest(REMOTE, CHILD)))
    assert user.held[CHILD].parent is None
    assert not user.unreported
    leads(user, DROPPED)
    accepted = ConfirmHandle(REMOTE, CHILD), SendMessage(0, UserDeleted(REMOTE, CHILD))
    leads(user, came(0, ForkAccepted(REMOTE, CHILD)), *accepted)
    assert user.is_empty()


def test_a_fork_that_comes_from_a_lost_worker_is_asked_for_at_once() -> None:
    user = worker(2, lost(1))
    leads(user, RECEIVED, SendMessage(0, ForkRequest(REMOTE, CHILD)))
    assert not user.unreported


def test_the_loss_of_the_owner_leaves_nothing_of_an_unreported_fork() -> None:
    user = worker(2, RECEIVED, PASSED)
    leads(user, lost(0), OrphanHandle(REMOTE, CHILD))
    assert tables(user)[1:5] == tables(worker(2, lost(0)))[1:5]
    leads(user, DROPPED)


def test_the_loss_of_the_childs_holder_lets_an_unreported_fork_go() -> None:
    user = worker(2, RECEIVED, PASSED, DROPPED)
    leads(user, lost(3), TOLD)


def test_a_worker_passes_a_fork_to_itself_and_drops_it() -> None:
    creator = worker(1, CALLED, confirmed(REMOTE, FIRST))
    leads(creator, passed(REMOTE, FIRST, CHILD, to=1))
    leads(creator, RECEIVED)
    leads(creator, dropped(REMOTE, FIRST))
    leads(creator, DROPPED, TOLD)
    leads(creator, came(1, ChildAccepted(REMOTE, CHILD)), SendMessage(0, UserDeleted(REMOTE, FIRST)))


@pytest.mark.parametrize(
    ("counts", "event", "message"),
    [
        (worker(2), REPORTED, "fork 1:2 of reference 1:1.* is not an unreported fork"),
        (worker(2, RECEIVED, REPORTED), REPORTED, "is not an unreported fork"),
        (worker(2, RECEIVED, PASSED, DROPPED), REPORTED, "is not an unreported fork"),
        (worker(2, RECEIVED), reported(RRefId(0, 1, 9), CHILD), "is not an unreported fork"),
        (worker(1, CALLED), reported(REMOTE, FIRST), "is not an unreported fork"),
        (worker(2, RECEIVED), came(0, ForkAccepted(REMOTE, CHILD)), "which did not ask"),
        (worker(2, RECEIVED), confirmed(REMOTE, CHILD), "did not ask for"),
    ],
)
def test_only_unreported_forks_are_reported_and_they_are_not_answered(
    counts: ReferenceCounts, event: Event, message: str
) -> None:
    before = tables(counts)
    with pytest.raises(ProtocolError, match=message):
        apply(counts, event)
    assert tables(counts) == before
