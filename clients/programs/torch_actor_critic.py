"""An agent and observers that call each other back, in processes that the program spawns itself."""

import os

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn

OBSERVERS = 2


class Observer:
    def __init__(self):
        self.id = rpc.get_worker_info().id

    def run_episode(self, agent, steps):
        state = torch.zeros(4)
        for step in range(steps):
            action = agent.rpc_sync().select_action(self.id, state)
            state = state + action
            agent.rpc_async().report_reward(self.id, float(step)).wait()
        return steps


class Agent:
    def __init__(self):
        self.rref = rpc.RRef(self)
        self.policy = nn.Linear(4, 4)
        self.rewards, self.saved = {}, {}
        self.observers = [rpc.remote(rpc.get_worker_info(f"observer{i}"), Observer) for i in range(1, OBSERVERS + 1)]

    def select_action(self, observer, state):
        logits = self.policy(state)
        self.saved.setdefault(observer, []).append(logits.logsumexp(0))
        return logits.softmax(0).detach()

    def report_reward(self, observer, reward):
        self.rewards.setdefault(observer, []).append(reward)

    def run_episode(self, steps):
        futures = [
            rpc.rpc_async(observer.owner(), _call, args=(Observer.run_episode, observer, self.rref, steps))
            for observer in self.observers
        ]
        assert torch.futures.wait_all(futures) == [steps] * OBSERVERS
        loss = sum(torch.stack(saved).sum() for saved in self.saved.values())
        loss.backward()
        assert self.policy.weight.grad is not None
        assert self.rewards == {i: [float(step) for step in range(steps)] for i in range(1, OBSERVERS + 1)}


def _call(method, rref, *args):
    return method(rref.local_value(), *args)


def work(rank, world_size):
    rpc.init_rpc(f"observer{rank}" if rank else "agent", rank=rank, world_size=world_size)
    if rank == 0:
        Agent().run_episode(10)
    rpc.shutdown()


if __name__ == "__main__":
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    mp.spawn(work, args=(OBSERVERS + 1,), nprocs=OBSERVERS + 1)
