"""One connection of a faulty agent: what it sends, and what comes, passes here and may come to harm.

The agent has one end of a socket pair instead of the connection; the link has the other end and the connection itself.
It takes whole messages from one side, looks up what is to happen to them, and passes them on.

A network loses no message of a connection that goes on, and neither does it lose one here if the sender counts on that.
So what must arrive (all about references) is lost along with its connection, and the agent's delivery sends it again.
Calls under way would suffer from that, so the connection ends when there are none, if that is soon. Calls and replies
themselves are lost alone; the references that they carry arrive, as they do after a connection was lost.

Rules
- Order is kept but for what is delayed, late or sent again. The protocols do not need it.
- Only under the relay's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Final

from farcall.agent.poller import READABLE, WRITABLE
from farcall.errors import ProtocolError, WorkerLost
from farcall.protocol.control import pack_control, pack_section, unpack_control, unpack_remote, unpack_section
from farcall.protocol.handshake import Hello
from farcall.protocol.ids import Worker
from farcall.protocol.wire import (
    CALL,
    CALL_CARRYING,
    CARRIED,
    CONTROL,
    FAILURE,
    REMOTE,
    RESULT,
    RESULT_CARRYING,
    Message,
    encode,
)
from farcall.serialization import encode_failure
from farcall.testing.faulty_options import REMOTE_CALL, SCRIPT_REMOTE_CALL, Failure
from farcall.testing.faulty_rules import Verdict, callee_of, name_of_call, name_of_reference_message
from farcall.testing.faulty_stream import Item, Stream, encode_message
from farcall.transports.base import Buffer, Channel

if TYPE_CHECKING:
    from farcall.testing.faulty_control import Conditions, Correspondence, Faults

_CHUNK: Final = 1 << 16
_MOST_QUEUED: Final = 1 << 18
"""Bytes that may wait for one side before the other is not read any more."""
_QUIET: Final = 0.05
"""Seconds without a call after which a connection may break without harm to one that begins just then."""
_LONGEST_WAIT: Final = 5.0
"""Seconds after which it breaks all the same."""
_BEHIND: Final = 0.02
"""Seconds by which a late message follows the one that was sent again: on another connection nothing else tells."""
_LATEST: Final = 5.0
"""Seconds after which a late message arrives though nothing was sent again."""


class _Flow:
    """One direction."""

    def __init__(self, source: Channel, target: Channel) -> None:
        self.source = source
        self.target = target
        self.source_descriptor = source.fileno()
        self.target_descriptor = target.fileno()
        self.stream = Stream()
        self.queue: deque[Buffer] = deque()
        self.queued = 0
        self.held = 0  # messages that are to come: delayed or late
        self.ended = False  # nothing comes any more
        self.useless = False  # nobody takes anything any more


class Link:
    """One connection. `inner` is the real one, `ours` leads to the agent."""

    def __init__(self, faults: Faults, inner: Channel, ours: Channel) -> None:
        self.peer: str | None = None
        """The name of the worker at the other end, once that is known; and its number."""
        self.number: Worker = -1
        self.reason: str | None = None
        """Why it was broken on purpose, for the agent's errors."""
        self._faults = faults
        self._relay = faults.relay
        self._inner = inner
        self._ours = ours
        self._outbound = _Flow(ours, inner)
        self._inbound = _Flow(inner, ours)
        self._flows = (self._outbound, self._inbound)
        self._closed = False
        self._breaks = False
        self._pending: set[int] = set()  # calls under way
        self._unanswered: set[int] = set()  # calls whose replies are to be lost
        self._last_call = 0.0
        # Those that are open still: the number of a closed one may be another's by now.
        self._descriptors = {self._outbound.source_descriptor, self._inbound.source_descriptor}
        poller = self._relay.poller
        poller.add(self._outbound.source_descriptor, self._handler(self._outbound, self._inbound), READABLE)
        poller.add(self._inbound.source_descriptor, self._handler(self._inbound, self._outbound), READABLE)

    # Moving bytes

    def _handler(self, source: _Flow, target: _Flow) -> Callable[[int], None]:
        def handle(events: int) -> None:
            if events & WRITABLE:
                self._write(target)
            if events & ~WRITABLE:
                self._read(source)
            self._finish()

        return handle

    def _read(self, flow: _Flow) -> None:
        if flow.ended or self._closed:
            return
        try:
            data = flow.source.receive(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            flow.ended = True
            return
        try:
            for item in flow.stream.feed(data):
                if flow.ended or self._closed:
                    return  # broken in the midst of it: the rest is lost
                self._take(flow, item)
        except ProtocolError as error:
            self._break(f"the faulty agent cannot follow the connection: {error}")

    def _take(self, flow: _Flow, item: Item) -> None:
        if isinstance(item, bytes):
            self._deliver(flow, [item])
        elif not isinstance(item, tuple):
            if isinstance(item, Hello):
                self._identify(item, connecting=flow is self._outbound)
        elif flow is self._outbound:
            self._send(item)
        else:
            self._receive(item)

    def _deliver(self, flow: _Flow, pieces: Sequence[Buffer], delay: float = 0.0) -> None:
        delay += self._conditions.slow
        if delay and not self._relay.is_closing:
            flow.held += 1
            self._relay.later(delay, lambda: self._release(flow, pieces))
        else:
            self._push(flow, pieces)

    def _release(self, flow: _Flow, pieces: Sequence[Buffer]) -> None:
        """Delivers what was held."""
        if not self._closed:
            flow.held = max(0, flow.held - 1)  # 0 if the link is winding up
            self._push(flow, pieces)
            self._finish()

    def _push(self, flow: _Flow, pieces: Sequence[Buffer]) -> None:
        flow.queue.extend(piece for piece in pieces if len(piece))
        flow.queued += sum(len(piece) for piece in pieces)
        self._write(flow)

    def _write(self, flow: _Flow) -> None:
        if self._closed or self._conditions.frozen:
            return
        queue = flow.queue
        while queue and not flow.useless:
            piece = queue.popleft()
            try:
                sent = flow.target.send(piece)
            except BlockingIOError:
                sent = 0
            except OSError:
                flow.useless = True
                break
            flow.queued -= sent
            if sent < len(piece):
                queue.appendleft(memoryview(piece)[sent:])
                break
        if flow.useless:
            queue.clear()
            flow.queued = 0

    def _finish(self) -> None:
        """Closes it if nothing can pass any more; else has the poller watch for what can."""
        if self._closed:
            return
        if any(flow.ended and not flow.held and not flow.queue for flow in self._flows):
            self.close()
            return
        frozen = self._conditions.frozen
        for flow in self._flows:
            self._want(flow.source_descriptor, READABLE, not (flow.ended or flow.queued >= _MOST_QUEUED or frozen))
            self._want(flow.target_descriptor, WRITABLE, bool(flow.queue) and not frozen)

    def _want(self, descriptor: int, events: int, on: bool) -> None:
        if descriptor in self._descriptors:
            self._relay.poller.want(descriptor, events, on)

    def _unwatch(self, descriptor: int) -> None:
        if descriptor in self._descriptors:
            self._descriptors.remove(descriptor)
            self._relay.poller.remove(descriptor)

    # What the agent sends

    def _send(self, message: Message) -> None:
        kind = message[0]
        if kind in (CALL, CALL_CARRYING):
            self._send_call(message)
        elif kind == REMOTE:
            number, *_, callee = unpack_remote(message[2])
            name = self._faults.rules.name_for(REMOTE_CALL, callee)
            self._send_reliably(name, number, encode_message(message))
        elif kind == CONTROL:
            acknowledged, entries = unpack_control(message[3])
            unnamed = [entry for entry in entries if not name_of_reference_message(entry[1])]
            if unnamed or acknowledged:
                self._deliver(self._outbound, [_control(acknowledged, unnamed)])
            for number, entry in entries:
                name = name_of_reference_message(entry)
                if name:
                    self._send_reliably(name, number, [_control(0, [(number, entry)])])
        else:
            self._deliver(self._outbound, encode_message(message))

    def _send_call(self, message: Message) -> None:
        kind, call_id, head, body, buffers = message
        callee = callee_of(kind, head)
        name = self._faults.rules.name_for(name_of_call(kind, head), callee)
        late = self._correspondence.sent_again(name)
        content = (self.number, callee, bytes(body), tuple(bytes(buffer) for buffer in buffers))
        verdict = self._faults.rules.judge(name, hash(content))
        self._last_call = monotonic()
        if verdict.failure in (Failure.ERROR, Failure.REQUEST_LOST):
            if kind == CALL_CARRYING:
                number, carried, _ = unpack_section(head)
                self._deliver(self._outbound, [encode(CARRIED, 0, pack_section(number, carried), b"")])
            if verdict.failure is Failure.ERROR:
                self._refuse(call_id, name, callee, verdict)
        elif verdict.failure is Failure.LATE:
            self._hold(name, encode_message(message))
        else:
            if verdict.failure is Failure.REPLY_LOST:
                self._unanswered.add(call_id)
            self._pending.add(call_id)
            self._deliver(self._outbound, encode_message(message), verdict.delay)
        for release in late:
            release()

    def _refuse(self, call_id: int, name: str, callee: bytes, verdict: Verdict) -> None:
        """Answers a call in the other worker's place."""
        function = f"`{callee.decode().replace(chr(0), '.')}`" if callee[:1] > b"\4" else "a function or a value"
        error = WorkerLost(f"worker {self.peer!r} was not asked for {function}: {_explained(name, verdict)}", self.peer)
        body = encode_failure(error, self._faults.name, "the faulty agent")
        self._deliver(self._inbound, [encode(FAILURE, call_id, b"", body)])

    def _send_reliably(self, name: str, number: int, pieces: Sequence[Buffer]) -> None:
        """Something that the agent sends again if its connection is lost before it was acknowledged."""
        correspondence = self._correspondence
        late = correspondence.sent_again(number)
        verdict = self._faults.rules.judge(name, (self.number, number))
        if verdict.failure in (None, Failure.REPLY_LOST):
            self._deliver(self._outbound, pieces, verdict.delay)
        if verdict.failure is Failure.REPLY_LOST:
            correspondence.hidden.add(number)
        elif verdict.failure is Failure.LATE:
            self._hold(number, pieces)
        if verdict.failure is not None:
            # Who has lost a remote call often waits for its value next, in vain: there is nothing to be spared.
            self._break_when_quiet(_explained(name, verdict), at_once=name in (REMOTE_CALL, SCRIPT_REMOTE_CALL))
        for release in late:
            release()

    def _hold(self, until_sent: int | str, pieces: Sequence[Buffer]) -> None:
        """Has it delivered when something of that number or name is sent to the same worker again."""
        self._outbound.held += 1
        waiting = [pieces]

        def release() -> None:
            if waiting:
                self._release(self._outbound, waiting.pop())

        self._correspondence.hold(until_sent, lambda: self._relay.later(_BEHIND, release))
        self._relay.later(_LATEST, release)

    # What comes

    def _receive(self, message: Message) -> None:
        kind, call_id, head, body, _ = message
        if kind in (RESULT, FAILURE, RESULT_CARRYING):
            self._last_call = monotonic()
            self._pending.discard(call_id)
            if call_id in self._unanswered:
                if kind == RESULT_CARRYING:  # of no call: its references are taken and given back
                    self._deliver(self._inbound, [encode(kind, 0, head, b"")])
                return
        elif kind == CONTROL and self._correspondence.hidden:
            acknowledged, entries = unpack_control(body)
            known = min(acknowledged, min(self._correspondence.hidden) - 1)
            self._deliver(self._inbound, [_control(known, entries)])
            return
        self._deliver(self._inbound, encode_message(message))

    # The other end

    @property
    def _conditions(self) -> Conditions:
        return self._faults.conditions(self.peer)

    @property
    def _correspondence(self) -> Correspondence:
        return self._faults.correspondence(self.number)

    def _identify(self, hello: Hello, connecting: bool) -> None:
        self.peer = hello.wanted if connecting else hello.name
        self.number = hello.wanted_number if connecting else hello.number
        self.conditions_changed()

    def conditions_changed(self) -> None:
        """It is another weather on the way to that worker: acts by it."""
        if self._conditions.cut:
            self.reason = f"the faulty agent has cut worker {self.peer!r} off; it can be reached again after heal()"
            self.close()
            return
        for flow in self._flows:
            self._write(flow)
        self._finish()

    # The end

    def _break_when_quiet(self, reason: str, at_once: bool) -> None:
        if at_once:
            self._break(reason)
        elif not self._breaks:
            self._breaks = True
            deadline = monotonic() + _LONGEST_WAIT
            # Not now: a call often comes right behind what the protocol has to say.
            self._relay.later(_QUIET, lambda: self._try_to_break(reason, deadline))

    def _try_to_break(self, reason: str, deadline: float) -> None:
        now = monotonic()
        if self._closed or self._outbound.ended:
            return
        self._read(self._outbound)  # a call may be there that nobody has seen yet
        busy = (self._pending or now - self._last_call < _QUIET) and now < deadline
        if busy or self._conditions.frozen:
            self._relay.later(_QUIET, lambda: self._try_to_break(reason, deadline))
        else:
            self._break(reason)
            self._finish()

    def _break(self, reason: str) -> None:
        """Ends it for the agent; what is held for the other side is delivered yet. `_finish` follows."""
        if self.reason is None:
            self.reason = reason
        self._unwatch(self._outbound.source_descriptor)
        self._ours.close()
        self._outbound.ended = True
        self._inbound.useless = True
        self._inbound.queue.clear()
        self._inbound.queued = self._inbound.held = 0

    def wind_up(self) -> None:
        """The agent has ended: nothing is held any more."""
        if self._conditions.frozen:
            self.close()
            return
        for flow in self._flows:
            flow.held = 0
        self._finish()

    def close(self) -> None:
        """Ends it at once, both ways. May be called twice."""
        if not self._closed:
            self._closed = True
            for flow in self._flows:
                self._unwatch(flow.source_descriptor)
            self._ours.close()
            self._inner.close()
            self._relay.links.discard(self)

    def abandon(self) -> None:
        """In a forked child: gives the descriptors back."""
        self._ours.abandon()
        self._inner.abandon()


def _control(acknowledged: int, entries: Sequence[tuple[int, object]]) -> bytes:
    return encode(CONTROL, 0, b"", pack_control(acknowledged, entries))  # type: ignore[arg-type]


def _explained(name: str, verdict: Verdict) -> str:
    return f"the faulty agent let this {name} fail ({verdict.failure}; {verdict.attempt} of {verdict.attempts} sends)"
