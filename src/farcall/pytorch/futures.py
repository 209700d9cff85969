"""Calls whose results are `torch.futures.Future`s, so that `then`, `collect_all` and the profiler take them.

A thread that waits for such a future reads the reply of its call itself, as with farcall's own futures. What torch's
C++ code waits for cannot do that; `collect_all` here, which stands for torch's after `install()`, tells the connections
that somebody waits. Whoever else waits in C++ has its reply read by the serving pool some milliseconds later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final

import torch

from farcall.futures import Future
from farcall.sleeping import FOREVER

_GLANCE: Final = 0.02
"""Seconds after which whoever waits for one of many looks whether another one has failed."""


class RpcFuture(torch.futures.Future):  # type: ignore[misc]  # torch may not be there when types are checked
    """The future of a call, as torch knows futures."""

    def __init__(self, call: Future[Any]) -> None:
        super().__init__()
        self.call: Future[Any] | None = call
        """Until it is settled."""
        self.failed = False
        call.watch(self._settle, waker=False, attended=True)

    def _settle(self, call: Future[Any]) -> None:
        self.failed = call.exception() is not None
        settle(self, call)
        self.call = None

    def wait(self) -> Any:
        """The result, as soon as it is there. Raises what the call raised."""
        call = self.call
        if call is not None:
            call.block(FOREVER)
            del call
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """A future for what `callback(this future)` returns. It runs as soon as this one is done."""
        self.hasten()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Runs `callback(this future)` as soon as it is done."""
        self.hasten()
        super().add_done_callback(callback)

    def hasten(self) -> None:
        """Somebody waits for it where we cannot see it: its reply is to be read without delay."""
        call = self.call
        if call is not None:
            call.hasten()


def settle(future: torch.futures.Future, call: Future[Any]) -> None:
    """Settles a torch future as that call was."""
    error = call.exception()
    if error is None:
        future.set_result(call.value())
    else:
        future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


def settled(value: Any) -> torch.futures.Future:
    """A torch future that has a result already."""
    future = torch.futures.Future()
    future.set_result(value)
    return future


def failed_with(error: BaseException) -> Future[Any]:
    """A future of farcall's that has failed already."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def adopted(future: Any) -> Future[Any] | None:
    """A future of farcall's for one of torch's; one of farcall's itself; None for anything else."""
    if isinstance(future, Future):
        return future
    if not isinstance(future, torch._C.Future):
        return None
    call = future.call if isinstance(future, RpcFuture) else None  # once: it may be settled just now
    if call is not None:
        return call
    mine: Future[Any] = Future()

    def follow(done: Any) -> None:
        try:
            value = done.value()
        except Exception as error:
            mine.set_exception(error)
        else:
            mine.set_result(value)

    future.add_done_callback(follow)
    return mine


def collect_all(futures: Sequence[Any]) -> Any:
    """A future of all of these, done when all are. As `torch.futures.collect_all`, and quicker for those of calls."""
    _hasten(futures)
    return torch._C._collect_all(futures)


def wait_all(futures: Sequence[Any]) -> list[Any]:
    """The results of all of these, when all are there. Raises an error of theirs, as soon as one is known."""
    together = torch._C._collect_all(futures)  # fails early, too, but knows only of errors that come from torch itself
    calls = [future for future in futures if isinstance(future, RpcFuture)]
    for future in calls:
        while (call := future.call) is not None and not call.block(monotonic() + _GLANCE):
            if together.done():
                together.wait()
            for failed in calls:
                if failed.failed:
                    failed.wait()
    for future in calls:
        future.wait()
    return [future.wait() for future in together.wait()]


def _hasten(futures: Sequence[Any]) -> None:
    for future in futures:
        if isinstance(future, RpcFuture):
            future.hasten()
