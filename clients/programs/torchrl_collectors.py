"""torchrl: RPC collectors, synchronous and asynchronous, which are given new weights on the way."""

import os
import sys

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors.distributed import RPCCollector
from torchrl.envs import PendulumEnv

FRAMES = 40


class Controller(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, th, thdot):
        return self.linear(torch.stack([th, thdot], -1))


def collect(sync, port):
    policy = TensorDictModule(Controller(), in_keys=["th", "thdot"], out_keys=["action"])
    collector = RPCCollector(
        [PendulumEnv, PendulumEnv],
        policy,
        frames_per_batch=FRAMES,
        total_frames=4 * FRAMES,
        sync=sync,
        launcher="mp",
        tcp_port=port,
        max_frames_per_traj=-1,
    )
    frames = 0
    try:
        for batch in collector:
            frames += batch.numel()
            assert batch["next", "reward"].isfinite().all()
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.add_(0.1)
            collector.update_policy_weights_()
    finally:
        collector.shutdown()
    assert frames == 4 * FRAMES, frames


if __name__ == "__main__":
    collect(sync=sys.argv[1] == "sync", port=int(os.environ["MASTER_PORT"]))
