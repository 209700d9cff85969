"""Many futures at once: waiting for all of them, having one future for all, or waiting for all that a block makes.

Whoever waits for the future of `collect_all` drives each of its members in turn, so that no thread has to be woken.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Final

from farcall.futures import DONE, Callbacks, Followed, Future
from farcall.sleeping import FOREVER


class _All:
    """The source of `collect_all`: whoever waits for all drives each in turn."""

    def __init__(self, futures: list[Future[Any]]) -> None:
        self._futures = futures

    def drive(self, future: Future[Any], deadline: float) -> None:
        for each in self._futures:
            each.block(deadline)

    def attend(self) -> None:
        for each in self._futures:
            if each._source is not None:
                each._source.attend()


def _checked(futures: Iterable[Future[Any]]) -> list[Future[Any]]:
    all_futures = list(futures)
    for future in all_futures:
        if not isinstance(future, Future):
            raise TypeError(f"collect_all and wait_all take farcall futures, as rpc_async gives them, not {future!r}")
    return all_futures


def collect_all(futures: Iterable[Future[Any]]) -> Future[list[Future[Any]]]:
    """A future that is done, with the list of all these futures, when all of them are done, failed or not."""
    all_futures = _checked(futures)
    collected: Future[list[Future[Any]]] = Future()
    collected._source = _All(all_futures)
    if not all_futures:
        collected.set_result([])
        return collected
    remaining = set(map(id, all_futures))
    lock = threading.Lock()

    def one_done(future: Future[Any]) -> Callbacks | None:
        with lock:
            remaining.discard(id(future))  # not counted: a waker may run twice
            if remaining:
                return None
        callbacks = collected.wake() if collected._state else collected.settle(DONE, all_futures)
        return [lambda _: Followed(collected, callbacks)] if callbacks else None

    for future in all_futures:
        future.watch(one_done, waker=True, attended=True)
    return collected


def wait_all(futures: Iterable[Future[Any]]) -> list[Any]:
    """The results of all, in their order. Raises the first error in that order, when all are done."""
    all_futures = _checked(futures)
    for future in all_futures:
        if not future._state:
            future.block(FOREVER)
    for future in all_futures:
        if future._state != DONE:
            future._load()  # all failures are seen, though only one can be raised
    return [future.value() for future in all_futures]


class AwaitedTogether(dict[int, list[Future[Any]]]):
    """The futures that `_wait_all` blocks have to wait for, by thread. Empty, and so false, while there is no block."""

    def note(self, future: Future[Any]) -> None:
        """A call was made; in the midst of a block if its thread is in here."""
        futures = self.get(get_ident())
        if futures is not None:
            futures.append(future)


awaited_together: Final = AwaitedTogether()


@contextmanager
def _wait_all() -> Iterator[None]:
    """Around `rpc_async`: at its end, waits for all futures of calls that this thread has made in it.

    Raises the first error of theirs, in the order of the calls, when all are done; what the block itself raises comes
    first. Blocks may stand in each other, and each waits for its own.
    """
    thread = get_ident()
    outer = awaited_together.get(thread)
    futures: list[Future[Any]] = []
    awaited_together[thread] = futures
    try:
        yield
    except Exception:
        for future in futures:
            future.exception()  # is seen, though another error is raised
        raise
    finally:
        if outer is None:
            del awaited_together[thread]
        else:
            awaited_together[thread] = outer
    wait_all(futures)
