"""What a callee does with a request: finds what is called, runs it, and makes the reply.

Rules
- Whatever the function raises, `SystemExit` and `KeyboardInterrupt` too, is the caller's to hear of; it never ends the
  worker, nor the thread.
- A function marked `async_execution` is answered when its future is settled; an `async def` function when its coroutine
  ends, in one event loop for the whole worker. What asks for a value that is not there yet is run when it is.
- Arguments are unpickled here, in the thread that runs the function: it is user code like the function itself.
- A remote call has no reply: its outcome settles the value of a reference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import CoroutineType
from typing import Any, NamedTuple, Protocol

from farcall.agent.book import ReferenceBook
from farcall.agent.coroutines import EventLoop
from farcall.agent.handle import Handle
from farcall.agent.serving import Answerable, Serving
from farcall.functions import is_async_execution
from farcall.futures import DONE, FAILED, Future, run_callbacks
from farcall.protocol.control import pack_section, unpack_handle
from farcall.protocol.ids import Worker
from farcall.protocol.wire import (
    FAILURE,
    METHOD,
    PRESENCE,
    RESULT,
    RESULT_CARRYING,
    TYPE,
    VALUE,
    Bytes,
    encode,
    encode_start,
)
from farcall.serialization import (
    callable_name,
    collecting,
    dumps_result,
    encode_failure,
    loads_arguments,
    offering,
    resolve_function,
)
from farcall.transports.base import Buffer


class Workplace(NamedTuple):
    """Where functions run: what all jobs of an agent share."""

    worker: str
    loop: EventLoop
    serving: Serving
    book: ReferenceBook


class Caller(Answerable, Protocol):
    """The connection that a request came on."""

    def caller(self) -> Worker:
        """Who is at its other end."""

    def is_lost(self) -> bool:
        """Whether what was sent on it may not have arrived."""


class _FunctionJob(ABC):
    """Runs a callee, and leaves it to the subclass what becomes of the outcome."""

    __slots__ = ("_body", "_buffers", "_handles", "_place", "kind", "origin")

    must_run = False
    origin: Caller | None

    def __init__(
        self, place: Workplace, head: bytes, body: Bytes, buffers: Sequence[Bytes], handles: Sequence[Handle]
    ) -> None:
        self._place = place
        self.kind: bytes = head
        self._body = body
        self._buffers = buffers
        self._handles = handles

    def run(self) -> Sequence[Buffer] | None:
        """See `Job`."""
        head = self.kind
        function: Any = None
        try:
            if head and head[0] <= TYPE[0]:
                waiting_for = self._value_if_not_ready()
                if waiting_for is not None:
                    waiting_for.watch(lambda _: self._place.serving.submit(self), waker=True, attended=True)
                    return None
                function = self._callee_on_reference()
            args, kwargs = self._arguments()
            if not head:
                function, *args = args
            elif function is None:
                function = resolve_function(head, f"worker {self._place.worker!r}")
            result = function(*args, **kwargs)
            if is_async_execution(function):
                self._finish_when_settled(function, result)
                return None
        except BaseException as error:
            return self._failed(function, error)
        if isinstance(result, CoroutineType):
            self._place.loop.run(result, lambda outcome, error: self._finish(function, outcome, error))
            return None
        return self._done(function, result)

    def _arguments(self) -> tuple[Sequence[Any], dict[str, Any]]:
        body, buffers, handles = self._body, self._buffers, self._handles
        self._body, self._buffers, self._handles = b"", (), ()  # they go when the function lets them go
        if handles:
            with offering(handles):
                return loads_arguments(body, buffers)
        return loads_arguments(body, buffers)

    def _value_if_not_ready(self) -> Future[Any] | None:
        reference, _, _ = unpack_handle(self.kind[1:])
        value = self._place.book.value(reference)
        return None if value.done() else value

    def _callee_on_reference(self) -> Callable[..., Any]:
        """What is to be called, for a request on the value of a reference."""
        what = self.kind[:1]
        reference, _, rest = unpack_handle(self.kind[1:])
        value = self._place.book.value(reference).value()  # raises what the remote call raised
        if what == METHOD:
            return _method(value, rest.decode())
        if what == VALUE:
            return lambda: value
        if what == PRESENCE:
            return lambda: None
        return lambda: type(value)

    def _finish_when_settled(self, function: Callable[..., Any], future: Any) -> None:
        if not isinstance(future, Future):
            raise TypeError(
                f"functions decorated with async_execution must return a Future, but `{callable_name(function)}` "
                f"returned a {type(future).__name__}"
            )

        def settled(future: Future[Any]) -> None:
            error = future.exception()
            self._finish(function, None if error is not None else future.value(), error)

        future.watch(settled, waker=False)

    @abstractmethod
    def _finish(self, function: Callable[..., Any], result: Any, error: BaseException | None) -> None:
        """As `_done` or `_failed`, later and in another thread."""

    @abstractmethod
    def _done(self, function: Callable[..., Any], result: Any) -> Sequence[Buffer] | None:
        """It returned; the reply, if there is one."""

    @abstractmethod
    def _failed(self, function: Any, error: BaseException) -> Sequence[Buffer] | None:
        """It raised; the reply, if there is one."""


def _method(value: Any, name: str) -> Callable[..., Any]:
    """A method of a value; or what reads an attribute that cannot be called."""
    attribute = getattr(value, name)
    if callable(attribute):
        return attribute  # type: ignore[no-any-return]
    return lambda: attribute


class CallJob(_FunctionJob):
    """One call, to be answered."""

    __slots__ = ("_call_id",)

    origin: Caller

    def __init__(
        self,
        place: Workplace,
        origin: Caller,
        call_id: int,
        head: bytes,
        body: Bytes,
        buffers: Sequence[Bytes],
        handles: Sequence[Handle] = (),
    ) -> None:
        # Not super().__init__: one call less on the path of every call.
        self._place = place
        self.origin = origin
        self._call_id = call_id
        self.kind = head
        self._body = body
        self._buffers = buffers
        self._handles = handles

    def _done(self, function: Callable[..., Any], result: Any) -> Sequence[Buffer]:
        if result is None:
            return [encode(RESULT, self._call_id, b"", b"")]
        try:
            with collecting() as handles:
                body, buffers = dumps_result(function, result, self._place.worker)
            if handles:
                number, carried = self._place.book.pass_on(handles, self.origin.caller(), self.origin)
                kind, head = RESULT_CARRYING, pack_section(number, carried)
            else:
                kind, head = RESULT, b""
        except BaseException as error:
            return self._failed(function, error)
        if buffers:
            return [encode_start(kind, self._call_id, head, body, buffers), *buffers]
        return [encode(kind, self._call_id, head, body)]

    def _failed(self, function: Any, error: BaseException) -> Sequence[Buffer]:
        failure = encode_failure(error, self._place.worker, _name(self.kind, function))
        return [encode(FAILURE, self._call_id, b"", failure)]

    def _finish(self, function: Callable[..., Any], result: Any, error: BaseException | None) -> None:
        self.origin.answer(self._done(function, result) if error is None else self._failed(function, error))


class RemoteJob(_FunctionJob):
    """One remote call, whose outcome is the value of a reference."""

    __slots__ = ("_value",)

    def __init__(
        self,
        place: Workplace,
        value: Future[Any],
        head: bytes,
        body: Bytes,
        buffers: Sequence[Bytes],
        handles: Sequence[Handle],
    ) -> None:
        super().__init__(place, head, body, buffers, handles)
        self.origin = None
        self._value = value

    def _done(self, function: Callable[..., Any], result: Any) -> None:
        run_callbacks(self._value, self._value.settle(DONE, result))

    def _failed(self, function: Any, error: BaseException) -> None:
        run_callbacks(self._value, self._value.settle(FAILED, error))

    def _finish(self, function: Callable[..., Any], result: Any, error: BaseException | None) -> None:
        if error is None:
            self._done(function, result)
        else:
            self._failed(function, error)


def _name(head: bytes, function: Any) -> str:
    if head[:1] == METHOD:
        return head[1:][-(len(head) - 29) :].decode(errors="replace")
    if head[:1] == VALUE:
        return "to_here"
    if function is not None:
        return callable_name(function)
    return head.decode(errors="replace").replace("\0", ".")
