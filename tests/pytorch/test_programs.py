"""Programs that know nothing of farcall: run by `python -m farcall.pytorch`, in all the ways in which they start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ports

LIMIT = 150.0
"""Seconds. Each program imports torch three times, which a busy machine does in its own time."""

pytestmark = pytest.mark.timeout(LIMIT + 10)

IMPORTS = {
    "from a package": "from torch.distributed import rpc\nrpc_sync, remote, RRef = rpc.rpc_sync, rpc.remote, rpc.RRef",
    "under a name": "import torch.distributed.rpc as rpc\nfrom torch.distributed.rpc import rpc_sync, remote, RRef",
    "by names": "from torch.distributed.rpc import *\nfrom torch.distributed.rpc import init_rpc, shutdown, api\n"
    "import torch.distributed.rpc\nrpc = torch.distributed.rpc",
}

WORK = """
import os, sys
import torch
{imports}


@torch.no_grad()
def scaled(x, factor):
    return x * factor


class Counter:
    def __init__(self):
        self.count = 0

    def increase(self, by):
        self.count += by
        return self.count


def work(rank, world_size):
    rpc.init_rpc(f"worker{{rank}}", rank=rank, world_size=world_size)
    if rank == 0:
        assert rpc_sync("worker1", scaled, args=(torch.ones(2), 3)).tolist() == [3.0, 3.0]
        counter = remote("worker1", Counter)
        assert not isinstance(counter, RRef)
        assert [counter.rpc_sync().increase(2), counter.rpc_async().increase(3).wait()] == [2, 5]
    rpc.shutdown()
    os.write(1, f"{{rank}} ran on {{rpc.__name__}}\\n".encode())  # at one stroke: the others write, too
"""

SPAWN = """
if __name__ == "__main__":
    import torch.multiprocessing as mp
    mp.spawn(work, args=(2,), nprocs=2)
"""

CONTEXT = """
if __name__ == "__main__":
    import multiprocessing
    context = multiprocessing.get_context("{method}")
    processes = [context.Process(target=work, args=(rank, 2)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(sum(process.exitcode for process in processes))
"""

ENVIRONMENT = """
work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
"""

INSTALLING = """
import farcall.pytorch
farcall.pytorch.install()
"""


def environment(**more: str) -> dict[str, str]:
    here = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.free_port()), **more}
    here["PYTHONWARNINGS"] = "ignore"
    return here


def start(command: list[str], where: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command], cwd=where, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen[str]) -> list[str]:
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"it did not end:\n{out}\n{err}")
    assert process.returncode == 0, f"{out}\n{err}"
    return sorted(out.splitlines())


ON_FARCALL = ["0 ran on farcall.pytorch", "1 ran on farcall.pytorch"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "end"),
    [
        ("from a package", SPAWN),
        ("under a name", CONTEXT.format(method="fork")),
        ("by names", CONTEXT.format(method="forkserver")),
    ],
    ids=["spawn", "fork", "forkserver"],
)
def test_a_program_that_starts_its_workers(tmp_path: Path, imports: str, end: str) -> None:
    tmp_path.joinpath("program.py").write_text(WORK.format(imports=IMPORTS[imports]) + end)
    env = environment()
    assert finish(start(["-m", "farcall.pytorch", "program.py"], tmp_path, env)) == ON_FARCALL


@pytest.mark.slow
def test_workers_that_are_started_one_by_one(tmp_path: Path) -> None:
    tmp_path.joinpath("program.py").write_text(WORK.format(imports=IMPORTS["by names"]) + ENVIRONMENT)
    env = environment(WORLD_SIZE="2")
    command = ["-m", "farcall.pytorch", "program.py"]
    workers = [start(command, tmp_path, {**env, "RANK": str(rank)}) for rank in range(2)]
    assert [line for worker in workers for line in finish(worker)] == ON_FARCALL


@pytest.mark.slow
def test_a_module_that_starts_its_workers(tmp_path: Path) -> None:
    tmp_path.joinpath("program.py").write_text(WORK.format(imports=IMPORTS["by names"]) + SPAWN)
    assert finish(start(["-m", "farcall.pytorch", "-m", "program"], tmp_path, environment())) == ON_FARCALL


@pytest.mark.slow
def test_a_program_that_installs_farcall_itself(tmp_path: Path) -> None:
    body = WORK.format(imports=IMPORTS["under a name"]) + SPAWN
    tmp_path.joinpath("program.py").write_text(INSTALLING + body)
    assert finish(start(["program.py"], tmp_path, environment())) == ON_FARCALL


@pytest.mark.slow
def test_without_farcall_it_is_torchs_own(tmp_path: Path) -> None:
    tmp_path.joinpath("program.py").write_text("from torch.distributed import rpc\nprint(rpc.__name__)\n")
    assert finish(start(["program.py"], tmp_path, environment())) == ["torch.distributed.rpc"]


def test_arguments_and_the_way_out(tmp_path: Path) -> None:
    tmp_path.joinpath("program.py").write_text(
        "import sys, os\nprint(sys.argv[1:], __name__, os.path.basename(sys.path[0]))\nsys.exit(7)\n"
    )
    process = start(["-m", "farcall.pytorch", "program.py", "-m", "x"], tmp_path, environment())
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out) == (7, f"['-m', 'x'] __main__ {tmp_path.name}\n"), err
    process = start(["-m", "farcall.pytorch"], tmp_path, environment())
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 2
    assert "usage: python -m farcall.pytorch" in err


def test_a_script_knows_where_it_is_wherever_it_goes(tmp_path: Path) -> None:
    tmp_path.joinpath("program.py").write_text(
        "import os\nos.chdir('/')\nprint(os.path.isabs(__file__), os.path.exists(__file__))\n"
    )
    assert finish(start(["-m", "farcall.pytorch", "program.py"], tmp_path, environment())) == ["True True"]
    process = start(["-m", "farcall.pytorch", "nowhere.py"], tmp_path, environment())
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out) == (2, "")
    assert err == "python -m farcall.pytorch: the script 'nowhere.py' does not exist\n"
