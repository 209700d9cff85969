"""The event loop of a worker: what its coroutines end with, and how it is closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from eventually import PATIENCE, eventually
from farcall.agent.coroutines import EventLoop


class Outcomes:
    """What `done` was called with, and where."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.all: list[tuple[Any, BaseException | None]] = []
        self.threads: set[str] = set()

    def done(self, result: Any, error: BaseException | None) -> None:
        self.threads.add(threading.current_thread().name)
        self.all.append((result, error))
        self.came.set()

    def one(self) -> tuple[Any, BaseException | None]:
        assert self.came.wait(PATIENCE)
        (outcome,) = self.all
        return outcome


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop("w")
    yield loop
    if not loop._closed:
        loop.close(PATIENCE)


def outcome(loop: EventLoop, coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, BaseException | None]:
    outcomes = Outcomes()
    loop.run(coroutine, outcomes.done)
    return outcomes.one()


async def give(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


async def fail(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


def test_the_result_of_a_coroutine(loop: EventLoop) -> None:
    assert outcome(loop, give(5)) == (5, None)
    assert outcome(loop, give(None)) == (None, None)


@pytest.mark.parametrize(
    "error", [ValueError("x"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()], ids=repr
)
def test_whatever_a_coroutine_raises_is_handed_over_and_the_loop_goes_on(loop: EventLoop, error: BaseException) -> None:
    assert outcome(loop, fail(error)) == (None, error)
    assert outcome(loop, give("after")) == ("after", None)


def test_the_loop_is_made_for_the_first_coroutine_in_a_thread_of_its_own(loop: EventLoop) -> None:
    assert loop._thread is None
    outcomes = Outcomes()
    loop.run(give(1), outcomes.done)
    outcomes.one()
    loop.run(give(1), outcomes.done)
    eventually(lambda: len(outcomes.all) == 2)
    assert outcomes.threads == {"farcall-w-asyncio"}


def test_coroutines_run_beside_each_other(loop: EventLoop) -> None:
    outcomes = Outcomes()

    async def meet(barrier: asyncio.Barrier) -> None:
        await barrier.wait()

    barrier = asyncio.Barrier(10)
    for _ in range(10):
        loop.run(meet(barrier), outcomes.done)
    eventually(lambda: len(outcomes.all) == 10)
    assert outcomes.all == [(None, None)] * 10


def test_close_cancels_what_runs_and_ends_the_thread(loop: EventLoop) -> None:
    outcomes = Outcomes()
    begun = threading.Event()
    cleaned: list[str] = []

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append("cleaned up")

    loop.run(wait(), outcomes.done)
    assert begun.wait(PATIENCE)
    loop.close(PATIENCE)
    result, error = outcomes.one()
    assert result is None
    assert isinstance(error, asyncio.CancelledError)
    assert cleaned == ["cleaned up"]
    assert loop._thread is not None
    assert not loop._thread.is_alive()


def test_close_ends_asynchronous_generators(loop: EventLoop) -> None:
    ended: list[str] = []
    kept: list[Any] = []

    async def generate() -> Any:
        try:
            while True:
                yield 1
        finally:
            ended.append("ended")

    async def take_one() -> None:
        generator = generate()
        kept.append(generator)
        await anext(generator)

    assert outcome(loop, take_one()) == (None, None)
    loop.close(PATIENCE)
    assert ended == ["ended"]


def test_a_loop_that_was_never_needed_is_closed() -> None:
    loop = EventLoop("w")
    loop.close(0)
    loop.close(0)


def test_after_close_a_coroutine_is_refused(loop: EventLoop) -> None:
    outcome(loop, give(1))
    loop.close(PATIENCE)
    result, error = outcome(loop, give(2))
    assert result is None
    assert isinstance(error, RuntimeError)
    assert "shutting down" in str(error)


def test_close_does_not_wait_beyond_its_time_for_who_blocks_the_loop(loop: EventLoop) -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def block() -> None:
        begun.set()
        go_on.wait(PATIENCE)

    outcomes = Outcomes()
    loop.run(block(), outcomes.done)
    assert begun.wait(PATIENCE)
    loop.close(0.0)
    assert loop._thread is not None
    assert loop._thread.is_alive()
    go_on.set()
    loop._thread.join(PATIENCE)
    assert outcomes.one() == (None, None)


def test_a_loop_may_be_closed_twice(loop: EventLoop) -> None:
    outcome(loop, give(1))
    loop.close(PATIENCE)
    loop.close(PATIENCE)


def blocked_while(loop: EventLoop, act: Callable[[], None]) -> None:
    """Does something while the loop's thread is busy, so that the loop sees it all at once afterwards."""
    begun, go_on = threading.Event(), threading.Event()

    async def block() -> None:
        begun.set()
        go_on.wait(PATIENCE)

    loop.run(block(), lambda result, error: None)
    assert begun.wait(PATIENCE)
    act()
    go_on.set()
    assert loop._thread is not None
    loop._thread.join(PATIENCE)
    assert not loop._thread.is_alive()


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_coroutine_that_close_overtakes_is_answered_too(loop: EventLoop) -> None:
    outcomes = Outcomes()

    def come_and_close() -> None:
        loop.run(give(1), outcomes.done)
        loop.close(0.0)

    blocked_while(loop, come_and_close)
    assert len(outcomes.all) == 1


def test_a_task_that_exits_does_not_end_the_loop(loop: EventLoop, caplog: pytest.LogCaptureFixture) -> None:
    tasks: list[asyncio.Task[None]] = []

    async def spawn() -> None:
        tasks.append(asyncio.create_task(fail(SystemExit(3))))

    assert outcome(loop, spawn()) == (None, None)
    eventually(lambda: tasks and tasks[0].done())
    assert outcome(loop, give("after")) == ("after", None)
    assert isinstance(tasks[0].exception(), SystemExit)
    assert "a task in the event loop ended it" in caplog.text


def test_a_loop_for_which_there_is_no_thread_is_made_for_a_later_coroutine(
    loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        result, error = outcome(loop, give(1))
    assert result is None
    assert isinstance(error, RuntimeError)
    assert outcome(loop, give(2)) == (2, None)
