"""Draws the results as PNG and SVG files. Only this module imports matplotlib, and only to draw.

The colours can be told apart by colour-blind readers (Okabe and Ito), and each system has a marker of its own as well.
A *system* is what was measured: farcall, or a library that it is compared with. A system looks the same in all
pictures of a run.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from farcall.bench import findings as found
from farcall.bench.effort import Effort
from farcall.bench.farcall_rpc import OWN
from farcall.bench.findings import Findings, Measure, points
from farcall.bench.report import show_point
from farcall.bench.system import System

_COLOURS: Final = ("#D55E00", "#000000", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8C6D31")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_LABELS: Final[dict[Measure, tuple[str, str]]] = {
    found.LATENCY: ("payload", "time of a call, there and back"),
    found.BANDWIDTH: ("payload", "bandwidth, both ways together (GB/s)"),
    found.IN_FLIGHT: ("calls in flight", "calls per second"),
    found.THREADS: ("threads that call", "calls per second, all together"),
    found.STARTUP: ("workers", "time until all can be used"),
}
"""The texts of the two axes of each measure that is drawn as curves."""
_DIVISORS: Final = {found.BANDWIDTH: 1e9}
"""By what the values of a measure are divided for its axis; 1 if it is not listed."""
_SIZE: Final = (8.5, 5.0)
"""Width and height of a picture in inches."""


def style_of(findings: Findings, system: System) -> tuple[str, str]:
    """Returns the colour, as `#RRGGBB`, and the matplotlib marker of a system, by its position in `findings.systems`.

    After nine systems they repeat. Raises `ValueError` if the system is not among them.
    """
    place = findings.systems.index(system) % len(_COLOURS)
    return _COLOURS[place], _MARKERS[place]


def can_draw() -> bool:
    """Returns True if matplotlib is installed, so that `draw` works; else False."""
    return importlib.util.find_spec("matplotlib") is not None


def curve(findings: Findings, measure: Measure, system: System, effort: Effort) -> list[tuple[int, float]]:
    """Returns the curve of one system: the points at which a measure has values, each with the median of its values.

    Args:
        findings: The results.
        measure: The kind of result, such as latency.
        system: What was measured: farcall or another library.
        effort: Which points were measured: payload sizes, or numbers of calls, threads or workers.

    Returns:
        Pairs of a point and its median, in the unit of the axis: GB/s for bandwidth, otherwise the unit of the measure.
        An empty list if there are no values.
    """
    medians = ((point, findings.median(measure, system, point)) for point in points(measure, effort))
    return [(point, value / _DIVISORS.get(measure, 1.0)) for point, value in medians if value is not None]


def positions(where: Sequence[int]) -> dict[int, float]:
    """Returns the position of each point on a logarithmic axis, by point; an empty dict for no points.

    The position is the point itself as a float. Such an axis has no 0: a point 0 is drawn at a sixteenth of the
    smallest other point, or at 1 if there is no other. Negative points are not checked.
    """
    least = min((point for point in where if point), default=16)
    return {point: float(point or least / 16) for point in where}


def draw(findings: Findings, effort: Effort, directory: Path) -> list[Path]:
    """Draws one picture for each kind of result that has values, and one for references, and writes them to files.

    Args:
        findings: The results.
        effort: Which points were measured: payload sizes, or numbers of calls, threads or workers.
        directory: Where the files are written. It must exist. Files of the same names are replaced.

    Returns:
        The files, an SVG and a PNG for each picture; an empty list if there are no values.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: A file cannot be written.
    """
    import matplotlib

    # No date and no random ids, so that the same results give the same files.
    with matplotlib.rc_context({"svg.hashsalt": "farcall", "font.size": 10, "svg.fonttype": "none"}):
        drawn = {measure.key: _draw_curves(findings, measure, effort) for measure in _LABELS}
        drawn["references"] = _draw_references(findings)
        files = []
        for name, figure in drawn.items():
            if figure is None:
                continue
            for ending, options in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": 150})):
                files.append(directory / f"{name}.{ending}")
                figure.savefig(files[-1], bbox_inches="tight", **options)
    return files


def _draw_curves(findings: Findings, measure: Measure, effort: Effort) -> Any:
    """Returns a matplotlib figure with one curve for each system that has values of `measure`; None if none has.

    `effort` says which points were measured. `measure` must be a key of `_LABELS`.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    curves = {system: curve(findings, measure, system, effort) for system in findings.systems}
    if not any(curves.values()):
        return None
    figure = Figure(_SIZE)
    axes = figure.subplots()
    where = positions(points(measure, effort))
    for system, values in curves.items():
        if values:
            colour, marker = style_of(findings, system)
            axes.plot(
                [where[point] for point, _ in values],
                [value for _, value in values],
                label=system.label,
                color=colour,
                marker=marker,
                markersize=6,
                linewidth=2.6 if system == OWN else 1.4,
                zorder=3 if system == OWN else 2,
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(where.values()), [show_point(measure, point) for point in where], rotation=30)
    axes.xaxis.set_minor_locator(NullLocator())
    every = [value for values in curves.values() for _, value in values]
    _logarithmic(axes, every, _tick_of_time if measure.unit == "s" else _tick_of_number)
    across, up = _LABELS[measure]
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    _finish(axes, measure.title)
    return figure


def _draw_references(findings: Findings) -> Any:
    """Returns a matplotlib figure of how many references per second each system fetches and shares, as bars.

    Returns None if there are no values.
    """
    from matplotlib.figure import Figure

    kinds = ((found.FETCHED, "fetched, one by one"), (found.SHARED, "shared with a third worker"))
    systems = [
        system for system in findings.systems if any(findings.median(measure, system, 1) for measure, _ in kinds)
    ]
    if not systems:
        return None
    figure = Figure(_SIZE)
    axes = figure.subplots()
    width = 0.8 / len(systems)
    for number, system in enumerate(systems):
        heights = [findings.median(measure, system, 1) or float("nan") for measure, _ in kinds]
        across = [kind + (number - (len(systems) - 1) / 2) * width for kind in range(len(kinds))]
        bars = axes.bar(across, heights, width * 0.9, label=system.label, color=style_of(findings, system)[0], zorder=2)
        axes.bar_label(bars, [f"{height:,.0f}" if height == height else "" for height in heights], fontsize=8)
    every = [findings.median(measure, system, 1) for measure, _ in kinds for system in systems]
    _logarithmic(axes, [value for value in every if value], _tick_of_number)
    axes.set_xticks(range(len(kinds)), [name for _, name in kinds])
    axes.set_ylabel("references per second")
    _finish(axes, "References per second")
    return figure


def _logarithmic(axes: Any, values: Sequence[float], tick: Callable[[float], str]) -> None:
    """Makes the y axis logarithmic, from the power of ten below all values to the power of ten above them.

    So at least two powers of ten are on the axis, and have labels.

    Args:
        axes: The axes of matplotlib.
        values: All values of the picture, more than 0; not empty.
        tick: Returns the label of a value.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_yscale("log")
    axes.set_ylim(10.0 ** math.floor(math.log10(min(values))), 10.0 ** math.ceil(math.log10(max(values) * 1.2)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _finish(axes: Any, title: str) -> None:
    """Sets the title, the grid and the legend of a picture, whose matplotlib axes are `axes`."""
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(True, which="major", color="#DDDDDD", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def _tick_of_number(value: float) -> str:
    """Returns the label of a number on an axis, with commas between thousands: `1,000`."""
    return f"{value:,.10g}"


def _tick_of_time(seconds: float) -> str:
    """Returns the label of a time on an axis, with its unit: `1 s`, `10 ms`, `100 µs`; below 1 µs in `ns`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size * 0.999:
            return f"{seconds / size:,.4g} {unit}"
    return f"{seconds * 1e9:,.4g} ns"
