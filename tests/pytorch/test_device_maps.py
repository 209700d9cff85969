"""Device maps are checked with torch's words, turned round, and exchanged: in fixed groups and in open ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import farcall.pytorch as rpc
from farcall.errors import WorkerLost
from farcall.pytorch import api, device_maps
from farcall.pytorch.device_maps import DeviceInfo, check, reverse_maps, used_devices
from farcall.pytorch.workers import WorkerInfo

CPU, META = torch.device("cpu"), torch.device("meta")


def gpu(index: int) -> torch.device:
    return torch.device("cuda", index)


def info(maps: dict[str, dict[int, int]] | None = None, count: int = 2, devices: tuple[int, ...] = ()) -> DeviceInfo:
    in_torch = {to: {gpu(ours): gpu(theirs) for ours, theirs in each.items()} for to, each in (maps or {}).items()}
    return DeviceInfo(count, in_torch, [gpu(device) for device in devices])


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (info(devices=(0, 0)), "Node a has duplicated devices"),
        (info(devices=(2,)), "Node a has devices with invalid indices"),
        (info({"nobody": {0: 0}}), "Node a has invalid target node names in its device maps"),
        (info({"b": {0: 0, 1: 0}}), "Node a has duplicated target devices in its device map for b"),
        (info({"b": {2: 0}}), "Node a has source devices with invalid indices in its device map for b"),
        (info({"b": {0: 2}}), "Node a has target devices with invalid indices in its device map for b"),
        (info({"b": {0: 0}}, devices=(1,)), "Node a has unexpected source devices in its device map for b"),
    ],
)
def test_what_cannot_be_is_refused(first: DeviceInfo, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check({"a": first, "b": info()})


def test_unexpected_target_devices() -> None:
    with pytest.raises(ValueError, match="Node a has unexpected target devices in its device map for b"):
        check({"a": info({"b": {0: 0}}), "b": info(devices=(1,))})


def test_what_can_be() -> None:
    check({"a": info({"b": {0: 1, 1: 0}, "a": {0: 0}}), "b": info({"a": {0: 0}}, devices=(0, 1))})
    check({"a": DeviceInfo(0, {"a": {CPU: META}}, [])})


def test_in_an_open_group_maps_may_be_for_those_who_come_later() -> None:
    check({"a": info({"later": {0: 7}})}, is_static_group=False)
    with pytest.raises(ValueError, match="source devices with invalid indices"):
        check({"a": info({"later": {7: 0}})}, is_static_group=False)


def test_the_way_back() -> None:
    everybody = {"a": info({"b": {0: 1}}), "b": info({"b": {1: 1}, "a": {0: 0}}), "c": info()}
    assert reverse_maps("b", everybody) == {"a": {gpu(1): gpu(0)}, "b": {gpu(1): gpu(1)}}


def test_devices_in_use() -> None:
    maps = {"b": {gpu(1): gpu(0), CPU: CPU}}
    assert used_devices([], maps, {"c": {gpu(0): gpu(3), META: META}}) == [gpu(0), gpu(1)]
    assert used_devices([gpu(2)], maps, {}) == [gpu(2)]


# In a group


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


def test_in_an_open_group_others_tell_of_their_maps() -> None:
    with worker(None, {"later": {"cpu": "cpu"}}) as agent:
        newcomer = WorkerInfo("later", 1)
        device_maps._has_joined(newcomer, DeviceInfo(0, {"alone": {META: CPU}, "other": {CPU: CPU}}, []))
        assert agent.reverse_device_maps == {"later": {CPU: META}}
        device_maps._has_joined(newcomer, DeviceInfo(0, {}, []))  # it left, and came again without
        assert agent.reverse_device_maps == {}


def test_who_has_gone_meanwhile_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Call:
        def __init__(self, name: str) -> None:
            self._name = name

        def wait(self) -> str:
            if self._name == "gone":
                raise WorkerLost("gone was lost", "gone")
            return f"{self._name}'s"

    monkeypatch.setattr(api, "rpc_async", lambda to, function, args: Call(to.name))
    workers = [WorkerInfo("gone", 1), WorkerInfo("here", 2)]
    assert device_maps._answers(workers, device_maps._info_of_this, ()) == {"here": "here's"}
