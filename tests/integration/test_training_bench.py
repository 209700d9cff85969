"""The benchmark of a training step runs on farcall and in one process, and its model learns the same in both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("torch")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIMIT = 50.0

LOSSES = """
import json
import os
import sys
import farcall.pytorch
farcall.pytorch.install()
import torch
import torch.distributed.rpc as rpc
from training import model

SIZES = model.Sizes(words=10, features=2, hidden=3, layers=4, length=3, batch=5)

class Noting(torch.nn.CrossEntropyLoss):
    def forward(self, *given):
        loss = super().forward(*given)
        self.found.append(loss.item())
        return loss

def losses(trained):
    trained._loss = Noting()
    trained._loss.found = []
    torch.manual_seed(3)
    model.time_steps(trained, SIZES, 5)
    return trained._loss.found

def copy_to(trained):
    # The server has made its modules with other random numbers than one process would.
    for name in ("_table", "_decoder"):
        there = getattr(trained, name)
        weights = {key: value.clone() for key, value in getattr(alone, name).state_dict().items()}
        there.rpc_sync().load_state_dict(weights)
    trained._recurrent.load_state_dict(alone._recurrent.state_dict())

rank = int(sys.argv[1])
options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{sys.argv[2]}")
rpc.init_rpc(("trainer", model.SERVER)[rank], rank=rank, world_size=2, rpc_backend_options=options)
if rank == 0:
    alone = model.Alone(SIZES)
    trained = model.Training(SIZES)
    copy_to(trained)
    print(json.dumps([losses(alone), losses(trained)]))
    del trained
rpc.shutdown()
"""


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "COLUMNS": "200"}


@pytest.mark.timeout(60)
def test_a_quick_run_measures_both_and_says_what_the_calls_add(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [
        sys.executable,
        "-m",
        "training.run",
        "--quick",
        "--systems",
        "farcall,one process",
        "--json",
        str(found),
    ]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT)
    assert run.returncode == 0, run.stderr
    rounds = json.loads(found.read_text())["rounds"]
    farcall, alone = rounds["farcall"][0], rounds["one process"][0]
    assert set(alone) < set(farcall)
    for micros in (farcall, alone):
        parts = [micros[f"small model: {part}"] for part in ("forward", "backward", "optimizer")]
        assert all(part > 0 for part in parts)
        assert micros["small model: step"] > max(parts)
    assert {"one call: backward", "one call: call in context"} <= set(farcall)


def test_a_system_that_is_none_is_refused() -> None:
    command = [sys.executable, "-m", "training.run", "--systems", "farcall,gloo"]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT)
    assert run.returncode == 2
    assert "there is no gloo; there are farcall, torch, one process" in run.stderr


@pytest.mark.timeout(60)
def test_the_model_learns_the_same_with_a_server_as_alone(tmp_path: Path) -> None:
    from farcall.bench.processes import free_port

    script = tmp_path / "losses.py"
    script.write_text(LOSSES)
    port = str(free_port())
    command = [sys.executable, str(script)]
    with subprocess.Popen([*command, "1", port], env=environment()) as server:
        trainer = subprocess.run(
            [*command, "0", port], env=environment(), capture_output=True, text=True, timeout=LIMIT
        )
        assert server.wait(LIMIT) == 0
    assert trainer.returncode == 0, trainer.stderr
    alone, trained = json.loads(trainer.stdout)
    assert trained == pytest.approx(alone, rel=1e-5)
    assert alone[-1] != alone[0]
