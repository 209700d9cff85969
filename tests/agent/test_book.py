"""The book of references: values made here and there, handles from hand to hand, the inventory, and the end."""

from __future__ import annotations

import gc
import re
import weakref

import pytest
from book_stage import WAY, Books, Sensitive, made

from farcall.agent.book import ReferenceBook
from farcall.agent.lending import LENT_FOR
from farcall.agent.values import Value
from farcall.errors import ReferenceRefused, UsageError
from farcall.serialization import encode_failure

pytestmark = pytest.mark.timeout(20)


def test_a_value_made_here(books: Books) -> None:
    handle = books[0].own("tea")
    assert handle.confirmed
    assert handle.value is books[0].value(handle.reference)
    assert handle.value.value() == "tea"
    assert re.search(r"test_book\.py:\d+$", handle.made_at)
    reference = handle.reference
    del handle
    assert books.left() == {}
    released = books[0].value(reference)
    with pytest.raises(ReferenceRefused, match=r"worker 'w0' does not own reference 0:1 owned by 0 any more"):
        released.value()
    assert books.left() == {}, "asking for it has made no entry"


def test_a_remote_call_is_confirmed_by_the_first_word_of_the_owner(books: Books) -> None:
    handle, (value, carried) = books.remote(0, 1)
    assert (handle.confirmed, carried, value.done()) == (False, (), False)
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
    assert len(books[0].dropped) == 1
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
    assert [owned.type for owned in books[0].inventory().owned] == ["failed: book_stage.Sensitive: seven"]
    assert made == []
    with pytest.raises(Sensitive):
        there.value()
    assert made == ["seven"]
    assert handle.confirmed


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


def test_what_a_function_uses_and_drops_is_never_asked_for(books: Books) -> None:
    handle, _ = books.remote(0, 1)
    books.deliver()
    (lent,) = books.pass_on(0, 2, handle)
    reference = handle.reference
    del handle
    gc.collect()
    books[0].work_off()
    assert books[0].mailboxes.outbox(1) is None, "it keeps the value for the one to whom it is lent"
    books[2].work_off()
    assert books[2].has_work(), "its owner is to be asked if it is kept"
    assert not books[2].is_quiet()
    del lent
    gc.collect()
    books[2].work_off()
    assert books[2].mailboxes.outbox(1) is None, "the owner has never heard of it"
    assert not books[2].has_work() or books[2].mailboxes.outboxes
    assert not books[1].value(reference).done()
    assert books.left() == {}


def test_what_is_kept_for_a_moment_is_asked_for_and_confirmed(books: Books) -> None:
    handle, _ = books.remote(0, 1)
    (lent,) = books.pass_on(0, 2, handle)
    del handle
    for _ in range(LENT_FOR):
        books[2].work_off()
        assert 1 not in books[2].mailboxes.outboxes
    books.moment(2)
    assert 1 in books[2].mailboxes.outboxes
    books.deliver()
    assert lent.confirmed
    assert not books[2].has_work()
    del lent
    assert books.left() == {}
