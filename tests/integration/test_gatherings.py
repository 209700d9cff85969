"""Gatherings and barriers between real processes: of all and of some, at once, with the late and the dead."""

from __future__ import annotations

import signal

import pytest

from worker_processes import StartWorkers

pytestmark = pytest.mark.timeout(60)


def test_all_and_some_in_a_row_and_at_once(workers: StartWorkers) -> None:
    script = """
    from concurrent.futures import ThreadPoolExecutor
    start()
    me = f"w{RANK}"
    everybody = rpc._all_gather(RANK * 10)
    row = [rpc._all_gather((turn, RANK)) for turn in range(20)]
    halves = rpc._all_gather(me, {"w0", "w2"} if RANK % 2 == 0 else {"w1", "w3"})
    def pair(other):
        return [rpc._all_gather((me, turn), [me, other]) for turn in range(5)]
    with ThreadPoolExecutor(3) as pool:  # each with each, all at once
        pairs = dict(zip(others := [f"w{n}" for n in range(SIZE) if n != RANK], pool.map(pair, others)))
    with ThreadPoolExecutor(4) as pool:  # the same members in several threads
        threads = list(pool.map(lambda _: sorted(rpc._all_gather(0)), range(4)))
    before = rpc.get_metrics()["calls_made"]
    rpc._barrier([f"w{n}" for n in range(SIZE)])
    made = rpc.get_metrics()["calls_made"] - before
    rpc._wait_all_workers(10)
    report(everybody=everybody, row=row, halves=halves, pairs=pairs, threads=threads, made=made,
           left=len(rpc.api.current_agent()._gatherings._led))
    rpc.shutdown()
    """
    reports = workers(script, n=4).finish()
    for rank, found in enumerate(reports):
        assert found["everybody"] == {"w0": 0, "w1": 10, "w2": 20, "w3": 30}
        assert found["row"] == [{f"w{n}": [turn, n] for n in range(4)} for turn in range(20)]
        mates = ["w0", "w2"] if rank % 2 == 0 else ["w1", "w3"]
        assert found["halves"] == {name: name for name in mates}
        for other, gathered in found["pairs"].items():
            assert gathered == [{name: [name, turn] for name in sorted([f"w{rank}", other])} for turn in range(5)]
        assert found["threads"] == 4 * [["w0", "w1", "w2", "w3"]]
        assert found["left"] == 0
    # One call for each worker but the leader; a few more if the machine is so slow that they look for each other.
    assert 3 <= sum(found["made"] for found in reports) <= 9


def test_a_worker_that_dies_before_it_comes_is_named_at_once(workers: StartWorkers) -> None:
    script = """
    start()
    if RANK == 2:
        report(there=True)
        threading.Event().wait(20)
    report(outcome=outcome(rpc._all_gather, RANK, None, 20))
    """
    group = workers(script, n=3)
    group.wait_for(2, "there")
    group.send_signal(2, signal.SIGKILL)
    group.wait(2)
    reports = group.finish({2: -signal.SIGKILL}, quiet=False)
    for rank in (0, 1):
        found = reports[rank]["outcome"]
        assert found["error"] == "WorkerLostError"
        assert "worker 'w2' was lost before it called _all_gather with 'w0', 'w1', 'w2'" in found["text"]
        assert found["seconds"] < 5


def test_a_leader_that_dies_is_named_at_once(workers: StartWorkers) -> None:
    script = """
    start()
    if RANK == 0:
        rpc.rpc_sync("w1", int)
        report(there=True)
        threading.Event().wait(20)
    if RANK == 1:
        threading.Timer(0.3, lambda: report(waits=True)).start()
    report(outcome=outcome(rpc._barrier, ["w0", "w1"]))
    """
    group = workers(script, n=2)
    group.wait_for(0, "there")
    group.wait_for(1, "waits")
    group.send_signal(0, signal.SIGKILL)
    found = group.finish({0: -signal.SIGKILL}, quiet=False)[1]["outcome"]
    assert found["error"] == "WorkerLostError"
    assert "'w0'" in found["text"]
    assert found["seconds"] < 10


@pytest.mark.parametrize("late", [0, 1])
def test_who_does_not_come_in_time_is_named_and_all_can_try_again(workers: StartWorkers, late: int) -> None:
    script = f"""
    start(rpc_timeout=0.5)
    gave_up = 0
    def give_up():
        global gave_up
        gave_up += 1
    if RANK == {late}:
        wait_for(lambda: gave_up == 2)
    report(outcome=outcome(rpc._all_gather, RANK))
    if RANK != {late}:
        rpc.rpc_sync("w{late}", give_up)
    rpc._set_rpc_timeout(20)
    report(again=rpc._all_gather(RANK))
    rpc.shutdown(timeout=20)
    """
    reports = workers(script, n=3).finish()
    for rank, found in enumerate(reports):
        assert found["outcome"]["error"] == "RpcTimeoutError"
        assert (
            f"worker 'w{late}' did not take part: timed out in _all_gather after 0.50 seconds"
            in found["outcome"]["text"]
        )
        assert found["outcome"]["seconds"] < (2.5 if rank != late else 1)
        assert found["again"] == {"w0": 0, "w1": 1, "w2": 2}
