"""`torch.distributed.rpc._utils`: a lock in a store for joining and leaving, and changes of the membership.

farcall's own groups need neither: their workers join through farcall's rendezvous. Both are for programs that add and
remove workers in their own way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from farcall.pytorch.internal import _get_current_rpc_agent
from farcall.pytorch.options import DeviceMap
from farcall.pytorch.worker_info import WorkerInfo

logger = logging.getLogger("farcall")

_TOKEN_KEY: Final = "RpcGroupManagementToken"
"""The key whose value names the worker that has the lock; empty if none has."""


@contextmanager
def _group_membership_management(store: Any, name: str, is_join: bool) -> Iterator[None]:
    """Context manager: a lock that one worker at a time holds, among all workers that share a store of torch's.

    Waits until the lock is free, and releases it at the end of the block.

    Args:
        store: A `torch.distributed.Store`.
        name: The name of this worker.
        is_join: True if the worker joins, False if it leaves. The lock is the same for both.

    Raises:
        RuntimeError: The store failed, or the worker that has the lock did not release it within the store's timeout.
    """
    mine = f"Token_for_{name}_{'join' if is_join else 'leave'}"
    while (holder := store.compare_set(_TOKEN_KEY, "", mine).decode()) != mine:
        try:
            store.wait([holder])
        except RuntimeError:
            logger.exception("%s: %s has not released the lock of the group membership", mine, holder)
            raise
    try:
        yield
    finally:
        store.set(_TOKEN_KEY, "")
        store.set(mine, "Done")


def _update_group_membership(
    worker_info: WorkerInfo,
    my_devices: list[torch.device],
    reverse_device_map: dict[str, DeviceMap],
    is_join: bool,
) -> None:
    """Tells the agent of this process that a worker has joined or left. Nothing is checked.

    Args:
        worker_info: The worker that has joined or left.
        my_devices: The devices that calls may use on this worker from now on. Ignored if `is_join` is False.
        reverse_device_map: For the name of each caller, a map from devices of this worker to devices of the caller.
            Ignored if `is_join` is False.
        is_join: True if the worker has joined. False if it has left; the map for it as a caller is then deleted.

    Raises:
        RuntimeError: This process is not a worker.
    """
    _get_current_rpc_agent()._update_group_membership(worker_info, my_devices, reverse_device_map, is_join)
