"""Nested calls, and their test in one process: `python examples/sharded_total.py`.

`total` runs on one worker and asks the others. It takes no group: it acts on the group of the worker that runs it, in
processes of their own and in a test alike.
"""

import farcall
from farcall.testing import LocalGroup

SHARDS = {"shard0": [1, 2, 3], "shard1": [10, 20]}


def part() -> int:
    return sum(SHARDS[farcall.worker().name])


def total() -> int:
    futures = [farcall.worker(name).submit(part) for name in SHARDS]
    return sum(farcall.wait_all(futures))


def test_total() -> None:
    with LocalGroup(3, names=["root", *SHARDS]) as group:
        assert group.worker("root").call(total) == 36


def main() -> None:
    with farcall.engines.local(2, name="shard") as group:
        print("the shards hold", group.worker("shard1").call(total))


if __name__ == "__main__":
    test_total()
    main()
