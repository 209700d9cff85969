"""The verbs `call`, `submit` and `keep` on workers and on references."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from typing import Any, Protocol

import pytest

import farcall
from farcall import (
    Future,
    NotAllowedError,
    RpcTimeoutError,
    RRef,
    SerializationError,
    UnknownWorkerError,
    UsageError,
    WorkerLostError,
)
from farcall.testing import LocalGroup
from gates import SOON, new_gate, wait_at
from group_stage import NewGroup


def my_name() -> str:
    return farcall.get_worker_info().name


def text_of(*args: Any, **kwargs: Any) -> str:
    return f"{args} {kwargs} on {my_name()}"


async def doubled(value: int) -> int:
    await asyncio.sleep(0)
    return 2 * value


@farcall.functions.async_execution
def asked(name: str) -> Future[str]:
    return farcall.worker(name).submit(my_name)


class SupportsPut(Protocol):
    def put(self, item: str, /) -> int: ...


class Shelf:
    def __init__(self, *items: str) -> None:
        self.items = list(items)

    def put(self, item: str) -> int:
        self.items.append(item)
        return len(self.items)

    async def put_later(self, item: str) -> int:
        return self.put(item)

    @farcall.functions.async_execution
    def ask(self, name: str) -> Future[str]:
        return farcall.worker(name).submit(my_name)

    @staticmethod
    def count(shelf: Shelf, more: int) -> int:
        return len(shelf.items) + more

    def __hidden(self) -> str:
        return "hidden"

    hidden = __hidden

    def __len__(self) -> int:
        return len(self.items)


class LockedShelf(Shelf):
    def put(self, item: str) -> int:
        raise PermissionError(item)


def items_of(shelf: Shelf, start: str = "") -> list[str]:
    return [item for item in shelf.items if item.startswith(start)]


def test_call_submit_and_keep_on_a_worker(group: LocalGroup) -> None:
    worker = group.worker("worker1")
    assert worker.call(text_of, 1, timeout=2) == "(1,) {'timeout': 2} on worker1"
    assert worker.call(text_of) == "() {} on worker1"
    assert worker.submit(text_of, 1, to=2).result(SOON) == "(1,) {'to': 2} on worker1"
    assert worker.call(doubled, 4) == worker.submit(doubled, 4).wait() == worker.keep(doubled, 4).to_here() == 8
    assert worker.call(asked, "worker2") == worker.keep(asked, "worker2").to_here() == "worker2"
    shelf = worker.keep(Shelf, "tea")
    assert shelf.owner_name() == "worker1"
    with pytest.raises(ZeroDivisionError):
        worker.call(divmod, 1, 0)
    with pytest.raises(ZeroDivisionError):
        worker.submit(divmod, 1, 0).result(SOON)


def test_handles(group: LocalGroup) -> None:
    info = group.agents[1].info
    for to in ("worker1", 1, info, group.worker("worker1"), farcall.worker("worker1")):
        worker = group.worker(to)
        assert (worker.name, worker.info(), worker.call(my_name)) == ("worker1", info, "worker1")
        assert farcall.rpc_sync(worker, my_name) == farcall.remote(worker, my_name).to_here() == "worker1"
        assert farcall.get_worker_info(worker) == info
    assert farcall.worker().name == group.worker().name == "worker0"
    assert farcall.worker("worker1") == farcall.worker("worker1") != farcall.worker("worker2")
    assert len({farcall.worker("worker1"), farcall.worker("worker1"), farcall.worker(1)}) == 2
    assert repr(farcall.worker("worker1")) == "<Worker 'worker1'>"


def ask_handle(worker: farcall.Worker) -> tuple[str, str]:
    return my_name(), worker.call(my_name)


def test_a_handle_that_is_sent_acts_for_the_worker_that_gets_it(group: LocalGroup) -> None:
    handle = group.worker("worker2").options(timeout=None)
    assert group.worker("worker1").call(ask_handle, handle) == ("worker1", "worker2")
    assert pickle.loads(pickle.dumps(farcall.worker("worker1"))) == farcall.worker("worker1")


@pytest.mark.parametrize("to", [True, 1.0, None, b"worker1"])
def test_what_is_no_worker(group: LocalGroup, to: Any) -> None:
    calls: list[Any] = [farcall.rpc_sync, farcall.rpc_async, farcall.remote]
    for call in calls:
        with pytest.raises(UsageError, match="`to` must be a worker's name, rank or WorkerInfo"):
            call(to, my_name)
    if to is not None:
        with pytest.raises(UsageError, match="`to` must be a worker's name, rank or WorkerInfo"):
            farcall.worker(to)
        with pytest.raises(UsageError, match="`to` must be a worker's name, rank or WorkerInfo"):
            farcall.get_worker_info(to)


def test_nothing_is_looked_up_before_the_first_use(group: LocalGroup) -> None:
    nobody = group.worker("nobody")
    assert nobody.name == "nobody"
    uses: list[Callable[[], Any]] = [
        nobody.info,
        lambda: nobody.call(my_name),
        lambda: nobody.submit(my_name),
        lambda: nobody.keep(list),
    ]
    for use in uses:
        with pytest.raises(UnknownWorkerError, match="there is no worker 'nobody' in this group"):
            use()


def test_a_worker_that_is_gone_fails_the_future_not_the_submit(make_group: NewGroup) -> None:
    group = make_group(2, is_open=True)
    worker = group.worker("worker1").wait_joined(SOON)
    assert worker.call(my_name) == "worker1"
    shelf = worker.keep(Shelf)
    assert shelf.call(len) == 0
    group.leave("worker1")
    with pytest.raises((WorkerLostError, UnknownWorkerError)):
        worker.call(my_name)
    with pytest.raises(farcall.OwnerLostError):
        shelf.submit(len).result(SOON)


def test_options(group: LocalGroup) -> None:
    worker = group.worker("worker1")
    shelf = worker.keep(Shelf)
    stuck = new_gate("stuck")
    for short in (worker.options(timeout=0.05), worker.options(timeout=None).options(timeout=0.05)):
        with pytest.raises(RpcTimeoutError, match=r"did not answer `wait_at` within 0\.05 s"):
            short.call(wait_at, "stuck")
        with pytest.raises(RpcTimeoutError):
            short.submit(wait_at, "stuck").result(SOON)
    with pytest.raises(RpcTimeoutError, match=r"did not answer `<lambda>` within 0\.05 s"):
        shelf.options(timeout=0.05).call(lambda _: wait_at("stuck"))
    stuck.set()
    group.agents[0].rpc_timeout = 0.05
    assert worker.options(timeout=None).call(my_name) == "worker1"
    assert shelf.options(timeout=None).call(Shelf.put, "tea") == 1
    assert group.worker("worker2").call(length_of, shelf.options(timeout=3)) == 1


def length_of(shelf: farcall.Target[Shelf]) -> int:
    return shelf.call(len)


def test_options_that_are_refused(group: LocalGroup) -> None:
    target: Any
    for target in (group.worker("worker1"), group.worker("worker1").keep(Shelf)):
        with pytest.raises(RpcTimeoutError, match=r"a timeout of 0 s is over .* for no limit, give timeout=None"):
            target.options(timeout=0)
        for timeout in (-1, "3", True, float("nan")):
            with pytest.raises(UsageError, match="the timeout of a call must be more than 0 seconds"):
                target.options(timeout=timeout)
        with pytest.raises(UsageError, match="calls have no option 'timout'; there is timeout"):
            target.options(timout=3)


def test_methods_and_functions_of_a_value(group: LocalGroup) -> None:
    shelf = group.worker("worker1").keep(Shelf, "tea")
    assert shelf.call(Shelf.put, "salt") == 2
    assert shelf.call("put", "sugar") == 3
    assert shelf.call(Shelf.put_later, item="soap") == shelf.call(len) == shelf.call(Shelf.__len__) == 4
    assert shelf.call(Shelf.ask, "worker2") == "worker2"
    assert shelf.call(items_of, start="s") == ["salt", "sugar", "soap"]
    assert shelf.submit(items_of, "t").result(SOON) == ["tea"]
    assert shelf.call(lambda value, n: value.items[:n], 1) == ["tea"]
    assert shelf.call(Shelf.count, 10) == 14
    assert shelf.call(Shelf.hidden) == "hidden"
    kept = shelf.keep(items_of, "t")
    assert (kept.owner_name(), kept.to_here()) == ("worker1", ["tea"])
    assert shelf.submit(Shelf.put_later, "x").wait() == 5
    numbers = group.worker("worker2").keep(list[int], (3, 1, 2))
    numbers.call(list.append, 4)
    assert numbers.call(sorted, reverse=True) == [4, 3, 2, 1]
    assert RRef([1, 2]).call(len) == 2


def test_a_function_of_a_class_body_is_looked_up_on_the_value(group: LocalGroup) -> None:
    shelf: RRef[Shelf] = group.worker("worker1").keep(LockedShelf)
    with pytest.raises(PermissionError):
        shelf.call(Shelf.put, "tea")
    wide: RRef[SupportsPut] = group.worker("worker1").keep(Shelf)
    assert wide.call(SupportsPut.put, "tea") == 1


def test_a_value_that_is_not_there_yet_is_waited_for(group: LocalGroup) -> None:
    slow = new_gate("slow")
    value = group.worker("worker1").keep(wait_at, "slow", "tea")
    future = value.submit(len)
    assert not future.done()
    slow.set()
    assert future.result(SOON) == 3


def test_what_cannot_be_called_on_a_value(group: LocalGroup) -> None:
    shelf: Any = group.worker("worker1").keep(Shelf)
    with pytest.raises(UsageError, match="'no method' is not the name of a method"):
        shelf.call("no method")
    with pytest.raises(UsageError, match="3 cannot be called"):
        shelf.call(3)
    with pytest.raises(AttributeError, match="nothing"):
        shelf.call("nothing")
    with pytest.raises(SerializationError):
        shelf.call(print, threading.Lock())


def test_functions_of_a_value_where_calls_are_restricted(make_group: NewGroup) -> None:
    group = make_group(2, allow=[Shelf, items_of])
    shelf: Any = group.worker("worker1").keep(Shelf, "tea")
    assert shelf.call(Shelf.put, "salt") == 2
    assert shelf.call(items_of) == ["tea", "salt"]
    with pytest.raises(NotAllowedError, match=r"calls of `.*text_of` are not allowed"):
        shelf.call(text_of)
    with pytest.raises(NotAllowedError, match="sent by value"):
        shelf.call(lambda value: value)


def test_wait_joined(make_group: NewGroup, background: Any) -> None:
    group = make_group(1, is_open=True)
    late = group.worker("late")
    with pytest.raises(RpcTimeoutError, match=r"worker 'late' did not join within 0\.01 s"):
        late.wait_joined(0.01)
    waiting = background.submit(late.wait_joined, SOON)
    group.join("late")
    assert waiting.result(SOON) is late
    assert late.wait_joined(0) is late
    assert late.call(my_name) == "late"
    with pytest.raises(UsageError, match="the timeout must be 0 or more seconds"):
        late.wait_joined(-1)


def test_nobody_joins_a_fixed_group(group: LocalGroup) -> None:
    assert group.worker("worker2").wait_joined().name == "worker2"
    assert group.worker(group.agents[1].info).wait_joined(1).name == group.worker(1).wait_joined().name == "worker1"
    with pytest.raises(UnknownWorkerError, match="worker 'late' will not join: the group is fixed, and has 'worker0'"):
        group.worker("late").wait_joined()


def test_waiting_ends_when_this_worker_leaves(make_group: NewGroup, background: Any) -> None:
    group = make_group(1, is_open=True)
    waiting = background.submit(group.worker("late").wait_joined)
    group.shutdown(graceful=False)
    with pytest.raises(farcall.NotInitializedError, match="has shut down"):
        waiting.result(SOON)
