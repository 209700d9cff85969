"""A worker of a simulation whose references live in the book of a real agent: what runs is what is simulated.

`ReferenceBook` does the usual transitions of the protocol again, at one stroke (`agent/tending.py`,
`agent/hearing.py`). Here it has everything of an agent but threads and connections: letters and remote calls are packed
as they travel, handles end by their finalizers, and what an agent puts off is put off, until it comes to a *chore*:

    tend w            a thread of w's program works off the usual of what was delivered and dropped
    work w            w's serving pool works off everything, and posts all letters
    count w           w has answered remote calls, and counts them
    mail w t          w's letter to t goes along with a call
    along w t         w's letter to t goes along with a reply, with what is to be worked off before

What a book does not know in this form is done the nearest way. A `draft` is Ctrl-C in the midst of a `pass_on`, and of
a `call_remote` with the handle, which undo themselves at once: nothing is left to `abandon`. To `keep` a handle is to
let so many looks of the pool pass that its owner is asked, as those of all that are lent to the worker. What is sent
again are the frames that a post would send: nobody waits for those any more, so the handles in them are dropped. A
letter that brings nothing but an acknowledgement is left out, as `ack` may happen at any time.

Besides what holds for every worker, a book has to keep (`book_invariants.py`) POSTED, VALUES and HANDLES.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, cast

from farcall.agent.book import ReferenceBook
from farcall.agent.calls import ToldCall
from farcall.agent.handle import Handle as RealHandle
from farcall.agent.handle import owner_lost, stillborn
from farcall.agent.hearing import create_answered
from farcall.agent.lending import LENT_FOR
from farcall.agent.parcels import CarriedFrame, RemoteFrame
from farcall.agent.tending import tend
from farcall.errors import OwnerLost, WorkerLost
from farcall.protocol.control import pack_control, unpack_control, unpack_remote
from farcall.protocol.delivery import Delivery
from farcall.protocol.ids import ForkId, RRefId, Worker
from farcall.protocol.reference_messages import (
    Carried,
    ConfirmHandle,
    CreateRequest,
    Effect,
    Event,
    Message,
    MessageReceived,
    RefuseHandle,
    ReleaseValue,
)
from farcall.protocol.wire import REMOTE, Decoder, unanswered
from farcall.testing.book_invariants import check_book, check_book_is_empty
from farcall.testing.simulated_workers import (
    CONFIRMED,
    ORPHANED,
    PENDING,
    REFUSED,
    Handle,
    Outgoing,
    Parcel,
    Payload,
    SimulatedWorker,
)

_CALLEE: Final = b"module\0function"


class RemoteCall(CreateRequest):
    """A remote call as it travels: as a request to make its reference, with the head of its frame."""

    call_id: int
    head: bytes
    carried: tuple[Carried, ...]


class BookHandle(Handle):
    """A handle that the program of a worker holds, and whose end it is if it does so no more."""

    __slots__ = ("real",)

    def __init__(self, real: RealHandle) -> None:
        super().__init__(real.reference, real.fork, PENDING)
        self.real = real


class Thing:
    """A value that is more than a number, so that its end could be felt."""


class _Way:
    """A connection that never breaks: what is lost is lost by the network."""

    def is_lost(self) -> bool:
        return False


class _Told:
    """As much of a `ToldCall` as a book sees."""

    call_id, number = 1, 0


class _Interrupted(list[RealHandle]):
    """Handles; at the second look, when forks are made of them, somebody presses Ctrl-C."""

    looks = 0

    def __iter__(self) -> Iterator[RealHandle]:
        yield from super().__iter__()
        self.looks += 1
        if self.looks == 2:
            raise KeyboardInterrupt


_WAY: Final = _Way()


class BookWorker(SimulatedWorker):
    """One worker of a simulation, with a `ReferenceBook`."""

    __slots__ = ("book", "sent", "things")

    def __init__(self, me: Worker, book: Callable[..., ReferenceBook] = ReferenceBook) -> None:
        super().__init__(me)
        self.book = book(me, self._post, _nothing, "worker{}".format)
        self.references = self.book._references
        self.delivery = cast("Delivery[Payload]", self.book.mailboxes.delivery)
        self.sent: dict[Worker, set[int]] = {}
        """The numbers of the messages that went out to each peer."""
        self.things: list[weakref.ref[Thing]] = []

    # What happens to it

    def join(self, peer: Worker) -> None:
        """See `SimulatedWorker`."""
        self.unknown.discard(peer)
        self.book.joined(peer)
        self.sent[peer] = set()

    def lose(self, peer: Worker) -> None:
        """See `SimulatedWorker`."""
        self.lost.add(peer)
        self.book.lost(peer)
        self.sent.pop(peer, None)
        self._look()

    def make(self) -> None:
        """See `SimulatedWorker`."""
        real = self.book.own(self._new_thing(self.references.numbers.get(self.me, 0)))
        self.values.add(real.reference)
        self._hold(BookHandle(real))
        self._look()

    def call(self, owner: Worker, numbers: Sequence[int] = (), told: bool = False) -> int:
        """See `SimulatedWorker`; what an agent calls at itself is simply made."""
        if owner == self.me:
            self.make()
            return 0
        passed = self._real(numbers)
        call = cast(ToldCall, _Told()) if told else None
        try:
            real, message = self.book.call_remote(owner, passed, _CALLEE, b"", [], _WAY, None, call)
        except WorkerLost:
            real = stillborn(self.book, owner, partial(owner_lost, RRefId(owner, self.me, 0), f"worker{owner}"))
            number = 0
        else:
            *letters, frame = Decoder().feed(message)
            for letter in letters:
                self._say(owner, bytes(letter[3]))
            number, payload = _remote_call(frame)
            self._send(owner, number, payload)
        self._hold(BookHandle(real))
        self._look()
        return number

    def can_pass(self, number: int) -> bool:
        """See `SimulatedWorker`; the owner may pass on a handle of its own for whose value an error stands."""
        handle = self.handles.get(number)
        return handle is not None and cast(BookHandle, handle).real.new_error is None

    def send(self, numbers: Sequence[int], to: Worker, brief: bool = False) -> None:
        """See `SimulatedWorker`."""
        with suppress(WorkerLost):
            number, carried = self.book.pass_on(self._real(numbers), to, _WAY)
            self._send(to, number, Parcel(tuple(carried), brief))
        self._look()

    def draft(self, number: int, to: Worker) -> None:
        """Ctrl-C comes while a message is made. What was to be said before it is sent again, as nobody knows better."""
        unsaid = list(self.book.mailboxes.outboxes.get(to, ()))
        with suppress(KeyboardInterrupt, WorkerLost):
            self.book.pass_on(_Interrupted(self._real([number])), to, _WAY)
        with suppress(KeyboardInterrupt, WorkerLost):
            self.book.call_remote(to, _Interrupted(self._real([number])), _CALLEE, b"", [], _WAY)
        for each, message in unsaid:
            if to not in self.book.mailboxes.outboxes:
                self._send(to, each, message)
        self._look()

    def drop(self, number: int) -> None:
        """See `SimulatedWorker`."""
        handle = self.handles.pop(number)
        if handle.fork is not None:
            self.by_fork.pop(handle.fork, None)  # several, if they are stillborn, have the same
        del handle
        self._look()

    def keep(self, number: int) -> None:
        """See `SimulatedWorker`."""
        for _ in range(2 * LENT_FOR):
            self.book.work_off()
        self._look()

    def takes(self, sender: Worker, payload: Payload) -> bool:
        """See `SimulatedWorker`."""
        if isinstance(payload, RemoteCall) and not super().takes(sender, Parcel(payload.carried, False)):
            return False
        return super().takes(sender, payload)

    def hear(self, sender: Worker, messages: Sequence[tuple[int, Payload]], upto: int) -> list[tuple[int, Payload]]:
        """See `SimulatedWorker`: what fits into a letter comes in one."""
        link = self.delivery.links.get(sender)
        known = [message for message in messages if self.takes(sender, message[1])]
        new = [message for message in known if link is not None and message[0] not in link.received]
        letter: list[tuple[int, Message]] = []
        for number, payload in known:
            if not isinstance(payload, Parcel | RemoteCall):
                letter.append((number, payload))
        if letter or upto:
            self.book.control_received(sender, pack_control(upto, letter))
        for number, payload in known:
            if isinstance(payload, RemoteCall):
                self._take_remote(sender, number, payload)
            elif isinstance(payload, Parcel):
                self._take_parcel(sender, number, payload)
        self._look()
        return [message for message in new if link is not None and message[0] in link.received]

    def _take_parcel(self, sender: Worker, number: int, parcel: Parcel) -> None:
        handles = self.book.take(sender, number, parcel.carried)
        if handles is not None and not parcel.brief:
            for real in handles:
                self._hold(BookHandle(real))

    def _take_remote(self, sender: Worker, number: int, call: RemoteCall) -> None:
        value = create_answered(self.book, sender, call.head) if call.call_id else None
        if value is None:
            reference, fork = call
            taken = self.book.create_requested(sender, number, reference, fork, call.carried, call.call_id != 0)
            if taken is None:
                return
            value, handles = taken
            for real in handles:
                self._hold(BookHandle(real))
        self.values.add(call.reference)
        if not value.done():
            value.give(self._new_thing(call.reference.number))

    def acknowledged(self, peer: Worker, upto: int) -> None:
        """See `SimulatedWorker`."""
        self.book.control_received(peer, pack_control(upto, []))
        self._look()

    def answered(self, owner: Worker, number: int) -> None:
        """See `SimulatedWorker`."""
        self.book.delivered.append((owner, number))

    def acknowledgement(self, peer: Worker) -> int:
        """See `SimulatedWorker`."""
        return self.book.mailboxes.acknowledgement(peer)

    def unacknowledged(self, peer: Worker) -> list[tuple[int, Payload]]:
        """See `SimulatedWorker`."""
        again: list[tuple[int, Payload]] = []
        waiting = dict(self.book.mailboxes.outboxes.get(peer, ()))
        for number, parcel in self.book.mailboxes.unacknowledged(peer):
            if number in waiting:
                self._send(peer, number, waiting[number])
            if isinstance(parcel, RemoteFrame):
                (frame,) = Decoder().feed(unanswered(parcel.frame))
                again.append(_remote_call(frame))
            elif isinstance(parcel, CarriedFrame):
                again.append((number, Parcel(tuple(parcel.carried), True)))
            else:
                again.append((number, parcel))
        return again

    def creations_to_confirm(self, peer: Worker) -> list[ForkId]:
        """See `SimulatedWorker`."""
        kept = self.book.mailboxes.delivery.unacknowledged(peer)
        return [parcel.fork for _, parcel in kept if isinstance(parcel, RemoteFrame)]

    # What it puts off

    def chores(self) -> list[tuple[str | int, ...]]:
        """See `SimulatedWorker`."""
        book, me = self.book, self.me
        boxes = book.mailboxes
        queued = bool(book.dropped or book.delivered)
        found: list[tuple[str | int, ...]] = []
        if queued:
            found.append(("tend", me))
        if book._uncounted:
            found.append(("count", me))
        if queued or book.left or book._uncounted or book._released or boxes.outboxes or boxes.owed:
            found.append(("work", me))
        for to in boxes.outboxes:
            found += [("mail", me, to), ("along", me, to)]
        return found

    def do_chore(self, word: str, *more: int) -> bool:
        """See `SimulatedWorker`."""
        if word == "tend":
            tend(self.book)
        elif word == "count":
            self.book.count_created()
        elif word == "work":
            self.book.work_off()
        else:
            letter = {"mail": self.book.mailboxes.mail, "along": self.book.mail_along}[word](*more)
            if letter is not None:
                self._say(more[0], letter)
        self._look()
        return True

    def has_to_say(self, fork: ForkId) -> bool:
        """See `SimulatedWorker`."""
        return any(message.fork == fork for box in self.book.mailboxes.outboxes.values() for _, message in box)

    def _post(self, to: Worker) -> None:
        letter = self.book.mailboxes.outbox(to)
        if letter is not None:
            self._say(to, letter.body)

    def _say(self, to: Worker, body: bytes) -> None:
        upto, messages = unpack_control(body)
        assert upto == self.delivery.acknowledgement(to), "a letter acknowledges what has come"
        for number, message in messages:
            self._send(to, number, message)

    def _send(self, to: Worker, number: int, payload: Payload) -> None:
        self.sent[to].add(number)
        self.outbox.append(Outgoing(to, number, payload))

    # What came of it

    def _look(self) -> None:
        """Brings what is seen from outside up to date, with a notice of what has changed."""
        for handle in self.handles.values():
            assert isinstance(handle, BookHandle)
            standing = self._standing(handle.real)
            if standing is not handle.standing:
                handle.standing = standing
                if standing is REFUSED:
                    self.notices.append(RefuseHandle(handle.reference, handle.fork))
                elif standing is CONFIRMED and handle.fork is not None:
                    self.notices.append(ConfirmHandle(handle.reference, handle.fork))
        gone = self.values - self.book._values.keys()
        if gone:
            self.values -= gone
            self.released |= gone
            self.notices += map(ReleaseValue, gone)
        self.refused = {reference for reference, owned in self.references.owned.items() if owned.refused}

    def _standing(self, real: RealHandle) -> str:
        if real.new_error is not None:
            return ORPHANED if isinstance(real.new_error(), OwnerLost) else REFUSED
        if real.fork is None:
            owned = self.references.owned.get(real.reference)
            return REFUSED if owned is not None and owned.refused else CONFIRMED
        return CONFIRMED if real.confirmed else PENDING

    def _real(self, numbers: Sequence[int]) -> list[RealHandle]:
        return [cast(BookHandle, self.handles[number]).real for number in numbers]

    def _new_thing(self, number: int) -> Thing | int:
        """Every other value is a plain one: the book lets go of those at once."""
        if number % 2:
            return number
        thing = Thing()
        self.things.append(weakref.ref(thing))
        return thing

    # Seen from outside

    def check(self, at_the_end: bool = False) -> None:
        """See `SimulatedWorker`."""
        handles = [handle.real for handle in self.handles.values() if isinstance(handle, BookHandle)]
        check_book(self.book, self.sent, handles)
        if at_the_end:
            check_book_is_empty(self.book, sum(thing() is not None for thing in self.things))

    def handle_illegal(self, event: Event) -> list[Effect]:
        """See `SimulatedWorker`: a message comes in a letter, at its turn. The letter is not counted as taken."""
        book = self.book
        link = self.delivery.links.get(event.sender) if isinstance(event, MessageReceived) else None
        if not isinstance(event, MessageReceived) or link is None or link.received.beyond or book._uncounted:
            return self.references.handle(event)
        before, is_owed = link.received.mark, event.sender in book.mailboxes.owed
        try:
            book.control_received(event.sender, pack_control(0, [(before + 1, event.message)]))
        finally:
            link.received.mark = before
            if not is_owed:
                book.mailboxes.owed.pop(event.sender, None)
        return []

    def copy(self) -> SimulatedWorker:
        """Raises `TypeError`: a book is not copied, and so not explored."""
        raise TypeError("the book of an agent cannot be copied: play its schedule again")


def _remote_call(frame: Sequence[Any]) -> tuple[int, RemoteCall]:
    kind, call_id, head = frame[:3]
    assert kind == REMOTE
    number, carried, reference, fork, _ = unpack_remote(head)
    call = RemoteCall(reference, fork)
    call.call_id, call.head, call.carried = call_id, head, tuple(carried)
    return number, call


def _nothing() -> None:
    pass
