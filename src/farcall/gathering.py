"""Many futures at once: waiting for all of them, or having one future for all.

Whoever waits for the future of `collect_all` drives each of its members in turn, so that no thread has to be woken.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

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
