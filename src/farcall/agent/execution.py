"""What a callee does with a request: finds the function, runs it, and makes the reply or the value of a reference.

Rules
- Whatever the function raises, `SystemExit` and `KeyboardInterrupt` too, is the caller's to hear of; it never ends the
  worker, nor the thread.
- A function marked `async_execution` is answered when its future is settled; an `async def` function when its coroutine
  ends, in one event loop for the whole worker.
- A request on the value of a reference that is not there yet is put off until it is; no thread waits for it.
- Whatever goes wrong, if only memory is left for it, the caller hears of it.
- Arguments are unpickled here, in the thread that runs the function: it is user code like the function itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CoroutineType
from typing import Any, Final, Protocol

from farcall.agent.book import ReferenceBook
from farcall.agent.coroutines import EventLoop
from farcall.agent.handle import Handle
from farcall.agent.jobs import Answerable, Reply
from farcall.agent.lanes import FEW_HANDLES, SMALL_BODY
from farcall.agent.returning import Returning
from farcall.agent.sending import LARGE
from farcall.agent.serving import Serving
from farcall.agent.values import Value
from farcall.errors import ProtocolError, SerializationError
from farcall.functions import async_result
from farcall.futures import DONE, Future, run_callbacks
from farcall.protocol.control import HANDLE_SIZE, pack_section
from farcall.protocol.ids import Worker
from farcall.protocol.wire import (
    FAILURE,
    HEADER,
    METHOD,
    PLAIN,
    PRESENCE,
    RESULT,
    RESULT_CARRYING,
    TYPE,
    UNTOLD,
    VALUE,
    Bytes,
    encode,
)
from farcall.serialization import (
    ATOMS,
    callable_name,
    collecting,
    dumps_atom,
    dumps_plain_result,
    dumps_result,
    encode_failure,
    loads_arguments,
    not_rebuilt,
    offering,
    resolve_function,
)
from farcall.transports.base import Buffer

_pack: Final = HEADER.pack


@dataclass(slots=True)
class Workplace:
    """Where functions run: what all jobs of an agent share."""

    worker: str
    loop: EventLoop
    serving: Serving
    book: ReferenceBook
    last_resort: bytes
    """The failure that is told if there is not even the memory to make one."""
    call_job: type[CallJob]
    """What is made of a call from another worker, and of a remote call: others than these if not all is allowed."""
    remote_job: type[RemoteJob]
    failure_to_send: Callable[[str, BaseException], BaseException] | None = None
    """Given a function's name and what it raised here for others: what its caller is to hear. Raises nothing."""
    own_remote_job: type[RemoteJob] = field(default_factory=lambda: RemoteJob)
    """The same for a remote call of this worker's to itself."""


class Caller(Answerable, Protocol):
    """The connection that a request came on."""

    def caller(self) -> Worker:
        """Who is at its other end."""

    def is_lost(self) -> bool:
        """Whether what was sent on it may not have arrived."""

    def check_reply(
        self, function: Callable[..., Any] | str, handles: int, body: bytes, buffers: Sequence[memoryview]
    ) -> None:
        """Raises `SerializationError` if the caller would not take such a reply."""

    def reply_of(
        self, kind: int, call_id: int, head: bytes, body: bytes, buffers: list[memoryview]
    ) -> Sequence[Buffer] | Returning | None:
        """A large reply, for `answer`; None if it has been sent, which may have taken a while.

        Or what has to be `made` a reply, once nothing of the result is in any frame.
        """


class FunctionJob(ABC):
    """Runs a callee, and leaves it to the subclass what becomes of the outcome."""

    __slots__ = ("_body", "_buffers", "_callee", "_handles", "_place", "_subject", "kind", "origin")

    must_run = False
    origin: Caller | None
    kind: bytes
    _place: Workplace
    _callee: bytes
    _body: Bytes
    _buffers: Sequence[Bytes]
    _handles: Sequence[Handle]
    _subject: Value | None
    """What the request is on, if that is the value of a reference."""

    def _find_subject(self) -> None:
        """For a request on the value of a reference: holds that from now on, though the reference may be given up."""
        callee = self._callee
        if callee:
            self._subject = self._place.book.value_at(callee)
            # How long a method takes has nothing to do with whose it is.
            self.kind = callee[:1] + callee[1 + HANDLE_SIZE :]

    def run(self) -> Reply | None:
        """See `Job`."""
        callee = self._callee
        function: Any = None
        try:
            if not callee:
                args, kwargs = self._arguments()
                if not args:
                    raise ProtocolError("a call came that names no function and brings none")
                function, *args = args
                result = function(*args, **kwargs)
            else:
                subject = self._subject
                if subject is None:
                    function = resolve_function(callee, self._place.worker)
                elif not subject._state:
                    subject.watch(lambda _: self._place.serving.submit(self), waker=True, attended=True)
                    return None
                elif subject.failure:
                    return self._failed_with(subject.failure)
                else:
                    value = subject._value if subject._state == DONE else subject.value()  # which raises
                    what = callee[:1]
                    if what == VALUE:
                        reply = self._done("to_here", value)
                        return reply if type(reply) is not Returning else self._made(reply)
                    if what == PLAIN:
                        return self._made(self._tell(value))
                    if what != METHOD:
                        name, answer = _QUESTIONS[what]
                        return self._made(self._done(name, answer(value)))
                    name = self.kind[1:].decode()
                    function = getattr(value, name) if name != "__call__" else value
                    if not callable(function) and name != "__call__":  # else Python says so
                        function = _reader_of(value, name, function)
                    del value
                if self._body:
                    args, kwargs = self._arguments()
                    result = function(*args, **kwargs)
                else:
                    result = function()
            future_of = async_result(function)
            if future_of is not None:
                future = future_of(callable_name(function), result)
                if future._state != DONE:
                    self._finish_when_settled(function, future)
                    return None
                result = future._value  # as good as returned
        except BaseException as error:
            return self._failed(function, error)
        if type(result) is CoroutineType:  # not isinstance, which may run code of the result's
            self._place.loop.run(result, lambda outcome, error: self._finish(function, outcome, error))
            return None
        reply = self._done(function, result)
        if type(reply) is Returning:
            args = kwargs = function = result = None  # type: ignore[assignment]  # it goes back if nobody else has it
            return self._made(reply)
        return reply

    def _made(self, reply: Reply | Returning | None) -> Reply | None:
        """The reply itself."""
        if not isinstance(reply, Returning):
            return reply
        try:
            return reply.made()
        except BaseException as error:
            return self._failed(None, error)

    def _arguments(self) -> tuple[Sequence[Any], dict[str, Any]]:
        body, buffers, handles = self._body, self._buffers, self._handles
        self._body, self._buffers, self._handles = b"", (), ()  # they go when the function lets them go
        try:
            if handles:
                with offering(handles):
                    return loads_arguments(body, buffers)
            return loads_arguments(body, buffers)
        except SerializationError as error:
            what = f"the arguments of `{self._name()}`" if self._callee else f"{self._name()}, or its arguments,"
            raise not_rebuilt(what, f"on worker {self._place.worker!r}", error.__cause__) from error.__cause__

    def _name(self) -> str:
        """Of a function that is not there yet, for messages."""
        name = self.kind.decode(errors="replace").lstrip("\1\2\3\4\5").replace("\0", ".")
        return name or ("the value" if self._callee else "a function sent by value")

    def _failed(self, function: Any, error: BaseException) -> Reply | None:
        """It raised; the reply, if there is one."""
        name = callable_name(function) if function is not None else self._name()
        if self._place.failure_to_send is not None:
            error = self._place.failure_to_send(name, error)
        return self._failed_with(encode_failure(error, self._place.worker, name))

    def failed(self, error: BaseException) -> Reply | None:
        """See `Awaited`."""
        try:
            return self._failed(None, error)
        except BaseException:
            return self._failed_with(self._place.last_resort)

    def _finish_when_settled(self, function: Callable[..., Any], future: Future[Any]) -> None:
        def settled(future: Future[Any]) -> None:
            error = future.exception()
            self._finish(function, None if error is not None else future.value(), error)

        future.watch(settled, waker=False)

    @abstractmethod
    def _finish(self, function: Callable[..., Any], result: Any, error: BaseException | None) -> None:
        """As `_done` or `_failed`, later and in another thread."""

    @abstractmethod
    def _done(self, function: Callable[..., Any] | str, result: Any) -> Reply | Returning | None:
        """It returned; the reply, if there is one, or what makes it. The function's name is enough for messages."""

    def _tell(self, value: Any) -> Reply | Returning | None:
        """The caller wants the value if it is plain; the reply, if there is one."""
        return self._done("to_here", value)

    @abstractmethod
    def _failed_with(self, failure: bytes) -> Reply | None:
        """It failed, and that is the encoded failure; the reply, if there is one."""


_QUESTIONS: Final[dict[bytes, tuple[str, Callable[[Any], Any]]]] = {
    PRESENCE: ("_get_future", lambda value: None),
    TYPE: ("_get_type", type),
}
"""What else is asked about a value, by which method of the reference, and what answers it."""


def _reader_of(value: Any, name: str, attribute: Any) -> Callable[..., Any]:
    """What reads an attribute of a value that cannot be called."""

    def read(*args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            raise TypeError(
                f"{name!r} of a {type(value).__name__} is a {type(attribute).__name__}, which cannot be called: "
                "it is read without arguments"
            )
        return attribute

    return read


def _told(value: Any) -> bytes:
    """The body of the reply to one who wants a value if it is plain."""
    if value is None:
        return b""
    body = dumps_atom(value) if type(value) in ATOMS else UNTOLD
    return body if len(body) <= SMALL_BODY else UNTOLD


class CallJob(FunctionJob):
    """One call, to be answered."""

    __slots__ = ("_call_id",)

    origin: Caller

    def __init__(
        self,
        place: Workplace,
        origin: Caller,
        call_id: int,
        callee: bytes,
        body: Bytes,
        buffers: Sequence[Bytes],
        handles: Sequence[Handle] = (),
    ) -> None:
        # Not super().__init__: one call less on the path of every call.
        self._place = place
        self.origin = origin
        self._call_id = call_id
        self._body = body
        self._buffers = buffers
        self._handles = handles
        self.kind = self._callee = callee
        self._subject = None
        if callee[:1] <= PLAIN:
            self._find_subject()

    def _done(self, function: Callable[..., Any] | str, result: Any) -> Reply | Returning | None:
        if result is None:
            return encode(RESULT, self._call_id, b"", b"")
        handles: Mapping[Handle, int] = {}
        try:
            plain = dumps_plain_result(result)
            if plain is not None:
                body, buffers = plain
            else:
                with collecting() as handles:
                    body, buffers = dumps_result(function, result, self._place.worker)
            if buffers or len(body) > SMALL_BODY or len(handles) > FEW_HANDLES:
                self.origin.check_reply(function, len(handles), body, buffers)
            if handles:
                number, carried = self._place.book.pass_on(list(handles), self.origin.caller(), self.origin)
                kind, head = RESULT_CARRYING, pack_section(number, carried)
            else:
                kind, head = RESULT, b""
            if buffers or len(body) > LARGE:
                return self.origin.reply_of(kind, self._call_id, head, body, buffers)
            return encode(kind, self._call_id, head, body)
        except BaseException as error:
            return self._failed(function, error)

    def _tell(self, value: Any) -> Reply | None:
        return encode(RESULT, self._call_id, b"", _told(value))

    def _failed_with(self, failure: bytes) -> Reply:
        return encode(FAILURE, self._call_id, b"", failure)

    def _finish(self, function: Callable[..., Any], result: Any, error: BaseException | None) -> None:
        try:
            reply = self._made(self._done(function, result)) if error is None else self._failed(function, error)
        except BaseException as escaped:
            reply = self.failed(escaped)
        if reply is not None:
            self.origin.answer(reply)


class RemoteJob(FunctionJob):
    """One remote call, whose outcome is the value of a reference; and is told to the caller if it is plain, and wanted.

    Plain is what cannot change: else a copy that is made now may not be what is there when it is used.
    """

    __slots__ = ("_call_id", "_keeps", "_value")

    def __init__(
        self,
        place: Workplace,
        value: Value,
        callee: bytes,
        body: Bytes,
        buffers: Sequence[Bytes],
        handles: Sequence[Handle],
        keeps: Handle | None = None,
        origin: Caller | None = None,
        call_id: int = 0,
    ) -> None:
        """`keeps` must live until it has run: the handle whose method it is. `call_id`: answered if it is not 0."""
        # Not super().__init__: one call less for every remote call.
        self._place = place
        self.origin = origin
        self._call_id = call_id
        self._body = body
        self._buffers = buffers
        self._handles = handles
        self.kind = self._callee = callee
        self._subject = None
        self._value = value
        self._keeps = keeps
        if callee[:1] <= PLAIN:
            self._find_subject()

    def _done(self, function: Callable[..., Any] | str, result: Any) -> Reply | None:
        value, call_id = self._value, self._call_id
        value._value = result  # as `Value.give`, without its frames
        value._state = DONE
        if value._watchers:
            run_callbacks(value, value.wake())
        if not call_id:
            return None
        # As `encode` of `_told`, without their frames:
        body = b""
        if result is not None:
            body = dumps_atom(result) if type(result) in ATOMS else UNTOLD
            if len(body) > SMALL_BODY:
                body = UNTOLD
        return _pack(RESULT, 0, 0, 0, len(body), call_id) + body

    def _failed_with(self, failure: bytes) -> Reply | None:
        self._value.fail(failure)
        return encode(FAILURE, self._call_id, b"", failure) if self._call_id else None

    def failed(self, error: BaseException) -> Reply | None:
        """See `Awaited`."""
        if not self._value.done():
            return super().failed(error)
        return encode(RESULT, self._call_id, b"", UNTOLD) if self._call_id else None

    def _finish(self, function: Callable[..., Any], result: Any, error: BaseException | None) -> None:
        try:
            reply = self._done(function, result) if error is None else self._failed(function, error)
        except BaseException as escaped:
            reply = self.failed(escaped)
        if reply is not None and self.origin is not None:
            self.origin.answer(reply)
