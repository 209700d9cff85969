"""Tensors are moved by the device maps; the second device is `meta`, which every machine has."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import farcall.pytorch as rpc
from farcall.pytorch.devices import Devices, Move, place_received, prepare_to_send
from farcall.pytorch.envelopes import RIDERS

CPU, META = torch.device("cpu"), torch.device("meta")


def returned(value: Any) -> Any:
    return value


def on(device: str) -> torch.Tensor:
    return torch.ones(2, device=device)


def device_of(tensor: torch.Tensor) -> str:
    return str(tensor.device)


@contextmanager
def worker(device_maps: Any) -> Iterator[None]:
    """A worker that is a group of its own: what it sends to itself is pickled, too."""
    options = rpc.TensorPipeRpcBackendOptions(device_maps=device_maps)
    with tempfile.TemporaryDirectory() as directory:
        options.init_method = f"file://{directory}/store"
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        try:
            yield
        finally:
            rpc.shutdown()


# The moves


def test_what_is_in_the_processors_memory_stays_itself() -> None:
    tensor = torch.ones(2)
    sent, moves = prepare_to_send([tensor], {META: META}, "Request", "other")
    assert sent[0] is tensor
    assert moves == [None]
    assert place_received(sent, moves)[0] is tensor


def test_a_map_moves_tensors_out_of_the_processors_memory() -> None:
    sent, moves = prepare_to_send([torch.ones(2, 3, requires_grad=True)], {CPU: META}, "Request", "other")
    assert moves == [Move("meta")]
    [got] = place_received(sent, moves)
    assert (got.device, got.shape, got.requires_grad, got.is_leaf) == (META, (2, 3), True, True)


def test_parameters_stay_parameters() -> None:
    sent, moves = prepare_to_send([Parameter(torch.ones(2), requires_grad=False)], {CPU: META}, "Request", "other")
    [got] = place_received(sent, moves)
    assert type(got) is Parameter
    assert (got.device, got.requires_grad) == (META, False)


def test_of_meta_tensors_only_the_shape_travels() -> None:
    tensor = torch.ones(3, 4, dtype=torch.float64, device="meta").t()
    sent, moves = prepare_to_send([tensor], {META: META}, "Request", "other")
    assert (sent[0].device, sent[0].numel()) == (CPU, 0)
    [got] = place_received(sent, moves)
    assert (got.device, got.dtype, got.shape, got.stride()) == (META, torch.float64, (4, 3), (1, 4))


def test_moves_are_part_of_the_graph_where_there_is_one() -> None:
    weight = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        [got] = place_received([weight * 1], [Move("meta")])
        assert got.is_leaf
    history = weight * 2
    with torch.no_grad():
        [got] = place_received([history], [Move("meta")])
    assert got.grad_fn is not None
    assert got.grad_fn.next_functions[0][0] is history.grad_fn


def test_a_device_without_a_map_is_refused() -> None:
    message = r"only supports CPU tensors by default.*`set_device_map` on `TensorPipeRpcBackendOptions`.*"
    with pytest.raises(RuntimeError, match=message + "Request device mapping is not available for destination other"):
        prepare_to_send([on("meta")], {CPU: CPU}, "Request", "other")
    with pytest.raises(RuntimeError, match="Response device mapping is not available for destination other"):
        prepare_to_send([on("meta")], {}, "Response", "other")


def test_nothing_comes_out_of_meta() -> None:
    with pytest.raises(RuntimeError, match="no contents that could go to cpu of other"):
        prepare_to_send([on("meta")], {META: CPU}, "Request", "other")


# The rider


def test_it_rides_before_all_others_and_once() -> None:
    assert isinstance(RIDERS[0], Devices)
    assert sum(isinstance(rider, Devices) for rider in RIDERS) == 1


def test_calls_without_a_map_refuse_other_devices() -> None:
    with worker(None):
        assert torch.equal(rpc.rpc_sync("alone", returned, (on("cpu"),)), on("cpu"))
        with pytest.raises(RuntimeError, match="only supports CPU tensors by default"):
            rpc.rpc_sync("alone", returned, (on("meta"),))
        with pytest.raises(RuntimeError, match="Response device mapping is not available"):
            rpc.rpc_sync("alone", on, ("meta",))
        with pytest.raises(RuntimeError, match="Response device mapping is not available"):
            rpc.remote("alone", list, ([on("meta")],)).to_here()


def test_calls_with_a_map_there_and_back() -> None:
    with worker({"alone": {"meta": "meta"}}):
        got = rpc.rpc_sync("alone", returned, ({"a": on("meta"), "b": [on("cpu")]},))
        assert (got["a"].device, got["b"][0].device) == (META, CPU)
        assert rpc.rpc_async("alone", device_of, (on("meta"),)).wait() == "meta"
        assert rpc.remote("alone", on, ("meta",)).to_here().device == META
        assert rpc.rpc_sync("alone", torch.add, (on("cpu"), on("cpu"))).sum() == 4


def test_the_map_is_that_of_the_direction() -> None:
    with worker({"alone": {"cpu": "meta"}}):
        assert rpc.rpc_sync("alone", device_of, (on("cpu"),)) == "meta"
        assert rpc.rpc_sync("alone", on, ("cpu",)).device == CPU  # none of the reply is on meta: it stays
        with pytest.raises(RuntimeError, match="Request device mapping is not available for destination alone"):
            rpc.rpc_sync("alone", returned, (on("meta"),))
        assert rpc.rpc_sync("alone", returned, (1,)) == 1
