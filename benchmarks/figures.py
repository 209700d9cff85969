"""What the numbers must amount to: ratios between systems, each with the figure that is wanted of it.

Pure: results in, figures out.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from farcall.bench import machine

_HOLDS: Final[dict[str, Callable[[float, float], bool]]] = {"≥": operator.ge, "≤": operator.le, "<": operator.lt}


@dataclass
class Results:
    """What each round found. The outer key of `calls` is a system's name, the inner one a measurement's."""

    calls: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    beside_raw: dict[str, list[float]] = field(default_factory=dict)
    """For each system: the time of a no-op as a multiple of the raw spinning ping-pong's, in slices side by side."""
    shared: dict[str, list[float]] = field(default_factory=dict)
    """For each system: references per second that are made, shared with a third worker, used once and dropped."""
    data: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """As `calls`, for large data and many threads: see `measure_data`."""
    copy_us: list[float] = field(default_factory=list)
    """Of memory to memory in one process, there and back."""
    import_ms: list[float] = field(default_factory=list)
    idle_percent: list[float] = field(default_factory=list)
    busy_spinning: list[float] = field(default_factory=list)
    """Calls per second in each slice, and below: in the slice beside it, with spinning turned off."""
    busy_blocking: list[float] = field(default_factory=list)
    others_percent: list[float] = field(default_factory=list)
    """For each turn, the share of a core that other programs took meanwhile."""

    @property
    def disturbed(self) -> int:
        """In how many turns other programs took a good part of a core."""
        return machine.disturbed(self.others_percent)

    @property
    def busy_ratios(self) -> list[float]:
        """For each slice: the rate with spinning, as a share of that without."""
        return [own / other for own, other in zip(self.busy_spinning, self.busy_blocking, strict=True)]

    def median(self, system: str, measurement: str) -> float | None:
        """The median over the rounds; None if it was not measured."""
        values = [found[measurement] for found in self.calls.get(system, ()) if measurement in found]
        return _median(values)

    def median_data(self, system: str, measurement: str) -> float | None:
        """The same of large data and many threads."""
        return _median([found[measurement] for found in self.data.get(system, ()) if measurement in found])

    @property
    def median_copy(self) -> float | None:
        """Microseconds; None if it was not measured."""
        return _median(self.copy_us)

    def median_shared(self, system: str) -> float | None:
        """The median rate of shared references; None if it was not measured."""
        return _median(self.shared.get(system, []))

    @property
    def median_import(self) -> float | None:
        """Milliseconds; None if it was not measured."""
        return _median(self.import_ms)


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


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _noise(values: list[float]) -> float:
    """How far the median of such values may lie from the truth: about twice the standard error of a median.

    By the quartiles, which one slice in which the machine did something else does not move.
    """
    if len(values) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4)
    return float(2.5 * (upper - lower) / 1.35 / len(values) ** 0.5)


@dataclass(frozen=True)
class TorchRatios:
    """How many times as fast as torch farcall over a Unix socket is. None: one of the two was not measured."""

    call: float | None
    pipelined: float | None
    remote: float | None
    proxy: float | None
    shared: float | None


def torch_ratios(results: Results) -> TorchRatios:
    """The ratios to torch, of which most of the figures are made."""

    def faster(measurement: str) -> float | None:
        return _ratio(results.median("torch", measurement), results.median("farcall-unix", measurement))

    return TorchRatios(
        call=faster("p50_us"),
        pipelined=_ratio(results.median("farcall-unix", "calls_per_s"), results.median("torch", "calls_per_s")),
        remote=faster("remote_us"),
        proxy=faster("proxy_us"),
        shared=_ratio(results.median_shared("farcall-unix"), results.median_shared("torch")),
    )


def wanted_figures(results: Results) -> list[Figure]:
    """All wanted figures, in the order of the table."""

    def p50(system: str) -> float | None:
        return results.median(system, "p50_us")

    def rate(system: str) -> float | None:
        return results.median(system, "calls_per_s")

    torch = torch_ratios(results)
    return [
        Figure("no-op, unix: faster than torch", torch.call, 12, aim=20),
        Figure("no-op, tcp: faster than torch", _ratio(p50("torch"), p50("farcall-tcp")), 8),
        Figure(
            "no-op, unix: of the raw spinning ping-pong",
            _median(results.beside_raw.get("farcall-unix", [])),
            2,
            bound="≤",
        ),
        Figure(
            "no-op, tcp: of the raw spinning ping-pong",
            _median(results.beside_raw.get("farcall-tcp", [])),
            2,
            bound="≤",
        ),
        Figure("pipelined, unix: torch's rate", torch.pipelined, 12, aim=25),
        Figure("pipelined, unix: RPyC's rate", _ratio(rate("farcall-unix"), rate("rpyc-tcp")), 2, aim=5),
        Figure("remote + to_here, unix: faster than torch", torch.remote, 12),
        Figure("proxy call, unix: faster than torch", torch.proxy, 15),
        Figure("shared references, unix: torch's rate", torch.shared, 10),
        *_data_figures(results),
        Figure("idle worker: share of a core", _median(results.idle_percent), 1, bound="<", unit=" %"),
        Figure(
            "8 busy workers: rate with spinning, of that without",
            _median(results.busy_ratios),
            1,
            noise=_noise(results.busy_ratios),
        ),
        Figure("import farcall", results.median_import, 150, bound="<", unit=" ms"),
    ]


def _data_figures(results: Results) -> list[Figure]:
    def faster(than: str, system: str, size: str, way: str = "echo") -> float | None:
        return _ratio(results.median_data(than, f"{way} {size}"), results.median_data(system, f"{way} {size}"))

    def threads(system: str, number: int) -> float | None:
        return results.median_data(system, f"threads {number}")

    return [
        Figure("64 MiB there and back, unix: torch's bandwidth", faster("torch", "farcall-unix", "64 MiB"), 8, aim=12),
        Figure(
            "64 MiB there and another back, unix: torch's bandwidth",
            faster("torch", "farcall-unix", "64 MiB", "exchange"),
            8,
        ),
        Figure(
            "64 MiB tensor there and back, farcall.pytorch: torch's bandwidth", faster("torch", "edge", "64 MiB"), 8
        ),
        Figure(
            "2 × 2 tensor there and back, farcall.pytorch: faster than torch",
            _ratio(results.median("torch", "tensor_us"), results.median("edge", "tensor_us")),
            12,
        ),
        Figure("1 MiB there and back, unix: torch's bandwidth", faster("torch", "farcall-unix", "1 MiB"), 6),
        Figure("64 MiB there and back, tcp: torch's bandwidth", faster("torch", "farcall-tcp", "64 MiB"), 1.5),
        Figure("64 MiB there and back, tcp: of a raw copy's", faster("raw-copy-tcp", "farcall-tcp", "64 MiB"), 0.8),
        Figure("4 KiB there and back, unix: torch's rate", faster("torch", "farcall-unix", "4 KiB"), 10),
        Figure("16 threads, unix: torch's rate", _ratio(threads("farcall-unix", 16), threads("torch", 16)), 10),
        Figure("16 threads, unix: of one alone", _ratio(threads("farcall-unix", 16), threads("farcall-unix", 1)), 1),
    ]
