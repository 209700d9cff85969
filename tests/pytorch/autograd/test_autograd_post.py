"""Distributed autograd between processes: a worker dies in the midst of a backward pass, and nothing is left of it."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import farcall.pytorch as rpc
from farcall.pytorch import autograd
from farcall.pytorch.autograd import post

NOTHING = {"num_current_backward_passes": "0", "num_autograd_contexts": "0"}


def work(rank: int, store: Path, report: Connection) -> None:
    tempfile.tempdir = str(store.parent)  # a worker that is killed leaves its sockets there
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        report.send(lead())
    report.poll(60)  # until the test ends
    os._exit(0)


def lead() -> list[Any]:
    """What worker0 sees."""
    seen: list[Any] = [rpc.rpc_sync("worker2", begin_another)]
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", through_worker2, (x,)).sum()
        try:
            autograd.backward(context_id, [loss])
        except RuntimeError as error:
            seen.append((type(error).__name__, "worker2" in str(error)))
    return [*seen, what_is_left(), rpc.rpc_sync("worker1", what_is_left)]


def begin_another() -> str:
    """Worker2 makes a context of its own, of which worker1 knows and which nobody is going to release."""
    autograd._new_context()
    rpc.rpc_sync("worker1", torch.add, (torch.ones(1, requires_grad=True), 1))
    contexts = rpc.rpc_sync("worker1", autograd._get_debug_info)["num_autograd_contexts"]
    post.contexts().current_id = None
    return str(contexts)


def through_worker2(value: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker2", fatal, (value,)) * 3  # type: ignore[no-any-return]


def fatal(value: torch.Tensor) -> torch.Tensor:
    result = value * 2
    result.register_hook(lambda gradient: os._exit(7))
    return result


def what_is_left() -> dict[str, str]:
    """As soon as it is nothing, else after some time: the news of the loss takes a moment."""
    deadline = time.monotonic() + 20
    while (info := autograd._get_debug_info()) != NOTHING and time.monotonic() < deadline:
        time.sleep(0.005)
    return info


def test_a_worker_that_dies_ends_the_pass_and_its_contexts_go(tmp_path: Path) -> None:
    forking = multiprocessing.get_context("fork")  # importing torch anew takes seconds
    ours, theirs = forking.Pipe()
    processes = [forking.Process(target=work, args=(rank, tmp_path / "store", theirs)) for rank in range(3)]
    for process in processes:
        process.start()
    try:
        assert ours.poll(40)
        assert ours.recv() == ["1", ("WorkerLost", True), NOTHING, NOTHING]
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        ours.close()
        theirs.close()


def test_without_a_worker_there_are_no_contexts() -> None:
    with pytest.raises(RuntimeError, match="Need to initialize distributed autograd"):
        autograd._new_context()
