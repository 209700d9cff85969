"""A parameter server that updates its model once all trainers have sent their gradients of a step."""

import threading

import torch
import torch.distributed.rpc as rpc
from torch import nn

from common import Ranks

STEPS = 5


class Server:
    def __init__(self, trainers):
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.trainers, self.received = trainers, 0
        self.lock, self.updated = threading.Lock(), torch.futures.Future()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def get_model(self):
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch(server_rref, gradients):
        self = server_rref.local_value()
        with self.lock:
            self.received += 1
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad += gradient / self.trainers
            updated = self.updated
            if self.received == self.trainers:
                self.received = 0
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.updated = torch.futures.Future()
                updated.set_result(self.model)
        return updated


def train(server):
    model = server.rpc_sync().get_model()
    torch.manual_seed(rpc.get_worker_info().id)
    x = torch.rand(16, 3)
    y = x.sum(1, keepdim=True)
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(x), y)
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        model = rpc.rpc_sync(server.owner(), Server.update_and_fetch, args=(server, gradients))
    return losses, [parameter.detach() for parameter in model.parameters()]


def main(ranks):
    trainers = [f"trainer{rank}" for rank in range(1, ranks.world_size)]
    server = rpc.RRef(Server(len(trainers)))
    results = [future.wait() for future in [rpc.rpc_async(name, train, args=(server,)) for name in trainers]]
    for losses, parameters in results:
        assert losses[-1] < losses[0], losses
        for mine, theirs in zip(server.local_value().model.parameters(), parameters, strict=True):
            assert torch.equal(mine, theirs)


if __name__ == "__main__":
    ranks = Ranks()
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, rpc_timeout=300)
    name = f"trainer{ranks.rank}" if ranks.rank else "server"
    rpc.init_rpc(name, rank=ranks.rank, world_size=ranks.world_size, rpc_backend_options=options)
    if ranks.rank == 0:
        main(ranks)
    rpc.shutdown()
