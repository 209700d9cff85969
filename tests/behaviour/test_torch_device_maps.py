"""The functions of `backend_registry` that check device maps, beside torch's own: same results, same errors."""

from __future__ import annotations

import inspect
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install farcall[torch]")

import torch
import torch.distributed as dist
import torch.distributed.rpc.backend_registry as theirs
from hypothesis import given, settings
from hypothesis import strategies as st

import farcall.pytorch as rpc
from farcall.pytorch import api
from farcall.pytorch import backend_registry as ours
from torch_stage import FORK, one_worker, options, run_group

CPU, META = torch.device("cpu"), torch.device("meta")
FUNCTIONS = [
    "_init_process_group",
    "_create_device_list",
    "_create_reverse_mapping",
    "_get_device_infos",
    "_set_devices_and_reverse_device_map",
    "_validate_device_maps",
    "_tensorpipe_validate_devices",
    "_tensorpipe_exchange_and_check_all_device_maps",
]


def gpu(index: int) -> torch.device:
    return torch.device("cuda", index)


def outcome(function: Any, *args: Any) -> Any:
    """What a call returns, or the type and the text of what it raises."""
    try:
        return function(*args)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures(name: str) -> None:
    def parameters(module: Any) -> list[tuple[str, Any, Any]]:
        found = inspect.signature(getattr(module, name)).parameters.values()
        return [(each.name, each.kind, each.default) for each in found]

    assert getattr(ours, name) is not getattr(theirs, name)
    assert parameters(ours) == parameters(theirs)


devices = st.sampled_from([CPU, META, torch.device("xpu", 0), *map(gpu, range(4)), gpu(-1 % 128)])
maps = st.dictionaries(st.sampled_from("abcd"), st.dictionaries(devices, devices, max_size=3), max_size=2)
worker = st.tuples(st.integers(0, 4), maps, st.lists(devices, max_size=3))
group = st.dictionaries(st.sampled_from("abc"), worker, min_size=1)


@settings(max_examples=500, deadline=None)
@given(group, st.booleans())
def test_maps_are_checked_as_torch_checks_them(everybody: dict[str, Any], is_static: bool) -> None:
    counts, of_all, named = ({name: infos[part] for name, infos in everybody.items()} for part in range(3))
    arguments = (list(everybody), counts, of_all, named, is_static)
    assert outcome(ours._validate_device_maps, *arguments) == outcome(theirs._validate_device_maps, *arguments)


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ((2, {}, [gpu(0), gpu(0)]), "Node a has duplicated devices"),
        ((2, {}, [gpu(2)]), "Node a has devices with invalid indices"),
        ((2, {"nobody": {gpu(0): gpu(0)}}, []), "Node a has invalid target node names in its device maps"),
        ((2, {"b": {gpu(0): gpu(0), gpu(1): gpu(0)}}, []), "Node a has duplicated target devices in its device map"),
        ((2, {"b": {gpu(2): gpu(0)}}, []), "Node a has source devices with invalid indices in its device map for b"),
        ((2, {"b": {gpu(0): gpu(2)}}, []), "Node a has target devices with invalid indices in its device map for b"),
        ((2, {"b": {gpu(0): gpu(0)}}, [gpu(1)]), "Node a has unexpected source devices in its device map for b"),
        ((2, {"c": {gpu(0): gpu(0)}}, []), "Node a has unexpected target devices in its device map for c"),
        ((2, {"b": {gpu(0): gpu(1)}, "a": {gpu(1): CPU}}, []), None),
    ],
)
@pytest.mark.parametrize("module", [theirs, ours], ids=["torch", "farcall"])
def test_what_cannot_be_is_refused(module: Any, first: Any, message: str | None) -> None:
    everybody = {"a": first, "b": (2, {}, []), "c": (2, {}, [gpu(1)])}
    counts, of_all, named = ({name: infos[part] for name, infos in everybody.items()} for part in range(3))
    found = outcome(module._validate_device_maps, list(everybody), counts, of_all, named)
    assert found == outcome(theirs._validate_device_maps, list(everybody), counts, of_all, named)
    assert (found is None) if message is None else (found[0] is ValueError and found[1].startswith(message))


@given(st.lists(devices, max_size=4), st.integers(0, 4))
def test_devices_are_checked_as_torch_checks_them(some: list[torch.device], count: int) -> None:
    assert ours._tensorpipe_validate_devices(some, count) is theirs._tensorpipe_validate_devices(some, count)


@given(group, st.sampled_from("abcd"))
def test_maps_are_reversed_as_torch_reverses_them(everybody: dict[str, Any], me: str) -> None:
    of_all = {name: infos[1] for name, infos in everybody.items()}
    found = ours._create_reverse_mapping(me, list(of_all), of_all)
    assert found == theirs._create_reverse_mapping(me, list(of_all), of_all)
    assert list(found) == list(theirs._create_reverse_mapping(me, list(of_all), of_all))


gpus = st.sampled_from([gpu(index) for index in range(4)])
gpu_maps = st.dictionaries(st.sampled_from("ab"), st.dictionaries(gpus | st.just(CPU), gpus, max_size=3), max_size=2)


@given(st.lists(gpus, max_size=3), gpu_maps, gpu_maps)
def test_devices_in_use_are_those_that_torch_finds(named: list[torch.device], mine: Any, reverse: Any) -> None:
    expected = theirs._create_device_list(named, mine, reverse)
    assert ours._create_device_list(named, mine, reverse) == expected


def test_what_a_worker_tells_of_its_devices(tmp_path: Path) -> None:
    with one_worker(tmp_path, device_maps={"alone": {"cpu": "meta"}}):
        assert ours._get_device_infos() == (torch.cuda.device_count(), {"alone": {CPU: META}}, [])


def test_without_an_agent_there_is_nothing_to_tell() -> None:
    assert outcome(ours._get_device_infos)[1].startswith("Current RPC agent is not set!")
    assert outcome(theirs._get_device_infos)[1].startswith("Current RPC agent is not set!")


# At the start of a worker


def test_the_start_checks_maps_by_these_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    validate = ours._validate_device_maps
    monkeypatch.setattr(ours, "_validate_device_maps", lambda *args: checked.append(args) or validate(*args))
    with one_worker(tmp_path, device_maps={"alone": {"cpu": "cpu"}}):
        pass
    assert checked == [
        (["alone"], {"alone": torch.cuda.device_count()}, {"alone": {"alone": {CPU: CPU}}}, {"alone": []}, True)
    ]


def test_a_worker_that_starts_refuses_with_torchs_words(tmp_path: Path) -> None:
    given = options(tmp_path, device_maps={"alone": {"cuda:99": "cpu"}})
    with pytest.raises(ValueError, match="source devices with invalid indices") as raised:
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=given)
    assert not api._is_current_rpc_agent_set()
    count = torch.cuda.device_count()
    arguments: tuple[Any, ...] = (["alone"], {"alone": count}, {"alone": {"alone": {gpu(99): CPU}}}, {"alone": []})
    assert (ValueError, str(raised.value)) == outcome(theirs._validate_device_maps, *arguments)


def test_all_workers_of_a_group_refuse(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        maps = {"worker1": {"cpu": "cuda:7"}} if rank == 0 else {}
        given = options(tmp_path, device_maps=maps)
        found = outcome(lambda: rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=given))
        return found, api._is_current_rpc_agent_set()

    told = f"device map = { ({CPU: gpu(7)}) }\ndevice count = 0"
    expected = f"Node worker0 has target devices with invalid indices in its device map for worker1\n{told}"
    assert run_group(tmp_path, body, 2, init=False) == [((ValueError, expected), False)] * 2


def test_a_worker_joins_those_that_restrict_calls(tmp_path: Path) -> None:
    """In an open group workers ask each other for their maps, though neither allows any call of the program."""
    first_is_there, all_are_there, all_are_done = FORK.Event(), FORK.Barrier(2), FORK.Barrier(2)

    def body(rank: int) -> Any:
        if rank:
            assert first_is_there.wait(20)
        maps = {} if rank else {"worker1": {"cpu": "cpu"}}
        given = options(tmp_path, device_maps=maps, allow=[])
        rpc.init_rpc(f"worker{rank}", rank=rank, rpc_backend_options=given)
        first_is_there.set()
        all_are_there.wait(20)
        known = api._get_current_rpc_agent().reverse_device_maps
        all_are_done.wait(20)
        rpc.shutdown(graceful=False)
        return known

    assert run_group(tmp_path, body, 2, init=False) == [{}, {"worker0": {CPU: CPU}}]


@pytest.mark.parametrize(
    "infos",
    [
        None,
        (1, {}),
        ("1", {}, []),
        (1, [], []),
        (1, {}, {}),
        (1, {}, ["cpu"]),
        (1, {1: {}}, []),
        (1, {"a": {1: 2}}, []),
    ],
)
def test_what_a_worker_tells_when_it_joins_is_checked(tmp_path: Path, infos: Any) -> None:
    with one_worker(tmp_path):
        with pytest.raises((TypeError, ValueError)):
            rpc.rpc_sync("alone", ours._worker_has_joined, (rpc.WorkerInfo("b", 1), infos))
        assert api._get_current_rpc_agent().reverse_device_maps == {}


# With a process group of torch's, for backends of somebody else


def in_process_groups(module: Any, directory: Path, work: Any, count: int = 2) -> list[Any]:
    """What `work(rank, group)` returns in each thread, with groups made by the module's `_init_process_group`."""
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        store = dist.FileStore(str(directory / module.__name__), count)
        results[rank] = outcome(lambda: work(rank, module._init_process_group(store, rank, count)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_process_group(tmp_path: Path) -> None:
    def work(rank: int, group: Any) -> Any:
        tensors = [torch.full((2,), float(rank))]
        group.allreduce(tensors).wait()
        return type(group), group.rank(), group.size(), tensors[0].tolist()

    found = in_process_groups(ours, tmp_path, work)
    assert found == in_process_groups(theirs, tmp_path, work)
    assert found == [(dist.ProcessGroupGloo, rank, 2, [1.0, 1.0]) for rank in range(2)]


def test_a_process_group_of_another_rank_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def __init__(self, *args: Any) -> None:
            pass

        def rank(self) -> int:
            return 3

        def size(self) -> int:
            return 5

    monkeypatch.setattr(dist, "ProcessGroupGloo", Group)
    for rank, size in itertools.product((-1, 3, 0), (-1, 5, 2)):
        got, expected = (outcome(module._init_process_group, None, rank, size) for module in (ours, theirs))
        assert got == expected if isinstance(expected, tuple) else isinstance(got, Group)


@pytest.mark.filterwarnings("ignore:You are using a Backend:UserWarning")  # torch's function uses the old name
@pytest.mark.parametrize("last", [{"worker0": {gpu(1): gpu(0)}}, {"nobody": {}}, {"worker0": {gpu(9): gpu(0)}}])
def test_an_exchange_by_a_process_group(tmp_path: Path, last: Any) -> None:
    def work(module: Any) -> Any:
        def exchange(rank: int, group: Any) -> Any:
            maps = last if rank else {"worker1": {gpu(0): gpu(1)}}
            return module._tensorpipe_exchange_and_check_all_device_maps(f"worker{rank}", 2, maps, [], group)

        return exchange

    found = in_process_groups(ours, tmp_path, work(ours))
    assert found == in_process_groups(theirs, tmp_path, work(theirs))
    if last == {"worker0": {gpu(1): gpu(0)}}:
        assert found[0] == ({"worker1": {gpu(0): gpu(1)}}, [gpu(0)])
