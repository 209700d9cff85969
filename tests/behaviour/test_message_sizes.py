"""Limits of one message: what is larger than the receiver takes is refused where it is sent, and nothing else fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from farcall import SerializationError, UsageError
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import NewGroup, call, echo, run, runs, start
from worker_processes import StartWorkers

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def limited(make_group: NewGroup) -> LocalGroup:
    return make_group(2, max_message_size=1_000_000, max_head_size=1024)


def make(count: int) -> bytes:
    return bytes(count)


def count(references: list[Any]) -> int:
    return len(references)


CALLS: dict[str, Callable[[LocalGroup, Any], Any]] = {
    "call": lambda group, value: start(group.agents[0], 1, run, value),
    "remote": lambda group, value: group.remote(0, 1, run, (value,)),
}


@pytest.mark.parametrize("way", CALLS)
@pytest.mark.parametrize("value", [bytes(2_000_000), ["x" * 2_000_000]], ids=["buffer", "in the pickle"])
def test_a_call_that_is_too_large_is_not_sent_and_harms_no_other(limited: LocalGroup, way: str, value: Any) -> None:
    gate = new_gate("other")
    other = start(limited.agents[0], 1, wait_at, "other", "unharmed")
    assert arrived["other"].wait(SOON)
    with pytest.raises(UsageError, match=r"was not sent to worker 'worker1': it has about 2,000,\d+ bytes"):
        CALLS[way](limited, value)
    gate.set()
    assert other.wait() == "unharmed"
    assert call(limited.agents[0], 1, echo, bytes(900_000)) == bytes(900_000)
    assert runs == []
    assert limited.references(0).held == ()


def test_a_result_that_is_too_large_fails_its_call_only(limited: LocalGroup) -> None:
    with pytest.raises(SerializationError, match=r"from worker 'worker1' to worker 'worker0': it has about 2,000,\d+"):
        call(limited.agents[0], 1, make, 2_000_000)
    assert call(limited.agents[0], 1, make, 900_000) == bytes(900_000)
    rref = limited.remote(0, 1, make, (2_000_000,))
    with pytest.raises(SerializationError):
        rref.to_here()
    assert rref.rpc_sync().__len__() == 2_000_000, "the value is where it was"


def test_more_references_than_the_head_of_a_message_takes_are_refused(limited: LocalGroup) -> None:
    references = [limited.rref(0, number) for number in range(100)]
    with pytest.raises((UsageError, SerializationError)):
        start(limited.agents[0], 1, count, references)
    assert call(limited.agents[0], 1, count, references[:5]) == 5


def test_each_worker_has_a_limit_of_its_own_for_what_is_sent_to_it(workers: StartWorkers) -> None:
    script = """
    def make(size): return bytes(size)
    start(**{"max_message_size": 100_000} if RANK == 1 else {})
    if RANK == 0:
        report(call=outcome(rpc.rpc_sync, "w1", len, args=(bytes(200_000),))["error"],
               small=rpc.rpc_sync("w1", len, args=(bytes(90_000),)),
               result=len(rpc.rpc_sync("w1", make, args=(200_000,))),
               itself=rpc.rpc_sync("w0", len, args=(bytes(200_000),)))
    rpc.shutdown()
    """
    facts = workers(script).finish()[0]
    assert facts == {"call": "UsageError", "small": 90_000, "result": 200_000, "itself": 200_000}
