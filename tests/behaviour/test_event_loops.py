"""Calls on the thread of an event loop: none of them stops the loop, whatever state the other worker is in.

A ticker runs beside the calls and reports its longest pause. A loop that waits for a connection to a stopped process
stands still for 10 s, and one that waits until a socket has room for as long as the process is stopped.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from eventually import eventually
from farcall import RpcError, RRef, WorkerLostError
from farcall.testing import LocalGroup, faults
from gates import SOON
from group_stage import NewGroup, echo
from worker_processes import StartWorkers, Workers

pytestmark = pytest.mark.timeout(60)

KILLED = -signal.SIGKILL
LONGEST_PAUSE_S = 3.0
"""Far more than a busy machine needs for one turn of the loop, far less than a loop would wait for a connection."""

PRELUDE = """
import asyncio, signal
import numpy as np
noted = []
def note(n): noted.append(n)
def get_noted(): return noted
def get(rref): return rref.local_value()
def run(main):
    async def tick(pauses):
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            pauses.append(time.monotonic() - before)
    async def all():
        pauses = []
        ticker = asyncio.create_task(tick(pauses))
        await asyncio.sleep(0.02)
        try:
            await main()
            await asyncio.sleep(0.02)
        finally:
            ticker.cancel()
            report(pause=max(pauses))
    asyncio.run(all())
async def told(word):
    while not os.path.exists(word):
        await asyncio.sleep(0.002)
async def failure(awaitable):
    try:
        await awaitable
    except rpc.RpcError as error:
        return [type(error).__name__, getattr(error, "started", None)]
def stop():
    os.kill(os.getpid(), signal.SIGSTOP)
start(num_worker_threads=1, heartbeat_patience=600, **OPTIONS)
w1 = rpc.worker("w1")
"""


def script(body: str, options: str = "{}") -> str:
    """The script of two workers. `body` has what follows the start."""
    return f"OPTIONS = {options}\n{PRELUDE}\n{body}\n"


def wait_until_stopped(group: Workers, rank: int) -> None:
    """Returns when the process is stopped by a signal, and tells the others."""
    stat = Path(f"/proc/{group.processes[rank].pid}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    (group.directory / "stopped").touch()


# First contact


def test_calls_to_a_stopped_worker_wait_beside_the_loop_and_run_in_order(workers: StartWorkers) -> None:
    group = workers(
        script("""
async def main():
    await told("stopped")
    futures = []
    for n in range(200):  # the connection comes about in the middle of it
        futures.append(w1.submit(note, n))
        await asyncio.sleep(0.001)
        if n == 50:
            report(waiting=not any(future.done() for future in futures))
    await asyncio.gather(*futures)
    report(noted=await rpc.rpc_async("w1", get_noted))
if RANK == 1:
    stop()
else:
    run(main)
rpc.shutdown()
""")
    )
    wait_until_stopped(group, 1)
    assert group.wait_for(0, "waiting") is True
    group.send_signal(1, signal.SIGCONT)
    facts = group.finish()[0]
    assert facts["noted"] == list(range(200))
    assert facts["pause"] < LONGEST_PAUSE_S


def test_a_stopped_worker_is_called_by_every_kind_of_call(workers: StartWorkers) -> None:
    """References, their arguments, interceptors and buffers: what was given is sent as it was then."""
    group = workers(
        script("""
class Stamp(rpc.ClientInterceptor):
    def intercept(self, call, send):
        call.annotations["stamp"] = b"1"
        return send(call)
async def main():
    await told("stopped")
    array = np.zeros(1 << 17)
    total = w1.submit(np.sum, array)
    array[:] = 1
    text = bytearray(b"then")
    copy = w1.submit(bytes, text)
    text[:] = b"late"
    shelf = w1.keep(list, (1, 2))
    torch_shelf = rpc.remote("w1", np.copy, args=(array,))
    array[:] = 2
    added = shelf.submit(list.append, 3)
    proxy = shelf.rpc_async().index(2)
    reverse = shelf.keep(sorted, reverse=True)
    carried = w1.submit(get, shelf)
    rpc.add_interceptor(Stamp())
    stamped, kept = w1.submit(max, 4, 5), w1.keep(max, 6, 7)
    report(waiting=True)
    report(results=[float(await total), (await copy).decode(), await added, await proxy, await reverse, await carried,
                    await shelf, float((await torch_shelf).sum()), await stamped, await kept])
    del shelf, torch_shelf, reverse, kept
if RANK == 1:
    stop()
else:
    run(main)
rpc.shutdown()
""")
    )
    wait_until_stopped(group, 1)
    assert group.wait_for(0, "waiting") is True
    group.send_signal(1, signal.SIGCONT)
    facts = group.finish()[0]
    numbers = [1, 2, 3]
    assert facts["results"] == [0.0, "then", None, 1, numbers[::-1], numbers, numbers, float(1 << 17), 5, 7]
    assert facts["pause"] < LONGEST_PAUSE_S


def test_a_call_to_a_stopped_worker_ends_at_its_timeout_or_when_it_is_cancelled_and_never_runs(
    workers: StartWorkers,
) -> None:
    group = workers(
        script("""
async def limited():
    with rpc.deadline(0.2):
        await w1.submit(note, "deadline")
async def main():
    await told("stopped")
    report(timeout=await failure(w1.options(timeout=0.2).submit(note, "timeout")))
    report(deadline=await failure(limited()))
    report(torch=await failure(rpc.rpc_async("w1", note, args=("torch",), timeout=0.2)))
    future = w1.submit(note, "cancelled")
    report(cancel=[future.cancel(), future.cancelled(), await failure(future)])
    async def wait():
        await w1.submit(note, "task")
    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    report(task=task.cancelled())
    last = w1.submit(note, "last")
    report(waiting=True)
    await last
    report(noted=await w1.submit(get_noted))
if RANK == 1:
    stop()
else:
    run(main)
rpc.shutdown()
""")
    )
    wait_until_stopped(group, 1)
    assert group.wait_for(0, "waiting") is True
    group.send_signal(1, signal.SIGCONT)
    facts = group.finish()[0]
    assert facts["timeout"] == facts["deadline"] == facts["torch"] == ["RpcTimeoutError", False]
    assert facts["cancel"] == [True, True, ["CallCancelledError", None]]
    assert facts["task"] is True
    assert facts["noted"] == ["last"]
    assert facts["pause"] < LONGEST_PAUSE_S


def test_a_stopped_worker_holds_up_no_calls_to_others(workers: StartWorkers) -> None:
    """Calls to many workers at once reach the others, and a call to any of them goes to one that answers."""
    group = workers(
        script("""
def rank(): return RANK
async def main():
    await told("stopped")
    array = np.zeros(1 << 17)
    both = rpc.workers("w1", "w2")
    futures = both.submit(np.sum, array)
    array[:] = 1
    report(other=float(await futures["w2"]), stopped=futures["w1"].done(), any=await both.any().submit(rank))
    report(waiting=True)
    report(total=sum(map(float, (await futures).values())))
if RANK == 1:
    stop()
elif RANK == 0:
    run(main)
rpc.shutdown()
"""),
        n=3,
    )
    wait_until_stopped(group, 1)
    assert group.wait_for(0, "waiting") is True
    group.send_signal(1, signal.SIGCONT)
    facts = group.finish()[0]
    assert (facts["other"], facts["stopped"], facts["any"], facts["total"]) == (0.0, False, 2, 0.0)
    assert facts["pause"] < LONGEST_PAUSE_S


def test_calls_to_a_worker_that_was_killed_fail_by_their_futures(workers: StartWorkers) -> None:
    group = workers(
        script("""
async def main():
    await told("killed")
    report(first=await failure(w1.submit(int)), second=await failure(w1.submit(int)))
    await asyncio.sleep(0.1)
    report(later=await failure(w1.submit(int)))
if RANK == 1:
    report(ready=True)
    time.sleep(60)
run(main)
rpc.shutdown(graceful=False)
""")
    )
    assert group.wait_for(1, "ready")
    group.send_signal(1, signal.SIGKILL)
    group.processes[1].wait()
    (group.directory / "killed").touch()
    facts = group.finish(statuses={1: KILLED})[0]
    assert facts["first"] == facts["second"] == facts["later"] == ["WorkerLostError", None]
    assert facts["pause"] < LONGEST_PAUSE_S


def test_a_worker_that_leaves_fails_calls_that_wait_for_a_connection(workers: StartWorkers) -> None:
    group = workers(
        script("""
async def main():
    global future
    await told("stopped")
    future = w1.submit(note, 1)
if RANK == 1:
    stop()
else:
    run(main)
    report(done=future.done())
    rpc.shutdown(graceful=False)
    report(error=outcome(future.wait)["text"])
""")
    )
    wait_until_stopped(group, 1)
    assert "shut down" in group.wait_for(0, "error")
    facts = group.reports(0)
    assert facts["done"] is False
    group.send_signal(1, signal.SIGKILL)
    group.finish(statuses={1: KILLED})


def test_a_blocking_call_on_the_thread_of_a_loop_connects_and_waits(make_group: NewGroup) -> None:
    """As in a notebook, whose cells run on an event loop."""
    group = make_group(2)

    async def cell() -> list[Any]:
        worker = group.worker("worker1")
        return [worker.call(echo, 1), worker.call(echo, 2), worker.keep(list, (3,)).to_here()]

    assert asyncio.run(cell()) == [1, 2, [3]]


# Senders that are held back


@pytest.mark.parametrize(
    ("count", "size", "options"),
    [
        pytest.param(40, 1 << 20, "dict(shared_memory=0)", id="socket"),
        pytest.param(40, 1 << 20, "dict(shared_memory=0, transports=('tcp',))", id="tcp"),
        pytest.param(40, 1 << 20, "dict(shared_memory=1 << 16)", id="ring in chunks"),
        pytest.param(30_000, 1000, "{}", id="ring"),
        pytest.param(1, 48 << 20, "dict(shared_memory=0)", id="one large call"),
    ],
)
def test_a_worker_that_does_not_read_holds_no_loop_back(
    workers: StartWorkers, count: int, size: int, options: str
) -> None:
    body = f"""
def length(n, data):
    noted.append(n)
    return len(data)
async def main():
    await w1.submit(int)
    report(connected=True)
    await told("stopped")
    futures = [w1.options(timeout=25).submit(length, n, bytes({size})) for n in range({count})]
    report(waiting=True)
    report(lengths=sorted(set(await asyncio.gather(*futures))))
    report(noted=await w1.submit(get_noted) == list(range({count})))
run(main) if RANK == 0 else wait_for(lambda: os.path.exists("connected"), 20) and stop()
rpc.shutdown()
"""
    group = workers(script(body, options), limit=50)
    assert group.wait_for(0, "connected")
    (group.directory / "connected").touch()
    wait_until_stopped(group, 1)
    assert group.wait_for(0, "waiting") is True
    group.send_signal(1, signal.SIGCONT)
    facts = group.finish()[0]
    assert facts["lengths"] == [size]
    assert facts["noted"] is True
    assert facts["pause"] < LONGEST_PAUSE_S


# Connections that break


def test_calls_in_a_loop_fail_and_connect_anew(make_faulty_group: NewGroup) -> None:
    group = make_faulty_group(2, heartbeat_patience=600)
    worker = group.worker("worker1")

    async def main() -> None:
        assert await worker.submit(echo, 1) == 1
        faults(group.agents[0]).cut("worker1")
        lost = [worker.submit(echo, n) for n in range(3)]
        for error in await asyncio.gather(*lost, return_exceptions=True):
            assert isinstance(error, WorkerLostError)
        faults(group.agents[0]).heal("worker1")
        for n in range(3):
            assert await worker.submit(echo, n) == n

    asyncio.run(main())


def test_a_reference_that_is_made_while_there_is_no_connection_is_there_after_it(make_faulty_group: NewGroup) -> None:
    group = make_faulty_group(2, heartbeat_interval=0.05, heartbeat_patience=600)
    faults(group.agents[0]).cut("worker1")

    async def make() -> RRef[list[int]]:
        kept = group.worker("worker1").keep(list, (1, 2))
        with pytest.raises(RpcError):
            await kept
        return kept

    kept = [asyncio.run(make())]
    faults(group.agents[0]).heal("worker1")
    eventually(lambda: _fetched(kept[0]) == [1, 2])
    kept.clear()
    eventually(lambda: _holds_nothing(group))


def _fetched(rref: RRef[Any]) -> Any:
    try:
        return rref.to_here()
    except RpcError:
        return None


def _holds_nothing(group: LocalGroup) -> bool:
    return not any(group.references(rank).owned or group.references(rank).held for rank in range(2))


# Cancellation of tasks


def test_a_task_that_is_cancelled_stops_its_remote_work(make_group: NewGroup) -> None:
    group = make_group(2)
    started, ended = asyncio.Event(), []

    async def work() -> None:
        try:
            loop.call_soon_threadsafe(started.set)
            await asyncio.sleep(2 * SOON)
        finally:
            ended.append("cancelled")

    async def main() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        _works.append(work)
        task = asyncio.ensure_future(group.worker("worker1").submit(_work))
        await asyncio.wait_for(started.wait(), SOON)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    loop: Any = None
    asyncio.run(main())
    eventually(lambda: ended == ["cancelled"])


_works: list[Any] = []


async def _work() -> None:
    await _works.pop()()
