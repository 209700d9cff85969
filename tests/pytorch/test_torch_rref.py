"""`farcall.pytorch.rref` and `rref_proxy`: references with torch's words."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import farcall.pytorch as rpc
from eventually import eventually
from farcall.errors import NotInitializedError, OwnerLostError, UsageError, WorkerLostError
from farcall.pytorch import api
from farcall.pytorch.functions import async_execution
from farcall.pytorch.rref import PyRRef, RRef, labels
from farcall.pytorch.rref_proxy import RRefProxy
from farcall.runtime.handles import Handle
from gates import gates, wait_at
from torch_stage import DIED, add, die, echo, fail, make_gate, one_worker, open_gate, run_group

ME = "alone"
held: list[Any] = []


@pytest.fixture
def me(tmp_path: Path) -> Iterator[None]:
    with one_worker(tmp_path):
        yield
        for gate in gates.values():
            gate.set()


class Counter:
    """What references stand for."""

    step = 1

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.own = lambda: "its own"

    def up(self, by: int = 1, *, func_name: str = "", timeout: float = 0, rref: Any = None) -> int:
        self.count += by
        return self.count

    def tensor(self) -> torch.Tensor:
        return torch.full((2,), float(self.count))

    def fails(self) -> None:
        raise ValueError("in a method")

    @async_execution
    def later(self, to: str) -> Any:
        return rpc.rpc_async(to, add, (self.count, 100))

    def waits(self, name: str) -> int:
        wait_at(name)
        return self.count

    def __call__(self, value: Any) -> Any:
        return self.count, value


def hold(rref: Any) -> str:
    held.append(rref)
    return str(rref)


def give_back() -> Any:
    return held[0]


def words_of(rref: Any) -> tuple[str, bool, str, int]:
    return str(rref), rref.is_owner(), rref.owner_name(), rref.owner().id


def local_value_of(rref: Any) -> Any:
    return rref.local_value()


def pass_to(rref: Any, to: str) -> Any:
    return rpc.rpc_sync(to, words_of, (rref,))


# At the owner


@pytest.mark.usefixtures("me")
def test_a_value_that_is_here() -> None:
    value = Counter(3)
    rref = rpc.RRef(value)
    assert isinstance(rref, PyRRef)
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.owner() == rpc.get_worker_info()
    assert rref.owner_name() == ME
    assert rref.local_value() is value
    assert rref.to_here() is value
    assert rref._get_type() is Counter
    assert rref._get_type(blocking=False).wait() is Counter
    assert rref._get_future().wait() is None
    assert repr(rref) == f"<RRef 0:{rref._handle.reference.number} owned by 'alone'>"


def test_no_reference_without_a_worker() -> None:
    with pytest.raises(NotInitializedError, match="Current RPC agent is not set"):
        rpc.RRef(1)


@pytest.mark.usefixtures("me")
def test_numbers_are_given_as_torch_counts() -> None:
    pattern = re.compile(r"OwnerRRef\(GloballyUniqueId\(created_on=0, local_id=(\d+)\)\)")
    rrefs = [rpc.RRef(1), rpc.RRef(2), rpc.remote(ME, echo, (3,)), rpc.RRef(4)]
    found = [pattern.fullmatch(str(rref)) for rref in rrefs]
    assert [int(match[1]) for match in found if match] == [0, 1, 2, 4]
    labels.begin()
    assert str(rpc.RRef(5)) == str(rrefs[0])


@pytest.mark.usefixtures("me")
def test_a_copy_is_the_same_reference() -> None:
    rref = rpc.RRef([1])
    twin = copy.copy(rref)
    assert type(twin) is PyRRef
    assert str(twin) == str(rref)
    assert twin == rref
    assert twin.local_value() is rref.local_value()
    with pytest.raises(UsageError, match="cannot be deep-copied"):
        copy.deepcopy(rref)


@pytest.mark.usefixtures("me")
def test_a_reference_is_not_pickled_outside_of_calls() -> None:
    rref = rpc.RRef([1])
    with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
        pickle.dumps(rref)
    with pytest.raises(RuntimeError):
        rref._serialize()
    with pytest.raises(RuntimeError):
        RRef._deserialize((0, 0))


@pytest.mark.usefixtures("me")
def test_what_the_function_of_a_remote_call_raised() -> None:
    rref = rpc.remote(ME, fail, ("far",))
    for use in (rref.to_here, rref.local_value, rref._get_type, rref._get_future().wait, rref.rpc_sync().up):
        with pytest.raises(ValueError, match="far"):
            use()
    with pytest.raises(ValueError, match="far"):
        rref._get_type(blocking=False).wait()


@pytest.mark.usefixtures("me")
def test_profiling_futures() -> None:
    rref = rpc.RRef(1)
    with pytest.raises(RuntimeError, match="Profiling future has not been set"):
        rref._get_profiling_future()
    future: Any = torch.futures.Future()
    rref._set_profiling_future(future)
    assert rref._get_profiling_future() is future


# Proxies


@pytest.mark.usefixtures("me")
def test_methods_through_proxies() -> None:
    rref = rpc.remote(ME, Counter, (1,))
    assert rref.rpc_sync().up() == 2
    assert rref.rpc_sync().up(by=2, func_name="any", timeout=3, rref=4) == 4
    future = rref.rpc_async().up(6)
    assert isinstance(future, torch.futures.Future)
    assert future.wait() == 10
    result = rref.remote().up(5)
    assert type(result) is PyRRef
    assert result.to_here() == 15
    assert torch.equal(rref.rpc_sync().tensor(), torch.full((2,), 15.0))
    assert rref.rpc_sync().later(ME) == 115
    assert rref.rpc_async().later(ME).wait() == 115
    assert rref.remote().later(ME).to_here() == 115
    assert isinstance(rref.rpc_sync(), RRefProxy)


@pytest.mark.usefixtures("me")
def test_values_that_can_be_called() -> None:
    rref = rpc.remote(ME, Counter, (1,))
    assert rref.rpc_sync()("x") == (1, "x")
    assert rref.rpc_async()("x").wait() == (1, "x")
    assert rref.remote()("x").to_here() == (1, "x")
    with pytest.raises(TypeError, match="not callable"):
        rpc.RRef(3).rpc_sync()()


@pytest.mark.usefixtures("me")
def test_methods_that_are_not_there() -> None:
    rref = rpc.remote(ME, Counter)
    with pytest.raises(AttributeError, match="nothing"):
        rref.rpc_sync().nothing()
    with pytest.raises(AttributeError, match="nothing"):
        rref.rpc_async().nothing().wait()
    with pytest.raises(AttributeError, match="nothing"):
        rref.remote().nothing()


@pytest.mark.usefixtures("me")
def test_methods_that_raise() -> None:
    rref = rpc.remote(ME, Counter)
    with pytest.raises(ValueError, match="in a method"):
        rref.rpc_sync().fails()
    with pytest.raises(ValueError, match="in a method"):
        rref.rpc_async().fails().wait()
    with pytest.raises(ValueError, match="in a method"):
        rref.remote().fails().to_here()


@pytest.mark.usefixtures("me")
def test_timeouts_of_proxies() -> None:
    make_gate("proxy")
    rref = rpc.remote(ME, Counter, (7,))
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        rref.rpc_sync(timeout=0.02).waits("proxy")
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        rref.rpc_async(timeout=0.02).waits("proxy").wait()
    api._set_rpc_timeout(0.02)
    future = rref.rpc_async(timeout=0).waits("proxy")
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        rref.rpc_sync().waits("proxy")
    open_gate("proxy")
    assert future.wait() == 7


# At others


def test_a_reference_at_its_users(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank:
            return None
        rref = rpc.remote("worker1", Counter, (5,))
        assert not rref.is_owner()
        assert rref.owner() == rpc.get_worker_info("worker1")
        assert rref.confirmed_by_owner()
        assert str(rref) == (
            "UserRRef(RRefId = GloballyUniqueId(created_on=0, local_id=0), "
            "ForkId = GloballyUniqueId(created_on=0, local_id=1))"
        )
        assert rref._get_type() is Counter
        assert rref._get_type(blocking=False).wait() is Counter
        assert rref._get_future().wait() is None
        assert rref.rpc_sync().up() == 6
        assert rref.rpc_async().up().wait() == 7
        assert rref.remote().up().to_here() == 8
        assert rref.remote().later("worker0").to_here() == 108
        with pytest.raises(RuntimeError, match=r"can't call localValue\(\) on user WorkerInfo\(id=0, name=worker0\)"):
            rref.local_value()
        with pytest.raises(RuntimeError, match=r"Call it on owner WorkerInfo\(id=1, name=worker1\)"):
            rref.local_value()
        assert rpc.rpc_sync("worker1", local_value_of, (rpc.remote("worker1", echo, (9,)),)) == 9
        with pytest.raises(AttributeError, match="nothing"):
            rref.remote().nothing()
        return str(rref)

    run_group(tmp_path, body)


def test_a_type_that_could_not_be_had_is_asked_for_again(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank:
            return None
        rpc.rpc_sync("worker1", make_gate, ("again",))
        rref = rpc.remote("worker1", wait_at, ("again", 1.5))
        with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
            rref._get_type(timeout=0.02)
        with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
            rref._get_type(timeout=0.02, blocking=False).wait()
        rpc.rpc_sync("worker1", open_gate, ("again",))
        assert rref._get_type() is float
        assert rref._get_type(timeout=1e-6) is float  # known
        return None

    run_group(tmp_path, body)


def test_all_workers_know_a_reference_by_the_same_number(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank:
            return None
        mine = rpc.RRef("mine")
        far = rpc.remote("worker1", Counter)
        of_method = far.remote().up()
        found = []
        for rref in (mine, far, of_method):
            number = re.search(r"created_on=0, local_id=(\d+)", str(rref))
            assert number
            found.append(int(number[1]))
            for to in ("worker0", "worker1", "worker2"):
                words, is_owner, owner, owner_rank = rpc.rpc_sync(to, words_of, (rref,))
                assert f"created_on=0, local_id={number[1]})" in words
                assert is_owner == (to == rref.owner_name())
                assert words.startswith("OwnerRRef(" if is_owner else "UserRRef(RRefId = ")
                assert (owner, owner_rank) == (rref.owner_name(), rref.owner().id)
            words, *_ = rpc.rpc_sync("worker1", pass_to, (rref, "worker2"))
            assert f"created_on=0, local_id={number[1]})" in words
        assert found == [0, 1, 3]
        rpc.rpc_sync("worker2", hold, (far,))
        back = rpc.rpc_sync("worker2", give_back)
        assert back == far
        assert back.rpc_sync().up() == 2
        return None

    run_group(tmp_path, body, 3)


def test_an_owner_that_dies(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank:
            api._all_gather(None)
            rpc.rpc_sync("worker0", echo)
            return None
        confirmed = rpc.remote("worker1", echo, (1,))
        assert confirmed.confirmed_by_owner()
        api._all_gather(None)
        lost = rpc.remote("worker1", die)
        with pytest.raises(WorkerLostError):
            lost.to_here()
        eventually(lambda: cast(Handle, confirmed._handle).new_error)
        with pytest.raises(OwnerLostError):
            confirmed.to_here()
        for args in ((confirmed,), ([{"a": confirmed}],)):
            with pytest.raises(OwnerLostError, match="'worker1'"):
                rpc.rpc_sync("worker0", echo, args)
        assert confirmed.confirmed_by_owner()
        for use in (lost._get_type, lost.rpc_sync().up, lost.remote().up, lambda: lost._get_future().wait()):
            with pytest.raises(RuntimeError):
                use()
        assert str(lost).startswith("UserRRef(")
        assert lost.owner_name() == "worker1"
        rpc.shutdown(graceful=False)
        return "lived on"

    assert run_group(tmp_path, body) == ["lived on", DIED]


@pytest.mark.usefixtures("me")
def test_confirmation_of_a_reference_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    rref = rpc.RRef(1)
    monkeypatch.setattr(rref._handle, "confirmed", False)
    api._set_rpc_timeout(0.02)
    with pytest.raises(RuntimeError, match="has not confirmed it in time"):
        rref.confirmed_by_owner()
    monkeypatch.setattr(rref._handle, "new_error", lambda: OwnerLostError("gone", "worker9"))
    with pytest.raises(OwnerLostError, match="gone"):
        rref.confirmed_by_owner()


def test_a_reference_that_was_deleted_says_so(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank:
            return None
        rref = rpc.remote("worker1", echo, (1,))
        assert rref.to_here() == 1
        api._delete_all_user_and_unforked_owner_rrefs()
        with pytest.raises(RuntimeError, match=r"Cannot call to_here\(\) on it after deletion"):
            rref.to_here()
        with pytest.raises(RuntimeError, match="Cannot call fork an UserRRef after deletion"):
            rpc.rpc_sync("worker1", echo, (rref,))
        with pytest.raises(RuntimeError):
            rref.rpc_sync().bit_length()
        assert rpc.remote("worker1", echo, (2,)).to_here() == 2
        return None

    run_group(tmp_path, body)


def test_counters_of_references(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank:
            return None
        own = rpc.RRef(1)
        rpc.rpc_sync("worker1", hold, (own,))
        info = rpc._get_debug_info()
        assert all(isinstance(value, str) for value in info.values())
        assert (info["num_owner_rrefs"], info["num_pending_users"]) == ("1", "0")
        return own.to_here()

    assert run_group(tmp_path, body) == [1, None]
