"""`farcall.pytorch.api`: calls, timeouts, who is there. Gatherings and the end are in files of their own."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch

import farcall.pytorch as rpc
from farcall import api as farcall_api
from farcall.errors import NotInitializedError, RpcTimeoutError
from farcall.pytorch import api
from farcall.pytorch.internal import _internal_rpc_pickler
from gates import gates, new_gate, wait_at
from torch_stage import SOON, add, echo, fail, make_gate, one_worker, open_gate, options, run_group

ME = "alone"


@pytest.fixture
def me(tmp_path: Path) -> Iterator[None]:
    with one_worker(tmp_path):
        yield
        for gate in gates.values():
            gate.set()


def keywords(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def my_name() -> str:
    return rpc.get_worker_info().name


class Callable:
    def __call__(self, value: Any) -> Any:
        return value


# Calls


@pytest.mark.usefixtures("me")
@pytest.mark.parametrize("to", [ME, 0, rpc.WorkerInfo(ME, 0)])  # type: ignore[attr-defined]
def test_a_worker_is_known_by_name_rank_and_info(to: Any) -> None:
    assert rpc.rpc_sync(to, my_name) == ME
    assert rpc.rpc_async(to, my_name).wait() == ME
    assert rpc.remote(to, my_name).to_here() == ME


@pytest.mark.usefixtures("me")
def test_arguments_of_all_kinds() -> None:
    assert rpc.rpc_sync(ME, keywords) == ((), {})
    assert rpc.rpc_sync(ME, keywords, (1,), {"two": 2}) == ((1,), {"two": 2})
    assert rpc.rpc_sync(ME, keywords, [1, 2]) == ((1, 2), {})
    assert rpc.rpc_sync(ME, keywords, kwargs={"timeout": 1, "to": 2, "func": 3}) == (
        (),
        {"timeout": 1, "to": 2, "func": 3},
    )
    assert rpc.remote(ME, keywords, (), {"args": 1}).to_here() == ((), {"args": 1})
    assert rpc.rpc_sync(ME, lambda value: value + 1, (1,)) == 2
    assert rpc.rpc_sync(ME, Callable(), (3,)) == 3


@pytest.mark.usefixtures("me")
@pytest.mark.parametrize("call", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
def test_what_is_wrong_with_a_call_is_raised_at_once(call: Any) -> None:
    with pytest.raises(TypeError, match=r"function should be callable\."):
        call(ME, 3)
    with pytest.raises(RuntimeError, match="nobody"):
        call("nobody", echo)
    with pytest.raises(RuntimeError, match="9"):
        call(9, echo)
    with pytest.raises(ValueError, match="Cannot get WorkerInfo from name"):
        call(1.5, echo)
    with pytest.raises(ValueError, match="Cannot get WorkerInfo from name"):
        call(None, echo)
    with pytest.raises((RuntimeError, TypeError), match="lock"):
        call(ME, echo, (threading.Lock(),))
    assert rpc.rpc_sync(ME, echo, (1,)) == 1


@pytest.mark.parametrize("call", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
def test_nothing_works_before_init_rpc(call: Any) -> None:
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        call(ME, echo)


@pytest.mark.parametrize(
    "call",
    [
        rpc.get_worker_info,
        rpc.shutdown,
        rpc._get_debug_info,
        lambda: api._all_gather(1),
        lambda: api._barrier(["x"]),
        api._wait_all_workers,
        api._get_current_rpc_agent,
        api.get_rpc_timeout,
        lambda: api._set_rpc_timeout(1),
        lambda: api._to_worker_info("x"),
        lambda: rpc.RRef(1),
        api._delete_all_user_and_unforked_owner_rrefs,
        lambda: api._destroy_rref_context(True),
    ],
)
def test_nothing_else_does_either(call: Any) -> None:
    assert not api._is_current_rpc_agent_set()
    with pytest.raises(NotInitializedError):
        call()


@pytest.mark.usefixtures("me")
def test_a_worker_that_cannot_be_reached_is_an_error_of_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_reach(*_: Any) -> Any:
        raise RpcTimeoutError("out of reach")

    monkeypatch.setattr(api._get_current_rpc_agent(), "call", out_of_reach)
    future = rpc.rpc_async(ME, echo)
    with pytest.raises(RuntimeError, match="out of reach"):
        future.wait()
    with pytest.raises(RuntimeError, match="out of reach"):
        rpc.rpc_sync(ME, echo)


# Timeouts


@pytest.mark.usefixtures("me")
def test_the_default_timeout() -> None:
    assert api.get_rpc_timeout() == 10
    api._set_rpc_timeout(0.05)
    assert api.get_rpc_timeout() == pytest.approx(0.05)
    new_gate("default")
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        rpc.rpc_sync(ME, wait_at, ("default",))
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        rpc.rpc_async(ME, wait_at, ("default",)).wait()
    future = rpc.rpc_async(ME, wait_at, ("default", 1), timeout=0)  # without end
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        rpc.rpc_sync(ME, wait_at, ("default",))
    assert not future.done()
    gates["default"].set()
    assert future.wait() == 1
    for wrong in (-1, float("nan"), "soon"):
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            api._set_rpc_timeout(wrong)  # type: ignore[arg-type]
    assert api.get_rpc_timeout() == pytest.approx(0.05)


@pytest.mark.usefixtures("me")
def test_a_timeout_of_a_call_goes_before_the_default() -> None:
    api._set_rpc_timeout(0.01)
    assert rpc.rpc_sync(ME, echo, (1,), timeout=10) == 1
    new_gate("given")
    api._set_rpc_timeout(10)
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        rpc.rpc_sync(ME, wait_at, ("given",), timeout=0.02)
    with pytest.raises((RuntimeError, ValueError), match="timeout"):
        rpc.rpc_sync(ME, echo, timeout=-2)


@pytest.mark.usefixtures("me")
@pytest.mark.parametrize("timeout", [-2, float("nan"), "1"])
def test_a_reference_is_not_made_with_a_wrong_timeout(timeout: Any) -> None:
    with pytest.raises(RuntimeError, match="a timeout must be"):
        rpc.remote(ME, echo, (1,), timeout=timeout)


def test_a_remote_call_that_takes_too_long(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        if rank:
            return
        rpc.rpc_sync("worker1", make_gate, ("creation",))
        rref = rpc.remote("worker1", wait_at, ("creation", 1), timeout=0.02)
        with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
            rref._get_future().wait()
        with pytest.raises(RuntimeError, match=r"RRef creation via rpc.remote\(\) timed out"):
            rref.to_here()
        unseen = rpc.remote("worker1", wait_at, ("creation", 1), timeout=0.02)
        assert unseen._creation.block(monotonic() + SOON)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del unseen
        assert not caught  # nobody has to look at it
        rpc.rpc_sync("worker1", open_gate, ("creation",))
        with pytest.raises(RuntimeError, match=r"RRef creation via rpc.remote\(\) timed out"):
            rref.to_here()
        assert rpc.remote("worker1", echo, (2,), timeout=SOON).to_here() == 2

    run_group(tmp_path, body)


@pytest.mark.usefixtures("me")
def test_a_remote_call_without_a_timeout_of_its_own() -> None:
    new_gate("endless")
    rref = rpc.remote(ME, wait_at, ("endless", 1), timeout=0)
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        rref.to_here(timeout=0.02)
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        rref._get_type(timeout=0.02)
    gates["endless"].set()
    assert rref.to_here() == 1
    assert rref._get_type() is int


# _wait_all


@pytest.mark.usefixtures("me")
def test_wait_all_waits_for_all_calls_inside() -> None:
    with api._wait_all():
        futures = [rpc.rpc_async(ME, add, (number, 1)) for number in range(3)]
        rpc.rpc_sync(ME, echo)
    assert [future.value() for future in futures] == [1, 2, 3]


@pytest.mark.usefixtures("me")
def test_wait_all_raises_what_a_call_raised() -> None:
    with pytest.raises(ValueError, match="inside"), api._wait_all():
        rpc.rpc_async(ME, fail, ("inside",))
    assert not hasattr(api._thread_local_var, "future_list")
    rpc.rpc_async(ME, echo).wait()


@pytest.mark.usefixtures("me")
def test_wait_all_is_of_one_thread() -> None:
    new_gate("other thread")
    with api._wait_all():
        thread = threading.Thread(target=lambda: rpc.rpc_async(ME, wait_at, ("other thread",)))
        thread.start()
        thread.join()
    gates["other thread"].set()


@pytest.mark.usefixtures("me")
def test_wait_all_inside_of_another() -> None:
    with api._wait_all():
        first = rpc.rpc_async(ME, echo, (1,))
        with api._wait_all():
            inner = rpc.rpc_async(ME, echo, (2,))
        assert inner.value() == 2
        last = rpc.rpc_async(ME, echo, (3,))
    assert (first.value(), last.value()) == (1, 3)


@pytest.mark.usefixtures("me")
def test_wait_all_knows_the_calls_of_proxies() -> None:
    rref = rpc.RRef([1, 2])
    with api._wait_all():
        future = rref.rpc_async().index(2)
    assert future.value() == 1


# The agent


@pytest.mark.usefixtures("me")
def test_the_agent_of_the_process_is_the_one_of_farcall() -> None:
    assert api._is_current_rpc_agent_set()
    assert api._get_current_rpc_agent() is farcall_api.current_agent()
    assert rpc.get_worker_info() == rpc.get_worker_info(ME) == rpc.get_worker_info(0)
    assert rpc.get_worker_info().name == ME
    with pytest.raises(RuntimeError, match="nobody"):
        rpc.get_worker_info("nobody")
    info = rpc.get_worker_info()
    assert api._to_worker_info(info) is info


def test_another_agent_may_be_set_and_reset(tmp_path: Path) -> None:
    rpc.autograd._init(0)
    agent = rpc.TensorPipeAgent(_store(tmp_path), "by_hand", 0, 1, options(tmp_path), {}, [])  # type: ignore[attr-defined]
    try:
        api._init_rpc_states(agent)
        api._init_rpc_states(agent)  # its backend may have done so
        assert rpc.rpc_sync("by_hand", my_name) == "by_hand"
    finally:
        agent.shutdown()
        api._reset_current_rpc_agent()
        rpc.autograd.close()
    assert not api._is_current_rpc_agent_set()


def _store(directory: Path) -> Any:
    return torch.distributed.FileStore(str(directory / "own"), 1)


def test_another_pickler_is_the_default_one_inside() -> None:
    other = object()
    with api._use_rpc_pickler(other):
        assert api._default_pickler is other
    assert api._default_pickler is _internal_rpc_pickler
    with pytest.raises(KeyError), api._use_rpc_pickler(other):
        raise KeyError
    assert api._default_pickler is _internal_rpc_pickler


@pytest.mark.usefixtures("me")
def test_the_type_of_a_value_that_is_here() -> None:
    rref = rpc.RRef({1: 2})
    assert api._rref_typeof_on_owner(rref) is dict
    assert api._rref_typeof_on_owner(rref, blocking=False).wait() is dict
    assert api._rref_typeof_on_user(rref) is dict
    assert api._rref_typeof_on_user(rref, blocking=False).wait() is dict
