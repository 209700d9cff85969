"""`torch.distributed.rpc._utils`: taking turns at a store, and hearing of who comes and goes.

farcall's own groups need neither: who joins meets the others by farcall's rendezvous. They are for programs that join
or leave in their own way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from farcall.pytorch import api
from farcall.pytorch.options import DeviceMap
from farcall.pytorch.workers import WorkerInfo

logger = logging.getLogger("farcall")

_TURN: Final = "RpcGroupManagementToken"
"""The key under which it is written whose turn it is; nothing if it is nobody's."""


@contextmanager
def _group_membership_management(store: Any, name: str, is_join: bool) -> Iterator[None]:
    """Only one worker at a time is inside, of all that have this store of torch's. Raises what the store raises.

    The turn ends with the block, also if that fails.
    """
    mine = f"Token_for_{name}_{'join' if is_join else 'leave'}"
    while (whose := store.compare_set(_TURN, "", mine).decode()) != mine:
        try:
            store.wait([whose])
        except RuntimeError:
            logger.exception("%s: %s has not ended its turn", mine, whose)
            raise
    try:
        yield
    finally:
        store.set(_TURN, "")
        store.set(mine, "Done")


def _update_group_membership(
    worker_info: WorkerInfo,
    my_devices: list[torch.device],
    reverse_device_map: dict[str, DeviceMap],
    is_join: bool,
) -> None:
    """Tells the agent of this process that a worker has joined, with these devices and maps, or left."""
    api._get_current_rpc_agent()._update_group_membership(worker_info, my_devices, reverse_device_map, is_join)
