"""Describes the machine of a run, and measures how much other programs use it meanwhile."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

DISTURBANCE_PERCENT: Final = 20.0
"""The share of one core, in percent, above which other programs spoil a turn.

On a machine with two cores, one other busy program makes two spinning processes share one core. Their calls then take
more than ten times as long.
"""


def disturbed(others_percent: Iterable[float]) -> int:
    """Returns in how many turns other programs used more than `DISTURBANCE_PERCENT` of a core.

    Args:
        others_percent: For each turn (one measurement of one system), the percentage of a core that other programs
            used. Empty gives 0.
    """
    return sum(percent > DISTURBANCE_PERCENT for percent in others_percent)


def describe(packages: Iterable[str], others_percent: list[float]) -> dict[str, str]:
    """Returns what a reader of the results needs to know: processor, kernel, versions, disturbed turns and date.

    Args:
        packages: The packages whose versions are listed; may be empty. Those that are not installed are left out.
        others_percent: For each turn (one measurement of one system), the percentage of a core that other programs
            used; may be empty.

    Returns:
        Texts by their titles, such as "kernel".

    Raises:
        OSError: There is no /proc: the system is not Linux.
    """
    versions = {name: version(name) for name in packages}
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        **{name: found for name, found in versions.items() if found},
        "disturbed turns": f"{disturbed(others_percent)} of {len(others_percent)}"
        f" (other programs took more than {DISTURBANCE_PERCENT:g} % of a core)",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def version(package: str) -> str | None:
    """Returns the installed version of a package, by its name for `pip`; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """Returns the model name of the processor, or the architecture, such as `aarch64`, if /proc/cpuinfo has none.

    Raises `OSError` if there is no /proc.
    """
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def available_memory() -> int:
    """Returns how many bytes programs could still use without swapping.

    If the kernel does not say, returns the free memory, which is less. Raises `OSError` if there is no /proc.
    """
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """Returns the processor time in seconds, user and system, that a process has used so far in all its threads.

    Raises `FileNotFoundError` if the process does not exist.
    """
    # The second field, the command in parentheses, may itself contain spaces and parentheses.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def others_cpu_seconds() -> float:
    """Returns the processor time in seconds that all programs but the benchmark have used since the machine started.

    The children of this process count as the benchmark once they have ended and were waited for. Includes time that a
    hypervisor gave to other virtual machines. Only the difference of two values is of use, accurate to about 10 ms per
    core. Raises `OSError` if there is no /proc.
    """
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks
    everything = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    for whom in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(whom)
        everything -= usage.ru_utime + usage.ru_stime
    return everything
