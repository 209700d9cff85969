"""For web services: calls end when the client that asked for them has disconnected.

    async with farcall.asgi.cancel_on_disconnect(request, future):
        return await future

FastAPI and Starlette do not cancel an endpoint whose client has gone, so its remote calls would go on. ASGI, the
interface of Python's web servers, tells about the end of a client by a message that the application has to receive. A
task of the endpoint's event loop waits for it during the block. This module needs no web framework.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol

from farcall.errors import UsageError
from farcall.futures import Future
from farcall.many.futures_by_name import Futures

if TYPE_CHECKING:
    import asyncio
    from contextlib import AbstractAsyncContextManager

_DISCONNECTS: Final = ("http.disconnect", "websocket.disconnect")
"""The types of the messages that say that the client has gone."""


class Request(Protocol):
    """What `cancel_on_disconnect` needs of a request: `Request` and `WebSocket` of FastAPI and Starlette have it."""

    @property
    def receive(self) -> Callable[[], Awaitable[MutableMapping[str, Any]]]:
        """The function with which an ASGI application receives messages."""


def cancel_on_disconnect(
    request: Request, *calls: Future[Any] | Futures[Any]
) -> AbstractAsyncContextManager[None, None]:
    """Cancels calls if the client of a request disconnects during an `async with` block.

    Code that awaits such a call then gets `CallCancelledError`. Calls that are done are left alone. After the block,
    nothing is cancelled any more.

    The block takes over what the client sends: an endpoint that needs the body of its request must read it before. One
    request must not be in two such blocks at once.

    Args:
        request: The request, an object with the attribute `receive` as FastAPI and Starlette have it.
        calls: The futures to cancel; also `Futures` of many workers. None are allowed.

    Returns:
        An asynchronous context manager, to be entered once.

    Raises:
        UsageError: `request` has no function `receive`, or one of `calls` is not a farcall future.

    Example:
        future = farcall.worker("scorer").submit(score, text)
        async with farcall.asgi.cancel_on_disconnect(request, future):
            return await future
    """
    if not callable(getattr(request, "receive", None)):
        raise UsageError(f"cancel_on_disconnect takes a request with an ASGI function `receive`, not {request!r}")
    for call in calls:
        if not isinstance(call, Future | Futures):
            raise UsageError(f"cancel_on_disconnect takes farcall futures, as submit returns them, not {call!r}")
    return _CancelOnDisconnect(request.receive, calls)


class _CancelOnDisconnect:
    """The block of `cancel_on_disconnect`."""

    def __init__(
        self,
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        calls: tuple[Future[Any] | Futures[Any], ...],
    ) -> None:
        self._receive = receive
        self._calls = calls
        self._listener: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        """Starts to wait for the end of the client. Raises `UsageError` the second time."""
        import asyncio  # not at the head: importing it would be half the time of `import farcall`

        if self._listener is not None:
            raise UsageError("a block of cancel_on_disconnect is entered once; make a new one")
        self._listener = asyncio.create_task(self._listen(), name="farcall.asgi.cancel_on_disconnect")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops to wait, and returns when the task has ended, so that the next reader of the request is the only one.

        Raises what `receive` has raised, unless an exception leaves the block anyway.
        """
        import asyncio

        listener = self._listener
        assert listener is not None
        listener.cancel()
        await asyncio.wait([listener])
        if not listener.cancelled():
            failure = listener.exception()  # asked for in any case, or asyncio would log it
            if failure is not None and kind is None:
                raise failure

    async def _listen(self) -> None:
        """Receives messages until the client has gone, and cancels the calls then."""
        while (await self._receive())["type"] not in _DISCONNECTS:
            pass  # the rest of the body of a request, which nobody waits for
        for call in self._calls:
            call.cancel()
