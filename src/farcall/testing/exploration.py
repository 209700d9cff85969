"""Every interleaving of a small world: breadth first over all states, each visited once.

Three workers, one reference, and a *bound*: how many forks are made, how many workers crash, how many messages are
doubled, lost and acknowledged. Within the bound everything may happen at any moment: any handle is passed to anybody or
dropped, messages arrive in any order, any worker dies and each survivor is told in its own time. All invariants are
checked in each state; where nothing is under way, that everything is decided; where also no handle is left, that every
table is empty. Breadth first, so what is found is found by a shortest schedule.

States are compared by value (`SimulatedWorker.snapshot`). What a worker does depends on its own state alone, so it is
worked out once for each of its states and events and remembered: a state of the world is a handful of small numbers.

Two liberties, both sound: who owns and who creates is fixed (the workers are alike), and what is under way from a dead
worker vanishes when its receiver is told (it would be dropped on arrival; the random schedules let it arrive).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, TypeAlias

from farcall.protocol.delivery import Delivery
from farcall.protocol.ids import Worker
from farcall.protocol.reference_messages import (
    ChildAccepted,
    CreateRequest,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    RefuseHandle,
    UserDeleted,
)
from farcall.protocol.references import References
from farcall.testing.illegal_events import check_unchanged
from farcall.testing.invariants import (
    BrokenInvariant,
    check_answered,
    check_empty,
    check_kept,
    check_lent,
    check_live,
    check_rest,
    check_settled,
)
from farcall.testing.simulated_workers import Outgoing, Parcel, Payload, SimulatedWorker
from farcall.testing.simulation import Step

_ABOUT_STANDING = (CreateRequest, ForkRequest, ForkAccepted, ForkRefused)
_KINDS = (CreateRequest, ForkRequest, ForkAccepted, ForkRefused, ChildAccepted, UserDeleted, Parcel)


class Bound(NamedTuple):
    """How often each of these may happen, at most."""

    forks: int = 2
    crashes: int = 1
    doubles: int = 1
    losses: int = 0
    acknowledgements: int = 0


class Packet(NamedTuple):
    """A message on the network, or lost from it. `taken`: its receiver has taken another copy.

    `kind` is there because named tuples of different kinds are equal if their fields are; a number, because the order
    of a set of packets, and with it what is found first, must not change from run to run.
    """

    source: Worker
    to: Worker
    number: int
    kind: int
    payload: Payload
    taken: bool


class _State(NamedTuple):
    workers: tuple[int, ...]  # positions in `Exploration._workers`
    under_way: int  # position in `Exploration._sets`, as the next
    lost: int
    untold: frozenset[tuple[Worker, Worker]]  # who has still to be told of whose death
    left: Bound


_Move: TypeAlias = tuple[Step, Packet | None]


class _Outcome(NamedTuple):
    worker: int
    outbox: tuple[Outgoing, ...]
    refused: bool
    took: bool


@dataclass(frozen=True)
class Explored:
    """How much was explored, and what was found: nothing, or the first broken invariant."""

    states: int
    transitions: int
    at_rest: int
    seconds: float
    broken: BrokenInvariant | None


class Exploration:
    """All that can happen within a bound, after a first step: `("call", 1, 0)`, `("make", 0)`, `("call", 0, 0)`."""

    def __init__(
        self,
        first: Step,
        bound: Bound = Bound(),  # noqa: B008 - it is immutable
        *,
        workers: int = 3,
        references: Callable[[Worker], References] = References,
        delivery: Callable[[], Delivery[Payload]] = Delivery,
    ) -> None:
        self._workers: list[SimulatedWorker] = []
        self._sound: list[bool] = []  # whether what concerns it alone was checked
        self._worker_numbers: dict[Hashable, int] = {}
        self._sets: list[frozenset[Packet]] = []
        self._set_numbers: dict[frozenset[Packet], int] = {}
        self._outcomes: dict[tuple[int, Step | Packet], _Outcome] = {}
        self._deaths_possible = bound.crashes
        made = [SimulatedWorker(me, references, delivery) for me in range(workers)]
        for worker in made:
            for peer in range(workers):
                worker.join(peer)
        empty = self._number_of_set(frozenset())
        start = _State(tuple(map(self._number_of_worker, made)), empty, empty, frozenset(), bound)
        self._first = first
        self._start = self._act(start, first, int(first[1]))

    def run(self, most: int | None = None) -> Explored:
        """Visits all states, or `most` of them; ends at the first broken invariant."""
        began = perf_counter()
        came_from: dict[_State, tuple[_State, Step] | None] = {self._start: None}
        level, transitions, at_rest = [self._start], 0, 0
        state, step = self._start, self._first
        broken: BrokenInvariant | None = None
        try:
            at_rest += self._check(state)
            while level and (most is None or len(came_from) < most):
                following: list[_State] = []
                for state in level:
                    for step, packet in self._moves(state):
                        transitions += 1
                        new = self._after(state, step, packet)
                        if new not in came_from:
                            came_from[new] = state, step
                            following.append(new)
                            at_rest += self._check(new)
                level = following
        except BrokenInvariant as found:
            broken = found
        except Exception as error:  # whatever a broken protocol raises, the schedule is what is wanted
            broken = BrokenInvariant("LAWFUL", f"{type(error).__name__}: {error}")
        if broken is not None:
            broken.schedule = [step]
            origin = came_from.get(state)
            while origin is not None:
                state, step = origin
                broken.schedule.append(step)
                origin = came_from[state]
            if broken.schedule[-1] != self._first:
                broken.schedule.append(self._first)
            broken.schedule.reverse()
        return Explored(len(came_from), transitions, at_rest, perf_counter() - began, broken)

    # What may happen next

    def _moves(self, state: _State) -> Iterator[_Move]:
        left = state.left
        for me, position in enumerate(state.workers):
            worker = self._workers[position]
            if not worker.alive:
                continue
            for number in worker.handles:
                yield ("drop", me, number), None
                if worker.handles[number].fork in worker.references.lent:
                    yield ("keep", me, number), None
                if left.forks and worker.can_pass(number):
                    for to in range(len(state.workers)):
                        yield ("pass", me, to, number), None
            if left.crashes:
                yield ("crash", me), None
        for pair in state.untold:
            yield ("tell", *pair), None
        for packet in self._sets[state.under_way]:
            yield ("deliver", *packet[:3]), packet
            if left.doubles and not packet.taken:
                yield ("again", *packet[:3]), packet
            if left.losses and not packet.taken:
                yield ("lose", *packet[:3]), packet
        for packet in self._sets[state.lost]:
            sender = self._workers[state.workers[packet.source]]
            if packet.number in dict(sender.delivery.unacknowledged(packet.to)):
                yield ("resend", *packet[:2]), packet
        yield from self._acknowledgements(state)

    def _acknowledgements(self, state: _State) -> Iterator[_Move]:
        """Those that confirm a remote call are free: it would wait for ever without them."""
        for me, position in enumerate(state.workers):
            for to, other in enumerate(state.workers):
                sender, receiver = self._workers[position], self._workers[other]
                if not (sender.alive and receiver.alive and sender.delivery.unacknowledged(to)):
                    continue
                if state.left.acknowledgements or self._confirms(sender, receiver):
                    yield ("ack", me, to), None

    @staticmethod
    def _confirms(sender: SimulatedWorker, receiver: SimulatedWorker) -> bool:
        """Whether the sender hears by an acknowledgement that a remote call of its own was taken."""
        upto = receiver.delivery.acknowledgement(sender.me)
        kept = sender.delivery.unacknowledged(receiver.me)
        return any(number <= upto and isinstance(payload, CreateRequest) for number, payload in kept)

    def _after(self, state: _State, step: Step, packet: Packet | None) -> _State:
        """The state after a move."""
        left = state.left
        match step, packet:
            case ("deliver", *_), Packet():
                return self._deliver(state, packet, keep=False)
            case ("again", *_), Packet():
                return self._deliver(state._replace(left=left._replace(doubles=left.doubles - 1)), packet, keep=True)
            case ("lose", *_), Packet():
                return self._lose(state, packet)
            case ("resend", *_), Packet():
                return self._resend(state, packet)
            case ("drop" | "keep", int(me), _), _:
                return self._act(state, step, me)
            case ("pass", int(me), _, _), _:
                return self._act(state._replace(left=left._replace(forks=left.forks - 1)), step, me)
            case ("ack", int(me), int(to)), _:
                sender, receiver = self._workers[state.workers[me]], self._workers[state.workers[to]]
                if not self._confirms(sender, receiver):
                    left = left._replace(acknowledgements=left.acknowledgements - 1)
                upto = receiver.delivery.acknowledgement(me)
                return self._act(state._replace(left=left), ("acknowledged", me, to, upto), me)
            case ("crash", int(me)), _:
                return self._crash(state, me, step)
            case ("tell", int(me), int(dead)), _:
                return self._tell(state, me, dead, step)
        raise AssertionError(step)

    # The world

    def _act(self, state: _State, action: Step | Packet, me: Worker) -> _State:
        """One worker does something, alone; what it wants sent is put under way."""
        outcome = self._outcome(state.workers[me], action)
        if outcome.refused and state.left.crashes == self._deaths_possible:
            raise BrokenInvariant("PROMISED", f"worker {me} refuses a handle, and nobody died")
        workers = (*state.workers[:me], outcome.worker, *state.workers[me + 1 :])
        under_way = state.under_way
        if outcome.outbox:
            sent = {
                Packet(me, to, number, _KINDS.index(type(payload)), payload, taken=False)
                for to, number, payload in outcome.outbox
                if self._workers[workers[to]].alive
            }
            under_way = self._number_of_set(self._sets[under_way] | sent)
        return _State(workers, under_way, state.lost, state.untold, state.left)

    def _deliver(self, state: _State, packet: Packet, keep: bool) -> _State:
        outcome = self._outcome(state.workers[packet.to], packet)
        if outcome.took and packet.taken:
            raise BrokenInvariant("D1", f"worker {packet.to} took message {packet.number} of {packet.source} twice")
        remaining = self._sets[state.under_way] - {packet}
        if keep:
            remaining |= {packet._replace(taken=True)}
        return self._act(state._replace(under_way=self._number_of_set(remaining)), packet, packet.to)

    def _lose(self, state: _State, packet: Packet) -> _State:
        return state._replace(
            under_way=self._number_of_set(self._sets[state.under_way] - {packet}),
            lost=self._number_of_set(self._sets[state.lost] | {packet}),
            left=state.left._replace(losses=state.left.losses - 1),
        )

    def _resend(self, state: _State, packet: Packet) -> _State:
        return state._replace(
            under_way=self._number_of_set(self._sets[state.under_way] | {packet}),
            lost=self._number_of_set(self._sets[state.lost] - {packet}),
        )

    def _crash(self, state: _State, me: Worker, step: Step) -> _State:
        others = [w for w, position in enumerate(state.workers) if w != me and self._workers[position].alive]
        dead = self._outcome(state.workers[me], step).worker
        return _State(
            (*state.workers[:me], dead, *state.workers[me + 1 :]),
            self._without(state.under_way, lambda packet: packet.to == me),
            self._without(state.lost, lambda packet: me in packet[:2]),
            frozenset(pair for pair in state.untold if pair[0] != me) | {(other, me) for other in others},
            state.left._replace(crashes=state.left.crashes - 1),
        )

    def _tell(self, state: _State, me: Worker, dead: Worker, step: Step) -> _State:
        before = state._replace(
            untold=state.untold - {(me, dead)},
            under_way=self._without(state.under_way, lambda packet: packet.source == dead and packet.to == me),
        )
        return self._act(before, step, me)

    def _without(self, packets: int, unwanted: Callable[[Packet], bool]) -> int:
        return self._number_of_set(frozenset(packet for packet in self._sets[packets] if not unwanted(packet)))

    # One worker

    def _outcome(self, position: int, action: Step | Packet) -> _Outcome:
        key = position, action
        outcome = self._outcomes.get(key)
        if outcome is None:
            worker = self._workers[position].copy()
            took = self._do(worker, action)
            refused = any(type(notice) is RefuseHandle for notice in worker.notices)
            outbox = tuple(worker.outbox)
            worker.outbox.clear()
            worker.notices.clear()
            outcome = self._outcomes[key] = _Outcome(self._number_of_worker(worker), outbox, refused, took)
        return outcome

    @staticmethod
    def _do(worker: SimulatedWorker, action: Step | Packet) -> bool:
        match action:
            case Packet(source, _, number, _, payload):
                return worker.receive(source, number, payload)
            case "make", _:
                worker.make()
            case "call", _, int(owner):
                worker.call(owner)
            case "pass", _, int(to), int(handle):
                worker.send((handle,), to)
            case "drop", _, int(handle):
                worker.drop(handle)
            case "keep", _, int(handle):
                worker.keep(handle)
            case "tell", _, int(dead):
                worker.lose(dead)
            case "crash", _:
                worker.alive = False
            case "acknowledged", _, int(peer), int(upto):
                worker.acknowledged(peer, upto)
        return False

    # The checks

    def _check(self, state: _State) -> bool:
        """Checks a state; whether nothing is under way in it."""
        workers = {me: self._workers[position] for me, position in enumerate(state.workers)}
        for position in state.workers:
            if not self._sound[position]:
                self._check_alone(self._workers[position])
                self._sound[position] = True
        check_live(workers)
        check_lent(workers)
        packets = [*self._sets[state.under_way], *self._sets[state.lost]]
        asked = {p.payload.fork for p in packets if not p.taken and isinstance(p.payload, _ABOUT_STANDING)}
        check_answered(workers, [worker for worker in workers.values() if worker.alive], asked)
        for packet in packets:
            sender = workers[packet.source]
            if not packet.taken and sender.alive and packet.to not in sender.lost:
                check_kept(sender, packet.to, (packet.number,))
        if state.untold or any(not packet.taken for packet in packets):
            return False
        living = [worker for worker in workers.values() if worker.alive]
        if any(worker.lent() for worker in living):
            return False
        if any(self._confirms(one, other) for one in living for other in living):
            return False
        check_rest(workers, deaths=self._deaths_possible - state.left.crashes)
        if not any(worker.handles for worker in workers.values() if worker.alive):
            check_empty(workers)
        return True

    @staticmethod
    def _check_alone(worker: SimulatedWorker) -> None:
        """What does not depend on the rest of the world, and so is checked once for each state of a worker."""
        check_settled(worker)
        if worker.alive:
            check_unchanged(worker.references)

    # Numbers for values

    def _number_of_worker(self, worker: SimulatedWorker) -> int:
        snapshot = worker.me, worker.snapshot() if worker.alive else None
        number = self._worker_numbers.get(snapshot)
        if number is None:
            number = self._worker_numbers[snapshot] = len(self._workers)
            self._workers.append(worker)
            self._sound.append(False)
        return number

    def _number_of_set(self, content: frozenset[Packet]) -> int:
        number = self._set_numbers.get(content)
        if number is None:
            number = self._set_numbers[content] = len(self._sets)
            self._sets.append(content)
        return number
