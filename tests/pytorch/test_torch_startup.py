"""`farcall.pytorch.startup`, `backend_registry`, `worker_info`, `agent`, `internal`, `native`: how a worker begins."""

from __future__ import annotations

import importlib
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import farcall.pytorch as rpc
from farcall.errors import RendezvousTimeoutError
from farcall.protocol import ids
from farcall.pytorch import api, backend_registry, internal, native
from farcall.pytorch.worker_info import WorkerInfo, as_torch
from torch_stage import SOON, add, echo, one_worker, options, run_group

ME = "alone"


# Beginning


def test_a_worker_begins_once(tmp_path: Path) -> None:
    assert rpc.is_available()
    with one_worker(tmp_path):
        agent = api._get_current_rpc_agent()
        with pytest.raises(RuntimeError, match="already initialized"):
            rpc.init_rpc("again", rank=0, world_size=1, rpc_backend_options=options(tmp_path))
        assert api._get_current_rpc_agent() is agent
        assert rpc.rpc_sync(ME, echo, (1,)) == 1


@pytest.mark.parametrize("name", ["", "a b", "slash/", "x" * 128, "ü", "line\n"])
def test_names_that_torch_does_not_take(tmp_path: Path, name: str) -> None:
    with pytest.raises(RuntimeError, match="Worker name must"):
        rpc.init_rpc(name, rank=0, world_size=1, rpc_backend_options=options(tmp_path))
    assert not api._is_current_rpc_agent_set()
    with pytest.raises(RuntimeError, match="Worker name must"):
        WorkerInfo(name, 0)


def test_a_rank_that_is_not_given_is_that_of_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin() -> None:
        rpc.init_rpc("own", world_size=1, rpc_backend_options=options(tmp_path))

    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="rank"):
        begin()
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(RuntimeError, match="RANK is 'first'"):
        begin()
    assert not api._is_current_rpc_agent_set()
    monkeypatch.setenv("RANK", "0")
    begin()
    assert rpc.get_worker_info().id == 0
    rpc.shutdown()


def test_names_that_it_takes(tmp_path: Path) -> None:
    name = "A-z_0:9" + "x" * 120
    with one_worker(tmp_path, name):
        assert rpc.get_worker_info().name == name


@pytest.mark.parametrize(
    ("others", "message"),
    [(3, "rank 0 was started with world_size=2, but another .* with world_size=3"), (None, "mixes statically")],
)
def test_workers_that_do_not_agree_on_the_size_of_their_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int | None, message: str
) -> None:
    monkeypatch.setattr(rpc, "_init_counter", 0)
    store = dist.FileStore(str(tmp_path / "store"), -1)
    dist.PrefixStore("rpc_prefix_0", store).set("kind", f"of {others}" if others else "open")
    with pytest.raises(RuntimeError, match=message):
        rpc.init_rpc(ME, rank=0, world_size=2, rpc_backend_options=options(tmp_path))
    assert not api._is_current_rpc_agent_set()


def test_arguments_of_wrong_kinds(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="backend must be a member of BackendType"):
        rpc.init_rpc(ME, backend="TENSORPIPE", rank=0, world_size=1)
    with pytest.raises(TypeError, match="must be an instance of RpcBackendOptions"):
        rpc.init_rpc(ME, rank=0, world_size=1, rpc_backend_options={})
    with pytest.raises(RuntimeError, match="must be of type"):
        rpc.init_rpc(3, rank=0, world_size=1, rpc_backend_options=options(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank"):
        rpc.init_rpc(ME, world_size=1, rpc_backend_options=options(tmp_path))
    assert not api._is_current_rpc_agent_set()


@pytest.mark.parametrize("rank", [1, 7])
def test_a_rank_that_no_worker_can_have(tmp_path: Path, rank: int) -> None:
    with pytest.raises((ValueError, RuntimeError), match="rank"):
        rpc.init_rpc(ME, rank=rank, world_size=1, rpc_backend_options=options(tmp_path, init_timeout=60))
    assert not api._is_current_rpc_agent_set()


def test_others_that_do_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farcall.rendezvous.CLOSE_TIMEOUT_S", 0.1)
    with pytest.raises(RendezvousTimeoutError, match=r"missing: rank 1"):
        rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options(tmp_path, init_timeout=0.1))
    assert not api._is_current_rpc_agent_set()


def test_two_workers_of_one_name(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        with pytest.raises(RuntimeError, match="not unique"):
            rpc.init_rpc("same", rank=rank, world_size=2, rpc_backend_options=options(tmp_path))
        return api._is_current_rpc_agent_set()

    assert run_group(tmp_path, body, init=False) == [False, False]


def test_a_store_of_the_programs_own(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "own"), 1)
    rpc.autograd._init(0)
    rpc._init_rpc_backend(store=store, name=ME, rank=0, world_size=1, rpc_backend_options=options(tmp_path))
    try:
        assert rpc.rpc_sync(ME, echo, (1,)) == 1
        assert rpc._get_debug_info()["agent.thread_pool_size"] == "4"
    finally:
        rpc.shutdown()
    with pytest.raises(RuntimeError, match="must be of type"):
        rpc._init_rpc_backend(store="none", name=ME, rank=0, world_size=1, rpc_backend_options=options(tmp_path))


def test_one_group_after_the_other_in_one_place(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        for number in range(3):
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options(tmp_path))
            assert rpc.rpc_sync(f"worker{1 - rank}", add, (number, 1)) == number + 1
            rpc.shutdown()
        return True

    assert run_group(tmp_path, body, init=False) == [True, True]


def test_a_forked_child_of_a_worker_may_be_a_worker_itself(tmp_path: Path) -> None:
    def body(_: int) -> Any:
        assert not api._is_current_rpc_agent_set()
        with pytest.raises(RuntimeError):
            rpc.rpc_sync(ME, echo)
        (tmp_path / "child").mkdir()
        with one_worker(tmp_path / "child", "child"):
            assert api._all_gather(1) == {"child": 1}
            rref = rpc.remote("child", echo, (os.getpid(),))
            return rref.to_here() == os.getpid(), str(rref)

    with one_worker(tmp_path), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork while threads run
        assert rpc.RRef(1).to_here() == 1
        words = "OwnerRRef(GloballyUniqueId(created_on=0, local_id=0))"
        assert run_group(tmp_path, body, 1, init=False) == [(True, words)]
        assert rpc.rpc_sync(ME, echo, (1,)) == 1


def test_an_open_group(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        rpc.init_rpc(f"worker{rank}", rank=rank, rpc_backend_options=options(tmp_path))
        assert rpc.rpc_sync(f"worker{rank}", echo, (rank,)) == rank
        if rank == 0:
            joined.wait(SOON)
            assert rpc.rpc_sync("worker1", add, (1, 2)) == 3
            called.set()
        else:
            joined.set()
            assert called.wait(SOON)
        rpc.shutdown()
        return api._is_current_rpc_agent_set()

    from torch_stage import FORK

    joined, called = FORK.Event(), FORK.Event()
    assert run_group(tmp_path, body, init=False) == [False, False]


# Backends


def test_the_backends_that_are_there() -> None:
    assert rpc.backend_registered("TENSORPIPE")
    assert not rpc.backend_registered("nothing")
    assert repr(backend_registry.BackendType.TENSORPIPE) == "BackendType.TENSORPIPE"
    made = rpc.construct_rpc_backend_options(backend_registry.BackendType.TENSORPIPE, rpc_timeout=3, init_method="x")
    assert (made.rpc_timeout, made.init_method) == (3, "x")


def test_another_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_registry, "BackendType", backend_registry.BackendType)
    asked: list[Any] = []

    class Options(rpc.TensorPipeRpcBackendOptions):
        """Of that backend only."""

    def construct(rpc_timeout: float, init_method: str, **kwargs: Any) -> Any:
        return Options(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)

    def init(**given: Any) -> Any:
        asked.append(given)
        return backend_registry.BackendType.TENSORPIPE.value.init_backend_handler(**given)

    backend = rpc.register_backend("OTHER", construct, init)
    assert backend is backend_registry.BackendType.OTHER
    with pytest.raises(RuntimeError, match="already registered"):
        rpc.register_backend("OTHER", construct, init)
    chosen = rpc.construct_rpc_backend_options(backend, init_method=f"file://{tmp_path / 'store'}")
    rpc.init_rpc(ME, backend=backend, rank=0, world_size=1, rpc_backend_options=chosen)
    assert rpc.rpc_sync(ME, echo, (1,)) == 1
    rpc.shutdown()
    assert asked[0]["rpc_backend_options"] is chosen


# Options


def test_options_that_cannot_be() -> None:
    with pytest.raises(TypeError, match="rpc_timeout must be a number of seconds"):
        rpc.TensorPipeRpcBackendOptions(rpc_timeout="soon")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="CUDA devices"):
        rpc.TensorPipeRpcBackendOptions(devices=["cpu"])
    with pytest.raises(ValueError, match="1-to-1"):
        rpc.TensorPipeRpcBackendOptions(device_maps={"x": {"cuda:0": "cuda:1", "cuda:1": "cuda:1"}})
    chosen = rpc.TensorPipeRpcBackendOptions(device_maps={"x": {"cuda:0": "cuda:1"}})
    with pytest.raises(ValueError, match="1-to-1"):
        chosen.set_device_map("x", {"cuda:0": "cuda:2"})
    assert chosen.device_maps == {"x": {torch.device("cuda:0"): torch.device("cuda:1")}}


def test_an_agent_takes_a_copy_of_its_options(tmp_path: Path) -> None:
    chosen = options(tmp_path, rpc_timeout=3)
    rpc.init_rpc(ME, rank=0, world_size=1, rpc_backend_options=chosen)
    try:
        chosen.device_maps[ME] = {torch.device("cpu"): torch.device("meta")}
        chosen.set_device_map("other", {"cuda:0": "cuda:1"})
        chosen.rpc_timeout = 5
        agent = api._get_current_rpc_agent()
        assert agent.device_maps == {}
        assert agent._get_device_map(WorkerInfo("other", 1)) == {}
        assert agent._get_backend_options().device_maps == {}
        assert agent._get_backend_options().rpc_timeout == 3
        assert api.get_rpc_timeout() == 3
    finally:
        rpc.shutdown()


# Workers


def test_a_worker_is_the_same_to_farcall_and_to_torch() -> None:
    ours, theirs = ids.WorkerInfo("one", 1), WorkerInfo("one", 1)
    assert ours == theirs
    assert theirs == ours
    assert len({ours, theirs}) == 1
    assert theirs != WorkerInfo("one", 2)
    assert theirs != "one"
    assert pickle.loads(pickle.dumps(theirs)) == theirs
    assert as_torch(theirs) is theirs
    assert type(as_torch(ours)) is WorkerInfo
    assert as_torch(ids.WorkerInfo("any name", 1)).name == "any name"
    assert str(theirs) == "WorkerInfo(id=1, name=one)"


def test_what_an_agent_tells_of_itself(tmp_path: Path) -> None:
    with one_worker(tmp_path):
        agent = api._get_current_rpc_agent()
        assert agent.get_worker_infos() == [WorkerInfo(ME, 0)]
        assert type(agent.get_worker_infos()[0]) is WorkerInfo
        assert agent.is_static_group
        info = agent.get_debug_info()
        assert {"agent.thread_pool_size", "agent.num_idle_threads", "agent.client_active_calls"} <= info.keys()
        assert all(isinstance(value, str) for value in info.values())
        agent.sync()
        agent.join()


def test_what_functions_raise_is_told_here_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with one_worker(tmp_path):
        with pytest.raises(ZeroDivisionError):
            rpc.rpc_sync(ME, divmod, (1, 0))
        assert "On WorkerInfo(id=0, name=alone):\nZeroDivisionError" in capfd.readouterr().err


# What stands for torch's own modules


def test_the_pickler_that_programs_may_use() -> None:
    body, tensors = internal.serialize({"tensor": torch.ones(2), "other": 1})
    assert len(tensors) == 1
    value = internal.deserialize(body, [torch.zeros(2)])
    assert torch.equal(value["tensor"], torch.zeros(2))
    assert value["other"] == 1
    missing = internal.deserialize(pickle.dumps(add).replace(b"add", b"adx"), [])
    assert isinstance(missing, AttributeError)
    assert "Default RPC pickler does not serialize" in str(missing)
    with pytest.raises(RuntimeError):
        internal.deserialize(b"nonsense", [])


def test_names_of_calls() -> None:
    key = internal._build_rpc_profiling_key(internal.RPCExecMode.ASYNC, "add", "one", "other")
    assert key == "rpc_async#add(one -> other)"
    with pytest.raises(AssertionError, match="profiler should be enabled"):
        internal._start_record_function(internal.RPCExecMode.SYNC, "add", "one", "other")


def test_all_names_are_there() -> None:
    for module in ("farcall.pytorch", "farcall.pytorch.native"):
        loaded = importlib.import_module(module)
        assert [name for name in loaded.__all__ if not hasattr(loaded, name)] == []
    assert native._UNSET_RPC_TIMEOUT == rpc.constants.UNSET_RPC_TIMEOUT
    theirs = importlib.import_module("torch._C._distributed_rpc") if dist.rpc.is_available() else native
    assert [name for name in vars(native) if name.startswith("_DEFAULT") and not hasattr(theirs, name)] == []
