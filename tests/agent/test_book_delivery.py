"""What books of references say to each other: kept until it is acknowledged, and no letter too many."""

from __future__ import annotations

import gc
import weakref

import pytest
from book_stage import CALL, WAY, WAYS_TO_PASS, Books, Way, only, read_remote

from farcall.agent.parcels import CarriedFrame, RemoteFrame
from farcall.agent.tending import work_off
from farcall.protocol.control import pack_control, unpack_control
from farcall.protocol.reference_messages import UserDeleted

pytestmark = pytest.mark.timeout(20)


def test_what_is_not_acknowledged_is_kept(books: Books) -> None:
    handle, _ = books.remote(0, 1)
    assert [type(parcel).__name__ for _, parcel in books[0].mailboxes.unacknowledged(1)] == ["RemoteFrame"]
    books.deliver()
    assert books[0].mailboxes.unacknowledged(1) == []
    assert books[0].is_quiet()
    assert handle.confirmed


def test_the_letter_before_a_remote_call_has_all_that_was_to_be_said(books: Books) -> None:
    dropped, _ = books.remote(0, 1)
    books.deliver()
    reference, fork = dropped.reference, dropped.fork
    del dropped
    gc.collect()
    with books[0]._lock:
        work_off(books[0])
    books.posted.clear()
    handle, message = books[0].call_remote(1, [], *CALL, WAY)
    letter, _ = read_remote(message)
    assert letter is not None
    _, messages = unpack_control(letter)
    assert [message for _, message in messages] == [UserDeleted(reference, fork)]  # type: ignore[arg-type]
    assert books[0].mailboxes.outbox(1) is None, "nobody need send it besides"
    (first, _), (second, parcel) = books[0].mailboxes.unacknowledged(1)
    assert (first, second) == (messages[0][0], first + 1), "the letter goes first, and has the lower numbers"
    assert isinstance(parcel, RemoteFrame)
    assert not handle.confirmed


def test_a_remote_call_with_nothing_else_to_say_has_no_letter(books: Books) -> None:
    handle, message = books[0].call_remote(1, [], *CALL, WAY)
    letter, _ = read_remote(message)
    assert letter is None
    assert not handle.confirmed


def test_what_was_dropped_is_not_worked_off_by_the_thread_that_calls(books: Books) -> None:
    dropped, _ = books.remote(0, 2)
    books.deliver()
    books.posted.clear()
    woken = books.woken
    del dropped
    gc.collect()
    handle, message = books[0].call_remote(1, [], *CALL, WAY)
    letter, _ = read_remote(message)
    assert letter is None
    assert books.woken > woken
    assert books[0].has_work()
    assert books.posted == [], "not by the thread that calls"
    books[0].work_off()
    assert books.posted == [(0, 2)]
    assert handle.fork is not None


def test_a_letter_of_answers_only_says_so(books: Books) -> None:
    handle, _ = books.remote(0, 1)
    (child,) = books.pass_on(0, 2, handle)
    letter = only(books[1].mailboxes.outbox(0))
    assert letter.is_bare, "an acknowledgement alone"
    assert not letter.only_answers
    assert books[1].mailboxes.outbox(0) is None
    books.moment(2)
    letter = only(books[2].mailboxes.outbox(1))
    assert not letter.only_answers, "a request"
    books[1].control_received(2, letter.body)
    letter = only(books[1].mailboxes.outbox(2))
    assert letter.only_answers
    books[2].control_received(1, letter.body)
    assert child.confirmed
    assert not only(books[2].mailboxes.outbox(0)).only_answers, "the word to the parent"


def test_mail_goes_along_with_a_call(books: Books) -> None:
    handle, _ = books.remote(0, 1)
    books.deliver()
    assert books[0].mailboxes.mail(1) is None
    reference, fork = handle.reference, handle.fork
    del handle
    gc.collect()
    assert books[0].mailboxes.mail(1) is None, "what a finalizer noted is for the pool"
    books[0].work_off()
    mail = books[0].mailboxes.mail(1)
    assert mail is not None
    assert [message for _, message in unpack_control(mail)[1]] == [UserDeleted(reference, fork)]  # type: ignore[arg-type]
    assert books[0].mailboxes.mail(1) is None
    books[1].control_received(0, mail)
    assert books.left() == {}


def test_an_acknowledgement_alone_is_no_mail(books: Books) -> None:
    """It would make every call heavier, and nobody waits for it."""
    handle, _ = books.remote(0, 1)
    assert books[1].mailboxes.mail(0) is None
    assert books[1].has_work()
    assert only(books[1].mailboxes.outbox(0)).is_bare
    assert not books[1].has_work()
    assert handle.fork is not None


def test_a_remote_call_is_confirmed_by_the_word_that_it_arrived(books: Books) -> None:
    first, _ = books.remote(0, 1)
    second, _ = books.remote(0, 1)
    books[0].control_received(1, pack_control(1, []))
    assert (first.confirmed, second.confirmed) == (True, False)
    books[0].control_received(1, pack_control(1, []))  # said twice
    books[0].control_received(1, pack_control(2, []))
    assert second.confirmed


def test_a_handle_dropped_before_its_remote_call_arrived_is_given_back_after(books: Books) -> None:
    handle, _ = books.remote(0, 1)
    del handle
    gc.collect()
    books[0].work_off()
    assert books[0].mailboxes.outbox(1) is None, "a delete must not overtake its own request"
    books[0].control_received(1, pack_control(1, []))
    (message,) = unpack_control(only(books[0].mailboxes.outbox(1)).body)[1]
    assert isinstance(message[1], UserDeleted)


def test_whether_the_peer_has_more_to_acknowledge(books: Books) -> None:
    """So that the reader of the connection knows whether anything is still to come."""
    first, _ = books.remote(0, 1)
    answer = only(books[1].mailboxes.outbox(0))
    second, _ = books.remote(0, 1)
    books[0].control_received(1, answer.body)
    assert books[0].mailboxes.awaits(1)
    books[0].control_received(1, only(books[1].mailboxes.outbox(0)).body)
    assert not books[0].mailboxes.awaits(1)
    assert first.confirmed
    assert second.confirmed


def test_whether_the_owner_has_more_to_answer(books: Books) -> None:
    """Its answer may come long after the acknowledgement: only when the creator's own request has come."""
    handle, _ = books.remote(0, 1, deliver=False)
    children = books.pass_on(0, 2, handle), books.pass_on(0, 2, handle)
    books.moment(2)
    books[1].control_received(2, only(books[2].mailboxes.outbox(1)).body)
    books[2].control_received(1, only(books[1].mailboxes.outbox(2)).body)
    assert books[2].mailboxes.unacknowledged(1) == []
    assert books[2].mailboxes.awaits(1), "it has come, and is not answered"
    books.last_call()
    books[2].control_received(1, only(books[1].mailboxes.outbox(2)).body)
    assert not books[2].mailboxes.awaits(1)
    assert all(child.confirmed for (child,) in children)


@pytest.mark.parametrize("way", WAYS_TO_PASS)
def test_what_went_on_a_lost_connection_is_sent_again(books: Books, way: str) -> None:
    again: list[int] = []
    books[0].resend = again.append
    books[0].call_remote(1, [], *CALL, WAY)
    assert again == []
    handle = books[0].own("tea")
    if way == "pass_on":
        books[0].pass_on([handle], 1, Way(lost=True))
    else:
        books[0].call_remote(1, [handle], *CALL, Way(lost=True))
    assert again == [1]
    kind = CarriedFrame if way == "pass_on" else RemoteFrame
    assert isinstance(books[0].mailboxes.unacknowledged(1)[-1][1], kind)


def test_what_a_remote_call_keeps_lives_until_it_is_acknowledged(books: Books) -> None:
    kept = books[0].own("tea")
    here = weakref.ref(kept)
    handle, message = books[0].call_remote(1, [], *CALL, WAY, kept)
    del kept
    gc.collect()
    assert here() is not None
    books[0].control_received(1, pack_control(read_remote(message)[1][0], []))
    gc.collect()
    assert here() is None
    assert handle.fork is not None


def test_an_acknowledgement_that_was_lost_is_said_again(books: Books) -> None:
    """What arrives a second time shows that its sender does not know that it came the first time."""
    handle = books[0].own("tea")
    number, carried = books[0].pass_on([handle], 1, WAY)
    taken = books[1].take(0, number, carried)
    assert books[1].mailboxes.outbox(0) is not None  # lost with its connection
    assert not books[0].is_quiet()
    assert books[1].take(0, number, carried) is None  # sent again
    books.deliver()
    assert books[0].is_quiet()
    assert taken


def test_an_acknowledgement_of_messages_that_was_lost_is_said_again(books: Books) -> None:
    handle, _ = books.remote(0, 1)
    books.deliver()
    del handle
    gc.collect()
    books[0].work_off()
    letter = books[0].mailboxes.outbox(1)
    assert letter is not None
    books[1].control_received(0, letter.body)
    assert books[1].mailboxes.outbox(0) is not None  # lost
    books[1].control_received(0, letter.body)  # sent again
    assert books.left() == {}
