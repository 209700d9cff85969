"""The default backend, as a program for torch asks for it."""

from __future__ import annotations

import logging

import pytest

import farcall as rpc
from farcall.options import BackendOptions
from farcall.runtime.agent import Agent


@pytest.fixture
def url(free_port: int) -> str:
    return f"tcp://127.0.0.1:{free_port}"


@pytest.mark.parametrize("backend", [None, rpc.BackendType.TENSORPIPE, rpc.BackendType.FARCALL])
def test_a_program_for_torch(url: str, backend: rpc.BackendType | None, caplog: pytest.LogCaptureFixture) -> None:
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=7, init_method=url)
    options.set_device_map("worker0", {0: 1})
    with caplog.at_level(logging.WARNING, logger="farcall"):
        rpc.init_rpc("worker0", backend=backend, rank=0, world_size=1, rpc_backend_options=options)
    try:
        agent = rpc.api.current_agent()
        assert isinstance(agent, Agent)
        assert agent.device_maps == {"worker0": {"cuda:0": "cuda:1"}}
        assert rpc.get_rpc_timeout() == 7
        options.rpc_timeout = 9
        assert agent.options.rpc_timeout == 7
        assert rpc.rpc_sync("worker0", max, args=(1, 2)) == 2
    finally:
        rpc.shutdown()
    assert caplog.text == ""


def test_options_made_by_the_registry() -> None:
    options = rpc.construct_rpc_backend_options(
        rpc.BackendType.TENSORPIPE, init_method="tcp://h:1", num_worker_threads=8, _transports=["shm"], _channels=None
    )
    assert options == rpc.RpcBackendOptions(init_method="tcp://h:1", num_worker_threads=8)
    assert rpc.construct_rpc_backend_options(rpc.BackendType.FARCALL, 3, spin=0).rpc_timeout == 3
    with pytest.raises(TypeError, match="colour"):
        rpc.construct_rpc_backend_options(rpc.BackendType.FARCALL, colour="red")


def test_options_of_another_backend_are_refused() -> None:
    with pytest.raises(TypeError, match=r"`rpc_backend_options` must be a `RpcBackendOptions` \(farcall.options\) "):
        rpc.init_rpc("a", rpc.BackendType.FARCALL, 0, 1, BackendOptions())


def test_device_maps_that_cannot_be_are_refused_when_they_are_taken(url: str) -> None:
    options = rpc.RpcBackendOptions(init_method=url)
    options.set_device_map("b", {0: 1})
    options.set_device_map("b", {1: 1})
    with pytest.raises(ValueError, match="only supports 1-to-1 mapping"):
        rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=options)
    with pytest.raises(rpc.NotInitializedError):
        rpc.get_worker_info()
