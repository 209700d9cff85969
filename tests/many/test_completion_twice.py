"""`as_completed` and wakers that run twice, as after an interrupt."""

from __future__ import annotations

from farcall import Future, as_completed
from farcall.futures import Watcher


class Repeating(Future[int]):
    """A future that runs its wakers twice, as one whose completion was interrupted."""

    def watch(self, watcher: Watcher, *, waker: bool, attended: bool = False) -> None:
        def twice(future: Future[int]) -> None:
            watcher(future)
            watcher(future)

        super().watch(twice, waker=waker, attended=attended)


def test_a_future_comes_once() -> None:
    future = Repeating()
    futures = as_completed([future])
    future.set_result(3)
    assert list(futures) == [future]
