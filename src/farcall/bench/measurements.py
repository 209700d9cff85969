"""One turn of one system: processes are started, asked for some points, and ended.

A turn never fails: what a system could not do is noted with the reason, and the run goes on. What has failed once is
not tried again in later rounds. A system that cannot be started at all is left out from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol

from farcall.bench import findings as found
from farcall.bench import systems
from farcall.bench.effort import Effort
from farcall.bench.findings import Findings, Measure
from farcall.bench.machine import available_memory
from farcall.bench.processes import EndpointFailed, Endpoints, start_ends
from farcall.bench.systems import System
from farcall.bench.tables import in_bytes

MEMORY_FACTOR: Final = 10
"""How many times its size an echo may take: two ends, each with what it sends, what it gets, and copies of both."""


class Asked(Protocol):
    """The end that is asked for points."""

    def ask(self, command: str, **options: object) -> Any:
        """The answer. Raises EndpointFailed."""


Opener = Callable[[System, str], AbstractContextManager[Asked]]


@contextmanager
def open_ends(system: System, part: str) -> Iterator[Asked]:
    """The processes of a system for a part of a run, or for `shared`, which needs a third end: the end to ask.

    Raises EndpointFailed; ends them in any case.
    """
    with Endpoints() as endpoints:
        if part == "startup":
            starter = endpoints.start(f"the starter of {system.label}", kind="starter", system=system.name)
            endpoints.wait_until_up(starter)
            yield starter
        else:
            yield start_ends(endpoints, system, third=part == "shared")[-1]


class Measurer:
    """Takes turns and records what they find."""

    def __init__(
        self,
        effort: Effort,
        findings: Findings,
        opener: Opener = open_ends,
        memory: Callable[[], int] = available_memory,
    ) -> None:
        self._effort = effort
        self._findings = findings
        self._open = opener
        self._memory = memory

    def turn(self, part: str, system: System) -> None:
        """One turn of a system in one part of the run. Raises nothing that a system does."""
        if system not in self._findings.systems:
            return  # it was left out meanwhile
        effort = self._effort
        match part:
            case "payload":
                measures = (found.LATENCY, found.LATENCY_P99, found.BANDWIDTH)
                sizes = [size for size in effort.sizes if self._fits(system, size)]
                self._points(part, system, measures, sizes, self._echoes)
            case "exchange":
                sizes = [
                    size for size in found.points(found.EXCHANGED, effort) if self._fits(system, size, found.EXCHANGED)
                ]
                self._points(part, system, [found.EXCHANGED], sizes, self._exchanges, systems.EXCHANGED)
            case "in-flight":
                self._points(part, system, [found.IN_FLIGHT], effort.windows, self._in_flight, systems.IN_FLIGHT)
            case "threads":
                self._points(part, system, [found.THREADS], effort.threads, self._threads, systems.THREADS)
            case "streaming":
                sizes = [size for size in effort.streamed if self._fits(system, size, found.STREAMING)]
                self._points(part, system, [found.STREAMING], sizes, self._streaming, systems.STREAMING)
            case "references":
                self._points(part, system, [found.FETCHED], found.ONCE, self._fetched, systems.FETCHED)
                self._points("shared", system, [found.SHARED], found.ONCE, self._shared, systems.SHARED)
            case "startup":
                # Workers are started once in a process: another number is another one's business.
                for count in effort.workers:
                    self._points(part, system, [found.STARTUP], [count], self._startup)

    def _points(
        self,
        part: str,
        system: System,
        measures: Sequence[Measure],
        wanted: Sequence[int],
        measure: Callable[[Asked, System, int], None],
        needs: str = "",
    ) -> None:
        if reason := system.cannot.get(needs) or system.untried(needs):
            for point in wanted:
                self._findings.explain(measures, system, point, reason)
            return
        todo = [point for point in wanted if self._findings.reason(measures[0], system, point) is None]
        if not todo:
            return
        rest = list(todo)
        started = False
        try:
            with self._open(system, part) as asked:
                started = True
                while rest:
                    measure(asked, system, rest[0])
                    rest.pop(0)
        except EndpointFailed as failure:
            if not rest:
                self._findings.notes.append(f"{system.label} did not end in order: {failure.reason}")
            elif not started and not self._findings.has_any(system):
                self._findings.leave_out(system, f"it could not be started: {failure.reason}")
            else:
                self._findings.explain(measures, system, rest[0], failure.reason)
                where = in_bytes(rest[0]) if measures[0] == found.LATENCY else str(rest[0])
                for point in rest[1:]:
                    self._findings.explain(measures, system, point, f"not tried: it failed at {where}")

    def _fits(self, system: System, size: int, *measures: Measure) -> bool:
        if size * MEMORY_FACTOR <= self._memory():
            return True
        reason = f"not tried: {in_bytes(size * MEMORY_FACTOR)} of memory may be needed, and are not free"
        measures = measures or (found.LATENCY, found.LATENCY_P99, found.BANDWIDTH)
        self._findings.explain(measures, system, size, reason)
        return False

    def _echoes(self, asked: Asked, system: System, size: int) -> None:
        effort = self._effort
        times = asked.ask("echoes", size=size, calls=effort.echoes, warmup=effort.warmup, seconds=effort.seconds)
        seconds = times["p50_us"] / 1e6
        self._findings.record(found.LATENCY, system, size, seconds)
        self._findings.record(found.LATENCY_P99, system, size, times["p99_us"] / 1e6)
        if size >= found.LEAST_FOR_BANDWIDTH:
            self._findings.record(found.BANDWIDTH, system, size, 2 * size / seconds)

    def _exchanges(self, asked: Asked, system: System, size: int) -> None:
        effort = self._effort
        times = asked.ask("exchanges", size=size, calls=effort.echoes, warmup=effort.warmup, seconds=effort.seconds)
        self._findings.record(found.EXCHANGED, system, size, 2 * size / times["p50_us"] * 1e6)

    def _in_flight(self, asked: Asked, system: System, window: int) -> None:
        rate = asked.ask("in_flight", window=window, calls=self._effort.calls, seconds=self._effort.seconds)
        self._findings.record(found.IN_FLIGHT, system, window, rate)

    def _threads(self, asked: Asked, system: System, threads: int) -> None:
        rate = asked.ask("threads", threads=threads, seconds=self._effort.seconds)
        self._findings.record(found.THREADS, system, threads, rate)

    def _streaming(self, asked: Asked, system: System, size: int) -> None:
        times = asked.ask("streaming", size=size, seconds=self._effort.seconds)
        self._findings.record(found.STREAMING, system, size, times["p99_us"] / 1e6)

    def _fetched(self, asked: Asked, system: System, point: int) -> None:
        effort = self._effort
        times = asked.ask("remotes", calls=effort.references, warmup=effort.warmup, seconds=effort.seconds)
        self._findings.record(found.FETCHED, system, point, 1e6 / times["p50_us"])

    def _shared(self, asked: Asked, system: System, point: int) -> None:
        rate = asked.ask("share_rate", count=self._effort.references, seconds=self._effort.seconds)
        self._findings.record(found.SHARED, system, point, rate)

    def _startup(self, asked: Asked, system: System, workers: int) -> None:
        self._findings.record(found.STARTUP, system, workers, asked.ask("start", workers=workers))
