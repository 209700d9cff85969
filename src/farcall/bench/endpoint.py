"""One end of a measurement: the program that the bench starts for each server, caller, third end and worker.

Started by `bootstrap FD`, where FD is its end of a pipe to the bench. The first message is its role, a
dictionary; each further one is a command and its arguments. It answers each of them with ("done", result) or ("failed",
traceback). It ends at the command "stop", and when the pipe breaks because the bench is gone.

Clocks are read here, not in the bench, so no message of the bench's own is inside a measured time.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from farcall.bench import startup, systems, timing
from farcall.bench.processes import MARK, sweep

Command = Callable[..., object]


def start(role: dict[str, Any]) -> dict[str, Command]:
    """Take up the role: the commands that it understands. Raises what the system raises."""
    if role["kind"] == "busy":
        worker = systems.BusyWorker(role["rank"], role["port"], role["spins"])
        return {"call_all": worker.call_all, "stop": worker.close}
    if role["kind"] == "module":  # one that this program does not know: the module does
        taken: dict[str, Command] = importlib.import_module(role["module"]).take_up(**role["options"])
        return taken
    system = systems.find(role["system"])
    match role["kind"]:
        case "server":
            return {"stop": system.serve(role["address"]).close}
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
    return caller_commands(system.connect(role["address"]))


def caller_commands(caller: systems.Caller) -> dict[str, Command]:
    """What a caller can be asked for."""
    commands: dict[str, Command] = {
        "noops": functools.partial(timing.time_each, caller.noop),
        "pipelined": functools.partial(timing.time_pipelined, caller),
        "stop": caller.close,
    }
    if isinstance(caller, systems.ReferenceCaller):
        commands["proxies"] = functools.partial(timing.time_each, caller.proxy_call)
        commands["shared"] = functools.partial(timing.time_shared, caller)
    if isinstance(caller, systems.EchoCaller):
        commands["echoes"] = functools.partial(echoes, caller)
        commands["in_flight"] = functools.partial(in_flight, caller)
    if isinstance(caller, systems.ExchangingCaller):
        commands["exchanges"] = functools.partial(exchanges, caller)
    if isinstance(caller, systems.StreamingCaller):
        commands["threads"] = functools.partial(timing.time_threads, caller.noop)
        commands["streaming"] = functools.partial(streaming, caller)
    if echo_small := getattr(caller, "echo_small", None):  # of those who send tensors
        commands["small_tensors"] = functools.partial(timing.time_each, echo_small)
    # Some have the one and not the other, or lack the proxies.
    if fetch := getattr(caller, "remote_to_here", None):
        commands["remotes"] = functools.partial(timing.time_each, fetch)
    if share := getattr(caller, "share", None):
        commands["share_rate"] = functools.partial(timing.rate, share)
    return commands


def echoes(caller: systems.EchoCaller, size: int, calls: int, warmup: int, seconds: float) -> dict[str, float]:
    """Time sending so many bytes there and back. Raises RuntimeError if something else comes back."""
    payload = caller.payload(size)
    start = time.perf_counter()
    back = caller.echo(payload)
    if time.perf_counter() - start > seconds:
        warmup = 0  # one was enough
    if type(back) is not type(payload) or len(back) != size or bytes(back[-8:]) != bytes(payload[-8:]):
        raise RuntimeError(f"{size} bytes were sent, and something else came back: {type(back).__name__}")
    del back
    if isinstance(caller, systems.AwaitingCaller):
        call = functools.partial(caller.await_echo, payload)
        return caller.run(timing.time_each_awaited(call, calls, warmup, seconds))
    return timing.time_each(functools.partial(caller.echo, payload), calls, warmup, seconds)


def exchanges(caller: systems.ExchangingCaller, size: int, calls: int, warmup: int, seconds: float) -> dict[str, float]:
    """Time sending so many bytes there and having as many others back. Raises RuntimeError if they are not."""
    payload = caller.payload(size)
    back = caller.exchange(payload)
    if type(back) is not type(payload) or len(back) != size:
        raise RuntimeError(f"{size} bytes were sent, and not as many came back: {type(back).__name__}")
    del back
    return timing.time_each(functools.partial(caller.exchange, payload), calls, warmup, seconds)


def in_flight(caller: systems.EchoCaller, window: int, calls: int, seconds: float) -> float:
    """The rate of no-op calls of which so many are under way at once."""
    return timing.rate(functools.partial(caller.in_flight, window=window), calls, seconds)


def streaming(caller: systems.StreamingCaller, size: int, seconds: float) -> dict[str, float]:
    """Time no-ops while payloads of so many bytes are sent all the time."""
    payload = caller.payload(size)
    return timing.time_beside(caller.noop, functools.partial(caller.send, payload), seconds)


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


def main(descriptor: int) -> None:
    """Live through one role, told by this pipe; ends the process."""
    with Connection(descriptor) as pipe:
        try:
            sys.exit(run(pipe))
        except (EOFError, ConnectionError):
            # The bench is gone, and what a system has started here would outlive it.
            sweep(os.environ[MARK])
            # No orderly end: it could wait for threads, or for another end that is gone as well.
            os._exit(1)
