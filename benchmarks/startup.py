"""How long a group takes to start: farcall and torch's RPC side by side, in alternating rounds.

All processes are started first, and import what they need; imports are not measured. Then all are told to go: each
calls `init_rpc`, then everybody else (all calls at once), and says when, by the clock that all processes share. A
round's time is from the moment when the last one called `init_rpc` to the moment when the last call returned.

    python benchmarks/startup.py                          # 32 workers, 5 rounds
    python benchmarks/startup.py --workers 8 --rounds 3 --strict

With --strict the exit status is 1 unless farcall takes at most a quarter of torch's time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

from farcall.bench.processes import free_port

WANTED: Final = 0.25
"""Of torch's time."""
LIMIT: Final = 180.0
"""Seconds for one round of one system."""


def noop() -> None:
    """The callee."""


# One worker


def work(system: str, rank: int, size: int, port: int, control: Connection) -> None:
    """The life of one worker process: it says when it is ready, and does the next thing at each word."""
    rpc: Any = importlib.import_module("torch.distributed.rpc" if system == "torch" else "farcall")
    if system == "torch":
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=LIMIT)
    else:
        options = rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=LIMIT, init_timeout=LIMIT)
    control.send("ready")
    control.recv()
    began = time.monotonic()
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    joined = time.monotonic()
    for future in [rpc.rpc_async(f"w{other}", noop) for other in range(size) if other != rank]:
        future.wait()
    control.send((began, joined, time.monotonic()))
    control.recv()
    began = time.monotonic()
    rpc.shutdown()
    control.send(time.monotonic() - began)


# The rounds


class Round(NamedTuple):
    """What one round of one system took, in seconds."""

    total: float
    joining: float
    """Of it, until `init_rpc` had returned everywhere."""
    shutdown: float
    """The longest graceful shutdown."""


class RoundFailed(Exception):
    """A worker failed, or did not come to its end in time."""


class Worker:
    """One process, with a pipe to it."""

    def __init__(self, system: str, rank: int, size: int, port: int, log: Path) -> None:
        self._title = f"{system}, worker {rank}"
        self._log = log
        self._control, theirs = Pipe()
        with theirs, log.open("wb") as errors:
            words = ["--worker", system, str(rank), str(size), str(port), str(theirs.fileno())]
            self._process = subprocess.Popen(
                [sys.executable, __file__, *words],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )

    def go(self) -> None:
        """Lets it do the next thing. If it is gone, `hear` says so."""
        with contextlib.suppress(OSError):
            self._control.send("go")

    def hear(self, deadline: float) -> Any:
        """Raises `RoundFailed`."""
        try:
            if self._control.poll(max(0.0, deadline - time.monotonic())):
                return self._control.recv()
        except (EOFError, OSError):
            pass
        raise RoundFailed(f"{self._title} said nothing; its last words: {self._log.read_text()[-1500:] or 'none'}")

    def end(self, seconds: float) -> None:
        """Waits for its end for so long, then kills it."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._control.close()


def measure(system: str, size: int, directory: Path) -> Round:
    """One round. Raises `RoundFailed`; no process is left in any case."""
    port = free_port()
    deadline = time.monotonic() + LIMIT
    workers: list[Worker] = []
    try:
        for rank in range(size):
            workers.append(Worker(system, rank, size, port, directory / f"{system}.{rank}"))
        for worker in workers:
            worker.hear(deadline)
        for worker in workers:
            worker.go()
        times = [worker.hear(deadline) for worker in workers]
        for worker in workers:
            worker.go()
        shutdown = max(worker.hear(deadline) for worker in workers)
    except BaseException:
        deadline = 0.0
        raise
    finally:
        for worker in workers:
            worker.end(max(0.0, min(10.0, deadline - time.monotonic())))
    last_came = max(began for began, _, _ in times)
    joining = max(joined for _, joined, _ in times) - last_came
    return Round(max(ended for _, _, ended in times) - last_came, joining, shutdown)


def main(arguments: list[str] | None = None) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(prog="startup.py", description="How long a group takes to start.")
    parser.add_argument("--workers", type=int, default=32, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--systems", default="farcall,torch", metavar="A,B")
    parser.add_argument("--strict", action="store_true", help="exit with 1 unless the figure is met")
    options = parser.parse_args(arguments)
    chosen = options.systems.split(",")
    if "torch" in chosen and importlib.util.find_spec("torch") is None:
        print("torch is not installed and is left out", file=sys.stderr)
        chosen.remove("torch")
    rounds: dict[str, list[Round]] = {system: [] for system in chosen}
    with tempfile.TemporaryDirectory(prefix="farcall-startup-") as directory:
        for number in range(options.rounds):
            for system in chosen if number % 2 == 0 else reversed(chosen):
                try:
                    found = measure(system, options.workers, Path(directory))
                except RoundFailed as failure:
                    print(f"round {number + 1}: {failure}")
                    continue
                rounds[system].append(found)
                print(
                    f"round {number + 1}: {system:8} {found.total:7.3f} s to the last of all calls "
                    f"(init_rpc {found.joining:.3f} s), shutdown {found.shutdown:.3f} s",
                    flush=True,
                )
    if not all(rounds.values()):
        return 1
    medians = {system: statistics.median(each.total for each in found) for system, found in rounds.items()}
    for system, seconds in medians.items():
        print(f"{system}: {seconds:.3f} s, the median of {len(rounds[system])} rounds, {options.workers} workers")
    if len(medians) < 2:
        return 0
    share = medians["farcall"] / medians["torch"]
    verdict = "met" if share <= WANTED else "missed"
    print(f"farcall takes {share:.2f} of torch's time; wanted: at most {WANTED:g}, {verdict}")
    return 1 if options.strict and share > WANTED else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        rank, size, port, descriptor = map(int, sys.argv[3:])
        work(sys.argv[2], rank, size, port, Connection(descriptor))
    else:
        sys.exit(main())
