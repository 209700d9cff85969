"""Calls on the value of a reference, where it lives: `rpc_sync`, `rpc_async` and `remote`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from farcall import RpcTimeoutError, RRef
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import echo
from reference_values import Shelf, ShelfError

pytestmark = pytest.mark.timeout(30)

owners = pytest.mark.parametrize("to", [0, 1], ids=["owned here", "owned by another worker"])

WAYS: dict[str, Callable[[Any], Any]] = {
    "rpc_sync": lambda rref: rref.rpc_sync(timeout=SOON),
    "rpc_async": lambda rref: Settled(rref.rpc_async(timeout=SOON), lambda future: future.wait()),
    "remote": lambda rref: Settled(rref.remote(timeout=SOON), lambda result: result.to_here(timeout=SOON)),
}


class Settled:
    """A proxy whose methods return the result itself."""

    def __init__(self, proxy: Any, settle: Callable[[Any], Any]) -> None:
        self.__proxy = proxy
        self.__settle = settle

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.__settle(getattr(self.__proxy, name)(*args, **kwargs))

    def __call__(self, *args: Any) -> Any:
        return self.__settle(self.__proxy(*args))


@owners
@pytest.mark.parametrize("way", WAYS)
def test_methods_of_every_kind_run_where_the_value_is(group: LocalGroup, way: str, to: int) -> None:
    proxy = WAYS[way](group.remote(0, to, Shelf, ("tea",)))
    assert proxy.put("milk", times=2) == 3
    assert proxy(0) == "tea"
    assert proxy.double(4) == 8
    assert proxy.named() == "Shelf"
    assert proxy.later(4) == 7
    assert proxy.soon(4) == 7
    assert proxy.size() == 3, "an attribute is read"
    assert proxy.items() == ["tea", "milk", "milk"]
    assert proxy.__len__() == 3
    assert proxy.fetch(group.remote(0, 2, echo, (5,))) == 5
    with pytest.raises(ShelfError) as caught:
        proxy.fail("empty")
    assert caught.value.args == ("empty", 7)
    with pytest.raises(AttributeError, match="'Shelf' object has no attribute 'nothing'"):
        proxy.nothing()
    with pytest.raises(TypeError, match="cannot be called: it is read without arguments"):
        proxy.size(1)


@owners
def test_the_result_of_a_remote_method_stays_with_the_value(group: LocalGroup, to: int) -> None:
    rref = group.remote(0, to, Shelf, ("tea",))
    count = rref.remote().put("milk")
    assert isinstance(count, RRef)
    assert count.owner() == rref.owner()
    assert count.to_here() == 2


@owners
def test_a_method_called_before_the_value_exists_waits_for_it_there(group: LocalGroup, to: int) -> None:
    gate = new_gate("early")
    rref = group.remote(0, to, wait_at, ("early", Shelf("tea")))
    futures = [rref.rpc_async(timeout=SOON).put("milk") for _ in range(3)]
    later = rref.remote().put("rice")
    assert arrived["early"].wait(SOON)
    assert not any(future.done() for future in futures)
    gate.set()
    assert sorted([future.wait() for future in futures] + [later.to_here()]) == [2, 3, 4, 5]


class AnyName:
    """Has methods of names that a proxy may have itself."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: (name, args, kwargs)


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async", "remote"])
def test_a_method_and_its_arguments_may_have_any_name(group: LocalGroup, way: str) -> None:
    proxy = getattr(group.remote(0, 1, AnyName), way)()
    for name in ("_call", "_handle", "_timeout", "call", "handle", "timeout", "method", "rpc_sync", "self"):
        outcome = getattr(proxy, name)(1, handle=2, timeout=3, method=4, self=5)
        result = outcome if way == "rpc_sync" else outcome.wait() if way == "rpc_async" else outcome.to_here()
        assert result == (name, (1,), {"handle": 2, "timeout": 3, "method": 4, "self": 5})


@owners
def test_a_method_ends_at_the_timeout_of_its_proxy(group: LocalGroup, to: int) -> None:
    gate = new_gate("proxy")
    rref = group.remote(0, to, wait_at, ("proxy", Shelf()))
    with pytest.raises(RpcTimeoutError):
        rref.rpc_sync(timeout=0.05).put("tea")
    future = rref.rpc_async(timeout=0.05).put("tea")
    assert isinstance(future.exception(SOON), RpcTimeoutError)
    gate.set()
    assert rref.to_here(timeout=SOON).items in ([], ["tea"], ["tea", "tea"]), "the methods may have run later"


def test_a_future_of_a_method_can_be_awaited_and_has_callbacks(group: LocalGroup) -> None:
    async def ask() -> list[Any]:
        rref = group.remote(0, 1, Shelf)
        return await asyncio.gather(*(rref.rpc_async().put("tea") for _ in range(5)))

    assert sorted(asyncio.run(ask())) == [1, 2, 3, 4, 5]
    assert group.remote(0, 1, Shelf).rpc_async().put("tea").then(lambda done: done.value() + 1).wait() == 2
