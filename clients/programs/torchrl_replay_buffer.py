"""torchrl: a replay buffer on one worker, a collector that fills it from another, a trainer that samples it."""

import torch
import torch.distributed.rpc as rpc
from tensordict import TensorDict
from torchrl._utils import accept_remote_rref_invocation
from torchrl.data.replay_buffers import RemoteTensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.data.replay_buffers.storages import LazyTensorStorage
from torchrl.data.replay_buffers.writers import RoundRobinWriter

from common import Ranks


class Buffer(RemoteTensorDictReplayBuffer):
    def __init__(self, capacity):
        super().__init__(
            storage=LazyTensorStorage(max_size=capacity),
            sampler=RandomSampler(),
            writer=RoundRobinWriter(),
            collate_fn=lambda batch: batch,
        )


class Collector:
    def __init__(self, buffer):
        self.buffer = buffer

    @accept_remote_rref_invocation
    def collect(self, count):
        added = [
            rpc.remote(self.buffer.owner(), Buffer.add, args=(self.buffer, TensorDict({"a": torch.tensor([i])}, [])))
            for i in range(count)
        ]
        return [index.to_here() for index in added]


def train():
    buffer = rpc.remote("Buffer", Buffer, args=(1000,))
    assert type(buffer) is torch._C._distributed_rpc.PyRRef
    collectors = [rpc.remote(f"Collector{i}", Collector, args=(buffer,)) for i in (2, 3)]
    futures = [rpc.rpc_async(c.owner(), Collector.collect, args=(c, 20)) for c in collectors]
    indices = [index for future in futures for index in future.wait()]
    assert sorted(indices) == list(range(40)), indices
    batch = rpc.rpc_sync("Buffer", Buffer.sample, args=(buffer, 16))
    assert type(batch) is TensorDict
    assert batch["a"].shape == (16, 1), batch["a"].shape
    rpc.rpc_sync("Buffer", Buffer.extend, args=(buffer, TensorDict({"a": torch.full((8, 1), 99)}, [8])))
    assert rpc.rpc_sync("Buffer", Buffer.sample, args=(buffer, 200))["a"].max() == 99


if __name__ == "__main__":
    ranks = Ranks()
    name = ["Buffer", "Trainer", "Collector2", "Collector3"][ranks.rank]
    rpc.init_rpc(
        name,
        rank=ranks.rank,
        world_size=ranks.world_size,
        backend=rpc.BackendType.TENSORPIPE,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(num_worker_threads=16),
    )
    if name == "Trainer":
        train()
    rpc.shutdown()
