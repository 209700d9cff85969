"""Tokens of references: a worker that does not know a token can do nothing to the reference."""

from __future__ import annotations

import pytest

from farcall.errors import ProtocolError
from farcall.protocol import refcount
from farcall.protocol.ids import TOKEN_SIZE, ForkId, RRefId
from farcall.protocol.refcount import ReferenceCounts
from farcall.protocol.reference_messages import (
    ChildAccepted,
    CreateRequest,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    RefuseHandle,
    ReleaseValue,
    SendMessage,
    UserDeleted,
)
from protocol.refcount_stage import (
    CALLED,
    CHILD,
    CONFIRMED,
    FIRST,
    OWN,
    TO_TWO,
    came,
    dropped,
    leads,
    lost,
    made,
    received,
    worker,
)
from simulation.reference_state import Event, apply, tables

TOKEN = bytes(range(TOKEN_SIZE))
RIGHT = RRefId(0, 1, 1, TOKEN)
WRONG = RRefId(0, 1, 1, TOKEN[::-1])
CREATED = came(1, CreateRequest(RIGHT, FIRST))
MINE = ForkId(3, 1)  # made by worker 3, who has no right to anything


def unchanged_by(counts: ReferenceCounts, event: Event) -> None:
    before = tables(counts)
    with pytest.raises(ProtocolError):
        apply(counts, event)
    assert tables(counts) == before


def test_every_new_reference_gets_a_token_of_its_own() -> None:
    drawn = iter([bytes([each]) * TOKEN_SIZE for each in range(1, 9)])
    one = ReferenceCounts(1, lambda: next(drawn))
    for peer in range(3):
        one.add_worker(peer)
    first, second, own = one.new_reference(0), one.create_remote(2)[0], one.new_reference(1)
    assert [each.token[0] for each in (first, second, own)] == [1, 2, 3]


def test_neither_str_nor_repr_shows_the_token() -> None:
    assert str(RIGHT) == "reference 1:1 owned by 0"
    assert repr(RIGHT) == "RRefId(owner=0, creator=1, number=1)"
    assert repr(ForkRequest(RIGHT, MINE)) == repr(ForkRequest(WRONG, MINE))


def test_a_fork_of_what_was_created_with_another_token_is_refused() -> None:
    owner = worker(0, CREATED)
    before = tables(owner)
    leads(owner, came(3, ForkRequest(WRONG, MINE)), SendMessage(3, ForkRefused(WRONG, MINE)))
    assert tables(owner) == before


def test_a_fork_cannot_be_given_up_with_another_token() -> None:
    unchanged_by(worker(0, CREATED), came(1, UserDeleted(WRONG, FIRST)))


def test_a_child_cannot_be_settled_with_another_token() -> None:
    parent = worker(1, CALLED, CONFIRMED, TO_TWO)
    unchanged_by(parent, came(2, ChildAccepted(WRONG, CHILD)))


def test_a_handle_that_came_with_another_token_leads_nowhere_and_leaves_nothing() -> None:
    owner = worker(0, CREATED)
    before = tables(owner)
    effects = apply(owner, received(WRONG, MINE, 3))
    assert repr(effects[0]) == repr(RefuseHandle(WRONG, None))
    apply(owner, dropped(WRONG, None))
    assert tables(owner) == before


def test_what_was_claimed_before_the_creation_is_refused_by_it() -> None:
    owner = worker(0, came(3, ForkRequest(WRONG, MINE)), came(2, ForkRequest(RIGHT, CHILD)))
    leads(
        owner,
        CREATED,
        SendMessage(3, ForkRefused(WRONG, MINE)),
        RefuseHandle(WRONG, None),
        ReleaseValue(WRONG),
        SendMessage(2, ForkAccepted(RIGHT, CHILD)),
    )
    assert list(owner.owned) == [RIGHT]
    assert not owner.noted


def test_what_was_only_used_before_the_creation_with_another_token_is_refused_by_it() -> None:
    owner = worker(0)
    assert owner.may_still_be_created(WRONG)
    assert owner.may_still_be_created(RIGHT)
    leads(owner, CREATED, RefuseHandle(WRONG, None), ReleaseValue(WRONG))
    assert not owner.may_still_be_created(WRONG)
    assert not owner.noted


def test_what_was_claimed_of_a_value_of_the_owners_own_is_refused_when_that_is_made() -> None:
    wrong = OWN._replace(token=TOKEN)
    owner = worker(0, came(3, ForkRequest(wrong, MINE)))
    refused = SendMessage(3, ForkRefused(wrong, MINE)), RefuseHandle(wrong, None), ReleaseValue(wrong)
    leads(owner, made(OWN), *refused)
    assert list(owner.owned) == [OWN]


def test_nothing_is_noted_of_a_creator_that_is_lost() -> None:
    owner = worker(0, came(3, ForkRequest(WRONG, MINE)))
    apply(owner, lost(1))
    assert not owner.noted
    assert owner.is_empty()
    assert not owner.may_still_be_created(RIGHT)


def test_what_one_worker_claims_before_its_creation_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refcount, "MAX_CLAIMS", 2)
    owner = worker(0)
    claims = [RIGHT._replace(number=number) for number in (5, 6, 7)]
    for claim in claims[:2]:
        leads(owner, came(3, ForkRequest(claim, MINE)))
    leads(owner, came(3, ForkRequest(claims[2], MINE)), SendMessage(3, ForkRefused(claims[2], MINE)))
    assert not owner.may_still_be_created(claims[2], 3)
    leads(owner, came(2, ForkRequest(claims[2], CHILD)))
    leads(owner, came(3, ForkRequest(claims[2], MINE)))  # which is noted already
    apply(owner, came(3, UserDeleted(claims[0], MINE)))
    assert owner.may_still_be_created(claims[0], 3)


def test_claims_of_those_who_are_lost_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refcount, "MAX_CLAIMS", 2)
    owner = worker(0)
    used = [RIGHT._replace(number=number) for number in (5, 6, 7)]
    assert owner.may_still_be_created(used[0], 2)
    assert owner.may_still_be_created(used[1], 3)
    assert owner.may_still_be_created(used[2], 3)
    apply(owner, came(3, ForkRequest(used[2], MINE)))
    leads(owner, lost(2))
    leads(owner, lost(3), RefuseHandle(used[2], None), ReleaseValue(used[2]))
    assert owner.claims == {refcount.NO_CLAIMANT: 2}
    assert not owner.may_still_be_created(used[2], 3)
    assert owner.may_still_be_created(used[0])
    apply(owner, lost(1))
    assert not owner.claims
    assert not owner.noted
