"""What workers hear when another one is killed, and what Ctrl-C and fork do: nothing waits, nothing is mixed up."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from worker_processes import StartWorkers, Workers

pytestmark = pytest.mark.timeout(60)

KILLED = -signal.SIGKILL


# -- a worker is killed


@pytest.mark.parametrize("transports", [("unix",), ("tcp",)], ids="".join)
def test_everybody_who_waits_hears_of_a_killed_worker_within_a_second(
    workers: StartWorkers, transports: tuple[str, ...]
) -> None:
    script = """
    hanging = []
    def hang():
        hanging.append(1)
        report(hanging=len(hanging))
        time.sleep(100)
    start(rpc_timeout=0)
    heard = {}
    def hear(how, wait):
        facts = outcome(wait)
        heard[how] = {**facts, "at": time.monotonic()}
    if RANK == 0:
        futures = {how: rpc.rpc_async("w1", hang) for how in ("unread", "waited for", "by another", "derived")}
        derived = futures["derived"].then(lambda future: future.value())
        futures["by callback"] = rpc.rpc_async("w1", hang)
        futures["by callback"].add_done_callback(lambda future: hear("by callback", future.wait))
        threads = [
            threading.Thread(target=hear, args=("waited for", futures["waited for"].wait)),
            threading.Thread(target=hear, args=("by another", futures["by another"].wait)),
            threading.Thread(target=hear, args=("derived", derived.wait)),
            threading.Thread(target=hear, args=("sync", lambda: rpc.rpc_sync("w1", hang))),
            threading.Thread(target=hear, args=("nested", lambda: rpc.rpc_sync("w2", rpc.rpc_sync, args=("w1", hang)))),
        ]
        for thread in threads:
            thread.start()
        wait_for(futures["unread"].done, 20)
        hear("unread", futures["unread"].value)
        for thread in threads:
            thread.join()
        wait_for(lambda: "by callback" in heard)
        report(heard=heard)
        report(later=outcome(rpc.rpc_sync, "w1", int), alive=rpc.rpc_sync("w2", int))
        rpc.shutdown(graceful=False)
    elif RANK == 2:
        wait_for(lambda: os.path.exists("done"), 20)
        rpc.shutdown(graceful=False)
    else:
        time.sleep(100)
    """
    group = workers(script, n=3, transports=transports)
    group.wait_until(1, "hanging", 7)
    killed = group.send_signal(1, signal.SIGKILL)
    heard: dict[str, dict[str, Any]] = group.wait_for(0, "heard")
    later = group.wait_for(0, "later")
    (group.directory / "done").touch()
    facts = group.finish({1: KILLED})[0]
    assert set(heard) == {"unread", "waited for", "by another", "derived", "by callback", "sync", "nested"}
    for how, one in heard.items():
        assert one["error"] == "WorkerLostError", how
        assert "worker 'w1' was lost" in one["text"], how
        assert one["at"] - killed < 1, how
    assert later["error"] == "WorkerLostError"
    assert "'w1'" in later["text"]
    assert later["seconds"] < 1
    assert facts["alive"] == 0


@pytest.mark.parametrize("victim", [0, 1])
def test_a_graceful_shutdown_without_a_killed_worker_ends_and_names_it(workers: StartWorkers, victim: int) -> None:
    script = """
    start()
    report(ready=True)
    if RANK == int(os.environ["VICTIM"]):
        time.sleep(100)
    time.sleep(0.3 if RANK == 0 else 0.9)
    report(shutdown=outcome(rpc.shutdown))
    """
    group = workers(script, n=3, environment={"VICTIM": str(victim)})
    for rank in range(3):
        group.wait_for(rank, "ready")
    group.send_signal(victim, signal.SIGKILL)
    for rank, facts in enumerate(group.finish({victim: KILLED})):
        if rank != victim:
            assert facts["shutdown"]["error"] == "ShutdownError"
            assert f"w{victim}" in facts["shutdown"]["text"]
            assert facts["shutdown"]["seconds"] < 8


def test_a_worker_killed_while_others_wait_in_shutdown(workers: StartWorkers) -> None:
    script = """
    start()
    if RANK == 1:
        time.sleep(100)
    report(leaving=True)
    report(shutdown=outcome(rpc.shutdown))
    """
    group = workers(script, n=3)
    for rank in (0, 2):
        group.wait_for(rank, "leaving")
    group.send_signal(1, signal.SIGKILL)
    reports = group.finish({1: KILLED})
    for rank in (0, 2):
        assert reports[rank]["shutdown"]["error"] == "ShutdownError"


def test_a_worker_killed_while_it_receives_and_while_it_sends_much(workers: StartWorkers) -> None:
    script = """
    def take(data): return len(data)
    def give(): return bytes(256 << 20)
    start()
    if RANK == 0:
        giving = rpc.rpc_async("w1", give)
        rpc.rpc_sync("w1", int)
        taking = rpc.rpc_async("w1", take, args=(bytes(4 << 20),))
        report(ready=True)
        while True:
            one = outcome(rpc.rpc_sync, "w1", take, args=(bytes(64 << 20),))
            if "error" in one:
                break
        report(one=one, giving=repr(giving.exception(5)), taking=repr(taking.exception(5)))
    else:
        time.sleep(100)
    os._exit(0)
    """
    group = workers(script)
    group.wait_for(0, "ready")
    group.send_signal(1, signal.SIGKILL)
    facts = group.finish({1: KILLED})[0]
    assert facts["one"]["error"] == "WorkerLostError"
    for which in ("giving", "taking"):  # they may have ended before
        assert facts[which].startswith(("None", "WorkerLostError"))


# -- a worker leaves without a word to the others


@pytest.mark.parametrize("leave", ["raise RuntimeError('crash')", "rpc.shutdown(graceful=False)", "sys.exit(1)"])
def test_a_graceful_shutdown_does_not_wait_for_who_has_left_already(workers: StartWorkers, leave: str) -> None:
    script = f"""
    start()
    if RANK == 1:
        {leave}
    else:
        report(shutdown=outcome(rpc.shutdown, timeout=5))
    """
    group = workers(script, limit=15)
    group.wait(1)
    facts = group.wait_for(0, "shutdown")
    group.wait(0)
    assert facts["error"] == "ShutdownError"
    assert "w1" in facts["text"]
    assert facts["seconds"] < 4


def test_the_interpreter_ends_without_a_shutdown(workers: StartWorkers) -> None:
    script = """
    def forever(): time.sleep(100)
    start()
    for to in range(SIZE):
        rpc.rpc_async(to, forever)
        rpc.rpc_sync(to, int)
    time.sleep(0.5)
    """
    group = workers(script, limit=15)
    group.finish(quiet=False)
    for rank in range(2):
        assert "Traceback" not in group.errors(rank)


def test_the_interpreter_ends_with_calls_under_way_and_threads_that_wait(workers: StartWorkers) -> None:
    script = """
    def forever(): time.sleep(100)
    start()
    if RANK == 0:
        for _ in range(4):
            threading.Thread(target=lambda: rpc.rpc_sync("w1", forever, timeout=0), daemon=True).start()
        for _ in range(2000):
            rpc.rpc_async("w1", int)
    else:
        time.sleep(1)
    """
    group = workers(script, limit=15)
    group.finish(quiet=False)
    for rank in range(2):
        assert "Fatal" not in group.errors(rank)


def test_the_interpreter_ends_while_another_thread_shuts_down(workers: StartWorkers) -> None:
    script = """
    start()
    report(ready=True)
    if RANK == 0:
        threading.Thread(target=rpc.shutdown, daemon=True).start()
        time.sleep(0.3)
        report(ends=True)
    else:
        wait_for(lambda: os.path.exists("done"), 20)
        os._exit(0)
    """
    group = workers(script, limit=15)
    group.wait_for(0, "ends")
    time.sleep(3)
    status = group.processes[0].poll()
    (group.directory / "done").touch()
    assert status == 0, "it has not ended"


def test_ungraceful_ends_at_once_with_work_under_way(workers: StartWorkers) -> None:
    script = """
    def forever(): time.sleep(100)
    start()
    rpc.rpc_async("w0", forever).then(lambda future: future.exception())
    rpc.rpc_async("w1", forever).then(lambda future: future.exception())
    rpc.rpc_sync("w0", int), rpc.rpc_sync("w1", int)
    time.sleep(0.2)
    report(shutdown=outcome(rpc.shutdown, graceful=False))
    os._exit(0)
    """
    for facts in workers(script).finish(quiet=False):
        assert facts["shutdown"]["result"] is None
        assert facts["shutdown"]["seconds"] < 4


@pytest.mark.parametrize("rank", [0, 1])
def test_ungraceful_does_not_wait_for_the_others(workers: StartWorkers, rank: int) -> None:
    script = f"""
    start()
    rpc.rpc_sync(0, int), rpc.rpc_sync(1, int)
    if RANK == {rank}:
        time.sleep(0.2)
        report(shutdown=outcome(rpc.shutdown, graceful=False))
    else:
        wait_for(lambda: os.path.exists("done"), 20)
        rpc.shutdown(graceful=False)
    """
    group = workers(script)
    facts = group.wait_for(rank, "shutdown")
    (group.directory / "done").touch()
    group.finish(quiet=False)
    assert facts["seconds"] < 2.5


def test_graceful_waits_for_the_work_of_others(workers: StartWorkers) -> None:
    script = """
    def chain(hops):
        time.sleep(0.1)
        return 0 if hops == 0 else 1 + rpc.rpc_sync((RANK + 1) % SIZE, chain, args=(hops - 1,))
    start()
    futures = [rpc.rpc_async((RANK + 1) % SIZE, chain, args=(RANK * 3,))]
    rpc.shutdown()
    report(chains=[future.value() for future in futures])
    """
    reports = workers(script, n=3).finish()
    assert [facts["chains"] for facts in reports] == [[0], [3], [6]]


# -- Ctrl-C


WAITS = {
    "in rpc_sync": "rpc.rpc_sync('w1', time.sleep, args=(1.5,))",
    "in Future.wait": "rpc.rpc_async('w1', time.sleep, args=(1.5,)).wait()",
    "in a queue behind another reader": "rpc.rpc_sync('w1', time.sleep, args=(1.5,))",
    "in collect_all": "rpc.collect_all([rpc.rpc_async('w1', time.sleep, args=(1.5,)) for _ in range(3)]).wait()",
    "in a future made by hand": "rpc.Future().wait()",
    "in a then": "rpc.rpc_async('w1', time.sleep, args=(1.5,)).then(lambda future: future.value()).wait()",
    "without a timeout": "rpc.rpc_sync('w1', time.sleep, args=(1.5,), timeout=0)",
    "in a large result": "[rpc.rpc_sync('w1', numpy.zeros, args=(8 << 20,)) for _ in range(1000)]",
    "in shutdown": "rpc.shutdown()",
}


@pytest.mark.parametrize("where", WAITS)
def test_ctrl_c_works_at_once_and_correct_calls_go_on(workers: StartWorkers, where: str) -> None:
    script = f"""
    import numpy
    start()
    where = {where!r}
    if RANK == 0:
        rpc.rpc_sync("w1", int)
        if "behind another reader" in where:
            reader = rpc.rpc_async("w1", time.sleep, args=(2.5,))
            thread = threading.Thread(target=reader.wait)
            thread.start()
            time.sleep(0.1)
        report(waiting=True)
        try:
            {WAITS[where]}
            report(at=None)
        except KeyboardInterrupt:
            report(at=time.monotonic())
        if where == "in shutdown":
            report(after=outcome(rpc.rpc_sync, "w1", int)["error"])
        else:
            if "large" in where:
                outcome(rpc.rpc_sync, "w1", int)  # the connection may be of no more use, as documented
            report(after=[rpc.rpc_sync("w1", int, args=(n,)) for n in range(200)] == list(range(200)))
            report(other=rpc.rpc_async("w1", int, args=(7,)).then(lambda future: future.value() + 1).wait())
        if "behind another reader" in where:
            thread.join()
    if where == "in shutdown":
        wait_for(lambda: os.path.exists("done"), 20)
        os._exit(0)
    rpc.shutdown()
    """
    group = workers(script, limit=20)
    group.wait_for(0, "waiting")
    time.sleep(0.4)
    sent = group.send_signal(0, signal.SIGINT)
    at = group.wait_for(0, "at")
    assert at is not None, "the wait ended before the signal came"
    assert at - sent < 0.5
    after = group.wait_for(0, "after")
    (group.directory / "done").touch()
    facts = group.finish(quiet=False)[0]
    if where == "in shutdown":
        assert after == "NotInitializedError"
    else:
        assert after is True
        assert facts["other"] == 8


CTRL_C_STORM = """
import signal, random

class Storm(KeyboardInterrupt):
    pass

def interrupt(*_):
    raise Storm

start()
if RANK == 0:
    rpc.rpc_sync("w1", int)
    signal.signal(signal.SIGALRM, interrupt)
    interrupted = wrong = lost = 0
    stop = time.monotonic() + 4
    n = 0
    while time.monotonic() < stop:
        n += 1
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(20e-6, 600e-6))
            try:
                for _ in range(50):
                    rpc.rpc_sync("w1", int, args=(n,))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Storm:
            interrupted += 1
        except rpc.RpcError:
            pass  # other calls may fail with the one that was interrupted, the next one may not
        signal.setitimer(signal.ITIMER_REAL, 0)
        after = outcome(rpc.rpc_sync, "w1", int, args=(n,), timeout=2)
        if after.get("error") == "WorkerLostError":
            lost += 1
        elif after.get("result") != n:
            wrong += 1
            report(wrong_one=after)
            break
    report(interrupted=interrupted, wrong=wrong, lost=lost)
    os._exit(0)
else:
    time.sleep(100)
"""


def _storm(workers: StartWorkers) -> tuple[Workers, dict[str, Any]]:
    group = workers(CTRL_C_STORM, limit=25)
    group.wait_for(0, "lost")
    facts = group.reports(0)
    group.send_signal(1, signal.SIGKILL)
    return group, facts


def test_ctrl_c_at_any_point_of_a_call_leaves_a_worker_that_can_call(workers: StartWorkers) -> None:
    group, facts = _storm(workers)
    group.finish({1: KILLED}, quiet=False)
    assert facts["wrong"] == 0, facts
    assert facts["lost"] == 0, facts
    assert facts["interrupted"] > 100


# -- fork


def test_a_forked_child_is_told_and_the_parent_goes_on(workers: StartWorkers) -> None:
    script = """
    start()
    if RANK == 0:
        rpc.rpc_sync("w1", int)
        pending = rpc.rpc_async("w1", time.sleep, args=(0.5,))
        child = os.fork()
        if child == 0:
            report(child=[outcome(rpc.rpc_sync, "w1", int), outcome(rpc.rpc_async, "w1", int),
                          outcome(rpc.shutdown), outcome(rpc.rpc_sync, "w1", int)])
            alone = options(init_method=f"file://{os.getcwd()}/x")
            rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=alone)
            report(alone=rpc.rpc_sync("alone", int, args=(5,)))
            rpc.shutdown()
            sys.exit(0)
        report(status=os.waitpid(child, 0)[1], pending=outcome(pending.wait))
        report(parent=[rpc.rpc_sync("w1", int, args=(n,)) for n in range(10)])
    rpc.shutdown()
    """
    facts = workers(script).finish(quiet=False)[0]
    first, second, shutdown, after = facts["child"]
    for one in (first, second):
        assert one["error"] == "ForkedProcessError"
        assert "forked from worker 'w0'" in one["text"]
        assert one["seconds"] < 1
    assert shutdown["result"] is None
    assert after["error"] == "NotInitializedError"
    assert facts["alone"] == 5
    assert facts["status"] == 0
    assert facts["pending"]["result"] is None
    assert facts["parent"] == list(range(10))


def test_a_forked_child_that_ends_at_once_harms_nobody(workers: StartWorkers) -> None:
    script = """
    import multiprocessing
    def child_work(): sys.exit(0)
    start()
    if RANK == 0:
        context = multiprocessing.get_context("fork")
        for n in range(10):
            process = context.Process(target=child_work)
            process.start()
            assert rpc.rpc_sync("w1", int, args=(n,)) == n
            process.join()
            assert rpc.rpc_sync("w1", int, args=(n,)) == n
    rpc.shutdown()
    report(end=True)
    """
    assert [facts["end"] for facts in workers(script).finish(quiet=False)] == [True, True]
