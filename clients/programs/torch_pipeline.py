"""A model in two shards on two workers, with micro-batches, distributed autograd and a distributed optimizer."""

import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer

from common import Ranks


class Shard(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers, self.lock = nn.Sequential(*layers), threading.Lock()

    def forward(self, x_rref):
        x = x_rref.to_here()
        with self.lock:
            return self.layers(x)

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def first():
    return Shard(nn.Linear(4, 16), nn.ReLU())


def second():
    return Shard(nn.Linear(16, 2))


class Pipeline(nn.Module):
    def __init__(self, workers, parts):
        super().__init__()
        self.parts = parts
        self.shards = [rpc.remote(to, make) for to, make in zip(workers, (first, second), strict=True)]

    def forward(self, x):
        outputs = []
        for part in x.chunk(self.parts):
            hidden = self.shards[0].remote().forward(rpc.RRef(part))
            outputs.append(self.shards[1].rpc_async().forward(hidden))
        return torch.cat(torch.futures.wait_all(outputs))

    def parameter_rrefs(self):
        return [rref for shard in self.shards for rref in shard.remote().parameter_rrefs().to_here()]


def main():
    torch.manual_seed(0)
    model = Pipeline(["worker1", "worker2"], parts=4)
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_rrefs(), lr=0.1)
    x = torch.rand(32, 4)
    y = x[:, :2]
    losses = []
    for _ in range(10):
        with dist_autograd.context() as context:
            loss = nn.functional.mse_loss(model(x), y)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses


if __name__ == "__main__":
    ranks = Ranks()
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=32)
    rpc.init_rpc(f"worker{ranks.rank}", rank=ranks.rank, world_size=ranks.world_size, rpc_backend_options=options)
    if ranks.rank == 0:
        main()
    rpc.shutdown()
