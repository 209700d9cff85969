"""`farcall.pytorch.api`: `_all_gather`, `_barrier`, `_wait_all_workers`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import farcall.pytorch as rpc
from farcall.errors import RpcTimeoutError, UsageError, WorkerLostError
from farcall.pytorch import api
from torch_stage import DIED, FORK, SOON, die, one_worker, run_group

EVERYBODY = {"worker0": 0, "worker1": 1, "worker2": 2}


@pytest.fixture(autouse=True)
def _glance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_CHECK_INTERVAL_S", 0.05)


@pytest.fixture
def me(tmp_path: Path) -> Iterator[None]:
    with one_worker(tmp_path):
        yield


def left_over() -> list[Any]:
    """What is kept of those that this worker has been through; others may have come early to the next."""
    states, numbers = api._all_gather_sequence_id_to_states, api._all_gather_sequence_id
    return [each for each in states if int(each.rpartition("#")[2]) < numbers.get(each.rpartition("#")[0], 0)]


def test_everybody_gets_what_everybody_gave(tmp_path: Path) -> None:
    def body(rank: int) -> list[Any]:
        results: list[Any] = [api._all_gather(rank) for _ in range(3)]
        results.append(api._all_gather(rank * 10, timeout=SOON))
        api._wait_all_workers()
        api._wait_all_workers(SOON)
        results.append(left_over())
        return results

    tens = {name: value * 10 for name, value in EVERYBODY.items()}
    assert run_group(tmp_path, body, 3) == [[EVERYBODY] * 3 + [tens, []]] * 3


@pytest.mark.usefixtures("me")
def test_wrong_timeouts() -> None:
    for name, values in (("_all_gather", (1, None)), ("_wait_all_workers", ())):
        function = getattr(api, name)
        for timeout in (-2, float("nan"), "1"):
            with pytest.raises(UsageError, match="a timeout must be"):
                function(*values, timeout)
        function(*values, SOON)


def test_some_of_the_workers(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        results = []
        if rank > 0:
            results = [api._all_gather(rank, {"worker1", "worker2"}) for _ in range(2)]
            api._barrier(["worker2", "worker1"])
        if rank < 2:
            results.append(api._all_gather(rank, ["worker0", "worker1"]))
        api._barrier(list(EVERYBODY))
        return results, left_over()

    later = {"worker1": 1, "worker2": 2}
    early = {"worker0": 0, "worker1": 1}
    assert run_group(tmp_path, body, 3) == [([early], []), ([later, later, early], []), ([later, later], [])]


def test_several_threads_gather_at_once(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        results: list[Any] = []
        threads = [threading.Thread(target=lambda: results.append(api._all_gather(rank))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results, left_over()

    pair = {"worker0": 0, "worker1": 1}
    assert run_group(tmp_path, body) == [([pair] * 4, [])] * 2


def test_who_does_not_come_in_time_is_named_and_hears_of_it(tmp_path: Path) -> None:
    given_up = FORK.Barrier(3)

    def body(rank: int) -> Any:
        if rank == 2:
            given_up.wait()
        with pytest.raises(RuntimeError) as raised:
            api._all_gather(rank, timeout=0.1)
        if rank < 2:
            given_up.wait()
        given_up.wait()
        together = api._all_gather(rank)  # the next one is not disturbed
        return type(raised.value), str(raised.value), together, left_over()

    for rank, (error, words, together, left) in enumerate(run_group(tmp_path, body, 3)):
        assert together == EVERYBODY
        assert left == []
        if rank == 0:
            assert error is RpcTimeoutError
            assert "Followers ['worker2'] timed out in _all_gather after 0.10 seconds" in words
        elif rank == 1:
            assert error is RpcTimeoutError
        else:
            assert "worker2 came too late" in words


def test_a_follower_that_has_given_up_keeps_nothing(tmp_path: Path) -> None:
    given_up = FORK.Barrier(2)

    def body(rank: int) -> Any:
        if rank:
            with pytest.raises(RpcTimeoutError, match="timed out in _all_gather"):
                api._all_gather(rank, timeout=0.1)
            given_up.wait()
            given_up.wait()
        else:
            given_up.wait()
            assert api._all_gather(rank) == {"worker0": 0, "worker1": 1}
            given_up.wait()
        return left_over()

    assert run_group(tmp_path, body) == [[], []]


def test_a_worker_that_dies_while_others_wait(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank == 1:
            die()
        with pytest.raises(WorkerLostError, match="worker1"):
            api._all_gather(rank)
        with pytest.raises(RuntimeError):
            api._wait_all_workers()
        rpc.shutdown(graceful=False)
        return left_over()

    assert run_group(tmp_path, body, 3) == [[], DIED, []]


def test_a_leader_that_dies(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank == 0:
            die()
        with pytest.raises(WorkerLostError, match="worker0"):
            api._all_gather(rank)
        rpc.shutdown(graceful=False)
        return left_over()

    assert run_group(tmp_path, body, 3) == [DIED, [], []]


@pytest.mark.usefixtures("me")
def test_a_group_of_one() -> None:
    assert api._all_gather("it") == {"alone": "it"}
    api._barrier(["alone"])
    api._wait_all_workers()
    assert left_over() == []


@pytest.mark.usefixtures("me")
def test_a_worker_that_is_none_of_those() -> None:
    with pytest.raises(UsageError, match="alone is not expected by leader 'other'"):
        api._all_gather(1, {"other"})
    assert left_over() == []


@pytest.mark.usefixtures("me")
def test_names_of_nobody() -> None:
    with pytest.raises(WorkerLostError, match="other"):
        api._all_gather(1, {"alone", "other"})  # we lead
    with pytest.raises(RuntimeError, match="a_leader"):
        api._all_gather(1, {"a_leader", "alone"})
    assert left_over() == []


@pytest.mark.usefixtures("me")
def test_a_barrier_only_logs_what_goes_wrong(caplog: pytest.LogCaptureFixture) -> None:
    api._barrier(["alone", "other"])
    assert "Failed to complete barrier" in caplog.text
    with pytest.raises(RpcTimeoutError, match="other"):
        api._all_gather(None, {"alone", "other"}, timeout=0.01)


@pytest.mark.usefixtures("me")
def test_a_follower_that_comes_twice_is_refused() -> None:
    sequence_id = "alone,other#0"
    api._gather_to_leader(sequence_id, "other", 1, {"alone", "other"})
    with pytest.raises(AssertionError, match="twice"):
        api._gather_to_leader(sequence_id, "other", 1, {"alone", "other"})
    with pytest.raises(RuntimeError, match=r"Followers \['other'\] timed out.*there is no worker 'other'"):
        api._all_gather(2, {"alone", "other"})
    with pytest.raises(RuntimeError, match="too late"):
        api._gather_to_leader(sequence_id, "other", 1, {"alone", "other"})
    assert left_over() == []


def test_nothing_of_a_group_is_left_for_the_next(tmp_path: Path) -> None:
    with one_worker(tmp_path, "first"):
        api._gather_to_leader("first,other#0", "other", 1, {"first", "other"})
    (tmp_path / "second").mkdir()
    with one_worker(tmp_path / "second", "first"):
        assert not api._all_gather_sequence_id_to_states
        assert api._all_gather(1) == {"first": 1}
