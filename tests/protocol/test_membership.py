"""The membership protocol rule by rule: what each event leads to.

Worker 1 is the one looked at; its neighbours on the ring are whoever the ring says.
"""

from __future__ import annotations

import random

import pytest

from farcall.errors import UsageError
from farcall.protocol.membership import MUCH, STRANGERS, Membership
from farcall.protocol.membership_messages import (
    Ack,
    Alive,
    Compare,
    Effect,
    Expelled,
    LeaveWanted,
    Member,
    MemberJoined,
    MemberLeft,
    MemberLost,
    Message,
    MessageReceived,
    News,
    PeerHeard,
    PeerUnreachable,
    Ping,
    Probe,
    SendMessage,
    Started,
    Ticked,
    Wanted,
)
from farcall.protocol.watching import NEIGHBOURS

pick = random.Random(1).randrange


def member(number: int, name: str | None = None) -> Member:
    return Member(number, name or f"w{number}", number - 1, "host")


def group(count: int, *, announce: bool = False) -> Membership:
    membership = Membership(member(1), pick)
    membership.handle(Started(tuple(member(number) for number in range(1, count + 1)), announce))
    return membership


def sent(effects: list[Effect]) -> list[tuple[int, Message]]:
    return [(effect.to, effect.message) for effect in effects if isinstance(effect, SendMessage)]


def told(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if not isinstance(effect, SendMessage)]


def receive(membership: Membership, sender: int, message: Message) -> list[Effect]:
    return membership.handle(MessageReceived(sender, message))


def lost(number: int) -> News:
    return News(lost=((number, number),))


def left(number: int) -> News:
    return News(left=((number, number),))


def run(membership: Membership, seconds: float, silent: set[int]) -> list[tuple[float, Effect]]:
    """Ticks in which all but some answer; all that came of it, and when."""
    results: list[tuple[float, Effect]] = []
    if membership.watching._now is None:
        membership.ticked(0.0)
    until = (membership.watching._now or 0.0) + seconds
    while (now := membership.next_tick()) <= until:
        for other in list(membership.members.here):
            if other not in silent and other != 1:
                membership.handle(PeerHeard(other))
        results += [(now, effect) for effect in membership.handle(Ticked(now))]
    return results


# -- starting


def test_who_starts_is_told_who_is_there_and_announces_itself() -> None:
    membership = Membership(member(1), pick)
    effects = membership.handle(Started((member(2), member(3)), True))
    assert told(effects) == [MemberJoined(member(2)), MemberJoined(member(3))]
    news = [to for to, message in sent(effects) if message == News((member(1),))]
    assert sorted(news) == [2, 3]


def test_who_starts_asks_a_member_for_what_the_store_did_not_know() -> None:
    membership = Membership(member(1), pick)
    effects = membership.handle(Started((member(2), member(3)), True))
    asked = [(to, message) for to, message in sent(effects) if isinstance(message, Compare)]
    assert asked == [(membership.members.successors(1, 1)[0], Compare(((1, 3),), ()))]


def test_in_a_fixed_group_nobody_is_told_anything() -> None:
    membership = Membership(member(1), pick)
    assert sent(membership.handle(Started((member(1), member(2)), False))) == []


def test_fixed_groups_begin_with_the_same_view() -> None:
    members = tuple(member(number) for number in range(1, 6))
    digests = set()
    for each in members:
        membership = Membership(each, pick)
        membership.started(members, False)
        digests.add(membership.members.digest)
    assert len(digests) == 1


def test_who_takes_its_name_again_makes_the_old_one_gone() -> None:
    membership = Membership(member(9, "a"), pick)
    effects = membership.started((member(3, "a"), member(4)), True)
    assert told(effects) == [MemberJoined(member(4))]
    assert set(membership.members.here) == {4, 9}


def test_who_starts_when_its_name_was_taken_again_is_expelled() -> None:
    membership = Membership(member(3, "a"), pick)
    assert membership.started((member(9, "a"),), True) == [Expelled()]


def test_times_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(UsageError, match="heartbeat_interval 1 s and heartbeat_patience 2 s leave no time"):
        Membership(member(1), pick, interval=1.0, patience=2.0)


# -- spreading


def test_what_is_new_is_told_and_passed_on_to_others_than_its_bringer() -> None:
    membership = group(8)
    effects = receive(membership, 2, News((member(9),)))
    assert told(effects) == [MemberJoined(member(9))]
    targets = [to for to, message in sent(effects) if message == News((member(9),))]
    assert len(targets) == len(set(targets)) == 3
    assert not {1, 2, 9} & set(targets)
    assert targets[0] == next(to for to in membership.members.successors(1, 9) if to not in (2, 9))


def test_what_is_known_is_not_passed_on() -> None:
    membership = group(8)
    receive(membership, 2, News((member(9),)))
    assert receive(membership, 3, News((member(9),))) == []


def test_only_what_was_new_is_passed_on() -> None:
    membership = group(8)
    effects = receive(membership, 2, News((member(3), member(9)), left=((4, 4),)))
    assert {message for _, message in sent(effects)} == {News((member(9),), left=((4, 4),))}


def test_who_learns_much_at_once_was_behind_and_passes_nothing_on() -> None:
    membership = group(3)
    many = tuple(member(number) for number in range(4, 4 + MUCH))
    effects = receive(membership, 2, News(many))
    assert len(told(effects)) == MUCH
    assert sent(effects) == []


def test_the_end_of_a_worker_is_told_with_its_reason() -> None:
    membership = group(5)
    assert told(receive(membership, 2, left(3))) == [MemberLeft(member(3))]
    assert told(receive(membership, 2, lost(4))) == [MemberLost(member(4))]


def test_a_restarted_worker_is_told_after_the_end_of_the_old_one() -> None:
    membership = group(3)
    effects = receive(membership, 2, News((member(7, "w3"),)))
    assert told(effects) == [MemberLost(member(3)), MemberJoined(member(7, "w3"))]


def test_a_worker_that_came_and_went_in_the_same_news_is_not_told() -> None:
    membership = group(3)
    effects = receive(membership, 2, News((member(7, "x"), member(8, "x"))))
    assert told(effects) == [MemberJoined(member(8, "x"))]


def test_late_news_of_a_gone_worker_changes_nothing() -> None:
    membership = group(4)
    receive(membership, 2, lost(3))
    assert receive(membership, 4, News((member(3),))) == []


# -- comparing


def test_a_ping_is_answered_also_if_its_sender_is_unknown() -> None:
    membership = group(3)
    assert sent(receive(membership, 77, Ping(0))) == [(77, Ack(membership.members.digest))]


def test_the_same_digest_needs_no_word() -> None:
    membership = group(3)
    assert receive(membership, 2, Ack(membership.members.digest)) == []


def test_another_digest_is_followed_up_once_in_each_round() -> None:
    membership = group(3)
    run(membership, 3.1, set())
    assert sent(receive(membership, 2, Ack(0))) == [(2, Compare(((1, 3),), ()))]
    assert receive(membership, 3, Ack(0)) == []
    run(membership, 1.1, set())
    assert len(sent(receive(membership, 3, Ack(0)))) == 1


def test_while_news_keeps_coming_comparing_is_put_off_but_not_for_ever() -> None:
    membership = group(3)
    compared = []
    for now in range(9):
        run(membership, 1.01, set())
        receive(membership, 2, News((member(10 + now),)))
        compared.append(len(sent(receive(membership, 2, Ack(0)))))
    assert sum(compared) == 3


def test_comparing_gives_each_what_it_lacks() -> None:
    one, other = group(3), Membership(member(2), pick)
    other.started((member(1), member(2), member(5)), False)
    receive(one, 2, left(4))
    answers = sent(receive(other, 1, one.members.summary()))
    assert [type(message) for _, message in answers] == [News, Wanted]
    for _, message in answers:
        for _, answer in sent(receive(one, 2, message)):
            receive(other, 1, answer)
    assert one.members.digest == other.members.digest
    assert set(one.members.here) == {1, 2, 3, 5}


def test_comparing_equal_views_needs_no_word() -> None:
    membership = group(3)
    assert receive(membership, 2, membership.members.summary()) == []
    assert receive(membership, 2, Wanted(((50, 60),))) == []


# -- watching


def test_each_tick_pings_the_neighbours() -> None:
    membership = group(10)
    pings = sent(membership.handle(Ticked(0.0)))
    assert [to for to, _ in pings] == membership.members.successors(1, NEIGHBOURS)
    assert {message for _, message in pings} == {Ping(membership.members.digest)}


def questions(results: list[tuple[float, Effect]]) -> dict[float, list[tuple[int, Message]]]:
    """Who was asked what about others, by the time."""
    found: dict[float, list[tuple[int, Message]]] = {}
    for now, effect in results:
        if isinstance(effect, SendMessage) and isinstance(effect.message, Probe):
            found.setdefault(now, []).append(effect)
    return found


def test_about_a_silent_neighbour_all_others_are_asked_before_it_is_lost_for_all() -> None:
    membership = group(10)
    silent = membership.members.successors(1, 3)[1]
    results = run(membership, 8.5, {silent})
    first, again = questions(results).items()
    assert 6.9 <= first[0] < again[0] < 8.0
    others = set(range(2, 11)) - {silent}
    assert sorted(first[1]) == sorted(again[1]) == [(other, Probe((silent,))) for other in sorted(others)]
    ((when, loss),) = [(now, effect) for now, effect in results if not isinstance(effect, SendMessage)]
    assert loss == MemberLost(member(silent))
    assert 8.0 < when < 8.5
    assert (membership.members.successors(1, 1)[0], lost(silent)) in [effect for now, effect in results if now == when]


def test_many_silent_ones_are_asked_about_in_one_message() -> None:
    membership = group(40)
    silent = set(membership.members.successors(1, 12))
    results = run(membership, 9.5, silent)
    asked = questions(results)
    assert max(len(each.targets) for messages in asked.values() for _, each in messages if isinstance(each, Probe)) >= 3
    assert all(len({to for to, _ in messages}) == len(messages) for messages in asked.values())
    assert {effect.member.number for _, effect in results if isinstance(effect, MemberLost)} == silent


def test_in_a_large_group_those_who_are_heard_are_asked_and_some_others_by_chance() -> None:
    membership = group(400)
    silent, *heard = membership.members.successors(1, 3)
    membership.ticked(0.0)
    for _ in range(26):
        now = membership.next_tick()
        effects = sent(membership.ticked(now))
        for other in heard:
            membership.handle(PeerHeard(other))
        asked = [to for to, message in effects if isinstance(message, Probe)]
        if asked:
            break
    assert set(heard) < set(asked)
    assert len(asked) == len(heard) + STRANGERS
    assert silent not in asked


def test_one_that_others_hear_is_not_lost() -> None:
    membership = group(10)
    silent = membership.members.successors(1, 3)[1]
    run(membership, 8.0, {silent})
    receive(membership, 9, Alive(silent))
    assert not told([effect for _, effect in run(membership, 8.0, {silent})])


def test_news_goes_to_those_who_answer() -> None:
    membership = group(30)
    silent = set(membership.members.successors(1, 3))
    run(membership, 1.5, silent)
    targets = {to for _ in range(20) for to in membership._targets(())}
    assert targets.isdisjoint(silent)
    assert membership.members.successors(1, 4)[3] in targets


def test_who_is_asked_about_another_pings_it_and_tells_if_it_answers() -> None:
    membership = group(5)
    assert sent(receive(membership, 2, Probe((4,)))) == [(4, Ping(membership.members.digest))]
    assert sent(receive(membership, 3, Probe((4, 4)))) == [(4, Ping(membership.members.digest))]
    assert sorted(sent(receive(membership, 4, Ack(membership.members.digest)))) == [(2, Alive(4)), (3, Alive(4))]
    assert receive(membership, 4, Ack(membership.members.digest)) == []


def test_an_answer_that_comes_much_later_is_no_answer() -> None:
    membership = group(5)
    receive(membership, 2, Probe((4,)))
    run(membership, 2.1, set())
    receive(membership, 2, Probe((4,)))
    run(membership, 2.1, {4})
    assert receive(membership, 4, Ack(membership.members.digest)) == []


def test_who_is_asked_about_a_gone_worker_says_so() -> None:
    membership = group(5)
    receive(membership, 3, left(4))
    assert sent(receive(membership, 2, Probe((4, 99)))) == [(2, News(left=((4, 4),), lost=((4, 4),)))]
    assert receive(membership, 2, Probe((99,))) == []


def test_who_is_asked_about_itself_is_there() -> None:
    membership = group(5)
    assert sent(receive(membership, 2, Probe((1,)))) == [(2, Ack(membership.members.digest))]


def test_a_worker_whose_address_refuses_is_lost_at_once() -> None:
    membership = group(5)
    effects = membership.handle(PeerUnreachable(3))
    assert told(effects) == [MemberLost(member(3))]
    assert {message for _, message in sent(effects)} == {lost(3)}
    assert membership.handle(PeerUnreachable(3)) == []
    assert membership.handle(PeerUnreachable(99)) == []


# -- gone ones, and being gone


@pytest.mark.parametrize("message", [Ping(0), News((member(9),)), Compare((), ()), Probe((2,)), Ack(0)])
def test_a_gone_worker_is_told_and_not_believed(message: Message) -> None:
    membership = group(5)
    receive(membership, 2, lost(3))
    digest = membership.members.digest
    assert sent(receive(membership, 3, message)) == [(3, lost(3))]
    assert membership.members.digest == digest


def test_two_that_take_each_other_for_gone_do_not_talk_for_ever() -> None:
    membership = group(2)
    membership.handle(PeerUnreachable(2))
    assert receive(membership, 2, lost(1)) == []


@pytest.mark.parametrize("word", [lost(1), left(1), News(lost=((1, 5),))])
def test_who_hears_of_its_own_loss_is_expelled_once(word: News) -> None:
    membership = group(5)
    assert receive(membership, 2, word) == [Expelled()]
    assert membership.is_out
    assert receive(membership, 3, word) == []
    assert receive(membership, 3, Ping(0)) == []
    assert membership.ticked(1.0) == []
    assert membership.handle(PeerUnreachable(3)) == []
    assert membership.handle(LeaveWanted()) == []


def test_who_hears_that_another_one_has_its_name_is_expelled() -> None:
    assert receive(group(5), 2, News((member(9, "w1"),))) == [Expelled()]


def test_a_good_bye_goes_to_the_watchers_and_some_others() -> None:
    membership = group(10)
    effects = membership.handle(LeaveWanted())
    targets = [to for to, message in sent(effects) if message == left(1)]
    assert len(targets) == len(set(targets)) == len(effects)
    assert {*membership.members.predecessors(1, 3), *membership.members.successors(1, 1)} <= set(targets)
    assert membership.handle(LeaveWanted()) == []


def test_who_has_left_says_so_to_whoever_asks_and_is_not_expelled() -> None:
    membership = group(5)
    membership.handle(LeaveWanted())
    assert sent(receive(membership, 2, Ping(0))) == [(2, left(1))]
    assert receive(membership, 2, left(1)) == []
    assert receive(membership, 2, Ack(0)) == []
    assert membership.ticked(0.0) == []
