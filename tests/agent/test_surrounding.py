"""What is around the functions that a worker runs for others: where it begins and ends, and when it is not there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import farcall
from eventually import eventually
from farcall.agent.execution import CallJob, RemoteJob
from farcall.agent.surrounding import surround
from farcall.futures import Future
from farcall.options import RpcBackendOptions
from farcall.testing import LocalGroup
from group_stage import call

pytestmark = pytest.mark.timeout(30)

events: list[str] = []
threads: list[tuple[str, int]] = []


class Noted:
    """Says when it is pickled and unpickled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        events.append(f"{self.name} pickled")
        return _arrive, (self.name,)


def _arrive(name: str) -> Noted:
    events.append(f"{name} unpickled")
    return Noted(name)


def run(argument: Noted | None = None) -> Noted:
    events.append("run")
    return Noted("result")


def fail() -> None:
    events.append("run")
    raise ValueError("meant")


@farcall.functions.async_execution
def later(gate: LocalGroup) -> Future[int]:
    events.append("run")
    future: Future[int] = Future()
    threading.Thread(target=lambda: future.set_result(3)).start()
    return future


@contextmanager
def noting() -> Iterator[None]:
    events.append("[")
    threads.append(("[", threading.get_ident()))
    yield
    threads.append(("]", threading.get_ident()))
    events.append("]")


@pytest.fixture
def group() -> Iterator[LocalGroup]:
    events.clear()
    threads.clear()
    with LocalGroup(2) as group:
        surround(group[1]._place, noting)
        yield group


def test_it_is_around_the_function_and_not_around_its_arguments_and_result(group: LocalGroup) -> None:
    call(group[0], 1, run, Noted("argument"))
    assert events == [
        "argument pickled",
        "argument unpickled",
        "[",
        "run",
        "]",
        "result pickled",
        "result unpickled",
    ]


def test_a_function_without_arguments_is_surrounded_too(group: LocalGroup) -> None:
    call(group[0], 1, run)
    assert events[:3] == ["[", "run", "]"]


def test_one_that_raises_is_left_and_its_caller_hears_of_it(group: LocalGroup) -> None:
    with pytest.raises(ValueError, match="meant"):
        call(group[0], 1, fail)
    assert events == ["[", "run", "]"]


def test_remote_calls_and_methods_are_surrounded(group: LocalGroup) -> None:
    made = group.remote(0, "worker1", list, ((3, 1, 2),))
    made.rpc_sync().sort()
    assert events == ["[", "]"] * 2
    assert made.to_here() == [1, 2, 3]


def test_a_worker_s_remote_calls_to_itself_are_surrounded(group: LocalGroup) -> None:
    assert group.remote(1, "worker1", list, ((1,),)).to_here() == [1]
    assert events == ["[", "]"]


def test_it_is_left_by_the_thread_that_entered_it_though_another_has_the_result(group: LocalGroup) -> None:
    for _ in range(20):
        assert call(group[0], 1, later, group) == 3
    eventually(lambda: len(threads) == 40)
    entered = [thread for what, thread in threads if what == "["]
    left = [thread for what, thread in threads if what == "]"]
    assert sorted(entered) == sorted(left)


def test_a_thread_that_has_only_the_result_does_not_leave_it(group: LocalGroup) -> None:
    job = object.__new__(group[1]._place.call_job)
    job._inside, job._thread = noting(), threading.get_ident() + 1  # type: ignore[attr-defined]
    job._inside.__enter__()  # type: ignore[attr-defined]
    job._leave()  # type: ignore[attr-defined]
    assert events == ["["]
    job._thread = threading.get_ident()  # type: ignore[attr-defined]
    job._leave()  # type: ignore[attr-defined]
    assert events == ["[", "]"]


def test_it_can_be_taken_away_and_changed(group: LocalGroup) -> None:
    place = group[1]._place
    surround(place, noting)  # again: it does not pile up
    call(group[0], 1, run)
    assert events.count("[") == 1
    surround(place, None)
    assert (place.call_job, place.remote_job, place.own_remote_job) == (CallJob, RemoteJob, RemoteJob)
    call(group[0], 1, run)
    assert events.count("[") == 1


def test_a_guarded_worker_stays_guarded() -> None:
    events.clear()
    with LocalGroup(2, RpcBackendOptions(allow=["builtins.max"])) as group:
        surround(group[1]._place, noting)
        assert call(group[0], 1, max, 1, 2) == 2
        with pytest.raises(farcall.NotAllowedError):
            call(group[0], 1, run)
        assert "run" not in events
        assert events[:2] == ["[", "]"]
