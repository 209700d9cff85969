"""The results of a run, and why some are missing: medians over the rounds, ratios, JSON. Pure.

A value belongs to a measure, a system and a point. A point is a payload size, a number of calls in flight, or a number
of workers.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from farcall.bench.effort import KIB, Effort
from farcall.bench.farcall_rpc import OWN
from farcall.bench.system import System


@dataclass(frozen=True)
class Measure:
    """One kind of result, for example the latency of a call. It is taken at several points, such as payload sizes.

    Attributes:
        key: The name of the measure in the JSON and in the file names of plots.
        title: The title of its tables and plots.
        point: What its points are: "payload", "in flight", "threads", "references" or "workers".
        unit: The unit of its values: "s", "B/s", "calls/s" or "1/s".
        less_is_better: True if a smaller value is better, as for times.
    """

    key: str
    """The name of the measure in the JSON and in the file names of plots."""
    title: str
    """The title of its tables and plots."""
    point: str
    """What its points are: "payload", "in flight", "threads", "references" or "workers"."""
    unit: str
    """The unit of its values: "s", "B/s", "calls/s" or "1/s"."""
    less_is_better: bool = False
    """True if a smaller value is better, as for times."""


LATENCY: Final = Measure("latency", "A call with a payload, there and back", "payload", "s", less_is_better=True)
LATENCY_P99: Final = Measure("latency_p99", "The same, 99th percentile", "payload", "s", less_is_better=True)
BANDWIDTH: Final = Measure("bandwidth", "Bandwidth, both ways together", "payload", "B/s")
EXCHANGED: Final = Measure(
    "exchanged", "Bandwidth, both ways together, when another array comes back", "payload", "B/s"
)
IN_FLIGHT: Final = Measure("in_flight", "Throughput of no-op calls", "in flight", "calls/s")
THREADS: Final = Measure("threads", "Throughput of no-op calls of many threads", "threads", "calls/s")
STREAMING: Final = Measure(
    "streaming",
    "A no-op while large arrays are sent to the same worker, the slowest in a hundred",
    "payload",
    "s",
    less_is_better=True,
)
FETCHED: Final = Measure("fetched", "References made, fetched and dropped, one by one", "references", "1/s")
SHARED: Final = Measure("shared", "References shared with a third worker, used and dropped", "references", "1/s")
STARTUP: Final = Measure("startup", "Until workers can be used", "workers", "s", less_is_better=True)
MEASURES: Final = (
    *(LATENCY, LATENCY_P99, BANDWIDTH, EXCHANGED, IN_FLIGHT, THREADS, STREAMING, FETCHED, SHARED, STARTUP),
)
SINGLE_POINT: Final = (1,)
"""The points of a measure that is taken at only one point."""
MIN_BANDWIDTH_BYTES: Final = 64 * KIB
"""The smallest payload for which bandwidth is reported. Below it bandwidth says the same as latency."""


def points(measure: Measure, effort: Effort) -> Sequence[int]:
    """Returns the points at which a measure is taken: payload sizes, or numbers of calls, threads or workers.

    Returns `SINGLE_POINT` for a measure without points of its own, and an empty sequence if the effort has none for it.

    Args:
        measure: The kind of result, one of `MEASURES`. Any other gives `SINGLE_POINT`.
        effort: How much is measured.
    """
    if measure in (LATENCY, LATENCY_P99):
        return effort.sizes
    if measure in (BANDWIDTH, EXCHANGED):
        return [size for size in effort.sizes if size >= MIN_BANDWIDTH_BYTES]
    several = {IN_FLIGHT: effort.windows, THREADS: effort.threads, STREAMING: effort.streamed}
    return (several | {STARTUP: effort.workers}).get(measure, SINGLE_POINT)


@dataclass
class Findings:
    """The results of all rounds of a run, and the reasons why results are missing. `Findings()` is empty.

    Values belong to a measure (a kind of result), a system (what was measured) and a point (a payload size, or a number
    of calls, threads or workers).

    Attributes:
        systems: The measured systems in the order of the tables, farcall first.
        values: The values of all rounds, by measure, name of the system and point.
        reasons: Why a value is missing, by measure, name of the system and point.
        left_out: Why systems that were asked for could not be measured, by label.
        notes: Lines for the reader of the results that concern no single value.
        others_percent: For each turn, the percentage of one core that other programs used meanwhile.
    """

    systems: list[System] = field(default_factory=list)
    """The measured systems in the order of the tables, farcall first."""
    values: dict[tuple[Measure, str, int], list[float]] = field(default_factory=dict)
    """The values of all rounds, by measure, name of the system and point."""
    reasons: dict[tuple[Measure, str, int], str] = field(default_factory=dict)
    """Why a value is missing, or is missing from later rounds on, by measure, name of the system and point."""
    left_out: dict[str, str] = field(default_factory=dict)
    """The systems that were asked for and could not be measured, by label, and why."""
    notes: list[str] = field(default_factory=list)
    """Lines for the reader of the results that concern no single value."""
    others_percent: list[float] = field(default_factory=list)
    """For each turn (the measurement of one part of one system), the percentage of one core that other programs used
    meanwhile.
    """

    def record(self, measure: Measure, system: System, point: int, value: float) -> None:
        """Adds the value that one round measured for a system at a point. Nothing is checked.

        Args:
            measure: The kind of result.
            system: What was measured: farcall or another library.
            point: A payload size, or a number of calls, threads or workers.
            value: The value, in the unit of the measure.
        """
        self.values.setdefault((measure, system.name, point), []).append(value)

    def explain(self, measures: Iterable[Measure], system: System, point: int, reason: str) -> None:
        """Records why a system has no value at a point, for each of the measures. An earlier reason is kept.

        Args:
            measures: The kinds of results that are missing; may be empty.
            system: What was measured: farcall or another library.
            point: A payload size, or a number of calls, threads or workers.
            reason: The reason, in one line.
        """
        for measure in measures:
            self.reasons.setdefault((measure, system.name, point), reason)

    def leave_out(self, system: System, reason: str) -> None:
        """Records why a system cannot be measured, and removes it from `systems` if it is there.

        A later reason for the same system replaces an earlier one.
        """
        self.left_out[system.label] = reason
        if system in self.systems:
            self.systems.remove(system)

    def has_any(self, system: System) -> bool:
        """Returns True if any value of this system was recorded, of whichever kind of result; else False."""
        return any(name == system.name for _, name, _ in self.values)

    def reason(self, measure: Measure, system: System, point: int) -> str | None:
        """Returns why a system has no value of a measure at a point, in one line; None if no reason was recorded.

        Args:
            measure: The kind of result.
            system: What was measured: farcall or another library.
            point: A payload size, or a number of calls, threads or workers.
        """
        return self.reasons.get((measure, system.name, point))

    def median(self, measure: Measure, system: System, point: int) -> float | None:
        """Returns the median of the values of all rounds for a system at a point; None if there is no value.

        Args:
            measure: The kind of result.
            system: What was measured: farcall or another library.
            point: A payload size, or a number of calls, threads or workers.
        """
        values = self.values.get((measure, system.name, point))
        return statistics.median(values) if values else None

    def times_as_fast(self, measure: Measure, peer: System, point: int) -> float | None:
        """Returns how many times as fast as `peer` farcall is at a point, by the medians; below 1 if farcall is slower.

        Returns None if one of the two has no value, or the value 0.

        Args:
            measure: The kind of result, which says whether a smaller value is better.
            peer: The system to compare with.
            point: A payload size, or a number of calls, threads or workers.
        """
        own, other = self.median(measure, OWN, point), self.median(measure, peer, point)
        if not own or not other:
            return None
        return other / own if measure.less_is_better else own / other

    @property
    def peers(self) -> list[System]:
        """All measured systems except farcall, in the order of the tables; empty if there are none."""
        return [system for system in self.systems if system != OWN]

    def as_json(self, effort: Effort, where: dict[str, str]) -> dict[str, Any]:
        """Returns all results as a dict for `json.dumps`. Times are in seconds.

        The keys are `machine`, `effort`, `systems`, `left_out`, `notes`, `others_percent` and `measures`. The dict
        `measures` has one entry for each kind of result. In it, each point of each system has the values of all rounds
        and their median. If there is no value, the median is None, and `reason` says why.

        Args:
            effort: What was measured.
            where: Texts about the machine, by their titles, such as "kernel".
        """
        return {
            "machine": where,
            "effort": dataclasses.asdict(effort),
            "systems": {system.name: {"label": system.label, "usage": system.usage} for system in self.systems},
            "left_out": self.left_out,
            "notes": self.notes,
            "others_percent": self.others_percent,
            "measures": {
                measure.key: {
                    "title": measure.title,
                    "point": measure.point,
                    "unit": measure.unit,
                    "systems": {
                        system.name: list(self._json_cells(measure, system, effort)) for system in self.systems
                    },
                }
                for measure in MEASURES
            },
        }

    def _json_cells(self, measure: Measure, system: System, effort: Effort) -> Iterator[dict[str, Any]]:
        """Yields one dict per point of a measure, for one system, with the keys `point` and `median`.

        A point with values also has `rounds`, the list of the values. For a system other than farcall, it also has
        `farcall_is_times_as_fast`. Without values, `median` is None. `reason` is there if some or all values are
        missing, and says why.
        """
        for point in points(measure, effort):
            cell: dict[str, Any] = {"point": point, "median": self.median(measure, system, point)}
            if (measure, system.name, point) in self.values:
                cell["rounds"] = self.values[measure, system.name, point]
                if system != OWN:
                    cell["farcall_is_times_as_fast"] = self.times_as_fast(measure, system, point)
            if reason := self.reason(measure, system, point):
                cell["reason"] = reason
            elif cell["median"] is None:
                cell["reason"] = "not measured in this run"
            yield cell
