"""A worker that forks: the child is no worker, and the parent goes on as if nothing had happened."""

from __future__ import annotations

import pytest

from worker_processes import StartWorkers

pytestmark = pytest.mark.timeout(60)


def test_a_forked_child_is_no_worker_and_the_parent_goes_on(workers: StartWorkers) -> None:
    script = """
    def wait_for_file(name): return wait_for(lambda: os.path.exists(name), 20)
    start()
    if RANK == 0:
        rref, mine = rpc.remote("w1", list), rpc.RRef(5)
        assert rref.to_here() == []
        pending = [rpc.rpc_async("w1", wait_for_file, args=("forked",)) for _ in range(3)]
        child = os.fork()
        if child == 0:
            uses = dict(
                rpc_sync=lambda: rpc.rpc_sync("w1", int), rpc_async=lambda: rpc.rpc_async("w1", int),
                remote=lambda: rpc.remote("w1", int), rref=lambda: rpc.RRef(5), references=rpc.references,
                to_here=rref.to_here, method=rref.rpc_sync().copy)
            outcomes = {name: outcome(use) for name, use in uses.items()}
            report(child={name: each.get("error") for name, each in outcomes.items()},
                   text=outcomes["rpc_sync"]["text"])
            del rref, mine, pending
            report(shutdown=outcome(rpc.shutdown).get("error"), after=outcome(rpc.rpc_sync, "w1", int)["error"])
            alone = options(init_method=f"file://{os.getcwd()}/child")
            rpc.init_rpc("child", rank=0, world_size=1, rpc_backend_options=alone)
            report(own=rpc.rpc_sync("child", int, args=(5,)))
            rpc.shutdown()
            sys.exit(0)
        report(status=os.waitpid(child, 0)[1])
        open("forked", "w").close()
        report(pending=[future.wait() for future in pending],
               parent=[rpc.rpc_sync("w1", int, args=(n,)) for n in range(100)],
               references=[rref.to_here(), mine.to_here(), len(rpc.references().held)])
        del rref, mine, pending
    rpc.shutdown()
    """
    facts = workers(script).finish()[0]
    assert set(facts["child"].values()) == {"ForkedProcessError"}
    assert len(facts["child"]) == 7
    assert "forked from worker 'w0'" in facts["text"]
    assert (facts["shutdown"], facts["after"]) == (None, "NotInitializedError")
    assert facts["own"] == 5
    assert facts["status"] == 0
    assert facts["pending"] == [True] * 3
    assert facts["parent"] == list(range(100))
    assert facts["references"] == [[], 5, 1]


def test_children_that_fork_while_calls_run_harm_no_call(workers: StartWorkers) -> None:
    """Threads of both workers call without a break while children are forked and end at once, in both ways."""
    script = """
    import numpy as np
    def echo(value): return value
    start()
    stop, wrong, count = threading.Event(), [], [0]
    def work(thread):
        n = 0
        while not stop.is_set():
            n += 1
            size = 100_000 if n % 10 == 0 else 10
            if not (rpc.rpc_sync(1 - RANK, echo, args=(np.full(size, n),)) == n).all():
                wrong.append(n)
            count[0] += 1
    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    statuses = []
    for number in range(20):
        before = count[0]
        child = os.fork()
        if child == 0:
            os._exit(0)
        statuses.append(os.waitpid(child, 0)[1])
        assert wait_for(lambda: count[0] > before)
    stop.set()
    for thread in threads:
        thread.join()
    report(wrong=wrong, statuses=statuses)
    rpc.shutdown()
    """
    for facts in workers(script).finish():
        assert facts == {"wrong": [], "statuses": [0] * 20}


def test_a_served_function_may_fork_a_child_that_becomes_a_worker(workers: StartWorkers) -> None:
    script = """
    def nested(): return rpc.rpc_sync("child", int, args=(7,))
    def fork():
        child = os.fork()
        if child == 0:
            rpc.init_rpc("child", rank=0, world_size=1,
                         rpc_backend_options=options(init_method=f"file://{os.getcwd()}/child"))
            result = rpc.rpc_sync("child", nested, timeout=20)
            rpc.shutdown()
            os._exit(result)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    start()
    if RANK == 0:
        report(status=rpc.rpc_sync("w1", fork), after=rpc.rpc_sync("w1", int, args=(5,)))
    rpc.shutdown()
    """
    assert workers(script).finish()[0] == {"status": 7, "after": 5}


def test_a_child_keeps_what_its_parent_had_received_though_more_comes(workers: StartWorkers) -> None:
    script = """
    import numpy as np
    def make(number): return np.full(300_000, number)
    start()
    if RANK == 0:
        array = rpc.rpc_sync("w1", make, args=(1,))
        child = os.fork()
        if child == 0:
            wait_for(lambda: os.path.exists("more"), 20)
            report(child=[int(array.min()), int(array.max())])
            os._exit(0)
        del array
        for number in range(2, 20):
            rpc.rpc_sync("w1", make, args=(number,))
        open("more", "w").close()
        report(status=os.waitpid(child, 0)[1])
    rpc.shutdown()
    """
    assert workers(script).finish()[0] == {"child": [1, 1], "status": 0}
