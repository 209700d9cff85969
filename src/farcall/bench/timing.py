"""Where clocks are read: around one call, or around many that are under way at once. No processes, no tables.

A point has a limit of calls and one of time, whichever ends first; a few calls are made in any case, so that a slow
point has a median too.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Final

from farcall.bench.systems import Caller, ReferenceCaller

LEAST: Final = 3
"""Calls that are timed whatever they take."""
ENDLESS: Final = float("inf")


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of all values lie (nearest rank)."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def time_each(call: Callable[[], object], calls: int, warmup: int, seconds: float = ENDLESS) -> dict[str, float]:
    """Time each of at most `calls` calls, in µs, after at most `warmup` that do not count.

    Both end after so many seconds as well, the warm-up after a tenth of them.
    """
    clock = time.perf_counter_ns
    end = clock() + seconds * 1e8
    for _ in range(warmup):
        call()
        if clock() > end:
            break
    times: list[float] = []
    end = clock() + seconds * 1e9
    while len(times) < calls and (len(times) < LEAST or clock() < end):
        start = clock()
        call()
        times.append((clock() - start) / 1000)
    return _summary(times)


async def time_each_awaited(
    call: Callable[[], Awaitable[object]], calls: int, warmup: int, seconds: float = ENDLESS
) -> dict[str, float]:
    """`time_each` for what is awaited: of a system whose users write coroutines, no event loop's start is timed."""
    clock = time.perf_counter_ns
    end = clock() + seconds * 1e8
    for _ in range(warmup):
        await call()
        if clock() > end:
            break
    times: list[float] = []
    end = clock() + seconds * 1e9
    while len(times) < calls and (len(times) < LEAST or clock() < end):
        start = clock()
        await call()
        times.append((clock() - start) / 1000)
    return _summary(times)


def _summary(times: list[float]) -> dict[str, float]:
    return {"p50_us": statistics.median(times), "p99_us": percentile(times, 0.99)}


def time_pipelined(caller: Caller, calls: int, warmup: int) -> dict[str, float]:
    """The rate of `calls` no-ops that are all under way at once, after `warmup` that do not count."""
    caller.pipelined(warmup)
    start = time.perf_counter()
    caller.pipelined(calls)
    return {"calls_per_s": calls / (time.perf_counter() - start)}


def rate(run: Callable[[int], object], count: int, seconds: float) -> float:
    """How many a second `run(number)` does, with as large a number, up to `count`, as takes about so many seconds.

    A first, small run warms up and says how many that are.
    """
    trial = max(1, count // 20)
    start = time.perf_counter()
    run(trial)
    taken = time.perf_counter() - start
    number = max(trial, min(count, int(trial * seconds / taken)))
    start = time.perf_counter()
    run(number)
    return number / (time.perf_counter() - start)


def time_threads(call: Callable[[], object], threads: int, seconds: float) -> float:
    """How many calls per second so many threads make together for so long, each one after another.

    Raises what a call has raised, once all have ended.
    """
    call()
    counts: list[int] = []
    errors: list[BaseException] = []
    ready = threading.Barrier(threads + 1)

    def run() -> None:
        made = 0
        try:
            ready.wait()
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                call()
                made += 1
        except BaseException as error:
            errors.append(error)
        counts.append(made)

    every = [threading.Thread(target=run, name=f"caller-{number}") for number in range(threads)]
    for thread in every:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    for thread in every:
        thread.join()
    if errors:
        raise errors[0]
    return sum(counts) / (time.perf_counter() - start)


def time_beside(call: Callable[[], object], load: Callable[[], object], seconds: float) -> dict[str, float]:
    """Time each call, for so long, while another thread does `load` again and again. Raises what either raises."""
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
        # The load counts as well: a point with none of it under way would be another one.
        while not errors and (loads < LEAST or time.perf_counter() < end):
            start = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - start) / 1000)
    finally:
        over = True
        thread.join()
    if errors:
        raise errors[0]
    return _summary(times)


def time_shared(caller: ReferenceCaller, references: int, warmup: int) -> float:
    """How many references per second are made, shared, used once and dropped, after `warmup` that do not count."""
    caller.share(warmup)
    start = time.perf_counter()
    caller.share(references)
    return references / (time.perf_counter() - start)
