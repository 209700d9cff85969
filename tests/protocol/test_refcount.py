"""Reference counting rule by rule: what each event leads to.

Worker 0 owns, 1 creates, 2 and 3 are others.
"""

from __future__ import annotations

from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.refcount import ForkState, ReferenceCounts
from farcall.protocol.reference_messages import (
    ChildAccepted,
    ConfirmHandle,
    CreateRequest,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    OrphanHandle,
    RefuseHandle,
    ReleaseValue,
    SendMessage,
    UserDeleted,
)
from protocol.refcount_stage import (
    CALLED,
    CHILD,
    CONFIRMED,
    CREATED,
    FIRST,
    OWN,
    PASSED,
    RECEIVED,
    REMOTE,
    REPORTED,
    TO_TWO,
    came,
    confirmed,
    dropped,
    leads,
    lost,
    made,
    no_token,
    passed,
    received,
    worker,
)
from simulation.reference_state import apply, tables

# -- ids


def test_numbers_of_references_count_for_each_owner_and_those_of_forks_for_all() -> None:
    creator = worker(1)
    assert [creator.new_reference(owner) for owner in (0, 2, 0)] == [REMOTE, RRefId(2, 1, 1), RRefId(0, 1, 2)]
    assert [creator.new_fork(), creator.new_fork()] == [ForkId(1, 1), ForkId(1, 2)]


def test_a_reference_at_a_lost_owner_has_the_number_zero_and_leaves_nothing_behind() -> None:
    creator = worker(1, lost(0))
    before = tables(creator)
    assert creator.new_reference(0) == RRefId(0, 1, 0)
    assert tables(creator) == before


# -- a value of its owner


def test_a_value_lives_as_long_as_its_owner_has_a_handle() -> None:
    owner = worker(0)
    leads(owner, made(OWN))
    assert not owner.is_empty()
    leads(owner, dropped(OWN, None), ReleaseValue(OWN))
    assert owner.is_empty()


def test_the_owner_makes_more_handles_of_its_value() -> None:
    owner = worker(0, made(OWN))
    owner.add_own_handle(OWN)
    leads(owner, dropped(OWN, None))
    leads(owner, dropped(OWN, None), ReleaseValue(OWN))


def test_the_owners_pass_is_counted_at_once_and_confirmed_on_arrival() -> None:
    owner, user = worker(0, made(OWN)), worker(2)
    leads(owner, passed(OWN, None, PASSED, to=2))
    leads(owner, dropped(OWN, None))
    leads(user, received(OWN, PASSED, 0), ConfirmHandle(OWN, PASSED))
    leads(user, dropped(OWN, PASSED), SendMessage(0, UserDeleted(OWN, PASSED)))
    assert user.is_empty()
    leads(owner, came(2, UserDeleted(OWN, PASSED)), ReleaseValue(OWN))
    assert owner.is_empty()


def test_the_owner_passes_a_handle_to_itself() -> None:
    owner = worker(0, made(OWN), passed(OWN, None, PASSED, to=0))
    leads(owner, dropped(OWN, None))
    leads(owner, received(OWN, PASSED, 0))
    leads(owner, dropped(OWN, None), ReleaseValue(OWN))


# -- a remote call


def test_a_remote_call_is_requested_delivered_and_deleted() -> None:
    creator, owner = worker(1), worker(0)
    assert creator.create_remote(0) == (REMOTE, FIRST)
    leads(owner, CREATED)
    leads(creator, CONFIRMED, ConfirmHandle(REMOTE, FIRST))
    leads(creator, dropped(REMOTE, FIRST), SendMessage(0, UserDeleted(REMOTE, FIRST)))
    leads(owner, came(1, UserDeleted(REMOTE, FIRST)), ReleaseValue(REMOTE))
    assert creator.is_empty()
    assert owner.is_empty()


def test_a_delete_waits_for_the_confirmation_so_that_it_cannot_overtake_the_request() -> None:
    creator = worker(1, CALLED)
    leads(creator, dropped(REMOTE, FIRST))
    leads(creator, CONFIRMED, SendMessage(0, UserDeleted(REMOTE, FIRST)))


def test_a_remote_call_to_oneself_whose_handle_is_passed_on_before_it_is_made() -> None:
    fork, child = ForkId(0, 1), ForkId(0, 2)
    owner, user = worker(0), worker(2)
    assert owner.create_remote(0) == (OWN, fork)
    leads(owner, passed(OWN, fork, child, to=2))
    leads(user, received(OWN, child, 0), ConfirmHandle(OWN, child))
    leads(owner, came(0, CreateRequest(OWN, fork)))
    leads(owner, confirmed(OWN, fork), ConfirmHandle(OWN, fork))
    leads(owner, dropped(OWN, fork), SendMessage(0, UserDeleted(OWN, fork)))
    leads(owner, came(0, UserDeleted(OWN, fork)))
    leads(owner, came(2, UserDeleted(OWN, child)), ReleaseValue(OWN))
    assert owner.is_empty()


# -- user to user


def test_g2_a_parent_is_not_given_up_before_its_child_is_counted() -> None:
    creator, user, owner = worker(1, CALLED, CONFIRMED, TO_TWO), worker(2), worker(0, CREATED)
    leads(creator, dropped(REMOTE, FIRST))
    leads(user, RECEIVED)
    leads(user, REPORTED, SendMessage(0, ForkRequest(REMOTE, CHILD)))
    leads(owner, came(2, ForkRequest(REMOTE, CHILD)), SendMessage(2, ForkAccepted(REMOTE, CHILD)))
    accepted = ConfirmHandle(REMOTE, CHILD), SendMessage(1, ChildAccepted(REMOTE, CHILD))
    leads(user, came(0, ForkAccepted(REMOTE, CHILD)), *accepted)
    leads(creator, came(2, ChildAccepted(REMOTE, CHILD)), SendMessage(0, UserDeleted(REMOTE, FIRST)))
    leads(owner, came(1, UserDeleted(REMOTE, FIRST)))
    leads(user, dropped(REMOTE, CHILD), SendMessage(0, UserDeleted(REMOTE, CHILD)))
    leads(owner, came(2, UserDeleted(REMOTE, CHILD)), ReleaseValue(REMOTE))


def test_a_child_that_was_dropped_meanwhile_tells_its_parent_and_is_deleted() -> None:
    user = worker(2, RECEIVED, REPORTED, dropped(REMOTE, CHILD))
    leads(
        user,
        came(0, ForkAccepted(REMOTE, CHILD)),
        ConfirmHandle(REMOTE, CHILD),
        SendMessage(1, ChildAccepted(REMOTE, CHILD)),
        SendMessage(0, UserDeleted(REMOTE, CHILD)),
    )
    assert user.is_empty()


def test_a_worker_passes_a_fork_to_itself() -> None:
    creator = worker(1, CALLED, CONFIRMED, passed(REMOTE, FIRST, CHILD, to=1), dropped(REMOTE, FIRST))
    leads(creator, RECEIVED)
    leads(creator, REPORTED, SendMessage(0, ForkRequest(REMOTE, CHILD)))
    accepted = ConfirmHandle(REMOTE, CHILD), SendMessage(1, ChildAccepted(REMOTE, CHILD))
    leads(creator, came(0, ForkAccepted(REMOTE, CHILD)), *accepted)
    leads(creator, came(1, ChildAccepted(REMOTE, CHILD)), SendMessage(0, UserDeleted(REMOTE, FIRST)))


def test_a_handle_passed_to_a_lost_worker_has_no_child() -> None:
    creator = worker(1, lost(2), CALLED, CONFIRMED)
    leads(creator, TO_TWO)
    leads(creator, dropped(REMOTE, FIRST), SendMessage(0, UserDeleted(REMOTE, FIRST)))
    owner = worker(0, lost(2), made(OWN))
    leads(owner, passed(OWN, None, PASSED, to=2))
    leads(owner, dropped(OWN, None), ReleaseValue(OWN))


# -- user to owner


def test_a_fork_that_comes_to_the_owner_becomes_a_handle_of_its_own() -> None:
    owner = worker(0, CREATED)
    leads(owner, RECEIVED, SendMessage(1, ChildAccepted(REMOTE, CHILD)))
    leads(owner, came(1, UserDeleted(REMOTE, FIRST)))
    leads(owner, dropped(REMOTE, None), ReleaseValue(REMOTE))


def test_the_owner_counts_each_handle_of_its_own() -> None:
    owner = worker(0, CREATED, RECEIVED, received(REMOTE, ForkId(1, 3), 1))
    apply(owner, came(1, UserDeleted(REMOTE, FIRST)))
    leads(owner, dropped(REMOTE, None))
    leads(owner, dropped(REMOTE, None), ReleaseValue(REMOTE))


def test_a_parent_that_is_lost_already_is_not_told() -> None:
    owner, user = worker(0, CREATED, lost(1)), worker(2, lost(1))
    leads(owner, RECEIVED, RefuseHandle(REMOTE, None))
    leads(user, RECEIVED, SendMessage(0, ForkRequest(REMOTE, CHILD)))
    leads(user, came(0, ForkAccepted(REMOTE, CHILD)), ConfirmHandle(REMOTE, CHILD))


def test_a_handle_may_come_to_the_owner_before_the_request_that_creates_it() -> None:
    owner = worker(0)
    leads(owner, RECEIVED, SendMessage(1, ChildAccepted(REMOTE, CHILD)))
    leads(owner, CREATED)
    leads(owner, dropped(REMOTE, None))
    leads(owner, came(1, UserDeleted(REMOTE, FIRST)), ReleaseValue(REMOTE))


def test_what_the_owner_passed_on_before_creation_is_not_confirmed_again() -> None:
    owner = worker(0, RECEIVED, passed(REMOTE, None, PASSED, to=2))
    leads(owner, CREATED)


# -- any order


def test_a_request_that_comes_before_the_creation_is_noted_and_accepted_then() -> None:
    owner = worker(0)
    leads(owner, came(2, ForkRequest(REMOTE, CHILD)))
    leads(owner, CREATED, SendMessage(2, ForkAccepted(REMOTE, CHILD)))


def test_a_request_that_comes_after_the_release_is_refused() -> None:
    owner = worker(0, CREATED, lost(1))
    leads(owner, came(2, ForkRequest(REMOTE, CHILD)), SendMessage(2, ForkRefused(REMOTE, CHILD)))
    assert owner.is_empty()


def test_released_is_told_from_not_yet_created_while_the_creator_lives() -> None:
    owner = worker(0, CREATED, came(1, UserDeleted(REMOTE, FIRST)))
    leads(owner, came(2, ForkRequest(REMOTE, CHILD)), SendMessage(2, ForkRefused(REMOTE, CHILD)))
    later = RRefId(0, 1, 2)
    leads(owner, came(2, ForkRequest(later, ForkId(1, 9))))
    assert list(owner.owned) == [later]


# -- refused


def test_a_refused_handle_is_forgotten_and_its_parent_told() -> None:
    user = worker(2, RECEIVED, REPORTED)
    refused = RefuseHandle(REMOTE, CHILD), SendMessage(1, ChildAccepted(REMOTE, CHILD))
    leads(user, came(0, ForkRefused(REMOTE, CHILD)), *refused)
    assert user.is_empty()
    leads(user, dropped(REMOTE, CHILD))


def test_a_refused_parent_gives_its_children_up() -> None:
    user = worker(2, RECEIVED, REPORTED, passed(REMOTE, CHILD, ForkId(2, 1), to=3))
    apply(user, came(0, ForkRefused(REMOTE, CHILD)))
    leads(user, came(3, ChildAccepted(REMOTE, ForkId(2, 1))))
    assert tables(user) == tables(worker(2))


def test_a_handle_of_a_released_value_comes_to_its_owner_and_is_refused_and_counted() -> None:
    owner = worker(0, CREATED, came(1, UserDeleted(REMOTE, FIRST)))
    refused = RefuseHandle(REMOTE, None), SendMessage(1, ChildAccepted(REMOTE, CHILD))
    leads(owner, RECEIVED, *refused)
    leads(owner, came(3, ForkRequest(REMOTE, ForkId(2, 1))), SendMessage(3, ForkRefused(REMOTE, ForkId(2, 1))))
    leads(owner, dropped(REMOTE, None), ReleaseValue(REMOTE))
    assert owner.is_empty()


# -- losses


def test_the_loss_of_a_holder_releases_its_forks() -> None:
    owner = worker(0, CREATED, came(2, ForkRequest(REMOTE, CHILD)), came(1, UserDeleted(REMOTE, FIRST)))
    leads(owner, lost(1))  # who made the fork
    leads(owner, lost(2), ReleaseValue(REMOTE))  # who holds it
    assert owner.is_empty()


def test_the_loss_of_the_creator_refuses_what_was_noted() -> None:
    owner = worker(0, came(2, ForkRequest(REMOTE, CHILD)))
    refused = SendMessage(2, ForkRefused(REMOTE, CHILD)), RefuseHandle(REMOTE, None), ReleaseValue(REMOTE)
    leads(owner, lost(1), *refused)
    assert owner.is_empty()


def test_the_loss_of_the_creator_leaves_an_error_to_those_that_the_owner_has_promised_a_value() -> None:
    owner = worker(0, RECEIVED, passed(REMOTE, None, PASSED, to=2))
    leads(owner, lost(1), RefuseHandle(REMOTE, None))
    leads(owner, came(3, ForkRequest(REMOTE, ForkId(2, 1))), SendMessage(3, ForkRefused(REMOTE, ForkId(2, 1))))
    leads(owner, dropped(REMOTE, None))
    leads(owner, came(2, UserDeleted(REMOTE, PASSED)), ReleaseValue(REMOTE))
    assert owner.is_empty()


def test_the_loss_of_a_holder_that_was_noted_releases_nothing_and_creation_may_follow() -> None:
    owner = worker(0, came(2, ForkRequest(REMOTE, CHILD)))
    leads(owner, lost(2))  # a use may wait for the value, which is still to come
    assert not owner.owned
    leads(owner, CREATED)
    assert owner.owned[REMOTE].forks == {FIRST: 1}
    assert not owner.noted
    assert not owner.claims


def test_the_loss_of_the_owner_orphans_its_forks() -> None:
    creator = worker(1, CALLED, TO_TWO)
    leads(creator, lost(0), OrphanHandle(REMOTE, FIRST))
    leads(creator, dropped(REMOTE, FIRST))
    leads(creator, came(2, ChildAccepted(REMOTE, CHILD)))
    assert creator.is_empty()
    assert not creator.parents


def test_a_handle_of_a_lost_owner_arrives_as_an_orphan() -> None:
    user = worker(2, lost(0))
    leads(user, RECEIVED, OrphanHandle(REMOTE, CHILD))
    assert user.is_empty()


def test_the_loss_of_a_child_lets_its_parent_go() -> None:
    creator = worker(1, CALLED, CONFIRMED, TO_TWO, dropped(REMOTE, FIRST))
    leads(creator, lost(2), SendMessage(0, UserDeleted(REMOTE, FIRST)))
    assert creator.is_empty()


def test_the_loss_of_a_parent_leaves_its_child_to_the_owner() -> None:
    user = worker(2, RECEIVED, REPORTED)
    leads(user, lost(1))
    assert user.held[CHILD].state is ForkState.REQUESTED
    assert user.held[CHILD].parent is None
    leads(user, came(0, ForkAccepted(REMOTE, CHILD)), ConfirmHandle(REMOTE, CHILD))


def test_a_lost_worker_leaves_no_trace() -> None:
    creator = worker(1)
    creator.new_reference(0)
    apply(creator, lost(0))
    creator.add_worker(9)
    fresh = ReferenceCounts(1, no_token)
    for peer in (1, 2, 3, 9):
        fresh.add_worker(peer)
    assert tables(creator) == tables(fresh)
