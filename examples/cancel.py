"""Stops functions that run on another worker: `python examples/cancel.py`.

`search` looks from time to time whether anybody still wants its result. `simulate` does not look: it is marked
`interruptible`, so it may be interrupted anywhere in its own Python code, as by Ctrl-C.
"""

from __future__ import annotations

import itertools
import threading
import time

import farcall

started, ended = threading.Event(), threading.Event()


def search() -> int | None:
    """Looks for an odd perfect number."""
    try:
        started.set()
        for number in itertools.count(1, step=2):
            if farcall.cancelled():
                break
            if sum(part for part in range(1, number) if number % part == 0) == number:
                return number
        return None
    finally:
        ended.set()


@farcall.interruptible
def simulate() -> int:
    try:
        started.set()
        return sum(number % 7 for number in itertools.count())  # never returns by itself
    finally:
        ended.set()


# -- What the main process asks the worker, whose events these are.


def has_started() -> bool:
    return started.wait(30)


def has_ended() -> bool:
    """Says whether the function has ended, and makes the events ready for the next one."""
    try:
        return ended.wait(30)
    finally:
        started.clear()
        ended.clear()


def main() -> None:
    with farcall.engines.local(1):
        worker = farcall.worker("worker0")
        for function in (search, simulate):
            future = worker.submit(function)
            worker.call(has_started)
            future.cancel()
            try:
                future.result()
            except farcall.CallCancelledError as error:
                print(error)
            print("it has ended there:", worker.call(has_ended))

        began = time.monotonic()
        try:
            worker.options(timeout=0.5).call(search)  # a timeout cancels, too
        except farcall.RpcTimeoutError as error:
            print(f"a timeout after {time.monotonic() - began:.1f} s; had it started? {error.started}")
        print("it has ended there:", worker.call(has_ended))


if __name__ == "__main__":
    main()
