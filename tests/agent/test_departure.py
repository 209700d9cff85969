"""When everybody may go: rounds over a made-up store, and a group in which work wanders about while they are held."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import pytest
from departure_stage import Board, Unmoved, Worker, leave_alone, way_in
from hypothesis import given, settings
from hypothesis import strategies as st

from farcall.agent import departure
from farcall.agent.departure import say_farewell, wait_for_everybody
from farcall.errors import RendezvousTimeoutError, ShutdownError
from farcall.rendezvous import Rendezvous
from farcall.sleeping import FOREVER
from interleaving import Schedule, explore


def test_a_quiet_worker_alone_goes_after_two_rounds() -> None:
    board, worker = Board(), Worker(0, 1)
    worker.calls = 7
    leave_alone(worker, board)
    assert board.rounds == [[7], [7]]


def test_a_call_between_two_rounds_makes_another() -> None:
    board, worker = Board(), Worker(0, 1)

    def call_in_the_first_rounds(number: int) -> None:
        worker.calls += number < 3

    board.on_collect = call_in_the_first_rounds
    leave_alone(worker, board)
    assert board.rounds == [[0], [1], [2], [3], [3]]


def test_a_worker_waits_until_it_is_idle_before_each_round() -> None:
    board, worker = Board(), Worker(0, 1)
    looks = 0

    def is_idle() -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:
            assert board.rounds == []
            worker.calls += 1
        if looks == 5:
            assert board.rounds == [[1]]
            worker.calls += 1
        return looks not in (1, 2, 4, 5)

    worker.is_idle = is_idle  # type: ignore[method-assign]
    leave_alone(worker, board)
    assert board.rounds == [[1], [2], [2]]


@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), max_size=5))
@settings(deadline=None, max_examples=25)
def test_all_leave_in_one_round_the_second_in_which_nothing_was_new(made: list[list[int]]) -> None:
    """`made[n][rank]`: the calls that a worker makes in round n, after it has said its number."""
    board = Board()
    workers = [Worker(rank, 3) for rank in range(3)]

    class OwnBoard:
        def __init__(self, worker: Worker) -> None:
            self.set = board.set
            self.within = board.within
            self.worker = worker

        def collect(self, prefix: str, count: int, timeout: float) -> Mapping[str, bytes]:
            number = int(prefix.split("/")[1])
            if number < len(made):
                self.worker.calls += made[number][self.worker.info.id]
            return board.collect(prefix, count, timeout)

    with ThreadPoolExecutor(3) as pool:
        leaving = [
            pool.submit(wait_for_everybody, worker, way_in(OwnBoard(worker), worker.info.id, 3), FOREVER)
            for worker in workers
        ]
        for each in leaving:
            each.result()
    quiet = next((number for number, calls in enumerate(made) if not any(calls)), len(made))
    assert len(board.rounds) == quiet + 2
    assert all(len(said) == 3 for said in board.rounds)
    assert board.rounds[-1] == board.rounds[-2]


# Once all may go, all say farewell, so that nobody who is still here takes one who goes for lost.


def test_a_farewell_is_one_round_of_its_own() -> None:
    board, worker = Board(), Worker(0, 1)
    leave_alone(worker, board)
    worker.calls = 1  # what comes so late is not waited for
    say_farewell(worker, way_in(board, 0, 1), FOREVER)
    assert board.rounds == [[0], [0]]
    assert list(board.under("farewell/")) == ["farewell/0"]
    assert board.timeouts[-1] < FOREVER


def test_a_farewell_asks_nobody_whether_it_is_idle() -> None:
    """What was quiet is quiet; only the report of what is left was written since."""
    worker = Worker(0, 1)
    worker.busy = 1
    say_farewell(worker, way_in(Board(), 0, 1), FOREVER)


def test_nobody_is_gone_before_all_have_said_farewell() -> None:
    board = Board()
    workers = [Worker(rank, 3) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        first = [pool.submit(say_farewell, workers[rank], way_in(board, rank, 3), FOREVER) for rank in (0, 1)]
        assert not any(each.done() for each in first)
        pool.submit(say_farewell, workers[2], way_in(board, 2, 3), FOREVER).result(30)
        for each in first:
            each.result(30)
    assert len(board.under("farewell/")) == 3


def test_a_farewell_names_who_did_not_come() -> None:
    store = Unmoved(RendezvousTimeoutError("late", ("departure/1/1", "farewell/0", "farewell/2")))
    with pytest.raises(ShutdownError, match=r"but 'bob', 'dai' did not come in time"):
        say_farewell(Worker(0, 4), way_in(store, 0, 4), monotonic() + 5)
    (timeout,) = store.timeouts
    assert 0 < timeout <= 5


# A group in which one piece of work wanders from worker to worker, over every interleaving with the rounds.


class Watched(Worker):
    """A worker that is asked whether it is idle until it is."""

    schedule: Schedule

    def is_idle(self) -> bool:
        self.schedule.step(super().is_idle, "waiting to be idle")
        return True

    def calls_started(self) -> int:
        self.schedule.step()
        return super().calls_started()


class CountsNothing(Watched):
    """Planted: believes that being idle is enough."""

    def calls_started(self) -> int:
        return 0


class NeverBusy(Watched):
    """Planted: does not wait for what runs here."""

    def is_idle(self) -> bool:
        return True


def after_one_round(leaver: Worker, rendezvous: Rendezvous, deadline: float) -> None:
    """Planted: everybody was idle once."""
    departure._wait_until_idle(leaver, rendezvous, "departure/0/", deadline)
    departure._hear_all(leaver, rendezvous, "departure/0/", deadline)


def wandering(
    path: tuple[int, ...],
    new_worker: Callable[[int, int], Watched] = Watched,
    leave: Callable[[Worker, Rendezvous, float], None] = wait_for_everybody,
) -> Callable[[Schedule], Any]:
    """A function at each worker of the path calls the next one and ends: each is busy before the one before is idle."""

    def scenario(schedule: Schedule) -> Any:
        workers = [new_worker(rank, 2) for rank in range(2)]
        workers[path[0]].busy = 1
        board = Board(lambda heard: schedule.step(heard, "hearing the others"))
        wandered: list[int] = []

        def go(worker: Watched) -> None:
            worker.schedule = schedule
            leave(worker, way_in(board, worker.info.id, 2), FOREVER)
            assert len(wandered) == len(path), "left while there was work"

        def work() -> None:
            for here, there in itertools.pairwise(path):
                workers[here].calls += 1
                schedule.step()
                workers[there].busy += 1
                schedule.step()
                workers[here].busy -= 1
                wandered.append(here)
                schedule.step()
            wandered.append(path[-1])
            workers[path[-1]].busy -= 1

        return [work, lambda: go(workers[0]), lambda: go(workers[1])], lambda: None

    return scenario


@pytest.mark.parametrize(("path", "preemptions"), [((0,), 2), ((0, 1), 1), ((0, 0, 1), 1), ((1, 0, 1), 2)])
def test_nobody_leaves_while_work_wanders_about(path: tuple[int, ...], preemptions: int) -> None:
    assert explore(wandering(path), (), preemptions) > 10


@pytest.mark.parametrize(
    "planted",
    [
        wandering((1, 0, 1), CountsNothing),
        wandering((0,), NeverBusy),
        wandering((1, 0, 1), leave=after_one_round),
    ],
    ids=["counts nothing", "never busy", "after one round"],
)
def test_a_planted_bug_is_caught(planted: Callable[[Schedule], Any]) -> None:
    with pytest.raises(AssertionError, match="left while there was work"):
        explore(planted, (), preemptions=2)
