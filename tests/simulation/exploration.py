"""Visits every state that a small group of workers can reach: breadth first, each state once.

The group has three workers and one reference. A *bound* says how many forks are made, how many workers crash, how many
messages are doubled, lost and acknowledged, and how often the last worker claims a reference that it was not given.
Within the bound everything may happen at any moment: any handle is passed to any worker or dropped, messages arrive in
any order, any worker dies, and each survivor hears of it at a time of its own. All invariants are checked in each
state. Where nothing is under way, everything must be decided; where also no handle is left, every table must be empty.
Breadth first, so that the schedule of a finding is a shortest one.

States are compared by value (`ExploredWorker.snapshot`). What a worker does depends on its own state alone, so it is
computed once for each state and event of a worker. A state of the whole group is a handful of small numbers.

Two things are left out, and nothing is missed by it. Which worker owns and which creates is fixed, because the workers
are alike. Messages of a dead worker vanish when their receiver hears of the death, because it would drop them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, TypeAlias

from farcall.protocol.ids import Worker
from farcall.protocol.reference_messages import (
    ChildAccepted,
    CreateRequest,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    UserDeleted,
)
from simulation.explored_worker import ExploredWorker, Outgoing, PassedHandle, Payload
from simulation.forgeries import check_forgeries, claim
from simulation.illegal_events import check_unchanged
from simulation.invariants import (
    BrokenInvariant,
    check_answered,
    check_claims,
    check_empty,
    check_kept,
    check_live,
    check_rest,
    check_settled,
    check_unreported,
)
from simulation.schedules import Step

_KINDS = (CreateRequest, ForkRequest, ForkAccepted, ForkRefused, ChildAccepted, UserDeleted, PassedHandle)


WORKERS = 3


class Bound(NamedTuple):
    """How often each of these may happen, at most."""

    forks: int = 2
    crashes: int = 1
    doubles: int = 1
    losses: int = 0
    acknowledgements: int = 0
    claims: int = 0


class Packet(NamedTuple):
    """A message on the network, or lost from it. `taken`: its receiver has taken another copy.

    `kind` is there because named tuples of different types are equal if their fields are.
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
    ) -> None:
        self._workers: list[ExploredWorker] = []
        self._sound: list[bool] = []  # whether what concerns it alone was checked
        self._worker_numbers: dict[Hashable, int] = {}
        self._sets: list[frozenset[Packet]] = []
        self._in_order: list[list[Packet]] = []  # the same, always in the same order
        self._set_numbers: dict[frozenset[Packet], int] = {}
        self._outcomes: dict[tuple[int, Step | Packet], _Outcome] = {}
        self._deaths_possible = bound.crashes
        made = [ExploredWorker(me) for me in range(WORKERS)]
        for worker in made:
            for other in range(WORKERS):
                worker.add(other)
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
                if worker.handles[number].fork in worker.counts.unreported:
                    yield ("report", me, number), None
                if left.forks and worker.can_pass(number):
                    for to in range(len(state.workers)):
                        yield ("pass", me, to, number), None
            if left.crashes:
                yield ("crash", me), None
        forger = len(state.workers) - 1
        if left.claims and self._workers[state.workers[forger]].alive:
            owner, creator = self._workers[state.workers[0]], int(self._first[1])
            if owner.alive and claim(owner.counts, forger, creator) is not None:
                yield ("claim", forger, 0, creator), None
        for pair in sorted(state.untold):
            yield ("remove", *pair), None
        for packet in self._in_order[state.under_way]:
            yield ("deliver", *packet[:3]), packet
            if left.doubles and not packet.taken:
                yield ("again", *packet[:3]), packet
            if left.losses and not packet.taken:
                yield ("lose", *packet[:3]), packet
        for packet in self._in_order[state.lost]:
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
    def _confirms(sender: ExploredWorker, receiver: ExploredWorker) -> bool:
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
            case ("drop" | "report", int(me), _), _:
                return self._act(state, step, me)
            case ("pass", int(me), _, _), _:
                return self._act(state._replace(left=left._replace(forks=left.forks - 1)), step, me)
            case ("claim", _, int(me), _), _:
                return self._act(state._replace(left=left._replace(claims=left.claims - 1)), step, me)
            case ("ack", int(me), int(to)), _:
                sender, receiver = self._workers[state.workers[me]], self._workers[state.workers[to]]
                if not self._confirms(sender, receiver):
                    left = left._replace(acknowledgements=left.acknowledgements - 1)
                upto = receiver.delivery.acknowledgement(me)
                return self._act(state._replace(left=left), ("acknowledged", me, to, upto), me)
            case ("crash", int(me)), _:
                return self._crash(state, me, step)
            case ("remove", int(me), int(dead)), _:
                return self._remove(state, me, dead, step)
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

    def _remove(self, state: _State, me: Worker, dead: Worker, step: Step) -> _State:
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
            outbox = tuple(worker.outbox)
            worker.outbox.clear()
            outcome = self._outcomes[key] = _Outcome(self._number_of_worker(worker), outbox, worker.has_refused, took)
        return outcome

    @staticmethod
    def _do(worker: ExploredWorker, action: Step | Packet) -> bool:
        match action:
            case Packet(source, _, number, _, payload):
                return worker.receive(source, number, payload)
            case "make", _:
                worker.make()
            case "call", _, int(owner):
                worker.call(owner)
            case "pass", _, int(to), int(handle):
                worker.pass_on(handle, to)
            case "drop", _, int(handle):
                worker.drop(handle)
            case "report", _, int(handle):
                worker.report(handle)
            case "claim", int(forger), _, int(creator):
                worker.claim(forger, creator)
            case "remove", _, int(dead):
                worker.remove(dead)
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
        check_unreported(workers)
        check_answered(workers)
        living = [worker for worker in workers.values() if worker.alive]
        for sender in living:
            for receiver in living:
                check_kept(sender, receiver)
        packets = [*self._sets[state.under_way], *self._sets[state.lost]]
        if state.untold or any(not packet.taken for packet in packets):
            return False
        if any(worker.unreported() for worker in living):
            return False
        if any(self._confirms(one, other) for one in living for other in living):
            return False
        check_rest(workers, deaths=self._deaths_possible - state.left.crashes)
        if not any(worker.handles for worker in living):
            check_empty(workers)
        return True

    @staticmethod
    def _check_alone(worker: ExploredWorker) -> None:
        """Checks what does not depend on other workers, once for each state of a worker."""
        check_settled(worker)
        if worker.alive:
            check_claims(worker)
            check_unchanged(worker.counts)
            for forger in worker.counts.workers:
                if forger != worker.me:
                    check_forgeries(worker.counts, forger)

    # Numbers for values

    def _number_of_worker(self, worker: ExploredWorker) -> int:
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
            self._in_order.append(sorted(content, key=lambda packet: (*packet[:4], packet.taken)))
        return number
