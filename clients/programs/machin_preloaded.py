"""What the fork server of `machin_world.py` preloads.

machin names functions of `torch.distributed` that newer versions of torch do not have, and calls them on GPUs only.
"""

import torch.distributed as dist

for name in ("broadcast_multigpu", "all_reduce_multigpu", "reduce_multigpu", "all_gather_multigpu"):
    if not hasattr(dist, name):
        setattr(dist, name, None)

from machin.parallel.distributed import World  # noqa: E402

__all__ = ["World"]
