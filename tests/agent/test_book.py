"""The book of references, with books of several workers wired by hand: every message goes when the test says so."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from farcall.agent.book import ReferenceBook
from farcall.agent.handle import Handle
from farcall.agent.parcels import CarriedFrame, Letter, RemoteFrame
from farcall.agent.values import Value
from farcall.errors import (
    OwnerLost,
    ProtocolError,
    ReferenceRefused,
    RpcError,
    SerializationError,
    UsageError,
    WorkerLost,
)
from farcall.protocol.control import MOST_HANDLES, pack_control, unpack_control
from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_messages import Carried, ForkAccepted, UserDeleted
from farcall.serialization import encode_failure

pytestmark = pytest.mark.timeout(20)


class Way:
    """A connection."""

    def __init__(self, lost: bool = False) -> None:
        self.lost = lost

    def is_lost(self) -> bool:
        return self.lost


WAY = Way()


class Books:
    """The books of some workers that know each other, and what each has posted."""

    def __init__(self, size: int = 3, kind: type[ReferenceBook] = ReferenceBook) -> None:
        self.posted: list[tuple[int, int]] = []
        self.woken = 0
        self.books = [self._new(kind, rank) for rank in range(size)]
        for book in self.books:
            for rank in range(size):
                book.joined(rank)

    def _new(self, kind: type[ReferenceBook], rank: int) -> ReferenceBook:
        return kind(rank, lambda to: self.posted.append((rank, to)), self._wake, lambda worker: f"w{worker}")

    def _wake(self) -> None:
        self.woken += 1

    def __getitem__(self, rank: int) -> ReferenceBook:
        return self.books[rank]

    def deliver(self) -> int:
        """Carries control messages to and fro until nobody has anything to say; how many letters that were."""
        letters = 0
        while True:
            before = letters
            for sender, book in enumerate(self.books):
                book.work_off()
                for to in range(len(self.books)):
                    letter = book.outbox(to)
                    if letter is not None:
                        letters += 1
                        self[to].control_received(sender, letter.body)
            if letters == before:
                return letters

    def remote(self, creator: int, owner: int, *passed: Handle, deliver: bool = True) -> tuple[Handle, Any]:
        """A remote call: the creator's handle, and what the owner got: the value and the handles."""
        sent: list[Any] = []

        def frame(number: int, carried: list[Carried], reference: RRefId, fork: ForkId) -> list[Any]:
            sent.append((number, reference, fork, carried))
            return [b"frame"]

        handle, message, letter = self[creator].call_remote(owner, passed, frame, WAY)
        assert message == [b"frame"]

        def arrive() -> Any:
            if letter is not None:
                self[owner].control_received(creator, letter)
            return self[owner].create_requested(creator, *sent[0])

        self.last_call = arrive
        return handle, arrive() if deliver else None

    def pass_on(self, sender: int, to: int, *handles: Handle) -> list[Handle]:
        number, carried = self[sender].pass_on(handles, to, WAY)
        taken = self[to].take(sender, number, carried)
        assert taken is not None
        return taken

    def left(self) -> dict[int, Any]:
        gc.collect()
        self.deliver()
        return {
            rank: (dict(book._references.owned), dict(book._references.held), dict(book._values))
            for rank, book in enumerate(self.books)
            if not book._references.is_empty() or book._values or not book.is_quiet() or book._origins
        }


@pytest.fixture
def books() -> Books:
    return Books()


def value(content: Any) -> Value:
    made = Value()
    made.give(content)
    return made


def only(letter: Letter | None) -> Letter:
    """The letter that must be there."""
    assert letter is not None
    return letter


def error_of(handle: Handle) -> RpcError | None:
    """What a use of the handle raises."""
    return handle.new_error() if handle.new_error is not None else None


def test_a_value_made_here(books: Books) -> None:
    handle = books[0].own("tea")
    assert handle.confirmed
    assert handle.value is not None
    assert books[0].value(handle.reference).value() == "tea"
    assert re.search(r"test_book\.py:\d+$", handle.made_at)
    reference = handle.reference
    del handle
    assert books.left() == {}
    released = books[0].value(reference)
    with pytest.raises(ReferenceRefused, match=r"worker 'w0' does not own reference 0:1 owned by 0 any more"):
        released.value()
    assert books.left() == {}, "asking for it has made no entry"


def test_an_object_of_this_worker(books: Books) -> None:
    handle = books[0].own("tea")
    assert books[0].value(handle.reference).value() == "tea"
    assert re.search(r"test_book\.py:\d+$", handle.made_at)
    assert handle.value is books[0].value(handle.reference)


def test_a_remote_call_is_confirmed_by_the_first_word_of_the_owner(books: Books) -> None:
    handle, (value, carried) = books.remote(0, 1)
    assert (handle.confirmed, carried, value.done()) == (False, [], False)
    books.deliver()
    assert handle.confirmed
    assert books[1].value(handle.reference) is value
    del handle, value
    assert books.left() == {}


def test_a_remote_call_that_came_twice_is_taken_once(books: Books) -> None:
    handle, _ = books.remote(0, 1)
    assert books.last_call() is None
    del handle
    assert books.left() == {}


def test_handles_that_came_twice_are_taken_once(books: Books) -> None:
    handle = books[0].own("tea")
    number, carried = books[0].pass_on([handle], 1, WAY)
    taken = books[1].take(0, number, carried)
    assert taken is not None
    assert books[1].take(0, number, carried) is None
    assert [one.reference for one in taken] == [handle.reference]
    del handle, taken
    assert books.left() == {}


def test_from_hand_to_hand_and_back(books: Books) -> None:
    first, (value, _) = books.remote(0, 1)
    (second,) = books.pass_on(0, 2, first)
    assert not second.confirmed
    (third,) = books.pass_on(2, 1, second)  # to its owner
    assert third.confirmed
    assert third.value is value
    (fourth,) = books.pass_on(1, 0, third)  # from its owner
    assert fourth.confirmed
    del first
    books.deliver()
    assert second.confirmed
    assert set(books[1].inventory().owned[0].holders) == {"w0", "w2"}
    value.give("tea")
    del second, third
    books.deliver()
    assert books[1].value(fourth.reference).value() == "tea"
    del fourth, value
    assert books.left() == {}


def test_a_finalizer_only_notes(books: Books) -> None:
    handle, _ = books.remote(0, 1)
    books.deliver()
    assert not books[0].has_work()
    woken = books.woken
    with books[0]._lock:  # garbage collection may run in the midst of it
        del handle
        gc.collect()
    assert books.woken > woken
    assert books[0].has_work()
    assert len(books[0]._dropped) == 1
    assert books.left() == {}


class Watched:
    """An object that notes whether the lock of a book was held when it went."""

    def __init__(self, book: ReferenceBook, notes: list[bool]) -> None:
        self._book = book
        self._notes = notes

    def __del__(self) -> None:
        self._notes.append(self._book._lock._is_owned())  # type: ignore[attr-defined]


@pytest.mark.parametrize("end", ["dropped", "given back", "holder lost", "cleared"])
def test_values_are_released_outside_the_lock(books: Books, end: str) -> None:
    locked: list[bool] = []
    handle = books[0].own(Watched(books[0], locked))
    passed = books.pass_on(0, 1, handle) if end != "dropped" else []
    del handle
    gc.collect()
    books.deliver()
    if end == "given back":
        passed.clear()
    elif end == "holder lost":
        books[0].lost(1)
    elif end == "cleared":
        books[0].clear()
    gc.collect()
    books.deliver()
    assert locked == [False]
    assert books[0].inventory().owned == ()


def test_an_inventory_runs_nothing_of_a_user_under_the_lock(books: Books) -> None:
    """An error is not made anew to be described: its class is the user's, and may do anything."""
    there = Value()
    there.fail(encode_failure(Sensitive("seven"), "w0", "f"))
    handle = books[0].make(there)
    made.clear()
    assert [owned.type for owned in books[0].inventory().owned] == ["failed: test_book.Sensitive: seven"]
    assert made == []
    with pytest.raises(Sensitive):
        there.value()
    assert made == ["seven"]
    assert handle.confirmed


made: list[str] = []


class Sensitive(Exception):
    """An error that notes when it is made anew."""

    def __reduce__(self) -> Any:
        return make_anew, self.args


def make_anew(text: str) -> Sensitive:
    made.append(text)
    return Sensitive(text)


def test_an_inventory_of_all_that_is_under_way(books: Books) -> None:
    handle, _ = books.remote(0, 1)
    passed = books.pass_on(0, 2, handle)
    (held,) = books[0].inventory().held
    assert (held.owner, held.confirmed, held.pending, held.dropped) == ("w1", False, ("w2",), False)
    del handle
    gc.collect()
    (held,) = books[0].inventory().held
    assert held.dropped
    books.deliver()
    assert books[0].inventory().held == ()
    assert len(books[2].inventory().held) == len(passed) == 1
    assert books[1].debug_info()["num_forks"] == "1"


# -- Errors change nothing


def test_a_handle_that_leads_nowhere_is_not_passed_on(books: Books) -> None:
    bad, _ = books.remote(0, 1)
    good = books[0].own("tea")
    books[0].lost(1)
    with pytest.raises(OwnerLost, match="worker 'w1', who owned reference 0:1 owned by 1, was lost") as caught:
        books[0].pass_on([good, bad], 2, WAY)
    assert caught.value.worker == "w1"
    with pytest.raises(OwnerLost):
        books[0].call_remote(2, [good, bad], lambda *_: [b""], WAY)
    assert books[0].inventory().owned[0].holders == ()
    assert books[0].is_quiet()


WAYS_TO_PASS: dict[str, Callable[[ReferenceBook, list[Handle]], Any]] = {
    "pass_on": lambda book, handles: book.pass_on(handles, 1, WAY),
    "call_remote": lambda book, handles: book.call_remote(1, handles, lambda *_: [b"frame"], WAY),
}


def snapshot(book: ReferenceBook) -> Any:
    """All that a failed attempt to pass something on could have changed."""
    references = book._references
    return (
        {reference: (owned.handles, dict(owned.forks)) for reference, owned in references.owned.items()},
        {fork: (held.dropped, dict(held.children)) for fork, held in references.held.items()},
        dict(references._numbers),
        references._forks,
        {peer: (link.last, dict(link.unacknowledged)) for peer, link in book._delivery._links.items()},
        dict(book._outboxes),
        dict(book._unacknowledged),
        dict(book._values),
        len(book._handles),
    )


@pytest.mark.parametrize("way", WAYS_TO_PASS)
def test_too_many_handles_are_refused_before_anything_is_taken(books: Books, way: str) -> None:
    handle = books[0].own("tea")
    theirs, _ = books.remote(0, 1)
    books.deliver()
    before = snapshot(books[0])
    with pytest.raises(SerializationError, match=r"a message with 65536 references .* at most 65535 .* in parts"):
        WAYS_TO_PASS[way](books[0], [handle] * (MOST_HANDLES + 1))
    assert snapshot(books[0]) == before
    assert theirs.confirmed


@pytest.mark.parametrize("way", WAYS_TO_PASS)
@pytest.mark.parametrize("error", [OwnerLost, ReferenceRefused, UsageError])
def test_a_handle_that_leads_nowhere_is_refused_before_anything_is_taken(
    books: Books, way: str, error: type[RpcError]
) -> None:
    good, (bad, _) = books[0].own("tea"), books.remote(0, 2)
    books.deliver()
    bad.new_error = lambda: error("it leads nowhere")
    before = snapshot(books[0])
    with pytest.raises(error, match="it leads nowhere"):
        WAYS_TO_PASS[way](books[0], [good, bad])
    assert snapshot(books[0]) == before


@pytest.mark.parametrize("way", WAYS_TO_PASS)
def test_a_lost_receiver_is_refused_before_anything_is_taken(books: Books, way: str) -> None:
    handle = books[0].own("tea")
    books[0].lost(1)
    before = snapshot(books[0])
    with pytest.raises(WorkerLost, match="worker 'w1' was lost") as caught:
        WAYS_TO_PASS[way](books[0], [handle])
    assert caught.value.worker == "w1"
    assert not isinstance(caught.value, OwnerLost)
    assert snapshot(books[0]) == before
    assert books[0].is_quiet()


def test_what_was_dropped_is_not_lost_with_a_remote_call_that_is_refused(books: Books) -> None:
    dropped, _ = books.remote(0, 1)
    books.deliver()
    del dropped
    gc.collect()
    books[0].lost(2)
    with pytest.raises(WorkerLost):
        books[0].call_remote(2, [], lambda *_: [b"frame"], WAY)
    assert books[0].has_work()
    books.deliver()
    assert books[1]._references.is_empty()


def test_a_message_that_is_none_is_refused(books: Books) -> None:
    with pytest.raises(ProtocolError):
        books[0].control_received(1, b"noise")
    with pytest.raises(ProtocolError, match="the last one sent is 0"):
        books[0].control_received(1, pack_control(5, []))
    with pytest.raises(ProtocolError, match="gave up"):
        books[0].control_received(1, pack_control(0, [(1, UserDeleted(RRefId(0, 1, 1), ForkId(1, 1)))]))
    assert books[0]._references.is_empty()


def test_what_came_before_a_message_that_is_none_is_done(books: Books) -> None:
    first, _ = books.remote(2, 1)
    (handle,) = books.pass_on(2, 0, first)
    good = ForkAccepted(handle.reference, handle.fork)  # type: ignore[arg-type]
    bad = UserDeleted(RRefId(0, 1, 1), ForkId(1, 1))
    with pytest.raises(ProtocolError):
        books[0].control_received(1, pack_control(0, [(1, good), (2, bad)]))
    assert handle.confirmed, "it was taken, and will not be taken again"


# -- Delivery


def test_what_is_not_acknowledged_is_kept(books: Books) -> None:
    handle, _ = books.remote(0, 1)
    assert [type(parcel).__name__ for _, parcel in books[0].unacknowledged(1)] == ["RemoteFrame"]
    books.deliver()
    assert books[0].unacknowledged(1) == []
    assert books[0].is_quiet()
    assert handle.confirmed


def test_the_letter_before_a_remote_call_has_all_that_was_to_be_said(books: Books) -> None:
    dropped, _ = books.remote(0, 1)
    books.deliver()
    reference, fork = dropped.reference, dropped.fork
    del dropped
    gc.collect()
    books.posted.clear()
    handle, _, letter = books[0].call_remote(1, [], lambda *_: [b"frame"], WAY)
    assert letter is not None
    _, messages = unpack_control(letter)
    assert [message for _, message in messages] == [UserDeleted(reference, fork)]  # type: ignore[arg-type]
    assert books[0].outbox(1) is None, "nobody need send it besides"
    (first, _), (second, parcel) = books[0].unacknowledged(1)
    assert (first, second) == (messages[0][0], first + 1), "the letter goes first, and has the lower numbers"
    assert isinstance(parcel, RemoteFrame)
    assert not handle.confirmed


def test_a_remote_call_with_nothing_else_to_say_has_no_letter(books: Books) -> None:
    handle, _, letter = books[0].call_remote(1, [], lambda *_: [b"frame"], WAY)
    assert letter is None
    assert not handle.confirmed


def test_what_a_remote_call_gives_up_for_others_is_posted_soon(books: Books) -> None:
    dropped, _ = books.remote(0, 2)
    books.deliver()
    del dropped
    gc.collect()
    books.posted.clear()
    woken = books.woken
    handle, _, letter = books[0].call_remote(1, [], lambda *_: [b"frame"], WAY)
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
    letter = only(books[1].outbox(0))
    assert letter.only_answers, "an acknowledgement alone"
    assert books[1].outbox(0) is None
    letter = only(books[2].outbox(1))
    assert not letter.only_answers, "a request"
    books[1].control_received(2, letter.body)
    letter = only(books[1].outbox(2))
    assert letter.only_answers
    books[2].control_received(1, letter.body)
    assert child.confirmed
    assert not only(books[2].outbox(0)).only_answers, "the word to the parent"


def test_mail_goes_along_with_a_call(books: Books) -> None:
    handle, _ = books.remote(0, 1)
    books.deliver()
    assert books[0].mail(1) is None
    reference, fork = handle.reference, handle.fork
    del handle
    gc.collect()
    assert books[0].mail(1) is None, "what a finalizer noted is for the pool"
    books[0].work_off()
    mail = books[0].mail(1)
    assert mail is not None
    assert [message for _, message in unpack_control(mail)[1]] == [UserDeleted(reference, fork)]  # type: ignore[arg-type]
    assert books[0].mail(1) is None
    books[1].control_received(0, mail)
    assert books.left() == {}


def test_an_acknowledgement_alone_is_no_mail(books: Books) -> None:
    """It would make every call heavier, and nobody waits for it."""
    handle, _ = books.remote(0, 1)
    assert books[1].mail(0) is None
    assert books[1].has_work()
    assert only(books[1].outbox(0)).only_answers
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
    assert books[0].outbox(1) is None, "a delete must not overtake its own request"
    books[0].control_received(1, pack_control(1, []))
    (message,) = unpack_control(only(books[0].outbox(1)).body)[1]
    assert isinstance(message[1], UserDeleted)


def test_whether_the_peer_has_more_to_acknowledge(books: Books) -> None:
    """So that the reader of the connection knows whether anything is still to come."""
    first, _ = books.remote(0, 1)
    answer = only(books[1].outbox(0))
    second, _ = books.remote(0, 1)
    books[0].control_received(1, answer.body)
    assert books[0].awaits(1)
    books[0].control_received(1, only(books[1].outbox(0)).body)
    assert not books[0].awaits(1)
    assert first.confirmed
    assert second.confirmed


def test_whether_the_owner_has_more_to_answer(books: Books) -> None:
    """Its answer may come long after the acknowledgement: only when the creator's own request has come."""
    handle, _ = books.remote(0, 1, deliver=False)
    children = books.pass_on(0, 2, handle), books.pass_on(0, 2, handle)
    books[1].control_received(2, only(books[2].outbox(1)).body)
    books[2].control_received(1, only(books[1].outbox(2)).body)
    assert books[2].unacknowledged(1) == []
    assert books[2].awaits(1), "it has come, and is not answered"
    books.last_call()
    books[2].control_received(1, only(books[1].outbox(2)).body)
    assert not books[2].awaits(1)
    assert all(child.confirmed for (child,) in children)


@pytest.mark.parametrize("way", WAYS_TO_PASS)
def test_what_went_on_a_lost_connection_is_sent_again(books: Books, way: str) -> None:
    again: list[int] = []
    books[0].resend = again.append
    books[0].call_remote(1, [], lambda *_: [b"frame"], WAY)
    assert again == []
    handle = books[0].own("tea")
    if way == "pass_on":
        books[0].pass_on([handle], 1, Way(lost=True))
    else:
        books[0].call_remote(1, [handle], lambda *_: [b"frame"], Way(lost=True))
    assert again == [1]
    kind = CarriedFrame if way == "pass_on" else RemoteFrame
    assert isinstance(books[0].unacknowledged(1)[-1][1], kind)


def test_what_a_remote_call_keeps_lives_until_it_is_acknowledged(books: Books) -> None:
    kept = books[0].own("tea")
    here = weakref.ref(kept)
    number: list[int] = []

    def frame(*parts: Any) -> list[Any]:
        number.append(parts[0])
        return [b"frame"]

    handle, _, _ = books[0].call_remote(1, [], frame, WAY, kept)
    del kept
    gc.collect()
    assert here() is not None
    books[0].control_received(1, pack_control(number[0], []))
    gc.collect()
    assert here() is None
    assert handle.fork is not None


def test_an_acknowledgement_that_was_lost_is_said_again(books: Books) -> None:
    """What arrives a second time shows that its sender does not know that it came the first time."""
    handle = books[0].own("tea")
    number, carried = books[0].pass_on([handle], 1, WAY)
    taken = books[1].take(0, number, carried)
    assert books[1].outbox(0) is not None  # lost with its connection
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
    letter = books[0].outbox(1)
    assert letter is not None
    books[1].control_received(0, letter.body)
    assert books[1].outbox(0) is not None  # lost
    books[1].control_received(0, letter.body)  # sent again
    assert books.left() == {}


def test_nothing_is_kept_of_a_lost_worker(books: Books) -> None:
    owned = books[0].own("tea")
    passed = books.pass_on(0, 1, owned)
    theirs, _ = books.remote(0, 1)
    del owned
    gc.collect()
    books[0].work_off()
    books[0].lost(1)
    books[0].lost(1)
    assert books[0]._references.is_empty()
    assert isinstance(error_of(theirs), OwnerLost)
    assert books[0]._values == {}
    books[0].work_off()
    assert books[0].is_quiet()
    assert books[0].take(1, 9, []) is None
    assert books[0].outbox(1) is None
    assert passed


def test_a_handle_whose_creators_request_never_comes_is_refused(books: Books) -> None:
    """Worker 0 asks worker 1 for a value and passes the handle to worker 2; then it dies, and its request is lost."""
    handle, _ = books.remote(0, 1, deliver=False)
    (child,) = books.pass_on(0, 2, handle)
    books[2].work_off()
    letter = books[2].outbox(1)
    assert letter is not None
    books[1].control_received(2, letter.body)
    for rank in (1, 2):
        books[rank].lost(0)
    letter = books[1].outbox(2)
    assert letter is not None
    books[2].control_received(1, letter.body)
    with pytest.raises(ReferenceRefused, match="passed on by a worker that died"):
        child.check()
    assert books[1]._references.is_empty()
    assert books[2]._references.is_empty()
    assert books[1]._values == {}


def test_a_value_that_is_not_yet_created_is_waited_for(books: Books) -> None:
    """A third worker may ask for it before the creator's own request has come."""
    handle, _ = books.remote(0, 1, deliver=False)
    passed = books.pass_on(0, 2, handle)
    books[2].work_off()
    letter = books[2].outbox(1)
    assert letter is not None
    books[1].control_received(2, letter.body)
    waited_for = books[1].value(handle.reference)
    assert not waited_for.done()
    value, _ = books.last_call()
    assert value is waited_for
    assert passed


def test_a_use_that_overtakes_everything_is_answered_in_the_end(books: Books) -> None:
    """Neither the creation nor the request of the fork has come; only the use has."""
    handle, _ = books.remote(0, 1, deliver=False)
    waited_for = books[1].value(handle.reference)
    assert not waited_for.done()
    assert not books[1].is_quiet(), "a value is to come"
    value, _ = books.last_call()
    assert value is waited_for


def test_a_use_that_overtook_a_creation_that_never_comes_is_refused(books: Books) -> None:
    handle, _ = books.remote(0, 1, deliver=False)
    waited_for = books[1].value(handle.reference)
    books[1].lost(0)
    assert isinstance(waited_for.exception(), ReferenceRefused)
    assert books[1]._values == {}
    assert books[1].is_quiet()
    assert isinstance(books[1].value(handle.reference).exception(), ReferenceRefused)
    assert books[1]._values == {}


def test_the_owners_own_handle_of_what_never_comes_meets_an_error(books: Books) -> None:
    """The creator passes the handle to the owner itself, and dies before its request for the value arrives."""
    handle, _ = books.remote(0, 1, deliver=False)
    (own,) = books.pass_on(0, 1, handle)
    assert own.value is not None
    assert not own.value.done()
    books[1].lost(0)
    assert isinstance(own.value.exception(), ReferenceRefused)
    (later,) = books.pass_on(1, 2, own)
    with pytest.raises(ReferenceRefused):
        books[1].value(later.reference).value()
    assert books[1].inventory().owned[0].type == "refused"
    del own, later
    gc.collect()
    books[2].work_off()
    books[1].control_received(2, only(books[2].outbox(1)).body)
    books[1].work_off()
    assert books[1]._references.is_empty()
    assert books[1]._values == {}


def test_errors_are_made_anew_for_every_use(books: Books) -> None:
    """One and the same would gather tracebacks, whose frames hold the handle."""
    handle, _ = books.remote(0, 1)
    books[0].lost(1)
    caught = []
    for _ in range(2):
        with pytest.raises(OwnerLost) as error:
            handle.check()
        caught.append(error.value)
    assert caught[0] is not caught[1]
    assert str(caught[0]) == str(caught[1])


# -- Threads, where the lock is free between two steps


class BetweenSteps(ReferenceBook):
    """Does something of another thread's between the decision and the deed."""

    before_acting: Callable[[], object] | None = None

    def _act(self) -> None:
        hook, self.before_acting = self.before_acting, None
        if hook is not None:
            hook()
        super()._act()


@pytest.mark.parametrize("way", [*WAYS_TO_PASS, "drop", "take", "make", "report"])
def test_a_worker_may_be_lost_at_any_moment(way: str) -> None:
    books = Books(kind=BetweenSteps)
    book = books[0]
    assert isinstance(book, BetweenSteps)
    own = book.own("tea")
    theirs: Handle | None
    theirs, _ = books.remote(0, 1)
    books.deliver()
    if way == "drop":
        theirs = None
        gc.collect()
    met: list[Any] = []

    def other_thread() -> None:
        steps: dict[str, Callable[[], object]] = {
            "drop": book.work_off,
            "take": lambda: book.take(1, 9, [Carried(RRefId(1, 1, 1), ForkId(1, 9))]),
            "make": lambda: book.own("milk"),
            "report": lambda: book.inventory().held,
        }
        try:
            met.append(WAYS_TO_PASS[way](book, [own]) if way in WAYS_TO_PASS else steps[way]())
        except WorkerLost:
            met.append("lost")

    book.before_acting = other_thread
    book.lost(1)
    wanted = {"pass_on": "lost", "call_remote": "lost", "drop": None, "take": None, "report": ()}
    assert len(met) == 1
    assert way == "make" or met[0] == wanted[way]
    met.clear()
    gc.collect()
    book.work_off()
    assert book.is_quiet()
    assert theirs is None or isinstance(error_of(theirs), OwnerLost)
    assert len(book.inventory().owned) == 1
    assert own.confirmed


def test_a_release_does_not_take_a_value_that_was_created_meanwhile() -> None:
    """The owner gets a handle before the creator's request, drops it, and the request comes just then."""
    books = Books(kind=BetweenSteps)
    book = books[1]
    assert isinstance(book, BetweenSteps)
    handle, _ = books.remote(0, 1, deliver=False)
    taken = books.pass_on(0, 1, handle)
    taken.clear()
    gc.collect()
    created: list[Any] = []
    book.before_acting = lambda: created.append(books.last_call())
    book.work_off()
    value, _ = created[0]
    assert book.value(handle.reference) is value


# -- The end


def test_giving_up_all_handles(books: Books) -> None:
    theirs, _ = books.remote(0, 1)
    own = books[0].own("tea")
    books.deliver()
    books[0].give_up_handles("it is over")
    with pytest.raises(UsageError, match="it is over"):
        theirs.check()
    own.check()
    books.deliver()
    assert books[1]._references.is_empty()
    books[0].give_up_handles("again")
    del theirs, own
    assert books.left() == {}


def test_clearing_forgets_everything(books: Books) -> None:
    class Content:
        pass

    content = Content()
    released = weakref.ref(content)
    handle = books[0].own(content)
    there, _ = books.remote(0, 1)
    del content
    books[0].clear()
    handle.value = None
    assert released() is None
    assert books[0].inventory().owned == books[0].inventory().held == ()
    assert books[0].is_quiet()
    del handle, there
    gc.collect()
    books[0].work_off()


def test_many_threads_make_pass_and_drop(books: Books) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            rounds()
        except BaseException as error:
            failures.append(error)

    def rounds() -> None:
        for _ in range(100):
            own = books[0].own("tea")
            handle, _ = books.remote(0, 1, own)
            books.pass_on(0, 1, handle, own)

    threads = [threading.Thread(target=work) for _ in range(4)]
    books.remote = _locked(books.remote)  # type: ignore[method-assign]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert books.left() == {}


def _locked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`last_call` belongs to one thread at a time."""
    lock = threading.Lock()

    def locked(*args: Any) -> Any:
        with lock:
            return function(*args)

    return locked


# -- A finalizer in the midst of a change to the tables


@pytest.mark.parametrize("way", ["make", "pass_on", "call_remote"])
def test_a_finalizer_that_interrupts_the_book_keeping_is_refused(books: Books, way: str) -> None:
    handle = books[0].own("tea")
    ways: dict[str, Callable[[], object]] = {
        "make": lambda: books[0].own("milk"),
        "pass_on": lambda: books[0].pass_on([handle], 1, WAY),
        "call_remote": lambda: books[0].call_remote(1, [], lambda *_: [b"frame"], WAY),
    }
    with books[0]._lock, pytest.raises(UsageError, match="a finalizer cannot"):
        ways[way]()
    assert books[0].is_quiet()
    ways[way]()
