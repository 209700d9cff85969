"""One call on all workers, under any launcher: rank 0 asks where each of them runs.

    farcall run -n 4 examples/everywhere.py
    srun --ntasks 4 --export=ALL,MASTER_ADDR=10.0.0.1,MASTER_PORT=4000 python examples/everywhere.py
    torchrun --nproc-per-node 4 examples/everywhere.py

`Group()` takes rank, size and address from the launcher.
"""

import os
import socket

import farcall


def place() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


if __name__ == "__main__":
    with farcall.Group() as group:
        if group.info.id == 0:
            for name, (host, process) in group.workers().options(timeout=None).call(place).items():
                print(f"{name} is process {process} on {host}")
