"""`installation`: what stands where after it. Each test in a process of its own, as there is no way back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(directory: Path, code: str) -> str:
    program = directory / "program.py"  # a file, as TorchScript reads the source
    program.write_text(code)
    command = [sys.executable, "-W", "ignore", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_modules_and_bound_names_are_ours(tmp_path: Path) -> None:
    out = run(
        tmp_path,
        """
import farcall.pytorch
farcall.pytorch.install()
farcall.pytorch.install()
import sys, torch, threading
from torch.distributed import rpc
from torch.distributed.rpc import api, _utils, backend_registry
import torch.distributed.autograd as dist_autograd
for module in (rpc, api, _utils, backend_registry, dist_autograd, torch._C._distributed_rpc):
    print(module.__name__)
print(torch._jit_internal.RRef is rpc.RRef, torch.jit.annotations.RRef is rpc.RRef)
print(torch.futures.wait_all.__module__, threading.active_count())

@torch.jit.script
def owner(rref: rpc.RRef[torch.Tensor]) -> str:
    return rref.owner_name()

print(owner.schema)
""",
    )
    assert out.splitlines() == [
        "farcall.pytorch",
        "farcall.pytorch.api",
        "farcall.pytorch._utils",
        "farcall.pytorch.backend_registry",
        "farcall.pytorch.autograd",
        "farcall.pytorch.native",
        "True True",
        "farcall.pytorch.futures 1",
        "owner(RRef(Tensor) rref) -> str",
    ]


@pytest.mark.parametrize("first", ["import torch.distributed.rpc", "import farcall.pytorch", "pass"])
def test_before_it_torchs_own_are_there(tmp_path: Path, first: str) -> None:
    code = f"{first}\nfrom torch.distributed import rpc\nprint(rpc.__name__)"
    assert run(tmp_path, code) == "torch.distributed.rpc\n"


def test_it_refuses_while_torchs_own_is_running(tmp_path: Path) -> None:
    out = run(
        tmp_path,
        f"""
import torch.distributed.rpc as rpc
options = rpc.TensorPipeRpcBackendOptions(init_method="file://{tmp_path}/meeting")
rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
import farcall.pytorch
try:
    farcall.pytorch.install()
except RuntimeError as error:
    print(error)
print(rpc.get_worker_info().name)
rpc.shutdown()
""",
    )
    assert out.splitlines() == ["torch's own RPC is running in this process: call install() before init_rpc", "worker0"]
