import os

import farcall as rpc


def greet(name: str) -> str:
    return f"hello {name}, this is {rpc.get_worker_info().name}"


rpc.init_rpc(f"worker{os.environ.get('RANK')}")  # returns when both workers are there
if rpc.get_worker_info().name == "worker0":
    print(rpc.rpc_sync("worker1", greet, args=("worker0",)))
rpc.shutdown()  # waits until both workers are done
