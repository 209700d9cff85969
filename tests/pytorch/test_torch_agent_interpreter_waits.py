"""How long threads wait for the interpreter: measured while it is enabled, and told by the agent."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch
from worker_stage import one_worker

import farcall.pytorch as rpc
from farcall.errors import NotInitializedError
from farcall.pytorch.agent import InterpreterWaits

pytestmark = pytest.mark.timeout(30)

KEY = "agent.gil_average_wait_time_us"


def test_the_average_is_of_all_waits() -> None:
    waits = InterpreterWaits()
    assert waits.average() == 0
    waits.note(1e-6)
    waits.note(3e-6)
    assert waits.average() == pytest.approx(2)


def test_a_thread_that_keeps_the_interpreter_is_waited_for() -> None:
    ended = threading.Event()

    def keep_it() -> None:
        while not ended.is_set():
            pass

    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.02)
    busy = threading.Thread(target=keep_it)
    busy.start()
    try:
        waits = InterpreterWaits()
        for _ in range(5):
            waits.measure()
    finally:
        ended.set()
        busy.join()
        sys.setswitchinterval(interval)
    assert waits.average() > 1000


def test_the_agent_tells_it_only_while_it_is_measured(tmp_path: Path) -> None:
    with one_worker(tmp_path) as agent:
        assert KEY not in agent.get_debug_info()
        rpc.enable_gil_profiling(True)
        assert float(agent.get_debug_info()[KEY]) == 0
        rpc.rpc_sync(0, torch.neg, (torch.ones(1),))
        assert float(agent.get_debug_info()[KEY]) > 0
        with rpc._server_process_global_profile() as profiled:  # both at once
            rpc.rpc_sync(0, torch.neg, (torch.ones(1),))
        assert profiled.function_events[0].name == "aten::neg"
        rpc.enable_gil_profiling(False)
        assert KEY not in agent.get_debug_info()
        assert agent.interceptors.server == ()


def test_a_process_that_is_no_worker_measures_nothing() -> None:
    with pytest.raises(NotInitializedError):
        rpc.enable_gil_profiling(True)
