"""Selections of workers: the verbs on all of them, futures and errors by worker name, and `any`."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import farcall
from farcall import Future, Futures, GroupCallError, RpcTimeoutError, UnknownWorkerError, UsageError, WorkerLostError
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import NewGroup, connect_all


def my_name() -> str:
    return farcall.get_worker_info().name


async def doubled(value: int) -> int:
    return 2 * value


@farcall.functions.async_execution
def asked(name: str) -> Future[str]:
    return farcall.worker(name).submit(my_name)


def fail_on(names: list[str], wait_on: str = "") -> str:
    """Fails on some workers, and waits on another one."""
    name = my_name()
    if name == wait_on:
        wait_at("stuck")
    if name in names:
        raise KeyError(name)
    return name


def fail_with(error: BaseException) -> None:
    raise error


def total() -> dict[str, str]:
    return farcall.workers("worker1", "worker2").call(fail_on, ["worker2"])


def call_selection(selection: farcall.Workers) -> tuple[str, list[str]]:
    return my_name(), list(selection.call(my_name))


def names_of(selection: farcall.Workers) -> list[str]:
    return [worker.name for worker in selection]


# Who is in a selection


def test_names_patterns_and_conditions(make_group: NewGroup) -> None:
    group = make_group(4)
    assert names_of(group.workers()) == ["worker0", "worker1", "worker2", "worker3"]
    assert names_of(group.workers("worker3", "worker1")) == ["worker1", "worker3"]
    assert names_of(group.workers("worker[12]", "worker2")) == ["worker1", "worker2"]
    assert names_of(group.workers("WORKER*")) == []
    assert names_of(group.workers(others=True)) == ["worker1", "worker2", "worker3"]
    assert names_of(group["worker2"].workers(others=True)) == ["worker0", "worker1", "worker3"]
    assert names_of(group.workers("worker*", where=lambda info: info.id % 2 == 1)) == ["worker1", "worker3"]
    assert len(group.workers(others=True)) == len(farcall.workers(others=True)) == 3
    assert list(farcall.workers("worker1")) == [farcall.worker("worker1")]
    assert next(iter(group.workers("worker2"))).call(my_name) == "worker2"
    assert repr(farcall.workers("w*", where=bool, others=True)) == "workers('w*', where=bool, others=True)"


def test_what_is_no_selection(group: LocalGroup) -> None:
    makers: list[Any] = [farcall.workers, group.workers]
    for make in makers:
        with pytest.raises(UsageError, match="takes names of workers, or patterns such as 'rollout"):
            make(3)
        with pytest.raises(UsageError, match="`where` must be a function of a WorkerInfo"):
            make(where="worker1")


def test_an_operation_on_an_empty_selection_is_refused(group: LocalGroup) -> None:
    nobody = group.workers("nobody*")
    uses: list[Callable[[], Any]] = [
        lambda: nobody.call(my_name),
        lambda: nobody.submit(my_name),
        lambda: nobody.keep(list),
        lambda: nobody.map(abs, [1]),
        lambda: nobody.any().call(my_name),
    ]
    for use in uses:
        with pytest.raises(UnknownWorkerError, match=r"workers\('nobody\*'\) is empty: the group has 'worker0'"):
            use()
    assert (len(nobody), list(nobody)) == (0, [])


def test_a_selection_follows_joins_and_losses(make_group: NewGroup) -> None:
    group = make_group(2, is_open=True)
    others = group.workers(others=True)
    anyone = others.any()
    others.wait_joined(1, SOON)
    assert set(others.call(my_name)) == {"worker1"}
    group.join("late")
    others.wait_joined(2, SOON)
    assert set(others.call(my_name)) == {"worker1", "late"}
    group.leave("worker1")
    assert set(others.call(my_name)) == {"late"}
    assert anyone.call(my_name) == "late"


def test_wait_joined(make_group: NewGroup, background: ThreadPoolExecutor) -> None:
    group = make_group(1, is_open=True)
    with pytest.raises(RpcTimeoutError, match=r"workers\('a', 'b\*'\) did not join within 0\.01 s"):
        group.workers("a", "b*").wait_joined(timeout=0.01)
    with pytest.raises(RpcTimeoutError, match=r"3 of workers\(\) did not join"):
        group.workers().wait_joined(3, 0)
    both = group.workers("a", "b*")
    waiting = background.submit(both.wait_joined, None, SOON)
    group.join("a")
    assert not waiting.done()
    group.join("b1")
    assert waiting.result(SOON) is both
    assert both.wait_joined(2, 0) is both
    for count in (0, True, 1.5):
        with pytest.raises(UsageError, match="`count` must be a number of workers"):
            both.wait_joined(count)  # type: ignore[arg-type]
    with pytest.raises(UnknownWorkerError, match="will not join: the group is fixed"):
        make_group(2).workers("nobody").wait_joined()


def test_a_selection_that_is_sent_acts_for_the_worker_that_gets_it(group: LocalGroup) -> None:
    others = group.workers(others=True).options(timeout=SOON)
    assert group.worker("worker1").call(call_selection, others) == ("worker1", ["worker0", "worker2"])
    assert group.worker("worker1").call(call_selection, farcall.workers("worker2")) == ("worker1", ["worker2"])
    assert repr(pickle.loads(pickle.dumps(others))) == "workers(others=True)"


# The verbs


def test_call_submit_and_keep_on_all(group: LocalGroup) -> None:
    everybody = group.workers()
    names = {"worker0": "worker0", "worker1": "worker1", "worker2": "worker2"}
    assert everybody.call(my_name) == everybody.submit(my_name).result(SOON) == names
    assert list(everybody.call(my_name)) == list(names)
    assert everybody.call(doubled, 4) == dict.fromkeys(names, 8)
    assert everybody.call(asked, "worker2") == dict.fromkeys(names, "worker2")
    assert everybody.call(dict, timeout=1, to=2) == {name: {"timeout": 1, "to": 2} for name in names}
    kept = everybody.keep(my_name)
    assert {name: reference.to_here() for name, reference in kept.items()} == names
    assert {name: reference.owner_name() for name, reference in kept.items()} == names
    with pytest.raises(farcall.SerializationError, match="argument 1"):
        everybody.call(repr, threading.Lock())


class CountsPickles:
    """Counts how often it is pickled."""

    pickled = 0

    def __reduce__(self) -> tuple[Any, ...]:
        CountsPickles.pickled += 1
        return CountsPickles, ()


def test_arguments_are_pickled_once(group: LocalGroup) -> None:
    CountsPickles.pickled = 0
    assert len(group.workers().call(type_name, CountsPickles())) == 3
    assert CountsPickles.pickled == 1
    kept = group.worker("worker1").keep(list, "tea")
    lengths = group.workers().call(length_of, kept, bytes(2_000_000))  # a reference among them
    assert lengths == {"worker0": 3, "worker1": 3, "worker2": 3}


def type_name(value: object) -> str:
    return type(value).__name__


def length_of(reference: farcall.RRef[list[str]], _: bytes) -> int:
    return reference.call(len)


def overwrite(buffer: bytearray, first: int) -> tuple[int, int, int]:
    """Changes its argument, and returns what was and what is there."""
    before = buffer[0], buffer[-1]
    buffer[:] = bytes([first]) * len(buffer)
    return before[0], before[1], buffer[-1]


def test_each_worker_has_a_copy_of_large_arguments(group: LocalGroup) -> None:
    for seed in range(1, 6):
        content = bytearray([seed]) * 3_000_000
        futures = group.workers().submit(overwrite, content, seed + 100)
        content[:] = bytes(len(content))  # it may be changed as soon as submit has returned
        assert set(futures.result(SOON).values()) == {(seed, seed, seed + 100)}


kept: list[bytearray] = []


def keep_argument(buffer: bytearray) -> None:
    kept.append(buffer)


def test_large_arguments_that_workers_keep_do_not_change(group: LocalGroup) -> None:
    for seed in range(1, 5):
        group.workers().call(keep_argument, bytearray([seed]) * 2_000_000)
    assert sorted(buffer[0] for buffer in kept) == sorted(3 * [1, 2, 3, 4])
    assert all(bytes(buffer) == bytes(buffer[:1]) * 2_000_000 for buffer in kept)
    kept.clear()


def test_options(group: LocalGroup) -> None:
    stuck = new_gate("stuck")
    others = group.workers(others=True)
    for short in (others.options(timeout=0.05), others.options(timeout=None).options(idempotent=True, timeout=0.05)):
        with pytest.raises(GroupCallError) as failed:
            short.call(wait_at, "stuck")
        assert set(map(type, failed.value.exceptions)) == {RpcTimeoutError}
    with pytest.raises(RpcTimeoutError):
        others.any().options(timeout=0.05).call(wait_at, "stuck")
    stuck.set()
    target: Any
    for target in (others, others.keep(list)):
        with pytest.raises(RpcTimeoutError, match="for no limit, give timeout=None"):
            target.options(timeout=0)
        with pytest.raises(UsageError, match="calls have no option 'timout'"):
            target.options(timout=3)
        with pytest.raises(UsageError, match="idempotent must be True or False, not 1"):
            target.options(idempotent=1)
    with pytest.raises(UsageError, match="calls have no option 'idempotent'"):
        group.worker("worker1").options(idempotent=True)  # type: ignore[call-arg]


def test_a_call_fails_as_soon_as_one_worker_fails(group: LocalGroup) -> None:
    stuck = new_gate("stuck")
    try:
        with pytest.raises(GroupCallError) as failed:
            group.workers().call(fail_on, ["worker1"], "worker2")
    finally:
        stuck.set()
    error = failed.value
    assert list(error.errors) == ["worker1"]
    assert isinstance(error.errors["worker1"], KeyError)
    assert error.exceptions == (error.errors["worker1"],)
    assert error.results in ({}, {"worker0": "worker0"})
    assert str(error).startswith("1 of 3 workers failed: 'worker1' with KeyError: 'worker1'")


def test_the_results_of_the_others_are_in_the_error(group: LocalGroup) -> None:
    futures = group.workers().submit(fail_on, ["worker0", "worker2"])
    farcall.collect_all(futures.values()).wait()
    with pytest.raises(GroupCallError) as failed:
        futures.result()
    assert list(failed.value.errors) == ["worker0", "worker2"]
    assert failed.value.results == {"worker1": "worker1"}


def test_a_part_of_the_error_is_caught() -> None:
    errors = {
        "worker0": KeyError("a"),
        "worker1": ExceptionGroup("inner", [KeyError("b"), ValueError("c")]),
        "worker2": TypeError("d"),
    }
    parts: list[Any] = []
    try:
        raise GroupCallError("failed", errors, {"worker3": 3})
    except* KeyError as caught:
        parts.append(caught)
    except* (ValueError, TypeError) as rest:
        parts.append(rest)
    assert [type(part) for part in parts] == [GroupCallError, GroupCallError]
    assert [list(part.errors) for part in parts] == [["worker0", "worker1"], ["worker1", "worker2"]]
    assert [part.results for part in parts] == [{"worker3": 3}, {"worker3": 3}]
    assert [type(each) for each in parts[0].errors["worker1"].exceptions] == [KeyError]
    copy = pickle.loads(pickle.dumps(GroupCallError("failed", errors, {"worker3": 3})))
    assert (str(copy), list(copy.errors), copy.results) == ("failed (3 sub-exceptions)", list(errors), {"worker3": 3})


def test_the_error_of_a_nested_call_arrives_whole(group: LocalGroup) -> None:
    with pytest.raises(GroupCallError) as failed:
        group.worker("worker1").call(total)
    assert [*failed.value.errors] == ["worker2"]
    assert type(failed.value.errors["worker2"]) is KeyError
    assert failed.value.errors["worker2"] is failed.value.exceptions[0]
    assert set(failed.value.results) <= {"worker1"}


def test_what_is_no_exception_is_raised_as_it_is(group: LocalGroup) -> None:
    with pytest.raises(SystemExit):
        group.workers("worker1").call(fail_with, SystemExit(3))


# Futures by name


def test_futures_are_a_mapping(group: LocalGroup) -> None:
    stuck = new_gate("stuck")
    futures = group.workers().submit(fail_on, [], "worker1")
    assert list(futures) == ["worker0", "worker1", "worker2"]
    assert len(futures) == 3
    assert futures["worker0"].result(SOON) == "worker0"
    assert not futures.done()
    assert arrived["stuck"].wait(SOON)
    with pytest.raises(TimeoutError, match=r"'worker1' did not answer within 0\.01 s; the calls go on"):
        futures.result(0.01 if futures["worker2"].result(SOON) else 0)
    assert "2 of 3 done" in repr(futures)
    stuck.set()
    assert futures.result(SOON)["worker1"] == "worker1"
    assert futures.done()
    assert not futures.cancel()


def test_futures_of_ones_own() -> None:
    one: Future[int] = Future()
    two: Future[int] = Future()
    both = Futures({"one": one, "two": two})
    first = both.first(1)
    two.set_result(2)
    assert first.result(0) == {"two": 2}
    assert Futures[int]({}).result() == {}
    wrong: Any
    for wrong in (3, [one], {"one": 3}):
        with pytest.raises(UsageError, match="Futures takes"):
            Futures(wrong)


def test_the_first_results(group: LocalGroup) -> None:
    stuck = new_gate("stuck")
    everybody = group.workers()
    connect_all(group)
    assert everybody.submit(fail_on, [], "worker1").first(2).result(SOON) == {
        "worker0": "worker0",
        "worker2": "worker2",
    }
    assert everybody.submit(fail_on, ["worker0"], "worker1").first(1).result(SOON) == {"worker2": "worker2"}
    with pytest.raises(GroupCallError) as failed:
        everybody.submit(fail_on, ["worker0", "worker2"], "worker1").first(2).result(SOON)
    assert list(failed.value.errors) == ["worker0", "worker2"]
    stuck.set()
    futures = everybody.submit(my_name)
    for count in (0, 4, True, 1.0):
        with pytest.raises(UsageError, match=r"first\(\) takes a number from 1 to 3"):
            futures.first(count)  # type: ignore[arg-type]
    assert len(futures.result(SOON)) == 3


def test_a_wait_that_ended_cancels_nothing_later() -> None:
    one: Future[int] = Future()
    two: Future[int] = Future()
    both = Futures({"one": one, "two": two})
    with pytest.raises(TimeoutError):
        both.result(0)
    one.set_exception(KeyError("one"))
    two.set_result(2)
    assert two.result() == 2
    with pytest.raises(GroupCallError):
        both.result()


def test_nobody_is_warned_about_what_was_given_up(group: LocalGroup) -> None:
    """The warnings of this test run are errors."""
    stuck = new_gate("stuck")
    futures = group.workers("worker1", "worker2").submit(fail_on, ["worker2"], "worker2")
    assert futures.first(1).result(SOON) == {"worker1": "worker1"}
    late = futures["worker2"]
    del futures
    stuck.set()
    farcall.collect_all([late]).wait()
    del late
    gc.collect()


def test_futures_are_awaited(group: LocalGroup) -> None:
    async def program() -> None:
        assert await group.workers("worker1", "worker2").submit(doubled, 2) == {"worker1": 4, "worker2": 4}
        assert len(await group.workers().submit(my_name).first(2)) == 2
        with pytest.raises(GroupCallError):
            await group.workers().submit(fail_on, ["worker1"])

    asyncio.run(asyncio.wait_for(program(), SOON))


def test_the_rest_is_cancelled(group: LocalGroup) -> None:
    stuck = new_gate("stuck")
    futures = group.workers().submit(fail_on, [], "worker1")
    assert len(futures.first(2).result(SOON)) == 2
    assert futures["worker1"].cancelled()
    futures = group.workers().submit(fail_on, ["worker2"], "worker1")
    with pytest.raises(GroupCallError) as failed:
        futures.result(SOON)
    assert list(failed.value.errors) == ["worker2"]
    assert futures["worker1"].cancelled()
    futures = group.workers().submit(wait_at, "stuck")
    quorum: Any = futures.first(2)
    assert quorum.cancel()
    assert all(future.cancelled() for future in futures.values())
    futures = group.workers().submit(wait_at, "stuck")
    assert futures.cancel()
    assert all(future.cancelled() for future in futures.values())
    stuck.set()


def test_a_cancelled_task_cancels_the_calls(group: LocalGroup) -> None:
    stuck = new_gate("stuck")

    async def program() -> None:
        futures = group.workers("worker1", "worker2").submit(wait_at, "stuck")

        async def read() -> None:
            await futures

        task = asyncio.ensure_future(read())
        await asyncio.sleep(0)  # it waits now
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all(future.cancelled() for future in futures.values())

    asyncio.run(program())
    stuck.set()


# Lost workers


def test_a_worker_that_cannot_be_reached_fails_its_future(make_group: NewGroup) -> None:
    group = make_group(3)
    both = group.workers("worker1", "worker2")
    infos = [group.agents[1].info, group.agents[2].info]
    connect_all(group)
    stuck = new_gate("stuck")
    futures = both.submit(fail_on, [], "worker1")
    assert arrived["stuck"].wait(SOON)
    group.leave("worker1")
    with pytest.raises(GroupCallError) as failed:
        futures.result(SOON)
    assert list(failed.value.errors) == ["worker1"]
    assert isinstance(failed.value.errors["worker1"], WorkerLostError)
    stuck.set()
    gone, there = group.agents[0].call_many(infos, my_name, None, None, SOON)
    assert there.result(SOON) == "worker2"
    with pytest.raises(WorkerLostError):
        gone.result(SOON)


# One of them


def test_any_takes_the_worker_with_the_fewest_calls(group: LocalGroup) -> None:
    stuck = new_gate("stuck")
    anyone = group.workers(others=True).any()
    waiting = group.worker("worker1").submit(wait_at, "stuck")
    assert {anyone.call(my_name) for _ in range(8)} == {"worker2"}
    assert farcall.rpc_sync(anyone, my_name) == "worker2"
    assert anyone.submit(my_name).result(SOON) == anyone.keep(my_name).to_here() == "worker2"
    two_more = [group.worker("worker2").submit(wait_at, "stuck") for _ in range(2)]
    assert {anyone.options(timeout=SOON).call(my_name) for _ in range(8)} == {"worker1"}
    stuck.set()
    farcall.wait_all([waiting, *two_more])
    assert {anyone.call(my_name) for _ in range(8)} == {"worker1", "worker2"}  # in turn


def call_any(anyone: farcall.Worker) -> tuple[str, str]:
    return my_name(), anyone.call(my_name)


def test_a_handle_of_any_may_be_sent(group: LocalGroup) -> None:
    anyone = group.workers("worker0", "worker2", others=True).any().options(timeout=SOON)
    assert group.worker("worker2").call(call_any, anyone) == ("worker2", "worker0")
    assert repr(anyone) == "<any of workers('worker0', 'worker2', others=True)>"
    assert anyone.wait_joined(0) is anyone
    assert anyone.info().name == "worker2"
