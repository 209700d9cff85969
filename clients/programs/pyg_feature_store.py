"""PyG: feature stores of two partitions, each of which looks up what the other has."""

import torch
from torch_geometric.distributed import LocalFeatureStore
from torch_geometric.distributed.dist_context import DistContext, DistRole
from torch_geometric.distributed.event_loop import ConcurrentEventLoop, to_asyncio_future
from torch_geometric.distributed.rpc import (
    RPCRouter,
    global_barrier,
    init_rpc,
    rpc_partition_to_workers,
    shutdown_rpc,
)

from common import Ranks

NODES = 20


def main(ranks):
    context = DistContext(
        rank=ranks.rank,
        global_rank=ranks.rank,
        world_size=ranks.world_size,
        global_world_size=ranks.world_size,
        group_name="stores",
        role=DistRole.WORKER,
    )
    features = torch.arange(2.0 * NODES).reshape(NODES, 2)
    half = torch.arange(NODES // 2) + ranks.rank * NODES // 2
    store = LocalFeatureStore()
    store.put_global_id(half, group_name=None)
    store.put_tensor(features[half], group_name=None, attr_name="x")
    init_rpc(context, ranks.host, ranks.port)
    workers = rpc_partition_to_workers(context, ranks.world_size, ranks.rank)
    assert workers == [[f"stores-{rank}"] for rank in range(ranks.world_size)], workers
    store.num_partitions = ranks.world_size
    store.node_feat_pb = torch.cat([torch.zeros(NODES // 2), torch.ones(NODES // 2)]).long()
    store.meta = {"is_hetero": False}
    store.partition_idx = ranks.rank
    store.local_only = False
    store.set_rpc_router(RPCRouter(workers))
    global_barrier()  # everybody has registered
    loop = ConcurrentEventLoop(2)
    loop.start_loop()
    wanted = torch.tensor([1, 15, 3, 19, 0, 10])
    for _ in range(5):
        found = loop.run_task(coro=wait_for(store.lookup_features(wanted)))
        assert torch.equal(found, features[wanted]), found
    shutdown_rpc(graceful=True)


async def wait_for(future):
    return await to_asyncio_future(future)


if __name__ == "__main__":
    main(Ranks())
