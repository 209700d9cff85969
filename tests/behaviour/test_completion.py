"""`wait`, `as_completed` and `as_concurrent`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import Any

import pytest

import farcall
from farcall import Future, UsageError
from farcall.testing import LocalGroup
from gates import SOON, new_gate, wait_at


def three(group: LocalGroup) -> tuple[Future[Any], Future[Any], Future[Any]]:
    """A call that waits at the gate "stuck", one with a result, and one that fails."""
    worker = group.worker("worker1")
    return worker.submit(wait_at, "stuck"), worker.submit(max, 1, 2), worker.submit(divmod, 1, 0)


def test_wait(group: LocalGroup) -> None:
    stuck = new_gate("stuck")
    slow, good, bad = three(group)
    assert farcall.wait([good, slow], return_when=farcall.FIRST_COMPLETED) == ({good}, {slow})
    assert farcall.wait([slow, bad, good], return_when=farcall.FIRST_EXCEPTION).done >= {bad}
    assert farcall.wait([good, bad, bad], SOON) == ({good, bad}, set())
    assert farcall.wait([good, bad, slow], 0.01) == ({good, bad}, {slow})
    assert farcall.wait([slow], 0) == (set(), {slow})
    assert farcall.wait([slow, good], 0.01, return_when=farcall.FIRST_EXCEPTION).not_done == {slow}
    assert farcall.wait([]) == (set(), set())
    stuck.set()
    assert farcall.wait([slow, good], SOON).not_done == set()
    assert isinstance(bad.exception(), ZeroDivisionError)


def test_as_completed(group: LocalGroup) -> None:
    stuck = new_gate("stuck")
    slow, good, bad = three(group)
    assert farcall.wait([good, bad], SOON).not_done == set()
    futures = farcall.as_completed([slow, good, bad, good])
    assert [next(futures), next(futures)] == [good, bad]
    stuck.set()
    assert list(futures) == [slow]
    assert list(futures) == []
    assert list(farcall.as_completed([])) == []
    assert isinstance(bad.exception(), ZeroDivisionError)


def test_as_completed_ends_at_its_timeout(group: LocalGroup) -> None:
    stuck = new_gate("stuck")
    slow, good, bad = three(group)
    futures = farcall.as_completed([slow, good], timeout=SOON)
    assert next(futures) is good
    with pytest.raises(TimeoutError, match=r"1 futures were not done within 0\.01 s; the calls go on"):
        next(farcall.as_completed([slow], timeout=0.01))

    async def program() -> None:
        with pytest.raises(TimeoutError, match=r"1 futures were not done within 0\.01 s"):
            await anext(farcall.as_completed([slow], timeout=0.01))

    asyncio.run(program())
    with futures:
        pass
    assert list(futures) == []
    assert not slow.done()
    stuck.set()
    slow.result(SOON)
    bad.exception()


def test_as_completed_in_an_event_loop(group: LocalGroup) -> None:
    async def program() -> None:
        stuck = new_gate("stuck")
        slow, good, bad = three(group)
        order: list[Future[Any]] = []
        async for future in farcall.as_completed([slow, good, bad], timeout=SOON):
            order.append(future)
            if len(order) == 2:
                asyncio.get_running_loop().call_soon(stuck.set)
        assert {*order[:2]} == {good, bad}
        assert order[2:] == [slow]
        with pytest.raises(ZeroDivisionError):
            await bad

    asyncio.run(asyncio.wait_for(program(), SOON))


def test_a_cancelled_task_ends_as_completed() -> None:
    async def program() -> None:
        pending: Future[int] = Future()
        futures = farcall.as_completed([pending])
        task = asyncio.ensure_future(anext(futures))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [future async for future in futures] == []
        pending.set_result(3)

    asyncio.run(asyncio.wait_for(program(), SOON))


def test_what_is_refused() -> None:
    future: Future[int] = Future()
    wait: Any = farcall.wait
    as_completed: Any = farcall.as_completed
    wrong: Any
    for use in (wait, as_completed):
        for wrong in (3, [3], [concurrent.futures.Future()], future):
            with pytest.raises(UsageError, match="farcall futures"):
                use(wrong)
        with pytest.raises(UsageError, match=r"give the values\(\) of a mapping"):
            use(farcall.Futures({"one": future}))
        for timeout in (-1, True, "3", float("nan")):
            with pytest.raises(UsageError, match="the timeout must be 0 or more seconds"):
                use([future], timeout)
    with pytest.raises(UsageError, match="`return_when` must be FIRST_COMPLETED"):
        wait([future], return_when="SOON")


def test_a_view_for_concurrent_futures(group: LocalGroup) -> None:
    stuck = new_gate("stuck")
    slow, good, bad = (future.as_concurrent() for future in three(group))
    done, _ = concurrent.futures.wait([slow, good], SOON, concurrent.futures.FIRST_COMPLETED)
    assert done == {good}
    assert good.result(SOON) == 2
    assert isinstance(bad.exception(SOON), ZeroDivisionError)
    stuck.set()
    assert set(concurrent.futures.as_completed([slow, good, bad], SOON)) == {slow, good, bad}
    settled: Future[int] = Future()
    settled.set_result(3)
    assert settled.as_concurrent().result(0) == 3


def test_a_view_that_is_cancelled() -> None:
    future: Future[int] = Future()
    view = future.as_concurrent()
    told = threading.Event()
    view.add_done_callback(lambda _: told.set())
    assert view.cancel()
    assert told.is_set()
    assert concurrent.futures.wait([view], 0).done == {view}
    future.set_result(3)
    assert view.cancelled()


def test_cancelling_passes_through_the_view() -> None:
    future: Any = Future()
    assert future.as_concurrent().cancel()
    assert future.cancelled()
    future = Future()
    view = future.as_concurrent()
    assert future.cancel()
    assert view.cancelled()
    assert concurrent.futures.wait([view], 0).done == {view}
