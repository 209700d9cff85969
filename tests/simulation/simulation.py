"""Many workers in one process, on a network that does its worst: reference counting under every fault.

`SimulatedNetwork` is a group of workers, each with the reference store of production (`simulated_worker`). Everything
that happens is a *step*, a word and numbers. Steps of the program of worker w, with its handles h:

    make w            makes a reference to a value              call w o h ...   makes a remote call at o, with handles
    on w h            makes a remote call on the value of h     fetch w h        asks for the value of h
    pass w t h ...    calls t with handles, which t keeps       use w t h ...    ... which t only uses
    return w e h ...  answers a call that came at end e of a link, with handles
    send w n          sends frame n, which one of these made    interrupt w n    ... or does not, because of Ctrl-C
    drop w h          lets go of handle h                       run w n          runs request n, and answers it
    cancel w h        cancels the remote call that made h       giveup w e n     cancels call n, made at end e

what worker w does by itself:

    work w            the timers of the store fire              report w         ... so often that forks are reported
    connect w p       connects to p, and sends what is lost     fail w p         ... or fails to
    retry w           a heartbeat: connects where that failed

what the network and the machines do:

    deliver n         frame n arrives                           again n          ... and so will a copy of it
    discard n         frame n is lost with its link             close e          end e of a link closes
    crash w           worker w dies                             remove w p       w hears of p's death
    restart           a worker joins under a new number         add w p          w hears that p has joined

and input that must have no effect:

    illegal w k       w gets the k-th kind of illegal input (`illegal_events`)
    forge f w k       w hears from f the k-th kind of what f has no right to say (`forgeries`)
    claim f w c n     w hears from f that f holds what c will create at w as its n-th from now, with a wrong token
    seek f w c n      f asks w for the value of that

The model. A worker that crashes says nothing afterwards, and only dead workers are declared lost. Each survivor hears
of a death at a time of its own, before or after frames of the dead arrive. Frames on a link arrive in any order, and
all of them, unless one end of the link is closed: then they may also be lost. The ends of a link close one after the
other. What was sent on a link after its other end was closed is lost. A frame that names a worker of which the
receiver has not heard waits until it has.

The invariants are checked after every step (`invariants`, `SimulatedWorker.check`). `finish` lets everything come to
rest by what the workers do themselves, drops all handles, and checks that nothing is left. A failing schedule is in the
`BrokenInvariant`, and `random_schedules.replay` plays it again. Steps that are impossible are passed over, so that a
schedule can be cut shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from farcall.errors import WorkerLostError
from farcall.protocol.ids import Worker
from simulation.forgeries import check_forgeries, claim, guessed_reference
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
from simulation.schedules import Step, show
from simulation.simulated_worker import End, SimulatedWorker

T = TypeVar("T")

_MAX_STEPS_TO_REST = 10_000


class Choice(Protocol):
    """Takes one of several."""

    def __call__(self, among: list[T], /) -> T: ...


class SimulatedNetwork:
    """A group of workers. `step` makes one thing happen; `finish` lets everything end well."""

    def __init__(self, workers: int = 4) -> None:
        self.workers: dict[Worker, SimulatedWorker] = {}
        self.alive: list[SimulatedWorker] = []
        self.ends: list[End] = []
        """The ends of all links there ever were; the two ends of a link stand side by side."""
        self.frames: dict[int, tuple[End, bytes]] = {}
        """The frames under way, and where each will arrive."""
        self.untold: list[tuple[Worker, Worker]] = []
        """Which worker has still to hear of which death."""
        self.unintroduced: list[tuple[Worker, Worker]] = []
        """Which worker has still to hear that which worker has joined."""
        self.deaths = 0
        self.schedule: list[Step] = []
        self._frame_number = 0
        for me in range(workers):
            self.workers[me] = SimulatedWorker(me, self._open_link)
        for worker in self.workers.values():
            self.alive.append(worker)
            for other in self.workers:
                worker.add(other)

    # Steps

    def step(self, *step: str | int) -> bool:
        """Makes it happen and checks every invariant. Returns False if it is impossible. Raises `BrokenInvariant`."""
        self.schedule.append(step)
        try:
            acted = _STEPS[step[0]](self, *step[1:])
            if acted is None:
                self.schedule.pop()
                return False
            self._check(acted)
        except BrokenInvariant as broken:
            broken.schedule = self.schedule
            raise
        except Exception as error:  # whatever a broken protocol raises, the schedule is what is wanted
            unlawful = BrokenInvariant("LAWFUL", f"{show([step])!r} raised {type(error).__name__}: {error}")
            unlawful.schedule = self.schedule
            raise unlawful from error
        return True

    def _check(self, acted: SimulatedWorker) -> None:
        if acted.has_refused and not self.deaths:
            raise BrokenInvariant("PROMISED", f"worker {acted.me} has no value for a handle, and nobody died")
        check_live(self.workers)
        check_unreported(self.workers)
        check_answered(self.workers)
        if acted.alive:
            for other in self.alive:
                check_kept(acted, other)
                check_kept(other, acted)
            if acted.counts.claims:
                check_claims(acted)
            check_settled(acted)
            acted.check()

    def living(self, number: Worker) -> SimulatedWorker | None:
        """Returns a worker that lives."""
        worker = self.workers.get(number)
        return worker if worker is not None and worker.alive else None

    # The program's

    def _user(self, me: Worker, handles: tuple[int, ...], other: Worker | None = None) -> SimulatedWorker | None:
        """Returns a worker that lives, has these handles, and knows the other worker."""
        worker = self.living(me)
        if worker is None or not all(map(worker.can_use, handles)):
            return None
        return worker if other is None or worker.knows(other) else None

    def _make(self, me: Worker) -> SimulatedWorker | None:
        if worker := self.living(me):
            worker.make()
        return worker

    def _call(self, me: Worker, owner: Worker, *handles: int) -> SimulatedWorker | None:
        worker = self._user(me, handles, owner)
        return worker if worker is not None and worker.call(owner, handles) else None

    def _on(self, me: Worker, handle: int) -> SimulatedWorker | None:
        worker = self._user(me, (handle,))
        return worker if worker and worker.handles[handle].fork and worker.call_on(handle) else None

    def _fetch(self, me: Worker, handle: int) -> SimulatedWorker | None:
        worker = self._user(me, (handle,))
        return worker if worker and worker.handles[handle].fork and worker.fetch(handle) else None

    def _pass(self, me: Worker, to: Worker, *handles: int, is_brief: bool = False) -> SimulatedWorker | None:
        worker = self._user(me, handles, to)
        return worker if handles and worker and worker.pass_on(to, handles, is_brief) else None

    def _use(self, me: Worker, to: Worker, *handles: int) -> SimulatedWorker | None:
        return self._pass(me, to, *handles, is_brief=True)

    def _return(self, me: Worker, number: int, *handles: int) -> SimulatedWorker | None:
        end = self.ends[number] if 0 <= number < len(self.ends) else None
        if end is None or end.is_client or end.me != me or not handles:
            return None
        if worker := self._user(me, handles, end.peer):
            worker.return_handles(end, handles)
        return worker

    def _send(self, me: Worker, draft: int) -> SimulatedWorker | None:
        worker = self.living(me)
        if worker is None or draft not in worker.drafts:
            return None
        worker.send(draft)
        return worker

    def _interrupt(self, me: Worker, draft: int) -> SimulatedWorker | None:
        worker = self.living(me)
        if worker is None or draft not in worker.drafts or not worker.drafts[draft].end.is_client:
            return None
        worker.interrupt(draft)
        return worker

    def _drop(self, me: Worker, handle: int) -> SimulatedWorker | None:
        worker = self.living(me)
        if worker is None or handle not in worker.handles:
            return None
        worker.drop(handle)
        return worker

    def _cancel(self, me: Worker, handle: int) -> SimulatedWorker | None:
        worker = self.living(me)
        held = worker.handles.get(handle) if worker is not None else None
        if worker is None or held is None or held.fork is None or held.reference.creator != me:
            return None
        worker.cancel(handle)
        return worker

    def _giveup(self, me: Worker, number: int, call_id: int) -> SimulatedWorker | None:
        end = self.ends[number] if 0 <= number < len(self.ends) else None
        worker = self.living(me)
        if worker is None or end is None or end.me != me or end.pending.get(call_id, (1, None))[0]:
            return None
        worker.give_up(end, call_id)
        return worker

    def _run(self, me: Worker, number: int) -> SimulatedWorker | None:
        worker = self.living(me)
        return worker if worker is not None and number in worker.invocations and worker.run(number) else None

    # The worker's

    def _work(self, me: Worker) -> SimulatedWorker | None:
        worker = self.living(me)
        if worker is None or not worker.due:
            return None
        worker.work()
        return worker

    def _report(self, me: Worker) -> SimulatedWorker | None:
        worker = self.living(me)
        if worker is None or not worker.counts.unreported:
            return None
        worker.report_forks()
        return worker

    def _connect(self, me: Worker, to: Worker, is_cut: bool = False) -> SimulatedWorker | None:
        worker = self.living(me)
        if worker is None or to not in worker.to_connect:
            return None
        worker.connect(to, is_cut)
        return worker

    def _fail(self, me: Worker, to: Worker) -> SimulatedWorker | None:
        return self._connect(me, to, is_cut=True)

    def _retry(self, me: Worker) -> SimulatedWorker | None:
        worker = self.living(me)
        if worker is None or not worker.stuck():
            return None
        for sender in worker.stuck():
            sender.connect_and_send()
        return worker

    # The network's

    def _open_link(self, me: Worker, to: Worker) -> End:
        worker, server = self.workers[me], self.living(to)
        if server is None:
            raise _dead_error(to)  # not from a variable, or the error and this frame would keep handles alive
        if me in server.unknown:
            self._add(to, me)
        assert worker.alive
        number = len(self.ends)
        self.ends += [
            End(number, me, to, True, self._transmit),
            End(number + 1, to, me, False, self._transmit),
        ]
        self.ends[number].twin, self.ends[number + 1].twin = self.ends[number + 1], self.ends[number]
        server.servers[me] = self.ends[number + 1]
        return self.ends[number]

    def _transmit(self, end: End, frame: bytes) -> None:
        if end.is_open and end.twin.is_open:
            self._frame_number += 1
            self.frames[self._frame_number] = end.twin, frame

    def _deliver(self, number: int, is_copied: bool = False) -> SimulatedWorker | None:
        end, frame = self.frames.get(number, (None, b""))
        if end is None or self.workers[end.me].names_unknown(frame):
            return None
        if not is_copied:
            del self.frames[number]
        self.workers[end.me].receive(end, frame)
        return self.workers[end.me]

    def _again(self, number: int) -> SimulatedWorker | None:
        return self._deliver(number, is_copied=True)

    def _discard(self, number: int) -> SimulatedWorker | None:
        end, _ = self.frames.get(number, (None, b""))
        if end is None or (end.is_open and end.twin.is_open):
            return None
        del self.frames[number]
        return self.workers[end.me]

    def _close(self, number: int) -> SimulatedWorker | None:
        end = self.ends[number] if 0 <= number < len(self.ends) else None
        if end is None or not end.is_open:
            return None
        worker = self.workers[end.me]
        worker.close(end)
        return worker

    # The machines'

    def _crash(self, me: Worker) -> SimulatedWorker | None:
        worker = self.living(me)
        if worker is None:
            return None
        worker.alive = False
        self.alive.remove(worker)
        self.deaths += 1
        for end in self.ends:
            if end.me == me:
                end.is_open = False
        self.frames = {number: frame for number, frame in self.frames.items() if frame[0].me != me}
        self.untold = [(who, dead) for who, dead in self.untold if who != me]
        self.unintroduced = [pair for pair in self.unintroduced if pair[0] != me]
        self.untold += [(other.me, me) for other in self.alive]
        return worker

    def _remove(self, me: Worker, dead: Worker) -> SimulatedWorker | None:
        if (me, dead) not in self.untold:
            return None
        self._add(me, dead)
        self.untold.remove((me, dead))
        worker = self.workers[me]
        worker.remove(dead, [end for end in self.ends if end.me == me and end.peer == dead and end.is_open])
        return worker

    def _restart(self) -> SimulatedWorker | None:
        if not self.deaths or not self.alive:
            return None
        me = len(self.workers)
        self.workers[me] = worker = SimulatedWorker(me, self._open_link)
        for number, other in self.workers.items():
            if other.alive:
                worker.add(number)
            else:
                worker.lost.add(number)
        for other in self.alive:
            other.unknown.add(me)
            self.unintroduced.append((other.me, me))
        self.alive.append(worker)
        return worker

    def _add(self, me: Worker, newcomer: Worker) -> SimulatedWorker | None:
        if (me, newcomer) not in self.unintroduced:
            return None
        self.unintroduced.remove((me, newcomer))
        self.workers[me].add(newcomer)
        return self.workers[me]

    # Dishonest workers

    def _illegal(self, me: Worker, kind: int) -> SimulatedWorker | None:
        if worker := self.living(me):
            check_unchanged(worker.counts, kind)
        return worker

    def _forge(self, forger: Worker, me: Worker, kind: int) -> SimulatedWorker | None:
        worker = self._hearer(forger, me)
        if worker is None or not check_forgeries(worker.counts, forger, kind, worker.refuse_forged):
            return None
        return worker

    def _claim(self, forger: Worker, me: Worker, creator: Worker, ahead: int) -> SimulatedWorker | None:
        worker = self._hearer(forger, me)
        message = claim(worker.counts, forger, creator, ahead) if worker is not None else None
        if worker is None or message is None:
            return None
        worker.receive_forged(("receive_message", forger, message))
        return worker

    def _seek(self, forger: Worker, me: Worker, creator: Worker, ahead: int) -> SimulatedWorker | None:
        worker = self._hearer(forger, me)
        reference = guessed_reference(worker.counts, forger, creator, ahead) if worker is not None else None
        if worker is None or reference is None:
            return None
        worker.receive_forged(("may_still_be_created", reference, forger))
        return worker

    def _hearer(self, forger: Worker, me: Worker) -> SimulatedWorker | None:
        """Returns a worker that another one can speak to. From then on that one gets answers it did not ask for."""
        worker, speaker = self.living(me), self.living(forger)
        if worker is None or speaker is None or worker is speaker or not worker.knows(forger):
            return None
        speaker.is_dishonest = True
        return worker

    # The end

    def rest(self, choose: Choice = lambda steps: steps[0]) -> None:
        """Lets everything happen that is under way or due, in an order of choice. Checks that all is decided."""
        for _ in range(_MAX_STEPS_TO_REST):
            steps = self._open_steps()
            if not steps:
                break
            step = choose(steps)
            if not self.step(*step):
                raise AssertionError(f"{show([step])} was said to be possible")
        else:
            self._break("PROMISED", f"it never comes to rest: {show([step])} again and again")
        try:
            check_rest(self.workers, self.deaths)
            for worker in self.alive:
                if worker.invocations:
                    raise BrokenInvariant("PROMISED", f"a request at worker {worker.me} waits for ever for its value")
                worker.check_quiet()
        except BrokenInvariant as broken:
            broken.schedule = self.schedule
            raise

    def _open_steps(self) -> list[Step]:
        """Returns what happens in the end in any case."""
        steps: list[Step] = [("remove", *pair) for pair in self.untold]
        steps += [("add", *pair) for pair in self.unintroduced]
        if steps:  # until then, workers try in vain to reach others
            return steps
        for end in self.ends:
            if end.is_open and not end.twin.is_open:
                steps.append(("close", end.number))
        for number, (end, _) in self.frames.items():
            steps.append(("deliver", number))
            if not end.is_open or not end.twin.is_open:
                steps.append(("discard", number))
        for worker in self.alive:
            me = worker.me
            steps += [("send", me, draft) for draft in worker.drafts]
            steps += [("connect", me, to) for to in worker.to_connect]
            steps += [("run", me, number) for number, each in worker.invocations.items() if each.is_ready()]
            if worker.due:
                steps.append(("work", me))
            if worker.stuck():
                steps.append(("retry", me))
        return steps

    def finish(self, choose: Choice = lambda steps: steps[0]) -> None:
        """Comes to rest, drops all handles, comes to rest again, and checks that nothing is left."""
        self.rest(choose)
        drops: list[Step] = [("drop", worker.me, handle) for worker in self.alive for handle in worker.handles]
        while drops:
            drop = choose(drops)
            drops.remove(drop)
            self.step(*drop)
        self.rest(choose)
        try:
            check_empty(self.workers)
            for worker in self.alive:
                worker.check()
                worker.check_empty()
        except BrokenInvariant as broken:
            broken.schedule = self.schedule
            raise

    def _break(self, invariant: str, what: str) -> None:
        broken = BrokenInvariant(invariant, what)
        broken.schedule = self.schedule
        raise broken


def _dead_error(worker: Worker) -> WorkerLostError:
    error = WorkerLostError(f"worker {worker} is dead")
    error.is_gone = True
    return error


# On the class, not bound: thousands of networks are made in a second.
_STEPS: dict[str | int, Callable[..., SimulatedWorker | None]] = {
    word: getattr(SimulatedNetwork, f"_{word}")
    for word in (
        "make", "call", "on", "fetch", "pass", "use", "return", "send", "interrupt", "drop", "run", "cancel",
        "giveup",
        "work", "report", "connect", "fail", "retry",
        "deliver", "again", "discard", "close", "crash", "remove", "restart", "add",
        "illegal", "forge", "claim", "seek",
    )
}  # fmt: skip
