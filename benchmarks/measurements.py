"""What is measured: calls between two processes, an idle worker, and many busy workers. Each function is one round.

Every round starts its processes anew and ends them afterwards. Torch's transport polls all the time, so a system that
merely waited for its turn would take a core from the one being measured; stopping it by a signal instead would hold
only if each system took a stopped peer well. A start costs some seconds and makes each round independent of the last.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from processes import Endpoint, Endpoints, free_port
from systems import BUSY_WORKERS, System

_SETTLE: Final = 0.5
"""Seconds between the last call and the beginning of idleness."""


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int = 5
    calls: int = 2_000
    warmup: int = 200
    pipelined: int = 5_000
    idle_seconds: float = 5.0
    busy_seconds: float = 3.0


QUICK: Final = Effort(rounds=2, calls=300, warmup=50, pipelined=1_000, idle_seconds=1.0, busy_seconds=1.0)
"""Enough to see that everything works; too little for figures to believe in."""


def start_pair(endpoints: Endpoints, system: System) -> tuple[Endpoint, Endpoint]:
    """Start both ends of a system: its server and its caller. Raises EndpointFailed."""
    address = endpoints.address()
    server = endpoints.start(f"the server of {system.label}", kind="server", system=system.name, address=address)
    if not system.starts_together:
        endpoints.wait_until_up(server)
    caller = endpoints.start(f"the caller of {system.label}", kind="caller", system=system.name, address=address)
    if system.starts_together:
        # The caller first: if it fails, the server would only report that it waited for it in vain.
        endpoints.wait_until_up(caller, server)
    else:
        endpoints.wait_until_up(caller)
    return server, caller


def measure_calls(system: System, effort: Effort) -> dict[str, float]:
    """One round of no-op calls, one by one and, where the system can, pipelined. Raises EndpointFailed.

    The result has `p50_us` and `p99_us`, and `calls_per_s` if it pipelines.
    """
    with Endpoints() as endpoints:
        _, caller = start_pair(endpoints, system)
        result: dict[str, float] = caller.ask("noops", calls=effort.calls, warmup=effort.warmup)
        if system.pipelines:
            result |= caller.ask("pipelined", calls=effort.pipelined, warmup=effort.pipelined // 10)
        return result


def measure_idle(system: System, effort: Effort) -> float:
    """The share of a core, in percent, that the busier one of two idle workers takes after some calls.

    Raises EndpointFailed.
    """
    with Endpoints() as endpoints:
        pair = start_pair(endpoints, system)
        pair[1].ask("noops", calls=effort.warmup, warmup=0)
        time.sleep(_SETTLE)
        before = [cpu_seconds(end.pid) for end in pair]
        start = time.perf_counter()
        time.sleep(effort.idle_seconds)
        seconds = time.perf_counter() - start
        return max(100 * (cpu_seconds(end.pid) - used) / seconds for end, used in zip(pair, before, strict=True))


def measure_busy(spins: bool, effort: Effort) -> float:
    """All calls per second of a group of busy workers that call each other, spinning or not. Raises EndpointFailed."""
    with Endpoints() as endpoints:
        port = free_port()
        workers = [
            endpoints.start(f"busy worker {rank}", kind="busy", rank=rank, port=port, spins=spins)
            for rank in range(BUSY_WORKERS)
        ]
        endpoints.wait_until_up(*workers)
        for worker in workers:
            worker.tell("call_all", seconds=effort.busy_seconds)
        calls: list[Any] = [worker.hear() for worker in workers]
        return float(sum(calls) / effort.busy_seconds)


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
