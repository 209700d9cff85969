"""When everybody may go: rounds over a made-up store, and a group in which work wanders about while they are held."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farcall.agent import departure
from farcall.agent.departure import say_farewell, wait_for_everybody
from farcall.errors import RendezvousError, RendezvousTimeoutError, ShutdownError
from farcall.protocol.ids import WorkerInfo
from farcall.rendezvous import Rendezvous
from farcall.sleeping import FOREVER
from interleaving import Schedule, explore

NAMES = ("ann", "bob", "cem", "dai")


class Worker:
    """One that wants to leave: idle, unless it is told otherwise."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.info = WorkerInfo(NAMES[rank], rank)
        self._world_size = world_size
        self.calls = 0
        self.busy = 0  # functions that run here
        self.gone: set[int] = set()  # lost, or left
        self.missed: list[str] = []  # lost
        self.expelled = False

    def is_expelled(self) -> bool:
        return self.expelled

    def is_idle(self) -> bool:
        return not self.busy

    def under_way(self) -> str:
        return "a walk"

    def calls_started(self) -> int:
        return self.calls

    def everybody(self) -> list[tuple[WorkerInfo, bool]]:
        return [(WorkerInfo(NAMES[rank], rank), rank in self.gone) for rank in range(self._world_size)]

    def lost(self) -> list[str]:
        return self.missed


class Board:
    """A store that only gathers. `heard` are the values of each round, `on_collect` what happens in it."""

    def __init__(self, wait: Callable[[Callable[[], bool]], None] | None = None) -> None:
        self.values: dict[str, bytes] = {}
        self.timeouts: list[float] = []
        self.on_collect: Callable[[int], None] = lambda number: None
        self._changed = threading.Condition()
        self._wait = wait

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            assert key not in self.values, "said twice in one round"
            self.values[key] = value
            self._changed.notify_all()

    def within(self, seconds: float) -> AbstractContextManager[None]:
        return nullcontext()

    def under(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in self.values.items() if key.startswith(prefix)}

    def collect(self, prefix: str, count: int, timeout: float) -> Mapping[str, bytes]:
        self.timeouts.append(timeout)
        if prefix.startswith("departure/"):
            self.on_collect(int(prefix.split("/")[1]))
        if self._wait is not None:
            self._wait(lambda: len(self.under(prefix)) == count)
        else:
            with self._changed:
                assert self._changed.wait_for(lambda: len(self.under(prefix)) == count, 30)
        return self.under(prefix)

    @property
    def rounds(self) -> list[list[int]]:
        """What was said in each round, by rank."""
        number = 0
        rounds = []
        while said := self.under(f"departure/{number}/"):
            rounds.append([int(said[key]) for key in sorted(said)])
            number += 1
        return rounds


def way_in(board: Any, rank: int, world_size: int) -> Rendezvous:
    return Rendezvous(store=board, rank=rank, world_size=world_size, host="127.0.0.1", group="g")


def leave_alone(worker: Worker, board: Any, deadline: float = FOREVER) -> None:
    wait_for_everybody(worker, way_in(board, 0, 1), deadline)


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


class Clock:
    """The time that passes in pauses, and in nothing else."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def wait(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(departure, "monotonic", lambda: clock.now)
    monkeypatch.setattr(departure, "threading", SimpleNamespace(Event=lambda: clock))
    return clock


# Who is missing


class Unmoved:
    """A store in which the others never come."""

    def __init__(self, error: RendezvousError) -> None:
        self.error = error
        self.timeouts: list[float] = []
        self.now = 0.0
        self.limits: list[float] = []
        self.after = lambda: None

    def within(self, seconds: float) -> AbstractContextManager[None]:
        self.limits.append(seconds)
        return nullcontext()

    def set(self, key: str, value: bytes) -> None:
        pass

    def collect(self, prefix: str, count: int, timeout: float) -> Mapping[str, bytes]:
        self.timeouts.append(timeout)
        self.now += timeout
        self.after()
        raise self.error


def test_those_who_did_not_come_are_named() -> None:
    present = ("departure/0/0", "departure/0/2", "departure/1/3", "join/1")
    store = Unmoved(RendezvousTimeoutError("late", present))
    with pytest.raises(ShutdownError) as missing:
        wait_for_everybody(Worker(0, 4), way_in(store, 0, 4), monotonic() + 5)
    assert str(missing.value) == (
        "worker 'ann' waited for the others to shut down, but 'bob', 'dai' did not come in time (shutdown() has not "
        "been called there, or functions still run there); everything is closed here now"
    )
    (timeout,) = store.timeouts
    assert 0 < timeout <= 5


def test_who_does_not_come_for_long_is_named_once_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Unmoved(RendezvousTimeoutError("late", ("departure/0/0",)))
    monkeypatch.setattr(departure, "monotonic", lambda: store.now)
    caplog.set_level("INFO", "farcall")
    with pytest.raises(ShutdownError, match="'bob' did not come in time"):
        wait_for_everybody(Worker(0, 2), way_in(store, 0, 2), 12.0)
    assert [record.levelname for record in caplog.records] == ["INFO"], "a server waits for hours, and all is well"
    assert caplog.messages == [
        "worker 'ann' waits in shutdown() for 'bob': shutdown() has not been called there, or functions still run there"
    ]
    assert store.timeouts == [departure.SILENCE, departure.SILENCE, 12.0 - 2 * departure.SILENCE]


def test_who_is_lost_is_not_waited_for() -> None:
    """A frozen one does not hang up on the store: only the group knows."""
    store = Unmoved(RendezvousTimeoutError("late", ("departure/0/0",)))
    worker = Worker(0, 3)
    store.after = lambda: worker.gone.add(2) if len(store.timeouts) == 3 else None
    with pytest.raises(ShutdownError) as lost:
        wait_for_everybody(worker, way_in(store, 0, 3), FOREVER)
    assert str(lost.value) == (
        f"worker 'ann' waited for the others to shut down, but {NAMES[2]!r} was lost before it came; "
        "everything is closed here now"
    )
    assert len(store.timeouts) == 3


def test_who_was_lost_before_is_not_even_looked_for() -> None:
    """Though it may have come back meanwhile, and have come: a group that has lost one is never together again."""
    board, worker = Board(), Worker(0, 2)
    worker.missed = ["bob"]
    for wait in (wait_for_everybody, lambda *args: departure.meet(*args, departure._DEPARTURE)):
        with pytest.raises(ShutdownError) as lost:
            wait(worker, way_in(board, 0, 2), FOREVER)
        assert str(lost.value) == (
            "worker 'ann' waited for the others to shut down, but 'bob' was lost before it came; "
            "everything is closed here now"
        )
    assert board.timeouts == []


def test_who_is_lost_when_all_may_go_is_no_reason_to_stay() -> None:
    board, worker = Board(), Worker(0, 1)
    worker.missed = ["bob"]
    say_farewell(worker, way_in(board, 0, 1), FOREVER)
    assert list(board.under("farewell/")) == ["farewell/0"]


class Frozen(Unmoved):
    """A store whose host is stopped: no word of it comes, whatever is asked."""

    def __init__(self, answers: int) -> None:
        super().__init__(RendezvousTimeoutError("the store in 'bob' does not answer"))
        self.answers = answers  # to `set`, before it was stopped

    def set(self, key: str, value: bytes) -> None:
        if not self.answers:
            self.now += self.limits[-1]
            self.after()
            raise self.error
        self.answers -= 1


@pytest.mark.parametrize("answers", [0, 1])
@pytest.mark.parametrize("timeout", [0.5, 2.0, 12.0])
def test_a_store_that_does_not_answer_ends_a_wait_a_second_after_its_time(
    monkeypatch: pytest.MonkeyPatch, answers: int, timeout: float
) -> None:
    store = Frozen(answers)
    monkeypatch.setattr(departure, "monotonic", lambda: store.now)
    with pytest.raises(ShutdownError) as silent:
        wait_for_everybody(Worker(0, 2), way_in(store, 0, 2), timeout)
    assert str(silent.value) == (
        "worker 'ann' could not wait for the others to shut down: the store in 'bob' does not answer; "
        "everything is closed here now"
    )
    assert max(store.limits) <= departure.SILENCE + 1
    assert timeout <= store.now <= timeout + 1.0


@pytest.mark.parametrize("answers", [0, 1])
def test_a_store_that_does_not_answer_is_asked_again_until_its_host_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answers: int
) -> None:
    store = Frozen(answers)
    monkeypatch.setattr(departure, "monotonic", lambda: store.now)
    worker = Worker(0, 2)

    def after() -> None:
        if len(store.limits) >= 9:  # the agent tells the store's client, which asks no more
            store.error = RendezvousError("the store in 'bob' is lost")
            worker.gone.add(1)

    store.after = after
    with pytest.raises(
        ShutdownError, match="could not wait for the others to shut down: the store in 'bob' is lost; e"
    ):
        wait_for_everybody(worker, way_in(store, 0, 2), FOREVER)
    assert caplog.messages == ["worker 'ann' waits in shutdown(): the store in 'bob' does not answer"]


def test_a_store_that_does_not_answer_is_not_asked_for_long_whether_the_others_wait(clock: Clock) -> None:
    worker, store = Worker(0, 2), Unmoved(RendezvousTimeoutError("the store in 'bob' does not answer"))
    worker.busy = 1
    with pytest.raises(ShutdownError, match="a walk"):
        wait_for_everybody(worker, way_in(store, 0, 2), 100 + 1.5 * departure.SILENCE)
    assert store.limits == [1.0]


TAKEN_FOR_DEAD = (
    "worker 'ann' was taken for dead by its group, and had nobody to wait for; everything is closed here now. "
    "After its shutdown, init_rpc() joins again"
)


def test_who_is_taken_for_dead_while_it_waits_for_the_others_hears_so() -> None:
    """The others have closed nothing: the store answers, and says that they are not there."""
    store = Unmoved(RendezvousTimeoutError("late", ("departure/0/0",)))
    worker = Worker(0, 2)

    def is_expelled_after_a_while() -> None:
        worker.expelled = len(store.timeouts) == 2

    store.after = is_expelled_after_a_while
    with pytest.raises(ShutdownError) as refused:
        wait_for_everybody(worker, way_in(store, 0, 2), FOREVER)
    assert str(refused.value) == TAKEN_FOR_DEAD
    assert len(store.timeouts) == 2


def test_those_who_come_late_are_heard_all_the_same() -> None:
    class Late(Board):
        def collect(self, prefix: str, count: int, timeout: float) -> Mapping[str, bytes]:
            if len(self.timeouts) == 0:
                self.timeouts.append(timeout)
                raise RendezvousTimeoutError("late", ())
            return super().collect(prefix, count, timeout)

    board = Late()
    leave_alone(Worker(0, 1), board)
    assert len(board.rounds) == 2
    assert board.timeouts == [departure.SILENCE] * 3, "it looks up now and then, and goes on"


def test_a_store_that_is_gone_is_said_to_be() -> None:
    store = Unmoved(RendezvousError("worker 'bob' died"))
    with pytest.raises(ShutdownError, match=r"worker 'ann' could not wait for the others .*: worker 'bob' died; every"):
        wait_for_everybody(Worker(0, 2), way_in(store, 0, 2), FOREVER)


def test_a_store_that_is_gone_before_anything_was_said() -> None:
    class Gone(Unmoved):
        def set(self, key: str, value: bytes) -> None:
            raise self.error

    with pytest.raises(ShutdownError, match="the store is gone"):
        leave_alone(Worker(0, 1), Gone(RendezvousError("the store is gone")))


def test_a_worker_that_does_not_become_idle_in_time_says_so(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(0, 1)
    worker.busy = 1
    with pytest.raises(
        ShutdownError,
        match=r"worker 'ann' shut down while .* under way here: a walk; .* though its caller .*longer tim",
    ):
        leave_alone(worker, Board(), deadline=103)
    assert clock.now == pytest.approx(103, abs=departure._LONGEST_PAUSE)
    assert clock.pauses[0] == departure._FIRST_PAUSE
    assert clock.pauses[-1] == departure._LONGEST_PAUSE
    assert sorted(clock.pauses) == clock.pauses
    assert caplog.messages == []


def test_who_is_taken_for_dead_while_it_is_not_idle_does_not_wait_until_it_is(clock: Clock) -> None:
    """What it waits for is what others have to say; they will not."""
    worker = Worker(0, 1)

    def is_idle() -> bool:
        worker.expelled = len(clock.pauses) == 3
        return False

    worker.is_idle = is_idle  # type: ignore[method-assign]
    with pytest.raises(ShutdownError) as refused:
        departure.wait_until_idle(worker, FOREVER)
    assert str(refused.value) == TAKEN_FOR_DEAD
    assert len(clock.pauses) == 4


def test_who_was_taken_for_dead_before_waits_for_nobody() -> None:
    store = Unmoved(RendezvousTimeoutError("late", ()))
    worker = Worker(0, 2)
    worker.expelled = True
    with pytest.raises(ShutdownError, match="was taken for dead"):
        wait_for_everybody(worker, way_in(store, 0, 2), FOREVER)
    assert store.timeouts == []


def test_what_keeps_a_worker_for_long_is_named_once_in_the_log(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(0, 1)
    worker.is_idle = lambda: clock.now > 100 + 4 * departure.SILENCE  # type: ignore[method-assign]
    leave_alone(worker, Board())
    assert caplog.messages == ["worker 'ann' waits in shutdown() for: a walk"]


def test_a_worker_that_serves_those_who_still_work_does_not_complain(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(0, 2)
    worker.is_idle = lambda: False  # type: ignore[method-assign]
    with pytest.raises(ShutdownError, match="a walk"):
        wait_for_everybody(worker, way_in(Unmoved(RendezvousTimeoutError("late", ())), 0, 2), 130)
    assert caplog.messages == []


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
