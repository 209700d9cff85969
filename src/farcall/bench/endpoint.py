"""The program in each process of a measurement: a server, a caller, a third end, a worker or a busy program.

`bootstrap FD` starts it, where FD is its end of a pipe to the benchmark. The first message is its role, a dictionary.
Each further message is a command and its arguments. It answers every message with ("done", result) or ("failed",
traceback). It ends after the command "stop", or when the pipe breaks because the benchmark is gone.

Clocks are read here and not in the benchmark's main process, so messages over the pipe are never in a measured time.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

from farcall.bench import startup, timing
from farcall.bench.computing import ComputingThread
from farcall.bench.farcall_rpc import BusyWorker
from farcall.bench.processes import MARK_VARIABLE, kill_marked
from farcall.bench.system import (
    AwaitingCaller,
    Caller,
    EchoCaller,
    ExchangingCaller,
    ReferenceCaller,
    StreamingCaller,
    System,
)

Command = Callable[..., object]
"""Carries out a command of the benchmark, with its options as keyword arguments, and returns the answer. It may raise;
the process then reports the failure and ends.
"""

MIXED_SIZES: Final = {"64 B": 64, "4 KiB": 1 << 12, "1 MiB": 1 << 20}
"""The kinds of calls of `mixed` that send an array to the server and back, with the size of the array in bytes."""
MIXED_KINDS: Final = ("no-op", *MIXED_SIZES, "remote + to_here", "proxy call", "shared reference")
"""All kinds of calls that `mixed` knows."""


def start(role: dict[str, Any]) -> dict[str, Command]:
    """Makes this process what `role` says, and returns the commands that it then understands, by name.

    Args:
        role: The key `kind` says what this process is. "caller" makes calls, "server" runs them, and references are
            shared with "third". "member" is one worker of a group, "starter" starts workers, and "joiner" joins a
            group. "busy" is one of several workers that call each other, and "busy program" only computes. "module" is
            what the module `role["module"]` defines. Any other kind is taken for "caller". The other keys are the
            arguments of the kind, such as `system` and `address`.

    Returns:
        The commands. One of them is "stop", which ends the role. For the kind "module", its module decides.

    Raises:
        KeyError: A key of the role is missing.
        Exception: What the measured library raises if it cannot be started.
    """
    if role["kind"] == "busy":
        worker = BusyWorker(role["rank"], role["port"], role["spins"])
        return {"call_all": worker.call_all, "stop": worker.close}
    if role["kind"] == "module":  # a role that the repository's benchmarks define
        taken: dict[str, Command] = importlib.import_module(role["module"]).take_up(**role["options"])
        return taken
    computing = ComputingThread()
    if role["kind"] == "busy program":
        computing.start()
        return {"stop": computing.stop}
    load: dict[str, Command] = {"start_computing": computing.start, "stop_computing": computing.stop}
    system: System = role["system"]
    match role["kind"]:
        case "server":
            return {**load, "stop": system.serve(role["address"]).close}
        case "third":
            return {"stop": system.join(role["address"]).close}
        case "member":
            return {"stop": system.member(role["rank"], role["address"]).close}
        case "starter":
            starter = startup.Starter(system)
            return {"start": starter.start, "stop": starter.close}
        case "joiner":
            joiner = startup.Joiner(system)
            return {"join": joiner.join, "leave": joiner.leave, "stop": lambda: None}
    return load | caller_commands(system.connect(role["address"]))


def caller_commands(caller: Caller) -> dict[str, Command]:
    """Returns the commands that a caller, the process that makes the calls, understands, by name.

    Every caller has `noops`, `pipelined` and `stop`. The others depend on which protocols of `bench.system` it
    implements: `EchoCaller` adds `echoes` and `in_flight`, for example.
    """
    commands: dict[str, Command] = {
        "noops": functools.partial(timing.time_each, caller.noop),
        "pipelined": functools.partial(timing.time_pipelined, caller),
        "stop": caller.close,
    }
    if isinstance(caller, ReferenceCaller):
        commands["proxies"] = functools.partial(timing.time_each, caller.proxy_call)
        commands["shared"] = functools.partial(timing.time_shared, caller)
        commands["passed_back"] = functools.partial(timing.time_each, caller.pass_back)
        if isinstance(caller, EchoCaller):
            commands["mixed"] = functools.partial(mixed, caller)
    if isinstance(caller, EchoCaller):
        commands["echoes"] = functools.partial(echoes, caller)
        commands["in_flight"] = functools.partial(in_flight, caller)
    if isinstance(caller, ExchangingCaller):
        commands["exchanges"] = functools.partial(exchanges, caller)
    if isinstance(caller, StreamingCaller):
        commands["threads"] = functools.partial(timing.time_threads, caller.noop)
        commands["streaming"] = functools.partial(streaming, caller)
    if echo_small := getattr(caller, "echo_small", None):  # callers that send tensors
        commands["small_tensors"] = functools.partial(timing.time_each, echo_small)
    # Some systems have only one of these two, or lack the proxies of a `ReferenceCaller`.
    if fetch := getattr(caller, "remote_to_here", None):
        commands["remotes"] = functools.partial(timing.time_each, fetch)
    if share := getattr(caller, "share", None):
        commands["share_rate"] = functools.partial(timing.rate, share)
    return commands


def echoes(caller: EchoCaller, size: int, calls: int, warmup: int, seconds: float) -> dict[str, float]:
    """Times calls that send `size` bytes to the server and get the same bytes back.

    One call is made first, to check what comes back.

    Args:
        caller: Makes the calls.
        size: The size of the payload in bytes; may be 0.
        calls: The largest number of timed calls, at least 1.
        warmup: The largest number of further untimed calls before the timed ones; 0 for none.
        seconds: After how many seconds to end. Three calls are timed in any case, unless `calls` is smaller.

    Returns:
        The median, the 99th percentile and the mean in microseconds, as `p50_us`, `p99_us` and `mean_us`.

    Raises:
        RuntimeError: The first call returns a payload of another type or size, or with other bytes at its end.
        Exception: What the measured library raises if a call fails.
    """
    payload = caller.payload(size)
    start = time.perf_counter()
    back = caller.echo(payload)
    if time.perf_counter() - start > seconds:
        warmup = 0  # a slow call: this one was warm-up enough
    if type(back) is not type(payload) or len(back) != size or bytes(back[-8:]) != bytes(payload[-8:]):
        raise RuntimeError(f"{size} bytes were sent, but something else came back: {type(back).__name__}")
    del back
    if isinstance(caller, AwaitingCaller):
        call = functools.partial(caller.await_echo, payload)
        return caller.run(timing.time_each_awaited(call, calls, warmup, seconds))
    return timing.time_each(functools.partial(caller.echo, payload), calls, warmup, seconds)


def exchanges(caller: ExchangingCaller, size: int, calls: int, warmup: int, seconds: float) -> dict[str, float]:
    """Times calls that send a payload of `size` bytes to the server and get a different payload of that size back.

    One call is made first, to check what comes back.

    Args:
        caller: Makes the calls.
        size: The size of both payloads in bytes; may be 0.
        calls: The largest number of timed calls, at least 1.
        warmup: The largest number of further untimed calls before the timed ones; 0 for none.
        seconds: After how many seconds to end. Three calls are timed in any case, unless `calls` is smaller.

    Returns:
        The median, the 99th percentile and the mean in microseconds, as `p50_us`, `p99_us` and `mean_us`.

    Raises:
        RuntimeError: The first call returns a payload of another size or type.
        Exception: What the measured library raises if a call fails.
    """
    payload = caller.payload(size)
    back = caller.exchange(payload)
    if type(back) is not type(payload) or len(back) != size:
        raise RuntimeError(f"{size} bytes were sent, but not as many came back: {type(back).__name__}")
    del back
    return timing.time_each(functools.partial(caller.exchange, payload), calls, warmup, seconds)


class MixedCaller(ReferenceCaller, EchoCaller, Protocol):
    """A caller that can make the calls of all `MIXED_KINDS`: no-ops, echoes of payloads, and uses of references.

    A type for annotations: an object with the methods of `ReferenceCaller` and `EchoCaller` is one.
    """


def mixed(caller: MixedCaller, kinds: Iterable[str], calls: int, warmup: int, seed: int) -> dict[str, dict[str, float]]:
    """Times calls of several kinds in random order.

    The kind "shared reference" needs a third process besides the server.

    Args:
        caller: Makes the calls.
        kinds: The kinds of calls, each one of `MIXED_KINDS`; none gives an empty result.
        calls: How many calls of each kind to time, at least 1.
        warmup: How many untimed calls of each kind to make first; 0 for none.
        seed: The seed of the random order: the same seed gives the same order.

    Returns:
        For each kind, the median, the 99th percentile and the mean in microseconds, as `p50_us`, `p99_us` and
        `mean_us`.

    Raises:
        KeyError: There is no such kind.
        Exception: What the measured library raises if a call fails.
    """
    known: dict[str, Callable[[], object]] = {
        "no-op": caller.noop,
        **{kind: functools.partial(caller.echo, caller.payload(size)) for kind, size in MIXED_SIZES.items()},
        "remote + to_here": caller.remote_to_here,
        "proxy call": caller.proxy_call,
        "shared reference": functools.partial(caller.share, 1),
    }
    return timing.time_mixed({kind: known[kind] for kind in kinds}, calls, warmup, seed)


def in_flight(caller: EchoCaller, window: int, calls: int, seconds: float) -> float:
    """Returns how many no-op calls per second complete with `window` calls always in flight.

    Args:
        caller: Makes the calls.
        window: How many calls are in flight, at least 1.
        calls: The largest number of calls, at least 1.
        seconds: About how long to measure.

    Raises:
        NotImplementedError: The system cannot have several calls in flight.
        Exception: What the measured library raises if a call fails.
    """
    return timing.rate(functools.partial(caller.in_flight, window=window), calls, seconds)


def streaming(caller: StreamingCaller, size: int, seconds: float) -> dict[str, float]:
    """Times no-op calls for `seconds`, while another thread sends payloads of `size` bytes all the time.

    Goes on longer if the other thread has not sent three payloads by then. Returns the median, the 99th percentile and
    the mean in microseconds, as `p50_us`, `p99_us` and `mean_us`. Raises what the measured library raises if a call
    fails.
    """
    payload = caller.payload(size)
    return timing.time_beside(caller.noop, functools.partial(caller.send, payload), seconds)


def attempt(act: Command, *args: object, **options: object) -> tuple[str, Any]:
    """Calls `act(*args, **options)`, and returns ("done", its result).

    If it raised an `Exception`, returns ("failed", traceback), with the traceback as text. Other exceptions, such as
    `KeyboardInterrupt`, are raised.
    """
    try:
        return "done", act(*args, **options)
    except Exception:
        return "failed", traceback.format_exc()


def run(control: Connection) -> int:
    """Carries out one role: reads it from the pipe, then answers commands until "stop" or the first failure.

    The role and every command are answered with ("done", result) or ("failed", traceback).

    Args:
        control: This process's end of the pipe to the benchmark.

    Returns:
        The exit status: 0 after "stop", 1 after a failure.

    Raises:
        EOFError: The benchmark is gone.
        ConnectionError: The benchmark is gone.
        KeyError: The role does not know a command. That command is not answered.
    """
    try:
        role = control.recv()
    except (ImportError, AttributeError):  # the role refers to a module that cannot be imported here
        control.send(("failed", traceback.format_exc()))
        return 1
    outcome, commands = attempt(start, role)
    control.send((outcome, None if outcome == "done" else commands))
    name = ""
    while outcome == "done" and name != "stop":
        name, options = control.recv()
        outcome, result = attempt(commands[name], **options)
        control.send((outcome, result))
    return 0 if outcome == "done" else 1


def main(descriptor: int) -> None:
    """Carries out the role that comes over the pipe with this descriptor, then ends the process.

    Never returns. The exit status is 0 after the command "stop", and 1 after a failure. It is also 1 if the benchmark
    is gone; then the processes that this one has started are killed.
    """
    with Connection(descriptor) as pipe:
        try:
            sys.exit(run(pipe))
        except (EOFError, ConnectionError):
            # The benchmark is gone. Kill what the system has started here, which would otherwise go on running.
            kill_marked(os.environ[MARK_VARIABLE])
            # Not sys.exit, which could wait for threads or for another process that is gone as well.
            os._exit(1)
