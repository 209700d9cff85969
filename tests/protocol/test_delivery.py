"""Exactly-once delivery: D1, D2 and D3, message by message and under any network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall.errors import ProtocolError
from farcall.protocol.delivery import Delivery

PEER = 7


@pytest.fixture
def delivery() -> Delivery[str]:
    made = Delivery[str]()
    made.joined(PEER)
    return made


def test_messages_are_numbered_from_one_for_each_peer(delivery: Delivery[str]) -> None:
    delivery.joined(8)
    assert [delivery.send(PEER, "a"), delivery.send(PEER, "b"), delivery.send(8, "c")] == [1, 2, 1]


def test_d1_a_message_is_taken_once(delivery: Delivery[str]) -> None:
    assert [delivery.receive(PEER, number) for number in (1, 1, 3, 2, 3, 1)] == [True, False, True, True, False, False]


def test_numbers_of_different_peers_are_different(delivery: Delivery[str]) -> None:
    delivery.joined(8)
    assert delivery.receive(PEER, 1)
    assert delivery.receive(8, 1)


def test_it_acknowledges_up_to_the_first_gap(delivery: Delivery[str]) -> None:
    acknowledged = []
    for number in (2, 1, 4, 5, 3):
        delivery.receive(PEER, number)
        acknowledged.append(delivery.acknowledgement(PEER))
    assert acknowledged == [0, 2, 2, 2, 5]


def test_d2_a_message_is_kept_until_it_is_acknowledged(delivery: Delivery[str]) -> None:
    for message in "abc":
        delivery.send(PEER, message)
    assert delivery.unacknowledged(PEER) == [(1, "a"), (2, "b"), (3, "c")]
    assert delivery.acknowledged(PEER, 2) == ["a", "b"]
    assert delivery.unacknowledged(PEER) == [(3, "c")]
    assert delivery.acknowledged(PEER, 1) == []  # a late one
    assert delivery.unacknowledged(PEER) == [(3, "c")]
    assert not delivery.is_quiet()
    delivery.acknowledged(PEER, 3)
    assert delivery.unacknowledged(PEER) == []
    assert delivery.is_quiet()


def test_one_message_may_be_known_to_be_taken_before_those_in_front_of_it(delivery: Delivery[str]) -> None:
    for message in "abc":
        delivery.send(PEER, message)
    assert delivery.taken(PEER, 2) == "b"
    assert delivery.taken(PEER, 2) is None
    assert delivery.taken(99, 1) is None
    assert delivery.unacknowledged(PEER) == [(1, "a"), (3, "c")]
    assert delivery.acknowledged(PEER, 3) == ["a", "c"]


def test_how_many_were_sent(delivery: Delivery[str]) -> None:
    delivery.joined(8)
    for peer in (PEER, PEER, 8):
        delivery.send(peer, "a")
    delivery.acknowledged(PEER, 2)
    assert delivery.sent() == 3


def test_what_a_peer_has_still_to_acknowledge(delivery: Delivery[str]) -> None:
    delivery.joined(8)
    assert not delivery.awaits(PEER)
    delivery.send(PEER, "a")
    delivery.send(PEER, "b")
    assert (delivery.awaits(PEER), delivery.awaits(8)) == (True, False)
    delivery.acknowledged(PEER, 1)
    assert delivery.awaits(PEER)
    delivery.acknowledged(PEER, 2)
    assert not delivery.awaits(PEER)


def test_nothing_is_awaited_of_one_who_is_not_there(delivery: Delivery[str]) -> None:
    delivery.send(PEER, "a")
    delivery.lost(PEER)
    assert (delivery.awaits(PEER), delivery.awaits(8)) == (False, False)


def test_d3_nothing_is_kept_for_a_lost_peer_nor_taken_from_it(delivery: Delivery[str]) -> None:
    delivery.send(PEER, "a")
    delivery.receive(PEER, 1)
    delivery.lost(PEER)
    assert delivery.unacknowledged(PEER) == []
    assert delivery.is_quiet()
    assert not delivery.receive(PEER, 2)
    assert delivery.acknowledgement(PEER) == 0
    assert delivery.acknowledged(PEER, 1) == []
    with pytest.raises(KeyError):
        delivery.send(PEER, "b")


def test_a_peer_that_was_never_there_may_be_lost(delivery: Delivery[str]) -> None:
    delivery.lost(8)
    assert delivery.is_quiet()


def test_a_peer_does_not_join_twice(delivery: Delivery[str]) -> None:
    delivery.send(PEER, "a")
    with pytest.raises(ProtocolError, match="worker 7 is there already"):
        delivery.joined(PEER)
    assert delivery.unacknowledged(PEER) == [(1, "a")]


def test_what_was_not_sent_cannot_be_acknowledged(delivery: Delivery[str]) -> None:
    delivery.send(PEER, "a")
    with pytest.raises(ProtocolError, match="acknowledged message 2; the last one sent is 1"):
        delivery.acknowledged(PEER, 2)
    assert delivery.unacknowledged(PEER) == [(1, "a")]


@given(st.lists(st.tuples(st.sampled_from(["send", "arrive", "lose", "resend", "acknowledge"]), st.integers(0, 10))))
def test_everything_arrives_once_whatever_the_network_does(steps: list[tuple[str, int]]) -> None:
    here, there = Delivery[int](), Delivery[int]()
    here.joined(2)
    there.joined(1)
    copies: list[tuple[int, int]] = []
    taken: list[int] = []
    sent = 0

    def arrive(position: int, keep: bool) -> None:
        number, message = copies[position] if keep else copies.pop(position)
        if there.receive(1, number):
            taken.append(message)

    for step, chance in steps:
        if step == "send":
            sent += 1
            copies.append((here.send(2, sent), sent))
        elif step == "arrive" and copies:
            arrive(chance % len(copies), keep=chance > 7)
        elif step == "lose" and copies:
            copies.pop(chance % len(copies))
        elif step == "resend":
            copies += here.unacknowledged(2)
        elif step == "acknowledge":
            here.acknowledged(2, there.acknowledgement(1))
        kept = {message for _, message in here.unacknowledged(2)}
        assert kept | set(taken) == set(range(1, sent + 1))
    copies += here.unacknowledged(2)
    while copies:
        arrive(0, keep=False)
    here.acknowledged(2, there.acknowledgement(1))
    assert sorted(taken) == list(range(1, sent + 1))
    assert here.is_quiet()
