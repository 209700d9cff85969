"""Device maps are exchanged when a worker starts, in groups of fixed size and in open ones.

How they are checked is compared with torch in tests/behaviour/test_torch_device_maps.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import farcall.pytorch as rpc
from farcall.errors import UsageError, WorkerLostError
from farcall.pytorch import api, backend_registry
from farcall.pytorch.worker_info import WorkerInfo

CHECK, LIST = "_validate_device_maps", "_create_device_list"
CPU, META = torch.device("cpu"), torch.device("meta")


@contextmanager
def worker(world_size: int | None, maps: dict[str, Any]) -> Iterator[Any]:
    options = rpc.TensorPipeRpcBackendOptions(device_maps=maps)
    with tempfile.TemporaryDirectory() as directory:
        options.init_method = f"file://{directory}/store"
        rpc.init_rpc("alone", rank=0, world_size=world_size, rpc_backend_options=options)
        try:
            yield api._get_current_rpc_agent()
        finally:
            rpc.shutdown()


@pytest.mark.parametrize("world_size", [1, None])
def test_a_worker_knows_the_way_back_to_itself(world_size: int | None) -> None:
    with worker(world_size, {"alone": {"cpu": "meta"}}) as agent:
        assert agent.reverse_device_maps == {"alone": {META: CPU}}
        assert agent._get_device_map(agent.get_worker_info()) == {CPU: META}


@pytest.mark.parametrize("world_size", [1, None])
def test_a_bad_map_leaves_no_worker_running(world_size: int | None) -> None:
    with (
        pytest.raises(ValueError, match="source devices with invalid indices"),
        worker(world_size, {"alone": {"cuda:5": "cpu"}}),
    ):
        pass
    assert not api._is_current_rpc_agent_set()


def test_a_gpu_without_an_index_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="source devices with invalid indices"),
        worker(1, {"alone": {"cuda": "cpu"}}),
    ):
        pass
    options = rpc.TensorPipeRpcBackendOptions(devices=["cuda"])
    everybody: Any = (["a"], {"a": 2}, {"a": {}}, {"a": options.devices})
    with pytest.raises(ValueError, match="Node a has devices with invalid indices"):
        getattr(backend_registry, CHECK)(*everybody)


def test_devices_without_an_index_come_first() -> None:
    list_devices = getattr(backend_registry, LIST)
    gpus = [torch.device("cuda", index) for index in (0, 1)]
    assert list_devices([], {"a": {gpus[1]: CPU, META: CPU}}, {"b": {gpus[0]: CPU}}) == [META, *gpus]
    assert list_devices([gpus[1], torch.device("cuda")], {}, {}) == [torch.device("cuda"), gpus[1]]


def test_an_open_group_exchanges_nothing_at_its_start() -> None:
    with worker(None, {}) as agent, pytest.raises(UsageError, match="exchange is for fixed groups"):
        agent.exchange(b"")


def test_in_an_open_group_others_tell_of_their_maps() -> None:
    with worker(None, {"later": {"cpu": "cpu"}}) as agent:
        newcomer = WorkerInfo("later", 1)
        backend_registry._worker_has_joined(newcomer, (0, {"alone": {META: CPU}, "other": {CPU: CPU}}, []))
        assert agent.reverse_device_maps == {"later": {CPU: META}}
        backend_registry._worker_has_joined(newcomer, (0, {}, []))  # it left, and came again without
        assert agent.reverse_device_maps == {}


def test_who_has_gone_meanwhile_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Call:
        def __init__(self, name: str) -> None:
            self._name = name

        def wait(self) -> str:
            if self._name == "gone":
                raise WorkerLostError("gone was lost", "gone")
            return f"{self._name}'s"

    monkeypatch.setattr(api, "rpc_async", lambda to, function, args: Call(to.name))
    workers = [WorkerInfo("gone", 1), WorkerInfo("here", 2)]
    assert backend_registry._ask(workers, backend_registry._get_device_infos, ()) == {"here": "here's"}
