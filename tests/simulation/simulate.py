"""`python -m simulation.simulate`: random schedules of reference counting, for as long as asked.

Exits with 0 if all schedules ran clean, and with 1 at the first that did not. Of that one it prints the seed, the
schedule, the shortest form of the schedule, and how to play it again.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from time import perf_counter
from typing import NamedTuple

from simulation.invariants import BrokenInvariant
from simulation.random_schedules import STEPS, WORKERS, RandomSchedule, replay, shorten
from simulation.schedules import parse, show

CHUNK = 500
"""Schedules between two words to the process that keeps count."""


class Finding(NamedTuple):
    """A schedule that broke an invariant, and its shortest form."""

    seed: int
    workers: int
    what: str
    schedule: str
    shortened: str
    shortened_what: str

    def __str__(self) -> str:
        return (
            f"seed {self.seed}, {self.workers} workers\n  {self.what}\n  {self.schedule}\n"
            f"shortened\n  {self.shortened_what}\n  {self.shortened}\n"
            f'again:\n  python -m simulation.simulate --workers {self.workers} --replay "{self.shortened}"'
        )


class Done(NamedTuple):
    """What a chunk of schedules came to."""

    schedules: int
    steps: int
    finding: Finding | None


def run_chunk(first: int, count: int, workers: int, steps: int) -> Done:
    """Runs the schedules of so many seeds, up to the first that fails."""
    made = 0
    for seed in range(first, first + count):
        schedule = RandomSchedule(seed, workers, steps)
        started_with = len(schedule.network.workers)
        try:
            made += len(schedule.run().schedule)
        except BrokenInvariant as broken:
            what, happened = str(broken), show(broken.schedule)
            short = shorten(broken, started_with)
            found = Finding(seed, started_with, what, happened, show(short.schedule), str(short))
            return Done(seed - first + 1, made, found)
    return Done(count, made, None)


def run(
    first: int,
    workers: int,
    steps: int,
    jobs: int,
    schedules: int | None,
    seconds: float | None,
    progress: Callable[[int, float], None],
) -> Done:
    """Runs so many schedules, or for so long, in `jobs` processes; ends at the first finding."""
    began = perf_counter()
    done = Done(0, 0, None)
    for chunk in _chunks(partial(_chunk_or_none, first, schedules, seconds, began), jobs, workers, steps):
        done = Done(done.schedules + chunk.schedules, done.steps + chunk.steps, done.finding or chunk.finding)
        progress(done.schedules, perf_counter() - began)
        if done.finding:
            break
    return done


def _chunk_or_none(
    first: int, schedules: int | None, seconds: float | None, began: float, index: int
) -> tuple[int, int] | None:
    """The seeds of a chunk: where they begin and how many; None if it is not to be run any more."""
    if seconds is not None and perf_counter() - began >= seconds:
        return None
    count = CHUNK if schedules is None else min(CHUNK, schedules - index * CHUNK)
    return (first + index * CHUNK, count) if count > 0 else None


def _chunks(chunk: Callable[[int], tuple[int, int] | None], jobs: int, workers: int, steps: int) -> Iterator[Done]:
    indices = itertools.count()
    if jobs == 1:
        while (seeds := chunk(next(indices))) is not None:
            yield run_chunk(*seeds, workers, steps)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=gc.freeze) as pool:
        running: set[Future[Done]] = set()
        try:
            more = True
            while more or running:
                while more and len(running) < 2 * jobs:
                    seeds = chunk(next(indices))
                    if seeds is None:
                        more = False
                    else:
                        running.add(pool.submit(run_chunk, *seeds, workers, steps))
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    yield future.result()
        finally:
            for future in running:
                future.cancel()


@contextmanager
def shown_progress(
    total: int | None, seconds: float | None, unit: str = "schedules", title: str = "simulating"
) -> Iterator[Callable[[int, float], None]]:
    """A progress bar where there is a terminal and rich, else a line every ten seconds."""
    try:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        Progress = None  # type: ignore[assignment,misc]  # noqa: N806
    if Progress is None or not sys.stderr.isatty():
        yield _plain_lines(unit)
        return
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn()
    from rich.console import Console

    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total or seconds, rate="")

        def show_bar(done: int, elapsed: float) -> None:
            rate = f"{done:,} {unit}, {done / elapsed:,.0f}/s"
            bar.update(task, completed=done if total else elapsed, rate=rate)

        yield show_bar


def _plain_lines(unit: str) -> Callable[[int, float], None]:
    said = 0.0

    def say(done: int, elapsed: float) -> None:
        nonlocal said
        if elapsed - said >= 10:
            said = elapsed
            print(f"{done:,} {unit}, {done / elapsed:,.0f}/s", file=sys.stderr, flush=True)

    return say


def main(arguments: list[str] | None = None) -> int:
    """The command. Gives its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m simulation.simulate",
        description="Random schedules of reference counting on a simulated network, every invariant at every step.",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--schedules", type=int, metavar="N", help="run so many (10,000 unless told otherwise)")
    length.add_argument("--minutes", type=float, metavar="M", help="run for so long")
    length.add_argument("--replay", metavar="STEPS", help="play one schedule that was printed, with --workers")
    parser.add_argument("--workers", type=int, default=WORKERS, metavar="N", help=f"at most so many ({WORKERS})")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"so many on average ({STEPS})")
    parser.add_argument("--seed", type=int, metavar="S", help="of the first schedule; the next has the next number")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many processes (1)")
    options = parser.parse_args(arguments)
    if options.replay is not None:
        return _replay(options.replay, options.workers)
    seconds = options.minutes * 60 if options.minutes else None
    schedules = options.schedules or (None if seconds else 10_000)
    first = random.randrange(10**9) * 1000 if options.seed is None else options.seed
    began = perf_counter()
    with shown_progress(schedules, seconds) as progress:
        jobs = max(1, options.jobs)
        done = run(first, options.workers, options.steps, jobs, schedules, seconds, progress)
    elapsed = perf_counter() - began
    print(
        f"{done.schedules:,} schedules from seed {first}, {done.steps:,} steps, in {elapsed:,.1f} s: "
        f"{done.schedules / elapsed:,.0f} schedules/s with {jobs} process(es)"
    )
    print(f"BROKEN: {done.finding}" if done.finding else "all invariants held at every step")
    return 1 if done.finding else 0


def _replay(schedule: str, workers: int) -> int:
    try:
        replay(parse(schedule), workers)
    except BrokenInvariant as broken:
        print(f"BROKEN: {broken}\n  {show(broken.schedule)}")
        return 1
    print("all invariants held at every step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
