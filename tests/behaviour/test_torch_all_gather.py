"""`AllGatherStates` and the state of `_all_gather`, for programs that gather over groups of their own.

Such a program keeps its own `AllGatherStates` by sequence ID and calls its own functions by RPC: followers send their
object to the leader, and the leader sends all objects to the followers.
"""

from __future__ import annotations

import collections
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install farcall[torch]")

import torch.distributed.rpc.api as torch_api

import farcall.pytorch as rpc
from farcall.pytorch import api
from torch_stage import one_worker, run_group

MEMBERS = {"worker0", "worker1", "worker2"}
ROLE = {"worker1", "worker2"}

_lock = threading.RLock()
_numbers = iter(range(1000))
_states: collections.defaultdict[int, rpc.AllGatherStates] = collections.defaultdict(rpc.AllGatherStates)


def _arrive_at_leader(number: int, name: str, obj: Any) -> None:
    with _lock:
        states = _states[number]
        states.gathered_objects[name] = obj
        if states.gathered_objects.keys() == ROLE:
            states.proceed_signal.set()


def _arrive_at_follower(number: int, objects: dict[str, Any]) -> None:
    with _lock:
        states = _states[number]
        assert not states.proceed_signal.is_set()
        states.gathered_objects = objects
        states.proceed_signal.set()


def gather_in_role(obj: Any) -> dict[str, Any]:
    """What a program does that gathers among some workers only."""
    me, leader, number = rpc.get_worker_info().name, min(ROLE), next(_numbers)
    rpc.rpc_sync(leader, _arrive_at_leader, (number, me, obj))
    with _lock:
        states = _states[number]
    assert states.proceed_signal.wait(timeout=20)
    if me == leader:
        for follower in ROLE - {leader}:
            rpc.rpc_sync(follower, _arrive_at_follower, (number, states.gathered_objects))
    return states.gathered_objects


def gather_everywhere(obj: Any) -> dict[str, Any]:
    """Called by another worker: it waits in a serving thread."""
    return api._all_gather(obj, {"worker0", "worker1"})


def test_a_program_gathers_over_its_own_group(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        return [gather_in_role(rank * 10 + turn) for turn in range(3)] if rank else None

    expected = [{"worker1": 10 + turn, "worker2": 20 + turn} for turn in range(3)]
    assert run_group(tmp_path, body, 3) == [None, expected, expected]


def test_all_workers_are_known_when_rpc_has_started(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        with api._all_gather_dict_lock:
            return api._ALL_WORKER_NAMES

    assert run_group(tmp_path, body, 3) == [MEMBERS] * 3


def test_a_gathering_in_a_serving_thread_leaves_room_for_other_calls(tmp_path: Path) -> None:
    """More gatherings wait than there are serving threads, and the objects they wait for arrive by calls."""

    def body(rank: int) -> Any:
        if rank == 0:
            futures = [rpc.rpc_async("worker0", gather_everywhere, ("a",)) for _ in range(4)]
            return [future.wait() for future in futures]
        return [gather_everywhere("b") for _ in range(4)]

    both = [{"worker0": "a", "worker1": "b"}] * 4
    assert run_group(tmp_path, body, 2, num_worker_threads=1) == [both, both]


@pytest.mark.parametrize("module", [torch_api, api], ids=["torch", "farcall"])
def test_new_states(module: Any) -> None:
    states = module.AllGatherStates()
    assert states.gathered_objects == {}
    assert isinstance(states.proceed_signal, threading.Event)
    assert not states.proceed_signal.wait(timeout=0)
    states.proceed_signal.set()
    assert states.proceed_signal.wait()


def refusals(module: Any) -> list[tuple[type[Exception], str]]:
    """What the two functions that others call say to a program that misuses them."""
    found = []
    for function, args in [
        (module._gather_to_leader, ("id0", "stranger", 1)),
        (module._gather_to_leader, ("id1", "a", 1, {"a", "b"})),
        (module._gather_to_leader, ("id1", "a", 1, {"a", "b"})),
        (module._broadcast_to_followers, ("id2", {"a": 1})),
        (module._broadcast_to_followers, ("id2", {"a": 1})),
    ]:
        try:
            function(*args)
        except Exception as error:
            found.append((type(error), str(error)))
    return found


def test_misuse_is_refused_as_torch_refuses_it(tmp_path: Path) -> None:
    theirs = refusals(torch_api)
    torch_api._all_gather_sequence_id_to_states.clear()
    assert len(theirs) == 3
    with one_worker(tmp_path):
        assert refusals(api) == theirs


def test_objects_of_others_are_found_in_the_states(tmp_path: Path) -> None:
    with one_worker(tmp_path, "me"):
        api._gather_to_leader("me,other#0", "other", "early", {"me", "other"})
        states = api._all_gather_sequence_id_to_states["me,other#0"]
        assert states.gathered_objects == {"other": "early"}
        api._gather_to_leader("me,other#0", "me", "late", {"me", "other"})
        assert states.proceed_signal.is_set()
