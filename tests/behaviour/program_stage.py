"""Programs written for `torch.distributed.rpc`, run as real processes, on torch and on farcall."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

import ports

TIME_LIMIT_S = 150.0
"""Every process imports torch, which takes its time on a busy machine."""

On = Literal["torch", "farcall"]


def start(
    command: list[str], directory: Path, *, on: On = "farcall", environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Starts `python command ...` in that directory; on farcall, `python -m farcall.pytorch command ...`."""
    runner = ["-m", "farcall.pytorch"] if on == "farcall" else []
    env = {**os.environ, "PYTHONWARNINGS": "ignore", **meeting_point(), **(environment or {})}
    return subprocess.Popen(
        [sys.executable, *runner, *command],
        cwd=directory,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def meeting_point() -> dict[str, str]:
    """The environment variables by which the workers of one group find each other."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.free_port())}


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    """The output of a process that ends with this exit status."""
    try:
        out, err = process.communicate(timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"the process did not end:\n{out}\n{err}")
    assert process.returncode == status, f"status {process.returncode}\n{out}\n{err}"
    return out


def run(command: list[str], directory: Path, *, on: On = "farcall", status: int = 0) -> str:
    """The output of a program that ends with this exit status."""
    return finish(start(command, directory, on=on), status)


def run_ranks(command: list[str], directory: Path, world_size: int, *, on: On = "farcall") -> list[str]:
    """Starts the program once for each rank, with the environment that torchrun gives; the output of each."""
    group = {**meeting_point(), "WORLD_SIZE": str(world_size)}
    processes = [
        start(command, directory, on=on, environment={**group, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world_size)
    ]
    try:
        return [finish(process) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
