"""Futures of calls as `torch.futures.Future`s, so that torch's `then`, `collect_all` and profiler accept them.

A thread that waits for such a future reads the reply of its call itself, as with farcall's own futures. A thread that
waits inside torch's C++ code cannot do that. So the `collect_all` of this module, which replaces torch's after
`install()`, tells the connections that a thread is waiting. For any other wait in C++, the executor reads the reply
some milliseconds later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final

import torch

from farcall.futures import Future
from farcall.gate import FOREVER, asleep

_CHECK_INTERVAL_S: Final = 0.02
"""How often a thread that waits for one of several futures checks whether another one has failed."""


class RpcFuture(torch.futures.Future):  # type: ignore[misc]  # torch may not be there when types are checked
    """The future of a call as a `torch.futures.Future`: `wait()` returns the result, and torch's functions accept it.

    Attributes:
        call: The future of farcall that it wraps; None once this future is done.
        failed: True once the call has failed.
    """

    def __init__(self, call: Future[Any]) -> None:
        """Creates a future that is done when `call` is, with the same result or error.

        Args:
            call: A future of farcall.
        """
        super().__init__()
        self.call: Future[Any] | None = call
        """The wrapped future; None once this one is done."""
        self.failed = False
        """True once the call has failed."""
        call.watch(self._settle, waker=False, attended=True)

    def _settle(self, call: Future[Any]) -> None:
        """Completes this future with the result or the error of the call, which is complete."""
        self.failed = call.exception() is not None
        copy_outcome(self, call)
        self.call = None

    def wait(self) -> Any:
        """Waits without a limit until the call has ended, and returns its result.

        Raises the error of the call, for example `RpcTimeoutError`, or what the function raised.
        """
        call = self.call
        if call is not None:
            call.block(FOREVER)
            del call
            if self.call is not None:
                # Another thread has read the reply, and has left the callback that completes this future to the
                # executor. If this thread belongs to the executor, the callback may need its place.
                with asleep():
                    return super().wait()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        """Returns a torch future of the result of `callback(self)`, which is called when this future is done.

        A future that has failed is done. If it is done already, the callback is called at once. If the callback raises,
        the returned future fails with that error.
        """
        self.hasten()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Calls `callback(self)` when this future is done, or at once if it is. The result of the callback is ignored.

        A future that has failed is done. Torch logs what the callback raises.
        """
        self.hasten()
        super().add_done_callback(callback)

    def hasten(self) -> None:
        """Makes the connection read the reply of this call soon, for a thread that waits inside torch's C++ code.

        Does nothing if the call is complete.
        """
        call = self.call
        if call is not None:
            call.hasten()


def copy_outcome(future: torch.futures.Future, call: Future[Any]) -> None:
    """Completes a torch future with the result or the error of a call that is complete.

    An error that is not an `Exception`, such as `KeyboardInterrupt`, becomes a `RuntimeError`, as torch requires.

    Args:
        future: The torch future. Raises `RuntimeError` if it is complete already.
        call: The future of the call, which must be complete.
    """
    error = call.exception()
    if error is None:
        future.set_result(call.value())
    else:
        future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


def completed_future(value: Any) -> torch.futures.Future:
    """Returns a torch future that already has this result. Any value is accepted."""
    future = torch.futures.Future()
    future.set_result(value)
    return future


def failed_future(error: BaseException) -> Future[Any]:
    """Returns a future of farcall that has already failed with `error`, which must be an exception."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def to_farcall_future(future: Any) -> Future[Any] | None:
    """Returns a future of farcall with the same outcome as `future`, which may be a future of torch or of farcall.

    A future of farcall is returned as it is. Returns None for anything else.
    """
    if isinstance(future, Future):
        return future
    if not isinstance(future, torch._C.Future):
        return None
    call = future.call if isinstance(future, RpcFuture) else None  # read once: another thread may set it to None
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
    """Returns a torch future that is done when all of these are: `torch.futures.collect_all`, but faster for calls.

    Args:
        futures: Futures of torch; anything else raises `TypeError`. For an empty sequence, the returned future is done.

    Returns:
        A future whose result is the list of the futures. If one of them is a call that failed, its own `wait()` raises;
        the returned future does not fail.
    """
    _hasten(futures)
    return torch._C._collect_all(futures)


def wait_all(futures: Sequence[Any]) -> list[Any]:
    """Waits until all futures are done, and returns their results in order; an empty list for no futures.

    `futures` are futures of torch; anything else raises `TypeError`. Raises the error of a future as soon as it has
    failed, without waiting for the others.
    """
    together = torch._C._collect_all(futures)  # fails early as well, but only for errors that torch itself sets
    calls = [future for future in futures if isinstance(future, RpcFuture)]
    for future in calls:
        while (call := future.call) is not None and not call.block(monotonic() + _CHECK_INTERVAL_S):
            if together.done():
                together.wait()
            for failed in calls:
                if failed.failed:
                    failed.wait()
    for future in calls:
        future.wait()
    return [future.wait() for future in together.wait()]


def _hasten(futures: Sequence[Any]) -> None:
    """Makes connections read the replies of these futures soon, if they are futures of calls. Ignores all others."""
    for future in futures:
        if isinstance(future, RpcFuture):
            future.hasten()
