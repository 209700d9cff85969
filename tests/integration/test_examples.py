"""The examples, run as a newcomer runs them."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 40.0
"""Seconds after which an example that does not end fails its test."""


def run_example(name: str, workers: int, *arguments: str, limit: float = LIMIT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "farcall", "run", "-n", str(workers), f"examples/{name}", *arguments],
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1", "PYTHONWARNINGS": "error"},
        capture_output=True,
        encoding="utf-8",
        timeout=limit,
    )


def test_the_first_program_greets() -> None:
    result = run_example("first.py", workers=2)
    assert (result.returncode, result.stdout, result.stderr) == (0, "worker0 | hello worker0, this is worker1\n", "")


def test_an_object_on_another_worker_answers_in_asyncio() -> None:
    result = run_example("actor.py", workers=2)
    said = [f"worker0 | hello {name}, says worker1\n" for name in ("tea", "salt", "tea")]
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "".join(said) + "worker0 | 2 of 3 for tea\n"


@pytest.mark.skipif(not find_spec("fastapi") or not find_spec("uvicorn"), reason="FastAPI is not installed")
def test_the_work_of_a_web_service_stops_when_its_client_has_gone() -> None:
    result = subprocess.run(
        [sys.executable, "examples/web_service.py"], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=LIMIT
    )
    counts = '{"started":2,"finished":1,"stopped":1}'
    said = f"a client that waits gets 0.5\na client has gone, and its work has stopped: {counts}\n"
    assert (result.returncode, result.stdout, result.stderr) == (0, said, "")


def run_script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, f"examples/{name}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "error", **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=LIMIT,
    )


def test_every_example_is_listed() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]", (ROOT / "examples" / "README.md").read_text("utf-8"), re.MULTILINE)
    helpers = {"progress.py"}  # imported by the examples of training
    assert sorted(listed) == sorted({path.name for path in (ROOT / "examples").glob("*.py")} - helpers)


def test_nested_calls_in_processes_and_in_a_test() -> None:
    result = run_script("sharded_total.py")
    assert (result.returncode, result.stdout, result.stderr) == (0, "the shards hold 36\n", "")


def test_functions_that_are_cancelled_end() -> None:
    result = run_script("cancel.py")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[:4] == [
        "the call of `search` on worker 'worker0' was cancelled",
        "it has ended there: True",
        "the call of `simulate` on worker 'worker0' was cancelled",
        "it has ended there: True",
    ]
    assert re.fullmatch(r"a timeout after \d+\.\d s; had it started\? True", lines[4])
    assert lines[5:] == ["it has ended there: True"]


def test_a_file_that_cannot_be_compressed_fails_alone(tmp_path: Path) -> None:
    texts = {tmp_path / f"{name}.txt": name.encode() * 1000 for name in ("tea", "salt", "rice", "milk", "oil")}
    for path, text in texts.items():
        path.write_bytes(text)
    result = run_script("compress_files.py", *map(str, [*texts, tmp_path / "missing.txt"]))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "missing.txt: FileNotFoundError\n5 of 6 files compressed\n"
    written = {path.with_suffix("") for path in tmp_path.glob("*.gz")}
    assert {path: gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes()) for path in written} == texts


@pytest.mark.parametrize("workers", [3, 6])
def test_the_controller_reaches_its_target_with_any_number_of_rollout_workers(workers: int) -> None:
    result = run_example("rlhf_controller.py", workers)
    assert (result.returncode, result.stderr) == (0, "")
    match = re.fullmatch(
        r"controller \| workers that roll out: (\d), batches in each step: (\d)\n"
        r"controller \| from 0\.0 to (\d\.\d), target 3\.0\n",
        result.stdout,
    )
    assert match, result.stdout
    assert (int(match[1]), int(match[2])) == (workers - 2, max(1, workers - 3))
    assert float(match[3]) == pytest.approx(3.0, abs=0.5)


def test_the_controller_says_how_many_workers_it_needs() -> None:
    result = run_example("rlhf_controller.py", workers=2)
    assert result.returncode == 1
    assert "start at least three workers" in result.stderr


def test_a_call_on_all_workers_under_farcall_run() -> None:
    result = run_example("everywhere.py", workers=3)
    assert (result.returncode, result.stderr) == (0, "")
    found = re.findall(r"^worker0 \| (worker\d) is process (\d+) on \S+$", result.stdout, re.MULTILINE)
    assert [name for name, _ in found] == ["worker0", "worker1", "worker2"]
    assert len({process for _, process in found}) == 3


def test_a_call_on_all_workers_under_slurm(free_port: int) -> None:
    common = {"SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    with ThreadPoolExecutor() as pool:  # as srun starts them: all with one environment but for the number of the task
        tasks = [pool.submit(run_script, "everywhere.py", **common, SLURM_PROCID=str(task)) for task in range(2)]
        results = [task.result() for task in tasks]
    assert [(result.returncode, result.stderr) for result in results] == [(0, ""), (0, "")]
    assert re.findall(r"^(worker\d) is process \d+ on \S+$", results[0].stdout, re.MULTILINE) == ["worker0", "worker1"]
    assert results[1].stdout == ""


def test_torchs_names_without_torch() -> None:
    result = run_example("torch_names.py", workers=2)
    said = ["4", "[1, 2, 4, 8, 16]", "[3, 1, 2, 4]"]
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "".join(f"worker0 | {line}\n" for line in said)


def test_the_demo_tells_its_whole_story_in_order() -> None:
    result = run_example("demo.py", workers=4)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line for line in lines if not line.startswith("worker0 | ")] == []  # one voice
    story = [
        r"Four workers have found each other\.",
        r"Calls: ",
        r"call\(who_are_you\)  →  worker1 is process \d+$",
        r"call\(max, 3, 4\)  →  4$",
        r"a lambda .*  →  40$",
        r"on all .*  →  worker1 is process \d+$",
        r"on all .*  →  worker2 is process \d+$",
        r"on all .*  →  worker3 is process \d+$",
        r"2000 calls, one after the other  →  \d+ µs each$",
        r"Futures: ",
        r"rests of 0\.3 s .*  →  done: False$",
        r"futures\.result\(\)  →  \{'worker1': 0\.3, 'worker2': 0\.3, 'worker3': 0\.3\} after \d+\.\d s$",
        r"then\(double it\)  →  8$",
        r"References: ",
        r"milk=1\)  →  \{'tea': 3, 'milk': 1\}$",
        r"shelf\.call\(len\)  →  2$",
        r"Errors: ",
        r"KeyError: 'milk'$",
        r"Remote traceback \(worker 'worker2', in `read_shelf`\):$",
        r"return shelf\[item\]$",
        r"UnknownWorkerError: could not find destination: there is no worker 'worker9'",
        r"Control: ",
        r"RpcTimeoutError: RPC ran for more than set timeout: worker 'worker3' did not answer `search` within 0\.2 s",
        r"the search has stopped on worker3  →  True$",
        r"A parameter server: ",
        r"at the start  →  y = 0\.00 x \+ 0\.00$",
        r"after 180 steps  →  y = (2\.9|3\.0)\d x \+ (1\.9|2\.0)\d$",  # the trainers may take turns in any order
        r"mean squared error .*e-\d\d, .*e-\d\d, .*e-\d\d$",
        r"That is all\.",
    ]
    rest = iter(lines)
    missing = [pattern for pattern in story if not any(re.search(pattern, line) for line in rest)]
    assert missing == [], result.stdout


@pytest.mark.parametrize("workers", [2, 4])
def test_the_parameter_server_learns_with_any_number_of_trainers(workers: int) -> None:
    result = run_example("parameter_server.py", workers)
    assert (result.returncode, result.stderr) == (0, "")
    line = re.compile(r"worker0 \| worker(\d): mean squared error (\S+) after 60 rounds")
    found = [match.groups() for match in map(line.fullmatch, result.stdout.splitlines()) if match is not None]
    assert [int(trainer) for trainer, _ in found] == list(range(1, workers))
    assert all(float(error) < 1e-6 for _, error in found)


def test_the_parameter_server_says_that_it_needs_a_trainer() -> None:
    result = run_example("parameter_server.py", workers=1)
    assert result.returncode == 1
    assert "start at least two workers" in result.stderr


needs_torch = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: pip install 'farcall[torch]'"
)
TORCH_LIMIT = 150.0
"""Four processes import torch and compile optimizers."""


@pytest.mark.long
@needs_torch
@pytest.mark.slow
@pytest.mark.timeout(2 * TORCH_LIMIT)
def test_training_with_a_server_brings_the_losses_down_and_draws_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "losses.png"
    result = run_example("training_server.py", 4, "--steps", "60", "--plot", str(plot), limit=TORCH_LIMIT)
    assert (result.returncode, result.stderr) == (0, "")
    *losses, drawn = result.stdout.splitlines()
    for trainer, line in zip(("worker2", "worker3"), losses, strict=True):
        match = re.fullmatch(rf"worker0 \| {trainer}: loss (\d\.\d\d) at first, (\d\.\d\d) at the end", line)
        assert match, line
        assert float(match[2]) < 0.8 * float(match[1])  # by far: the two train one table, as it happens
    assert drawn == "worker0 | the losses are drawn in losses.png"
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@needs_torch
@pytest.mark.slow
@pytest.mark.timeout(2 * TORCH_LIMIT)
def test_a_pipeline_learns_what_the_same_model_learns_in_one_process() -> None:
    result = run_example("training_pipeline.py", 4, "--steps", "12", limit=TORCH_LIMIT)
    assert (result.returncode, result.stderr) == (0, "")
    match = re.fullmatch(r"worker0 \| loss (\d\.\d\d) at first, (\d\.\d\d) after 12 steps\n", result.stdout)
    assert match, result.stdout
    assert [float(each) for each in match.groups()] == pytest.approx(trained_here(12), abs=0.011)


def trained_here(steps: int) -> list[float]:
    """The first loss, and the mean of the last five, of the pipeline's model as one model of this process."""
    script = textwrap.dedent(f"""
        import torch, training_pipeline as example
        from torch import nn

        torch.set_num_threads(1)
        model = nn.Sequential(*[example.make_part(*widths) for widths in ((2, 32), (32, 32), (32, 2))])
        optimizer, generator = torch.optim.Adam(model.parameters(), lr=0.02), torch.Generator().manual_seed(0)
        losses = []
        for _ in range({steps}):
            points, classes = example.spirals(generator)
            loss = nn.functional.cross_entropy(model(points), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(losses[0], sum(losses[-5:]) / 5)
    """)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
        timeout=TORCH_LIMIT,
        check=True,
    )
    return [float(word) for word in done.stdout.split()]
