"""The event loop in which a worker runs the `async def` functions that others call.

One loop, in one thread, made when the first such function is called: asyncio is not imported before that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio


class EventLoop:
    """Runs coroutines until closed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, coroutine: Coroutine[Any, Any, Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Runs it, and calls `done(result, error)` in the loop's thread when it ends. Never raises."""
        import asyncio

        async def run() -> None:
            try:
                result = await coroutine
            except BaseException as error:
                done(None, error)
                if isinstance(error, asyncio.CancelledError):
                    raise
            else:
                done(result, None)

        with self._lock:
            if self._closed:
                coroutine.close()
                done(None, RuntimeError("the worker is shutting down"))
                return
            loop = self._loop
            if loop is None:
                loop = self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._live, args=(loop,), name=f"farcall-{self._name}-asyncio", daemon=True
                )
                self._thread.start()
        asyncio.run_coroutine_threadsafe(run(), loop)

    @staticmethod
    def _live(loop: asyncio.AbstractEventLoop) -> None:
        import asyncio

        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    def close(self, timeout: float) -> None:
        """Cancels what runs and ends the thread, waiting for it at most that long."""
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(timeout)
