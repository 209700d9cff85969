"""machin: an RPC group with paired values and services, in children of a fork server that has preloaded machin."""

import multiprocessing
import os
import sys

from machin_preloaded import World

NAMES = ["zero", "one", "two"]


def double(x):
    return 2 * x


def work(rank, directory):
    world = World(
        name=NAMES[rank],
        rank=rank,
        world_size=len(NAMES),
        dist_init_method=f"file://{directory}/dist",
        rpc_init_method=f"file://{directory}/rpc",
    )
    group = world.create_rpc_group("group", NAMES)
    group.pair(f"value of {NAMES[rank]}", rank)
    group.register(f"double at {NAMES[rank]}", double)
    group.barrier()
    for other, name in enumerate(NAMES):
        assert group.get_paired(f"value of {name}").to_here() == other
        assert group.registered_sync(f"double at {name}", args=(other,)) == 2 * other
        assert group.registered_async(f"double at {name}", args=(other,)).wait() == 2 * other
        assert group.registered_remote(f"double at {name}", args=(other,)).to_here() == 2 * other
        assert group.rpc_sync(name, double, args=(3,)) == 6
    group.barrier()
    world.stop()


if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["machin_preloaded"])
    # A fork server does not look for modules beside the script.
    os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    processes = [context.Process(target=work, args=(rank, os.getcwd())) for rank in range(len(NAMES))]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))
