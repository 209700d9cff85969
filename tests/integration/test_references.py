"""References among real processes that are killed: survivors get the value or an honest error, and keep nothing.

Four workers pass references around rings and trees, each from several threads, while some are killed by SIGKILL at
moments of a seeded chance. Values are megabytes, so that a leak of a few shows in a survivor's memory.
"""

from __future__ import annotations

import random
import signal
import time

import pytest
from worker_processes import StartWorkers, Workers

STEADY = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "2"}
"""For the C library: what is freed goes back to the system, so that what stays is what is kept."""

SCRIPT = """
import collections, gc, random

SEED, SECONDS, THREADS = int(os.environ["REFERENCES_SEED"]), 2.5, 3
MEGABYTES = 2
HONEST = (rpc.OwnerLost, rpc.ReferenceRefused, rpc.WorkerLost)
alive = set(range(SIZE))
outcomes = collections.Counter()
wrong = []

def make(mark):
    return bytes([mark]) * (MEGABYTES << 20)

def look(rref, mark):
    value = rref.to_here(timeout=20)
    assert len(value) == MEGABYTES << 20 and value[0] == value[-1] == mark, "another's value"
    return mark

def ring(rref, mark, path):
    "From hand to hand; the last one looks at it, and all the way back each gives a reference of its own."
    if not path:
        return rpc.RRef(look(rref, mark))
    back = rpc.rpc_sync(path[0], ring, args=(rref, mark, path[1:]), timeout=20)
    return rpc.RRef(back.to_here(timeout=20))

def tree(rref, mark, depth, seed):
    "To two others, and from these on."
    if depth == 0:
        return look(rref, mark)
    chance = random.Random(seed)
    futures = [rpc.rpc_async(chance.choice(sorted(alive)), tree, args=(rref, mark, depth - 1, 2 * seed + n), timeout=20)
               for n in range(2)]
    errors = [error for error in (future.exception(30) for future in futures) if error is not None]
    if errors:
        raise errors[0]
    return futures[0].wait()

def work(thread):
    chance = random.Random(SEED * 1000 + RANK * 10 + thread)
    mine = []
    while time.monotonic() < stop:
        mark = chance.randrange(256)
        try:
            some = sorted(alive)
            rref = rpc.remote(chance.choice(some), make, args=(mark,))
            mine.append((rref, mark))
            path = [chance.choice(some) for _ in range(chance.randrange(4))]
            assert ring(rref, mark, path).to_here(timeout=20) == mark
            tree(rref, mark, 2, chance.randrange(1 << 20))
            look(*chance.choice(mine))
            outcomes["right"] += 1
        except HONEST as error:
            outcomes[type(error).__name__] += 1
            alive.discard(int((getattr(error, "worker", None) or "w9").removeprefix("w")))
        except BaseException as error:
            wrong.append(f"{type(error).__name__}: {error}"[:300])
        if len(mine) > 3:
            del mine[chance.randrange(len(mine))]

def left():
    book = rpc.api._agent.book
    sizes = dict(owned=len(book._references.owned), held=len(book._references.held), values=len(book._values),
                 handles=len(book._handles), dropped=len(book._dropped), outboxes=len(book._outboxes),
                 delivery=sum(len(link.unacknowledged) for link in book._delivery._links.values()))
    return {name: size for name, size in sizes.items() if size}

def megabytes():
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)

def wait_for_file(name, seconds):
    assert wait_for(lambda: os.path.exists(name), seconds), f"the test did not say {name!r}"

import farcall.api
rpc.api = farcall.api
start()
for rank in range(SIZE):  # warm: threads, connections, and the memory that they keep
    assert rpc.remote(rank, make, args=(1,)).to_here()[0] == 1
gc.collect()
before = megabytes()
report(ready=True)
wait_for_file("go", 20)
stop = time.monotonic() + SECONDS
threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(60)
report(hanging=sum(thread.is_alive() for thread in threads), outcomes=outcomes, wrong=wrong[:5])
wait_for_file("settle", 60)
gc.collect()
wait_for(lambda: not left(), 10)
again = [rpc.remote(rank, make, args=(2,)).rpc_sync().count(2) for rank in sorted(alive)]
wait_for(lambda: not left(), 10)
report(again=again == [MEGABYTES << 20] * len(alive), alive=sorted(alive))
report(left=left(), before=before, after=megabytes())
wait_for_file("end", 40)
rpc.shutdown(graceful=False)
"""


def tell(group: Workers, word: str) -> None:
    (group.directory / word).touch()


def run_round(workers: StartWorkers, seed: int, victims: list[int]) -> dict[int, dict[str, object]]:
    """One group, some of it killed; what each survivor reports."""
    chance = random.Random(seed)
    group = workers(SCRIPT, n=4, limit=110, environment={**STEADY, "REFERENCES_SEED": str(seed)})
    for rank in range(4):
        group.wait_for(rank, "ready")
    tell(group, "go")
    for victim in victims:
        time.sleep(chance.uniform(0.2, 0.9))
        group.send_signal(victim, signal.SIGKILL)
    survivors = [rank for rank in range(4) if rank not in victims]
    for rank in survivors:
        group.wait_for(rank, "hanging")
    tell(group, "settle")
    for rank in survivors:
        group.wait_for(rank, "left")
    tell(group, "end")
    for rank in range(4):
        group.wait(rank)
    return {rank: group.reports(rank) for rank in survivors}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("seed", "victims"),
    [(1, []), (2, [3]), (3, [1, 2]), (4, [2, 3])],
    ids=["nobody dies", "one dies", "two die", "another two die"],
)
def test_survivors_get_values_or_honest_errors_and_keep_nothing(
    workers: StartWorkers, seed: int, victims: list[int]
) -> None:
    reports = run_round(workers, seed, victims)
    for rank, facts in reports.items():
        assert facts["hanging"] == 0, (rank, facts)
        assert facts["wrong"] == [], (rank, facts)
        assert facts["outcomes"]["right"] > 10, (rank, facts)  # type: ignore[index]
        assert facts["again"] is True, (rank, facts)
        assert set(reports) <= set(facts["alive"]), (rank, facts)  # type: ignore[call-overload]
        assert victims or set(facts["outcomes"]) == {"right"}, (rank, facts)  # type: ignore[call-overload]
    assert [facts["left"] for facts in reports.values()] == [{}] * len(reports)
    for rank, facts in reports.items():
        grown = facts["after"] - facts["before"]  # type: ignore[operator]
        assert grown < 20, f"worker {rank} has grown by {grown:.0f} MB: {facts}"
