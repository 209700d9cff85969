"""Which workers, functions and arguments a call takes, and what is refused before anything is sent."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

from farcall import UnknownWorkerError, UsageError, WorkerInfo
from farcall.testing import LocalGroup
from gates import SOON
from group_stage import call, echo, start

pytestmark = pytest.mark.timeout(30)


def add(left: Any, right: Any = 1) -> Any:
    return left + right


def calls_served(group: LocalGroup) -> list[int]:
    """How many calls each worker has run for worker0."""
    return [agent.get_metrics()["peers"]["worker0"]["calls_served"] for agent in group.agents]


@pytest.mark.parametrize("to", ["worker1", 1, WorkerInfo("worker1", 1)], ids=["name", "rank", "WorkerInfo"])
def test_a_worker_is_called_by_name_rank_or_worker_info(group: LocalGroup, to: Any) -> None:
    assert call(group.agents[0], to, echo, "tea") == "tea"
    assert calls_served(group) == [0, 1, 0]


def test_every_worker_can_call_every_worker_and_itself(group: LocalGroup) -> None:
    for caller in group.agents:
        for to in group.names:
            assert call(caller, to, echo, (caller.info.name, to)) == (caller.info.name, to)
    assert calls_served(group) == [1, 1, 1]


def test_worker_infos_are_the_same_on_every_worker_and_travel_by_value(group: LocalGroup) -> None:
    expected = [WorkerInfo(f"worker{rank}", rank) for rank in range(3)]
    assert [agent.get_worker_infos() for agent in group.agents] == [expected] * 3
    assert group.agents[1].get_worker_info() == expected[1]
    assert group.agents[0].get_worker_info("worker2") == group.agents[0].get_worker_info(2) == expected[2]
    assert call(group.agents[0], 1, echo, expected[2]) == expected[2] == pickle.loads(pickle.dumps(expected[2]))
    assert len({*expected, WorkerInfo("worker1", 1)}) == 3


@pytest.mark.parametrize("to", ["worker7", 3, -1, "", WorkerInfo("worker1", 2)])
def test_an_unknown_worker_is_refused_with_the_names_of_those_that_exist(group: LocalGroup, to: Any) -> None:
    with pytest.raises(UnknownWorkerError) as caught:
        start(group.agents[0], to, echo, 1)
    assert repr(to) in str(caught.value)
    assert all(name in str(caught.value) for name in group.names)
    with pytest.raises(UnknownWorkerError):
        group.agents[0].get_worker_info(to)
    with pytest.raises(UnknownWorkerError):
        group.remote(0, to, echo, (1,))


@pytest.mark.parametrize("to", [None, b"worker1", ("worker1",), 3.5, ["worker1"], {}], ids=repr)
def test_a_target_of_a_wrong_type_is_refused(group: LocalGroup, to: Any) -> None:
    with pytest.raises(UsageError, match="must be a worker's name, rank or WorkerInfo"):
        start(group.agents[0], to, echo, 1)
    with pytest.raises(UsageError, match="must be a worker's name, rank or WorkerInfo"):
        group.remote(0, to, echo, (1,))


@pytest.mark.parametrize("function", [None, "print", 3, b"x"])
def test_a_callee_that_is_not_callable_is_refused(group: LocalGroup, function: Any) -> None:
    with pytest.raises(UsageError, match="cannot be called"):
        group.agents[0].call(1, function, (), None, SOON)
    with pytest.raises(UsageError, match="cannot be called"):
        group.remote(0, 1, function)


@pytest.mark.parametrize("args", [5, "text", {1: 2}.values(), {"left": 1}], ids=repr)
def test_arguments_that_are_no_tuple_or_list_are_refused(group: LocalGroup, args: Any) -> None:
    with pytest.raises(UsageError, match="`args` must be a tuple or list"):
        group.agents[0].call(1, add, args, None, SOON)
    with pytest.raises(UsageError, match="`args` must be a tuple or list"):
        group.remote(0, 1, add, args)


@pytest.mark.parametrize("timeout", [-0.5, -2, -math.inf, math.nan])
def test_a_negative_timeout_is_refused(group: LocalGroup, timeout: float) -> None:
    with pytest.raises(UsageError, match="must be 0 \\(no timeout\\) or more seconds"):
        start(group.agents[0], 1, echo, 1, timeout=timeout)
    rref = group.remote(0, 1, echo, (1,))
    with pytest.raises(UsageError, match="must be 0"):
        rref.to_here(timeout=timeout)


@pytest.mark.parametrize(
    ("args", "kwargs", "result"),
    [
        ((2,), None, 3),
        ((2, 3), {}, 5),
        ([2, 3], None, 5),
        (None, {"left": 2, "right": 3}, 5),
        ((2,), {"right": 3}, 5),
    ],
)
def test_arguments_are_given_by_position_and_by_keyword(group: LocalGroup, args: Any, kwargs: Any, result: int) -> None:
    assert group.agents[0].call(1, add, args, kwargs, SOON).wait() == result
    assert group.remote(0, 1, add, args, kwargs).to_here() == result


def test_wrong_arguments_raise_the_error_of_a_local_call(group: LocalGroup) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'left'"):
        call(group.agents[0], 1, add)
    with pytest.raises(TypeError, match="unexpected keyword argument 'middle'"):
        call(group.agents[0], 1, add, 1, middle=2)


@pytest.mark.parametrize("to", [0, 1], ids=["itself", "another worker"])
def test_arguments_and_results_are_copies(group: LocalGroup, to: int) -> None:
    sent: list[Any] = [1, {"a": [2]}]
    back = call(group.agents[0], to, echo, sent)
    assert back == sent
    assert back is not sent
    assert back[1]["a"] is not sent[1]["a"]


def test_arguments_may_be_changed_as_soon_as_the_call_was_made(group: LocalGroup) -> None:
    sent = [0]
    futures = []
    for number in range(50):
        sent[0] = number
        futures.append(start(group.agents[0], 1, echo, sent))
    references = []
    for number in range(50):
        sent[0] = number
        references.append(group.remote(0, 1, echo, (sent,)))
    assert [future.wait() for future in futures] == [[number] for number in range(50)]
    assert [rref.to_here() for rref in references] == [[number] for number in range(50)]
