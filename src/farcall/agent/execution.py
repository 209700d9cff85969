"""What a callee does with a request: finds the function, runs it, and makes the reply.

Rules
- Whatever the function raises, `SystemExit` and `KeyboardInterrupt` too, is the caller's to hear of; it never ends the
  worker, nor the thread.
- A function marked `async_execution` is answered when its future is settled; an `async def` function when its coroutine
  ends, in one event loop for the whole worker.
- Arguments are unpickled here, in the thread that runs the function: it is user code like the function itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CoroutineType
from typing import Any

from farcall.agent.coroutines import EventLoop
from farcall.agent.serving import Answerable, Reply
from farcall.errors import SerializationError
from farcall.functions import is_async_execution
from farcall.futures import Future
from farcall.protocol.wire import FAILURE, RESULT, Bytes, encode, encode_start
from farcall.serialization import (
    callable_name,
    dumps_result,
    encode_failure,
    loads_arguments,
    not_rebuilt,
    resolve_function,
)


class CallJob:
    """One request, to be run in the serving pool."""

    __slots__ = ("_body", "_buffers", "_call_id", "_loop", "_worker", "kind", "origin")

    must_run = False

    def __init__(
        self,
        worker: str,
        loop: EventLoop,
        origin: Answerable,
        call_id: int,
        head: bytes,
        body: Bytes,
        buffers: Sequence[Bytes],
    ) -> None:
        self._worker = worker
        self._loop = loop
        self.origin = origin
        self._call_id = call_id
        self.kind: bytes = head
        self._body = body
        self._buffers = buffers

    def run(self) -> Reply | None:
        """See `Job`."""
        function: Any = None
        try:
            if self.kind and not self._body:
                function = resolve_function(self.kind, self._worker)
                result = function()
            else:
                if self.kind:
                    function = resolve_function(self.kind, self._worker)
                    args, kwargs = loads_arguments(self._body, self._buffers)
                else:
                    (function, *args), kwargs = loads_arguments(self._body, self._buffers)  # type: ignore[assignment]
                self._body = b""  # the arguments are the function's alone now, and go when it lets them go
                self._buffers = ()
                result = function(*args, **kwargs)
            if is_async_execution(function):
                self._answer_when_settled(function, result)
                return None
        except BaseException as error:
            if self._body and isinstance(error, SerializationError) and (function is not None or not self.kind):
                error = self._not_rebuilt(error)
            return self._failure(function, error)
        if isinstance(result, CoroutineType):
            self._loop.run(result, lambda outcome, error: self._answer(function, outcome, error))
            return None
        if result is None:
            return encode(RESULT, self._call_id, b"", b"")
        return self._result(function, result)

    def _result(self, function: Callable[..., Any], result: Any) -> Reply:
        try:
            body, buffers = dumps_result(function, result, self._worker)
        except BaseException as error:
            return self._failure(function, error)
        if buffers:
            return [encode_start(RESULT, self._call_id, b"", body, buffers), *buffers]
        return encode(RESULT, self._call_id, b"", body)

    def _name(self) -> str:
        """Of a function that is not there yet, for messages."""
        return self.kind.decode(errors="replace").replace("\0", ".") or "a function sent by value"

    def _not_rebuilt(self, error: SerializationError) -> SerializationError:
        what = f"the arguments of `{self._name()}`" if self.kind else f"{self._name()}, or its arguments,"
        explained = not_rebuilt(what, f"on worker {self._worker!r}", error.__cause__)
        explained.__cause__ = error.__cause__
        return explained

    def _failure(self, function: Any, error: BaseException) -> Reply:
        name = callable_name(function) if function is not None else self._name()
        return encode(FAILURE, self._call_id, b"", encode_failure(error, self._worker, name))

    def _answer(self, function: Callable[..., Any], result: Any, error: BaseException | None) -> None:
        reply = self._result(function, result) if error is None else self._failure(function, error)
        self.origin.answer(reply)

    def _answer_when_settled(self, function: Callable[..., Any], future: Any) -> None:
        if not isinstance(future, Future):
            raise TypeError(
                f"functions decorated with async_execution must return a Future, but what `{callable_name(function)}` "
                f"returned is of type {type(future).__name__}"
            )

        def settled(future: Future[Any]) -> None:
            error = future.exception()
            self._answer(function, None if error is not None else future.value(), error)

        future.watch(settled, waker=False)
