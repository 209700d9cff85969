"""A call at the caller: its future, and its reply before it is unpickled.

These objects are created for every call, so they have slots and do little.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from farcall.deadlines import raise_if_cancelled
from farcall.errors import NotAllowedError, RpcError, RpcTimeoutError, SerializationError, WorkerLostError
from farcall.futures import DONE, FAILED, PENDING, Callbacks, Future
from farcall.protocol.frames import Bytes
from farcall.serialization import (
    callable_name,
    decode_failure,
    describe_failure,
    loads,
    loads_restricted,
    not_rebuilt_error,
)
from farcall.serialization import offering as offering_references
from farcall.transports.base import FOREVER

if TYPE_CHECKING:
    from farcall.protocol.ids import ForkId, RRefId
    from farcall.runtime.client import ClientConnection
    from farcall.runtime.reference_store import ReferenceStore
    from farcall.security.allowed import AllowList


class PendingCall(Future[Any]):
    """The future of a call that this worker has made. A thread that waits for it reads replies from `connection`.

    Args:
        connection: The connection on which the call is sent.
        call_id: The number of the call on that connection.
        function: The function or the name of the method, for error messages.
        timeout: The timeout in seconds, for error messages; 0 for no limit.
        deadline: When the call times out, as a time of the monotonic clock; `FOREVER` for never.
    """

    __slots__ = ("call_id", "connection", "deadline", "due", "function", "keeps", "timeout")

    def __init__(
        self,
        connection: ClientConnection,
        call_id: int,
        function: Callable[..., Any] | str,
        timeout: float,
        deadline: float,
    ) -> None:
        # Not super().__init__: that is one function more for every call.
        self._state = PENDING
        self._value = None
        self._watchers = []
        self._source: Any = connection
        self.connection = connection
        self._report = None
        self._reply = None
        self.call_id = call_id
        self.function = function
        self.timeout = timeout
        self.deadline = deadline
        self.keeps: object = None
        """The handle whose value the call uses. It must not be released before the call is answered."""
        self.due: Callbacks | None = None
        """Callbacks for the thread that waits for this call. It runs them after it has stopped reading the link."""

    def wait(self) -> Any:
        """Waits until the call has succeeded or failed. Then returns its result, or raises its error.

        Raises:
            RpcTimeoutError: The timeout of the call expired.
            WorkerLostError: The connection to the callee was lost.
            CallCancelledError: The call was cancelled.
            CancelledError: The function that waits was itself cancelled, or its time is over.
            RpcError: This worker was shut down or expelled.
            Exception: The error that the function raised.
        """
        if not self._state:
            self.connection.wait(self, FOREVER)
        if self._state == DONE:
            return self._value
        if not self._state:  # another thread is closing the connection, and settles this future next
            self.block(FOREVER)
        if self._load() == FAILED:
            raise_if_cancelled(self._value)
            try:
                raise self._value  # what the function raised, or why the call failed
            finally:
                del self  # see `Future.value`
        return self._value

    def cancel_alone(self) -> bool:
        """Cancels this one call, tells the callee with a CANCEL frame, and returns True.

        The future then fails with `CallCancelledError`. Returns False if the call is done, or if another thread is
        cancelling it.
        """
        return self.connection.cancel(self)

    def _settle_by_hand(self, state: int, value: Any, describe: Callable[[], str] | None) -> None:
        """Always raises `RuntimeError`: a program may not call `set_result` or `set_exception` of this future.

        Only farcall itself completes the future of a call. All parameters are ignored.
        """
        raise settled_by_call_alone(self)

    def mark_failure_seen(self) -> None:
        """Prevents the warning about a failure that no code looked at.

        Used when the thread that waited was interrupted.
        """
        if self._report is not None:
            self._report.seen = True

    def timeout_error(self, started: bool | None) -> RpcTimeoutError:
        """Returns the error with which this call fails when its deadline has passed.

        `started` is whether the function had started; None if that is not known.
        """
        return timeout_error(self.connection.peer.name, self.function, self.timeout, started)

    def lost_error(self, reason: RpcError, advice: str) -> RpcError:
        """Returns the error with which this call fails when its connection has ended.

        Args:
            reason: Why the connection has ended. The returned error has the same type.
            advice: Text to add to the end of the message; may be empty.
        """
        text = f"{reason} (while `{callable_name(self.function)}` was running there, or on its way){advice}"
        return WorkerLostError(text, reason.worker) if isinstance(reason, WorkerLostError) else type(reason)(text)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]} of `{callable_name(self.function)}`>"


def settled_by_call_alone(call: Future[Any]) -> RuntimeError:
    """Returns the error to raise if a program calls `set_result` or `set_exception` of `call`, the future of a call."""
    return RuntimeError(f"{call!r} is settled by its call alone; make a Future() of your own to settle by hand")


def timeout_error(
    worker: str, function: Callable[..., Any] | str, seconds: float, started: bool | None
) -> RpcTimeoutError:
    """Returns the error of a call that was not answered in time.

    Args:
        worker: The name of the callee.
        function: The function or the name of the method, for the message.
        seconds: The timeout that has expired, for the message.
        started: Whether the function had started; None if that is not known.
    """
    state = {
        True: "it had started there, and was told to stop",
        False: "it had not started there, and was not run",
        None: "it may still be running there",
    }[started]
    return RpcTimeoutError(
        f"RPC ran for more than set timeout: worker {worker!r} did not answer `{callable_name(function)}` within "
        f"{seconds:g} s; {state}. Give the call a longer timeout, or 0 for none",
        started,
    )


class KeptCall(PendingCall):
    """The future of a call made by `remote`, whose result stays at the callee.

    Its result is the value, if the reply contains it. Otherwise, or if the connection is lost, its result is `KEPT`:
    the value must be requested from the callee. If the function raises an error, the future fails with it.

    It never times out.

    Args:
        connection: The connection on which the call is sent.
        call_id: The number of the call on that connection.
        function: The function or the name of the method, for error messages.
    """

    __slots__ = ("number",)

    def __init__(self, connection: ClientConnection, call_id: int, function: Callable[..., Any] | str) -> None:
        super().__init__(connection, call_id, function, 0.0, FOREVER)
        self.number = 0
        """The number of the frame among those that need an acknowledgement. The reply acknowledges it."""

    def cancel_alone(self) -> bool:
        """Does nothing and returns False, because other code may wait for the value as well.

        `KeptCreation.cancel` stops the function.
        """
        return False


class KeptCreation:
    """A call made by `remote`, in the form in which a scope holds it. A scope is a set of calls cancelled together.

    `cancel` asks the owner to stop the function. The owner then puts an error in the place of the value. The future
    `call` stays pending until its reply arrives, because the reply is also the acknowledgement.

    Args:
        store: The reference store of this worker.
        call: The future of the call. None if there was no connection when the call was made: such a call has no future.
        reference: The reference of the call's result.
        fork: The fork of `reference` that this worker holds.
    """

    __slots__ = ("_call", "_connection", "_fork", "_reference", "_store")

    def __init__(self, store: ReferenceStore, call: KeptCall | None, reference: RRefId, fork: ForkId) -> None:
        self._store = store
        self._call = ref(call) if call is not None else None
        self._connection = call.connection if call is not None else None
        self._reference = reference
        self._fork = fork

    def done(self) -> bool:
        """Returns True if the owner is known to have replied.

        Returns False if the owner has not replied, if `call` is None, or if the connection of the call was lost.
        """
        if self._call is None or self._connection is None or self._connection.is_lost():
            return False
        call = self._call()
        return call is None or call.done()

    def cancel(self) -> None:
        """Asks the owner to stop the function. Does nothing if the owner has replied, has left or was lost.

        May be called twice, and in any thread. Does not wait.
        """
        if not self.done():
            self._store.cancel_remote(self._reference, self._fork)


class _Kept:
    """The type of `KEPT`, which stands for a result that must be requested from the callee."""

    def __repr__(self) -> str:
        return "<kept at the callee>"


KEPT: Final = _Kept()
"""The result of a remote call whose value must be requested from the callee."""


class Reply:
    """A reply that is not unpickled yet.

    The thread that uses the result unpickles it, not the thread that has read it.

    Args:
        worker: The name of the callee, for error messages.
        function: The function that was called, or the name of the method, for error messages.
        is_failure: Whether the call has failed at the callee.
        payload: The pickled result, or the encoded failure.
        buffers: The buffers of the reply; may be empty.
        handles: The handles of the references in the reply; may be empty.
        guard: The allow-list that limits what may be unpickled; None to allow everything.
    """

    __slots__ = ("_buffers", "_function", "_guard", "_handles", "_is_failure", "_payload", "_worker", "lock")

    def __init__(
        self,
        worker: str,
        function: Callable[..., Any] | str,
        is_failure: bool,
        payload: Bytes,
        buffers: Sequence[Bytes],
        handles: Sequence[Any],
        guard: AllowList | None,
    ) -> None:
        self.lock = threading.Lock()
        self._worker = worker
        self._function = function
        self._is_failure = is_failure
        self._payload = payload
        self._buffers = buffers
        self._handles = handles
        self._guard = guard

    def load(self) -> tuple[int, Any]:
        """Unpickles the reply. Returns DONE and the result, or FAILED and the error.

        A result that cannot be unpickled, or that the allow-list forbids, also returns FAILED; nothing is raised.
        """
        guard = self._guard
        if self._is_failure:
            if guard is None:
                return FAILED, decode_failure(self._payload)
            return FAILED, decode_failure(self._payload, lambda payload: loads_restricted(payload, (), guard))
        try:
            if not self._handles and guard is None:
                return DONE, loads(self._payload, self._buffers)
            with offering_references(self._handles):
                if guard is None:
                    return DONE, loads(self._payload, self._buffers)
                return DONE, loads_restricted(self._payload, self._buffers, guard)
        except (SerializationError, NotAllowedError) as error:
            return FAILED, self._load_error(error)

    def _load_error(self, error: RpcError) -> RpcError:
        """Returns the error for a result that could not be unpickled because of `error`."""
        what = f"the result of `{callable_name(self._function)}` from worker {self._worker!r}"
        if isinstance(error, NotAllowedError):
            refused = NotAllowedError(f"{what} was refused here: {error}; or have it return plain data")
            refused.__cause__ = error
            return refused
        wrapped = not_rebuilt_error(what, "here", error.__cause__)
        wrapped.__cause__ = error.__cause__
        return wrapped

    def describe(self) -> str:
        """Returns the warning that is logged if the program never looks at the failure in this reply.

        Must be called only if `is_failure` is True. Runs no code of users.
        """
        return (
            f"nobody looked at the failure of `{callable_name(self._function)}` on worker {self._worker!r}: "
            f"{describe_failure(self._payload)}"
        )
