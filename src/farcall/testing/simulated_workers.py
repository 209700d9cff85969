"""A worker of a simulation: the reference protocol, its delivery, and a small program that holds handles.

It does what an agent does, and no more: hands events to `References`, carries out the effects, numbers messages with
`Delivery`. It has no network: what it wants sent lies in `outbox` after each event, what was decided in `notices`.

Its rules are those that an agent has to keep too:
- Nothing of a worker is taken after that worker's loss.
- Nothing is taken that names a worker of whom this one has not been told: it is left to be sent again.
- A handle that was refused or orphaned is not passed on; the drop of every handle is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

from farcall.protocol.delivery import Delivery
from farcall.protocol.ids import ForkId, RRefId, Worker
from farcall.protocol.reference_messages import (
    Carried,
    ConfirmHandle,
    CreateDelivered,
    CreateRequest,
    Effect,
    Event,
    HandleDropped,
    HandleKept,
    HandlePassed,
    HandleReceived,
    Message,
    MessageReceived,
    OrphanHandle,
    PassingFailed,
    PeerJoined,
    PeerLost,
    ReleaseValue,
    RemoteCalled,
    SendMessage,
    ValueMade,
)
from farcall.protocol.reference_tables import Held, Owned
from farcall.protocol.references import References
from farcall.protocol.watermark import Watermark

PENDING, CONFIRMED, REFUSED, ORPHANED = "pending", "confirmed", "refused", "orphaned"
"""What the program knows of a handle."""


class Parcel(NamedTuple):
    """A user's message with handles inside. `brief`: its receiver lets go of them at once, as a function does."""

    carried: tuple[Carried, ...]
    brief: bool


Payload: TypeAlias = Message | Parcel
NewWorker: TypeAlias = "Callable[[Worker], SimulatedWorker]"


class Outgoing(NamedTuple):
    """A numbered message that a worker wants sent."""

    to: Worker
    number: int
    payload: Payload


class Handle:
    """A handle that the program of a worker holds."""

    __slots__ = ("fork", "reference", "standing")

    def __init__(self, reference: RRefId, fork: ForkId | None, standing: str) -> None:
        self.reference = reference
        self.fork = fork
        self.standing = standing


class SimulatedWorker:
    """One worker of a simulation. Its methods are what happens to it; each leaves `outbox` and `notices`."""

    __slots__ = (
        "_handle_number", "alive", "by_fork", "delivery", "drafts", "handles", "lost", "me", "notices", "outbox",
        "references", "refused", "released", "unknown", "values",
    )  # fmt: skip

    def __init__(
        self,
        me: Worker,
        references: Callable[[Worker], References] = References,
        delivery: Callable[[], Delivery[Payload]] = Delivery,
    ) -> None:
        self.me = me
        self.references = references(me)
        self.delivery = delivery()
        self.alive = True
        self.handles: dict[int, Handle] = {}
        self.by_fork: dict[ForkId, Handle] = {}
        self.drafts: dict[ForkId, tuple[RRefId, ForkId | None]] = {}
        """Children made for messages that will turn out never to be sent."""
        self.values: set[RRefId] = set()
        self.released: set[RRefId] = set()
        """Values that were here and were let go."""
        self.refused: set[RRefId] = set()
        """References of this owner whose value is an error, because their creator is lost."""
        self.lost: set[Worker] = set()
        self.unknown: set[Worker] = set()
        """Workers that are there, and of whom this one has not been told."""
        self.outbox: list[Outgoing] = []
        self.notices: list[Effect] = []
        self._handle_number = 0

    # What happens to it

    def join(self, peer: Worker) -> None:
        """It is told that a worker is there."""
        self.unknown.discard(peer)
        self.delivery.joined(peer)
        self.perform(self.references.handle(PeerJoined(peer)))

    def lose(self, peer: Worker) -> None:
        """It is told that a worker is dead."""
        self.lost.add(peer)
        self.delivery.lost(peer)
        self.perform(self.references.handle(PeerLost(peer)))

    def make(self) -> None:
        """The program gives a value of its own a reference."""
        reference = self.references.new_reference(self.me)
        self.perform(self.references.handle(ValueMade(reference)))
        self.values.add(reference)
        self._hold(Handle(reference, None, CONFIRMED))

    def call(self, owner: Worker, numbers: Sequence[int] = (), told: bool = False) -> int:
        """The program calls `remote` with some handles; the number of the message, 0 if the owner is lost.

        It makes no difference here whether it is to be `told` of the value.
        """
        reference, fork = self.references.new_reference(owner), self.references.new_fork()
        self._hold(Handle(reference, fork, PENDING))
        self.perform(self.references.handle(RemoteCalled(reference, fork)))
        number = self.outbox[-1].number if owner not in self.lost else 0
        if numbers:
            self.send(numbers, owner)
        return number

    def can_pass(self, number: int) -> bool:
        """Whether the program has such a handle, and may use it."""
        handle = self.handles.get(number)
        return handle is not None and handle.standing in (PENDING, CONFIRMED)

    def send(self, numbers: Sequence[int], to: Worker, brief: bool = False) -> None:
        """The program puts handles into a message."""
        parcel = Parcel(tuple([self._fork(number, to) for number in numbers]), brief)
        if to not in self.lost:
            self.outbox.append(Outgoing(to, self.delivery.send(to, parcel), parcel))

    def draft(self, number: int, to: Worker) -> None:
        """The program puts a handle into a message that will never be sent."""
        carried = self._fork(number, to)
        self.drafts[carried.fork] = carried.reference, self.handles[number].fork

    def abandon(self, child: ForkId) -> None:
        """A draft turns out to be unsendable."""
        reference, parent = self.drafts.pop(child)
        self.perform(self.references.handle(PassingFailed(reference, parent, child)))

    def drop(self, number: int) -> None:
        """The program lets go of a handle."""
        handle = self.handles.pop(number)
        if handle.fork is not None:
            del self.by_fork[handle.fork]
        self.perform(self.references.handle(HandleDropped(handle.reference, handle.fork)))

    def lent(self) -> list[int]:
        """The handles that the program has, and that their owner was not asked for yet."""
        lent = self.references.lent
        return [number for number, handle in self.handles.items() if handle.fork in lent] if lent else []

    def keep(self, number: int) -> None:
        """The program has kept a handle for a moment that was lent to it."""
        handle = self.handles[number]
        assert handle.fork is not None
        self.perform(self.references.handle(HandleKept(handle.reference, handle.fork)))

    def takes(self, sender: Worker, payload: Payload) -> bool:
        """Whether it knows of everybody whom the message names."""
        if not self.unknown:
            return True
        named = {sender}
        for reference, fork in payload.carried if isinstance(payload, Parcel) else (payload,):
            named |= {reference.owner, reference.creator, fork.creator}
        return self.unknown.isdisjoint(named)

    def hear(self, sender: Worker, messages: Sequence[tuple[int, Payload]], upto: int) -> list[tuple[int, Payload]]:
        """Messages come, and an acknowledgement unless it is 0; those that were taken."""
        taken = [message for message in messages if self.receive(sender, *message)]
        if upto:
            self.acknowledged(sender, upto)
        return taken

    def receive(self, sender: Worker, number: int, payload: Payload) -> bool:
        """A message comes, perhaps not for the first time; whether it was taken."""
        if not self.takes(sender, payload) or not self.delivery.receive(sender, number):
            return False
        if isinstance(payload, Parcel):
            for carried in payload.carried:
                self._unpack(carried, sender, payload.brief)
        else:
            if isinstance(payload, CreateRequest):
                self.values.add(payload.reference)
            self.perform(self.references.handle(MessageReceived(sender, payload)))
        return True

    def acknowledged(self, peer: Worker, upto: int) -> None:
        """It hears up to which number a peer has taken its messages."""
        for payload in self.delivery.acknowledged(peer, upto):
            if isinstance(payload, CreateRequest):
                self.perform(self.references.handle(CreateDelivered(payload.reference, payload.fork)))

    def answered(self, owner: Worker, number: int) -> None:
        """It is told that a remote call of its has come."""
        payload = self.delivery.taken(owner, number)
        if isinstance(payload, CreateRequest):
            self.perform(self.references.handle(CreateDelivered(payload.reference, payload.fork)))

    def acknowledgement(self, peer: Worker) -> int:
        """It says up to which number it has taken a peer's messages."""
        return self.delivery.acknowledgement(peer)

    def unacknowledged(self, peer: Worker) -> list[tuple[int, Payload]]:
        """What it sends once more."""
        return self.delivery.unacknowledged(peer)

    def creations_to_confirm(self, peer: Worker) -> list[ForkId]:
        """The forks of remote calls of which it does not know yet that the peer has taken them."""
        kept = self.delivery.unacknowledged(peer)
        return [payload.fork for _, payload in kept if isinstance(payload, CreateRequest)]

    def _unpack(self, carried: Carried, sender: Worker, brief: bool) -> None:
        reference, fork = carried
        effects = self.references.handle(HandleReceived(carried, sender))
        own = reference.owner == self.me
        number = self._hold(Handle(reference, None if own else fork, CONFIRMED if own else PENDING))
        self.perform(effects)
        if brief:
            self.drop(number)

    def _fork(self, number: int, to: Worker) -> Carried:
        handle = self.handles[number]
        child = self.references.new_fork()
        self.perform(self.references.handle(HandlePassed(handle.reference, handle.fork, child, to)))
        return Carried(handle.reference, child)

    def _hold(self, handle: Handle) -> int:
        self._handle_number += 1
        self.handles[self._handle_number] = handle
        if handle.fork is not None:
            self.by_fork[handle.fork] = handle
        return self._handle_number

    def perform(self, effects: list[Effect]) -> None:
        """Does what the protocol decided."""
        for effect in effects:
            if isinstance(effect, SendMessage):
                to, message = effect
                self.outbox.append(Outgoing(to, self.delivery.send(to, message), message))
                continue
            self.notices.append(effect)
            if isinstance(effect, ReleaseValue):
                reference = effect.reference
                if reference in self.values:
                    self.values.remove(reference)
                    self.released.add(reference)
                self.refused.discard(reference)
            elif isinstance(effect, ConfirmHandle):
                self._mark(effect.fork, CONFIRMED)
            elif isinstance(effect, OrphanHandle):
                self._mark(effect.fork, ORPHANED)
            else:
                self._refuse(*effect)

    def _refuse(self, reference: RRefId, fork: ForkId | None) -> None:
        if fork is not None:
            self._mark(fork, REFUSED)
            return
        self.refused.add(reference)
        for handle in self.handles.values():
            if handle.reference == reference and handle.fork is None:
                handle.standing = REFUSED

    def _mark(self, fork: ForkId, standing: str) -> None:
        handle = self.by_fork.get(fork)
        if handle is not None:  # else the program has let go of it
            handle.standing = standing

    # What it puts off: nothing

    def chores(self) -> list[tuple[str | int, ...]]:
        """What it could do now by itself, as steps of the network."""
        return []

    def do_chore(self, word: str, *more: int) -> bool:
        """Does one of these; whether there was anything to do. Raises `KeyError` if it has no such chore."""
        raise KeyError(word)

    def has_to_say(self, fork: ForkId) -> bool:
        """Whether it has decided to say something about the standing of a fork, and put that off."""
        return False

    # Seen from outside

    def check(self, at_the_end: bool = False) -> None:
        """Raises `BrokenInvariant` if something is wrong with it that has nothing to do with others."""

    def handle_illegal(self, event: Event) -> list[Effect]:
        """Something happens to it that cannot be. Raises `ProtocolError`, if all is well."""
        return self.references.handle(event)

    def snapshot(self) -> Hashable:
        """All that decides what it will do, and nothing else: equal for two workers that nobody can tell apart."""
        return (
            self.alive,
            tables(self.references),
            links(self.delivery),
            tuple(sorted((h.reference, h.fork or (), h.standing) for h in self.handles.values())),
            frozenset(self.drafts.items()),
            frozenset(self.values),
            frozenset(self.released),
            frozenset(self.refused),
            frozenset(self.lost),
            frozenset(self.unknown),
        )

    def copy(self) -> SimulatedWorker:
        """Another one in the same state, with an empty outbox. The classes of its protocols are kept."""
        new: SimulatedWorker = object.__new__(SimulatedWorker)
        new.me, new.alive, new._handle_number = self.me, self.alive, self._handle_number
        new.references = copy_references(self.references)
        new.delivery = copy_delivery(self.delivery)
        new.handles = {number: Handle(h.reference, h.fork, h.standing) for number, h in self.handles.items()}
        new.by_fork = {h.fork: h for h in new.handles.values() if h.fork is not None}
        new.drafts = dict(self.drafts)
        new.values, new.released, new.refused = set(self.values), set(self.released), set(self.refused)
        new.lost, new.unknown = set(self.lost), set(self.unknown)
        new.outbox, new.notices = [], []
        return new


def tables(references: References) -> Hashable:
    """The whole state of a `References` as a value."""
    return (
        frozenset(
            (reference, owned.created, owned.refused, owned.handles, frozenset(owned.forks.items()))
            for reference, owned in references.owned.items()
        ),
        frozenset(
            (fork, held.reference, held.standing.value, held.parent, held.dropped, frozenset(held.children.items()))
            for fork, held in references.held.items()
        ),
        frozenset(references.lent),
        frozenset((worker, seen.mark, frozenset(seen.beyond)) for worker, seen in references.peers.items()),
        frozenset(references.parents.items()),
        frozenset(references.numbers.items()),
        references.forks,
    )


def links(delivery: Delivery[Any]) -> Hashable:
    """The whole state of a `Delivery` as a value."""
    return frozenset(
        (peer, link.last, frozenset(link.unacknowledged), link.received.mark, frozenset(link.received.beyond))
        for peer, link in delivery.links.items()
    )


def copy_references(old: References) -> References:
    """Another `References` of the same class, in the same state."""
    new = type(old)(old.me)
    for reference, owned in old.owned.items():
        copied = new.owned[reference] = Owned(owned.created)
        copied.refused, copied.handles, copied.forks = owned.refused, owned.handles, dict(owned.forks)
    for fork, held in old.held.items():
        taken = new.held[fork] = Held(held.reference, held.standing, held.parent)
        taken.dropped, taken.children = held.dropped, dict(held.children)
        if fork in old.lent:
            new.lent[fork] = taken
    new.peers = {worker: _copy_watermark(seen) for worker, seen in old.peers.items()}
    new.parents, new.numbers, new.forks = dict(old.parents), dict(old.numbers), old.forks
    return new


def copy_delivery(old: Delivery[Payload]) -> Delivery[Payload]:
    """Another `Delivery` of the same class, in the same state."""
    new = type(old)()
    for peer, link in old.links.items():
        new.joined(peer)
        copied = new.links[peer]
        copied.last, copied.unacknowledged = link.last, dict(link.unacknowledged)
        copied.received = _copy_watermark(link.received)
    return new


def _copy_watermark(old: Watermark) -> Watermark:
    new = Watermark()
    new.mark, new.beyond = old.mark, set(old.beyond)
    return new
