"""What the numbers must amount to: ratios between systems, each with the figure that is wanted of it.

Pure: results in, figures out.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from farcall.bench import machine
from farcall.bench.endpoint import MIXED_KINDS
from measurements import BUSY_PROGRAMS, SHORT_CALLS, Found, busy_load

_HOLDS: Final[dict[str, Callable[[float, float], bool]]] = {"≥": operator.ge, "≤": operator.le, "<": operator.lt}


@dataclass
class Results:
    """What all rounds found."""

    rounds: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    """For each system, each point and each value of it: what every round found. `measurements` has the names."""
    others_percent: list[float] = field(default_factory=list)
    """For each turn, the share of a core that other programs took meanwhile."""

    @property
    def disturbed(self) -> int:
        """In how many turns other programs took a good part of a core."""
        return machine.disturbed(self.others_percent)

    def record(self, system: str, found: Found) -> None:
        """Adds what one turn of a system found."""
        points = self.rounds.setdefault(system, {})
        for point, values in found.items():
            for name, value in values.items():
                points.setdefault(point, {}).setdefault(name, []).append(value)

    def values(self, system: str, point: str, name: str = "p50_us") -> list[float]:
        """Returns what every round found; an empty list if it was not measured."""
        return self.rounds.get(system, {}).get(point, {}).get(name, [])

    def median(self, system: str, point: str, name: str = "p50_us") -> float | None:
        """Returns the median over the rounds; None if it was not measured."""
        values = self.values(system, point, name)
        return statistics.median(values) if values else None


@dataclass(frozen=True)
class Figure:
    """One wanted figure and what was found."""

    title: str
    value: float | None
    """None: it could not be had, because a system was left out."""
    required: float
    aim: float | None = None
    bound: str = "≥"
    """How the value must stand to what is required: `≥`, `≤` or `<`."""
    unit: str = "×"
    noise: float = 0.0
    """The share of the required value by which it may lie from the truth; a miss by no more than that is none."""
    floor: float | None = None
    """What the value must never fall below, for `floors`; None: what is required."""

    @property
    def verdict(self) -> str:
        """`not measured`, `missed`, `within noise`, `met` or `aim met`."""
        if self.value is None:
            return "not measured"
        holds = _HOLDS[self.bound]
        if self.aim is not None and holds(self.value, self.aim):
            return "aim met"
        if holds(self.value, self.required):
            return "met"
        slack = -self.noise if self.bound == "≥" else self.noise
        return "within noise" if self.noise and holds(self.value, self.required * (1 + slack)) else "missed"

    def as_json(self) -> dict[str, Any]:
        """Returns all fields and the verdict, for programs to read."""
        return asdict(self) | {"verdict": self.verdict}


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def _noise(values: list[float]) -> float:
    """How far the median of such values may lie from the truth: about twice the standard error of a median.

    By the quartiles, which one slice in which the machine did something else does not move.
    """
    if len(values) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4)
    return float(2.5 * (upper - lower) / 1.35 / len(values) ** 0.5)


def wanted_figures(results: Results) -> list[Figure]:
    """Returns all wanted figures, in the order of the table."""

    def faster(point: str, name: str = "p50_us", system: str = "farcall-unix", than: str = "torch") -> float | None:
        """How many times as fast the system is: of times."""
        return _ratio(results.median(than, point, name), results.median(system, point, name))

    def rate(point: str, name: str = "calls_per_s", than: str = "torch") -> float | None:
        """How many times the other system's rate farcall has: of rates."""
        return _ratio(results.median("farcall-unix", point, name), results.median(than, point, name))

    fastest = results.values("farcall-unix", "fresh run", "fastest_us")
    slowest = results.values("farcall-unix", "fresh run", "slowest_us")
    short = f"{busy_load(0)}: 16 threads"
    ratios = results.values("farcall-unix", "busy workers", "ratio")
    return [
        Figure("no-op, unix: faster than torch", faster("no-op"), 12, aim=20),
        Figure("no-op, unix, pure Python: faster than torch", faster("no-op", system="farcall-unix-python"), 15),
        Figure("no-op, tcp: faster than torch", faster("no-op", system="farcall-tcp"), 8),
        Figure(
            "no-op, unix: slowest fresh run, of the fastest",
            _ratio(max(slowest, default=None), min(fastest, default=None)),
            1.5,
            bound="≤",
        ),
        *(
            Figure(
                f"no-op, {kind}: of the raw spinning ping-pong",
                results.median(f"farcall-{kind}", "of the raw socket", "ratio"),
                2,
                bound="≤",
            )
            for kind in ("unix", "tcp")
        ),
        *(
            Figure(
                f"no-op, unix, beside {busy_load(number)}, {title}: faster than torch",
                faster(f"{busy_load(number)}: in a row", name),
                15,
            )
            for number in BUSY_PROGRAMS
            if number
            for title, name in (("p50", "p50_us"), ("mean", "mean_us"))
        ),
        *(
            Figure(
                f"{kind}, mixed, unix: of its own run",
                _ratio(
                    results.median("farcall-unix", f"mixed: {kind}"), results.median("farcall-unix", f"alone: {kind}")
                ),
                1.3,
                bound="≤",
            )
            for kind in MIXED_KINDS
        ),
        Figure("pipelined, unix: torch's rate", rate("pipelined"), 25, floor=12),
        Figure("pipelined, unix: RPyC's rate", rate("pipelined", than="rpyc-tcp"), 2, aim=5),
        Figure("remote + to_here, unix: faster than torch", faster("remote + to_here"), 12),
        Figure("proxy call, unix: faster than torch", faster("proxy call"), 15),
        # By the mean: references are dropped some time later, which a median would not show.
        Figure(
            "reference made, passed back and dropped, unix: faster than torch", faster("passed back", "mean_us"), 12
        ),
        Figure("shared references, unix: torch's rate", rate("shared", "references_per_s"), 10),
        Figure("64 MiB there and back, unix: torch's bandwidth", faster("echo 64 MiB"), 12, floor=8),
        Figure("64 MiB there and another back, unix: torch's bandwidth", faster("exchange 64 MiB"), 8),
        Figure(
            "64 MiB tensor there and back, farcall.pytorch: torch's bandwidth", faster("echo 64 MiB", system="edge"), 8
        ),
        Figure(
            "2 × 2 tensor there and back, farcall.pytorch: faster than torch", faster("2 × 2 tensor", system="edge"), 12
        ),
        Figure("1 MiB there and back, unix: torch's bandwidth", faster("echo 1 MiB"), 10, floor=6),
        Figure("64 MiB there and back, tcp: torch's bandwidth", faster("echo 64 MiB", system="farcall-tcp"), 1.5),
        Figure(
            "64 MiB there and back, tcp: of a raw copy's",
            faster("echo 64 MiB", system="farcall-tcp", than="raw-copy-tcp"),
            0.8,
        ),
        Figure("4 KiB there and back, unix: torch's rate", faster("echo 4 KiB"), 25, floor=10),
        Figure("16 threads, unix: torch's rate", rate("16 threads"), 12, floor=10),
        Figure(f"16 threads, {SHORT_CALLS} calls each, unix: torch's rate", rate(short), 12),
        Figure(
            f"16 threads, {SHORT_CALLS} calls each, unix: p99",
            _ratio(results.median("farcall-unix", short, "p99_us"), 1000),
            2,
            bound="<",
            unit=" ms",
        ),
        Figure(
            "16 threads, unix: of one alone",
            _ratio(
                results.median("farcall-unix", "16 threads", "calls_per_s"),
                results.median("farcall-unix", "1 thread", "calls_per_s"),
            ),
            1,
        ),
        Figure(
            "idle worker: share of a core",
            results.median("farcall-unix", "idle", "percent"),
            0.5,
            bound="<",
            unit=" %",
            floor=1,
        ),
        Figure(
            "8 busy workers: rate with spinning, of that without",
            results.median("farcall-unix", "busy workers", "ratio"),
            0.97,
            noise=_noise(ratios),
        ),
        Figure("import farcall", results.median("farcall-unix", "import", "ms"), 150, bound="<", unit=" ms"),
    ]
