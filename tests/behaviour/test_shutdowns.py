"""How workers leave: gracefully, with calls under way, not gracefully, twice, and from a served function."""

from __future__ import annotations

import logging
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import farcall as rpc
from eventually import eventually
from farcall import NotInitializedError, RpcError, RpcTimeoutError, ShutdownError, WorkerLostError
from farcall.testing import LocalGroup
from gates import SOON, arrived, await_at, new_gate, wait_at
from group_stage import NewGroup, call, echo, run, runs, start
from worker_processes import StartWorkers

pytestmark = pytest.mark.timeout(60)

SHORT = 0.05
"""Seconds after which a shutdown that cannot end gives up."""


def forward(group: LocalGroup, here: str, to: str, function: Any, *args: Any) -> Any:
    return call(group.agents[here], to, function, *args)


# -- Graceful


def test_a_graceful_shutdown_waits_for_calls_under_way_anywhere_and_serves_meanwhile(
    group: LocalGroup, background: ThreadPoolExecutor
) -> None:
    gate = new_gate("work")
    future = start(group.agents[0], 1, forward, group, "worker1", "worker2", wait_at, "work", "done")
    assert arrived["work"].wait(SOON)
    leaving = [background.submit(agent.shutdown, True, SOON) for agent in group.agents]
    assert call(group.agents[2], 0, echo, "still served") == "still served"
    assert call(group.agents[0], 1, echo, "still served") == "still served"
    assert not any(one.done() for one in leaving)
    gate.set()
    for one in leaving:
        one.result(SOON)
    assert future.wait() == "done"


def call_from_a_callback(group: LocalGroup) -> Any:
    future = start(group.agents[0], 1, echo, 1)
    future.add_done_callback(lambda _: runs.append(call(group.agents[0], 1, wait_at, "work", "in a callback")))
    return future


UNDER_WAY: dict[str, Any] = {
    "coroutine": lambda group: start(group.agents[0], 1, await_at, "work"),
    "remote call": lambda group: group.remote(0, 1, wait_at, ("work",)),
    "callback": call_from_a_callback,
    "method": lambda group: group.remote(0, 1, wait_at, ("work", 5)).rpc_async().bit_length(),
}


@pytest.mark.parametrize("kind", UNDER_WAY)
def test_a_graceful_shutdown_waits_for_work_of_every_kind(
    group: LocalGroup, background: ThreadPoolExecutor, kind: str
) -> None:
    gate = new_gate("work")
    work = UNDER_WAY[kind](group)
    assert arrived["work"].wait(SOON)
    with pytest.raises(ShutdownError):
        group.agents[0].join(timeout=SHORT)
    leaving = background.submit(group.shutdown, True, SOON)
    gate.set()
    leaving.result(SOON)
    assert runs == (["in a callback"] if kind == "callback" else [])
    del work


def test_a_graceful_shutdown_waits_for_a_function_whose_caller_has_given_up(
    group: LocalGroup, background: ThreadPoolExecutor
) -> None:
    gate = new_gate("work")
    with pytest.raises(RpcTimeoutError):
        call(group.agents[0], 1, wait_and_run, "work", timeout=SHORT)
    assert arrived["work"].wait(SOON)
    leaving = background.submit(group.shutdown, True, SOON)
    assert call(group.agents[0], 1, echo, "still served") == "still served"
    assert not leaving.done()
    gate.set()
    leaving.result(SOON)
    assert runs == ["ran to its end"]


def wait_and_run(gate: str) -> None:
    wait_at(gate)
    run("ran to its end")


def test_a_graceful_shutdown_runs_all_calls_that_were_made_before_it(
    make_group: NewGroup, background: ThreadPoolExecutor
) -> None:
    """Nobody has kept their futures, and they wait for the only thread of their worker."""
    group = make_group(3, num_worker_threads=1)
    gate = new_gate("first")
    first = [start(group.agents[0], to, wait_at, "first") for to in (1, 2)]
    for number in range(1000):
        start(group.agents[0], 1 + number % 2, run, number)
    leaving = background.submit(group.shutdown, True, 2 * SOON)
    assert call(group.agents[1], 0, echo, "still served") == "still served"
    gate.set()
    leaving.result(2 * SOON)
    assert sorted(runs) == list(range(1000))
    assert [future.wait() for future in first] == [None, None]


def test_a_graceful_shutdown_that_takes_too_long_says_who_has_not_come(group: LocalGroup) -> None:
    with pytest.raises(ShutdownError, match="'worker1', 'worker2'"):
        group.agents[0].shutdown(graceful=True, timeout=SHORT)
    with pytest.raises(NotInitializedError, match="'worker0' has shut down"):
        start(group.agents[0], 1, echo, 1)


def test_a_graceful_shutdown_that_takes_too_long_says_what_still_runs(group: LocalGroup) -> None:
    gate = new_gate("stuck")
    future = start(group.agents[0], 1, wait_at, "stuck")
    assert arrived["stuck"].wait(SOON)
    with pytest.raises(ShutdownError, match=r"still under way here: .*`wait_at`.*'worker0'"):
        group.agents[1].shutdown(graceful=True, timeout=SHORT)
    gate.set()
    assert isinstance(future.exception(SOON), RpcError)


def test_join_and_sync_return_when_all_workers_have_called_them_and_the_workers_go_on(
    group: LocalGroup, background: ThreadPoolExecutor
) -> None:
    gate = new_gate("work")
    future = start(group.agents[0], 1, wait_at, "work")
    assert arrived["work"].wait(SOON)
    syncing = [background.submit(group.agents[rank].sync, 2 * SOON) for rank in (0, 1)]
    assert call(group.agents[2], 0, echo, "still served") == "still served"
    assert not any(one.done() for one in syncing)
    group.agents[2].sync(2 * SOON)  # whatever is under way
    for one in syncing:
        one.result(2 * SOON)
    joining = [background.submit(agent.join, timeout=2 * SOON) for agent in group.agents]
    assert call(group.agents[2], 0, echo, "still served") == "still served"
    assert not any(one.done() for one in joining)
    gate.set()
    for one in joining:
        one.result(2 * SOON)
    assert future.wait() is None
    assert call(group.agents[0], 1, echo, 1) == 1


# -- Twice


def test_a_second_graceful_shutdown_waits_for_the_first(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    gate = new_gate("work")
    future = start(group.agents[0], 1, wait_at, "work", "done")
    assert arrived["work"].wait(SOON)
    leaving = [background.submit(agent.shutdown, True, SOON) for agent in group.agents for _ in range(2)]
    assert call(group.agents[2], 0, echo, "still served") == "still served"
    assert not any(one.done() for one in leaving)
    gate.set()
    for one in leaving:
        one.result(SOON)
    assert future.wait() == "done"


def test_a_graceful_shutdown_after_another_one_does_nothing(group: LocalGroup) -> None:
    group.shutdown(graceful=True, timeout=SOON)
    for agent in group.agents:
        agent.shutdown(graceful=True, timeout=SOON)


def test_a_graceful_shutdown_after_one_that_was_not_does_nothing(group: LocalGroup) -> None:
    for agent in group.agents:
        agent.shutdown(graceful=False)
        agent.shutdown(graceful=True, timeout=SOON)


def test_a_shutdown_that_is_not_graceful_ends_a_graceful_one(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    gate = new_gate("work")
    future = start(group.agents[0], 1, wait_at, "work")
    assert arrived["work"].wait(SOON)
    leaving = background.submit(group.agents[0].shutdown, True, 0.0)
    eventually(lambda: leaving.running())
    group.agents[0].shutdown(graceful=False)
    gate.set()
    leaving.exception(SOON)
    assert isinstance(future.exception(SOON), RpcError)


def test_a_graceful_shutdown_in_a_signal_handler_leaves_the_one_that_it_interrupts_alone(workers: StartWorkers) -> None:
    script = """
    import signal
    def leave(_, frame):
        while frame.f_back and frame.f_code.co_name != "shutdown":
            frame = frame.f_back
        if frame.f_code.co_name == "shutdown":  # else it has not begun, and the next signal comes soon
            signal.setitimer(signal.ITIMER_REAL, 0)
            rpc.shutdown()
            open("go on", "w").close()
    signal.signal(signal.SIGALRM, leave)
    def work():
        assert wait_for(lambda: os.path.exists("go on"), 20)
        return "done"
    start()
    future = rpc.rpc_async("w0", work, timeout=0)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    rpc.shutdown()
    report(result=future.value())
    """
    assert workers(script, n=1).finish()[0]["result"] == "done"


# -- Not graceful


def test_calls_under_way_fail_when_their_caller_shuts_down(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    gate = new_gate("end")
    waiting = background.submit(call, group.agents[0], 1, wait_at, "end")
    future = start(group.agents[0], 1, wait_at, "end")
    derived = start(group.agents[0], 1, wait_at, "end").then(lambda done: done.value())
    eventually(lambda: group.agents[1].get_metrics()["threads_running"] == 3)
    group.agents[0].shutdown(graceful=False)
    for error in (waiting.exception(SOON), future.exception(SOON), derived.exception(SOON)):
        assert isinstance(error, RpcError)
        assert not isinstance(error, WorkerLostError)
        assert "'worker0' (this one) shut down" in str(error)
    gate.set()


def test_calls_under_way_fail_when_their_callee_shuts_down(group: LocalGroup) -> None:
    gate = new_gate("end")
    futures = [start(group.agents[caller], 1, wait_at, "end", timeout=0) for caller in (0, 2)]
    eventually(lambda: group.agents[1].get_metrics()["threads_running"] == 2)
    ending = threading.Thread(target=group.agents[1].shutdown, args=(False,))
    ending.start()
    for future in futures:
        error = future.exception(SOON)
        assert isinstance(error, WorkerLostError)
        assert error.worker == "worker1"
    gate.set()
    ending.join()


def test_a_worker_that_has_shut_down_cannot_be_called_and_the_others_go_on(group: LocalGroup) -> None:
    assert call(group.agents[0], 1, echo, 1) == 1
    group.agents[1].shutdown(graceful=False)
    for caller in (0, 2):
        for _ in range(2):
            with pytest.raises(WorkerLostError, match="'worker1'") as caught:
                call(group.agents[caller], 1, echo, 1)
            assert caught.value.worker == "worker1"
    assert call(group.agents[0], 2, echo, 1) == 1
    assert call(group.agents[2], 0, echo, 1) == 1


def test_after_the_shutdown_every_call_is_refused_and_a_second_shutdown_does_nothing(group: LocalGroup) -> None:
    agent = group.agents[0]
    agent.shutdown(graceful=False)
    for to in ("worker0", "worker1", "nobody"):
        with pytest.raises(NotInitializedError, match="'worker0' has shut down"):
            start(agent, to, echo, 1)
    agent.shutdown(graceful=False)


def test_a_shutdown_with_a_function_running_says_so_in_the_log(
    group: LocalGroup, caplog: pytest.LogCaptureFixture
) -> None:
    gate = new_gate("stuck")
    future = start(group.agents[0], 1, wait_at, "stuck")
    assert arrived["stuck"].wait(SOON)
    with caplog.at_level(logging.WARNING, "farcall"):
        group.agents[1].shutdown(graceful=False)
    assert "1 function(s) still run" in caplog.text
    gate.set()
    assert isinstance(future.exception(SOON), WorkerLostError)


# -- The worker of this process


def options(port: int) -> rpc.RpcBackendOptions:
    return rpc.RpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", init_timeout=10)


def test_the_functions_of_the_package_need_a_worker_before_and_after_it(free_port: int) -> None:
    uses = [
        lambda: rpc.rpc_sync("alone", int),
        lambda: rpc.rpc_async("alone", int),
        rpc.get_worker_info,
        rpc.get_worker_infos,
        rpc.get_metrics,
        rpc.get_rpc_timeout,
        lambda: rpc.add_membership_callback(print),
    ]
    rpc.shutdown()  # harmless
    for _ in range(2):
        for use in uses:
            with pytest.raises(NotInitializedError, match="init_rpc"):
                use()
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options(free_port))  # the same port again
        assert rpc.rpc_sync("alone", int, args=(5,)) == 5
        with pytest.raises(rpc.AlreadyInitializedError, match="'alone'"):
            rpc.init_rpc("second", rank=0, world_size=1, rpc_backend_options=options(free_port))
        assert rpc.get_worker_info().name == "alone"
        rpc.shutdown()
        rpc.shutdown()


def test_a_graceful_shutdown_is_refused_in_a_served_function(alone: None) -> None:
    with pytest.raises(rpc.UsageError, match="graceful"):
        rpc.rpc_sync("alone", rpc.shutdown, timeout=SOON)
    assert rpc.rpc_sync("alone", int) == 0


@pytest.mark.parametrize("timeout", [-1, "1", None])
def test_a_shutdown_with_a_wrong_timeout_is_refused_and_the_worker_goes_on(alone: None, timeout: Any) -> None:
    with pytest.raises(rpc.UsageError, match="timeout"):
        rpc.shutdown(timeout=timeout)
    assert rpc.rpc_sync("alone", int) == 0


# -- Processes


def test_a_served_function_may_shut_its_worker_down_ungracefully(workers: StartWorkers) -> None:
    script = """
    def leave(): rpc.shutdown(graceful=False)
    start(heartbeat_patience=600)
    if RANK == 0:
        report(call=outcome(rpc.rpc_sync, "w1", leave)["error"], later=outcome(rpc.rpc_sync, "w1", int)["error"])
        open("left", "w").close()
    else:
        assert wait_for(lambda: "error" in outcome(rpc.rpc_sync, "w0", int), 20)
        report(after=outcome(rpc.rpc_sync, "w0", int)["error"])
    rpc.shutdown(graceful=False)
    """
    caller, callee = workers(script).finish(quiet=False)
    assert (caller["call"], caller["later"]) == ("WorkerLostError", "WorkerLostError")
    assert callee["after"] == "NotInitializedError"


def test_processes_leave_together_when_the_work_of_all_is_done(workers: StartWorkers) -> None:
    script = """
    def chain(hops):
        return 0 if hops == 0 else 1 + rpc.rpc_sync((RANK + 1) % SIZE, chain, args=(hops - 1,))
    start()
    future = rpc.rpc_async((RANK + 1) % SIZE, chain, args=(30 * RANK,))
    rpc.shutdown()
    report(chain=future.value(), after=outcome(rpc.rpc_sync, 0, int)["error"])
    """
    reports = workers(script, n=3).finish()
    assert reports == [{"chain": 30 * rank, "after": "NotInitializedError"} for rank in range(3)]


def test_a_graceful_shutdown_names_a_worker_that_was_killed(workers: StartWorkers) -> None:
    """Rank 0, which hosts the store, and rank 2 wait already; rank 1 is killed."""
    script = """
    start(heartbeat_patience=600)
    for to in range(SIZE):
        rpc.rpc_sync(to, int)
    report(leaves=True)
    if RANK == 1:
        time.sleep(100)
    report(shutdown=outcome(rpc.shutdown))
    """
    group = workers(script, n=3)
    for rank in range(3):
        group.wait_for(rank, "leaves")
    group.send_signal(1, signal.SIGKILL)
    reports = group.finish({1: -signal.SIGKILL}, quiet=False)
    for rank in (0, 2):
        assert reports[rank]["shutdown"]["error"] == "ShutdownError"
        assert "'w1'" in reports[rank]["shutdown"]["text"]


def test_a_process_that_ends_without_shutdown_ends_at_once_and_quietly(workers: StartWorkers) -> None:
    script = """
    def forever(): time.sleep(100)
    start()
    if RANK == 0:
        for to in range(SIZE):
            rpc.rpc_async(to, forever, timeout=0).add_done_callback(lambda done: done.exception())
        threading.Thread(target=lambda: outcome(rpc.rpc_sync, "w1", forever, timeout=0), daemon=True).start()
        rref = rpc.remote("w1", list)
        for _ in range(500):
            rpc.rpc_async("w1", int)
        assert rpc.rpc_sync("w1", int, args=(5,)) == 5
        report(ends=True)
    else:
        assert wait_for(lambda: "error" in outcome(rpc.rpc_sync, "w0", int), 20)
        report(other=outcome(rpc.rpc_sync, "w0", int)["error"])
    """
    group = workers(script)
    group.finish(quiet=False)
    assert group.reports(1)["other"] == "WorkerLostError"
    for rank in range(2):
        assert "Traceback" not in group.errors(rank)
        assert "Fatal" not in group.errors(rank)


def test_a_signal_handler_may_shut_down_while_a_shutdown_waits(workers: StartWorkers) -> None:
    script = """
    import signal
    def leave(*_):
        rpc.shutdown(graceful=False)
        report(left=True)
        os._exit(0)
    signal.signal(signal.SIGUSR1, leave)
    def hang():
        report(hangs=True)
        time.sleep(100)
    start()
    future = rpc.rpc_async("w0", hang, timeout=0)
    rpc.shutdown()
    """
    group = workers(script, n=1)
    group.wait_for(0, "hangs")
    group.send_signal(0, signal.SIGUSR1)
    assert group.wait_for(0, "left") is True
    group.finish(quiet=False)
