"""The links of a faulty agent: every frame that it sends or receives passes here, and may be lost, held or answered.

A `FaultyLink` wraps the *inner* link, which leads to the other worker. The agent uses it like any link. A frame that
the agent sends is judged in the thread that sends. A frame that arrives is read from the inner link by the thread of
the relay, judged there, and put into an inbox. The agent's poller watches one end of a socket pair: it is readable
while the inbox has frames, and hung up when the link has ended.

How messages are lost
- A network loses no message of a connection that goes on, and the runtime counts on that. So messages that must arrive
  (calls by `remote`, and control messages) are lost only along with their connection. The agent sends them again on the
  next one. Calls under way would fail, so the connection breaks when there are none, if that is soon.
- Calls and replies are lost alone, because no worker sends them again. The references that they carry arrive, as they
  do when a connection is lost.

Rules
- Everything is done under the lock of the relay, except what waits (`wait`, establishing the inner link) and `abandon`.
- No thread waits for the inner link, which copies and queues what its socket does not take. A thread that waited under
  the lock would keep the relay from reading, and two workers that send to each other would wait for ever.
- Frames keep their order, except those that are delayed, late or sent again. The protocols do not depend on it.
- After the last frame of the other end's handshake, the inner link is not read until it is established. It would refuse
  what comes next.
"""

from __future__ import annotations

import copy
import errno
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Final

from farcall.errors import ProtocolError, WorkerLostError
from farcall.protocol import frames
from farcall.protocol.frames import HEADER_SIZE, unpack_annotations, unpack_references
from farcall.protocol.handshake import Hello, Proof, Welcome, unpack
from farcall.protocol.ids import Worker
from farcall.protocol.reference_messages import Message
from farcall.runtime.reference_outbox import pack_control, unpack_control
from farcall.serialization import encode_failure
from farcall.testing.faulty_control import Conditions, Faults, SentMessages
from farcall.testing.faulty_options import REMOTE_CALL, SCRIPT_REMOTE_CALL, Failure
from farcall.testing.faulty_rules import Verdict, name_of_reference_message
from farcall.transports.base import FOREVER, Frame, Link, LinkOptions, Listener, Transport
from farcall.transports.sockets import OwnSocket
from farcall.transports.wake_up import WakeUp

QUIET_S: Final = 0.05
"""A connection that is to break breaks only after this many seconds without a call, because a call often follows
control messages.
"""
MAX_BUSY_S: Final = 5.0
"""A connection that is to break breaks after this many seconds even if calls are running."""
MAX_LATE_S: Final = 5.0
"""A late message arrives after this many seconds even if no other message was sent."""
_BEHIND_S: Final = 0.02
"""How many seconds after the later message a late one is sent. They may be on two connections, without an order."""
MAX_SLEEP_S: Final = 1.0
"""How many seconds `wait` sleeps before it checks whether a signal handler has received the frames."""
_FLUSH_INTERVAL_S: Final = 0.01
"""How many seconds a link that ends waits between two looks at whether its last frames were sent."""
_MAX_UNREAD: Final = 64
"""With so many frames in the inbox, the inner link is not read."""
_NO_WAIT: Final = 0.0
"""A deadline in the past, for `send` of the inner link: it queues what cannot be sent at once."""


class _Flow:
    """The frames of one direction of a link that are not passed on yet. Empty at first.

    Attributes:
        waiting: Functions that each pass one frame on, in the order of the frames.
        held: How many more frames a timer or a later message will append to `waiting`.
    """

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()  # each passes one frame on, in this order
        self.held = 0  # how many more will be appended, by a timer or by a later message


class FaultyLink:
    """A `Link` around another link, the *inner* link, on which frames fail, are delayed or are held as a test says.

    A `FaultyTransport` makes these links, and a faulty agent uses them like any other link.

    Args:
        inner: The link to the other worker, in its handshake. This object owns it from now on, and closes it.
        faults: What goes wrong, as the test has set it.
        is_connecting: Whether this end connected; False if it was accepted.

    Attributes:
        address: The address of the inner link.
        is_established: Whether `establish` was called.
        peer: The name of the worker at the other end; empty until the handshake has told it.

    Raises:
        OSError: There are no descriptors left, or the agent has ended. `inner` is closed.
    """

    def __init__(self, inner: Link, faults: Faults, is_connecting: bool) -> None:
        """Wraps a link that is in its handshake. A thread of the faulty agent, the relay, reads it from now on.

        Args:
            inner: The link to the other worker. This object owns it from now on, and closes it.
            faults: What goes wrong, as the test has set it.
            is_connecting: Whether this end connected; False if it was accepted.

        Raises:
            OSError: There are no descriptors left, or the agent has ended. `inner` is closed.
        """
        self.address = inner.address
        self.is_established = False
        self.peer = ""
        """The name of the worker at the other end; empty until the handshake has told it."""
        self._number: Worker = -1  # of that worker
        self.counts, self.flush, self.unsent_bytes = inner.counts, inner.flush, inner.unsent_bytes
        self.sweep, self.prepare_fork = inner.sweep, inner.prepare_fork
        self._inner = inner
        self._faults = faults
        self._relay = faults.relay
        self._is_connecting = is_connecting
        self._inbound, self._outbound = _Flow(), _Flow()
        self._inbox: deque[Frame] = deque()
        self._wake_up = WakeUp()
        self._reads = 0  # how often the inbox was emptied
        self._is_watched = False  # the relay reads the inner link
        self._must_not_read = False  # until the inner link is established, or because it has ended
        self._is_detached = False  # the agent has closed it, or the faults have broken it
        self._is_disconnected = False  # the inner link is closed
        self._error: Exception = ConnectionResetError("the other end closed the connection")  # or why it ended
        self._calls: set[int] = set()  # ids of calls under way
        self._unanswered: set[int] = set()  # ids of calls whose replies are dropped
        self._remote_calls: set[int] = set()  # ids of remote calls without a reply
        self._last_call = 0.0
        self._is_to_break = False  # when it is quiet
        try:
            ends = socket.socketpair()
        except OSError:
            inner.close()
            raise
        self._agent_end: OwnSocket | None = OwnSocket(ends[0])
        self._relay_end = ends[1]
        with self._relay.lock:
            if not self._relay.add(self):
                self.close()
                raise OSError(errno.ESHUTDOWN, "the faulty agent has ended")
            self._advance()

    # The agent's side

    @property
    def backlog(self) -> int:
        """The number of bytes that wait in this process to be sent to the other worker; 0 if there are none.

        Frames that are held because a test says so do not count. So they do not make callers wait.
        """
        return self._inner.backlog

    @property
    def network(self) -> str:
        """Text that is the same at both ends of an unencrypted loopback link in one network namespace; else empty."""
        return self._inner.network

    @property
    def binding(self) -> bytes:
        """The fingerprint of the certificate of an encrypted link; empty if the link is not encrypted."""
        return self._inner.binding

    def fileno(self) -> int:
        """Returns a descriptor that is readable when frames have arrived or the link has ended.

        Raises `ConnectionAbortedError` if this end is closed.
        """
        return self._open_end().fileno()

    def _open_end(self) -> OwnSocket:
        """Returns the socket that is readable when frames have arrived or the link has ended.

        Raises `ConnectionAbortedError` if this end of the link is closed.
        """
        end = self._agent_end
        if end is None:
            raise ConnectionAbortedError(f"the link to {self.address} is closed")
        return end

    def establish(self, options: LinkOptions, deadline: float | None = None) -> None:
        """Completes the handshake: from now on frames with buffers, and larger ones, can be sent and received.

        Args:
            options: The options of all links of this worker. Their poller and their `spin_s` are not used.
            deadline: Until when the connecting end waits for the other end, as a time of the monotonic clock. The
                accepted end does not wait, and must be given None.

        Raises:
            TimeoutError: The other end did not answer before `deadline`.
            ConnectionError: The link is closed or broken.
            ProtocolError: The answer of the other end cannot be read.
        """
        options = options._replace(poller=self._relay.poller, spin_s=0.0)
        with self._relay.lock:
            self.is_established = self._must_not_read = True
            self._watch()
            if deadline is None:
                # Behind the frames of its handshake, which may be held: an established link cannot send them.
                self._deliver(self._outbound, partial(self._establish_inner, options, None))
                return
        self._establish_inner(options, deadline)

    def _establish_inner(self, options: LinkOptions, deadline: float | None) -> None:
        """Completes the handshake of the link to the other worker, and lets the relay thread read it.

        `options` are those of that link. The connecting end waits until `deadline`, a time of the monotonic clock; None
        does not wait. Raises `TimeoutError` at the deadline, `ConnectionError` if the link is closed or broken, and
        `ProtocolError` if the answer of the other end cannot be read.
        """
        self._inner.establish(options, deadline)  # the connecting end waits, and reads the inner link itself
        with self._relay.lock:
            self._must_not_read = False
            self._watch()

    def send(self, frame: bytes, buffers: list[memoryview] | None = None, deadline: float = FOREVER) -> None:
        """Sends one frame, unless the test wants it to fail. Never waits: what cannot be sent at once is queued.

        A frame that is lost, delayed or held because the test says so raises nothing.

        Args:
            frame: The bytes of the frame.
            buffers: Its buffers, which are copied; None or an empty list for none. The list is emptied.
            deadline: Ignored.

        Raises:
            ConnectionError: The link is closed or broken.
        """
        with self._relay.lock:
            self._check_open()
            if self.is_established:
                self._send(frame, buffers or [])
            else:
                self._send_handshake(frame)
            if buffers:
                buffers.clear()
            self._advance()

    def send_kept(self, frame: bytes, buffers: list[memoryview], deadline: float = FOREVER) -> list[memoryview]:
        """Sends one frame, unless the test wants it to fail, and returns copies of its buffers.

        The copies do not change when the program changes the originals. Never waits. Returns an empty list for no
        buffers.

        Args:
            frame: The bytes of the frame.
            buffers: Its buffers. The list is not changed.
            deadline: Ignored.

        Raises:
            ConnectionError: The link is closed or broken.
        """
        kept = _copies(buffers)
        self.send(frame, list(kept), deadline)
        return kept

    def receive(self) -> list[Frame]:
        """Returns the frames that have arrived, each with its buffers; an empty list if there are none. Does not wait.

        Raises:
            ConnectionError: The other end has closed the link or the test has broken it, and all frames were received;
                or this end is closed.
            ProtocolError: The other end has sent bytes that are not a frame, and all frames before them were received.
        """
        with self._relay.lock:
            end = self._open_end()
            received = list(self._inbox)
            if received:
                self._reads += 1
                self._inbox.clear()
                end.recv(1)
                self._advance()
            elif self.has_hung_up():
                raise copy.copy(self._error)  # the traceback of the error itself would keep this link alive
            return received

    def wait(self, seconds: float | None) -> bool:
        """Waits until frames have arrived or the link has ended, and returns True. Returns False when the time is over.

        May return False early if a signal handler has received the frames. Raises `ConnectionAbortedError` if this end
        was closed before.

        Args:
            seconds: How long to wait at most; None for no limit, 0 to only look.
        """
        end = self._open_end()  # its descriptor stays open though another thread closes the link
        poll = select.poll()
        poll.register(end, select.POLLIN)
        wake_up = self._wake_up
        event = wake_up.fileno()
        if event >= 0:
            poll.register(event, select.POLLIN)
        before, until = self._reads, FOREVER if seconds is None else monotonic() + seconds
        while True:
            if wake_up.take():
                return False
            left = min(max(0.0, until - monotonic()), MAX_SLEEP_S)
            if poll.poll(left * 1000):
                return not wake_up.take()
            # A signal handler may have received what is waited for: `poll` itself goes on after one.
            if self._reads != before or monotonic() >= until:
                return False

    def _check_open(self) -> None:
        """Returns if frames can be sent.

        Raises `ConnectionAbortedError` if this end is closed, or the link has ended.
        """
        self._open_end()
        if self.has_hung_up():
            raise ConnectionAbortedError(str(self._error))

    def has_hung_up(self) -> bool:
        """Returns whether the link has ended: one end has closed it, or the test has broken it.

        Frames that arrived before may still wait to be received.
        """
        return self._is_detached or self._is_disconnected

    def wake(self) -> None:
        """See `Link`."""
        self._wake_up.request()

    def note_hang_up(self) -> None:
        """Does nothing: a waiting thread notices the end of the link by itself."""

    def close(self) -> None:
        """Closes this end of the link. Frames that were not received are dropped. May be called again.

        `send`, `receive`, `wait` and `fileno` raise `ConnectionAbortedError` from then on. Frames that were sent
        before, and are held or queued, still go out.
        """
        with self._relay.lock:
            end, self._agent_end = self._agent_end, None
            self._wake_up = WakeUp()  # frees the descriptor of the old one when no thread polls it any more
            if end is not None:
                end.release()
                self._inbox.clear()
                self._detach()
                self._advance()

    def abandon(self) -> None:
        """Called in a forked child: closes the child's copies of descriptors. The parent's link stays as it is.

        Raises nothing.
        """
        end, self._agent_end = self._agent_end, None
        if end is not None:
            end.abandon()
        self._relay_end.close()
        self._wake_up.close()
        self._inner.abandon()

    # Passing frames on

    def _send_on(self, frame: bytes, buffers: Sequence[memoryview] = (), delay: float = 0.0) -> None:
        """Sends a frame to the other worker, now or after `delay` seconds.

        While the test freezes the network, the frame is held. The buffers are copied. Raises `ConnectionError` if the
        frame is sent now and the connection is closed or broken.
        """
        self._deliver(self._outbound, partial(self._inner.send, frame, _copies(buffers), _NO_WAIT), delay)

    def _put(self, frame: bytes, buffers: Sequence[memoryview] = ()) -> None:
        """Puts a frame into the inbox, from which `receive` takes it: now, or later if the network is slow or frozen.

        Drops the frame if the link has ended.
        """

        def put() -> None:
            if not self.has_hung_up():
                self._inbox.append((frame, buffers))
                if len(self._inbox) == 1:
                    self._relay_end.send(b"\0")

        self._deliver(self._inbound, put)

    def _deliver(self, flow: _Flow, pass_on: Callable[[], None], delay: float = 0.0) -> None:
        """Passes a frame on in one direction: now, or after a delay. While the test freezes the network, it is held.

        Args:
            flow: The frames of that direction that are not passed on yet.
            pass_on: Passes the frame on. What it raises is raised here, if it is called now.
            delay: Seconds, in addition to those of `Faults.slow`; 0 for none. While the agent ends, there is no delay.
        """
        delay += self._conditions().slow_s
        if delay and not self._relay.is_closing:
            flow.held += 1
            self._relay.call_later(delay, partial(self._release, flow, pass_on))
        else:
            flow.waiting.append(pass_on)
            self._pass_on(flow)

    def _release(self, flow: _Flow, pass_on: Callable[[], None]) -> None:
        """Passes on a frame whose delay is over, in the direction `flow`, by calling `pass_on` when its turn comes.

        Does nothing if the frame was dropped meanwhile.
        """
        if flow.held:
            flow.held -= 1
            flow.waiting.append(pass_on)
            self._advance()

    def _pass_on(self, flow: _Flow) -> None:
        """Passes on all waiting frames of one direction, in order.

        Does nothing while the test freezes the network, or if none wait. Raises what the functions in `flow.waiting`
        raise, for example `ConnectionError` from the connection.
        """
        while flow.waiting and not self._conditions().is_frozen:
            flow.waiting.popleft()()

    def _advance(self) -> None:
        """Passes on all frames of both directions that can be passed on now. Does nothing if the connection is closed.

        Closes the connection if this end is closed or broken and nothing is left to send. A `ConnectionError` drops the
        frames to be sent, and is not raised.
        """
        if self._is_disconnected:
            return
        try:
            self._pass_on(self._inbound)
            self._pass_on(self._outbound)
        except ConnectionError:
            self._outbound = _Flow()  # the end of the connection is found by reading
        if self._is_detached and not self._outbound.waiting and not self._outbound.held:
            if self._inner.unsent_bytes():
                self._relay.call_later(_FLUSH_INTERVAL_S, self._advance)
            else:
                self.disconnect()
        self._watch()

    def _watch(self) -> None:
        """Makes the relay, a thread of the faulty agent, start or stop reading the connection, as its state requires.

        The connection is not read if it is closed, while the network is frozen, while `_MAX_UNREAD` frames wait in the
        inbox, and while the handshake does not allow it. Does nothing if the relay already does the right thing.
        """
        must_wait = self._must_not_read or self._conditions().is_frozen or len(self._inbox) >= _MAX_UNREAD
        is_watched = not must_wait and not self._is_disconnected
        if is_watched != self._is_watched:
            self._is_watched = is_watched
            if is_watched:
                self._relay.poller.watch(self._inner, self._read_inner)
            else:
                self._relay.poller.unwatch(self._inner)

    def _read_inner(self) -> None:
        """Called by the relay thread: puts the frames that have come from the other worker into the inbox.

        The faults of the test are applied before. If receiving raises, `receive` raises that error after the last
        frame. Raises nothing.
        """
        if not self._is_watched:
            return  # an old event
        try:
            for frame, buffers in self._inner.receive():
                if self.is_established:
                    self._receive(frame, buffers)
                else:
                    self._receive_handshake(frame)
        except Exception as error:  # of any kind: the agent gets it when it reads
            self._must_not_read = True
            if not self._is_detached:
                self._error = error.with_traceback(None)
            self._deliver(self._inbound, self.disconnect)  # behind the last frame
        self._advance()

    # The other end

    def _conditions(self) -> Conditions:
        """Returns the state of the network to the other worker; without faults until that worker is known."""
        return self._faults.conditions(self.peer)

    def _sent_messages(self) -> SentMessages:
        """Returns what is remembered about messages to the other worker, on this and earlier connections."""
        return self._faults.sent_to(self._number)

    def _send_handshake(self, frame: bytes) -> None:
        """Sends a frame of the handshake.

        The hello, the first frame of the connecting end, tells which worker is at the other end. Raises
        `ConnectionAbortedError` if the test has cut that worker off, and `ProtocolError` if the first frame of the
        connecting end is no message of a handshake.
        """
        if self._is_connecting and not self.peer:
            hello = unpack(frame, self.address)
            if isinstance(hello, Hello):
                self._identify(hello.wanted, hello.wanted_number)
                self._check_open()
        self._send_on(frame)

    def _receive_handshake(self, frame: bytes) -> None:
        """Puts a received frame of the handshake into the inbox.

        The first frame of a connecting end, the hello, tells which worker is at that end. After the last frame of the
        other end's handshake, the connection is not read until it is established. A frame that is not a message of a
        handshake also goes into the inbox; the agent refuses it there.
        """
        try:
            message = unpack(bytes(frame), self.address)
        except ProtocolError:
            message = None  # for the agent to refuse
        if isinstance(message, Hello):
            self._identify(message.name, message.number)
        self._must_not_read = isinstance(message, Welcome if self._is_connecting else Proof)
        self._put(frame)

    def _identify(self, name: str, number: Worker) -> None:
        """Stores the name and the id of the worker at the other end, and applies the test's faults for that worker."""
        self.peer, self._number = name, number
        self.apply_conditions()

    def apply_conditions(self) -> None:
        """Applies the state of the network between the two workers after a test has changed it.

        Breaks the link at once if the other worker is cut off. Otherwise passes on the frames that can be passed on
        now.
        """
        if self._conditions().is_cut:
            self._break(f"the faulty agent has cut worker {self.peer!r} off; it can be reached again after heal()")
            self.disconnect()
        else:
            self._advance()

    # What the agent sends

    def _send(self, frame: bytes, buffers: Sequence[memoryview]) -> None:
        """Decides by the test's rules what happens to a frame of this worker, and sends it, holds it or drops it.

        Raises `ConnectionError` if it is sent and the connection is closed or broken.
        """
        kind, flags, callee_size, _, call_id = frames.unpack_header(frame)
        at = HEADER_SIZE + callee_size
        callee = frame[HEADER_SIZE:at]
        if kind == frames.CALL:
            self._send_call(frame, buffers, flags, callee, call_id)
        elif kind == frames.KEEP:
            if call_id:
                self._remote_calls.add(call_id)
            number, _, _ = unpack_references(frame, at + frames.HANDLE_SIZE)
            self._send_reliably(self._faults.rules.name_of_remote_call(callee), number, frame, buffers)
        elif kind == frames.CONTROL:
            self._send_control(frame)
        else:
            self._send_on(frame, buffers)

    def _send_call(self, frame: bytes, buffers: Sequence[memoryview], flags: int, callee: bytes, call_id: int) -> None:
        """Decides by the test's rules what happens to a call: sends, holds or drops it, or answers it with an error.

        References in a call that is dropped or answered are sent all the same. If the rules have made earlier calls of
        the same message name late, these are sent after this one.

        Args:
            frame: The whole frame.
            buffers: Its buffers; may be empty.
            flags: The flags of its header, which say which sections it has.
            callee: The function or reference that it names, as encoded in the frame.
            call_id: The id of the call.

        Raises:
            ConnectionError: It is sent, and the connection is closed or broken.
        """
        references, _, payload = _sections(frame, HEADER_SIZE + len(callee), flags)
        name = self._faults.rules.name_of_call(callee)
        verdict = self._faults.rules.judge(name, hash((self._number, callee, payload, *map(bytes, buffers))))
        late = self._sent_messages().take_late(name)
        self._last_call = monotonic()
        if verdict.failure in (Failure.ERROR, Failure.REQUEST_LOST):
            if references:
                self._send_on(frames.pack_message(frames.REFERENCES, references))
            if verdict.failure is Failure.ERROR:
                self._refuse(call_id, callee, _explain(name, verdict))
        elif verdict.failure is Failure.LATE:
            self._hold(name, frame, buffers)
        else:
            self._calls.add(call_id)
            if verdict.failure is Failure.REPLY_LOST:
                self._unanswered.add(call_id)
            self._send_on(frame, buffers, verdict.delay)
        for release in late:
            release()

    def _refuse(self, call_id: int, callee: bytes, reason: str) -> None:
        """Answers a call of this worker with a `WorkerLostError`, as if the other worker could not be reached.

        Sends nothing.

        Args:
            call_id: The id of the call.
            callee: The function or reference that it names, as encoded in the frame, for the message.
            reason: Why it failed, for the message.
        """
        # A callee that names a reference begins with a small number.
        function = f"`{callee.decode().replace(chr(0), '.')}`" if callee[:1] > frames.TYPE else "a function or a value"
        error = WorkerLostError(f"worker {self.peer!r} was not asked for {function}: {reason}", self.peer)
        failure = encode_failure(error, self._faults.name, "the faulty agent")
        self._put(frames.pack_reply(frames.FAILURE, call_id, failure))

    def _send_control(self, frame: bytes) -> None:
        """Sends the control messages in a frame of this worker.

        Each message that has a name in torch gets a frame of its own, which the test's rules may hold or drop. The
        acknowledgement and the messages without a name are sent together in one frame. Raises `ConnectionError` if the
        connection is closed or broken.
        """
        acknowledged, messages = unpack_control(frame[HEADER_SIZE:])
        unnamed = [each for each in messages if not name_of_reference_message(each[1])]
        if unnamed or acknowledged:
            self._send_on(_pack_control(acknowledged, unnamed))
        for number, message in messages:
            name = name_of_reference_message(message)
            if name:
                self._send_reliably(name, number, _pack_control(0, [(number, message)]))

    def _send_reliably(self, name: str, number: int, frame: bytes, buffers: Sequence[memoryview] = ()) -> None:
        """Sends, holds or drops a message that must arrive in the end: a control message or a call by `remote`.

        The test's rules decide. If the message fails, the link is broken, at once or soon. This worker then sends the
        message again on its next link.

        Args:
            name: The message name, such as `RREF_FORK_REQUEST`; empty if no rule applies to it.
            number: Its number, by which the other worker acknowledges it.
            frame: The frame.
            buffers: Its buffers; may be empty.

        Raises:
            ConnectionError: It is sent, and the connection is closed or broken.
        """
        sent = self._sent_messages()
        sent.unacknowledged.discard(number)
        late = sent.take_late(number)
        verdict = self._faults.rules.judge(name, (self._number, number))
        if verdict.failure in (None, Failure.REPLY_LOST):
            self._send_on(frame, buffers, verdict.delay)
        if verdict.failure is Failure.REPLY_LOST:
            sent.unacknowledged.add(number)
        elif verdict.failure is Failure.LATE:
            self._hold(number, frame, buffers)
        if verdict.failure is not None:
            reason = _explain(name, verdict)
            if name in (REMOTE_CALL, SCRIPT_REMOTE_CALL):
                self._break(reason)  # at once: the next call of the caller is often for the value, and would wait
            elif not self._is_to_break:
                self._is_to_break = True
                self._break_when_quiet(reason, monotonic() + MAX_BUSY_S)
        for release in late:
            release()

    def _hold(self, key: int | str, frame: bytes, buffers: Sequence[memoryview]) -> None:
        """Makes a frame late: sends it soon after the next message with the same key, or after `MAX_LATE_S` seconds.

        Args:
            key: For a control message or a call by `remote`, its number. For any other call, its message name.
            frame: The frame.
            buffers: Its buffers, which are copied; may be empty.
        """
        self._outbound.held += 1
        send = partial(self._inner.send, frame, _copies(buffers), _NO_WAIT)
        late = [partial(self._release, self._outbound, send)]

        def release() -> None:
            if late:
                late.pop()()

        self._sent_messages().add_late(key, lambda: self._relay.call_later(_BEHIND_S, release))
        self._relay.call_later(MAX_LATE_S, release)

    # What comes from the other worker

    def _receive(self, frame: bytes, buffers: Sequence[memoryview]) -> None:
        """Puts a received frame into the inbox as the test's rules change it, or drops it if they say so.

        Raises nothing. A frame that cannot be read is put there unchanged, for the agent to refuse.
        """
        received: Frame | None = frame, buffers
        try:
            received = self._judge_received(frame, buffers)
        except (ProtocolError, struct.error):
            pass  # for the agent to refuse
        if received is not None:
            self._put(*received)

    def _judge_received(self, frame: bytes, buffers: Sequence[memoryview]) -> Frame | None:
        """Returns what goes into the inbox in place of a received frame; None if the test's rules drop it.

        A dropped reply with references is replaced by one that has only these. If the rules drop the acknowledgement of
        a message, only earlier messages are acknowledged. The value is taken out of the reply to a call by `remote`, so
        that `to_here` has to send a message. Any other frame is returned unchanged. Raises `ProtocolError` or
        `struct.error` if the frame cannot be read.
        """
        kind, flags, _, _, call_id = frames.unpack_header(frame)
        if kind in (frames.RESULT, frames.FAILURE):
            self._last_call = monotonic()
            self._calls.discard(call_id)
            references, annotations, _ = _sections(frame, HEADER_SIZE, flags)
            if call_id in self._unanswered:
                self._unanswered.remove(call_id)
                if not references:
                    return None
                # No call has the id 0, so the references are counted and given back.
                return frames.pack_full_reply(kind, 0, b"", references, b""), ()
            if call_id in self._remote_calls:
                self._remote_calls.remove(call_id)
                if kind == frames.RESULT and not flags & frames.IS_KEPT:
                    # The value is taken out, so that `to_here` has to send a message, which can fail as in torch.
                    return frames.pack_full_reply(kind, call_id, b"", references, annotations, is_kept=True), ()
        elif kind == frames.CONTROL and (unacknowledged := self._sent_messages().unacknowledged):
            acknowledged, messages = unpack_control(frame[HEADER_SIZE:])
            return _pack_control(min(acknowledged, min(unacknowledged) - 1), messages), buffers
        return frame, buffers

    # The end

    def _break_when_quiet(self, reason: str, deadline: float) -> None:
        """Breaks the link when no call has run on it for `QUIET_S` seconds, or at `deadline`.

        While the test freezes the network, the link is not broken. This method returns at once; the relay thread breaks
        the link. Does nothing if the link has ended.

        Args:
            reason: Why, for the errors of `send` and `receive`.
            deadline: When to break it even if calls run, as a time of the monotonic clock.
        """

        def try_to_break() -> None:
            now = monotonic()
            is_busy = (self._calls or now - self._last_call < QUIET_S) and now < deadline
            if is_busy or self._conditions().is_frozen:
                self._break_when_quiet(reason, deadline)
            else:
                self._break(reason)
                self._advance()

        if not self.has_hung_up():
            self._relay.call_later(QUIET_S, try_to_break)

    def _break(self, reason: str) -> None:
        """Ends the link for this worker: `send` and `receive` raise `ConnectionAbortedError` with `reason`.

        Frames that are held for the other worker are still sent. The caller must call `_advance` next, or `disconnect`.
        Does nothing if the link has ended.
        """
        if not self.has_hung_up():
            self._error = ConnectionAbortedError(reason)
            self._detach()

    def _detach(self) -> None:
        """Ends the link for this worker, wakes a thread that waits, and drops frames that are not in the inbox yet."""
        self._is_detached = True
        self._inbound = _Flow()
        self._relay_end.close()  # hangs up

    def finish(self) -> None:
        """Called repeatedly while the agent ends: sends the frames that are queued.

        Frames that are still delayed are dropped. Closes the connection if this end is closed and nothing is left to
        send, or if the test freezes the network.
        """
        self._inbound.held = self._outbound.held = 0
        if self._conditions().is_frozen:
            self.disconnect()
        else:
            self._advance()

    def disconnect(self) -> None:
        """Closes the connection to the other worker at once.

        Frames that were not sent are lost, and the link has ended. May be called again.
        """
        if not self._is_disconnected:
            self._is_disconnected = True
            self._watch()
            self._inner.close()
            self._relay_end.close()
            self._relay.links.discard(self)


def _sections(frame: bytes, at: int, flags: int) -> tuple[bytes, bytes, bytes]:
    """Returns the references, the annotations and the payload of a frame, as bytes; each may be empty.

    Args:
        frame: The frame.
        at: The offset at which the references begin, after the header and the callee.
        flags: The flags of its header, which say which sections it has.

    Raises:
        ProtocolError: The frame is too short for its sections.
    """
    references_end = unpack_references(frame, at)[2] if flags & frames.HAS_REFERENCES else at
    end = unpack_annotations(frame, references_end)[1] if flags & frames.HAS_ANNOTATIONS else references_end
    return bytes(frame[at:references_end]), bytes(frame[references_end:end]), frame[end:]


def _pack_control(acknowledged: int, messages: Sequence[tuple[int, Message]]) -> bytes:
    """Returns the frame with an acknowledgement and control messages about references.

    Args:
        acknowledged: The number up to which messages of the other worker have arrived; 0 for none.
        messages: Messages with their numbers; may be empty.
    """
    return frames.pack_message(frames.CONTROL, pack_control(acknowledged, messages))


def _explain(name: str, verdict: Verdict) -> str:
    """Returns why a message with the name `name` failed, for error messages.

    The text has the name, how it failed, and which of its failing sends this was.
    """
    return f"the faulty agent let this {name} fail ({verdict.failure}; {verdict.attempt} of {verdict.attempts} sends)"


def _copies(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Returns a copy of each buffer, which cannot be written to; an empty list for none."""
    return [memoryview(bytes(buffer)) for buffer in buffers]


class FaultyListener:
    """A `Listener` that wraps each accepted link in a `FaultyLink`, on which frames fail as a test says.

    Args:
        inner: The listener that accepts the links. `fileno`, `close` and `abandon` of this object call the methods of
            `inner`.
        faults: What goes wrong on the links.

    Attributes:
        address: The address of the inner listener.
    """

    def __init__(self, inner: Listener, faults: Faults) -> None:
        self.address = inner.address
        self.fileno, self.close, self.abandon = inner.fileno, inner.close, inner.abandon
        self._accept = inner.accept
        self._faults = faults

    def accept(self) -> FaultyLink | None:
        """Returns the next connection that waits, as a link in its handshake; None if there is none. Does not wait.

        Raises `OSError` if the listener is closed, there are no descriptors left, or the faulty agent has ended.
        """
        link = self._accept()
        return None if link is None else FaultyLink(link, self._faults, is_connecting=False)


class FaultyTransport:
    """A `Transport` that wraps each link of another transport in a `FaultyLink`, on which frames fail as a test says.

    Args:
        inner: The transport that makes the connections.
        faults: What goes wrong on the links.

    Attributes:
        scheme: The scheme of the inner transport.
        connect_encrypted: Takes the arguments of `connect`, and returns a link that is encrypted even on loopback; None
            if the inner transport has no such method.
    """

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self.scheme = inner.scheme
        self._inner = inner
        self._faults = faults
        encrypted: Callable[..., Link] | None = getattr(inner, "connect_encrypted", None)
        self.connect_encrypted = None if encrypted is None else partial(self._connect, encrypted)
        """Takes the arguments of `connect`, and returns a link that is encrypted even on loopback. None if the inner
        transport has no such method.
        """

    def listen(self, host: str | None, handshake_limit: int) -> FaultyListener:
        """Returns a listener at a free address.

        Args:
            host: The address of the network interface to listen on; None lets the inner transport choose.
            handshake_limit: The most bytes of a frame that an accepted link receives before it is established.

        Raises:
            OSError: The inner transport cannot listen there.
        """
        return FaultyListener(self._inner.listen(host, handshake_limit), self._faults)

    def connect(self, address: str, timeout: float, handshake_limit: int) -> FaultyLink:
        """Connects to the listener at `address`, and returns the link, which is in its handshake.

        Args:
            address: The address of the listener.
            timeout: How many seconds connecting may take; passed on to the inner transport.
            handshake_limit: The most bytes of a frame that the link receives before it is established.

        Raises:
            OSError: Nobody listens there, the address is not valid, the timeout expired (`TimeoutError`), or the agent
                has ended.
            ProtocolError: The program that listens there is not a worker, or only one end uses encryption.
        """
        return self._connect(self._inner.connect, address, timeout, handshake_limit)

    def _connect(self, connect: Callable[..., Link], address: str, timeout: float, handshake_limit: int) -> FaultyLink:
        """Connects with a method of the inner transport, and returns its link in a `FaultyLink`.

        Args:
            connect: The method. It takes the other three arguments.
            address: The address of the listener.
            timeout: How many seconds connecting may take.
            handshake_limit: The most bytes of a frame that the link receives before it is established.

        Raises:
            OSError: Nobody listens there, the timeout expired (`TimeoutError`), or the agent has ended.
            ProtocolError: The program that listens there is not a worker, or only one end uses encryption.
        """
        return FaultyLink(connect(address, timeout, handshake_limit), self._faults, is_connecting=True)
