"""The profile of all that a worker runs for others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_stage import one_worker

import farcall.pytorch as rpc
from farcall.errors import NotInitializedError
from farcall.pytorch import server_process_global_profiler as module

pytestmark = pytest.mark.timeout(30)

ONE = torch.ones(1)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Any]:
    with one_worker(tmp_path) as agent:
        yield agent
    assert module._recordings == []


def names(profiled: Any) -> list[str]:
    return [event.name for event in profiled.function_events]


def test_it_has_what_was_run_for_others_while_it_was_entered(agent: Any) -> None:
    rpc.rpc_sync(0, torch.exp, (ONE,))
    with rpc._server_process_global_profile() as outer:
        torch.tanh(ONE)  # here, for nobody else
        rpc.rpc_sync(0, torch.neg, (ONE,))
        with rpc._server_process_global_profile() as inner:
            rpc.rpc_sync(0, torch.abs, (ONE,))
    rpc.rpc_sync(0, torch.exp, (ONE,))
    assert names(inner)[0] == "aten::abs"
    assert not {"aten::neg", "aten::exp", "aten::tanh"} & set(names(inner))
    assert not {"aten::exp", "aten::tanh"} & set(names(outer))
    assert [each[0].name for each in outer.process_global_function_events] == [
        "aten::neg",
        "aten::abs",
    ]
    assert "aten::neg" in outer.key_averages().table()


def test_it_can_be_entered_and_left_from_elsewhere(agent: Any) -> None:
    rref = rpc.remote(0, rpc._server_process_global_profile, kwargs={"record_shapes": True})
    rref.rpc_sync().__enter__()
    rpc.rpc_sync(0, torch.neg, (torch.ones(7),))
    rref.rpc_sync().__exit__(None, None, None)
    (neg,) = (event for event in rref.local_value().function_events if event.name == "aten::neg")
    assert neg.input_shapes == [[7]]


def test_functions_that_fail_are_in_it_too(agent: Any) -> None:
    with rpc._server_process_global_profile() as profiled, pytest.raises(RuntimeError):
        rpc.rpc_sync(0, torch.add, (torch.ones(2), torch.ones(3)))
    assert len(profiled.process_global_function_events) == 1
    assert not rpc.rpc_sync(0, torch.autograd._profiler_enabled)


def test_a_disabled_one_does_nothing(agent: Any) -> None:
    with rpc._server_process_global_profile(enabled=False) as profiled:
        assert profiled is None
        assert module._recordings == []


def test_what_cannot_be(agent: Any) -> None:
    mine = rpc._server_process_global_profile()
    with mine, pytest.raises(RuntimeError, match="not reentrant"):
        mine.__enter__()
    with pytest.raises(RuntimeError, match="nothing was entered"):
        module._disable_server_process_global_profiler()


def test_a_process_that_is_no_worker_has_nothing_to_profile() -> None:
    with pytest.raises(NotInitializedError):
        rpc._server_process_global_profile().__enter__()
    assert module._recordings == []
