"""Distributed autograd between processes: a worker dies in the midst of a backward pass, and nothing is left of it."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import farcall.pytorch as rpc
from eventually import eventually
from farcall.api import current_agent
from farcall.errors import NotAllowedError, RpcError, RpcTimeoutError
from farcall.futures import Future
from farcall.protocol.ids import WorkerInfo
from farcall.pytorch import autograd
from farcall.pytorch.autograd import post

NOTHING = {"num_current_backward_passes": "0", "num_autograd_contexts": "0"}


def work(rank: int, store: Path, report: Connection, lead: Callable[[], list[Any]]) -> None:
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


def lead_through_one_that_dies(chain: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """What worker0 sees if worker1 dies, by which alone worker2 is in the context."""
    seen: list[Any] = []
    with autograd.context() as context_id:
        try:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", chain, (torch.ones(2, requires_grad=True),)).sum()])
        except RuntimeError as error:
            seen.append((type(error).__name__, "worker1" in str(error)))
    return [*seen, what_is_left(), rpc.rpc_sync("worker2", what_is_left)]


def dying_forwards(value: torch.Tensor) -> torch.Tensor:
    rpc.rpc_sync("worker2", weighted, (value,))
    os._exit(7)


def dying_backwards(value: torch.Tensor) -> torch.Tensor:
    first = rpc.rpc_sync("worker2", weighted, (value,)) * 1
    first.register_hook(lambda gradient: os._exit(7))  # when worker2 has the gradients of the second
    return first + rpc.rpc_sync("worker2", weighted, (value,))  # type: ignore[no-any-return]


def weighted(value: torch.Tensor) -> torch.Tensor:
    return value * torch.ones(2, requires_grad=True)


def what_is_left() -> dict[str, str]:
    """When it is nothing: the news of the loss takes a moment. Fails if it stays."""
    eventually(lambda: autograd._get_debug_info() == NOTHING)
    return autograd._get_debug_info()


def test_a_worker_that_dies_ends_the_pass_and_its_contexts_go(tmp_path: Path) -> None:
    assert seen_by(lead, tmp_path) == ["1", ("WorkerLostError", True), NOTHING, NOTHING]


@pytest.mark.parametrize("chain", [dying_forwards, dying_backwards])
def test_nor_is_anything_left_at_those_who_were_called_by_it_alone(
    tmp_path: Path, chain: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    assert seen_by(partial(lead_through_one_that_dies, chain), tmp_path) == [
        ("WorkerLostError", True),
        NOTHING,
        NOTHING,
    ]


@pytest.mark.parametrize(("error", "attempts"), [(NotAllowedError("no"), 1), (RpcTimeoutError("late"), 20)])
def test_only_what_a_broken_connection_may_have_cost_is_told_again(
    error: Exception, attempts: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Any] = []

    def call(*words: Any, unattended: bool) -> Future[None]:
        made.append(words)
        answer: Future[None] = Future()
        answer.set_exception(error)
        return answer

    monkeypatch.setattr(post, "call", call)
    monkeypatch.setattr(post, "_is_there", lambda worker: True)
    post.AgentPost().release(WorkerInfo("worker1", 1), 5)
    assert len(made) == attempts
    assert "worker 'worker1' could not be told _release(5,)" in caplog.text


def test_who_shuts_down_does_not_complain_of_what_others_were_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    agent: Any = current_agent()
    try:
        call: Future[None] = Future()
        monkeypatch.setattr(post, "call", lambda *_, **__: call)
        post._tell(agent.get_worker_info(), post._release, (5,), 1)
        monkeypatch.setattr(agent._peers, "closed", RpcError("this worker has shut down"))
        call.set_exception(RpcError("worker 'alone' (this one) shut down before the call ended"))
        assert "could not be told" not in caplog.text
        monkeypatch.undo()
    finally:
        rpc.shutdown()


def seen_by(lead: Callable[[], list[Any]], tmp_path: Path) -> list[Any]:
    """What it returns in worker0 of a group of three."""
    forking = multiprocessing.get_context("fork")  # importing torch anew takes seconds
    ours, theirs = forking.Pipe()
    processes = [forking.Process(target=work, args=(rank, tmp_path / "store", theirs, lead)) for rank in range(3)]
    for process in processes:
        process.start()
    try:
        assert ours.poll(40)
        return list(ours.recv())
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
