"""The book of references when workers are lost, and values whose creation is late or never comes."""

from __future__ import annotations

import gc

import pytest
from book_stage import Books, error_of, only

from farcall.errors import ExpelledError, OwnerLost, ReferenceRefused

pytestmark = pytest.mark.timeout(20)


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
    assert books[0].mailboxes.outbox(1) is None
    assert passed


def test_a_handle_whose_creators_request_never_comes_is_refused(books: Books) -> None:
    """Worker 0 asks worker 1 for a value and passes the handle to worker 2; then it dies, and its request is lost."""
    handle, _ = books.remote(0, 1, deliver=False)
    (child,) = books.pass_on(0, 2, handle)
    books.moment(2)
    letter = books[2].mailboxes.outbox(1)
    assert letter is not None
    books[1].control_received(2, letter.body)
    for rank in (1, 2):
        books[rank].lost(0)
    letter = books[1].mailboxes.outbox(2)
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
    books.moment(2)
    letter = books[2].mailboxes.outbox(1)
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
    books[1].control_received(2, only(books[2].mailboxes.outbox(1)).body)
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


# -- This worker itself was taken for dead


def test_who_is_cut_off_keeps_nothing_for_others_and_awaits_nothing(books: Books) -> None:
    book = books[0]
    theirs = [books.remote(0, 1)[0] for _ in range(3)]
    passed = books.pass_on(0, 2, theirs[0])
    lent = books.pass_on(0, 2, book.own("tea"))
    assert not book.is_quiet()
    book.cut_off()
    book.work_off()
    assert book.is_quiet()
    assert book._values == {}, "what only others held is released"
    del theirs[0]
    gc.collect()
    book.work_off()
    assert book.is_quiet(), "there is nobody who would have to be told"
    assert book.take(2, 1, []) is None
    assert not book.has_work(), "nobody is owed an acknowledgement either"
    assert passed
    assert lent


def test_handles_of_one_that_is_cut_off_say_that_it_is(books: Books) -> None:
    """Their owners are alive, so they are not said to be lost."""
    theirs, _ = books.remote(0, 1)
    books.deliver()
    own = books[0].own("tea")
    books[0].cut_off()
    for _ in range(2):
        with pytest.raises(
            ExpelledError, match=r"'w0' \(this one\) was taken for dead by its group, .* create it anew"
        ):
            theirs.check()
    own.check()
    assert own.value is not None
    assert own.value.done()


def test_who_joins_when_this_worker_is_cut_off_is_nobody_to_it(books: Books) -> None:
    books[0].cut_off()
    books[0].joined(7)
    assert 7 not in books[0]._references.peers
    books[0].take(7, 1, [])
    assert not books[0].has_work()
