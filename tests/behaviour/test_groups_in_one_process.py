"""The current group: served calls, `with` blocks and `init_rpc`, in processes with several groups."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import farcall
from farcall import Group, NotInitializedError, RpcBackendOptions, UsageError
from farcall.testing import LocalGroup
from gates import SOON


def my_name() -> str:
    return farcall.get_worker_info().name


async def my_name_later() -> str:
    await asyncio.sleep(0)
    in_thread = await asyncio.to_thread(my_name)
    assert in_thread == my_name()
    return in_thread


@farcall.functions.async_execution
def name_of(other: str) -> farcall.Future[str]:
    return farcall.rpc_async(other, my_name)


def ask(*route: str) -> list[str]:
    """Passes a call on from worker to worker; returns the names of those that ran it."""
    if not route:
        return [my_name()]
    return [my_name(), *farcall.worker(route[0]).call(ask, *route[1:])]


def a_group(path: Path, name: str = "alone") -> Group:
    return Group(name, url=f"file://{path}", rank=0, world_size=1, options=RpcBackendOptions(init_timeout=10))


def test_a_function_finds_the_group_of_the_worker_that_runs_it() -> None:
    with LocalGroup(3) as group:
        assert my_name() == "worker0"
        assert group.worker("worker2").call(my_name) == "worker2"
        assert group["worker1"].worker("worker2").call(ask, "worker0", "worker1") == ["worker2", "worker0", "worker1"]
        assert farcall.rpc_sync("worker1", my_name_later) == "worker1"
        assert farcall.rpc_sync("worker1", name_of, ("worker2",)) == "worker2"
        assert farcall.remote("worker2", my_name).to_here() == "worker2"


def test_several_groups_in_one_process(tmp_path: Path) -> None:
    with LocalGroup(2) as group, a_group(tmp_path / "a", "a") as a:
        assert farcall.group() is a
        assert my_name() == "a"
        with a_group(tmp_path / "b", "b") as b:
            assert (my_name(), farcall.group(), farcall.worker("b").call(my_name)) == ("b", b, "b")
            assert group.worker("worker1").call(my_name) == "worker1"
            assert a.worker("a").call(my_name) == "a"
            assert a.worker().name == "a"
        assert my_name() == "a"
    with pytest.raises(NotInitializedError, match=r"Call farcall\.init_rpc"):
        my_name()
    with pytest.raises(NotInitializedError, match="not in the group"):
        print(a.info)


def test_the_view_of_a_worker_is_current_in_its_block_and_stays() -> None:
    with LocalGroup(2) as group:
        with group["worker1"] as view:
            assert my_name() == view.info.name == "worker1"
            assert farcall.group() is view
        assert my_name() == "worker0"
        assert view.worker("worker0").call(my_name) == "worker0"


def test_code_outside_of_all_blocks(tmp_path: Path) -> None:
    seen: list[Any] = []

    def look() -> None:
        try:
            seen.append(my_name())
        except NotInitializedError as error:
            seen.append(str(error))

    def look_from_a_thread() -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(SOON)

    with a_group(tmp_path / "a", "a"):
        look_from_a_thread()
        with a_group(tmp_path / "b", "b"):
            look_from_a_thread()
            farcall.init_rpc(
                "c", rank=0, world_size=1, rpc_backend_options=RpcBackendOptions(init_method=f"file://{tmp_path}/c")
            )
            look_from_a_thread()
            assert my_name() == "b"
        assert my_name() == "a"
    assert my_name() == "c"
    farcall.shutdown()
    assert seen[0] == "a"
    assert "in several groups (as worker 'a', 'b'), and this code runs in the `with` block of none" in seen[1]
    assert seen[2] == "c"


def join_and_ask(path: str) -> list[str]:
    before = my_name()
    with a_group(Path(path), "inner"):
        inside = my_name()
    return [before, inside, my_name()]


def test_a_block_inside_of_a_served_call_is_the_innermost(tmp_path: Path) -> None:
    with LocalGroup(2) as group:
        assert group.worker("worker1").call(join_and_ask, str(tmp_path / "x")) == ["worker1", "inner", "worker1"]


def test_async_with(tmp_path: Path) -> None:
    async def run() -> tuple[str, str, str]:
        async with a_group(tmp_path / "a", "a") as group:
            task = asyncio.create_task(asyncio.to_thread(my_name))
            return my_name(), await task, await group.worker("a").submit(my_name)

    assert asyncio.run(run()) == ("a", "a", "a")
    assert not farcall.api.is_initialized()


def test_a_join_that_is_cancelled_is_undone(tmp_path: Path) -> None:
    """Rank 1 never comes, so the cancelled join ends by its timeout."""

    async def run() -> None:
        options = RpcBackendOptions(init_timeout=1)
        group = Group("a", url=f"file://{tmp_path}/a", rank=0, world_size=2, options=options)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(group.__aenter__(), 0.1)

    asyncio.run(run())
    assert not farcall.api.is_initialized()


end = threading.Event()


def wait_for_the_end() -> None:
    end.wait(SOON)


def test_leaving_by_an_exception_waits_for_nobody(tmp_path: Path) -> None:
    group = a_group(tmp_path / "a")
    futures: list[farcall.Future[None]] = []

    def fail() -> None:
        with group:
            futures.append(farcall.worker("alone").submit(wait_for_the_end))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert repr(group) == "<Group, not joined>"
    with pytest.raises(farcall.RpcError, match="shut down before the call ended"):
        futures[0].wait()
    end.set()


def test_what_a_group_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "FARCALL_WORKER_NAME"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UsageError, match="a worker's name must be a str"):
        Group("")
    with pytest.raises(UsageError, match="two places: 'tcp://b:1' by its url, 'tcp://a:1' by its options"):
        Group(url="tcp://b:1", options=RpcBackendOptions(init_method="tcp://a:1"))
    with a_group(tmp_path / "a") as group:
        with pytest.raises(farcall.AlreadyInitializedError, match="entered already, as worker 'alone'"):
            group.__enter__()
        with pytest.raises(UsageError, match="a Group cannot be sent"):
            farcall.worker("alone").call(print, group)
        with pytest.raises(UsageError, match="more than 0 seconds"):
            group.shutdown(timeout=0)


def test_the_name_of_a_group_of_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FARCALL_WORKER_NAME", raising=False)
    options = RpcBackendOptions(init_method=f"file://{tmp_path}/a")
    with Group(rank=0, world_size=1, options=options) as group:
        assert group.info.name == "worker0"
    with Group(options=options) as group:  # an open group without a rank
        assert "-" in group.info.name
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    farcall.init_rpc(rpc_backend_options=options)
    assert my_name() == "worker0"
    farcall.shutdown()
    monkeypatch.setenv("FARCALL_WORKER_NAME", "trainer0")
    with Group(options=options) as group:
        assert group.info.name == "trainer0"


def test_init_rpc_without_a_name_and_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "FARCALL_WORKER_NAME"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UsageError, match="this worker has no name: give init_rpc one"):
        farcall.init_rpc()
