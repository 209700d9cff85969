"""What programs written for `torch.distributed.rpc` find on farcall: each probe prints the same on both."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install farcall[torch]")

from program_stage import TIME_LIMIT_S, run, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * TIME_LIMIT_S)]

TYPES_OF_REFERENCES = """
import copy, inspect, os, pickle, typing, weakref
import torch
import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import PyRRef
from torch.distributed.rpc import RRef

rank = int(os.environ["RANK"])


class Thing:
    def number(self):
        return 3


def describe(*rrefs):
    return [(type(r) is PyRRef, type(r) is RRef, isinstance(r, PyRRef), isinstance(r, RRef)) for r in rrefs]


def listed(rrefs):
    return list(rrefs)


def make():
    return RRef(Thing())


def told(what):
    print(what)


def attempt(what):
    try:
        told(what())
    except (RuntimeError, AttributeError) as error:
        told("refused by a RuntimeError" if isinstance(error, RuntimeError) else "refused by an AttributeError")


rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
if rank == 0:
    there, here, own = rpc.remote("worker1", Thing), rpc.remote("worker0", Thing), RRef(Thing())
    by_method, received = there.remote().number(), rpc.rpc_sync("worker1", make)
    rrefs = [there, here, own, by_method, received]
    print(describe(*rrefs))
    print(rpc.rpc_sync("worker1", describe, tuple(rrefs)))
    print(rpc.rpc_sync("worker0", describe, tuple(rrefs)))
    print(rpc.rpc_async("worker1", describe, args=(there, own)).wait())
    print(describe(*rpc.rpc_sync("worker1", listed, ([there, own],))))
    for rref in rrefs:
        told([rref.owner_name(), rref.is_owner(), hash(rref) == hash(rref), weakref.ref(rref)() is rref])
        attempt(lambda: setattr(rref, "mark", 1))
        attempt(lambda: pickle.dumps(rref))
        attempt(lambda: copy.deepcopy(rref))
    with torch.distributed.autograd.context():
        print(rpc.rpc_sync("worker1", describe, tuple(rrefs)))
        print(describe(rpc.remote("worker1", Thing), there.remote().number()))
told([issubclass(RRef, PyRRef), issubclass(PyRRef, RRef), rpc.PyRRef is PyRRef])
told([RRef[int] == RRef[int], RRef[int] == RRef[str], RRef[int].__args__, typing.get_origin(RRef[int]) is RRef])
told([torch._jit_internal.is_rref_instance(r) for r in (RRef(1), rpc.remote("worker0", make))])


class MyRRef(RRef[int]):
    pass


told(describe(MyRRef(1)))
for method in (
    "owner owner_name is_owner confirmed_by_owner to_here local_value rpc_sync rpc_async remote backward _get_type "
    "_get_future _get_profiling_future _set_profiling_future _serialize _deserialize"
).split():
    told([method, callable(getattr(PyRRef, method, None)), callable(getattr(RRef, method, None))])
rpc.shutdown()
"""


def test_references_have_torchs_types(tmp_path: Path) -> None:
    tmp_path.joinpath("program.py").write_text(TYPES_OF_REFERENCES)
    on_torch = run_ranks(["program.py"], tmp_path, 2, on="torch")
    assert "(True, False, True, False)" in on_torch[0]
    assert run_ranks(["program.py"], tmp_path, 2) == on_torch


PACKAGE = """
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc
import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import PyRRef
from torch.distributed import rpc as other_name
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef, TensorPipeRpcBackendOptions, api, init_rpc
from torch.distributed.rpc import remote, rpc_async, rpc_sync, shutdown


class Counter:
    count = 0

    def up(self):
        self.count += 1
        return self.count


@rpc.functions.async_execution
def up_later(counter):
    return rpc_async("worker0", Counter.up, args=(counter.local_value(),))


def work(rank, path):
    options = TensorPipeRpcBackendOptions(num_worker_threads=4, init_method=f"file://{path}")
    init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        counter = remote("worker1", Counter)
        assert type(counter) is PyRRef
        assert isinstance(RRef(1), api.RRef)
        assert [counter.rpc_sync().up(), rpc_sync("worker1", up_later, args=(counter,))] == [1, 2]
    shutdown()
    modules = (torch.distributed.rpc, rpc, api, other_name, dist_autograd, rpc_sync, DistributedOptimizer)
    return {getattr(module, "__module__", module.__name__).split(".")[0] for module in modules}
"""

PRELOADS = """
import multiprocessing, os, sys, time
import package_of_the_program

def work(rank, path):
    line = f"{{rank}} {{package_of_the_program.work(rank, path)}}" + os.linesep
    os.write(1, line.encode())  # at once: both workers write to one pipe

def begin_late(context):
    first = context.Process(target=time.sleep, args=(0,))
    first.start()  # and with it the fork server, which preloads
    first.join()
    from farcall.pytorch import install
    install()

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["package_of_the_program"])
    if {late}:
        begin_late(context)
    processes = [context.Process(target=work, args=(rank, os.path.abspath("store"))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(sum(process.exitcode for process in processes))
"""


@pytest.mark.parametrize("late", [False, True], ids=["before the fork server", "after the fork server"])
def test_a_fork_server_that_has_preloaded_the_program(
    tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fork server does not look for modules beside the script.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    tmp_path.joinpath("package_of_the_program.py").write_text(PACKAGE)
    tmp_path.joinpath("program.py").write_text(PRELOADS.format(late=late))
    out = run(["program.py"], tmp_path, on="torch" if late else "farcall")
    assert sorted(out.splitlines()) == ["0 {'farcall'}", "1 {'farcall'}"]


IMPORTS_FIRST = """
import os
import package_of_the_program as program
from farcall.pytorch import install
install()
install()
store = os.path.abspath("store")
child = os.fork()
os.write(1, f"{program.work(1 if child else 0, store)}\\n".encode())  # in one piece: two processes write
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""

KEEPS = """
import torch.distributed.rpc as rpc
class Kept:
    start = staticmethod(rpc.init_rpc)
from farcall.pytorch import install
install()
try:
    Kept.start("worker0", rank=0, world_size=1)
except RuntimeError as error:
    print(error)
"""


def test_a_program_that_installs_after_its_imports(tmp_path: Path) -> None:
    tmp_path.joinpath("package_of_the_program.py").write_text(PACKAGE)
    tmp_path.joinpath("program.py").write_text(IMPORTS_FIRST)
    assert run(["program.py"], tmp_path, on="torch") == 2 * "{'farcall'}\n"


def test_what_cannot_be_replaced_says_what_to_do(tmp_path: Path) -> None:
    tmp_path.joinpath("program.py").write_text(KEEPS)
    out = run(["program.py"], tmp_path, on="torch")
    assert "Call install() before the program imports torch.distributed.rpc" in out


SLOW_TO_LEAVE = """
import os, sys, time
import torch.distributed.rpc as rpc

rank = int(os.environ["RANK"])
slept = []


def slow(frame, event, result):
    if event == "return" and frame.f_code.co_name == "wait" and result is True and not slept:
        slept.append(True)
        time.sleep(0.5)


rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
rpc.api._all_gather(rank)
if rank == 1:
    sys.setprofile(slow)  # this thread is slow once it has been told what all have brought
begin = time.monotonic()
assert rpc.api._all_gather(rank) == {"worker0": 0, "worker1": 1}
print(time.monotonic() - begin >= 0.5)
sys.setprofile(None)
rpc.shutdown()
"""


def test_who_leads_a_gathering_leaves_it_last(tmp_path: Path) -> None:
    tmp_path.joinpath("program.py").write_text(SLOW_TO_LEAVE)
    assert run_ranks(["program.py"], tmp_path, 2) == ["True\n", "True\n"]
