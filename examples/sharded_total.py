"""Nested calls under one deadline, and their test in one process: `python examples/sharded_total.py`.

`total` runs on one worker and asks the others. It takes no group: it acts on the group of the worker that runs it, in
processes of their own and in a test alike. It takes no timeout either: its calls have what is left of its caller's.
"""

import farcall
from farcall.testing import LocalGroup

SHARDS = {"shard0": [1, 2, 3], "shard1": [10, 20]}


def part() -> int:
    assert 0 < (farcall.remaining() or 0) <= 10  # inherited over two calls
    return sum(SHARDS[farcall.worker().name])


def total() -> int:
    return sum(farcall.workers("shard*").call(part).values())


def ask(root: farcall.Worker) -> int:
    with farcall.deadline(10):
        return root.call(total)


def test_total() -> None:
    with LocalGroup(3, names=["root", *SHARDS]) as group:
        assert ask(group.worker("root")) == 36


def main() -> None:
    with farcall.engines.local(2, name="shard") as group:
        print("the shards hold", ask(group.worker("shard1")))


if __name__ == "__main__":
    test_total()
    main()
