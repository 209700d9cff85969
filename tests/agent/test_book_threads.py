"""The book of references used by several threads, which come between any two of its steps."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from book_stage import WAYS_TO_PASS, Books, error_of

from farcall.agent.book import ReferenceBook
from farcall.agent.handle import Handle
from farcall.errors import OwnerLost, WorkerLost
from farcall.protocol.ids import ForkId, RRefId
from farcall.protocol.reference_messages import Carried

pytestmark = pytest.mark.timeout(20)


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
