"""torchopt: a task per worker, reduced at rank 0, and gradients across workers, as its distributed examples do."""

import torch
import torch.distributed.autograd as dist_autograd
import torchopt.distributed as todist
from torch import nn


def setup():
    torch.manual_seed(todist.get_rank())


def loss_of(weight, bias, batch):
    return nn.functional.linear(batch, weight, bias).square().mean()


@todist.parallelize(partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=True), reducer=todist.sum_reducer)
def total_of(batch):
    return batch.sum()


def scaled(x, factor):
    return x * factor


@todist.auto_init_rpc(setup)
@todist.rank_zero_only
def main():
    print(todist.get_world_info(), flush=True)
    batch = torch.arange(12.0).reshape(6, 2)
    assert total_of(batch).item() == batch.sum().item()
    model = nn.Linear(2, 1)
    weight, bias = (parameter.detach().requires_grad_() for parameter in model.parameters())
    with dist_autograd.context() as context:
        parts = enumerate(batch.chunk(todist.get_world_size()))
        futures = [
            todist.remote_async_call(loss_of, args=(weight, bias, part), partitioner=rank, reducer=sum)
            for rank, part in parts
        ]
        loss = torch.stack([future.wait() for future in futures]).mean()
        dist_autograd.backward(context, [loss])
        gradients = dist_autograd.get_gradients(context)
    expected = torch.autograd.grad(loss_of(weight, bias, batch), (weight, bias))
    for parameter, gradient in zip((weight, bias), expected, strict=True):
        assert torch.allclose(gradients[parameter], gradient, rtol=1e-4), (gradients[parameter], gradient)
    for rank in range(todist.get_world_size()):
        assert todist.remote_sync_call(scaled, args=(2, rank), partitioner=rank) == [2 * rank]
    # The other ranks have left `main`, and serve from the exit handler that `auto_init_rpc` has registered.


if __name__ == "__main__":
    main()
