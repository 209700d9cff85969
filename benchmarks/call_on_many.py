"""Times `workers.call` with a 64 MiB argument on one worker and on eight workers of this host.

    python benchmarks/call_on_many.py

The function either only looks at the size of its argument, or reads a byte of each page of it. The pages of an argument
for several workers are mapped anew for every call, so reading them costs each worker a page fault for every few pages.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import farcall

SIZE = 64 << 20
WORKERS = 8
ROUNDS = 10


def size_of(argument: memoryview) -> int:
    return len(argument)


def read_pages(argument: memoryview) -> int:
    return sum(argument[::4096])


def milliseconds(call: Callable[[], object]) -> float:
    """Returns the median time of a call, after two that are not counted."""
    times = []
    for _ in range(ROUNDS + 2):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:]) * 1000


def main() -> None:
    argument = memoryview(bytearray(SIZE))
    with farcall.engines.local(WORKERS) as group:
        everybody = group.workers(others=True)
        first = next(iter(everybody))
        for function in (size_of, read_pages):
            one = milliseconds(lambda function=function: first.call(function, argument))  # type: ignore[misc]
            many = milliseconds(lambda function=function: everybody.call(function, argument))  # type: ignore[misc]
            print(
                f"{function.__name__}: {one:.1f} ms on one worker, {many:.1f} ms on {len(everybody)}: {many / one:.2f}x"
            )


if __name__ == "__main__":
    main()
