"""`farcall.pytorch.api.shutdown`: the end, in good order and in bad."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from time import monotonic
from typing import Any

import pytest

import farcall.pytorch as rpc
from eventually import eventually
from farcall.errors import NotInitializedError, UsageError, WorkerLostError
from farcall.pytorch import api
from gates import wait_at
from torch_stage import DIED, FORK, SOON, die, echo, fail, make_gate, one_worker, open_gate, run_group

ME = "alone"
held: list[Any] = []


@pytest.fixture(autouse=True)
def _glance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_CHECK_INTERVAL_S", 0.05)


@pytest.fixture
def me(tmp_path: Path) -> Iterator[Path]:
    with one_worker(tmp_path):
        yield tmp_path


def hold(rref: Any) -> None:
    held.append(rref)


def value_of(rref: Any) -> Any:
    return rref.to_here()


def shut_down(graceful: bool) -> None:
    rpc.shutdown(graceful=graceful)


def assert_is_down() -> None:
    assert not api._is_current_rpc_agent_set()
    with pytest.raises(NotInitializedError):
        rpc.rpc_sync(ME, echo)


@pytest.mark.parametrize("graceful", [True, False])
def test_the_end_and_another_beginning(me: Path, graceful: bool) -> None:
    rpc.shutdown(graceful=graceful)
    assert_is_down()
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        rpc.shutdown(graceful=graceful)
    (me / "again").mkdir()
    with one_worker(me / "again", "again"):
        assert rpc.rpc_sync("again", echo, (1,)) == 1


def test_a_graceful_end_waits_for_calls_that_are_under_way(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank == 1:
            make_gate("late")
        api._barrier(["worker0", "worker1", "worker2"])
        future = rpc.rpc_async("worker1", wait_at, ("late", "through")) if rank == 0 else None
        if rank == 2:
            rpc.rpc_async("worker1", open_gate, ("late",))
        rpc.shutdown()
        assert_is_down()
        return future.value() if future else None

    assert run_group(tmp_path, body, 3) == ["through", None, None]


def test_a_worker_may_end_at_once_and_others_hear_of_it(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank:
            rpc.shutdown(graceful=False)
            return None
        with pytest.raises(RuntimeError):
            rpc.shutdown()
        assert_is_down()
        return "heard"

    assert run_group(tmp_path, body) == ["heard", None]


def test_a_dead_worker_does_not_keep_others_from_their_end(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank == 1:
            die()
        with pytest.raises(WorkerLostError, match="worker1"):
            rpc.shutdown()
        assert_is_down()
        return rank

    assert run_group(tmp_path, body, 3) == [0, DIED, 2]


def test_what_others_have_called_ends_though_a_worker_dies_and_only_that_one_is_blamed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(rank: int) -> Any:
        if rank == 1:
            make_gate("late")
        api._barrier(["worker0", "worker1", "worker2"])
        if rank == 2:
            die()
        future = rpc.rpc_async("worker1", wait_at, ("late", "through")) if rank == 0 else None
        if rank == 1:
            Timer(2.0, lambda: open_gate("late")).start()  # by then it has heard of the loss
        with pytest.raises(WorkerLostError) as lost:
            rpc.shutdown()
        assert "'worker2'" in str(lost.value)
        assert "worker1" not in str(lost.value)
        assert "Shutdown Proceed" not in caplog.text
        return future.value() if future else None

    assert run_group(tmp_path, body, 3) == ["through", None, DIED]


def test_the_time_limit_of_a_graceful_end(tmp_path: Path) -> None:
    over = FORK.Event()

    def body(rank: int) -> Any:
        if rank:
            assert over.wait(SOON)
            rpc.shutdown(graceful=False)
            return None
        began = monotonic()
        with pytest.raises(RuntimeError, match=r"worker1.*timed out"):
            rpc.shutdown(timeout=0.2)
        assert monotonic() - began < SOON
        assert_is_down()
        over.set()
        return "in time"

    assert run_group(tmp_path, body) == ["in time", None]


@pytest.mark.usefixtures("me")
@pytest.mark.parametrize("step", ["_wait_all_workers", "_delete_all_user_and_unforked_owner_rrefs"])
def test_what_fails_on_the_way_is_raised_and_all_is_freed(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setattr(api, step, lambda *_: fail(step))
    with pytest.raises(ValueError, match=step):
        rpc.shutdown()
    assert_is_down()


@pytest.mark.usefixtures("me")
@pytest.mark.parametrize("step", ["_destroy_rref_context", "_cleanup_python_rpc_handler"])
def test_what_fails_at_the_very_end_is_raised_and_all_is_freed(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setattr(api, step, lambda *_: fail(step))
    with pytest.raises(ValueError, match=step):
        rpc.shutdown()
    assert_is_down()


@pytest.mark.usefixtures("me")
def test_an_interrupt_while_waiting_frees_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "_wait_all_workers", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rpc.shutdown()
    assert_is_down()


@pytest.mark.usefixtures("me")
def test_a_function_that_runs_for_others_cannot_wait_for_its_own_end() -> None:
    with pytest.raises(UsageError, match="graceful=False"):
        rpc.rpc_sync(ME, shut_down, (True,))
    assert rpc.rpc_sync(ME, echo, (1,)) == 1


@pytest.mark.usefixtures("me")
def test_a_function_that_runs_for_others_may_end_the_worker() -> None:
    with pytest.raises(RuntimeError):
        rpc.rpc_sync(ME, shut_down, (False,))
    eventually(lambda: not api._is_current_rpc_agent_set())  # it was cut off before that


def test_references_that_others_hold_are_a_leak_if_one_wants_to_know(tmp_path: Path) -> None:
    leaked = FORK.Event()

    def body(rank: int) -> Any:
        if rank:
            assert leaked.wait(SOON)
            rpc.shutdown(graceful=False)
            return None
        rref = rpc.RRef([1])
        rpc.rpc_sync("worker1", hold, (rref,))
        api._ignore_rref_leak = False
        with pytest.raises(RuntimeError, match="Leaking RRef: worker 'worker0'"):
            rpc.shutdown(graceful=False)
        assert_is_down()
        leaked.set()
        return "leaked"

    assert run_group(tmp_path, body) == ["leaked", None]


def test_references_are_no_leak_by_default_and_others_are_let_go_of_at_a_graceful_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def body(rank: int) -> Any:
        api._ignore_rref_leak = False
        rref = rpc.remote(f"worker{1 - rank}", echo, ([rank],))
        rpc.rpc_sync(f"worker{1 - rank}", hold, (rref,))
        api._barrier(["worker0", "worker1"])
        rpc.shutdown()
        assert_is_down()
        with pytest.raises(RuntimeError):
            rref.to_here()
        assert held[0].local_value() == [1 - rank]  # what is here stays as long as somebody has it
        return True

    caplog.set_level(logging.CRITICAL, "farcall")
    assert run_group(tmp_path, body) == [True, True]


def test_references_after_the_end_and_in_the_next_group(me: Path) -> None:
    mine, made = rpc.RRef([1]), rpc.remote(ME, echo, ([2],))
    assert made.to_here() == [2]
    rpc.shutdown()
    for rref, value in ((mine, [1]), (made, [2])):
        assert rref.local_value() == rref.to_here() == value  # as long as somebody has it
        assert str(rref).startswith("OwnerRRef(")
        for use in (rref.confirmed_by_owner, rref.rpc_sync().copy, rref.rpc_async().copy, rref.remote().copy):
            with pytest.raises(NotInitializedError):
                use()
    (me / "next").mkdir()
    with one_worker(me / "next"):
        new = rpc.RRef([3])  # has the numbers that the old one had
        with pytest.raises(RuntimeError, match="before it was shut down"):
            rpc.rpc_sync(ME, value_of, (mine,))
        for use in (mine.rpc_sync().copy, mine.rpc_async().copy, mine.remote().copy):
            with pytest.raises(NotInitializedError, match="has shut down"):
                use()
        assert rpc.rpc_sync(ME, value_of, (new,)) == [3]
