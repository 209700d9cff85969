"""What is lent: a handle that was passed on and is not kept for long is between its holder and its parent alone.

Worker 0 owns, 1 creates and passes it to 2, who may pass it to 3. Effects are compared by what they print.
"""

from __future__ import annotations

import pytest

from farcall.errors import ProtocolError
from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_messages import (
    ChildAccepted,
    ConfirmHandle,
    CreateDelivered,
    Event,
    ForkAccepted,
    ForkRequest,
    HandleDropped,
    HandleKept,
    HandlePassed,
    MessageReceived,
    OrphanHandle,
    PassingFailed,
    PeerLost,
    RemoteCalled,
    SendMessage,
    UserDeleted,
)
from farcall.protocol.reference_tables import Standing
from farcall.protocol.references import References
from farcall.testing.simulated_workers import tables
from protocol.references_stage import CHILD, FIRST, KEPT, RECEIVED, REMOTE, leads, worker

GRANDCHILD = ForkId(2, 1)  # made by worker 2 for worker 3

DROPPED = HandleDropped(REMOTE, CHILD)
PASSED = HandlePassed(REMOTE, CHILD, GRANDCHILD, to=3)
GIVEN_BACK = SendMessage(1, ChildAccepted(REMOTE, CHILD))
GRANDCHILD_SETTLED = MessageReceived(3, ChildAccepted(REMOTE, GRANDCHILD))


def test_what_was_lent_and_is_dropped_at_once_is_given_back_and_the_owner_never_hears_of_it() -> None:
    parent = worker(1, RemoteCalled(REMOTE, FIRST), CreateDelivered(REMOTE, FIRST))
    user = worker(2)
    leads(parent, HandlePassed(REMOTE, FIRST, CHILD, to=2))
    leads(parent, HandleDropped(REMOTE, FIRST))  # it keeps the value meanwhile
    leads(user, RECEIVED)
    assert user.held[CHILD].standing is Standing.LENT
    leads(user, DROPPED, GIVEN_BACK)
    assert user.is_empty()
    assert not user.lent
    leads(parent, MessageReceived(2, ChildAccepted(REMOTE, CHILD)), SendMessage(0, UserDeleted(REMOTE, FIRST)))
    assert parent.is_empty()


def test_what_is_kept_is_asked_for_once() -> None:
    user = worker(2, RECEIVED)
    leads(user, KEPT, SendMessage(0, ForkRequest(REMOTE, CHILD)))
    assert user.held[CHILD].standing is Standing.UNCONFIRMED
    assert not user.lent
    leads(user, MessageReceived(0, ForkAccepted(REMOTE, CHILD)), ConfirmHandle(REMOTE, CHILD), GIVEN_BACK)
    leads(user, DROPPED, SendMessage(0, UserDeleted(REMOTE, CHILD)))


def test_what_was_lent_and_passed_on_is_given_back_when_its_child_is_settled() -> None:
    user = worker(2, RECEIVED, PASSED)
    leads(user, DROPPED)
    leads(user, GRANDCHILD_SETTLED, GIVEN_BACK)
    assert tables(user) == tables(worker(2))


def test_what_was_lent_and_passed_on_is_not_given_back_while_it_is_held() -> None:
    user = worker(2, RECEIVED, PASSED)
    leads(user, GRANDCHILD_SETTLED)
    leads(user, DROPPED, GIVEN_BACK)


def test_what_was_lent_is_given_back_when_it_turns_out_that_its_passing_failed() -> None:
    user = worker(2, RECEIVED, PASSED, DROPPED)
    leads(user, PassingFailed(REMOTE, CHILD, GRANDCHILD), GIVEN_BACK)


def test_the_loss_of_the_lender_has_the_owner_asked_at_once() -> None:
    user = worker(2, RECEIVED)
    leads(user, PeerLost(1), SendMessage(0, ForkRequest(REMOTE, CHILD)))
    assert user.held[CHILD].parent is None
    assert not user.lent
    leads(user, DROPPED)
    accepted = ConfirmHandle(REMOTE, CHILD), SendMessage(0, UserDeleted(REMOTE, CHILD))
    leads(user, MessageReceived(0, ForkAccepted(REMOTE, CHILD)), *accepted)
    assert user.is_empty()


def test_what_comes_from_one_who_is_lost_is_asked_for_at_once() -> None:
    user = worker(2, PeerLost(1))
    leads(user, RECEIVED, SendMessage(0, ForkRequest(REMOTE, CHILD)))
    assert not user.lent


def test_the_loss_of_the_owner_leaves_nothing_of_what_was_lent() -> None:
    user = worker(2, RECEIVED, PASSED)
    leads(user, PeerLost(0), OrphanHandle(REMOTE, CHILD))
    assert tables(user)[1:4] == tables(worker(2, PeerLost(0)))[1:4]  # type: ignore[index]
    leads(user, DROPPED)


def test_the_loss_of_the_one_to_whom_it_was_passed_on_has_it_given_back() -> None:
    user = worker(2, RECEIVED, PASSED, DROPPED)
    leads(user, PeerLost(3), GIVEN_BACK)


def test_a_worker_lends_to_itself() -> None:
    creator = worker(1, RemoteCalled(REMOTE, FIRST), CreateDelivered(REMOTE, FIRST))
    leads(creator, HandlePassed(REMOTE, FIRST, CHILD, to=1))
    leads(creator, RECEIVED)
    leads(creator, HandleDropped(REMOTE, FIRST))
    leads(creator, DROPPED, GIVEN_BACK)
    leads(creator, MessageReceived(1, ChildAccepted(REMOTE, CHILD)), SendMessage(0, UserDeleted(REMOTE, FIRST)))


@pytest.mark.parametrize(
    ("references", "event", "message"),
    [
        (worker(2), KEPT, "fork 1:2 of reference 1:1.* is not lent"),
        (worker(2, RECEIVED, KEPT), KEPT, "is not lent"),
        (worker(2, RECEIVED, PASSED, DROPPED), KEPT, "is not lent"),
        (worker(2, RECEIVED), HandleKept(RRefId(0, 1, 9), CHILD), "is not lent"),
        (worker(1, RemoteCalled(REMOTE, FIRST)), HandleKept(REMOTE, FIRST), "is not lent"),
        (worker(2, RECEIVED), MessageReceived(0, ForkAccepted(REMOTE, CHILD)), "which did not ask"),
        (worker(2, RECEIVED), CreateDelivered(REMOTE, CHILD), "did not ask for"),
    ],
)
def test_what_is_not_lent_cannot_be_kept_and_what_is_lent_was_not_asked_for(
    references: References, event: Event, message: str
) -> None:
    before = tables(references)
    with pytest.raises(ProtocolError, match=message):
        references.handle(event)
    assert tables(references) == before
