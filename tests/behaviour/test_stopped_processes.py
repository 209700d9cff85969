"""Processes that stop for a while or for good. The others are not held up.

Heartbeats are slow here, so that nothing ends because a worker was silent for long.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from eventually import eventually
from worker_processes import StartWorkers, Workers

pytestmark = pytest.mark.timeout(60)

KILLED = -signal.SIGKILL


def wait_until_stopped(group: Workers, rank: int) -> None:
    """Returns when the process is stopped by a signal."""
    stat = Path(f"/proc/{group.processes[rank].pid}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


def tell(group: Workers, word: str) -> None:
    """Tells all scripts that wait for the file of that name."""
    (group.directory / word).touch()


@pytest.mark.parametrize("memory", ["shared_memory=0", ""], ids=["sockets only", "shared memory"])
def test_a_caller_that_stops_reading_does_not_block_the_callee_for_others(workers: StartWorkers, memory: str) -> None:
    """w2 asks for far more than a socket takes, and stops. w1, with one thread, answers it and goes on to serve w0."""
    script = f"""
    import signal
    served = 0
    def large():
        global served
        assert wait_for(lambda: os.path.exists("stopped"), 20)
        served += 1
        return bytes(1 << 20)
    def count(): return served
    start(num_worker_threads=1, heartbeat_patience=600, {memory})
    if RANK == 2:
        futures = [rpc.rpc_async("w1", large, timeout=0) for _ in range(100)]
        os.kill(os.getpid(), signal.SIGSTOP)
        report(received=sum(len(future.wait()) for future in futures) >> 20)
    elif RANK == 0:
        assert wait_for(lambda: os.path.exists("stopped"), 20)
        assert wait_for(lambda: rpc.rpc_sync("w1", count) == 100, 20)
        report(quick=[rpc.rpc_sync("w1", int, args=(n,)) for n in range(50)], large=len(rpc.rpc_sync("w1", large)))
    rpc.shutdown()
    """
    group = workers(script, n=3)
    wait_until_stopped(group, 2)
    tell(group, "stopped")
    assert group.wait_for(0, "quick") == list(range(50))
    assert group.wait_for(0, "large") == 1 << 20
    group.send_signal(2, signal.SIGCONT)
    assert group.finish()[2]["received"] == 100


def test_a_call_to_a_stopped_process_ends_at_its_timeout_though_its_arguments_cannot_be_sent(
    workers: StartWorkers,
) -> None:
    script = """
    start(heartbeat_patience=600, shared_memory=0)
    if RANK == 0:
        rpc.rpc_sync("w1", int)
        report(connected=True)
        assert wait_for(lambda: os.path.exists("stopped"), 20)
        large = bytes(32 << 20)
        report(calls=[outcome(rpc.rpc_sync, "w1", len, args=(large,), timeout=0.3).get("error") for _ in range(3)],
               other=rpc.rpc_sync("w0", int, args=(5,)))
        assert wait_for(lambda: os.path.exists("goes on"), 20)
        report(after=rpc.rpc_sync("w1", len, args=(large,)))
    rpc.shutdown()
    """
    group = workers(script)
    group.wait_for(0, "connected")
    group.send_signal(1, signal.SIGSTOP)
    wait_until_stopped(group, 1)
    tell(group, "stopped")
    assert group.wait_for(0, "calls") == ["RpcTimeoutError"] * 3
    group.send_signal(1, signal.SIGCONT)
    tell(group, "goes on")
    facts = group.finish()[0]
    assert (facts["other"], facts["after"]) == (5, 32 << 20)


# -- Killed


def test_everything_that_waits_for_a_killed_process_fails_with_worker_lost(workers: StartWorkers) -> None:
    """No call has a timeout, and no heartbeat is missed for 600 s: the end of the connection is what tells."""
    script = """
    import asyncio
    hanging = []
    def hang():
        hanging.append(1)
        report(hanging=len(hanging))
        time.sleep(100)
    def make(): return "value"
    start(rpc_timeout=0, heartbeat_patience=600, num_worker_threads=32)
    heard = {}
    def hear(how, wait):
        try:
            heard[how] = repr(wait())
        except rpc.WorkerLostError as error:
            heard[how] = [type(error).__name__, error.worker]
        except BaseException as error:
            heard[how] = repr(error)
    async def awaited(future): return await future
    if RANK == 0:
        value = rpc.remote("w1", make)
        assert value.to_here() == "value"
        unread = rpc.rpc_async("w1", hang)
        by_callback = rpc.rpc_async("w1", hang)
        by_callback.add_done_callback(lambda future: hear("callback", future.wait))
        futures = [rpc.rpc_async("w1", hang) for _ in range(5)]
        waits = {
            "rpc_sync": lambda: rpc.rpc_sync("w1", hang),
            "wait": futures[0].wait,
            "result": lambda: futures[1].result(30),
            "then": futures[2].then(lambda future: future.value()).wait,
            "collect_all": lambda: rpc.collect_all([futures[3]]).wait()[0].value(),
            "await": lambda: asyncio.run(awaited(futures[4])),
            "to_here": rpc.remote("w1", hang).to_here,
            "method": rpc.remote("w1", hang).rpc_sync().upper,
            "nested": lambda: rpc.rpc_sync("w2", rpc.rpc_sync, args=("w1", hang)),
        }
        threads = [threading.Thread(target=hear, args=each) for each in waits.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wait_for(unread.done) and wait_for(lambda: "callback" in heard)
        hear("unread", unread.value)
        report(heard=heard)
        hear("later call", lambda: rpc.rpc_sync("w1", int))
        assert wait_for(lambda: outcome(value.to_here).get("error") == "OwnerLostError")
        hear("value", value.to_here)
        report(later=[heard["later call"], heard["value"]], others=rpc.rpc_sync("w2", int, args=(5,)))
    else:
        wait_for(lambda: os.path.exists("end"), 30)
    rpc.shutdown(graceful=False)
    """
    group = workers(script, n=3)
    group.wait_until(1, "hanging", 11)
    group.send_signal(1, signal.SIGKILL)
    heard: dict[str, Any] = group.wait_for(0, "heard")
    later = group.wait_for(0, "later")
    tell(group, "end")
    facts = group.finish({1: KILLED}, quiet=False)[0]
    ways = ("rpc_sync", "wait", "result", "then", "collect_all", "await", "nested", "callback", "unread")
    assert {way: heard[way] for way in ways if heard[way] != ["WorkerLostError", "w1"]} == {}
    for way in ("to_here", "method"):
        assert heard[way] in (["WorkerLostError", "w1"], ["OwnerLostError", "w1"])
    assert later == [["WorkerLostError", "w1"], ["OwnerLostError", "w1"]]
    assert facts["others"] == 5


def test_a_process_that_is_killed_while_large_data_goes_both_ways_fails_the_calls(workers: StartWorkers) -> None:
    script = """
    def take(data): return len(data)
    def give(): return bytes(16 << 20)
    start(heartbeat_patience=600)
    if RANK == 0:
        rpc.rpc_sync("w1", int)
        errors = []
        def work(function, *args):
            while True:
                one = outcome(rpc.rpc_sync, "w1", function, args=args, timeout=0)
                if "error" in one:
                    errors.append(one["error"])
                    return
        threads = [threading.Thread(target=work, args=each) for each in ((take, bytes(16 << 20)), (give,)) * 2]
        for thread in threads:
            thread.start()
        assert wait_for(lambda: rpc.get_metrics()["calls_made"] > 20)
        report(ready=True)
        for thread in threads:
            thread.join()
        report(errors=errors, alive=rpc.rpc_sync("w0", int, args=(5,)))
    else:
        time.sleep(100)
    rpc.shutdown(graceful=False)
    """
    group = workers(script)
    group.wait_for(0, "ready")
    group.send_signal(1, signal.SIGKILL)
    facts = group.finish({1: KILLED}, quiet=False)[0]
    assert facts["errors"] == ["WorkerLostError"] * 4
    assert facts["alive"] == 5


def test_a_killed_process_leaves_no_memory_behind(workers: StartWorkers) -> None:
    """The data that it sent stays usable, and nothing is left in /dev/shm."""
    script = """
    import numpy as np
    before = set(os.listdir("/dev/shm"))
    def make(number): return np.full(1 << 20, float(number))
    start(heartbeat_patience=600)
    if RANK == 0:
        arrays = [rpc.rpc_sync("w1", make, args=(number,)) for number in range(4)]
        report(ready=True)
        assert wait_for(lambda: "error" in outcome(rpc.rpc_sync, "w1", int))
        report(values=[float(each.min()) == each.max() and float(each[0]) for each in arrays],
               left=[name for name in set(os.listdir("/dev/shm")) - before if "farcall" in name])
    else:
        time.sleep(100)
    rpc.shutdown(graceful=False)
    """
    group = workers(script)
    group.wait_for(0, "ready")
    group.send_signal(1, signal.SIGKILL)
    facts = group.finish({1: KILLED}, quiet=False)[0]
    assert facts["values"] == [0, 1, 2, 3]
    assert facts["left"] == []
