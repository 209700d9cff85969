"""Rules of a map that the workers of a real group cannot show: a worker that is lost and still listed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from farcall import Future, UnknownWorkerError, WorkerLostError
from farcall.many.map_stream import MapStream, MapTargets


class Members:
    """Stands in for an agent: its group never changes."""

    def watch_members(self, watcher: Callable[..., object]) -> None:
        pass

    def unwatch_members(self, watcher: Callable[..., object]) -> None:
        pass


class Targets(MapTargets[str]):
    """Two workers, of which `a` is lost and stays in the list, as until its heartbeats are missed."""

    def __init__(self, is_reached: bool, names: tuple[str, ...] = ("a", "b")) -> None:
        agent: Any = Members()
        super().__init__(agent)
        self.sent: list[tuple[str, int]] = []
        self._is_reached = is_reached
        self._names = names

    def present(self) -> list[str]:
        return list(self._names)

    def name_of(self, target: str) -> str:
        return target

    def send(self, target: str, item: int) -> Future[int]:
        self.sent.append((target, item))
        error = WorkerLostError("worker 'a' was lost", "a")
        if target == "a" and not self._is_reached:
            raise error
        future: Future[int] = Future()
        if target == "a":
            future.set_exception(error)
        else:
            future.set_result(item)
        return future


@pytest.mark.parametrize("retries", [False, True])
def test_a_lost_worker_gets_no_more_items(retries: bool) -> None:
    targets = Targets(is_reached=True)
    stream: MapStream[int, int] = MapStream(targets, range(8), 1, retries)
    errors = {outcome.item: type(outcome.error) for outcome in stream.outcomes() if outcome.error}
    assert errors == ({} if retries else {0: WorkerLostError})
    assert [item for target, item in targets.sent if target == "a"] == [0]


def test_an_item_that_was_not_sent_goes_to_another_worker() -> None:
    targets = Targets(is_reached=False)
    assert list(MapStream(targets, range(4), 1, False)) == [0, 1, 2, 3]
    assert targets.sent[:2] == [("a", 0), ("b", 0)]


def test_items_that_no_worker_can_be_sent_fail() -> None:
    stream: MapStream[int, int] = MapStream(Targets(is_reached=False, names=("a",)), range(4), 1, False)
    outcomes = stream.outcomes()
    outcome = next(outcomes)
    assert (outcome.item, type(outcome.error), outcome.worker) == (0, WorkerLostError, "a")
    with pytest.raises(UnknownWorkerError, match="is left for the other items"):
        next(outcomes)
