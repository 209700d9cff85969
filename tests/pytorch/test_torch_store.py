"""`farcall.pytorch.torch_store`: torch's stores as farcall's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import farcall.pytorch as rpc
from farcall.errors import RendezvousError, RendezvousTimeoutError
from farcall.pytorch import api
from farcall.pytorch.torch_store import TorchStore
from ports import free_port
from torch_stage import DIED, die, run_group

Make = Callable[[], Any]


@pytest.fixture(scope="module", autouse=True)
def _what_torch_keeps() -> None:
    """A pipe, once in the process, with the first store of that kind."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(params=["file", "hash", "tcp", "prefix"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes one end after the other of one and the same store of torch's."""
    if request.param == "file":
        yield lambda: dist.FileStore(str(tmp_path / "store"), 2)
    elif request.param == "tcp":
        host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield lambda: dist.TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
        del host
    else:
        store = dist.HashStore()
        yield lambda: dist.PrefixStore("part", store) if request.param == "prefix" else store


def test_keys_and_values(make: Make) -> None:
    here, there = TorchStore(make(), 0, 2), TorchStore(make(), 1, 2)
    here.set("join/0", b"zero\0\xff")
    assert there.get("join/0", 1.0) == b"zero\0\xff"
    assert there.read("join/") == {"join/0": b"zero\0\xff"}
    assert here.set_new("run", b"mine") == b"mine"
    assert there.set_new("run", b"theirs") == b"mine"
    assert here.add("count", 2) == 2
    assert there.add("count", 3) == 5
    with pytest.raises(RendezvousTimeoutError, match="'missing'"):
        here.get("missing", 0.0)


@pytest.mark.parametrize("world_size", [2, None])
def test_values_may_have_any_bytes(make: Make, world_size: int | None, request: pytest.FixtureRequest) -> None:
    if world_size is None and "file" in request.node.name:
        pytest.skip("a FileStore does not list its keys")
    here, there = TorchStore(make(), 0, world_size), TorchStore(make(), 1, world_size)
    value = bytes(range(256))
    assert here.set_new("run/0", value) == value
    assert there.set_new("run/0", b"theirs\xff") == value
    assert there.get("run/0", 1.0) == value
    assert not there.delete("run/0", b"theirs\xff")
    assert there.delete("run/0", value)
    assert here.read("run/") == {}


def test_a_counter_that_holds_no_number_is_an_error(tmp_path: Path) -> None:
    for kind in (dist.FileStore(str(tmp_path / "store"), 2), dist.HashStore()):
        store = TorchStore(kind, 0, 2)
        store.set("count", b"text")
        with pytest.raises(RendezvousError, match="'count' is not a number"):
            store.add("count", 1)
        assert store.get("count", 1.0) == b"text"


def test_keys_of_all_workers_are_waited_for(make: Make) -> None:
    here, there = TorchStore(make(), 0, 2), TorchStore(make(), 1, 2)
    here.set("join/0", b"0")
    with pytest.raises(RendezvousTimeoutError, match="1 of 2") as raised:
        here.collect("join/", 2, 0.01)
    assert tuple(raised.value.present) == ("join/0",)
    assert here.collect("join/", 1, 0.0) == {"join/0": b"0"}
    thread = threading.Timer(0.02, lambda: there.set("join/1", b"1"))
    thread.start()
    assert here.collect("join/", 2, 10.0) == {"join/0": b"0", "join/1": b"1"}
    thread.join()


def test_a_wait_ends_when_a_worker_is_lost(make: Make) -> None:
    store = TorchStore(make(), 0, 2)
    store.report_lost(1, "worker1 is gone")
    store.report_lost(1, "and again")
    with pytest.raises(RendezvousError, match="worker1 is gone"):
        store.collect("join/", 2, 10.0)
    store.close()  # waits for nobody


def test_the_end_waits_for_the_others_at_rank_0_only(make: Make) -> None:
    here, there = TorchStore(make(), 0, 2), TorchStore(make(), 1, 2)
    there.close()
    there.close()
    here.close(timeout=10.0)
    early = TorchStore(make(), 0, 3)
    early.close(early=True, timeout=10.0)


def test_keys_may_be_deleted_where_the_store_can(tmp_path: Path) -> None:
    store = TorchStore(dist.HashStore(), 0, 1)
    store.set("join/0", b"0")
    assert store.delete("join/0")
    assert not store.delete("join/0")
    assert store.read("join/") == {}


def test_two_groups_on_one_store() -> None:
    store = dist.HashStore()
    one, other = (TorchStore(dist.PrefixStore(part, store), 0, 1) for part in ("one", "other"))
    one.set("join/0", b"one")
    assert other.read("join/") == {}
    assert other.set_new("run", b"other") == b"other"
    assert one.set_new("run", b"one") == b"one"


def test_a_store_that_vanishes() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TorchStore(dist.TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False), 1, 2)
    store.set("join/1", b"1")
    del host
    with pytest.raises(RendezvousError, match="does not answer any more"):
        store.read("join/")
    with pytest.raises(RendezvousError, match="does not answer any more"):
        store.set("join/1", b"2")
    store.close()


def test_a_group_that_meets_at_an_address(tmp_path: Path) -> None:
    port = free_port()

    def body(rank: int) -> Any:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
        for _ in range(2):  # once more at the same place
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
            assert api._all_gather(rank) == {"worker0": 0, "worker1": 1}
            rpc.shutdown()
        return rank

    assert run_group(tmp_path, body, init=False) == [0, 1]


def test_a_group_whose_store_dies_with_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(api, "_CHECK_INTERVAL_S", 0.05)

    def body(rank: int) -> Any:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        api._all_gather(rank)
        if rank == 0:
            die()
        with pytest.raises(RuntimeError):
            rpc.shutdown()
        assert not api._is_current_rpc_agent_set()
        return "freed"

    assert run_group(tmp_path, body, init=False) == [DIED, "freed"]
