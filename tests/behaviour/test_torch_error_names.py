"""Errors at the torch edge name the program's own functions, and not those of farcall that carry them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import json, sys, time
import torch
import farcall.pytorch as rpc
import farcall.pytorch.autograd as dist_autograd
from farcall.pytorch.nn.remote_module import RemoteModule

RANK = int(sys.argv[1])
over = []

def fail(tensor):
    raise ValueError("bad")

def wait_long(tensor):
    while not over:
        time.sleep(0.01)

def end():
    over.append(True)

class Broken(torch.nn.Module):
    def __init__(self):
        raise KeyError("no module")

def told(function):
    try:
        function()
    except Exception as error:
        return "\\n".join([str(error), *getattr(error, "__notes__", [])])

def in_context(function):
    with dist_autograd.context():
        function()

options = rpc.TensorPipeRpcBackendOptions(init_method=sys.argv[2])
rpc.init_rpc(f"w{RANK}", rank=RANK, world_size=2, rpc_backend_options=options)
if RANK == 0:
    small, large = torch.ones(2, requires_grad=True), torch.ones(200_000, requires_grad=True)
    facts = {
        "small fails": told(lambda: in_context(lambda: rpc.rpc_sync("w1", fail, args=(small,)))),
        "large fails": told(lambda: in_context(lambda: rpc.rpc_sync("w1", fail, args=(large,)))),
        "remote fails": told(lambda: in_context(lambda: rpc.remote("w1", fail, args=(small,)).to_here())),
        "small hangs": told(lambda: in_context(lambda: rpc.rpc_sync("w1", wait_long, args=(small,), timeout=0.2))),
        "large hangs": told(lambda: in_context(lambda: rpc.rpc_sync("w1", wait_long, args=(large,), timeout=0.2))),
        "module": told(lambda: RemoteModule("w1/cpu", Broken).forward()),
    }
    rpc.rpc_sync("w1", end)
    print(json.dumps(facts), flush=True)
rpc.shutdown()
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What w0 was told by its errors."""
    directory = tmp_path_factory.mktemp("names")
    (directory / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(Path(directory, "script.py"))]
    processes = [
        subprocess.Popen(
            [*command, str(rank), f"file://{directory}/meeting"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    assert [process.returncode for process in processes] == [0, 0], said
    facts: dict[str, Any] = json.loads(said[0][0])
    return facts


@pytest.mark.parametrize("case", ["small fails", "large fails", "remote fails"])
def test_a_failure_names_the_function_that_failed(errors: dict[str, Any], case: str) -> None:
    assert "Remote traceback (worker 'w1', in `fail`)" in errors[case]


@pytest.mark.parametrize("case", ["small hangs", "large hangs"])
def test_a_timeout_names_the_function_that_hangs(errors: dict[str, Any], case: str) -> None:
    assert "did not answer `wait_long` within 0.2 s" in errors[case]


def test_a_module_that_cannot_be_made_names_its_own_constructor(errors: dict[str, Any]) -> None:
    assert "Remote traceback (worker 'w1', in `Broken.__init__`)" in errors["module"]
