"""What an agent does with a function that another worker has called, for agents that are written elsewhere.

farcall's own does the same with fewer steps, in `agent.execution`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import CoroutineType
from typing import Any

from farcall.functions import async_result
from farcall.futures import Future


def run_here(
    function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Future[Any]:
    """Runs the function in this thread; a `Future` of what its caller is to hear. Raises nothing.

    The future is settled when this returns, with two exceptions: a function marked `async_execution` gives its own
    future, and the coroutine of an `async def` function runs in an event loop of its own, in a thread of its own.
    What the function raises, `SystemExit` and `KeyboardInterrupt` too, is the caller's to hear of.
    """
    future: Future[Any] = Future()
    try:
        result = function(*args, **(kwargs or {}))
        future_of = async_result(function)
        if future_of is not None:
            return future_of(getattr(function, "__qualname__", repr(function)), result)
        if type(result) is CoroutineType:
            threading.Thread(target=_run_coroutine, args=(result, future), name="farcall-async", daemon=True).start()
            return future
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
    return future


def _run_coroutine(coroutine: CoroutineType[Any, Any, Any], future: Future[Any]) -> None:
    import asyncio  # not at the head: it would be half the time of `import farcall`

    try:
        result = asyncio.run(coroutine)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
