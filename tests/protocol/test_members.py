"""A view of the group merges with any other, in any order, however often; and what is gone stays gone."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.protocol import members as members_module
from farcall.protocol.members import Members, place_of
from farcall.protocol.membership_messages import Member, News


def member(number: int, name: str | None = None) -> Member:
    return Member(number, name or f"w{number}", number, "host")


def view(*news: News) -> Members:
    members = Members()
    for each in news:
        members.learn(each)
    return members


def synchronize(one: Members, other: Members) -> None:
    """What `Compare` and its answers come to."""
    news, wanted = other.difference(one.summary())
    one.learn(news)
    other.learn(one.about(wanted.numbers))


def state(members: Members) -> object:
    return members.here, members.gone, members.names, members.digest


facts = st.one_of(
    st.builds(
        lambda number: News(members=(member(number, "abc"[number % 3] if number % 2 else None),)), st.integers(1, 9)
    ),
    st.builds(lambda number: News(left=((number, number),)), st.integers(1, 9)),
    st.builds(lambda first, more: News(lost=((first, first + more),)), st.integers(1, 9), st.integers(0, 3)),
)


@given(st.lists(facts, max_size=12), st.randoms(use_true_random=False), st.data())
def test_views_that_heard_different_parts_in_any_order_agree_once_compared(
    news: list[News], chance: random.Random, data: st.DataObject
) -> None:
    views = []
    for _ in range(3):
        heard = data.draw(st.lists(st.sampled_from(news), max_size=20)) if news else []  # lost, doubled, reordered
        views.append(view(*heard))
    for _ in range(3):  # a chain of exchanges carries everything everywhere; superseding may take one more
        for one, other in pairwise([*views, views[0]]):
            synchronize(one, other)
    assert state(views[0]) == state(views[1]) == state(views[2])
    assert not views[0].here.keys() & {number for number in range(20) if number in views[0].gone}


@given(st.lists(facts, max_size=12))
def test_learning_again_changes_nothing(news: list[News]) -> None:
    members = view(*news)
    before = repr(state(members))
    for each in news:
        assert not members.is_new(each)
        assert not members.learn(each)
    assert repr(state(members)) == before


@given(st.lists(facts, max_size=12), facts)
def test_what_is_new_is_known_beforehand(news: list[News], more: News) -> None:
    members = view(*news)
    digest, is_new = members.digest, members.is_new(more)
    learned = members.learn(more)
    assert bool(learned) == is_new == (members.digest != digest)


@given(st.lists(facts, max_size=12))
def test_passing_on_what_was_learned_teaches_the_same(news: list[News]) -> None:
    one, other = Members(), Members()
    for each in news:
        learned = one.learn(each)
        if learned:
            other.learn(learned.news())
    assert state(one) == state(other)


def test_late_news_does_not_bring_anybody_back() -> None:
    members = view(News(lost=((3, 3),)))
    assert not members.learn(News(members=(member(3),)))
    assert members.here == {}


def test_a_name_belongs_to_the_highest_number() -> None:
    old, new = News(members=(member(3, "a"),)), News(members=(member(7, "a"),))
    members = view(old)
    learned = members.learn(new)
    assert learned.removed == [(member(3, "a"), False)]
    assert members.names == {"a": 7}
    assert state(members) == state(view(new, old))


def test_the_end_of_the_older_one_does_not_take_the_name_from_the_newer() -> None:
    members = view(News(members=(member(3, "a"),)), News(members=(member(7, "a"),)), News(lost=((3, 3),)))
    assert members.names == {"a": 7}


def test_a_good_bye_is_told_as_one_also_by_comparing() -> None:
    known = News(members=(member(1), member(2), member(3)))
    one, other = view(known), view(known, News(left=((2, 2),)), News(lost=((3, 3),)))
    news, wanted = other.difference(one.summary())
    assert not wanted.numbers
    assert one.learn(news).removed == [(member(2), True), (member(3), False)]
    third = view(known)
    _, wanted = third.difference(other.summary())
    assert third.learn(other.about(wanted.numbers)).removed == [(member(2), True), (member(3), False)]


def test_the_reason_is_forgotten_after_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "REMEMBERED", 2)
    members = view(*(News(left=((number, number),)) for number in (1, 2, 3)))
    assert members.about([(1, 3)]) == News(left=((2, 3),), lost=((1, 3),))


def test_what_is_kept_of_the_gone_is_bounded_by_those_who_are_there() -> None:
    members = view(News(members=(member(1),)))
    for number in range(2, 3000):
        members.learn(News(members=(member(number),)))
        members.learn(News(left=((number, number),)))
    assert members.gone.pairs() == ((2, 2999),)
    assert list(members.names) == ["w1"]
    assert len(members._left) == members_module.REMEMBERED


def test_a_vast_range_of_gone_ones_costs_nothing() -> None:
    members = view(News(members=(member(5),)), News(left=((1, 2**32 - 1),)))
    assert members.here == {}
    assert len(members._left) <= members_module.REMEMBERED


# -- the ring


def test_neighbours_follow_each_other_round_the_ring() -> None:
    members = view(News(members=tuple(member(number) for number in range(1, 10))))
    ring = sorted(range(1, 10), key=place_of)
    for place, number in enumerate(ring):
        assert members.successors(number, 3) == [ring[(place + step) % 9] for step in (1, 2, 3)]
        assert members.predecessors(number, 3) == [ring[(place - step) % 9] for step in (1, 2, 3)]
    assert members.successors(ring[0], 100) == ring[1:]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_small_rings_have_fewer_neighbours(count: int) -> None:
    members = view(News(members=tuple(member(number) for number in range(1, count + 1))))
    assert len(members.successors(1, 3)) == len(members.predecessors(1, 3)) == max(0, count - 1)


def test_neighbours_are_spread_over_hosts() -> None:
    """Eight workers on each host, with numbers in a row: their successors are elsewhere."""
    members = view(News(members=tuple(member(number) for number in range(1, 257))))
    together = sum(
        (number - 1) // 8 == (other - 1) // 8 for number in range(1, 257) for other in members.successors(number, 3)
    )
    assert together <= 3 * 256 * 0.08  # by chance about 7 of 255 others are on the same host


def test_a_sample_has_no_doubles_and_nobody_unwanted() -> None:
    members = view(News(members=tuple(member(number) for number in range(1, 8))))
    chance = random.Random(1)
    found = [members.sample(3, chance.randrange, (1, 2)) for _ in range(200)]
    assert all(len(set(each)) == len(each) for each in found)
    assert sum(len(each) == 3 for each in found) > 180
    assert {number for each in found for number in each} == {3, 4, 5, 6, 7}
    assert sorted(members.sample(5, chance.randrange, (1, 2))) == [3, 4, 5, 6, 7]
    assert members.sample(3, lambda n: 0, (1, 2)) == members.sample(1, lambda n: 0, (1, 2))  # it gives up in the end


def test_what_is_asked_for_many_times_is_told_once() -> None:
    members = Members()
    members.learn(News((member(1), member(2))))
    assert members.about([(0, 9)] * 50 + [(2, 5)]) == News((member(1), member(2)))
