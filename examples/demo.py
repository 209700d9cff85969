"""What `make demo` runs: four workers, of which worker0 tells what happens.

    farcall run -n 4 examples/demo.py

All four processes run this same file. Three of them only start, serve the calls of the others, and end.
"""

from __future__ import annotations

import os
import random
import threading
import time

import farcall

# -- What the workers call on each other. All workers run this file, so each of them has these functions.


def who_are_you() -> str:
    return f"{farcall.worker().name} is process {os.getpid()}"


def nothing() -> None:
    pass


def rest(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def search() -> None:
    """Runs until nobody wants its result any more."""
    while not farcall.cancelled():
        time.sleep(0.001)
    search_stopped.set()


search_stopped = threading.Event()  # used in worker3 only


def has_stopped() -> bool:
    return search_stopped.wait(10)


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
    chance = random.Random(farcall.worker().info().id)
    server = farcall.worker("worker0")
    points = [(x, TRUE_SLOPE * x + TRUE_OFFSET) for x in (chance.uniform(-1, 1) for _ in range(50))]
    slope, offset = server.call(get_weights)
    for _ in range(steps):
        misses = [(x, slope * x + offset - y) for x, y in points]
        gradient = [sum(miss * x for x, miss in misses) / len(points), sum(miss for _, miss in misses) / len(points)]
        slope, offset = server.call(push_gradient, gradient)
    return sum((slope * x + offset - y) ** 2 for x, y in points) / len(points)


# -- The story, told by worker0.


def show_calls() -> None:
    title("Calls: run a function in another process, and get what it returns")
    worker = farcall.worker("worker1")
    say('farcall.worker("worker1").call(who_are_you)', worker.call(who_are_you))
    say('farcall.worker("worker1").call(max, 3, 4)', worker.call(max, 3, 4))
    factor = 10
    say("a lambda with what it closes over", worker.call(lambda x: factor * x, 4))
    for name, answer in farcall.workers(others=True).call(who_are_you).items():
        say(f"on all other workers at once: {name}", answer)
    count = 2000
    start = time.perf_counter()
    for _ in range(count):
        worker.call(nothing)
    say(f"{count} calls, one after the other", f"{(time.perf_counter() - start) / count * 1e6:.0f} µs each")


def show_futures() -> None:
    title("Futures: start calls now, take the results later")
    start = time.perf_counter()
    futures = farcall.workers(others=True).submit(rest, 0.3)
    say("rests of 0.3 s are started on three workers", f"done: {futures.done()}")
    results = futures.result()
    say("futures.result()", f"{results} after {time.perf_counter() - start:.1f} s")
    doubled = farcall.worker("worker1").submit(max, 3, 4).then(lambda future: 2 * future.value())
    say("then(double it)", doubled.result())


def show_references() -> None:
    title("References: an object stays on another worker, and its methods run there")
    shelf = farcall.worker("worker2").keep(dict, tea=3)
    shelf.call(dict.update, milk=1)
    say("worker2's shelf after shelf.call(dict.update, milk=1)", shelf.to_here())
    say("shelf.call(len)", shelf.call(len))


def show_errors() -> None:
    title("Errors: they arrive with their own type, and say where they come from")
    try:
        farcall.worker("worker2").call(read_shelf, {"tea": 3}, "milk")
    except KeyError as error:
        say('farcall.worker("worker2").call(read_shelf, ...)', f"KeyError: {error}")
        for line in "\n".join(error.__notes__).strip().splitlines():
            print(f"      {line}")
    try:
        farcall.worker("worker9").call(nothing)
    except farcall.UnknownWorkerError as error:
        say('farcall.worker("worker9").call(nothing)', f"UnknownWorkerError: {error}")


def show_control() -> None:
    title("Control: a call whose time is over is stopped where it runs")
    worker = farcall.worker("worker3")
    try:
        worker.options(timeout=0.2).call(search)
    except farcall.RpcTimeoutError as error:
        say("options(timeout=0.2).call(search)", f"RpcTimeoutError: {error}")
    say("the search has stopped on worker3", worker.call(has_stopped))


def show_parameter_server() -> None:
    title("A parameter server: worker0 keeps the weights, workers 1 to 3 learn from points of their own")
    print(f"    They look for the line y = {TRUE_SLOPE:g} x + {TRUE_OFFSET:g}, in {STEPS} steps each.")
    say("at the start", line(weights))
    losses = farcall.workers(others=True).call(train, STEPS)
    say(f"after {3 * STEPS} steps", line(weights))
    say("mean squared error of each trainer", ", ".join(f"{loss:.1e}" for loss in losses.values()))


def title(text: str) -> None:
    print(f"\n{text}")


def say(what: str, outcome: object) -> None:
    print(f"    {what}  →  {outcome}")


def line(found: list[float]) -> str:
    slope, offset = found
    return f"y = {slope:.2f} x + {offset:.2f}"


def main() -> None:
    with farcall.Group() as group:
        if group.info.name == "worker0":
            print(f"Four workers have found each other. This is worker0, process {os.getpid()}.")
            show_calls()
            show_futures()
            show_references()
            show_errors()
            show_control()
            show_parameter_server()
            print("\nThat is all. Now every worker leaves the group, which waits until all are done.")


if __name__ == "__main__":
    main()
