"""`FaultyTensorPipeAgent`: farcall's faulty agent, with torch's constructor and options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from farcall.options import RpcBackendOptions
from farcall.pytorch.agent import TensorPipeAgent
from farcall.pytorch.options import DeviceMap, TensorPipeRpcBackendOptions
from farcall.testing.faulty import FaultyAgent
from farcall.testing.faulty_options import FaultyRpcBackendOptions


@dataclass(kw_only=True)
class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """The options of the default backend, and what goes wrong: see `FaultyRpcBackendOptions`."""

    messages_to_fail: list[str] = field(default_factory=list)
    messages_to_delay: dict[str, float] = field(default_factory=dict)
    num_fail_sends: int = 0

    def for_agent(self) -> RpcBackendOptions:
        """See `TensorPipeRpcBackendOptions`."""
        mine = super().for_agent()
        return FaultyRpcBackendOptions(
            **{each.name: getattr(mine, each.name) for each in dataclasses.fields(RpcBackendOptions)},
            messages_to_fail=self.messages_to_fail,
            messages_to_delay=self.messages_to_delay,
            num_fail_sends=self.num_fail_sends,
        )


class FaultyTensorPipeAgent(TensorPipeAgent, FaultyAgent):
    """An agent with faults, for programs written for torch."""

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        world_size: int | None,
        opts: FaultyTensorPipeRpcBackendOptions,
        reverse_device_maps: dict[str, DeviceMap],
        devices: list[torch.device],
    ) -> None:
        """As `TensorPipeAgent`."""
        super().__init__(store, name, rank, world_size, opts, reverse_device_maps, devices)
