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
from farcall.errors import OwnerLost, ProtocolError, ReferenceRefused, UsageError
from farcall.futures import DONE, Future
from farcall.protocol.control import pack_control
from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_messages import Carried, ForkAccepted, UserDeleted

pytestmark = pytest.mark.timeout(20)

# Faults of the code that these tests have found.
UNPACKED = "call_remote uses up a number and a fork before it packs the message, and packing may fail"
EFFECTS = "control_received drops the effects of the messages before one that is refused"
NOT_SAID_AGAIN = "what comes twice is not acknowledged again, so that a lost acknowledgement is lost for good"
TOO_EARLY = "value() takes a value that is not yet created for one that was released"
HALF_LOST = "lost() lets the lock go between the delivery's loss and the protocol's: KeyError in between"
LATE_RELEASE = "_act pops a released value outside the lock, and may pop one that was created meanwhile"


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
        """A remote call: the creator's handle, and what the owner got: the future and the handles."""
        sent: list[Any] = []

        def frame(number: int, carried: list[Carried], reference: RRefId, fork: ForkId) -> list[Any]:
            sent.append((number, reference, fork, carried))
            return [b"frame"]

        handle, message = self[creator].call_remote(owner, passed, frame, WAY)
        assert message == [b"frame"]
        self.last_call = lambda: self[owner].create_requested(creator, *sent[0])
        return handle, self.last_call() if deliver else None

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


def value(content: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.settle(DONE, content)
    return future


def test_a_value_made_here(books: Books) -> None:
    handle = books[0].make(value("tea"))
    assert handle.confirmed
    assert handle.value is not None
    assert books[0].value(handle.reference).value() == "tea"
    assert re.search(r"test_book\.py:\d+$", handle.created_at)
    reference = handle.reference
    del handle
    assert books.left() == {}
    with pytest.raises(ReferenceRefused, match=r"worker 'w0' does not own reference 0:1 owned by 0 any more"):
        books[0].value(reference)


def test_a_remote_call_is_confirmed_by_the_first_word_of_the_owner(books: Books) -> None:
    handle, (future, carried) = books.remote(0, 1)
    assert (handle.confirmed, carried, future.done()) == (False, [], False)
    books.deliver()
    assert handle.confirmed
    assert books[1].value(handle.reference) is future
    del handle, future
    assert books.left() == {}


def test_a_remote_call_that_came_twice_is_taken_once(books: Books) -> None:
    handle, _ = books.remote(0, 1)
    assert books.last_call() is None
    del handle
    assert books.left() == {}


def test_handles_that_came_twice_are_taken_once(books: Books) -> None:
    handle = books[0].make(value("tea"))
    number, carried = books[0].pass_on([handle], 1, WAY)
    taken = books[1].take(0, number, carried)
    assert taken is not None
    assert books[1].take(0, number, carried) is None
    assert [one.reference for one in taken] == [handle.reference]
    del handle, taken
    assert books.left() == {}


def test_from_hand_to_hand_and_back(books: Books) -> None:
    first, (future, _) = books.remote(0, 1)
    (second,) = books.pass_on(0, 2, first)
    assert not second.confirmed
    (third,) = books.pass_on(2, 1, second)  # to its owner
    assert third.confirmed
    assert third.value is future
    (fourth,) = books.pass_on(1, 0, third)  # from its owner
    assert fourth.confirmed
    del first
    books.deliver()
    assert second.confirmed
    assert set(books[1].inventory().owned[0].holders) == {"w0", "w2"}
    future.settle(DONE, "tea")
    del second, third
    books.deliver()
    assert books[1].value(fourth.reference).value() == "tea"
    del fourth, future
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


def test_values_are_released_outside_the_lock(books: Books) -> None:
    locked: list[bool] = []

    class Value:
        def __del__(self) -> None:
            locked.append(books[0]._lock.locked())

    handle = books[0].make(value(Value()))
    del handle
    assert books.left() == {}
    assert locked == [False]


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
    good = books[0].make(value("tea"))
    books[0].lost(1)
    with pytest.raises(OwnerLost, match="worker 'w1', who owned reference 0:1 owned by 1, was lost") as caught:
        books[0].pass_on([good, bad], 2, WAY)
    assert caught.value.worker == "w1"
    with pytest.raises(OwnerLost):
        books[0].call_remote(2, [good, bad], lambda *_: [b""], WAY)
    assert books[0].inventory().owned[0].holders == ()
    assert books[0].is_quiet()


def test_a_message_that_cannot_be_packed_leaves_nothing_behind(books: Books) -> None:
    """Its number is never sent, so no message after it could ever be acknowledged."""
    handle = books[0].make(value("tea"))

    def refuse(*_: Any) -> Any:
        raise ProtocolError("too many buffers")

    with pytest.raises(ProtocolError, match="too many"):
        books[0].call_remote(1, [handle], refuse, WAY)
    del handle
    assert books.left() == {}


def test_a_message_that_is_none_is_refused(books: Books) -> None:
    with pytest.raises(ProtocolError):
        books[0].control_received(1, b"noise")
    with pytest.raises(ProtocolError, match="the last one sent is 0"):
        books[0].control_received(1, pack_control(5, []))
    with pytest.raises(ProtocolError, match="gave up"):
        books[0].control_received(1, pack_control(0, [(1, UserDeleted(RRefId(0, 1, 1), ForkId(1, 1)))]))
    assert books[0]._references.is_empty()


def test_what_came_before_a_message_that_is_none_is_done(books: Books) -> None:
    handle, _ = books.remote(0, 1)
    books.posted.clear()
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


def test_an_acknowledgement_that_was_lost_is_said_again(books: Books) -> None:
    """What arrives a second time shows that its sender does not know that it came the first time."""
    handle = books[0].make(value("tea"))
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
    owned = books[0].make(value("tea"))
    passed = books.pass_on(0, 1, owned)
    theirs, _ = books.remote(0, 1)
    del owned
    gc.collect()
    books[0].work_off()
    books[0].lost(1)
    books[0].lost(1)
    assert books[0]._references.is_empty()
    assert isinstance(theirs.error, OwnerLost)
    assert books[0]._values == {}
    assert books[0].is_quiet()
    assert books[0].take(1, 9, []) is None
    assert books[0].outbox(1) is None
    assert passed


def test_to_a_lost_worker_nothing_is_passed(books: Books) -> None:
    handle = books[0].make(value("tea"))
    books[0].lost(1)
    assert books[0].pass_on([handle], 1, WAY) == (0, [])
    there, message = books[0].call_remote(1, [handle], lambda *_: [b"frame"], WAY)
    assert message == []
    assert isinstance(there.error, OwnerLost)
    assert books[0].is_quiet()


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
    assert isinstance(child.error, ReferenceRefused)
    assert "passed on by a worker that died" in str(child.error)
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
    future, _ = books.last_call()
    assert future is waited_for
    assert passed


# -- Threads, where the lock is free between two steps


class BetweenSteps(ReferenceBook):
    """Does something of another thread's between the decision and the deed."""

    before_acting: Callable[[], object] | None = None
    before_losing: Callable[[], object] | None = None

    def _act(self, effects: Any) -> None:
        hook, self.before_acting = self.before_acting, None
        if hook is not None:
            hook()
        super()._act(effects)

    def _handle(self, events: Any) -> None:
        hook, self.before_losing = self.before_losing, None
        if hook is not None:
            hook()
        super()._handle(events)


@pytest.mark.parametrize("way", ["pass_on", "call_remote", "drop"])
def test_a_worker_may_be_lost_at_any_moment(way: str) -> None:
    books = Books(kind=BetweenSteps)
    book = books[0]
    assert isinstance(book, BetweenSteps)
    own = book.make(value("tea"))
    theirs, _ = books.remote(0, 1)
    books.deliver()
    if way == "drop":
        theirs = None  # type: ignore[assignment]
        gc.collect()
    steps: dict[str, Callable[[], object]] = {
        "pass_on": lambda: book.pass_on([own], 1, WAY),
        "call_remote": lambda: book.call_remote(1, [], lambda *_: [b"frame"], WAY),
        "drop": book.work_off,
    }
    book.before_losing = steps[way]
    book.lost(1)
    gc.collect()
    book.work_off()
    assert book.is_quiet()
    assert theirs is None or isinstance(theirs.error, OwnerLost)


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
    future, _ = created[0]
    assert book.value(handle.reference) is future


# -- The end


def test_giving_up_all_handles(books: Books) -> None:
    theirs, _ = books.remote(0, 1)
    own = books[0].make(value("tea"))
    books.deliver()
    books[0].give_up_handles("it is over")
    assert isinstance(theirs.error, UsageError)
    assert str(theirs.error) == "it is over"
    assert own.error is None
    books.deliver()
    assert books[1]._references.is_empty()
    books[0].give_up_handles("again")
    del theirs, own
    assert books.left() == {}


def test_clearing_forgets_everything(books: Books) -> None:
    class Value:
        pass

    content = Value()
    released = weakref.ref(content)
    handle = books[0].make(value(content))
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
    def work() -> None:
        for _ in range(100):
            own = books[0].make(value("tea"))
            handle, _ = books.remote(0, 1, own)
            books.pass_on(0, 1, handle, own)

    threads = [threading.Thread(target=work) for _ in range(4)]
    books.remote = _locked(books.remote)  # type: ignore[method-assign]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert books.left() == {}


def _locked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`last_call` belongs to one thread at a time."""
    lock = threading.Lock()

    def locked(*args: Any) -> Any:
        with lock:
            return function(*args)

    return locked
