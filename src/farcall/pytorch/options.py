"""`TensorPipeRpcBackendOptions`: farcall's options with torch's devices, and torch's answers to what cannot be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeAlias

import torch

from farcall.options import RpcBackendOptions

_is_tensorpipe_available = True
"""For programs that ask: what stands for it is there wherever torch is."""

DeviceType: TypeAlias = int | str | torch.device

DeviceMap: TypeAlias = dict[torch.device, torch.device]


def _to_device(device: DeviceType) -> torch.device:
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"`set_devices` expect a list of CUDA devices, but got device type {device.type}.")
    return device


def _to_device_map(device_map: Mapping[DeviceType, DeviceType]) -> DeviceMap:
    ours: DeviceMap = {}
    theirs: DeviceMap = {}
    for source, target in device_map.items():
        source, target = torch.device(source), torch.device(target)
        if target in theirs:
            raise ValueError(
                f"`device_map` only supports 1-to-1 mapping, trying to map {source} and {theirs[target]} to {target}"
            )
        ours[source] = target
        theirs[target] = source
    return ours


def _to_device_list(devices: Sequence[DeviceType]) -> list[torch.device]:
    return [_to_device(device) for device in devices]


@dataclass(kw_only=True)
class _TensorPipeRpcBackendOptionsBase(RpcBackendOptions):
    """What torch has in C++: all of farcall's options, and two that are taken and mean nothing here."""

    heartbeat_patience: float = 30.0
    """As of farcall's options, but longer: much of what programs for torch do in C keeps the interpreter to itself."""

    device_maps: dict[str, DeviceMap] = field(default_factory=dict)
    devices: list[torch.device] = field(default_factory=list)
    _transports: Sequence[str] | None = None
    _channels: Sequence[str] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "rpc_timeout" and not isinstance(value, Real):
            raise TypeError(
                f"incompatible constructor arguments: {name} must be a number of seconds, not {value!r}, a "
                f"{type(value).__name__}"
            )
        if name == "device_maps":  # torch.devices, which farcall itself knows nothing of
            value = {worker: _to_device_map(device_map) for worker, device_map in (value or {}).items()}
        elif name == "devices":
            value = _to_device_list(value or [])
        else:
            super().__setattr__(name, value)
            return
        if self.__dict__.get("_taken"):
            super().__setattr__(name, value)  # refused
        self.__dict__[name] = value

    def for_agent(self) -> RpcBackendOptions:
        """The same as options of farcall's own agent, which has nothing to do with devices."""
        mine = dataclasses.fields(RpcBackendOptions)
        return RpcBackendOptions(
            **{each.name: getattr(self, each.name) for each in mine if each.name not in ("device_maps", "devices")}
        )

    def _set_device_map(self, to: str, device_map: Mapping[DeviceType, DeviceType]) -> None:
        self.device_maps = {**self.device_maps, to: {**self.device_maps.get(to, {}), **_to_device_map(device_map)}}


@dataclass(kw_only=True)
class TensorPipeRpcBackendOptions(_TensorPipeRpcBackendOptionsBase):
    """The options of the default backend: torch's, and farcall's (`RpcBackendOptions`), which have good defaults.

    Raises `ValueError` for device maps that are not one to one, and for devices that are none of CUDA's.
    """

    def set_device_map(self, to: str, device_map: Mapping[DeviceType, DeviceType]) -> None:
        """Adds to the map for worker `to`: our devices are the keys, its devices the values. Raises `ValueError`."""
        known = self.device_maps.get(to, {})
        for source, target in _to_device_map(device_map).items():
            if known.get(source, target) != target:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {source} to {target} and "
                    f"{known[source]}"
                )
        self._set_device_map(to, device_map)

    def set_devices(self, devices: Iterable[DeviceType]) -> None:
        """Says which CUDA devices calls may use here. Raises `ValueError` for any other."""
        self.devices = list(devices)
