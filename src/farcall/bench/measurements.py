"""One turn of one system: starts its processes, asks them for the points of one part, and ends them.

A turn never fails. If a system cannot do something, the reason is recorded and the run goes on. A point that has failed
is not tried again in later rounds. A system that cannot be started at all is left out from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol

from farcall.bench import findings as found
from farcall.bench import system as abilities
from farcall.bench.effort import Effort
from farcall.bench.findings import Findings, Measure
from farcall.bench.machine import available_memory
from farcall.bench.processes import EndpointFailed, Endpoints, start_ends
from farcall.bench.system import System
from farcall.bench.tables import in_bytes

MEMORY_FACTOR: Final = 10
"""How many times the payload size a call that sends a payload and gets one back may need in memory.

There are two processes, each with what it sends, what it gets, and copies of both.
"""


class MeasuredEnd(Protocol):
    """A process that makes the calls of a system that is measured, and answers commands with measurements.

    A type for annotations: any object with the method `ask` is one.
    """

    def ask(self, command: str, **options: object) -> Any:
        """Sends a command, such as "echoes", with its options, waits, and returns the answer.

        The type of the answer depends on the command. Raises `EndpointFailed` if the command fails or is not answered
        in time.
        """


Opener = Callable[[System, str], AbstractContextManager[MeasuredEnd]]
"""Starts the processes of a system for a part of the run, and yields the one to ask. `open_ends` is the usual one."""


@contextmanager
def open_ends(system: System, part: str) -> Iterator[MeasuredEnd]:
    """Context manager: starts the processes of a system, yields the one to ask, and ends them all.

    Args:
        system: What is measured: farcall or another library.
        part: The part of the run. "startup" starts a process that starts workers; "shared" a server, a caller and a
            third process, with which references are shared; any other text a server and a caller.

    Raises:
        EndpointFailed: A process could not be started, or did not end in order.
    """
    with Endpoints() as endpoints:
        if part == "startup":
            starter = endpoints.start(f"the starter of {system.label}", kind="starter", system=system)
            endpoints.wait_until_up(starter)
            yield starter
        else:
            yield start_ends(endpoints, system, third=part == "shared")[-1]


class Measurer:
    """Measures systems, and records the values, or why they are missing, in `Findings`.

    Each call of `turn` measures one part of the run, such as "payload", for one system.

    Args:
        effort: How much to measure.
        findings: Where results are recorded.
        opener: Starts the processes; tests replace it.
        memory: Returns the available bytes of memory; tests replace it.
    """

    def __init__(
        self,
        effort: Effort,
        findings: Findings,
        opener: Opener = open_ends,
        memory: Callable[[], int] = available_memory,
    ) -> None:
        """Stores the arguments. Nothing is started until `turn`.

        Args:
            effort: How much to measure.
            findings: Where results are recorded.
            opener: Starts the processes of a system, and yields the one to ask; tests replace it.
            memory: Returns the available bytes of memory; tests replace it.
        """
        self._effort = effort
        self._findings = findings
        self._open = opener
        self._memory = memory

    def turn(self, part: str, system: System) -> None:
        """Measures one part of a system, and records values, or reasons why they are missing.

        Raises nothing if the system fails. Does nothing for a system that is not in the `systems` of the findings, for
        example because it was left out.

        Args:
            part: One of `effort.PARTS`, such as "payload". Any other text does nothing.
            system: What is measured: farcall or another library.
        """
        if system not in self._findings.systems:
            return
        effort = self._effort
        match part:
            case "payload":
                measures = (found.LATENCY, found.LATENCY_P99, found.BANDWIDTH)
                sizes = [size for size in effort.sizes if self._fits_in_memory(system, size)]
                self._measure_points(part, system, measures, sizes, self._echoes)
            case "exchange":
                sizes = [
                    size
                    for size in found.points(found.EXCHANGED, effort)
                    if self._fits_in_memory(system, size, found.EXCHANGED)
                ]
                self._measure_points(part, system, [found.EXCHANGED], sizes, self._exchanges, abilities.EXCHANGED)
            case "in-flight":
                self._measure_points(
                    part, system, [found.IN_FLIGHT], effort.windows, self._in_flight, abilities.IN_FLIGHT
                )
            case "threads":
                self._measure_points(part, system, [found.THREADS], effort.threads, self._threads, abilities.THREADS)
            case "streaming":
                sizes = [size for size in effort.streamed if self._fits_in_memory(system, size, found.STREAMING)]
                self._measure_points(part, system, [found.STREAMING], sizes, self._streaming, abilities.STREAMING)
            case "references":
                self._measure_points(
                    part, system, [found.FETCHED], found.SINGLE_POINT, self._fetched, abilities.FETCHED
                )
                self._measure_points(
                    "shared", system, [found.SHARED], found.SINGLE_POINT, self._shared, abilities.SHARED
                )
            case "startup":
                # A process can start workers only once, so each number needs a process of its own.
                for count in effort.workers:
                    self._measure_points(part, system, [found.STARTUP], [count], self._startup)

    def _measure_points(
        self,
        part: str,
        system: System,
        measures: Sequence[Measure],
        wanted: Sequence[int],
        measure: Callable[[MeasuredEnd, System, int], None],
        needs: str = "",
    ) -> None:
        """Measures the wanted points, and records why points are missing.

        A point is a payload size, or a number of calls, threads or workers. A point that has failed before is not
        measured again. After a failure the points that follow are not tried. A system that cannot be started, and has
        no values, is left out of the run.

        Args:
            part: The part of the run, which says which processes to start.
            system: What is measured: farcall or another library.
            measures: The kinds of results that each point gives; all get the same reason if it fails.
            wanted: The points; may be empty.
            measure: Measures and records one point. Raises `EndpointFailed` if it cannot.
            needs: What the system must be able to do, as a key of `System.cannot`; empty if nothing in particular.
        """
        if reason := system.cannot.get(needs) or system.why_not_tried(needs):
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

    def _fits_in_memory(self, system: System, size: int, *measures: Measure) -> bool:
        """Returns whether there is enough memory to measure a payload of `size` bytes; if not, records why not.

        The reason is recorded for the kinds of results `measures`; for latency and bandwidth if none are given.
        """
        if size * MEMORY_FACTOR <= self._memory():
            return True
        reason = f"not tried: {in_bytes(size * MEMORY_FACTOR)} of memory may be needed, which are not free"
        measures = measures or (found.LATENCY, found.LATENCY_P99, found.BANDWIDTH)
        self._findings.explain(measures, system, size, reason)
        return False

    def _echoes(self, asked: MeasuredEnd, system: System, size: int) -> None:
        """Measures and records latency and bandwidth for a payload of `size` bytes.

        `asked` is the process that makes the calls. Raises `EndpointFailed` if it fails.
        """
        effort = self._effort
        times = asked.ask("echoes", size=size, calls=effort.echoes, warmup=effort.warmup, seconds=effort.seconds)
        seconds = times["p50_us"] / 1e6
        self._findings.record(found.LATENCY, system, size, seconds)
        self._findings.record(found.LATENCY_P99, system, size, times["p99_us"] / 1e6)
        if size >= found.MIN_BANDWIDTH_BYTES:
            self._findings.record(found.BANDWIDTH, system, size, 2 * size / seconds)

    def _exchanges(self, asked: MeasuredEnd, system: System, size: int) -> None:
        """Measures and records the bandwidth of calls that send one array of `size` bytes and get another one back.

        `asked` is the process that makes the calls. Raises `EndpointFailed` if it fails.
        """
        effort = self._effort
        times = asked.ask("exchanges", size=size, calls=effort.echoes, warmup=effort.warmup, seconds=effort.seconds)
        self._findings.record(found.EXCHANGED, system, size, 2 * size / times["p50_us"] * 1e6)

    def _in_flight(self, asked: MeasuredEnd, system: System, window: int) -> None:
        """Measures and records the rate of no-op calls with `window` of them in flight.

        `asked` is the process that makes the calls. Raises `EndpointFailed` if it fails.
        """
        rate = asked.ask("in_flight", window=window, calls=self._effort.calls, seconds=self._effort.seconds)
        self._findings.record(found.IN_FLIGHT, system, window, rate)

    def _threads(self, asked: MeasuredEnd, system: System, threads: int) -> None:
        """Measures and records the rate of no-op calls of `threads` threads together.

        `asked` is the process that makes the calls. Raises `EndpointFailed` if it fails.
        """
        measured = asked.ask("threads", threads=threads, seconds=self._effort.seconds)
        self._findings.record(found.THREADS, system, threads, measured["calls_per_s"])

    def _streaming(self, asked: MeasuredEnd, system: System, size: int) -> None:
        """Measures and records the 99th percentile of the times of no-op calls while arrays of `size` bytes are sent.

        `asked` is the process that makes the calls. Raises `EndpointFailed` if it fails.
        """
        times = asked.ask("streaming", size=size, seconds=self._effort.seconds)
        self._findings.record(found.STREAMING, system, size, times["p99_us"] / 1e6)

    def _fetched(self, asked: MeasuredEnd, system: System, point: int) -> None:
        """Measures how many references per second are created and fetched, one by one, and records that under `point`.

        `point` is always 1, because there is only one measurement. `asked` is the process that makes the calls. Raises
        `EndpointFailed` if it fails.
        """
        effort = self._effort
        times = asked.ask("remotes", calls=effort.references, warmup=effort.warmup, seconds=effort.seconds)
        self._findings.record(found.FETCHED, system, point, 1e6 / times["p50_us"])

    def _shared(self, asked: MeasuredEnd, system: System, point: int) -> None:
        """Measures how many references per second are shared with a third process, and records that under `point`.

        `point` is always 1, because there is only one measurement. `asked` is the process that makes the calls. Raises
        `EndpointFailed` if it fails.
        """
        rate = asked.ask("share_rate", count=self._effort.references, seconds=self._effort.seconds)
        self._findings.record(found.SHARED, system, point, rate)

    def _startup(self, asked: MeasuredEnd, system: System, workers: int) -> None:
        """Measures and records how many seconds `workers` workers take to start.

        `asked` is the process that starts them. Raises `EndpointFailed` if it fails.
        """
        self._findings.record(found.STARTUP, system, workers, asked.ask("start", workers=workers))
