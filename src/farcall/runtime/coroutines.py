"""The event loop in which a worker runs the `async def` functions that other workers call.

A worker has one loop in one thread. Both are created when the first such function is called, and asyncio is imported
then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from farcall.current import enter_block
from farcall.deadlines import current_scope

if TYPE_CHECKING:
    import asyncio

    from farcall.backends.interface import RpcAgent
    from farcall.deadlines import Scope

logger = logging.getLogger("farcall")


class RunningCoroutine:
    """Cancels one coroutine that `EventLoop.run` has started. `loop` is the event loop in which the coroutine runs.

    `EventLoop.run` creates this object and sets its `task`.
    """

    __slots__ = ("_loop", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.task: asyncio.Task[None] | None = None
        """Its task, which is created in the loop's thread."""

    def cancel(self) -> None:
        """Cancels the coroutine: its current or next await raises `asyncio.CancelledError`.

        A coroutine that has not begun is closed without being run. May be called in any thread. Does nothing if the
        coroutine has ended or the loop is closed.
        """
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel("the call that this function runs for was cancelled")


class EventLoop:
    """An asyncio event loop in a thread of its own. Runs coroutines until it is closed.

    The loop and its thread start with the first coroutine.

    Args:
        name: The name of this worker, for the name of the thread and for messages.
        agent: The agent that is the current one inside the coroutines.
    """

    def __init__(self, name: str, agent: RpcAgent) -> None:
        self._name = name
        self._agent = agent
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._stopped = False  # used in the loop's thread only

    def run(
        self,
        coroutine: Coroutine[Any, Any, Any],
        scope: Scope,
        started: Callable[[], None],
        done: Callable[[Any, BaseException | None], None],
    ) -> RunningCoroutine | None:
        """Starts to run a coroutine in the loop. Does not wait for it, and raises nothing.

        Args:
            coroutine: The coroutine. It is closed without being run if the loop is closed or cannot be started.
            scope: The scope to which the calls that the coroutine makes belong.
            started: Called in the thread of the loop before the first step of the coroutine. Not called if the
                coroutine is not run.
            done: Called once, as `done(result, error)`, in the thread of the loop when the coroutine ends. `error` is
                None if it has returned. If the coroutine cannot be run, called at once as `done(None, error)`.

        Returns:
            An object whose `cancel` cancels the coroutine; None if the coroutine cannot be run.
        """
        import asyncio

        ended = False

        def end(result: Any, error: BaseException | None) -> None:
            nonlocal ended
            ended = True
            done(result, error)

        async def run() -> None:
            enter_block(self._agent)  # in the context of the task, which ends with it
            current_scope.set(scope)
            started()
            try:
                result = await coroutine
            except BaseException as error:
                end(None, error)
                if isinstance(error, asyncio.CancelledError):
                    raise
            else:
                end(result, None)

        def over(_: asyncio.Task[None]) -> None:
            if not ended:  # cancelled before its first step: `run` was never entered
                coroutine.close()
                end(None, asyncio.CancelledError("it was cancelled before it began, or the worker is shutting down"))

        try:
            with self._lock:
                if self._closed:
                    raise RuntimeError("the worker is shutting down")
                loop = self._loop or self._start()
                running = RunningCoroutine(loop)

                def create() -> None:
                    running.task = loop.create_task(run())
                    running.task.add_done_callback(over)

                # Under the lock, so that the loop is not closed in between.
                loop.call_soon_threadsafe(create)
                return running
        except Exception as error:
            coroutine.close()
            done(None, error)
            return None

    def _start(self) -> asyncio.AbstractEventLoop:
        """Starts the thread and returns its event loop. Raises `RuntimeError` if the system cannot create a thread."""
        import asyncio

        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._live, args=(loop,), name=f"farcall-{self._name}-asyncio", daemon=True)
        try:
            thread.start()
        except BaseException:
            loop.close()
            raise
        self._loop, self._thread = loop, thread
        return loop

    def _live(self, loop: asyncio.AbstractEventLoop) -> None:
        """The function of the thread: runs the loop until `close`, then cancels all tasks and closes the loop."""
        import asyncio

        asyncio.set_event_loop(loop)
        try:
            while not self._closed:
                try:
                    loop.run_forever()
                except BaseException:  # such as SystemExit in a task that a function has created; other tasks continue
                    logger.exception("worker %r: a task in the event loop ended it", self._name)
            self._stopped = True
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    def close(self, timeout: float) -> None:
        """Cancels all tasks, ends the thread, and waits for its end. May be called twice.

        If the thread has not ended after `timeout` seconds, returns, and the thread goes on. Does not wait if the loop
        was never started. Coroutines that are given to `run` later are closed without being run.
        """
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is not None and thread is not None:
            with suppress(RuntimeError):  # the loop is closed already
                loop.call_soon_threadsafe(self._stop, loop)
            thread.join(timeout)

    def _stop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stops the loop. Called in its thread. Does nothing if the loop was stopped before.

        A second stop would end the wait for the cancelled tasks too early.
        """
        if not self._stopped:
            self._stopped = True
            loop.stop()
