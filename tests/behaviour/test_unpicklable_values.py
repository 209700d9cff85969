"""Arguments, results and functions that cannot be pickled or rebuilt: the call fails, and no other call notices."""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from farcall import Future, SerializationError
from farcall.functions import async_execution
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import call, echo, run, runs, start

pytestmark = pytest.mark.timeout(30)


def add(left: Any, right: Any = 1) -> Any:
    return left + right


def return_lock() -> Any:
    return {"nested": [threading.Lock()]}


async def return_lock_async() -> Any:
    return {"nested": [threading.Lock()]}


@async_execution
def return_lock_later() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result({"nested": [threading.Lock()]})
    return future


class Unloadable:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> Any:
        return raise_on_load, ()


def raise_on_load() -> None:
    raise ValueError("cannot be made")


def return_unloadable() -> Unloadable:
    return Unloadable()


class ManyBuffers:
    """Pickles into more buffers than a message can have."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        shared = bytearray(1 << 14)
        return list, (), None, iter([pickle.PickleBuffer(shared) for _ in range(70_000)])


class Thing:
    pass


class Lazy:
    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not loaded")


def return_dead_proxy() -> Any:
    return weakref.proxy(Thing())


def return_future() -> Future[int]:
    return Future()


@pytest.mark.parametrize(
    ("args", "kwargs", "name"),
    [
        ((1, threading.Lock()), {}, "argument 2 ('right')"),
        ((1,), {"right": threading.Lock()}, "argument 'right'"),
        (([1, {"k": threading.Lock()}],), {}, "left[1]['k']"),
    ],
    ids=["position", "keyword", "nested"],
)
def test_an_argument_that_cannot_be_pickled_is_refused_where_it_is_sent_and_named(
    group: LocalGroup, args: Any, kwargs: Any, name: str
) -> None:
    for send in (
        lambda: start(group.agents[0], 1, add, *args, **kwargs),
        lambda: group.remote(0, 1, add, args, kwargs),
    ):
        with pytest.raises(SerializationError) as caught:
            send()
        assert isinstance(caught.value, TypeError)
        for part in (name, "`add`", "worker1", "_thread.lock"):
            assert part in str(caught.value)
    assert group.agents[0].get_metrics()["calls_made"] == 0
    assert group.references(0).held == ()


def test_a_function_that_cannot_be_pickled_is_refused_where_it_is_sent(group: LocalGroup) -> None:
    lock = threading.Lock()
    with pytest.raises(SerializationError, match=r"the function `<lambda>`.*'lock'"):
        start(group.agents[0], 1, lambda: lock)


@pytest.mark.parametrize("function", [return_lock, return_lock_async, return_lock_later])
def test_a_result_that_cannot_be_pickled_names_the_function_and_the_type(
    group: LocalGroup, function: Callable[[], Any]
) -> None:
    with pytest.raises(SerializationError) as caught:
        call(group.agents[0], 1, function)
    for part in (f"`{function.__name__}`", "worker1", "_thread.lock"):
        assert part in str(caught.value)
    assert call(group.agents[0], 1, echo, "alive") == "alive"


def test_arguments_that_cannot_be_unpickled_fail_the_call_and_the_function_does_not_run(group: LocalGroup) -> None:
    with pytest.raises(SerializationError, match=r"cannot be rebuilt on worker 'worker1' \(ValueError"):
        call(group.agents[0], 1, run, Unloadable())
    with pytest.raises(SerializationError, match="on worker 'worker1'"):
        call(group.agents[0], 1, lambda _: run(1), Unloadable())
    assert runs == []
    assert call(group.agents[0], 1, echo, "alive") == "alive"


def test_a_result_that_cannot_be_unpickled_fails_the_call_at_the_caller(group: LocalGroup) -> None:
    with pytest.raises(SerializationError, match="the result of `return_unloadable` from worker 'worker1' cannot be"):
        call(group.agents[0], 1, return_unloadable)
    future = start(group.agents[0], 1, return_unloadable)
    assert isinstance(future.exception(SOON), SerializationError)
    assert call(group.agents[0], 1, echo, "alive") == "alive"


def test_too_many_buffers_are_refused_and_harm_no_other_call(group: LocalGroup) -> None:
    gate = new_gate("other")
    other = start(group.agents[0], 1, wait_at, "other", "unharmed")
    assert arrived["other"].wait(SOON)
    with pytest.raises(SerializationError, match=r"argument 1.*of worker1's `len`.*65535"):
        start(group.agents[0], 1, len, ManyBuffers())
    with pytest.raises(SerializationError, match=r"the result of worker1's `ManyBuffers`.*65535"):
        call(group.agents[0], 1, ManyBuffers)
    gate.set()
    assert other.wait() == "unharmed"


def test_a_future_cannot_be_sent(group: LocalGroup) -> None:
    with pytest.raises(SerializationError):
        start(group.agents[0], 1, echo, Future())
    with pytest.raises(SerializationError, match="async_execution"):
        call(group.agents[0], 1, return_future)


@pytest.mark.parametrize("function", [return_dead_proxy, Lazy])
def test_a_result_whose_class_cannot_be_read_fails_the_call_only(
    group: LocalGroup, function: Callable[[], Any]
) -> None:
    with pytest.raises(SerializationError):
        call(group.agents[0], 1, function)
    assert call(group.agents[0], 1, echo, 1) == 1
