"""One of the two processes: the trainer, with rank 0, or the server. Started through `farcall.bench.endpoint`.

Or the only one, which computes the same without calls (`ALONE`).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from typing import Any, Final

ALONE: Final = "one process"
"""As the name of a system."""


def take_up(system: str, rank: int, port: int, limit: float) -> dict[str, Callable[..., object]]:
    """Join the group: the commands that this worker understands. Raises what `init_rpc` raises."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    import torch

    torch.set_num_threads(1)  # each process has its own work, and more threads than cores would be in each other's way
    if system == "farcall":
        import farcall.pytorch

        farcall.pytorch.install()
    import torch.distributed.rpc as rpc

    from training import model

    def steps_of(make: Callable[[model.Sizes], model.Training | model.Alone]) -> Callable[..., dict[str, float]]:
        made: dict[model.Sizes, model.Training | model.Alone] = {}

        def steps(sizes: dict[str, int], times: int) -> dict[str, float]:
            given = model.Sizes(**sizes)
            if given not in made:
                made[given] = make(given)
            return medians(model.time_steps(made[given], given, times))

        return steps

    if system == ALONE:
        return {"steps": steps_of(model.Alone), "stop": lambda: None}
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=limit)
    rpc.init_rpc(("trainer", model.SERVER)[rank], rank=rank, world_size=2, rpc_backend_options=options)
    return {
        "steps": steps_of(model.Training),
        "pairs": lambda times: medians(model.time_pairs(times)),
        "stop": rpc.shutdown,
    }


def medians(times: Mapping[str, list[Any]]) -> dict[str, float]:
    """In µs."""
    return {name: statistics.median(seconds) * 1e6 for name, seconds in times.items()}
