"""A connection to a peer for our own calls: requests go out, replies come back.

Rules
- A call is in `pending` from before it is sent until it is settled; whoever pops it from there settles it, and nobody
  else does: the reader of its reply, the one who sees its time over, or the loss of the connection.
- The connection is lost once, for whatever reason; then everything pending fails, naming the worker.
- An exception that comes from nowhere (Ctrl-C) in the midst of reading may have lost bytes: the connection is given up.
  While a thread merely waits, it harms nothing. A call that was taken from `pending` and not settled is put back, and
  callbacks that were taken from their future and not run are dispatched: nobody waits for what never comes.
- A signal handler or finalizer may call in the midst of a call of its own thread. It may wait, too, unless it
  interrupts a send or a receive on this connection, which must go on first.
- Callbacks of users run in the serving pool, or in the thread that waited for that very future.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from farcall.agent.attendance import Attendance
from farcall.agent.book import ReferenceBook
from farcall.agent.calls import CallbackJob, ChoreJob, PendingCall, Reply
from farcall.agent.deadlines import Deadlines
from farcall.agent.handle import Handle
from farcall.agent.lanes import Lane
from farcall.agent.poller import HUNG_UP, READABLE, WRITABLE, Poller, new_poll
from farcall.agent.reading import CANNOT_WAIT, CHUNK, LOOK_AGAIN, Reading, first_pause, receive_large
from farcall.agent.sending import LARGE, MAX_WAITING, Sender, Traffic
from farcall.agent.serving import Serving
from farcall.agent.shortcuts import AFTER, abandon, offer, receive_beside
from farcall.agent.spinning import AT_ONCE, Dozing, Spinning
from farcall.agent.supervisor import Supervisor
from farcall.agent.turns import Bells, Turns
from farcall.errors import ProtocolError, RpcError, UsageError, WorkerLost
from farcall.futures import DONE, FAILED, UNLOADED, Callbacks, Future, run_callbacks
from farcall.protocol.control import unpack_section
from farcall.protocol.ids import Worker, WorkerInfo
from farcall.protocol.wire import CALL, CONTROL, FAILURE, KNOCK, NEWS, RESULT, RESULT_CARRYING, Bytes, Decoder, encode
from farcall.serialization import MARK, small_array
from farcall.sleeping import FOREVER, Gate, asleep
from farcall.transports.base import Buffer, Channel
from farcall.transports.rings import RingReader, rest

TOLD: Final = 1 << 63
"""From here on are the ids of what is told without a call."""
LOST_ADVICE: Final = "is it still running, and does every worker call rpc.shutdown() at its end?"


class Outgoing:
    """One connection to one peer."""

    def __init__(
        self,
        peer: WorkerInfo,
        number: Worker,
        channel: Channel,
        lane: Lane,
        poller: Poller,
        serving: Serving,
        supervisor: Supervisor,
        book: ReferenceBook,
        spinning: Spinning,
        bells: Bells,
        on_news: Callable[[Worker, Bytes], None],
        on_lost: Callable[[Outgoing], None],
    ) -> None:
        self.pending: dict[int, PendingCall] = {}
        self.peer, self.number, self._channel, self.lane = peer, number, channel, lane
        self._descriptor, self._decoder = channel.fileno(), Decoder()
        self._poller, self._serving, self.book, self._on_news, self._on_lost = poller, serving, book, on_news, on_lost
        self._late: set[int] = set()  # calls whose time was over: their replies may bring references to be given back
        self._awaits_control = False  # what was sent about references is not acknowledged yet
        self.new_reply: Callable[..., Reply] = Reply  # the agent sets another one if not all may be loaded
        self._ids, self.told_ids, self._uses = itertools.count(1), itertools.count(TOLD), itertools.count(1)
        self._decoder.shared, self._decoder.returned = lane.take, lane.take_returned
        self._reading, self._deadlines = Reading(self, turns=Turns(bells)), Deadlines(supervisor)
        self._attendance = Attendance(self, supervisor, self._reading.look_after)
        self.unattended, self.attend = self._attendance.unattended, self._reading.attend
        """See `Readable`, and `Source`; the first also for a call that nobody waits for yet. No frames of their own."""
        self._spinning, self._dozing, self._poll = spinning, Dozing(), new_poll(self._descriptor)
        lane.on_large = self._spinning.after_large
        self._lock, self._receiving = threading.RLock(), False  # the holder of the reader's role is at it just now
        self._rings: tuple[RingReader, ...] = ()  # one, if small messages come through it
        self._lost: RpcError | None = None
        self._advice = self._parting = ""  # the latter: why it is about to end, once the peer has left
        self.calls_started = self.calls_failed = 0
        """How many calls were sent on it so far, and how many of those have ended with an error."""
        poller.add(self._descriptor, self._handle, HUNG_UP)  # a peer that dies is noticed though nobody waits for it
        self._sender = Sender(channel, lambda on: poller.want(self._descriptor, WRITABLE, on))
        self.traffic = Traffic(self._sender, self._decoder)

    # Calling

    def call(
        self,
        function: Callable[..., Any] | str,
        head: bytes,
        body: bytes,
        buffers: Sequence[memoryview],
        timeout: float,
        spent: float = 0.0,
        kind: int = CALL,
        mail: bytes | None = None,
    ) -> PendingCall:
        """Sends a call, for which `spent` of its timeout is over already. `function` may be a name, for messages only.

        `mail`: the body of a control message that goes in front. The future is settled in any case, if by `WorkerLost`.
        """
        call_id = next(self._ids)
        deadline = monotonic() + timeout - spent if timeout else FOREVER
        future = PendingCall(self, call_id, function, timeout, deadline)
        before = b""
        try:
            self.pending[call_id] = future
            if deadline < self._deadlines.first:
                self._deadlines.note(deadline)
            self.calls_started = call_id
            if next(self._uses) == AFTER:
                self._rings = offer(self.lane, self._sender)
            if kind != CALL or mail is not None:
                self._awaits_control = True  # before it is sent: the answer may come at once
                self.unattended()
                if mail is not None:
                    before = encode(CONTROL, 0, b"", mail)
            if buffers or len(body) > LARGE:
                message = self.lane.pieces(kind, call_id, head, body, buffers)
                self._sender.send_large(message, deadline, self.is_lost, before)
            else:
                whole = encode(kind, call_id, head, body)
                self._sender.send(before + whole if before else whole)
            if self._sender.waiting > MAX_WAITING:
                self._sender.hold_back(deadline, self.is_lost)
        except OSError as error:
            self._sending_failed(error)
        except BaseException as error:
            self.pending.pop(call_id, None)  # nobody gets to know of it
            self._sending_interrupted(error, must_arrive=kind != CALL or mail is not None)
            raise
        if self._lost is not None:
            self._on_lost(self)  # whoever loses it may not have come to that yet, and the next call must not come here
            self._fail(future)
        return future

    def send_news(self, message: bytes) -> None:
        """Sends something that is not answered here, and that need not arrive, or is said again if it did not."""
        try:
            self._sender.send(message)
        except OSError as error:
            self._sending_failed(error)

    def send_control(
        self, message: bytes, buffers: Sequence[Buffer] = (), patience: float = 0.0, is_told: bool = False
    ) -> None:
        """Sends something about references, which the peer will acknowledge. What is lost is sent again later.

        While too much waits to be sent the caller is held back, for at most `patience` seconds. What `is_told` is among
        the pending calls, and acknowledged by its answer.
        """
        if not is_told:
            self._awaits_control = True  # before it is sent: the answer may come at once
        try:
            if next(self._uses) == AFTER:  # whatever is said a lot, not calls alone
                self._rings = offer(self.lane, self._sender)
            if buffers:
                self._sender.send_all([message, *buffers])
            else:
                self._sender.send(message)
            if patience and self._sender.waiting > MAX_WAITING:
                self._sender.hold_back(monotonic() + patience, self.is_lost)
        except OSError as error:
            self._sending_failed(error)
        except BaseException as error:
            self._sending_interrupted(error, must_arrive=True)
            raise
        self.unattended()

    def interrupted(self, error: BaseException) -> None:
        """Gives the connection up: something that must arrive was perhaps not sent, and is sent again then."""
        self.lose(f"sending to it was interrupted by {type(error).__name__}", advice="")

    def _sending_failed(self, error: OSError) -> None:
        """It has hung up, most likely: what it said before that, perhaps good-bye, is read first."""
        poll = new_poll(self._descriptor)
        while self._lost is None and (poll(0) or rest(self._rings)) and self.receive_in_background():
            pass
        self.lose(f"sending to it failed: {error}")

    def _sending_interrupted(self, error: BaseException, must_arrive: bool) -> None:
        if must_arrive or self._sender.is_broken():  # a part of a message may be gone
            self.interrupted(error)
        else:
            self._handle(WRITABLE)  # others may have left it to this thread to send theirs, or to knock

    def is_lost(self) -> bool:
        """Whether it is closed, and what was sent on it may not have arrived."""
        return self._lost is not None

    # The source of its futures

    def drive(self, future: Future[Any], deadline: float) -> None:
        """Waits for one of its futures, reading the connection if nobody does."""
        if TYPE_CHECKING:
            assert isinstance(future, PendingCall)
        due = None
        try:
            self._reading.wait(future, deadline if deadline < future.deadline else future.deadline)
            if future.due is not None:
                due, future.due = future.due, None
                run_callbacks(future, due, waiting=True)
        except BaseException:
            if due is None:
                due, future.due = future.due, None
            if due:
                self._dispatch(future, due)  # those that were not run
            if not future._state:
                self.unattended()  # who is interrupted before it reads has left its reply to nobody
            future.watch(PendingCall.forgive, waker=True, attended=True)
            raise
        if not future._state and monotonic() >= future.deadline:
            self._expire(future)

    # Reading

    def read_until(self, future: Future[Any], deadline: float, nested: bool = False) -> None:
        """See `Readable`."""
        poll, line, spinning, pause = self._poll, self._reading.line, self._spinning, 0.0
        if nested:
            if self._receiving:
                raise UsageError(CANNOT_WAIT.format("reading a reply"))
            poll = new_poll(self._descriptor)  # one that polls already cannot be used
        try:
            while not future._state and self._lost is None and (nested or not line):  # else those go first, further out
                if spinning.look(poll, self._rings):
                    self._receive(future)
                    continue
                began = monotonic()
                left = deadline - began
                if left <= 0:
                    break
                if self._sender.busy:
                    self.check_wait()
                pause = min(2 * pause, LOOK_AGAIN) if pause else first_pause()
                if self._serving.doze(self._dozing, poll):
                    self._receive(future)
                    continue
                with asleep():
                    came = poll(math.ceil(min(left, pause) * 1000))
                if came:
                    spinning.slept(monotonic() - began)
                    self._receive(future)
                else:
                    self._handle(WRITABLE)  # a thread that was to send for others as well may have been interrupted
        finally:
            if nested and rest(self._rings):  # who waits further out may be about to sleep
                self._receive(None)

    def glance(self, future: Future[Any]) -> None:
        """See `Readable`."""
        stop = monotonic() + AT_ONCE
        while not future._state and self._lost is None and self._spinning.glance(self._poll, self._rings, stop):
            self._receive(future)

    def doze(self, gate: Gate) -> None:
        """See `Readable`."""
        self._serving.doze(self._dozing, gate.doze)

    def check_wait(self) -> None:
        """See `Readable`."""
        if self._sender.is_sending_here():
            raise UsageError(CANNOT_WAIT.format("sending"))

    def _receive(self, waited_for: Future[Any] | None) -> None:
        """Reads what is there and settles the futures it is for. Only the holder of the reader's role calls it."""
        decoder, pending, rings = self._decoder, self.pending, self._rings
        future = callbacks = None
        self._receiving = True
        try:
            if rings:
                messages = receive_beside(rings[0], self._channel, decoder)
            elif decoder.space is None:
                messages = decoder.feed(data) if (data := self._channel.receive(CHUNK)) else None
            else:
                messages = receive_large(self._channel, decoder)
            if messages is None:
                self.lose(self._parting or "it closed the connection", "" if self._parting else LOST_ADVICE)
                return
            for kind, call_id, head, body, buffers in messages:
                handles: Sequence[Handle] = ()
                if kind == CALL:
                    raise ProtocolError("a call came where only replies may")
                if kind > FAILURE:
                    taken = self._take(kind, head, body)
                    if taken is None:
                        continue
                    handles = taken
                callbacks = None
                future = pending.get(call_id)
                if future is None:
                    self._late.discard(call_id)
                    continue  # its time was over: dropped quietly
                try:
                    del pending[call_id]  # not pop(): Ctrl-C may come as that returns, and the future would be lost
                except KeyError:
                    future = None
                    continue
                future.keeps = None
                value = None
                if kind == RESULT and body and body[0] == MARK and not buffers:
                    value = small_array(body)  # at once: it may always be loaded, and that costs less than a reply
                if kind == RESULT and (not body or value is not None):
                    callbacks = future.settle(DONE, value)
                elif kind == RESULT and call_id >= TOLD and self.new_reply is Reply:
                    callbacks = future.tell(body)  # type: ignore[attr-defined]  # a ToldCall, by its id
                else:
                    reply = self.new_reply(self.peer.name, future.function, kind, body, buffers, handles)
                    if kind == FAILURE:
                        self.calls_failed += 1
                        future.report_unseen(reply.describe)
                    callbacks = future.settle(UNLOADED, reply)
                if callbacks is None:
                    continue
                if future is waited_for:
                    future.due = callbacks
                else:
                    self._dispatch(future, callbacks)
        except BlockingIOError:
            return
        except (OSError, ProtocolError, MemoryError) as error:
            self._put_back(future, callbacks, waited_for)
            self.lose(f"reading its replies failed: {error or type(error).__name__}")
        except BaseException as error:
            self._put_back(future, callbacks, waited_for)
            self.lose(f"reading its replies was interrupted by {type(error).__name__}", advice="")
            raise
        finally:
            self._receiving = False

    def _put_back(self, future: PendingCall | None, callbacks: Callbacks | None, waited_for: object) -> None:
        """Reading was interrupted with this call in hand: it must be settled yet, or its callbacks run."""
        if future is None:
            return
        if not future._state:
            self.pending[future.call_id] = future
            return
        callbacks = callbacks or future.wake()
        if callbacks and future is waited_for:
            future.due = callbacks
        elif callbacks:
            self._dispatch(future, callbacks)  # if it was done before: each is run once, whoever comes first

    def _take(self, kind: int, head: bytes, body: Bytes) -> list[Handle] | None:
        """What has to do with references; the handles of a result that carries some, None for anything else."""
        if kind == CONTROL:
            self.book.control_received(self.number, body)
        elif kind == NEWS:
            self._on_news(self.number, body)
            if self._parting:  # that was its good-bye, and it answers nothing more
                self.lose(self._parting, advice="")
        elif kind == RESULT_CARRYING:
            number, carried, _ = unpack_section(head)
            return self.book.take(self.number, number, carried)
        elif kind != KNOCK:
            raise ProtocolError(f"a call (kind {kind}) came where only replies may")
        return None

    def _dispatch(self, future: Future[Any], callbacks: Callbacks) -> None:
        self._serving.submit(CallbackJob(future, callbacks))

    def _handle(self, events: int) -> None:
        """The poller says that something can be read or sent, and the serving pool has the time to do it."""
        if events & WRITABLE:
            try:
                self._sender.flush()
            except OSError as error:
                self._sending_failed(error)
        if events & ~WRITABLE:
            self.receive_in_background()

    def receive_in_background(self, milliseconds: int = 0) -> bool:
        """Reads what is there, or comes within that time, unless somebody else does; whether it did."""
        if not self._reading.enter_in_background():
            return False
        try:
            if not milliseconds or rest(self._rings) or self._poll(milliseconds):
                self._receive(None)
        finally:
            self._reading.leave()
        return True

    def watch_in_background(self, on: bool) -> None:
        """See `Readable`."""
        self._poller.want(self._descriptor, READABLE, on)
        if on and rest(self._rings):  # nobody polls them now, and what is there already wakes nobody
            self._serving.submit(ChoreJob(self.receive_in_background))

    def has_pending(self) -> bool:
        """See `Readable`."""
        if self.pending or self._late:
            return True
        if self._awaits_control and not self._attendance.since:  # else that asks, in a moment
            # First unset, then asked: whoever sends something just now sets it after the book knows of that.
            self._awaits_control = False
            if self.book.mailboxes.awaits(self.number):
                self._awaits_control = True
        return self._awaits_control

    # The supervisor's view

    def tick(self, now: float) -> bool:
        """See `Supervised`: ends calls whose time is over, and has replies read that nobody reads."""
        if now >= self._deadlines.first:
            self._deadlines.expire(list(self.pending.values()), now, self._expire)
        return self._attendance.tick(now)

    def next_deadline(self) -> float:
        """See `Supervised`."""
        return self._deadlines.first

    def _expire(self, future: PendingCall) -> None:
        self._late.add(future.call_id)  # before it is taken: its reply may come just then
        if self.take_and_fail(future, future.too_late()):
            self.unattended()
        else:
            self._late.discard(future.call_id)

    # The end

    def lose(self, reason: str, advice: str = LOST_ADVICE) -> None:
        """Gives the connection up; everything pending fails with `WorkerLost`."""
        self._advice = f"; {advice}" if advice else ""
        self._end(WorkerLost(f"worker {self.peer.name!r} was lost: {reason}", self.peer.name))

    def part(self, reason: str) -> None:
        """The peer has left. What it has answered before may not have been read yet; after that, this ends."""
        self._parting = reason
        if not self.pending:
            self.lose(reason, advice="")

    def close(self, reason: str, kind: type[RpcError] = RpcError) -> None:
        """Closes it from our side; everything pending fails with that reason, as an error of that kind."""
        self._advice = ""
        self._end(kind(reason))

    def abandon(self, error: RpcError) -> None:
        """In a forked child: the connection is the parent's, and stays as it is there."""
        self._lost = error
        abandon(self._rings, self._sender)
        self._channel.abandon()
        self.lane.abandon()
        while self.pending:
            _, future = self.pending.popitem()
            future.settle(FAILED, error)

    def _end(self, error: RpcError) -> None:
        try:
            with self._lock:
                if self._lost is not None:
                    return
                self._lost = error
            self._finish()
        except BaseException:  # Ctrl-C: each step may be done twice
            if self._lost is error:
                self._finish()
            raise

    def _finish(self) -> None:
        self._poller.remove(self._descriptor)
        self._channel.close()
        self.lane.close()
        self._rings, self._sender.ring = (), None
        self._on_lost(self)
        for future in list(self.pending.values()):
            self._fail(future)

    def _fail(self, future: PendingCall) -> None:
        assert self._lost is not None
        self.take_and_fail(future, future.cut_off(self._lost, self._advice))

    def take_and_fail(self, future: PendingCall, error: RpcError) -> bool:
        """Settles it with that error, unless somebody else has taken it from `pending`; whether it was settled here."""
        callbacks = None
        try:
            del self.pending[future.call_id]
        except KeyError:
            return False
        self.calls_failed += 1
        try:
            future.keeps = None
            future.report_unseen(lambda: f"nobody looked at a call that failed: {error}")
            callbacks = future.settle(FAILED, error)
            if callbacks is not None:
                self._dispatch(future, callbacks)
        except BaseException:
            self._put_back(future, callbacks, None)
            raise
        return True
