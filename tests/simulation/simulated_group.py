"""A group of many workers in one process: the membership protocol in virtual time, under joins, leaves and failures.

`SimulatedGroup` is a network of `Membership` machines, a clock that jumps from event to event, and a store that gives
out numbers and says to whoever joins who is there. Messages take a while (`latency`), some are lost (`loss`), all of
those between two sides of a partition are. Workers fail in three ways: `crash` (the process ends: its address refuses
connections, and those who were connected to it notice), `freeze` (it stops, and may go on later with everything that
has come meanwhile), and `vanish` (its host is gone: silence, for ever).

What is checked, by name, while it runs (`BrokenInvariant`):
- ONCE: a worker hears of another one's coming and going once each, in this order.
- FAIR: nobody is taken for dead who was not out of reach, of all or of somebody, for longer than `harmless` seconds,
  the patience unless told otherwise; one interval less where messages are lost by chance. (What those believe who are
  cut off, or are taken for dead themselves, is their own affair, until others believe it.)
- HEARD: nobody declares a worker dead while a third one hears both. To hear each other means that both are running and
  no direction of the link between them was cut, for two intervals. In groups in which not all can be asked
  (`STRANGERS`), the third is one that was heard of late. Not checked where messages are lost by chance.
- QUIET: messages come to an end.

and at `settle`:
- CONVERGED: all who are there agree on who is there, which is the truth, within the time that is given.
- BOUNDED: nothing is kept of the gone but their numbers, in no more ranges than there are members and gaps.

Everything is decided by the seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple

from farcall.protocol.ids import Worker
from farcall.protocol.membership import INTERVAL, PATIENCE, STRANGERS, Membership
from farcall.protocol.membership_messages import (
    Compare,
    Effect,
    Expelled,
    Member,
    MemberJoined,
    MemberLeft,
    MemberLost,
    News,
    SendMessage,
    Wanted,
    decode,
    encode,
)
from simulation.invariants import BrokenInvariant

SPREADING = (News, Compare, Wanted)
"""The messages that a change costs; pings and their like go on whether something changes or not."""


class SimulatedMember:
    """One worker: its machine, what its program was told, and how it fares."""

    __slots__ = (
        "alive", "frozen", "inbox", "known", "late_tick", "machine", "out_of_reach_since", "runs_since", "was_told",
    )  # fmt: skip

    def __init__(self, machine: Membership, now: float) -> None:
        self.machine = machine
        self.runs_since = now
        self.alive = True
        self.frozen = False
        self.inbox: list[tuple[Worker, Any]] = []  # what came while it was frozen
        self.late_tick = False
        self.out_of_reach_since: float | None = None
        self.known: set[Worker] = set()
        self.was_told: set[Worker] = set()  # of whose end

    @property
    def is_there(self) -> bool:
        """Whether it belongs to the group: the others should know it, and it them."""
        return self.alive and not self.machine.is_out


class Store:
    """Gives out numbers, and knows who took one and did not leave: some of them dead, and not noticed yet."""

    def __init__(self) -> None:
        self.members: dict[Worker, Member] = {}
        self._last = 0

    def join(self, name: str, host: str) -> tuple[Member, tuple[Member, ...]]:
        """A new member, and those who are there."""
        self._last += 1
        others = tuple(self.members.values())
        member = Member(self._last, name, self._last - 1, host, (f"tcp://{host}:{self._last}",))
        self.members[member.number] = member
        return member, others

    def skip(self) -> None:
        """Gives out a number to somebody who dies with it, unheard of."""
        self._last += 1


class Settled(NamedTuple):
    """How the group came to agree."""

    seconds: float
    messages: int
    """Those that a change costs: `SPREADING`."""


class SimulatedGroup:
    """A group in virtual time. Nothing happens but in `run`, `settle` and the calls that make something happen."""

    def __init__(
        self,
        seed: int = 0,
        *,
        latency: tuple[float, float] = (0.0005, 0.02),
        loss: float = 0.0,
        interval: float = INTERVAL,
        patience: float = PATIENCE,
        harmless: float | None = None,
        as_bytes: bool = False,
        machine: Callable[..., Membership] = Membership,
    ) -> None:
        self.now = 0.0
        self.workers: dict[Worker, SimulatedMember] = {}
        self.store = Store()
        self.sent: Counter[type] = Counter()
        self.loss = loss
        self.expelled: list[Worker] = []
        self.declared: dict[Worker, float] = {}
        """When each of the lost was first taken for dead by somebody who is not cut off."""
        self._random = random.Random(seed)
        self._latency = latency
        self._interval, self._patience = interval, patience
        self._harmless = patience if harmless is None else harmless
        self._as_bytes = as_bytes
        self._machine = machine
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._events = 0
        self._decides = False  # what is told now was found out by silence, not heard from others
        self._sides: dict[Worker, int] = {}  # of a partition; 0 for whoever is not named
        self._cut_links: dict[tuple[Worker, Worker], float] = {}  # since when
        self._mended: dict[tuple[Worker, Worker], float] = {}  # when links that were cut worked again
        self._joined_again = -inf  # ... and the two sides of a partition

    # Who is there

    def there(self) -> list[Worker]:
        """The members of the group, in truth. Frozen ones are, until they are taken for dead."""
        return [number for number, worker in self.workers.items() if worker.is_there]

    def join(
        self, name: str | None = None, *, host: str | None = None, knowing: Iterable[Worker] | None = None
    ) -> Worker:
        """A worker joins; gives its number. `knowing`: only these are in what the store tells it."""
        name = f"worker{self.store._last}" if name is None else name
        member, others = self.store.join(name, host or f"host{self.store._last // 8}")
        if knowing is not None:
            others = tuple(self.store.members[number] for number in knowing)
        self._start(member, others, announce=True)
        return member.number

    def start_fixed(self, count: int) -> None:
        """So many workers that all know each other from the start."""
        members = [self.store.join(f"worker{rank}", f"host{rank // 8}")[0] for rank in range(count)]
        for member in members:
            self._start(member, tuple(members), announce=False)

    def _start(self, member: Member, others: tuple[Member, ...], announce: bool) -> None:
        pick = self._random.random
        machine = self._machine(member, lambda n: int(pick() * n), interval=self._interval, patience=self._patience)
        self.workers[member.number] = SimulatedMember(machine, self.now)
        self._act(member.number, machine.started(others, announce))
        self._at(self.now + self._interval * self._random.random(), self._tick, member.number)

    def leave(self, number: Worker) -> None:
        """It says good-bye, and its process ends a little later."""
        self.store.members.pop(number, None)
        self._act(number, self.workers[number].machine.leave_wanted())
        self._at(self.now + 0.5, self._end, number)

    def crash(self, number: Worker) -> None:
        """Its process ends without a word. Those who have a connection to it see it closed."""
        self._end(number)
        for other, worker in self.workers.items():
            if worker.alive and number in worker.machine.watching.watched:
                self._at(self.now + self._delay(), self._refused, other, number)

    def vanish(self, number: Worker) -> None:
        """Its host is gone: nobody hears anything of it any more."""
        self.freeze(number, None)

    def freeze(self, number: Worker, seconds: float | None) -> None:
        """It stops for so long; None: for ever."""
        worker = self.workers[number]
        worker.frozen = True
        worker.out_of_reach_since = self.now
        if seconds is not None:
            self._at(self.now + seconds, self._thaw, number)

    def part(self, side: Iterable[Worker]) -> None:
        """Cuts these, the smaller side, off from all others."""
        self._sides = dict.fromkeys(side, 1)
        for number in self._sides:
            self.workers[number].out_of_reach_since = self.now

    def cut(self, one: Worker, other: Worker, *, both_ways: bool = True) -> None:
        """Cuts the link between two, or only what the first one sends to the second."""
        self._cut_links.setdefault((one, other), self.now)
        if both_ways:
            self._cut_links.setdefault((other, one), self.now)

    def heal(self) -> None:
        """Ends the partition, and mends all links."""
        self._mended.update(dict.fromkeys(self._cut_links, self.now))
        if self._sides:
            self._joined_again = self.now
        for number in self._sides:  # in a round at the latest they have been heard
            self._at(self.now + self._interval, self._reached, number)
        self._sides = {}
        self._cut_links = {}

    def _reached(self, number: Worker) -> None:
        if not self.workers[number].frozen and number not in self._sides:
            self.workers[number].out_of_reach_since = None

    def _end(self, number: Worker) -> None:
        worker = self.workers[number]
        worker.alive = False
        worker.inbox.clear()

    def _thaw(self, number: Worker) -> None:
        worker = self.workers[number]
        worker.frozen = False
        worker.out_of_reach_since = None
        worker.runs_since = self.now
        if not worker.alive:
            return
        if worker.late_tick:  # before anything that waits for it is read: the worst order
            worker.late_tick = False
            self._tick(number)
        inbox, worker.inbox = worker.inbox, []
        for sender, message in inbox:
            self._deliver(number, sender, message)

    # Time

    def run(self, seconds: float) -> None:
        """Lets so much time pass. Raises `BrokenInvariant`."""
        until = self.now + seconds
        heap, most = self._heap, self._events + int(200 * (len(self.workers) + 1) * (seconds + 1))
        while heap and heap[0][0] <= until:
            self.now, _, what, arguments = heappop(heap)
            what(*arguments)
            if self._events > most:
                raise BrokenInvariant("QUIET", f"{len(self.workers)} workers send each other ever more messages")
        self.now = until

    def settle(self, within: float, step: float = 0.05) -> Settled:
        """Lets time pass until all agree. Raises `BrokenInvariant` if that takes longer."""
        began, before = self.now, self.spreading_messages()
        while not self.agrees():
            if self.now - began >= within:
                raise BrokenInvariant("CONVERGED", f"after {within:g} s {self._disagreement()}")
            self.run(step)
        self._check_bounded()
        return Settled(self.now - began, self.spreading_messages() - before)

    def spreading_messages(self) -> int:
        """How many messages were sent so far that changes cost."""
        return sum(self.sent[kind] for kind in SPREADING)

    def agrees(self) -> bool:
        """Whether all who are there know exactly those who are there."""
        there = [worker.machine for worker in self.workers.values() if worker.is_there and not worker.frozen]
        if len({machine.members.digest for machine in there}) > 1:
            return False
        return not there or there[0].members.here.keys() == set(self._expected())

    def _expected(self) -> list[Worker]:
        """Who should be there for all: not those that stopped for good."""
        return [number for number, worker in self.workers.items() if worker.is_there and not worker.frozen]

    def _disagreement(self) -> str:
        truth = set(self._expected())
        wrong = [
            f"worker {number} {'misses ' + str(sorted(truth - here)[:5]) if truth - here else ''}"
            f"{' keeps ' + str(sorted(here - truth)[:5]) if here - truth else ''}"
            for number in truth
            if (here := set(self.workers[number].machine.members.here)) != truth
        ]
        return f"{len(wrong)} of {len(truth)} workers are wrong: {'; '.join(wrong[:3]) or 'their gone ones differ'}"

    def _check_bounded(self) -> None:
        gaps = self.store._last - len(self.workers)
        for number in self._expected():
            machine = self.workers[number].machine
            ranges = len(machine.members.gone.pairs())
            if ranges > len(machine.members.here) + gaps + 1 or len(machine.members.names) > len(machine.members.here):
                raise BrokenInvariant("BOUNDED", f"worker {number} keeps {ranges} ranges of gone workers")

    def _at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        self._events += 1
        heappush(self._heap, (when, self._events, what, arguments))

    # What happens

    def _tick(self, number: Worker) -> None:
        worker = self.workers[number]
        if not worker.alive or worker.machine.is_out:
            return
        if worker.frozen:
            worker.late_tick = True
            return
        self._decides = True
        self._act(number, worker.machine.ticked(self.now))
        self._decides = False
        self._at(worker.machine.next_tick(), self._tick, number)

    def _deliver(self, to: Worker, sender: Worker, message: Any) -> None:
        worker = self.workers[to]
        if worker.frozen:
            worker.inbox.append((sender, message))
        elif worker.alive:
            self._act(to, worker.machine.message_received(sender, decode(message) if self._as_bytes else message))
        else:
            self._at(self.now + self._delay(), self._refused, sender, to)

    def _refused(self, number: Worker, by: Worker) -> None:
        worker = self.workers[number]
        if worker.alive and not worker.frozen and not self._is_cut(number, by):
            self._act(number, worker.machine.peer_unreachable(by))

    def _act(self, number: Worker, effects: list[Effect]) -> None:
        for effect in effects:
            if type(effect) is SendMessage:
                to, message = effect
                self.sent[type(message)] += 1
                if (self.loss and self._random.random() < self.loss) or self._is_cut(number, to):
                    continue
                content = encode(message) if self._as_bytes else message
                self._at(self.now + self._delay(), self._deliver, to, number, content)
            else:
                self._told(number, effect)

    def _told(self, number: Worker, effect: Effect) -> None:
        worker = self.workers[number]
        if isinstance(effect, MemberJoined):
            other = effect.member.number
            if other in worker.known or other in worker.was_told:
                raise BrokenInvariant("ONCE", f"worker {number} hears of the coming of {other} again")
            worker.known.add(other)
        elif isinstance(effect, MemberLeft | MemberLost):
            other = effect.member.number
            if other not in worker.known:
                raise BrokenInvariant("ONCE", f"worker {number} hears of the end of {other}, of whom it did not know")
            worker.known.remove(other)
            worker.was_told.add(other)
            if isinstance(effect, MemberLost):
                self.store.members.pop(other, None)
                if other not in self.declared and number not in self.declared and not self._sides.get(number):
                    if self._decides and not self.loss:
                        self._check_heard(number, effect.member)
                    self.declared[other] = self.now
                    self._check_fair(number, effect.member)
        elif isinstance(effect, Expelled):
            self.expelled.append(number)
            self.store.members.pop(number, None)

    def _check_fair(self, by: Worker, member: Member) -> None:
        lost = self.workers[member.number]
        since = lost.out_of_reach_since
        # An answer that was lost makes the silence that a watcher sees longer than it was.
        harmless = self._harmless - (self._interval if self.loss else 0.0)
        if not lost.is_there or (since is not None and self.now - since > harmless):
            return
        if any(member.number in link and self.now - at > self._harmless for link, at in self._cut_links.items()):
            return  # some do not hear it; whether others do is for HEARD
        if any(other.machine.me.name == member.name for n, other in self.workers.items() if n > member.number):
            return  # another one has its name
        raise BrokenInvariant("FAIR", f"worker {by} takes worker {member.number} for dead, which lives")

    def _check_heard(self, by: Worker, member: Member) -> None:
        lost = member.number
        if not self._runs(lost):
            return
        asked = self.workers if len(self.workers) <= STRANGERS else self.workers[by].machine.watching.heard_of_late()
        for third in asked:
            if self._runs(third) and self._hear_each_other(by, third) and self._hear_each_other(third, lost):
                raise BrokenInvariant(
                    "HEARD", f"worker {by} declares worker {lost} dead, and worker {third} hears both"
                )

    def _runs(self, number: Worker) -> bool:
        """Whether it was there, and not frozen, for two intervals, and nobody takes it for dead."""
        worker = self.workers[number]
        is_running = worker.is_there and not worker.frozen and number not in self.declared
        return is_running and worker.runs_since <= self.now - 2 * self._interval

    def _hear_each_other(self, one: Worker, other: Worker) -> bool:
        """Whether nothing was cut between two for two intervals."""
        since = self.now - 2 * self._interval
        return one != other and not any(
            self._is_cut(*link) or max(self._joined_again, self._mended.get(link, -inf)) > since
            for link in ((one, other), (other, one))
        )

    def _delay(self) -> float:
        least, most = self._latency
        return least + (most - least) * self._random.random()

    def _is_cut(self, one: Worker, other: Worker) -> bool:
        if self._cut_links and (one, other) in self._cut_links:
            return True
        return bool(self._sides) and self._sides.get(one, 0) != self._sides.get(other, 0)
