"""A connection for our own calls to one worker: sends requests and reads replies.

The thread that waits for a reply reads the link itself, so no other thread has to be woken for a call. One thread at a
time reads: it holds the *reader's role* (`_role`), and gives the replies of other threads' calls to their futures.
The other threads sleep. When the reader has its own reply, it wakes one sleeping thread to read, its *successor*. It
wakes nobody if an earlier successor was woken and does not run yet. That thread waits for the interpreter's lock, and
meanwhile the former reader may make and finish many calls; without this rule each call would wake another thread.

If no thread waits for a reply, the leader of the executor reads: at once if a future has a callback or is awaited, and
after `UNATTENDED_S` otherwise. Reading many replies at once, later, costs less than reading each as it arrives.

Rules
- A call is in `pending` from before it is sent until it is settled. Only the thread that pops it from `pending` settles
  it: the reader of its reply, the thread that finds its deadline passed, or the thread that ends the connection.
- The connection ends once. Replies that arrived before are still given to their futures; then all pending calls fail.
- A thread that ends the connection may miss a call that is sent at the same time. So the sender checks whether the
  connection has ended after it has sent.
- User callbacks run in the executor, or in the thread that waited for that same future, never while reading.
- If a signal handler raises while frames are being read, frames may be lost, so the connection is ended.
- An exception from a signal handler never leaves the role taken. Python runs signal handlers only after calls, in loops
  and when a function begins. So the role is taken and released by statements without calls, at a `try` or `finally`.
- A call whose deadline has passed is cancelled at the callee. It fails when the callee has said whether its function
  had started, at most `EXPIRY_GRACE_S` later; until then it is in `_expiring`, not in `pending`. A result that comes
  meanwhile is too late. (Without `honours_deadlines` the call fails at once, and the callee is not told.)
- A thread that waits for a call and is itself cancelled is woken: the reader by `Link.wake`, others by their gates.
- If a signal handler interrupts its own thread's wait on the link, and waits for a call, the handler reads the link.
"""

from __future__ import annotations

import itertools
import struct
import threading
import weakref
from collections.abc import Callable
from functools import partial
from threading import get_ident
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Final

from farcall.deadlines import NO_SCOPE, Scope, Waker, current_scope, grace_end
from farcall.errors import CallCancelledError, ProtocolError, RpcError, UsageError, WorkerLostError
from farcall.futures import DONE, FAILED, UNLOADED, Callbacks, Future, run_callbacks
from farcall.gate import Gate, asleep, blocking_thread, must_not_sleep
from farcall.protocol.frames import (
    CONTROL,
    FAILURE,
    GOSSIP,
    HAS_ANNOTATIONS,
    HAS_REFERENCES,
    HAS_STARTED,
    HEADER_SIZE,
    IS_CANCELLED,
    IS_KEPT,
    RESULT,
    pack_call,
    pack_cancel,
    unpack_annotations,
    unpack_header,
    unpack_references,
)
from farcall.protocol.ids import Worker, WorkerInfo
from farcall.runtime.calls import KEPT, KeptCall, PendingCall, Reply
from farcall.runtime.executor import Task
from farcall.runtime.interrupts import raise_deferred
from farcall.runtime.parts import WorkerParts
from farcall.serialization import ARRAYS_MARK, callable_name, unpack_small_array
from farcall.transports.base import FOREVER, Frame, Link

if TYPE_CHECKING:
    from farcall.runtime.interceptors import ClientCall

UNATTENDED_S: Final = 5e-3
"""Seconds after which the leader of the executor reads replies that no thread waits for."""
_MAX_LOOK_INTERVAL_S: Final = 20e-3
"""The same while threads read all replies themselves. Each look wakes a thread that takes the core from those."""
_MAX_UNATTENDED_S: Final = 0.1
"""The most seconds of that delay, while more calls are being sent."""
MAX_BACKLOG_BYTES: Final = 1 << 24
"""Callers have to wait when more bytes than this wait to be sent."""
_HELD_BACK_S: Final = 1e-3
"""Seconds between two checks whether callers still have to wait."""
_ROLE: Final = 0
LOST_ADVICE: Final = "is it still running, and does every worker call rpc.shutdown() at its end?"


class ClientConnection:
    """Our connection to one worker: sends our requests, reads the replies, and fails calls that time out.

    It ends once: when the link breaks, the peer leaves the group, or this worker shuts down. Pending calls fail then,
    except calls made by `remote`: those are sent again on the next connection, if there is one.

    It takes over a link whose handshake is complete.

    Args:
        parts: The objects that the connections and calls of this worker share, such as its executor.
        peer: The worker at the other end.
        number: The number of that worker in the group.
        link: The link to that worker. The connection closes it at its end.
        peer_limits: The most bytes of a head (a frame without payload and buffers) and of a whole frame that the
            peer accepts; 0 for no limit.
        on_gossip: Called with the number of the peer and the payload of each message about the group that it sends.
        on_lost: Called once with this connection, when the connection has ended.
    """

    def __init__(
        self,
        parts: WorkerParts,
        peer: WorkerInfo,
        number: Worker,
        link: Link,
        peer_limits: tuple[int, int],
        on_gossip: Callable[[Worker, bytes], None],
        on_lost: Callable[[ClientConnection], None],
    ) -> None:
        self.peer = peer
        self.number = number
        self.link = link
        self.peer_limits = peer_limits
        self.pending: dict[int, PendingCall] = {}
        """The calls that wait for a reply, by call id, including those made by `remote`."""
        self._poller = parts.poller
        self._executor = parts.executor
        self._timers = parts.timers
        self._store = parts.store
        self._guard = parts.guard
        self.deadline_factor = float(parts.honours_deadlines)
        """1.0; 0.0 if callees are not told how much time is left."""
        self._on_gossip = on_gossip
        self._on_lost = on_lost
        self._ids = itertools.count(1)
        self.calls_made = 0
        """The number of calls so far, without those made by `remote`."""
        self.calls_failed = 0
        """How many of `calls_made` have failed."""
        self._kept_calls_made = 0  # calls made by `remote`
        self._first_deadline = FOREVER  # not later than the deadline of any pending call
        # Calls that timed out or were cancelled: their replies may contain references that must be released.
        self._late: set[int] = set()
        self._expiring: dict[
            int, PendingCall
        ] = {}  # calls that timed out, and whose callee was asked; not in `pending`
        self.intercepted: dict[int, ClientCall] = {}
        """Pending calls with interceptors, by call id. The annotations of the reply are stored in them."""
        self._role = {_ROLE: None}  # empty while a thread has the reader's role: `del` succeeds in one thread only
        self._reader = 0  # the ident of the thread that has the role; 0 for none
        # The call for which the reader waits on the link; None while it processes frames, and if there is no reader.
        self._awaited: PendingCall | None = None
        self._sleepers: dict[Gate, None] = {}  # the gates of the threads that wait for replies
        self._successor: Gate | None = None  # the gate of the thread that was woken to read and does not run yet
        self._expects_acknowledgement = False  # of messages about references that were sent to the peer
        self._must_read_in_background = False  # a pending future has a callback or is awaited
        self._is_watched = False  # the leader reads the link
        self._has_hung_up = False  # the other end has closed the link; frames that it sent before may be unread
        self._unattended_since = 0.0
        self._calls_at_last_look = 0
        self._look_interval_s = UNATTENDED_S
        self._leaving = ""  # why the connection is about to end, once the peer has left the group
        self._lost: RpcError | None = None
        self._lost_advice = ""
        self._losing = threading.RLock()  # a signal handler may end the connection while its thread holds it
        parts.poller.watch_hang_up(link, self._on_hang_up)

    # Calling

    def call(
        self,
        function: Callable[..., Any] | str,
        callee: bytes,
        payload: bytes,
        buffers: list[memoryview],
        timeout: float,
        spent: float = 0.0,
    ) -> PendingCall:
        """Sends a call that has no references and no annotations. Returns its future without waiting for the reply.

        If sending fails, the connection ends, and the future fails with `WorkerLostError`. While more than
        `MAX_BACKLOG_BYTES` wait to be sent, this waits, at most until the call times out.

        Args:
            function: The function or the name of the method, for error messages.
            callee: The function or method to call, as encoded in a frame (`protocol.frames`).
            payload: The pickled arguments; empty for none. Their size is not compared with `peer_limits` here.
            buffers: The buffers of the arguments; may be empty. The link empties the list.
            timeout: How many seconds the call may take; 0 for no limit.
            spent: How many seconds of `timeout` have passed already, for example for connecting.
        """
        # Repeats `new_call` and `send_call`, because function calls would slow down every call.
        call_id = next(self._ids)
        deadline = monotonic() + timeout - spent if timeout else FOREVER
        future = self.pending[call_id] = PendingCall(self, call_id, function, timeout, deadline)
        try:
            self.calls_made += 1
            if deadline < self._first_deadline:
                self._note_deadline(deadline)
            frame = pack_call(call_id, callee, payload, (timeout - spent) * self.deadline_factor)
            self.link.send(frame, buffers, deadline)
        except ConnectionError as error:
            self._lose_after_last_frames(f"sending to it failed: {error}")
        except BaseException:
            self.pending.pop(call_id, None)  # nobody gets to know of it
            raise
        if self.link.backlog > MAX_BACKLOG_BYTES or self._lost is not None:
            self._after_sending(future)
        return future

    def new_call(self, function: Callable[..., Any] | str, timeout: float, spent: float = 0.0) -> PendingCall:
        """Adds a new call to `pending`, the calls that wait for a reply, and returns its future.

        The caller must send the call with `send_call`.

        Args:
            function: The function or the name of the method, for error messages.
            timeout: How many seconds the call may take; 0 for no limit.
            spent: How many seconds of `timeout` have passed already.
        """
        call_id = next(self._ids)
        deadline = monotonic() + timeout - spent if timeout else FOREVER
        future = PendingCall(self, call_id, function, timeout, deadline)
        self.pending[call_id] = future
        self.calls_made += 1
        if deadline < self._first_deadline:
            self._note_deadline(deadline)
        return future

    def new_kept_call(self, function: Callable[..., Any] | str) -> KeptCall:
        """Adds a new call made by `remote` to `pending`, the calls that wait for a reply, and returns its future.

        The caller must send the call. The call has no timeout, and is not counted in `calls_made`. `function` is for
        error messages.
        """
        call_id = next(self._ids)
        self._kept_calls_made += 1
        future = self.pending[call_id] = KeptCall(self, call_id, function)
        return future

    def calls_pending(self) -> int:
        """Returns the number of calls that wait for a reply. Calls made by `remote` are not counted."""
        return sum(not isinstance(call, KeptCall) for call in list(self.pending.values()))

    def send_call(self, future: PendingCall, frame: bytes, buffers: list[memoryview]) -> None:
        """Sends a call that `new_call` or `new_kept_call` has created. Does not wait for the reply.

        If sending fails, the connection ends, and a call of `new_call` fails with `WorkerLostError`. A call of
        `new_kept_call` gets the result `KEPT` then: it is sent again on the next connection. While more than
        `MAX_BACKLOG_BYTES` wait to be sent, this waits, at most until the call times out.

        Args:
            future: The future of the call.
            frame: The request.
            buffers: The buffers of the arguments; may be empty. The link empties the list.
        """
        try:
            self.link.send(frame, buffers, future.deadline)
        except ConnectionError as error:
            self._lose_after_last_frames(f"sending to it failed: {error}")
        except BaseException:
            self.pending.pop(future.call_id, None)  # nobody gets to know of it
            raise
        self._after_sending(future)

    def _after_sending(self, future: PendingCall) -> None:
        """Waits while more than `MAX_BACKLOG_BYTES` wait to be sent, at most until the call times out.

        Fails all pending calls if the connection has ended.
        """
        try:
            self._hold_back(future.deadline)
        except BaseException:
            self.pending.pop(future.call_id, None)
            raise
        if self._lost is not None:
            self._fail_pending()

    def send(self, frame: bytes, buffers: list[memoryview] | None = None) -> None:
        """Sends a frame that is not a call. If sending fails, ends the connection and raises nothing.

        Args:
            frame: The frame.
            buffers: The buffers of the frame; None for none. The link empties the list.
        """
        try:
            self.link.send(frame, buffers)
        except ConnectionError as error:
            self._lose_after_last_frames(f"sending to it failed: {error}")

    def send_kept(self, frame: bytes, buffers: list[memoryview], deadline: float) -> list[memoryview]:
        """Sends a frame that may have to be sent again later. Returns copies of its buffers, to be sent then.

        The program may change the original buffers afterwards. If sending fails, the connection ends, and the copies
        are returned all the same. While more than `MAX_BACKLOG_BYTES` wait to be sent, this waits.

        Args:
            frame: The frame.
            buffers: The buffers of the frame; may be empty.
            deadline: Until when to wait, as a time of the monotonic clock; `FOREVER` for no limit. What is not sent by
                then is sent later.

        Returns:
            A copy of each buffer, in the same order; an empty list if `buffers` is empty.
        """
        try:
            kept = self.link.send_kept(frame, buffers, deadline)
            self._hold_back(deadline)
            return kept
        except ConnectionError as error:
            kept = [memoryview(bytes(buffer)) for buffer in buffers]
            self._lose_after_last_frames(f"sending to it failed: {error}")
            return kept

    def _hold_back(self, deadline: float) -> None:
        """Waits while more than `MAX_BACKLOG_BYTES` wait to be sent and the connection has not ended.

        Stops at `deadline`, a time of the monotonic clock; `FOREVER` for no limit. Replies are read meanwhile, because
        the other end may not read requests until its replies are read. Returns at once on the thread of an event loop,
        and wherever else a thread must not sleep (`must_not_sleep`).
        """
        if self.link.backlog <= MAX_BACKLOG_BYTES or must_not_sleep():
            return
        with asleep():
            while self.link.backlog > MAX_BACKLOG_BYTES and self._lost is None and monotonic() < deadline:
                self.link.flush()
                self._read_if_free()
                raise_deferred()
                sleep(_HELD_BACK_S)

    # Waiting: the connection is the `futures.Source` of its futures

    def wait(
        self, future: PendingCall, deadline: float, scope: Scope | None = None, waker: Waker | None = None
    ) -> None:
        """Waits until a call is settled (done or failed), the deadline has passed, or the connection has ended.

        Reads the link if no other thread does. Runs the callbacks of the call if this thread has read its reply. If the
        call itself has timed out, it fails with `RpcTimeoutError`. Does not return or raise the outcome of the call.

        Args:
            future: A call of this connection.
            deadline: Until when to wait, as a time of the monotonic clock; `FOREVER` for no limit.
            scope: The wait ends when this scope is cancelled. A scope is a function that runs for another worker, or a
                block of `deadline` or `detached`. None for the scope in which this thread runs, if there is one.
            waker: The result of `scope.add_waker`. It wakes this thread when `scope` is cancelled. None if `scope` is
                None.

        Raises:
            UsageError: A signal handler or finalizer called this while its own thread was processing a reply.
            KeyboardInterrupt: Ctrl-C was pressed.
            CancelledError: The function that waits was cancelled, or its time is over.
            RpcTimeoutError: The time of the `deadline` block in which this thread waits is over.
        """
        if scope is None and (found := current_scope.get()) is not None:
            self._wait_in_scope(future, deadline, found.find() or NO_SCOPE)
            return
        until = deadline if deadline < future.deadline else future.deadline  # not min(), which is a call
        me = get_ident()
        is_nested = self._reader == me
        if is_nested:
            self._check_nested_wait()
        before = blocking_thread.before
        if before is not None:
            before()
        try:
            while not future._state:
                if is_nested:
                    interrupted = self._awaited
                    self._read_until(future, until, scope)
                    self._awaited = interrupted  # the thread returns to the wait that was interrupted
                    break
                try:
                    del self._role[_ROLE]
                except KeyError:
                    if not self._sleep(future, until, scope, waker):
                        break
                    continue
                self._reader = me
                try:
                    if self._is_watched:
                        self._unwatch()
                    self._read_until(future, until, scope)
                finally:
                    self._reader = 0
                    self._role[_ROLE] = None
                    if self._sleepers or self.pending or self._expects_acknowledgement or self._lost is not None:
                        self._after_reading()
                if not future._state and self._must_stop(until, scope):
                    break
        except BaseException:
            self._wait_interrupted(future)
            raise
        finally:
            if before is not None and blocking_thread.after is not None:
                blocking_thread.after()
        if not future._state or future.due is not None:
            self._after_wait(future, deadline, scope, waker)

    drive = wait
    """See `futures.Source`."""

    def _wait_in_scope(self, future: PendingCall, deadline: float, scope: Scope) -> None:
        """Waits until a call is settled, the deadline has passed, the connection has ended, or `scope` is over.

        `scope` is the function, or block of `deadline` or `detached`, that this thread is in. It is over when it was
        cancelled or its time has passed. Then this raises `RpcTimeoutError` if the time of a `deadline` block has
        passed, else `CancelledError`. `deadline` is a time of the monotonic clock; `FOREVER` for no limit. The outcome
        of the call is neither returned nor raised.
        """
        until = scope.limit_wait(deadline)
        waker = scope.add_waker(partial(self._wake_reader_of, future))
        try:
            self.wait(future, until, scope, waker)
            if not future.done() and until < deadline:
                scope.check()
        except BaseException:
            self._wait_interrupted(future)
            raise
        finally:
            scope.discard(waker)

    def _must_stop(self, deadline: float, scope: Scope | None) -> bool:
        """Returns whether a wait must end: the connection has ended, the deadline has passed, or `scope` is cancelled.

        `deadline` is a time of the monotonic clock. `scope` is None for a wait without a scope.
        """
        return self._lost is not None or monotonic() >= deadline or (scope is not None and scope.is_cancelled)

    def _after_wait(self, future: PendingCall, deadline: float, scope: Scope | None, waker: Waker | None) -> None:
        """Called at the end of `wait`, with the arguments of `wait`. Runs the callbacks in `future.due`, if any.

        If there are none and the call is not settled, raises `CancelledError` if `scope` is cancelled. If `scope` is
        not cancelled, the connection has not ended and `deadline` has not passed, calls `wait` again. If the deadline
        of the call itself has passed, calls `_expire` before that. In all other cases does nothing.
        """
        if future.due is not None:
            due, future.due = future.due, None
            run_callbacks(future, due, waiting=True)
        elif not future.done():
            if scope is not None and scope.is_cancelled:
                scope.raise_over()
            if self._lost is None and monotonic() < deadline:
                if monotonic() >= future.deadline:
                    self._expire(future)
                # For the answer of the callee. The timers may have asked for it, and set a later deadline.
                self.wait(future, deadline, scope, waker)

    def _check_nested_wait(self) -> None:
        """Called if a signal handler or finalizer waits for a call on the thread that reads the link.

        Raises `UsageError` if the thread was interrupted while it processed a frame, because it cannot read further
        frames before that is done. Does nothing if the thread was interrupted while it waited on the link.
        """
        if self._awaited is None:
            raise UsageError(
                "a signal handler or finalizer cannot wait for a call here: it interrupts its own thread in the middle "
                "of reading a reply, which must go on first; use rpc_async in it"
            )

    def _wait_interrupted(self, future: PendingCall) -> None:
        """Called when an exception has ended a wait for the call `future`.

        Makes another thread read the reply, if the call is not settled. Runs the callbacks in `future.due`, if any, in
        the executor.
        """
        if not future._state:
            self.drive_in_background_later()  # perhaps no thread reads its reply now
        future.watch(PendingCall.mark_failure_seen, waker=True, attended=True)
        if future.due:
            due, future.due = future.due, None
            self._dispatch(future, due)

    def _read_until(self, future: PendingCall, deadline: float, scope: Scope | None) -> None:
        """Reads the link until a call is settled, the deadline has passed, or the connection or the scope has ended.

        Only the reader may call this: the one thread that may read the link (`_take_role`). `deadline` is a time of the
        monotonic clock; `FOREVER` for no limit. `scope` is None for a wait without a scope.
        """
        wait, receive = self.link.wait, self.link.receive
        try:
            self._awaited = future  # before each check: a thread that ends this wait looks at it afterwards
            while not future._state and self._lost is None and (scope is None or not scope.is_cancelled):
                left = None if deadline == FOREVER else deadline - monotonic()
                if left is not None and left <= 0:
                    return
                has_frames = wait(left)
                self._awaited = None
                if has_frames or self._has_hung_up:
                    self._complete(receive(), future)
                else:
                    raise_deferred()
                self._awaited = future
        except ConnectionError as error:
            self._awaited = None
            self._link_failed(error)
        finally:
            self._awaited = None

    def _wake_reader_of(self, future: PendingCall) -> None:
        """Wakes the thread that reads the link, if that thread waits for this call, to check whether its wait is over.

        To be called after the call was settled or a scope was cancelled.
        """
        if self._awaited is future:
            self.link.wake()

    def _sleep(self, future: PendingCall, deadline: float, scope: Scope | None, waker: Waker | None) -> bool:
        """Sleeps until a call is settled, this thread is woken to read the link, or the wait must end.

        Returns False if the wait must end without a settled call: the connection has ended, the deadline has passed, or
        `scope` is cancelled. Otherwise returns True. Then the caller must check whether the call is settled, and go on
        with the wait if it is not.

        Args:
            future: The call.
            deadline: A time of the monotonic clock; `FOREVER` for no limit.
            scope: What can cancel the wait; None for nothing.
            waker: The member of `scope` that wakes this thread when `scope` is cancelled. None if `scope` is None.
        """
        gate = Gate()
        self._sleepers[gate] = None
        future.watch(gate.open, waker=True, attended=True)
        reads = False
        if waker is not None:
            wake_reader, waker.wake = waker.wake, gate.open
        try:
            # Check again: the reader may have stopped before it could see this gate.
            if not future._state and not self._role and not self._must_stop(deadline, scope):
                gate.rest(deadline)
            reads = not future._state and not self._must_stop(deadline, scope)
        finally:
            if waker is not None:
                waker.wake = wake_reader
            future.forget(gate.open)
            self._sleepers.pop(gate, None)
            if self._successor is gate:
                self._successor = None
                if not reads:
                    self._wake_successor()  # this thread was woken to read, and does not read
        raise_deferred()
        return bool(future._state) or reads

    def _take_role(self) -> bool:
        """Makes this thread the reader, the one thread that may read the link, and returns True.

        Returns False if there is a reader already.
        """
        try:
            del self._role[_ROLE]
        except KeyError:
            return False
        self._reader = get_ident()
        return True

    def _after_reading(self) -> None:
        """Called when a thread has stopped reading the link: lets another thread read it, if necessary.

        Tries again if a signal handler raises an exception meanwhile, and then raises that exception.
        """
        try:
            self._find_successor()
        except BaseException:  # a signal handler raised
            self._find_successor()
            raise

    def _find_successor(self) -> None:
        """Makes another thread read the link, if replies or acknowledgements are still expected.

        Fails all pending calls first if the connection has ended.
        """
        if self._lost is not None:
            self._fail_pending()
        if self._sleepers or self.pending or self._expects_acknowledgement:
            self._wake_successor()

    def _wake_successor(self) -> None:
        """Makes sure that some thread reads the link.

        Does nothing if a thread was woken for that before, and has not begun to read yet. Otherwise wakes a thread that
        sleeps in `_sleep`. If there is none and replies or acknowledgements are expected, makes the leader read: the
        thread of the executor that reads requests. It reads from now on if `drive_in_background` was called and calls
        are pending, and otherwise as `drive_in_background_later` says.
        """
        while self._successor is None and (sleepers := list(self._sleepers)):
            gate = sleepers[-1]
            # Set before the gate is removed from `_sleepers`: a thread that stops sleeping removes its own gate first,
            # and then checks whether it is the successor.
            self._successor = gate
            if self._sleepers.pop(gate, self) is None:
                gate.open()
                return
            if self._successor is gate:
                self._successor = None  # that thread woke up by itself
        if self._successor is not None:
            return
        if self._lost is None:
            if self._must_read_in_background and self.pending:
                self._watch()
            elif self.pending or self._expects_acknowledgement:
                self.drive_in_background_later()

    def _read_if_free(self) -> None:
        """Reads and processes the frames that have arrived. Does nothing if another thread reads the link.

        Never waits.
        """
        if self._take_role():
            try:
                self._complete(self.link.receive(), None)
            except ConnectionError as error:
                self._link_failed(error)
            finally:
                self._reader = 0
                self._role[_ROLE] = None
                self._after_reading()

    def _complete(self, frames: list[Frame], waited_for: PendingCall | None) -> None:
        """Processes received frames: settles the calls that replies belong to, and handles other messages.

        A reply to a call that has timed out is discarded. If an exception from a signal handler interrupts this, the
        connection ends, because the remaining frames are lost.

        Args:
            frames: The frames; may be empty.
            waited_for: The call that this thread waits for, or None. Its callbacks are stored in its `due`, for this
                thread to run. Callbacks of other calls run in the executor.

        Raises:
            ProtocolError: A frame cannot be read, or is of a kind that a callee may not send.
        """
        pending = self.pending
        future = None
        try:
            for frame, buffers in frames:
                kind, flags, _, _, call_id = unpack_header(frame)
                if kind != RESULT and kind != FAILURE:
                    self._receive_message(kind, frame)
                    continue
                handles, begin = (), HEADER_SIZE
                if flags & ~IS_KEPT:
                    handles, begin = self._open_reply(flags, frame, call_id)
                future = pending.pop(call_id, None)
                if future is None:
                    self._receive_late(call_id, flags)
                    continue
                payload = frame[begin:]
                if kind == RESULT and not payload and not flags and type(future) is PendingCall:
                    future.keeps = None
                    callbacks = future.settle(DONE, None)
                else:
                    callbacks = self._settle(future, kind, flags, payload, buffers, handles)
                if callbacks is not None:
                    if future is waited_for:
                        future.due = callbacks
                    else:
                        self._dispatch(future, callbacks)
                future = None
        except BaseException as error:
            self._complete_failed(future, error)
            raise

    def _complete_failed(self, future: PendingCall | None, error: BaseException) -> None:
        """Called when processing a frame has raised `error`. Puts `future` back into `pending`, unless it is settled.

        Then ends the connection, because the frames that follow are lost. Does not end it if `error` is a
        `ConnectionError`: the caller must do that.

        Args:
            future: The call that the frame is a reply to; None if there is none.
            error: The exception.

        Raises:
            ProtocolError: `error` is a `struct.error`, which means that the frame is too short. Then nothing else is
                done.
        """
        if isinstance(error, struct.error):
            raise ProtocolError("a frame came that is too short") from None
        if future is not None and not future._state:
            self.pending[future.call_id] = future
        if not isinstance(error, ConnectionError):
            self.lose(f"reading its replies was interrupted by {type(error).__name__}", advice="")

    def _settle(
        self, future: PendingCall, kind: int, flags: int, payload: Any, buffers: Any, handles: Any
    ) -> Callbacks | None:
        """Settles a call with its reply. Returns the callbacks to run; None if there are none.

        Args:
            future: The call, which is not in `pending` any more.
            kind: RESULT or FAILURE.
            flags: The flags of the frame.
            payload: The pickled result or the encoded failure; empty for the result None.
            buffers: The buffers of the frame.
            handles: The handles of the references in the frame; may be empty.

        Raises:
            ProtocolError: The reply says that the result stays at the callee, but the call was not made by `remote`.
        """
        future.keeps = None
        is_kept = type(future) is KeptCall
        if is_kept:
            self._store.confirm_created(self.number, future.number)  # type: ignore[attr-defined]
        if kind == RESULT:
            if not payload and not flags & IS_KEPT:
                return future.settle(DONE, None)
            if payload and payload[0] == ARRAYS_MARK and not buffers:
                value = unpack_small_array(payload)
                if value is not None:
                    return future.settle(DONE, value)
            if flags & IS_KEPT:
                if not is_kept:
                    raise ProtocolError("the result of a call was kept, which nobody asked for")
                return future.settle(DONE, KEPT)
            reply = Reply(self.peer.name, future.function, False, payload, buffers, handles, self._guard)
        elif flags & IS_CANCELLED:  # its time was over at the callee first
            return self._settle_failed(future, future.timeout_error(bool(flags & HAS_STARTED)))
        else:
            reply = Reply(self.peer.name, future.function, True, payload, buffers, handles, self._guard)
            if not is_kept:  # for remote calls, the reference raises the failure when it is used
                self.calls_failed += 1
                future.report_unseen(reply.describe)
        return future.settle(UNLOADED, reply)

    def _receive_late(self, call_id: int, flags: int) -> None:
        """Processes the reply to a call that has timed out or was cancelled.

        When a call times out, the callee is usually asked whether the function had started. If the call still waits for
        that answer, it fails now. Its `RpcTimeoutError` says whether the function had started, as read from `flags`.
        Otherwise the reply is discarded. `call_id` is the id of the call, and may be unknown.
        """
        self._late.discard(call_id)
        future = self._expiring.get(call_id)
        if future is not None:
            has_started = bool(flags & HAS_STARTED) or not flags & IS_CANCELLED
            self.fail(future, future.timeout_error(has_started))

    def _open_reply(self, flags: int, frame: bytes, call_id: int) -> tuple[Any, int]:
        """Returns the handles of the references in a reply, and the offset of its payload in `frame`.

        The handles are an empty sequence if the reply has no references. If the call with the id `call_id` has
        interceptors, they get the annotations of the reply in `ClientCall.reply_annotations`. Otherwise the annotations
        are dropped. `flags` say whether the reply has references and annotations. Raises `ProtocolError` if these
        cannot be read.
        """
        at = HEADER_SIZE
        handles: Any = ()
        if flags & HAS_REFERENCES:
            number, carried, at = unpack_references(frame, at)
            handles = self._store.receive_references(self.number, number, carried) or ()
        if flags & HAS_ANNOTATIONS:
            annotations, at = unpack_annotations(frame, at)
            call = self.intercepted.pop(call_id, None)
            if call is not None:
                call.reply_annotations = annotations
        return handles, at

    def _receive_message(self, kind: int, frame: bytes) -> None:
        """Processes a frame that is not a reply: a control message, or gossip (a message about the group).

        Raises `ProtocolError` if the frame is of another kind, or cannot be read.
        """
        payload = frame[HEADER_SIZE:]
        if kind == CONTROL:
            self._store.receive_control(self.number, payload)
        elif kind == GOSSIP:
            self._on_gossip(self.number, payload)
            if self._leaving:  # the peer has said that it leaves, and sends no more replies
                self.lose(self._leaving, advice="")
        else:
            raise ProtocolError(f"a frame of kind {kind} came where only replies may")

    def _dispatch(self, future: Future[Any], callbacks: Callbacks) -> None:
        """Runs the callbacks of a call in the executor, even if the executor is closing."""
        self._executor.submit(Task(lambda: run_callbacks(future, callbacks), must_run=True))

    # Reading while no thread waits

    def drive_in_background(self) -> None:
        """Makes the leader, the thread of the executor that reads requests, read the link as well. Does not wait.

        If other threads read the link now, the leader begins when none of them reads any more, if calls are pending
        then.
        """
        self._must_read_in_background = True
        if self._role:
            self._watch()

    def drive_in_background_later(self) -> None:
        """Makes the leader of the executor read the link if no thread does after `UNATTENDED_S` seconds. Does not wait.

        The leader is the thread of the executor that reads requests. While more calls are being sent, it begins later,
        after about `_MAX_UNATTENDED_S` seconds at most. It does not begin if no reply or acknowledgement is expected
        then.
        """
        if not self._unattended_since:
            self._unattended_since = now = monotonic()
            self._schedule(now + self._look_interval_s, self._look_unattended)

    def expect_acknowledgement(self) -> None:
        """Notes that the peer will acknowledge a control message. Does not wait.

        If no other thread reads the link soon, a thread of the executor reads the acknowledgement.
        """
        self._expects_acknowledgement = True
        self.drive_in_background_later()

    def _schedule(self, when: float, method: Callable[[], None]) -> None:
        """Schedules one call of a method of this connection.

        The schedule does not keep the connection alive. If the connection was garbage-collected before, nothing is
        called.

        Args:
            when: A time of the monotonic clock.
            method: A method of this connection, without arguments.
        """
        reference = weakref.WeakMethod(method)

        def call() -> None:
            found = reference()
            if found is not None:
                found()

        self._timers.schedule(when, call)

    def _look_unattended(self) -> None:
        """Called by the timers. Makes the leader of the executor read the link, if no other thread does.

        The leader is the thread of the executor that reads requests. If another thread reads the link, or more calls
        are being sent, schedules itself again instead. Does nothing if no reply or acknowledgement is expected, the
        leader reads already, or the connection has ended.
        """
        since, self._unattended_since = self._unattended_since, 0.0
        if self._lost is not None or not self._awaits_reply() or self._is_watched:
            self._look_interval_s = min(2 * self._look_interval_s, _MAX_LOOK_INTERVAL_S)
            return
        is_read = not self._role
        calls = self.calls_made + self._kept_calls_made
        is_bursting, self._calls_at_last_look = calls != self._calls_at_last_look, calls
        if is_read or (is_bursting and monotonic() < since + _MAX_UNATTENDED_S):
            interval = min(2 * self._look_interval_s, _MAX_LOOK_INTERVAL_S) if is_read else UNATTENDED_S
            self._look_interval_s, self._unattended_since = interval, since
            self._schedule(monotonic() + interval, self._look_unattended)
        else:
            self._look_interval_s = UNATTENDED_S
            self._watch()

    def _awaits_reply(self) -> bool:
        """Returns whether a reply (also one of a call that has timed out) or an acknowledgement is expected."""
        if self.pending or self._late:
            return True
        if self._expects_acknowledgement:
            # Clear the flag before asking the store: a thread that sends sets the flag after it has told the store.
            self._expects_acknowledgement = False
            if self._store.awaits_acknowledgement(self.number):
                self._expects_acknowledgement = True
        return self._expects_acknowledgement

    def _watch(self) -> None:
        """Makes the leader, the thread of the executor that reads requests, read the link as well.

        Does nothing if the leader reads the link already, or the connection has ended.
        """
        if not self._is_watched and self._lost is None:
            self._is_watched = True
            try:
                self._poller.watch(self.link, self._read_in_background)
            except OSError:
                pass  # another thread is closing it

    def _read_in_background(self) -> None:
        """Called by the leader of the executor: reads and processes the frames that have arrived.

        The leader is the thread of the executor that reads requests. It stops reading this link if another thread reads
        the link or sleeps until it may read, or if no reply or acknowledgement is expected any more.
        """
        if not self._take_role():
            self._unwatch()
            if self._role:
                self._wake_successor()  # the reader has just stopped, and believed that the leader watches
            return
        try:
            self._complete(self.link.receive(), None)
        except ConnectionError as error:
            self._link_failed(error)
        finally:
            if not self.pending:
                self._must_read_in_background = False
            if self._sleepers or not self._awaits_reply():
                self._unwatch()
            self._reader = 0
            self._role[_ROLE] = None
            self._after_reading()

    def _unwatch(self) -> None:
        """Makes the leader, the thread of the executor that reads requests, stop reading the link.

        The leader still calls `_on_hang_up` when the other end closes the link. Does nothing if the leader does not
        read the link.
        """
        if self._is_watched:
            self._is_watched = False
            try:
                self._poller.watch_hang_up(self.link, self._on_hang_up)
            except OSError:
                pass  # another thread is closing it

    def _on_hang_up(self) -> None:
        """Called by the poller if the other end seems to have closed the link: checks that, and ends the connection.

        Processes the last frames before that. If another thread reads the link, that thread does both instead. Does
        nothing if the other end has not closed the link, or the link is closed here already.
        """
        try:
            if not self.link.has_hung_up():
                return  # the event was of an earlier link with the same descriptor
        except OSError:
            return  # another thread has closed it
        self._has_hung_up = True
        self._poller.unwatch(self.link)  # otherwise the poller would report it again and again
        while self._lost is None:
            if not self._role:
                self.link.note_hang_up()  # the reader ends the connection
                return
            self._read_if_free()

    # Timeouts

    def _note_deadline(self, deadline: float) -> None:
        """Schedules `_expire_calls` for `deadline`, a time of the monotonic clock.

        `deadline` must be earlier than the deadlines of all other pending calls. That is not checked.
        """
        self._first_deadline = deadline
        self._schedule(deadline, self._expire_calls)

    def _expire_calls(self) -> None:
        """Called by the timers: fails the calls whose deadline has passed.

        Schedules itself for the next deadline, if any.
        """
        now, self._first_deadline = monotonic(), FOREVER
        first = FOREVER
        for call in [*list(self.pending.values()), *list(self._expiring.values())]:
            if call.deadline <= now:
                self._expire(call)
            elif call.deadline < first:
                first = call.deadline
        if first < self._first_deadline:
            self._note_deadline(first)

    def _expire(self, future: PendingCall) -> None:
        """Ends a call whose deadline has passed. Normally asks the callee first whether the function had started.

        To ask, sends a CANCEL frame, and gives the call a new deadline a moment later. When that has passed as well,
        the call fails with `RpcTimeoutError`. The call fails at once, without asking, if the connection has ended or
        this worker does not honour deadlines (`deadline_factor` is 0). Does nothing if the call is settled.
        """
        call_id = future.call_id
        self._late.add(call_id)  # before it is not pending any more: its reply may arrive at the same time
        if not self.deadline_factor or self._lost is not None:
            if not self.fail(future, future.timeout_error(None)):
                self._late.discard(call_id)
            self.drive_in_background_later()
        elif call_id in self._expiring:
            if monotonic() >= future.deadline:  # else another thread has just asked
                self.fail(future, future.timeout_error(None))
        else:
            future.deadline = deadline = grace_end()
            self._expiring[call_id] = future
            if self.pending.pop(call_id, None) is None:  # it is settled
                self._expiring.pop(call_id, None)
                self._late.discard(call_id)
                return
            if deadline < self._first_deadline:
                self._note_deadline(deadline)
            self.send(pack_cancel(call_id))
            self.drive_in_background_later()

    def cancel(self, future: PendingCall) -> bool:
        """Cancels a pending call, tells the callee, and returns True. The call fails with `CallCancelledError`.

        Returns False if the call is not pending any more, or if another thread is cancelling it.
        """
        call_id = future.call_id
        if future.done() or (call_id in self._late and call_id not in self._expiring):
            return False  # it is done, or another thread is cancelling it
        self._late.add(call_id)  # as in `_expire`
        if not self._take(call_id):
            self._late.discard(call_id)
            return False
        try:
            if self._lost is None:
                self.send(pack_cancel(call_id))  # first: it should travel on before the threads run that are woken here
                self.drive_in_background_later()
        finally:
            name = callable_name(future.function)
            self._fail_taken(
                future, CallCancelledError(f"the call of `{name}` on worker {self.peer.name!r} was cancelled")
            )
            self._wake_reader_of(future)
        return True

    def fail(self, future: PendingCall, error: RpcError) -> bool:
        """Settles a pending call with an error and returns True. Returns False if the call is not pending any more.

        A call made by `remote` does not fail: its result is `KEPT`, because its frame is sent again on the next
        connection. Callbacks run in the executor.
        """
        if not self._take(future.call_id):
            return False
        self._fail_taken(future, error)
        return True

    def _take(self, call_id: int) -> bool:
        """Removes a call from those that wait for a reply, and returns True. Returns False if it is not among them.

        So only one thread gets True for a call. That thread must settle the call.
        """
        return self.pending.pop(call_id, None) is not None or self._expiring.pop(call_id, None) is not None

    def _fail_taken(self, future: PendingCall, error: RpcError) -> None:
        """Fails a call with `error`, after `_take` has removed it. Callbacks run in the executor.

        A call made by `remote` does not fail: its result is `KEPT`, because its frame is sent again on the next
        connection.
        """
        future.keeps = None
        self.intercepted.pop(future.call_id, None)
        # The frame of a remote call is sent again, and then its value can be requested.
        is_kept = type(future) is KeptCall
        callbacks = future.settle(DONE, KEPT) if is_kept else self._settle_failed(future, error)
        if callbacks is not None:
            self._dispatch(future, callbacks)

    def _settle_failed(self, future: PendingCall, error: RpcError) -> Callbacks | None:
        """Settles a call that is not pending any more with an error. Returns the callbacks to run, None if none."""
        self.calls_failed += 1
        if type(error) is not CallCancelledError:  # who cancels a call need not look at it
            future.report_unseen(lambda: f"nobody looked at a call that failed: {error}")
        return future.settle(FAILED, error)

    # The end

    def is_lost(self) -> bool:
        """Returns whether the connection has ended. Frames that were sent on it may not have arrived."""
        return self._lost is not None

    def _link_failed(self, error: ConnectionError) -> None:
        """Ends the connection, because the link has raised `error`. Pending calls fail with `WorkerLostError`.

        The message of that error gives the reason: the peer has left the group, or the peer has closed the connection.
        In all other cases the message has the text of `error`.
        """
        if self._leaving:
            self.lose(self._leaving, advice="")
        elif isinstance(error, ProtocolError):
            self.lose(f"reading its replies failed: {error}")
        else:
            self.lose("it closed the connection" if isinstance(error, ConnectionResetError) else str(error))

    def _lose_after_last_frames(self, reason: str) -> None:
        """Called when sending has failed. Processes the frames that have arrived, and then ends the connection.

        `reason` is the reason in error messages. If the peer has announced that it leaves the group, error messages say
        that instead. If another thread reads the link, no frames are processed here.
        """
        for _ in range(1000):
            if self._lost is not None or not self._take_role():
                break
            try:
                frames = self.link.receive()
                if not frames:
                    break
                self._complete(frames, None)
            except ConnectionError:
                break
            finally:
                self._reader = 0
                self._role[_ROLE] = None
                self._after_reading()
        self.lose(self._leaving or reason, "" if self._leaving else LOST_ADVICE)

    def lose(self, reason: str, advice: str = LOST_ADVICE) -> None:
        """Ends the connection because the peer is lost: pending calls fail with `WorkerLostError`.

        Calls made by `remote` do not fail: they are sent again on the next connection, if there is one. Does nothing if
        the connection has ended.

        Args:
            reason: Why the connection ends, for the error message.
            advice: What the user can do, for the error message; empty for none.
        """
        error = WorkerLostError(f"worker {self.peer.name!r} was lost: {reason}", self.peer.name)
        self._end(error, f"; {advice}" if advice else "")

    def leave(self, reason: str) -> None:
        """Ends the connection to a peer that has left the group.

        Ends it at once if no call is pending. Otherwise it ends after the last replies of the peer were read, and calls
        without a reply fail with `WorkerLostError`. `reason` is the reason in error messages. Has no effect on a
        connection that has ended.
        """
        self._leaving = reason
        if not self.pending:
            self.lose(reason, advice="")

    def close(self, reason: str, kind: type[RpcError] = RpcError) -> None:
        """Ends the connection because this worker is closing: pending calls fail. Does nothing if it has ended.

        Args:
            reason: The message of the errors.
            kind: The type of the errors.
        """
        self._end(kind(reason), "")

    def _end(self, error: RpcError, advice: str) -> None:
        """Closes the link, calls `on_lost`, and fails all pending calls with `error`. Does nothing the second time.

        `advice` is added to the message of each error; may be empty.
        """
        with self._losing:
            if self._lost is not None:
                return
            self._lost_advice = advice
            self._lost = error
        self._poller.unwatch(self.link)
        self.link.close()  # wakes the thread that reads
        self._on_lost(self)
        self._fail_pending()

    def _fail_pending(self) -> None:
        """Fails all pending calls after the connection has ended.

        Does nothing if another thread reads the link: that thread calls this method when it stops.
        """
        is_reader = self._reader == get_ident()
        if not is_reader and not self._take_role():
            return
        try:
            assert self._lost is not None
            for future in [*list(self.pending.values()), *list(self._expiring.values())]:
                self.fail(future, future.lost_error(self._lost, self._lost_advice))
        finally:
            if not is_reader:
                self._reader = 0
                self._role[_ROLE] = None

    def abandon(self, error: RpcError) -> None:
        """Called in a forked child: fails the child's copies of pending calls with `error`. Runs no callbacks.

        Closes the link in the child only; the connection of the parent is not affected.
        """
        self._lost = error
        self.link.abandon()
        for calls in (self.pending, self._expiring):
            while calls:
                _, future = calls.popitem()
                future.settle(FAILED, error)
