from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from farcall.bench import timing
from farcall.bench.system import keep_in_flight


class Clock:
    """Time goes on only when something is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def nanoseconds(self) -> float:
        return self.now * 1e9

    def seconds(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", clock.nanoseconds)
    monkeypatch.setattr(time, "perf_counter", clock.seconds)
    return clock


def calls_that_take(clock: Clock, seconds: Callable[[int], float]) -> tuple[Callable[[], None], list[int]]:
    made = [0]

    def call() -> None:
        clock.now += seconds(made[0])
        made[0] += 1

    return call, made


def test_each_call_is_timed_and_the_warm_up_is_not(clock: Clock) -> None:
    call, made = calls_that_take(clock, lambda number: 1.0 if number < 2 else 1e-6 * (number - 1))
    found = timing.time_each(call, calls=5, warmup=2)
    assert made == [7]
    assert found == {"p50_us": pytest.approx(3.0), "p99_us": pytest.approx(5.0), "mean_us": pytest.approx(3.0)}


def test_one_slow_call_shows_in_p99_and_mean_but_not_in_p50(clock: Clock) -> None:
    call, _ = calls_that_take(clock, lambda number: 0.5e-3 if number == 7 else 1e-6)
    found = timing.time_each(call, calls=50, warmup=0)
    assert found == {"p50_us": pytest.approx(1.0), "p99_us": pytest.approx(500.0), "mean_us": pytest.approx(10.98)}


def test_a_pause_before_each_call_is_not_timed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    call, made = calls_that_take(clock, lambda _: 1e-6)
    found = timing.time_each(call, calls=4, warmup=2, pause=0.5)
    assert (made, slept) == ([6], [0.5] * 4)
    assert found["mean_us"] == pytest.approx(1.0)


def test_kinds_are_mixed_in_the_order_of_the_seed_and_each_has_its_own_times(clock: Clock) -> None:
    made: list[str] = []

    def kind(name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            made.append(name)
            clock.now += seconds

        return call

    kinds = {"a": kind("a", 1e-6), "b": kind("b", 5e-6)}
    orders = []
    for seed in (1, 1, 2):
        made.clear()
        found = timing.time_mixed(kinds, calls=50, warmup=10, seed=seed)
        orders.append(made[:])
        assert {name: values["mean_us"] for name, values in found.items()} == pytest.approx({"a": 1.0, "b": 5.0})
    assert orders[0] == orders[1] != orders[2]
    for order in orders:
        assert order[:20].count("a") == 10  # the warm-up
        assert order[20:].count("a") == order[20:].count("b") == 50
        assert order[20:70] != ["a"] * 50


def test_a_slow_point_ends_with_its_time_but_has_a_few_calls(clock: Clock) -> None:
    call, made = calls_that_take(clock, lambda _: 10.0)
    assert timing.time_each(call, calls=1000, warmup=100, seconds=2.0)["p50_us"] == pytest.approx(10e6)
    assert made == [1 + timing.MIN_CALLS]


def test_awaited_calls_are_timed_alike(clock: Clock) -> None:
    call, made = calls_that_take(clock, lambda _: 0.5)

    async def awaited() -> None:
        call()

    found = asyncio.run(timing.time_each_awaited(awaited, calls=100, warmup=10, seconds=2.0))
    assert found["p50_us"] == pytest.approx(500_000)
    assert made == [1 + 4]


@pytest.mark.parametrize(("seconds", "numbers"), [(1.0, [50, 100]), (100.0, [50, 1000])])
def test_a_rate_is_taken_over_about_the_wanted_time(clock: Clock, seconds: float, numbers: list[int]) -> None:
    asked: list[int] = []

    def run(number: int) -> None:
        asked.append(number)
        clock.now += number / 100

    assert timing.rate(run, 1000, seconds) == pytest.approx(100.0)
    assert asked == numbers


def test_percentile_is_by_nearest_rank() -> None:
    assert timing.percentile([float(number) for number in range(100)], 0.99) == 99.0
    assert timing.percentile([3.0], 0.99) == 3.0


@pytest.mark.parametrize(("count", "window", "most"), [(10, 3, 3), (2, 8, 2), (5, 1, 1)])
def test_so_many_are_under_way_and_the_oldest_is_finished_first(count: int, window: int, most: int) -> None:
    started: list[int] = []
    finished: list[int] = []
    seen = 0

    def start() -> int:
        nonlocal seen
        started.append(len(started))
        seen = max(seen, len(started) - len(finished))
        return started[-1]

    keep_in_flight(count, window, start, finished.append)
    assert finished == list(range(count))
    assert seen == most


def test_all_threads_call_at_once_and_their_calls_are_counted() -> None:
    together = threading.Barrier(3)
    made: list[int] = []

    def call() -> None:
        me = threading.get_ident()
        if threading.current_thread() is not threading.main_thread():
            if me not in made:
                together.wait(20)  # none gets past its first call before all three are there
            made.append(me)

    found = timing.time_threads(call, threads=3, seconds=0.05)
    assert len(set(made)) == 3
    assert 0 < found["calls_per_s"] <= len(made) / 0.05
    assert 0 < found["p50_us"] <= found["p99_us"]


def test_a_run_of_threads_is_as_short_as_asked_for() -> None:
    made: list[int] = []

    def call() -> None:
        made.append(threading.get_ident())

    found = timing.time_threads(call, threads=4, calls=5)
    assert len(made) == 1 + 4 * 5  # the first one is made before
    assert set(found) == {"calls_per_s", "p50_us", "p99_us", "mean_us"}


def test_what_a_call_of_a_thread_raises_is_raised() -> None:
    def call() -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        timing.time_threads(call, threads=2, seconds=10.0)


def test_calls_are_timed_while_the_load_goes_on() -> None:
    loaded = threading.Semaphore(0)
    loads: list[int] = []

    def load() -> None:
        loads.append(threading.get_ident())
        loaded.release()

    def call() -> None:
        assert loaded.acquire(timeout=20)  # so there is a load for each call at least

    found = timing.time_beside(call, load, seconds=0.02)
    assert 0 < found["p50_us"] <= found["p99_us"]
    assert set(loads[1:]) == {loads[-1]} != {threading.get_ident()}
    assert len(loads) > timing.MIN_CALLS
    assert not any(thread.name == "load" for thread in threading.enumerate())


def test_a_load_that_fails_ends_the_timing() -> None:
    def load() -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        timing.time_beside(lambda: None, load, seconds=60.0)
