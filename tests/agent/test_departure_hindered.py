"""What keeps a worker from leaving: others who do not come, a store that does not answer, work of its own."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from types import SimpleNamespace

import pytest
from departure_stage import NAMES, Board, Unmoved, Worker, leave_alone, way_in

from farcall.agent import departure
from farcall.agent.departure import say_farewell, wait_for_everybody
from farcall.errors import RendezvousError, RendezvousTimeoutError, ShutdownError
from farcall.sleeping import FOREVER


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


def test_what_others_have_called_meanwhile_ends_though_one_is_lost(clock: Clock) -> None:
    """They have not called the lost one, and need not hear of it."""
    store = Unmoved(RendezvousError("worker 'cem' is gone"))
    worker = Worker(0, 3)
    ends_at = clock.now + 3.0
    looks = 0

    def is_idle() -> bool:
        nonlocal looks
        looks += 1
        return looks == 1 or clock.now >= ends_at  # idle as it came, and then called

    worker.is_idle = is_idle  # type: ignore[method-assign]
    with pytest.raises(ShutdownError, match="'cem' is gone"):
        wait_for_everybody(worker, way_in(store, 0, 3), FOREVER)
    assert clock.now >= ends_at
    looks, ends_at = 0, FOREVER
    with pytest.raises(ShutdownError, match="'cem' is gone"):
        wait_for_everybody(worker, way_in(store, 0, 3), clock.now + 5.0)


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
