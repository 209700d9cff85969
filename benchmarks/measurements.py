"""What is measured: calls and data between two processes, references among three, an idle worker, many busy workers, an
import.

Each function is one round.

Every round starts its processes anew and ends them afterwards. Torch's transport polls all the time, so a system that
merely waited for its turn would take a core from the one being measured; stopping it by a signal instead would hold
only if each system took a stopped peer well. A start costs some seconds and makes each round independent of the last.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Final

from farcall.bench.machine import cpu_seconds
from farcall.bench.processes import Endpoint, Endpoints, free_port, run_python, start_ends
from farcall.bench.systems import BUSY_WORKERS, System

_SLICE: Final = 100
_SLICE_WARMUP: Final = 20
_BUSY_SLICE: Final = 0.5
"""Seconds. Long against the time slices of a scheduler, short against the changes of a machine's speed."""
SIZES: Final = {"4 KiB": 1 << 12, "1 MiB": 1 << 20, "64 MiB": 1 << 26}
EXCHANGED: Final = ("1 MiB", "64 MiB")
"""Of these, those of which another one comes back as well."""
"""Of the arrays that are sent there and back."""
THREADS: Final = (1, 16)
"""That call at once."""
_SETTLE: Final = 0.5
"""Seconds between the last call and the beginning of idleness."""


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int = 5
    calls: int = 2_000
    warmup: int = 200
    pipelined: int = 5_000
    references: int = 10_000
    data_seconds: float = 2.0
    """For each size, for each number of threads, and for the no-ops beside a stream."""
    streamed: int = 1 << 28
    """Bytes of each array of the stream."""
    imports: int = 5
    idle_seconds: float = 5.0
    busy_seconds: float = 8.0
    """Of each of the two groups."""


QUICK: Final = Effort(
    rounds=2,
    calls=300,
    warmup=50,
    pipelined=1_000,
    references=500,
    data_seconds=0.2,
    streamed=1 << 24,
    imports=2,
    idle_seconds=1.0,
    busy_seconds=1.0,
)
"""Enough to see that everything works; too little for figures to believe in."""


def measure_calls(system: System, effort: Effort) -> dict[str, float]:
    """One round of calls between two processes: no-ops and, where the system can, many at once, and references.

    The result has `p50_us` and `p99_us`, `calls_per_s` if it pipelines, `remote_us` and `proxy_us` (p50) if it refers,
    `tensor_us` (p50), a tensor of 2 × 2 there and back, if it sends tensors.
    Raises EndpointFailed.
    """
    with Endpoints() as endpoints:
        _, caller = start_ends(endpoints, system)
        result: dict[str, float] = caller.ask("noops", calls=effort.calls, warmup=effort.warmup)
        if system.pipelines:
            result |= caller.ask("pipelined", calls=effort.pipelined, warmup=effort.pipelined // 10)
        if system.refers:
            for command, name in (("remotes", "remote_us"), ("proxies", "proxy_us")):
                result[name] = caller.ask(command, calls=effort.calls, warmup=effort.warmup)["p50_us"]
        if system.package == "torch":
            result["tensor_us"] = caller.ask("small_tensors", calls=effort.calls, warmup=effort.warmup)["p50_us"]
        return result


def measure_data(system: System, effort: Effort) -> dict[str, float]:
    """One round of arrays there and back and, where many threads may call at once, of these and of a stream.

    The result has `echo <size>`, µs (p50), for each of `SIZES`; `exchange <size>` for each of `EXCHANGED`; `threads
    <number>`, calls per second, for each of `THREADS`; and `streaming`, the p99 of a no-op beside a stream of large
    arrays, µs. Raises EndpointFailed.
    """
    seconds = effort.data_seconds
    result: dict[str, float] = {}
    with Endpoints() as endpoints:
        _, caller = start_ends(endpoints, system)
        for name, size in SIZES.items():
            times = caller.ask("echoes", size=size, calls=10 * effort.calls, warmup=effort.warmup, seconds=seconds)
            result[f"echo {name}"] = times["p50_us"]
            if system.exchanges and name in EXCHANGED:
                times = caller.ask(
                    "exchanges", size=size, calls=10 * effort.calls, warmup=effort.warmup, seconds=seconds
                )
                result[f"exchange {name}"] = times["p50_us"]
        if system.threads:
            for number in THREADS:
                result[f"threads {number}"] = caller.ask("threads", threads=number, seconds=seconds)
            result["streaming"] = caller.ask("streaming", size=effort.streamed, seconds=seconds)["p99_us"]
    return result


def measure_copy(effort: Effort) -> float:
    """Microseconds in which memory of the largest of `SIZES` is copied in this process and copied back."""
    source = bytearray(os.urandom(1 << 16) * (max(SIZES.values()) >> 16))
    target = bytearray(len(source))
    times = []
    for _ in range(max(5, effort.imports)):
        start = time.perf_counter()
        target[:] = source
        source[:] = target
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def measure_beside(system: System, yardstick: System, effort: Effort) -> float:
    """How long a no-op takes, as a multiple of another system's. Raises EndpointFailed.

    Both are up at once and take turns in short slices, because the speed of a virtual machine changes from second to
    second by as much as the two lie apart. Only for systems that use no processor while nobody calls.
    """
    with Endpoints() as endpoints:
        callers = [start_ends(endpoints, each)[-1] for each in (system, yardstick)]
        for caller in callers:
            caller.ask("noops", calls=1, warmup=effort.warmup)
        ratios = []
        for _ in range(max(2, effort.calls // _SLICE)):
            own, other = (float(one.ask("noops", calls=_SLICE, warmup=_SLICE_WARMUP)["p50_us"]) for one in callers)
            ratios.append(own / other)
        return statistics.median(ratios)


def measure_shared(system: System, effort: Effort) -> float:
    """The rate of references that one worker has another one make and shares with a third. Raises EndpointFailed."""
    with Endpoints() as endpoints:
        _, caller = start_ends(endpoints, system, third=True)
        rate: float = caller.ask("shared", references=effort.references, warmup=effort.references // 10)
        return rate


def measure_idle(system: System, effort: Effort) -> float:
    """The share of a core, in percent, that the busier one of two idle workers takes after some calls.

    Raises EndpointFailed.
    """
    with Endpoints() as endpoints:
        pair = start_ends(endpoints, system)
        pair[1].ask("noops", calls=effort.warmup, warmup=0)
        time.sleep(_SETTLE)
        before = [cpu_seconds(end.pid) for end in pair]
        start = time.perf_counter()
        time.sleep(effort.idle_seconds)
        seconds = time.perf_counter() - start
        return max(100 * (cpu_seconds(end.pid) - used) / seconds for end, used in zip(pair, before, strict=True))


def measure_busy(effort: Effort) -> tuple[list[float], list[float]]:
    """All calls per second of busy workers that call each other: of a group that spins, and of one that does not.

    Both groups are up and take turns in short slices, as in `measure_beside`. Raises EndpointFailed.
    """
    with Endpoints() as endpoints:
        groups = [_start_busy(endpoints, spins) for spins in (True, False)]
        rates: tuple[list[float], list[float]] = ([], [])
        for number in range(max(2, round(effort.busy_seconds / _BUSY_SLICE))):
            for turn in (0, 1) if number % 2 == 0 else (1, 0):
                for worker in groups[turn]:
                    worker.tell("call_all", seconds=_BUSY_SLICE)
                calls = sum(float(worker.hear()) for worker in groups[turn])
                rates[turn].append(calls / _BUSY_SLICE)
        return rates


def _start_busy(endpoints: Endpoints, spins: bool) -> list[Endpoint]:
    port = free_port()
    workers = [
        endpoints.start(f"busy worker {rank}", kind="busy", rank=rank, port=port, spins=spins)
        for rank in range(BUSY_WORKERS)
    ]
    endpoints.wait_until_up(*workers)
    return workers


def measure_import(effort: Effort) -> float:
    """Milliseconds of `import farcall` in a fresh interpreter, its bytecode cached: the best of several.

    Raises EndpointFailed.
    """
    program = "import time; start = time.perf_counter(); import farcall; print(time.perf_counter() - start)"
    with tempfile.TemporaryDirectory(prefix="bench-") as cache:
        # A cache of its own: whether bytecode may be written where the sources are is a matter of the machine.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = cache
        # The first one fills the cache and does not count.
        seconds = [float(run_python("`import farcall`", program, environment)) for _ in range(1 + effort.imports)]
    return 1000 * min(seconds[1:])
