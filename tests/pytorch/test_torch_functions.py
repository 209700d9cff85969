"""`farcall.pytorch.functions`: functions that return futures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import farcall.pytorch as rpc
from farcall.futures import Future
from farcall.pytorch.functions import async_execution
from torch_stage import add, echo, fail, one_worker

ME = "alone"


@pytest.fixture(autouse=True)
def _me(tmp_path: Path) -> Iterator[None]:
    with one_worker(tmp_path, num_worker_threads=2):
        yield


@async_execution
def add_there(to: str, left: Any, right: Any) -> Any:
    """Adds on another worker."""
    return rpc.rpc_async(to, add, (left, right))


@async_execution
def add_chained(to: str, left: Any, right: Any, more: Any) -> Any:
    return rpc.rpc_async(to, add, (left, right)).then(lambda done: done.wait() + more)


@async_execution
def nested(to: str, depth: int) -> Any:
    return rpc.rpc_async(to, nested, (to, depth - 1)) if depth else rpc.rpc_async(to, echo, ("the bottom",))


@async_execution
def later(result: Any) -> Any:
    future: Any = torch.futures.Future()
    threading.Timer(0.01, lambda: future.set_result(result)).start()
    return future


@async_execution
def already(result: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return future


@async_execution
def ours() -> Any:
    future: Future[int] = Future()
    future.set_result(7)
    return future


@async_execution
def no_future() -> Any:
    return 3


@async_execution
def raises() -> Any:
    raise KeyError("before any future")


@async_execution
def fails_later() -> Any:
    return rpc.rpc_async(ME, fail, ("later",))


@async_execution
def fails_in_callback() -> Any:
    return rpc.rpc_async(ME, echo).then(lambda done: fail("in the callback"))


@async_execution
def fails_by_hand() -> Any:
    future: Any = torch.futures.Future()
    future.set_exception(KeyError("by hand"))
    return future


class Adder:
    """Methods of all kinds."""

    def __init__(self, base: int) -> None:
        self.base = base

    @staticmethod
    @async_execution
    def static(right: int) -> Any:
        return rpc.rpc_async(ME, add, (1, right))

    @classmethod
    @async_execution
    def of_class(cls, right: int) -> Any:
        return rpc.rpc_async(ME, add, (len(cls.__name__), right))

    @async_execution
    def bound(self, right: int) -> Any:
        return rpc.rpc_async(ME, add, (self.base, right))


def test_the_caller_gets_what_the_future_is_settled_with() -> None:
    assert rpc.rpc_sync(ME, add_there, (ME, 1, 2)) == 3
    assert torch.equal(rpc.rpc_async(ME, add_chained, (ME, torch.ones(2), 1, 2)).wait(), torch.full((2,), 4.0))
    assert rpc.remote(ME, add_chained, (ME, 1, 2, 3)).to_here() == 6


@pytest.mark.parametrize(("function", "args", "result"), [(later, (1,), 1), (already, (2,), 2), (ours, (), 7)])
def test_futures_of_all_kinds(function: Any, args: Any, result: Any) -> None:
    assert rpc.rpc_sync(ME, function, args) == result
    assert rpc.remote(ME, function, args).to_here() == result


def test_no_thread_waits_while_futures_are_pending() -> None:
    assert rpc.rpc_sync(ME, nested, (ME, 10)) == "the bottom"  # there are two threads


def test_anything_else_than_a_future_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"must return a torch.futures.Future object.*no_future.*int"):
        rpc.rpc_sync(ME, no_future)
    with pytest.raises(RuntimeError, match=r"must return a torch.futures.Future object"):
        rpc.remote(ME, no_future).to_here()


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (raises, KeyError, "before any future"),
        (fails_later, ValueError, "later"),
        (fails_in_callback, RuntimeError, "in the callback"),
        (fails_by_hand, KeyError, "by hand"),
    ],
)
def test_failures(function: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        rpc.rpc_sync(ME, function)
    with pytest.raises(error, match=words):
        rpc.rpc_async(ME, function).wait()
    with pytest.raises(error, match=words):
        rpc.remote(ME, function).to_here()


def test_methods() -> None:
    assert rpc.rpc_sync(ME, Adder.static, (1,)) == 2
    assert rpc.rpc_sync(ME, Adder.of_class, (1,)) == 6
    adder = rpc.remote(ME, Adder, (10,))
    assert adder.rpc_sync().static(1) == 2
    assert adder.rpc_sync().of_class(1) == 6
    assert adder.rpc_sync().bound(1) == 11
    assert adder.rpc_async().bound(2).wait() == 12
    assert adder.remote().bound(3).to_here() == 13


def test_partials_are_marked_as_what_they_stand_for() -> None:
    assert rpc.rpc_sync(ME, partial(add_there, ME, 1), (2,)) == 3


def test_a_call_in_the_same_process_gives_the_future() -> None:
    assert add_there(ME, 1, 2).wait() == 3
    assert add_there.__name__ == "add_there"
    assert add_there.__doc__ == "Adds on another worker."
    assert add_there._wrapped_async_rpc_function is add_there.__wrapped__  # type: ignore[attr-defined]
