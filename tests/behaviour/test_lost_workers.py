"""How lost workers are noticed: all of them in time, none before the patience is over, none that others hear.

Each time that is compared with a limit is one that docs/groups.md promises, with as much again for a slow machine.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from worker_processes_with_orders import WorkerProcesses

from eventually import eventually
from farcall import WorkerLostError
from farcall.testing import FaultyRpcBackendOptions, LocalGroup, faults
from ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def start(size: int, interval: float, patience: float) -> WorkerProcesses:
    return WorkerProcesses(size, f"tcp://127.0.0.1:{free_port()}", interval, patience)


def wait_for_losses(workers: WorkerProcesses, count: int, seconds: float) -> dict[str, float]:
    """The workers that w0 has lost, and when, as soon as there are so many; or what there is after so many seconds."""
    deadline = time.monotonic() + seconds
    while len(lost := workers.ask(0, "lost")) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    return dict(lost)


def test_workers_that_are_lost_together_are_noticed_together() -> None:
    """11 of 12 are stopped. They used to be lost three at a time, one patience after the other."""
    interval, patience = 0.4, 2.0
    promised = patience + 2 * interval
    with start(12, interval, patience) as workers:
        workers.ask(0, "start_endless_calls()")
        stopped = workers.stop(range(1, 12))
        lost = wait_for_losses(workers, 11, 6 * promised)
        assert len(lost) == 11
        assert min(lost.values()) >= stopped + patience
        assert max(lost.values()) <= stopped + 2 * promised
        eventually(lambda: len(workers.ask(0, "ended")) == 11)
        ended = workers.ask(0, "ended")
        for name, at in lost.items():
            assert ended[name][1] == "WorkerLostError"
            assert abs(ended[name][0] - at) < interval  # a call that waits fails when its worker is declared lost


@pytest.mark.long
@pytest.mark.parametrize(
    ("interval", "patience", "stop", "times"),
    [pytest.param(1.0, 8.0, 7.7, 1, id="defaults"), pytest.param(0.9, 2.7, 2.35, 4, id="short")],
)
def test_no_worker_is_lost_before_its_patience_is_over(
    interval: float, patience: float, stop: float, times: int
) -> None:
    """A worker is stopped for less than the patience, at any moment between two pings."""
    with start(5, interval, patience) as workers:
        for attempt in range(times):
            time.sleep(interval * (1 + 0.3 * attempt))
            began = workers.stop([4])
            time.sleep(max(0.0, began + stop - time.monotonic()))
            stopped_for = workers.resume([4]) - began
            if stopped_for > (stop + patience) / 2:
                pytest.skip(f"this machine is too busy: it stopped a worker for {stopped_for:.2f} s, not {stop} s")
            time.sleep(interval)
            assert [workers.ask(rank, "names()") for rank in range(5)] == [["w0", "w1", "w2", "w3", "w4"]] * 5
        assert workers.ask(0, "call_all()") == ["w0", "w1", "w2", "w3", "w4"]


def test_a_worker_that_stays_silent_is_lost_for_all_once_the_patience_is_over() -> None:
    interval, patience = 0.5, 2.0
    with start(4, interval, patience) as workers:
        stopped = workers.stop([3])
        for rank in range(3):
            eventually(lambda rank=rank: "w3" in workers.ask(rank, "lost"))
        at = [workers.ask(rank, "lost")["w3"] for rank in range(3)]
        assert min(at) >= stopped + patience
        assert max(at) <= stopped + 2 * (patience + 2 * interval)
        workers.resume([3])
        eventually(lambda: workers.ask(3, "call_all()").count("ExpelledError") >= 3)


def views(group: LocalGroup) -> list[list[str]]:
    return [[info.name for info in agent.get_worker_infos()] for agent in group.agents]


def echo(value: int) -> int:
    return value


def call(agent: Any, to: str) -> Any:
    return agent.call(to, echo, (7,), None, 20).wait()


@pytest.mark.long
def test_a_partial_cut_loses_nobody_whom_others_hear() -> None:
    """Workers 2 and 3 do not reach 4 and 5, and the other way round; 0 and 1 reach all of them."""
    options = FaultyRpcBackendOptions(heartbeat_interval=0.2, heartbeat_patience=1.6)
    with LocalGroup(6, options) as group:
        for one in (2, 3):
            for other in ("worker4", "worker5"):
                faults(group.agents[one]).freeze(other)
        until = time.monotonic() + 14.0
        while time.monotonic() < until:
            for caller in (0, 1):
                for to in range(2, 6):
                    assert call(group.agents[caller], f"worker{to}") == 7
            time.sleep(0.05)
        assert views(group) == [[f"worker{rank}" for rank in range(6)]] * 6
        # Who falls silent to all is lost meanwhile, as ever, and what waits for it fails.
        for rank in (0, 1, 4):
            faults(group.agents[rank]).freeze("worker5")
        waiting = group.agents[0].call("worker5", echo, (7,), None, 0)
        with pytest.raises(WorkerLostError, match="worker 'worker5' was lost"):
            waiting.wait()
        eventually(lambda: views(group)[:5] == [[f"worker{rank}" for rank in range(5)]] * 5)


def test_a_worker_that_a_single_member_hears_stays() -> None:
    options = FaultyRpcBackendOptions(heartbeat_interval=0.25, heartbeat_patience=1.5)
    with LocalGroup(5, options) as group:
        for rank in (0, 1, 2):
            faults(group.agents[rank]).freeze("worker4")
        until = time.monotonic() + 7.0
        while time.monotonic() < until:
            assert call(group.agents[3], "worker4") == 7
            time.sleep(0.05)
        assert views(group) == [[f"worker{rank}" for rank in range(5)]] * 5


def test_a_worker_that_is_cut_off_for_a_while_takes_nobody_with_it() -> None:
    """Worker 0 hears nobody until the others have lost it. When it hears them again it is the one to go."""
    options = FaultyRpcBackendOptions(heartbeat_interval=0.5, heartbeat_patience=1.5)
    with LocalGroup(4, options) as group:
        for other in ("worker1", "worker2", "worker3"):
            faults(group.agents[0]).freeze(other)
        eventually(lambda: all("worker0" not in view for view in views(group)[1:]))
        faults(group.agents[0]).heal()
        time.sleep(2.0)
        assert views(group)[1:] == [["worker1", "worker2", "worker3"]] * 3
        for caller in (1, 2, 3):
            for to in (1, 2, 3):
                assert call(group.agents[caller], f"worker{to}") == 7


def test_a_shutdown_names_all_workers_that_were_lost() -> None:
    with start(4, 1.0, 8.0) as workers:
        for rank in (3, 1):
            workers.processes[rank].kill()
        wait_for_losses(workers, 2, 60)
        with pytest.raises(AssertionError, match=r"ShutdownError: .*but 'w1', 'w3' were lost before they came;"):
            workers.ask(0, "rpc.shutdown()")
