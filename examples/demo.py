"""What `make demo` runs: four workers, of which worker0 tells what happens.

    farcall run -n 4 examples/demo.py

All four processes run this same file. Three of them only start, serve the calls of the others, and end.
"""

from __future__ import annotations

import os
import random
import threading
import time

import farcall as rpc

# -- What the workers call on each other. All workers run this file, so each of them has these functions.


def who_are_you() -> str:
    return f"{rpc.get_worker_info().name} is process {os.getpid()}"


def nothing() -> None:
    pass


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def read_shelf(shelf: dict[str, int], item: str) -> int:
    return shelf[item]


# -- A small parameter server: worker0 holds the weights of a line, the others learn from points of their own.

TRUE_SLOPE, TRUE_OFFSET = 3.0, 2.0
RATE = 0.15
STEPS = 60

weights = [0.0, 0.0]  # used in worker0 only
weights_lock = threading.Lock()  # functions that others call run at the same time, in threads


def get_weights() -> list[float]:
    with weights_lock:
        return list(weights)


def push_gradient(gradient: list[float]) -> list[float]:
    """Runs in worker0: takes one trainer's step, gives the new weights."""
    with weights_lock:
        for index, part in enumerate(gradient):
            weights[index] -= RATE * part
        return list(weights)


def train(steps: int) -> float:
    """Runs in each trainer, which calls back into worker0. Gives the error that is left."""
    chance = random.Random(rpc.get_worker_info().id)
    points = [(x, TRUE_SLOPE * x + TRUE_OFFSET) for x in (chance.uniform(-1, 1) for _ in range(50))]
    slope, offset = rpc.rpc_sync("worker0", get_weights)
    for _ in range(steps):
        misses = [(x, slope * x + offset - y) for x, y in points]
        gradient = [sum(miss * x for x, miss in misses) / len(points), sum(miss for _, miss in misses) / len(points)]
        slope, offset = rpc.rpc_sync("worker0", push_gradient, args=(gradient,))
    return sum((slope * x + offset - y) ** 2 for x, y in points) / len(points)


# -- The story, told by worker0.


def show_calls() -> None:
    title("Calls: run a function in another process, and get what it returns")
    for name in ("worker1", "worker2", "worker3"):
        say(f'rpc_sync("{name}", who_are_you)', rpc.rpc_sync(name, who_are_you))
    say('rpc_sync("worker1", max, args=(3, 4))', rpc.rpc_sync("worker1", max, args=(3, 4)))
    factor = 10
    say("a lambda with what it closes over", rpc.rpc_sync("worker2", lambda x: factor * x, args=(4,)))
    count = 2000
    start = time.perf_counter()
    for _ in range(count):
        rpc.rpc_sync("worker1", nothing)
    say(f"{count} calls, one after the other", f"{(time.perf_counter() - start) / count * 1e6:.0f} µs each")


def show_futures() -> None:
    title("Futures: start calls now, take the results later")
    start = time.perf_counter()
    futures = [rpc.rpc_async(f"worker{rank}", nap, args=(0.3,)) for rank in (1, 2, 3)]
    say("three naps of 0.3 s are started", f"done: {[future.done() for future in futures]}")
    results = rpc.wait_all(futures)
    say("wait_all(futures)", f"{results} after {time.perf_counter() - start:.1f} s")
    doubled = rpc.rpc_async("worker1", max, args=(3, 4)).then(lambda future: 2 * future.value())
    say("then(double it)", doubled.wait())


def show_errors() -> None:
    title("Errors: they arrive with their own type, and say where they come from")
    try:
        rpc.rpc_sync("worker2", read_shelf, args=({"tea": 3}, "milk"))
    except KeyError as error:
        say('rpc_sync("worker2", read_shelf, ...)', f"KeyError: {error}")
        for line in "\n".join(error.__notes__).strip().splitlines():
            print(f"      {line}")
    try:
        rpc.rpc_sync("worker3", nap, args=(1.0,), timeout=0.2)
    except rpc.RpcTimeoutError as error:
        say("a nap of 1 s with timeout=0.2", f"RpcTimeoutError: {error}")
    try:
        rpc.rpc_sync("worker9", nothing)
    except rpc.UnknownWorkerError as error:
        say('rpc_sync("worker9", nothing)', f"UnknownWorkerError: {error}")


def show_parameter_server() -> None:
    title("A parameter server: worker0 keeps the weights, workers 1 to 3 learn from points of their own")
    print(f"    They look for the line y = {TRUE_SLOPE:g} x + {TRUE_OFFSET:g}, in {STEPS} steps each.")
    say("at the start", line(weights))
    losses = rpc.wait_all([rpc.rpc_async(f"worker{rank}", train, args=(STEPS,)) for rank in (1, 2, 3)])
    say(f"after {3 * STEPS} steps", line(weights))
    say("mean squared error of each trainer", ", ".join(f"{loss:.1e}" for loss in losses))


def title(text: str) -> None:
    print(f"\n{text}")


def say(what: str, outcome: object) -> None:
    print(f"    {what}  →  {outcome}")


def line(found: list[float]) -> str:
    slope, offset = found
    return f"y = {slope:.2f} x + {offset:.2f}"


def main() -> None:
    rpc.init_rpc(os.environ["FARCALL_WORKER_NAME"])
    if rpc.get_worker_info().name == "worker0":
        print(f"Four workers have found each other. This is worker0, process {os.getpid()}.")
        show_calls()
        show_futures()
        show_errors()
        show_parameter_server()
        print("\nThat is all. Now every worker calls shutdown(), which waits until all are done.")
    rpc.shutdown()


if __name__ == "__main__":
    main()
