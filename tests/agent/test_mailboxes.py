"""The mailboxes by themselves: what is to be said, said once, and forgotten with its addressee."""

from __future__ import annotations

import threading

import pytest

from farcall.agent.mailboxes import Mailboxes
from farcall.protocol.control import unpack_control
from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_messages import ForkAccepted, ForkRequest, Message

ASKED = ForkRequest(RRefId(1, 0, 1), ForkId(0, 1))
ANSWERED = ForkAccepted(RRefId(0, 1, 1), ForkId(1, 1))


@pytest.fixture
def boxes() -> Mailboxes:
    boxes = Mailboxes(threading.RLock())
    for worker in (1, 2):
        boxes.delivery.joined(worker)
    return boxes


def say(boxes: Mailboxes, to: int, message: Message) -> None:
    """As the book does."""
    boxes.outboxes.setdefault(to, []).append((boxes.delivery.send(to, message), message))


def test_what_is_to_be_said_is_said_once(boxes: Mailboxes) -> None:
    say(boxes, 1, ASKED)
    say(boxes, 1, ANSWERED)
    letter = boxes.outbox(1)
    assert letter is not None
    assert unpack_control(letter.body) == (0, [(1, ASKED), (2, ANSWERED)])
    assert not letter.only_answers
    assert boxes.outbox(1) is None
    assert boxes.mail(1) is None


def test_answers_alone_are_known_as_such(boxes: Mailboxes) -> None:
    say(boxes, 1, ANSWERED)
    letter = boxes.outbox(1)
    assert letter is not None
    assert letter.only_answers


def test_an_acknowledgement_goes_with_a_letter_but_is_no_reason_to_weigh_down_a_call(boxes: Mailboxes) -> None:
    boxes.owed[1] = None
    boxes.delivery.receive(1, 1)
    assert boxes.mail(1) is None
    letter = boxes.outbox(1)
    assert letter is not None
    assert unpack_control(letter.body) == (1, [])
    say(boxes, 1, ASKED)
    boxes.owed[1] = None
    mail = boxes.mail(1)
    assert mail is not None
    assert unpack_control(mail) == (1, [(1, ASKED)])
    assert not boxes.owed


def test_everybody_to_whom_something_is_to_be_said_is_an_addressee_once(boxes: Mailboxes) -> None:
    say(boxes, 1, ASKED)
    boxes.owed.update({1: None, 2: None})
    assert boxes.addressees() == [1, 2]
    assert boxes.acknowledgement(2) == 0
    assert boxes.addressees() == [1]


def test_what_is_sent_again_is_not_in_the_outbox_any_more(boxes: Mailboxes) -> None:
    say(boxes, 1, ASKED)
    assert boxes.unacknowledged(1) == [(1, ASKED)]
    assert boxes.outbox(1) is None
    assert boxes.unacknowledged(1) == [(1, ASKED)], "it is kept until it is acknowledged"


@pytest.mark.parametrize("what", ["a message to acknowledge", "an answer"])
def test_something_is_awaited(boxes: Mailboxes, what: str) -> None:
    assert not boxes.awaits(1)
    if what == "an answer":
        boxes.asked[1] = 1
    else:
        say(boxes, 1, ASKED)
    assert boxes.awaits(1)
    assert not boxes.awaits(2)


def test_nothing_is_kept_for_who_is_lost(boxes: Mailboxes) -> None:
    for worker in (1, 2):
        say(boxes, worker, ASKED)
        boxes.owed[worker] = None
        boxes.asked[worker] = 1
    boxes.lost(1)
    assert (list(boxes.outboxes), list(boxes.owed), list(boxes.asked)) == ([2], [2], [2])
    assert boxes.unacknowledged(1) == []
    assert boxes.messages_sent() == 1
    kept = boxes.clear()
    assert (boxes.outboxes, boxes.owed, boxes.asked, boxes.messages_sent()) == ({}, {}, {}, 0)
    assert kept.unacknowledged(2) == [(1, ASKED)], "it ends where whoever gets it lets it"
