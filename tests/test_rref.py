"""References as a program sees them: made, used, passed anywhere, reported, and gone when nobody holds them.

All workers live in this process. What they run stands here, and sees the same globals as the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import logging
import pickle
import re
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_type_hints

import pytest

import farcall
from eventually import eventually
from farcall import (
    NotInitializedError,
    OwnerLost,
    ReferenceRefused,
    RpcBackendOptions,
    RpcError,
    RpcTimeoutError,
    RRef,
    SerializationError,
    UnknownWorkerError,
    UsageError,
    WorkerInfo,
    api,
)
from farcall.functions import async_execution
from farcall.futures import Future
from farcall.testing import LocalGroup
from reference_stage import SOON, call, expect_confirmed, expect_nothing_left, here, remote, start, tables

pytestmark = pytest.mark.timeout(30)

# Faults of the code that these tests have found.
ALIASED = "a remote call to oneself does not copy the buffers beside the pickle"
NO_TIMEOUT = "_get_type() at the owner waits without end"
NEGATIVE = "call_on and to_here take a timeout below 0"
UNHASHABLE = "Agent.remote looks up what cannot be hashed"
CHAIN = "a remote call on a reference does not hold it: its delete may come before the call runs"
NOT_CALLABLE = "a proxy looks up `__call__` as an attribute"
BYTES = "execution._name knows heads of methods and values only"
UNREAD = "nobody reads the acknowledgement of a call's references while no call is pending on that connection"
TOO_EARLY = "a fetch that comes before the creator's request is refused, though the value is only not yet created"
OWN_ERROR = "the error in the owner's table has the frames that met it in its traceback, and these hold the reference"
COROUTINES = "a remote call whose function is a coroutine, or answers later, is not counted as under way"
UNNOTICED = "nobody reads an idle connection, so that the end of a worker that never called us is not noticed"

gates: dict[str, threading.Event] = {}
arrived: dict[str, threading.Event] = {}


@pytest.fixture
def group() -> Iterator[LocalGroup]:
    """Three workers, whose tables must be empty in the end unless the test has failed."""
    with LocalGroup(3) as group:
        yield group


@pytest.fixture
def this_worker(group: LocalGroup, monkeypatch: pytest.MonkeyPatch) -> LocalGroup:
    """Worker 0 is the one of this process, for `farcall.remote` and `RRef(value)`."""
    monkeypatch.setattr(api, "_agent", group[0])
    return group


# -- What the workers run


def echo(value: Any) -> Any:
    return value


def fetch(rref: RRef[Any]) -> Any:
    return rref.to_here(timeout=SOON)


def new_gate(name: str) -> threading.Event:
    gates[name], arrived[name] = threading.Event(), threading.Event()
    return gates[name]


def wait_at(name: str, result: Any = None) -> Any:
    arrived[name].set()
    assert gates[name].wait(SOON), f"nobody opened the gate {name!r}"
    return result


def fail(text: str) -> None:
    raise ShelfError(text, 7)


class ShelfError(Exception):
    """An error with arguments of its own."""


class Shelf:
    """Something with methods of all kinds."""

    capacity = 10

    def __init__(self, *items: str) -> None:
        self.items = list(items)

    def put(self, item: str, times: int = 1) -> int:
        self.items += [item] * times
        return len(self.items)

    def __call__(self, index: int) -> str:
        return self.items[index]

    def fail(self, text: str) -> None:
        raise ShelfError(text, 7)

    def fetch(self, rref: RRef[Any]) -> Any:
        return rref.to_here(timeout=SOON)

    @property
    def size(self) -> int:
        return len(self.items)

    @staticmethod
    def double(value: int) -> int:
        return 2 * value

    @classmethod
    def named(cls) -> str:
        return cls.__name__

    @async_execution
    def later(self, value: int) -> Future[int]:
        future: Future[int] = Future()
        threading.Thread(target=lambda: future.set_result(value + len(self.items))).start()
        return future

    async def soon(self, value: int) -> int:
        await asyncio.sleep(0)
        return value + len(self.items)


class Box:
    """An object that holds something; equal by what it holds."""

    def __init__(self, content: Any) -> None:
        self.content = content


# -- Made by remote


def test_a_remote_call_leaves_its_result_there(group: LocalGroup) -> None:
    rref = remote(group[0], "worker1", Shelf, "tea", "milk")
    assert rref.to_here().items == ["tea", "milk"]
    assert rref.owner() == WorkerInfo("worker1", 1)
    assert rref.owner_name() == "worker1"
    assert not rref.is_owner()


def test_a_remote_call_does_not_wait(group: LocalGroup) -> None:
    gate = new_gate("remote")
    rref = remote(group[0], 1, wait_at, "remote", "done")
    assert arrived["remote"].wait(SOON)
    expect_confirmed(rref)  # long before there is a value
    gate.set()
    assert rref.to_here() == "done"


def test_the_functions_of_the_package(this_worker: LocalGroup) -> None:
    rref: RRef[int] = farcall.remote("worker1", max, args=(3, 4), timeout=5.0)
    assert rref.to_here() == 4
    assert farcall.remote("worker2", sorted, args=([3, 1],), kwargs={"reverse": True}).to_here() == [3, 1]
    assert isinstance(rref, RRef)


def test_a_worker_may_ask_itself(group: LocalGroup) -> None:
    rref = remote(group[0], 0, Shelf, "tea")
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.to_here().items == ["tea"]
    assert rref.to_here() is rref.local_value()
    assert call(group[1], 2, echo, 1) == 1


def test_to_whom_is_checked_as_in_a_call(group: LocalGroup) -> None:
    with pytest.raises(UnknownWorkerError, match="there is no worker 'worker9' in this group"):
        remote(group[0], "worker9", max, 1, 2)
    with pytest.raises(UsageError, match="cannot be called"):
        group[0].calling.remote(1, 5, (), None)  # type: ignore[arg-type]
    with pytest.raises(SerializationError, match=r"argument 1 .*cannot be pickled"):
        remote(group[0], 1, echo, threading.Lock())
    assert tables(group[0]) == {}


@pytest.mark.parametrize(
    "to",
    [
        ["worker1"],
        {},
        None,
        1.5,
    ],
)
def test_whom_nobody_can_be_is_refused(group: LocalGroup, to: Any) -> None:
    with pytest.raises(UsageError, match="must be a worker's name, rank or WorkerInfo"):
        remote(group[0], to, max, 1, 2)


def test_lambdas_async_execution_and_coroutines_as_callees(group: LocalGroup) -> None:
    base = 40
    assert remote(group[0], 1, lambda: base + 2).to_here() == 42
    shelf = Shelf("tea")
    assert remote(group[0], 1, shelf.later, 4).to_here() == 5
    assert remote(group[0], 1, shelf.soon, 4).to_here() == 5


def test_an_argument_may_be_changed_after_the_call(group: LocalGroup) -> None:
    numpy = pytest.importorskip("numpy")
    gate = new_gate("changed")
    blocker = remote(group[0], 1, wait_at, "changed")
    array = numpy.zeros(100_000)
    rref = remote(group[0], 1, echo, array)
    array[:] = 7.0
    gate.set()
    assert rref.to_here().sum() == 0.0
    assert blocker.to_here() is None


def test_an_argument_may_be_changed_after_a_call_to_oneself(group: LocalGroup) -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros(100_000)
    rref = remote(group[0], 0, echo, array)
    rref.to_here()
    array[:] = 7.0
    assert rref.to_here().sum() == 0.0, "the value is the caller's own memory"


# -- Made here


def test_a_value_of_this_worker(this_worker: LocalGroup) -> None:
    shelf = Shelf("tea")
    rref = RRef(shelf)
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.owner_name() == "worker0"
    assert rref.local_value() is rref.to_here() is shelf
    assert rref._get_type() is Shelf


def test_a_type_hint_is_accepted(this_worker: LocalGroup) -> None:
    assert RRef([1], type_hint=list[int]).local_value() == [1]


def test_a_reference_needs_a_worker() -> None:
    with pytest.raises(NotInitializedError, match="init_rpc"):
        RRef(1)


def test_others_see_what_the_owner_changes(group: LocalGroup) -> None:
    shelf = Shelf()
    rref = here(group[0], shelf)
    assert call(group[0], 1, put_twice, rref, "tea") == 2
    assert shelf.items == ["tea", "tea"]


def put_twice(rref: RRef[Shelf], item: str) -> Any:
    rref.rpc_sync().put(item)
    return rref.rpc_sync().put(item)


# -- The value


def test_local_value_is_for_the_owner_only(group: LocalGroup) -> None:
    rref = remote(group[0], "worker1", Shelf)
    with pytest.raises(UsageError, match=r"belongs to worker 'worker1': local_value\(\) works only there; use to_here"):
        rref.local_value()
    assert call(group[0], 1, local_type, rref) is Shelf


def local_type(rref: RRef[Any]) -> Any:
    assert rref.is_owner()
    return type(rref.local_value())


def test_a_copy_is_a_copy(group: LocalGroup) -> None:
    rref = remote(group[0], 1, Shelf, "tea")
    rref.to_here().items.append("mine")
    assert rref.to_here().items == ["tea"]


def test_to_here_has_a_timeout(group: LocalGroup) -> None:
    gate = new_gate("slow")
    rref = remote(group[0], 1, wait_at, "slow", 5)
    with pytest.raises(RpcTimeoutError, match=r"worker 'worker1' did not answer `to_here` within 0.05 s"):
        rref.to_here(timeout=0.05)
    gate.set()
    assert rref.to_here() == 5


def test_to_here_has_a_timeout_at_the_owner_too(group: LocalGroup) -> None:
    gate = new_gate("slow here")
    rref = remote(group[0], 0, wait_at, "slow here", 5)
    with pytest.raises(RpcTimeoutError, match=r"was not there within 0.05 s"):
        rref.to_here(timeout=0.05)
    gate.set()
    assert rref.to_here() == 5


def test_the_default_timeout_is_the_workers(group: LocalGroup) -> None:
    gate = new_gate("default")
    group[0].calling.rpc_timeout = 0.05
    rrefs = [remote(group[0], to, wait_at, "default", 5) for to in (0, 1)]
    for rref in rrefs:
        with pytest.raises(RpcTimeoutError):
            rref.to_here()
    with pytest.raises(RpcTimeoutError):
        rrefs[1].rpc_sync().bit_length()
    gate.set()


@pytest.mark.parametrize(
    "to",
    [
        pytest.param(0, id="at the owner"),
        pytest.param(1, id="elsewhere"),
    ],
)
def test_the_type_has_a_timeout(group: LocalGroup, to: int) -> None:
    gate = new_gate("type")
    rref = remote(group[0], to, wait_at, "type", 5)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(rref._get_type, timeout=0.05)
        try:
            with pytest.raises(RpcTimeoutError):
                asked.result(3)
        finally:
            gate.set()
    assert rref._get_type() is int


@pytest.mark.parametrize("use", ["to_here", "rpc_sync", "_get_type"])
def test_a_timeout_below_zero_is_refused(group: LocalGroup, use: str) -> None:
    rref = remote(group[0], 1, Shelf)
    with pytest.raises(UsageError, match="a timeout must be 0"):
        TIMED[use](rref)


TIMED: dict[str, Callable[[RRef[Any]], Any]] = {
    "to_here": lambda rref: rref.to_here(timeout=-5),
    "rpc_sync": lambda rref: rref.rpc_sync(timeout=-5).put("tea"),
    "_get_type": lambda rref: rref._get_type(timeout=-5),
}


def test_type_and_presence(group: LocalGroup) -> None:
    gate = new_gate("presence")
    for to in (0, 1):
        gates["presence"].clear()
        rref = remote(group[0], to, wait_at, "presence", Shelf())
        present = rref._get_future()
        type_later = rref._get_type(blocking=False)
        assert not present.done()
        assert not type_later.done()
        gate.set()
        assert present.wait() is None
        assert type_later.wait() is Shelf
        assert rref._get_type() is Shelf
        assert rref._get_type(timeout=SOON, blocking=True) is Shelf


def test_awaiting_a_reference_fetches_its_value(group: LocalGroup) -> None:
    async def both() -> list[Any]:
        return [await remote(group[0], 1, echo, 5), await remote(group[0], 0, echo, 6), await here(group[0], 7)]

    assert asyncio.run(both()) == [5, 6, 7]


def test_awaiting_a_reference_whose_function_failed(group: LocalGroup) -> None:
    async def one(to: int) -> Any:
        return await remote(group[0], to, fail, "empty")

    for to in (0, 1):
        with pytest.raises(ShelfError, match="empty"):
            asyncio.run(one(to))


# -- Proxies


@pytest.mark.parametrize("to", [0, 1], ids=["own", "another's"])
def test_methods_run_where_the_value_is(group: LocalGroup, to: int) -> None:
    rref = remote(group[0], to, Shelf, "tea")
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
    rref = remote(group[0], to, Shelf, "tea")
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
    rref = remote(group[0], 1, wait_at, "early", Shelf("tea"))
    futures = [rref.rpc_async().put("milk") for _ in range(3)]
    later = rref.remote().put("rice")
    assert arrived["early"].wait(SOON)
    assert not any(future.done() for future in futures)
    gate.set()
    assert sorted([future.wait() for future in futures] + [later.to_here()]) == [2, 3, 4, 5]


def test_a_chain_of_references_whose_links_are_dropped_at_once(group: LocalGroup) -> None:
    gate = new_gate("chain")
    count = remote(group[0], 1, wait_at, "chain", Shelf("tea")).remote().put("milk").remote().bit_length()
    gc.collect()
    assert arrived["chain"].wait(SOON)
    for _ in range(20):  # whatever is given back is given back before the first value is there
        call(group[0], 1, echo, 0)
        group[0].book.work_off()
    gate.set()
    assert count.to_here() == 2


def test_a_call_holds_its_reference_until_it_is_answered(group: LocalGroup) -> None:
    gate = new_gate("held")
    future = remote(group[0], 1, wait_at, "held", Shelf("tea")).rpc_async().put("milk")
    gc.collect()
    assert arrived["held"].wait(SOON)
    call(group[0], 1, echo, 1)
    gate.set()
    assert future.wait() == 2


def test_a_method_that_is_not_there(group: LocalGroup) -> None:
    rref = remote(group[0], 1, Shelf)
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
    rref = remote(group[0], 1, Named)
    for name in ("_call", "_handle", "_rref", "_timeout", "_way", "call", "handle", "timeout", "method", "rpc_sync"):
        outcome = getattr(getattr(rref, way)(), name)(1, handle=2, timeout=3, method=4, self=5)
        if way == "remote":
            outcome = outcome.to_here()
        elif way == "rpc_async":
            outcome = outcome.wait()
        assert outcome == (name, (1,), {"handle": 2, "timeout": 3, "method": 4, "self": 5})


def test_an_attribute_takes_no_arguments(group: LocalGroup) -> None:
    rref = remote(group[0], 1, Shelf)
    with pytest.raises(TypeError, match=r"'size' of a Shelf is a int, which cannot be called: it is read without arg"):
        rref.rpc_sync().size(1)
    with pytest.raises(TypeError, match="'items' of a Shelf is a list"):
        rref.rpc_sync().items(index=1)


@pytest.mark.parametrize("to", [0, 1, 2])
def test_a_proxy_and_its_methods_go_where_references_go(group: LocalGroup, to: int) -> None:
    rref = remote(group[0], 1, Shelf, "tea")
    proxy = rref.rpc_sync(timeout=SOON)
    assert call(group[0], to, proxy.put, "milk") == 2
    assert call(group[0], to, put_by, proxy, "rice") == 3
    assert call(group[0], to, repr, proxy) == repr(proxy)
    back = call(group[0], to, echo, proxy)
    assert back.items() == ["tea", "milk", "rice"]
    assert copy.copy(proxy).items() == ["tea", "milk", "rice"]
    del rref, proxy, back
    expect_nothing_left(group)


def put_by(proxy: Any, item: str) -> Any:
    return proxy.put(item)


def test_a_proxy_is_pickled_only_in_calls(group: LocalGroup) -> None:
    proxy = remote(group[0], 1, Shelf).rpc_sync()
    for thing in (proxy, proxy.put):
        with pytest.raises(SerializationError, match=r"can be pickled only as an argument or result of a remote call"):
            pickle.dumps(thing)
    with pytest.raises(UsageError, match=r"rpc_sync\(\) cannot be copied deeply"):
        copy.deepcopy(proxy)


def test_a_value_that_cannot_be_called(group: LocalGroup) -> None:
    with pytest.raises(TypeError, match="'int' object is not callable"):
        remote(group[0], 1, echo, 5).rpc_sync()()


def test_what_a_method_raises_arrives_with_its_own_type(group: LocalGroup) -> None:
    rref = remote(group[0], 1, Shelf)
    for fail_at in (rref.rpc_sync().fail, lambda text: rref.rpc_async().fail(text).wait()):
        with pytest.raises(ShelfError) as caught:
            fail_at("empty")
        assert caught.value.args == ("empty", 7)
        assert "worker 'worker1', in `Shelf.fail`" in whole_text(caught.value)


def test_methods_take_references(group: LocalGroup) -> None:
    shelf = remote(group[0], 1, Shelf)
    assert shelf.rpc_sync().fetch(remote(group[0], 2, echo, 5)) == 5
    assert shelf.rpc_sync().fetch(here(group[0], 6)) == 6
    assert shelf.remote().fetch(remote(group[0], 2, echo, 7)).to_here() == 7


def test_a_proxys_method_has_a_timeout(group: LocalGroup) -> None:
    gate = new_gate("proxy")
    rref = remote(group[0], 1, wait_at, "proxy", Shelf())
    with pytest.raises(RpcTimeoutError, match=r"did not answer `put` within 0.05 s"):
        rref.rpc_sync(timeout=0.05).put("tea")
    future = rref.rpc_async(timeout=0.05).put("tea")
    assert isinstance(future.exception(), RpcTimeoutError)
    gate.set()


def whole_text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


# -- The error of the function


USES: dict[str, Callable[[RRef[Any]], Any]] = {
    "to_here": lambda rref: rref.to_here(),
    "rpc_sync": lambda rref: rref.rpc_sync().put("tea"),
    "rpc_async": lambda rref: rref.rpc_async().put("tea").wait(),
    "remote": lambda rref: rref.remote().put("tea").to_here(),
    "remote of remote": lambda rref: rref.remote().put("tea").remote().bit_length().to_here(),
    "_get_type": lambda rref: rref._get_type(),
    "_get_type, later": lambda rref: rref._get_type(blocking=False).wait(),
    "_get_future": lambda rref: rref._get_future().wait(),
    "call": lambda rref: rref.rpc_sync()(),
}


@pytest.mark.parametrize(
    ("use", "to"),
    [
        pytest.param(
            use,
            to,
            id=use + (", another's" if to else ", own"),
        )
        for use in USES
        for to in (0, 1)
    ],
)
def test_every_use_raises_what_the_function_raised(group: LocalGroup, use: str, to: int) -> None:
    rref = remote(group[0], to, fail, "empty")
    for _ in range(2):
        with pytest.raises(ShelfError) as caught:
            USES[use](rref)
        assert caught.value.args == ("empty", 7)
        assert not re.search(r"[\x00-\x08]", whole_text(caught.value)), "bytes of the protocol are in the text"


def test_a_third_worker_meets_the_error_too(group: LocalGroup) -> None:
    with pytest.raises(ShelfError, match="empty"):
        call(group[0], 2, fetch, remote(group[0], 1, fail, "empty"))


def test_the_owner_meets_the_error_by_local_value(group: LocalGroup) -> None:
    with pytest.raises(ShelfError, match="empty"):
        remote(group[0], 0, fail, "empty").local_value()


@pytest.mark.parametrize("use", ["to_here", "local value", "_get_type"])
def test_an_error_that_the_owner_has_met_does_not_keep_the_reference(group: LocalGroup, use: str) -> None:
    rref = remote(group[0], 0, fail, "empty")
    with pytest.raises(ShelfError):
        rref.local_value() if use == "local value" else USES[use](rref)
    del rref
    expect_nothing_left(group)


@pytest.mark.parametrize("to", [0, 1], ids=["at the owner", "elsewhere"])
@pytest.mark.parametrize(
    "use",
    [
        lambda rref: rref.to_here(),
        lambda rref: rref.rpc_sync().anything(),
        lambda rref: rref.rpc_async().anything().wait(),
        lambda rref: rref.rpc_async().anything().result(SOON),
    ],
    ids=["to_here", "rpc_sync", "wait", "result"],
)
def test_an_error_that_was_handled_keeps_nothing(group: LocalGroup, use: Callable[[RRef[Any]], Any], to: int) -> None:
    """Not even until the garbage collector comes by: the references would be reported as leaks."""
    rref = remote(group[0], to, fail, "early")
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ShelfError):
            use(rref)
        handle = weakref.ref(rref._handle)
        del rref
        eventually(lambda: handle() is None)
    finally:
        gc.enable()


def test_arguments_that_cannot_be_unpickled_there_fail_the_value(group: LocalGroup) -> None:
    with pytest.raises(SerializationError, match="cannot be rebuilt on worker 'worker1'"):
        remote(group[0], 1, echo, Unreadable()).to_here()


class Unreadable:
    def __reduce__(self) -> Any:
        return raise_on_load, ()


def raise_on_load() -> None:
    raise ValueError("no")


def test_a_value_that_cannot_be_pickled_stays_usable_there(group: LocalGroup) -> None:
    rref = remote(group[0], 1, threading.Lock)
    with pytest.raises(SerializationError, match="cannot be pickled"):
        rref.to_here()
    assert rref.rpc_sync().locked() is False


# -- Travelling


def carry(rref: RRef[Any], way: str) -> Any:
    """The reference in something."""
    return {
        "itself": rref,
        "list": [rref],
        "nested": {"a": [(1, (rref,))]},
        "object": Box(Box(rref)),
        "key": {rref: "value"},
        "set": {rref},
        "twice": [rref, rref, copy.copy(rref)],
    }[way]


def references_in(value: Any) -> list[RRef[Any]]:
    match value:
        case RRef():
            return [value]
        case Box():
            return references_in(value.content)
        case dict():
            return [rref for pair in value.items() for part in pair for rref in references_in(part)]
        case list() | tuple() | set():
            return [rref for part in value for rref in references_in(part)]
    return []


def fetch_all(value: Any) -> list[Any]:
    return [rref.to_here(timeout=SOON) for rref in references_in(value)]


WAYS = ["itself", "list", "nested", "object", "key", "set", "twice"]


@pytest.mark.parametrize(
    ("to", "owner"),
    [(to, owner) for to in range(3) for owner in range(3)],
)
@pytest.mark.parametrize("way", WAYS)
def test_a_reference_goes_anywhere_in_anything(group: LocalGroup, way: str, to: int, owner: int) -> None:
    rref = remote(group[0], owner, echo, "tea")
    values = call(group[0], to, fetch_all, carry(rref, way))
    assert values == ["tea"] * (3 if way == "twice" else 1)
    back = call(group[0], to, echo, carry(rref, way))
    assert references_in(back) == references_in(carry(rref, way))
    assert fetch_all(back) == values
    assert rref.to_here() == "tea"
    del rref, back
    expect_nothing_left(group)


@pytest.mark.parametrize("to", [0, 1, 2])
def test_a_reference_in_a_remote_call_and_in_its_value(group: LocalGroup, to: int) -> None:
    inner = remote(group[0], 1, echo, "tea")
    outer = remote(group[0], to, Box, inner)
    assert outer.to_here().content == inner
    assert outer.to_here().content.to_here() == "tea"
    del inner
    gc.collect()
    assert outer.to_here().content.to_here() == "tea", "the box at its owner holds it"
    del outer
    expect_nothing_left(group)


def test_twice_in_one_message_is_one_handle(group: LocalGroup) -> None:
    rref = remote(group[0], 1, echo, "tea")
    assert call(group[0], 2, are_one_handle, [rref, rref]) is True
    assert call(group[0], 1, are_one_handle, [rref, copy.copy(rref)]) is True


def are_one_handle(rrefs: list[RRef[Any]]) -> bool:
    return rrefs[0]._handle is rrefs[1]._handle


def test_an_argument_before_its_value_exists(group: LocalGroup) -> None:
    gate = new_gate("argument")
    rref = remote(group[0], 1, wait_at, "argument", "tea")
    futures = [start(group[0], to, fetch, rref) for to in (0, 1, 2)]
    sums = remote(group[0], 2, fetch_all, [rref, rref])
    assert arrived["argument"].wait(SOON)
    assert not any(future.done() for future in futures)
    gate.set()
    assert [future.wait() for future in futures] == ["tea"] * 3
    assert sums.to_here() == ["tea", "tea"]


def test_an_argument_before_the_owner_has_heard_of_it(group: LocalGroup) -> None:
    """The creator's message is still on its way, a large one, say; a third worker is faster."""
    call(group[0], 1, echo, 0)
    connection = group[0]._peers[1].connection
    assert connection is not None
    held_back: list[Any] = []
    send_control = connection.send_control
    connection.send_control = lambda message, *_: held_back.append(message)  # type: ignore[method-assign]
    rref = remote(group[0], 1, echo, "tea")
    connection.send_control = send_control  # type: ignore[method-assign]
    fetched = start(group[0], 2, fetch, rref)
    eventually(lambda: group[1].book._references.owned)
    call(group[2], 1, echo, 0)
    assert not fetched.done(), fetched
    for frame in held_back:
        send_control(frame)
    assert fetched.wait() == "tea"
    del rref
    expect_nothing_left(group)


def test_a_result_that_nobody_takes_is_given_back(group: LocalGroup) -> None:
    gate = new_gate("late")
    future = start(group[0], 1, reference_at, group, "late", timeout=0.05)
    assert isinstance(future.exception(), RpcTimeoutError)
    gate.set()
    call(group[0], 1, echo, 0)
    expect_nothing_left(group)


def reference_at(group: LocalGroup, gate: str) -> Any:
    """Runs on worker 1: a reference to a value of its own, after a while."""
    wait_at(gate)
    return here(group[1], "tea")


def test_a_result_that_nobody_reads_is_given_back(group: LocalGroup) -> None:
    gate = new_gate("unread")
    gate.set()
    future = start(group[0], 1, reference_at, group, "unread")
    eventually(future.done)
    assert group[1].book._references.owned
    del future
    expect_nothing_left(group)


def test_a_value_lives_as_long_as_anybody_holds_it(group: LocalGroup) -> None:
    shelf = Shelf()
    value = weakref.ref(shelf)
    first = here(group[1], shelf)
    del shelf
    second = call(group[1], 0, echo, first)  # to worker 0 and back
    del first
    gc.collect()
    third = keep(group[1], 2, second)
    del second
    gc.collect()
    call(group[2], 1, echo, 0)
    assert value() is not None
    assert third.to_here().items == []
    del third
    kept.clear()
    expect_nothing_left(group)
    eventually(lambda: value() is None)


kept: list[RRef[Any]] = []


def keep(caller: Any, to: int, rref: RRef[Any]) -> RRef[Any]:
    call(caller, to, keep_there, rref)
    return kept[-1]


def keep_there(rref: RRef[Any]) -> None:
    kept.append(rref)


class Farewell:
    """Takes its time to go: does something in its finalizer."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def __del__(self) -> None:
        self._act()


def new_farewell(group: LocalGroup, name: str) -> Farewell:
    def act() -> None:
        farewells[name] = "began"
        if name == "waits":
            wait_at(name)
        farewells[name] = call(group[1], 2, echo, "called")

    return Farewell(act)


farewells: dict[str, str] = {}


@pytest.mark.parametrize("name", ["calls", "waits"])
def test_the_finalizer_of_a_value_may_call_and_holds_up_nobody(group: LocalGroup, name: str) -> None:
    farewells.clear()
    gate = new_gate(name)
    rref = remote(group[0], 1, new_farewell, group, name)
    rref._get_future().wait()
    del rref
    if name == "waits":
        assert arrived[name].wait(SOON)
        assert call(group[0], 1, echo, "meanwhile") == "meanwhile"
        assert call(group[2], 1, echo, "meanwhile") == "meanwhile"
        gate.set()
    eventually(lambda: farewells.get(name) == "called")
    expect_nothing_left(group)


def test_pickling_outside_a_call_is_refused(group: LocalGroup) -> None:
    rref = remote(group[0], 1, echo, 5)
    for dump in (lambda: pickle.dumps(rref), lambda: pickle.dumps([1, {2: rref}]), rref._serialize):
        with pytest.raises(SerializationError, match=r"RRef 0:1 .*only as an argument or result of a remote call"):
            dump()
    with pytest.raises(UsageError, match=r"cannot be copied deeply; copy its value"):
        copy.deepcopy([rref])
    assert copy.copy(rref) == rref


def test_what_stands_for_it_in_a_pickle(group: LocalGroup) -> None:
    rref = here(group[0], "tea")
    assert call(group[0], 1, deserialized_value, Serialized(rref)) == "tea"
    with pytest.raises(SerializationError, match="outside the call that it belongs to"):
        RRef._deserialize((0,))


class Serialized:
    """Travels by way of `_serialize` and `_deserialize`."""

    def __init__(self, rref: RRef[Any]) -> None:
        self.rref = rref

    def __reduce__(self) -> Any:
        return deserialize, (self.rref._serialize(),)


def deserialize(place: tuple[int]) -> Serialized:
    return Serialized(RRef._deserialize(place))


def deserialized_value(serialized: Serialized) -> Any:
    return serialized.rref.to_here(timeout=SOON)


def test_a_pickle_of_a_call_read_after_it_is_refused(group: LocalGroup) -> None:
    assert call(group[0], 1, load_later, Stored(here(group[0], 1))) == "SerializationError"


class Stored:
    """Pickles by itself, and is read by itself, too late."""

    def __init__(self, rref: RRef[Any]) -> None:
        self.rref = rref

    def __reduce__(self) -> Any:
        return bytes, (pickle.dumps(self.rref),)


def load_later(data: bytes) -> str:
    try:
        pickle.loads(data)
    except SerializationError as error:
        return type(error).__name__
    return "loaded"


# -- What it looks like


def test_equal_hashed_and_shown_by_what_it_refers_to(group: LocalGroup) -> None:
    first, second = remote(group[0], 1, echo, 5), remote(group[0], 1, echo, 5)
    assert first == copy.copy(first)
    assert first != second
    assert first != 5
    assert {first: 1}[copy.copy(first)] == 1
    assert repr(first) == "<RRef 0:1 owned by 'worker1'>"
    assert call(group[0], 2, repr, first) == repr(first)
    assert repr(first.rpc_sync()) == "<RRef 0:1 owned by 'worker1'>.rpc_sync()"
    assert [repr(proxy())[-8:] for proxy in (first.rpc_async, first.remote)] == ["_async()", "remote()"]


def test_it_is_generic_in_its_type() -> None:
    assert get_type_hints(put_twice)["rref"] == RRef[Shelf]
    assert RRef[int] != RRef[str]


def test_a_copy_is_the_same_handle(group: LocalGroup) -> None:
    rref = remote(group[0], 1, echo, 5)
    expect_confirmed(rref)
    other = copy.copy(rref)
    del rref
    gc.collect()
    call(group[0], 1, echo, 0)
    assert other.to_here() == 5
    assert other.confirmed_by_owner()


# -- Reports


def line_of(text: str) -> bool:
    return re.search(r"test_rref\.py:\d+$", text) is not None


def test_references_lists_what_is_owned_and_held(this_worker: LocalGroup) -> None:
    own = RRef(Shelf())
    other = farcall.remote("worker1", Shelf)
    call(this_worker[0], 2, keep_there, own)
    expect_confirmed(other)
    inventory = farcall.references()
    ((owned,), (held,)) = inventory.owned, inventory.held
    assert (owned.type, owned.handles, owned.holders) == ("Shelf", 1, ("worker2",))
    assert line_of(owned.created_at), owned
    assert (held.owner, held.confirmed, held.dropped, held.pending) == ("worker1", True, False, ())
    assert line_of(held.created_at), held
    shown = str(inventory)
    assert "owns 1, holds 1" in shown
    assert "(Shelf), held 1 here, 1 by 'worker2'; made at " in shown
    assert "owned by 'worker1', confirmed; made at " in shown
    there = this_worker[1].book.inventory()
    assert there.owned[0].created_at == "the request of 'worker0'"
    assert there.owned[0].holders == ("worker0",)
    kept.clear()
    del own, other
    expect_nothing_left(this_worker)
    assert farcall.references().owned == farcall.references().held == ()


def test_a_value_that_is_not_there_or_failed_is_listed_so(this_worker: LocalGroup) -> None:
    gate = new_gate("listed")
    pending = farcall.remote("worker0", wait_at, args=("listed",))
    failed = farcall.remote("worker0", fail, args=("empty",))
    with pytest.raises(ShelfError):
        failed.to_here()
    assert [owned.type for owned in farcall.references().owned] == ["", "failed: test_rref.ShelfError: ('empty', 7)"]
    assert "(no value yet)" in str(farcall.references())
    gate.set()
    pending.to_here()


def test_a_stack_is_recorded_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalGroup(2, RpcBackendOptions(record_stacks=True)) as group:
        monkeypatch.setattr(api, "_agent", group[0])
        own = make_in_a_function()
        (owned,) = farcall.references().owned
        assert "in make_in_a_function" in owned.created_at
        assert "in test_a_stack_is_recorded_on_request" in owned.created_at
        assert own.is_owner()


def make_in_a_function() -> RRef[int]:
    return RRef(5)


def test_the_counters_that_torch_has(this_worker: LocalGroup) -> None:
    zero = {"num_owner_rrefs": "0", "num_pending_users": "0", "num_pending_futures": "0", "num_forks": "0"}
    assert farcall._rref_context_get_debug_info() == zero
    gate = new_gate("counted")
    own, pending = RRef(5), farcall.remote("worker0", wait_at, args=("counted",))
    call(this_worker[0], 2, keep_there, own)
    assert farcall._rref_context_get_debug_info() == {
        "num_owner_rrefs": "2", "num_pending_users": "0", "num_pending_futures": "1", "num_forks": "1"
    }  # fmt: skip
    gate.set()
    kept.clear()
    pending.to_here()
    del own, pending
    expect_nothing_left(this_worker)
    assert farcall._rref_context_get_debug_info() == zero


def test_all_handles_of_others_can_be_given_up(this_worker: LocalGroup) -> None:
    own, other = RRef(5), farcall.remote("worker1", echo, args=(6,))
    expect_confirmed(other)
    farcall._delete_all_user_and_unforked_owner_rrefs()
    with pytest.raises(UsageError, match="all references of this worker were deleted"):
        other.to_here()
    with pytest.raises(UsageError, match="were deleted"):
        call(this_worker[0], 2, fetch, other)
    with pytest.raises(UsageError, match="were deleted"):
        other.remote().bit_length()
    assert own.to_here() == 5
    expect_nothing_left([this_worker[1]])


def test_the_context_is_not_destroyed_while_references_are_left(this_worker: LocalGroup) -> None:
    rref = RRef(5)
    with pytest.raises(UsageError, match=r"references are left on worker 'worker0': it owns 1, holds 0"):
        farcall._destroy_rref_context(ignore_leak=False)
    assert rref.to_here() == 5
    farcall._destroy_rref_context(ignore_leak=True)
    del rref
    assert farcall.references().owned == ()
    farcall._destroy_rref_context(ignore_leak=False)


def own_shelf(group: LocalGroup) -> RRef[Any]:
    return here(group[1], Shelf())


def test_a_worker_whose_context_was_destroyed_goes_on(this_worker: LocalGroup) -> None:
    own, other = RRef(Shelf()), farcall.remote("worker1", Shelf)
    held = weakref.ref(own.local_value())
    call(this_worker[0], 2, keep_there, own)
    del own
    farcall._destroy_rref_context(ignore_leak=True)
    assert held() is None
    with pytest.raises(UsageError, match="the references of this worker were destroyed"):
        other.to_here()
    with pytest.raises(ReferenceRefused, match=r"'worker0' does not own .* any more: its value was released"):
        fetch(kept[0])
    assert RRef(5).to_here() == 5
    assert farcall.remote("worker1", echo, args=(6,)).to_here() == 6
    assert remote(this_worker[1], 0, echo, 7).to_here() == 7
    returned = call(this_worker[0], 1, own_shelf, this_worker)
    assert returned.rpc_sync().put("tea") == 1
    del returned
    kept.clear()
    expect_nothing_left(this_worker)


# -- The end


def test_a_graceful_shutdown_names_what_is_left_and_who_holds_it(caplog: pytest.LogCaptureFixture) -> None:
    with LocalGroup(3) as group:
        own, other = here(group[0], Shelf()), remote(group[0], 1, Shelf)
        call(group[0], 2, keep_there, own)
        with caplog.at_level(logging.WARNING, "farcall"):
            group.shutdown(graceful=True)
        lines = sorted(record.getMessage() for record in caplog.records)
        assert len(lines) == 3
        assert "worker 'worker0' shuts down with references left: it owns 1, holds 1" in lines[0]
        assert "held 1 here, 1 by 'worker2'; made at " in lines[0]
        assert "worker 'worker1' shuts down with references left: it owns 1, holds 0" in lines[1]
        assert "(Shelf), held 1 by 'worker0'; made at the request of 'worker0'" in lines[1]
        assert "worker 'worker2' shuts down with references left: it owns 0, holds 1" in lines[2]
        kept.clear()
        del own, other


def test_a_shutdown_with_nothing_left_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with LocalGroup(3) as group:
        rrefs = [remote(group[0], 1, Shelf) for _ in range(10)]
        assert call(group[0], 2, fetch, rrefs[0]).items == []
        del rrefs
        with caplog.at_level(logging.WARNING, "farcall"):
            group.shutdown(graceful=True)
        assert caplog.text == ""
        assert [tables(agent) for agent in group] == [{}] * 3


def test_a_shutdown_waits_for_releases_that_lead_to_others(caplog: pytest.LogCaptureFixture) -> None:
    """Each worker is idle most of the time, while a chain of references goes from the one to the other."""
    with LocalGroup(3) as group:
        rref = remote(group[0], 1, Shelf)
        for number in range(90):
            rref = remote(group[0], number % 3, echo, rref)
        assert rref.to_here(timeout=SOON) is not None
        del rref
        with caplog.at_level(logging.WARNING, "farcall"):
            group.shutdown(graceful=True, timeout=SOON)
        assert caplog.records == []


@pytest.mark.parametrize("graceful", [True, False])
def test_a_use_after_the_shutdown_says_so(graceful: bool) -> None:
    with LocalGroup(2) as group:
        own, other = here(group[0], 5), remote(group[0], 1, echo, 6)
        expect_confirmed(other)
        group.shutdown(graceful=graceful)
        for use in (USES["to_here"], USES["rpc_sync"], USES["_get_type"], USES["remote"], USES["_get_future"]):
            with pytest.raises(UsageError, match="worker 'worker0' has shut down"):
                use(other)
        with pytest.raises(UsageError, match="worker 'worker0' has shut down"):
            own.rpc_sync().bit_length()
        assert repr(other) == "<RRef 0:1 owned by 'worker1'>"
        assert (other.owner_name(), own.is_owner()) == ("worker1", True)
        del own, other
        gc.collect()


def test_a_shutdown_waits_for_remote_calls_under_way() -> None:
    with LocalGroup(2) as group, ThreadPoolExecutor(1) as pool:
        gate = new_gate("under way")
        rref = remote(group[0], 1, wait_at, "under way")
        assert arrived["under way"].wait(SOON)
        ending = pool.submit(group.shutdown, True, SOON)
        assert not ended_soon(ending)
        gate.set()
        ending.result(SOON)
        del rref


def test_a_shutdown_waits_for_remote_calls_of_coroutines() -> None:
    with LocalGroup(2) as group, ThreadPoolExecutor(1) as pool:
        gate = new_gate("coroutine")
        rref = remote(group[0], 1, wait_in_coroutine, "coroutine")
        assert arrived["coroutine"].wait(SOON)
        ending = pool.submit(group.shutdown, True, SOON)
        try:
            assert not ended_soon(ending)
        finally:
            gate.set()
            ending.result(SOON)
        del rref


async def wait_in_coroutine(name: str) -> None:
    arrived[name].set()
    while not gates[name].is_set():
        await asyncio.sleep(0.005)


def ended_soon(future: Any) -> bool:
    """Whether it ends though it should not; waits only as long as it would take."""
    threading.Event().wait(0.2)
    return bool(future.done())


def test_a_lost_owner_is_named_by_every_use(group: LocalGroup) -> None:
    rref, passed = remote(group[0], 1, echo, 5), remote(group[0], 1, echo, 6)
    expect_confirmed(rref)
    expect_confirmed(passed)
    group[1].shutdown(graceful=False, timeout=0)
    eventually(lambda: rref._handle.new_error is not None)
    for use in USES.values():
        with pytest.raises(OwnerLost, match="worker 'worker1', who owned reference 0:1") as caught:
            use(rref)
        assert caught.value.worker == "worker1"
    with pytest.raises(OwnerLost, match="worker 'worker1', who owned reference 0:2"):
        call(group[0], 2, echo, passed)
    with pytest.raises(OwnerLost, match="worker 'worker1', who owned reference 0:2"):
        remote(group[0], 2, echo, passed)
    assert "worker1" in repr(rref)
    expect_nothing_left([group[0], group[2]])


def test_a_remote_call_to_a_lost_worker(group: LocalGroup) -> None:
    call(group[0], 1, echo, 0)
    group[1].shutdown(graceful=False, timeout=0)
    eventually(lambda: group[0]._peers[1].is_lost)
    with pytest.raises(RpcError, match="worker1"):
        remote(group[0], 1, echo, 5).to_here()


def test_what_a_lost_worker_held_is_released(group: LocalGroup) -> None:
    value = Shelf()
    released = weakref.ref(value)
    call(group[0], 2, keep_there, here(group[0], value))
    del value
    assert group[0].book.inventory().owned[0].holders == ("worker2",)
    group[2].shutdown(graceful=False, timeout=0)
    expect_nothing_left([group[0], group[1]])
    eventually(lambda: released() is None)
    kept.clear()


# -- Threads


@pytest.mark.slow
def test_many_threads_make_share_and_drop_references(group: LocalGroup) -> None:
    stop = threading.Event()
    timer = threading.Timer(3.0, stop.set)
    timer.start()
    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(lambda number: make_and_share(group, number, stop), range(8)))
    timer.join()
    assert min(counts) > 20, counts
    expect_nothing_left(group)


def make_and_share(group: LocalGroup, number: int, stop: threading.Event) -> int:
    """One thread: makes references everywhere, has others fetch them, drops them; how many."""
    mine = []
    count = 0
    while not stop.is_set():
        count += 1
        maker = group[(number + count) % 3]
        rref = remote(maker, (number + 2 * count) % 3, echo, (number, count))
        mine.append(rref)
        assert call(maker, count % 3, fetch_all, [rref, {1: rref}]) == [(number, count)] * 2
        back = call(maker, (count + 1) % 3, echo, rref)
        assert back.to_here(timeout=SOON) == (number, count)
        assert here(maker, count).remote().bit_length().to_here(timeout=SOON) == count.bit_length()
        if len(mine) > 5:
            assert mine.pop(count % 5).to_here(timeout=SOON)[0] == number
    return count
