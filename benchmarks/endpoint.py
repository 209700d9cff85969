"""One end of a measurement: the program that the bench starts for each server, caller, third end and busy worker.

Started as `endpoint.py FD`, where FD is its end of a pipe to the bench. The first message is its role, a dictionary;
each further one is a command and its arguments. It answers each of them with ("done", result) or ("failed", traceback).
It ends at the command "stop", and when the pipe breaks because the bench is gone.

Clocks are read here, not in the bench, so no message of the bench's own is inside a measured time.
"""

from __future__ import annotations

import functools
import importlib
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import systems

Command = Callable[..., object]


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of all values lie (nearest rank)."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def time_each(call: Callable[[], None], calls: int, warmup: int) -> dict[str, float]:
    """Time each of `calls` calls, in µs, after `warmup` that do not count."""
    for _ in range(warmup):
        call()
    clock = time.perf_counter_ns
    times = []
    for _ in range(calls):
        start = clock()
        call()
        times.append((clock() - start) / 1000)
    return {"p50_us": statistics.median(times), "p99_us": percentile(times, 0.99)}


def time_pipelined(caller: systems.Caller, calls: int, warmup: int) -> dict[str, float]:
    """The rate of `calls` no-ops that are all under way at once, after `warmup` that do not count."""
    caller.pipelined(warmup)
    start = time.perf_counter()
    caller.pipelined(calls)
    return {"calls_per_s": calls / (time.perf_counter() - start)}


def time_shared(caller: systems.ReferenceCaller, references: int, warmup: int) -> float:
    """How many references per second are made, shared, used once and dropped, after `warmup` that do not count."""
    caller.share(warmup)
    start = time.perf_counter()
    caller.share(references)
    return references / (time.perf_counter() - start)


def start(role: dict[str, Any]) -> dict[str, Command]:
    """Take up the role: the commands that it understands. Raises what the system raises."""
    if role["kind"] == "busy":
        worker = systems.BusyWorker(role["rank"], role["port"], role["spins"])
        return {"call_all": worker.call_all, "stop": worker.close}
    if role["kind"] == "module":  # one that this program does not know: the module does
        taken: dict[str, Command] = importlib.import_module(role["module"]).take_up(**role["options"])
        return taken
    system = systems.find(role["system"])
    if role["kind"] == "server":
        return {"stop": system.serve(role["address"]).close}
    if role["kind"] == "third":
        return {"stop": system.join(role["address"]).close}
    caller = system.connect(role["address"])
    commands: dict[str, Command] = {
        "noops": functools.partial(time_each, caller.noop),
        "pipelined": functools.partial(time_pipelined, caller),
        "stop": caller.close,
    }
    if isinstance(caller, systems.ReferenceCaller):
        commands["remotes"] = functools.partial(time_each, caller.remote_to_here)
        commands["proxies"] = functools.partial(time_each, caller.proxy_call)
        commands["shared"] = functools.partial(time_shared, caller)
    return commands


def attempt(act: Command, *args: object, **options: object) -> tuple[str, Any]:
    """How it went: ("done", result) or ("failed", traceback)."""
    try:
        return "done", act(*args, **options)
    except Exception:
        return "failed", traceback.format_exc()


def run(control: Connection) -> int:
    """Live through one role; the exit status. Raises EOFError or ConnectionError if the bench is gone."""
    outcome, commands = attempt(start, control.recv())
    control.send((outcome, None if outcome == "done" else commands))
    name = ""
    while outcome == "done" and name != "stop":
        name, options = control.recv()
        outcome, result = attempt(commands[name], **options)
        control.send((outcome, result))
    return 0 if outcome == "done" else 1


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as pipe:
        try:
            sys.exit(run(pipe))
        except (EOFError, ConnectionError):
            # The bench is gone. No orderly end: it could wait for threads, or for another end that is gone as well.
            os._exit(1)
