"""Many workers in one process, on a network that does its worst: the reference protocol under every fault.

`SimulatedNetwork` is a world of workers, each with a `References`, a `Delivery` and a small program. Everything that
happens is a *step*, a tuple of a word and numbers. The program's steps:

    make w            worker w gives a value a reference        call w o h ...   w calls remote at o, with handles h ...
                                                                ask w o h ...    ... and will be told of the value
    pass w t h ...    w sends its handles h ... to t            use w t h ...    ... and t drops them on arrival
    draft w t h       h goes into a message never to be sent    abandon w n      ... which turns out so (n: its fork)
    drop w h          w lets go of its handle h                 keep w h         ... has it for longer than a moment

the network's:

    deliver s d n     message n of s to d arrives               again s d n      ... and a copy of it stays under way
    deliver s d n ... several arrive at once                    answer s d n     s is told that d has taken its call n
    lose s d n        its copy is lost                          resend s d       s sends again what d has not confirmed
    ack s d           d acknowledges to s                       cut a b, heal a b    the link between a and b

and the machines':

    crash w           worker w dies                             tell w p         w is told of p's death
    restart           a worker comes under a new number         greet w p        w is told that p is there
    illegal w k       w gets the k-th kind of illegal input

and, of workers that put something off, their chores (`SimulatedWorker.chores`; those of `simulated_books.py`, which
have the book of a real agent).

The model. Workers stop when they crash, and say nothing afterwards; whoever is declared lost is dead. Each survivor is
told in its own time, before or after messages of the dead that are still under way, and takes none of them from then
on. A cut link loses what is on it, and that is no loss of a worker. Messages, users' messages with handles included,
go through `Delivery`, and so arrive once while both ends live. Acknowledgements ride on messages, late ones included.
An answer goes with the connection on which its call came: a cut link loses it.

The invariants are checked after every step (`invariants.py`). `finish` lets everything come to rest, drops all handles,
and checks that nothing is left. A failing schedule is in the `BrokenInvariant` and replays with `replay`; the steps
that make no sense any more are passed over, so that a schedule can be cut shorter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias, TypeVar

from farcall.protocol.ids import ForkId, Worker
from farcall.protocol.reference_messages import (
    ConfirmHandle,
    CreateRequest,
    ForkAccepted,
    ForkRefused,
    ForkRequest,
    RefuseHandle,
    ReleaseValue,
)
from farcall.testing.illegal_events import check_unchanged
from farcall.testing.invariants import (
    BrokenInvariant,
    check_answered,
    check_empty,
    check_kept,
    check_lent,
    check_live,
    check_not_released,
    check_rest,
    check_settled,
)
from farcall.testing.simulated_workers import NewWorker, Payload, SimulatedWorker

T = TypeVar("T")
Step: TypeAlias = tuple[str | int, ...]
Key: TypeAlias = tuple[Worker, Worker, int]
"""A message: its sender, its receiver, its number."""


class Choice(Protocol):
    """Takes one of several."""

    def __call__(self, among: list[T], /) -> T: ...


_ABOUT_STANDING = (CreateRequest, ForkRequest, ForkAccepted, ForkRefused)


class SimulatedNetwork:
    """A world of workers. `step` makes one thing happen; `finish` lets it end well."""

    def __init__(self, workers: int = 4, *, new_worker: NewWorker = SimulatedWorker) -> None:
        self._new_worker = new_worker
        self.workers: dict[Worker, SimulatedWorker] = {}
        self.alive: list[SimulatedWorker] = []
        self.under_way: dict[Key, tuple[Payload, int]] = {}
        """Messages of which there is a copy on the network, with the acknowledgement that rides on each."""
        self.not_taken: dict[tuple[Worker, Worker], dict[int, Payload]] = {}
        """Messages that their receivers have not taken, copies on the network or not."""
        self.answers: list[Key] = []
        """Remote calls that were taken, and whose callers are about to hear that."""
        self.cuts: set[tuple[Worker, Worker]] = set()
        self.untold: list[tuple[Worker, Worker]] = []
        """Who has still to be told of whose death."""
        self.ungreeted: list[tuple[Worker, Worker]] = []
        """Who has still to be told that who is there."""
        self.deaths = 0
        self.schedule: list[Step] = []
        self._taken: set[Key] = set()
        self._told: set[Key] = set()
        self._asked: Counter[ForkId] = Counter()
        self._others_may_wait = False
        for me in range(workers):
            self.workers[me] = worker = new_worker(me)
            self.alive.append(worker)
            for peer in range(workers):
                worker.join(peer)

    # Steps

    def step(self, *step: str | int) -> bool:
        """Makes it happen and checks every invariant; False if it cannot happen now. Raises `BrokenInvariant`."""
        self.schedule.append(step)
        try:
            act = _STEPS.get(step[0])
            acted = act(self, *step[1:]) if act is not None else self._chore(*step)
            if acted is None:
                self.schedule.pop()
                return False
            self._settle(acted)
        except BrokenInvariant as broken:
            broken.schedule = self.schedule
            raise
        except Exception as error:  # whatever a broken protocol raises, the schedule is what is wanted
            unlawful = BrokenInvariant("LAWFUL", f"{show([step])!r} raised {type(error).__name__}: {error}")
            unlawful.schedule = self.schedule
            raise unlawful from error
        return True

    def _settle(self, acted: SimulatedWorker) -> None:
        """Sends what the worker wants sent, and checks what its step can have broken."""
        if acted.outbox:
            self._empty_outbox(acted)
        if acted.notices:
            for notice in acted.notices:
                if isinstance(notice, ReleaseValue):
                    check_live(self.workers)
                elif isinstance(notice, ConfirmHandle):
                    check_not_released(self.workers, acted.me, notice.reference)
                elif isinstance(notice, RefuseHandle) and not self.deaths:
                    raise BrokenInvariant("PROMISED", f"worker {acted.me} refuses {notice.reference}, and nobody died")
            acted.notices.clear()
            check_answered(self.workers, self.alive, self._asked)
        elif self._others_may_wait or not acted.alive:
            check_answered(self.workers, self.alive, self._asked)
        elif acted.references.held:
            check_answered(self.workers, (acted,), self._asked)  # what others hold is as it was
        self._others_may_wait = False
        check_lent(self.workers)
        if acted.lost:
            check_settled(acted)
        acted.check()

    def _empty_outbox(self, sender: SimulatedWorker) -> None:
        me = sender.me
        for to, number, payload in sender.outbox:
            if isinstance(payload, _ABOUT_STANDING):
                self._asked[payload.fork] += 1
            if self.workers[to].alive:
                self.not_taken.setdefault((me, to), {})[number] = payload
                if (me, to) not in self.cuts:
                    self.under_way[me, to, number] = payload, sender.delivery.acknowledgement(to)
        sender.outbox.clear()

    def _living(self, number: Worker) -> SimulatedWorker | None:
        worker = self.workers.get(number)
        return worker if worker is not None and worker.alive else None

    # The program's

    def _make(self, me: Worker) -> SimulatedWorker | None:
        if worker := self._living(me):
            worker.make()
        return worker

    def _call(self, me: Worker, owner: Worker, *handles: int, told: bool = False) -> SimulatedWorker | None:
        worker = self._living(me)
        if worker is None or owner not in self.workers or owner in worker.unknown:
            return None
        if not all(map(worker.can_pass, handles)):
            return None
        number = worker.call(owner, handles, told)
        if told and number:
            self._told.add((me, owner, number))
        return worker

    def _ask(self, me: Worker, owner: Worker, *handles: int) -> SimulatedWorker | None:
        return self._call(me, owner, *handles, told=True)

    def _pass(self, me: Worker, to: Worker, *handles: int, brief: bool = False) -> SimulatedWorker | None:
        worker = self._living(me)
        if worker is None or to not in self.workers or to in worker.unknown:
            return None
        if not handles or not all(map(worker.can_pass, handles)):
            return None
        worker.send(handles, to, brief)
        return worker

    def _use(self, me: Worker, to: Worker, *handles: int) -> SimulatedWorker | None:
        return self._pass(me, to, *handles, brief=True)

    def _draft(self, me: Worker, to: Worker, handle: int) -> SimulatedWorker | None:
        worker = self._living(me)
        if worker is None or to not in self.workers or to in worker.unknown or not worker.can_pass(handle):
            return None
        worker.draft(handle, to)
        return worker

    def _abandon(self, me: Worker, number: int) -> SimulatedWorker | None:
        worker, child = self._living(me), ForkId(me, number)
        if worker is None or child not in worker.drafts:
            return None
        worker.abandon(child)
        return worker

    def _drop(self, me: Worker, handle: int) -> SimulatedWorker | None:
        worker = self._living(me)
        if worker is None or handle not in worker.handles:
            return None
        worker.drop(handle)
        return worker

    def _keep(self, me: Worker, handle: int) -> SimulatedWorker | None:
        worker = self._living(me)
        if worker is None or handle not in worker.lent():
            return None
        worker.keep(handle)
        return worker

    def _chore(self, word: Any, me: Any, *more: Any) -> SimulatedWorker | None:
        worker = self._living(me)
        return worker if worker is not None and worker.do_chore(word, *more) else None

    def _illegal(self, me: Worker, kind: int) -> SimulatedWorker | None:
        if worker := self._living(me):
            check_unchanged(worker.references, kind, worker.handle_illegal)
        return worker

    # The network's

    def _deliver(self, source: Worker, to: Worker, *numbers: int, keep: bool = False) -> SimulatedWorker | None:
        upto = 0
        messages: list[tuple[int, Payload]] = []
        for number in numbers:
            if (found := self.under_way.get((source, to, number))) is not None:
                messages.append((number, found[0]))
                upto = max(upto, found[1])
                if not keep:
                    del self.under_way[source, to, number]
        if not messages:
            return None
        receiver = self.workers[to]
        for number, payload in receiver.hear(source, messages, upto):
            self._note_taken((source, to, number), payload)
        if upto:
            self._check_kept(receiver, source)
        return receiver

    def _note_taken(self, key: Key, payload: Payload) -> None:
        source, to, number = key
        if key in self._taken:
            raise BrokenInvariant("D1", f"worker {to} took message {number} of worker {source} twice")
        self._taken.add(key)
        del self.not_taken[source, to][number]
        if isinstance(payload, _ABOUT_STANDING):
            self._others_may_wait = True
            self._asked[payload.fork] -= 1
            if not self._asked[payload.fork]:
                del self._asked[payload.fork]
        if key in self._told and (source, to) not in self.cuts and self.workers[source].alive:
            self.answers.append(key)

    def _again(self, source: Worker, to: Worker, *numbers: int) -> SimulatedWorker | None:
        return self._deliver(source, to, *numbers, keep=True)

    def _answer(self, me: Worker, owner: Worker, number: int) -> SimulatedWorker | None:
        if (me, owner, number) not in self.answers:
            return None
        self.answers.remove((me, owner, number))
        self.workers[me].answered(owner, number)
        return self.workers[me]

    def _lose(self, source: Worker, to: Worker, number: int) -> SimulatedWorker | None:
        return self.workers[to] if self.under_way.pop((source, to, number), None) is not None else None

    def _resend(self, source: Worker, to: Worker) -> SimulatedWorker | None:
        sender, receiver = self._living(source), self._living(to)
        if sender is None or receiver is None or (source, to) in self.cuts:
            return None
        upto = sender.delivery.acknowledgement(to)
        for number, payload in sender.unacknowledged(to):
            self.under_way[source, to, number] = payload, upto
        self._empty_outbox(sender)  # with it went what had been put off
        return sender

    def _ack(self, source: Worker, to: Worker) -> SimulatedWorker | None:
        sender, receiver = self._living(source), self._living(to)
        if sender is None or receiver is None or (source, to) in self.cuts:
            return None
        sender.acknowledged(to, receiver.acknowledgement(source))
        self._check_kept(sender, to)
        return sender

    def _check_kept(self, sender: SimulatedWorker, to: Worker) -> None:
        if (not_taken := self.not_taken.get((sender.me, to))) and to not in sender.lost:
            check_kept(sender, to, not_taken)

    def _cut(self, one: Worker, other: Worker) -> SimulatedWorker | None:
        worker, peer = self._living(one), self._living(other)
        if worker is None or peer is None or worker is peer or (one, other) in self.cuts:
            return None
        self.cuts |= {(one, other), (other, one)}
        for key in [key for key in self.under_way if key[:2] in self.cuts]:
            del self.under_way[key]
        self.answers = [key for key in self.answers if key[:2] not in self.cuts]
        return worker

    def _heal(self, one: Worker, other: Worker) -> SimulatedWorker | None:
        if (one, other) not in self.cuts:
            return None
        self.cuts -= {(one, other), (other, one)}
        self._resend(one, other)
        self._resend(other, one)
        return self.workers[one]

    # The machines'

    def _crash(self, me: Worker) -> SimulatedWorker | None:
        worker = self._living(me)
        if worker is None:
            return None
        worker.alive = False
        self.alive.remove(worker)
        self.deaths += 1
        for key in [key for key in self.under_way if key[1] == me]:
            del self.under_way[key]
        for (_, to), messages in self.not_taken.items():
            if to == me:
                messages.clear()
        self.answers = [key for key in self.answers if key[0] != me]
        self.untold = [(who, dead) for who, dead in self.untold if who != me]
        self.ungreeted = [pair for pair in self.ungreeted if pair[0] != me]
        self.untold += [(other.me, me) for other in self.alive]
        return worker

    def _tell(self, me: Worker, dead: Worker) -> SimulatedWorker | None:
        if (me, dead) not in self.untold:
            return None
        if (me, dead) in self.ungreeted:
            self._greet(me, dead)
        self.untold.remove((me, dead))
        self._others_may_wait = True  # the creator of what was noted may be the dead one
        worker = self.workers[me]
        worker.lose(dead)
        if link := self.not_taken.get((dead, me)):
            link.clear()
        return worker

    def _restart(self) -> SimulatedWorker | None:
        if not self.deaths or not self.alive:
            return None
        me = len(self.workers)
        worker = self._new_worker(me)
        for peer, other in self.workers.items():
            if other.alive:
                worker.join(peer)
                other.unknown.add(me)
                self.ungreeted.append((peer, me))
            else:
                worker.lost.add(peer)
        worker.join(me)
        self.workers[me] = worker
        self.alive.append(worker)
        return worker

    def _greet(self, me: Worker, newcomer: Worker) -> SimulatedWorker | None:
        if (me, newcomer) not in self.ungreeted:
            return None
        self.ungreeted.remove((me, newcomer))
        self.workers[me].join(newcomer)
        return self.workers[me]

    # The end

    def rest(self, choose: Choice = lambda steps: steps[0]) -> None:
        """Lets everything that is under way arrive, in an order of choice, and checks that all is decided."""
        for _ in range(10_000):
            chores = self.chores()
            if self.untold or self.ungreeted or self.cuts:
                step = choose(self._open_ends() + chores)
            elif self.under_way and (not chores or choose([True, False])):
                step = "deliver", *choose(list(self.under_way))
            elif self.answers:
                step = "answer", *choose(self.answers)
            elif chores:
                step = choose(chores)
            elif drafts := [(worker.me, child.number) for worker in self.alive for child in worker.drafts]:
                step = "abandon", *choose(drafts)
            elif lent := [(worker.me, handle) for worker in self.alive for handle in worker.lent()]:
                step = "keep", *choose(lent)
            elif lost := [link for link, messages in self.not_taken.items() if messages]:
                step = "resend", *choose(lost)
            elif silent := [
                (worker.me, peer) for worker in self.alive for peer in worker.references.peers
                if worker.creations_to_confirm(peer)
            ]:  # fmt: skip
                step = "ack", *choose(silent)
            else:
                break
            self.step(*step)
        else:
            self._fail("PROMISED", f"it never comes to rest: {show([step])} again and again")
        try:
            check_rest(self.workers, self.deaths)
        except BrokenInvariant as broken:
            broken.schedule = self.schedule
            raise

    def chores(self) -> list[Step]:
        """What the workers have put off."""
        return [chore for worker in self.alive for chore in worker.chores()]

    def _open_ends(self) -> list[Step]:
        ends: list[Step] = [("tell", *pair) for pair in self.untold]
        ends += [("greet", *pair) for pair in self.ungreeted]
        ends += [("heal", *pair) for pair in sorted(self.cuts) if pair[0] < pair[1]]
        ends += [("deliver", *key) for key in self.under_way]
        return ends

    def finish(self, choose: Choice = lambda steps: steps[0]) -> None:
        """Comes to rest, drops all handles, comes to rest again, and checks that nothing is left."""
        self.rest(choose)
        drops: list[Step] = [("drop", worker.me, handle) for worker in self.alive for handle in worker.handles]
        while drops:
            drop = choose(drops)
            drops.remove(drop)
            self.step(*drop)
        self.rest(choose)
        for worker in self.alive:
            for peer in worker.references.peers:
                worker.acknowledged(peer, self.workers[peer].acknowledgement(worker.me))
            if not worker.delivery.is_quiet():
                self._fail("D2", f"worker {worker.me} keeps messages that all have been taken")
        try:
            check_empty(self.workers)
            for worker in self.alive:
                worker.check(at_the_end=True)
        except BrokenInvariant as broken:
            broken.schedule = self.schedule
            raise

    def _fail(self, invariant: str, what: str) -> None:
        broken = BrokenInvariant(invariant, what)
        broken.schedule = self.schedule
        raise broken


# On the class, not bound: thousands of networks are made in a second.
_STEPS: dict[str | int, Callable[..., SimulatedWorker | None]] = {
    "make": SimulatedNetwork._make, "call": SimulatedNetwork._call, "pass": SimulatedNetwork._pass,
    "use": SimulatedNetwork._use, "draft": SimulatedNetwork._draft, "abandon": SimulatedNetwork._abandon,
    "drop": SimulatedNetwork._drop, "keep": SimulatedNetwork._keep,
    "deliver": SimulatedNetwork._deliver, "again": SimulatedNetwork._again,
    "lose": SimulatedNetwork._lose, "resend": SimulatedNetwork._resend, "ack": SimulatedNetwork._ack,
    "cut": SimulatedNetwork._cut, "heal": SimulatedNetwork._heal, "crash": SimulatedNetwork._crash,
    "tell": SimulatedNetwork._tell, "restart": SimulatedNetwork._restart, "greet": SimulatedNetwork._greet,
    "illegal": SimulatedNetwork._illegal, "ask": SimulatedNetwork._ask, "answer": SimulatedNetwork._answer,
}  # fmt: skip


def show(schedule: Iterable[Step]) -> str:
    """A schedule as text, one that `parse` reads."""
    return "; ".join(" ".join(map(str, step)) for step in schedule)


def parse(text: str) -> list[Step]:
    """A schedule from its text. Raises `ValueError` for what is none."""
    schedule: list[Step] = []
    for part in filter(None, map(str.split, text.split(";"))):
        schedule.append((part[0], *map(int, part[1:])))
    return schedule
