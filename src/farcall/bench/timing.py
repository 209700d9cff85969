"""Reads clocks: around single calls, or around many calls that are in flight at the same time.

A point ends after a number of calls or a time, whichever comes first. A few calls are made in any case, so that a slow
point has a median as well.
"""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from farcall.bench.system import Caller, ReferenceCaller

MIN_CALLS: Final = 3
"""How many calls are timed however long they take."""
NO_LIMIT: Final = float("inf")
"""The time limit, in seconds, of a measurement that only its number of calls ends."""
UNLIMITED: Final = sys.maxsize
"""The number of calls of a measurement that only its time ends."""


def percentile(values: list[float], share: float) -> float:
    """Returns the value below which `share` (0 to 1) of all values lie, by nearest rank: 0.99 for the 99th percentile.

    Raises `IndexError` if the list is empty. `share` is not checked.
    """
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def time_each(
    call: Callable[[], object], calls: int, warmup: int, seconds: float = NO_LIMIT, pause: float = 0.0
) -> dict[str, float]:
    """Times each call, after some calls that do not count.

    Args:
        call: What to time.
        calls: The largest number of timed calls, at least 1.
        warmup: The largest number of untimed calls that are made first; 0 for none.
        seconds: The time limit; by default none. The warm-up is limited to a tenth of it. `MIN_CALLS` calls are timed
            however long they take, unless `calls` is smaller.
        pause: How many seconds to sleep before each timed call; 0 for none. The sleep is not timed.

    Returns:
        The median, the 99th percentile and the mean in microseconds, as `p50_us`, `p99_us` and `mean_us`.

    Raises:
        Exception: What a call raises.
        StatisticsError: `calls` is 0.
    """
    clock = time.perf_counter_ns
    end = clock() + seconds * 1e8
    for _ in range(warmup):
        call()
        if clock() > end:
            break
    times: list[float] = []
    end = clock() + seconds * 1e9
    while len(times) < calls and (len(times) < MIN_CALLS or clock() < end):
        if pause:
            time.sleep(pause)
        start = clock()
        call()
        times.append((clock() - start) / 1000)
    return summarize(times)


def time_mixed(
    kinds: Mapping[str, Callable[[], object]], calls: int, warmup: int, seed: int
) -> dict[str, dict[str, float]]:
    """Times each call of several kinds in random order, after some calls of each kind that do not count.

    Args:
        kinds: What to time, by name. A single kind is simply called again and again; none gives an empty result.
        calls: How many calls of each kind to time, at least 1.
        warmup: How many untimed calls of each kind to make first; 0 for none.
        seed: The seed of the random order: the same seed gives the same order.

    Returns:
        For each kind, the median, the 99th percentile and the mean in microseconds, as `p50_us`, `p99_us` and
        `mean_us`.

    Raises:
        Exception: What a call raises.
        StatisticsError: `calls` is 0.
    """
    shuffle = random.Random(seed).shuffle
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    clock = time.perf_counter_ns
    for number in (warmup, calls):
        order = list(kinds) * number
        shuffle(order)
        times = {kind: [] for kind in kinds}
        for kind in order:
            call = kinds[kind]
            start = clock()
            call()
            times[kind].append((clock() - start) / 1000)
    return {kind: summarize(found) for kind, found in times.items()}


async def time_each_awaited(
    call: Callable[[], Awaitable[object]], calls: int, warmup: int, seconds: float = NO_LIMIT
) -> dict[str, float]:
    """Times each call of a coroutine function, after some calls that do not count.

    Runs inside the event loop, so that starting a loop is not timed.

    Args:
        call: What to time. Its result is awaited.
        calls: The largest number of timed calls, at least 1.
        warmup: The largest number of untimed calls that are made first; 0 for none.
        seconds: The time limit; by default none. The warm-up is limited to a tenth of it. `MIN_CALLS` calls are timed
            however long they take, unless `calls` is smaller.

    Returns:
        The median, the 99th percentile and the mean in microseconds, as `p50_us`, `p99_us` and `mean_us`.

    Raises:
        Exception: What a call raises.
        StatisticsError: `calls` is 0.
    """
    clock = time.perf_counter_ns
    end = clock() + seconds * 1e8
    for _ in range(warmup):
        await call()
        if clock() > end:
            break
    times: list[float] = []
    end = clock() + seconds * 1e9
    while len(times) < calls and (len(times) < MIN_CALLS or clock() < end):
        start = clock()
        await call()
        times.append((clock() - start) / 1000)
    return summarize(times)


def summarize(times: list[float]) -> dict[str, float]:
    """Returns the median, the 99th percentile and the mean of times, as `p50_us`, `p99_us` and `mean_us`.

    Args:
        times: The times in microseconds; an empty list raises `StatisticsError`.
    """
    return {
        "p50_us": statistics.median(times),
        "p99_us": percentile(times, 0.99),
        "mean_us": statistics.fmean(times),
    }


def time_pipelined(caller: Caller, calls: int, warmup: int) -> dict[str, float]:
    """Measures how many no-op calls per second complete if all of them are started at once.

    Returns a dict with this number under the key `calls_per_s`.

    Args:
        caller: Makes the calls.
        calls: How many calls to time, at least 1.
        warmup: How many untimed calls to make first, also started at once; 0 for none.

    Raises:
        NotImplementedError: The system cannot have several calls in flight.
        Exception: What the measured library raises if a call fails.
    """
    caller.pipelined(warmup)
    start = time.perf_counter()
    caller.pipelined(calls)
    return {"calls_per_s": calls / (time.perf_counter() - start)}


def rate(run: Callable[[int], object], count: int, seconds: float) -> float:
    """Returns how many operations per second `run` performs.

    `run` is called twice. The first call is the warm-up, with a twentieth of `count` operations, at least 1. From its
    duration follows how many operations the second call, which is measured, can perform in `seconds`.

    Args:
        run: Performs as many operations as its argument says. What it raises is raised here.
        count: The largest number of operations of the second call, at least 1.
        seconds: About how long the second call should take. It takes longer if it must: it never performs fewer
            operations than the first call.
    """
    trial = max(1, count // 20)
    start = time.perf_counter()
    run(trial)
    taken = time.perf_counter() - start
    number = max(trial, min(count, int(trial * seconds / taken)))
    start = time.perf_counter()
    run(number)
    return number / (time.perf_counter() - start)


def time_threads(
    call: Callable[[], object], threads: int, seconds: float = NO_LIMIT, calls: int = UNLIMITED
) -> dict[str, float]:
    """Times the calls of several threads, which start at the same time and each make one call after another.

    Args:
        call: What to time. It is called once before, which does not count.
        threads: How many threads, at least 1.
        seconds: How long they go on at most; by default no limit. Each makes one call in any case.
        calls: How many calls each thread makes at most, at least 1; by default no limit. Without `seconds` and `calls`
            the threads never end.

    Returns:
        The calls per second of all threads together, as `calls_per_s`, and the median, the 99th percentile and the mean
        time of a call in microseconds, as `p50_us`, `p99_us` and `mean_us`.

    Raises:
        BaseException: What a call raised, after all threads have ended.
    """
    call()
    times: list[float] = []
    errors: list[BaseException] = []
    ready = threading.Barrier(threads + 1)

    def run() -> None:
        own: list[float] = []
        clock = time.perf_counter_ns
        try:
            ready.wait()
            start = clock()
            end = start + seconds * 1e9
            while len(own) < calls and (not own or start < end):
                call()
                now = clock()
                own.append((now - start) / 1000)
                start = now
        except BaseException as error:
            errors.append(error)
        times.extend(own)

    every = [threading.Thread(target=run, name=f"caller-{number}") for number in range(threads)]
    for thread in every:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    for thread in every:
        thread.join()
    if errors:
        raise errors[0]
    return {"calls_per_s": len(times) / (time.perf_counter() - start), **summarize(times)}


def time_beside(call: Callable[[], object], load: Callable[[], object], seconds: float) -> dict[str, float]:
    """Times each call for `seconds`, while another thread calls `load` again and again.

    Goes on longer if `load` has not run `MIN_CALLS` times by then. Both functions are called once before, which does
    not count.

    Args:
        call: What to time.
        load: What the other thread calls.
        seconds: How long to time calls; 0 only until `load` has run `MIN_CALLS` times.

    Returns:
        The median, the 99th percentile and the mean in microseconds, as `p50_us`, `p99_us` and `mean_us`.

    Raises:
        BaseException: What either function raises. The other thread has ended then.
    """
    load()
    call()
    over = False
    loads = 0
    errors: list[BaseException] = []

    def run() -> None:
        nonlocal loads
        try:
            while not over:
                load()
                loads += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="load")
    thread.start()
    times: list[float] = []
    try:
        end = time.perf_counter() + seconds
        # Wait for some loads as well: without a load in progress this would measure something else.
        while not errors and (loads < MIN_CALLS or time.perf_counter() < end):
            start = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - start) / 1000)
    finally:
        over = True
        thread.join()
    if errors:
        raise errors[0]
    return summarize(times)


def time_shared(caller: ReferenceCaller, references: int, warmup: int) -> float:
    """Returns how many references per second are created, shared with a third process, used once and dropped.

    Args:
        caller: Makes and shares the references.
        references: How many are measured, at least 1.
        warmup: How many are shared before and do not count; 0 for none.

    Raises:
        RuntimeError: The third process got a wrong value.
        Exception: What the measured library raises if a call fails.
    """
    caller.share(warmup)
    start = time.perf_counter()
    caller.share(references)
    return references / (time.perf_counter() - start)
