"""Device maps between all workers: exchanged and checked at the start, with torch's words for what is wrong.

A map says, for a callee, on which of its devices a tensor arrives that is on one of ours. Replies go the other way by
the reverse of the caller's map. How tensors are moved is in `devices`.

In an open group a worker that comes asks those who are there, and tells them of its own maps; a map may name workers
that have not come yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from farcall.api import current_agent
from farcall.errors import UnknownWorkerError, WorkerLost
from farcall.pytorch.options import DeviceMap
from farcall.pytorch.workers import WorkerInfo


class DeviceInfo(NamedTuple):
    """What a worker tells the others of its devices."""

    device_count: int
    maps: dict[str, DeviceMap]
    devices: list[torch.device]


def exchange(agent: Any) -> None:
    """Has the workers know each other's maps, and this one its reverse maps and its devices.

    Raises `ValueError` for maps that cannot be: in a fixed group at every worker, in an open one at that which comes.
    """
    mine = _info_of(agent)
    me = agent.get_worker_info()
    others: list[WorkerInfo] = []
    if agent.is_static_group:
        # By the store, not by calls: a worker may be through with all it has to do as soon as this is over.
        everybody = {name: _decode(told) for name, told in agent.exchange(_encode(mine)).items()}
    else:
        others = [info for info in agent.get_worker_infos() if info != me]
        everybody = {me.name: mine, **_answers(others, _info_of_this, ())}
    check(everybody, agent.is_static_group)
    agent.reverse_device_maps = reverse_maps(me.name, everybody)
    agent.used_devices = used_devices(mine.devices, mine.maps, agent.reverse_device_maps)
    _answers(others, _has_joined, (me, mine))


def _answers(workers: Iterable[WorkerInfo], function: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Any]:
    """What that gave at these workers, by name; without those that have gone meanwhile."""
    from farcall.pytorch import api

    answers = {}
    for worker, future in [(worker, api.rpc_async(worker, function, args)) for worker in workers]:
        with suppress(WorkerLost, UnknownWorkerError):
            answers[worker.name] = future.wait()
    return answers


def _encode(info: DeviceInfo) -> bytes:
    """As plain text: nobody has proved yet who writes to a store."""
    maps = {name: {str(ours): str(theirs) for ours, theirs in each.items()} for name, each in info.maps.items()}
    return json.dumps([info.device_count, maps, [str(device) for device in info.devices]]).encode()


def _decode(told: bytes) -> DeviceInfo:
    """Raises `ValueError` for anything else."""
    count, maps, devices = json.loads(told)
    device = torch.device
    return DeviceInfo(
        int(count),
        {name: {device(ours): device(theirs) for ours, theirs in each.items()} for name, each in maps.items()},
        [device(each) for each in devices],
    )


def _info_of(agent: Any) -> DeviceInfo:
    options = agent._get_backend_options()
    return DeviceInfo(torch.cuda.device_count(), options.device_maps, options.devices)


def _info_of_this() -> DeviceInfo:
    return _info_of(current_agent())


def _has_joined(worker: WorkerInfo, info: DeviceInfo) -> None:
    """At the others of an open group: that worker has come, with these maps."""
    agent: Any = current_agent()
    reverse = reverse_maps(agent.get_worker_info().name, {worker.name: info})
    options = agent._get_backend_options()
    agent.reverse_device_maps.pop(worker.name, None)  # of an earlier one of that name
    devices = used_devices(options.devices, options.device_maps, {**agent.reverse_device_maps, **reverse})
    agent._update_group_membership(worker, devices, reverse, True)


def check(everybody: Mapping[str, DeviceInfo], is_static_group: bool = True) -> None:
    """Raises `ValueError` for what cannot be."""
    for node, info in everybody.items():
        if len(set(info.devices)) != len(info.devices):
            raise ValueError(f"Node {node} has duplicated devices\ndevices = {info.devices}")
        if not _are_there(info.devices, info.device_count):
            raise ValueError(
                f"Node {node} has devices with invalid indices\ndevices = {info.devices}\n"
                f"device count = {info.device_count}"
            )
    for node, info in everybody.items():
        if is_static_group and not info.maps.keys() <= everybody.keys():
            raise ValueError(
                f"Node {node} has invalid target node names in its device maps\ndevice maps = {info.maps.keys()}\n"
                f"node names = {list(everybody)}"
            )
        for target, device_map in info.maps.items():
            _check_map(node, info, target, everybody.get(target), device_map)


def _check_map(node: str, info: DeviceInfo, target: str, other: DeviceInfo | None, device_map: DeviceMap) -> None:
    told = f"device map for {target}\ndevice map = {device_map}"
    if len(set(device_map.values())) != len(device_map):
        raise ValueError(f"Node {node} has duplicated target devices in its {told}")
    sides = [("source", device_map.keys(), info)]
    if other is not None:
        sides.append(("target", device_map.values(), other))  # type: ignore[arg-type]
    for side, devices, owner in sides:
        if owner.devices:
            if not set(devices) <= set(owner.devices):
                raise ValueError(f"Node {node} has unexpected {side} devices in its {told}\ndevices = {owner.devices}")
        elif not _are_there(devices, owner.device_count):
            raise ValueError(
                f"Node {node} has {side} devices with invalid indices in its {told}\n"
                f"device count = {owner.device_count}"
            )


def _are_there(devices: Iterable[torch.device], count: int) -> bool:
    return all(
        device.type in _WITHOUT_INDEX or (device.type == "cuda" and 0 <= device.index < count) for device in devices
    )


_WITHOUT_INDEX: Collection[str] = ("cpu", "meta")


def reverse_maps(name: str, everybody: Mapping[str, DeviceInfo]) -> dict[str, DeviceMap]:
    """For each worker that has a map for `name`: the way back."""
    return {
        node: {theirs: ours for ours, theirs in info.maps[name].items()}
        for node, info in everybody.items()
        if name in info.maps
    }


def used_devices(
    devices: list[torch.device], maps: Mapping[str, DeviceMap], reverse: Mapping[str, DeviceMap]
) -> list[torch.device]:
    """The devices that calls may use: those that were named, else those of all maps."""
    if not devices:
        found = {device for device_map in (*maps.values(), *reverse.values()) for device in device_map}
        devices = [device for device in found if device.type not in _WITHOUT_INDEX]
    return sorted(devices, key=lambda device: device.index)
