"""References among real processes that are killed: survivors get the value or an honest error, and keep nothing.

Four workers pass references around rings and trees, each from several threads, while some are killed by SIGKILL at
moments of a seeded chance. Then every survivor is measured against itself after its warm-up: its tables are empty, it
has no more objects of farcall's than before, and its memory has not grown by more than `GROWTH`. Values are megabytes,
so that a leak of some ten of the hundreds that are made shows there.

Behind it, one by one: what becomes of references whose owner, holder or parent is killed, and what a shutdown says.
"""

from __future__ import annotations

import random
import signal
import time

import pytest

from worker_processes import StartWorkers, Workers

STEADY = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "2"}
"""For the C library: what is freed goes back to the system, so that what stays is what is kept."""

GROWTH = 20
"""Megabytes by which a survivor's memory may grow: what its threads and the interpreter keep for themselves."""

MEASURES = """
import collections, gc, signal, weakref
import farcall.api

def left():
    "How much is in each table that should be empty; only those that are not."
    sizes = farcall.api.current_agent().reference_store.table_sizes()
    return {name: size for name, size in sizes.items() if size}

def settled():
    gc.collect()
    return wait_for(lambda: not left(), 10)

def objects():
    "The objects of farcall's classes, but for those of idle threads of the pool: there may be more."
    gc.collect()
    return collections.Counter(
        type(each).__qualname__ for each in gc.get_objects()
        if type(each).__module__.startswith("farcall.")
        and type(each).__qualname__ not in ("Gate", "ServingThread"))

def megabytes():
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)

def wait_for_file(name, seconds=20):
    assert wait_for(lambda: os.path.exists(name), seconds), f"the test did not say {name!r}"

kept = []
def keep(*values):
    kept.extend(values)

def forget():
    kept.clear()
"""

SCRIPT = """
import random

SEED, SECONDS, THREADS = int(os.environ["REFERENCES_SEED"]), 2.5, 3
MEGABYTES = 2
HONEST = (rpc.OwnerLostError, rpc.ReferenceRefusedError, rpc.WorkerLostError)
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

start()
for rank in range(SIZE):  # warm: threads, connections, and the memory that they keep, rings too
    assert rpc.remote(rank, make, args=(1,)).to_here()[0] == 1
    assert all(rpc.rpc_sync(rank, max, args=(0, 1)) for _ in range(300))
report(warm=True)
wait_for_file("warmed")  # when all others have connected to this one too
settled()
before, objects_before = megabytes(), objects()
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
settled()
again = [rpc.remote(rank, make, args=(2,)).rpc_sync().count(2) for rank in sorted(alive)]
report(again=again == [MEGABYTES << 20] * len(alive), alive=sorted(alive))
wait_for_file("measure", 60)  # when all others have done that too
settled()
for link in farcall.api.current_agent()._links():  # as after some seconds: shared memory that is not in use is kept
    link.sweep(time.monotonic() + 1000)
more = {}
def grown():  # not by what is made for a moment, for a heartbeat, say
    global more
    more = objects() - objects_before
    return more
wait_for(lambda: not grown(), 5)
report(inventory=str(rpc.references()), left=left(), more=more, before=before, after=megabytes(),
       rings=objects()["RingReader"])
wait_for_file("end", 40)
rpc.shutdown(graceful=False)
"""


def tell(group: Workers, word: str) -> None:
    (group.directory / word).touch()


def run_round(workers: StartWorkers, seed: int, victims: list[int]) -> dict[int, dict[str, object]]:
    """One group, some of it killed; what each survivor reports."""
    chance = random.Random(seed)
    group = workers(MEASURES + SCRIPT, n=4, limit=110, environment={**STEADY, "REFERENCES_SEED": str(seed)})
    for rank in range(4):
        group.wait_for(rank, "warm")
    tell(group, "warmed")
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
        group.wait_for(rank, "again")
    tell(group, "measure")
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
        assert facts["outcomes"]["right"] > 3, (rank, facts)  # type: ignore[index]
        assert facts["again"] is True, (rank, facts)
        assert set(reports) <= set(facts["alive"]), (rank, facts)  # type: ignore[call-overload]
        assert victims or set(facts["outcomes"]) == {"right"}, (rank, facts)  # type: ignore[call-overload]
    inventories = {rank: facts["inventory"] for rank, facts in reports.items()}
    assert [facts["left"] for facts in reports.values()] == [{}] * len(reports), inventories
    assert [facts["more"] for facts in reports.values()] == [{}] * len(reports)
    connections = 2 * len(reports)  # to each survivor, and from it, itself too
    assert all(facts["rings"] <= connections for facts in reports.values()), reports  # type: ignore[operator]
    for rank, facts in reports.items():
        grown = facts["after"] - facts["before"]  # type: ignore[operator]
        assert grown < GROWTH, f"worker {rank} has grown by {grown:.0f} MB: {facts}"


# -- One by one


def kill(group: Workers, rank: int) -> None:
    """Kills a worker, and tells the others that it was done."""
    group.send_signal(rank, signal.SIGKILL)
    group.wait(rank)
    tell(group, "killed")


OWNER = """
start()
def uses(rref):
    "What every use of a reference gives, once the loss of its owner is known."
    wait_for(lambda: outcome(rref.to_here).get("error") == "OwnerLostError")
    ways = dict(to_here=rref.to_here, rpc_sync=rref.rpc_sync().upper, rpc_async=lambda: rref.rpc_async().upper().wait(),
                remote=lambda: rref.remote().upper().to_here(), type=rref._get_type,
                future=lambda: rref._get_future().wait(), passed=lambda: rpc.rpc_sync(2 - RANK, keep, args=(rref,)))
    found = {}
    for way, use in ways.items():
        try:
            found[way] = repr(use())
        except rpc.OwnerLostError as error:
            found[way] = f"OwnerLostError: {error.worker}"
        except BaseException as error:
            found[way] = repr(error)
    return found

if RANK == 0:
    rref = rpc.remote(1, str, args=("tea",))
    rpc.rpc_sync(2, keep, args=(rref,))
    report(ready=rref.to_here())
wait_for_file("killed")
if RANK == 2:
    rref = kept[0]
facts = uses(rref)
settled()
report(uses=facts, shown=repr(rref), left=left(), there=rpc.rpc_sync(2 - RANK, max, args=(1, 2)))
wait_for_file("end")
rpc.shutdown(graceful=False)
"""


def test_every_use_of_a_reference_whose_owner_was_killed_raises_owner_lost(workers: StartWorkers) -> None:
    group = workers(MEASURES + OWNER, n=3)
    assert group.wait_for(0, "ready") == "tea"
    kill(group, 1)
    for rank in (0, 2):
        assert set(group.wait_for(rank, "uses").values()) == {"OwnerLostError: w1"}, group.reports(rank)
        assert group.reports(rank)["shown"] == "<RRef 0:1 owned by 'w1'>"
        assert group.reports(rank)["left"] == {}
    tell(group, "end")
    group.finish({1: -signal.SIGKILL}, quiet=False)
    assert [group.reports(rank)["there"] for rank in (0, 2)] == [2, 2], "the others are as well as before"


HOLDER = """
class Thing:
    pass

def pass_on(rref, to):
    kept.append(rref)
    rpc.rpc_sync(to, keep, args=(rref,))

start()
if RANK == 0:
    things = [Thing() for _ in range(20)]
    gone = [weakref.ref(thing) for thing in things]
    rrefs = [rpc.RRef(thing) for thing in things]
    thing = things = None
    for number, rref in enumerate(rrefs):
        if number < 10:
            rpc.rpc_sync(1, keep, args=(rref,))
        else:
            rpc.rpc_sync(1, pass_on, args=(rref, 2))
    rref = rrefs = None
    def holders():
        gc.collect()
        return sorted({name for owned in rpc.references().owned for name in owned.holders})
    def alive():
        "How many of the things: each goes a moment after its entry in the table."
        return sum(ref() is not None for ref in gone)
    wait_for(lambda: holders() == ["w1", "w2"] and not any(owned.handles for owned in rpc.references().owned))
    report(ready=[holders(), alive()])
    wait_for_file("killed")
    wait_for(lambda: holders() == ["w2"] and alive() <= 10)
    report(after=[holders(), alive(), len(rpc.references().owned)])
    rpc.rpc_sync(2, forget)
    report(settled=settled(), end=wait_for(lambda: not alive()))
else:
    wait_for_file("end", 40)
rpc.shutdown(graceful=False)
"""


def test_what_a_killed_holder_held_is_released_and_nothing_else(workers: StartWorkers) -> None:
    """Ten values are held by worker 1 alone, ten more have been passed on by it to worker 2."""
    group = workers(MEASURES + HOLDER, n=3)
    assert group.wait_for(0, "ready") == [["w1", "w2"], 20]
    kill(group, 1)
    assert group.wait_for(0, "after") == [["w2"], 10, 10]
    assert group.wait_for(0, "settled") is True
    assert group.reports(0)["end"] is True
    tell(group, "end")
    group.finish({1: -signal.SIGKILL}, quiet=False)


PARENT = """
def take(rref):
    kept.append(rref)
    report(taken=True)

def owned_there():
    return farcall.api.current_agent().reference_store.table_sizes()["owned"]

def settle_there():
    report(settled=settled(), left=left())

start()
when = os.environ["REFERENCES_WHEN"]
if RANK == 0:
    for rank in range(SIZE):
        rpc.rpc_sync(rank, max, args=(1, 2))
    if when == "never":  # the request for the value is lost with its sender
        connection = farcall.api.current_agent().calling.numbered[1].connection
        connection.send_call = lambda *_: None
    rref = rpc.remote(1, str, args=("tea",))
    rpc.rpc_async(2, take, args=(rref,))
    if when == "at once":
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_file("end", 40)
elif RANK == 2:
    assert wait_for(lambda: kept, 20)
    rref = kept[0]
    if when == "counted":
        assert wait_for(rref.confirmed_by_owner)
    elif when == "never":
        assert wait_for(lambda: rpc.rpc_sync(1, owned_there) == 1), "the owner notes it, and waits for its creator"
    report(ready=True)
    wait_for_file("killed")
    if when != "counted":  # until its owner has decided
        wait_for(lambda: rref.confirmed_by_owner() or rref._handle.new_error is not None)
    report(first=outcome(rref.to_here, timeout=20), second=outcome(rref.rpc_sync(timeout=20).upper))
    rref = None
    kept.clear()
    report(settled=settled(), left=left())
    rpc.rpc_sync(1, settle_there)
    wait_for_file("end", 40)
else:
    wait_for_file("end", 40)
rpc.shutdown(graceful=False)
"""


@pytest.mark.parametrize("when", ["counted", "never", "at once"])
def test_a_reference_whose_parent_was_killed_works_or_is_refused(workers: StartWorkers, when: str) -> None:
    """It works if its owner has counted it, it is refused if the value was never made; else it is one of both."""
    group = workers(MEASURES + PARENT, n=3, environment={"REFERENCES_WHEN": when})
    if when == "at once":  # it kills itself
        group.wait(0)
        tell(group, "killed")
    else:
        group.wait_for(2, "ready")
        kill(group, 0)
    group.wait_for(2, "left")
    first, second = group.reports(2)["first"], group.reports(2)["second"]
    worked = (first.get("result"), second.get("result")) == ("tea", "TEA")
    refused = (first.get("error"), second.get("error")) == ("ReferenceRefusedError", "ReferenceRefusedError")
    assert worked if when == "counted" else refused if when == "never" else worked or refused, (first, second)
    group.wait_for(1, "left")
    tell(group, "end")
    group.finish({0: -signal.SIGKILL}, quiet=False)
    for rank in (1, 2):
        assert group.reports(rank)["left"] == {}


LEFT = """
import logging
logging.basicConfig(format="%(levelname)s %(message)s")
start()
if RANK == 0:
    mine = rpc.RRef({"a": 1})
    rpc.rpc_sync(1, keep, args=(mine, mine))
    theirs = rpc.remote(2, dict)
    theirs.to_here()
rpc.shutdown()
report(after=outcome(theirs.to_here) if RANK == 0 else None)
"""


def test_a_graceful_shutdown_with_references_left_names_them_and_their_holders(workers: StartWorkers) -> None:
    group = workers(MEASURES + LEFT, n=3)
    after = group.finish(quiet=False)[0]["after"]
    said = [group.errors(rank).replace(str(group.directory), "") for rank in range(3)]
    line = (MEASURES + LEFT).splitlines().index('    mine = rpc.RRef({"a": 1})') + 2  # one stands before the script
    assert said[0].splitlines() == [
        "WARNING worker 'w0' shuts down with references left: it owns 1, holds 1",
        f"  reference 0:1 owned by 0 (dict), held 1 here, 1 by 'w1'; made at /script.py:{line}",
        f"  reference 0:1 owned by 2, owned by 'w2', confirmed; made at /script.py:{line + 2}",
    ]
    assert said[1].splitlines() == [
        "WARNING worker 'w1' shuts down with references left: it owns 0, holds 1",
        "  reference 0:1 owned by 0, owned by 'w0', confirmed; made at a message of 'w0'",
    ]
    assert said[2].splitlines() == [
        "WARNING worker 'w2' shuts down with references left: it owns 1, holds 0",
        "  reference 0:1 owned by 2 (dict), held 1 by 'w0'; made at the request of 'w0'",
    ]
    assert after["error"] == "NotInitializedError"
    assert "'w0' has shut down" in after["text"]
