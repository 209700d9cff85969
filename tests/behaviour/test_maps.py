"""`map` over the workers of a selection: order, outcomes, lost workers, workers that join, async iterables."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import farcall
from eventually import eventually
from farcall import Outcome, SerializationError, UnknownWorkerError, UsageError, WorkerLostError
from farcall.testing import LocalGroup
from gates import SOON, arrived, new_gate, wait_at
from group_stage import NewGroup, runs
from worker_processes import StartWorkers

busy: dict[str, int] = {}
most_busy: dict[str, int] = {}
counting = threading.Lock()


def my_name() -> str:
    return farcall.get_worker_info().name


def note(item: Any) -> Any:
    """Notes which worker ran an item."""
    runs.append((my_name(), item))
    return item


def wait_if_first(item: int) -> int:
    runs.append((my_name(), item))
    if item == 0:
        wait_at("first")
    return item


def inverse(item: int) -> float:
    return 1 / item


def count_busy(gate: str) -> None:
    name = my_name()
    with counting:
        busy[name] = busy.get(name, 0) + 1
        most_busy[name] = max(busy[name], most_busy.get(name, 0))
    wait_at(gate)
    with counting:
        busy[name] -= 1


async def doubled(item: int) -> int:
    await asyncio.sleep(0)
    return 2 * item


def lose_other() -> None:
    raise WorkerLostError("worker 'nobody' was lost", "nobody")


def lost_elsewhere(item: int) -> int:
    runs.append(item)
    lose_other()
    return item


def test_results_come_in_the_order_of_the_items(group: LocalGroup) -> None:
    first = new_gate("first")
    results = group.workers().map(wait_if_first, range(9))
    threading.Thread(target=lambda: eventually(lambda: len(runs) == 9) or first.set()).start()
    assert list(results) == list(range(9))
    assert {worker for worker, _ in runs} == {"worker0", "worker1", "worker2"}
    assert list(group.workers().map(doubled, [1, 2, 3])) == [2, 4, 6]
    assert list(group.workers().map(abs, [])) == []
    assert list(group.workers().map(doubled, iter(())).outcomes()) == []


def test_a_failure_is_raised_in_its_place(group: LocalGroup) -> None:
    results = group.workers().map(inverse, [1, 2, 0, 4, 5])
    assert (next(results), next(results)) == (1.0, 0.5)
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert list(results) == []


def test_no_items_are_sent_after_a_failure(group: LocalGroup) -> None:
    items = iter(range(100))
    results = group.workers("worker1").map(inverse, items)
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert next(items) == 1


def test_outcomes_come_as_they_come(group: LocalGroup) -> None:
    first = new_gate("first")
    outcomes = group.workers(others=True).map(wait_if_first, range(5)).outcomes()
    early = [next(outcomes) for _ in range(4)]
    assert sorted(outcome.item for outcome in early) == [1, 2, 3, 4]
    first.set()
    (late,) = outcomes
    assert (late.item, late.result(), late.error, late.worker) == (0, 0, None, dict(map(reversed, runs))[0])


def test_each_item_has_its_own_outcome(group: LocalGroup) -> None:
    lock: Any = threading.Lock()
    items: list[int] = [0, 2, lock, 4]
    outcomes = {
        id(outcome.item) if outcome.item is lock else outcome.item: outcome
        for outcome in group.workers("worker1").map(inverse, items).outcomes()
    }
    assert isinstance(outcomes[0].error, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        outcomes[0].result()
    assert isinstance(outcomes[id(lock)].error, SerializationError)
    assert [outcomes[n].result() for n in (2, 4)] == [0.5, 0.25]
    assert {outcome.worker for outcome in outcomes.values()} == {"worker1"}
    assert repr(outcomes[2]) == "<Outcome of 2 on 'worker1': 0.5>"


def test_so_many_items_are_under_way_on_each_worker(group: LocalGroup) -> None:
    busy.clear()
    most_busy.clear()
    gate = new_gate("busy")
    results = group.workers(others=True).map(count_busy, ["busy"] * 9, per_worker=2)

    def open_when_full() -> None:
        eventually(lambda: sum(busy.values()) == 4)
        gate.set()

    opener = threading.Thread(target=open_when_full)
    opener.start()
    assert list(results) == [None] * 9
    opener.join()
    assert most_busy == {"worker1": 2, "worker2": 2}
    for per_worker in (0, True, 1.5):
        with pytest.raises(UsageError, match="per_worker must be a whole number of at least 1"):
            group.workers().map(abs, [], per_worker=per_worker)  # type: ignore[arg-type]


def test_items_are_read_only_as_they_are_needed(group: LocalGroup) -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for item in range(10_000):
            read.append(item)
            yield item

    results = group.workers("worker1", "worker2").map(note, items())
    assert (read, runs) == ([], [])
    assert next(results) == 0
    assert len(read) <= 2 + 2 + 1
    for expected in range(1, 200):
        assert next(results) == expected
        assert len(read) <= expected + 2 + 16
    results.close()
    assert list(results) == []


def test_results_that_nobody_takes_are_bounded(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    """The first item takes long. The other worker must not run away with all the others."""
    first = new_gate("first")
    items = iter(range(10_000))
    results = group.workers("worker1", "worker2").map(wait_if_first, items)
    waiting = background.submit(next, results)
    eventually(lambda: len(runs) == 2 + 16)
    assert not waiting.done()
    first.set()
    assert waiting.result(SOON) == 0
    assert len(runs) <= 2 + 16 + 2
    results.close()


def test_an_error_of_the_items_comes_after_the_results_before(group: LocalGroup) -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("no more")

    results = group.workers().map(note, items())
    assert (next(results), next(results)) == (1, 2)
    with pytest.raises(KeyError, match="no more"):
        next(results)
    outcomes = group.workers().map(note, items()).outcomes()
    assert {next(outcomes).item, next(outcomes).item} == {1, 2}
    with pytest.raises(KeyError, match="no more"):
        next(outcomes)


def test_what_cannot_be_mapped(group: LocalGroup) -> None:
    everybody: Any = group.workers()
    with pytest.raises(UsageError, match="map takes a function and an iterable of items, not 3"):
        everybody.map(abs, 3)
    with pytest.raises(UsageError, match="'abs' cannot be called"):
        everybody.map("abs", [3])
    results = everybody.map(abs, [3])
    outcomes = results.outcomes()
    with pytest.raises(UsageError, match="outcomes of this map are read"):
        next(results)
    with pytest.raises(UsageError, match="before the first result is read, and once"):
        results.outcomes()
    assert [outcome.result() for outcome in outcomes] == [3]
    results = everybody.map(abs, [3])
    assert next(results) == 3
    with pytest.raises(UsageError, match="before the first result is read, and once"):
        results.outcomes()


# asyncio


def test_results_and_outcomes_of_an_async_for(group: LocalGroup) -> None:
    async def items(until: int) -> AsyncIterator[int]:
        for item in range(until):
            await asyncio.sleep(0)
            yield item

    async def program() -> None:
        everybody = group.workers()
        assert [result async for result in everybody.map(doubled, items(9))] == list(range(0, 18, 2))
        assert [result async for result in everybody.map(doubled, [1, 2])] == [2, 4]
        outcomes = [outcome async for outcome in everybody.map(note, items(5)).outcomes()]
        assert sorted(outcome.item for outcome in outcomes) == [0, 1, 2, 3, 4]
        async with everybody.map(note, items(1000)) as results:
            async for result in results:
                if result == 3:
                    break
        with pytest.raises(UsageError, match="iterate the results with `async for`"):
            next(everybody.map(note, items(3)))

    asyncio.run(asyncio.wait_for(program(), SOON))


def test_results_come_while_the_next_item_is_awaited(group: LocalGroup) -> None:
    async def program() -> None:
        more = asyncio.Event()

        async def items() -> AsyncIterator[int]:
            yield 1
            await more.wait()
            yield 2

        results = group.workers().map(note, items())
        assert await anext(results) == 1
        more.set()
        assert [result async for result in results] == [2]

    asyncio.run(asyncio.wait_for(program(), SOON))


def test_an_error_of_async_items(group: LocalGroup) -> None:
    async def items() -> AsyncIterator[int]:
        yield 1
        raise KeyError("no more")

    async def program() -> None:
        results = group.workers().map(note, items())
        assert await anext(results) == 1
        with pytest.raises(KeyError, match="no more"):
            await anext(results)

    asyncio.run(asyncio.wait_for(program(), SOON))


def test_a_cancelled_task_ends_the_map(group: LocalGroup) -> None:
    stuck = new_gate("stuck")

    async def program() -> None:
        results = group.workers("worker1").map(wait_at, ["stuck", "stuck"])

        async def read() -> None:
            await anext(results)

        task = asyncio.ensure_future(read())
        while not arrived["stuck"].is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [result async for result in results] == []

    asyncio.run(asyncio.wait_for(program(), SOON))
    stuck.set()


def test_closing_cancels_what_is_under_way(group: LocalGroup, background: ThreadPoolExecutor) -> None:
    stuck = new_gate("stuck")
    pending = group.agents[0].calls_pending
    results = group.workers("worker1").map(wait_at, ["stuck"] * 3, per_worker=2)
    background.submit(next, results, None)
    eventually(lambda: pending(group.agents[1].info) == 2)
    results.close()
    eventually(lambda: pending(group.agents[1].info) == 0)
    stuck.set()


# Workers that come and go


def test_a_worker_that_joins_gets_items(make_group: NewGroup, background: ThreadPoolExecutor) -> None:
    group = make_group(2, is_open=True)
    others = group.workers(others=True).wait_joined(1, SOON)
    first = new_gate("first")
    results = others.map(wait_if_first, range(8)).outcomes()
    taken: list[Outcome[int, int]] = []
    reading = background.submit(taken.extend, results)
    assert arrived["first"].wait(SOON)
    group.join("late")  # worker1 is busy: nothing but the change of the group can wake the map
    eventually(lambda: len(taken) == 7)
    assert {outcome.worker for outcome in taken} == {"late"}
    first.set()
    reading.result(SOON)
    assert (taken[-1].item, taken[-1].worker) == (0, "worker1")


@pytest.mark.parametrize("retries", [False, True])
def test_a_worker_that_leaves_during_a_map(make_group: NewGroup, background: ThreadPoolExecutor, retries: bool) -> None:
    group = make_group(3, is_open=True)
    others = group.workers(others=True).wait_joined(2, SOON).options(idempotent=retries)
    first = new_gate("first")
    taken: list[Outcome[int, int]] = []
    reading = background.submit(taken.extend, others.map(wait_if_first, range(6)).outcomes())
    assert arrived["first"].wait(SOON)
    lost = next(worker for worker, item in runs if item == 0)
    eventually(lambda: len(taken) == 5)
    if retries:
        first.set()
        new_gate("first").set()  # it does not wait again
    group.leave(lost)
    first.set()
    reading.result(SOON)
    outcome = next(outcome for outcome in taken if outcome.item == 0)
    if retries:
        assert outcome.result() == 0
    else:
        assert isinstance(outcome.error, WorkerLostError)
        assert outcome.worker == lost
    assert all(each.error is None for each in taken if each.item)


def test_no_item_is_lost_with_a_worker_that_had_none(make_group: NewGroup) -> None:
    group = make_group(3, is_open=True)
    others = group.workers(others=True).wait_joined(2, SOON)
    leaving = group.agents["worker2"].info
    results = others.map(note, range(60))
    assert [next(results) for _ in range(20)] == list(range(20))
    rest = []
    for outcome in results:
        rest.append(outcome)
        if outcome == 30:
            eventually(lambda: group.agents[0].calls_pending(leaving) == 0)
            group.leave("worker2")
    assert rest == list(range(20, 60))
    assert runs[-1][0] == "worker1"


def test_the_map_ends_when_no_worker_is_left(make_group: NewGroup, background: ThreadPoolExecutor) -> None:
    group = make_group(2, is_open=True)
    others = group.workers(others=True).wait_joined(1, SOON)
    first = new_gate("first")
    taken: list[Outcome[int, int]] = []

    def read() -> None:
        for outcome in others.options(idempotent=True).map(wait_if_first, range(9)).outcomes():
            taken.append(outcome)

    reading = background.submit(read)
    assert arrived["first"].wait(SOON)
    group.leave("worker1")
    with pytest.raises(UnknownWorkerError, match=r"no worker of workers\(others=True\) is left for the other items"):
        reading.result(SOON)
    first.set()
    assert [(outcome.item, type(outcome.error)) for outcome in taken] == [(0, WorkerLostError)]


def test_a_loss_that_the_function_reports_is_not_a_lost_worker(group: LocalGroup) -> None:
    outcomes = list(group.workers("worker1").options(idempotent=True).map(lost_elsewhere, [1, 2]).outcomes())
    assert [type(outcome.error) for outcome in outcomes] == [WorkerLostError, WorkerLostError]
    assert runs == [1, 2]


SCRIPT = """
def work(item):
    if item == 4 and not os.path.exists("done"):
        open("done", "w").close()
        os._exit(3)  # as a process that is killed
    return [rpc.get_worker_info().name, item]

@rpc.idempotent
def work_again(item):
    return work(item)

def outcomes(function):
    run = rpc.workers(others=True).options(timeout=20).map(function, range(12)).outcomes()
    return sorted([each.item, each.worker, type(each.error).__name__] for each in run)

start(heartbeat_interval=0.2)
if RANK == 0:
    report(outcomes=outcomes(work_again if os.environ["STAGE_MARKED"] == "yes" else work))
    rpc.shutdown(graceful=False)
else:
    wait_for(lambda: "w0" not in names(), 25)
    rpc.shutdown(graceful=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("marked", ["yes", "no"])
def test_a_process_that_dies_during_a_map(workers: StartWorkers, marked: str) -> None:
    started = workers(SCRIPT, 4, environment={"STAGE_MARKED": marked})
    outcomes = started.wait_for(0, "outcomes")
    assert [item for item, _, _ in outcomes] == list(range(12))
    failed = {item: error for item, _, error in outcomes if error != "NoneType"}
    assert failed == ({} if marked == "yes" else {4: "WorkerLostError"})


def test_marks_on_functions(group: LocalGroup) -> None:
    @farcall.idempotent
    def marked(item: int) -> int:
        return item

    assert marked(3) == 3
    assert list(group.workers().map(marked, [1, 2])) == [1, 2]
    with pytest.raises(TypeError, match=r"cannot be marked as idempotent.*options\(idempotent=True\)"):
        farcall.idempotent(abs)
