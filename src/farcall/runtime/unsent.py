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
    """What waits for the connection to a peer."""

    made_at: float
    """When it was made, as a time of the monotonic clock."""

    def send(self, connection: ClientConnection) -> None:
        """Sends it. Called once, by the thread that connects. Does not wait, and raises no `Exception`."""

    def fail(self, error: RpcError) -> None:
        """Called if there will be no connection, with the reason. Raises nothing."""

    def abandon(self, error: RpcError) -> None:
        """Called in a forked child: fails the child's copy. Runs no callbacks."""


class _NoConnection:
    """Stands for the connection of a call that is not sent yet."""

    def drive_in_background_later(self) -> None:
        """Does nothing: once the call is sent, the leader of the executor reads its reply."""


class UnsentCall(Future[Any]):
    """The future of a call that is sent as soon as there is a connection. Its outcome is that of the sent call."""

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
        """Creates the future. The caller must queue it.

        Args:
            executor: Runs callbacks.
            worker: The name of the callee, for messages.
            function: The function or the name of the method, for messages.
            timeout: How many seconds the call may take, connecting included; 0 for no limit.
            send: Sends the call, given a connection and how many seconds of the timeout are spent, and returns it.
            error_of: Returns the error of this call, given why there is no connection.
        """
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
        """Has the timers fail the call if it is not sent when its timeout expires."""
        if self._timeout:
            reference = ref(self)

            def expire() -> None:
                call = reference()
                if call is not None:
                    call.expire()

            timers.schedule(self.made_at + self._timeout, expire)

    def expire(self) -> None:
        """Fails the call if it is not sent yet. A call that was sent has a timeout of its own."""
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
        """See `Unsent`. Does nothing if the call is settled."""
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
        """The waker of the sent call: settles this future as the call."""
        self.settle_as(call)
        self._end()

    def fail(self, error: RpcError) -> None:
        """See `Unsent`. Does nothing if the call is settled."""
        self._fail(self._error_of(error))

    def abandon(self, error: RpcError) -> None:
        """See `Unsent`."""
        if self.settle_first(FAILED, error, None):
            self.wake()

    def _fail(self, error: RpcError) -> None:
        """Settles the future with an error. Does nothing if it is settled."""
        if self.settle_first(FAILED, error, lambda: f"nobody looked at a call that failed: {error}"):
            self._end()

    def cancel_alone(self) -> bool:
        """See `Future`. Cancels the call that was sent, or keeps this one from being sent."""
        name = callable_name(self.function)
        error = CallCancelledError(f"the call of `{name}` on worker {self._worker!r} was cancelled")
        if not self.settle_first(FAILED, error, None):
            return False
        if self._sent is not None:
            self._sent.cancel()
        self._end()
        return True

    def _end(self) -> None:
        """After this future was settled: frees what the call needed, and wakes everybody that waits."""
        self._send = self.keeps = None
        callbacks = self.wake()
        if callbacks is not None:
            self._executor.submit(Task(lambda: run_callbacks(self, callbacks), must_run=True))

    def _settle_by_hand(self, state: int, value: Any, describe: Callable[[], str] | None) -> None:
        """Raises `RuntimeError`, as for every call."""
        raise settled_by_call_alone(self)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]} of `{callable_name(self.function)}`>"


class UnsentKeep:
    """A call made by `remote` that is sent as soon as there is a connection.

    It is the connection of its `UnackedKeep` until then, so that the outbox does not send it as well.
    """

    unacked: UnackedKeep
    """The call, with its frame and its buffers. To be set before the entry is queued."""

    def __init__(self, fit: Callable[[ClientConnection], None], resend: Callable[[], None]) -> None:
        """Creates the entry.

        Args:
            fit: Called before the call is sent, to replace a frame that is too large for the other end.
            resend: Has the outbox connect, and send everything that was not acknowledged.
        """
        self.made_at = monotonic()
        self._fit = fit
        self._resend = resend
        self._has_failed = False

    def is_lost(self) -> bool:
        """Returns whether there was no connection, so that the outbox has to send the call."""
        return self._has_failed

    def send(self, connection: ClientConnection) -> None:
        """See `Unsent`."""
        unacked = self.unacked
        self._fit(connection)
        unacked.via = connection
        connection.send(pack_again(unacked.frame, unacked.seconds_left()), list(unacked.buffers or ()))
        connection.expect_acknowledgement()
        if connection.is_lost():
            self._resend()

    def fail(self, error: RpcError) -> None:
        """See `Unsent`. The reference stays: its call is sent later, or fails when the owner is declared lost."""
        self._has_failed = True
        self._resend()

    def abandon(self, error: RpcError) -> None:
        """See `Unsent`. The reference store of the child fails all references."""
