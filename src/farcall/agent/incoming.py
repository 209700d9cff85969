"""A connection from a peer: its calls come in, our replies go out.

Rules
- First the greeting, in which the other side proves that it knows the group's secret (`security.proof`), then calls.
  Before that nothing it sends is more than a greeting, and there is no more of it than a greeting may have. Nothing is
  unpickled here at all: that is done where the function runs.
- Of a stranger one line is logged, however often it comes.
- What cannot be a message closes the connection with a line in the log, and harms nothing else.
- It never blocks: it is read by the leader of the serving pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from farcall.agent.calling import Asks
from farcall.agent.execution import Workplace
from farcall.agent.hearing import create_answered
from farcall.agent.jobs import Reply
from farcall.agent.lanes import Lane
from farcall.agent.poller import READABLE, WRITABLE, Poller
from farcall.agent.reading import CHUNK, receive_large
from farcall.agent.returning import Returning
from farcall.agent.sending import InParts, Sender, Traffic
from farcall.agent.shortcuts import abandon, accept, receive_beside
from farcall.agent.tending import ENOUGH
from farcall.errors import ProtocolError, SerializationError
from farcall.protocol.control import REMOTE_SIZE, unpack_remote, unpack_section
from farcall.protocol.handshake import Hello, Purpose, Refused, Welcome, pack, take
from farcall.protocol.ids import Worker
from farcall.protocol.membership_messages import Member
from farcall.protocol.wire import (
    CALL,
    CALL_CARRYING,
    CARRIED,
    CONTROL,
    KNOCK,
    NEWS,
    REMOTE,
    RING,
    SHARES,
    Bytes,
    Decoder,
    encode,
)
from farcall.security import Credentials, Doorkeeper, kind_of, refusal_of
from farcall.serialization import callable_name
from farcall.sleeping import FOREVER
from farcall.transports.base import Buffer, Channel
from farcall.transports.rings import RingReader
from farcall.transports.shared_memory import Pool

logger = logging.getLogger("farcall")


class Reception(Protocol):
    """The worker that others connect to."""

    me: Member

    def refusal(self, hello: Hello) -> Refused | None:
        """Why who says that is not let in; None if it is."""

    def greeted(self, incoming: Incoming, hello: Hello) -> None:
        """It was let in."""

    def closed(self, incoming: Incoming) -> None:
        """The connection has ended; of one who was let in, and of one who was not."""

    def told(self, sender: Worker, news: Bytes) -> None:
        """News about the group came. Raises `ProtocolError`."""


class Incoming:
    """One connection from one peer, or from somebody who says so."""

    def __init__(
        self,
        reception: Reception,
        channel: Channel,
        poller: Poller,
        place: Workplace,
        on_closed: Callable[[Incoming], None],
        credentials: Credentials,
        address: str,
        pool: Pool,
    ) -> None:
        """`address`: where it came in."""
        self._reception = reception
        self._credentials = credentials
        self._address = address
        self._doorkeeper: Doorkeeper | None = None
        self._channel = channel
        self._descriptor = channel.fileno()
        self._poller = poller
        self._place = place
        self._on_closed = on_closed
        self.lane = Lane(pool, channel)
        self.lane.on_large = place.serving.after_large
        self._decoder = Decoder()
        self._decoder.shared = self.lane.take
        self._greeting = bytearray()
        self._peer: Hello | None = None
        self._caller: Worker = -1  # its number, once it has greeted
        self._closed = False
        self._asks: Asks = []
        self._spoke = False  # enough of references, since something was last said to it, to say something again
        self._carried = 0  # how many calls have brought references since then
        self._uncounted = False  # a remote call is to be counted once its answer is sent
        self.calls_served = 0
        """How many calls have come on it."""
        self._sender = Sender(channel, lambda on: poller.want(self._descriptor, WRITABLE, on))
        self.traffic = Traffic(self._sender, self._decoder)
        self._ring: RingReader | None = None
        self._greeted = 0  # bytes that the greeting took to send
        self.queue_answer = self._sender.queue
        poller.add(self._descriptor, self._handle, READABLE)

    def _handle(self, events: int) -> None:
        """The poller says that something can be read or sent."""
        if events & WRITABLE:
            self.flush_answers()
            if events == WRITABLE:
                return
        try:
            decoder = self._decoder
            ring = self._ring
            if ring is not None:
                messages = receive_beside(ring, self._channel, decoder)
                if ring not in self._place.serving.hot.rings:
                    self._place.serving.hot.warm(ring)
            elif decoder.space is not None:
                messages = receive_large(self._channel, decoder)
            else:
                data = self._channel.receive(CHUNK)
                if self._peer is None:
                    if not data:
                        self.dismiss("left", "left before it had proved that it knows the secret")
                        return
                    data = self._greet(data)
                    if not data:
                        return
                messages = decoder.feed(data) if data else None
            if messages is None:
                self.close()
                return
            self.calls_served += len(messages)
            place = self._place
            ready = place.serving.ready
            call_job = place.call_job
            for kind, call_id, head, body, buffers in messages:
                if kind == CALL:
                    ready.append(call_job(place, self, call_id, head, body, buffers))
                elif kind == REMOTE:
                    self._take_remote(call_id, head, body, buffers)
                elif kind == CALL_CARRYING:
                    self._take_carrying(call_id, head, body, buffers)
                elif kind == RING:
                    self.calls_served -= 1
                    self._ring = accept(buffers, self._sender, self._greeted, (self._descriptor, READABLE))
                else:
                    self.calls_served -= 1
                    self._take(kind, head, body)
        except BlockingIOError:
            pass
        except (ProtocolError, MemoryError) as error:
            if self._peer is None:
                self.dismiss(kind_of(error), str(error))
                return
            logger.warning("worker %r: connection from %s closed: %s", self._reception.me.name, self._who(), error)
            self.close()
        except OSError as error:
            if self._peer is None:
                self.dismiss("left", f"the connection broke before it had proved that it knows the secret: {error}")
            self.close()
        finally:
            if self._asks:
                self._place.book.calling.send_asks(self._asks)

    def dismiss(self, kind: str, why: str) -> None:
        """Closes the connection of one who is not let in, with a line in the log for the first of this kind."""
        # Who goes again may be a worker of ours whose time was over; no need to wake anybody.
        level = logging.INFO if kind == "left" else logging.WARNING
        if not self._credentials.notebook.is_new(self._channel.address, kind):
            level = logging.DEBUG
        name = self._reception.me.name
        logger.log(level, "worker %r: connection from %s closed: %s", name, self._channel.address, why)
        self.close()

    # What has to do with references: they are counted here, before anything of the message is used.

    def _take_remote(self, call_id: int, head: bytes, body: Bytes, buffers: Sequence[Bytes]) -> None:
        self.calls_served -= 1
        place = self._place
        if call_id and (value := create_answered(place.book, self._caller, head)) is not None:
            self._uncounted = True
            job = place.remote_job(place, value, head[REMOTE_SIZE:], body, buffers, (), None, self, call_id)
            place.serving.ready.append(job)
            return
        number, carried, reference, fork, callee = unpack_remote(head)
        taken = place.book.create_requested(self._caller, number, reference, fork, carried, call_id != 0)
        if taken is not None:
            value, handles = taken
            job = place.remote_job(place, value, callee, body, buffers, handles, None, self, call_id)
            place.serving.ready.append(job)

    def _take_carrying(self, call_id: int, head: bytes, body: Bytes, buffers: Sequence[Bytes]) -> None:
        place = self._place
        self._carried += 1
        if self._carried >= ENOUGH:
            self._spoke = True
        number, carried, callee = unpack_section(head)
        handles = place.book.take(self._caller, number, carried)
        if handles is not None:
            if callee:
                place.book.calling.ask_ahead(callee, handles, self._asks)
            place.serving.ready.append(place.call_job(place, self, call_id, callee, body, buffers, handles))

    def _take(self, kind: int, head: bytes, body: Bytes) -> None:
        book = self._place.book
        caller = self._caller
        if kind == CONTROL:
            self._spoke = True
            book.control_received(caller, body)
            return
        if kind == NEWS:
            self._reception.told(caller, body)
            return
        if kind == SHARES:
            self.lane.open()
            return
        if kind == KNOCK:
            return
        if kind != CARRIED:
            raise ProtocolError(f"a reply (kind {kind}) came where only calls may")
        number, carried, _ = unpack_section(head)
        book.take(caller, number, carried)

    def _greet(self, data: bytes) -> bytes:
        """Goes on with the greeting; what is behind it, once the other side is let in.

        Raises `ProtocolError` if it is not, and `AuthenticationError` if it does not know the secret.
        """
        door = self._doorkeeper
        if door is None:
            # Not before something came: by then an encrypted channel knows what it is bound to.
            binding = getattr(self._channel, "binding", b"")
            door = self._doorkeeper = self._credentials.doorkeeper(Purpose.CALLS, self._address, binding)
        buffer = self._greeting
        buffer += data
        limit = self._credentials.limits.greeting
        while not door.is_proven:
            try:
                taken = take(buffer, Purpose.CALLS, self._channel.address, limit)
                if taken is None:
                    return b""
                answer = pack(Purpose.CALLS, door.take(*taken))
            except ProtocolError as error:
                # Told in the one form that every version understands, so that the other side can say what is wrong.
                self._sender.send(pack(Purpose.CALLS, refusal_of(error)))
                raise
            self._sender.send(answer)
        hello = door.hello
        assert hello is not None
        refusal = self._reception.refusal(hello)
        if refusal is not None:
            self._sender.send(pack(Purpose.CALLS, refusal))
            raise ProtocolError(refusal.reason)
        us = self._reception.me
        shares = self.lane.accept(hello.lends, hello.token)
        self.lane.agree(hello.limits)
        welcome = Welcome(us.name, us.rank, us.number, self._decoder.limits, shares, *self.lane.offer())
        self._sender.send(pack(Purpose.CALLS, welcome))
        self._greeted = self._sender.sent + self._sender.waiting
        self._doorkeeper, self._greeting = None, bytearray()
        self._peer, self._caller = hello, hello.number
        self._reception.greeted(self, hello)
        return bytes(buffer)

    def caller(self) -> Worker:
        """Who is at the other end, once it has greeted."""
        assert self._peer is not None
        return self._caller

    def has_greeted(self) -> bool:
        """Whether it is known who is at the other end."""
        return self._peer is not None

    def __str__(self) -> str:
        return self._who()

    def _who(self) -> str:
        return f"worker {self._peer.name!r}" if self._peer is not None else self._channel.address

    # Replies

    def check_reply(
        self, function: Callable[..., Any] | str, handles: int, body: bytes, buffers: Sequence[memoryview]
    ) -> None:
        """See `Caller`."""
        excess = self.lane.excess(0, handles, body, buffers)
        if excess is not None:
            raise SerializationError(
                f"the result of `{callable_name(function)}` cannot be sent from worker {self._reception.me.name!r} to "
                f"{self._who()}: it has {excess}. Return less at once, or start that worker with a larger limit"
            )

    def reply_of(
        self, kind: int, call_id: int, head: bytes, body: bytes, buffers: list[memoryview]
    ) -> Sequence[Buffer] | Returning | None:
        """See `Caller`."""
        loan = self.lane.loan_of(buffers)
        if loan is not None:
            return Returning(loan, kind, call_id, head, body, buffers, self._large_reply)
        return self._large_reply(kind, call_id, head, body, buffers)

    def _large_reply(
        self, kind: int, call_id: int, head: bytes, body: bytes, buffers: Sequence[memoryview]
    ) -> Sequence[Buffer] | None:
        pieces = self.lane.pieces(kind, call_id, head, body, buffers)
        if not isinstance(pieces, InParts):
            return pieces
        try:
            self._sender.send_in_parts(pieces, FOREVER, self.is_lost)
        except OSError:
            self.close()
        except BaseException as error:
            self._give_up(error)
        return None

    def answer(self, reply: Reply) -> None:
        """See `Answerable`."""
        try:
            self._sender.send_all((reply,) if isinstance(reply, bytes) else reply)
        except OSError:
            self.close()
        except BaseException as error:
            self._give_up(error)

    def flush_answers(self) -> None:
        """See `Answerable`."""
        try:
            if self._spoke:
                self._say_along()
            self._sender.flush()
            if self._uncounted:
                self._uncounted = False
                self._place.book.count_created()
        except OSError:
            self.close()
        except BaseException as error:
            self._give_up(error)

    def _say_along(self) -> None:
        """What there is to be said about references goes along with the replies: it reads these in any case."""
        self._spoke, self._carried = False, 0
        book = self._place.book
        mail = book.mail_along(self._caller)
        if mail is not None:
            self._sender.queue(encode(CONTROL, 0, b"", mail))
            if self._closed:  # and who has closed it may not have known of this
                book.resend(self._caller)

    def _give_up(self, error: BaseException) -> None:
        """A part of a reply may have been sent: whoever waits for an answer must hear that it will not come."""
        self.close()
        if not isinstance(error, Exception):
            raise error  # Ctrl-C, in a thread of the user's
        logger.warning(
            "worker %r: connection from %s closed, a reply could not be sent: %r",
            self._reception.me.name,
            self._who(),
            error,
        )

    def close(self) -> None:
        """Closes it. Calls that came over it run on; their replies are dropped. May be called twice."""
        if self._closed:
            return  # its descriptor's number may be another connection's by now
        self._closed = True
        self._poller.remove(self._descriptor)
        self._channel.close()
        self.lane.close()
        ring, self._ring, self._sender.ring = self._ring, None, None
        if ring is not None:
            self._place.serving.hot.cool(ring)
        self._on_closed(self)
        self._reception.closed(self)

    def has_unsent(self) -> bool:
        """Whether a reply waits until the caller reads."""
        return not self._closed and (self._sender.waiting > 0 or self.lane.has_unseen())

    def is_lost(self) -> bool:
        """Whether it is closed, and what was sent on it may not have arrived."""
        return self._closed

    def abandon(self) -> None:
        """In a forked child: the connection is the parent's, and stays as it is there."""
        abandon((self._ring,) if self._ring is not None else (), self._sender)
        self._channel.abandon()
        self.lane.abandon()
