"""`native`: the functions by which torch's Python code calls its C++ agent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from script_stage import script

from farcall.pytorch import api, functions, native
from farcall.pytorch.futures import completed_future
from farcall.pytorch.internal import PythonUDF, serialize
from farcall.testing.local import LocalGroup

pytestmark = pytest.mark.usefixtures("group")

UNSET = native._UNSET_RPC_TIMEOUT


@script
def increased(x: torch.Tensor, by: int = 1) -> torch.Tensor:
    return x + by


@functions.async_execution
def given(x: Any) -> Any:
    return completed_future(x)


@pytest.fixture
def group() -> Iterator[LocalGroup]:
    with LocalGroup(2) as group:
        yield group


@pytest.fixture
def other(group: LocalGroup) -> native.WorkerInfo:
    return api.get_worker_info("worker1")


def test_an_operator(other: native.WorkerInfo) -> None:
    future = native._invoke_rpc_builtin(other, "aten::add", UNSET, torch.ones(1), 1, alpha=2)
    assert isinstance(future, torch.futures.Future)
    assert future.wait() == 3
    rref = native._invoke_remote_builtin(other, "aten::add", UNSET, torch.ones(1), 1)
    assert rref.owner() == other
    assert rref.to_here() == 2


def test_a_script_function(other: native.WorkerInfo) -> None:
    name = increased.qualified_name
    assert native._invoke_rpc_torchscript("worker1", name, (torch.ones(1),), {"by": 2}, UNSET, False).wait() == 3
    assert native._invoke_remote_torchscript("worker1", name, UNSET, False, torch.ones(1), by=4).to_here() == 5


def test_a_pickled_call(other: native.WorkerInfo) -> None:
    pickled, tensors = serialize(PythonUDF(given, (torch.ones(1),), {}))
    assert len(tensors) == 1
    assert native._invoke_rpc_python_udf(other, pickled, tensors, UNSET, True).wait() == 1
    assert native._invoke_remote_python_udf(other, pickled, tensors, UNSET, True).to_here() == 1
