"""What a run stood on, and who else used the machine meanwhile."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

DISTURBANCE: Final = 20.0
"""Percent of a core. On two cores one other busy program makes two ends that spin share the other core, and they take
more than ten times as long: a turn like that says nothing."""


def disturbed(others_percent: Iterable[float]) -> int:
    """In how many turns other programs took more than `DISTURBANCE` percent of a core."""
    return sum(percent > DISTURBANCE for percent in others_percent)


def describe(packages: Iterable[str], others_percent: list[float]) -> dict[str, str]:
    """The machine, the versions of those of the packages that are installed, the disturbances and the date."""
    versions = {name: version(name) for name in packages}
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        **{name: found for name, found in versions.items() if found},
        "disturbed turns": f"{disturbed(others_percent)} of {len(others_percent)}"
        f" (other programs took more than {DISTURBANCE:g} % of a core)",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def version(package: str) -> str | None:
    """The installed version; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def available_memory() -> int:
    """The bytes that programs could still take without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """The processor time, user and system, that a process has used so far, with all its threads."""
    # The second field, the command in parentheses, may itself hold spaces and parentheses.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def others_cpu_seconds() -> float:
    """The processor time that everything on this machine but the bench and its ended processes has used so far.

    Time that a hypervisor gave to other machines counts as well. Differences are good to about 10 ms for each core.
    """
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks
    everything = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    for whom in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(whom)
        everything -= usage.ru_utime + usage.ru_stime
    return everything
