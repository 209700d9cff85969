"""The references of one agent: the protocol's state under a lock, and what follows from it, done outside the lock.

The protocol itself is `protocol.references`; here it meets threads, values and connections.

Rules
- Decide under the lock, act outside it. Messages get their numbers under the same lock as the decision to send them.
- Nothing of a user runs under the lock. Values that are released are let go outside it, by `work_off`: their finalizers
  may take long or make calls, and the thread that reads a message must not be held up.
- Nothing that may fail comes after a number is taken: a number that is never sent would hold up all that follow. Ctrl-C
  may come all the same: under the lock, what was begun is undone; after it, whoever has the number to send gives up the
  connection, and it is sent again.
- A finalizer only appends to a queue (garbage collection may run anywhere, in the midst of any lock, this one too); the
  queue is worked off by the serving pool a moment later. So are the outboxes, unless a call takes them along.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from farcall.agent.handle import Handle, Made, check_usable, cut_off, made_here, refuse_finalizers, released
from farcall.agent.hearing import hear_acknowledged, hear_messages
from farcall.agent.inventory import Inventory, count_references, take_inventory
from farcall.agent.lending import Lending
from farcall.agent.parcels import CarriedFrame, Parcel, RemoteFrame, Way, new_remote_frame
from farcall.agent.tables import Tables
from farcall.agent.tending import Delivered, Dropped, work_off
from farcall.agent.values import Value
from farcall.errors import UsageError, WorkerLost
from farcall.protocol.control import (
    HANDLE_SIZE,
    REMOTE_SIZE,
    pack_frame,
    pack_remote,
    unpack_entries,
    unpack_handle,
    unpack_reference,
)
from farcall.protocol.ids import ForkId, RRefId, Worker, new_tuple
from farcall.protocol.reference_messages import Carried
from farcall.protocol.references import References
from farcall.protocol.wire import CONTROL, REMOTE, encode, encode_start

if TYPE_CHECKING:
    from farcall.agent.calling import Calling
    from farcall.agent.calls import ToldCall

_LOOKS: Final = 4
"""So many looks at most are left out while others do what is to be done."""


class ReferenceBook(Tables):
    """All references of one agent, and the values it owns."""

    calling: Calling
    """By whom the handles in it are used; set by the agent."""

    def __init__(
        self,
        me: Worker,
        post: Callable[[Worker], None],
        work_soon: Callable[[], None],
        name_of: Callable[[Worker], str],
        record_stacks: bool = False,
    ) -> None:
        """`post` sends what is in the outbox for a worker, `work_soon` has `work_off` called in the serving pool."""
        super().__init__(me, work_soon, name_of)
        self._post = post
        self.record_stacks = record_stacks
        self.dropped: deque[Dropped] = deque()
        """What finalizers have left."""
        self.delivered: deque[Delivered] = deque()
        """Remote calls that were answered, and so have arrived: the owner, and the number of the message."""
        self.left: deque[Dropped | Delivered] = deque()
        """What a thread of the program has found among these, and left to the serving pool."""
        self.tended = 0
        """How often such a thread has done what was to be done (`tending.py`)."""
        self._tended_before = self._looks = 0
        self._lending = Lending()
        self._senders: dict[Worker, str] = {}  # where handles come from, in words
        self.ended = False
        """All is forgotten: handles that are left are dropped without a word."""
        self._is_cut_off = False
        self.resend: Callable[[Worker], None] = lambda worker: None
        """Has sent again what was lost with a connection; set by the agent."""

    # Workers

    def joined(self, worker: Worker) -> None:
        """A worker is there. Does nothing once this one is `cut_off`."""
        with self._lock:
            if self._is_cut_off:
                return
            self._references.peer_joined(worker)
            self.mailboxes.delivery.joined(worker)

    def lost(self, worker: Worker) -> None:
        """A worker is gone for good. Does nothing if it was known to be."""
        with self._lock:
            if worker not in self._references.peers:
                return
            self._count_created()
            self.mailboxes.lost(worker)
            self._senders.pop(worker, None)
            self._decide(self._references.peer_lost(worker))
            # Awaited by uses that overtook creations, which never come now.
            awaited = [each for each in self._values if each.creator == worker and each not in self._references.owned]
            self._refused += [(reference, self._values.pop(reference)) for reference in awaited]
        self._act()

    def cut_off(self) -> None:
        """The group has taken this worker for dead: nobody listens to it, or will say anything to it, ever again.

        All others are as good as lost, so that nothing is kept for them, or awaited from them. Handles of what they own
        raise `ExpelledError` from now on: the values are most likely there still, but not for this worker.
        """
        with self._lock:
            self._is_cut_off = True
            for fork, held in list(self._references.held.items()):
                self._handles.fail(fork, partial(cut_off, held.reference, self._name_of(self.me)))
            others = [worker for worker in self._references.peers if worker != self.me]
        for worker in others:
            self.lost(worker)

    # Making, passing, receiving, dropping

    def own(self, value: Any) -> Handle:
        """A reference to something that is here."""
        there = Value()
        there.give(value)
        return self.make(there)

    def make(self, value: Value) -> Handle:
        """A reference to a value of this worker, which may still be to come."""
        refuse_finalizers(self._lock)
        made = made_here(self.record_stacks)
        with self._lock:
            reference = self._references.new_reference(self.me)
            self._references.value_made(reference)
            self._values[reference] = value
            self._origins[reference] = made
        return Handle(self, reference, None, value, made)

    def call_remote(
        self,
        owner: Worker,
        passed: Sequence[Handle],
        callee: bytes,
        body: bytes,
        buffers: Sequence[memoryview],
        via: Way,
        keeps: object = None,
        told: ToldCall | None = None,
    ) -> tuple[Handle, bytes]:
        """A reference that `owner` is asked to make, and what asks, to be sent before the buffers.

        `passed` are the handles among the arguments, `keeps` lives until it has arrived, as `told` the owner tells
        of the value. Who asks says in the handle where it was made, once it is sent: it is not waited for then.
        Raises the error of a handle that leads nowhere, `WorkerLost` if the owner is lost; then nothing was passed.
        """
        if self._lock._is_owned():  # type: ignore[attr-defined]
            refuse_finalizers(self._lock)
        if passed:
            check_usable(passed, self)
        boxes, references = self.mailboxes, self._references
        with self._lock:
            if owner not in references.peers:
                raise self._lost(owner)
            parcel, before = None, (references.numbers.get(owner, 0), references.forks)
            try:
                reference, fork = references.call_remote(owner)
                handle = Handle(self, reference, fork, None)
                self._handles[fork] = weakref.ref(handle)
                message = b""
                if owner in boxes.outboxes or owner in boxes.owed:
                    message = encode(CONTROL, 0, b"", boxes.letter(owner) or b"")
                parcel = new_remote_frame(RemoteFrame)
                parcel.reference, parcel.fork, parcel.via, parcel.keeps = reference, fork, via, keeps
                parcel.frame, parcel.buffers, link = b"", buffers, boxes.delivery.links[owner]
                number = link.last = link.last + 1  # as `Delivery.send`
                link.unacknowledged[number] = parcel
                call_id = 0
                if told is not None:
                    told.number, call_id = number, told.call_id
                if not passed and not buffers:  # as `encode_remote`
                    size, of_body, me = REMOTE_SIZE + len(callee), len(body), self.me
                    sizes, ids = (size, of_body, call_id, number, 0), (owner, me, reference[2], me, fork[1])
                    parcel.frame = pack_frame(REMOTE, 0, 0, *sizes, *ids) + callee + body
                else:
                    head = pack_remote(number, self._fork_all(passed, owner), reference, fork) + callee
                    parcel.frame = encode_start(REMOTE, call_id, head, body, buffers)
            except BaseException:
                self._take_back(owner, before, passed, parcel)
                raise
        if via.is_lost():
            self.resend(owner)
        return handle, message + parcel.frame if message else parcel.frame

    def pass_on(self, handles: Sequence[Handle], to: Worker, via: Way) -> tuple[int, list[Carried]]:
        """Makes a fork of each handle for `to`: the number of the message that will carry them, and what it carries.

        Raises the error of a handle that leads nowhere, `WorkerLost` if the receiver is lost; then none was passed.
        """
        if self._lock._is_owned():  # type: ignore[attr-defined]
            refuse_finalizers(self._lock)
        check_usable(handles, self)
        with self._lock:
            if to not in self._references.peers:
                raise self._lost(to)
            before, parcel = self._references.ids_given(to), None
            try:
                carried = self._fork_all(handles, to)
                parcel = CarriedFrame(carried, via)
                number = self.mailboxes.delivery.send(to, parcel)
            except BaseException:
                self._take_back(to, before, handles, parcel)
                raise
        if via.is_lost():
            self.resend(to)
        return number, carried

    def _lost(self, worker: Worker) -> WorkerLost:
        name = self._name_of(worker)
        return WorkerLost(f"worker {name!r} was lost: nothing can be asked of it any more; use another one", name)

    def _fork_all(self, handles: Sequence[Handle], to: Worker) -> list[Carried]:
        references = self._references
        carried = []
        for handle in handles:
            reference, child = handle.reference, references.new_fork()
            references.handle_passed(reference, handle.fork, child, to)
            carried.append(new_tuple(Carried, (reference, child)))
        return carried

    def _take_back(self, to: Worker, before: tuple[int, int], passed: Sequence[Handle], parcel: Parcel | None) -> None:
        """Ctrl-C has come in the midst of a change to the tables. What was begun is undone: nobody was told of it."""
        if parcel is not None:
            self.mailboxes.delivery.take_back(to, parcel)
        handles = [(handle.reference, handle.fork) for handle in passed]
        self._decide(self._references.take_back(to, before, handles))

    def take(self, sender: Worker, number: int, carried: Sequence[Carried]) -> list[Handle] | None:
        """The handles that came in a message; None if that message came before. Raises `ProtocolError`."""
        boxes, is_owed = self.mailboxes, True
        try:
            with self._lock:
                is_owed = sender in boxes.owed
                if not is_owed:
                    self._owe(sender)
                if not boxes.delivery.receive(sender, number):
                    return None
                self._count_created()
                return self._receive_all(sender, carried)
        finally:
            if not is_owed or boxes.outboxes or self._refused:  # else it is known that there is something to be done
                self._act()

    def _owe(self, sender: Worker) -> None:
        """Something is to be acknowledged, though it came before: then its sender did not know. Under the lock."""
        if sender in self._references.peers:
            self.mailboxes.owed[sender] = None

    def _receive_all(self, sender: Worker, carried: Sequence[Carried]) -> list[Handle]:
        made = self._senders.get(sender)
        if made is None:
            made = self._senders[sender] = f"a message of {self._name_of(sender)!r}"
        handles, received = [], self._references.handle_received
        for each in carried:
            effects = received(each, sender)
            handles.append(self._new_handle(each, made))
            if effects:
                self._decide(effects)
        return handles

    def _new_handle(self, carried: Carried, made: Made) -> Handle:
        reference, fork = carried
        if reference[0] == self.me:
            value = self._values.get(reference)
            if value is None:
                value = self._values[reference] = Value()
            return Handle(self, reference, None, value, made)
        handle = Handle(self, reference, fork, None, made)
        self._handles[fork] = weakref.ref(handle)
        return handle

    def has_work(self) -> bool:
        """Whether finalizers have left something to do, a peer is to be told something, or an owner to be asked."""
        boxes = self.mailboxes
        return bool(
            self.dropped
            or self.delivered
            or self.left
            or self._uncounted
            or boxes.outboxes
            or boxes.owed
            or self._released
            or self._references.lent
        )

    def needs_help(self) -> bool:
        """Whether there is work for the serving pool. To be called at each look, every few milliseconds.

        Not if threads of the program, or replies, have taken it along since the last look; but after some looks all
        the same, as that need not be true of all of it.
        """
        tended, self._tended_before = self._tended_before, self.tended
        if tended != self.tended and self._looks < _LOOKS:
            self._looks += 1
            return False
        self._looks = 0
        return self.has_work()

    def work_off(self) -> None:
        """Handles what finalizers left, sends all that is to be said, and lets go of the values that may go.

        Called every few milliseconds while `has_work`; what is lent is asked for after some times.
        """
        while True:
            with self._lock:
                self._count_created()
                work_off(self)
                self._ask_owners()
                addressees = self.mailboxes.addressees()
                values, self._released = self._released, []
            self._act()
            for worker in addressees:
                self._post(worker)
            if not values:
                return
            values.clear()  # which may have held references

    def mail_along(self, to: Worker) -> bytes | None:
        """What is to be said to a worker whom something is sent just now: the body of a control message, if any."""
        with self._lock:
            work_off(self)
            self.tended += 1
            return self.mailboxes.letter(to)

    def _ask_owners(self) -> None:
        for reference, fork in self._lending.due(self._references.lent):
            self._decide(self._references.handle_kept(reference, fork))

    # Values

    def value_at(self, callee: bytes) -> Value:
        """As `value`, of the handle behind the first byte; `ProtocolError` if none is. Quick for what is there."""
        value = None
        if len(callee) > HANDLE_SIZE:
            value = self._values.get(unpack_reference(callee, 1))  # type: ignore[call-overload]  # equal to an RRefId
        return value if value is not None else self.value(unpack_handle(callee[1:])[0])

    def value(self, reference: RRefId) -> Value:
        """A value that this worker owns, or will; one that is refused if there is none."""
        value = self._values.get(reference)
        if value is None:
            with self._lock:
                self._count_created()
                value = self._values.get(reference)
                if value is None and self._references.is_to_come(reference):  # this use overtook the creation
                    value = self._values[reference] = Value()
        if value is None:
            value = Value()
            value.refuse(partial(released, reference, self._name_of(self.me)))
        return value

    # Messages

    def create_requested(
        self,
        sender: Worker,
        number: int,
        reference: RRefId,
        fork: ForkId,
        carried: Sequence[Carried],
        answered: bool = False,
    ) -> tuple[Value, Sequence[Handle]] | None:
        """A remote call came: the place of its value, and the handles it carries; None if it came before.

        One that will be `answered` is acknowledged by that. Raises `ProtocolError`.
        """
        boxes, references, values = self.mailboxes, self._references, self._values
        is_owed = True
        try:
            with self._lock:
                is_new = boxes.delivery.receive(sender, number)
                if not answered or not is_new:
                    is_owed = sender in boxes.owed
                    if not is_owed:
                        self._owe(sender)
                if not is_new:
                    return None
                self._count_created()
                effects = references.create_requested(sender, reference, fork)
                value = values.get(reference)  # there already, if a fork came before
                if value is None:
                    value = values[reference] = Value()
                if effects:
                    self._decide(effects)
                return value, self._receive_all(sender, carried) if carried else ()
        finally:
            if not is_owed or boxes.outboxes or self._refused:  # as in `take`
                self._act()

    def count_created(self) -> None:
        """What was answered meanwhile is counted."""
        with self._lock:
            self._count_created()

    def control_received(self, sender: Worker, body: bytes | bytearray | memoryview) -> None:
        """Handles a control message. Raises `ProtocolError`."""
        acknowledged, messages = unpack_entries(body)
        try:
            with self._lock:
                self._count_created()
                hear_acknowledged(self, sender, acknowledged)
                if messages:
                    self._owe(sender)
                    hear_messages(self, sender, messages)
        finally:
            self._act()

    # Reports

    def inventory(self) -> Inventory:
        """All that is owned and held here now."""
        self.work_off()
        with self._lock:
            return take_inventory(self._references, self._values, self._origins, self._handles.find, self._name_of)

    def debug_info(self) -> dict[str, str]:
        """Counters, by the names that torch gives them."""
        with self._lock:
            self._count_created()
            return count_references(self._references, self._values_to_come())

    def is_quiet(self) -> bool:
        """Whether nothing about references is to be done, said or acknowledged, and every value is there."""
        with self._lock:
            return not self.has_work() and self.mailboxes.delivery.is_quiet() and not self._values_to_come()

    def _values_to_come(self) -> set[RRefId]:
        return {reference for reference, value in self._values.items() if not value.done()}

    # The end

    def give_up_handles(self, reason: str) -> None:
        """Lets go of all handles of references that others own; using one raises from now on."""
        with self._lock:
            for fork, held in list(self._references.held.items()):
                if not held.dropped:
                    self._handles.fail(fork, partial(UsageError, reason))
                    self._decide(self._references.handle_dropped(held.reference, fork))
        self._act()

    def forget(self, reason: str) -> None:
        """Gives up all handles as `give_up_handles` does, and lets all values go: others that use them are refused.

        Who holds what is counted to its end as ever, and new references can be made.
        """
        self.give_up_handles(reason)
        with self._lock:
            self._count_created()
            for reference in self._references.owned:
                value = self._values.get(reference)
                self._released.append(value)
                self._values[reference] = gone = Value()
                gone.refuse(partial(released, reference, self._name_of(self.me)))
        self.work_off()

    def clear(self) -> None:
        """Forgets everything, and lets all values go; handles that are left are dropped without a word."""
        self.ended = True
        with self._lock:
            self.dropped.clear()
            self.delivered.clear()
            self.left.clear()
            self._uncounted.clear()
            self._lending = Lending()
            values, self._values = self._values, {}
            going, self._released = self._released, []
            self._references = References(self.me)
            parcels = self.mailboxes.clear()
            self._origins.clear()
            self._handles.clear()
        values.clear()
        going.clear()
        del parcels
