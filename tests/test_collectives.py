"""What all workers do together: the leader's table by itself, and the functions over a worker that is alone."""

from __future__ import annotations

import inspect
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import farcall as rpc
from farcall import collectives
from farcall.collectives import Gathering, Gatherings, Key
from farcall.errors import NotAllowedError, RpcTimeoutError, UsageError, WorkerLostError
from farcall.futures import Future

ABC = ("a", "b", "c")
IDS = (0, 1, 2)


def first(members: tuple[str, ...] = ABC) -> Key:
    return Key(members, IDS, 0)


# -- the table


def test_all_hear_when_the_last_has_come() -> None:
    table = Gatherings()
    outcomes = [table.bring(first(), name, name.upper()) for name in ("c", "a")]
    assert not any(outcome.done() for outcome in outcomes)
    assert table.missing(first()) == ["b"]
    outcomes.append(table.bring(first(), "b", None))
    assert [outcome.value() for outcome in outcomes] == 3 * [{"a": "A", "b": None, "c": "C"}]
    assert list(outcomes[0].value()) == ["a", "b", "c"]
    assert table._led == {}


def test_gatherings_do_not_mix() -> None:
    table = Gatherings()
    keys = [Key(ABC, IDS, 0), Key(ABC, IDS, 1), Key(("a", "b"), IDS, 0)]
    outcomes = {key: table.bring(key, "a", key.number) for key in keys}
    table.bring(keys[1], "b", "later")
    table.bring(keys[2], "b", "two")
    assert [outcomes[key].done() for key in keys] == [False, False, True]
    assert outcomes[keys[2]].value() == {"a": 0, "b": "two"}
    table.bring(keys[1], "c", "later")
    assert outcomes[keys[1]].value() == {"a": 1, "b": "later", "c": "later"}
    assert table.missing(keys[0]) == ["b", "c"]


def test_nobody_comes_twice() -> None:
    table = Gatherings()
    table.bring(first(), "a", 1)
    with pytest.raises(UsageError, match="worker 'a' took part twice in gathering 0 of 'a', 'b', 'c'"):
        table.bring(first(), "a", 2)


def test_numbers_count_the_gatherings_of_the_same_members() -> None:
    table = Gatherings()
    assert [table.enter(ABC, IDS).number for _ in range(3)] == [0, 1, 2]
    assert table.enter(ABC, (0, 1, 7)).number == 0, "one of them was started again"
    assert table.enter(("a", "b"), IDS).number == 0
    table.leave(Key(ABC, IDS, 2))
    assert table.enter(ABC, IDS).number == 2
    table.leave(Key(ABC, IDS, 1))  # another thread has come to the next meanwhile
    assert table.enter(ABC, IDS).number == 3


def test_one_that_is_lost_ends_it_for_all_and_late_ones_hear_it() -> None:
    table = Gatherings()
    outcome = table.bring(first(), "a", 1)
    table.fail(first(), WorkerLostError("worker 'b' was lost", "b"), lost="b")
    with pytest.raises(WorkerLostError, match="'b'"):
        outcome.value()
    assert table.missing(first()) == ["c"]
    with pytest.raises(WorkerLostError, match="'b'"):
        table.bring(first(), "c", 3).value()
    assert table._led == {}


def test_it_ends_once() -> None:
    table = Gatherings()
    outcome = table.bring(first(), "a", 1)
    table.fail(first(), RpcTimeoutError("late"))
    table.fail(first(), WorkerLostError("gone", "b"), lost="b")
    assert isinstance(outcome.exception(), RpcTimeoutError)
    table.fail(first(("x",)), RpcTimeoutError("late"))  # of which nobody knows
    complete = table.bring(Key(("a",), IDS, 0), "a", 1)
    table.fail(Key(("a",), IDS, 0), RpcTimeoutError("late"))
    assert complete.value() == {"a": 1}


def test_the_missing_are_looked_for_once() -> None:
    table = Gatherings()
    assert table.begin_to_look(first()) == []
    table.bring(first(), "b", 1)
    assert table.begin_to_look(first()) == ["a", "c"]
    assert table.begin_to_look(first()) == []
    assert table.is_awaited(first(), "a")
    assert not table.is_awaited(first(), "b")
    table.fail(first(), RpcTimeoutError("late"))
    assert not table.is_awaited(first(), "a")
    assert not table.is_awaited(first(("x",)), "x")


def test_who_has_come_to_a_gathering_of_others_is_known() -> None:
    table = Gatherings()
    outcome = table.bring(first(("a", "b")), "a", 1)
    table.bring(first(), "b", 2)
    table.bring(first(), "c", 2)
    assert table.elsewhere(first(("a", "b"))) == {"b": ABC}
    assert table.elsewhere(first()) == {"a": ("a", "b")}
    assert table.elsewhere(first(("x",))) == {}
    table.bring(first(), "a", 2)  # now that one is complete, and nobody waits there
    assert table.elsewhere(first(("a", "b"))) == {}
    assert not outcome.done()


def test_who_waits_for_others_is_said_to_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch, agent: Any) -> None:
    monkeypatch.setattr(collectives, "current_agent", lambda: agent)
    table = collectives.gatherings_of(agent)
    outcome = table.bring(first(("a", "b")), "a", 1)
    table.bring(first(), "b", 2)
    collectives._time_is_over(first(("a", "b")), 3.0)
    assert str(outcome.exception(0)) == (
        "worker 'b' did not take part: timed out in _all_gather after 3.00 seconds. "
        "But 'b' called it with 'a', 'b', 'c': all workers must name the same workers"
    )


def test_a_look_is_answered_when_the_worker_comes() -> None:
    table = Gatherings()
    looks = [table.look(Key(ABC, IDS, number)) for number in (0, 1)]
    assert [look.done() for look in looks] == [False, False]
    table.enter(ABC, IDS)
    assert [look.done() for look in looks] == [True, False]
    table.enter(ABC, IDS)
    assert looks[1].done()
    assert table.look(Key(ABC, IDS, 1)).done()
    assert table._looks == {}


def test_looks_that_nobody_waits_for_do_not_gather() -> None:
    table = Gatherings()
    looks = [table.look(first()) for _ in range(100)]
    assert len(table._looks[first()]) == 8
    table.enter(ABC, IDS)
    assert looks[-1].done()


def test_a_new_gathering_misses_all() -> None:
    assert Gathering(ABC).missing == {"a", "b", "c"}


# -- the functions, over an agent that is made up


class Agent:
    """Worker `b` of three. Its calls are noted, and answered by the test."""

    info = rpc.WorkerInfo("b", 1)
    rpc_timeout = 60.0
    closed: rpc.RpcError | None = None

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Any, float]] = []
        self.futures: list[Future[Any]] = []
        self.refuse_with: rpc.RpcError | None = None

    def call(self, to: str, function: Any, args: Any, kwargs: Any, timeout: float, unattended: bool) -> Future[Any]:
        if self.refuse_with is not None:
            raise self.refuse_with
        self.calls.append((to, function.__name__, args, timeout))
        self.futures.append(Future())
        return self.futures[-1]

    def get_worker_info(self, to: str) -> rpc.WorkerInfo:
        return rpc.WorkerInfo(to, ABC.index(to))

    def get_worker_infos(self) -> list[rpc.WorkerInfo]:
        return [self.get_worker_info(name) for name in ABC]


@pytest.fixture
def agent() -> Any:
    return Agent()


def test_a_look_is_repeated_while_the_worker_is_waited_for(agent: Any) -> None:
    table = Gatherings()
    outcome = table.bring(first(), "b", 1)
    collectives._look_for(agent, table, first(), "c")
    assert agent.calls == [("c", "coming_to_the_others", (first(),), collectives._LOOK)]
    agent.futures[0].set_exception(RpcTimeoutError("not yet"))
    assert len(agent.calls) == 2
    table.fail(first(), RpcTimeoutError("late"))
    agent.futures[1].set_exception(RpcTimeoutError("not yet"))
    assert len(agent.calls) == 2
    assert isinstance(outcome.exception(), RpcTimeoutError)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_look_that_finds_a_worker_lost(agent: Any, at_once: bool) -> None:
    table = Gatherings()
    outcome = table.bring(first(), "b", 1)
    lost = WorkerLostError("it cannot be reached", "c")
    agent.refuse_with = lost if at_once else None
    collectives._look_for(agent, table, first(), "c")
    if not at_once:
        agent.futures[0].set_exception(lost)
    error = outcome.exception(0)
    assert isinstance(error, WorkerLostError)
    assert error.worker == "c"
    assert "worker 'c' was lost before it called _all_gather with 'a', 'b', 'c': it cannot" in str(error)


def test_a_look_that_cannot_be_made_harms_nothing(agent: Any) -> None:
    table = Gatherings()
    outcome = table.bring(first(), "b", 1)
    agent.refuse_with = rpc.NotInitializedError("shut down")
    collectives._look_for(agent, table, first(), "c")
    assert not outcome.done()


def test_who_is_among_the_members(agent: Any) -> None:
    assert collectives._members(agent, None) == ABC
    assert collectives._members(agent, ()) == ABC
    assert collectives._members(agent, iter(["c", "b", "c"])) == ("b", "c")
    with pytest.raises(UsageError, match="worker 'b' is not one of 'a', 'c': name it as well"):
        collectives._members(agent, ["a", "c"])
    texts: list[Any] = ["b", "", b"b"]
    for text in texts:
        with pytest.raises(UsageError, match=r"worker_names must be a list of names, not one text; write \["):
            collectives._members(agent, text)


def test_a_leader_that_does_not_even_say_who_is_missing(agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "current_agent", lambda: agent)
    monkeypatch.setattr(collectives, "_ANSWER", 0.01)
    with pytest.raises(
        RpcTimeoutError, match=r"worker 'a' did not take part: timed out in _all_gather after 0\.02 seconds"
    ):
        rpc._all_gather(5, timeout=0.02)
    assert [(to, name) for to, name, _, _ in agent.calls] == [("a", "waiting_for_each_other"), ("a", "_time_is_over")]
    for future in agent.futures:
        future.set_result(None)


@pytest.mark.parametrize("names", [("b", "c"), None], ids=["leads", "follows"])
def test_who_is_taken_for_dead_while_it_waits_does_not_wait_for_ever(
    agent: Any, names: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "current_agent", lambda: agent)
    monkeypatch.setattr(collectives, "_GLANCE", 0.01)
    agent.closed = rpc.ExpelledError("taken for dead")
    with pytest.raises(rpc.ExpelledError, match="taken for dead"):
        rpc._all_gather(5, names, timeout=0)
    for future in agent.futures:
        future.set_result(None)


def test_who_could_not_bring_its_part_was_not_there(agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "current_agent", lambda: agent)
    agent.refuse_with = rpc.SerializationError("cannot be pickled")
    with pytest.raises(rpc.SerializationError):
        rpc._all_gather(threading.Lock())
    assert collectives.gatherings_of(agent).enter(ABC, IDS).number == 0


# -- the functions


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        ("_all_gather", "(obj, worker_names=None, timeout=-1.0)"),
        ("_barrier", "(worker_names)"),
        ("_wait_all_workers", "(timeout=0.0)"),
        ("_wait_all", "()"),
    ],
)
def test_signatures(function: str, signature: str) -> None:
    parameters = inspect.signature(getattr(rpc, function)).parameters.values()
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    assert str(inspect.Signature(bare)) == signature


def test_without_a_worker() -> None:
    for use in (lambda: rpc._all_gather(1), lambda: rpc._barrier(["a"]), rpc._wait_all_workers):
        with pytest.raises(rpc.NotInitializedError):
            use()


@pytest.mark.usefixtures("alone")
def test_alone() -> None:
    lock = threading.Lock()
    assert rpc._all_gather(lock) == {"alone": lock}
    assert rpc._all_gather(2, ["alone", "alone"], timeout=1) == {"alone": 2}
    assert rpc._all_gather(3, []) == {"alone": 3}
    rpc._barrier({"alone"})
    rpc._wait_all_workers(5)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("timeout", [-2, -0.5, float("nan"), "1", None])
def test_wrong_timeouts(timeout: Any) -> None:
    for name, values in (("_all_gather", (1, None)), ("_wait_all_workers", ())):
        function = getattr(rpc, name)
        with pytest.raises(UsageError, match="a timeout must be"):
            function(*values, timeout)
        function(*values, 5)


@pytest.mark.usefixtures("alone")
def test_wrong_names() -> None:
    with pytest.raises(rpc.UnknownWorkerError, match="no worker 'nobody'"):
        rpc._all_gather(1, ["alone", "nobody"])
    assert rpc._all_gather(1) == {"alone": 1}


def test_what_a_list_refuses_is_said_without_the_call_by_which_it_came() -> None:
    outcome: Future[dict[str, Any]] = Future()
    refused = NotAllowedError(
        "the result of `_bring` from worker 'a' was refused here: it is not allowed to load `x.P`"
    )
    refused.__cause__ = NotAllowedError("it is not allowed to load `x.P` on worker 'b'; add it there")
    outcome.set_exception(refused)
    agent: Any = SimpleNamespace(info=rpc.WorkerInfo("b", 1))
    with pytest.raises(NotAllowedError) as caught:
        collectives._wait(agent, outcome, first(), float("inf"), 0.0)
    assert str(caught.value) == (
        "a value passed to _all_gather was refused: it is not allowed to load `x.P` on worker 'b'; add it there; or "
        "pass plain data"
    )
