"""The small objects of a call's life at the caller: the pending call, its reply, its callbacks; and the agent's chores.

They are made for every call, so they have slots and do little. What a callee does with a request is in `execution.py`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from farcall.errors import RpcError, RpcTimeoutError, SerializationError, WorkerLost
from farcall.futures import DONE, FAILED, PENDING, UNLOADED, Callbacks, Future, run_callbacks
from farcall.protocol.wire import FAILURE, RESULT, UNTOLD, Bytes
from farcall.serialization import callable_name, decode_failure, describe_failure, loads, not_rebuilt, offering
from farcall.sleeping import FOREVER

logger = logging.getLogger("farcall")

if TYPE_CHECKING:
    from farcall.agent.handle import Handle
    from farcall.agent.jobs import Answerable
    from farcall.agent.outgoing import Outgoing


class PendingCall(Future[Any]):
    """The future of a call."""

    __slots__ = ("call_id", "connection", "deadline", "due", "function", "keeps", "timeout")

    def __init__(
        self, connection: Outgoing, call_id: int, function: Callable[..., Any] | str, timeout: float, deadline: float
    ) -> None:
        # Not super().__init__: one call less on the path of every call.
        self._state = PENDING
        self._value = None
        self._watchers = []
        self._source = self.connection = connection
        self._report = None
        self._reply = None
        self.call_id = call_id
        self.function = function
        self.deadline = deadline
        self.timeout = timeout
        self.keeps: object = None
        """What must live until the call is answered."""
        self.due: Callbacks | None = None
        """Callbacks that the thread which waits for this future runs, once it has left the connection."""

    def wait(self) -> Any:
        """See `Future`. With fewer frames, as nearly every call ends here."""
        if not self._state:
            self._source.drive(self, FOREVER)  # type: ignore[union-attr]  # set above, never unset
        if self._state == DONE:
            return self._value
        try:
            return self.value() if self._state else super().wait()  # unsettled: its connection is just being lost
        finally:
            del self  # see `Future.value`

    def _settle_by_hand(self, state: int, value: Any, describe: Callable[[], str] | None) -> None:
        raise RuntimeError(f"{self!r} is settled by its call alone; make a Future() of your own to settle by hand")

    def forgive(self) -> None:
        """Who waited for it was interrupted (Ctrl-C), and may never look: should it fail, that is not reported."""
        if self._report is not None:
            self._report.seen = True

    def too_late(self) -> RpcTimeoutError:
        """What it fails with when its time is over."""
        return RpcTimeoutError(
            f"RPC ran for more than set timeout: worker {self.connection.peer.name!r} did not answer "
            f"`{callable_name(self.function)}` within {self.timeout:g} s; it may still be running there. "
            "Give the call a longer timeout, or 0 for none"
        )

    def cut_off(self, lost: RpcError, advice: str) -> RpcError:
        """What it fails with when its connection has ended for that reason."""
        text = f"{lost} (while `{callable_name(self.function)}` was running there, or on its way){advice}"
        return WorkerLost(text, lost.worker) if isinstance(lost, WorkerLost) else type(lost)(text)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]} of `{callable_name(self.function)}`>"


class ToldCall(PendingCall):
    """What the owner tells of the value of a remote call as soon as it is there. Nobody need look at it."""

    __slots__ = ("body", "number")

    def __init__(self, connection: Outgoing, call_id: int) -> None:
        # Not super().__init__: see there.
        self._state = PENDING
        self._value = None
        self._watchers = []
        self._source = self.connection = connection
        self._report = None
        self._reply = None
        self.call_id = call_id
        self.function = "to_here"
        self.deadline = FOREVER
        self.timeout = 0.0
        self.keeps = None
        self.due = None
        self.body: Bytes | None = None
        """What it was told with, if that may be loaded as it is: a plain value, or `UNTOLD`."""
        self.number = 0
        """Of the message that made the remote call, which its answer acknowledges; 0 for what was merely asked for."""

    def tell(self, body: Bytes) -> Callbacks | None:
        """As `settle`, with a result."""
        self.body = body
        self._state = UNLOADED
        if self.number:
            connection = self.connection
            connection.book.delivered.append((connection.number, self.number))
        return self.wake() if self._watchers else None

    def settle(self, state: int, value: Any) -> Callbacks | None:
        """See `Future`. An answer, whatever it says, tells that the remote call has arrived."""
        if state == UNLOADED:
            self._reply = value
        else:
            self._value = value
        self._state = state
        if self.number and state != FAILED:
            connection = self.connection
            connection.book.delivered.append((connection.number, self.number))
        return self.wake() if self._watchers else None

    def report_unseen(self, describe: Callable[[], str]) -> None:
        """See `Future`; whoever uses the reference hears of the failure."""

    def read(self, milliseconds: int) -> bool:
        """Reads what comes within that time, if nobody else does; whether it is done."""
        self.connection.receive_in_background(milliseconds)
        return self._state != PENDING

    def outcome(self) -> tuple[int, Any]:
        """Of one that is done: DONE and the value, or FAILED and what its function raised. `PENDING`: ask for it.

        It is loaded anew each time, and nothing of it kept: it is used once.
        """
        if self.body is not None:
            return Reply(self.connection.peer.name, self.function, RESULT, self.body, ()).told()
        reply = self._reply
        if reply is not None:
            return reply.told()  # type: ignore[attr-defined,no-any-return]
        return (DONE, self._value) if self._state == DONE else (PENDING, None)


class Reply:
    """A reply as it came: unpickled by the thread that wants the value, not by the one that read it."""

    __slots__ = ("_body", "_buffers", "_function", "_handles", "_kind", "_worker", "lock")

    def __init__(
        self,
        worker: str,
        function: Callable[..., Any] | str,
        kind: int,
        body: Bytes,
        buffers: Sequence[Bytes],
        handles: Sequence[Handle] = (),
    ) -> None:
        self.lock = threading.Lock()
        self._worker = worker
        self._function = function
        self._kind = kind
        self._body = body
        self._buffers = buffers
        self._handles = handles

    def told(self) -> tuple[int, Any]:
        """As `load`; `PENDING` if it says nothing but that the value has to be asked for."""
        return self.load() if self._body != UNTOLD else (PENDING, None)

    def load(self) -> tuple[int, Any]:
        """See `Unloaded`."""
        if self._kind == FAILURE:
            return FAILED, decode_failure(self._body)
        try:
            if self._handles:
                with offering(self._handles):
                    return DONE, loads(self._body, self._buffers)
            return DONE, loads(self._body, self._buffers)
        except SerializationError as error:
            what = f"the result of `{callable_name(self._function)}` from worker {self._worker!r}"
            wrapped = not_rebuilt(what, "here", error.__cause__)
            wrapped.__cause__ = error.__cause__
            return FAILED, wrapped

    def describe(self) -> str:
        """For the warning that nobody has looked at this failure. Runs in a finalizer: no code of a user's."""
        return (
            f"nobody looked at the failure of `{callable_name(self._function)}` on worker {self._worker!r}: "
            f"{describe_failure(self._body)}"
        )


class CallbackJob:
    """Runs the callbacks of a future in the serving pool, and even when it closes: others may wait for what they do."""

    must_run = True

    __slots__ = ("_callbacks", "_future", "kind", "origin")

    def __init__(self, future: Future[Any], callbacks: Callbacks) -> None:
        self.kind: object = "callbacks"
        self.origin: Answerable | None = None
        self._future = future
        self._callbacks = callbacks

    def run(self) -> None:
        """See `Job`."""
        try:
            run_callbacks(self._future, self._callbacks)
        except BaseException:
            logger.exception("a callback of %r failed", self._future)


class ChoreJob:
    """Something that the agent itself has to do, in the serving pool."""

    __slots__ = ("_chore", "kind", "origin")

    must_run = False

    def __init__(self, chore: Callable[[], object]) -> None:
        self.kind: object = "chore"
        self.origin: Answerable | None = None
        self._chore = chore

    def run(self) -> None:
        """See `Job`."""
        self._chore()
