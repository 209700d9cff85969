"""What all workers do together: values are gathered, and nobody goes on before all have come."""

from __future__ import annotations

import signal

import pytest

from worker_processes import StartWorkers

pytestmark = pytest.mark.timeout(60)


def test_values_are_gathered_from_all_workers_and_from_some(workers: StartWorkers) -> None:
    script = """
    from concurrent.futures import ThreadPoolExecutor
    start()
    row = [rpc._all_gather((turn, RANK)) for turn in range(10)]
    some = rpc._all_gather(RANK, {"w0", "w2"}) if RANK != 1 else None
    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(lambda _: rpc._all_gather(RANK), range(4)))
    if RANK == 0:
        open("before", "w").close()
    rpc._barrier(["w0", "w1", "w2"])
    came = os.path.exists("before")
    rpc._wait_all_workers(20)
    report(row=row, some=some, at_once=at_once, came=came)
    rpc.shutdown()
    """
    for rank, facts in enumerate(workers(script, n=3).finish()):
        assert facts["row"] == [{f"w{n}": [turn, n] for n in range(3)} for turn in range(10)]
        assert facts["some"] == (None if rank == 1 else {"w0": 0, "w2": 2})
        assert facts["at_once"] == [{"w0": 0, "w1": 1, "w2": 2}] * 4
        assert facts["came"] is True


def test_a_worker_that_does_not_come_is_named_to_all_others(workers: StartWorkers) -> None:
    """First it is late, and all can try again; then it is killed."""
    script = """
    start(heartbeat_patience=600)
    if RANK < 2:
        late = outcome(rpc._all_gather, RANK, None, 0.5)
        report(late=[late.get("error"), "w2" in late.get("text", "")])
        open(f"late{RANK}", "w").close()
    else:
        assert wait_for(lambda: os.path.exists("late0") and os.path.exists("late1"), 20)
        outcome(rpc._all_gather, RANK, None, 0.5)  # it hears that it came too late
    report(again=outcome(rpc._all_gather, RANK, None, 20).get("result"))
    if RANK == 2:
        time.sleep(100)
    lost = outcome(rpc._all_gather, RANK, None, 20)
    report(lost=[lost.get("error"), "'w2'" in lost.get("text", "")])
    rpc.shutdown(graceful=False)
    """
    group = workers(script, n=3)
    for rank in range(3):
        assert group.wait_for(rank, "again") == {"w0": 0, "w1": 1, "w2": 2}
    group.send_signal(2, signal.SIGKILL)
    reports = group.finish({2: -signal.SIGKILL}, quiet=False)
    for facts in reports[:2]:
        assert facts["late"] == ["RpcTimeoutError", True]
        assert facts["lost"] == ["WorkerLostError", True]
