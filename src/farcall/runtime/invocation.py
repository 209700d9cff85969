"""`Invocation`, one request at the callee: finds the function, runs it, and sends the reply.

Rules
- Everything that the function raises is sent to the caller, including `SystemExit` and `KeyboardInterrupt`. It never
  ends the worker or the thread.
- The reply of a function marked `async_execution` is sent when its future is done. The reply of an `async def` function
  is sent when its coroutine ends; all coroutines of a worker run in one event loop.
- A request that uses the value of a reference is delayed until that value exists. No thread waits for it.
- Arguments are unpickled here, on the thread that runs the function, because unpickling may run user code.
- With an allow-list, the callee is checked before the arguments are unpickled, and a method before it is looked up.
- The arguments and the result are released before a reply is sent, because a buffer that nothing refers to can be sent
  back to the caller without a copy (`transports.base.Link.send`).
- Every error is reported to the caller, even if memory is short.
- A request whose time is over before it starts is not run, and is counted. A request that is cancelled before it starts
  is not run either. The thread that runs it sets `has_started` first and then looks at `deadline`; the thread that
  cancels it sets `deadline` first and then looks at `has_started`. So what it says about that is true.
- Each request is answered once, by the thread that *claims* it: that removes it from the calls of its connection, or a
  remote call from the creations of the store. What a cancelled function returns or raises is dropped.
- An invocation is the scope (`deadlines`) of its function: calls that the function makes end no later than the
  invocation, and are cancelled with it. So is the coroutine or future that the function has returned.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final

from farcall.deadlines import Scope, ServingThread, current_scope, find_scope, serve_in_thread
from farcall.errors import CallCancelledError, NotAllowedError, ProtocolError, RpcTimeoutError, SerializationError
from farcall.functions import ASYNC_MARK, async_result
from farcall.futures import DONE, Future
from farcall.gate import FOREVER
from farcall.protocol.fields import quoted
from farcall.protocol.frames import (
    FAILURE,
    HANDLE_SIZE,
    METHOD,
    PRESENCE,
    RESULT,
    TYPE,
    VALUE,
    Bytes,
    pack_annotations,
    pack_cancelled,
    pack_full_reply,
    pack_reply,
)
from farcall.runtime.executor import Task
from farcall.runtime.handles import Handle, Value
from farcall.runtime.interceptors import ServerCall, run_server_interceptors
from farcall.runtime.parts import WorkerParts
from farcall.serialization import (
    ATOMS,
    callable_name,
    collecting,
    dumps_atom,
    dumps_plain_result,
    dumps_result,
    encode_failure,
    find_raising_function,
    loads_arguments,
    loads_restricted_arguments,
    not_rebuilt_error,
    offering,
    resolve_function,
)

if TYPE_CHECKING:
    from farcall.protocol.ids import RRefId
    from farcall.runtime.reference_store import ReferenceStore
    from farcall.runtime.server import ServerConnection
    from farcall.security.allowed import AllowList

logger = logging.getLogger("farcall")

INLINE_VALUE_BYTES: Final = 4096
"""An immutable value of at most this size is sent in the reply to the remote call that created it."""
SMALL_PAYLOAD_BYTES: Final = 60_000
FEW_HANDLES: Final = 16
"""Every caller accepts replies within these two limits, so their size is not checked."""
_LATER: Final = object()
"""Stands for the result of a function whose reply is sent when a future is done."""
_ON_REFERENCE: Final = TYPE
"""Callees that begin with this byte or a lower one name a reference."""


def call_after_reply(function: Callable[[], object]) -> None:
    """Calls `function` as soon as the reply to the current call was sent, by the thread that has sent it.

    The current call is the one that this thread or coroutine runs for another worker. Errors of `function` are logged.
    If there is no current call, or its reply was sent already, `function` is called at once, and its errors are raised.
    """
    scope = find_scope()
    while scope is not None and not isinstance(scope, Invocation):
        scope = scope.outer
    if scope is None or scope.is_answered():
        function()
    else:
        scope.add_after_reply(function)


class Invocation(Scope):
    """One request at the callee: a job that runs its function and sends the reply.

    `run` runs the function.

    Args:
        parts: The objects that the connections and calls of this worker share, such as its executor.
        connection: The connection on which the reply is sent; None if this worker has called itself with `remote`.
        call_id: The id of the call, which the reply repeats; 0 if no reply is sent.
        callee: The function or method to call, as encoded in the frame (`protocol.frames`); empty if the function
            is the first pickled argument.
        payload: The pickled arguments; empty for none.
        buffers: The buffers of the arguments; may be empty.
        deadline: When nobody waits for the result any more, as a time of the monotonic clock; `FOREVER` for no
            limit.

    Raises:
        ProtocolError: `callee` should name a reference, but is too short.
    """

    __slots__ = (
        "_after_reply", "_annotations", "_buffers", "_call", "_call_id", "_callee", "_connection", "_handles", "_keeps",
        "_parts", "_payload", "_reference", "_subject", "_value", "has_started",
    )  # fmt: skip

    must_run = False
    ends_function = True

    def __init__(
        self,
        parts: WorkerParts,
        connection: ServerConnection | None,
        call_id: int,
        callee: bytes,
        payload: Bytes,
        buffers: Sequence[Bytes],
        deadline: float,
    ) -> None:
        # Not super().__init__: that is one function more for every call.
        self.deadline = deadline
        self.is_cancelled = False
        self._members = None
        self.has_started = False
        self._parts = parts
        self._connection = connection
        self._call_id = call_id
        self._callee = callee
        self._payload = payload
        self._buffers = buffers
        self._handles: Sequence[Handle] = ()
        self._annotations: dict[str, bytes] | None = None
        self._value: Value | None = None
        self._keeps: object = None
        self._call: ServerCall | None = None
        self._after_reply: list[Callable[[], object]] | None = None
        self._subject: Value | None = None
        """The value of the reference that the request uses, or None. Kept even if it is released meanwhile."""
        if callee and callee[:1] <= _ON_REFERENCE:
            self._subject = parts.store.value_at(callee, connection.worker_number if connection is not None else None)

    def attach(
        self,
        handles: Sequence[Handle],
        annotations: dict[str, bytes] | None,
        value: Value | None = None,
        reference: RRefId | None = None,
        keeps: object = None,
    ) -> None:
        """Adds the parts that only some requests have. Must be called before `run`. Other requests do not need it.

        If `reference` is given, `ReferenceStore.creations` has this call from now on, and the timers cancel it at its
        deadline.

        Args:
            handles: The handles of the references in the arguments; may be empty.
            annotations: The annotations of the request; None for none.
            value: For a call of `remote`, the `Value` that receives the result; else None.
            reference: For a call of `remote`, the reference of that value; else None.
            keeps: An object to keep alive until the function has run; None for none.
        """
        self._handles = handles
        self._annotations = annotations
        self._value = value
        self._keeps = keeps
        if reference is not None:
            self._reference = reference
            self._parts.store.creations[reference] = self
            if self.deadline != FOREVER:  # of a call, the caller would say when its time is over
                self._parts.timers.schedule(self.deadline, partial(_cancel_late, self._parts.store, reference))

    # Running

    def run(self) -> None:
        """Runs the function of the request, and sends the reply. Raises nothing: errors are sent to the caller.

        A request may use the value of a reference. If that value is still pending, returns at once: the executor runs
        the request again when the value, or an error in its place, is there. If the function returns a coroutine, or is
        marked `async_execution` and returns a pending future, the reply is sent when the coroutine or future is done.
        """
        function: Any = None
        thread = current_scope.get()
        if type(thread) is not ServingThread:
            thread = serve_in_thread()  # the first request of this thread
        try:
            parts = self._parts
            if self._subject is not None and not self._is_subject_there(self._subject):
                return
            self.has_started = True
            if self.deadline <= monotonic():
                self._skip()
                return
            if parts.guard is not None:
                self._check_allowed(parts.guard)
            thread.scope = self
            args: Sequence[Any] = ()
            kwargs: dict[str, Any] = {}
            if self._subject is None and self._callee and not self._payload:
                function = resolve_function(self._callee, parts.name)
            else:
                function, args, kwargs = self._load()
            if function is None:  # a request for a value, its presence or its type: `args` has the name and the answer
                function, result = args
            elif parts.interceptors.server or parts.function_runner is not None:
                result = self._run_function(function, args, kwargs)
            else:
                result = function(*args, **kwargs)
            del args, kwargs
            if hasattr(function, ASYNC_MARK) or type(function) is partial:
                result = self._await_async_execution(function, result)
            if type(result) is CoroutineType:  # not isinstance, which may run code of the result
                self._run_coroutine(function, result)
                return
            if result is _LATER:
                return
            outcome = [result]
            del result  # this stack frame must not keep it: see the rules
            self._finish(function, outcome)
        except BaseException as error:
            self._fail(function, error)
        finally:
            thread.scope = None
        if self._after_reply is not None:  # not reached if `_finish_later` sends the reply
            self._call_after_reply()

    def _run_coroutine(self, function: Callable[..., Any], coroutine: CoroutineType[Any, Any, Any]) -> None:
        self.has_started = False  # until its first step
        task = self._parts.loop.run(coroutine, self, self._start_late, partial(self._finish_later, function))
        if task is not None:
            self.add(task)

    def _start_late(self) -> None:
        self.has_started = True

    def _skip(self) -> None:
        """Answers a request that is not run, because its deadline has passed. Does nothing if it was answered before.

        The reply says that the function was not started. For a call of `remote`, `RpcTimeoutError` takes the place of
        the value.
        """
        self.has_started = False
        if not self._claim():
            return
        if self._connection is not None:
            self._connection.calls_expired += 1
        if self._value is None and self._connection is not None:
            self._connection.reply(pack_cancelled(self._call_id, False), None)
        else:
            self._fail_late()

    def _is_subject_there(self, subject: Value) -> bool:
        """Returns whether the request can be run now: `subject`, the value that it uses, exists.

        If the value is pending, returns False, and the executor runs the request again when the value, or an error in
        its place, is there. If an error is in its place, sends that error to the caller and returns False.
        """
        if not subject._state:
            subject.watch(lambda _: self._parts.executor.submit(self), waker=True, attended=True)
            return False
        if subject.failure:
            if self._claim():
                self._fail_with(subject.failure)
            return False
        return True

    def _await_async_execution(self, function: Callable[..., Any], result: Any) -> Any:
        """Returns the final result of a call, given the `result` that its function returned.

        Returns `result` itself if the function is not marked `async_execution`. Otherwise `result` must be a future. If
        it is done, returns its value. If it is pending or has failed, returns the constant `_LATER`: then the reply is
        sent when the future is done, not by the caller of this method. Raises `TypeError` if `result` should be a
        future and is not.
        """
        future_of = async_result(function)
        if future_of is None:
            return result
        future = future_of(callable_name(function), result)
        if future._state == DONE:
            return future._value
        self._finish_when_done(function, future)
        self.add(_CancelledLater(self._parts, future))
        return _LATER

    def _load(self) -> tuple[Any, Sequence[Any], dict[str, Any]]:
        """Returns the function, its positional arguments and its keyword arguments.

        Some requests about a reference call no function: they ask for the value, whether it exists, or its type. For
        these the function is None, and there are two positional arguments: first a name that is used in messages, then
        the answer to the request. The keyword arguments are empty.

        Raises:
            ProtocolError: The request has no function.
            SerializationError: There is no such function, or the arguments cannot be unpickled.
            NotAllowedError: The allow-list forbids the arguments.
            Exception: The request is about a reference: its value has no such method (`AttributeError`), or the
                function that should have made the value has failed, and its error is raised.
        """
        callee, subject = self._callee, self._subject
        if not callee:
            args, kwargs = self._arguments()
            if not args:
                raise ProtocolError("a call came that names no function and brings none")
            function, *args = args
            return function, args, kwargs
        if subject is None:
            function = resolve_function(callee, self._parts.name)
        else:
            value = subject._value if subject._state == DONE else subject.value()  # which raises
            kind = callee[:1]
            if kind != METHOD:
                return None, _answer(kind, value), {}
            name = callee[1 + HANDLE_SIZE :].decode()
            if not name or "\0" in name:
                return self._load_function_of(value, name)
            function = getattr(value, name) if name != "__call__" else value
            if not callable(function) and name != "__call__":  # else calling it raises Python's own TypeError
                function = _reader_of(value, name, function)
        if not self._payload:
            return function, (), {}
        args, kwargs = self._arguments()
        return function, args, kwargs

    def _load_function_of(self, value: Any, name: str) -> tuple[Any, Sequence[Any], dict[str, Any]]:
        """Returns a function that has `value` as its first argument, and its other positional and keyword arguments.

        Args:
            value: The value of the reference that the request uses.
            name: The encoded name of the function; empty if the function itself is the first pickled argument.

        Raises:
            ProtocolError: `name` is empty, and there are no pickled arguments.
            SerializationError: There is no such function, or the arguments cannot be unpickled.
            NotAllowedError: The allow-list forbids the arguments.
        """
        function = resolve_function(name.encode(), self._parts.name) if name else None
        args, kwargs = self._arguments() if self._payload else ((), {})
        if function is None:
            if not args:
                raise ProtocolError("a call on a reference came that names no function and brings none")
            function, *args = args
        return partial(function, value), args, kwargs

    def _arguments(self) -> tuple[Sequence[Any], dict[str, Any]]:
        """Unpickles the arguments. Returns the positional and the keyword arguments. Can be called once.

        Raises `SerializationError` if they cannot be unpickled, and `NotAllowedError` if the allow-list forbids them.
        """
        payload, buffers, handles = self._payload, self._buffers, self._handles
        self._payload, self._buffers, self._handles = b"", (), ()  # so that only the function keeps them alive
        guard = self._parts.guard
        try:
            if guard is None and not handles:
                return loads_arguments(payload, buffers)
            with offering(handles):
                if guard is None:
                    return loads_arguments(payload, buffers)
                return loads_restricted_arguments(payload, buffers, guard)
        except NotAllowedError as error:
            self._log_refusal(error)
            raise
        except SerializationError as error:
            what = f"the arguments of `{self._name()}`" if self._callee else f"{self._name()}, or its arguments,"
            raise not_rebuilt_error(what, f"on worker {self._parts.name!r}", error.__cause__) from error.__cause__

    def _run_function(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs `function` inside the server interceptors, if there are any, and returns the result.

        If `WorkerParts.function_runner` is set, it is called with the function, and what it returns is run in place of
        the function. Raises the errors of the function and of the interceptors.
        """
        parts = self._parts
        runner = parts.function_runner
        interceptors = parts.interceptors.server
        if not interceptors:
            run = function if runner is None else runner(function)
            return run(*args, **kwargs)
        caller = self._connection.peer_info() if self._connection is not None else None
        name = callable_name(function)
        call = self._call = ServerCall(
            caller, function, name, args, kwargs, self._annotations or {}, self.add_after_reply
        )

        def proceed(call: ServerCall) -> Any:
            run = call.function if runner is None else runner(call.function)
            return run(*call.args, **call.kwargs)

        return run_server_interceptors(interceptors, call, proceed)

    # The allow-list

    def _check_allowed(self, guard: AllowList) -> None:
        """Raises `NotAllowedError` and logs a warning if the allow-list forbids the callee.

        Raises `SerializationError` if there is no such function. Does nothing if the callee is allowed.
        """
        callee, subject = self._callee, self._subject
        try:
            if not callee:
                guard.check_by_value()
            elif subject is None:
                self._check_function(guard, callee)
            elif callee[:1] == METHOD:
                name = callee[1 + HANDLE_SIZE :]
                if not name:
                    guard.check_by_value()
                elif b"\0" in name:
                    self._check_function(guard, name)
                else:
                    guard.check_method(subject.value(), name.decode(errors="replace"))
        except NotAllowedError as error:
            self._log_refusal(error)
            raise

    def _check_function(self, guard: AllowList, encoded: bytes) -> None:
        """Raises `NotAllowedError` if the allow-list forbids a function; otherwise does nothing.

        `encoded` is the name of the module and the qualified name of the function, separated by a zero byte. In a
        qualified name such as `A.b`, `A` must be a class, or the function is forbidden. Raises `SerializationError` if
        there is no such function.
        """
        module, _, name = encoded.decode(errors="replace").partition("\0")
        guard.check_function(module, name)
        outer, _, _ = name.rpartition(".")
        while outer:
            if not isinstance(resolve_function(f"{module}\0{outer}".encode(), self._parts.name), type):
                full = quoted(f"{module}.{name}")
                raise NotAllowedError(f"`{full}` is not allowed: it leads through something that is no class")
            outer, _, _ = outer.rpartition(".")
        guard.check_found(module, name, resolve_function(encoded, self._parts.name))

    def _log_refusal(self, error: NotAllowedError) -> None:
        """Logs a warning that the allow-list has forbidden this request."""
        who = f"{self._connection}" if self._connection is not None else "another worker"
        why = quoted(str(error))  # the text contains names that the caller chose
        logger.warning("worker %r refused a call of %s from %s: %s", self._parts.name, self._name(), who, why)

    # Answering

    def _finish(self, function: Callable[..., Any] | str, outcome: list[Any]) -> None:
        """Sends the reply of a function that has returned; for a call of `remote`, keeps the result. Raises nothing.

        If the result cannot be sent, sends the error. Sends nothing if the request was answered before.

        Args:
            function: The function, or its name as a str; for error messages.
            outcome: A list with the result as its only item, which this method removes. So no stack frame of a caller
                keeps the result alive.
        """
        try:
            connection, call = self._connection, self._call
            if call is not None:
                call.args, call.kwargs = (), {}
            if self._value is not None:
                self._keep(outcome.pop())
                return
            assert connection is not None
            if connection.calls.pop(self._call_id, None) is None:
                return  # it was cancelled and answered meanwhile
            if outcome[0] is None and call is None:
                connection.reply(pack_reply(RESULT, self._call_id, b""), None)
                return
            frame, buffers = self._pack_result(function, outcome.pop(), connection)
            self._keeps = None
            connection.reply(frame, buffers)
        except BaseException as error:
            self._send_failure(None, error)

    def _claim(self) -> bool:
        """Claims the request for this thread. Returns True if this call has claimed it, False if it was claimed before.

        Only the thread that got True may answer the request, and it must do so.
        """
        if self._value is not None:
            return self._parts.store.creations.pop(self._reference, None) is not None
        return self._connection is None or self._connection.calls.pop(self._call_id, None) is not None

    def is_answered(self) -> bool:
        """Returns whether the request was answered, or some thread is about to answer it."""
        if self._value is not None:
            return self._reference not in self._parts.store.creations
        return self._connection is not None and self._call_id not in self._connection.calls

    def _pack_result(
        self, function: Callable[..., Any] | str, result: Any, connection: ServerConnection
    ) -> tuple[bytes, list[memoryview]]:
        """Pickles a result. Returns the frame of the reply to be sent on `connection`, and its buffers (may be empty).

        `function` is the function, or its name as a str; for error messages. Raises `SerializationError` if the result
        cannot be pickled, or is larger than the caller accepts.
        """
        handles: Any = ()
        plain = dumps_plain_result(result) if result is not None else (b"", [])
        if plain is not None:
            payload, buffers = plain
        else:
            with collecting() as handles:
                payload, buffers = dumps_result(function, result, self._parts.name)
        if buffers or len(payload) > SMALL_PAYLOAD_BYTES or len(handles) > FEW_HANDLES:
            connection.check_reply_size(function, len(handles), payload, buffers)
        annotations = pack_annotations(self._call.reply_annotations) if self._call is not None else b""
        if not handles and not annotations:
            return pack_reply(RESULT, self._call_id, payload), list(buffers)
        references = self._parts.store.pass_on(list(handles), connection.number, connection) if handles else b""
        return pack_full_reply(RESULT, self._call_id, payload, references, annotations), list(buffers)

    def _keep(self, result: Any) -> None:
        """Stores the result of a call of `remote`, and sends the reply. Does nothing if the call was cancelled.

        The reply contains the result if that is small and immutable. No reply is sent if the caller expects none.
        """
        assert self._value is not None
        if not self._claim():
            return
        connection, call_id = self._connection, self._call_id
        frame = b""
        if connection is not None and call_id:
            annotations = pack_annotations(self._call.reply_annotations) if self._call is not None else b""
            if result is None:
                frame = pack_full_reply(RESULT, call_id, b"", b"", annotations)
            else:
                payload = dumps_atom(result) if type(result) in ATOMS else b""
                is_kept = not 0 < len(payload) <= INLINE_VALUE_BYTES
                frame = pack_full_reply(RESULT, call_id, b"" if is_kept else payload, b"", annotations, is_kept)
        self._value.give(result)
        del result
        if connection is not None and frame:
            connection.reply(frame, None)

    def _fail(self, function: Any, error: BaseException) -> None:
        """Sends an error to the caller: the function has raised it, or could not be run. Raises nothing.

        Does nothing if the request was answered before.

        Args:
            function: The function, for the name in the message; None if it could not be found.
            error: The error.
        """
        if not self._claim():
            return
        if self.is_over() and self._value is None and self._connection is not None and _is_cancellation(error):
            self._connection.reply(pack_cancelled(self._call_id, True), None)  # its time is over
        else:
            self._send_failure(function, error)

    def _send_failure(self, function: Any, error: BaseException) -> None:
        """Sends an error to the caller. This thread must have claimed the request, so that no other thread answers it.

        For a call of `remote`, the error also takes the place of the value. If `error` cannot be encoded, a
        `RuntimeError` is sent instead. `function` is used for the name in the message; None if it is not known.
        """
        try:
            name = callable_name(function) if function is not None else self._name()
            if str(getattr(function, "__module__", "")).startswith("farcall."):
                name = find_raising_function(error) or name  # a wrapper of farcall: name the user function that raised
            if _is_cancellation(error):
                text = f"`{name}` was cancelled on worker {self._parts.name!r}: {error}"
                error = CallCancelledError(text).with_traceback(error.__traceback__)
            if self._parts.failure_to_send is not None:
                error = self._parts.failure_to_send(name, error)
            failure = encode_failure(error, self._parts.name, name)
        except BaseException:
            logger.exception("worker %r: a failure could not be encoded", self._parts.name)
            failure = encode_failure(
                RuntimeError("the function failed, and there was not even memory to say how"), self._parts.name, ""
            )
        self._fail_with(failure)

    def _fail_with(self, failure: bytes) -> None:
        """Sends an encoded failure to the caller; for a call of `remote`, also stores it in place of the value."""
        if self._value is not None:
            self._value.fail(failure)
        if self._connection is not None and self._call_id:
            annotations = self._call.reply_annotations if self._call is not None else {}
            frame = pack_full_reply(FAILURE, self._call_id, failure, b"", pack_annotations(annotations))
            self._connection.reply(frame, None)

    def _finish_when_done(self, function: Callable[..., Any], future: Future[Any]) -> None:
        """Has the reply sent when `future` is done; at once if it is done already.

        If `future` was cancelled, the caller gets a `CallCancelledError`. `function` is used for error messages.
        """

        def done(future: Future[Any]) -> None:
            error: BaseException | None = CallCancelledError("the future that it has returned was cancelled")
            if not future.cancelled():
                error = future.exception()
            self._finish_later(function, None if error is not None else future.value(), error)

        future.watch(done, waker=False)

    def _finish_later(self, function: Callable[..., Any], result: Any, error: BaseException | None) -> None:
        """Sends the reply of a function whose result or error was known only after `run` had returned.

        `error` is None if the function has succeeded; otherwise `result` is not used. `function` is used for error
        messages. Raises nothing.
        """
        if error is None:
            self._finish(function, [result])
        else:
            self._fail(function, error)
        if self._after_reply is not None:
            self._call_after_reply()

    # Cancellation

    def cancel_call(self) -> bool:
        """Cancels the request, and sends no reply. Returns whether its function had started.

        A function that has not started is not run. If it has started, the calls that it has made are cancelled. So is
        the coroutine or future that it has returned. A later result of the function is dropped. The calling thread must
        have claimed the request, so that no other thread answers it.
        """
        self.deadline = 0.0  # so that `run` skips it
        has_started = self.has_started
        if not has_started:
            self._payload, self._buffers, self._handles = b"", (), ()
        super().cancel()
        return has_started

    def cancel(self) -> None:
        """Cancels a call of `remote`. Does nothing if its value, or an error in its place, is there already.

        A function that has not started is not run. If it has started, the calls that it has made are cancelled. An
        error takes the place of the value: `RpcTimeoutError` if the deadline has passed, otherwise
        `CallCancelledError`. Runs no user code in this thread. Does nothing if `WorkerParts.honours_deadlines` is
        False. Must not be used for calls that `remote` did not make; this is not checked.
        """
        if self._parts.honours_deadlines and self._claim():
            if self._connection is not None:
                self._connection.calls_cancelled += 1
            is_late = self.deadline <= monotonic()
            self.cancel_call()
            # In the executor, because callbacks of users may wait for the value.
            self._parts.executor.submit(Task(partial(self._fail_late, is_late), must_run=True))

    def note_over(self) -> None:
        """Called when the function learns that it is cancelled or that its deadline has passed: cancels the call.

        The caller is sent a failure, even if the function goes on. For a call of `remote`, an error also takes
        the place of the value. A later result of the function is dropped. Does nothing if the call was cancelled or
        answered before, or if it is a call of `remote` and `WorkerParts.honours_deadlines` is False.
        """
        if self.is_cancelled:
            return
        if self._value is not None:
            self.cancel()
        elif self._connection is not None and self._claim():
            self._connection.calls_cancelled += 1
            self.cancel_call()
            self._connection.reply(pack_cancelled(self._call_id, True), None)

    def done(self) -> bool:
        """Returns whether the value of a call of `remote`, or an error in its place, is there.

        False for other calls.
        """
        return self._value is not None and self._value.done()

    def _fail_late(self, is_late: bool = True) -> None:
        """Has an error take the place of the value of a call of `remote`, and sends it to the caller.

        The error is a `RpcTimeoutError` if `is_late`, otherwise a `CallCancelledError`. This thread must have claimed
        the request, so that no other thread answers it.
        """
        name = self._name()
        error: Exception = CallCancelledError(
            f"the remote call of `{name}` on worker {self._parts.name!r} was cancelled"
        )
        if is_late:
            error = RpcTimeoutError(
                f"RPC ran for more than set timeout: the result of `{name}` was not there on worker "
                f"{self._parts.name!r} when the time of its remote call was over. Give it a longer timeout",
                self.has_started,
            )
        self._fail_with(encode_failure(error, self._parts.name, name))

    # After the reply

    def add_after_reply(self, function: Callable[[], object]) -> None:
        """Has a function called after the reply was sent, by the thread that sent it. Its errors are logged.

        Must be called before the reply is sent; afterwards it has no effect.
        """
        if self._after_reply is None:
            self._after_reply = []
        self._after_reply.append(function)

    def _call_after_reply(self) -> None:
        """Calls the functions of `add_after_reply` once, in order. Logs their errors."""
        functions, self._after_reply = self._after_reply or [], None
        for function in functions:
            try:
                function()
            except BaseException:
                logger.exception("worker %r: what was to be done after a reply failed", self._parts.name)

    # For messages

    def _name(self) -> str:
        """Returns the name of the callee in the request, for messages; a description if it has no name.

        The function need not exist.
        """
        callee = self._callee
        name = callee[1 + HANDLE_SIZE :] if self._subject is not None else callee
        text = quoted(name.decode(errors="replace").replace("\0", "."))
        return text or ("the value" if callee else "a function sent by value")

    def describe(self, function: Any) -> str:
        """Returns text that says which function runs for which worker. `function` is None if it is not known yet."""
        name = "a function" if function is None else f"`{callable_name(function)}`"
        return f"{name}, called by {self._connection}" if self._connection is not None else f"{name}, for a reference"


class _CancelledLater:
    """Cancels the future that an asynchronous function has returned, when the call of the function is cancelled.

    It is added to the scope of the call. `parts` are the parts of this worker; `future` is that future.
    """

    __slots__ = ("_future", "_parts")

    def __init__(self, parts: WorkerParts, future: Future[Any]) -> None:
        self._parts = parts
        self._future = future

    def cancel(self) -> None:
        """Has the executor cancel the future, because callbacks of the future are user code. May be called twice."""
        self._parts.executor.submit(Task(self._future.cancel))  # its callbacks are user code


def _cancel_late(store: ReferenceStore, reference: RRefId) -> None:
    """Cancels a call of `remote`, given the reference of its value. Called by the timers at its deadline.

    Does nothing if the value, or an error in its place, is there already. `store` is the reference store of this
    worker.
    """
    creation = store.creations.get(reference)
    if creation is not None:
        creation.cancel()


def _is_cancellation(error: BaseException) -> bool:
    """Returns whether `error` is an `asyncio.CancelledError`. Does not import asyncio.

    Returns False if asyncio is not imported yet, or another thread is just importing it.
    """
    cancelled = getattr(sys.modules.get("asyncio.exceptions"), "CancelledError", None)
    return cancelled is not None and isinstance(error, cancelled)


def _answer(kind: bytes, value: Any) -> tuple[str, Any]:
    """Answers a request that uses a value but calls nothing. Returns a pair: a name that messages use, and the answer.

    Args:
        kind: What the request asks for (`protocol.frames`). VALUE is answered with the value, PRESENCE with None, TYPE
            and any other kind with the type of the value.
        value: The value, which exists.
    """
    if kind == VALUE:
        return "to_here", value
    if kind == PRESENCE:
        return "_get_future", None
    return "_get_type", type(value)


def _reader_of(value: Any, name: str, attribute: Any) -> Callable[..., Any]:
    """Returns a function that returns `attribute`, an attribute of `value` that is not callable.

    The function raises `TypeError` if it is given arguments. `name` is the name of the attribute.
    """

    def read(*args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            raise TypeError(
                f"{name!r} of a {type(value).__name__} is a {type(attribute).__name__}, which cannot be called: "
                "it is read without arguments"
            )
        return attribute

    return read
