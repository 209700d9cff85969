"""Calls on the value of a reference, where it lives: `rpc_sync`, `rpc_async` and `remote`."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from farcall import RpcTimeoutError, RRef, SerializationError, UsageError
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import call, echo
from reference_stage import expect_nothing_left, here, remote, whole_text
from reference_values import Shelf, ShelfError

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("to", [0, 1], ids=["own", "another's"])
def test_methods_run_where_the_value_is(group: LocalGroup, to: int) -> None:
    rref = remote(group.agents[0], to, Shelf, "tea")
    assert rref.rpc_sync().put("milk") == 2
    assert rref.rpc_sync().put("salt", times=2) == 4
    assert rref.rpc_async().put("rice").wait() == 5
    assert rref.rpc_sync(timeout=5).double(4) == 8
    assert rref.rpc_sync().named() == "Shelf"
    assert rref.rpc_sync()(1) == "milk"
    assert rref.rpc_async()(0).wait() == "tea"
    assert rref.rpc_sync().size() == 5
    assert rref.rpc_sync().capacity() == 10
    assert rref.rpc_sync().later(1) == 6
    assert rref.rpc_async().later(1).wait() == 6
    assert rref.rpc_sync().soon(1) == 6


@pytest.mark.parametrize("to", [0, 1], ids=["own", "another's"])
def test_the_result_of_a_method_may_stay_there(group: LocalGroup, to: int) -> None:
    rref = remote(group.agents[0], to, Shelf, "tea")
    count = rref.remote().put("milk")
    assert isinstance(count, RRef)
    assert count.owner() == rref.owner()
    assert count.to_here() == 2
    assert rref.remote()(0).to_here() == "tea"
    assert rref.remote(timeout=5).later(3).to_here() == 5
    assert rref.remote().soon(3).to_here() == 5
    assert rref.remote().fail("no").to_here.__name__ == "to_here"


def test_a_method_is_called_before_the_value_is_there(group: LocalGroup) -> None:
    gate = new_gate("early")
    rref = remote(group.agents[0], 1, wait_at, "early", Shelf("tea"))
    futures = [rref.rpc_async().put("milk") for _ in range(3)]
    later = rref.remote().put("rice")
    assert arrived["early"].wait(SOON)
    assert not any(future.done() for future in futures)
    gate.set()
    assert sorted([future.wait() for future in futures] + [later.to_here()]) == [2, 3, 4, 5]


def test_a_chain_of_references_whose_links_are_dropped_at_once(group: LocalGroup) -> None:
    gate = new_gate("chain")
    count = remote(group.agents[0], 1, wait_at, "chain", Shelf("tea")).remote().put("milk").remote().bit_length()
    gc.collect()
    assert arrived["chain"].wait(SOON)
    for _ in range(20):  # whatever is given back is given back before the first value is there
        call(group.agents[0], 1, echo, 0)
        group.agents[0].reference_store.process()
    gate.set()
    assert count.to_here() == 2


def test_a_call_holds_its_reference_until_it_is_answered(group: LocalGroup) -> None:
    gate = new_gate("held")
    future = remote(group.agents[0], 1, wait_at, "held", Shelf("tea")).rpc_async().put("milk")
    gc.collect()
    assert arrived["held"].wait(SOON)
    call(group.agents[0], 1, echo, 1)
    gate.set()
    assert future.wait() == 2


def test_a_method_that_is_not_there(group: LocalGroup) -> None:
    rref = remote(group.agents[0], 1, Shelf)
    with pytest.raises(AttributeError, match="'Shelf' object has no attribute 'nothing'"):
        rref.rpc_sync().nothing()


class Named:
    """Has methods of names that a proxy, or what is behind it, may have itself."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: (name, args, kwargs)


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "remote"])
def test_a_method_may_have_any_name(group: LocalGroup, way: str) -> None:
    rref = remote(group.agents[0], 1, Named)
    for name in ("_call", "_handle", "_rref", "_timeout", "_way", "call", "handle", "timeout", "method", "rpc_sync"):
        outcome = getattr(getattr(rref, way)(), name)(1, handle=2, timeout=3, method=4, self=5)
        if way == "remote":
            outcome = outcome.to_here()
        elif way == "rpc_async":
            outcome = outcome.wait()
        assert outcome == (name, (1,), {"handle": 2, "timeout": 3, "method": 4, "self": 5})


def test_an_attribute_takes_no_arguments(group: LocalGroup) -> None:
    rref = remote(group.agents[0], 1, Shelf)
    with pytest.raises(TypeError, match=r"'size' of a Shelf is a int, which cannot be called: it is read without arg"):
        rref.rpc_sync().size(1)
    with pytest.raises(TypeError, match="'items' of a Shelf is a list"):
        rref.rpc_sync().items(index=1)


@pytest.mark.parametrize("to", [0, 1, 2])
def test_a_proxy_and_its_methods_go_where_references_go(group: LocalGroup, to: int) -> None:
    rref = remote(group.agents[0], 1, Shelf, "tea")
    proxy = rref.rpc_sync(timeout=SOON)
    assert call(group.agents[0], to, proxy.put, "milk") == 2
    assert call(group.agents[0], to, put_by, proxy, "rice") == 3
    assert call(group.agents[0], to, repr, proxy) == repr(proxy)
    back = call(group.agents[0], to, echo, proxy)
    assert back.items() == ["tea", "milk", "rice"]
    assert copy.copy(proxy).items() == ["tea", "milk", "rice"]
    del rref, proxy, back
    expect_nothing_left(group.agents)


def put_by(proxy: Any, item: str) -> Any:
    return proxy.put(item)


def test_a_proxy_is_pickled_only_in_calls(group: LocalGroup) -> None:
    proxy = remote(group.agents[0], 1, Shelf).rpc_sync()
    for thing in (proxy, proxy.put):
        with pytest.raises(SerializationError, match=r"can be pickled only as an argument or result of a remote call"):
            pickle.dumps(thing)
    with pytest.raises(UsageError, match=r"rpc_sync\(\) cannot be deep-copied"):
        copy.deepcopy(proxy)


def test_a_value_that_cannot_be_called(group: LocalGroup) -> None:
    with pytest.raises(TypeError, match="'int' object is not callable"):
        remote(group.agents[0], 1, echo, 5).rpc_sync()()


def test_what_a_method_raises_arrives_with_its_own_type(group: LocalGroup) -> None:
    rref = remote(group.agents[0], 1, Shelf)
    for fail_at in (rref.rpc_sync().fail, lambda text: rref.rpc_async().fail(text).wait()):
        with pytest.raises(ShelfError) as caught:
            fail_at("empty")
        assert caught.value.args == ("empty", 7)
        assert "worker 'worker1', in `Shelf.fail`" in whole_text(caught.value)


def test_methods_take_references(group: LocalGroup) -> None:
    shelf = remote(group.agents[0], 1, Shelf)
    assert shelf.rpc_sync().fetch(remote(group.agents[0], 2, echo, 5)) == 5
    assert shelf.rpc_sync().fetch(here(group.agents[0], 6)) == 6
    assert shelf.remote().fetch(remote(group.agents[0], 2, echo, 7)).to_here() == 7


def test_a_proxys_method_has_a_timeout(group: LocalGroup) -> None:
    gate = new_gate("proxy")
    rref = remote(group.agents[0], 1, wait_at, "proxy", Shelf())
    with pytest.raises(RpcTimeoutError, match=r"did not answer `put` within 0.05 s"):
        rref.rpc_sync(timeout=0.05).put("tea")
    future = rref.rpc_async(timeout=0.05).put("tea")
    assert isinstance(future.exception(), RpcTimeoutError)
    gate.set()
