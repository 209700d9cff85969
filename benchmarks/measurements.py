"""What is measured: the parts of the benchmark. Each part is a function that measures one system in one round.

Every turn starts the processes of its system anew and ends them afterwards: a system is up only while it is measured.
Idle workers of torch's RPC poll: each takes a whole core from whatever is measured beside it. Starting anew costs some
seconds, and makes each round independent of the one before. Two parts have two groups up at once, which take turns in
short slices (`measure_beside`, `measure_busy_workers`): both groups use no processor while nobody calls.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import systems
from farcall.bench.endpoint import MIXED_KINDS
from farcall.bench.farcall_rpc import BUSY_WORKERS
from farcall.bench.machine import cpu_seconds
from farcall.bench.processes import (
    Endpoint,
    Endpoints,
    busy_programs,
    computing,
    free_port,
    run_python,
    start_ends,
)
from farcall.bench.system import System

_SLICE_CALLS: Final = 100
_SLICE_WARMUP: Final = 20
_BUSY_SLICE_S: Final = 0.5
"""Long compared to the time slices of a scheduler, short compared to the changes of a machine's speed."""
SIZES: Final = {"4 KiB": 1 << 12, "1 MiB": 1 << 20, "64 MiB": 1 << 26}
"""The arrays that are sent there and back, in bytes."""
EXCHANGED: Final = ("1 MiB", "64 MiB")
"""Of `SIZES`, those of which another array comes back as well."""
THREADS: Final = (1, 16)
"""How many threads call at the same time."""
REFERENCE_USES: Final = {"remote + to_here": "remotes", "proxy call": "proxies", "passed back": "passed_back"}
"""The uses of references whose calls are timed one by one, and the command for each."""
BUSY_PROGRAMS: Final = (0, 1, 2, 4)
"""How many busy programs run beside the system in the contended part."""
APART_S: Final = 0.0002
"""How long the caller sleeps between calls that are not made in a row."""
SHORT_CALLS: Final = 60
"""How many calls each thread makes in a short run."""
_SETTLE_S: Final = 0.5
"""Time between the last call and the beginning of idleness."""
YARDSTICKS: Final = {"farcall-unix": "raw-spin-unix", "farcall-tcp": "raw-spin-tcp"}
"""The raw socket beside which a system is measured."""

Found = dict[str, dict[str, float]]
"""What a turn found: for each point, its values by name, such as `p50_us` or `calls_per_s`."""


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
    """The bytes of each array of the stream."""
    fresh_runs: int = 2
    """How many times in each round workers are started anew for nothing but no-ops."""
    mixed_calls: int = 1_000
    """For each kind of call, once alone and once mixed with the others."""
    contended_seconds: float = 1.0
    """For each load, for calls in a row and for calls that are apart."""
    short_runs: int = 5
    """How many short runs of many threads there are beside each number of busy programs."""
    imports: int = 5
    idle_seconds: float = 5.0
    busy_seconds: float = 8.0
    """For each of the two groups of busy workers."""


QUICK: Final = Effort(
    rounds=2,
    calls=300,
    warmup=50,
    pipelined=1_000,
    references=500,
    data_seconds=0.2,
    streamed=1 << 24,
    fresh_runs=1,
    mixed_calls=50,
    contended_seconds=0.1,
    short_runs=1,
    imports=2,
    idle_seconds=1.0,
    busy_seconds=1.0,
)
"""Enough to see that everything works; too little for reliable figures."""


def measure_calls(system: System, effort: Effort) -> Found:
    """Measures calls between two processes one by one and, where the system can, many at once, and references.

    Returns:
        The point `no-op`; `pipelined` if the system pipelines, each of `REFERENCE_USES` if it has references,
        `2 × 2 tensor` if it sends tensors.

    Raises:
        EndpointFailed: A process failed.
    """
    with Endpoints() as endpoints:
        _, caller = start_ends(endpoints, system)
        found: Found = {"no-op": caller.ask("noops", calls=effort.calls, warmup=effort.warmup)}
        if system.pipelines:
            found["pipelined"] = caller.ask("pipelined", calls=effort.pipelined, warmup=effort.pipelined // 10)
        if system.refers:
            for point, command in REFERENCE_USES.items():
                found[point] = caller.ask(command, calls=effort.calls, warmup=effort.warmup)
        if system.package == "torch":
            found["2 × 2 tensor"] = caller.ask("small_tensors", calls=effort.calls, warmup=effort.warmup)
        return found


def measure_data(system: System, effort: Effort) -> Found:
    """Measures arrays there and back and, where many threads may call at once, many threads and a stream.

    Returns:
        The points `echo <size>` for each of `SIZES`; `exchange <size>` for each of `EXCHANGED`; `1 thread` and so on
        for each of `THREADS`; and `beside a stream`, no-ops while another thread sends large arrays.

    Raises:
        EndpointFailed: A process failed.
    """
    seconds = effort.data_seconds
    amount = {"calls": 10 * effort.calls, "warmup": effort.warmup, "seconds": seconds}
    found: Found = {}
    with Endpoints() as endpoints:
        _, caller = start_ends(endpoints, system)
        for name, size in SIZES.items():
            found[f"echo {name}"] = caller.ask("echoes", size=size, **amount)
            if system.exchanges and name in EXCHANGED:
                found[f"exchange {name}"] = caller.ask("exchanges", size=size, **amount)
        if system.threads:
            for number in THREADS:
                found[counted(number, "thread")] = caller.ask("threads", threads=number, seconds=seconds)
            found["beside a stream"] = caller.ask("streaming", size=effort.streamed, seconds=seconds)
    return found


def measure_shared(system: System, effort: Effort) -> Found:
    """Measures references that one worker has another one make and shares with a third: the point `shared`.

    Raises `EndpointFailed`.
    """
    with Endpoints() as endpoints:
        _, caller = start_ends(endpoints, system, third=True)
        rate = caller.ask("shared", references=effort.references, warmup=effort.references // 10)
        return {"shared": {"references_per_s": rate}}


def measure_fresh(system: System, effort: Effort) -> Found:
    """Measures no-ops of workers that are started anew for each run: the point `fresh run`, fastest and slowest p50.

    Raises `EndpointFailed`.
    """
    found = []
    for _ in range(effort.fresh_runs):
        with Endpoints() as endpoints:
            _, caller = start_ends(endpoints, system)
            found.append(caller.ask("noops", calls=effort.calls, warmup=effort.warmup)["p50_us"])
    return {"fresh run": {"fastest_us": min(found), "slowest_us": max(found)}}


def measure_beside(system: System, effort: Effort) -> Found:
    """Measures how long a no-op takes, as a multiple of the raw spinning ping-pong's: the point `of the raw socket`.

    Both are up at once and take turns in short slices, because the speed of a virtual machine changes from second to
    second by as much as the two differ. Raises `EndpointFailed`.
    """
    with Endpoints() as endpoints:
        pair = (system, systems.find(YARDSTICKS[system.name]))
        callers = [start_ends(endpoints, each)[-1] for each in pair]
        for caller in callers:
            caller.ask("noops", calls=1, warmup=effort.warmup)
        ratios = []
        for _ in range(max(2, effort.calls // _SLICE_CALLS)):
            own, other = (one.ask("noops", calls=_SLICE_CALLS, warmup=_SLICE_WARMUP)["p50_us"] for one in callers)
            ratios.append(own / other)
        return {"of the raw socket": {"ratio": statistics.median(ratios)}}


def measure_mixed(system: System, effort: Effort) -> Found:
    """Measures each of `MIXED_KINDS` in a run of its own, then all of them in random order in one process.

    Each run has three fresh processes, so that no run inherits anything from another one.

    Returns:
        The points `alone: <kind>` and `mixed: <kind>` for each kind.

    Raises:
        EndpointFailed: A process failed.
    """

    def run(*kinds: str) -> Found:
        with Endpoints() as endpoints:
            _, caller = start_ends(endpoints, system, third=True)
            found: Found = caller.ask("mixed", kinds=kinds, calls=effort.mixed_calls, warmup=effort.warmup, seed=1)
            return found

    alone = {f"alone: {kind}": run(kind)[kind] for kind in MIXED_KINDS}
    return alone | {f"mixed: {kind}": found for kind, found in run(*MIXED_KINDS).items()}


def measure_contended(system: System, effort: Effort) -> Found:
    """Measures no-ops beside busy programs, and while another thread of the caller or of the callee computes.

    Returns:
        For each load of `contended_loads`, the points `<load>: in a row` and `<load>: apart`. Beside busy programs also
        `<load>: 16 threads`, the median over the short runs.

    Raises:
        EndpointFailed: A process failed.
    """
    found: Found = {}
    with Endpoints() as endpoints:
        server, caller = start_ends(endpoints, system)

        def noops(load: str) -> None:
            amount = {"calls": effort.calls, "warmup": effort.warmup, "seconds": effort.contended_seconds}
            found[f"{load}: in a row"] = caller.ask("noops", **amount)
            found[f"{load}: apart"] = caller.ask("noops", **amount, pause=APART_S)

        # The busy programs are started last, or the start of the system would take long.
        for number in BUSY_PROGRAMS:
            with busy_programs(number):
                noops(busy_load(number))
                runs = [
                    caller.ask("threads", threads=max(THREADS), calls=SHORT_CALLS) for _ in range(effort.short_runs)
                ]
                found[f"{busy_load(number)}: {max(THREADS)} threads"] = {
                    name: statistics.median(run[name] for run in runs) for name in runs[0]
                }
        for load, end in (("caller computes", caller), ("callee computes", server)):
            with computing(end):
                noops(load)
    return found


def counted(number: int, word: str) -> str:
    """Returns a number with its word: `1 thread`, `16 threads`."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def busy_load(number: int) -> str:
    """Returns the name of the load of so many busy programs."""
    return counted(number, "busy program")


def contended_loads() -> list[str]:
    """Returns the names of all loads of `measure_contended`, in order."""
    return [*map(busy_load, BUSY_PROGRAMS), "caller computes", "callee computes"]


def measure_copy(_system: System, effort: Effort) -> Found:
    """Measures how long memory of the largest of `SIZES` takes to be copied in this process and copied back."""
    source = bytearray(os.urandom(1 << 16) * (max(SIZES.values()) >> 16))
    target = bytearray(len(source))
    times = []
    for _ in range(max(5, effort.imports)):
        start = time.perf_counter()
        target[:] = source
        source[:] = target
        times.append(time.perf_counter() - start)
    return {"memory copy": {"p50_us": 1e6 * statistics.median(times)}}


def measure_idle(system: System, effort: Effort) -> Found:
    """Measures the share of a core that the busier one of two idle workers takes after some calls: the point `idle`.

    Raises `EndpointFailed`.
    """
    with Endpoints() as endpoints:
        pair = start_ends(endpoints, system)
        pair[1].ask("noops", calls=effort.warmup, warmup=0)
        time.sleep(_SETTLE_S)
        before = [cpu_seconds(end.pid) for end in pair]
        start = time.perf_counter()
        time.sleep(effort.idle_seconds)
        seconds = time.perf_counter() - start
        used = max(cpu_seconds(end.pid) - spent for end, spent in zip(pair, before, strict=True))
        return {"idle": {"percent": 100 * used / seconds}}


def measure_busy_workers(_system: System, effort: Effort) -> Found:
    """Measures busy farcall workers that call each other: a group that spins, and one that does not.

    Both groups are up and take turns in short slices, as in `measure_beside`.

    Returns:
        The point `busy workers`: the calls per second of each group, `spinning` and `blocking`, and the median over the
        slices of the first as a share of the second, `ratio`.

    Raises:
        EndpointFailed: A process failed.
    """
    with Endpoints() as endpoints:
        groups = [_start_busy_workers(endpoints, spins) for spins in (True, False)]
        rates: tuple[list[float], list[float]] = ([], [])
        for number in range(max(2, round(effort.busy_seconds / _BUSY_SLICE_S))):
            for turn in (0, 1) if number % 2 == 0 else (1, 0):
                for worker in groups[turn]:
                    worker.send("call_all", seconds=_BUSY_SLICE_S)
                calls = sum(float(worker.receive()) for worker in groups[turn])
                rates[turn].append(calls / _BUSY_SLICE_S)
    spinning, blocking = map(statistics.median, rates)
    ratio = statistics.median(own / other for own, other in zip(*rates, strict=True))
    return {"busy workers": {"spinning": spinning, "blocking": blocking, "ratio": ratio}}


def _start_busy_workers(endpoints: Endpoints, spins: bool) -> list[Endpoint]:
    port = free_port()
    workers = [
        endpoints.start(f"busy worker {rank}", kind="busy", rank=rank, port=port, spins=spins)
        for rank in range(BUSY_WORKERS)
    ]
    endpoints.wait_until_up(*workers)
    return workers


def measure_import(_system: System, effort: Effort) -> Found:
    """Measures `import farcall` in a fresh interpreter, its bytecode cached: the point `import`, the best of several.

    Raises `EndpointFailed`.
    """
    program = "import time; start = time.perf_counter(); import farcall; print(time.perf_counter() - start)"
    with tempfile.TemporaryDirectory(prefix="bench-") as cache:
        # A cache of its own: whether bytecode may be written where the sources are is a matter of the machine.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = cache
        # The first one fills the cache and does not count.
        seconds = [float(run_python("`import farcall`", program, environment)) for _ in range(1 + effort.imports)]
    return {"import": {"ms": 1000 * min(seconds[1:])}}


@dataclass(frozen=True)
class Part:
    """A part of the benchmark: in each round, each system that it is for has one turn."""

    title: str
    measure: Callable[[System, Effort], Found]
    is_for: Callable[[System], bool]


def _named(*names: str) -> Callable[[System], bool]:
    return lambda system: system.name in names


PARTS: Final = (
    Part("calls", measure_calls, lambda system: system is not systems.COPY),
    Part("fresh runs", measure_fresh, _named("farcall-unix")),
    Part("beside the raw socket", measure_beside, _named(*YARDSTICKS)),
    Part("shared references", measure_shared, lambda system: system.refers),
    Part("large data and many threads", measure_data, lambda system: system.threads or system is systems.COPY),
    Part("mixed", measure_mixed, _named("farcall-unix")),
    Part("contended", measure_contended, _named("farcall-unix", "torch")),
    Part("idle workers", measure_idle, _named("farcall-unix", "torch")),
    Part("memory", measure_copy, _named("farcall-unix")),
    Part(f"{BUSY_WORKERS} busy workers, spinning and not", measure_busy_workers, _named("farcall-unix")),
    Part("import farcall", measure_import, _named("farcall-unix")),
)
"""All parts, in the order of a round."""
