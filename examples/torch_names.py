"""The names of `torch.distributed.rpc`, without torch: `farcall run -n 2 examples/torch_names.py`.

Only the import differs from a program for torch. docs/from-torch.md has the names of farcall's own layer beside these.
"""

import os

import farcall as rpc


def make_calls() -> None:
    print(rpc.rpc_sync("worker1", max, args=(3, 4)))
    print(rpc.wait_all([rpc.rpc_async("worker1", pow, args=(2, n)) for n in range(5)]))
    numbers = rpc.remote("worker1", list[int], args=((3, 1, 2),))
    numbers.rpc_sync().append(4)
    print(numbers.to_here())


def main() -> None:
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        make_calls()
    rpc.shutdown()


if __name__ == "__main__":
    main()
