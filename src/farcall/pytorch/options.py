"""`TensorPipeRpcBackendOptions`: farcall's options, with torch's devices and device maps, and torch's messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeAlias

import torch

from farcall.options import RpcBackendOptions

_is_tensorpipe_available = True
"""For programs that ask: the default backend works wherever torch does."""

DeviceType: TypeAlias = int | str | torch.device

DeviceMap: TypeAlias = dict[torch.device, torch.device]


def _to_device(device: DeviceType) -> torch.device:
    """Returns the CUDA device that a number, a text or a `torch.device` names.

    Raises `ValueError` if it is another kind of device, and `RuntimeError` if torch does not know the text.
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"`set_devices` expect a list of CUDA devices, but got device type {device.type}.")
    return device


def _to_device_map(device_map: Mapping[DeviceType, DeviceType]) -> DeviceMap:
    """Returns a device map with `torch.device` keys and values; empty for an empty map.

    Raises `ValueError` if two devices are mapped to the same one, and `RuntimeError` for a device that torch does not
    know.
    """
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
    """Returns the CUDA devices that numbers, texts or `torch.device`s name; an empty list for none.

    Raises `ValueError` for other kinds of devices, and `RuntimeError` if torch does not know a text.
    """
    return [_to_device(device) for device in devices]


@dataclass(kw_only=True)
class _TensorPipeRpcBackendOptionsBase(RpcBackendOptions):
    """The base class of `TensorPipeRpcBackendOptions`: all options of farcall's `RpcBackendOptions`, and torch's.

    Torch has a class of this name in C++.

    Args:
        device_maps: For the name of each callee, a map from devices of this worker to devices of the callee; none by
            default.
        devices: The CUDA devices that calls may use on this worker. By default those of all device maps.
        _transports: Ignored.
        _channels: Ignored.
        heartbeat_patience: How many seconds a worker may be silent before it can be declared lost; 30 by default.

    Raises:
        ValueError: A device map is not one to one, or a device is not CUDA's.
        TypeError: `rpc_timeout` is not a number.
        UsageError: Another option has a wrong value.
    """

    heartbeat_patience: float = 30.0
    """How many seconds a worker may be silent before it can be declared lost.

    Longer than farcall's default, because C code of torch often holds the GIL for seconds.
    """

    device_maps: dict[str, DeviceMap] = field(default_factory=dict)
    devices: list[torch.device] = field(default_factory=list)
    _transports: Sequence[str] | None = None
    _channels: Sequence[str] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "rpc_timeout":
            if not isinstance(value, Real):
                raise TypeError(
                    f"incompatible constructor arguments: {name} must be a number of seconds, not {value!r}, a "
                    f"{type(value).__name__}"
                )
            value = float(value)  # as in torch: programs print it
        if name == "device_maps":  # checked and converted here, because farcall itself does not know torch.device
            value = {worker: _to_device_map(device_map) for worker, device_map in (value or {}).items()}
        elif name == "devices":
            value = _to_device_list(value or [])
        else:
            super().__setattr__(name, value)
            return
        if self.__dict__.get("_frozen"):
            super().__setattr__(name, value)  # raises: options of a running agent cannot be changed
        self.__dict__[name] = value

    def for_agent(self) -> RpcBackendOptions:
        """Returns the same options for farcall's own agent, without devices and device maps."""
        mine = dataclasses.fields(RpcBackendOptions)
        return RpcBackendOptions(
            **{each.name: getattr(self, each.name) for each in mine if each.name not in ("device_maps", "devices")}
        )

    def _set_device_map(self, to: str, device_map: Mapping[DeviceType, DeviceType]) -> None:
        """Adds the entries of `device_map` to the device map for the worker `to`. Replaces those for the same devices.

        An empty map adds nothing. Raises `ValueError` if two devices would be mapped to the same one, and
        `RuntimeError` for a device that torch does not know.
        """
        self.device_maps = {**self.device_maps, to: {**self.device_maps.get(to, {}), **_to_device_map(device_map)}}


@dataclass(kw_only=True)
class TensorPipeRpcBackendOptions(_TensorPipeRpcBackendOptionsBase):
    """The options of the default backend: those of torch, and all of farcall's `RpcBackendOptions`.

    Pass them to `init_rpc`, for example `TensorPipeRpcBackendOptions(rpc_timeout=10)`.

    Args:
        num_worker_threads: The number of threads that run requests; 16 by default.
        rpc_timeout: The default timeout of calls in seconds; 0 for no timeout. 60 by default.
        init_method: The rendezvous URL, for example "tcp://host:port". By default "env://": MASTER_ADDR and
            MASTER_PORT of the environment.
        device_maps: For the name of each callee, a map from devices of this worker to devices of the callee. A tensor
            on the first arrives on the second. None by default.
        devices: The CUDA devices that calls may use on this worker. By default those of all device maps.

    Raises:
        ValueError: A device map is not one to one, or a device is not CUDA's.
        TypeError: `rpc_timeout` is not a number.
        UsageError: Another option has a wrong value.
    """

    def set_device_map(self, to: str, device_map: Mapping[DeviceType, DeviceType]) -> None:
        """Adds entries to the device map for a worker: tensors on one device here arrive on another device there.

        Args:
            to: The name of the worker that is called. It is not checked.
            device_map: Devices of this worker as keys, devices of `to` as values. An empty map changes nothing.

        Raises:
            ValueError: The map is not one to one, or contradicts an earlier entry.
            RuntimeError: torch does not know a device.
        """
        known = self.device_maps.get(to, {})
        for source, target in _to_device_map(device_map).items():
            if known.get(source, target) != target:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {source} to {target} and "
                    f"{known[source]}"
                )
        self._set_device_map(to, device_map)

    def set_devices(self, devices: Iterable[DeviceType]) -> None:
        """Sets the CUDA devices that calls may use on this worker, replacing earlier ones.

        Args:
            devices: Numbers, texts or `torch.device`s. If empty, calls may use the devices of all device maps.

        Raises:
            ValueError: A device is not CUDA's.
            RuntimeError: torch does not know a device.
        """
        self.devices = list(devices)
