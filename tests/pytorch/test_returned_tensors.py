"""Tensors that a function got and returns go back in the memory of the caller, if nothing there can reach them."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import farcall.pytorch as rpc
from farcall import get_metrics
from torch_stage import echo, one_worker, run_group

COUNT = 1 << 18
kept: list[Any] = []


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[str]:
    with one_worker(tmp_path) as name:
        yield name
        kept.clear()
        gc.collect()


def returned() -> int:
    """Returns how many bytes came back to this process without a copy."""
    return int(get_metrics()["bytes_returned"])


def shared() -> int:
    """Returns how many bytes this process has sent in shared memory, both as caller and as callee."""
    return int(get_metrics()["bytes_shared_out"])


def segments() -> int:
    """Returns how many segments of shared memory this process has open."""
    gc.collect()
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum("/memfd:farcall" in os.readlink(name) for name in names if os.path.islink(name))


def tensor(kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(COUNT).remainder(100).to(kind)


def added(value: torch.Tensor) -> torch.Tensor:
    return value.add_(1)


def turned(value: torch.Tensor) -> torch.Tensor:
    return value.view(512, -1).t()


def most(value: torch.Tensor) -> torch.Tensor:
    return value[64:]


def wrapped(value: torch.Tensor) -> dict[str, Any]:
    return {"data": value, "list": [value]}


@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.bfloat16, torch.uint8, torch.complex64])
@pytest.mark.parametrize("function", [echo, added, turned, most])
def test_what_nobody_has_any_more_goes_back(
    worker: str, function: Callable[[torch.Tensor], torch.Tensor], kind: torch.dtype
) -> None:
    sent = tensor(kind)
    result = rpc.rpc_sync(worker, function, args=(sent,))
    expected = function(sent.clone())
    assert torch.equal(result, expected)
    assert (result.dtype, result.stride()) == (expected.dtype, expected.stride())
    assert torch.equal(sent, tensor(kind))
    assert (returned(), shared()) == (expected.nbytes, sent.nbytes + expected.nbytes)
    result.zero_()
    del result
    before = segments()
    assert torch.equal(rpc.rpc_sync(worker, function, args=(sent,)), expected)
    assert segments() == before, "its memory was free again"


def test_inside_of_something_and_a_parameter(worker: str) -> None:
    result = rpc.rpc_sync(worker, wrapped, args=(tensor(),))
    assert result["list"][0] is result["data"]
    assert torch.equal(result["data"], tensor())
    parameter = rpc.rpc_sync(worker, echo, args=(torch.nn.Parameter(tensor()),))
    assert type(parameter) is torch.nn.Parameter
    assert torch.equal(parameter.detach(), tensor())
    assert returned() == 2 * 4 * COUNT


def keep(value: torch.Tensor) -> torch.Tensor:
    kept.append(value)
    return value


def keep_a_view(value: torch.Tensor) -> torch.Tensor:
    kept.append(value[3:5])
    return value


def keep_its_storage(value: torch.Tensor) -> torch.Tensor:
    kept.append(value.untyped_storage())
    return value


def keep_an_array(value: torch.Tensor) -> torch.Tensor:
    kept.append(value.numpy())
    return value


def keep_what_a_gradient_needs(value: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(COUNT, requires_grad=True)
    kept.append((weight * value).sum())
    return value


@pytest.mark.parametrize("function", [keep, keep_a_view, keep_its_storage, keep_an_array, keep_what_a_gradient_needs])
def test_what_somebody_there_still_has_is_copied(worker: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    result = rpc.rpc_sync(worker, function, args=(tensor(),))
    assert (returned(), shared()) == (0, 2 * result.nbytes)
    assert torch.equal(result, tensor())
    result.zero_()
    if function is keep:
        assert torch.equal(kept[0], tensor())
    kept.clear()
    del result
    before = segments()
    assert torch.equal(rpc.rpc_sync(worker, echo, args=(tensor(),)), tensor())
    assert segments() == before, "its memory was free again"


def test_two_that_share_memory_arrive_as_two(worker: str) -> None:
    first, second = rpc.rpc_sync(worker, lambda value: (value, value[:]), args=(tensor(),))
    first.zero_()
    assert torch.equal(second, tensor())
    assert returned() == 0


def marked(value: torch.Tensor, place: int) -> torch.Tensor:
    value[place] = -1
    return value


def test_between_processes(tmp_path: Path) -> None:
    sent = tensor()  # made here: a forked child has none of the threads by which torch fills large ones

    def body(rank: int) -> Any:
        if rank:
            return None
        value = sent
        for place in range(20):
            value = rpc.rpc_sync("worker1", marked, args=(value, place))
        return returned(), value[18:22].tolist(), sent[18:22].tolist(), rpc.rpc_sync("worker1", shared)

    facts, _ = run_group(tmp_path, body)
    assert facts == (20 * 4 * COUNT, [-1, -1, 20, 21], [18, 19, 20, 21], 20 * 4 * COUNT)
