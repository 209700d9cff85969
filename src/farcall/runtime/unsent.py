"""Calls that wait for a connection, so that the thread that makes them does not: it runs an event loop.

Connecting to a worker can take seconds, for example if the worker is frozen. A call that is made on the thread of an
event loop is therefore not sent by that thread if there is no connection. Its peer queues it
(`Peer.send_when_connected`), and the thread that connects sends it.

Rules
- Arguments are pickled, and their buffers copied, before the call returns: the program may change them afterwards.
- Calls are sent in the order in which they were queued, and before every call that finds the connection open.
- A call that is settled before it is sent (cancelled, or its time is over) is not sent, and its arguments are freed.
- No code of users runs in the thread that connects: the executor runs callbacks.
- A remote call has its reference at once. If connecting fails, it is treated as one whose connection was lost: the
  outbox sends it as soon as there is a connection (`reference_outbox`).
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any, Final, Protocol
from weakref import ref

from farcall.errors import CallCancelledError, RpcError, RpcTimeoutError
from farcall.futures import FAILED, Future, run_callbacks
from farcall.protocol.frames import pack_again
from farcall.runtime.calls import PendingCall, settled_by_call_alone
from farcall.runtime.client import ClientConnection
from farcall.runtime.executor import Executor, Task
from farcall.runtime.reference_outbox import UnackedKeep
from farcall.runtime.timers import Timers
from farcall.serialization import callable_name


class Unsent(Protocol):
    """A call that waits for the connection to a peer. Either `send`, `fail` or `abandon` ends the wait.

    Attributes:
        made_at: When the call was made, as a time of the monotonic clock.
    """

    made_at: float

    def send(self, connection: ClientConnection) -> None:
        """Sends the call on `connection`, which was just opened. Is called at most once, and does not wait.

        A failure is not raised: it becomes the error of the call's future.
        """

    def fail(self, error: RpcError) -> None:
        """Called instead of `send` if connecting has failed. `error` says why. Raises nothing."""

    def abandon(self, error: RpcError) -> None:
        """Called in a forked child: fails the child's copy of the call with `error`. Runs no callbacks."""


class _NoConnection:
    """The `connection` of an `UnsentCall`: an object with the one method that users of a call's connection need."""

    def drive_in_background_later(self) -> None:
        """Does nothing. A real connection makes the executor read replies here; an unsent call has no reply yet."""


class UnsentCall(Future[Any]):
    """The future of a call that is sent as soon as there is a connection.

    After the constructor, the caller must queue the future. Later, `send` or `fail` is called. The sent call is another
    future, a `PendingCall`. When that is done, this future gets the same outcome.

    Args:
        executor: Runs the callbacks of this future.
        worker: The name of the callee, for error messages.
        function: The function or the name of the method, for error messages.
        timeout: How many seconds the call may take, connecting included; 0 for no limit.
        send: Sends the call and returns it. Its arguments are the connection and the seconds since the call was made.
            If there is a timeout, the seconds are always less than it.
        error_of: Returns the error with which this future fails. Its argument is the error that connecting has raised.

    Attributes:
        connection: Not a real connection: an object that does nothing.
    """

    __slots__ = ("_error_of", "_executor", "_send", "_sent", "_timeout", "_worker", "function", "keeps", "made_at")

    connection: Final = _NoConnection()

    def __init__(
        self,
        executor: Executor,
        worker: str,
        function: Callable[..., Any] | str,
        timeout: float,
        send: Callable[[ClientConnection, float], PendingCall],
        error_of: Callable[[RpcError], RpcError],
    ) -> None:
        super().__init__()
        self._executor = executor
        self._worker = worker
        self._timeout = timeout
        self._send: Callable[[ClientConnection, float], PendingCall] | None = send
        self._sent: PendingCall | None = None
        self._error_of = error_of
        self.function = function
        self.keeps: object = None
        """The handle whose value the call uses. It must not be released before the call is answered."""
        self.made_at = monotonic()

    def expire_by(self, timers: Timers) -> None:
        """Makes `timers` call `expire` when the timeout of this call has passed. Does nothing if the timeout is 0."""
        if self._timeout:
            reference = ref(self)

            def expire() -> None:
                call = reference()
                if call is not None:
                    call.expire()

            timers.schedule(self.made_at + self._timeout, expire)

    def expire(self) -> None:
        """Fails this future with `RpcTimeoutError` if the call was not sent yet. Otherwise does nothing.

        The sent call has a timeout of its own.
        """
        if self._sent is None:
            self._fail(
                RpcTimeoutError(
                    f"RPC ran for more than set timeout: `{callable_name(self.function)}` was not sent within "
                    f"{self._timeout:g} s: there is no connection to worker {self._worker!r} yet. Is it running? Give "
                    "the call a longer timeout, or 0 for none",
                    False,
                )
            )

    def send(self, connection: ClientConnection) -> None:
        """Sends the call on `connection`. Does nothing if this future is done, for example because it was cancelled.

        Does not wait for the reply. An `RpcError` while sending is not raised: this future fails with it. If a signal
        handler raises an exception meanwhile, this future fails, and the exception is raised.
        """
        send = self._send
        if self._state or send is None:
            return
        spent = monotonic() - self.made_at
        if self._timeout:
            spent = min(spent, self._timeout - 1e-3)  # a call without any time left would have no limit
        try:
            call = send(connection, spent)
        except RpcError as error:
            self._fail(error)
            return
        except BaseException as error:  # from a signal handler
            self._fail(RpcError(f"sending it was interrupted by {type(error).__name__}"))
            raise
        self._sent = call
        self._send = None
        if self._state:  # meanwhile
            call.cancel()
        call.watch(self._finish, waker=True)

    def _finish(self, call: PendingCall) -> None:
        """Called when the sent call is done: gives this future the same outcome, unless it is done already."""
        self.settle_as(call)
        self._end()

    def fail(self, error: RpcError) -> None:
        """Fails this future, because connecting has failed with `error`. Does nothing if this future is done.

        The future's error is `error_of(error)`, with the `error_of` of the constructor.
        """
        self._fail(self._error_of(error))

    def abandon(self, error: RpcError) -> None:
        """Called in a forked child: fails the child's copy of this future with `error`. Runs no callbacks.

        Does nothing if the future is done.
        """
        if self.settle_first(FAILED, error, None):
            self.wake()

    def _fail(self, error: RpcError) -> None:
        """Fails this future with `error`. Does nothing if this future is done."""
        if self.settle_first(FAILED, error, lambda: f"nobody looked at a call that failed: {error}"):
            self._end()

    def cancel_alone(self) -> bool:
        """Cancels this one call and returns True. This future then fails with `CallCancelledError`.

        A call that was sent is cancelled at the callee too. A call that was not sent is never sent. Returns False, and
        does nothing, if this future is done.
        """
        name = callable_name(self.function)
        error = CallCancelledError(f"the call of `{name}` on worker {self._worker!r} was cancelled")
        if not self.settle_first(FAILED, error, None):
            return False
        if self._sent is not None:
            self._sent.cancel()
        self._end()
        return True

    def _end(self) -> None:
        """Called when this future is done: frees the arguments, wakes waiting threads, and runs callbacks.

        The executor runs the callbacks.
        """
        self._send = self.keeps = None
        callbacks = self.wake()
        if callbacks is not None:
            self._executor.submit(Task(lambda: run_callbacks(self, callbacks), must_run=True))

    def _settle_by_hand(self, state: int, value: Any, describe: Callable[[], str] | None) -> None:
        """Raises `RuntimeError`, because a program may not set the result of a call. The arguments are ignored."""
        raise settled_by_call_alone(self)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]} of `{callable_name(self.function)}`>"


class UnsentKeep:
    """A call made by `remote` that is sent as soon as there is a connection.

    The outbox is the part of this worker that sends a call again if its connection was lost. Until the call is sent,
    this object takes the place of the connection, in `unacked.via`. `is_lost` returns False until connecting has
    failed. So the outbox does not send the call before that.

    Args:
        fit: Called with the connection before the call is sent. If the frame is too large for the other end, `fit`
            replaces it by one without the arguments.
        resend: Makes the outbox connect, and send all calls and messages that were not acknowledged.

    Attributes:
        unacked: The call, with its frame and its buffers. Must be set before this object is queued.
    """

    unacked: UnackedKeep

    def __init__(self, fit: Callable[[ClientConnection], None], resend: Callable[[], None]) -> None:
        self.made_at = monotonic()
        self._fit = fit
        self._resend = resend
        self._has_failed = False

    def is_lost(self) -> bool:
        """Returns whether connecting has failed, that is, `fail` was called. Then the outbox must send the call."""
        return self._has_failed

    def send(self, connection: ClientConnection) -> None:
        """Sends the call on `connection`. Does not wait. If `connection` is lost, the outbox sends the call again."""
        unacked = self.unacked
        self._fit(connection)
        unacked.via = connection
        connection.send(pack_again(unacked.frame, unacked.seconds_left()), list(unacked.buffers or ()))
        connection.expect_acknowledgement()
        if connection.is_lost():
            self._resend()

    def fail(self, error: RpcError) -> None:
        """Called if connecting has failed: leaves the call to the outbox. `error` is ignored.

        The outbox sends the call later. If the owner is declared lost before it gets the call, the reference of the
        result fails.
        """
        self._has_failed = True
        self._resend()

    def abandon(self, error: RpcError) -> None:
        """Called in a forked child: does nothing, because the child's reference store fails all references."""
