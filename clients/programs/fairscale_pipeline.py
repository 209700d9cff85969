"""fairscale: a pipeline of remote modules over two workers, trained with distributed autograd."""

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from fairscale.experimental.nn.distributed_pipeline import DistributedLoss, DistributedPipeline, PipelineModulesGraph
from torch import nn
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer

from common import Ranks


def train():
    graph = PipelineModulesGraph()
    layers = [
        RemoteModule("worker0/cpu", nn.Linear, (4, 8)),
        RemoteModule("worker1/cpu", nn.ReLU, ()),
        RemoteModule("worker1/cpu", nn.Linear, (8, 2)),
    ]
    graph.add_sequence(layers, [0])
    pipe = DistributedPipeline(graph, chunks=4)
    parameters = pipe.parameter_rrefs()
    assert len(parameters) == 4, len(parameters)
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
    loss_of = DistributedLoss(nn.MSELoss)
    torch.manual_seed(0)
    x, y = torch.rand(16, 4), torch.rand(16, 2)
    target = rpc.remote("worker1", torch.Tensor.clone, args=(y,))
    losses = []
    for _ in range(5):
        with dist_autograd.context() as context:
            loss = loss_of(pipe(x), target)
            loss.backward(context)
            losses.append(loss.to_here().item())
            optimizer.step(context)
    assert losses[-1] < losses[0], losses


if __name__ == "__main__":
    ranks = Ranks()
    rpc.init_rpc(f"worker{ranks.rank}", rank=ranks.rank, world_size=ranks.world_size)
    if ranks.rank == 0:
        train()
    rpc.shutdown()
