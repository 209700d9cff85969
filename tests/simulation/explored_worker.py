"""A worker of an exploration: `ReferenceCounts`, `Delivery`, and a small program that holds handles.

It calls the methods of both as the reference store does, and no more. It can be copied, and its state is a value, which
the reference store offers neither of. It has no network: after each event, what is to be sent is in `outbox`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple, TypeAlias

from farcall.protocol.delivery import Delivery, Link
from farcall.protocol.ids import ForkId, RRefId, Worker
from farcall.protocol.refcount import OwnedEntry, ReferenceCounts, UserFork
from farcall.protocol.reference_messages import (
    Carried,
    ConfirmHandle,
    CreateRequest,
    Effect,
    ForkRefused,
    Message,
    OrphanHandle,
    RefuseHandle,
    SendMessage,
)
from farcall.protocol.watermark import Watermark
from simulation.forgeries import claim
from simulation.invariants import CONFIRMED, ORPHANED, PENDING, REFUSED, HandleStatus
from simulation.reference_state import SimulatedTokens, is_forged, tables


class PassedHandle(NamedTuple):
    """A call with a handle among its arguments."""

    carried: Carried


Payload: TypeAlias = Message | PassedHandle


class Outgoing(NamedTuple):
    """A numbered message that a worker wants to be sent."""

    to: Worker
    number: int
    payload: Payload


class ExploredWorker:
    """One worker of an exploration. Its methods are what happens to it."""

    __slots__ = ("alive", "counts", "delivery", "handles", "handles_made", "has_refused", "lost", "me", "outbox")

    is_dishonest = False

    def __init__(self, me: Worker) -> None:
        self.me = me
        self.alive = True
        self.counts = ReferenceCounts(me, SimulatedTokens(me))
        self.delivery: Delivery[Payload] = Delivery()
        self.handles: dict[int, HandleStatus] = {}
        self.lost: set[Worker] = set()
        self.outbox: list[Outgoing] = []
        self.has_refused = False
        """A handle was refused, by this event."""
        self.handles_made = 0

    # What happens to it

    def add(self, worker: Worker) -> None:
        """A worker has joined the group."""
        self.delivery.joined(worker)
        self._perform(self.counts.add_worker(worker))

    def remove(self, worker: Worker) -> None:
        """A worker is dead."""
        self.lost.add(worker)
        self.delivery.lost(worker)
        self._perform(self.counts.remove_worker(worker))

    def make(self) -> None:
        """The program makes a reference to a value of its own."""
        reference = self.counts.new_reference(self.me)
        self._perform(self.counts.create_value(reference))
        self._hold(reference, None, CONFIRMED)

    def call(self, owner: Worker) -> None:
        """The program makes a remote call."""
        reference, fork = self.counts.create_remote(owner)
        self._hold(reference, fork, PENDING)
        self._send(owner, CreateRequest(reference, fork))

    def can_pass(self, number: int) -> bool:
        """Returns whether the program may use a handle."""
        return self.handles[number].status in (PENDING, CONFIRMED)

    def pass_on(self, number: int, to: Worker) -> None:
        """The program makes a call with a handle among the arguments."""
        reference, parent, _ = self.handles[number]
        child = self.counts.new_fork()
        self._perform(self.counts.pass_handle(reference, parent, child, to))
        if to not in self.lost:
            self._send(to, PassedHandle(Carried(reference, child)))

    def drop(self, number: int) -> None:
        """The program lets go of a handle."""
        reference, fork, _ = self.handles.pop(number)
        self._perform(self.counts.drop_handle(reference, fork))

    def unreported(self) -> list[int]:
        """Returns the handles of the program that are unreported."""
        return [number for number, handle in self.handles.items() if handle.fork in self.counts.unreported]

    def report(self, number: int) -> None:
        """The program has kept an unreported handle for a while."""
        reference, fork, _ = self.handles[number]
        assert fork is not None
        self._perform(self.counts.report_fork(reference, fork))

    def receive(self, sender: Worker, number: int, payload: Payload) -> bool:
        """A message comes, perhaps not for the first time. Returns whether it was taken."""
        if not self.delivery.receive(sender, number):
            return False
        if isinstance(payload, PassedHandle):
            reference, fork = payload.carried
            effects = self.counts.receive_handle(payload.carried, sender)
            is_own = reference.owner == self.me
            self._hold(reference, None if is_own else fork, CONFIRMED if is_own else PENDING)
            self._perform(effects)
        elif not (isinstance(payload, ForkRefused) and is_forged(payload.reference)):  # the answer to a forger
            self._perform(self.counts.receive_message(sender, payload))
        return True

    def acknowledged(self, by: Worker, upto: int) -> None:
        """Another worker has taken the messages of this one, up to that number."""
        for payload in self.delivery.acknowledged(by, upto):
            if isinstance(payload, CreateRequest):
                self._perform(self.counts.confirm_created(payload.reference, payload.fork))

    def claim(self, forger: Worker, creator: Worker) -> None:
        """A dishonest worker asks to be counted for a reference that does not exist yet."""
        message = claim(self.counts, forger, creator)
        assert message is not None
        self._perform(self.counts.receive_message(forger, message))

    # What follows

    def _hold(self, reference: RRefId, fork: ForkId | None, status: str) -> None:
        self.handles_made += 1
        self.handles[self.handles_made] = HandleStatus(reference, fork, status)

    def _send(self, to: Worker, payload: Payload) -> None:
        self.outbox.append(Outgoing(to, self.delivery.send(to, payload), payload))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendMessage):
                self._send(*effect)
            elif isinstance(effect, ConfirmHandle):
                self._mark(effect.reference, effect.fork, CONFIRMED)
            elif isinstance(effect, OrphanHandle):
                self._mark(effect.reference, effect.fork, ORPHANED)
            elif isinstance(effect, RefuseHandle):
                self.has_refused |= not is_forged(effect.reference)
                self._mark(effect.reference, effect.fork, REFUSED)

    def _mark(self, reference: RRefId, fork: ForkId | None, status: str) -> None:
        for number, handle in self.handles.items():
            if handle.reference == reference and handle.fork == fork:
                self.handles[number] = handle._replace(status=status)

    # Seen from outside

    def handle_statuses(self) -> Iterator[HandleStatus]:
        """See `Observed`."""
        return iter(self.handles.values())

    def snapshot(self) -> Hashable:
        """Returns all that decides what the worker will do: equal for two workers that nobody can tell apart."""
        return (
            tables(self.counts),
            frozenset(
                (peer, link.last, _sent(link), link.received.mark, frozenset(link.received.beyond))
                for peer, link in self.delivery.links.items()
            ),
            tuple(sorted((reference, fork or (), status) for reference, fork, status in self.handles.values())),
            frozenset(self.lost),
        )

    def copy(self) -> ExploredWorker:
        """Returns another worker in the same state, with an empty outbox."""
        new: ExploredWorker = object.__new__(ExploredWorker)
        new.me, new.alive, new.handles_made = self.me, self.alive, self.handles_made
        new.counts, new.delivery = _copy_counts(self.counts), _copy_delivery(self.delivery)
        new.handles, new.lost = dict(self.handles), set(self.lost)
        new.outbox, new.has_refused = [], False
        return new


def _sent(link: Link[Payload]) -> Hashable:
    """Returns what is not acknowledged, with its types: named tuples of different types may be equal."""
    return frozenset((number, type(payload).__name__, payload) for number, payload in link.unacknowledged.items())


def _copy_counts(old: ReferenceCounts) -> ReferenceCounts:
    tokens = old.new_token
    assert isinstance(tokens, SimulatedTokens)
    new = ReferenceCounts(old.me, SimulatedTokens(tokens.me, tokens.drawn))
    for reference, owned in old.owned.items():
        entry = new.owned[reference] = OwnedEntry(owned.created)
        entry.refused, entry.handles, entry.forks = owned.refused, owned.handles, dict(owned.forks)
    for fork, held in old.held.items():
        copied = new.held[fork] = UserFork(held.reference, held.state, held.parent)
        copied.dropped, copied.children = held.dropped, dict(held.children)
        if fork in old.unreported:
            new.unreported[fork] = copied
    new.workers = {worker: _copy_watermark(seen) for worker, seen in old.workers.items()}
    new.parents, new.numbers, new.forks_made = dict(old.parents), dict(old.numbers), old.forks_made
    new.noted = {key: dict(named) for key, named in old.noted.items()}
    new.claims = dict(old.claims)
    return new


def _copy_delivery(old: Delivery[Any]) -> Delivery[Any]:
    new: Delivery[Any] = Delivery()
    for peer, link in old.links.items():
        new.joined(peer)
        copied = new.links[peer]
        copied.last, copied.unacknowledged = link.last, dict(link.unacknowledged)
        copied.received = _copy_watermark(link.received)
    return new


def _copy_watermark(old: Watermark) -> Watermark:
    new = Watermark()
    new.mark, new.beyond = old.mark, list(old.beyond)
    return new
