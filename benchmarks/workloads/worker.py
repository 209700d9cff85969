"""One worker of a workload: what a process does that the bench gives this role. Started through `endpoint`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from workloads import sides
from workloads.settings import Setting


def take_up(system: str, setting: Setting, rank: int, port: int, limit: float) -> dict[str, Callable[..., object]]:
    """Join the group: the commands that this worker understands, `stop` and, at rank 0, `lead`.

    Raises what the system raises if the group does not come together within `limit` seconds.
    """
    # A thread for each core in each process would measure how they get into each other's way. Before numpy is imported.
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    side = sides.choose(system)
    # Before the group is there: a worker that answers calls must not be importing what they need.
    workload: Any = importlib.import_module(setting.module)
    importlib.import_module(f"workloads.in_{setting.computing}")
    side.init_rpc(setting.name(rank), rank, setting.world_size, port, limit)
    commands: dict[str, Callable[..., object]] = {"stop": lambda: side.rpc.shutdown(timeout=10)}
    if rank == 0:
        commands["lead"] = lambda: workload.lead(setting)
    return commands
