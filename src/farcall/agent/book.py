"""The references of one agent: the protocol's state under a lock, and what follows from it, done outside the lock.

The protocol itself is `protocol.references`; here it meets threads, values and connections.

Rules
- Decide under the lock, act outside it: effects are gathered under the lock, in their order, and acted on after it.
- A finalizer only appends to a list (garbage collection may run anywhere, in the midst of any lock, this one too); the
  list is worked off by the next one who comes, or by the serving pool, which is woken for it.
- Nothing of a user runs under the lock. Values that are released are let go outside it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from farcall.agent.handle import Handle
from farcall.agent.inventory import HeldReference, Inventory, OwnedReference
from farcall.agent.parcels import CarriedFrame, Letter, Parcel, RemoteFrame, Way
from farcall.errors import OwnerLost, ReferenceRefused, RpcError, SerializationError, UsageError
from farcall.futures import FAILED, Future, run_callbacks
from farcall.protocol.control import MOST_HANDLES, pack_control, unpack_control
from farcall.protocol.delivery import Delivery
from farcall.protocol.ids import ForkId, RRefId, Worker
from farcall.protocol.reference_messages import (
    Carried,
    ConfirmHandle,
    CreateRequest,
    Effect,
    Event,
    ForkAccepted,
    ForkRefused,
    HandleDropped,
    HandlePassed,
    HandleReceived,
    Message,
    MessageReceived,
    OrphanHandle,
    PeerJoined,
    PeerLost,
    RefuseHandle,
    ReleaseValue,
    RemoteCalled,
    SendMessage,
    ValueMade,
)
from farcall.protocol.references import References, Standing
from farcall.transports.base import Buffer

if TYPE_CHECKING:
    from farcall.agent.agent import Agent


class _Note(NamedTuple):
    """What finalizers leave behind."""

    reference: RRefId
    fork: ForkId | None


class ReferenceBook:
    """All references of one agent, and the values it owns."""

    agent: Agent
    """Whose references these are; set by the agent."""

    def __init__(
        self,
        me: Worker,
        post: Callable[[Worker], None],
        work_soon: Callable[[], None],
        name_of: Callable[[Worker], str],
    ) -> None:
        self.me = me
        self._post = post  # there is something in the outbox for this worker
        self._work_soon = work_soon  # have `work_off` called in the serving pool
        self._name_of = name_of
        self._lock = threading.Lock()
        self._references = References(me)
        self._delivery: Delivery[Parcel] = Delivery()
        self._outboxes: dict[Worker, list[tuple[int, Message]]] = {}
        self._unacknowledged: dict[Worker, None] = {}  # peers that do not know yet what of theirs has come
        self._values: dict[RRefId, Future[Any]] = {}
        self._handles: weakref.WeakValueDictionary[ForkId, Handle] = weakref.WeakValueDictionary()
        self._dropped: deque[_Note] = deque()
        self._origins: dict[RRefId, str] = {}  # where values of this worker got their reference
        self._ended = False
        self.resend: Callable[[Worker], None] = lambda worker: None
        """Has sent again what was lost with a connection; set by the agent."""
        self.record_stacks = False
        self.resend = lambda worker: None
        """Whether handles remember the whole stack where they were made, not only the line."""

    # Workers

    def joined(self, worker: Worker) -> None:
        """A worker is there."""
        self._handle([PeerJoined(worker)])
        with self._lock:
            self._delivery.joined(worker)

    def lost(self, worker: Worker) -> None:
        """A worker is gone for good. Does nothing if it was known to be."""
        with self._lock:
            if worker not in self._references.peers:
                return
            self._delivery.lost(worker)
            self._outboxes.pop(worker, None)
            self._unacknowledged.pop(worker, None)
            effects = self._references.handle(PeerLost(worker))
        self._act(effects)
        with self._lock:
            awaited = [each for each in self._values if each.creator == worker and each not in self._references.owned]
        for reference in awaited:  # by a use that overtook the creation, which never comes now
            self._refuse(RefuseHandle(reference, None))
            self._values.pop(reference, None)

    # Making, passing, receiving, dropping

    def make(self, value: Future[Any]) -> Handle:
        """A reference to a value of this worker."""
        with self._lock:
            reference = self._references.new_reference(self.me)
            self._references.handle(ValueMade(reference))
            self._values[reference] = value
        handle = Handle(self, reference, None, value)
        self._origins[reference] = handle.created_at
        return handle

    def call_remote(
        self,
        owner: Worker,
        passed: Sequence[Handle],
        frame: Callable[[int, list[Carried], RRefId, ForkId], list[Buffer]],
        via: Way,
    ) -> tuple[Handle, list[Buffer]]:
        """A reference that `owner` is asked to make, and the message that asks, with the handles among its arguments.

        `frame` packs the message, given its number and what it carries. Empty if the owner is lost.
        Raises as `pass_on`.
        """
        self._check_usable(passed)
        with self._lock:
            reference, fork = self._references.new_reference(owner), self._references.new_fork()
            effects = self._references.handle(RemoteCalled(reference, fork))
            handle = Handle(self, reference, fork, None)
            if not isinstance(effects[0], SendMessage):
                handle.error = self._owner_lost(reference)
                return handle, []
            self._handles[fork] = handle
            parcel = RemoteFrame()
            parcel.via = via
            number = self._delivery.send(owner, parcel)
            parcel.frame = frame(number, self._fork_all(passed, owner), reference, fork)
        if via.is_lost():
            self.resend(owner)
        return handle, parcel.frame

    def pass_on(self, handles: Sequence[Handle], to: Worker, via: Way) -> tuple[int, list[Carried]]:
        """Makes a fork of each handle for `to`: the number of the message that will carry them, and what it carries.

        Raises the error of a handle that leads nowhere; then none was passed.
        """
        self._check_usable(handles)
        with self._lock:
            if to not in self._references.peers:
                return 0, []  # nobody will hear of it
            carried = self._fork_all(handles, to)
            number = self._delivery.send(to, CarriedFrame(carried, via))
        if via.is_lost():
            self.resend(to)
        return number, carried

    def _check_usable(self, handles: Sequence[Handle]) -> None:
        if len(handles) > MOST_HANDLES:
            raise SerializationError(
                f"a message with {len(handles)} references cannot be sent; at most {MOST_HANDLES} are allowed: "
                "send them in parts"
            )
        for handle in handles:
            if handle.error is not None:
                raise handle.error

    def _fork_all(self, handles: Sequence[Handle], to: Worker) -> list[Carried]:
        carried = []
        for handle in handles:
            child = self._references.new_fork()
            self._references.handle(HandlePassed(handle.reference, handle.fork, child, to))
            carried.append(Carried(handle.reference, child))
        return carried

    def take(self, sender: Worker, number: int, carried: Sequence[Carried]) -> list[Handle] | None:
        """The handles that came in a message; None if that message came before."""
        effects: list[Effect] = []
        with self._lock:
            self._acknowledge(sender)
            if not self._delivery.receive(sender, number):
                return None
            handles = self._receive_all(sender, carried, effects)
        self._act(effects)
        return handles

    def _acknowledge(self, sender: Worker) -> None:
        """Also for what came before: its sender does not know it."""
        if sender in self._references.peers:
            self._unacknowledged[sender] = None

    def _receive_all(self, sender: Worker, carried: Sequence[Carried], effects: list[Effect]) -> list[Handle]:
        handles = []
        for each in carried:
            effects += self._references.handle(HandleReceived(each, sender))
            handles.append(self._new_handle(each))
        return handles

    def _new_handle(self, carried: Carried) -> Handle:
        reference, fork = carried
        if reference.owner == self.me:
            value = self._values.get(reference)
            if value is None:
                value = self._values[reference] = Future()
            return Handle(self, reference, None, value)
        handle = self._handles[fork] = Handle(self, reference, fork, None)
        return handle

    def drop_later(self, reference: RRefId, fork: ForkId | None) -> None:
        """For finalizers: takes no lock."""
        if self._ended:
            return
        self._dropped.append(_Note(reference, fork))
        self._work_soon()

    def work_off_now(self) -> None:
        """For a thread that is about to send something anyway: what finalizers left can go along with it."""
        if self._dropped:
            self.work_off()

    def has_work(self) -> bool:
        """Whether finalizers have left something to do, or a peer is to be told what has come."""
        return bool(self._dropped or self._unacknowledged)

    def work_off(self) -> None:
        """Handles what finalizers left, and acknowledges what has come."""
        events: list[Event] = []
        while self._dropped:
            try:
                note = self._dropped.popleft()
            except IndexError:
                break
            events.append(HandleDropped(note.reference, note.fork))
        if events:
            self._handle(events)
        with self._lock:
            silent = [worker for worker in self._unacknowledged if worker not in self._outboxes]
        for worker in silent:
            self._post(worker)

    # Values

    def value(self, reference: RRefId) -> Future[Any]:
        """The future of a value that this worker owns, or will. Raises `ReferenceRefused` if there is none."""
        future = self._values.get(reference)
        if future is None:
            with self._lock:
                future = self._values.get(reference)
                if future is None and self._references.is_to_come(reference):  # this use overtook the creation
                    future = self._values[reference] = Future()
        if future is None:
            raise ReferenceRefused(
                f"worker {self._name_of(self.me)!r} does not own {reference} any more: its value was released"
            )
        return future

    # Messages

    def create_requested(
        self, sender: Worker, number: int, reference: RRefId, fork: ForkId, carried: Sequence[Carried]
    ) -> tuple[Future[Any], list[Handle]] | None:
        """A remote call came: the future for its value, and the handles it carries; None if it came before."""
        with self._lock:
            self._acknowledge(sender)
            if not self._delivery.receive(sender, number):
                return None
            effects = self._references.handle(MessageReceived(sender, CreateRequest(reference, fork)))
            future = self._values.get(reference)  # there already, if a fork came before
            if future is None:
                future = self._values[reference] = Future()
            handles = self._receive_all(sender, carried, effects)
        self._act(effects)
        return future, handles

    def control_received(self, sender: Worker, body: bytes | bytearray | memoryview) -> bool:
        """Handles a control message; whether its sender has more to acknowledge. Raises `ProtocolError`."""
        acknowledged, messages = unpack_control(body)
        effects: list[Effect] = []
        with self._lock:
            self._delivery.acknowledged(sender, acknowledged)
            more = bool(self._delivery.unacknowledged(sender))
            for number, message in messages:
                self._acknowledge(sender)
                if self._delivery.receive(sender, number):
                    effects += self._references.handle(MessageReceived(sender, message))
        self._act(effects)
        return more

    def outbox(self, to: Worker) -> Letter | None:
        """The control message for a peer: what it has not been sent yet, and an acknowledgement. None if nothing."""
        with self._lock:
            messages = self._outboxes.pop(to, [])
            if not messages and to not in self._unacknowledged:
                return None
            self._unacknowledged.pop(to, None)
            acknowledgement = self._delivery.acknowledgement(to)
        only_answers = all(isinstance(message, (ForkAccepted, ForkRefused)) for _, message in messages)
        return Letter(pack_control(acknowledgement, messages), only_answers)

    def acknowledgement(self, to: Worker) -> int:
        """Up to which number the messages of a peer have come."""
        with self._lock:
            self._unacknowledged.pop(to, None)
            return self._delivery.acknowledgement(to)

    def unacknowledged(self, to: Worker) -> list[tuple[int, Parcel]]:
        """What is to be sent again after a reconnect. What waited in the outbox is among it, and no longer there."""
        with self._lock:
            self._outboxes.pop(to, None)
            return self._delivery.unacknowledged(to)

    # Reports

    def inventory(self) -> Inventory:
        """All that is owned and held here now."""
        self.work_off()
        with self._lock:
            owned = [
                OwnedReference(
                    str(reference),
                    self._type_of(reference),
                    entry.handles,
                    tuple(self._name_of(holder) for holder in entry.forks.values()),
                    self._origins.get(reference) or f"the request of {self._name_of(reference.creator)!r}",
                )
                for reference, entry in self._references.owned.items()
            ]
            held = []
            for fork, entry in self._references.held.items():
                handle = self._handles.get(fork)
                held.append(
                    HeldReference(
                        str(entry.reference),
                        self._name_of(entry.reference.owner),
                        entry.standing is Standing.CONFIRMED,
                        tuple(self._name_of(child) for child in entry.children.values()),
                        entry.dropped,
                        handle.created_at if handle is not None else "",
                    )
                )
        return Inventory(tuple(owned), tuple(held))

    def _type_of(self, reference: RRefId) -> str:
        value = self._values.get(reference)
        if value is None or not value.done():
            return ""
        error = value.exception()
        return type(value.value()).__qualname__ if error is None else f"failed: {type(error).__name__}"

    def debug_info(self) -> dict[str, str]:
        """Counters, by the names that torch gives them."""
        with self._lock:
            pending = sum(held.standing is Standing.UNCONFIRMED for held in self._references.held.values())
            return {
                "num_owner_rrefs": str(len(self._references.owned)),
                "num_pending_users": str(pending),
                "num_pending_futures": str(sum(not value.done() for value in self._values.values())),
                "num_forks": str(sum(len(owned.forks) for owned in self._references.owned.values())),
            }

    def is_quiet(self) -> bool:
        """Whether nothing about references is to be done, said or acknowledged."""
        with self._lock:
            return not self._dropped and not self._outboxes and self._delivery.is_quiet()

    # The end

    def give_up_handles(self, reason: str) -> None:
        """Lets go of all handles of references that others own; using one raises from now on."""
        with self._lock:
            forks = [(fork, held.reference) for fork, held in self._references.held.items() if not held.dropped]
        for fork, _ in forks:
            self._fail(fork, UsageError(reason))
        self._handle([HandleDropped(reference, fork) for fork, reference in forks])

    def clear(self) -> None:
        """Forgets everything, and lets all values go; handles that are left are dropped without a word."""
        self._ended = True
        with self._lock:
            self._dropped.clear()
            values, self._values = self._values, {}
            self._references = References(self.me)
            self._delivery = Delivery()
            self._outboxes.clear()
            self._unacknowledged.clear()
            self._origins.clear()
        values.clear()

    # Acting

    def _handle(self, events: Sequence[Event]) -> None:
        effects: list[Effect] = []
        with self._lock:
            for event in events:
                if isinstance(event, HandleDropped) and self._is_gone(event.reference, event.fork):
                    continue
                effects += self._references.handle(event)
        self._act(effects)

    def _is_gone(self, reference: RRefId, fork: ForkId | None) -> bool:
        """Whether a handle that is dropped was given up before."""
        if fork is None:
            return False
        held = self._references.held.get(fork)
        return held is not None and held.dropped

    def _act(self, effects: Sequence[Effect]) -> None:
        told: dict[Worker, None] = {}
        released = []  # let go at the end, outside of everything
        for effect in effects:
            if isinstance(effect, SendMessage):
                with self._lock:
                    if effect.to not in self._references.peers:
                        continue
                    number = self._delivery.send(effect.to, effect.message)
                    self._outboxes.setdefault(effect.to, []).append((number, effect.message))
                told[effect.to] = None
            elif isinstance(effect, ReleaseValue):
                with self._lock:
                    if effect.reference not in self._references.owned:  # it may have been created meanwhile
                        released.append(self._values.pop(effect.reference, None))
                        self._origins.pop(effect.reference, None)
            elif isinstance(effect, ConfirmHandle):
                handle = self._handles.get(effect.fork)
                if handle is not None:
                    handle.confirmed = True
            elif isinstance(effect, OrphanHandle):
                self._fail(effect.fork, self._owner_lost(effect.reference))
            else:
                self._refuse(effect)
        for worker in told:
            self._post(worker)

    def _fail(self, fork: ForkId, error: RpcError) -> None:
        handle = self._handles.pop(fork, None)
        if handle is not None:
            handle.error = error

    def _refuse(self, effect: RefuseHandle) -> None:
        error = ReferenceRefused(
            f"{effect.reference} was passed on by a worker that died before its owner could count it; "
            "its value is gone. Create it anew"
        )
        if effect.fork is not None:
            self._fail(effect.fork, error)
            return
        with self._lock:
            value = self._values.setdefault(effect.reference, Future())  # an error stands for it until all have gone
        if not value.done():
            run_callbacks(value, value.settle(FAILED, error))

    def _owner_lost(self, reference: RRefId) -> OwnerLost:
        name = self._name_of(reference.owner)
        return OwnerLost(f"worker {name!r}, who owned {reference}, was lost, and the value with it", name)
