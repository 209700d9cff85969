"""`farcall.pytorch.futures`: calls whose results are torch's futures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import farcall.pytorch as rpc
from farcall.errors import RpcTimeoutError, SerializationError
from farcall.futures import Future
from farcall.pytorch.futures import (
    RpcFuture,
    collect_all,
    completed_future,
    copy_outcome,
    failed_future,
    to_farcall_future,
    wait_all,
)
from gates import gates, new_gate, wait_at
from torch_stage import SOON, add, echo, fail, one_worker

ME = "alone"


@pytest.fixture(autouse=True)
def _me(tmp_path: Path) -> Iterator[None]:
    with one_worker(tmp_path):
        yield
        for gate in gates.values():
            gate.set()


def waiting(name: str, result: Any = None) -> Any:
    """The future of a call that waits for the gate of that name."""
    new_gate(name)
    return rpc.rpc_async(ME, wait_at, (name, result))


def leave() -> None:
    raise SystemExit(3)


class Peculiar(Exception):
    """Made of more than a message."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(left, right)
        self.right = right


def fail_peculiarly() -> None:
    raise Peculiar(1, 2)


def unpicklable() -> Any:
    return threading.Lock()


def test_the_future_of_a_call_is_one_of_torch() -> None:
    future = rpc.rpc_async(ME, add, (torch.ones(2), 1))
    assert isinstance(future, torch.futures.Future)
    assert torch.equal(future.wait(), torch.full((2,), 2.0))
    assert future.done()
    assert torch.equal(future.value(), torch.full((2,), 2.0))
    assert torch.equal(future.wait(), torch.full((2,), 2.0))  # again


def test_a_value_that_is_not_there_yet() -> None:
    future = waiting("value", 1)
    assert not future.done()
    with pytest.raises(RuntimeError):
        future.value()
    gates["value"].set()
    assert future.wait() == 1


def test_what_the_function_raised_is_raised_by_wait_and_value() -> None:
    future = rpc.rpc_async(ME, fail, ("far away",))
    with pytest.raises(ValueError, match="far away"):
        future.wait()
    with pytest.raises(ValueError, match="far away"):
        future.value()
    with pytest.raises(ValueError, match="far away"):
        future.wait()
    assert future.done()


@pytest.mark.parametrize(
    ("function", "error"),
    [(fail_peculiarly, RuntimeError), (leave, (RuntimeError, SystemExit)), (unpicklable, SerializationError)],
)
def test_errors_of_all_kinds_reach_whoever_waits(function: Any, error: Any) -> None:
    future = rpc.rpc_async(ME, function)
    with pytest.raises(error):
        future.wait()
    assert future.then(lambda done: "went on").wait() == "went on"


def test_an_exit_far_away_does_not_end_this_program() -> None:
    with pytest.raises(RuntimeError, match="SystemExit"):
        rpc.rpc_async(ME, leave).wait()


def test_then_runs_with_the_future_itself_and_chains() -> None:
    future = rpc.rpc_async(ME, add, (1, 2))
    seen: list[Any] = []

    def next_one(done: Any) -> Any:
        seen.append(done)
        return done.wait() + 1

    assert future.then(next_one).then(lambda done: done.value() * 10).wait() == 40
    assert seen[0].value() == 3
    assert future.then(next_one).wait() == 4  # after it was done


def test_then_runs_though_nobody_waits_for_anything() -> None:
    ran = threading.Event()
    rpc.rpc_async(ME, echo, (1,)).then(lambda done: ran.set())
    assert ran.wait(SOON)


def test_a_then_of_a_failure_sees_it_and_may_recover() -> None:
    def recover(done: Any) -> str:
        try:
            done.value()
        except ValueError as error:
            return f"recovered from {error}"
        return "nothing to recover from"

    assert rpc.rpc_async(ME, fail, ("it",)).then(recover).wait() == "recovered from it"


def test_a_then_that_raises_fails_what_follows_and_nothing_else() -> None:
    future = waiting("raises", 1)
    derived = future.then(lambda done: fail("in the callback"))
    gates["raises"].set()
    with pytest.raises(RuntimeError, match="in the callback"):
        derived.wait()
    assert future.wait() == 1
    assert rpc.rpc_sync(ME, echo, (2,)) == 2  # the thread that ran it goes on


def test_callbacks_all_run_though_one_raises() -> None:
    future = waiting("callbacks", 1)
    ran: list[int] = []
    everything = threading.Event()
    future.add_done_callback(lambda done: ran.append(done.value()))
    future.add_done_callback(lambda done: fail("in a callback"))
    future.add_done_callback(lambda done: everything.set())
    gates["callbacks"].set()
    assert everything.wait(SOON)
    assert ran == [1]
    future.add_done_callback(lambda done: ran.append(2))  # at once, as it is done
    assert ran == [1, 2]


def test_a_callback_may_call_on() -> None:
    answer: Any = torch.futures.Future()

    def go_on(done: Any) -> None:
        rpc.rpc_async(ME, add, (done.value(), 1)).then(lambda later: answer.set_result(later.value()))

    rpc.rpc_async(ME, add, (1, 1)).add_done_callback(go_on)
    assert answer.wait() == 3


def test_collect_all_gives_the_futures_when_all_are_done() -> None:
    calls = [waiting(f"collect{number}", number) for number in range(3)]
    plain: Any = torch.futures.Future()
    together = collect_all([*calls, plain])
    for number in (2, 0, 1):
        assert not together.done()
        gates[f"collect{number}"].set()
    plain.set_result("plain")
    assert [future.wait() for future in together.wait()] == [0, 1, 2, "plain"]


def test_collect_all_of_nothing() -> None:
    assert collect_all([]).wait() == []
    assert wait_all([]) == []


def test_collect_all_of_failures_is_done_and_each_tells_its_own() -> None:
    failing = rpc.rpc_async(ME, fail, ("one",))
    fine = rpc.rpc_async(ME, echo, (2,))
    futures = collect_all([failing, fine])
    with pytest.raises(ValueError, match="one"):
        futures.wait()[0].wait()
    assert fine.wait() == 2


def test_wait_all_gives_results_in_order() -> None:
    assert wait_all([rpc.rpc_async(ME, echo, (number,)) for number in range(5)]) == list(range(5))


def test_wait_all_raises_as_soon_as_one_call_has_failed() -> None:
    first = waiting("early", 1)  # never through while we wait
    failing = rpc.rpc_async(ME, fail, ("early",))
    with pytest.raises(ValueError, match="early"):
        wait_all([first, failing])
    assert not first.done()


def test_wait_all_raises_as_soon_as_a_derived_future_has_failed() -> None:
    first = waiting("derived", 1)
    derived = rpc.rpc_async(ME, echo).then(lambda done: fail("derived early"))
    with pytest.raises(RuntimeError, match="derived early"):
        wait_all([first, derived])
    assert not first.done()


def test_wait_all_raises_a_failure_though_a_future_of_torch_is_pending() -> None:
    with pytest.raises(ValueError, match="early"):
        wait_all([torch.futures.Future(), rpc.rpc_async(ME, fail, ("early",))])


def test_a_future_that_only_torch_waits_for() -> None:
    future = rpc.rpc_async(ME, echo, (1,))
    assert torch._C.Future.wait(future) == 1  # nothing of ours is called


def test_many_threads_wait_for_one_future() -> None:
    future = waiting("threads", 5)
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(future.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    gates["threads"].set()
    for thread in threads:
        thread.join(SOON)
    assert results == [5] * 4


def test_a_timeout_is_a_runtime_error_with_torchs_words() -> None:
    new_gate("slow")
    future = rpc.rpc_async(ME, wait_at, ("slow",), timeout=0.05)
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout") as raised:
        future.wait()
    assert isinstance(raised.value, RpcTimeoutError)
    gates["slow"].set()


def test_futures_cannot_be_sent() -> None:
    with pytest.raises((RuntimeError, TypeError)):
        rpc.rpc_sync(ME, echo, (rpc.rpc_async(ME, echo),))
    with pytest.raises((RuntimeError, TypeError)):
        rpc.rpc_sync(ME, echo, (torch.futures.Future(),))


def test_adopted_takes_both_kinds() -> None:
    own: Future[int] = Future()
    assert to_farcall_future(own) is own
    assert to_farcall_future(3) is None
    plain: Any = torch.futures.Future()
    follower = to_farcall_future(plain)
    assert follower is not None
    assert not follower.done()
    plain.set_result(1)
    assert follower.wait() == 1
    failed: Any = torch.futures.Future()
    failed.set_exception(KeyError("gone"))
    follower = to_farcall_future(failed)
    assert follower is not None
    with pytest.raises(KeyError, match="gone"):
        follower.wait()


def test_adopting_a_call_gives_the_call_itself_until_it_is_settled() -> None:
    call: Future[int] = Future()
    future = RpcFuture(call)
    assert to_farcall_future(future) is call
    call.set_result(1)
    follower = to_farcall_future(future)
    assert follower is not call
    assert follower is not None
    assert follower.value() == 1


def test_adopting_a_call_that_is_settled_just_now() -> None:
    class JustNow(RpcFuture):
        """Settled between two looks."""

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name == "call" and value is not None:
                value.set_result(1)
            return value

    call: Future[int] = Future()
    future = JustNow(call)
    follower = to_farcall_future(future)
    assert follower is not None
    assert follower.value() == 1


def test_settling_by_hand() -> None:
    assert completed_future(3).value() == 3
    failed = failed_future(ValueError("before"))
    with pytest.raises(ValueError, match="before"):
        failed.value()
    exit_: Future[None] = Future()
    exit_.set_exception(SystemExit(1))
    target: Any = torch.futures.Future()
    copy_outcome(target, exit_)
    with pytest.raises(RuntimeError, match="SystemExit"):
        target.wait()


def test_a_future_says_whether_it_failed() -> None:
    fine, failing = rpc.rpc_async(ME, echo), rpc.rpc_async(ME, fail)
    fine.wait()
    with pytest.raises(ValueError, match="no"):
        failing.wait()
    assert (fine.failed, failing.failed) == (False, True)
    assert fine.call is None
    fine.hasten()  # nothing to hasten any more


def test_nothing_warns_of_a_failure_that_nobody_looks_at() -> None:
    future = rpc.rpc_async(ME, fail)
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    assert done.wait(SOON)
    del future  # warnings are errors here
